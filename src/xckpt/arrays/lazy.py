"""Arrays of which nothing is read yet, what an index selects of them, and how they are cut."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from operator import index as as_integer
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from xckpt.errors import CheckpointError, UnsupportedError, locating, shown

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from xckpt.arrays.parts import PartReader
    from xckpt.index import Tensor
    from xckpt.storage import Source
    from xckpt.storage.ahead import Range

AxisKey = int | slice | np.ndarray[Any, np.dtype[np.int64]]


class ElementRun(NamedTuple):
    """A contiguous run of the elements of a C-ordered array."""

    start: int  # of the first element in the flat array
    shape: tuple[int, ...]  # of the block that the run makes; it has the axes of the whole array
    key: tuple[AxisKey, ...]  # what to take of that block, one entry for each axis


def normalize(key: Any, shape: Sequence[int]) -> tuple[AxisKey, ...]:
    """Spell an index out: one in-range entry for each axis."""
    entries = list(key) if isinstance(key, tuple) else [key]
    where = [i for i, entry in enumerate(entries) if entry is Ellipsis]
    if where:
        fill = len(shape) - len(entries) + 1
        entries[where[0] : where[0] + 1] = [slice(None)] * fill
    entries += [slice(None)] * (len(shape) - len(entries))
    if len(entries) != len(shape):
        raise IndexError(f"{len(entries)} indices for an array of {len(shape)} dimensions")
    return tuple(_normalize_axis(e, n) for e, n in zip(entries, shape, strict=True))


def whole(shape: Sequence[int]) -> tuple[AxisKey, ...]:
    """Return the index that selects all, as `normalize` spells it."""
    return tuple([slice(0, length, 1) for length in shape])


def _slice_of(steps: range) -> slice:
    # A negative stop would count from the end; None means "to the start".
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


def _normalize_array(entry: np.ndarray[Any, Any], length: int) -> AxisKey:
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
    """Return the half-open hull of what an entry selects; ``(0, 0)`` for nothing."""
    if isinstance(entry, int):
        return entry, entry + 1
    chosen = positions(entry, length)
    if not len(chosen):
        return 0, 0
    if isinstance(chosen, range):
        return min(chosen[0], chosen[-1]), max(chosen[0], chosen[-1]) + 1
    return int(chosen.min()), int(chosen.max()) + 1


def _shifted(entry: AxisKey, low: int) -> AxisKey:
    if isinstance(entry, slice):
        if entry.stop is None or entry.stop < low:
            return slice(entry.start - low, None, entry.step)
        return slice(entry.start - low, entry.stop - low, entry.step)
    return entry - low


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
        inner.append(_shifted(entry, low))
        narrowed = high - low == 1
    return ElementRun(start, tuple(block), tuple(inner))


def result_shape(shape: Sequence[int], key: Sequence[AxisKey]) -> tuple[int, ...]:
    """Return the shape of a selection."""
    sizes = []
    for length, entry in zip(shape, key, strict=True):
        if isinstance(entry, slice):
            sizes.append(len(range(*entry.indices(length))))
        elif not isinstance(entry, int):
            sizes.append(len(entry))
    return tuple(sizes)


def is_all(run: ElementRun) -> bool:
    """Whether what is taken of a run is all of it, in its order."""
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
    """Cut an index along an axis: where in the result each part is, and its index."""
    before = (slice(None),) * len(result_shape(shape[:axis], key[:axis]))
    for number, some in enumerate(groups(key[axis], shape[axis], size)):
        where = slice(number * size, (number + 1) * size)
        yield (*before, where), (*key[:axis], some, *key[axis + 1 :])


def leading_axes(shape: Sequence[int], key: Sequence[AxisKey], skip: int) -> int:
    """Return along how many axes it is best to read each selected position by itself."""
    best, lowest, count = 0, float("inf"), 1
    for axis, (length, entry) in enumerate(zip(shape, key, strict=True)):
        cost = count * (prod(contiguous_run(shape[axis:], key[axis:]).shape) + skip)
        if cost < lowest:
            best, lowest = axis, cost
        count *= len(positions(entry, length))
    return best


def take(block: Any, key: Sequence[AxisKey]) -> Any:
    """Apply an index to a block, orthogonally: each array acts on its own axis."""
    arrays = [axis for axis, entry in enumerate(key) if isinstance(entry, np.ndarray)]
    for axis in arrays:
        block = block[(slice(None),) * axis + (key[axis],)]
    return block[tuple(slice(None) if isinstance(e, np.ndarray) else e for e in key)]


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
    return _slice_of(steps[inner])


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


# Sparse tensors claim any shape in a few bytes; a chunk of a real file is no smaller for this.
_MOST_CHUNKS = 1 << 17

Chunks = tuple[tuple[int, ...], ...]


def target_nbytes() -> int:
    """Return the wanted size of a chunk in bytes: dask's ``array.chunk-size``."""
    import dask
    from dask.utils import parse_bytes

    return max(1, int(parse_bytes(dask.config.get("array.chunk-size", "128MiB"))))


