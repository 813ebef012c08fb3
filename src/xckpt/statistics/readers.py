"""How the elements of lazy arrays of all kinds are read."""

from __future__ import annotations

import sys
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.dense import DenseArray, QuantizedArray
from xckpt.arrays.sparse import SparseArray
from xckpt.elements import ELEMENT_TYPES, nbytes_of
from xckpt.errors import UnsupportedError, locating
from xckpt.statistics.kinds import kind_named, require_numbers
from xckpt.statistics.reader import Reader
from xckpt.storage.encodings import STREAMS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xckpt.arrays.lazy import LazyArray
    from xckpt.statistics.workspace import Workspace

__all__ = ["ArrayReader", "DenseReader", "RawReader", "SparseReader", "reader_of"]

Array = np.ndarray[Any, np.dtype[Any]]

# Of what is decoded or comes from elsewhere, at a time.
_PIECE_NBYTES = 4 << 20


class RawReader(Reader):
    """Elements that are stored as the kernels want them: read into one buffer, never decoded."""

    def __init__(self, lazy: DenseArray) -> None:
        self.lazy = lazy
        part = lazy.reader.part
        self.kind = kind_named(part.dtype)
        _describe_dense(self, lazy)

    def blocks(self, start: int, stop: int, workspace: Workspace) -> Iterator[tuple[int, Array]]:
        """Read some of the elements; see `Reader.blocks`."""
        reader, itemsize = self.lazy.reader, self.kind.itemsize
        if reader.part.nbytes != self.nbytes or reader.part.digest is not None:
            reader.read(0, 0, self.nbytes)  # checks size and digest, and reads nothing
        step = workspace.buffer.nbytes // itemsize
        dtype = self.kind.unsigned if self.kind.exact else self.kind.dtype
        for at in range(start, stop, step):
            memory = workspace.buffer[: (min(at + step, stop) - at) * itemsize]
            reader.source.read_into(reader.part.offset + at * itemsize, memory.data)
            yield at, memory.view(dtype)


