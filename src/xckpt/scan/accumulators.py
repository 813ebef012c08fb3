"""Accumulators: partial results over elements, updated block by block, merged, and cached as bytes.

An `Accumulator` covers runs of the elements of one tensor, or of a pair of tensors. Runs consist of
whole leaves (`streams.whole_leaves`), which are added to a `trees.MergeTree` at their position.
Therefore results depend only on the elements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from xckpt.arrays.trees import MergeTree
    from xckpt.typing import Array

#: Size of a block to read, in bytes; several leaves, so that compiled loops are called seldom.
BLOCK_NBYTES = 4 << 20


class Accumulator:
    """A partial result over runs of elements; it pickles, and is small once it is closed."""

    #: Kind of the records in the cache; empty if results are not cached.
    record = ""
    #: Elements of a leaf; 1 if results do not depend on how elements are cut into runs.
    leaf = 1
    #: Number of elements.
    count: int
    tree: MergeTree[Any]

    @classmethod
    def begin(cls, stream: Any, argument: Any) -> Accumulator:
        """Return an empty accumulator for a tensor; `argument` has options of this tensor."""
        raise NotImplementedError

    @classmethod
    def unpack(cls, data: bytes, stream: Any) -> Accumulator:
        """Return the accumulator from the bytes of `pack`."""
        raise NotImplementedError

    def pack(self) -> bytes:
        """Return the accumulator as bytes, for the cache."""
        raise NotImplementedError

    def update(self, start: int, *columns: Array) -> None:
        """Add a run of elements, or of pairs in two columns: whole leaves, but for the last."""
        raise NotImplementedError

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
