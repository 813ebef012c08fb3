"""Order of the rows of a vocabulary, which a tokenizer numbers, of labels, and of layers."""

from __future__ import annotations

import warnings
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.derived import is_computed, selections_in, with_values
from xckpt.arrays.graph import lazy_of
from xckpt.arrays.keys import compose, take, whole
from xckpt.arrays.lazy import LazyArray, SlicedArray
from xckpt.arrays.moved_rows import are_moved, is_in_place
from xckpt.arrays.stacked import StackedArray
from xckpt.structure.numbering import number_in_place

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from xckpt.formats.plan import WantedTensor
    from xckpt.structure.model import Structure
    from xckpt.typing import Array

_TABLES = frozenset({"token_embedding", "output"})
_ROWS = "vocab"
_EXPERT, _ROUTER = "expert", "router"
# Numbers of tokens whose rows are looked at.
_MOST_CHECKED = 32


def are_rows_moved(
    tensors: Iterable[WantedTensor], structure: Structure, rows: str = _ROWS
) -> bool:
    """Return whether rows of a computed table of tokens, or of labels, are those of others."""
    for tensor, array, axis in _tables(tensors, structure, rows):
        selected = _slice_of(array, axis)
        if selected is not None and (selected.start or selected.step not in {None, 1}):
            return True
        if not hasattr(array, "dask"):
            continue
        if _are_selected(array, tensor.shape, rows):
            return True
        if is_computed(array) and axis is not None and array.size:
            return are_moved(array, axis)
    return False


def moved_tokens(
    tensors: Iterable[WantedTensor], structure: Structure, numbers: Collection[int]
) -> frozenset[int]:
    """Return the numbers of tokens whose rows are not certain to be the old ones.

    The rows of a table are known to have moved, as by `are_rows_moved`.
    """
    for tensor, array, axis in _tables(tensors, structure):
        if axis is not None:
            distinct = sorted({n for n in numbers if n < tensor.shape[axis]})
            checked = distinct[:_MOST_CHECKED]
            in_place = [n for n in checked if _is_row_in_place(array, axis, n)]
            return frozenset(distinct).difference(in_place)
    return frozenset()


def _is_row_in_place(array: Any, axis: int, row: int) -> bool:
    """Return whether a row of a table is the one that was there."""
    selected = _slice_of(array, axis)
    if selected is not None:
        return (selected.start or 0) + row * (selected.step or 1) == row
    return is_computed(array) and is_in_place(array, axis, row)


def _tables(
    tensors: Iterable[WantedTensor], structure: Structure, rows: str = _ROWS
) -> Iterator[tuple[WantedTensor, Any, int | None]]:
    """Yield the tables of tokens, or the tensors with such rows, and the axis of these."""
    for tensor in tensors:
        array: Any = getattr(tensor, "data", {}).get("data")
        info = structure[tensor.name]
        axes: list[str | None] = list(info.axes)
        if rows == _EXPERT and rows not in axes and structure.module_type(tensor.name) == _ROUTER:
            axes = [axis or rows for axis in axes]  # few experts leave the axis unnamed
        if info.slot in _TABLES if rows == _ROWS else rows in axes:
            yield tensor, array, axes.index(rows) if rows in axes else None


def _slice_of(array: Any, axis: int | None) -> slice | None:
    """Return what an array that is not computed selects of the rows of a stored one."""
    lazy = array if isinstance(array, LazyArray) else lazy_of(array)
    if not isinstance(lazy, SlicedArray) or axis is None:
        return None
    return [part for part in lazy.key if isinstance(part, slice)][axis]


def moved_routers(
    tensors: Collection[WantedTensor],
    structure: Structure,
    stored: Mapping[str, Collection[str]],
) -> list[str]:
    """Return the routers of a mixture if their rows are in another order than its experts."""
    # `stored` has the names of the tensors that a tensor is read or may be computed from.
    routers = {t.name: t for t in tensors if structure.module_type(t.name) == _ROUTER}
    experts = [tensor for tensor in tensors if tensor.name not in routers]
    numbers = {name: dict(structure.indices(name)).get(_EXPERT) for name in structure}
    renumbered = [
        name
        for name in numbers.keys() - routers.keys()
        if (number := numbers[name]) is not None and stored[name]
        if number not in (old := [number_in_place(n, name, number) for n in stored[name]])
        and None not in old
    ]
    have_moved = bool(renumbered) or are_rows_moved(experts, structure, _EXPERT)
    are_apart = have_moved != are_rows_moved(routers.values(), structure, _EXPERT)
    return [*routers] if are_apart else []


def is_computed_from(array: Any, names: Collection[str]) -> bool:
    """Return whether the first element of a computed array depends on tensors of these names."""

    def marks(_: str, lazy: LazyArray, key: Any) -> Array:
        base, within = lazy, whole(lazy.shape)
        if isinstance(lazy, SlicedArray):
            base, within = lazy.base, lazy.key
        grid = base.grid if isinstance(base, StackedArray) else ()
        is_marked = [origin.tensor.name in names for origin in base.tensor_origins]
        factors = np.ones(base.ndim * (1,), lazy.dtype)
        if len(is_marked) == prod(grid) and lazy.dtype.kind == "f":
            members = np.where(is_marked, np.nan, 1).astype(lazy.dtype)
            factors = members.reshape(*grid, *(base.ndim - len(grid)) * (1,))
        return np.array(take(np.broadcast_to(factors, base.shape), compose(within, key)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            marked = with_values(array, marks)[array.ndim * (0,)]
            return bool(np.isnan(np.asarray(marked.compute())))
        except (ArithmeticError, TypeError, ValueError):  # a function that does not take others
            return True


def _are_selected(array: Any, shape: Sequence[int], rows: str) -> bool:
    """Return whether rows were selected in another order."""
    for selection in chain.from_iterable(selections_in(array).values()):
        in_order = range(len(selection.positions))
        if selection.dim == rows and len(in_order) in shape:
            return not np.array_equal(selection.positions, in_order)
    return False
