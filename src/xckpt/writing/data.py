"""New tensors, and the sources of the bytes of their parts.

A `PartData` returns its bytes in order, and in most cases also as pieces in any order. Dask arrays
are computed into their places, each chunk once. Chunks may be cut along any axis and come in any
order. Their tasks open the file by its path, so that any scheduler runs them, on any machine that
has access to the file. Digests of the old file are compared while its bytes are copied.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import numpy as np

from xckpt.arrays import LazyArray
from xckpt.arrays.blocks import BlockArray
from xckpt.arrays.dense import ChunkedArray, DenseArray, OnePartArray, dense_array
from xckpt.arrays.keys import chunks_along_slowest, target_nbytes
from xckpt.arrays.parts import decoded_shape, has_byte_each
from xckpt.elements import ELEMENT_TYPES, nbytes_of, stored_dtype
from xckpt.errors import UnsupportedError
from xckpt.formats.plan import WantedPart, WantedTensor
from xckpt.index import Arrangement, Quantization, strides_of
from xckpt.progress import report
from xckpt.storage.encodings import STREAMS
from xckpt.storage.limits import open_file
from xckpt.storage.sink import write_at
from xckpt.writing.casting import canonical_parts, convert

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from dask.delayed import Delayed

    from xckpt.arrays.parts import PartReader
    from xckpt.index import Layout, Tensor
    from xckpt.storage.digests import Hasher
    from xckpt.storage.partial import Place
    from xckpt.storage.prefetch import Range
    from xckpt.typing import Array
    from xckpt.writing.casting import Cast

    # The start of a range of the raw bytes, and a function that reads it, on any thread.
    Piece = tuple[int, Callable[[], memoryview]]

__all__ = [
    "PIECE_NBYTES",
    "ArrayData",
    "Gathered",
    "PartData",
    "Payload",
    "SpooledData",
    "StoredData",
    "as_bytes",
    "is_scattered",
    "lazy_dask_array",
    "part_data",
    "replacements",
    "store",
    "stored_payload",
]

# Size of pieces that are read, converted and written: large enough for disks, small enough for
# caches and for several threads to have a few each.
PIECE_NBYTES = 8 << 20
# Runs shorter than this, in bytes, are written through a memory map instead of by system calls.
_SHORTEST_RUN = 1 << 12
# Largest part that is transposed in pieces; larger ones are transposed by chunks.
_TURNED_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Payload(WantedTensor):
    """A tensor to write, with the source of its values."""

    #: The array of each part: one part of a file (`OnePartArray`), numpy's or dask's.
    data: Mapping[str, Any] = field(default_factory=dict)
    #: Makes a dense array of a tensor of another layout.
    values: Callable[[], Any] | None = None
    #: Tensors that a file holds in place of a quantised one; they are written unless a dense layout
    #: is requested.
    stored: tuple[Payload, ...] = ()

    def part_data(self, role: str, part: WantedPart, cast: Cast) -> PartData:
        """Return the bytes of a part in the form in which they are written."""
        order = self.order if self.layout == "dense" else "C"
        return part_data(self.data[role], part, order, cast, self.name)


class Gathered(NamedTuple):
    """All tensors of a new file, and its attributes."""

    payloads: list[Payload]
    attrs: Mapping[str, Any]
    arrangement: Arrangement
    attr_types: Mapping[str, str]  # element types that attributes have in the old file


def stored_payload(
    tensor: Tensor, readers: Mapping[str, PartReader], values: Callable[[], Any] | None = None
) -> Payload:
    """Return a tensor of a file, to be written with its stored bytes."""
    layout: Layout = tensor.layout
    data: dict[str, Any] = {}
    parts: dict[str, WantedPart] = {}
    if layout == "chunked":
        # No format that is written has chunks of its own.
        layout = "dense"
        offset = min([part.offset for part in tensor.parts.values()])
        parts["data"] = WantedPart.of(tensor.dtype, tensor.shape, source_offset=offset)
        data["data"] = lazy_dask_array(ChunkedArray(tensor, readers, decode=False))
    elif "sparse" in layout and (in_order := canonical_parts(tensor, readers)) is not None:
        parts, data = in_order
    else:
        for role, p in tensor.parts.items():
            name, reader = tensor.name, readers[role]
            shape = decoded_shape(tensor, role, reader)
            parts[role] = WantedPart.of(p.dtype, shape, p.encoding, p.digest, p.offset)
            if layout == "blocks":
                data[role] = BlockArray(name, reader, tensor.shape, tensor.dtype)
            elif layout == "dense" and role == "data":
                data[role] = dense_array(tensor, reader, decode=False)
            else:
                data[role] = DenseArray(name, reader, shape, decode=False, strict=tensor.strict)
    # No format has codebooks: the stored tensors are written, or the values.
    scheme = tensor.quantization
    return Payload(
        tensor.name,
        tensor.dtype,
        tensor.shape,
        parts,
        layout,
        tensor.order,
        tensor.attrs,
        tensor.dims,
        scheme if isinstance(scheme, Quantization) else None,
        tensor.path,
        data,
        values,
        tuple([stored_payload(*stored) for stored in replacements(tensor, readers)]),
    )


def replacements(
    tensor: Tensor, readers: Mapping[str, PartReader]
) -> Iterator[tuple[Tensor, Mapping[str, PartReader]]]:
    """Yield the tensors that a file has in place of a quantised one, with their readers."""
    for role, stored in (tensor.stored or {}).items():
        yield stored, {"data": replace(readers[role], part=stored.parts["data"])}


class PartData(ABC):
    """The bytes of one part of a new file: raw, little-endian, in the order of the file."""

    nbytes: int

    @abstractmethod
    def blocks(self) -> Iterator[memoryview]:
        """Return all bytes in order, a few megabytes at a time."""

    def pieces(self) -> Iterable[Piece] | None:
        """Return ranges that can be read in any order; None if the order is fixed."""
        return None

    def ranges(self) -> Iterator[Range]:
        """Return the byte ranges that are read, if they are known before."""
        return iter(())


def part_data(array: Any, part: WantedPart, order: str, cast: Cast, tensor: str) -> PartData:
    """Return the bytes of an array in the form of a part of a new file."""
    if not isinstance(array, OnePartArray):
        return ArrayData(array, part.dtype, cast, tensor, order)
    stored = array.reader.part
    if isinstance(array, DenseArray):
        is_turned = order != array.order and sum(n > 1 for n in array.shape) > 1
        # Booleans other than 0 and 1 are not copied.
        is_recoded = part.dtype != stored.dtype or stored.byteorder == "big" or part.dtype == "bool"
        if is_turned or is_recoded or has_byte_each(stored):
            checked = array.verified()
            is_small = array.part_nbytes <= _TURNED_NBYTES and stored.encoding is None
            if is_turned and not is_small:
                return ArrayData(lazy_dask_array(checked), part.dtype, cast, tensor, order)
            return ArrayData(checked, part.dtype, cast, tensor, order if is_turned else array.order)
    is_same = part.compression == stored.encoding and stored.skip is None
    is_verbatim = stored.encoding is not None and is_same and part.level is None
    return StoredData(array, is_verbatim=is_verbatim)


@dataclass(frozen=True, slots=True)
class ArrayData(PartData):
    """An array of numpy, of dask or of a file, with the element type and order to write."""

    array: Any
    dtype: str
    cast: Cast
    # For messages: name of the tensor, and the position of the array in it.
    tensor: str
    order: str = "C"
    origin: Sequence[int] = ()

    @property
    def is_dask(self) -> bool:
        """Whether chunks are computed into place, in the cheapest order, before other parts."""
        return hasattr(self.array, "dask")

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # here it follows from the array
        """Number of bytes to write."""
        return nbytes_of(self.dtype, prod(self.array.shape))

    def ranges(self) -> Iterator[Range]:
        """Return the byte ranges of a lazy array; see `PartData.ranges`."""
        if isinstance(self.array, LazyArray):
            yield from self.array.ranges(...)

    def blocks(self) -> Iterator[memoryview]:
        """Return all bytes in order; see `PartData.blocks`."""
        if ELEMENT_TYPES[self.dtype].bits >= 8:
            yield from map(as_bytes, self._converted_blocks())
            return
        pending = np.empty(0, np.uint8)
        for block in self._converted_blocks():
            codes = np.concatenate([pending, block.reshape(-1).view(np.uint8)])
            count = len(codes) // 2 * 2
            pending = codes[count:]
            yield _joined(codes[:count])
        if len(pending):
            yield _joined(pending)

    def pieces(self) -> Iterable[Piece] | None:
        """Return ranges, unless elements share bytes or are decoded from the first one on."""
        shares_bytes = ELEMENT_TYPES[self.dtype].bits < 8
        return None if shares_bytes or self._stream is not None else self._pieces()

    @property
    def _stream(self) -> DenseArray | None:
        """The array if its part can only be decoded from its start; else None."""
        array = self.array
        is_stream = isinstance(array, DenseArray) and array.reader.part.encoding in STREAMS
        return array if is_stream else None

    def _converted_blocks(self) -> Iterator[Array]:
        stream = self._stream
        if stream is None:
            yield from (self.converted(key) for key, _ in self.runs())
            return
        for position, block in stream.stream(PIECE_NBYTES):
            origin = (position,)
            yield convert(block, self.dtype, self.cast, tensor=self.tensor, origin=origin)

    def _pieces(self) -> Iterator[Piece]:
        start = 0
        for key, count in self.runs():
            yield start, partial(self._bytes, key)
            start += nbytes_of(self.dtype, count)

    def _bytes(self, key: tuple[slice, ...]) -> memoryview:
        return as_bytes(self.converted(key))

    def runs(self) -> Iterator[tuple[tuple[slice, ...], int]]:
        """Yield keys of runs of the file, in order, and their sizes; axes are in file order."""
        if isinstance(self.array, LazyArray):
            self.array.require_expansion()
        shape = self.array.shape[::-1] if self.order == "F" else self.array.shape
        if 0 in shape:
            return
        along = []
        itemsize = max(ELEMENT_TYPES[self.dtype].bits // 8, 1)
        for lengths in chunks_along_slowest(shape, itemsize, PIECE_NBYTES):
            stops = np.cumsum(lengths, dtype=np.int64).tolist()
            along.append([slice(b - n, b) for n, b in zip(lengths, stops, strict=True)])
        for key in product(*along):
            yield key, prod([run.stop - run.start for run in key])

    def converted(self, key: tuple[slice, ...]) -> Array:
        """Return a converted run; its axes are in the order of the file."""
        key = key[::-1] if self.order == "F" else key
        origin = self.origin or [0] * len(key)
        first = [at + run.start for at, run in zip(origin, key, strict=True)]
        block = convert(self.array[key], self.dtype, self.cast, tensor=self.tensor, origin=first)
        return block.T if self.order == "F" else block


def _joined(codes: Array) -> memoryview:
    """Pack two 4-bit codes into each byte, the first one into the low half."""
    if len(codes) % 2:
        codes = np.append(codes, np.uint8(0))
    return (codes[::2] & 0xF | codes[1::2] << 4).astype(np.uint8).data


def as_bytes(array: Array) -> memoryview:
    """Return the bytes of an array in C order, without a copy where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


