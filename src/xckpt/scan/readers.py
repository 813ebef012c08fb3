"""The elements of a tensor as a flat sequence, read block by block in the order they are stored.

Dask arrays that are not read from a checkpoint come in chunks. A chunk that is a run of elements in
C order has a position in the tensor, and the moments do not depend on how the tensor is cut into
such chunks. Other chunks are rechunked to runs if a row of them is small. If it is not, elements
come in the order of the chunks, so that the last bits of the moments depend on the chunks.
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

from xckpt.arrays.lazy import PIECE_NBYTES, LazyArray, UnreadableArray, flat_blocks
from xckpt.arrays.sparse import SparseArray
from xckpt.errors import CheckpointError, UnsupportedError
from xckpt.index import Part
from xckpt.scan.kinds import kind_named, magnitudes, require_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xckpt.scan.kinds import Kind
    from xckpt.storage import Source
    from xckpt.storage.prefetch import Range
    from xckpt.structure import Channels
    from xckpt.typing import Array

#: Attributes of lazy arrays that determine their elements, besides the stored parts.
DECODING = ("order", "strict", "block_type", "quantization", "origins")
_FIELDS = attrgetter(*(field.name for field in fields(Part)))
_LARGEST_BAND = 64 << 20
# Largest tensor that is read together with its neighbours.
_SMALL_NBYTES = 1 << 18


class Reader:
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
    #: Whether `rows` gives stored values only.
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

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[tuple[int, Any]]:
        """Read a range of the elements, perhaps into a buffer of bytes that is used again."""
        raise NotImplementedError

    def ranges(self, start: int, stop: int) -> Iterator[Range]:
        """Return the byte ranges that are read for elements, if they are known before."""
        # If the ranges of a part of the elements are unknown, the first elements have all.
        if start == 0 and isinstance(self.array, LazyArray):
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


class TensorReader(Reader):
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
        """See `Reader.shared_source`."""
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

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[tuple[int, Array]]:
        """Read a range of the elements; see `LazyArray.flat`."""
        is_raw = self.array.is_raw
        for position, values in self.array.flat(start, stop, buffer):
            if is_raw:
                yield position, values.view(self.block_dtype)
            else:
                yield position, magnitudes(values) if self.complex else values


class ArrayReader(Reader):
    """Anything that is indexed like an array, in C order."""

    def __init__(self, array: Any, nbytes: int | None = None) -> None:
        if isinstance(array, LazyArray):
            array.require_expansion()
        super().__init__(array, require_numbers(array.dtype), nbytes)
        self.piece_nbytes = PIECE_NBYTES

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[tuple[int, Array]]:
        """Read a range of the elements."""
        for position, values in flat_blocks(self.array, start, stop, self.piece_nbytes):
            yield position, magnitudes(values) if self.complex else values


class SparseReader(Reader):
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

    def rows(self) -> Iterator[tuple[int, Array, int]]:
        """Yield stored values with the position of the first one, and the number of zero rows."""
        position = 0
        for block in self.array.blocks():
            rows = block.coords[0][block.values != 0]
            alive = int(np.count_nonzero(np.diff(rows, prepend=-1)))
            values: Array = magnitudes(block.values) if self.complex else block.values
            yield position, values, block.stop - block.start - alive
            position += len(values)


class UnreadableReader(Reader):
    """A tensor that cannot be read, in the place of its reader."""

    def __init__(self, lazy: UnreadableArray) -> None:
        super().__init__(lazy, kind_named("float32"))
        self.name, self.problem = lazy.name, lazy.error()


class ChunkedTensor(Reader):
    """A dask array as a sequence of elements."""

    def __init__(self, array: Any) -> None:
        if any(math.isnan(size) for sizes in array.chunks for size in sizes):
            array = array.compute_chunk_sizes()
        super().__init__(array, require_numbers(array.dtype))
        self.array, runs = _in_runs(array)
        if not runs:
            self.row = 0

    def chunks(self) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """Return the position of each chunk in the grid, and its first and last elements."""
        start = 0
        sizes = [list(enumerate(along)) for along in self.array.chunks]
        for combination in product(*sizes):
            stop = start + prod(size for _, size in combination)
            yield tuple(position for position, _ in combination), start, stop
            start = stop


def reader_of(lazy: LazyArray, name: str = "") -> Reader:
    """Return a reader of the elements of a lazy array."""
    reader: Reader
    if isinstance(lazy, SparseArray) and 0 not in lazy.shape:
        reader = SparseReader(lazy)
    else:
        reader = TensorReader(lazy)
    reader.name = name
    return reader


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