@lru_cache(maxsize=4096)
def chunks_along_slowest(
    shape: tuple[int, ...], itemsize: int, target: int, order: str = "C"
) -> Chunks:
    """Cut a shape into chunks of about `target` bytes, each contiguous in memory order."""
    if order == "F":
        return chunks_along_slowest(shape[::-1], itemsize, target)[::-1]
    chunks: list[tuple[int, ...]] = []
    rest = itemsize
    for length in shape:
        rest *= length
    target = max(target, rest // _MOST_CHUNKS)
    if rest <= target:
        return tuple((length,) for length in shape)
    for length in shape:
        rest //= length
        step = min(length, max(1, target // rest)) if rest else length
        whole, left = divmod(length, step)
        chunks.append((step,) * whole + ((left,) if left else ()))
        # Once a chunk holds several positions of an axis, the faster axes must stay whole.
        if step > 1:
            target = rest
    return tuple(chunks)


class Origin(NamedTuple):
    """What an array shows all of: a tensor as its file describes it, or one part of that."""

    tensor: Tensor
    role: str | None


class LazyArray(ABC):
    """An array in a file: indexing it reads what is asked for, and nothing else does.

    It has what `dask.array.from_array` wants, is safe to use from several threads, and pickles by
    reference. `name` is that of the tensor, for messages; `dtype` that of what indexing returns.
    """

    # What has no origin does not have the attribute either: tasks are smaller without it.
    __slots__ = ("_origin", "dtype", "name", "shape", "source")

    #: What to do where all of it does not fit in memory.
    advice = "Select less of it at once"

    def __init__(
        self, name: str, source: Source, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self.name = name
        self.source = source
        self.shape = shape
        self.dtype = dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def sources(self) -> Collection[Source]:
        """All files that it is in."""
        return [self.source]

    @property
    def origin(self) -> Origin | None:
        """Which tensor it is, where it is all of one, or all of a part of one."""
        return getattr(self, "_origin", None)

    def of(self, tensor: Tensor, role: str | None) -> Self:
        """Say which tensor it is, and return it."""
        self._origin = Origin(tensor, role)
        return self

    def __getitem__(self, key: Any) -> Any:
        chosen = normalize(key, self.shape)
        with locating(path=self.source.name, tensor=self.name):
            return self._select(chosen)

    def read_into(self, out: np.ndarray[Any, Any], key: Any) -> None:
        """Read a selection into an array of its shape and dtype."""
        chosen = normalize(key, self.shape)
        with locating(path=self.source.name, tensor=self.name):
            self._select_into(chosen, out)

    @abstractmethod
    def _select(self, key: tuple[AxisKey, ...]) -> Any:
        """Return the selection of a normalised index."""

    def _select_into(self, key: tuple[AxisKey, ...], out: np.ndarray[Any, Any]) -> None:
        out[...] = self._select(key)

    @property
    def part_readers(self) -> Collection[PartReader]:
        """Those that reading all of it reads all of."""
        return ()

    def ranges(self, key: Any) -> Iterator[Range]:
        """Return which bytes of which files a selection is read from, where that is known before.

        All of it is read in this order.
        """
        if normalize(key, self.shape) == whole(self.shape):
            for reader in self.part_readers:
                yield from reader.ranges()

    def chunks(self, target: int) -> Chunks:
        """Return the chunks that reading it is cheapest in."""
        return chunks_along_slowest(self.shape, self.dtype.itemsize, target)

    def sliced(self, key: tuple[AxisKey, ...]) -> LazyArray:
        """Return a selection as an array, from which nothing is read yet."""
        return self if key == whole(self.shape) else SlicedArray(self, key)

    def narrowed(self, key: tuple[AxisKey, ...]) -> tuple[LazyArray, tuple[AxisKey, ...]]:
        """Return the smallest array that has a selection, for a task that reads no more."""
        return self.bare(), key

    def bare(self) -> Self:
        """Return the same without its `origin`, which reading does not need."""
        if self.origin is None:
            return self
        bare = copy(self)
        del bare._origin  # noqa: SLF001  a copy of this object
        return bare

    def allocate(self, order: Any = "C") -> np.ndarray[Any, Any]:
        """Return memory for the whole array, to be read into."""
        try:
            return np.empty(self.shape, self.dtype, order)
        except (MemoryError, ValueError) as error:
            raise MemoryError(f"{self.source.name}: tensor {shown(self.name)}: {error}") from error

    def empty(self, shape: tuple[int, ...]) -> Any:
        """Return an array without elements, of the kind and dtype that indexing gives."""
        try:
            return np.empty(shape, self.dtype)
        except ValueError as error:  # numpy wants the other axes to be countable in bytes
            raise UnsupportedError(f"numpy has no array of shape {shape}: {error}") from error


class UnreadableArray(LazyArray):
    """A tensor that can be described but not read: indexing it raises."""

    __slots__ = ("problem",)

    def __init__(
        self,
        name: str,
        source: Source,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        problem: CheckpointError,
    ) -> None:
        super().__init__(name, source, shape, dtype)
        self.problem = problem

    def chunks(self, target: int) -> Chunks:
        """Return one chunk: no bytes bound the shape, nor would they the number of chunks."""
        return tuple((size,) for size in self.shape)

    def _select(self, key: tuple[AxisKey, ...]) -> Any:
        # A copy: one error object raised in several threads would mix their tracebacks.
        raise copy(self.problem)


class SlicedArray(LazyArray):
    """What integers and slices with positive steps, a normalised key, select of an array."""

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

    def ranges(self, key: Any) -> Iterator[Range]:
        """Return those of the base; see `LazyArray.ranges`."""
        return self.base.ranges(compose(self.key, normalize(key, self.shape)))

    def _select(self, key: tuple[AxisKey, ...]) -> Any:
        return self.base[compose(self.key, key)]

    def _select_into(self, key: tuple[AxisKey, ...], out: np.ndarray[Any, Any]) -> None:
        self.base.read_into(out, compose(self.key, key))
