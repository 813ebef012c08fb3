"""The two mergeable sketches of a tensor: counts of bit patterns, and moments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.statistics.kinds import kind_named
from xckpt.statistics.moments import EMPTY, LEAF, Moments, MomentTree, merge
from xckpt.statistics.rows import RowCount

if TYPE_CHECKING:
    from xckpt.statistics.kinds import Kind

__all__ = ["Sketch", "SketchSum"]

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(slots=True)
class Sketch:
    """What is known of some elements of a tensor: small, mergeable, and made of plain values.

    Parameters
    ----------
    kind : str
        Name of the `Kind` of the elements.
    count : int
        Number of elements.
    codes, counts : array of uint32, array of int64
        The codes that occur, ascending, and how often.
    nan, inf, zero, negative_zero : int
        How many there are, of a kind that is not exact.
    low, high : float, int or None
        The smallest and the largest finite element of a kind that is not exact.
    total : int
        Sum of all integers of 32 or 64 bits.
    implied : int
        Zeros that a sparse tensor has without storing them: in `count`, `counts` and `zero`, but
        not in `nodes`.
    nodes : tuple of ((int, int), Moments)
        Of the tree of moments; see `MomentTree`.
    pieces : tuple of (int, array)
        Positions and elements of leaves that are not complete.
    row : int
        Elements in a row; 0 where rows are not counted.
    dead : int
        Rows of zeros.
    open : dict
        Rows that are not complete; see `RowCount`.
    """

    kind: str
    count: int
    codes: Array
    counts: Array
    nan: int = 0
    inf: int = 0
    zero: int = 0
    negative_zero: int = 0
    low: float | int | None = None
    high: float | int | None = None
    total: int = 0
    implied: int = 0
    nodes: tuple[tuple[tuple[int, int], Moments], ...] = ()
    pieces: tuple[tuple[int, Array], ...] = ()
    row: int = 0
    dead: int = 0
    open: dict[int, tuple[int, bool]] = field(default_factory=dict)

    def moments(self) -> Moments:
        """Return the moments of all finite elements of a kind that is not exact."""
        tree = MomentTree()
        tree.update(self.nodes)
        total = tree.total()
        return merge(total, (float(self.implied), *EMPTY[1:])) if self.implied else total

    def closed(self, stored: int, row: int, dead: int) -> Sketch:
        """Complete the last leaf of a sparse tensor, now that its end is known."""
        total = SketchSum(kind_named(self.kind), stored)
        total.add(self)
        sketch = total.result()
        sketch.row, sketch.dead = row, dead if row else 0
        return sketch


class SketchSum:
    """Merges the sketches of all parts of one tensor, in whatever order they come.

    Parameters
    ----------
    kind : Kind
        Of the elements.
    size : int
        Number of elements that the leaves are cut from.
    """

    __slots__ = ("_dense", "_pieces", "_rows", "_total", "_tree", "kind", "size")

    def __init__(self, kind: Kind, size: int) -> None:
        self.kind = kind
        self.size = size
        self._tree = MomentTree()
        self._rows: RowCount | None = None
        self._pieces: dict[int, list[tuple[int, Array]]] = {}
        self._dense: Array | None = None
        self._total = Sketch(kind.name, 0, np.empty(0, np.uint32), np.empty(0, np.int64))

    def add(self, sketch: Sketch) -> None:
        """Add the sketch of some more elements."""
        total = self._total
        self._add_counts(sketch)
        for name in ("count", "nan", "inf", "zero", "negative_zero", "total", "implied"):
            setattr(total, name, getattr(total, name) + getattr(sketch, name))
        if sketch.low is not None:
            total.low = sketch.low if total.low is None else min(total.low, sketch.low)
        if sketch.high is not None:
            total.high = sketch.high if total.high is None else max(total.high, sketch.high)
        self._tree.update(sketch.nodes)
        for start, values in sketch.pieces:
            self._add_piece(start, values)
        if sketch.row:
            if self._rows is None:
                self._rows = RowCount(sketch.row)
            self._rows.update(sketch.dead, sketch.open)

    def result(self) -> Sketch:
        """Return the sketch of all that was added."""
        total = self._total
        if self._dense is not None:
            codes = np.flatnonzero(self._dense)
            total.codes, total.counts = codes.astype(np.uint32), self._dense[codes]
        total.nodes = tuple(self._tree.nodes.items())
        total.pieces = tuple(piece for pieces in self._pieces.values() for piece in pieces)
        if self._rows is not None:
            total.row, total.dead, total.open = self._rows.length, self._rows.dead, self._rows.open
        return total

    def _add_counts(self, sketch: Sketch) -> None:
        total = self._total
        if self._dense is None and not total.count:
            total.codes, total.counts = sketch.codes, sketch.counts
            return
        # A table of all codes only for tensors in several parts, of which few are open at a time.
        if self._dense is None:
            self._dense = np.zeros(1 << self.kind.code_bits, np.int64)
            self._dense[total.codes] += total.counts
        self._dense[sketch.codes] += sketch.counts

    def _add_piece(self, start: int, values: Array) -> None:
        leaf = start // LEAF
        pieces = self._pieces.setdefault(leaf, [])
        pieces.append((start, values))
        missing = min(LEAF, self.size - leaf * LEAF) - sum(len(v) for _, v in pieces)
        if missing == 0:
            from xckpt.statistics.blocks import leaf_moments

            del self._pieces[leaf]
            whole = np.concatenate([v for _, v in sorted(pieces, key=_first)])
            self._tree.add(0, leaf, leaf_moments(self.kind, whole))


def _first(piece: tuple[int, Array]) -> int:
    return piece[0]
