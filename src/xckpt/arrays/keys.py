"""Keys: selections of arrays, the runs of elements that hold them, and chunks."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from operator import index as as_integer
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from xckpt.typing import Array

AxisKey = int | slice | np.ndarray[Any, np.dtype[np.int64]]


class ElementRun(NamedTuple):
    """A contiguous run of the elements of a C-ordered array."""

    start: int  # of the first element in the flat array
    shape: tuple[int, ...]  # of the block that the run makes; it has the axes of the whole array
    key: tuple[AxisKey, ...]  # the selection in that block, one entry for each axis


def normalize(key: Any, shape: Sequence[int]) -> tuple[AxisKey, ...]:
    """Spell out a key: one entry within bounds for each axis."""
    entries = list(key) if isinstance(key, tuple) else [key]
    for position, entry in enumerate(entries):
        if entry is Ellipsis:
            fill = len(shape) - len(entries) + 1
            entries[position : position + 1] = [slice(None)] * fill
            break
    entries += [slice(None)] * (len(shape) - len(entries))
    if len(entries) != len(shape):
        raise IndexError(f"{len(entries)} indices for an array of {len(shape)} dimensions")
    return tuple([_normalize_axis(e, n) for e, n in zip(entries, shape, strict=True)])


def whole(shape: Sequence[int]) -> tuple[AxisKey, ...]:
    """Return the key that selects everything, as `normalize` spells it."""
    return tuple([slice(0, length, 1) for length in shape])


def _slice_of(steps: range) -> slice:
    # A negative stop would count from the end; None means to the start.
    stop = None if steps.stop < 0 else steps.stop
    return slice(steps.start, stop, steps.step) if steps else slice(0, 0, 1)


def _normalize_axis(entry: Any, length: int) -> AxisKey:
    if isinstance(entry, slice):
        return _slice_of(range(length)[entry])
    if isinstance(entry, list | np.ndarray):
        return _normalize_array(np.asarray(entry), length)
    try:
        position = as_integer(entry)
    except TypeError:
        raise IndexError(f"cannot index with {entry!r}") from None
    if not -length <= position < length:
        raise IndexError(f"index {position} is out of bounds for an axis of size {length}")
    return position % length


def _normalize_array(entry: Array, length: int) -> AxisKey:
    if entry.ndim != 1:
        raise IndexError(f"only 1-d arrays can index an axis, not {entry.ndim}-d ones")
    if entry.dtype == bool:
        if len(entry) != length:
            raise IndexError(f"boolean index of length {len(entry)} for an axis of size {length}")
        return np.flatnonzero(entry)
    positions = entry.astype(np.int64)
    if positions.size and not (-length <= positions.min() and positions.max() < length):
        raise IndexError(f"index array is out of bounds for an axis of size {length}")
    return np.where(positions < 0, positions + length, positions)


def _bounds(entry: AxisKey, length: int) -> tuple[int, int]:
    """Return the half-open hull of the selected positions; ``(0, 0)`` if there are none."""
    if isinstance(entry, int):
        return entry, entry + 1
    chosen = positions(entry, length)
    if not len(chosen):
        return 0, 0
    if isinstance(chosen, range):
        return min(chosen[0], chosen[-1]), max(chosen[0], chosen[-1]) + 1
    return int(chosen.min()), int(chosen.max()) + 1


def contiguous_run(shape: Sequence[int], key: Sequence[AxisKey]) -> ElementRun:
    """Find the smallest contiguous run of a C-ordered array that holds a selection."""
    start, narrowed = 0, True
    block: list[int] = []
    inner: list[AxisKey] = []
    for axis, (length, entry) in enumerate(zip(shape, key, strict=True)):
        if not narrowed:
            block.append(length)
            inner.append(entry)
            continue
        low, high = _bounds(entry, length)
        start += low * prod(shape[axis + 1 :])
        block.append(high - low)
        if isinstance(entry, slice):
            # With a negative step, a slice that ends before the block has no stop.
            is_open = entry.stop is None or entry.stop < low
            stop = None if is_open else entry.stop - low
            inner.append(slice(entry.start - low, stop, entry.step))
        else:
            inner.append(entry - low)
        narrowed = high - low == 1
    return ElementRun(start, tuple(block), tuple(inner))


def result_shape(shape: Sequence[int], key: Sequence[AxisKey]) -> tuple[int, ...]:
    """Return the shape of a selection."""
    pairs = zip(shape, key, strict=True)
    return tuple([len(positions(e, length)) for length, e in pairs if not isinstance(e, int)])


def is_all(run: ElementRun) -> bool:
    """Return whether a selection is its whole run, in order."""
    key = tuple([slice(0, 1, 1) if isinstance(entry, int) else entry for entry in run.key])
    return all(isinstance(entry, slice) for entry in key) and key == whole(run.shape)


def positions(entry: AxisKey, length: int) -> range | np.ndarray[Any, np.dtype[np.int64]]:
    """Return the positions on an axis that an entry selects, in the order of the result."""
    if isinstance(entry, slice):
        return range(length)[entry]
    return np.atleast_1d(np.asarray(entry))


def groups(entry: AxisKey, length: int, size: int) -> Iterator[AxisKey]:
    """Cut an entry into entries that select `size` positions each, in the same order."""
    chosen = positions(entry, length)
    for start in range(0, len(chosen), size):
        part = chosen[start : start + size]
        yield _slice_of(part) if isinstance(part, range) else part


def cut_along(
    axis: int, size: int, shape: Sequence[int], key: tuple[AxisKey, ...]
) -> Iterator[tuple[tuple[slice, ...], tuple[AxisKey, ...]]]:
    """Cut a key along an axis; yield the place of each part in the result, and its key."""
    before = (slice(None),) * len(result_shape(shape[:axis], key[:axis]))
    for number, entry in enumerate(groups(key[axis], shape[axis], size)):
        place = slice(number * size, (number + 1) * size)
        yield (*before, place), (*key[:axis], entry, *key[axis + 1 :])


def leading_axes(shape: Sequence[int], key: Sequence[AxisKey], skip: int) -> int:
    """Return the number of leading axes whose selected positions are best read one by one."""
    best, lowest, count = 0, float("inf"), 1
    for axis, (length, entry) in enumerate(zip(shape, key, strict=True)):
        cost = count * (prod(contiguous_run(shape[axis:], key[axis:]).shape) + skip)
        if cost < lowest:
            best, lowest = axis, cost
        count *= len(positions(entry, length))
    return best


def take(block: Any, key: Sequence[AxisKey]) -> Any:
    """Return a selection of a block; arrays in the key select along their own axis."""
    arrays = [axis for axis, entry in enumerate(key) if isinstance(entry, np.ndarray)]
    for axis in arrays:
        block = block[(slice(None),) * axis + (key[axis],)]
    return block[tuple([slice(None) if isinstance(e, np.ndarray) else e for e in key])]


def compose(first: Sequence[AxisKey], second: Sequence[AxisKey]) -> tuple[AxisKey, ...]:
    """Return the key that selects the same as a key of the result of another key."""
    inner_entries = iter(second)
    composed: list[AxisKey] = []
    for outer in first:
        if not isinstance(outer, slice):
            composed.append(outer)
            continue
        inner, steps = next(inner_entries), range(outer.start, outer.stop, outer.step)
        if isinstance(inner, slice):
            composed.append(_slice_of(steps[inner]))
        elif isinstance(inner, int):
            composed.append(steps[inner])
        else:
            composed.append(np.asarray(outer.start + inner * outer.step))
    return tuple(composed)


def cut_chunks(chunks: Chunks, key: Sequence[AxisKey]) -> Chunks:
    """Return the chunks of a selection, as dask cuts the chunks of the whole array."""
    cut = []
    for sizes, entry in zip(chunks, key, strict=True):
        if not isinstance(entry, slice):
            continue
        start, stop, step = entry.start, entry.stop, entry.step
        if (start, stop, step) == (0, sum(sizes), 1):
            cut.append(sizes)
            continue
        lengths = []
        for begin, end in pairwise(accumulate(sizes, initial=0)):
            first = max(start, begin + (start - begin) % step)
            # Like dask (``dask.array.slicing._slice_1d``), keep an empty chunk if the next step is
            # in it, but behind the end. Variables with the same slice must have the same chunks, or
            # their Dataset has no chunks.
            if begin < stop and first < end:
                lengths.append(len(range(first, min(stop, end), step)))
        cut.append(tuple(lengths) or (0,))
    return tuple(cut)


# Limits the chunks of sparse tensors, which claim any shape in a few bytes.
_MOST_CHUNKS = 1 << 17

Chunks = tuple[tuple[int, ...], ...]


def target_nbytes() -> int:
    """Return the size of a chunk in bytes, dask's ``array.chunk-size``."""
    import dask
    from dask.utils import parse_bytes

    return max(1, int(parse_bytes(dask.config.get("array.chunk-size", "128MiB"))))


@lru_cache(maxsize=4096)
def chunks_along_slowest(
    shape: tuple[int, ...], itemsize: int, target: int, order: str = "C"
) -> Chunks:
    """Cut a shape into chunks of about `target` bytes that are contiguous in memory order."""
    if order == "F":
        return chunks_along_slowest(shape[::-1], itemsize, target)[::-1]
    chunks: list[tuple[int, ...]] = []
    nbytes = itemsize  # of an array of this and the faster axes
    for length in shape:
        nbytes *= length
    target = max(target, nbytes // _MOST_CHUNKS)
    if nbytes <= target:
        return tuple((length,) for length in shape)
    for length in shape:
        nbytes //= length
        step = min(length, max(1, target // nbytes)) if nbytes else length
        count, remainder = divmod(length, step)
        chunks.append((step,) * count + ((remainder,) if remainder else ()))
        # Once a chunk holds several positions of an axis, the faster axes must stay whole.
        if step > 1:
            target = nbytes
    return tuple(chunks)
