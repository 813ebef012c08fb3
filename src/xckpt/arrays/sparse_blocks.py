"""Sparse tensors whose stored elements are blocks: BSR, BSC, and coordinates of dense values."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.sparse import COOArray, CSCArray, CSRArray, SparseArray, StoredElements
from xckpt.storage import is_mapped

if TYPE_CHECKING:
    from xckpt.typing import Array


class SparseBlocksArray(SparseArray):
    """A tensor as dense blocks of one shape at given positions; they may overlap."""

    # The part `values` has a block for each position along its first axis. Positions are rows or
    # columns of blocks (`indptr`, `indices`), or coordinates along the first axes (`coords`), with
    # whole blocks along the others.
    __slots__ = ()

    def load(self) -> StoredElements:
        """Read and check all blocks, and sort their elements; see `SparseArray.load`."""
        count, *extents = self._shape("values")
        self._require_memory(count * prod(extents))
        if self.layout == "sparse_hybrid":
            starts = self._coordinates(count)
            extents = [1] * (self.ndim - len(extents)) + extents
        else:
            starts = self._compressed(count, extents)
        size = count * prod(extents)
        values = self._part("values", 0, size, size)
        coords = []
        for axis, (first, extent) in enumerate(zip(starts, extents, strict=True)):
            along = first[:, None] + np.arange(extent)
            after = self.ndim - axis - 1
            spread = along.reshape(count, *[1] * axis, extent, *[1] * after)
            coords.append(np.broadcast_to(spread, (count, *extents)).reshape(-1))
        ordered, values = self._in_order(coords, values)
        values = values.copy() if is_mapped(values) else values
        return StoredElements(0, self.shape[0], tuple(ordered), values)

    def _shape(self, role: str) -> tuple[int, ...]:
        """Return the shape of a part, which formats of such tensors state."""
        shape = self.shapes[role]
        if shape is None:
            raise self._broken(role, f"the shape of {role!r} is not known")
        return shape

    def _coordinates(self, count: int) -> list[Array]:
        """Return where blocks begin that are given by coordinates along the first axes."""
        axes = self._shape("coords")[0]
        stored = self._part("coords", 0, axes * count, axes * count).reshape(axes, count)
        for axis in range(axes):
            self._check_below(stored[axis], self.shape[axis], "coords")
        starts = [along.astype(np.int64) for along in stored]
        return starts + [np.zeros(count, np.int64)] * (self.ndim - axes)

    def _compressed(self, count: int, extents: list[int]) -> list[Array]:
        """Return where blocks begin that are given by rows, or by columns, of blocks."""
        outer = 0 if self.layout == "sparse_bsr" else 1
        grid = [size // extent for size, extent in zip(self.shape, extents, strict=True)]
        pointers = self._part("indptr", 0, grid[outer] + 1, grid[outer] + 1)
        if pointers[0] != 0 or pointers[-1] != count or (pointers[1:] < pointers[:-1]).any():
            raise self._broken("indptr", f"pointers do not ascend from 0 to {count}")
        indices = self._part("indices", 0, count, count)
        self._check_below(indices, grid[1 - outer], "indices")
        counts: Any = np.diff(pointers.astype(np.int64))
        along = np.repeat(np.arange(grid[outer]), counts)
        starts = [along * extents[outer], indices.astype(np.int64) * extents[1 - outer]]
        return starts if outer == 0 else starts[::-1]


#: The arrays of sparse tensors, by layout.
SPARSE_ARRAYS: dict[str, type[SparseArray]] = {
    "sparse_csr": CSRArray,
    "sparse_csc": CSCArray,
    "sparse_coo": COOArray,
    **dict.fromkeys(("sparse_bsr", "sparse_bsc", "sparse_hybrid"), SparseBlocksArray),
}
