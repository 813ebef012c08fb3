"""Numbered modules as dimensions: which tensors are one array with one more axis.

The word before an index names the dimension: ``layers.0.w``, ``layers.1.w``, ... of one kind are
the variable ``layers.w`` with the dimension ``layers``, whose coordinate has the indices. An index
that all of them have stays in the name. Zeros in front of indices are kept in the template, where
one number of digits spells them all. Every tensor is in exactly one group at one position, or in
none and keeps its own name. A group is a full grid, or, in an outer join, lies on the indices that
its modules have anywhere, so that some of its places are empty.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import chain, product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from xckpt.labels.numbering import (
    bare,
    has_words,
    numbered,
    numbered_bases,
    numbered_places,
    words,
)
from xckpt.labels.paths import tree_paths

if TYPE_CHECKING:
    from collections.abc import (
        Callable,
        Collection,
        Hashable,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

__all__ = ["Stack", "StackedAttrs", "flat_names", "stack", "stack_in_tree", "stacked_attrs"]

_Item = TypeVar("_Item")
_Path = tuple[str, ...]
_Position = tuple[int, ...]
# Pieces, None where an index stands, or its number of digits where zeros stand in front of it.
_Template = tuple[str | int | None, ...]
# In an outer join, places in a grid for each tensor in it. Where more are empty, as they can be in
# a file that was made to take long, tensors have dimensions of their own.
_MOST_PLACES = 64


@dataclass(frozen=True, slots=True)
class Stack:
    """Tensors that are one array with more axes.

    Parameters
    ----------
    name : str
        Name of the variable: the common path without its indices.
    template : tuple of (str, int or None)
        The pieces of the name of every member, None where an index stands, or its number of digits
        where zeros stand in front of it.
    dims : tuple of str
        Names of the dimensions that the indices make, in their order.
    indices : tuple of tuple of int
        The indices along each of these dimensions, ascending.
    members : tuple of str
        Names of the tensors; the last dimension varies fastest.
    present : frozenset of tuple of int, optional
        The indices of the members, where the grid has places without one.
    """

    name: str
    template: _Template
    dims: tuple[str, ...]
    indices: tuple[tuple[int, ...], ...]
    members: tuple[str, ...]
    present: frozenset[_Position] | None = None

    @property
    def places(self) -> tuple[str | None, ...]:
        """The dimension of each number in the names, None where all members have it."""
        dims = iter(self.dims)
        places = numbered_places(self.template)
        return tuple([None if isinstance(part, str) else next(dims) for _, part in places])

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent along each of the dimensions."""
        return tuple(len(along) for along in self.indices)

    def spread(self, items: Iterable[_Item]) -> Iterator[_Item | None]:
        """Put an item for each member at its place in the grid, and None where there is none."""
        if self.present is None:
            return iter(items)
        each = iter(items)
        return (next(each) if at in self.present else None for at in product(*self.indices))


class _Numbering(NamedTuple):
    """Where indices stand in a path, and what the dimensions they make would like to be called."""

    template: _Template
    bases: tuple[str, ...]


class _Grid(NamedTuple):
    """Members that fill a grid of indices."""

    pattern: _Numbering
    indices: tuple[tuple[int, ...], ...]
    members: tuple[str, ...]
    present: frozenset[_Position] | None = None


def stack(
    kinds: Mapping[str, Hashable],
    only: Collection[str] | None = None,
    paths: Mapping[str, _Path] | None = None,
    reserved: Collection[str] = (),
    wanted: Mapping[str, tuple[str | None, ...]] | None = None,
    *,
    outer: Callable[[str], bool] | None = None,
) -> list[Stack]:
    """Group tensors by all but their modules' numbers.

    `wanted` has the `Stack.places` of members; `outer` says of a tensor whether others of its kind
    may be absent: these have all indices that their modules have.
    """
    families: dict[tuple[_Template, Hashable], list[tuple[_Path, str]]] = defaultdict(list)
    for name, kind in kinds.items():
        stated = None if paths is None else paths.get(name)
        if stated is not None and ".".join(stated) != name:
            continue
        found = numbered(name, only, stated)
        if found.indices:
            families[found.template, kind].append((found.indices, name))
    alike = [
        each
        for (template, _), spelled_members in families.items()
        if len(spelled_members) > 1 and has_words(template)
        for each in _spelled_alike(template, spelled_members)
        if len(each[1]) > 1
    ]
    grids, rest = ([], alike) if outer is None else _outer_grids(alike, outer)
    grids += [
        _Grid(pattern, indices, tuple(map(members.__getitem__, product(*indices))))
        for pattern, members in rest
        for indices in _full_grids(list(members))
    ]
    order = {name: number for number, name in enumerate(kinds)}
    grids = [_without_shared(grid) for grid in grids if len(grid.members) > 1]
    return _named(grids, order, reserved, wanted or {})


def stack_in_tree(
    kinds: Mapping[str, Hashable],
    only: Collection[str] | None = None,
    paths: Mapping[str, _Path] | None = None,
    reserved: Collection[str] = (),
    *,
    others: Collection[str] = (),
    wanted: Mapping[str, tuple[str | None, ...]] | None = None,
    outer: Callable[[str], bool] | None = None,
) -> list[Stack]:
    """Group tensors as `stack` does, for a tree of modules."""
    refused = set(reserved)
    while True:
        stacks = stack(kinds, only, paths, refused, wanted, outer=outer)
        clashes = _clashes(stacks, [*kinds, *others], paths or {})
        if not clashes:
            return stacks
        refused |= clashes


def flat_names(
    template: Iterable[str | int | None], indices: tuple[tuple[int, ...], ...]
) -> list[str]:
    """Return the names of the members of a stack, the inverse of `stack`."""
    form = "".join(map(_form, template))
    return [form % place for place in product(*indices)]


def _form(part: str | int | None) -> str:
    if isinstance(part, str):
        return part.replace("%", "%%")
    return "%d" if part is None else f"%0{part}d"


def _clashes(stacks: list[Stack], names: Iterable[str], paths: Mapping[str, _Path]) -> set[str]:
    """Find dimensions whose coordinates have the name of a variable, or of a node below them."""
    members = {name for each in stacks for name in each.members}
    placed: dict[str, _Path | None] = {n: paths.get(n) for n in names if n not in members}
    for each in stacks:
        stated = each.members[0] in paths
        placed[each.name] = words(each.template) if stated else None
    places = tree_paths(placed)
    dims = {dim for each in stacks for dim in each.dims}
    # A node has the coordinates of those above it, too.
    below = _nodes_below({path for path, _ in places.values()}, dims)
    clashes = dims & {leaf for _, leaf in places.values()}
    for each in stacks:
        clashes |= below.get(places[each.name][0], set()).intersection(each.dims)
    return clashes


def _nodes_below(paths: Iterable[str], names: Collection[str]) -> dict[str, set[str]]:
    """Find which of some names the nodes anywhere below each node have."""
    below: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        components = path.split("/")[1:]
        for depth, component in enumerate(components):
            if component in names:
                for above in range(depth + 1):
                    below["/" + "/".join(components[:above])].add(component)
    return below


def _spelled_alike(
    template: _Template, members: Sequence[tuple[_Path, str]]
) -> Iterator[tuple[_Numbering, dict[_Position, str]]]:
    """Cut a family so that one number of digits spells all indices along each axis."""
    bases = tuple(numbered_bases(template))
    columns = list(zip(*[spelled for spelled, _ in members], strict=True))
    # Many members have few indices: each of these is looked at once.
    values = [{index: int(index) for index in set(column)} for column in columns]
    if not any(map(_padding, chain.from_iterable(values))):
        axes = [[value[n] for n in column] for value, column in zip(values, columns, strict=True)]
        names = [name for _, name in members]
        yield _Numbering(template, bases), dict(zip(zip(*axes, strict=True), names, strict=True))
        return
    groups: dict[_Position, list[tuple[_Path, str]]] = defaultdict(list)
    for spelled, name in members:
        groups[tuple(map(_padding, spelled))].append((spelled, name))
    if len(groups) > 1:
        # Of 08, 09, 10 the last has no zero in front, and the same number of digits.
        widths = tuple(map(max, zip(*groups, strict=True)))
        if all(_fits(spelled, widths) for spelled, _ in members):
            groups = {widths: list(members)}
    for widths, alike in groups.items():
        padded = iter(widths)
        of_width = tuple([next(padded) or None if part is None else part for part in template])
        places = {tuple(map(int, spelled)): name for spelled, name in alike}
        yield _Numbering(of_width, bases), places


def _padding(index: str) -> int:
    """Return the number of digits if there are zeros in front, else 0."""
    return len(index) if index[0] == "0" and index != "0" else 0


