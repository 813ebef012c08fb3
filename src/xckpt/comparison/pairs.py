"""Two tensors as one sequence of pairs, whatever their layouts, orders and element types are.

Tensors that are stored alike may have the same bytes, which is found out before any is decoded.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import numpy as np

from xckpt.arrays.blocks import BlockArray
from xckpt.arrays.dense import DenseArray
from xckpt.arrays.scaled import CodebookArray, QuantizedArray
from xckpt.arrays.sparse import SparseArray, dense_values, flat_positions
from xckpt.errors import locating
from xckpt.scan.accumulators import Accumulator
from xckpt.scan.kinds import kind_named, require_numbers
from xckpt.scan.readers import ArrayReader, ChunkedTensor, RawReader, Reader, SparseReader
from xckpt.scan.trees import LEAF
from xckpt.storage.local import is_mapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from xckpt.arrays.parts import PartReader
    from xckpt.storage.prefetch import Range

Array = np.ndarray[Any, np.dtype[Any]]

#: Bytes read at a time across the order of a file, where one read brings few elements.
TURNED_NBYTES = 64 << 20


def pair_of(first: Reader, second: Reader, name: str = "") -> PairReader | ChunkedPair:
    """Find how two tensors are best read next to each other."""
    pair: PairReader | ChunkedPair
    if isinstance(first, ChunkedTensor) or isinstance(second, ChunkedTensor):
        pair = ChunkedPair(first, second)
    elif isinstance(first, SparseReader) and isinstance(second, SparseReader):
        pair = SparsePairReader(first, second)
    else:
        ours, theirs = _plain(first), _plain(second)
        orders = _order(ours), _order(theirs)
        if orders[0] != orders[1]:
            # In the order of the one that is costly to read otherwise.
            if not is_sliceable(theirs) and is_sliceable(ours):
                ours = _reordered(ours, orders[1])
            else:
                theirs = _reordered(theirs, orders[0])
        pair = PairReader(ours, theirs)
    if isinstance(pair, PairReader) and first.identity is not None and second.identity is not None:
        (files, *read), (others, *others_read) = first.identity, second.identity
        pair.identity = ((*files, *others), len(files), *read, *others_read)
    pair.name = name
    return pair


class PairReader(Reader):
    """Two tensors of one size whose elements are read in the same order.

    Its blocks are mappings with both sides as ``"a"`` and ``"b"``; each but the last has whole
    leaves.
    """

    def __init__(self, first: Reader, second: Reader) -> None:
        self.first = first
        self.second = second
        # The larger one: tasks are cut by its size.
        self.kind = max(first.kind, second.kind, key=lambda kind: kind.itemsize)
        self.size = first.size
        self.nbytes = first.nbytes + second.nbytes
        self.whole = first.whole or second.whole
        self.local = first.local or second.local
        self.place = first.place

    @property
    def kinds(self) -> tuple[str, str]:
        """What the elements are: names of kinds, or "complex128"."""
        return _type_name(self.first), _type_name(self.second)

    def ranges(self, start: int, stop: int) -> Iterator[Range]:
        """Return those of both."""
        yield from self.first.ranges(start, stop)
        yield from self.second.ranges(start, stop)

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[tuple[int, Any]]:
        """Read some of the pairs."""
        itemsizes = self.first.kind.itemsize, self.second.kind.itemsize
        leaves = max(1, buffer.nbytes // (sum(itemsizes) * LEAF))
        # A power of two: nodes of the tree of sums.
        step = LEAF << (leaves.bit_length() - 1)
        cut = step * itemsizes[0]
        first = _Recut(self.first, start, stop, buffer[:cut])
        second = _Recut(self.second, start, stop, buffer[cut : cut + step * itemsizes[1]])
        for at in range(start, stop, step):
            count = min(step, stop - at)
            yield at, {"a": first.take(count), "b": second.take(count)}


class _Recut:
    """The blocks of a reader, cut anew."""

    def __init__(self, reader: Reader, start: int, stop: int, buffer: Array) -> None:
        self.reader = reader
        self.blocks = reader.blocks(start, stop, buffer)
        self.left: Array = np.empty(0)

    def take(self, count: int) -> Array:
        """Return the next elements; valid until the next ones are asked for."""
        if not len(self.left):
            self.left = self._next()
        if len(self.left) < count:
            # What is left would be overwritten.
            taken = np.empty(count, self.left.dtype)
            filled = 0
            while filled < count:
                part = self.left[: count - filled] if len(self.left) else self._next()
                if not len(self.left):
                    self.left = part
                    continue
                taken[filled : filled + len(part)] = part
                filled += len(part)
                self.left = self.left[len(part) :]
            return taken
        found, self.left = self.left[:count], self.left[count:]
        return found

    def _next(self) -> Array:
        with locating(path=self.reader.place[0] or None):
            values: Array = next(self.blocks)[1]
        return values


class SparsePairReader(PairReader):
    """The values that one of two sparse tensors of one shape stores, or both; never made dense.

    Positions are those among these values; of the zeros that neither stores, as many as fill the
    last leaf are given too.
    """

    omits_zeros = True

    def __init__(self, first: SparseReader, second: SparseReader) -> None:
        super().__init__(first, second)
        self.arrays = first.array, second.array

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[tuple[int, Any]]:
        """Read all stored values."""
        at = 0
        kept = [np.empty(0, array.dtype) for array in self.arrays]
        for values in self._unions():
            kept = [np.concatenate(each) for each in zip(kept, values, strict=True)]
            count = len(kept[0]) // LEAF * LEAF
            if count:
                yield at, {"a": kept[0][:count], "b": kept[1][:count]}
                at += count
                kept = [each[count:] for each in kept]
        if len(kept[0]):
            count = min(LEAF, self.size - at)
            kept = [np.pad(each, (0, count - len(each))) for each in kept]
            yield at, {"a": kept[0], "b": kept[1]}

    def _unions(self) -> Iterator[tuple[Array, Array]]:
        """Return what either side stores in some rows, in the order of the places."""
        rows = [_StoredRows(array) for array in self.arrays]
        nrows = self.arrays[0].shape[0]
        row = 0
        while row < nrows:
            row = min(side.stop for side in rows)
            places, values = zip(*(side.up_to(row) for side in rows), strict=True)
            union = np.union1d(*places)
            found = [np.zeros(len(union), each.dtype) for each in values]
            for each, where, stored in zip(found, places, values, strict=True):
                each[np.searchsorted(union, where)] = stored
            yield found[0], found[1]
        for side in rows:
            side.finish()


class _StoredRows:
    """The stored elements of a sparse tensor, in blocks that are cut anew."""

    def __init__(self, array: SparseArray) -> None:
        self._shape = array.shape
        self._blocks = array.blocks()
        self._left = next(self._blocks)

    @property
    def stop(self) -> int:
        """Up to which row elements are at hand."""
        if self._left.start == self._left.stop < self._shape[0]:
            self._left = next(self._blocks)
        return self._left.stop

    def up_to(self, row: int) -> tuple[Array, Array]:
        """Return the places of the next elements as numbers, and the elements."""
        taken = self._left.rows(self._left.start, row)
        self._left = self._left.rows(row, self._left.stop)
        return flat_positions(taken.coords, self._shape), taken.values

    def finish(self) -> None:
        """Read to the end: some of what can be wrong is found out there."""
        for _ in self._blocks:
            pass


class ChunkedPair(ChunkedTensor):
    """Two tensors of one shape, of which at least one is a dask array: chunks of pairs."""

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


class _TransposedArray:
    """An array with its axes reversed; only what is asked for is read."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.shape, self.dtype = array.shape[::-1], array.dtype

    def __getitem__(self, key: Any) -> Any:
        if key is ...:
            return self.array[...].T
        chosen = key if isinstance(key, tuple) else (key,)
        missing = (slice(None),) * (len(self.shape) - len(chosen))
        return self.array[(*chosen, *missing)[::-1]].T


