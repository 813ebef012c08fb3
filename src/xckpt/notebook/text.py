"""A `Summary` as plain text as wide as the terminal, without colours, safe to print."""

from __future__ import annotations

import re
from collections import Counter
from itertools import zip_longest
from typing import TYPE_CHECKING

from xckpt.formatting import (
    TIMES,
    binary_size,
    columns,
    counted,
    line_width,
    printable,
    shape_text,
    share,
    short_count,
    shortened,
    value_text,
    word,
    wrapped,
)
from xckpt.notebook.models import model_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from xckpt.notebook.folding import Pattern
    from xckpt.notebook.summary import FoldedFinding, Summary

_INDENT = "  "
_GAP = "  "
_DOT = " · "
_MOST_ROWS = 12
_MOST_NOTES = 5
_MOST_LINES = 3  # of a sentence
#: Title of a summary of tensors that are in no file.
IN_MEMORY = "in memory"
_NARROWEST_NAME = 30
_ALIGNMENT, _ALIGNMENT_OF_GROUPS = "<<<<>>", "<>>>>"
_ROOM_FOR_MORE = 20  # "… 1,234,567 more" and a separator
#: Places where a name may break: after slashes and dots, except the dots of "0..63".
BREAK = re.compile(r"(?<=[^.]\.)(?=[^.])|(?<=/)(?=.)")
#: Columns of an element type or a scheme of quantisation.
WIDEST_KIND = 38
_WIDEST_VERSION = 16
_MOST_FINDINGS = 8
_LEAST_EXPLANATION = 24
_COUNTED = ("error", "warning")
_MOST_MODULES = _MOST_COMPONENTS = 8
# The size of a smaller model in other precisions is of no interest.
_FEWEST_WEIGHED = 10**6


def render(summary: Summary, *, most: int | None = _MOST_ROWS) -> str:
    """Return a summary as text, with at most `most` patterns; None for all."""
    dtypes = []
    for total in summary.dtypes:
        part = share(total.nbytes, summary.nbytes)
        size = f" {binary_size(total.nbytes)} ({part})" if part else ""
        dtypes.append(f"{word(total.kind, WIDEST_KIND)}{size}")
    storage = [
        f"{word(total.kind)} {binary_size(total.nbytes)} ({counted(total.count, 'tensor')})"
        for total in summary.storage
    ]
    # Generators, because there may be a million of these.
    dims = (f"{word(name)} {size:,}" for name, size in summary.dims.items())
    attrs = (f"{word(str(name))}={value_text(value)}" for name, value in summary.attrs.items())
    width = line_width() - len(_INDENT)
    sentences = [
        f"{kind}: {printable(text)}" if kind else text
        for kind, text in remarks(summary, width * (_MOST_LINES - 1))
    ]
    modules = [": ".join(parts) for parts in modules_text(summary)]
    return "\n".join(
        [
            *_header(summary),
            *_listed("", dtypes, len(dtypes), most_lines=2, separator="   "),
            *aligned(groups_text(summary), _ALIGNMENT_OF_GROUPS),
            *aligned(components_text(summary), _ALIGNMENT_OF_GROUPS),
            *[_INDENT + line for text in sentences for line in wrapped(text, width, _MOST_LINES)],
            *_table(summary, len(summary.patterns) if most is None else most),
            *[_INDENT + shortened(line, width) for line in modules],
            *_listed("stored as: ", storage, len(storage), most_lines=1),
            *_listed("dims: ", dims, len(summary.dims), most_lines=2),
            *_listed("attrs: ", attrs, len(summary.attrs), most_lines=3),
        ]
    )


