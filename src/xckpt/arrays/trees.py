"""A tree that merges values of a sequence in a fixed order.

A sequence is cut into leaves of `LEAF` elements at fixed positions. Neighbours are merged as in a
binary tree: a node covers ``2**level`` leaves and begins at a multiple of that number. Therefore
the result depends only on the sequence, not on the blocks in which it is read or on their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: Elements of a leaf: 64 KiB of float32, so that several loops find it in the L2 cache.
LEAF = 1 << 14

Node = TypeVar("Node")


class MergeTree(Generic[Node]):
    """The nodes of a binary tree so far, merged as far as possible; leaves come in any order."""

    __slots__ = ("empty", "merged", "nodes")

    def __init__(self, merged: Callable[[Node, Node], Node], empty: Node) -> None:
        self.merged = merged
        self.empty = empty
        #: Nodes by level and number within the level.
        self.nodes: dict[tuple[int, int], Node] = {}

    def add(self, level: int, number: int, node: Node) -> None:
        """Add a node, and merge it with its neighbours."""
        nodes = self.nodes
        while (neighbour := nodes.pop((level, number ^ 1), None)) is not None:
            ours, theirs = (neighbour, node) if number & 1 else (node, neighbour)
            node = self.merged(ours, theirs)
            level, number = level + 1, number >> 1
        nodes[level, number] = node

    def total(self) -> Node:
        """Return the merged value of all elements, once all leaves were added."""
        total = self.empty
        for place in sorted(self.nodes, key=lambda place: place[1] << place[0], reverse=True):
            total = self.merged(self.nodes[place], total)
        return total


def runs(first: int, count: int) -> Iterable[tuple[int, int]]:
    """Cut a range of leaves into the largest nodes of the tree."""
    while count:
        level = count.bit_length() - 1
        if first:
            level = min(level, (first & -first).bit_length() - 1)
        yield level, first >> level
        first += 1 << level
        count -= 1 << level
