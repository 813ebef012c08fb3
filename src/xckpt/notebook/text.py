"""A `Summary` as plain text: at most 120 columns, no colours, safe to print in any terminal."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from xckpt.notebook.formatting import (
    binary_size,
    columns,
    counted,
    printable,
    share,
    short_count,
    shortened,
)
from xckpt.notebook.words import (
    TIMES,
    count_text,
    findings_text,
    format_text,
    kind_text,
    rest_text,
    shapes_text,
    value_text,
    word,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from xckpt.notebook.folding import Pattern
    from xckpt.notebook.summary import Summary

__all__ = ["render"]

_WIDTH = 120
_INDENT = "  "
_GAP = "  "
_DOT = " · "
_MOST_ROWS = 12
_MOST_NOTES = 5
_ALIGNMENT = "<<<<>>"
_ROOM_FOR_MORE = 20  # "… 1,234,567 more" and a separator
# After a dot that separates components, not after one of "0..63".
_BREAK = re.compile(r"(?<=[^.]\.)(?=[^.])")


def render(summary: Summary) -> str:
    """Write a summary as text."""
    return "\n".join(
        [
            _header(summary),
            *_dtypes(summary),
            *_findings(summary),
            *[_note(note) for note in summary.notes[:_MOST_NOTES]],
            *_table(summary),
            *_storage(summary),
            *_dims(summary),
            *_attrs(summary),
        ]
    )


def _header(summary: Summary) -> str:
    facts = [
        format_text(summary),
        counted(summary.shards, "shard") if summary.shards else "",
        counted(summary.count, "tensor"),
        f"{short_count(summary.size)} {'param' if summary.size == 1 else 'params'}",
        binary_size(summary.nbytes),
        "lazy",
    ]
    before = "<Checkpoint "
    after = ">" + _GAP + _DOT.join([fact for fact in facts if fact])
    title = shortened(summary.title, _WIDTH - len(before) - columns(after))
    return shortened((before + title).rstrip() + after, _WIDTH)


def _findings(summary: Summary) -> Iterator[str]:
    if summary.findings is not None:
        number, which = findings_text(summary.findings)
        text = f"{number}: {which}" if which else number
        yield _INDENT + shortened(text, _WIDTH - len(_INDENT))


def _note(text: str) -> str:
    return _INDENT + shortened(f"note: {printable(text)}", _WIDTH - len(_INDENT))


def _dtypes(summary: Summary) -> Iterator[str]:
    items = []
    for total in summary.dtypes:
        part = share(total.nbytes, summary.nbytes)
        size = binary_size(total.nbytes)
        items.append(f"{word(total.kind)} {size} ({part})" if part else word(total.kind))
    return _listed("", items, len(items), most_lines=2, separator="   ")


def _storage(summary: Summary) -> Iterator[str]:
    items = [
        f"{word(total.kind)} {binary_size(total.nbytes)} ({counted(total.count, 'tensor')})"
        for total in summary.storage
    ]
    return _listed("stored as: ", items, len(items), most_lines=1)


def _dims(summary: Summary) -> Iterator[str]:
    items = (f"{word(name)} {size:,}" for name, size in summary.dims.items())
    return _listed("dims: ", items, len(summary.dims), most_lines=2)


def _attrs(summary: Summary) -> Iterator[str]:
    items = (f"{word(str(name))}={value_text(value)}" for name, value in summary.attrs.items())
    return _listed("attrs: ", items, len(summary.attrs), most_lines=3)


def _listed(
    label: str, items: Iterable[str], count: int, *, most_lines: int, separator: str = _DOT
) -> Iterator[str]:
    """Pack `count` items into lines, as many as fit, and say how many did not."""
    room = _WIDTH - len(_INDENT) - len(label)
    lines: list[str] = []
    for placed, item in enumerate(items):
        text = shortened(item, room - _ROOM_FOR_MORE)
        spare = _ROOM_FOR_MORE if len(lines) == most_lines else 0
        if lines and columns(lines[-1] + separator + text) <= room - spare:
            lines[-1] += separator + text
        elif len(lines) < most_lines:
            lines.append(text)
        else:
            lines[-1] += f"{separator}… {count - placed:,} more"
            break
    for line in lines:
        yield _INDENT + label + line
        label = " " * len(label)


# --- the table of patterns -----------------------------------------------------------------------


def _table(summary: Summary) -> Iterator[str]:
    patterns = summary.patterns
    # A line that says "1 more" takes the room of the one.
    kept = len(patterns) if len(patterns) <= _MOST_ROWS + 1 else _MOST_ROWS
    yield from _aligned([_cells(pattern, summary) for pattern in patterns[:kept]])
    if rest := patterns[kept:]:
        yield f"{_INDENT}… {rest_text(rest)}"


def _cells(pattern: Pattern, summary: Summary) -> list[str]:
    return [
        pattern.text,
        _count(pattern),
        shapes_text(pattern.shapes),
        kind_text(pattern),
        binary_size(pattern.nbytes),
        share(pattern.nbytes, summary.nbytes),
    ]


def _count(pattern: Pattern) -> str:
    return f"{TIMES}{count_text(pattern)}" if pattern.grid > 1 else ""


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Pad cells to columns; where there is no room, drop the shares first, then wrap names."""
    widths = [max(map(columns, cells)) for cells in zip(*rows, strict=True)]
    if widths and _table_width(widths) > _WIDTH:
        widths[-1] = 0
        widths[0] -= max(0, _table_width(widths) - _WIDTH)
    for name, *figures in rows:
        first, *others = _wrapped(name, widths[0])
        cells = zip([first, *figures], widths, _ALIGNMENT, strict=True)
        yield (_INDENT + _GAP.join([_padded(*cell) for cell in cells if cell[1]])).rstrip()
        yield from [_INDENT + other for other in others]


def _table_width(widths: Sequence[int]) -> int:
    return len(_INDENT) + sum([width + len(_GAP) for width in widths if width]) - len(_GAP)


def _padded(text: str, width: int, alignment: str) -> str:
    padding = " " * (width - columns(text))
    return text + padding if alignment == "<" else padding + text


def _wrapped(name: str, width: int) -> list[str]:
    """Break a name after dots and indent what follows."""
    if columns(name) <= width:
        return [name]
    lines = [""]
    for piece in _BREAK.split(name):
        if lines[-1].strip() and columns(lines[-1] + piece) > width:
            lines.append(_INDENT)
        lines[-1] = shortened(lines[-1] + piece, width)
    return lines
