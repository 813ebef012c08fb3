"""Sparse tensors: the stored elements of rows, checked, and selections of them.

A selection picks stored elements before it allocates an array, because a file can claim any shape
at no cost. Lists of coordinates, which are unordered, and parts that are compressed as one stream
are read as a whole and sorted once. Small ones are cached.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections import deque
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.arrays.dense import elements
from xckpt.arrays.keys import chunks_along_slowest, contiguous_run, result_shape, take
from xckpt.arrays.lazy import LazyArray
from xckpt.elements import decoded_dtype, nbytes_of
from xckpt.errors import FormatError, TooLargeError
from xckpt.storage import is_mapped
from xckpt.storage.limits import Locks, Pool, require_memory

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

    from xckpt.arrays.keys import AxisKey, Chunks
    from xckpt.arrays.parts import PartReader
    from xckpt.index import Tensor
    from xckpt.typing import Array

# The number of chunks is at most 256, plus one for each stored MiB, however large the shape is.
_MOST_CHUNKS = 256
_NBYTES_PER_CHUNK = 1 << 20

# Size of the cache of sorted elements, for all tensors in this process.
_KEPT_NBYTES = 128 << 20

# Block sizes for reading all elements: rows, stored elements, and bytes of a part.
_MOST_ROWS = 1 << 17
_MOST_ELEMENTS = 1 << 18
_PIECE_NBYTES = 1 << 20

_TOGETHER = "So many stored elements have to be in memory together"


class StoredElements(NamedTuple):
    """The stored elements of some rows, unique and sorted by position."""

    start: int  # half-open range of rows
    stop: int
    coords: tuple[Array, ...]  # positions in the tensor along each axis, as int64
    values: Array

    @property
    def nbytes(self) -> int:
        """Size of the coordinates and values in memory."""
        return sum(array.nbytes for array in (*self.coords, self.values))

    def rows(self, start: int, stop: int) -> StoredElements:
        """Return the elements of a smaller range of rows."""
        low, high = np.searchsorted(self.coords[0], (start, stop))
        coords = tuple([along[low:high] for along in self.coords])
        return StoredElements(start, stop, coords, self.values[low:high])


_kept: Pool[StoredElements] = Pool(_KEPT_NBYTES, lambda elements: elements.nbytes)
# Chunks that are read in parallel wait while one of them reads the elements of the tensor.
_loading = Locks(16)


def require_sparse() -> Any:
    """Return the package pydata/sparse."""
    try:
        import sparse
    except ImportError as error:
        raise ImportError("sparse=True needs sparse: pip install 'xckpt[sparse]'") from error
    return sparse


class SparseArray(LazyArray):
    """Base class of sparse tensors, whose selections are dense arrays or `sparse.COO`."""

    __slots__ = ("layout", "readers", "shapes", "sparse", "strict")

    advice = "Select less of it at once, or open it with sparse=True"

    def __init__(
        self, tensor: Tensor, readers: Mapping[str, PartReader], *, sparse: bool = False
    ) -> None:
        source = readers["values"].source
        super().__init__(tensor.name, source, tensor.shape, decoded_dtype(tensor.dtype))
        self.layout = tensor.layout
        self.readers = dict(readers)
        self.shapes = {role: part.shape for role, part in tensor.parts.items()}
        self.sparse = sparse
        self.strict = tensor.strict

    @property
    def part_readers(self) -> Collection[PartReader]:
        """See `LazyArray.part_readers`."""
        return self.readers.values()

    def stored(self, start: int, stop: int) -> StoredElements:
        """Return the stored elements of some rows."""
        return self._whole().rows(start, stop)

    def blocks(self) -> Iterator[StoredElements]:
        """Yield all stored elements in order, in blocks of whole rows."""
        yield self.load()

    @abstractmethod
    def load(self) -> StoredElements:
        """Read all stored elements at once."""

    @property
    def nbytes_stored(self) -> int:
        """Size of all parts, decoded if the file states the decoded size."""
        parts = [reader.part for reader in self.readers.values()]
        return sum([part.decoded_nbytes or part.nbytes for part in parts])

    @property
    def reads_whole(self) -> bool:
        """True if reading any row means reading all, unless they are cached."""
        return True

    @property
    def nbytes_read(self) -> int:
        """Approximate number of bytes that the smallest selection reads."""
        if not self.reads_whole:
            return self.nbytes_stored // max(1, self.shape[0])
        return self.nbytes_stored if self.nbytes_stored > _KEPT_NBYTES else 0

    def chunks(self, target: int) -> Chunks:
        """Return chunks, each at least as large as its read, and of a bounded number."""
        if not self.sparse and self.is_expanded:
            return tuple((size,) for size in self.shape)
        max_chunks = _MOST_CHUNKS + self.nbytes_stored // _NBYTES_PER_CHUNK
        target = max(target, self.nbytes_read, self.nbytes // max_chunks)
        return chunks_along_slowest(self.shape, self.dtype.itemsize, target)

    def empty(self, shape: tuple[int, ...]) -> Any:
        """Return an array without elements; see `LazyArray.empty`."""
        if not self.sparse:
            return super().empty(shape)
        coords = np.empty((len(shape), 0), np.int64)
        return require_sparse().COO(coords, np.empty(0, self.dtype), shape=shape)

    def select(self, key: tuple[AxisKey, ...]) -> Any:
        """Return a selection; see `LazyArray.select`."""
        shape = result_shape(self.shape, key)
        if 0 in shape:
            if 0 in self.shape:  # its parts may be damaged all the same
                deque(self.blocks(), maxlen=0)
            return self.empty(shape)
        run = contiguous_run(self.shape[:1], key[:1])
        coords, values = self.stored(run.start, run.start + run.shape[0])[2:]
        places: list[Array] = []
        extents: list[int] = []
        remaining: list[AxisKey] = []
        for axis, entry in enumerate(key):
            selected = _along(coords[axis], entry, self.shape[axis])
            mask, place = selected.mask, selected.coords
            if mask is not None and not mask.all():
                coords = tuple([along[mask] for along in coords])
                places = [along[mask] for along in places]
                values, place = values[mask], place[mask]
            if selected.extent is not None:
                places.append(place)
                extents.append(selected.extent)
                remaining.append(selected.remaining)
        if not extents:
            return values[0] if len(values) else self.dtype.type(0)
        return take(self._block(tuple(extents), places, values), remaining)

    def _block(self, shape: tuple[int, ...], places: Sequence[Array], values: Array) -> Any:
        """Return a block with values at unique places inside `shape`."""
        count = prod(shape)
        if not self.sparse:
            require_memory(count * self.dtype.itemsize, self.advice)
            block = np.zeros(count, self.dtype)
            block[flat_positions(places, shape)] = values
            return block.reshape(shape)
        if count > sys.maxsize:
            reason = f"{count} elements are too many for one array"
            raise TooLargeError(reason, rule="Memory", hint="Select less of it at once")
        flat = flat_positions(places, shape)
        if (flat[1:] < flat[:-1]).any():  # an axis is reversed
            order = np.argsort(flat)
            places, values = [along[order] for along in places], values[order]
        coords = np.stack(places)
        # A copy, so that changes to this result do not reach the cached elements.
        values = values if values.flags.owndata else values.copy()
        return require_sparse().COO(coords, values, shape=shape, has_duplicates=False, sorted=True)

    def _part(self, role: str, start: int, stop: int, count: int) -> Array:
        """Return elements `start` to `stop` of a part that has `count` of them."""
        size = nbytes_of(self.readers[role].part.dtype, 1)
        return self.typed(role, self.readers[role].read(start * size, stop * size, count * size))

    def typed(self, role: str, data: memoryview) -> Array:
        """Return the elements in bytes of a part."""
        part = self.readers[role].part
        return elements(data, part.dtype, decode=True, byteorder=part.byteorder, strict=self.strict)

    def _require_memory(self, count: int) -> None:
        """Raise if memory cannot hold the elements twice and their order, as sorting needs."""
        require_memory(count * (16 * self.ndim + 2 * self.dtype.itemsize + 8), _TOGETHER)

    def _whole(self) -> StoredElements:
        """Return all stored elements, from the cache if the tensor is small."""
        parts: Hashable = tuple(
            (role, reader.source.name, reader.source.identity, reader.part, reader.verify)
            for role, reader in self.readers.items()
        )
        key = (type(self), self.shape, self.strict, parts)
        with _loading.of(key):
            return _kept.get(key, self.load)

    def _in_order(self, coords: Sequence[Array], values: Array) -> tuple[list[Array], Array]:
        """Sort elements by position, and add up duplicates."""
        keys = list(coords)
        if prod(self.shape) <= sys.maxsize:
            keys = [flat_positions(coords, self.shape)]
        # Sorted and unique is the common case, and cheap to detect.
        if len(keys) == 1 and (keys[0][1:] > keys[0][:-1]).all():
            return list(coords), values
        order = np.lexsort(keys[::-1])
        coords, values = [along[order] for along in coords], values[order]
        is_new = np.ones(len(values), np.bool_)
        is_new[1:] = np.any([key[order][1:] != key[order][:-1] for key in keys], axis=0)
        if is_new.all():
            return coords, values
        if self.strict:
            raise FormatError("an element is given more than once", rule="LayoutData")
        total = np.zeros(np.count_nonzero(is_new), values.dtype)
        np.add.at(total, np.cumsum(is_new) - 1, values)
        return [along[is_new] for along in coords], total

    def _check_below(self, indices: Array, bound: int, role: str) -> None:
        """Raise if an index is outside its axis; compare before unsigned ones become signed."""
        for index in (indices.max(), indices.min()) if indices.size else ():
            if not 0 <= int(index) < bound:
                raise self._broken(
                    role, f"index {index} in {role!r} is outside its axis of size {bound}"
                )

    def _broken(self, role: str, reason: str) -> FormatError:
        return FormatError(reason, offset=self.readers[role].part.offset, rule="LayoutData")


def flat_positions(coords: Sequence[Array], shape: Sequence[int]) -> Array:
    """Return positions in the flat array. `numpy.ravel_multi_index` limits the number of axes."""
    flat = coords[0]
    for along, extent in zip(coords[1:], shape[1:], strict=True):
        flat = flat * extent + along
    return flat


class _Selected(NamedTuple):
    """The elements along an axis that the entry of an index selects."""

    mask: Array | None  # None if all are
    coords: Array  # in the result
    extent: int | None  # of the result; None if the axis is dropped
    remaining: AxisKey = slice(None)  # the index to apply to the result


def _along(coords: Array, entry: AxisKey, length: int) -> _Selected:
    """Apply the entry of an index to the coordinates along its axis."""
    if isinstance(entry, int):
        return _Selected(coords == entry, coords, None)
    if isinstance(entry, slice):
        steps = range(length)[entry]
        if steps == range(length):
            return _Selected(None, coords, length)
        mask = (coords >= min(steps[0], steps[-1])) & (coords <= max(steps[0], steps[-1]))
        if abs(entry.step) > 1:
            mask &= (coords - entry.start) % entry.step == 0
        return _Selected(mask, (coords - entry.start) // entry.step, len(steps))
    positions, inverse = np.unique(entry, return_inverse=True)
    place = np.minimum(np.searchsorted(positions, coords), len(positions) - 1)
    is_ascending = len(positions) == len(entry) and bool((positions == entry).all())
    remaining: AxisKey = slice(None) if is_ascending else inverse
    return _Selected(positions[place] == coords, place, len(positions), remaining)


class CSRArray(SparseArray):
    """A matrix in compressed sparse rows; a block of rows reads only its stored elements."""

    __slots__ = ()

    @property
    def reads_whole(self) -> bool:
        """True if a part is compressed as one stream."""
        return any(reader.part.encoding == "zstd" for reader in self.readers.values())

    def stored(self, start: int, stop: int) -> StoredElements:
        """Return the stored elements of some rows; see `SparseArray.stored`."""
        return super().stored(start, stop) if self.reads_whole else self._read(start, stop)

    def blocks(self) -> Iterator[StoredElements]:
        """Yield all stored elements; see `SparseArray.blocks`."""
        nrows = self.shape[0]
        count = self._count()
        pointers = _ElementStream(self, "indptr", nrows + 1)
        columns, values = [_ElementStream(self, role, count) for role in ("indices", "values")]
        indptr = pointers.take(1)
        self._check_indptr(indptr, count, first=True)
        for start in range(0, nrows, _MOST_ROWS):
            rows = min(_MOST_ROWS, nrows - start)
            indptr = np.concatenate([indptr[-1:], pointers.take(rows)])
            self._check_indptr(indptr, count)
            bounds = indptr.astype(np.int64)
            begin = 0
            while begin < rows:
                last = np.searchsorted(bounds, bounds[begin] + _MOST_ELEMENTS, "right") - 1
                end = max(begin + 1, int(last))
                size = int(bounds[end] - bounds[begin])
                if size > _MOST_ELEMENTS:  # a row cannot be cut
                    self._require_memory(size)
                block = columns.take(size), values.take(size)
                yield self._rows(start + begin, bounds[begin : end + 1], *block)
                begin = end
        for stream in (pointers, columns, values):
            stream.finish()

    def load(self) -> StoredElements:
        """Read all stored elements at once; see `SparseArray.load`."""
        self._require_memory(self._count())
        blocks = list(self.blocks())
        if not blocks:  # a matrix without rows
            columns, values = [self._part(role, 0, 0, 0) for role in ("indices", "values")]
            return self._rows(0, np.zeros(1, np.int64), columns, values)
        coords = [np.concatenate(along) for along in zip(*(b.coords for b in blocks), strict=True)]
        values = np.concatenate([block.values for block in blocks])
        return StoredElements(0, self.shape[0], tuple(coords), values)

    def _read(self, start: int, stop: int) -> StoredElements:
        nrows = self.shape[0]
        indptr = self._part("indptr", start, stop + 1, nrows + 1)
        count = self._count(indptr[-1] if stop == nrows else None)
        self._check_indptr(indptr, count, first=start == 0)
        low, high = int(indptr[0]), int(indptr[-1])
        columns = self._part("indices", low, high, count)
        self._require_memory(high - low)
        values = self._part("values", low, high, count)
        return self._rows(start, indptr.astype(np.int64), columns, values)

    def _rows(self, start: int, indptr: Array, columns: Array, values: Array) -> StoredElements:
        """Return the elements of rows, given the stored parts of these rows."""
        self._check_below(columns, self.shape[1], "indices")
        stop = start + len(indptr) - 1
        row = np.repeat(np.arange(start, stop), np.diff(indptr))
        columns = columns.astype(np.int64)
        if self.strict and (columns[1:] <= columns[:-1])[row[1:] == row[:-1]].any():
            raise self._broken("indices", "column indices do not increase within a row")
        coords, values = self._in_order([row, columns], values)
        return StoredElements(start, stop, tuple(coords), values)

    def _count(self, last: Any = None) -> int:
        """Check and return the last row pointer, which is the number of stored elements."""
        nrows = self.shape[0]
        if last is None:
            (last,) = self._part("indptr", nrows, nrows + 1, nrows + 1)
        count = int(last)
        for role in ("indices", "values"):
            shape = self.shapes[role]
            if shape is not None and count != shape[0]:
                reason = f"the last row pointer is {count}, but {role!r} has {shape[0]} elements"
                raise self._broken("indptr", reason)
        if count > prod(self.shape):
            reason = f"the last row pointer is {count}, more than the matrix has elements"
            raise self._broken("indptr", reason)
        return count

    def _check_indptr(self, indptr: Array, count: int, *, first: bool = False) -> None:
        if first and indptr[0] != 0:
            raise self._broken("indptr", f"the first row pointer is {indptr[0]}, not 0")
        if (indptr[1:] < indptr[:-1]).any() or indptr[-1] > count or indptr[0] < 0:
            raise self._broken("indptr", "row pointers decrease")


class _ElementStream:
    """The elements of a part, read in sequence."""

    def __init__(self, array: SparseArray, role: str, count: int) -> None:
        reader = array.readers[role]
        nbytes = nbytes_of(reader.part.dtype, count)
        self._blocks = (array.typed(role, data) for data in reader.blocks(nbytes, _PIECE_NBYTES))
        # The first block is read immediately, so that an unreadable part raises here.
        self._block = next(self._blocks, array.typed(role, memoryview(b"")))

    def take(self, count: int) -> Array:
        """Return the next elements as a copy, because the next block may reuse the buffer."""
        result = np.empty(count, self._block.dtype)
        done = 0
        while True:
            head = self._block[: count - done]
            result[done : done + len(head)] = head
            self._block = self._block[len(head) :]
            done += len(head)
            if done == count:
                return result
            self._block = next(self._blocks)

    def finish(self) -> None:
        """Read to the end, where the size and the digest are checked."""
        for _ in self._blocks:
            pass


class CSCArray(SparseArray):
    """A matrix in compressed sparse columns; every row is spread over all of them."""

    __slots__ = ("turned",)

    def __init__(
        self, tensor: Tensor, readers: Mapping[str, PartReader], *, sparse: bool = False
    ) -> None:
        super().__init__(tensor, readers, sparse=sparse)
        self.turned = CSRArray(replace(tensor, shape=tensor.shape[::-1]), readers)

    def load(self) -> StoredElements:
        """Sort the stored elements of the transpose; see `SparseArray.load`."""
        transpose = self.turned.load()
        coords, values = self._in_order(transpose.coords[::-1], transpose.values)
        return StoredElements(0, self.shape[0], tuple(coords), values)


class COOArray(SparseArray):
    """A tensor as an unordered list of coordinates, one row of `coords` for each axis."""

    __slots__ = ()

    def load(self) -> StoredElements:
        """Read, check and sort all stored elements; see `SparseArray.load`."""
        count = self._count()
        stored = self._part("coords", 0, self.ndim * count, self.ndim * count)
        coords = stored.reshape(self.ndim, count)
        self._require_memory(count)
        for axis, size in enumerate(self.shape):
            self._check_below(coords[axis], size, "coords")
        values = self._part("values", 0, count, count)
        signed = [axis.astype(np.int64) for axis in coords]
        signed, values = self._in_order(signed, values)
        values = values.copy() if is_mapped(values) else values
        return StoredElements(0, self.shape[0], tuple(signed), values)

    def _count(self) -> int:
        values, coords = self.shapes["values"], self.shapes["coords"]
        if values is not None:
            return values[0]
        if coords is not None:
            return coords[1]
        reader = self.readers["values"]
        return reader.count_decoded_nbytes() // nbytes_of(reader.part.dtype, 1)


# --- elements that are blocks ---------------------------------------------------------------------


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
