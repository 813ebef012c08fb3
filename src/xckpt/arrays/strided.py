"""Elements that lie apart: which bytes a selection of them needs, and how they come together."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from xckpt.arrays.selection import (
    AxisKey,
    Chunks,
    chunks_along_slowest,
    contiguous_run,
    groups,
    positions,
    result_shape,
    take,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Strided", "runs_of", "strided_chunks"]

Array = np.ndarray[Any, np.dtype[Any]]

# Read at a time where what lies between elements is read, too, and not kept.
_BLOCK_NBYTES = 4 << 20


class Strided(NamedTuple):
    """Elements of `itemsize` bytes that lie `strides` elements apart along each axis.

    ``read(start, stop)`` gives bytes from the first of them on; `at_once` is whether it costs
    nothing to read what lies between them.
    """

    read: Callable[[int, int], memoryview]
    shape: Sequence[int]
    strides: Sequence[int]
    itemsize: int
    at_once: bool

    def select(self, key: Sequence[AxisKey]) -> Array:
        """Return a selection, as opaque elements."""
        out = np.empty(result_shape(self.shape, key), f"V{self.itemsize}")
        if out.size:
            self._select_into(tuple(key), out)
        return out

    def _select_into(self, key: tuple[AxisKey, ...], out: Array) -> None:
        hulls = [contiguous_run((n,), (entry,)) for n, entry in zip(self.shape, key, strict=True)]
        extents = [hull.shape[0] for hull in hulls]
        along = [(n - 1) * step for n, step in zip(extents, self.strides, strict=True)]
        span, itemsize = sum(along) + 1, self.itemsize
        if self.at_once or span * itemsize <= _BLOCK_NBYTES or span <= 2 * out.size:
            starts = [hull.start * step for hull, step in zip(hulls, self.strides, strict=True)]
            data = self.read(sum(starts) * itemsize, (sum(starts) + span) * itemsize)
            steps = [step * itemsize for step in self.strides]
            flat = np.frombuffer(data, out.dtype)
            block = as_strided(flat, extents, steps, writeable=False)
            out[...] = take(block, tuple([hull.key[0] for hull in hulls]))
            return
        # Along the axis whose positions lie farthest apart, some at a time.
        axis = max(range(len(key)), key=along.__getitem__)
        count = len(positions(key[axis], self.shape[axis]))
        step = max(1, min(_BLOCK_NBYTES // (self.strides[axis] * itemsize), count // 2))
        before = (slice(None),) * len(result_shape(self.shape[:axis], key[:axis]))
        for number, some in enumerate(groups(key[axis], self.shape[axis], step)):
            part = out[(*before, slice(number * step, (number + 1) * step))]
            self._select_into((*key[:axis], some, *key[axis + 1 :]), part)


def runs_of(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[slice, ...]]:
    """Return the blocks that a range of elements in C order is made of."""
    if len(shape) < 2:
        yield (slice(start, stop, 1),) * len(shape)
        return
    length, inner = shape[0], shape[1:]
    row = prod(inner)
    first, last = start // row, (stop - 1) // row
    if first == last:
        for key in runs_of(inner, start - first * row, stop - first * row):
            yield (slice(first, first + 1, 1), *key)
        return
    if start % row:
        yield from runs_of(shape, start, (first + 1) * row)
        first += 1
    end = min(stop // row, length)
    if first < end:
        yield (slice(first, end, 1), *(slice(0, n, 1) for n in inner))
    if stop % row:
        yield from runs_of(shape, end * row, stop)


def strided_chunks(
    shape: Sequence[int], strides: Sequence[int], itemsize: int, target: int
) -> Chunks:
    """Cut along the axes whose positions lie farthest apart."""
    axes = sorted(range(len(shape)), key=lambda axis: -strides[axis])
    cut = chunks_along_slowest(tuple([shape[axis] for axis in axes]), itemsize, target)
    placed = dict(zip(axes, cut, strict=True))
    return tuple([placed[axis] for axis in range(len(shape))])
