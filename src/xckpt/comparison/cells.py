"""Differences between two tensors in each channel or block."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.streams import LEAF
from xckpt.comparison.measure import Comparison, as_floats
from xckpt.comparison.pair_loops import compare_cells
from xckpt.errors import shown
from xckpt.scan.entries import Entry, no_dimension
from xckpt.scan.scanning import MergeTree

if TYPE_CHECKING:
    from xckpt.typing import Array

# Every axis is cut into blocks: of one element, of some neighbours, or of its whole length if it is
# reduced completely. The products of blocks are the cells of a grid.

#: Dimensions to reduce: names or positions, optionally with the number of neighbours to reduce.
Reduced = Hashable | Iterable[Hashable] | Mapping[Hashable, int | None]

# Columns of a table: numbers of elements, sums, and the largest difference.
_COLUMNS = 10
#: Bytes per cell while tables are merged.
CELL_NBYTES = 4 * 8 * _COLUMNS


@dataclass(frozen=True, slots=True)
class ChannelGrid:
    """The division of the elements of a tensor into cells."""

    shape: tuple[int, ...]
    #: Extent of a cell along each axis.
    blocks: tuple[int, ...]
    #: Names and sizes of the dimensions that remain after the reduction.
    dims: tuple[Hashable, ...]
    extents: tuple[int, ...]

    def runs(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shape and blocks after merging neighbouring axes that allow it."""
        shape, blocks = [1], [1]
        for size, block in zip(self.shape, self.blocks, strict=True):
            both_kept = blocks[-1] == 1 == block
            both_reduced = blocks[-1] == shape[-1] and block == size
            if both_kept or both_reduced:
                shape[-1] *= size
                blocks[-1] *= block
            else:
                shape.append(size)
                blocks.append(block)
        return tuple(shape), tuple(blocks)


def reduced_lengths(dim: Reduced, entries: Sequence[Entry]) -> dict[Hashable, int | None]:
    """Return the dimensions to reduce, each with its number of neighbours; None reduces all."""
    if isinstance(dim, Mapping):
        lengths: dict[Hashable, int | None] = dict(dim)
        for key, length in lengths.items():
            is_number = isinstance(length, int) and not isinstance(length, bool)
            if length is not None and not (is_number and length >= 1):
                text = "a number of neighbours is a whole number of at least 1, or None for all"
                raise ValueError(f"dim={{{key!r}: {length!r}}}: {text}")
    elif isinstance(dim, Iterable) and not isinstance(dim, str):
        lengths = dict.fromkeys(dim)
    else:
        lengths = {dim: None}
    stacked = {str(name) for entry in entries for name in entry.dims}
    reducible = {str(name) for entry in entries for name in entry.variable.dims} - stacked
    for key in lengths:
        if isinstance(key, bool) or not isinstance(key, int | str):
            raise TypeError(f"dim takes names and positions of dimensions, not {key!r}")
        if isinstance(key, int) or key in reducible:
            continue
        if key in stacked:
            raise ValueError(f"tensors are stacked along {shown(key)}, and are compared one by one")
        raise ValueError(no_dimension(key, reducible | stacked))
    return lengths


