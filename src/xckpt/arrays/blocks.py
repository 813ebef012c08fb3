"""Tensors of quantised blocks as float32: each row is blocks of a type, one after another."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.dense import DenseArray, OnePartArray
from xckpt.arrays.keys import (
    AxisKey,
    Chunks,
    chunks_along_slowest,
    contiguous_run,
    is_all,
    normalize,
    positions,
    result_shape,
)
from xckpt.elements import BLOCK_TYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from xckpt.arrays.parts import PartReader
    from xckpt.storage.prefetch import Range
    from xckpt.typing import Array

# Size of pieces that are decoded; a piece and its elements stay in the second-level cache.
_BLOCK_NBYTES = 1 << 20


class BlockArray(OnePartArray):
    """A tensor whose rows are blocks of a type, a key of `BLOCK_TYPES`, one after another."""

    __slots__ = ("block_type",)

    def __init__(
        self, name: str, reader: PartReader, shape: tuple[int, ...], block_type: str
    ) -> None:
        super().__init__(name, reader, shape, np.dtype(np.float32))
        self.block_type = block_type

    @property
    def part_nbytes(self) -> int:
        """Decoded size of the part, in bytes."""
        block = BLOCK_TYPES[self.block_type]
        return prod(self.shape) // block.size * block.nbytes

    @property
    def stored_blocks(self) -> DenseArray:
        """The bytes of the blocks as they are stored, a block in each row."""
        block = BLOCK_TYPES[self.block_type]
        raw = replace(self.reader, part=replace(self.reader.part, dtype="uint8"))
        shape = prod(self.shape) // block.size, block.nbytes
        return DenseArray(self.name, raw, shape, decode=False)

    def ranges(self, key: Any) -> Iterator[Range]:
        """Return the blocks that a selection touches, if it is a run; see `LazyArray.ranges`."""
        run = contiguous_run(self.shape, normalize(key, self.shape))
        if not is_all(run) or not self.reader.is_raw:
            yield from super().ranges(key)
        elif count := prod(run.shape):
            block = BLOCK_TYPES[self.block_type]
            first, end = run.start // block.size, -(-(run.start + count) // block.size)
            start = self.reader.part.offset + first * block.nbytes
            yield self.reader.source, start, (end - first) * block.nbytes

    def flattened(self) -> BlockArray:
        """Return all elements as one axis: blocks follow each other whatever the rows are."""
        return BlockArray(self.name, self.reader, (prod(self.shape),), self.block_type)

    def stored(self, block_nbytes: int) -> Iterator[memoryview]:
        """Read the blocks of the part in little-endian order; see `OnePartArray.stored`."""
        start = 0
        for data in super().stored(block_nbytes):
            yield self._little_endian(data, start)
            start += len(data)

    def stored_range(self, start: int, stop: int) -> memoryview:
        """Read bytes of blocks in little-endian order; see `OnePartArray.stored_range`."""
        return self._little_endian(super().stored_range(start, stop), start)

    def _little_endian(self, data: memoryview, start: int) -> memoryview:
        is_big = self.reader.part.byteorder == "big"
        return byteswapped(data, self.block_type, start) if is_big else data

    def chunks(self, target: int) -> Chunks:
        """Return chunks of whole blocks, each a run of bytes; see `LazyArray.chunks`."""
        size = BLOCK_TYPES[self.block_type].size
        grid = (*self.shape[:-1], self.shape[-1] // size)
        *others, last = chunks_along_slowest(grid, size * self.dtype.itemsize, target)
        return (*others, tuple([size * count for count in last]))

    def select(self, key: tuple[AxisKey, ...]) -> Any:
        """Return a selection; see `LazyArray.select`."""
        shape = result_shape(self.shape, key)
        if 0 in shape:
            return self.empty(shape)
        return self._select_c_order(self.shape, key)

    def _gathered(self, shape: tuple[int, ...], key: tuple[AxisKey, ...]) -> Array | None:
        long = [axis for axis, n in enumerate(contiguous_run(shape, key).shape) if n > 1]
        if len(long) == 1:
            return None
        chosen = np.asarray(positions(key[long[0]], shape[long[0]]))
        few = 2 * len(chosen) <= chosen.max() - chosen.min() + 1
        return self._gathered_by_rows(shape, key, one_by_one=bool(few))

    def select_into(self, key: tuple[AxisKey, ...], out: Array) -> None:
        """Read a selection into an array; see `LazyArray.select_into`."""
        run = contiguous_run(self.shape, key)
        size = BLOCK_TYPES[self.block_type].size
        is_whole = out.size and run.start % size == 0 == prod(run.shape) % size
        if is_whole and is_all(run) and out.flags.c_contiguous:
            self._decode(run.start // size, out.reshape(-1, size))
        else:
            out[...] = self.select(key)

    def _elements(self, start: int, stop: int) -> Array:
        """Return elements of the flat array; blocks are in their order."""
        size = BLOCK_TYPES[self.block_type].size
        first = start // size
        out = np.empty((-(-stop // size) - first, size), self.dtype)
        self._decode(first, out)
        return out.reshape(-1)[start - first * size : stop - first * size]

    def _decode(self, first: int, out: Array) -> None:
        """Decode as many blocks as `out` has rows."""
        from xckpt.arrays.dequantize import decode  # numba: only if blocks are decoded

        block = BLOCK_TYPES[self.block_type]
        nbytes = block.nbytes
        total, start = self.part_nbytes, first * nbytes
        step, part = _BLOCK_NBYTES // nbytes, self.reader.part
        if self.reader.is_raw:
            self.reader.check(total)
            pieces: Iterable[memoryview] = self.reader.source.blocks(
                part.offset + start, len(out) * nbytes, step * nbytes
            )
        else:
            pieces = (self.reader.read(start, start + len(out) * nbytes, total),)
        at = 0
        for piece in pieces:
            blocks = np.frombuffer(piece, np.uint8).reshape(-1, nbytes)
            decode(self.block_type, blocks, out[at : at + len(blocks)], part.byteorder)
            at += len(blocks)


def byteswapped(data: memoryview, block_type: str, start: int) -> memoryview:
    """Return bytes of blocks in the other byte order; they begin at the byte `start` of a part."""
    # `start` is even, like the places of float16 and the sizes of blocks with float16.
    block = BLOCK_TYPES[block_type]
    codes = np.frombuffer(data, np.uint8).copy()
    for place in block.halves or ():
        first = (place - start) % block.nbytes
        upper = codes[first :: block.nbytes].copy()
        codes[first :: block.nbytes] = codes[first + 1 :: block.nbytes]
        codes[first + 1 :: block.nbytes] = upper
    return codes.data
