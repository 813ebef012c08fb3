"""Computed arrays in a new file: each chunk of a dask array, written straight into its place.

All arrays are computed in one graph, so that shared tasks run once. Chunks may be cut along any
axis and come in any order. Their tasks open the file by its path, so that any scheduler runs them,
on any machine that has access to the file. Arrays for compressed parts are computed into a
temporary file (`SpooledBytes`).
"""

from __future__ import annotations

import os
from functools import partial
from itertools import accumulate, islice, product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import numpy as np

from xckpt.arrays.converted import (
    BLOCK_NBYTES,
    ByteStream,
    Converted,
    as_bytes,
    cast_block,
    count_lost,
    count_nonfinite,
    excess_zeros,
    packed_codes,
)
from xckpt.arrays.keys import chunks_along_slowest
from xckpt.elements import nbytes_of, stored_dtype
from xckpt.errors import UnsupportedError
from xckpt.index import strides_of
from xckpt.progress import report
from xckpt.storage.limits import open_file
from xckpt.storage.sink import write_at
from xckpt.writing.payloads import lazy_dask_array

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dask.delayed import Delayed

    from xckpt.arrays.converted import Cast
    from xckpt.arrays.streams import Block
    from xckpt.storage.partial import Place
    from xckpt.typing import Array

# Runs shorter than this, in bytes, are written through a memory map instead of by system calls.
_SHORTEST_RUN = 1 << 12
# Computed tensors with NaN or infinities whose sources are read again, to find out whether they
# have some, too.
_MOST_SOURCES = 16


class ComputedPart(NamedTuple):
    """A dask array, and where it is computed into."""

    data: Converted
    file: int  # position among the temporary files; the spool is the last
    offset: int


class SpooledBytes(ByteStream):
    """A dask array in a temporary file, with at least a byte for each element."""

    whole = True

    def __init__(self, offset: int, data: Converted) -> None:
        super().__init__(data.name, data.size)
        self.offset, self.is_packed = offset, data.is_packed
        #: Size of the elements in the temporary file.
        self.spooled_nbytes = data.array.size * stored_dtype(data.dtype).itemsize
        self.file: Place | None = None  # once it is known

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[Block]:
        """Read all elements back; see `ElementStream.blocks`."""
        if self.file is None:
            raise TypeError(self)
        position = 0
        for first in range(0, self.spooled_nbytes, BLOCK_NBYTES):
            nbytes = min(BLOCK_NBYTES, self.spooled_nbytes - first)
            codes = np.frombuffer(self.file.read(self.offset + first, nbytes), np.uint8)
            block = packed_codes(codes) if self.is_packed else codes
            yield position, (block,)
            position += len(block)


def store_array(data: Converted, place: Any, offset: int, observer: str = "") -> Delayed:
    """Return a task that counts what is lost, after tasks for chunks wrote to a file."""
    # One layer for all chunks. `map_blocks` would run the task that makes the file a second time.
    import dask
    from dask.delayed import Delayed
    from dask.highlevelgraph import HighLevelGraph

    from xckpt.arrays.derived import is_computed

    if any(np.isnan(size) for sizes in data.array.chunks for size in sizes):
        raise UnsupportedError(
            "the sizes of its chunks are not known before it is computed",
            tensor=data.name,
            hint="Call .compute_chunk_sizes() on the dask array, or compute it",
        )
    # Bound, because dask looks for tasks in arguments: in all of it, once for each chunk.
    target = _ArrayTarget(
        offset,
        data.array.shape,
        data.dtype,
        data.array.dtype,
        data.cast,
        data.name,
        data.order,
        observer,
        is_computed(data.array),
    )
    write = partial(_store_block, target)
    name = f"xckpt-write-{uuid4().hex}"
    file = dask.delayed(place, pure=False, traverse=False)
    origins = product(*(accumulate(sizes[:-1], initial=0) for sizes in data.array.chunks))
    layer: dict[Any, Any] = {
        (name, *position): (write, (data.array.name, *position), file.key, list(origin))
        for position, origin in zip(np.ndindex(data.array.numblocks), origins, strict=True)
    }
    layer[name] = (sum, list(layer))
    graph = HighLevelGraph.from_collections(name, layer, dependencies=[data.array, file])
    return Delayed(name, graph)


class _ArrayTarget(NamedTuple):
    """The place, type and order of a dask array in a file, for its tasks."""

    offset: int
    shape: tuple[int, ...]
    dtype: str
    #: Type of the dask array; interpolation computes wider chunks than it declares.
    declared: np.dtype[Any]
    cast: Cast
    tensor: str  # for messages
    order: str
    observer: str  # name of the progress bar
    is_computed: bool  # from tensors of files, rather than in memory or by another engine


