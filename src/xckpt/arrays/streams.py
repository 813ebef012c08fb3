"""Streams: all elements of a tensor, block by block, whatever its layout and wherever it is.

Every command that reads whole tensors reads them here. `of_tensor` and `of_array` make a stream;
`Zip` joins two to pairs of elements, and `Raw` has the stored bytes. A stream is a sequence of
elements in the order in which they are cheapest to read. It has no memory of its own: a task gives
it a buffer, and a block is valid until the next one.

Chunks of dask arrays that are runs of elements in C order have positions in the tensor, and results
do not depend on how the tensor is cut into such chunks. Other chunks are rechunked to runs if a row
of them is small. If it is not, elements come in the order of the chunks, on which the last bits of
moments then depend.
"""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from dataclasses import fields
from itertools import accumulate, product
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np

from xckpt.arrays.dense import stored_bytes
from xckpt.arrays.kinds import kind_named, magnitudes, require_numbers
from xckpt.arrays.lazy import PIECE_NBYTES, LazyArray, UnreadableArray, dense_values, flat_blocks
from xckpt.arrays.sparse import SparseArray, flat_positions
from xckpt.errors import CheckpointError, UnsupportedError
from xckpt.index import Part

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from xckpt.arrays.dense import DenseArray
    from xckpt.arrays.kinds import Kind
    from xckpt.storage import Source
    from xckpt.storage.prefetch import Range
    from xckpt.structure import Channels
    from xckpt.typing import Array

    #: The position of the first element, and an array of elements for each side: one, or two.
    Block = tuple[int, tuple[Any, ...]]

#: Elements of a leaf, the smallest part of a stream that is added up by itself: 64 KiB of float32,
#: so that several loops find it in the L2 cache.
LEAF = 1 << 14
#: Attributes of lazy arrays that determine their elements, besides the stored parts.
DECODING = ("order", "strict", "block_type", "quantization", "origins")
_FIELDS = attrgetter(*(field.name for field in fields(Part)))
_LARGEST_BAND = 64 << 20
# Largest tensor that is read together with its neighbours.
_SMALL_NBYTES = 1 << 18