class _LoadedReader(ArrayReader):
    """An array that is costly to read in pieces: all of it is in memory while it is read."""

    whole = True

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[tuple[int, Array]]:
        """Read some of the elements."""
        yield from ArrayReader(self.array[...]).blocks(start, stop, buffer)


def in_c_order(reader: Reader) -> Reader:
    """Return a reader of all elements as they are, in C order."""
    if isinstance(reader, ChunkedTensor):
        if reader.row or reader.array.ndim < 2:
            return reader
        inner = [-1] * (reader.array.ndim - 1)
        cut = ChunkedTensor(reader.array.rechunk(("auto", *inner)))
        cut.name = reader.name
        return cut
    reader = _plain(reader)
    return reader if _order(reader) == "C" else _reordered(reader, "C")


def _order(reader: Reader) -> str:
    """Tell in which order a reader gives the elements."""
    lazy = reader.array
    if isinstance(reader, ArrayReader) or not isinstance(lazy, DenseArray):
        return "C"
    several = 0 not in lazy.shape and sum(size > 1 for size in lazy.shape) > 1
    return lazy.order if several else "C"


def _reordered(reader: Reader, order: str) -> Reader:
    """Read the elements in another order than they are stored in."""
    array = reader.array
    kind = ArrayReader if is_sliceable(reader) else _LoadedReader
    new = kind(_TransposedArray(array) if order == "F" else array, reader.nbytes)
    new.place, new.local = reader.place, reader.local
    if not reader.local:
        new.piece_nbytes = TURNED_NBYTES
    return new


def is_sliceable(reader: Reader) -> bool:
    """Return whether any slice costs no more than what is in it."""
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
    """Return a reader of all elements as they are: no magnitudes, no zeros left out."""
    if isinstance(reader, SparseReader):
        lazy = copy(reader.array)
        lazy.sparse = False
        dense = ArrayReader(lazy, reader.nbytes)
        dense.place = reader.place
        # Where each piece costs what all of them do, in fewer of them.
        dense.piece_nbytes = max(dense.piece_nbytes, lazy.nbytes_read)
        dense.whole = dense.piece_nbytes == lazy.nbytes_read
        return dense
    if isinstance(reader, ArrayReader) and reader.complex:
        reader = copy(reader)
        reader.complex = False
    return reader


def _type_name(reader: Reader) -> str:
    return "complex128" if reader.array.dtype.kind == "c" else reader.kind.name


def _dtype_name(dtype: np.dtype[Any]) -> str:
    return "complex128" if dtype.kind == "c" else require_numbers(dtype).name


# --- stored bytes --------------------------------------------------------------------------------


def stored_pair(pair: Any) -> PairReader | None:
    """Return the stored bytes of two tensors, where these mean the same if they are the same."""
    if not isinstance(pair, PairReader) or pair.identity is None:
        return None
    if isinstance(pair.first, RawReader) or isinstance(pair.second, RawReader):
        return None
    ours, theirs = (_parts(each.array) for each in (pair.first, pair.second))
    if (
        ours is None
        or theirs is None
        or _meaning(pair.first, ours) != _meaning(pair.second, theirs)
    ):
        return None
    readers = [StoredReader(list(parts.values())) for parts in (ours, theirs)]
    if readers[0].size != readers[1].size:
        return None
    return PairReader(*readers)


class StoredReader(Reader):
    """The bytes of all parts of a tensor, one part after the other; none is decoded."""

    kind = kind_named("uint8")

    def __init__(self, parts: Sequence[PartReader]) -> None:
        self.parts = parts
        self.size = self.nbytes = sum(_nbytes(each) for each in parts)
        self.place = (parts[0].source.name, parts[0].part.offset)

    def ranges(self, start: int, stop: int) -> Iterator[Range]:
        """Return where some of the bytes are."""
        first = 0
        for each in self.parts:
            low, high = max(first, start) - first, min(first + _nbytes(each), stop) - first
            for source, offset, _ in each.ranges() if low < high else ():
                yield source, offset + low, high - low
            first += _nbytes(each)

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[tuple[int, Array]]:
        """Read some of the bytes."""
        first = 0
        for each in self.parts:
            end = min(first + _nbytes(each), stop)
            step = len(buffer)
            for at in range(max(first, start), end, step):
                memory = buffer[: min(step, end - at)]
                inline = each.part.inline
                if inline is None:
                    each.source.read_into(each.part.offset + at - first, memory.data)
                else:
                    memory[:] = np.frombuffer(inline, np.uint8)[at - first :][: len(memory)]
                yield at, memory
            first += _nbytes(each)


class SameBytes(Accumulator):
    """Looks at the bytes of two tensors until there is a difference."""

    def __init__(self) -> None:
        self.count = 0
        self.are_same = True

    @classmethod
    def begin(cls, reader: Any, argument: Any) -> SameBytes:  # noqa: ARG003
        """Return one for bytes of two tensors."""
        return cls()

    def update(self, start: int, values: Any) -> None:
        """Add bytes."""
        a, b = values["a"], values["b"]
        self.count += len(a)
        if not self.are_same:
            return
        # Eight at a time.
        words = len(a) // 8 * 8
        self.are_same = np.array_equal(a[words:], b[words:]) and np.array_equal(
            a[:words].view(np.uint64), b[:words].view(np.uint64)
        )

    def merge(self, other: SameBytes) -> None:
        """Add what another one found in other bytes."""
        self.count += other.count
        self.are_same &= other.are_same


def _parts(lazy: Any) -> dict[str, PartReader] | None:
    """Return the parts of an array by their roles; None if it is not made of parts."""
    of_parts = DenseArray | BlockArray | CodebookArray | QuantizedArray | SparseArray
    return dict(lazy.readers) if isinstance(lazy, of_parts) else None


def _meaning(reader: Any, parts: Mapping[str, PartReader]) -> Any:
    """Return what the values depend on besides the bytes; nothing where bytes are not enough."""
    if any(each.verify for each in parts.values()):
        return reader  # a digest that disagrees is to be an error
    lazy = reader.array
    stored = {
        role: replace(each.part, offset=0, digest=None, shard=None, inline=None)
        for role, each in parts.items()
    }
    names = ("order", "quantization", "block_type", "strict", "decode")
    how = [getattr(lazy, name, None) for name in names]
    return type(lazy), lazy.shape, stored, how


def _nbytes(part: PartReader) -> int:
    inline = part.part.inline
    return part.part.nbytes if inline is None else len(inline)


# --- which tensors belong together --------------------------------------------------------------


class Partner(NamedTuple):
    """The tensor of the other side, and what says so: a rule of `compare`."""

    name: str
    rule: str


class Match(NamedTuple):
    """A tensor of either side, or two that belong together."""

    #: Of the tensor, in `a` if it is there.
    name: str
    #: Those that are there; neither of one that was not chosen.
    ours: Reader | None = None
    theirs: Reader | None = None
    #: In `b`, if there is one.
    partner: Partner | None = None
    #: Both, if they are of one shape: to be read.
    pair: PairReader | ChunkedPair | None = None

    @property
    def status(self) -> str:
        """What is known without reading: one of `STATUSES`, or nothing."""
        if self.theirs is None:
            return "" if self.ours is None else "only_a"
        if self.ours is None:
            return "only_b"
        return "shape" if self.pair is None else ""

    @property
    def is_chosen(self) -> bool:
        """Whether something is to be said of it."""
        return self.ours is not None or self.theirs is not None

    @property
    def size(self) -> int:
        """Number of elements, in `a` if it is there."""
        reader = self.theirs if self.ours is None else self.ours
        return 0 if reader is None else reader.size

    @property
    def both(self) -> tuple[Reader, Reader] | None:
        """The tensors, if they are to be compared."""
        ours, theirs = self.ours, self.theirs
        return None if self.pair is None or ours is None or theirs is None else (ours, theirs)

    @property
    def shapes(self) -> str:
        """The shapes, where they differ."""
        if self.ours is None or self.theirs is None or self.pair is not None:
            return ""
        return f"{self.ours.array.shape} and {self.theirs.array.shape}"
