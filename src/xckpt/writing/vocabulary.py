"""Order of the rows of a vocabulary, which a tokenizer numbers, of labels, and of layers."""

from __future__ import annotations

import warnings
from functools import partial
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.arrays.graph import is_computed, lazies_in, lazy_of, selections_in, with_values
from xckpt.arrays.keys import compose, result_shape, take, whole
from xckpt.arrays.lazy import LazyArray, SlicedArray
from xckpt.arrays.stacked import StackedArray
from xckpt.structure.numbering import parse_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from xckpt.formats.plan import WantedTensor
    from xckpt.structure.model import Structure
    from xckpt.typing import Array

_TABLES = frozenset({"token_embedding", "output"})
_ROWS = "vocab"
_EXPERT, _ROUTER = "expert", "router"
# Larger tables are computed in part.
_WHOLE_NBYTES = 64 << 20
# One choice of marks may not tell few rows apart.
_FEW_ROWS, _SEEDS_OF_FEW = 64, 8


def are_rows_moved(
    tensors: Iterable[WantedTensor], structure: Structure, rows: str = _ROWS
) -> bool:
    """Return whether rows of a computed table of tokens, or of labels, are those of others."""
    for tensor in tensors:
        array: Any = getattr(tensor, "data", {}).get("data")
        info = structure[tensor.name]
        axes: list[str | None] = list(info.axes)
        if rows == _EXPERT and rows not in axes and structure.module_type(tensor.name) == _ROUTER:
            axes = [axis or rows for axis in axes]  # of too few experts to tell
        if not (info.slot in _TABLES if rows == _ROWS else rows in axes):
            continue
        lazy = array if isinstance(array, LazyArray) else lazy_of(array)
        if isinstance(lazy, SlicedArray) and rows in axes:
            kept = [part for part in lazy.key if isinstance(part, slice)][axes.index(rows)]
            if kept.start or kept.step not in {None, 1}:
                return True
        if not hasattr(array, "dask"):
            continue
        if _are_selected(array, tensor.shape, rows):
            return True
        if is_computed(array) and rows in axes and array.size:
            return _are_moved(array, axes.index(rows))
    return False


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
        if number not in (old := [_number_in(n, name, number) for n in stored[name]])
        and None not in old
    ]
    have_moved = bool(renumbered) or are_rows_moved(experts, structure, _EXPERT)
    are_apart = have_moved != are_rows_moved(routers.values(), structure, _EXPERT)
    return [*routers] if are_apart else []


def _number_in(stored: str, name: str, number: int) -> int | None:
    """Return the number of a stored tensor in the place of a number in a name of the same form."""
    before, after = parse_name(stored), parse_name(name)
    places = [place for place, text in enumerate(after.indices) if int(text) == number]
    is_same = before.template == after.template
    return int(before.indices[places[-1]]) if is_same and places else None


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


def _are_moved(array: Any, axis: int) -> bool:
    """Return whether a stored row becomes another row of a computed table, and not the same."""
    tables = {
        name: table
        for name, lazy in lazies_in(array).items()
        if (table := _Table.of(lazy, axis, array.ndim)) is not None
    }
    files = {table.base.source.name for table in tables.values()}
    blocks: list[Any] = [...]
    if array.nbytes * len(files) > _WHOLE_NBYTES:
        count = array.numblocks[axis]
        blocks = [(slice(None),) * axis + (n,) for n in sorted({0, count // 2, count - 1})]
    for file in files:
        of_file = {name: t for name, t in tables.items() if t.base.source.name == file}
        count = min(table.rows for table in of_file.values())
        starts = np.cumsum([0, *array.chunks[axis]])
        seeds = range(_SEEDS_OF_FEW if count <= _FEW_ROWS else 1)
        marked = [with_values(array, partial(_marks, of_file, seed)) for seed in seeds]
        for block in blocks:
            first = 0 if block is ... else int(starts[block[axis]])
            pairs: set[tuple[bool, bool]] = set()
            for seed in seeds:
                is_marked = _is_marked(count, seed)[first:]
                pairs |= _marks_in(marked[seed].blocks[block], axis, is_marked)
            if {(True, False), (False, True)} <= pairs:
                return True
    return False


def _marks_in(block: Any, axis: int, is_marked: Array) -> set[tuple[bool, bool]]:
    """Return whether rows have marks, and whether they had some: all pairs of these."""
    # Sums over all rows have NaN in all of them, and functions that replace it in none.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            values = np.asarray(block.compute())
        except (ArithmeticError, TypeError, ValueError):  # a function that does not take others
            return set()
        is_nan = np.isnan(values).any(axis=tuple(n for n in range(values.ndim) if n != axis))
    return {*zip(is_nan.tolist(), is_marked.tolist(), strict=False)}


class _Table(NamedTuple):
    """A lazy array that is, or is selected from, a stored table."""

    base: LazyArray
    within: tuple[Any, ...]
    axis: int  # of the rows
    rows: int

    @classmethod
    def of(cls, lazy: LazyArray, axis: int, ndim: int) -> _Table | None:
        """Return the table of a result with the same axes; None for others."""
        base, within = lazy, whole(lazy.shape)
        if isinstance(lazy, SlicedArray):
            base, within = lazy.base, lazy.key
        tensor = next((origin.tensor for origin in lazy.tensor_origins), None)
        if tensor is None or len(tensor.shape) != ndim or lazy.dtype.kind != "f":
            return None
        count, axis = tensor.shape[axis], axis + base.ndim - ndim  # of a stack
        return cls(base, within, axis, count) if base.shape[axis] == count else None


def _marks(tables: Mapping[str, _Table], seed: int, name: str, lazy: LazyArray, key: Any) -> Array:
    """Return ones, and NaN in half of the rows of some tables."""
    ones = np.ones(result_shape(lazy.shape, key), lazy.dtype)
    if name not in tables:
        return ones
    base, within, axis, count = tables[name]
    rows = np.where(_is_marked(count, seed), np.nan, 1).astype(lazy.dtype)
    rows = rows.reshape([-1 if n == axis else 1 for n in range(base.ndim)])
    marked: Array = ones * take(np.broadcast_to(rows, base.shape), compose(within, key))
    return marked


def _is_marked(count: int, seed: int) -> Array:
    return np.random.default_rng(seed).random(count) < 0.5
