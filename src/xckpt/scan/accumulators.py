"""Accumulators: partial results over elements, updated block by block, merged, and cached as bytes.

An `Accumulator` covers runs of the elements of one tensor, or of a pair of tensors. It adds whole
leaves to a `trees.MergeTree` at their position, and keeps the elements of incomplete leaves until
another accumulator provides the other elements. Therefore results depend only on the elements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np

from xckpt.scan.trees import LEAF, MergeTree

if TYPE_CHECKING:
    from xckpt.typing import Array

#: Size of a block to read, in bytes; several leaves, so that compiled loops are called seldom.
BLOCK_NBYTES = 4 << 20


class Accumulator:
    """A partial result over runs of elements; it pickles, and is small once it is closed."""

    #: Kind of the records in the cache; empty if results are not cached.
    record = ""
    #: Elements of a leaf.
    leaf = LEAF
    #: Number of elements.
    count: int
    #: Number of elements that the leaves are cut from; -1 while it is unknown.
    size: int
    tree: MergeTree[Any]
    #: Pieces of incomplete leaves, by number of the leaf: first position and elements.
    pieces: dict[int, list[tuple[int, tuple[Array, ...]]]]

    @classmethod
    def begin(cls, reader: Any, argument: Any) -> Accumulator:
        """Return an empty accumulator for a tensor; `argument` has options of this tensor."""
        raise NotImplementedError

    @classmethod
    def unpack(cls, data: bytes, reader: Any) -> Accumulator:
        """Return the accumulator from the bytes of `pack`."""
        raise NotImplementedError

    def pack(self) -> bytes:
        """Return the accumulator as bytes, for the cache; all leaves must be complete."""
        raise NotImplementedError

    def update(self, start: int, values: Any) -> None:
        """Add a run of elements."""
        columns = self._columns(values)
        stop = start + len(columns[0])
        # The last leaf of the tensor is whole even if it is shorter.
        first = min(-(-start // self.leaf) * self.leaf, stop)
        last = stop if stop == self.size else max(first, stop // self.leaf * self.leaf)
        for low, high in ((start, first), (first, last), (last, stop)):
            if low < high:
                part = tuple(column[low - start : high - start] for column in columns)
                self._add_run(low, part, is_whole=low == first < last)

    def close(self) -> Self:
        """Release the memory of this thread after the last element."""
        return self

    def imply(self, zeros: int, row: int = 0, dead: int = 0) -> None:
        """Add the zeros that a sparse tensor does not store, after its last stored element."""
        self.count += zeros

    def merge(self, other: Self) -> None:
        """Add an accumulator of other elements."""
        self.count += other.count
        for (level, number), node in other.tree.nodes.items():
            self.tree.add(level, number, node)
        for pieces in other.pieces.values():
            for start, columns in pieces:
                self._add_piece(start, columns)

    @staticmethod
    def _columns(values: Any) -> tuple[Array, ...]:
        return (values,)

    def _add_run(self, start: int, columns: tuple[Array, ...], *, is_whole: bool) -> None:
        """Add whole leaves, or a part of one."""
        raise NotImplementedError

    def _complete(self, start: int, columns: tuple[Array, ...]) -> None:
        """Add a leaf that came in pieces."""
        raise NotImplementedError

    def _add_piece(self, start: int, columns: tuple[Array, ...]) -> None:
        leaf = start // self.leaf
        pieces = self.pieces.setdefault(leaf, [])
        pieces.append((start, columns))
        if sum(len(c[0]) for _, c in pieces) == min(self.leaf, self.size - leaf * self.leaf):
            ordered = sorted(self.pieces.pop(leaf), key=lambda piece: piece[0])
            parts = zip(*(columns for _, columns in ordered), strict=True)
            self._complete(leaf * self.leaf, tuple(np.concatenate(column) for column in parts))
