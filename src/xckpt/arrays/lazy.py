"""Lazy arrays over tensors of files, and slices of them; nothing is read before indexing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from xckpt.arrays.keys import (
    AxisKey,
    Chunks,
    chunks_along_slowest,
    compose,
    cut_chunks,
    normalize,
    result_shape,
    whole,
)
from xckpt.errors import CheckpointError, UnsupportedError, locating, shown
from xckpt.storage.limits import exceeds_expansion, require_expansion

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from xckpt.arrays.parts import PartReader
    from xckpt.index import Tensor
    from xckpt.storage import Source
    from xckpt.storage.prefetch import Range
    from xckpt.typing import Array

# Names that are pickled with an array.
_MOST_PICKLED = 4096


class Opened:
    """The tensors that were opened together."""

    __slots__ = ("names", "shared", "source", "stacks")

    def __init__(
        self,
        source: str,
        names: Collection[str],
        stacks: Mapping[str, Any] | None = None,
        shared: Mapping[str, str] | None = None,
    ) -> None:
        self.source = source  # path or URL
        self.names = names  # empty after pickling too many, which would outweigh an array
        #: Records of stacks by name of the variable; empty if the tensors are separate.
        self.stacks = stacks or {}
        #: Names of tensors that share the bytes of others, with the names of these.
        self.shared = shared or {}

    def __reduce__(self) -> tuple[Any, ...]:
        names = self.names if len(self.names) <= _MOST_PICKLED else ()
        return Opened, (self.source, names, self.stacks, self.shared)

    def __deepcopy__(self, memo: Any) -> Opened:
        return self


class Origin(NamedTuple):
    """The tensor that an array shows as a whole, or the part of it, as the file describes it."""

    tensor: Tensor
    role: str | None
    opened: Opened | None = None


class LazyArray(ABC):
    """An array in a file, which is read by indexing it, on any thread; pickles by reference."""

    # Without an origin the attribute is missing as well: tasks are smaller without it.
    __slots__ = ("_origin", "dtype", "name", "shape", "source")

    #: Advice for arrays that do not fit in memory.
    advice = "Select less of it at once"
    #: Memory order in which the elements are stored: "C" or "F".
    order: str = "C"

    def __init__(
        self, name: str, source: Source, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self.name = name  # of a tensor or a stack, for messages, readers and names of dask arrays
        self.source = source
        self.shape = shape
        self.dtype = dtype  # of selections

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of all elements in memory, in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def sources(self) -> Collection[Source]:
        """All files that the array is read from."""
        return [self.source]

    @property
    def origin(self) -> Origin | None:
        """The tensor, or part of a tensor, that the array shows as a whole."""
        return getattr(self, "_origin", None)

    @property
    def tensor_origins(self) -> Iterator[Origin]:
        """The tensors that the array is read from."""
        origin = self.origin
        return iter(() if origin is None else (origin,))

    def of(self, tensor: Tensor, role: str | None, opened: Opened | None = None) -> Self:
        """Set the tensor that the array shows as a whole, and return the array."""
        self._origin = Origin(tensor, role, opened)
        return self

    def reopened(self, separate: Callable[[Opened], Opened]) -> Self:
        """Return the array of a tensor as one of others; other arrays as they are."""
        origin = self.origin
        if origin is None or origin.opened is None:
            return self
        return copy(self).of(origin.tensor, origin.role, separate(origin.opened))

    def __getitem__(self, key: Any) -> Any:
        spelled_out = normalize(key, self.shape)
        with locating(path=self.source.name, tensor=self.name):
            return self.select(spelled_out)

    def read_into(self, out: Array, key: Any) -> None:
        """Read a selection into an array of its shape and dtype."""
        spelled_out = normalize(key, self.shape)
        with locating(path=self.source.name, tensor=self.name):
            self.select_into(spelled_out, out)

    @abstractmethod
    def select(self, key: tuple[AxisKey, ...]) -> Any:
        """Return a selection by a key that `normalize` has spelled out."""

    def select_into(self, key: tuple[AxisKey, ...], out: Array) -> None:
        """Read a selection by a spelled-out key into an array of its shape and dtype."""
        out[...] = self.select(key)

    @property
    def part_readers(self) -> Collection[PartReader]:
        """Readers of the parts that are read as a whole to read the whole array."""
        return ()

    @property
    def stored_nbytes(self) -> int | None:
        """Size of its parts in the file; None if that is unknown."""
        sizes = [reader.part.nbytes for reader in self.part_readers]
        return sum(sizes) if sizes else None

    @property
    def is_expanded(self) -> bool:
        """Whether a few stored bytes stand for too many elements to read them all."""
        if not exceeds_expansion(self.nbytes, 0):
            return False
        stored = self.stored_nbytes
        return stored is not None and exceeds_expansion(self.nbytes, stored)

    def require_expansion(self) -> None:
        """Raise `TooLargeError` if it is expanded, before all of it is read piece by piece."""
        if self.is_expanded:
            with locating(path=self.source.name, tensor=self.name):
                require_expansion(self.nbytes, self.stored_nbytes or 0)

    def ranges(self, key: Any) -> Iterator[Range]:
        """Return the byte ranges that a selection is read from, in order, if they are known."""
        if normalize(key, self.shape) == whole(self.shape):
            for reader in self.part_readers:
                yield from reader.ranges()

    def chunks(self, target: int) -> Chunks:
        """Return the chunks that reading it is cheapest in; one if they would be too many."""
        if self.is_expanded:
            return tuple((size,) for size in self.shape)
        return chunks_along_slowest(self.shape, self.dtype.itemsize, target)

    def sliced(self, key: tuple[AxisKey, ...]) -> LazyArray:
        """Return a selection as a lazy array."""
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

    def allocate(self, order: Any = "C") -> Array:
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

    def select(self, key: tuple[AxisKey, ...]) -> Any:
        """Return a selection; see `LazyArray.select`."""
        raise self.error()

    def error(self) -> CheckpointError:
        """Return the error that names this tensor, also if several have one problem."""
        # A copy: one error object raised in several threads would mix their tracebacks.
        error = copy(self.problem)
        error.tensor = self.name
        return error


class SlicedArray(LazyArray):
    """A selection of a lazy array, by integers and slices with positive steps."""

    __slots__ = ("base", "key")

    def __init__(self, base: LazyArray, key: tuple[AxisKey, ...]) -> None:
        super().__init__(base.name, base.source, result_shape(base.shape, key), base.dtype)
        self.base = base
        self.key = key

    @property
    def sources(self) -> Collection[Source]:
        """Files of the base; see `LazyArray.sources`."""
        return self.base.sources

    @property
    def tensor_origins(self) -> Iterator[Origin]:
        """Tensors of the base; see `LazyArray.tensor_origins`."""
        return self.base.tensor_origins

    def reopened(self, separate: Callable[[Opened], Opened]) -> Self:
        """Return the selection of the base as one of others; see `LazyArray.reopened`."""
        base = self.base.reopened(separate)
        return self if base is self.base else type(self)(base, self.key)

    @property
    def stored_nbytes(self) -> int | None:
        """Stored size of the base; see `LazyArray.stored_nbytes`."""
        return self.base.stored_nbytes

    @property
    def advice(self) -> str:  # type: ignore[override]  # that of the base
        """Advice for arrays that do not fit in memory."""
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
        """Narrow the base; see `LazyArray.narrowed`."""
        return self.base.narrowed(compose(self.key, key))

    def ranges(self, key: Any) -> Iterator[Range]:
        """Return the byte ranges of the base; see `LazyArray.ranges`."""
        return self.base.ranges(compose(self.key, normalize(key, self.shape)))

    def select(self, key: tuple[AxisKey, ...]) -> Any:
        """Return a selection; see `LazyArray.select`."""
        return self.base.select(compose(self.key, key))

    def select_into(self, key: tuple[AxisKey, ...], out: Array) -> None:
        """Read a selection into an array; see `LazyArray.select_into`."""
        self.base.select_into(compose(self.key, key), out)


def dense_values(block: Any) -> Array:
    """Return the values of a block, which may be lazy or sparse, as a numpy array."""
    if hasattr(block, "dask"):
        block = block.compute()
    return np.asarray(block.todense() if hasattr(block, "todense") else block)
