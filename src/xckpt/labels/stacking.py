"""Numbered modules as dimensions: which tensors are one array with one more axis.

A path component that is a whole number is an index; the component before it names the dimension.
``layers.0.w``, ``layers.1.w``, ... of one kind are the variable ``layers.w`` with the dimension
``layers``, whose coordinate has the indices as they are written. Every tensor is in exactly one
group at one position, or in none and keeps its own name; nothing is padded.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Mapping

__all__ = ["Stack", "flat_names", "stack"]

# The dimension of an index that stands first, as the layers of a bare sequence do.
_FIRST = "index"
_Path = tuple[str, ...]
_Position = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stack:
    """Tensors that are one array with more axes.

    Parameters
    ----------
    name : str
        Name of the variable: the common path without its indices.
    template : tuple of (str or None)
        The path of every member, None where an index stands.
    dims : tuple of str
        Names of the dimensions that the indices make, in their order.
    indices : tuple of tuple of int
        The indices along each of these dimensions, ascending.
    members : tuple of str
        Names of the tensors; the last dimension varies fastest.
    """

    name: str
    template: tuple[str | None, ...]
    dims: tuple[str, ...]
    indices: tuple[tuple[int, ...], ...]
    members: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent along each of the dimensions."""
        return tuple(len(along) for along in self.indices)


class _Pattern(NamedTuple):
    """Where indices stand in a path, and what the dimensions they make would like to be called."""

    template: tuple[str | None, ...]
    bases: tuple[str, ...]


class _Grid(NamedTuple):
    """Members that fill a grid of indices."""

    pattern: _Pattern
    indices: tuple[tuple[int, ...], ...]
    members: tuple[str, ...]


def stack(
    kinds: Mapping[str, Hashable],
    only: Collection[str] | None = None,
    paths: Mapping[str, _Path] | None = None,
) -> list[Stack]:
    """Group tensors that differ in the numbers of their modules alone.

    Parameters
    ----------
    kinds : mapping of str to hashable
        By name of the tensor, in file order, all that members must have in common: shape, type...
    only : collection of str, optional
        Components whose indices become dimensions; by default all.
    paths : mapping of str to tuple of str, optional
        Paths of tensors that are not to be split at their dots.

    Returns
    -------
    list of Stack
        Of two members or more each, in order of their first members. Tensors in none of them
        are to keep their names.

    Examples
    --------
    >>> (found,) = stack({"h.0.w": 1, "h.1.w": 1, "head": 1})
    >>> found.name, found.dims, found.indices
    ('h.w', ('h',), ((0, 1),))
    """
    families: dict[tuple[_Pattern, Hashable], dict[_Position, str]] = defaultdict(dict)
    for name, kind in kinds.items():
        stated = None if paths is None else paths.get(name)
        found = _split(stated or tuple(name.split(".")), only)
        if found is not None:
            pattern, position = found
            families[pattern, kind][position] = name
    grids = [
        _Grid(pattern, indices, tuple([members[place] for place in _product(indices)]))
        for (pattern, _), members in families.items()
        for indices in _full_grids(list(members))
    ]
    order = {name: number for number, name in enumerate(kinds)}
    grids = [grid for grid in grids if len(grid.members) > 1]
    return _named(grids, order)


def flat_names(template: Iterable[str | None], indices: tuple[tuple[int, ...], ...]) -> list[str]:
    """Give the names of the members of a stack, the inverse of `stack`.

    Parameters
    ----------
    template : iterable of (str or None)
        As `Stack` has it.
    indices : tuple of tuple of int
        The indices along each dimension.

    Returns
    -------
    list of str
        The last dimension varies fastest.

    Examples
    --------
    >>> flat_names(("h", None, "w"), ((0, 2),))
    ['h.0.w', 'h.2.w']
    """
    form = ".".join("%d" if part is None else part.replace("%", "%%") for part in template)
    return [form % place for place in _product(indices)]


def _split(path: _Path, only: Collection[str] | None) -> tuple[_Pattern, _Position] | None:
    """Take the indices out of a path; None if there are none."""
    template: list[str | None] = []
    bases: list[str] = []
    position: list[int] = []
    base = _FIRST
    for part in path:
        # "007" is a name: as a number it would come back as "7".
        is_index = part.isdecimal() and part.isascii() and (part[0] != "0" or part == "0")
        if is_index and (only is None or base in only):
            template.append(None)
            bases.append(base)
            position.append(int(part))
        else:
            template.append(part)
            base = part
    if not position or len(position) == len(path):
        return None
    return _Pattern(tuple(template), tuple(bases)), tuple(position)


def _full_grids(places: list[_Position]) -> list[tuple[tuple[int, ...], ...]]:
    """Partition positions into full grids, as large as they come.

    Rows (positions with one first index) that have the same rest form one grid together; a rest
    that is itself no full grid is partitioned first.
    """
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


def _product(indices: tuple[tuple[int, ...], ...]) -> list[_Position]:
    places: list[_Position] = [()]
    for along in indices:
        places = [(*place, index) for place in places for index in along]
    return places


def _named(grids: list[_Grid], order: Mapping[str, int]) -> list[Stack]:
    """Name variables and dimensions; a grid whose name is a tensor's is left unstacked."""
    grids = sorted(grids, key=lambda grid: (-len(grid.members), order[grid.members[0]]))
    taken = set(order)
    named: list[tuple[str, _Grid]] = []
    for grid in grids:
        plain = ".".join(part for part in grid.pattern.template if part is not None)
        name = _free(plain, taken)
        taken.add(name)
        named.append((name, grid))
    dims = _dimensions(grids, taken)
    stacks = [
        Stack(
            name,
            grid.pattern.template,
            tuple([dims[key] for key in _dimension_keys(grid)]),
            grid.indices,
            grid.members,
        )
        for name, grid in named
    ]
    return sorted(stacks, key=lambda each: order[each.members[0]])


def _dimension_keys(grid: _Grid) -> list[tuple[str, int, tuple[int, ...]]]:
    """Say what makes a dimension: its base, how many of that base are before it, its indices."""
    seen: dict[str, int] = defaultdict(int)
    keys = []
    for base, along in zip(grid.pattern.bases, grid.indices, strict=True):
        keys.append((base, seen[base], along))
        seen[base] += 1
    return keys


def _dimensions(
    grids: list[_Grid], taken: Collection[str]
) -> dict[tuple[str, int, tuple[int, ...]], str]:
    """Name the dimensions: the largest set of indices has the plain name of its base.

    Others have a number after it, in order of their first index.
    """
    by_base: dict[str, list[tuple[str, int, tuple[int, ...]]]] = defaultdict(list)
    for key in sorted({key for grid in grids for key in _dimension_keys(grid)}):
        by_base[key[0]].append(key)
    names: dict[tuple[str, int, tuple[int, ...]], str] = {}
    used = set(taken)
    for base, keys in by_base.items():
        largest = max(keys, key=lambda key: (len(key[2]), -key[1], key[2]))
        for key in [largest, *(key for key in keys if key != largest)]:
            names[key] = _free(base, used)
            used.add(names[key])
    return names


def _free(name: str, taken: Collection[str]) -> str:
    candidate, number = name, 0
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate
