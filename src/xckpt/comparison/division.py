"""Tensors that are divided over ranks, and flat parameters that have many tensors.

===================  ===============================================================================
layout               whole and parts
===================  ===============================================================================
tensor parallelism   rows or columns of a tensor on each rank; each fused part of it is divided
FSDP                 all parameters of a module in one vector, which ranks may share out; padding
                     lies between the parameters, to align them, and at the end
===================  ===============================================================================

As in `layouts`, a suggestion proves nothing.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.arrays.lazy import dense_values
from xckpt.comparison.arrangements import Reshaped, View, cropped, lines_along
from xckpt.comparison.layouts import Conversion, Piece
from xckpt.structure.forms import (
    are_in_order,
    form_in_layer,
    layer_of,
    module_of_flat,
    on_ranks,
    without_wrappers,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from xckpt.typing import Array

    Shape = tuple[int, ...]

# Elements that show which tensor begins at a place, and their relative distance after rounding.
_PROBED, _NEAR = 16, 2.0**-6
# Padding that aligns a parameter, and padding at the end, in elements.
_MOST_ALIGNED, _MOST_AT_END = 16, 1 << 14
# `_FLAT_PARAM_PADDING_VALUE` in torch/distributed/fsdp/_flat_param.py.
_MARK = 42
# Places that the search for an order visits, and parameters of a module.
_MOST_VISITED, _MOST_PARTS = 1 << 13, 1 << 12


def divisions(
    wholes: Mapping[str, Any], parts: Mapping[str, Any], fused: Callable[[str], Sequence[int]]
) -> dict[str, list[Conversion]]:
    """Return ways to compose tensors of one side of tensors of the other, by a name of a whole.

    Parameters
    ----------
    wholes, parts : mapping of str to array
        Tensors of the two sides, by name.
    fused : callable
        Returns the extents of the fused parts of a whole along its outputs; empty without any.
    """
    return {**_on_ranks(wholes, parts, fused), **_in_flat_parameters(wholes, parts)}


# --- tensor parallelism ---------------------------------------------------------------------------


def _on_ranks(
    wholes: Mapping[str, Any], parts: Mapping[str, Any], fused: Callable[[str], Sequence[int]]
) -> dict[str, list[Conversion]]:
    ranks: dict[str, dict[int, str]] = defaultdict(dict)
    for name in parts:
        for reading in on_ranks(name):
            if reading.name in wholes and reading.name not in parts:
                ranks[reading.name].setdefault(reading.rank, name)
                break
    conversions = {}
    for name, numbered in ranks.items():
        names = [numbered[rank] for rank in sorted(numbered)]
        if len(names) < 2 or sorted(numbered) != list(range(len(names))):
            continue
        shapes = [tuple(parts[part].shape) for part in names]
        options = list(_divided(name, tuple(wholes[name].shape), names, shapes, fused(name)))
        if options:
            conversions[name] = options
    return conversions


def _divided(
    name: str,
    shape: Shape,
    names: Sequence[str],
    shapes: Sequence[Shape],
    fused: Sequence[int],
) -> Iterator[Conversion]:
    """Yield the ways in which ranks may divide a tensor of this shape."""
    ranks = f"on {len(names)} ranks"
    if all(of_part == shape for of_part in shapes):
        pieces = tuple([Piece(name, part, ()) for part in names])
        yield Conversion(pieces, f"entire {ranks}", key=("copies",))
        return
    for axis, extent in enumerate(shape):
        if any(len(s) != len(shape) for s in shapes):
            return
        others = {(*s[:axis], *s[axis + 1 :]) for s in shapes}
        extents = [s[axis] for s in shapes]
        if others != {(*shape[:axis], *shape[axis + 1 :])} or sum(extents) != extent:
            continue
        bounds = list(accumulate(extents, initial=0))
        pieces = tuple(
            [Piece(name, part, (cropped(shape, axis, *pair),))
             for part, pair in zip(names, pairwise(bounds), strict=True)]
        )  # fmt: skip
        yield Conversion(pieces, f"along the {lines_along(axis)} {ranks}", key=("ranks", axis))
        if sum(fused) == extent and len(set(extents)) == 1:
            yield from _each_fused(name, shape, axis, names, fused)


def _each_fused(
    name: str, shape: Shape, axis: int, names: Sequence[str], fused: Sequence[int]
) -> Iterator[Conversion]:
    """Yield the division of each fused part, such as a part of the gate above one of `up`."""
    count = len(names)
    if any(n % count for n in fused):
        return
    of_part = (*shape[:axis], shape[axis] // count, *shape[axis + 1 :])
    starts = list(accumulate(fused, initial=0))
    pieces = []
    for rank, part in enumerate(names):
        at = 0
        for start, n in zip(starts, fused, strict=False):
            width = n // count
            first = start + rank * width
            in_whole = cropped(shape, axis, first, first + width)
            pieces.append(Piece(name, part, (in_whole,), (cropped(of_part, axis, at, at + width),)))
            at += width
    words = f"with each of its {len(fused)} parts divided on {count} ranks"
    yield Conversion(tuple(pieces), words, is_regrouped=True, key=("fused", axis))


# --- flat parameters ------------------------------------------------------------------------------


class _Vector:
    """The vectors of all ranks, one after the other."""

    def __init__(self, names: Sequence[str], arrays: Sequence[Any]) -> None:
        self.names, self.arrays = names, arrays
        self.bounds = list(accumulate([array.shape[0] for array in arrays], initial=0))
        self.size = self.bounds[-1]

    def read(self, start: int, stop: int) -> Array:
        """Return a few elements."""
        return np.concatenate(
            [_floats(self.arrays[n][(slice(a, b),)]) for n, a, b in self.ranges(start, stop)]
            or [np.zeros(0)]
        )

    def ranges(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the number of a vector and a range in it, for a range of elements."""
        for n, (first, last) in enumerate(pairwise(self.bounds)):
            a, b = max(start, first), min(stop, last)
            if a < b:
                yield n, a - first, b - first


