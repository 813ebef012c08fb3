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
from functools import cached_property
from itertools import accumulate, chain, product, repeat
from math import prod
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np

from xckpt.arrays.dense import DenseArray, OnePartArray, stored_bytes
from xckpt.arrays.kinds import Kind, kind_named, require_numbers
from xckpt.arrays.lazy import LazyArray, UnreadableArray, dense_values
from xckpt.arrays.scaled import QuantizedArray
from xckpt.arrays.sparse import SparseArray, flat_positions
from xckpt.errors import CheckpointError, UnsupportedError
from xckpt.index import Part

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from xckpt.storage import Source
    from xckpt.storage.prefetch import Range
    from xckpt.structure import Channels
    from xckpt.typing import Array

    #: The position of the first element, and an array of elements for each side: one, or two.
    Block = tuple[int, tuple[Any, ...]]

#: Elements of a leaf, the smallest part of a stream that is added up by itself: 64 KiB of float32,
#: so that several loops find it in the L2 cache.
LEAF = 1 << 14
#: Size of what is read or decoded of an array at a time, in bytes.
PIECE_NBYTES = 4 << 20
#: The same for tensors whose rows are in many places of the file.
TURNED_NBYTES = 32 << 20
# Columns of a transposed matrix that are copied together.
_STRIP = 64
#: Attributes of lazy arrays that determine their elements, besides the stored parts.
DECODING = ("order", "strict", "block_type", "quantization", "origins")
_FIELDS = attrgetter(*(field.name for field in fields(Part)))
_LARGEST_BAND = 64 << 20
# Largest tensor that is read together with its neighbours.
_SMALL_NBYTES = 1 << 18