@dataclass(frozen=True, slots=True)
class SpooledData(PartData):
    """An array in a temporary file, whose elements do not share bytes."""

    offset: int
    count: int
    dtype: str
    place: Place | None = None  # of the file, once it is known

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # here it follows from the count
        """Number of bytes to write."""
        return nbytes_of(self.dtype, self.count)

    def blocks(self) -> Iterator[memoryview]:
        """Return all bytes in order; see `PartData.blocks`."""
        if self.place is None:
            raise TypeError(self)
        bits = ELEMENT_TYPES[self.dtype].bits
        total = self.count * max(bits, 8) // 8
        for start in range(0, total, PIECE_NBYTES):
            block = self.place.read(self.offset + start, min(PIECE_NBYTES, total - start))
            codes = np.frombuffer(block, np.uint8)
            yield codes.data if bits >= 8 else _joined(codes)


# --- parts of files ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredData(PartData):
    """The bytes of an unchanged part of a file, decoded, or as they are stored (`is_verbatim`)."""

    array: OnePartArray
    is_verbatim: bool = False

    @property
    def reader(self) -> PartReader:
        """The reader of the part."""
        return self.array.reader

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # here it follows from the part
        """Number of bytes to write."""
        return self.reader.part.nbytes if self.is_verbatim else self.array.part_nbytes

    @property
    def is_checked(self) -> bool:
        """Whether the file states a digest, which is compared when all bytes have passed."""
        return self.reader.is_checked

    @property
    def is_range(self) -> bool:
        """Whether the bytes are a range of the file."""
        is_little = self.reader.part.byteorder == "little"
        return self.reader.is_raw and is_little and self.nbytes > 0

    def ranges(self) -> Iterator[Range]:
        """Return the stored byte range; see `PartData.ranges`."""
        return self.reader.ranges()

    def blocks(self) -> Iterator[memoryview]:
        """Return all bytes in order; see `PartData.blocks`."""
        return (
            self.reader.compared_blocks() if self.is_verbatim else self.array.stored(PIECE_NBYTES)
        )

    def pieces(self) -> Iterable[Piece] | None:
        """Return ranges, except of a stream that can only be decoded from its start."""
        if self.is_verbatim or self.reader.part.encoding in STREAMS:
            return None
        starts = range(0, self.nbytes, PIECE_NBYTES)
        stops = (min(start + PIECE_NBYTES, self.nbytes) for start in starts)
        read = self.array.stored_range
        return ((at, partial(read, at, stop)) for at, stop in zip(starts, stops, strict=True))

    def hash_decoded(self, hasher: Hasher | None) -> None:
        """Decode all bytes if a digest covers them: a new one, or the one that the file states."""
        reader = self.reader
        is_due = self.is_checked and reader.part.digest_of == "decoded"
        if not is_due:
            reader = replace(reader, verify=False)
        decoded = reader.blocks(self.array.part_nbytes, PIECE_NBYTES, compare=True)
        for block in decoded if is_due or hasher is not None else ():
            if hasher is not None:
                hasher.update(block)


def lazy_dask_array(lazy: LazyArray) -> Any:
    """Make a dask array of a lazy one."""
    from xckpt.arrays.graph import tensor_array

    chunks = lazy.chunks(target_nbytes())
    return tensor_array(lazy, f"{lazy.name}-{uuid4().hex}", chunks, lazy.empty((0,) * lazy.ndim))


# --- dask arrays into their places ----------------------------------------------------------------


class _ArrayTarget(NamedTuple):
    """The place, type and order of a dask array in a file, for its tasks."""

    offset: int
    shape: tuple[int, ...]
    dtype: str
    cast: Cast
    tensor: str  # for messages
    order: str
    observer: str  # name of the progress bar

    @classmethod
    def of(cls, data: ArrayData, offset: int, observer: str) -> _ArrayTarget:
        if any(np.isnan(size) for sizes in data.array.chunks for size in sizes):
            raise UnsupportedError(
                "the sizes of its chunks are not known before it is computed",
                tensor=data.tensor,
                hint="Call .compute_chunk_sizes() on the dask array, or compute it",
            )
        shape = data.array.shape
        return cls(offset, shape, data.dtype, data.cast, data.tensor, data.order, observer)


def store(data: ArrayData, place: Any, offset: int, observer: str = "") -> Delayed:
    """Return a task that ends after a task per chunk has written it to an existing file."""
    # One layer for all chunks. `map_blocks` would run the task that makes the file a second time.
    import dask
    from dask.delayed import Delayed
    from dask.highlevelgraph import HighLevelGraph

    # Bound, because dask looks for tasks in arguments: in all of it, once for each chunk.
    write = partial(_store_block, _ArrayTarget.of(data, offset, observer))
    name = f"xckpt-write-{uuid4().hex}"
    file = dask.delayed(place, pure=False, traverse=False)
    origins = product(*(accumulate(sizes[:-1], initial=0) for sizes in data.array.chunks))
    layer: dict[Any, Any] = {
        (name, *position): (write, (data.array.name, *position), file.key, list(origin))
        for position, origin in zip(np.ndindex(data.array.numblocks), origins, strict=True)
    }
    layer[name] = (len, list(layer))
    graph = HighLevelGraph.from_collections(name, layer, dependencies=[data.array, file])
    return Delayed(name, graph)


