"""Tensors of one kind as one array: the leading axes are a grid, each position of it a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from xckpt.arrays import lazy_arrays
from xckpt.arrays.chunks import Chunks, chunks_along_slowest
from xckpt.arrays.lazy import LazyArray
from xckpt.arrays.selection import AxisKey, positions, result_shape, whole

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from xckpt.arrays import ReadOptions
    from xckpt.index import Tensor
    from xckpt.storage import Source

__all__ = ["StackedArray", "TensorArrays"]

# Members smaller than this share chunks, which are at most so large: to read 61 biases at once is
# one task then, and to read one of them still reads that one.
_SMALL = 1 << 20
_LARGEST_SHARED = 16 << 20
# A task that reads a chunk has the place of each member: no more than some tens of KiB.
_MOST_SHARED = 1024


class TensorArrays(Sequence[LazyArray]):
    """The lazy arrays of many tensors, each made when it is asked for.

    Parameters
    ----------
    tensors : sequence of Tensor
        From an index.
    role : str or None
        Which part of them is shown, None where it is the whole.
    sources : mapping of (str or None) to Source
        The file under None, its shards under their names.
    options : ReadOptions
        How to read values.
    """

    __slots__ = ("options", "role", "sources", "tensors")

    def __init__(
        self,
        tensors: Sequence[Tensor],
        role: str | None,
        sources: Mapping[str | None, Source],
        options: ReadOptions,
    ) -> None:
        self.tensors = tensors
        self.role = role
        self.sources = sources
        self.options = options

    def __len__(self) -> int:
        return len(self.tensors)

    @overload
    def __getitem__(self, position: int) -> LazyArray: ...

    @overload
    def __getitem__(self, position: slice) -> TensorArrays: ...

    def __getitem__(self, position: int | slice) -> LazyArray | TensorArrays:
        if isinstance(position, slice):
            return TensorArrays(self.tensors[position], self.role, self.sources, self.options)
        return lazy_arrays(self.tensors[position], self.sources, self.options)[self.role]

    def take(self, positions: Sequence[int]) -> TensorArrays:
        """Return some of them, with the files of these alone."""
        tensors = tuple([self.tensors[position] for position in positions])
        labels = {None, *(part.shard for tensor in tensors for part in tensor.parts.values())}
        sources = {label: self.sources[label] for label in labels}
        return TensorArrays(tensors, self.role, sources, self.options)


class StackedArray(LazyArray):
    """Arrays of one shape and dtype as one array with more axes in front.

    Parameters
    ----------
    name : str
        Of the variable, for messages; a member's errors have the member's.
    members : sequence of LazyArray
        In C order over the grid, at least one.
    grid : tuple of int
        Extents of the leading axes.
    """

    __slots__ = ("grid", "members")

    def __init__(self, name: str, members: Sequence[LazyArray], grid: tuple[int, ...]) -> None:
        first = members[0]
        super().__init__(name, first.source, (*grid, *first.shape), first.dtype)
        self.members = members
        self.grid = grid

    @property
    def sources(self) -> Collection[Source]:
        """Those of all members; see `LazyArray.sources`."""
        if isinstance(self.members, TensorArrays):
            return self.members.sources.values()
        return {source for member in self.members for source in member.sources}

    @property
    def advice(self) -> str:  # type: ignore[override]  # that of the members
        """What to do where all of it does not fit in memory."""
        return self.members[0].advice

    def chunks(self, target: int) -> Chunks:
        """Return a chunk or several to each member; small members share some."""
        first = self.members[0]
        inner = first.chunks(target)
        nbytes = prod(first.shape) * self.dtype.itemsize
        if nbytes < _SMALL and all(len(sizes) == 1 for sizes in inner):
            most = min(target, _LARGEST_SHARED, _MOST_SHARED * max(1, nbytes))
            return chunks_along_slowest(self.grid, max(1, nbytes), most) + inner
        return tuple((1,) * count for count in self.grid) + inner

    def empty(self, shape: tuple[int, ...]) -> Any:
        """Return an array without elements, of the kind that the members give."""
        return self.members[0].empty(shape)

    def sliced(self, key: tuple[AxisKey, ...]) -> LazyArray:
        """Return fewer members, or one of them, where that is all; see `LazyArray.sliced`."""
        outer, inner = key[: len(self.grid)], key[len(self.grid) :]
        if all(isinstance(entry, int) for entry in outer):
            return self.members[self._position(outer)].sliced(inner)
        places, grid = self._places(outer)
        if not places:
            return LazyArray.sliced(self, key)
        fewer = self if grid == self.grid else self._with(places, grid)
        return LazyArray.sliced(fewer, whole(grid) + inner)

    def narrowed(self, key: tuple[AxisKey, ...]) -> tuple[LazyArray, tuple[AxisKey, ...]]:
        """Return the members that are needed; see `LazyArray.narrowed`."""
        outer, inner = key[: len(self.grid)], key[len(self.grid) :]
        if all(isinstance(entry, int) for entry in outer):
            return self.members[self._position(outer)].narrowed(inner)
        places, grid = self._places(outer)
        if not places:
            return self, key
        members = tuple([self.members[place].bare() for place in places])
        return StackedArray(self.name, members, grid), whole(grid) + inner

    def _select(self, key: tuple[AxisKey, ...]) -> Any:
        outer, inner = key[: len(self.grid)], key[len(self.grid) :]
        shape = result_shape(self.shape, key)
        if 0 in shape:
            return self.empty(shape)
        if all(isinstance(entry, int) for entry in outer):
            return self.members[self._position(outer)][inner]
        places = product(*map(positions, outer, self.grid))
        chosen = [self.members[self._position(place)] for place in places]
        if not isinstance(self.empty((0,) * len(shape)), np.ndarray):
            return _sparse_stack([member[inner] for member in chosen], shape)
        if len(chosen) == 1:
            return chosen[0][inner].reshape(shape)
        stacked = np.empty(shape, self.dtype)
        _stack_into(stacked, chosen, inner)
        return stacked

    def _select_into(self, key: tuple[AxisKey, ...], out: np.ndarray[Any, Any]) -> None:
        if not out.flags.c_contiguous or not out.size:
            super()._select_into(key, out)
            return
        outer, inner = key[: len(self.grid)], key[len(self.grid) :]
        places = product(*map(positions, outer, self.grid))
        _stack_into(out, [self.members[self._position(place)] for place in places], inner)

    def _places(self, outer: Sequence[AxisKey]) -> tuple[list[int], tuple[int, ...]]:
        """Return the members at some positions of the grid, and the grid that they make."""
        along = list(map(positions, outer, self.grid))
        grid = [len(s) for s, e in zip(along, outer, strict=True) if not isinstance(e, int)]
        return [self._position(place) for place in product(*along)], tuple(grid)

    def _with(self, places: list[int], grid: tuple[int, ...]) -> LazyArray:
        """Return an array of some members only."""
        members = self.members
        if isinstance(members, TensorArrays):
            return StackedArray(self.name, members.take(places), grid)
        return StackedArray(self.name, tuple([members[place] for place in places]), grid)

    def _position(self, place: Sequence[AxisKey]) -> int:
        position = 0
        for step, count in zip(place, self.grid, strict=True):
            position = position * count + index(step)  # type: ignore[arg-type]  # only integers
        return position


def _stack_into(
    out: np.ndarray[Any, Any], members: list[LazyArray], inner: tuple[AxisKey, ...]
) -> None:
    """Read members one after another into a contiguous array."""
    flat = out.reshape(len(members), *_tail(out.shape, inner))
    for place, member in enumerate(members):
        member.read_into(flat[place, ...], inner)


def _tail(shape: tuple[int, ...], inner: tuple[AxisKey, ...]) -> tuple[int, ...]:
    """Return the axes that the selection of a member has."""
    kept = sum(not isinstance(entry, int) for entry in inner)
    return shape[len(shape) - kept :]


def _sparse_stack(blocks: list[Any], shape: tuple[int, ...]) -> Any:
    import sparse

    return sparse.stack(blocks).reshape(shape)