class ElementStream:
    """A tensor as a flat sequence; pickles by reference, so that tasks open the file themselves."""

    #: Name of the tensor in results.
    name: str = ""
    #: Name of the tensor in its file, for errors.
    tensor: str = ""
    #: Number of elements, implied zeros of a sparse tensor included.
    size: int
    #: Bytes to read, for the progress.
    nbytes: int
    #: Elements in a row, which is a slice along the axis that is stored slowest; 0 where there is
    #: but one axis.
    row: int = 0
    #: Elements that a cut does not separate.
    leaf: int = LEAF
    #: The data: a lazy array, or anything that is indexed like an array.
    array: Any
    #: Whether reading a part costs as much as reading all.
    whole = False
    #: Whether the elements are in the memory of this process.
    local = False
    #: Whether elements are complex numbers; statistics describe their magnitudes.
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

    def __init__(self, array: Any, nbytes: int | None = None) -> None:
        self.array = array
        self.complex = array.dtype.kind == "c"
        self.size = prod(array.shape)
        self.nbytes = self.size * array.dtype.itemsize if nbytes is None else nbytes
        self.row = prod(array.shape[1:]) if len(array.shape) > 1 else 0

    @cached_property
    def kind(self) -> Kind:
        """Kind of the elements, or of the magnitudes of complex ones."""
        return require_numbers(self.array.dtype)

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
        step = max(self.leaf, nbytes // self.kind.itemsize // self.leaf * self.leaf)
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
            values = [getattr(lazy, name, None) for name in DECODING]
            # The origins of chunks are by the name of the part.
            decoding = [(*v.items(),) if isinstance(v, dict) else v for v in values]
            self.identity = (tuple(stored), lazy.shape, *decoding)


def of_tensor(lazy: LazyArray, name: str = "") -> ElementStream:
    """Return the elements of a tensor of a file, in the order in which they are stored."""
    stream: ElementStream
    if isinstance(lazy, OnePartArray) and not (lazy.order == "F" and lazy.dtype.kind == "c"):
        stream = StoredStream(lazy)
    elif isinstance(lazy, UnreadableArray):
        return UnreadableStream(lazy, name)
    elif isinstance(lazy, SparseArray) and 0 not in lazy.shape:
        stream = SparseStream(lazy)
    else:
        stream = ArrayStream(lazy)
    _ = stream.kind  # raises for elements that are not numbers
    stream._identify(lazy)  # noqa: SLF001
    stream.name, stream.tensor = name or lazy.name, lazy.name
    return stream


def of_array(array: Any, name: str = "") -> ElementStream:
    """Return the elements of a dask array, or of anything that is indexed like an array."""
    stream: ElementStream = ChunkedStream(array) if hasattr(array, "dask") else ArrayStream(array)
    stream.local = not hasattr(array, "dask")
    stream.name = stream.tensor = name
    _ = stream.kind  # raises for elements that are not numbers
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
    """A tensor in one part of a file: elements in the order in which they are stored."""

    array: OnePartArray

    def __init__(self, lazy: OnePartArray) -> None:
        lazy.require_expansion()
        super().__init__(lazy)
        self.whole = lazy.is_stream
        self.is_turned = lazy.order == "F"
        if self.is_turned:
            self.row = prod(lazy.shape[:-1]) if lazy.ndim > 1 else 0

    @cached_property
    def kind(self) -> Kind:
        """Kind of the elements in their stored type; see `OnePartArray.undecoded`."""
        return require_numbers(self.array.undecoded_dtype)

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
        """Return the byte ranges of elements; see `OnePartArray.flat_ranges`."""
        return self.array.flat_ranges(start, stop)

    def step(self, buffer: Array) -> int:
        """Return the number of elements that the buffer has room for, if they are raw."""
        return len(buffer) // self.block_dtype.itemsize if self.array.is_raw else 1

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[Block]:
        """Read a range of the elements into the buffer; a stream from its start to its end."""
        if self.array.is_raw:
            return raw_blocks(self.array, self.block_dtype, start, stop, buffer)
        flat = self.array.undecoded.flattened()
        if isinstance(flat, DenseArray) and flat.is_stream:
            blocks = flat.stream(len(buffer))
        else:
            blocks = flat.blocks_in(buffer, start, stop)
        return ((position, (values,)) for position, values in blocks)


def raw_blocks(
    lazy: Any, dtype: np.dtype[Any], start: int, stop: int, buffer: Array
) -> Iterator[Block]:
    """Read raw elements into a buffer, as elements of a dtype."""
    itemsize = dtype.itemsize
    memory = buffer[: len(buffer) // itemsize * itemsize]
    elements = memory.view(dtype)
    reader = lazy.reader
    offset, nbytes = reader.part.offset + start * itemsize, (stop - start) * itemsize
    if not nbytes:
        return iter(())  # an empty tensor needs no file
    reader.check(lazy.part_nbytes)
    # No generator: the threads of a scan wait for each other in its steps.
    whole, last = divmod(stop - start, len(elements))
    columns = chain(repeat((elements,), whole), [(elements[:last],)])
    blocks = reader.source.blocks_in(memory.data, offset, nbytes)
    starts = range(start, stop, len(elements))
    return map(itemgetter(0, 1), zip(starts, columns, blocks, strict=False))


class SparseStream(ElementStream):
    """The stored values of a sparse tensor, in the order of their positions."""

    whole = sparse = True

    def __init__(self, lazy: SparseArray) -> None:
        super().__init__(lazy)
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
            if len(block.values):
                yield position, (block.values,)
            position += len(block.values)


class UnreadableStream(ElementStream):
    """A tensor that cannot be read, in the place of its elements."""

    def __init__(self, lazy: UnreadableArray, name: str = "") -> None:
        super().__init__(lazy)
        self.name, self.problem = name or lazy.name, lazy.error()


class Raw(ElementStream):
    """The bytes of all parts of a tensor, one part after the other, without decoding."""

    def __init__(self, tensor: ElementStream) -> None:
        parts = list(tensor.array.readers.values())
        self.arrays = [stored_bytes(part, tensor.array.name) for part in parts]
        self.size = self.nbytes = sum(array.shape[0] for array in self.arrays)
        self.place = (parts[0].source.name, parts[0].part.offset)
        self.kind = kind_named("uint8")

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
        super().__init__(array, nbytes)
        self.piece_nbytes = PIECE_NBYTES
        if isinstance(array, QuantizedArray) and array.is_turned:
            self.read_rows(TURNED_NBYTES)

    def read_rows(self, nbytes: int) -> None:
        """Read blocks of whole rows, of about a size."""
        self.piece_nbytes, self.whole_rows = nbytes, True

    def blocks(self, start: int, stop: int, buffer: Array | None = None) -> Iterator[Block]:
        """Read a range of the elements, in blocks of positions along an axis."""
        array, shape = self.array, self.array.shape
        if start >= stop:
            return
        if self.loads:
            array = array.loaded() if hasattr(array, "loaded") else dense_values(array[...])
        if not shape:
            yield 0, (dense_values(array[()]).reshape(-1),)
            return
        # The axis is the first one whose positions are short enough, or the first one of all.
        most = max(1, self.piece_nbytes // np.dtype(array.dtype).itemsize)
        axis, inner = 0, prod(shape[1:])
        while inner > most and axis + 1 < len(shape) and not self.whole_rows:
            axis += 1
            inner = prod(shape[axis + 1 :])
        count = max(1, most // inner)
        while start < stop:
            line, first = divmod(start // inner, shape[axis])
            lead = np.unravel_index(line, shape[:axis]) if axis else ()
            last = min(shape[axis], first + count, first + -(-(stop - start) // inner) + 1)
            values = _in_c_order(dense_values(array[(*map(int, lead), slice(first, last))]))
            begin = (line * shape[axis] + first) * inner
            values = values[start - begin : stop - begin]
            yield start, (values,)
            start += len(values)


def _in_c_order(values: Array) -> Array:
    """Return the elements of an array as one axis, in C order."""
    if values.ndim != 2 or values.flags.c_contiguous or not values.flags.f_contiguous:
        return values.reshape(-1)
    # numpy reads whole columns, which evict each other from the cache if their length is even.
    out = np.empty(values.shape, values.dtype)
    for start in range(0, values.shape[1], _STRIP):
        out[:, start : start + _STRIP] = values[:, start : start + _STRIP]
    return out.reshape(-1)


class Transposed:
    """An array with its axes in another order, which reads what is selected."""

    def __init__(self, array: Any, axes: Sequence[int]) -> None:
        self.array, self.axes, self.dtype = array, tuple(axes), array.dtype
        self.shape = tuple([array.shape[axis] for axis in self.axes])

    def __getitem__(self, key: Any) -> Array:
        keys = () if key is ... else key
        entries = dict.fromkeys(self.axes, slice(None)) | dict(zip(self.axes, keys, strict=False))
        values = dense_values(self.array[tuple([entries[axis] for axis in sorted(entries)])])
        remaining = [axis for axis in self.axes if isinstance(entries[axis], slice)]
        stored = sorted(remaining)
        return values.transpose([stored.index(axis) for axis in remaining])

    def ranges(self, key: Any) -> Iterator[Range]:
        """Return the byte ranges of the whole array, if they are known before."""
        if hasattr(self.array, "ranges"):
            yield from self.array.ranges(...)


class ChunkedStream(ElementStream):
    """A dask array as a sequence of elements, which a scheduler computes chunk by chunk."""

    def __init__(self, array: Any) -> None:
        self.kind = require_numbers(array.dtype)  # its tasks have no array
        if any(math.isnan(size) for sizes in array.chunks for size in sizes):
            array = array.compute_chunk_sizes()
        super().__init__(array)
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
    return (values,)


def _type_name(stream: ElementStream) -> str:
    return "complex128" if stream.array.dtype.kind == "c" else stream.kind.name


def _dtype_name(dtype: np.dtype[Any]) -> str:
    return "complex128" if dtype.kind == "c" else require_numbers(dtype).name