class _Parameter(NamedTuple):
    """A tensor that may be in a vector, and its first elements."""

    name: str
    shape: Shape
    first: Array

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class _Slot(NamedTuple):
    """A place of a parameter in a vector."""

    start: int
    parameter: _Parameter


class _Flat(NamedTuple):
    """The vectors of a module, the parameters in them, and the candidates."""

    vector: _Vector
    slots: Sequence[_Slot]
    candidates: Sequence[str]

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters, in their order."""
        return [slot.parameter.name for slot in self.slots]


def _floats(values: Any) -> Array:
    return np.asarray(dense_values(np.asarray(values)), np.float64).reshape(-1)


def _in_flat_parameters(
    wholes: Mapping[str, Any], parts: Mapping[str, Any]
) -> dict[str, list[Conversion]]:
    ranks: dict[str, dict[int, str]] = defaultdict(dict)
    for name, array in wholes.items():
        if len(array.shape) != 1:
            continue
        for reading in (*on_ranks(name), None):
            plain = name if reading is None else reading.name
            module = module_of_flat(plain)
            if module is not None:
                ranks[plain][0 if reading is None else reading.rank] = name
                break
    found: dict[str, _Flat] = {}
    for plain, numbered in ranks.items():
        names = [numbered[rank] for rank in sorted(numbered)]
        vector = _Vector(names, [wholes[name] for name in names])
        module = module_of_flat(plain) or ""
        front = f"{module}." if module else ""
        candidates = [
            _Parameter(name, tuple(array.shape), _start_of(array))
            for name, array in parts.items()
            if without_wrappers(name).startswith(front) and 0 < prod(array.shape) <= vector.size
        ][:_MOST_PARTS]
        slots = _walk(vector, candidates)
        if slots:
            found[plain] = _Flat(vector, slots, [candidate.name for candidate in candidates])
    unlike = _unlike_siblings(found)
    return {
        flat.vector.names[0]: [_conversion(flat, is_like_siblings=plain not in unlike)]
        for plain, flat in found.items()
    }


def _unlike_siblings(found: Mapping[str, _Flat]) -> set[str]:
    """Return the vectors whose tensors or order differ from the vectors of most layers."""
    used = {name for flat in found.values() for name in flat.parameters}
    siblings: dict[object, list[str]] = defaultdict(list)
    for plain in found:
        siblings[form_in_layer(plain)].append(plain)
    unlike = set()
    for group in siblings.values():
        orders = {plain: [*map(form_in_layer, found[plain].parameters)] for plain in group}
        forms = set().union(*orders.values())
        for plain, order in orders.items():
            agreeing = sum([_agree(order, orders[sibling]) for sibling in group]) - 1
            # Zeros instead of a small tensor look like padding.
            free = [name for name in found[plain].candidates if name not in used]
            if 2 * agreeing < len(group) - 1 or not forms.isdisjoint(map(form_in_layer, free)):
                unlike.add(plain)
    return unlike


def _agree(a: Sequence[object], b: Sequence[object]) -> bool:
    """Return whether two sequences have their common members in the same order."""
    return [member for member in a if member in b] == [member for member in b if member in a]


def _start_of(array: Any) -> Array:
    """Return the first elements of an array in C order."""
    shape, size = tuple(array.shape), prod(array.shape)
    flat = View(array, Reshaped(shape, (size,)))
    return _floats(flat[: min(size, _PROBED)])


def _walk(vector: _Vector, parameters: Sequence[_Parameter]) -> list[_Slot]:
    """Return the parameters in a vector in order, from its start to its end; empty if unknown.

    Tensors that begin alike, such as norms of ones, are tried in the order of their layers.
    """
    visited = 0
    beginnings = _Beginnings(parameters)
    numbers = {parameter.name: layer_of(parameter.name) for parameter in parameters}
    ordered = sorted(parameters, key=lambda parameter: numbers[parameter.name])
    order = {parameter.name: n for n, parameter in enumerate(ordered)}
    stack: list[tuple[int, tuple[_Slot, ...]]] = [(0, ())]
    while stack and visited < _MOST_VISITED:
        visited += 1
        place, slots = stack.pop()
        used = {slot.parameter.name for slot in slots}
        if slots and _is_padding(vector, place, vector.size, _MOST_AT_END):
            return list(slots)
        last = slots[-1].parameter.name if slots else ""
        layer = numbers.get(last, ())[:1]
        for gap in range(_MOST_ALIGNED):
            start = place + gap
            if gap and not _is_padding(vector, place, start, _MOST_ALIGNED):
                break
            probe = vector.read(start, min(start + _PROBED, vector.size))
            fitting = [
                p for p in beginnings.agreeing(probe)
                if p.name not in used and start + p.size <= vector.size
            ]  # fmt: skip
            # The last one on the stack is tried first.
            fitting.sort(key=lambda p: (numbers[p.name][:1] != layer, order[p.name]), reverse=True)
            stack += [(start + p.size, (*slots, _Slot(start, p))) for p in fitting]
            if fitting:
                break
    return []


class _Beginnings:
    """The first elements of many parameters, as rows of a table."""

    def __init__(self, parameters: Sequence[_Parameter]) -> None:
        self.parameters = parameters
        self.table = np.zeros((len(parameters), _PROBED))
        self.lengths = np.array([len(parameter.first) for parameter in parameters], np.int64)
        for row, parameter in zip(self.table, parameters, strict=True):
            row[: len(parameter.first)] = parameter.first

    def agreeing(self, probe: Array) -> list[_Parameter]:
        """Return the parameters that begin with some elements, apart from rounding."""
        count = len(probe)
        table = self.table[:, :count]
        with np.errstate(invalid="ignore"):
            is_near = np.abs(table - probe) <= _NEAR * np.maximum(np.abs(table), np.abs(probe))
        is_near |= np.isnan(table) & np.isnan(probe)
        is_near |= np.arange(count) >= self.lengths[:, None]
        fits = is_near.all(axis=1) & (self.lengths <= count)
        return [self.parameters[n] for n in np.flatnonzero(fits).tolist()]


def _is_padding(vector: _Vector, start: int, stop: int, most: int) -> bool:
    """Return whether elements are few and the padding of FSDP: zeros, or 42 as a mark."""
    if stop - start > most:
        return False
    values = vector.read(start, stop)
    return bool(np.all((values == 0) | (values == _MARK)))


def _conversion(flat: _Flat, *, is_like_siblings: bool) -> Conversion:
    vector, pieces = flat.vector, []
    for slot in flat.slots:
        shape, size = slot.parameter.shape, slot.parameter.size
        at = 0
        for n, start, stop in vector.ranges(slot.start, slot.start + size):
            crop = cropped(vector.arrays[n].shape, 0, start, stop)
            count = stop - start
            if count == size:
                piece = Piece(
                    vector.names[n], slot.parameter.name, (crop, Reshaped((size,), shape))
                )
            else:  # the rest is on another rank
                rows = (Reshaped(shape, (size,)), cropped((size,), 0, at, at + count))
                piece = Piece(vector.names[n], slot.parameter.name, (crop,), rows)
            pieces.append(piece)
            at += count
    return Conversion(
        tuple(pieces),
        "in one vector"
        if len(vector.names) == 1
        else f"in one vector over {len(vector.names)} ranks",
        is_in_order=is_like_siblings and are_in_order(flat.parameters),
        key=("flat",),
    )