def _fits(spelled: _Path, widths: _Position) -> bool:
    return all(
        len(index) == width if _padding(index) else len(index) >= width
        for index, width in zip(spelled, widths, strict=True)
    )


def _without_shared(grid: _Grid) -> _Grid:
    """Put indices that all members have into the name: they are no axis of length one."""
    if all(len(along) > 1 for along in grid.indices):
        return grid
    each = iter(zip(grid.indices, grid.pattern.bases, strict=True))
    template: list[str | int | None] = []
    bases, indices = [], []
    for piece in grid.pattern.template:
        if isinstance(piece, str):
            template.append(piece)
            continue
        along, base = next(each)
        if len(along) == 1:
            template.append(_form(piece) % along[0])
        else:
            template.append(piece)
            bases.append(base)
            indices.append(along)
    kept = [at for at, along in enumerate(grid.indices) if len(along) > 1]
    present = grid.present and frozenset(tuple([at[n] for n in kept]) for at in grid.present)
    pattern = _Numbering(tuple(template), tuple(bases))
    return _Grid(pattern, tuple(indices), grid.members, present)


def _full_grids(places: list[_Position]) -> list[tuple[tuple[int, ...], ...]]:
    """Partition positions into full grids, as large as they come."""
    indices = tuple(tuple(sorted(set(along))) for along in zip(*places, strict=True))
    if prod(len(along) for along in indices) == len(places):
        return [indices]
    rests: dict[int, list[_Position]] = defaultdict(list)
    for first, *rest in places:
        rests[first].append(tuple(rest))
    rows: dict[tuple[tuple[int, ...], ...], list[int]] = defaultdict(list)
    for first, rest_places in sorted(rests.items()):
        for grid in _full_grids(rest_places) if rest_places[0] else [()]:
            rows[grid].append(first)
    return [(tuple(firsts), *grid) for grid, firsts in rows.items()]


# Tensors of one kind whose names differ in indices only, by these.
_Family = tuple[_Numbering, dict[_Position, str]]


def _outer_grids(
    families: Iterable[_Family], outer: Callable[[str], bool]
) -> tuple[list[_Grid], list[_Family]]:
    """Put families on the indices that their modules have anywhere; return those left over too."""
    rest: list[_Family] = []
    joined: list[_Family] = []
    for family in families:
        (joined if outer(next(iter(family[1].values()))) else rest).append(family)
    while True:
        # A module is what stands before the index: encoder.layers and decoder.layers are two.
        numbers: dict[_Template, set[int]] = defaultdict(set)
        for (template, _), members in joined:
            for module, along in zip(_modules(template), zip(*members, strict=True), strict=True):
                numbers[module].update(along)
        union = {module: tuple(sorted(found)) for module, found in numbers.items()}
        grids: list[_Grid] = []
        kept: list[_Family] = []
        for pattern, members in joined:
            indices = tuple([union[module] for module in _modules(pattern.template)])
            places = prod(map(len, indices))
            if places > _MOST_PLACES * len(members):
                rest.append((pattern, members))
                continue
            kept.append((pattern, members))
            present = None if places == len(members) else frozenset(members)
            names = tuple([members[place] for place in sorted(members)])
            grids.append(_Grid(pattern, indices, names, present))
        if len(kept) == len(joined):
            return grids, rest
        joined = kept


def _modules(template: _Template) -> list[_Template]:
    """Return what stands before each index of a template."""
    return [template[:at] for at, part in enumerate(template) if not isinstance(part, str)]


# What makes a dimension: the name that it would like, how many of that name are before it in a
# path, and its indices.
_Dimension = tuple[str, int, tuple[int, ...]]


def _named(
    grids: list[_Grid],
    order: Mapping[str, int],
    reserved: Collection[str],
    wanted: Mapping[str, tuple[str | None, ...]],
) -> list[Stack]:
    """Name variables and dimensions; nothing is named like a tensor."""
    grids = sorted(grids, key=lambda grid: (-len(grid.members), order[grid.members[0]]))
    free = _FreeNames(order)
    named = [(free.take(bare(grid.pattern.template)), grid) for grid in grids]
    keys = [_dimension_keys(grid, wanted) for grid in grids]
    free = _FreeNames({*order, *reserved, *(name for name, _ in named)})
    dims = _dimensions({key for each in keys for key in each}, free)
    stacks = [
        Stack(
            name,
            grid.pattern.template,
            tuple([dims[key] for key in each]),
            grid.indices,
            grid.members,
            grid.present,
        )
        for (name, grid), each in zip(named, keys, strict=True)
    ]
    return sorted(stacks, key=lambda each: order[each.members[0]])


