"""Two tensors as one sequence of pairs, for any layouts, orders and element types.

Tensors stored in the same way may have the same bytes; their bytes are compared before any element
is decoded.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import numpy as np

from xckpt.arrays.dense import DenseArray, stored_bytes
from xckpt.arrays.lazy import dense_values
from xckpt.arrays.sparse import SparseArray, flat_positions
from xckpt.comparison.arrangements import Transposed, View, arranged, parts_of_view
from xckpt.errors import is_damage, locating
from xckpt.scan.accumulators import Accumulator
from xckpt.scan.kinds import kind_named, require_numbers
from xckpt.scan.readers import DECODING, ArrayReader, ChunkedTensor, Reader, SparseReader
from xckpt.scan.trees import LEAF
from xckpt.storage.local import is_mapped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xckpt.errors import CheckpointError
    from xckpt.storage.prefetch import Range
    from xckpt.typing import Array

#: Bytes to read at a time against the order of a file, where one read yields few elements.
TURNED_NBYTES = 64 << 20


def pair_of(first: Reader, second: Reader, name: str = "") -> PairReader | ChunkedPair:
    """Return a reader of two tensors side by side, in the order that costs less."""
    pair: PairReader | ChunkedPair
    if isinstance(first, ChunkedTensor) or isinstance(second, ChunkedTensor):
        pair = ChunkedPair(first, second)
    elif isinstance(first, SparseReader) and isinstance(second, SparseReader):
        pair = SparsePairReader(first, second)
    else:
        ours, theirs = _plain(first), _plain(second)
        orders = _order(ours), _order(theirs)
        if orders[0] != orders[1]:
            # Keep the order of the tensor that is costly to read in another one.
            if not is_sliceable(theirs) and is_sliceable(ours):
                ours = _reordered(ours, orders[1])
            else:
                theirs = _reordered(theirs, orders[0])
        pair = PairReader(ours, theirs)
    if isinstance(pair, PairReader) and first.identity is not None and second.identity is not None:
        (our_files, *our_rest), (their_files, *their_rest) = first.identity, second.identity
        pair.identity = ((*our_files, *their_files), len(our_files), *our_rest, *their_rest)
    pair.name = name
    return pair


class PairReader(Reader):
    """Two tensors of one size whose elements are read in the same order.

    Blocks are mappings with the sides ``"a"`` and ``"b"``. All blocks but the last consist of whole
    leaves.
    """

    #: Whether pairs of zeros are left out.
    omits_zeros = False

    def __init__(self, first: Reader, second: Reader) -> None:
        self.first = first
        self.second = second
        # Tasks are cut by the larger item size.
        self.kind = max(first.kind, second.kind, key=lambda kind: kind.itemsize)
        self.size = first.size
        self.nbytes = first.nbytes + second.nbytes
        self.whole = first.whole or second.whole
        self.local = first.local or second.local
        self.place = first.place

    @property
    def kinds(self) -> tuple[str, str]:
        """Kinds of the elements of both sides: names of kinds, or "complex128"."""
        return _type_name(self.first), _type_name(self.second)

    def ranges(self, start: int, stop: int) -> Iterator[Range]:
        """Yield the byte ranges of both tensors."""
        yield from self.first.ranges(start, stop)
        yield from self.second.ranges(start, stop)

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[tuple[int, Any]]:
        """Yield blocks of pairs, each with its first position."""
        itemsizes = self.first.kind.itemsize, self.second.kind.itemsize
        leaves = max(1, buffer.nbytes // (sum(itemsizes) * LEAF))
        # A power of two, so that blocks are nodes of the tree of sums.
        step = LEAF << (leaves.bit_length() - 1)
        cut = step * itemsizes[0]
        first = _Recut(self.first, start, stop, buffer[:cut])
        second = _Recut(self.second, start, stop, buffer[cut : cut + step * itemsizes[1]])
        for position in range(start, stop, step):
            count = min(step, stop - position)
            yield position, {"a": first.take(count), "b": second.take(count)}


class _Recut:
    """The blocks of a reader, cut to requested sizes."""

    def __init__(self, reader: Reader, start: int, stop: int, buffer: Array) -> None:
        self.reader = reader
        self.blocks = reader.blocks(start, stop, buffer)
        self.remaining: Array = np.empty(0)

    def take(self, count: int) -> Array:
        """Return the next elements, which are valid until the next call."""
        if not len(self.remaining):
            self.remaining = self._next()
        while len(self.remaining) < count:
            # The next block overwrites the remaining elements, so copy them.
            copied = self.remaining.copy()
            self.remaining = np.concatenate([copied, self._next()])
        elements, self.remaining = self.remaining[:count], self.remaining[count:]
        return elements

    def _next(self) -> Array:
        with locating(path=self.reader.place[0] or None):
            values: Array = next(self.blocks)[1]
        return values


class SparsePairReader(PairReader):
    """The values stored by either of two sparse tensors of one shape, without making them dense.

    Positions count these values. Zeros that neither tensor stores fill up the last leaf.
    """

    omits_zeros = True

    def __init__(self, first: SparseReader, second: SparseReader) -> None:
        super().__init__(first, second)
        self.arrays = first.array, second.array

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[tuple[int, Any]]:
        """Yield blocks of all stored values, each with its first position."""
        position = 0
        pending = [np.empty(0, array.dtype) for array in self.arrays]
        for values in self._unions():
            pending = [np.concatenate(parts) for parts in zip(pending, values, strict=True)]
            count = len(pending[0]) // LEAF * LEAF
            if count:
                yield position, {"a": pending[0][:count], "b": pending[1][:count]}
                position += count
                pending = [side[count:] for side in pending]
        if len(pending[0]):
            count = min(LEAF, self.size - position)
            pending = [np.pad(side, (0, count - len(side))) for side in pending]
            yield position, {"a": pending[0], "b": pending[1]}

    def _unions(self) -> Iterator[tuple[Array, Array]]:
        """Yield the values stored by either side, a batch of rows at a time, in C order."""
        rows = [_StoredRows(array) for array in self.arrays]
        nrows = self.arrays[0].shape[0]
        row = 0
        while row < nrows:
            row = min(side.stop for side in rows)
            places, values = zip(*(side.up_to(row) for side in rows), strict=True)
            union = np.union1d(*places)
            filled = [np.zeros(len(union), stored.dtype) for stored in values]
            for target, side_places, stored in zip(filled, places, values, strict=True):
                target[np.searchsorted(union, side_places)] = stored
            yield filled[0], filled[1]
        for side in rows:
            side.finish()


class _StoredRows:
    """The stored elements of a sparse tensor, cut into blocks at requested rows."""

    def __init__(self, array: SparseArray) -> None:
        self._shape = array.shape
        self._blocks = array.blocks()
        self._remaining = next(self._blocks)

    @property
    def stop(self) -> int:
        """End of the rows that have been read."""
        if self._remaining.start == self._remaining.stop < self._shape[0]:
            self._remaining = next(self._blocks)
        return self._remaining.stop

    def up_to(self, row: int) -> tuple[Array, Array]:
        """Return the flat positions of the next elements up to a row, and the elements."""
        block = self._remaining.rows(self._remaining.start, row)
        self._remaining = self._remaining.rows(row, self._remaining.stop)
        return flat_positions(block.coords, self._shape), block.values

    def finish(self) -> None:
        """Read to the end, where the reader checks for some errors."""
        for _ in self._blocks:
            pass


class ChunkedPair(ChunkedTensor):
    """Two tensors of one shape as chunks of pairs; at least one tensor is a dask array."""

    omits_zeros = False

    def __init__(self, first: Reader, second: Reader) -> None:
        import dask.array as da

        leading = first if isinstance(first, ChunkedTensor) else second
        super().__init__(leading.array)
        chunks = self.array.chunks
        a, b = _dask_array(first, chunks), _dask_array(second, chunks)
        dtype = np.dtype([("a", a.dtype), ("b", b.dtype)])
        meta = np.empty((0,) * a.ndim, dtype)
        self.kinds = _dtype_name(a.dtype), _dtype_name(b.dtype)
        self.array = da.map_blocks(_paired, a, b, dtype=dtype, meta=meta)
        self.nbytes = first.nbytes + second.nbytes
        self.row = 0


def _dask_array(reader: Reader, chunks: Any) -> Any:
    import dask.array as da

    array = reader.array
    if isinstance(reader, ChunkedTensor):
        return array.rechunk(chunks)
    meta = np.empty((0,) * len(array.shape), array.dtype)
    return da.from_array(array, chunks, f"xckpt-compare-{uuid4().hex}", meta=meta)


def _paired(a: Any, b: Any) -> Array:
    dense = [dense_values(a), dense_values(b)]
    block = np.empty(dense[0].shape, [("a", dense[0].dtype), ("b", dense[1].dtype)])
    block["a"], block["b"] = dense
    return block


class _ViewReader(ArrayReader):
    """The elements of an array or a view of it in C order."""

    def __init__(self, view: Any, nbytes: int, *, whole: bool) -> None:
        super().__init__(view, nbytes)
        self.whole = whole

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[tuple[int, Array]]:
        """Yield blocks of elements, each with its first position."""
        if not self.whole:
            yield from super().blocks(start, stop, buffer)
            return
        # The array is costly to read in pieces, so it is loaded as a whole.
        array, steps = parts_of_view(self.array)
        in_memory = np.asarray(dense_values(array[...]))
        yield from ArrayReader(arranged(in_memory, steps)).blocks(start, stop, buffer)

    def ranges(self, start: int, stop: int) -> Iterator[Range]:
        """Yield the byte ranges of all elements, if they are known in advance."""
        array, _ = parts_of_view(self.array)
        if start == 0 and stop and hasattr(array, "ranges"):
            yield from array.ranges(...)


def in_c_order(reader: Reader) -> Reader:
    """Return a reader of all elements in C order, complex numbers and zeros included."""
    if isinstance(reader, ChunkedTensor):
        if reader.row or reader.array.ndim < 2:
            return reader
        inner = [-1] * (reader.array.ndim - 1)
        rechunked = ChunkedTensor(reader.array.rechunk(("auto", *inner)))
        rechunked.name = reader.name
        return rechunked
    reader = _plain(reader)
    return reader if _order(reader) == "C" else _reordered(reader, "C")


def _order(reader: Reader) -> str:
    """Return the memory order, C or F, in which a reader yields the elements."""
    shape = reader.array.shape
    has_order = 0 not in shape and sum(size > 1 for size in shape) > 1
    return "F" if reader.is_turned and has_order else "C"


def _reordered(reader: Reader, order: str) -> Reader:
    """Return a reader of the elements in another order than the stored one."""
    array = reader.array
    axes = tuple(range(len(array.shape)))[::-1]
    view = View(array, Transposed(axes)) if order == "F" else array
    return _view_reader(view, reader, is_across=True)


def _view_reader(view: Any, tensor: Reader, *, is_across: bool) -> Reader:
    """Return a reader of a view, whose rows may be scattered over the tensor."""
    whole = tensor.whole or (is_across and not is_sliceable(tensor))
    reader = _ViewReader(view, tensor.nbytes, whole=whole)
    reader.place, reader.local = tensor.place, tensor.local
    if is_across and not tensor.local:
        reader.piece_nbytes = TURNED_NBYTES
    return reader


def reader_of_view(view: Any, tensor: Reader, name: str) -> Reader:
    """Return a reader of a view of a tensor."""
    _, steps = parts_of_view(view)
    if not steps:
        return in_c_order(tensor)
    if isinstance(tensor, ChunkedTensor):
        reader = in_c_order(ChunkedTensor(view[...]))
        # Blocks lie within rows, so that each row has to be in one chunk.
        if isinstance(reader, ChunkedTensor) and reader.array.ndim > 1 and not reader.row:
            reader = ChunkedTensor(reader.array.rechunk({1: -1}))
    else:
        reader = _view_reader(view, tensor, is_across=any(step.is_across for step in steps))
    reader.name = name
    return reader


def is_sliceable(reader: Reader) -> bool:
    """Return whether reading a slice costs no more than the bytes of its elements."""
    lazy = reader.array
    if not isinstance(lazy, DenseArray):
        return reader.local
    part = lazy.reader.part
    if part.encoding is not None or lazy.reader.is_arranged:
        return False
    if part.inline is not None or lazy.source.worth_skipping is not None:
        return True
    return is_mapped(lazy.source.view(part.offset, 1))


def _plain(reader: Reader) -> Reader:
    """Return a reader of all elements: complex numbers instead of magnitudes, zeros included."""
    if isinstance(reader, SparseReader):
        lazy = copy(reader.array)
        lazy.sparse = False
        dense = ArrayReader(lazy, reader.nbytes)
        dense.place = reader.place
        # Use fewer pieces if each piece costs as much as the whole tensor.
        dense.piece_nbytes = max(dense.piece_nbytes, lazy.nbytes_read)
        dense.whole = dense.piece_nbytes == lazy.nbytes_read
        return dense
    if reader.complex:
        reader = copy(reader)
        reader.complex = False
    return reader


def _type_name(reader: Reader) -> str:
    return "complex128" if reader.array.dtype.kind == "c" else reader.kind.name


def _dtype_name(dtype: np.dtype[Any]) -> str:
    return "complex128" if dtype.kind == "c" else require_numbers(dtype).name


# --- stored bytes --------------------------------------------------------------------------------


def stored_pair(pair: Any) -> PairReader | None:
    """Return a reader of the stored bytes of two tensors; None if equal bytes prove nothing."""
    if not isinstance(pair, PairReader) or pair.identity is None:
        return None
    arrays = pair.first.array, pair.second.array
    if any(getattr(a, "is_raw", False) or not hasattr(a, "readers") for a in arrays):
        return None
    if _meaning(pair.first) != _meaning(pair.second):
        return None
    ours, theirs = StoredReader(pair.first), StoredReader(pair.second)
    return PairReader(ours, theirs) if ours.size == theirs.size else None


class StoredReader(Reader):
    """The bytes of all parts of a tensor, one part after the other, without decoding."""

    kind = kind_named("uint8")

    def __init__(self, reader: Reader) -> None:
        parts = list(reader.array.readers.values())
        self.arrays = [stored_bytes(part, reader.array.name) for part in parts]
        self.size = self.nbytes = sum(array.shape[0] for array in self.arrays)
        self.place = (parts[0].source.name, parts[0].part.offset)

    def ranges(self, start: int, stop: int) -> Iterator[Range]:
        """Yield the byte ranges in files from `start` to `stop`."""
        for array, _, low, high in self._shares(start, stop):
            yield from array.flat_ranges(low, high)

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[tuple[int, Array]]:
        """Yield blocks of bytes, each with its first position."""
        for array, first, low, high in self._shares(start, stop):
            for position, values in array.flat(low, high, buffer):
                yield first + position, values

    def _shares(self, start: int, stop: int) -> Iterator[tuple[DenseArray, int, int, int]]:
        """Yield the parts with bytes in a range: where a part begins, and the range in it."""
        first = 0
        for array in self.arrays:
            (nbytes,) = array.shape
            low, high = max(start - first, 0), min(stop - first, nbytes)
            if low < high:
                yield array, first, low, high
            first += nbytes


class SameBytes(Accumulator):
    """Comparison of the bytes of two tensors, up to the first difference."""

    def __init__(self) -> None:
        self.count = 0
        self.are_same = True

    @classmethod
    def begin(cls, reader: Any, argument: Any) -> SameBytes:  # noqa: ARG003
        """Return a new accumulator."""
        return cls()

    def update(self, start: int, values: Any) -> None:
        """Compare the next bytes."""
        a, b = values["a"], values["b"]
        self.count += len(a)
        if not self.are_same:
            return
        # Comparing eight bytes at a time is faster.
        words = len(a) // 8 * 8
        self.are_same = np.array_equal(a[words:], b[words:]) and np.array_equal(
            a[:words].view(np.uint64), b[:words].view(np.uint64)
        )

    def merge(self, other: SameBytes) -> None:
        """Add the result for other bytes of the same tensors."""
        self.count += other.count
        self.are_same &= other.are_same


def _meaning(reader: Reader) -> Any:
    """Return the properties, besides the bytes, that determine the values.

    A tensor with digests to verify has the same meaning as no other.
    """
    lazy = reader.array
    if any(part.verify for part in lazy.readers.values()):
        return reader  # the tensor must be decoded, so that a wrong digest raises
    stored = {
        role: replace(part.part, offset=0, digest=None, shard=None, inline=None)
        for role, part in lazy.readers.items()
    }
    decoding = [getattr(lazy, name, None) for name in (*DECODING, "decode")]
    return type(lazy), lazy.shape, stored, decoding


# --- matches -------------------------------------------------------------------------------------


class Partner(NamedTuple):
    """The matching tensor on the other side, and the rule of `compare` that matched it."""

    name: str
    rule: str


class Match(NamedTuple):
    """A tensor of either side, or two matching tensors."""

    #: Name in `a`, or in `b` if only `b` has the tensor.
    name: str
    #: The tensor on each side, if it exists; both None if it was not selected.
    ours: Reader | None = None
    theirs: Reader | None = None
    #: The tensor in `b` that matches one in `a`.
    partner: Partner | None = None
    #: Reader of both tensors, if they have one shape.
    pair: PairReader | ChunkedPair | None = None

    @property
    def status(self) -> str:
        """The status if it is clear without reading, one of `STATUSES`; else empty."""
        if self.problem is not None:
            return "unreadable"
        if self.theirs is None:
            return "" if self.ours is None else "only_a"
        if self.ours is None:
            return "only_b"
        return "shape" if self.pair is None else ""

    @property
    def problem(self) -> CheckpointError | None:
        """The error of the tensor that cannot be read, the one in `a` first."""
        readers = (reader for reader in (self.ours, self.theirs) if reader is not None)
        return next((reader.problem for reader in readers if reader.problem is not None), None)

    @property
    def is_beyond(self) -> bool:
        """True if nothing is known of a chosen tensor, because its type is unsupported."""
        problems = [side.problem for side in (self.ours, self.theirs) if side is not None]
        return bool(problems) and not any(
            problem is None or is_damage(problem) for problem in problems
        )

    @property
    def is_chosen(self) -> bool:
        """True if the tensor was selected for the comparison."""
        return self.ours is not None or self.theirs is not None

    @property
    def size(self) -> int:
        """Number of elements in `a`, or in `b` if only `b` has the tensor or can be read."""
        sides = [reader for reader in (self.ours, self.theirs) if reader is not None]
        readable = [reader for reader in sides if reader.problem is None]
        return next((reader.size for reader in [*readable, *sides]), 0)

    @property
    def both(self) -> tuple[Reader, Reader] | None:
        """Both tensors, if they can be compared; else None."""
        ours, theirs = self.ours, self.theirs
        return None if self.pair is None or ours is None or theirs is None else (ours, theirs)

    @property
    def shapes(self) -> str:
        """The shapes of both tensors if they differ; else empty."""
        if self.status != "shape" or self.ours is None or self.theirs is None:
            return ""
        return f"{self.ours.array.shape} and {self.theirs.array.shape}"
