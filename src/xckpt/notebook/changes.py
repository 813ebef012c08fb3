"""The differences between two checkpoints in a few sentences, exceptions first.

Modules whose tensors all differ in the same way are folded like the names in a summary::

    lm_head.weight is only in a
    mlp of layers 24 to 31 changed by 8 to 12 % (24 tensors)
    everything else is equal (267 tensors)
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from math import inf, isnan, log
from typing import TYPE_CHECKING, NamedTuple

from xckpt.formatting import counted, printable, shortened
from xckpt.notebook.folding import Family, families_of, numbered_path, phrase, united
from xckpt.structure import Described, Structure
from xckpt.tensor_rows import Row

if TYPE_CHECKING:
    from collections.abc import Sequence


#: Number of lines with which a summary of a comparison still has at most twenty.
MOST_LINES = 17
#: Up to this number of tensors, a table of them is as short as the sentences.
FEW_TENSORS = 12

# Kinds of differences that always come first, in this order, with their verbs for one tensor and
# for several. All other kinds are equal tensors, or the causes that explain a difference.
_EXCEPTIONS = {
    "unreadable": ("cannot be read", "cannot be read"),
    "shape": ("has another shape in b", "have another shape in b"),
    "only_a": ("is only in a", "are only in a"),
    "only_b": ("is only in b", "are only in b"),
    "not_merged": ("is without the adapter", "are without the adapter"),
    "not_finite": ("differs by NaN or infinities", "differ by NaN or infinities"),
    "changed": ("changed", "changed"),
}
#: Relative changes by more than this factor apart are in separate lines.
_GAP = 3.0
_MOST_GAPS = 4
_WIDEST_LINE = 116
_SEPARATOR = re.compile(r"[./]")


class TensorChange(NamedTuple):
    """A tensor of a comparison."""

    name: str
    kind: str  # a key of `_EXCEPTIONS`, "same", or "explained"
    size: float = float("nan")  # norm of the difference, divided by the norm of `a`
    cause: str = ""  # of an explanation, or of a change


class ChangeLine(NamedTuple):
    """Tensors that differ in the same way; `subject` and `predicate` make a sentence."""

    subject: str
    predicate: str
    number: str  # of tensors, in parentheses; empty for a single one
    is_exception: bool

    def __str__(self) -> str:
        end = f" {self.predicate}{self.number}"
        return shortened(self.subject, _WIDEST_LINE - len(end)) + end


class _ChangeKind(NamedTuple):
    """The properties that all tensors of a line share."""

    kind: str
    cause: str
    level: int  # rises with the size of the change


class _ChangedModule(NamedTuple):
    """A tensor, or a module whose tensors are all of one kind."""

    name: str
    kind: _ChangeKind
    sizes: list[float]  # of the tensors; NaN for unknown ones


class _Folded(NamedTuple):
    """Modules or tensors of one kind with similar names."""

    text: str
    family: Family
    sizes: list[float]

    @property
    def number(self) -> str:
        """The number of tensors, and of modules if the pattern has others, in parentheses."""
        if len(self.sizes) == 1:
            return ""
        pattern = self.family.pattern()
        number = counted(len(self.sizes), "tensor")
        if pattern.count == pattern.grid:
            return f" ({number})"
        places = f"{pattern.count:,} of {pattern.grid:,}"
        is_of_tensors = pattern.count == len(self.sizes)
        return f" ({places} tensors)" if is_of_tensors else f" ({number} in {places} modules)"


def change_lines(tensors: Sequence[TensorChange], most: int = MOST_LINES) -> list[ChangeLine]:
    """Summarise a comparison in at most `most` lines, exceptions and large changes first."""
    levels = _levels([tensor.size for tensor in tensors])
    kinds = [
        _ChangeKind(tensor.kind, tensor.cause, level if tensor.kind == "changed" else 0)
        for tensor, level in zip(tensors, levels, strict=True)
    ]
    structure = Structure([Described(tensor.name, "float32", (2, 2)) for tensor in tensors])
    modules = _modules(tensors, kinds, structure)
    numbers = {kind: str(number) for number, kind in enumerate(dict.fromkeys(kinds))}
    rows = [Row(module.name, numbers[module.kind], (), len(module.sizes)) for module in modules]
    families = united(families_of(rows))
    is_short = len({path for family in families if (path := numbered_path(family))}) <= 1
    folded: dict[_ChangeKind, list[_Folded]] = {}
    for family in families:
        sizes = [size for n in family.places for size in modules[n].sizes]
        text = phrase(family, is_short=is_short)
        folded.setdefault(modules[family.place].kind, []).append(_Folded(text, family, sizes))
    totals = {kind: sum([len(part.sizes) for part in parts]) for kind, parts in folded.items()}
    order = sorted(folded, key=lambda kind: _rank(kind, totals[kind]))
    if len(order) == 1 and len(tensors) > 1 and order[0].kind not in _EXCEPTIONS:
        predicate = _predicate(order[0], len(tensors), [])
        return [
            ChangeLine(f"all {counted(len(tensors), 'tensor')}", predicate, "", is_exception=False)
        ]
    lines: list[ChangeLine] = []
    for position, kind in enumerate(order):
        following = order[position + 1 :]
        if following and len(lines) + 1 >= most:
            omitted = [kind, *following]
            number = f" ({counted(sum([totals[k] for k in omitted]), 'tensor')})"
            predicate = f"differ in {len(omitted):,} other ways"
            is_exception = any(k.kind in _EXCEPTIONS for k in omitted)
            return [*lines, ChangeLine("all others", predicate, number, is_exception)]
        room = max(1, most - len(lines) - len(following))
        lines += _lines_of(kind, folded[kind], room, is_last=not following)
    return lines


def _rank(kind: _ChangeKind, count: int) -> tuple[float, ...]:
    """Return a key that sorts exceptions first, then large changes, then rare explanations."""
    if kind.kind in _EXCEPTIONS:
        return list(_EXCEPTIONS).index(kind.kind), -kind.level, count
    return len(_EXCEPTIONS), count


def _lines_of(
    kind: _ChangeKind, parts: Sequence[_Folded], room: int, *, is_last: bool
) -> list[ChangeLine]:
    """Return at most `room` lines for the tensors of a kind."""
    is_exception = kind.kind in _EXCEPTIONS
    is_rest = is_last and not is_exception and len(parts) > 1
    if kind.kind == "changed":
        parts = sorted(parts, key=lambda part: -_range(part.sizes)[1])
    listed = 0 if is_rest else len(parts) if len(parts) <= room else room - 1
    lines = []
    for part in parts[:listed]:
        predicate = _predicate(kind, len(part.sizes), part.sizes)
        lines.append(ChangeLine(part.text, predicate, part.number, is_exception))
    if remaining := parts[listed:]:
        sizes = [size for part in remaining for size in part.sizes]
        subject = "everything else" if is_rest else "… and others" if listed else "others"
        predicate = _predicate(kind, 1 if is_rest else len(sizes), sizes)
        number = f" ({counted(len(sizes), 'tensor')})"
        lines.append(ChangeLine(subject, predicate, number, is_exception))
    return lines


def _predicate(kind: _ChangeKind, count: int, sizes: Sequence[float]) -> str:
    if kind.kind not in _EXCEPTIONS:
        return f"{'is' if count == 1 else 'are'} {printable(kind.cause) or 'equal'}"
    words = _EXCEPTIONS[kind.kind][count > 1]
    low, high = _range(sizes)
    if kind.kind == "changed" and high >= 0:
        range_text = f"{_percent(low)} to {_percent(high)}"
        words += " from zeros" if high == inf else f" by {range_text} %"
        if _percent(low) == _percent(high):
            words = words.replace(range_text, _percent(high))
    return f"{words} ({printable(kind.cause)})" if kind.cause else words


def _range(sizes: Sequence[float]) -> tuple[float, float]:
    """Return the smallest and the largest size; negative ones if all are unknown."""
    numbers = [size for size in sizes if not isnan(size)]
    return min(numbers, default=-1.0), max(numbers, default=-1.0)


def _percent(size: float) -> str:
    """Write a size as a percentage with two digits."""
    value = 100.0 * size
    if value >= 1e6 or 0 < value < 1e-4:
        return f"{value:.1e}"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _levels(sizes: Sequence[float]) -> list[int]:
    """Return the number of the cluster of each size; the largest gaps separate clusters.

    Changes from zeros are one cluster, and unknown sizes another.
    """
    logs = sorted({log(size) for size in sizes if 0 < size < inf})
    gaps = [(after - before, after) for before, after in pairwise(logs)]
    wide = sorted([gap for gap in gaps if gap[0] > log(_GAP)])[-_MOST_GAPS:]
    starts = [start for _, start in wide]
    return [
        sum([log(size) >= start for start in starts])
        if 0 < size < inf
        else len(wide) + 1
        if size == inf
        else -isnan(size)
        for size in sizes
    ]


def _modules(
    tensors: Sequence[TensorChange], kinds: Sequence[_ChangeKind], structure: Structure
) -> list[_ChangedModule]:
    """Return the largest modules inside of layers whose tensors are all of one kind."""
    kinds_of: dict[str, _ChangeKind | None] = {}
    counts: Counter[str] = Counter()
    prefixes: list[list[str]] = []
    for tensor, kind in zip(tensors, kinds, strict=True):
        names = _prefixes(tensor.name, len(structure.layer(tensor.name)))
        prefixes.append(names)
        for name in names:
            counts[name] += 1
            if kinds_of.setdefault(name, kind) != kind:
                kinds_of[name] = None
    modules: dict[tuple[str, _ChangeKind], _ChangedModule] = {}
    for tensor, kind, names in zip(tensors, kinds, prefixes, strict=True):
        of_one_kind = (n for n in names if kinds_of[n] is not None and counts[n] > 1)
        name = next(of_one_kind, tensor.name)
        modules.setdefault((name, kind), _ChangedModule(name, kind, [])).sizes.append(tensor.size)
    return list(modules.values())


def _prefixes(name: str, start: int) -> list[str]:
    """List the modules of a tensor in its layer, whose name ends at `start`, and the tensor."""
    if not start:
        return [name]
    ends = [match.start() for match in _SEPARATOR.finditer(name, start + 1)]
    return [*[name[:end] for end in ends], name]
