"""The elements of a tensor as a flat sequence, read block by block in the order they are stored.

Dask arrays that are not read from a checkpoint come in chunks. A chunk that is a run of elements in
C order has a position in the tensor, and the moments do not depend on how the tensor is cut into
such chunks. Chunks that are no runs are made into runs where a row of them is small; else the
elements are taken in the order of the chunks, and the last bits of the moments (of nothing else)
depend on how the array is chunked.
"""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from dataclasses import fields
from itertools import product
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.blocks import BlockArray
from xckpt.arrays.dense import DenseArray
from xckpt.arrays.lazy import LazyArray
from xckpt.arrays.scaled import CodebookArray, QuantizedArray
from xckpt.arrays.sparse import SparseArray, dense_values
from xckpt.elements import ELEMENT_TYPES, nbytes_of
from xckpt.errors import CheckpointError, UnsupportedError, locating
from xckpt.index import Part
from xckpt.scan.kinds import Kind, kind_named, magnitudes, require_numbers
from xckpt.storage.encodings import STREAMS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xckpt.storage import Source
    from xckpt.storage.prefetch import Range

Array = np.ndarray[Any, np.dtype[Any]]

_FIELDS = attrgetter(*(field.name for field in fields(Part)))
# Block size of decoded data and of arrays that are not files, in bytes.
_PIECE_NBYTES = 4 << 20
_LARGEST_BAND = 64 << 20
# Largest tensor that is read together with its neighbours.
_SMALL_NBYTES = 1 << 18
# Block size of tensors stored in another order of axes, whose rows are in many places.
_TURNED_NBYTES = 32 << 20


class Reader:
    """A tensor as a flat sequence; pickles by reference, so that tasks open the file themselves."""

    #: The tensor's own name in the file.
    name: str = ""
    #: Of the elements that `blocks` gives.
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
    #: Whether `rows` gives stored values only; whether pairs of zeros are left out.
    sparse = False
    omits_zeros = False
    #: File and offset, to read in this order.
    place: tuple[str, int] = ("", 0)
    #: Stored parts with their files, and options of decoding; None if the content may change.
    identity: tuple[Any, ...] | None = None

    @property
    def shared_source(self) -> Source | None:
        """The local file that has all elements, which are few, as they are from `place` on."""
        return None

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[tuple[int, Any]]:
        """Read some of the elements, perhaps into a buffer of bytes that is used again."""
        raise NotImplementedError

    def ranges(self, start: int, stop: int) -> Iterator[Range]:
        """Return what is read for some of the elements, as far as is known before."""
        # Told by who reads the first of them, or again and again.
        if start == 0 and isinstance(self.array, LazyArray):
            yield from self.array.ranges(...)

    def share(self, start: int, stop: int) -> int:
        """Return how many of the bytes a range of the elements counts for."""
        if not self.size:
            return self.nbytes
        return self.nbytes * stop // self.size - self.nbytes * start // self.size


class RawReader(Reader):
    """Elements that are stored as the kernels want them: read into one buffer, never decoded."""

    def __init__(self, lazy: DenseArray) -> None:
        self.array = lazy
        part = lazy.reader.part
        self.kind = kind_named(part.dtype)
        _describe_dense(self, lazy)

    @property
    def shared_source(self) -> Source | None:
        """See `Reader.shared_source`."""
        part = self.array.reader.part
        if part.nbytes == self.nbytes <= _SMALL_NBYTES and part.digest is None:
            with suppress(OSError, CheckpointError):  # reading it tells
                near: Source | None = self.array.reader.source.near
                return near
        return None

    @property
    def block_dtype(self) -> np.dtype[Any]:
        """The dtype of blocks: elements, or bit patterns of exact kinds, which are only counted."""
        return self.kind.unsigned if self.kind.exact else self.kind.dtype

    def ranges(self, start: int, stop: int) -> Iterator[Range]:
        """Return the bytes of some of the elements."""
        reader, itemsize = self.array.reader, self.kind.itemsize
        if stop > start and reader.part.nbytes:
            yield reader.source, reader.part.offset + start * itemsize, (stop - start) * itemsize

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[tuple[int, Array]]:
        """Read a range of the elements."""
        flat = DenseArray(self.array.name, self.array.reader, (self.size,), decode=False)
        for position, values in _read_flat(flat, start, stop, buffer):
            yield position, values.view(self.block_dtype)


