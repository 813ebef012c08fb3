"""Sparse tensors: stored elements of some rows, checked, and the selections made of them.

What is chosen is picked among the stored elements before anything of the size of the tensor is
made: shapes cost nothing to claim. A list of coordinates, which is in no order, and what is
compressed from its start to its end, are read as a whole and sorted once; what is small is kept.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
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

Array = np.ndarray[Any, np.dtype[Any]]

# A shape of any size is cut into no more chunks than these, and one for each MiB that is stored.
_MOST_CHUNKS = 256
_NBYTES_PER_CHUNK = 1 << 20

# Sorted elements that this process keeps, of all tensors together.
_KEPT_NBYTES = 128 << 20

# Of rows and of stored elements, at a time, where all are read.
_MOST_ROWS = 1 << 17
_MOST_ELEMENTS = 1 << 18
_PIECE_NBYTES = 1 << 20

_TOGETHER = "So many stored elements have to be in memory together"


class StoredElements(NamedTuple):
    """The elements of some rows that are stored, in the order of their positions, each once."""

    start: int  # half-open range of rows
    stop: int
    coords: tuple[Array, ...]  # for each axis, where in the tensor they are, as int64
    values: Array

    @property
    def nbytes(self) -> int:
        """How much memory they take."""
        return sum(each.nbytes for each in (*self.coords, self.values))

    def rows(self, start: int, stop: int) -> StoredElements:
        """Return those of fewer rows."""
        low, high = np.searchsorted(self.coords[0], (start, stop))
        coords = tuple([each[low:high] for each in self.coords])
        return StoredElements(start, stop, coords, self.values[low:high])


_kept: Pool[StoredElements] = Pool(_KEPT_NBYTES, lambda each: each.nbytes)
# Chunks that are read at the same time wait for one of them to read what they share.
_loading = Locks(16)


class SparseArray(LazyArray):
    """What CSR and COO share: typed parts, order, selections as dense or `sparse.COO` blocks."""

    __slots__ = ("readers", "shapes", "sparse", "strict")

    advice = "Select less of it at once, or open it with sparse=True"

    def __init__(
        self, tensor: Tensor, readers: Mapping[str, PartReader], *, sparse: bool = False
    ) -> None:
        source = readers["values"].source
        super().__init__(tensor.name, source, tensor.shape, decoded_dtype(tensor.dtype))
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
        """Read all stored elements once, in order, a block of whole rows at a time."""
        yield self._load()

    @abstractmethod
    def _load(self) -> StoredElements:
        """Read all stored elements at once."""

    @property
    def nbytes_stored(self) -> int:
        """Size of all parts, decoded where the file says how large they are then."""
        parts = [reader.part for reader in self.readers.values()]
        return sum([part.decoded_nbytes or part.nbytes for part in parts])

    @property
    def reads_whole(self) -> bool:
        """Whether any row costs what all cost, where it cannot be kept."""
        return True

    @property
    def nbytes_read(self) -> int:
        """How much has to be read for the smallest selection, about."""
        if not self.reads_whole:
            return self.nbytes_stored // max(1, self.shape[0])
        return self.nbytes_stored if self.nbytes_stored > _KEPT_NBYTES else 0

    def chunks(self, target: int) -> Chunks:
        """Return chunks that are no smaller than what is read for each, and not too many."""
        if not self.sparse and self.is_expanded:
            return tuple((size,) for size in self.shape)
        most = _MOST_CHUNKS + self.nbytes_stored // _NBYTES_PER_CHUNK
        total = prod(self.shape) * self.dtype.itemsize
        target = max(target, self.nbytes_read, total // most)
        return chunks_along_slowest(self.shape, self.dtype.itemsize, target)

    def empty(self, shape: tuple[int, ...]) -> Any:
        """Return an array without elements; see `LazyArray.empty`."""
        if not self.sparse:
            return super().empty(shape)
        import sparse

        coords = np.empty((len(shape), 0), np.int64)
        return sparse.COO(coords, np.empty(0, self.dtype), shape=shape)

    def select(self, key: tuple[AxisKey, ...]) -> Any:
        """Return a selection; see `LazyArray.select`."""
        shape = result_shape(self.shape, key)
        if 0 in shape:
            return self.empty(shape)
        run = contiguous_run(self.shape[:1], key[:1])
        coords, values = self.stored(run.start, run.start + run.shape[0])[2:]
        places: list[Array] = []
        extents: list[int] = []
        rest: list[AxisKey] = []
        for axis, entry in enumerate(key):
            chosen, place, extent, again = _along(coords[axis], entry, self.shape[axis])
            if chosen is not None and not chosen.all():
                coords = tuple([each[chosen] for each in coords])
                places = [each[chosen] for each in places]
                values, place = values[chosen], place[chosen]
            if extent is not None:
                places.append(place)
                extents.append(extent)
                rest.append(again)
        if not extents:
            return values[0] if len(values) else self.dtype.type(0)
        return take(self._block(tuple(extents), places, values), rest)

    def _block(self, shape: tuple[int, ...], places: Sequence[Array], values: Array) -> Any:
        """Put values at places that are inside `shape`, no two of them at one."""
        count = prod(shape)
        if not self.sparse:
            require_memory(count * self.dtype.itemsize, self.advice)
            block = np.zeros(count, self.dtype)
            block[flat_positions(places, shape)] = values
            return block.reshape(shape)
        import sparse

        if count > sys.maxsize:
            reason = f"{count} elements are too many for one array"
            raise TooLargeError(reason, rule="Memory", hint="Select less of it at once")
        flat = flat_positions(places, shape)
        if (flat[1:] < flat[:-1]).any():  # an axis was turned round
            order = np.argsort(flat)
            places, values = [each[order] for each in places], values[order]
        coords = np.stack(places)
        # What is kept for the next selection must not change with what this one is used for.
        values = values if values.flags.owndata else values.copy()
        return sparse.COO(coords, values, shape=shape, has_duplicates=False, sorted=True)

    def _part(self, role: str, start: int, stop: int, count: int) -> Array:
        """Return elements `start` to `stop` of a part that has `count` of them."""
        size = nbytes_of(self.readers[role].part.dtype, 1)
        return self._typed(role, self.readers[role].read(start * size, stop * size, count * size))

    def _typed(self, role: str, data: memoryview) -> Array:
        part = self.readers[role].part
        return elements(data, part.dtype, decode=True, byteorder=part.byteorder, strict=self.strict)

    def _require_memory(self, count: int) -> None:
        """Refuse to sort more stored elements than memory has room for, twice and for an order."""
        require_memory(count * (16 * self.ndim + 2 * self.dtype.itemsize + 8), _TOGETHER)

    def _whole(self) -> StoredElements:
        """Return all stored elements, of a small tensor those that were read before."""
        parts: Hashable = tuple(
            (role, each.source.name, each.source.identity, each.part, each.verify)
            for role, each in self.readers.items()
        )
        key = (type(self), self.shape, self.strict, parts)
        with _loading.of(key):
            return _kept.get(key, self._load)

    def _in_order(self, coords: Sequence[Array], values: Array) -> tuple[list[Array], Array]:
        """Sort elements by their positions, and add up those that are stored more than once."""
        rank = list(coords)
        if prod(self.shape) <= sys.maxsize:
            rank = [flat_positions(coords, self.shape)]
        # Sorted and unique is the common case, and the cheapest to find out.
        if len(rank) == 1 and (rank[0][1:] > rank[0][:-1]).all():
            return list(coords), values
        order = np.lexsort(rank[::-1])
        coords, values = [each[order] for each in coords], values[order]
        is_new = np.ones(len(values), np.bool_)
        is_new[1:] = np.any([each[order][1:] != each[order][:-1] for each in rank], axis=0)
        if is_new.all():
            return coords, values
        if self.strict:
            raise FormatError("an element is given more than once", rule="LayoutData")
        total = np.zeros(np.count_nonzero(is_new), values.dtype)
        np.add.at(total, np.cumsum(is_new) - 1, values)
        return [each[is_new] for each in coords], total

    def _check_below(self, indices: Array, bound: int, role: str) -> None:
        """Refuse indices outside their axis, comparing as unsigned before any cast to signed."""
        for index in (indices.max(), indices.min()) if indices.size else ():
            if not 0 <= int(index) < bound:
                raise self._broken(
                    role, f"index {index} in {role!r} is outside its axis of size {bound}"
                )

    def _broken(self, role: str, reason: str) -> FormatError:
        return FormatError(reason, offset=self.readers[role].part.offset, rule="LayoutData")


def dense_values(block: Any) -> Array:
    """Return the values of a block, which may be sparse, as a numpy array."""
    values: Array = np.asarray(block.todense() if hasattr(block, "todense") else block)
    return values


def flat_positions(coords: Sequence[Array], shape: Sequence[int]) -> Array:
    """Return positions in a flat array; unlike `numpy.ravel_multi_index`, of any number of axes."""
    flat = coords[0]
    for along, extent in zip(coords[1:], shape[1:], strict=True):
        flat = flat * extent + along
    return flat


def _along(
    where: Array, entry: AxisKey, length: int
) -> tuple[Array | None, Array, int | None, AxisKey]:
    """Apply the entry of an index to the coordinates along its axis."""
    everything = slice(None)
    if isinstance(entry, int):
        return where == entry, where, None, everything
    if isinstance(entry, slice):
        steps = range(length)[entry]
        if steps == range(length):
            return None, where, length, everything
        chosen = (where >= min(steps[0], steps[-1])) & (where <= max(steps[0], steps[-1]))
        if abs(entry.step) > 1:
            chosen &= (where - entry.start) % entry.step == 0
        return chosen, (where - entry.start) // entry.step, len(steps), everything
    positions, again = np.unique(entry, return_inverse=True)
    place = np.minimum(np.searchsorted(positions, where), len(positions) - 1)
    is_ascending = len(positions) == len(entry) and bool((positions == entry).all())
    taken: AxisKey = everything if is_ascending else again
    return positions[place] == where, place, len(positions), taken


class CSRArray(SparseArray):
    """A matrix in compressed sparse rows; a block of rows reads only its own non-zeros."""

    __slots__ = ()

    @property
    def reads_whole(self) -> bool:
        """Whether a part is compressed from its start to its end."""
        return any(each.part.encoding == "zstd" for each in self.readers.values())

    def stored(self, start: int, stop: int) -> StoredElements:
        """Return the stored elements of some rows; see `SparseArray.stored`."""
        return super().stored(start, stop) if self.reads_whole else self._read(start, stop)

    def blocks(self) -> Iterator[StoredElements]:
        """Read all stored elements; see `SparseArray.blocks`."""
        nrows = self.shape[0]
        count = self._count()
        pointers = _ElementStream(self, "indptr", nrows + 1)
        columns, values = [_ElementStream(self, each, count) for each in ("indices", "values")]
        known = pointers.take(1)
        self._check_indptr(known, count, first=True)
        for start in range(0, nrows, _MOST_ROWS):
            rows = min(_MOST_ROWS, nrows - start)
            known = np.concatenate([known[-1:], pointers.take(rows)])
            self._check_indptr(known, count)
            bounds = known.astype(np.int64)
            at = 0
            while at < rows:
                fitting = np.searchsorted(bounds, bounds[at] + _MOST_ELEMENTS, "right") - 1
                end = max(at + 1, int(fitting))
                number = int(bounds[end] - bounds[at])
                if number > _MOST_ELEMENTS:  # a row cannot be cut
                    self._require_memory(number)
                some = columns.take(number), values.take(number)
                yield self._rows(start + at, bounds[at : end + 1], *some)
                at = end
        for stream in (pointers, columns, values):
            stream.finish()

    def whole(self) -> StoredElements:
        """Read all stored elements at once."""
        return self._load()

    def _load(self) -> StoredElements:
        self._require_memory(self._count())
        blocks = list(self.blocks())
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
        """Make the elements of rows of what is stored for them."""
        self._check_below(columns, self.shape[1], "indices")
        stop = start + len(indptr) - 1
        row = np.repeat(np.arange(start, stop), np.diff(indptr))
        columns = columns.astype(np.int64)
        if self.strict and (columns[1:] <= columns[:-1])[row[1:] == row[:-1]].any():
            raise self._broken("indices", "column indices do not increase within a row")
        coords, values = self._in_order([row, columns], values)
        return StoredElements(start, stop, tuple(coords), values)

    def _count(self, last: Any = None) -> int:
        """Check the last row pointer, which is the number of stored elements."""
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
    """The elements of a part one after the other."""

    def __init__(self, array: SparseArray, role: str, count: int) -> None:
        reader = array.readers[role]
        nbytes = nbytes_of(reader.part.dtype, count)
        self._blocks = (array._typed(role, data) for data in reader.blocks(nbytes, _PIECE_NBYTES))  # noqa: SLF001
        # At once, because what cannot be read at all is found out then.
        self._left = next(self._blocks, array._typed(role, memoryview(b"")))  # noqa: SLF001

    def take(self, count: int) -> Array:
        """Return the next elements, in memory of their own: the next block may reuse its buffer."""
        taken = np.empty(count, self._left.dtype)
        at = 0
        while True:
            some = self._left[: count - at]
            taken[at : at + len(some)] = some
            self._left = self._left[len(some) :]
            at += len(some)
            if at == count:
                return taken
            self._left = next(self._blocks)

    def finish(self) -> None:
        """Read to the end: that nothing follows, and the digest, are checked there."""
        for _ in self._blocks:
            pass


class CSCArray(SparseArray):
    """A matrix in compressed sparse columns, the rows of its transpose; each row is in all."""

    __slots__ = ("turned",)

    def __init__(
        self, tensor: Tensor, readers: Mapping[str, PartReader], *, sparse: bool = False
    ) -> None:
        super().__init__(tensor, readers, sparse=sparse)
        self.turned = CSRArray(replace(tensor, shape=tensor.shape[::-1]), readers)

    def _load(self) -> StoredElements:
        found = self.turned.whole()
        coords, values = self._in_order(found.coords[::-1], found.values)
        return StoredElements(0, self.shape[0], tuple(coords), values)


class COOArray(SparseArray):
    """A tensor as a list of coordinates in no order, one row of `coords` for each axis."""

    __slots__ = ()

    def _load(self) -> StoredElements:
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
        return reader.decoded_nbytes() // nbytes_of(reader.part.dtype, 1)
