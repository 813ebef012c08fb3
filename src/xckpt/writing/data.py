"""Where the bytes of parts come from: arrays in memory, dask arrays, temporary files.

All but dask arrays give them in order, and mostly in any order (`Data`); so do parts of files, see
`xckpt.writing.stored_data`. Dask arrays are computed into their places, see
`xckpt.writing.regions`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.arrays.chunks import chunks_along_slowest
from xckpt.dtypes import ELEMENT_TYPES, nbytes_of
from xckpt.writing.casting import convert

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from xckpt.writing.casting import Cast

__all__ = [
    "PIECE_NBYTES",
    "ArrayData",
    "DaskData",
    "Data",
    "LiteralData",
    "Piece",
    "SpooledData",
    "as_bytes",
    "block_keys",
]

# Read, converted and written at a time: large enough for disks, small enough for caches and
# for several threads to have a few each.
PIECE_NBYTES = 8 << 20


class Piece(NamedTuple):
    """A range of the raw bytes of a part that can be had by itself.

    Parameters
    ----------
    start, stop : int
        Half-open range.
    read : callable
        Gives exactly these bytes, from any thread.
    """

    start: int
    stop: int
    read: Callable[[], memoryview]


class Data(ABC):
    """The bytes of one part, raw, little-endian, in the order in which the file has them.

    Attributes
    ----------
    nbytes : int
        How many there are.
    """

    nbytes: int

    @abstractmethod
    def blocks(self) -> Iterator[memoryview]:
        """Return all bytes in order, a few megabytes at a time."""

    def pieces(self) -> Iterable[Piece] | None:
        """Return ranges that can be read in any order; None where there is only one order."""
        return None


@dataclass(frozen=True, slots=True)
class LiteralData(Data):
    """Bytes that are known.

    Parameters
    ----------
    data : bytes
        All of them.
    """

    data: bytes

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # here it follows from the data
        """How many bytes there are."""
        return len(self.data)

    def blocks(self) -> Iterator[memoryview]:
        """Return all bytes at once."""
        yield memoryview(self.data)


@dataclass(frozen=True, slots=True)
class ArrayData(Data):
    """An array in memory, or a lazy one.

    Parameters
    ----------
    array : numpy.ndarray or LazyArray
        Values of any dtype that has an element type, with any strides.
    dtype : str
        Element type to write.
    cast : {"exact", "allow", "never"}
        What the conversion may lose.
    tensor : str
        For messages.
    order : {"C", "F"}
        Memory order to write.
    """

    array: Any
    dtype: str
    cast: Cast
    tensor: str
    order: str = "C"

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # here it follows from the array
        """How many bytes are written."""
        return nbytes_of(self.dtype, prod(self.array.shape))

    def blocks(self) -> Iterator[memoryview]:
        """Return all bytes in order; see `Data.blocks`."""
        if ELEMENT_TYPES[self.dtype].bits < 8:
            yield from self._packed()
            return
        for piece in self._pieces():
            yield piece.read()

    def pieces(self) -> Iterable[Piece] | None:
        """Return ranges, except of elements that share bytes."""
        return None if ELEMENT_TYPES[self.dtype].bits < 8 else self._pieces()

    def _pieces(self) -> Iterator[Piece]:
        start = 0
        size = ELEMENT_TYPES[self.dtype].bits // 8
        for key, count in block_keys(self._shape, size):
            yield Piece(start, start + count * size, partial(self._bytes, key))
            start += count * size

    @property
    def _shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.array.shape
        return shape[::-1] if self.order == "F" else shape

    def _converted(self, key: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        """Convert a block; it is asked for and given with its axes in the order of the file."""
        turned = self.order == "F"
        key = key[::-1] if turned else key
        origin = [run.start for run in key]
        converted = convert(
            self.array[key], self.dtype, self.cast, tensor=self.tensor, origin=origin
        )
        return converted.T if turned else converted

    def _bytes(self, key: tuple[slice, ...]) -> memoryview:
        return as_bytes(self._converted(key))

    def _packed(self) -> Iterator[memoryview]:
        """Return 4-bit elements, two in a byte, the first in its low half."""
        rest = np.empty(0, np.uint8)
        for key, _ in block_keys(self._shape, 1):
            codes = np.concatenate([rest, self._converted(key).reshape(-1).view(np.uint8)])
            whole = len(codes) // 2 * 2
            rest = codes[whole:]
            yield _joined(codes[:whole])
        if len(rest):
            yield _joined(rest)


def _joined(codes: np.ndarray[Any, Any]) -> memoryview:
    """Put two codes into each byte; the last byte may have one."""
    if len(codes) % 2:
        codes = np.append(codes, np.uint8(0))
    return (codes[::2] & 0xF | codes[1::2] << 4).astype(np.uint8).data


@dataclass(frozen=True, slots=True)
class SpooledData(Data):
    """An array that was computed into a temporary file.

    Parameters
    ----------
    offset : int
        Where it is in that file.
    count : int
        How many elements there are.
    dtype : str
        Their type, one element in each byte where several are to share one.
    path : str
        Of the file, once it is known.
    """

    offset: int
    count: int
    dtype: str
    path: str = ""

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # here it follows from the count
        """How many bytes are written."""
        return nbytes_of(self.dtype, self.count)

    def blocks(self) -> Iterator[memoryview]:
        """Return all bytes in order; see `Data.blocks`."""
        bits = ELEMENT_TYPES[self.dtype].bits
        left = self.count * max(bits, 8) // 8
        with Path(self.path).open("rb") as file:
            file.seek(self.offset)
            while left:
                block = file.read(min(left, PIECE_NBYTES))
                left -= len(block)
                codes = np.frombuffer(block, np.uint8)
                yield codes.data if bits >= 8 else _joined(codes)


def block_keys(
    shape: tuple[int, ...], itemsize: int, target: int = PIECE_NBYTES
) -> Iterator[tuple[tuple[slice, ...], int]]:
    """Cut a C-ordered array into runs of its memory, in order."""
    if 0 in shape:
        return
    along = []
    for lengths in chunks_along_slowest(shape, itemsize, target):
        stops = np.cumsum(lengths, dtype=np.int64).tolist()
        along.append([slice(b - n, b) for n, b in zip(lengths, stops, strict=True)])
    for key in product(*along):
        yield key, prod([run.stop - run.start for run in key])


def as_bytes(array: np.ndarray[Any, Any]) -> memoryview:
    """Return the bytes of an array in C order, without a copy where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


@dataclass(frozen=True, slots=True)
class DaskData:
    """A dask array, whose chunks are computed in whatever order is cheapest.

    Parameters are those of `ArrayData`; `array` is a dask array of numpy blocks.
    """

    array: Any
    dtype: str
    cast: Cast
    tensor: str
    order: str = "C"

    @property
    def nbytes(self) -> int:
        """How many bytes are written."""
        return nbytes_of(self.dtype, prod(self.array.shape))
