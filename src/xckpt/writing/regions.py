"""Dask arrays into their places in a file: each chunk is computed once and written where it goes.

One graph for all arrays of a save, so that what several of them need is computed once. Chunks
come in any order and may be cut along any axis; the tasks open the file by its path, so that any
scheduler and any machine that sees it can run them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np

from xckpt.dtypes import nbytes_of, stored_dtype
from xckpt.errors import UnsupportedError
from xckpt.progress import report
from xckpt.storage.sink import Place, write_at
from xckpt.writing.casting import convert
from xckpt.writing.data import as_bytes, block_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.writing.casting import Cast
    from xckpt.writing.data import DaskData

__all__ = ["Region", "is_scattered", "store", "store_delayed"]

# Shorter runs are not worth a system call each: they are written through a memory map.
_SHORTEST_RUN = 1 << 12


@dataclass(frozen=True, slots=True)
class Region:
    """Where an array goes in a file, as which type, and who is told of the progress."""

    place: Place
    offset: int
    shape: tuple[int, ...]
    dtype: str
    cast: Cast
    tensor: str  # for messages
    order: str = "C"
    observer: str = ""

    def write(self, block: np.ndarray[Any, Any], origin: Sequence[int]) -> int:
        """Convert a block that begins at `origin`, write it, and return how many bytes it has."""
        with self.place.named():
            fileno = os.open(self.place.path, os.O_RDWR | getattr(os, "O_BINARY", 0))
            try:
                self._write(fileno, block, origin)
            finally:
                os.close(fileno)
        nbytes = nbytes_of(self.dtype, block.size)
        report(self.observer, nbytes)
        return nbytes

    def _write(self, fileno: int, block: np.ndarray[Any, Any], origin: Sequence[int]) -> None:
        turned = self.order == "F"
        ordered = block.T if turned else block
        start = tuple(origin[::-1] if turned else origin)
        size = stored_dtype(self.dtype).itemsize
        # In small blocks, so that conversions need little memory besides the chunk.
        for key, _ in block_keys(ordered.shape, size):
            where = tuple(o + run.start for o, run in zip(start, key, strict=True))
            piece = ordered[key]
            converted = convert(
                piece.T if turned else piece,
                self.dtype,
                self.cast,
                tensor=self.tensor,
                origin=where[::-1] if turned else where,
            )
            self._put(fileno, converted.T if turned else converted, where)

    def _put(self, fileno: int, block: np.ndarray[Any, Any], where: tuple[int, ...]) -> None:
        """Write a block whose axes have the order of the file."""
        shape = self.shape[::-1] if self.order == "F" else self.shape
        split, run = _longest_run(shape, block.shape)
        if split and run * block.itemsize < _SHORTEST_RUN and prod(block.shape[:split]) > 1:
            target = np.memmap(self.place.path, block.dtype, "r+", self.offset, shape)
            target[tuple(slice(w, w + n) for w, n in zip(where, block.shape, strict=True))] = block
            return
        strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
        for position in np.ndindex(block.shape[:split]):
            inside = (*position, *(0 for _ in shape[split:]))
            first = sum((w + i) * s for w, i, s in zip(where, inside, strides, strict=True))
            write_at(fileno, as_bytes(block[position]), self.offset + first * block.itemsize)


def _longest_run(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, int]:
    """Return the first axis from which on a block is contiguous in the array, and so many elements.

    Examples
    --------
    >>> _longest_run((10, 4, 8), (2, 3, 8))
    (1, 24)
    """
    split = len(shape)
    while split and block[split:] == shape[split:]:
        split -= 1
    return split, prod(block[split:])


def is_scattered(data: DaskData) -> bool:
    """Return whether some chunks are written in runs so short that a memory map is used."""
    turned = data.order == "F"
    shape = data.array.shape[::-1] if turned else data.array.shape
    chunks = tuple(min(sizes) if sizes else 0 for sizes in data.array.chunks)
    split, run = _longest_run(shape, chunks[::-1] if turned else chunks)
    return split > 0 and run * stored_dtype(data.dtype).itemsize < _SHORTEST_RUN


def store(data: DaskData, place: Place, offset: int, observer: str = "") -> Any:
    """Make a dask array whose chunks write those of another to a file that is there."""
    array = data.array
    return array.map_blocks(
        _store_block,
        place=place,
        region=_region(data, offset, observer),
        starts=_starts(data),
        chunks=tuple((1,) * len(sizes) for sizes in array.chunks),
        dtype=np.int64,
        meta=np.empty((0,) * array.ndim, np.int64),
        name=f"xckpt-write-{array.name}-{uuid4().hex}",
    )


def store_delayed(data: DaskData, place: Any, offset: int) -> list[Any]:
    """Make tasks, one for each chunk, that write to a file that another task makes."""
    # Not by map_blocks: it runs what a delayed argument depends on once more for itself.
    import dask

    region, starts = _region(data, offset, ""), _starts(data)
    write = dask.delayed(_store_block, pure=False, traverse=False)
    blocks = data.array.to_delayed(optimize_graph=False)
    return [
        write(blocks[where], place=place, region=region, starts=starts, block_id=where)
        for where in np.ndindex(blocks.shape)
    ]


def _region(data: DaskData, offset: int, observer: str) -> tuple[Any, ...]:
    shape = data.array.shape
    return offset, shape, data.dtype, data.cast, data.tensor, data.order, observer


def _starts(data: DaskData) -> tuple[tuple[int, ...], ...]:
    """Return where chunks begin along each axis."""
    chunks = data.array.chunks
    if any(np.isnan(size) for sizes in chunks for size in sizes):
        raise UnsupportedError(
            "the sizes of its chunks are not known before it is computed",
            tensor=data.tensor,
            hint="Call .compute_chunk_sizes() on the dask array, or compute it",
        )
    return tuple(tuple(np.cumsum((0, *sizes[:-1])).tolist()) for sizes in chunks)


def _store_block(
    block: Any,
    *,
    place: Place,
    region: tuple[Any, ...],
    starts: tuple[tuple[int, ...], ...],
    block_id: tuple[int, ...],
) -> np.ndarray[Any, Any]:
    origin = [along[i] for along, i in zip(starts, block_id, strict=True)]
    written = Region(place, *region).write(np.asarray(block), origin)
    return np.full((1,) * len(starts), written, np.int64)
