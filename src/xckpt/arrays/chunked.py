"""A tensor in blocks, each a dense array of its own somewhere, as one array."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.arrays.dense import DenseArray
from xckpt.arrays.lazy import LazyArray
from xckpt.arrays.selection import AxisKey, positions, result_shape

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from xckpt.arrays.parts import PartReader
    from xckpt.index import Tensor
    from xckpt.storage import Source

__all__ = ["ChunkedArray"]

Array = np.ndarray[Any, np.dtype[Any]]


class _Share(NamedTuple):
    """What an index selects of a block: of the result, and of the block."""

    role: str
    outer: tuple[Any, ...]
    inner: tuple[AxisKey, ...]


class ChunkedArray(LazyArray):
    """The blocks of a tensor; a selection reads those that it needs, and of each what it needs."""

    __slots__ = ("blocks", "origins")

    def __init__(
        self, tensor: Tensor, readers: Mapping[str, PartReader], *, decode: bool = True
    ) -> None:
        self.origins = {role: part.origin or () for role, part in tensor.parts.items()}
        self.blocks = {
            role: DenseArray(tensor.name, reader, reader.part.shape or (), decode=decode)
            for role, reader in readers.items()
        }
        first = next(iter(self.blocks.values()))
        super().__init__(tensor.name, first.source, tensor.shape, first.dtype)

    @property
    def readers(self) -> dict[str, PartReader]:
        """The parts by their roles."""
        return {role: block.reader for role, block in self.blocks.items()}

    @property
    def sources(self) -> Collection[Source]:
        """All files that blocks are in."""
        return {block.source for block in self.blocks.values()}

    def narrowed(self, key: tuple[AxisKey, ...]) -> tuple[LazyArray, tuple[AxisKey, ...]]:
        """Return the blocks that are needed; see `LazyArray.narrowed`."""
        needed = {share.role for share in self._shares(key)}
        fewer = copy(self.bare())
        if needed:
            fewer.blocks = {role: self.blocks[role] for role in needed}
            fewer.origins = {role: self.origins[role] for role in needed}
        return fewer, key

    def _select(self, key: tuple[AxisKey, ...]) -> Any:
        out = np.empty(result_shape(self.shape, key), self.dtype)
        self._select_into(key, out)
        return out

    def _select_into(self, key: tuple[AxisKey, ...], out: Array) -> None:
        for role, outer, inner in self._shares(key):
            block = self.blocks[role]
            if all(isinstance(entry, slice) for entry in outer):
                block.read_into(out[outer], inner)
            else:
                out[np.ix_(*outer)] = block[inner]

    def _shares(self, key: tuple[AxisKey, ...]) -> Iterator[_Share]:
        for role, block in self.blocks.items():
            outer: list[Any] = []
            inner: list[AxisKey] = []
            along = zip(key, self.shape, self.origins[role], block.shape, strict=True)
            for entry, length, low, extent in along:
                if isinstance(entry, int):
                    if not low <= entry < low + extent:
                        break
                    inner.append(entry - low)
                    continue
                where, chosen = _within(entry, length, low, low + extent)
                if not len(where):
                    break
                outer.append(where)
                inner.append(chosen)
            else:
                if all(isinstance(each, range) for each in outer):
                    outer = [slice(each.start, each.stop) for each in outer]
                yield _Share(role, tuple(outer), tuple(inner))


def _within(entry: AxisKey, length: int, low: int, high: int) -> tuple[Any, AxisKey]:
    """Return which places of a result are in a range of an axis, and what of that range they are.

    Places are a range where the positions are a slice with a positive step.
    """
    chosen = positions(entry, length)
    if isinstance(chosen, range) and chosen.step > 0:
        first, stop = (max(0, -((chosen.start - at) // chosen.step)) for at in (low, high))
        stop = min(stop, len(chosen))
        if first >= stop:
            return range(0), slice(0, 0, 1)
        begin = chosen[first] - low
        last = chosen[stop - 1] - low
        return range(first, stop), slice(begin, last + 1, chosen.step)
    found = np.asarray(chosen)
    where = np.flatnonzero((found >= low) & (found < high))
    return where, found[where] - low