def _store_block(region: _ArrayTarget, block: Any, place: Place, origin: Sequence[int]) -> None:
    """Convert a chunk and write it to its place."""
    block = np.asarray(block)
    data = ArrayData(block, region.dtype, region.cast, region.tensor, region.order, origin)
    first = origin[::-1] if region.order == "F" else origin
    with place.named():
        fileno = open_file(place.path, os.O_RDWR | getattr(os, "O_BINARY", 0))
        try:
            # Small runs, so that conversions need little memory besides the chunk.
            for key, _ in data.runs():
                start = tuple(at + run.start for at, run in zip(first, key, strict=True))
                _write_run(place.path, fileno, region, data.converted(key), start)
        finally:
            os.close(fileno)
    report(region.observer, nbytes_of(region.dtype, block.size))


def _write_run(
    path: str,
    fileno: int,
    region: _ArrayTarget,
    block: Array,
    start: tuple[int, ...],
) -> None:
    """Write a block that begins at `start`; its axes are in the order of the file."""
    shape = region.shape[::-1] if region.order == "F" else region.shape
    split, run = _longest_run(shape, block.shape)
    if split and run * block.itemsize < _SHORTEST_RUN and prod(block.shape[:split]) > 1:
        target = np.memmap(path, block.dtype, "r+", region.offset, shape)
        target[tuple(slice(a, a + n) for a, n in zip(start, block.shape, strict=True))] = block
        return
    strides = strides_of(shape)
    for position in np.ndindex(block.shape[:split]):
        inside = (*position, *(0 for _ in shape[split:]))
        first = sum((a + i) * s for a, i, s in zip(start, inside, strides, strict=True))
        write_at(fileno, as_bytes(block[position]), region.offset + first * block.itemsize)


def _longest_run(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, int]:
    """Return the first of the axes along which a block is contiguous, and the length of a run."""
    # A block of (2, 3, 8) elements in a tensor of (10, 4, 8): runs of 24, from axis 1 on.
    split = len(shape)
    while split and block[split:] == shape[split:]:
        split -= 1
    return split, prod(block[split:])


def is_scattered(data: ArrayData) -> bool:
    """Return whether some chunks are written in runs so short that a memory map is used."""
    turned = data.order == "F"
    shape = data.array.shape[::-1] if turned else data.array.shape
    chunks = tuple(min(sizes) if sizes else 0 for sizes in data.array.chunks)
    split, run = _longest_run(shape, chunks[::-1] if turned else chunks)
    return split > 0 and run * stored_dtype(data.dtype).itemsize < _SHORTEST_RUN