def _dimension_keys(grid: _Grid, wanted: Mapping[str, tuple[str | None, ...]]) -> list[_Dimension]:
    asked = {wanted.get(member) for member in grid.members} if wanted else {None}
    bases = grid.pattern.bases
    if len(asked) == 1 and (names := asked.pop()):
        places = numbered_places(grid.pattern.template)
        here = [n for n, (_, part) in zip(names, places, strict=True) if not isinstance(part, str)]
        bases = tuple([name or base for name, base in zip(here, bases, strict=True)])
    seen: Counter[str] = Counter()
    keys = []
    for base, along in zip(bases, grid.indices, strict=True):
        keys.append((base, seen[base], along))
        seen[base] += 1
    return keys


def _dimensions(keys: Collection[_Dimension], free: _FreeNames) -> dict[_Dimension, str]:
    """Name the dimensions: the largest set of indices has the plain name of its base."""
    by_base: dict[str, list[_Dimension]] = defaultdict(list)
    for key in sorted(keys):
        by_base[key[0]].append(key)
    # A dimension that is called layers_1 in the whole file comes before one that may be.
    largest = [
        max(each, key=lambda key: (len(key[2]), -key[1], key[2])) for each in by_base.values()
    ]
    names = {key: free.take(key[0]) for key in largest}
    for each in by_base.values():
        names |= {key: free.take(key[0]) for key in each if key not in names}
    return names


class _FreeNames:
    """Names that are not taken: the wanted one, or that with a number behind it."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        # Where the last search ended: a hostile file can want one name ten thousand times.
        self._numbers: Counter[str] = Counter()

    def take(self, wanted: str) -> str:
        """Return a name and take it."""
        name = wanted
        while name in self._taken:
            self._numbers[wanted] += 1
            name = f"{wanted}_{self._numbers[wanted]}"
        self._taken.add(name)
        return name


_MISSING = object()
# Longer texts as a fixed-width array would take the longest one's memory for every tensor.
_LONGEST_TEXT = 64


class StackedAttrs(NamedTuple):
    """Attributes of the members of a stack.

    Parameters
    ----------
    shared : dict
        Those that all members have, with one value.
    along : dict of str to array
        Those that all members have, with different values that fit an array: one for each
        place, flat; NaN or an empty text where there is no member.
    dropped : list of str
        Names of the others.
    """

    shared: dict[str, Any]
    along: dict[str, np.ndarray[Any, Any]]
    dropped: list[str]


def stacked_attrs(places: Sequence[Mapping[str, Any] | None]) -> StackedAttrs:
    """Split the attributes of the members of a stack; None is a place without one."""
    found = StackedAttrs({}, {}, [])
    if not any(places):
        return found
    members = [attrs for attrs in places if attrs is not None]
    names = dict.fromkeys(name for attrs in members for name in attrs)
    for name in names:
        values = [attrs.get(name, _MISSING) for attrs in members]
        if all(_equal(value, values[0]) for value in values[1:]):
            found.shared[name] = values[0]
            continue
        if len(members) < len(places):
            # Whole numbers and booleans have no such value: they are left out.
            absent = {str: "", float: np.nan}.get(type(values[0]), _MISSING)
            values = [absent if attrs is None else attrs.get(name, _MISSING) for attrs in places]
        array = _as_array(values)
        if array is None:
            found.dropped.append(name)
        else:
            found.along[name] = array
    return found


def _equal(a: Any, b: Any) -> bool:
    # 1, 1.0 and True are equal, but not the same value in a file.
    if a is b:
        return True
    return type(a) is type(b) and not isinstance(a, np.ndarray) and bool(a == b)


def _as_array(values: list[Any]) -> np.ndarray[Any, Any] | None:
    """Make an array of scalars of one type; None if they are none."""
    kinds = {type(value) for value in values}
    if len(kinds) != 1 or not kinds <= {bool, int, float, str}:
        return None
    if kinds == {str}:
        return np.array(values, None if max(map(len, values)) <= _LONGEST_TEXT else object)
    array = np.array(values)
    return None if array.dtype == object else array
