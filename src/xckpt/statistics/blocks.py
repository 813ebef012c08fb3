"""Blocks of elements to sketches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.statistics.compiled import fold, mark_rows
from xckpt.statistics.kinds import kind_named
from xckpt.statistics.moments import LEAF, Moments, MomentTree, runs
from xckpt.statistics.rows import RowCount
from xckpt.statistics.sketch import Sketch
from xckpt.statistics.workspace import Tables

if TYPE_CHECKING:
    from xckpt.statistics.kinds import Kind
    from xckpt.statistics.workspace import Workspace

__all__ = ["SHORTEST_ROW", "Sketcher", "codes_of", "keys_of", "leaf_moments", "prepared"]

Array = np.ndarray[Any, np.dtype[Any]]

# The counters of a table have 32 bits.
_MOST_PENDING = 1 << 31
# Of so few elements the codes are sorted, which takes less time than to look through a table.
_FEW = 4096
#: Shorter rows are columns of something else.
SHORTEST_ROW = 2


class Sketcher:
    """Makes the sketch of a run of elements, block by block.

    Parameters
    ----------
    kind : Kind
        Of the elements.
    size : int
        Number of elements that the leaves are cut from: those of the whole tensor.
    row : int
        Elements in a row, to count rows of zeros; 0 not to.
    workspace : Workspace
        Of this thread.
    """

    def __init__(self, kind: Kind, size: int, row: int, workspace: Workspace) -> None:
        self.kind = kind
        self.size = size
        self._tables = workspace.tables(kind)
        self._tables.reset()
        self._block_size = workspace.buffer.nbytes // kind.itemsize // LEAF * LEAF
        self._tree = MomentTree()
        self._pieces: list[tuple[int, Array]] = []
        self._rows = RowCount(row) if row >= SHORTEST_ROW else None
        self._count = 0
        self._pending = 0
        self._drained: list[tuple[Array, Array]] = []
        self._few: list[Array] = []

    def update(self, start: int, values: Array) -> None:
        """Add elements."""
        stop = start + len(values)
        leaf_end = min(-(-start // LEAF) * LEAF, stop)
        if start < leaf_end:
            self._add(start, values[: leaf_end - start])
        # Whole leaves; the last one of the tensor is whole as well.
        end = stop if stop == self.size else max(leaf_end, stop // LEAF * LEAF)
        for at in range(leaf_end, end, self._block_size):
            self._add(at, values[at - start : min(at + self._block_size, end) - start])
        if max(end, leaf_end) < stop:
            self._add(max(end, leaf_end), values[max(end, leaf_end) - start :])

    def result(self, implied: int = 0) -> Sketch:
        """Return the sketch."""
        self._drain()
        tables = self._tables
        codes, counts = self._drained[0] if len(self._drained) == 1 else _joined(self._drained)
        sketch = Sketch(self.kind.name, self._count, codes, counts)
        if not self.kind.exact:
            self._fill(sketch, tables)
            sketch.nodes = tuple(self._tree.nodes.items())
            sketch.pieces = tuple(self._pieces)
        if implied:
            _imply(sketch, implied)
        if self._rows is not None:
            sketch.row, sketch.dead = self._rows.length, self._rows.dead
            sketch.open = self._rows.open
        return sketch

    def _fill(self, sketch: Sketch, tables: Tables) -> None:
        low, high = tables.extremes
        tally = tables.tally.tolist()
        if self.kind.integer:
            sketch.zero, sketch.total = tally[0], tally[1] + (tally[2] << 32)
            if low <= high:
                sketch.low, sketch.high = int(low), int(high)
            return
        sketch.nan, sketch.inf, sketch.zero, sketch.negative_zero = tally
        if low <= high:
            keys = tables.extremes
            keys = keys ^ ((keys >> (self.kind.bits - 1)) & tables.constants[0])
            sketch.low, sketch.high = keys.view(self.kind.dtype).tolist()

    def _add(self, start: int, values: Array) -> None:
        """Count one block: some whole leaves, or a part of one."""
        values = prepared(values, self.kind)
        self._tables.count(values)
        self._count += len(values)
        self._pending += len(values)
        if self._count <= _FEW:
            self._few.append(codes_of(self.kind, values))
        if self._pending > _MOST_PENDING:
            self._drain()
        if not self.kind.exact:
            self._add_nodes(start, values)
        if self._rows is not None:
            self._add_rows(start, values)

    def _drain(self) -> None:
        few = _distinct(self._few) if 0 < self._count <= _FEW else None
        self._drained.append(self._tables.drain(few))
        self._pending = 0

    def _add_nodes(self, start: int, values: Array) -> None:
        leaves = -(-len(values) // LEAF)
        whole = len(values) == leaves * LEAF or start + len(values) == self.size
        if start % LEAF or not whole:
            self._pieces.append((start, values.copy()))
            return
        at = start // LEAF
        for level, number in runs(at, leaves):
            nodes = self._tables.nodes[(number << level) - at :]
            fold(nodes, 1 << level)
            self._tree.add(level, number, _moments(nodes))

    def _add_rows(self, start: int, values: Array) -> None:
        rows = self._rows
        if rows is None:
            return
        zeros = self._tables.zeros[: -(-len(values) // LEAF)]
        if not zeros.any():
            rows.add_alive(start, len(values))
            return
        skipped = start % rows.length
        alive = np.zeros((skipped + len(values) - 1) // rows.length + 1, np.bool_)
        bits = values.view(self.kind.unsigned)
        magnitude = self.kind.unsigned.type(self.kind.magnitude)
        mark_rows(bits, magnitude, skipped, rows.length, zeros, alive)
        rows.add(start, len(values), alive)


def leaf_moments(kind: Kind, values: Array) -> Moments:
    """Return the moments of one leaf."""
    tables = Tables(kind, LEAF * kind.itemsize)
    tables.reset()
    tables.count(prepared(values, kind))
    return _moments(tables.nodes)


def codes_of(kind: Kind, values: Array) -> Array:
    """Return the codes of elements."""
    if kind.exact:
        return values.astype(np.uint32)
    if kind.integer:
        values = values.astype(np.float64)
    bits = 8 * values.itemsize
    patterns: Array = values.view(f"u{values.itemsize}") >> (bits - kind.code_bits)
    return patterns.astype(np.uint32)


def keys_of(kind: Kind, values: Array) -> Array:
    """Return integers in the order of the elements, of a kind that is not exact."""
    bits = values.view(kind.unsigned).astype(np.uint64)
    if kind.dtype.kind == "u":
        return bits
    sign = np.uint64(1 << (kind.bits - 1))
    if kind.integer:
        return bits ^ sign
    every = np.uint64((1 << kind.bits) - 1)
    return np.where(bits & sign, bits ^ every, bits ^ sign)


def prepared(values: Array, kind: Kind) -> Array:
    """Return what the kernels are compiled for: contiguous, aligned, native, writable memory."""
    dtype = kind.unsigned if kind.exact else kind.dtype
    if values.dtype != dtype:
        if kind.exact and values.dtype.itemsize == dtype.itemsize:
            values = values.view(dtype)
        else:
            values = values.astype(dtype)
    flags = values.flags
    if not (flags.c_contiguous and flags.aligned and flags.writeable):
        values = values.copy()
    if kind.bits < 8 and kind.dtype.kind == "V":
        values = values & np.uint8((1 << kind.bits) - 1)
    return values


def _distinct(codes: list[Array]) -> Array:
    """Return different codes in order; `numpy.unique` hashes, which takes ten times as long."""
    ordered = np.sort(np.concatenate(codes))
    first = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


def _moments(nodes: Array) -> Moments:
    n, high, low, m2, m3, m4, scale = nodes[0].tolist()
    return n, high, low, m2, m3, m4, scale


def _joined(drained: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    every = np.concatenate([codes for codes, _ in drained])
    codes, where = np.unique(every, return_inverse=True)
    counts = np.zeros(len(codes), np.int64)
    np.add.at(counts, where, np.concatenate([counts for _, counts in drained]))
    return codes.astype(np.uint32), counts


def _imply(sketch: Sketch, zeros: int) -> None:
    """Count zeros that are not stored."""
    sketch.count += zeros
    sketch.implied = zeros
    if len(sketch.codes) and sketch.codes[0] == 0:
        sketch.counts[0] += zeros
    else:
        sketch.codes = np.insert(sketch.codes, 0, 0)
        sketch.counts = np.insert(sketch.counts, 0, zeros)
    if not kind_named(sketch.kind).exact:
        sketch.zero += zeros
        sketch.low = 0 if sketch.low is None else min(sketch.low, 0)
        sketch.high = 0 if sketch.high is None else max(sketch.high, 0)
