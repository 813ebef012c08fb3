"""Selections of arrays as arrays: two indices in a row are one, and read what one reads."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.lazy import LazyArray
from xckpt.arrays.selection import result_shape

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from xckpt.arrays.chunks import Chunks
    from xckpt.arrays.selection import AxisKey
    from xckpt.storage import Source

__all__ = ["SlicedArray", "compose", "cut_chunks"]


class SlicedArray(LazyArray):
    """What integers and slices with positive steps select of an array.

    Parameters
    ----------
    base : LazyArray
        Of which it is a part.
    key : tuple of int or slice
        As `xckpt.arrays.selection.normalize` gives it for the shape of `base`.
    """

    __slots__ = ("base", "key")

    def __init__(self, base: LazyArray, key: tuple[AxisKey, ...]) -> None:
        super().__init__(base.name, base.source, result_shape(base.shape, key), base.dtype)
        self.base = base
        self.key = key

    @property
    def sources(self) -> Collection[Source]:
        """Those of the base; see `LazyArray.sources`."""
        return self.base.sources

    @property
    def advice(self) -> str:  # type: ignore[override]  # that of the base
        """What to do where all of it does not fit in memory."""
        return self.base.advice

    def chunks(self, target: int) -> Chunks:
        """Return the chunks of the base, cut; see `LazyArray.chunks`."""
        return cut_chunks(self.base.chunks(target), self.key)

    def empty(self, shape: tuple[int, ...]) -> Any:
        """Return an array without elements, of the kind that the base gives."""
        return self.base.empty(shape)

    def sliced(self, key: tuple[AxisKey, ...]) -> LazyArray:
        """Select of the base at once; see `LazyArray.sliced`."""
        return self.base.sliced(compose(self.key, key))

    def narrowed(self, key: tuple[AxisKey, ...]) -> tuple[LazyArray, tuple[AxisKey, ...]]:
        """Leave it to the base; see `LazyArray.narrowed`."""
        return self.base.narrowed(compose(self.key, key))

    def _select(self, key: tuple[AxisKey, ...]) -> Any:
        return self.base[compose(self.key, key)]

    def _select_into(self, key: tuple[AxisKey, ...], out: np.ndarray[Any, Any]) -> None:
        self.base.read_into(out, compose(self.key, key))


def compose(first: Sequence[AxisKey], second: Sequence[AxisKey]) -> tuple[AxisKey, ...]:
    """Return the index that selects at once what two select one after the other."""
    rest = iter(second)
    return tuple([e if isinstance(e, int) else _within(e, next(rest)) for e in first])


def _within(outer: Any, inner: AxisKey) -> AxisKey:
    steps = range(outer.start, outer.stop, outer.step)
    if isinstance(inner, int):
        return steps[inner]
    if not isinstance(inner, slice):
        return np.asarray(outer.start + inner * outer.step)
    chosen = steps[inner]
    if not chosen:
        return slice(0, 0, 1)
    # A negative stop would count from the end; None means "to the start".
    return slice(chosen.start, chosen.stop if chosen.stop >= 0 else None, chosen.step)


def cut_chunks(chunks: Chunks, key: Sequence[AxisKey]) -> Chunks:
    """Return the chunks of a selection as dask does: those of the whole without the rest."""
    kept = zip(chunks, key, strict=True)
    return tuple([_cut(sizes, entry) for sizes, entry in kept if isinstance(entry, slice)])


def _cut(sizes: tuple[int, ...], entry: slice) -> tuple[int, ...]:
    start, stop, step = entry.start, entry.stop, entry.step
    if (start, stop, step) == (0, sum(sizes), 1):
        return sizes
    left = []
    for begin, end in pairwise(accumulate(sizes, initial=0)):
        first = max(start, begin + (start - begin) % step)
        # Like dask's (``dask.array.slicing._slice_1d``), a chunk in which the next step would be
        # is there without an element if the end comes first: variables that are cut alike must
        # have chunks alike, or their Dataset has none.
        if begin < stop and first < end:
            left.append(len(range(first, min(stop, end), step)))
    return tuple(left) or (0,)
