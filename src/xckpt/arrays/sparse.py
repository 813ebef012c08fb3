"""Sparse tensors: blocks of rows, validated before anything is scattered by their indices."""

from __future__ import annotations

import sys
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.elements import elements
from xckpt.arrays.lazy import RowBlockArray
from xckpt.dtypes import decoded_dtype, nbytes_of
from xckpt.errors import FormatError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.arrays.parts import PartReader
    from xckpt.index import Tensor

__all__ = ["COOArray", "CSRArray"]

Array = np.ndarray[Any, np.dtype[Any]]


class SparseArray(RowBlockArray):
    """What CSR and COO share: typed parts, and scattering into a dense or sparse block.

    Parameters
    ----------
    tensor : Tensor
        With the layout's parts.
    readers : mapping of str to PartReader
        Their bytes, by role.
    sparse : bool
        Whether to give `sparse.COO` blocks instead of dense ones.
    """

    __slots__ = ("readers", "shapes", "sparse", "strict")

    def __init__(
        self, tensor: Tensor, readers: Mapping[str, PartReader], *, sparse: bool = False
    ) -> None:
        source = readers["values"].source
        super().__init__(tensor.name, source, tensor.shape, decoded_dtype(tensor.dtype))
        self.readers = dict(readers)
        self.shapes = {role: part.shape for role, part in tensor.parts.items()}
        self.sparse = sparse
        self.strict = tensor.strict

    def empty(self, shape: tuple[int, ...]) -> Any:
        if not self.sparse:
            return super().empty(shape)
        import sparse

        coords = np.empty((len(shape), 0), np.int64)
        return sparse.COO(coords, np.empty(0, self.dtype), shape=shape)

    def _part(self, role: str, start: int, stop: int, count: int) -> Array:
        """Give elements `start` to `stop` of a part that has `count` of them."""
        reader = self.readers[role]
        part = reader.part
        size = nbytes_of(part.dtype, 1)
        data = reader.read(start * size, stop * size, count * size)
        return elements(data, part.dtype, decode=True, byteorder=part.byteorder, strict=self.strict)

    def _scatter(self, shape: tuple[int, ...], coords: list[Array], values: Array) -> Any:
        """Put values at coordinates that are known to be inside `shape`; repeated ones add up."""
        if prod(shape) * self.dtype.itemsize > sys.maxsize:
            raise UnsupportedError(
                f"{shape} elements are too many for one array", hint="Select fewer rows"
            )
        flat = np.ravel_multi_index(coords, shape)
        # Sorted and unique is the common case, and the cheapest to tell.
        if flat.size > 1 and not (flat[1:] > flat[:-1]).all():
            flat, values = self._merged(flat, values)
        if self.sparse:
            import sparse

            where = np.stack(np.unravel_index(flat, shape))
            return sparse.COO(where, values, shape=shape, has_duplicates=False, sorted=True)
        block = np.zeros(prod(shape), self.dtype)
        block[flat] = values
        return block.reshape(shape)

    def _merged(self, flat: Array, values: Array) -> tuple[Array, Array]:
        unique, inverse = np.unique(flat, return_inverse=True)
        if self.strict and unique.size != flat.size:
            raise FormatError("an element is given more than once", rule="LayoutData")
        total = np.zeros(unique.size, values.dtype)
        np.add.at(total, inverse, values)
        return unique, total

    def _check_below(self, indices: Array, bound: int, role: str) -> None:
        """Refuse indices outside their axis, comparing as unsigned before any cast to signed."""
        if indices.size == 0:
            return
        highest = int(indices.max())
        lowest = int(indices.min())
        if highest >= bound or lowest < 0:
            bad = highest if highest >= bound else lowest
            raise FormatError(
                f"index {bad} in {role!r} is outside its axis of size {bound}",
                offset=self.readers[role].part.offset,
                rule="LayoutData",
            )


class CSRArray(SparseArray):
    """A matrix in compressed sparse rows; a block of rows reads only its own non-zeros."""

    __slots__ = ()

    def rows(self, start: int, stop: int) -> Any:
        """Make a block of rows."""
        nrows, ncols = self.shape
        indptr = self._part("indptr", start, stop + 1, nrows + 1)
        last = self._part("indptr", nrows, nrows + 1, nrows + 1)
        count = self._count(int(last[0]))
        self._check_indptr(indptr, count, first=start == 0)
        low, high = int(indptr[0]), int(indptr[-1])
        columns = self._part("indices", low, high, count)
        self._check_below(columns, ncols, "indices")
        values = self._part("values", low, high, count)
        counts = (indptr[1:] - indptr[:-1]).astype(np.int64)
        row = np.repeat(np.arange(stop - start), counts)
        columns = columns.astype(np.int64)
        if self.strict:
            self._check_increasing(row, columns)
        return self._scatter((stop - start, ncols), [row, columns], values)

    def _count(self, last: int) -> int:
        """Check the last row pointer, which is the number of stored elements."""
        for role in ("indices", "values"):
            shape = self.shapes[role]
            if shape is not None and last != shape[0]:
                raise FormatError(
                    f"the last row pointer is {last}, but {role!r} has {shape[0]} elements",
                    offset=self.readers["indptr"].part.offset,
                    rule="LayoutData",
                )
        if last > prod(self.shape):
            raise FormatError(
                f"the last row pointer is {last}, more than the matrix has elements",
                offset=self.readers["indptr"].part.offset,
                rule="LayoutData",
            )
        return last

    def _check_indptr(self, indptr: Array, count: int, *, first: bool) -> None:
        offset = self.readers["indptr"].part.offset
        if first and indptr[0] != 0:
            raise FormatError(
                f"the first row pointer is {indptr[0]}, not 0", offset=offset, rule="LayoutData"
            )
        if (indptr[1:] < indptr[:-1]).any() or indptr[-1] > count or indptr[0] < 0:
            raise FormatError("row pointers decrease", offset=offset, rule="LayoutData")

    def _check_increasing(self, row: Array, columns: Array) -> None:
        same_row = row[1:] == row[:-1]
        if (columns[1:][same_row] <= columns[:-1][same_row]).any():
            raise FormatError(
                "column indices do not increase within a row",
                offset=self.readers["indices"].part.offset,
                rule="LayoutData",
            )


class COOArray(SparseArray):
    """A tensor as a list of coordinates, one row of `coords` for each axis."""

    __slots__ = ()

    def rows(self, start: int, stop: int) -> Any:
        """Make a block of rows; each block scans all coordinates, which are in no order."""
        count = self._count()
        stored = self._part("coords", 0, self.ndim * count, self.ndim * count)
        coords = stored.reshape(self.ndim, count)
        for axis, size in enumerate(self.shape):
            self._check_below(coords[axis], size, "coords")
        inside = np.flatnonzero((coords[0] >= start) & (coords[0] < stop))
        chosen = [axis[inside].astype(np.int64) for axis in coords]
        chosen[0] -= start
        values = self._part("values", 0, count, count)[inside]
        return self._scatter((stop - start, *self.shape[1:]), chosen, values)

    def _count(self) -> int:
        values, coords = self.shapes["values"], self.shapes["coords"]
        if values is not None:
            return values[0]
        if coords is not None:
            return coords[1]
        reader = self.readers["values"]
        size = nbytes_of(reader.part.dtype, 1)
        # More elements than the tensor has positions could only be repetitions.
        return reader.count_nbytes(prod(self.shape) * size) // size
