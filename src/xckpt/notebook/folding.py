"""Folds the tensor names of a checkpoint into few patterns.

A deep model repeats its modules, so the names of 25,000 tensors say little more than ten lines::

    model.layers.{0..63}.mlp.experts.{0..255}.{gate,up,down}_proj.weight   x 49,152

Two steps make a pattern:

1. Path components that are whole numbers become sets of indices, ``{0..63}`` or ``{0..2,5}``.
   Rows that are equal but for these numbers are one family.
2. Families that differ in one word and have the same index sets and number of tensors are united:
   ``{q,k,v,o}_proj``.

Element type, way of storing and number of axes are the same throughout a pattern, so that weights
are not mixed with biases.

In a pattern a backslash stands before braces, and before commas inside them, that are part of a
real name, and ``…`` in braces for members left out.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    """What the summary needs to know of one tensor.

    Parameters
    ----------
    name : str
        Exactly as in the file; no two rows have the same.
    dtype : str
        Stored element type.
    shape : tuple of int
        Logical shape.
    nbytes : int
        Stored bytes.
    size : int
        Number of elements.
    storage : str
        How it is stored where that is not plainly dense, e.g. ``"csr"`` or ``"zstd"``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    size: int
    storage: str = ""


@dataclass(frozen=True, slots=True)
class Pattern:
    """Tensors with alike names, and what they have in sum.

    Parameters
    ----------
    text : str
        The names in short, printable, at most 120 columns.
    count : int
        Number of tensors.
    grid : int
        Number of names that the braces stand for; more than `count` where some are missing.
    shapes : tuple of tuple of int
        The different shapes, in file order.
    dtype : str
        Stored element type of all of them.
    storage : str
        As in `Row`.
    nbytes : int
        Stored bytes.
    size : int
        Number of elements.
    """

    text: str
    count: int
    grid: int
    shapes: tuple[tuple[int, ...], ...]
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
    count: int
    nbytes: int
    size: int
    shapes: dict[tuple[int, ...], None]  # in place of an ordered set
    indices: list[tuple[int, set[str]]]


def fold(rows: Iterable[Row]) -> list[Pattern]:
    """Fold tensors into patterns."""
    return [_pattern(family) for family in _merged(_indexed(rows))]


def one_by_one(rows: Iterable[Row]) -> list[Pattern]:
    """Return every tensor a pattern of its own."""
    return [
        Pattern(
            text=_text(row.name.split(".")),
            count=1,
            grid=1,
            shapes=(row.shape,),
            dtype=row.dtype,
            storage=row.storage,
            nbytes=row.nbytes,
            size=row.size,
        )
        for row in rows
    ]


class _Words(dict[str, str]):
    """Path components as seen so far: indices all look the same, others are themselves."""

    def __missing__(self, component: str) -> str:
        self[component] = word = _INDEX if is_index(component) else component
        return word


def indices_text(indices: Iterable[str]) -> str:
    """Write whole numbers in short, as in a pattern."""
    return _component_text(frozenset(indices))


def _indexed(rows: Iterable[Row]) -> list[_Family]:
    """Group rows whose names differ in whole-number components only."""
    families: dict[Hashable, _Family] = {}
    words = _Words()
    for name, dtype, shape, nbytes, size, storage in rows:
        parts = name.split(".")
        key = (itemgetter(*parts)(words), dtype, storage, len(shape))
        family = families.get(key)
        if family is None:
            family = families[key] = _new_family(parts, dtype, storage, len(shape))
        family.count += 1
        family.nbytes += nbytes
        family.size += size
        family.shapes[shape] = None
        for position, values in family.indices:
            values.add(parts[position])
    for family in families.values():
        if family.indices:
            family.components = _with_indices(family)
    return list(families.values())


def _new_family(parts: Sequence[str], dtype: str, storage: str, ndim: int) -> _Family:
    indices = [(position, set[str]()) for position, part in enumerate(parts) if is_index(part)]
    return _Family(tuple(parts), dtype, storage, ndim, 0, 0, 0, {}, indices)


def _with_indices(family: _Family) -> tuple[_Component, ...]:
    components = list(family.components)
    for position, values in family.indices:
        components[position] = frozenset(values)
    return tuple(components)


def _merged(families: list[_Family]) -> list[_Family]:
    """Unite families that differ in one word, from the last component to the first."""
    depth = max([len(family.components) for family in families], default=0)
    for position in reversed(range(min(depth, _DEEPEST_MERGE))):
        families = _merged_at(position, families)
    return families


def _merged_at(position: int, families: list[_Family]) -> list[_Family]:
    first: dict[Hashable, _Family] = {}
    groups: dict[Hashable, list[_Family]] = {}  # of two and more: most families stay alone
    for family in families:
        key = _all_but(position, family)
        if (other := first.setdefault(key, family)) is not family:
            groups.setdefault(key, [other]).append(family)
    return [
        _united(groups[key], position) if key in groups else family for key, family in first.items()
    ]


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


def _united(group: list[_Family], position: int) -> _Family:
    first = group[0]
    words = tuple([str(family.components[position]) for family in group])
    return _Family(
        (*first.components[:position], words, *first.components[position + 1 :]),
        first.dtype,
        first.storage,
        first.ndim,
        sum([family.count for family in group]),
        sum([family.nbytes for family in group]),
        sum([family.size for family in group]),
        {shape: None for family in group for shape in family.shapes},
        first.indices,
    )


def _pattern(family: _Family) -> Pattern:
    return Pattern(
        text=_text(family.components),
        count=family.count,
        grid=prod([1 if isinstance(part, str) else len(part) for part in family.components]),
        shapes=tuple(family.shapes),
        dtype=family.dtype,
        storage=family.storage,
        nbytes=family.nbytes,
        size=family.size,
    )


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
    tail = ends[_first_joint(ends) :]
    members = [word.removesuffix(tail) for word in words]
    if not all(members):
        tail, members = "", list(words)
    head = _common_head(members)
    return head, [member[len(head) :] for member in members], tail


def _shared_start(words: Sequence[str]) -> str:
    return commonprefix(list(words))  # noqa: RUF071 (character by character is what is meant)


def _first_joint(text: str) -> int:
    return min([at for joint in _JOINTS if (at := text.find(joint)) >= 0], default=len(text))


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
        if runs and int(text) == int(runs[-1][-1]) + 1 and _alike(runs[-1][0], text):
            runs[-1].append(text)
        else:
            runs.append([text])
    listed: list[str] = []
    for run in runs:
        listed += run if len(run) <= _LONGEST_LISTED_RUN else [f"{run[0]}..{run[-1]}"]
    return listed


def _alike(first: str, last: str) -> bool:
    """Return whether a range is clear about leading zeros, as 08..11 and 8..11, but not 08..100."""
    return len(first) == len(last) or first[0] != "0" or first == "0"


def _braced(members: Sequence[str]) -> str:
    return "{" + ",".join([_literal(member, ",") for member in _abbreviated(members)]) + "}"


def _abbreviated(members: Sequence[str]) -> Sequence[str]:
    """Leave out all but the first few and the last of many or long members."""
    kept = len(members) if len(members) <= _MOST_MEMBERS else 3
    while kept > 1 and sum(map(len, members[:kept])) > _LONGEST_MEMBERS:
        kept -= 1
    return members if kept >= len(members) - 1 else [*members[:kept], "…", members[-1]]
