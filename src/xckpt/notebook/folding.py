"""Folds the tensor names of a checkpoint into few patterns.

A deep model repeats its modules, so the names of 25,000 tensors say little more than ten lines::

    model.layers.{0..63}.mlp.experts.{0..255}.{gate,up,down}_proj.weight   x 49,152

Two steps make a pattern:

1. Path components that are whole numbers become sets of indices, ``{0..63}`` or ``{0..2,5}``.
   Rows that differ in these numbers only are one family.
2. Families that differ in one word and have the same index sets and number of tensors are united:
   ``{q,k,v,o}_proj``.

Element type, way of storing and number of axes are the same throughout a pattern, so that weights
are not mixed with biases.

In a pattern a backslash stands before braces, and before commas inside them, that are part of a
real name, and ``…`` in braces for members left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from operator import itemgetter
from os.path import commonprefix
from typing import TYPE_CHECKING, NamedTuple

from xckpt.labels.stacking import is_index
from xckpt.notebook.formatting import columns, printable, shortened

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

__all__ = ["Pattern", "Row", "fold", "indices_text", "one_by_one"]

_LONGEST_TEXT = 120
_MOST_MEMBERS = 6
_LONGEST_MEMBERS = 48
_LONGEST_LISTED_RUN = 2
_DEEPEST_MERGE = 16
_JOINTS = "_-:/"
# Any whole number is an index, "0" among them, so that this word cannot be a real one.
_INDEX = "0"

# A word, the alternatives of a merged word, or the indices (in digits) of a repeated module.
_Component = str | tuple[str, ...] | frozenset[str]


class Row(NamedTuple):
    """What summaries need to know of one tensor."""

    name: str  # exactly as in the file; no two rows have the same
    dtype: str  # stored element type
    shape: tuple[int, ...]
    nbytes: int  # as stored
    size: int
    storage: str = ""  # "csr", "zstd", ...: how it is stored where that is not plainly dense


@dataclass(frozen=True, slots=True)
class Pattern:
    """Tensors with similar names, and what they have in total."""

    text: str  # the names in short, printable, at most 120 columns
    count: int
    grid: int  # how many names the braces stand for: more than `count` where some are missing
    shapes: tuple[tuple[int, ...], ...]  # the different ones, in file order
    dtype: str
    storage: str
    nbytes: int
    size: int


@dataclass(slots=True)
class _Family:
    """Rows that one pattern will stand for, while they are being counted."""

    components: tuple[_Component, ...]
    dtype: str
    storage: str
    ndim: int
    indices: list[tuple[int, set[str]]]
    count: int = 0
    nbytes: int = 0
    size: int = 0
    shapes: dict[tuple[int, ...], None] = field(default_factory=dict)  # an ordered set

    def pattern(self) -> Pattern:
        return Pattern(
            text=_text(self.components),
            count=self.count,
            grid=prod([1 if isinstance(part, str) else len(part) for part in self.components]),
            shapes=tuple(self.shapes),
            dtype=self.dtype,
            storage=self.storage,
            nbytes=self.nbytes,
            size=self.size,
        )


def fold(rows: Iterable[Row]) -> list[Pattern]:
    """Fold tensors into patterns."""
    families = _indexed(rows)
    # Families that differ in one word are united, from the last component to the first.
    depth = max([len(family.components) for family in families], default=0)
    for position in reversed(range(min(depth, _DEEPEST_MERGE))):
        families = _merged_at(position, families)
    return [family.pattern() for family in families]


def one_by_one(rows: Iterable[Row]) -> list[Pattern]:
    """Return a pattern for each tensor."""
    return [family.pattern() for row in rows for family in _indexed([row])]


class _Words(dict[str, str]):
    """Path components as seen so far: indices all look the same, others are themselves."""

    def __missing__(self, component: str) -> str:
        self[component] = word = _INDEX if is_index(component) else component
        return word


def _indexed(rows: Iterable[Row]) -> list[_Family]:
    """Group rows whose names differ in whole-number components only."""
    families: dict[Hashable, _Family] = {}
    words = _Words()
    for name, dtype, shape, nbytes, size, storage in rows:
        parts = name.split(".")
        key = (itemgetter(*parts)(words), dtype, storage, len(shape))
        family = families.get(key)
        if family is None:
            indices = [(at, set[str]()) for at, part in enumerate(parts) if is_index(part)]
            family = _Family(tuple(parts), dtype, storage, len(shape), indices)
            families[key] = family
        family.count += 1
        family.nbytes += nbytes
        family.size += size
        family.shapes[shape] = None
        for position, values in family.indices:
            values.add(parts[position])
    for family in families.values():
        if family.indices:
            components = list(family.components)
            for position, values in family.indices:
                components[position] = frozenset(values)
            family.components = tuple(components)
    return list(families.values())


def _merged_at(position: int, families: list[_Family]) -> list[_Family]:
    """Unite families that differ in the component at a position only."""
    groups: dict[Hashable, list[_Family]] = {}
    for family in families:
        groups.setdefault(_all_but(position, family), []).append(family)
    for first, *others in groups.values():
        if others:
            words = [str(family.components[position]) for family in (first, *others)]
            before, after = first.components[:position], first.components[position + 1 :]
            first.components = (*before, tuple(words), *after)
        for other in others:
            first.count += other.count
            first.nbytes += other.nbytes
            first.size += other.size
            first.shapes |= other.shapes
    return [group[0] for group in groups.values()]


def _all_but(position: int, family: _Family) -> Hashable:
    """Return what families must share to be united at a position; unique where they cannot be."""
    components = family.components
    if position >= len(components) or not isinstance(word := components[position], str):
        return id(family)
    mark = None
    if len(components) == 1:  # nothing else is shared, so that only w1, w2, w3 are alike
        mark = word.rstrip("0123456789") if word[-1:].isdigit() else word
    return (
        *(family.dtype, family.storage, family.ndim, family.count),
        *(*components[:position], mark, *components[position + 1 :]),
    )


def indices_text(indices: Iterable[str]) -> str:
    """Write whole numbers in short, as in a pattern."""
    return _component_text(frozenset(indices))


def _text(components: Sequence[_Component]) -> str:
    parts = list(map(_component_text, components))
    text = ".".join(parts) or '""'
    if columns(text) <= _LONGEST_TEXT:
        return text
    # Cutting through braces would turn "{0..63}.{0..63}" into "{0…63}": leave out whole parts.
    for kept in range(min(len(parts) - 1, _LONGEST_TEXT), 1, -1):
        text = ".".join([*parts[: kept // 2], "…", *parts[kept // 2 - kept :]])
        if columns(text) <= _LONGEST_TEXT:
            return text
    return shortened(text, _LONGEST_TEXT)


def _component_text(component: _Component) -> str:
    if isinstance(component, str):
        return _literal(component)
    if isinstance(component, frozenset):
        return str(*component) if len(component) == 1 else _braced(_ranges(component))
    head, members, tail = _stripped(component)
    listed = _ranges(members) if all(map(is_index, members)) else members
    return _literal(head) + _braced(listed) + _literal(tail)


def _literal(word: str, also: str = "") -> str:
    """Escape what a reader could take for the notation of a pattern."""
    if word.isidentifier():
        return word
    for special in "\\{}" + also:
        word = word.replace(special, "\\" + special)
    return printable(word)


def _stripped(words: Sequence[str]) -> tuple[str, Sequence[str], str]:
    """Split words into the head and tail that all share and what differs between them."""
    ends = _shared_start([word[::-1] for word in words])[::-1]
    joints = [at for joint in _JOINTS if (at := ends.find(joint)) >= 0]
    tail = ends[min(joints) :] if joints else ""
    members = [word.removesuffix(tail) for word in words]
    if not all(members):
        tail, members = "", list(words)
    head = _common_head(members)
    return head, [member[len(head) :] for member in members], tail


def _shared_start(words: Sequence[str]) -> str:
    return commonprefix(list(words))  # noqa: RUF071 (character by character is what is meant)


def _common_head(words: Sequence[str]) -> str:
    head = _shared_start(words)
    stem = head.rstrip("0123456789")
    if all(word[len(stem) :].isdigit() for word in words):
        return stem
    head = head[: max(map(head.rfind, _JOINTS)) + 1]
    return "" if head in words else head


def _ranges(numbers: Iterable[str]) -> list[str]:
    """List whole numbers as they are written, with runs of three or more as ``first..last``."""
    runs: list[list[str]] = []
    for text in sorted(numbers, key=lambda text: (int(text), len(text))):
        first = runs[-1][0] if runs else ""
        # A range must be clear about leading zeros: 08..11 and 8..11 are, 08..100 is not.
        is_clear = len(first) == len(text) or first[:1] != "0" or first == "0"
        if runs and int(text) == int(runs[-1][-1]) + 1 and is_clear:
            runs[-1].append(text)
        else:
            runs.append([text])
    listed: list[str] = []
    for run in runs:
        listed += run if len(run) <= _LONGEST_LISTED_RUN else [f"{run[0]}..{run[-1]}"]
    return listed


def _braced(members: Sequence[str]) -> str:
    """List members, of many or long ones only the first few and the last."""
    kept = len(members) if len(members) <= _MOST_MEMBERS else 3
    while kept > 1 and sum(map(len, members[:kept])) > _LONGEST_MEMBERS:
        kept -= 1
    if kept < len(members) - 1:
        members = [*members[:kept], "…", members[-1]]
    return "{" + ",".join([_literal(member, ",") for member in members]) + "}"