class DenseReader(Reader):
    """Dense elements that are compressed, packed, in another byte order, or booleans."""

    def __init__(self, lazy: DenseArray) -> None:
        lazy.require_expansion()
        self.array = lazy
        # All elements in the order they are stored, in their own type.
        decode = ELEMENT_TYPES[lazy.reader.part.dtype].decoded == "bool"
        shape = (prod(lazy.shape),)
        self.flat = DenseArray(lazy.name, lazy.reader, shape, decode=decode, strict=lazy.strict)
        self.kind = require_numbers(self.flat.dtype)
        _describe_dense(self, lazy)
        self.whole = lazy.reader.part.encoding in STREAMS

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[tuple[int, Array]]:
        """Read some of the elements."""
        if self.whole:
            # A stream that can be decoded only from its start is not kept.
            yield from self._decoded()
            return
        step = max(1, _PIECE_NBYTES // self.kind.itemsize)
        for at in range(start, stop, step):
            yield at, self.flat[at : min(at + step, stop)]

    def _decoded(self) -> Iterator[tuple[int, Array]]:
        with locating(tensor=self.flat.name):
            yield from self.flat.flat(_PIECE_NBYTES)


class BlockReader(Reader):
    """Blocks of quantised elements, decoded into one buffer."""

    kind = kind_named("float32")

    def __init__(self, lazy: BlockArray) -> None:
        self.array = lazy
        self.size = prod(lazy.shape)
        # Blocks follow each other whatever the rows are.
        self.flat = BlockArray(lazy.name, lazy.reader, (self.size,), lazy.block_type)
        self.nbytes = lazy.reader.part.nbytes
        self.row = _row(lazy.shape)
        self.place = (lazy.source.name, lazy.reader.part.offset)
        self.identity = (_stored(lazy), lazy.shape, lazy.block_type)

    def ranges(self, start: int, stop: int) -> Iterator[Range]:
        """Return the blocks of some of the elements."""
        return self.flat.ranges(slice(start, stop))

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[tuple[int, Array]]:
        """Decode a range of the elements."""
        return _read_flat(self.flat, start, stop, buffer)


class ArrayReader(Reader):
    """Anything that is indexed like an array, in C order."""

    def __init__(self, array: Any, nbytes: int | None = None) -> None:
        if isinstance(array, LazyArray):
            array.require_expansion()
        self.array = array
        self.shape: tuple[int, ...] = tuple(array.shape)
        dtype = np.dtype(array.dtype)
        self.complex = dtype.kind == "c"
        self.kind = require_numbers(dtype)
        self.size = prod(self.shape)
        self.nbytes = self.size * dtype.itemsize if nbytes is None else nbytes
        self.row = _row(self.shape)
        self.piece_nbytes = _PIECE_NBYTES
        self.turned = False  # whether it is stored in another order of axes

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[tuple[int, Array]]:
        """Read some of the elements."""
        if stop <= start:
            return
        if not self.shape:
            yield 0, self._values(())
            return
        wanted = max(1, self.piece_nbytes // self.kind.itemsize)
        axis, inner = 0, prod(self.shape[1:])
        # A slice along the first axis may be too large: then along the next one.
        while inner > wanted and axis + 1 < len(self.shape) and not self.turned:
            axis += 1
            inner = prod(self.shape[axis + 1 :])
        rows = max(1, wanted // inner)
        at = start
        while at < stop:
            line, row = divmod(at // inner, self.shape[axis])
            lead = np.unravel_index(line, self.shape[:axis]) if axis else ()
            last = min(self.shape[axis], row + rows, row + -(-(stop - at) // inner) + 1)
            values = self._values((*map(int, lead), slice(row, last)))
            first = (line * self.shape[axis] + row) * inner
            values = values[at - first : stop - first]
            yield at, values
            at += len(values)

    def _values(self, key: tuple[Any, ...]) -> Array:
        flat: Array = dense_values(self.array[key]).reshape(-1)
        return magnitudes(flat) if self.complex else flat


class SparseReader(Reader):
    """The stored values of a sparse tensor, in the order of their positions."""

    whole = sparse = True

    def __init__(self, lazy: SparseArray) -> None:
        self.array = lazy
        self.complex = lazy.dtype.kind == "c"
        self.kind = require_numbers(lazy.dtype)
        self.size = prod(lazy.shape)
        if self.size > sys.maxsize:
            raise UnsupportedError(
                f"{self.size} elements are more than can be counted",
                path=lazy.source.name,
                tensor=lazy.name,
                hint="Leave it out",
            )
        parts = [reader.part for reader in lazy.readers.values()]
        self.nbytes = sum(part.nbytes for part in parts)
        self.row = _row(lazy.shape)
        self.place = (lazy.source.name, min(part.offset for part in parts))
        self.identity = (_stored(lazy), lazy.shape, lazy.strict)

    def rows(self) -> Iterator[tuple[int, Array, int]]:
        """Read all stored values: where they begin, they, and how many rows are zeros."""
        at = 0
        for block in self.array.blocks():
            rows = block.coords[0][block.values != 0]
            alive = int(np.count_nonzero(np.diff(rows, prepend=-1)))
            values: Array = magnitudes(block.values) if self.complex else block.values
            yield at, values, block.stop - block.start - alive
            at += len(values)


class ChunkedTensor(Reader):
    """A dask array as a sequence of elements."""

    def __init__(self, array: Any) -> None:
        if any(math.isnan(size) for sizes in array.chunks for size in sizes):
            array = array.compute_chunk_sizes()
        self.complex = array.dtype.kind == "c"
        self.kind = require_numbers(array.dtype)
        self.array, runs = _in_runs(array)
        self.size = int(array.size)
        self.nbytes = int(array.nbytes)
        self.row = prod(array.shape[1:]) if runs and array.ndim > 1 else 0

    def chunks(self) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """Return the position of each chunk in the grid, and its first and last elements."""
        start = 0
        sizes = [list(enumerate(along)) for along in self.array.chunks]
        for combination in product(*sizes):
            stop = start + prod(size for _, size in combination)
            yield tuple(position for position, _ in combination), start, stop
            start = stop


def _read_flat(
    flat: LazyArray, start: int, stop: int, buffer: Array
) -> Iterator[tuple[int, Array]]:
    """Read a range of an array of one axis into a buffer of bytes that is used again."""
    itemsize = flat.dtype.itemsize
    values = buffer[: buffer.nbytes // itemsize * itemsize].view(flat.dtype)
    for position in range(start, stop, len(values)):
        block = values[: stop - position]
        flat.read_into(block, slice(position, position + len(block)))
        yield position, block


def reader_of(lazy: LazyArray, name: str = "") -> Reader:
    """Find how the elements of a lazy array are best read."""
    reader = _reader_of(lazy)
    reader.name = name
    return reader


def _reader_of(lazy: LazyArray) -> Reader:
    if isinstance(lazy, DenseArray) and lazy.dtype.kind != "c":
        return RawReader(lazy) if _is_raw(lazy) else DenseReader(lazy)
    if isinstance(lazy, BlockArray):
        return BlockReader(lazy)
    if isinstance(lazy, SparseArray) and 0 not in lazy.shape:
        return SparseReader(lazy)
    reader = ArrayReader(lazy)
    if isinstance(lazy, QuantizedArray | CodebookArray):
        if isinstance(lazy, QuantizedArray) and lazy.is_turned:
            reader.turned, reader.piece_nbytes = True, _TURNED_NBYTES
        reader.nbytes = sum(each.part.nbytes for each in lazy.readers.values())
        reader.place = (lazy.source.name, lazy.readers["data"].part.offset)
        reader.identity = (_stored(lazy), lazy.shape, lazy.quantization)
    elif isinstance(lazy, DenseArray):
        _describe_dense(reader, lazy)
    return reader


def _is_raw(lazy: DenseArray) -> bool:
    part = lazy.reader.part
    return (
        lazy.reader.is_raw
        and part.byteorder == "little"
        and ELEMENT_TYPES[part.dtype].bits >= 8
        and ELEMENT_TYPES[part.dtype].decoded != "bool"
    )


def _describe_dense(reader: Reader, lazy: DenseArray) -> None:
    part = lazy.reader.part
    reader.size = prod(lazy.shape)
    reader.nbytes = nbytes_of(part.dtype, reader.size)
    reader.row = _row(lazy.shape[::-1] if lazy.order == "F" else lazy.shape)
    reader.place = (lazy.reader.source.name, part.offset)
    reader.identity = (_stored(lazy), lazy.shape, lazy.order, lazy.strict)


def _stored(lazy: Any) -> tuple[Any, ...]:
    """Return the stored parts that the values depend on."""
    return tuple(
        [
            # The fields: to write the part itself takes several times as long.
            (role, each.source.name, each.source.identity, _FIELDS(each.part), each.verify)
            for role, each in lazy.readers.items()
        ]
    )


def _row(shape: tuple[int, ...]) -> int:
    return prod(shape[1:]) if len(shape) > 1 else 0


def _in_runs(array: Any) -> tuple[Any, bool]:
    """Chunk an array so that chunks are runs, where that is cheap; say whether they are."""
    axis = next((k for k, sizes in enumerate(array.chunks) if max(sizes) > 1), array.ndim)
    split = [k for k in range(axis + 1, array.ndim) if len(array.chunks[k]) > 1]
    if not split:
        return array, True
    band = max(array.chunks[axis]) * prod(array.shape[axis + 1 :]) * array.dtype.itemsize
    if band > _LARGEST_BAND:
        return array, False
    return array.rechunk(dict.fromkeys(split, -1)), True