class DenseReader(Reader):
    """Dense elements that are compressed, packed, in another byte order, or booleans."""

    def __init__(self, lazy: DenseArray) -> None:
        self.lazy = lazy
        self.flat = _flat(lazy)
        self.kind = require_numbers(self.flat.dtype)
        _describe_dense(self, lazy)
        self.whole = lazy.reader.part.encoding in STREAMS

    def blocks(self, start: int, stop: int, workspace: Workspace) -> Iterator[tuple[int, Array]]:
        """Read some of the elements; see `Reader.blocks`."""
        if self.whole:
            # A stream that can be decoded only from its start is not kept.
            yield from self._decoded()
            return
        step = max(1, _PIECE_NBYTES // self.kind.itemsize)
        for at in range(start, stop, step):
            yield at, self.flat[at : min(at + step, stop)]

    def _decoded(self) -> Iterator[tuple[int, Array]]:
        at = 0
        with locating(tensor=self.flat.name):
            for data in self.flat.reader.blocks(self.nbytes, _PIECE_NBYTES):
                values = self.flat.decoded(data, at)
                yield at, values
                at += len(values)


class ArrayReader(Reader):
    """Anything that is indexed like an array, in C order.

    Parameters
    ----------
    array : array-like
        With ``shape`` and ``dtype``; what indexing gives is handed to `numpy.asarray`.
    nbytes : int, optional
        What there is to read.
    """

    piece_nbytes = _PIECE_NBYTES

    def __init__(self, array: Any, nbytes: int | None = None) -> None:
        self.array = array
        self.shape: tuple[int, ...] = tuple(array.shape)
        dtype = np.dtype(array.dtype)
        # The kernels know no complex numbers: they get the magnitudes.
        self.complex = dtype.kind == "c"
        self.kind = require_numbers(dtype)
        self.size = prod(self.shape)
        self.nbytes = self.size * dtype.itemsize if nbytes is None else nbytes
        self.row = _row(self.shape)
        self.piece_nbytes = _PIECE_NBYTES

    def blocks(self, start: int, stop: int, workspace: Workspace) -> Iterator[tuple[int, Array]]:
        """Read some of the elements; see `Reader.blocks`."""
        if stop <= start:
            return
        if not self.shape:
            yield 0, self._values(())
            return
        wanted = max(1, self.piece_nbytes // self.kind.itemsize)
        axis, inner = 0, prod(self.shape[1:])
        # A slice along the first axis may be too large: then along the next one.
        while inner > wanted and axis + 1 < len(self.shape) and self._divisible:
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

    @property
    def _divisible(self) -> bool:
        return not isinstance(self.array, QuantizedArray)  # it makes whole rows only

    def _values(self, key: tuple[Any, ...]) -> Array:
        values = self.array[key]
        values = np.asarray(values.todense() if hasattr(values, "todense") else values)
        flat: Array = values.reshape(-1)
        return np.abs(flat) if self.complex else flat


class SparseReader(Reader):
    """The stored values of a sparse tensor, in the order of their positions."""

    whole = True

    def __init__(self, lazy: SparseArray) -> None:
        self.lazy = lazy
        # The kernels know no complex numbers: they get the magnitudes.
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

    def blocks(self, start: int, stop: int, workspace: Workspace) -> Iterator[tuple[int, Array]]:
        """Read the stored values; positions are those among them. See `Reader.blocks`."""
        for at, values, _ in self.rows():
            yield at, values

    def rows(self) -> Iterator[tuple[int, Array, int]]:
        """Read all stored values."""
        at = 0
        for block in self.lazy.blocks():
            rows = block.coords[0][block.values != 0]
            alive = int(np.count_nonzero(np.diff(rows, prepend=-1)))
            values: Array = np.abs(block.values) if self.complex else block.values
            yield at, values, block.stop - block.start - alive
            at += len(values)


def reader_of(lazy: LazyArray) -> Reader:
    """Find how the elements of a lazy array are best read."""
    if isinstance(lazy, DenseArray) and lazy.dtype.kind != "c":
        return RawReader(lazy) if _is_raw(lazy) else DenseReader(lazy)
    if isinstance(lazy, SparseArray) and 0 not in lazy.shape:
        return SparseReader(lazy)
    reader = ArrayReader(lazy)
    if isinstance(lazy, QuantizedArray):
        scheme = lazy.quantization
        # Words along the first axis are unpacked all at once, whichever rows are asked for.
        reader.whole = scheme.axis == 0 and scheme.word_bits != scheme.bits
        reader.nbytes = sum(each.part.nbytes for each in lazy.readers.values())
        reader.place = (lazy.source.name, lazy.readers["data"].part.offset)
        reader.identity = (_stored(lazy), lazy.shape, scheme)
    elif isinstance(lazy, DenseArray):
        _describe_dense(reader, lazy)
    return reader


def _is_raw(lazy: DenseArray) -> bool:
    part = lazy.reader.part
    return (
        part.encoding is None
        and part.inline is None
        and part.byteorder == "little"
        and ELEMENT_TYPES[part.dtype].bits >= 8
        and ELEMENT_TYPES[part.dtype].decoded != "bool"
    )


def _flat(lazy: DenseArray) -> DenseArray:
    """Return all elements of an array in the order they are stored, in their own type."""
    decode = ELEMENT_TYPES[lazy.reader.part.dtype].decoded == "bool"
    shape = (prod(lazy.shape),)
    return DenseArray(lazy.name, lazy.reader, shape, decode=decode, strict=lazy.strict)


def _describe_dense(reader: Reader, lazy: DenseArray) -> None:
    part = lazy.reader.part
    reader.size = prod(lazy.shape)
    reader.nbytes = nbytes_of(part.dtype, reader.size)
    reader.row = _row(lazy.shape[::-1] if lazy.order == "F" else lazy.shape)
    reader.place = (lazy.reader.source.name, part.offset)
    reader.identity = (_stored(lazy), lazy.shape, lazy.order, lazy.strict)


def _stored(lazy: Any) -> tuple[Any, ...]:
    """Say what the values depend on."""
    readers = {"data": lazy.reader} if isinstance(lazy, DenseArray) else lazy.readers
    return tuple(
        (role, each.source.name, each.source.identity, each.part, each.verify)
        for role, each in readers.items()
    )


def _row(shape: tuple[int, ...]) -> int:
    return prod(shape[1:]) if len(shape) > 1 else 0
