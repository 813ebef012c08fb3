"""Moves of rows between stored tensors and a result."""

from __future__ import annotations

import warnings
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.arrays.derived import lazies_in, with_values
from xckpt.arrays.keys import compose, result_shape, take, whole
from xckpt.arrays.lazy import LazyArray, SlicedArray

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from xckpt.typing import Array

# Larger tables are computed in part.
_WHOLE_NBYTES = 64 << 20
# Few rows need several choices of marks.
_FEW_ROWS, _CHOICES_OF_FEW = 64, 8


def random_rows(count: int) -> list[Array]:
    """Return which of some rows are marked: half of them, in several ways if they are few."""
    choices = _CHOICES_OF_FEW if count <= _FEW_ROWS else 1
    return [np.random.default_rng(seed).random(count) < 0.5 for seed in range(choices)]


def are_moved(array: Any, axis: int, mark: Callable[[int], list[Array]] = random_rows) -> bool:
    """Return whether a stored row becomes another row of a computed table, and not the same."""
    by_file = _tables_by_file(array, axis)
    blocks: list[Any] = [...]
    if array.nbytes * len(by_file) > _WHOLE_NBYTES:
        count = array.numblocks[axis]
        blocks = [(slice(None),) * axis + (n,) for n in sorted({0, count // 2, count - 1})]
    for of_file in by_file.values():
        count = min(table.rows for table in of_file.values())
        choices = mark(count)
        marked = [with_values(array, partial(_marks, of_file, rows)) for rows in choices]
        starts = np.cumsum([0, *array.chunks[axis]])
        for block in blocks:
            first = 0 if block is ... else int(starts[block[axis]])
            pairs: set[tuple[bool, bool]] = set()
            for values, rows in zip(marked, choices, strict=True):
                pairs |= _marks_in(values.blocks[block], axis, rows[first:])
            if {(True, False), (False, True)} <= pairs:
                return True
    return False


def is_in_place(array: Any, axis: int, row: int) -> bool:
    """Return whether a row of a computed table depends on the stored ones of its number."""
    by_file = _tables_by_file(array, axis)
    is_same = []
    for tables in by_file.values():
        mark = np.arange(min(table.rows for table in tables.values())) == row
        marked = with_values(array, partial(_marks, tables, mark))
        of_row = marked[(slice(None),) * axis + (slice(row, row + 1),)]
        is_same.append((True, True) in _marks_in(of_row, axis, np.ones(1, bool)))
    return bool(is_same) and all(is_same)


def _tables_by_file(array: Any, axis: int) -> dict[str, dict[str, _Table]]:
    """Return the stored tables of the same axes that an array is computed from."""
    by_file: dict[str, dict[str, _Table]] = defaultdict(dict)
    for name, lazy in lazies_in(array).items():
        if (table := _Table.of(lazy, axis, array.ndim)) is not None:
            by_file[table.base.source.name][name] = table
    return by_file


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


def _marks(
    tables: Mapping[str, _Table], is_marked: Array, name: str, lazy: LazyArray, key: Any
) -> Array:
    """Return ones, and NaN in the marked rows of some tables."""
    ones = np.ones(result_shape(lazy.shape, key), lazy.dtype)
    if name not in tables:
        return ones
    base, within, axis, count = tables[name]
    rows = np.ones(count, lazy.dtype)
    rows[: len(is_marked)][is_marked] = np.nan
    rows = rows.reshape([-1 if n == axis else 1 for n in range(base.ndim)])
    marked: Array = ones * take(np.broadcast_to(rows, base.shape), compose(within, key))
    return marked
