"""Tensors of one kind as one array: the leading axes are a grid, each position of it a tensor.

Where a grid has no tensor at a position, it has NaN, which nothing is read for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from xckpt.arrays import ReadOptions, lazy_arrays
from xckpt.arrays.keys import (
    AxisKey,
    Chunks,
    chunks_along_slowest,
    normalize,
    positions,
    result_shape,
    whole,
)
from xckpt.arrays.lazy import LazyArray, Origin
from xckpt.storage.local import BytesSource

if TYPE_CHECKING:
    from xckpt.index import Tensor
    from xckpt.storage import Source
    from xckpt.storage.prefetch import Range
    from xckpt.typing import Array

# Members smaller than this share chunks, which are at most so large: to read 61 biases at once is
# one task then, and to read one of them still reads that one.
_SMALL = 1 << 20
_LARGEST_SHARED = 16 << 20
# A task that reads a chunk has the place of each member: no more than some tens of KiB.
_MOST_SHARED = 1024


def can_be_absent(meta: Any) -> bool:
    """Return whether NaN can stand for arrays like one: dense ones, of a type that has NaN."""
    # Types of ml_dtypes are of the kinds "f" and "V", whether they have one or not.
    with np.errstate(invalid="ignore"), suppress(TypeError, ValueError):
        is_float = isinstance(meta, np.ndarray) and meta.dtype.kind in "fcV"
        return is_float and bool(np.isnan(np.full((), np.nan, meta.dtype)))
    return False


_NOWHERE = BytesSource(b"")


class AbsentArray(LazyArray):
    """An array of NaN in the place of tensors that a file does not have."""

    __slots__ = ()

    def __init__(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        super().__init__(name, _NOWHERE, shape, dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return AbsentArray, (self.name, self.shape, self.dtype)

    @property
    def sources(self) -> Collection[Source]:
        """None; see `LazyArray.sources`."""
        return ()

    def sliced(self, key: tuple[AxisKey, ...]) -> LazyArray:
        """Return a smaller one; see `LazyArray.sliced`."""
        return AbsentArray(self.name, result_shape(self.shape, key), self.dtype)

    def select(self, key: tuple[AxisKey, ...]) -> Any:
        """Return a selection; see `LazyArray.select`."""
        return np.full(result_shape(self.shape, key), np.nan, self.dtype)

    def select_into(self, key: tuple[AxisKey, ...], out: Array) -> None:
        """Read a selection into an array; see `LazyArray.select_into`."""
        out[...] = np.nan


@dataclass(eq=False, slots=True)
class MemberArrays(Sequence[LazyArray]):
    """The lazy arrays of many tensors, or of one part of each, made when they are asked for."""

    tensors: Sequence[Tensor | None]
    role: str | None
    sources: Mapping[str | None, Source]
    options: ReadOptions
    #: Stands for tensors that are None.
    absent: AbsentArray | None = None

    def __len__(self) -> int:
        return len(self.tensors)

    @overload
    def __getitem__(self, position: int) -> LazyArray: ...

    @overload
    def __getitem__(self, position: slice) -> MemberArrays: ...

    def __getitem__(self, position: int | slice) -> LazyArray | MemberArrays:
        if isinstance(position, slice):
            return replace(self, tensors=self.tensors[position])
        tensor = self.tensors[position]
        if tensor is not None:
            return lazy_arrays(tensor, self.sources, self.options)[self.role]
        if self.absent is None:
            raise ValueError("no array stands for the tensors that are absent")
        return self.absent

    @property
    def present(self) -> list[Tensor]:
        """The tensors that are there."""
        return [tensor for tensor in self.tensors if tensor is not None]

    def take(self, positions: Sequence[int]) -> MemberArrays:
        """Return the arrays at some positions, with only the files of these."""
        tensors = tuple([self.tensors[position] for position in positions])
        present = [tensor for tensor in tensors if tensor is not None]
        labels = {None, *(part.shard for tensor in present for part in tensor.parts.values())}
        sources = {label: self.sources[label] for label in labels}
        return replace(self, tensors=tensors, sources=sources)


class _MemberKey(NamedTuple):
    """An index into a stack, as the members that it selects and the index into each of them."""

    places: list[int]  # positions of the members in the stack
    grid: tuple[int, ...]  # that these members make
    inner: tuple[AxisKey, ...]


class StackedArray(LazyArray):
    """Arrays of one shape and dtype, in C order over a grid, as one array with more axes."""

    __slots__ = ("grid", "members")

    def __init__(self, name: str, members: Sequence[LazyArray], grid: tuple[int, ...]) -> None:
        self.members = members
        self.grid = grid
        first = self.first
        super().__init__(name, first.source, (*grid, *first.shape), first.dtype)

    @property
    def first(self) -> LazyArray:
        """The first member that there is."""
        return next((m for m in self.members if not isinstance(m, AbsentArray)), self.members[0])

    @property
    def sources(self) -> Collection[Source]:
        """Files of all members; see `LazyArray.sources`."""
        if isinstance(self.members, MemberArrays):
            return self.members.sources.values()
        return {source for member in self.members for source in member.sources}

    @property
    def tensor_origins(self) -> Iterator[Origin]:
        """Tensors of all members; see `LazyArray.tensor_origins`."""
        members = self.members
        if not isinstance(members, MemberArrays):
            return chain.from_iterable([member.tensor_origins for member in members])
        opened = members.options.opened
        return (Origin(tensor, members.role, opened) for tensor in members.present)

    @property
    def advice(self) -> str:  # type: ignore[override]  # that of the members
        """Advice for arrays that do not fit in memory."""
        return self.first.advice

    def ranges(self, key: Any) -> Iterator[Range]:
        """Return the byte ranges of the members; see `LazyArray.ranges`."""
        places, _, inner = self._split(normalize(key, self.shape))
        for place in places:
            yield from self.members[place].ranges(inner)

    def chunks(self, target: int) -> Chunks:
        """Return a chunk or several to each member; small members share some."""
        inner, nbytes = self.first.chunks(target), self.first.nbytes
        if nbytes < _SMALL and all(len(sizes) == 1 for sizes in inner):
            most = min(target, _LARGEST_SHARED, _MOST_SHARED * max(1, nbytes))
            return chunks_along_slowest(self.grid, max(1, nbytes), most) + inner
        return tuple((1,) * count for count in self.grid) + inner

    def empty(self, shape: tuple[int, ...]) -> Any:
        """Return an array without elements, of the kind that the members give."""
        return self.first.empty(shape)

    def sliced(self, key: tuple[AxisKey, ...]) -> LazyArray:
        """Return fewer members, or one of them, where that is all; see `LazyArray.sliced`."""
        places, grid, inner = self._split(key)
        if not grid:
            return self.members[places[0]].sliced(inner)
        if not places:
            return LazyArray.sliced(self, key)
        fewer = self
        if grid != self.grid:
            members: Sequence[LazyArray] = (
                self.members.take(places)
                if isinstance(self.members, MemberArrays)
                else tuple([self.members[place] for place in places])
            )
            fewer = StackedArray(self.name, members, grid)
        return LazyArray.sliced(fewer, whole(grid) + inner)

    def narrowed(self, key: tuple[AxisKey, ...]) -> tuple[LazyArray, tuple[AxisKey, ...]]:
        """Return the members that are needed; see `LazyArray.narrowed`."""
        places, grid, inner = self._split(key)
        if not grid:
            return self.members[places[0]].narrowed(inner)
        if not places:
            return self, key
        members = tuple([self.members[place].bare() for place in places])
        return StackedArray(self.name, members, grid), whole(grid) + inner

    def select(self, key: tuple[AxisKey, ...]) -> Any:
        """Return a selection; see `LazyArray.select`."""
        shape = result_shape(self.shape, key)
        if 0 in shape:
            return self.empty(shape)
        places, grid, inner = self._split(key)
        if len(places) == 1:
            selection = self.members[places[0]][inner]
            return selection.reshape(shape) if grid else selection
        if not isinstance(self.empty((0,) * len(shape)), np.ndarray):
            import sparse

            return sparse.stack([self.members[n][inner] for n in places]).reshape(shape)
        stacked = np.empty(shape, self.dtype)
        self.select_into(key, stacked)
        return stacked

    def select_into(self, key: tuple[AxisKey, ...], out: Array) -> None:
        """Read a selection into an array; see `LazyArray.select_into`."""
        if not out.flags.c_contiguous or not out.size:
            super().select_into(key, out)
            return
        places, grid, inner = self._split(key)
        # One after another, in the order of memory.
        flat = out.reshape(len(places), *out.shape[len(grid) :])
        for position, place in enumerate(places):
            self.members[place].read_into(flat[position, ...], inner)

    def _split(self, key: tuple[AxisKey, ...]) -> _MemberKey:
        """Split an index into the selected members and the index into each of them."""
        places, grid = [0], []
        for entry, count in zip(key, self.grid, strict=False):
            along = [entry] if isinstance(entry, int) else [*map(int, positions(entry, count))]
            places = [place * count + index for place in places for index in along]
            if not isinstance(entry, int):
                grid.append(len(along))
        return _MemberKey(places, tuple(grid), key[len(self.grid) :])