def grid_of(entry: Entry, lengths: Mapping[Hashable, int | None]) -> ChannelGrid | None:
    """Return the cells of the tensors of a variable; None without dimensions to reduce."""
    tensor_dims = [dim for dim in entry.variable.dims if dim not in entry.dims]
    shape = tuple([entry.variable.sizes[dim] for dim in tensor_dims])
    reduced: dict[int, int | None] = {}
    for key, length in lengths.items():
        if isinstance(key, int):
            if -len(tensor_dims) <= key < len(tensor_dims):
                reduced[key % len(tensor_dims)] = length
        elif key in tensor_dims:
            reduced[tensor_dims.index(key)] = length
    if not reduced:
        return None
    blocks, dims, extents = [], [], []
    for axis, size in enumerate(shape):
        length = reduced.get(axis, 1)
        blocks.append(max(1, size if length is None else min(length, size)))
        if length is not None:
            dims.append(f"{tensor_dims[axis]}_block" if axis in reduced else tensor_dims[axis])
            extents.append(-(-size // blocks[-1]))
    return ChannelGrid(shape, tuple(blocks), tuple(dims), tuple(extents))


class Channels(Comparison):
    """Counts and sums over pairs of elements, for each cell of a grid."""

    #: Large, because the table of each leaf may be large too.
    leaf = 32 * LEAF

    def __init__(self, kinds: tuple[str, str], size: int, grid: ChannelGrid) -> None:
        super().__init__(kinds, size)
        self.shape, self.blocks = grid.runs()
        self.cells = prod(grid.extents)
        extents = [-(-n // block) for n, block in zip(self.shape, self.blocks, strict=True)]
        self.strides = [prod(extents[axis + 1 :]) for axis in range(len(extents))]
        self.tree: MergeTree[Any] = MergeTree(_add_tables, (0, np.zeros((0, _COLUMNS))))

    @classmethod
    def begin(cls, stream: Any, argument: Any) -> Channels:
        """Return an empty comparison for a stream of pairs; the argument is a `ChannelGrid`."""
        return cls(stream.kinds, stream.size, argument)

    def table(self) -> Array:
        """Return the counts and sums of each cell, once all elements were added."""
        first, rows = self.tree.total()
        table = np.zeros((self.cells, _COLUMNS))
        table[first : first + len(rows)] = rows
        return table

    def update(self, start: int, *columns: Array) -> None:
        """Add pairs."""
        self.count += len(columns[0])
        for offset in range(0, len(columns[0]), self.leaf):
            sides = [column[offset : offset + self.leaf] for column in columns]
            with np.errstate(invalid="ignore", over="ignore"):
                node = self._node(start + offset, *sides)
            self.tree.add(0, (start + offset) // self.leaf, node)

    def _node(self, start: int, a: Array, b: Array) -> tuple[int, Array]:
        """Return the first of the cells that a leaf overlaps, and the table of these cells."""
        size, block = self.shape[-1], self.blocks[-1]
        (line, along), (last, end) = divmod(start, size), divmod(start + len(a) - 1, size)
        lines = np.arange(line, last + 1)
        bases = np.zeros(len(lines), np.int64)
        for axis in reversed(range(len(self.shape) - 1)):
            lines, coordinates = np.divmod(lines, self.shape[axis])
            bases += coordinates // self.blocks[axis] * self.strides[axis]
        low, high = (along // block, end // block) if line == last else (0, (size - 1) // block)
        first = int(bases.min()) + low
        table = np.zeros((int(bases.max()) + high + 1 - first, _COLUMNS))
        compare_cells(*self._numbers(a, b), along, size, block, bases - first, table)
        return first, table

    def _numbers(self, a: Array, b: Array) -> tuple[Array, Array]:
        """Return both sides as floats of one type."""
        x, y = (as_floats(side, kind) for side, kind in zip((a, b), self.kinds, strict=True))
        return (x, y) if x.dtype == y.dtype else (x.astype(np.float64), y.astype(np.float64))


def _add_tables(a: tuple[int, Array], b: tuple[int, Array]) -> tuple[int, Array]:
    """Add two tables of cells, which are given with the numbers of their first cells."""
    tables = [table for table in (a, b) if len(table[1])]
    if len(tables) < 2:
        return tables[0] if tables else a
    first = min(start for start, _ in tables)
    total = np.zeros((max(start + len(rows) for start, rows in tables) - first, _COLUMNS))
    for start, rows in tables:
        target = total[start - first : start - first + len(rows)]
        target[:, :-1] += rows[:, :-1]
        np.maximum(target[:, -1], rows[:, -1], out=target[:, -1])
    return first, total