class ElementStream:
    """A tensor as a flat sequence; pickles by reference, so that tasks open the file themselves."""

    #: The tensor's own name in the file.
    name: str = ""
    #: Kind of the elements that `blocks` yields.
    kind: Kind
    #: Number of elements, implied zeros of a sparse tensor included.
    size: int
    #: Bytes to read, for the progress.
    nbytes: int
    #: Elements in a row, which is a slice along the axis that is stored slowest; 0 where there is
    #: but one axis.
    row: int = 0
    #: The data: a lazy array, or anything that is indexed like an array.
    array: Any
    #: Whether reading a part costs as much as reading all.
    whole = False
    #: Whether the elements are in the memory of this process.
    local = False
    #: Whether elements are magnitudes: the kernels know no complex numbers.
    complex = False
    #: Whether rows of the tensor are stored as columns.
    is_turned = False
    #: Whether `blocks` has stored values only; their positions count these values.
    sparse = False
    #: The error of reading it, for a tensor that cannot be read.
    problem: CheckpointError | None = None
    #: Axes of its rows and columns; None for the axis that is stored slowest and all others.
    channels: Channels | None = None
    #: File and offset, to read in this order.
    place: tuple[str, int] = ("", 0)
    #: Stored parts with their files, and options of decoding; None if the content may change.
    identity: tuple[Any, ...] | None = None

    def __init__(self, array: Any, kind: Kind, nbytes: int | None = None) -> None:
        self.array = array
        self.kind = kind
        self.complex = array.dtype.kind == "c"
        self.size = prod(array.shape)
        self.nbytes = self.size * array.dtype.itemsize if nbytes is None else nbytes
        self.row = prod(array.shape[1:]) if len(array.shape) > 1 else 0

    @property
    def shared_source(self) -> Source | None:
        """The local file that has all elements, which are few, as they are from `place` on."""
        return None

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[Block]:
        """Read a range of the elements, perhaps into a buffer of bytes that is used again."""
        raise NotImplementedError

    def step(self, buffer: Array) -> int:
        """Return the number of elements of each block but the last, or 1 if it is not known."""
        return 1

    def cuts(self, start: int, stop: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Cut a range into ranges of whole leaves that can be read alone, of about a size."""
        step = max(LEAF, nbytes // self.kind.itemsize // LEAF * LEAF)
        if self.whole or stop - start <= step:
            yield start, stop
            return
        for first in range(start, stop, step):
            yield first, min(first + step, stop)

    def ranges(self, start: int, stop: int) -> Iterator[Range]:
        """Return the byte ranges that are read for elements, if they are known before."""
        # If the ranges of a part of the elements are unknown, the first elements have all.
        if start == 0 and hasattr(self.array, "ranges"):
            yield from self.array.ranges(...)

    def share(self, start: int, stop: int) -> int:
        """Return how many of the bytes a range of the elements counts for."""
        if not self.size:
            return self.nbytes
        return self.nbytes * stop // self.size - self.nbytes * start // self.size

    def _identify(self, lazy: Any) -> None:
        """Add the place and the identity of a lazy array that is made of parts."""
        if hasattr(lazy, "readers"):
            part = (lazy.readers.get("data") or next(iter(lazy.readers.values()))).part
            self.place = (lazy.source.name, part.offset)
            self.nbytes = getattr(lazy, "part_nbytes", lazy.stored_nbytes)
            # The fields of parts: to write the part itself takes several times as long.
            stored = [
                (role, part.source.name, part.source.identity, _FIELDS(part.part), part.verify)
                for role, part in lazy.readers.items()
            ]
            decoding = [getattr(lazy, name, None) for name in DECODING]
            self.identity = (tuple(stored), lazy.shape, *decoding)


def of_tensor(lazy: LazyArray, name: str = "") -> ElementStream:
    """Return the elements of a tensor of a file, in the order in which they are stored."""
    stream: ElementStream
    if isinstance(lazy, SparseArray) and 0 not in lazy.shape:
        stream = SparseStream(lazy)
    elif isinstance(lazy, UnreadableArray):
        stream = UnreadableStream(lazy)
    else:
        stream = StoredStream(lazy)
    stream.name = stream.name or name
    return stream


def of_array(array: Any, name: str = "") -> ElementStream:
    """Return the elements of a dask array, or of anything that is indexed like an array."""
    stream: ElementStream = ChunkedStream(array) if hasattr(array, "dask") else ArrayStream(array)
    stream.local = not hasattr(array, "dask")
    stream.name = name
    return stream


def whole_leaves(blocks: Iterable[Block], leaf: int = LEAF) -> Iterator[Block]:
    """Join and cut blocks, so that each begins with a leaf, and all but the last end with one."""
    pieces: list[tuple[Any, ...]] = []
    first = collected = 0
    for position, columns in blocks:
        count = len(columns[0])
        if collected:
            head = min(leaf - collected, count)
            pieces.append(tuple([column[:head].copy() for column in columns]))
            collected += head
            if collected < leaf:
                continue
            yield first, _joined(pieces)
            pieces, collected = [], 0
            position, count = position + head, count - head  # noqa: PLW2901
            columns = tuple([column[head:] for column in columns])  # noqa: PLW2901
        end = count // leaf * leaf
        if end == count:
            if count:
                yield position, columns
            continue
        if end:
            yield position, tuple([column[:end] for column in columns])
        first, collected = position + end, count - end
        pieces = [tuple([column[end:].copy() for column in columns])]
    if collected:
        yield first, _joined(pieces)


def _joined(pieces: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple([np.concatenate(column) for column in zip(*pieces, strict=True)])


# --- tensors of files ----------------------------------------------------------------------------


class StoredStream(ElementStream):
    """A tensor of a file: elements in the order in which they are stored."""

    def __init__(self, lazy: LazyArray) -> None:
        lazy.require_expansion()
        super().__init__(lazy, require_numbers(lazy.flat_dtype))
        self.whole = lazy.is_stream
        self.is_turned = lazy.order == "F" and not self.complex
        if self.is_turned:
            self.row = prod(lazy.shape[:-1]) if lazy.ndim > 1 else 0
        self._identify(lazy)

    @property
    def shared_source(self) -> Source | None:
        """See `ElementStream.shared_source`."""
        if self.array.is_raw:
            part = self.array.reader.part
            if part.nbytes == self.nbytes <= _SMALL_NBYTES and part.digest is None:
                with suppress(OSError, CheckpointError):  # reading it raises them
                    file: Source = self.array.reader.source.file
                    return file if file.is_near else None
        return None

    @property
    def block_dtype(self) -> np.dtype[Any]:
        """The dtype of raw blocks: elements, or bit patterns of exact kinds, which are counted."""
        return self.kind.unsigned if self.kind.exact else self.kind.dtype

    def ranges(self, start: int, stop: int) -> Iterator[Range]:
        """Return the byte ranges of elements; see `LazyArray.flat_ranges`."""
        ranges: Iterator[Range] = self.array.flat_ranges(start, stop)
        return ranges

    def step(self, buffer: Array) -> int:
        """Return the number of elements that the buffer has room for, if they are raw."""
        return len(buffer) // self.block_dtype.itemsize if self.array.is_raw else 1

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[Block]:
        """Read a range of the elements; raw ones at once into the buffer."""
        if self.array.is_raw:
            return raw_blocks(self.array, self.block_dtype, start, stop, buffer)
        flat = self.array.flat(start, stop, buffer)
        if self.complex:
            return ((position, (magnitudes(values),)) for position, values in flat)
        return ((position, (values,)) for position, values in flat)


def raw_blocks(
    lazy: Any, dtype: np.dtype[Any], start: int, stop: int, buffer: Array
) -> Iterator[Block]:
    """Read raw elements into a buffer, as elements of a dtype."""
    # As few steps as possible: the threads of a scan wait for each other in them.
    itemsize = dtype.itemsize
    memory = buffer[: len(buffer) // itemsize * itemsize]
    elements = memory.view(dtype)
    reader = lazy.reader
    offset, nbytes = reader.part.offset + start * itemsize, (stop - start) * itemsize
    if not nbytes:
        return  # an empty tensor needs no file
    reader.check(lazy.part_nbytes)
    count = len(elements)
    for _ in reader.source.blocks_in(memory.data, offset, nbytes):
        if start + count > stop:
            elements = elements[: stop - start]
        yield start, (elements,)
        start += count


class SparseStream(ElementStream):
    """The stored values of a sparse tensor, in the order of their positions."""

    whole = sparse = True

    def __init__(self, lazy: SparseArray) -> None:
        super().__init__(lazy, require_numbers(lazy.dtype))
        self._identify(lazy)
        if self.size > sys.maxsize:
            raise UnsupportedError(
                f"{self.size} elements are more than can be counted",
                path=lazy.source.name,
                tensor=lazy.name,
                hint="Leave it out",
            )
        #: Rows without a nonzero element, once all blocks have been read.
        self.dead = 0

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[Block]:
        """Yield stored values, and count the rows of zeros."""
        position = self.dead = 0
        for block in self.array.blocks():
            rows = block.coords[0][block.values != 0]
            alive = int(np.count_nonzero(np.diff(rows, prepend=-1)))
            self.dead += block.stop - block.start - alive
            values: Array = magnitudes(block.values) if self.complex else block.values
            if len(values):
                yield position, (values,)
            position += len(values)


class UnreadableStream(ElementStream):
    """A tensor that cannot be read, in the place of its elements."""

    def __init__(self, lazy: UnreadableArray) -> None:
        super().__init__(lazy, kind_named("float32"))
        self.name, self.problem = lazy.name, lazy.error()


class Raw(ElementStream):
    """The bytes of all parts of a tensor, one part after the other, without decoding."""

    kind = kind_named("uint8")

    def __init__(self, tensor: ElementStream) -> None:
        parts = list(tensor.array.readers.values())
        self.arrays = [stored_bytes(part, tensor.array.name) for part in parts]
        self.size = self.nbytes = sum(array.shape[0] for array in self.arrays)
        self.place = (parts[0].source.name, parts[0].part.offset)

    def ranges(self, start: int, stop: int) -> Iterator[Range]:
        """Yield the byte ranges in files from `start` to `stop`."""
        for array, _, low, high in self._shares(start, stop):
            yield from array.flat_ranges(low, high)

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[Block]:
        """Yield blocks of bytes, each with its first position."""
        for array, first, low, high in self._shares(start, stop):
            if array.is_raw:
                blocks = raw_blocks(array, array.dtype, low, high, buffer)
                yield from ((first + position, columns) for position, columns in blocks)
            else:
                yield first + low, (array[low:high],)

    def _shares(self, start: int, stop: int) -> Iterator[tuple[DenseArray, int, int, int]]:
        """Yield the parts with bytes in a range: where a part begins, and the range in it."""
        first = 0
        for array in self.arrays:
            (nbytes,) = array.shape
            low, high = max(start - first, 0), min(stop - first, nbytes)
            if low < high:
                yield array, first, low, high
            first += nbytes


# --- arrays --------------------------------------------------------------------------------------


class ArrayStream(ElementStream):
    """Anything that is indexed like an array, in C order."""

    #: Whether blocks consist of whole rows, however long these are.
    whole_rows = False
    #: Whether the array is loaded before its first block, because reading pieces costs too much.
    loads = False

    def __init__(self, array: Any, nbytes: int | None = None) -> None:
        if isinstance(array, LazyArray):
            array.require_expansion()
        super().__init__(array, require_numbers(array.dtype), nbytes)
        self.piece_nbytes = PIECE_NBYTES

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[Block]:
        """Read a range of the elements."""
        array = self.array
        if self.loads:
            array = array.loaded() if hasattr(array, "loaded") else dense_values(array[...])
        pieces = flat_blocks(array, start, stop, self.piece_nbytes, whole_rows=self.whole_rows)
        for position, values in pieces:
            yield position, (magnitudes(values) if self.complex else values,)


class ChunkedStream(ElementStream):
    """A dask array as a sequence of elements, which a scheduler computes chunk by chunk."""

    def __init__(self, array: Any) -> None:
        if any(math.isnan(size) for sizes in array.chunks for size in sizes):
            array = array.compute_chunk_sizes()
        super().__init__(array, require_numbers(array.dtype))
        self.array, runs = _in_runs(array)
        if not runs:
            self.row = 0

    def flat(self, leaf: int) -> Any:
        """Return the elements as a dask array with one axis, whose chunks are whole leaves."""
        import dask.array as da
        from dask.highlevelgraph import HighLevelGraph

        sizes = [prod(extents) for extents in product(*self.array.chunks)]
        positions = product(*(range(len(along)) for along in self.array.chunks))
        name = f"xckpt-flat-{uuid4().hex}"
        layer: dict[Any, Any] = {
            (name, number): (_flat_values, (self.array.name, *position))
            for number, position in enumerate(positions)
        }
        graph = HighLevelGraph.from_collections(name, layer, dependencies=[self.array])
        meta = np.empty(0, self.array.dtype)
        flat = da.Array(graph, name, (tuple(sizes),), meta=meta)
        ends = list(accumulate(sizes))
        stops = sorted({*(end // leaf * leaf for end in ends), ends[-1]} - {0})
        chunks = tuple(np.diff(stops, prepend=0).tolist()) or (0,)
        return flat if chunks == flat.chunks[0] else flat.rechunk((chunks,))


def _flat_values(block: Any) -> Array:
    return dense_values(block).reshape(-1)


def _in_runs(array: Any) -> tuple[Any, bool]:
    """Rechunk an array so that chunks are runs if that is cheap; return whether they are."""
    axis = next((k for k, sizes in enumerate(array.chunks) if max(sizes) > 1), array.ndim)
    split = [k for k in range(axis + 1, array.ndim) if len(array.chunks[k]) > 1]
    if not split:
        return array, True
    band = max(array.chunks[axis]) * prod(array.shape[axis + 1 :]) * array.dtype.itemsize
    if band > _LARGEST_BAND:
        return array, False
    return array.rechunk(dict.fromkeys(split, -1)), True


# --- pairs ---------------------------------------------------------------------------------------


class Zip(ElementStream):
    """Two streams of one size as pairs of elements; both have the same order."""

    #: Whether pairs of zeros are left out.
    omits_zeros = False

    def __init__(self, first: ElementStream, second: ElementStream) -> None:
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

    def _shares(self, buffer: Array) -> tuple[Array, Array]:
        """Divide a buffer so that both sides have room for as many leaves, a power of two."""
        itemsizes = self.first.kind.itemsize, self.second.kind.itemsize
        leaves = max(1, buffer.nbytes // (sum(itemsizes) * LEAF))
        step = LEAF << (leaves.bit_length() - 1)
        cut = step * itemsizes[0]
        return buffer[:cut], buffer[cut : cut + step * itemsizes[1]]

    def step(self, buffer: Array) -> int:
        """Return the number of pairs that the buffer has room for, if both sides are raw."""
        first, second = self._shares(buffer)
        step = self.first.step(first)
        return step if step == self.second.step(second) else 1

    def ranges(self, start: int, stop: int) -> Iterator[Range]:
        """Yield the byte ranges of both tensors."""
        yield from self.first.ranges(start, stop)
        yield from self.second.ranges(start, stop)

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[Block]:
        """Yield blocks of pairs, as long as the shorter block of both sides."""
        buffers = self._shares(buffer)
        first, second = (
            side.blocks(start, stop, share)
            for side, share in zip((self.first, self.second), buffers, strict=True)
        )
        a = b = np.empty(0)
        if self.step(buffer) > 1:
            for (position, (a,)), (_, (b,)) in zip(first, second, strict=True):
                yield position, (a, b)
            return
        while start < stop:
            if not len(a):
                _, (a,) = next(first)
            if not len(b):
                _, (b,) = next(second)
            count = min(len(a), len(b))
            yield start, (a[:count], b[:count])
            a, b, start = a[count:], b[count:], start + count


class SparseZip(Zip):
    """The values stored by either of two sparse tensors of one shape, without making them dense.

    Positions count these values. Zeros that neither tensor stores fill up the last leaf.
    """

    omits_zeros = True

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[Block]:
        """Yield blocks of all stored values, each with its first position."""
        for position, columns in whole_leaves(self._unions()):
            count = len(columns[0])
            short = min(-count % LEAF, self.size - position - count)
            yield position, tuple([np.pad(side, (0, short)) if short else side for side in columns])

    def _unions(self) -> Iterator[Block]:
        """Yield the values stored by either side, a batch of rows at a time, in C order."""
        rows = [_StoredRows(stream.array) for stream in (self.first, self.second)]
        nrows = self.first.array.shape[0]
        row = position = 0
        while row < nrows:
            row = min(side.stop for side in rows)
            places, values = zip(*(side.up_to(row) for side in rows), strict=True)
            union = np.union1d(*places)
            filled = [np.zeros(len(union), stored.dtype) for stored in values]
            for target, side_places, stored in zip(filled, places, values, strict=True):
                target[np.searchsorted(union, side_places)] = stored
            yield position, tuple(filled)
            position += len(union)
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


class ChunkedZip(ChunkedStream):
    """Two tensors of one shape as chunks of pairs; at least one tensor is a dask array."""

    omits_zeros = False

    def __init__(self, first: ElementStream, second: ElementStream) -> None:
        import dask.array as da

        leading = first if isinstance(first, ChunkedStream) else second
        super().__init__(leading.array)
        chunks = self.array.chunks
        a, b = _dask_array(first, chunks), _dask_array(second, chunks)
        dtype = np.dtype([("a", a.dtype), ("b", b.dtype)])
        meta = np.empty((0,) * a.ndim, dtype)
        self.kinds = _dtype_name(a.dtype), _dtype_name(b.dtype)
        self.array = da.map_blocks(_paired, a, b, dtype=dtype, meta=meta)
        self.nbytes = first.nbytes + second.nbytes
        self.row = 0


def _dask_array(stream: ElementStream, chunks: Any) -> Any:
    import dask.array as da

    array = stream.array
    if isinstance(stream, ChunkedStream):
        return array.rechunk(chunks)
    meta = np.empty((0,) * len(array.shape), array.dtype)
    return da.from_array(array, chunks, f"xckpt-compare-{uuid4().hex}", meta=meta)


def _paired(a: Any, b: Any) -> Array:
    dense = [dense_values(a), dense_values(b)]
    block = np.empty(dense[0].shape, [("a", dense[0].dtype), ("b", dense[1].dtype)])
    block["a"], block["b"] = dense
    return block


def columns_of(values: Array) -> tuple[Array, ...]:
    """Return the columns of a computed chunk: its elements, or both sides of its pairs."""
    if values.dtype.names:
        return values["a"], values["b"]
    return (magnitudes(values) if values.dtype.kind == "c" else values,)


def _type_name(stream: ElementStream) -> str:
    return "complex128" if stream.array.dtype.kind == "c" else stream.kind.name


def _dtype_name(dtype: np.dtype[Any]) -> str:
    return "complex128" if dtype.kind == "c" else require_numbers(dtype).name