def _header(summary: Summary) -> Iterator[str]:
    """Yield the lines with the name of the file, its model, its format and its size."""
    before, title = "<Checkpoint ", summary.title or IN_MEMORY
    width = line_width()
    model = model_text(summary)
    shards = counted(summary.shards, "shard") if summary.shards else ""
    parameters = f"{short_count(summary.size)} {'param' if summary.size == 1 else 'params'}"
    facts = [
        format_text(summary),
        shards,
        counted(summary.count, "tensor"),
        "" if model else parameters,
        binary_size(summary.nbytes),
        "lazy" if summary.format else "",
    ]
    facts = [fact for fact in facts if fact]
    if model:
        room = max(_NARROWEST_NAME, width // 3)
        line = f"{before}{shortened(title, room)}>{_GAP}{model}"
        yield from wrapped(line, width, _MOST_LINES)
        yield shortened(_INDENT + _DOT.join(facts), width)
        return
    omissible = [fact for fact in (shards, "lazy") if fact]  # to make room for the title
    while True:
        after = ">" + _GAP + _DOT.join(facts)
        room = width - len(before) - columns(after)
        if not omissible or room >= min(columns(title), _NARROWEST_NAME):
            break
        facts.remove(omissible.pop())
    yield shortened((before + shortened(title, room)).rstrip() + after, width)


def _listed(
    label: str, items: Iterable[str], count: int, *, most_lines: int, separator: str = _DOT
) -> Iterator[str]:
    """Pack `count` items into lines, as many as fit, and count the others."""
    room = line_width() - len(_INDENT) - len(label)
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


def _table(summary: Summary, most: int) -> Iterator[str]:
    patterns = summary.patterns
    # The line "1 more" would take as much room as the last pattern.
    listed = len(patterns) if len(patterns) <= most + 1 else most
    rows = [
        [
            pattern.text,
            f"{TIMES}{count_text(pattern)}" if pattern.grid > 1 else "",
            shape_text(pattern.shape, pattern.dtype),
            kind_text(pattern),
            binary_size(pattern.nbytes),
            share(pattern.nbytes, summary.nbytes),
        ]
        for pattern in patterns[:listed]
    ]
    yield from aligned(rows, _ALIGNMENT)
    if remaining := patterns[listed:]:
        yield f"{_INDENT}… {rest_text(remaining)}"


def aligned(rows: Sequence[Sequence[str]], alignment: str) -> Iterator[str]:
    """Pad cells to columns; if they are too wide, drop the shares first, then wrap names."""
    # Names keep some columns if there is a wider text, which is then broken as well.
    widths = [max(map(columns, cells)) for cells in zip(*rows, strict=True)]
    most = line_width()
    if widths and _table_width(widths) > most:
        widths[-1] = 0
        widest = max(range(1, len(widths)), key=lambda n: widths[n])
        excess = max(0, _table_width(widths) - most)
        kept = min(widths[0], max(widths[0] - excess, min(_NARROWEST_NAME, widths[widest])))
        widths[widest] -= excess - (widths[0] - kept)
        widths[0] = kept
    for name, *figures in rows:
        cells = [_wrapped(name, widths[0])]
        cells += [
            [text] if columns(text) <= width else wrapped(text, width, _MOST_LINES, indent="")
            for text, width in zip(figures, widths[1:], strict=True)
            if width
        ]
        shown = [(width, side) for width, side in zip(widths, alignment, strict=True) if width]
        for texts in zip_longest(*cells, fillvalue=""):
            line = []
            for text, (width, side) in zip(texts, shown, strict=True):
                padding = " " * (width - columns(text))
                line.append(text + padding if side == "<" else padding + text)
            yield (_INDENT + _GAP.join(line)).rstrip()


def _table_width(widths: Sequence[int]) -> int:
    return len(_INDENT) + sum([width + len(_GAP) for width in widths if width]) - len(_GAP)


def _wrapped(name: str, width: int) -> list[str]:
    """Break a name after dots, and indent the further lines."""
    if columns(name) <= width:
        return [name]
    lines = [""]
    for piece in BREAK.split(name):
        if lines[-1].strip() and columns(lines[-1] + piece) > width:
            lines.append(_INDENT)
        lines[-1] = shortened(lines[-1] + piece, width)
    return lines


# --- texts that all renderings share -------------------------------------------------------------


def format_text(summary: Summary) -> str:
    """Return the format and its version, which must not look like the version of a framework."""
    version = word(summary.version, _WIDEST_VERSION)
    version = f"file version {version}" if version.isdigit() else version
    return f"{word(summary.format)} {version}".strip()


def groups_text(summary: Summary) -> list[tuple[str, ...]]:
    """Return the groups of tensors with counts and sizes; none if all are parameters."""
    if [total.group for total in summary.groups] in ([], ["parameters"]):
        return []
    return [
        (
            total.group,
            counted(total.tensors, "tensor"),
            f"{short_count(total.size)} {'element' if total.size == 1 else 'elements'}",
            binary_size(total.nbytes),
            share(total.nbytes, summary.nbytes),
        )
        for total in summary.groups
    ]


def components_text(summary: Summary) -> list[tuple[str, ...]]:
    """Return the components of a model with counts and sizes; none for a single one."""
    components = summary.components
    rows: list[tuple[str, ...]] = [
        (
            word(total.group),
            counted(total.tensors, "tensor"),
            f"{short_count(total.size)} {'parameter' if total.size == 1 else 'parameters'}",
            binary_size(total.nbytes),
            share(total.nbytes, summary.nbytes),
        )
        for total in components[:_MOST_COMPONENTS]
    ]
    if remaining := components[_MOST_COMPONENTS:]:
        count = sum([total.tensors for total in remaining])
        size = binary_size(sum([total.nbytes for total in remaining]))
        name = counted(len(remaining), "more component")
        rows.append((name, counted(count, "tensor"), "", size, ""))
    return rows


def count_text(pattern: Pattern) -> str:
    """Return the number of tensors in a pattern, and of index combinations if some are missing."""
    if pattern.grid > pattern.count:
        places = f"{pattern.grid:,}" if pattern.grid < 10**6 else short_count(pattern.grid)
        return f"{pattern.count:,} of {places}"
    return f"{pattern.count:,}"


def kind_text(pattern: Pattern) -> str:
    """Return the element type and the way of storing."""
    return word(f"{pattern.dtype} {pattern.storage}".rstrip(), WIDEST_KIND)


def rest_text(patterns: Sequence[Pattern]) -> str:
    """Return the totals of patterns that are not listed."""
    count = sum([pattern.count for pattern in patterns])
    size = binary_size(sum([pattern.nbytes for pattern in patterns]))
    if count == len(patterns):
        return f"{counted(count, 'more tensor')}, {size}"
    return f"{counted(len(patterns), 'more pattern')}: {counted(count, 'tensor')}, {size}"


def remarks(summary: Summary, width: int | None = None) -> Iterator[tuple[str, str]]:
    """Yield errors, findings and notes, as a kind and a sentence of at most `width` columns."""
    yield from [("error", error) for error in summary.errors[:_MOST_NOTES]]
    if summary.findings is not None:
        yield from finding_lines(summary.findings, width)
    yield from [("note", note) for note in summary.notes[:_MOST_NOTES]]
    if summary.size >= _FEWEST_WEIGHED:
        yield "", str(summary.footprint)


def finding_lines(
    findings: Sequence[FoldedFinding], width: int | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the number of findings and the first ones, as a kind and a sentence."""
    width = width or line_width()
    yield "", findings_text(findings)
    for severity, rule, value, pattern, explanation in findings[:_MOST_FINDINGS]:
        subject = f"{word(rule).replace('_', ' ')} in {counted(pattern.count, 'tensor')}"
        out_of = f" of {pattern.grid:,}" if pattern.grid > pattern.count else ""
        detail = f"up to {value:.6g}" if pattern.count > 1 else f"{value:.6g}"
        if explanation and pattern.count == 1:
            # Cut the explanation rather than the name, whose end is specific.
            room = width - columns(f"{severity}: {subject}: {pattern.text} ()") - len(_INDENT)
            detail = printable(explanation)
            if columns(detail) > room:
                detail = f"{detail[: max(_LEAST_EXPLANATION, room) - 1]}…"
        yield word(severity), f"{subject}{out_of}: {pattern.text} ({detail})"
    if remaining := findings[_MOST_FINDINGS:]:
        count = sum([finding.pattern.count for finding in remaining])
        yield "", f"… {count:,} more findings"


def findings_text(findings: Sequence[FoldedFinding]) -> str:
    """Return the number of findings by severity, as a text."""
    severities: Counter[str] = Counter()
    for finding in findings:
        severities[finding.severity] += finding.pattern.count
    if not severities:
        return "no findings"
    parts = [
        counted(count, severity) if severity in _COUNTED else f"{count:,} {word(severity)}"
        for severity, count in severities.items()
    ]
    return f"{counted(severities.total(), 'finding')}: {', '.join(parts)}"


def modules_text(summary: Summary) -> Iterator[tuple[str, ...]]:
    """Yield the sets of modules with the parts that only they have, and a call to select some."""
    for module_set in summary.modules[:_MOST_MODULES]:
        dim = f" (dimension {word(module_set.dim)})" if module_set.dim else ""
        yield f"{word(module_set.module)} {module_set.indices}{dim}", ", ".join(module_set.parts)
    if (count := len(summary.modules) - _MOST_MODULES) > 0:
        yield (f"… {count:,} more sets of modules",)
    if summary.choose and summary.modules:
        dims = ", whatever the dimensions are called" if any(m.dim for m in summary.modules) else ""
        yield (f"choose with {summary.choose}{dims}",)
