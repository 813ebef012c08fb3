"""A `Summary` as static HTML: a few kilobytes that look the same wherever a notebook is shown.

Untrusted notebooks, GitHub and nbviewer remove style sheets, scripts, SVG, ids and ARIA. Therefore
all style is inline, text and lines inherit their colours from a light or dark page, folding uses
`<details>`, and everything that is drawn is also there as text.
"""

from __future__ import annotations

import re
from html import escape
from itertools import islice
from typing import TYPE_CHECKING

from xckpt.formatting import (
    binary_size,
    counted,
    printable,
    shape_text,
    share,
    short_count,
    shortened,
    value_text,
    word,
)
from xckpt.notebook.models import model_text
from xckpt.notebook.text import (
    BREAK,
    IN_MEMORY,
    WIDEST_KIND,
    components_text,
    count_text,
    format_text,
    groups_text,
    kind_text,
    modules_text,
    remarks,
    rest_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from xckpt.notebook.folding import Pattern
    from xckpt.notebook.summary import Summary

#: Colours of element types, with a contrast of at least 3:1 to white and to ``#111``. The last is
#: for all further types.
PALETTE = ("#2f81d6", "#d9731a", "#14958a", "#9a6bd6", "#c4528c", "#788794")
_ERROR = "#d1363f"
_WARNING = "#d9731a"
_PLAIN = "#788794"

_MOST_ROWS = 12
_MOST_FOLDED_ROWS = 8
_MOST_DTYPES = 8
_MOST_ITEMS = 24
_LONGEST_NOTE = 240

_ROOT = "font:13px/1.5 system-ui,sans-serif;max-width:920px"
_CODE = "font:12px/1.5 Menlo,Consolas,monospace"
_LINE = "1px solid #8886"
_LEFT = "padding:2px 6px;text-align:left"
_RIGHT = "padding:2px 6px;text-align:right"
_NAME = f"{_LEFT};{_CODE}"
_BAR = "display:flex;height:9px;border-radius:3px;overflow:hidden;margin:8px 0 4px"
_MUTED = "opacity:.72"
_DOT = f' <span style="{_MUTED}">·</span> '
_WRAPPED = "overflow-wrap:break-word"
_NO_BREAK = "\xa0"
_LONGEST_UNBROKEN = 20
_WIDTH_OF_SHARE = 40  # pixels
_LONGEST_PIECE = 40
_REPEATED = re.compile(r"[^{}]*\{[\d.,…]+\}[./]")


def colors_of(kinds: Iterable[str]) -> dict[str, str]:
    """Return a colour for each element type, in the order of `PALETTE`."""
    last = len(PALETTE) - 1
    return {kind: PALETTE[min(number, last)] for number, kind in enumerate(kinds)}


def render(summary: Summary, calls: Sequence[str] = ()) -> str:
    """Return a summary as HTML; `calls` are suggestions for the last line."""
    colors = colors_of(total.kind for total in summary.dtypes)
    label = f"Checkpoint {summary.title or IN_MEMORY}: {counted(summary.count, 'tensor')}"
    storage = [
        (word(total.kind), f"{binary_size(total.nbytes)}, {counted(total.count, 'tensor')}")
        for total in summary.storage
    ]
    # Generators, because there may be a million of these.
    dims = ((word(name), f"{size:,}") for name, size in summary.dims.items())
    attrs = ((word(str(name)), value_text(value)) for name, value in summary.attrs.items())
    code = " · ".join([f'<span style="{_CODE}">{_text(call)}</span>' for call in calls])
    return "".join(
        [
            f'<div role="group" aria-label="{_text(label)}" style="{_ROOT}">',
            _header(summary),
            *_remarks(summary),
            *_bar(summary, colors),
            *_groups(summary),
            *_table(summary, colors),
            *_modules(summary),
            *_list("Stored as", storage, len(storage)),
            *_list("Named dimensions", dims, len(summary.dims)),
            *_list("File attributes", attrs, len(summary.attrs)),
            f'<div style="margin-top:4px;{_MUTED}">Next: {code}</div>' if code else "",
            "</div>",
        ]
    )


def sentences(heading: str, conclusion: str, items: Iterable[tuple[str, bool]], more: str) -> str:
    """Return a heading and sentences as HTML, with a mark at those that are exceptions."""
    lines = [f'<div style="{_ROOT};{_WRAPPED}"><div><b>{_text(heading)}</b></div>']
    lines += [f'<div style="margin-top:4px">{_text(conclusion)}</div>'] if conclusion else []
    for sentence, is_exception in items:
        color = _WARNING if is_exception else "#8886"
        style = f"border-left:3px solid {color};padding-left:8px;margin-top:4px"
        lines.append(f'<div style="{style}">{_text(sentence)}</div>')
    lines.append(f'<div style="margin-top:4px;{_MUTED}">{_text(more)}</div></div>')
    return "".join(lines)


def table(
    heading: str, titles: Sequence[str], rows: Sequence[Sequence[str]], notes: Iterable[str]
) -> str:
    """Return a heading, a table of a name and numbers in each row, and notes as HTML.

    A row without numbers is the title of the rows after it.
    """
    head = "".join([_head(_text(title), _RIGHT if n else _LEFT) for n, title in enumerate(titles)])
    lines = []
    for name, *numbers in rows:
        cells = f'<td style="{_NAME}">{breaking(printable(name))}</td>'
        cells += "".join([_cell(_RIGHT, number) for number in numbers])
        if not any(numbers):
            cells = f'<th colspan="{len(titles)}" style="{_LEFT};{_MUTED}">{_text(name)}</th>'
        lines.append(f"<tr>{cells}</tr>")
    below = [f'<div style="margin-top:4px">{_text(note)}</div>' for note in notes]
    return (
        f'<div style="{_ROOT};{_WRAPPED}"><div style="font-weight:600">{_text(heading)}</div>'
        '<div style="overflow-x:auto"><table style="border-collapse:collapse;margin:'
        '8px 0 4px;font-size:12.5px">'
        f'<thead><tr style="border-bottom:{_LINE}">{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>{''.join(below)}</div>"
    )


def _text(text: str) -> str:
    return escape(printable(text))


def _muted(html: str) -> str:
    return f'<span style="{_MUTED}">{html}</span>' if html else ""


def _header(summary: Summary) -> str:
    model = _text(model_text(summary))
    figures = [counted(summary.count, "tensor"), binary_size(summary.nbytes)]
    if not model:
        noun = "parameter" if summary.size == 1 else "parameters"
        figures.insert(1, f"{short_count(summary.size)} {noun}")
    facts = [
        f'<b style="font-size:14px">{_text(summary.title or IN_MEMORY)}</b>',
        _muted(_text(format_text(summary))),
        _muted(counted(summary.shards, "shard")) if summary.shards else "",
        *["<b>{}</b> {}".format(*figure.split(" ", 1)) for figure in figures],
        _muted("lazy"),
    ]
    line = _DOT.join([fact for fact in facts if fact])
    line += f"<div>{model}</div>" if model else ""
    return f'<div style="{_WRAPPED};border-bottom:{_LINE};padding-bottom:5px">{line}</div>'


def _remarks(summary: Summary) -> Iterator[str]:
    for kind, sentence in remarks(summary, _LONGEST_NOTE):
        text = _text(shortened(printable(sentence), _LONGEST_NOTE))
        if not kind:
            yield f'<div style="padding-top:4px;{_MUTED}">{text}</div>'
            continue
        color = _ERROR if kind == "error" else _WARNING if kind == "warning" else _PLAIN
        style = f"border-left:3px solid {color};padding-left:8px;margin-top:4px;{_WRAPPED}"
        yield f'<div style="{style}"><b>{_text(kind)}:</b> {text}</div>'


def _modules(summary: Summary) -> Iterator[str]:
    if not summary.modules:
        return
    yield f'<div style="{_CODE};margin:4px 6px;{_WRAPPED}">'
    lines = [
        ": ".join([_text(label), *map(_muted, map(_text, parts))])
        for label, *parts in modules_text(summary)
    ]
    # With `choose`, the last line is a hint, which needs no break after it.
    yield "<br>".join(lines if summary.choose else [*lines, ""])
    yield "</div>"


# --- element types -------------------------------------------------------------------------------


def _bar(summary: Summary, colors: dict[str, str]) -> Iterator[str]:
    """Draw the share of each element type as a bar, and write it as text."""
    if not summary.dtypes:
        return
    shown = summary.dtypes[:_MOST_DTYPES]
    if summary.nbytes:
        yield f'<div style="{_BAR}">'
        for total in shown:
            width = _thousandths(total.nbytes, summary.nbytes) / 10
            yield f'<span style="width:{width:g}%;background:{colors[total.kind]}"></span>'
        yield "</div>"
    yield "<div>"
    for total in shown:
        part = _muted(escape(share(total.nbytes, summary.nbytes)))
        yield f'<span style="display:inline-block;margin-right:20px">{_key(colors[total.kind])}'
        yield f"{_text(word(total.kind, WIDEST_KIND))} {binary_size(total.nbytes)} {part}</span> "
    if remaining := len(summary.dtypes) - len(shown):
        yield _muted(f"… {remaining:,} more")
    yield "</div>"


def _key(color: str) -> str:
    return f'<span style="color:{color}">■</span>{_NO_BREAK}'


def _thousandths(part: int, total: int) -> int:
    """Divide integers, because a file can claim more than a float can represent."""
    return part * 1000 // total if total else 0


def _groups(summary: Summary) -> Iterator[str]:
    """List groups such as buffers and optimizer state, then the components of the model."""
    lines = [
        f"<b>{_text(group)}</b> {' · '.join(filter(None, figures))} {escape(part)}"
        for group, *figures, part in (*groups_text(summary), *components_text(summary))
    ]
    yield f'<div style="{_MUTED}">{"<br>".join(lines)}</div>' if lines else ""


# --- the table of patterns -----------------------------------------------------------------------


def _table(summary: Summary, colors: dict[str, str]) -> Iterator[str]:
    patterns = summary.patterns
    if not patterns:
        return
    listed = len(patterns) if len(patterns) <= _MOST_ROWS + 1 else _MOST_ROWS
    # Omit the counts if every row is a single tensor.
    folded = summary.count > len(patterns)
    yield '<div style="overflow-x:auto"><table style="border-collapse:collapse;width:100%;margin:'
    yield f'8px 0 4px;font-size:12.5px;table-layout:auto"><thead><tr style="border-bottom:{_LINE}">'
    title = "tensors, repeated modules folded" if folded else "tensors"
    yield _head(title, f"width:70%;min-width:15em;{_LEFT}")
    yield _head("count", _RIGHT) if folded else ""
    yield _head("shape", _LEFT) + _head(f"stored{_NO_BREAK}as", _LEFT) + _head("size", _RIGHT)
    yield _head("share", _RIGHT) + _head("", f"min-width:{_WIDTH_OF_SHARE}px;padding:0")
    yield "</tr></thead><tbody>"
    for pattern in patterns[:listed]:
        yield _row(pattern, summary.nbytes, colors[pattern.dtype], folded=folded)
    yield "</tbody></table></div>"
    if remaining := patterns[listed:]:
        items = []
        for pattern in remaining[:_MOST_FOLDED_ROWS]:
            count = f"{count_text(pattern)} tensors, " if pattern.grid > 1 else ""
            figures = f"{count}{shape_text(pattern.shape, pattern.dtype)}, {kind_text(pattern)}"
            items.append((pattern.text, f"{figures}, {binary_size(pattern.nbytes)}"))
        yield from _list(rest_text(remaining), items, len(remaining), most=_MOST_FOLDED_ROWS)


def _head(text: str, style: str) -> str:
    if not text:
        return f'<td style="{style}"></td>'
    return f'<th scope="col" style="{style};font-weight:600;{_MUTED}">{text}</th>'


def _row(pattern: Pattern, total: int, color: str, *, folded: bool) -> str:
    width = _thousandths(pattern.nbytes, total) * _WIDTH_OF_SHARE // 1000
    bar = f'<div style="width:{width}px;height:7px;background:{color}"></div>' if width else ""
    return (
        f'<tr><td style="{_NAME}">{_name(pattern.text)}</td>'
        + (_cell(_RIGHT, count_text(pattern)) if folded else "")
        + _cell(_LEFT, shape_text(pattern.shape, pattern.dtype))
        + _cell(_LEFT, kind_text(pattern), _key(color))
        + _cell(_RIGHT, binary_size(pattern.nbytes))
        + _cell(_RIGHT, share(pattern.nbytes, total))
        + (f'<td style="padding:0">{bar}</td></tr>' if bar else "</tr>")
    )


def _cell(style: str, text: str, key: str = "") -> str:
    html = _text(text)
    if len(text) <= _LONGEST_UNBROKEN:
        html = html.replace(" ", _NO_BREAK)  # takes fewer bytes than a style
    else:
        style += ";white-space:nowrap"
    return f'<td style="{style}">{key}{html}</td>'


def _name(text: str) -> str:
    """Write a pattern that may break after dots, with its repeated first words muted."""
    repeated = _REPEATED.match(text)
    cut = repeated.end() if repeated is not None else 0
    html = breaking(text[cut:])
    return f"{_muted(escape(text[:cut]))}<wbr>{html}" if cut else html


def breaking(text: str) -> str:
    """Write a name that may break after dots, and within very long words."""
    pieces = [
        piece[start : start + _LONGEST_PIECE]
        for piece in BREAK.split(text)
        for start in range(0, len(piece), _LONGEST_PIECE)
    ]
    return "<wbr>".join(map(escape, pieces))


# --- folded lists --------------------------------------------------------------------------------


def _list(
    title: str, items: Iterable[tuple[str, str]], count: int, *, most: int = _MOST_ITEMS
) -> Iterator[str]:
    """Write pairs of a name and a value as a list that is folded at first."""
    if not count:
        return
    number = "" if title[0].isdigit() else f" ({count:,})"
    yield '<details style="margin-top:2px"><summary style="cursor:pointer">'
    yield f"{_muted(title + number)}</summary>"
    yield f'<div style="{_CODE};margin:2px 0 4px 16px;{_WRAPPED}">'
    for name, value in islice(items, most):
        yield f"<b>{_text(name)}</b> {_text(value)}<br>"
    yield _muted(f"… {count - most:,} more") if count > most else ""
    yield "</div></details>"