def _store_block(target: _ArrayTarget, block: Any, place: Place, origin: Sequence[int]) -> Array:
    """Convert a chunk and write it to its place; return the numbers that `WriteJob` adds."""
    # Axes are in the order of the file from here on.
    is_turned = target.order == "F"
    values = np.asarray(block).T if is_turned else np.asarray(block)
    if values.dtype.kind == target.declared.kind == "f":
        values = values.astype(target.declared, copy=False)
    first, counts = origin[::-1] if is_turned else origin, np.zeros(4, np.int64)
    with place.named():
        fileno = open_file(place.path, os.O_RDWR | getattr(os, "O_BINARY", 0))
        try:
            # Small pieces, so that conversions need little memory besides the chunk.
            for key in _pieces(values.shape, stored_dtype(target.dtype).itemsize):
                start = [low + entry.start for low, entry in zip(first, key, strict=True)]
                piece = values[key]

                def position(number: int, start: Any = start, shape: Any = piece.shape) -> Any:
                    inside = np.unravel_index(number, shape)
                    place = [low + int(at) for low, at in zip(start, inside, strict=True)]
                    return place[::-1] if is_turned else place

                options: Any = {"tensor": target.tensor, "position": position}
                converted = cast_block(piece, target.dtype, target.cast, **options)
                if target.cast == "allow":
                    counts[0] += count_lost(piece, converted)
                    counts[3] += excess_zeros(piece, converted)
                if target.is_computed:
                    counts[1:3] += count_nonfinite(piece)
                _write_run(place.path, fileno, target, converted, start)
        finally:
            os.close(fileno)
    report(target.observer, nbytes_of(target.dtype, values.size))
    return counts


def _pieces(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[slice, ...]]:
    """Yield the keys of pieces of an array, of about `BLOCK_NBYTES` each."""
    if 0 in shape:
        return
    along = []
    for lengths in chunks_along_slowest(shape, itemsize, BLOCK_NBYTES):
        stops = accumulate(lengths)
        along.append([slice(b - n, b) for n, b in zip(lengths, stops, strict=True)])
    yield from product(*along)


def _write_run(
    path: str,
    fileno: int,
    target: _ArrayTarget,
    block: Array,
    start: Sequence[int],
) -> None:
    """Write a block that begins at `start`; its axes are in the order of the file."""
    shape = target.shape[::-1] if target.order == "F" else target.shape
    split, run = _longest_run(shape, block.shape)
    if split and run * block.itemsize < _SHORTEST_RUN and prod(block.shape[:split]) > 1:
        memory = np.memmap(path, block.dtype, "r+", target.offset, shape)
        memory[tuple(slice(a, a + n) for a, n in zip(start, block.shape, strict=True))] = block
        return
    strides = strides_of(shape)
    for position in np.ndindex(block.shape[:split]):
        inside = (*position, *(0 for _ in shape[split:]))
        first = sum((a + i) * s for a, i, s in zip(start, inside, strides, strict=True))
        write_at(fileno, as_bytes(block[position]), target.offset + first * block.itemsize)


def _longest_run(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, int]:
    """Return the first of the axes along which a block is contiguous, and the length of a run."""
    # A block of (2, 3, 8) elements in a tensor of (10, 4, 8): runs of 24, from axis 1 on.
    split = len(shape)
    while split and block[split:] == shape[split:]:
        split -= 1
    return split, prod(block[split:])


def is_scattered(data: Converted) -> bool:
    """Return whether some chunks are written in runs so short that a memory map is used."""
    turned = data.order == "F"
    shape = data.array.shape[::-1] if turned else data.array.shape
    chunks = tuple(min(sizes) if sizes else 0 for sizes in data.array.chunks)
    split, run = _longest_run(shape, chunks[::-1] if turned else chunks)
    return split > 0 and run * stored_dtype(data.dtype).itemsize < _SHORTEST_RUN


def new_nonfinite(
    stores: Iterable[ComputedPart], lost: Iterable[Array]
) -> dict[str, tuple[int, int]]:
    """Return the numbers of NaN and infinities by tensor, without those that sources explain."""
    from xckpt.arrays.derived import lazies_in  # which imports dask

    pairs = zip(stores, lost, strict=False)
    counts = [(store.data, (int(n), int(i))) for store, (_, n, i, _) in pairs if n or i]
    new = {}
    for data, (nans, infinities) in counts[:_MOST_SOURCES]:
        sources = [lazy_dask_array(lazy) for lazy in lazies_in(data.array).values()]
        if any(np.isnan(source).any().compute() for source in sources):
            continue
        is_new = infinities > 0 and not any(np.isinf(s).any().compute() for s in sources)
        if nans or is_new:
            new[data.name] = nans, infinities * is_new
    return new and new | {data.name: numbers for data, numbers in counts[_MOST_SOURCES:]}


def are_filled(stores: Iterable[ComputedPart], new: Mapping[str, tuple[int, int]]) -> bool:
    """Return whether a tensor of a stack is NaN as a whole, as xarray fills missing numbers."""
    from xckpt.arrays.derived import lazies_in  # which imports dask

    return any(
        new.get(store.data.name, (0, 0))[0] == store.data.array.size
        and any(
            len([*islice(o.tensor_origins, 2)]) > 1 for o in lazies_in(store.data.array).values()
        )
        for store in stores
    )
