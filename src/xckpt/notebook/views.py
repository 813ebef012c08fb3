"""The summary of a checkpoint and its findings as blocks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from xckpt.formatting import TIMES, binary_size, counted, shape_text, short_count, value_text, word
from xckpt.notebook.documents import (
    Bar,
    BarPart,
    Field,
    Folded,
    Heading,
    Sentence,
    Share,
    Table,
    more,
    number_listed,
)
from xckpt.notebook.models import model_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from xckpt.notebook.documents import Block, Cell
    from xckpt.notebook.folding import Pattern
    from xckpt.notebook.footprint import GroupTotal
    from xckpt.notebook.summary import FoldedFinding, Summary

#: Title of a summary of tensors that are in no file.
IN_MEMORY = "in memory"
#: Number of patterns that a summary lists.
MOST_PATTERNS = 12
_MOST_NOTES = 5
_MOST_FINDINGS = 8
_MOST_MODULES = _MOST_COMPONENTS = 8
_COUNTED = ("error", "warning")
_WIDEST_KIND, _WIDEST_VERSION = 38, 16
# The size of a smaller model in other precisions is of no interest.
_FEWEST_WEIGHED = 10**6
_TOTALS = [Field("", kind) for kind in ("name", "number", "number", "size", "share")]


def summary_blocks(
    summary: Summary, calls: Sequence[str] = (), *, most: int | None = MOST_PATTERNS
) -> list[Block]:
    """Return a summary with at most `most` patterns, None for all, and suggestions of calls."""
    dims = ((name, f"{size:,}") for name, size in summary.dims.items())
    attrs = ((str(name), value_text(value)) for name, value in summary.attrs.items())
    storage = [
        (total.kind, f"{binary_size(total.nbytes)} ({counted(total.count, 'tensor')})")
        for total in summary.storage
    ]
    folded = [
        Folded("stored as", storage, len(storage), most_lines=1),
        Folded("dims", dims, len(summary.dims)),
        Folded("attrs", attrs, len(summary.attrs), link="=", most_lines=3),
    ]
    bar = Bar([BarPart(total.kind, total.nbytes) for total in summary.dtypes])
    tables = [_totals(summary, _groups(summary)), _totals(summary, _components(summary))]
    notes: list[Block] = [Sentence("error", error) for error in summary.errors[:_MOST_NOTES]]
    notes += [] if summary.findings is None else finding_blocks(summary.findings)
    notes += [Sentence("note", note) for note in summary.notes[:_MOST_NOTES]]
    if summary.size >= _FEWEST_WEIGHED:
        notes.append(Sentence("", str(summary.footprint)))
    return [
        _heading(summary),
        *([bar] if summary.dtypes else []),
        *[table for table in tables if table.rows],
        *notes,
        *([_patterns(summary, most)] if summary.patterns else []),
        *[Sentence("code", line) for line in _modules(summary)],
        *[block for block in folded if block.total],
        *([Sentence("hint", f"Next: {' · '.join(calls)}")] if calls else []),
    ]


def _heading(summary: Summary) -> Heading:
    model = model_text(summary)
    version = word(summary.version, _WIDEST_VERSION)
    # The version of a file must not look like the version of a framework.
    version = f"file version {version}" if version.isdigit() else version
    shards = counted(summary.shards, "shard") if summary.shards else ""
    parameters = f"{short_count(summary.size)} {'param' if summary.size == 1 else 'params'}"
    facts = [
        f"{word(summary.format)} {version}".strip(),
        shards,
        f"{summary.count:,} of {counted(summary.total, 'tensor')}"
        if summary.total
        else counted(summary.count, "tensor"),
        "" if model else parameters,
        binary_size(summary.nbytes),
        "lazy" if summary.format else "",
    ]
    return Heading(
        summary.title or IN_MEMORY,
        "Checkpoint",
        list(filter(None, facts)),
        model,
        list(filter(None, (shards, "lazy"))),
    )


def _totals(summary: Summary, totals: Sequence[tuple[GroupTotal, str]]) -> Table:
    rows = [
        (
            word(total.group),
            counted(total.tensors, "tensor"),
            f"{short_count(total.size)} {noun if total.size == 1 else noun + 's'}" if noun else "",
            total.nbytes,
            Share(total.nbytes, summary.nbytes),
        )
        for total, noun in totals
    ]
    return Table(_TOTALS, rows)


def _groups(summary: Summary) -> list[tuple[GroupTotal, str]]:
    """Return the groups of tensors; none if all are parameters."""
    is_plain = [total.group for total in summary.groups] in ([], ["parameters"])
    return [] if is_plain else [(total, "element") for total in summary.groups]


def _components(summary: Summary) -> list[tuple[GroupTotal, str]]:
    """Return the components of a model; none for a single one."""
    components = summary.components
    totals = [(total, "parameter") for total in components[:_MOST_COMPONENTS]]
    if remaining := components[_MOST_COMPONENTS:]:
        sums = [sum(numbers) for numbers in zip(*[t[1:] for t in remaining], strict=True)]
        name = counted(len(remaining), "more component")
        totals.append((type(remaining[0])(name, *sums), ""))
    return totals


# --- patterns ------------------------------------------------------------------------------------


def _patterns(summary: Summary, most: int | None) -> Table:
    patterns, total = summary.patterns, summary.nbytes
    listed = len(patterns) if most is None else number_listed(len(patterns), most)
    is_folded = summary.count > len(patterns)
    colors = {total.kind: place for place, total in enumerate(summary.dtypes)}
    fields = [
        Field("tensors, repeated modules folded" if is_folded else "tensors", "pattern"),
        *([Field("count", "word")] if is_folded else []),
        Field("shape", "word"),
        Field("stored as", "key"),
        Field("size", "size"),
        Field("share", "share", is_optional=True),
    ]
    rows: list[list[Cell]] = [
        [
            pattern.text,
            *([_count(pattern)] if is_folded else []),
            shape_text(pattern.shape, pattern.dtype),
            word(f"{pattern.dtype} {pattern.storage}".rstrip(), _WIDEST_KIND),
            pattern.nbytes,
            Share(pattern.nbytes, total),
        ]
        for pattern in patterns
    ]
    return Table(
        fields,
        rows,
        _rest(patterns[listed:]),
        listed,
        colors=[colors[pattern.dtype] for pattern in patterns],
    )


def _count(pattern: Pattern) -> str:
    """Return the number of tensors in a pattern, and of index combinations if some are missing."""
    if pattern.grid > pattern.count:
        places = f"{pattern.grid:,}" if pattern.grid < 10**6 else short_count(pattern.grid)
        return f"{TIMES}{pattern.count:,} of {places}"
    return f"{TIMES}{pattern.count:,}" if pattern.grid > 1 else ""


def _rest(patterns: Sequence[Pattern]) -> str:
    """Return the totals of patterns that are not listed."""
    if not patterns:
        return ""
    count = sum([pattern.count for pattern in patterns])
    size = binary_size(sum([pattern.nbytes for pattern in patterns]))
    if count == len(patterns):
        return f"{more(count, 'tensor')}, {size}"
    return f"{more(len(patterns), 'pattern')}: {counted(count, 'tensor')}, {size}"


def _modules(summary: Summary) -> Iterator[str]:
    """Yield the sets of modules with the parts that only they have, and a call to select some."""
    for module_set in summary.modules[:_MOST_MODULES]:
        dim = f" (dimension {word(module_set.dim)})" if module_set.dim else ""
        parts = ", ".join(module_set.parts)
        yield f"{word(module_set.module)} {module_set.indices}{dim}: {parts}"
    if remaining := summary.modules[_MOST_MODULES:]:
        yield f"… {len(remaining):,} more sets of modules"
    if summary.choose and summary.modules:
        dims = ", whatever the dimensions are called" if any(m.dim for m in summary.modules) else ""
        yield f"choose with {summary.choose}{dims}"


# --- findings ------------------------------------------------------------------------------------


def finding_blocks(findings: Sequence[FoldedFinding]) -> list[Sentence]:
    """Return the number of findings by severity, and the first ones."""
    blocks = [Sentence("", _number_of(findings))]
    for severity, rule, value, pattern, explanation in findings[:_MOST_FINDINGS]:
        out_of = f" of {pattern.grid:,}" if pattern.grid > pattern.count else ""
        subject = f"{word(rule).replace('_', ' ')} in {counted(pattern.count, 'tensor')}{out_of}"
        detail = f"up to {value:.6g}" if pattern.count > 1 else explanation or f"{value:.6g}"
        blocks.append(Sentence(word(severity), f"{subject}: {pattern.text}", detail))
    remaining = sum([finding.pattern.count for finding in findings[_MOST_FINDINGS:]])
    if remaining:
        blocks.append(Sentence("hint", f"… {remaining:,} more findings"))
    return blocks


def _number_of(findings: Sequence[FoldedFinding]) -> str:
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
