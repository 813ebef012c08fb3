"""Sketches of tensors: counts of the bit patterns of the elements, and their moments."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from xckpt.arrays.kinds import Kind, kind_named, prepared
from xckpt.arrays.streams import LEAF
from xckpt.scan.scanning import BLOCK_NBYTES, Accumulator, MergeTree, runs
from xckpt.statistics import block_loops
from xckpt.statistics.block_loops import EMPTY, PAGE, Moments, merge
from xckpt.statistics.vector_kernel import LANES, WIDTH

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.typing import Array

#: Smallest length of a row; shorter slices are not rows of a matrix.
SHORTEST_ROW = 2

# The counters of a table have 32 bits.
_MOST_PENDING = 1 << 31
# Leaves whose moments are merged at once.
_LEAVES_AT_ONCE = 1024

_thread = threading.local()


class Sketch(Accumulator):
    """Counts of bit patterns and moments of a part of a tensor, or of all of it."""

    record = "sketch"
    leaf = LEAF

    def __init__(self, kind: Kind, row: int = 0) -> None:
        self.kind = kind
        self.count = 0
        #: The codes that occur, in ascending order, and their counts.
        self.codes: Array = np.empty(0, np.uint32)
        self.counts: Array = np.empty(0, np.int64)
        #: For kinds that are not exact: counts of special elements, the smallest and the largest
        #: finite element, and the sum of integers.
        self.nan = self.inf = self.zero = self.negative_zero = 0
        self.low: float | int | None = None
        self.high: float | int | None = None
        self.total = 0
        #: Zeros that are not stored; `count`, `counts` and `zero` include them, `tree` does not.
        self.implied = 0
        self.tree: MergeTree[Moments] = MergeTree(merge, EMPTY)
        self.rows = Rows(row if row >= SHORTEST_ROW else 0)
        self._dense: Array | None = None
        self._tables: Tables | None = None
        # Elements in the counters of the tables, and the leaf after those whose moments are there.
        self._pending = self._end = 0
        # Where the blocks without a zero begin that have not been added to the rows, and how many
        # elements they have.
        self._alive = 0, 0

    @classmethod
    def begin(cls, stream: Any, argument: Any) -> Sketch:  # noqa: ARG003
        """Return an empty sketch for a tensor."""
        return cls(stream.kind, 0 if stream.sparse else stream.row)

    def moments(self) -> Moments:
        """Return the moments of all finite elements of a kind that is not exact."""
        total = self.tree.total()
        return merge(total, (float(self.implied), *EMPTY[1:])) if self.implied else total

    def counted(self) -> tuple[Array, Array]:
        """Return the codes that occur, in ascending order, and their counts."""
        if self._dense is not None:
            codes = np.flatnonzero(self._dense)
            self.codes, self.counts = codes.astype(np.uint32), self._dense[codes]
            self._dense = None
        return self.codes, self.counts

    def update(self, start: int, *columns: Array) -> None:
        """Add elements."""
        tables = self._tables
        if tables is None:
            self._tables = tables = _tables(self.kind)
            tables.reset()
        values, most = prepared(columns[0], self.kind), tables.most
        if values.size <= most:
            self._add_block(tables, start, values)
            return
        for offset in range(0, values.size, most):
            self._add_block(tables, start + offset, values[offset : offset + most])

    def _add_block(self, tables: Tables, start: int, values: Array) -> None:
        size = values.size
        self.count += size
        self._pending += size
        if self._pending > _MOST_PENDING:
            self._drain(tables)
        if self.kind.exact:
            tables.count(values)
        else:
            first, leaves = start // LEAF, -(-size // LEAF)
            if tables.leaves + leaves > _LEAVES_AT_ONCE:
                self._fold(tables, first)
            if tables.describe(values):  # other powers of two than those of their neighbours
                nodes = tables.nodes[tables.leaves : tables.leaves + leaves].tolist()
                self._fold(tables, first)
                for number, node in enumerate(nodes, first):
                    self.tree.add(0, number, tuple(node))
            else:
                tables.leaves += leaves
                self._end = first + leaves
        first, count = self._alive
        if tables.zeros[-1]:
            self._add_alive()
            self._add_zeros(tables, start, values, tables.zeros[: -(-size // LEAF)])
        elif first + count == start:
            self._alive = first, count + size
        else:
            self._add_alive()
            self._alive = start, size

    def _fold(self, tables: Tables, end: int) -> None:
        """Move the moments of the leaves before a leaf into the tree."""
        count, tables.leaves = tables.leaves, 0
        first = end - count
        for level, number in runs(first, count):
            nodes = tables.nodes[(number << level) - first :]
            block_loops.fold(nodes, 1 << level)
            self.tree.add(level, number, tuple(nodes[0].tolist()))

    def _add_zeros(self, tables: Tables, start: int, values: Array, zeros: Array) -> None:
        """Count zeros of floats, which share a code with tiny elements, and rows of zeros."""
        length, unsigned = self.rows.length, self.kind.unsigned
        skipped = start % length if length else 0
        alive = np.zeros((skipped + len(values) - 1) // length + 1 if length else 0, np.bool_)
        magnitude = unsigned.type(self.kind.magnitude)
        negative = block_loops.find_zeros(
            values.view(unsigned), magnitude, skipped, length, zeros, alive
        )
        tables.tally[2:] += int(zeros.sum()), negative
        if length:
            self.rows.add(start, len(values), alive)

    def _add_alive(self) -> None:
        """Add the rows of blocks without a zero, which lie next to each other."""
        if self.rows.length and self._alive[1]:
            self.rows.add(*self._alive)
        self._alive = 0, 0

    def _drain(self, tables: Tables) -> None:
        self._pending = 0
        self._add_counts(*tables.drain())

    def _add_counts(self, codes: Array, counts: Array) -> None:
        # A table of all codes is large: only tensors in several parts get one, few at a time.
        if self._dense is None and not len(self.codes):
            self.codes, self.counts = codes, counts
            return
        if self._dense is None:
            self._dense = np.zeros(1 << self.kind.code_bits, np.int64)
            self._dense[self.codes] = self.counts
        self._dense[codes] += counts

    def close(self) -> Self:
        """Move the counts from the tables of this thread into the sketch."""
        tables, self._tables = self._tables, None
        if tables is None:
            return self
        self._add_alive()
        self._drain(tables)
        self.counted()
        if self.kind.exact:
            return self
        self._fold(tables, self._end)
        low, high = tables.extremes
        tally = tables.tally.tolist()
        if self.kind.integer:
            self.total = tally[0] + (tally[1] << 32)
            if len(self.codes) and self.codes[0] == 0:
                self.zero = int(self.counts[0])
            if low <= high:
                self.low, self.high = int(low), int(high)
            return self
        self.nan, self.inf, self.zero, self.negative_zero = tally
        if low <= high:
            keys = tables.extremes
            keys = keys ^ ((keys >> (self.kind.bits - 1)) & tables.limits[1])
            self.low, self.high = keys.view(self.kind.dtype).tolist()
        return self

    def imply(self, zeros: int, row: int = 0, dead: int = 0) -> None:
        """Count zeros that are not stored."""
        self.rows = Rows(row, dead if row else 0)
        if not zeros:
            return
        self.count += zeros
        self.implied = zeros
        if len(self.codes) and self.codes[0] == 0:
            self.counts[0] += zeros
        else:
            self.codes = np.insert(self.codes, 0, 0)
            self.counts = np.insert(self.counts, 0, zeros)
        if not self.kind.exact:
            self.zero += zeros
            self.low = 0 if self.low is None else min(self.low, 0)
            self.high = 0 if self.high is None else max(self.high, 0)

    def merge_counts(self, other: Sketch) -> None:
        """Add the counts and extremes of other elements, of this or of another tensor."""
        self._add_counts(*other.counted())
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.low is not None and other.high is not None:
            self.low = other.low if self.low is None else min(self.low, other.low, key=_order)
            self.high = other.high if self.high is None else max(self.high, other.high, key=_order)

    def merge(self, other: Sketch) -> None:
        """Add the sketch of other elements of the same tensor."""
        self.merge_counts(other)
        self.rows.merge(other.rows)
        super().merge(other)

    def pack(self) -> bytes:
        """Return the sketch as bytes, for the cache."""
        import msgpack

        data: bytes = msgpack.packb(self._fields(), default=str)
        return data

    def _fields(self) -> dict[str, Any]:
        """Return the fields to pack; `pack` writes integers beyond 64 bits as text for msgpack."""
        codes, counts = self.counted()
        steps = codes.copy()
        steps[1:] -= codes[:-1]
        return {name: getattr(self, name) for name in ("count", *_SUMS)} | {
            "row": self.rows.length,
            "zeros": self.rows.zeros,
            "kind": self.kind.name,
            "codes": _pack_integers(steps, (1 << self.kind.code_bits) - 1),
            "counts": _pack_integers(counts, self.count),
            "extremes": [self.low, self.high],
            "nodes": [[*place, *node] for *place, node in self.tree.nodes],
            "cut": list(self.rows.cut.items()),
        }

    @classmethod
    def unpack(cls, data: bytes, stream: Any) -> Self:
        """Return the sketch from the bytes of `pack`."""
        import msgpack

        fields = msgpack.unpackb(data)
        sketch = cls(kind_named(fields["kind"]))
        sketch._restore(fields, stream)
        return sketch

    def _restore(self, fields: Mapping[str, Any], stream: Any) -> None:
        for name in ("count", *_SUMS):
            setattr(self, name, int(fields[name]))
        self.codes = np.cumsum(_unpack_integers(fields["codes"]), dtype=np.uint32)
        self.counts = _unpack_integers(fields["counts"]).astype(np.int64)
        self.low, self.high = fields["extremes"]
        self.tree.nodes = [(node[0], node[1], tuple(node[2:])) for node in fields["nodes"]]
        self.rows = Rows(fields["row"], fields["zeros"])
        self.rows.cut = dict(fields["cut"])


# Fields that are added up.
_SUMS = ("nan", "inf", "zero", "negative_zero", "total", "implied")
_WIDTHS = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}


def _order(extreme: float) -> tuple[float, float]:
    """Return a key that puts the negative zero before the other one, as the loops do."""
    return extreme, math.copysign(1.0, extreme)


def _pack_integers(numbers: Array, largest: int) -> bytes:
    """Pack integers up to `largest` in as few bytes as possible, after a byte with their width."""
    width = np.min_scalar_type(largest).itemsize
    return bytes([width]) + numbers.astype(_WIDTHS[width]).tobytes()


def _unpack_integers(data: bytes) -> Array:
    """Return the integers from the bytes of `_pack_integers`."""
    return np.frombuffer(data, _WIDTHS[data[0]], offset=1)


class Rows:
    """A counter of rows of zeros."""

    __slots__ = ("cut", "length", "zeros")

    def __init__(self, length: int, zeros: int = 0) -> None:
        #: Elements in a row; 0 if rows are not counted.
        self.length = length
        #: Rows of zeros that are whole in a block.
        self.zeros = zeros
        #: Rows that blocks cut, by number: whether an element so far is not zero.
        self.cut: dict[int, bool] = {}

    @property
    def dead(self) -> int:
        """Number of rows of zeros, once all elements were added."""
        return self.zeros + list(self.cut.values()).count(False)

    def add(self, start: int, count: int, alive: Array | None = None) -> None:
        """Add a block; `alive` has whether its rows have a nonzero element, None if all have."""
        length, stop = self.length, start + count
        first, skipped = start // length, start % length
        last, end = stop // length, stop % length
        if skipped or first == last:
            self.cut[first] = alive is None or bool(alive[0]) or self.cut.get(first, False)
        if end:
            self.cut[last] = alive is None or bool(alive[-1]) or self.cut.get(last, False)
        if alive is not None:
            whole = alive[skipped > 0 : last - first]
            self.zeros += len(whole) - int(np.count_nonzero(whole))

    def merge(self, other: Rows) -> None:
        """Add the rows of other elements of the same tensor."""
        self.length = self.length or other.length
        self.zeros += other.zeros
        for row, alive in other.cut.items():
            self.cut[row] = alive or self.cut.get(row, False)


class Tables:
    """Arrays that compiled loops write to, for one kind of elements."""

    def __init__(self, kind: Kind, nbytes: int) -> None:
        self.kind = kind
        leaves = -(-nbytes // kind.itemsize // LEAF)
        #: Leaves whose moments are in `nodes`.
        self.leaves = 0
        #: Largest number of elements of a block.
        self.most = nbytes // kind.itemsize // LEAF * LEAF
        counters = np.zeros((2, 1 << kind.code_bits), np.uint32)
        self.counted = *counters, np.zeros(counters.shape[1] // PAGE, np.bool_)
        self.codes = np.empty(counters.shape[1], np.uint32)
        self.counts = np.empty(counters.shape[1], np.int64)
        self.used = False
        #: Numbers of zeros in the leaves of a block, or more than that; last their sum.
        self.zeros = np.zeros(leaves + 1, np.int64)
        bits = kind.bits if kind.exact else kind.code_bits
        minus = 1 << (bits - 1) if kind.has_negative_zero else 0
        #: Type of the patterns that are counted. Integers are counted as float64.
        unsigned = np.dtype(np.uint64) if kind.integer else kind.unsigned
        shift = 0 if kind.exact else 8 * unsigned.itemsize - kind.code_bits
        #: Position of the lowest bit of a code in a pattern, and the code of minus zero.
        self.of_codes = (unsigned.type(shift), minus)
        #: For floats, the numbers of NaN, infinities, zeros and negative zeros; for integers, the
        #: sums of their lower and upper halves.
        self.tally = np.zeros(4, np.int64)
        self.extremes = np.zeros(2, np.int64)
        if kind.exact:
            return
        self.nodes = np.zeros((_LEAVES_AT_ONCE + leaves, 7))
        self.signed = np.dtype(f"i{kind.itemsize}")
        key_type = kind.dtype if kind.integer else self.signed
        self.extremes = np.zeros(2, key_type)
        info = np.iinfo(key_type)
        self.widest = (info.max, info.min)
        # The loops store vectors here constantly, which is fastest if each fits in one cache line.
        memory = np.empty(5 * LANES)
        start = -memory.__array_interface__["data"][0] // memory.itemsize % WIDTH
        sums = memory[start : start + 4 * LANES]
        #: Arrays that the loops write to besides the moments.
        self.out: tuple[Array, ...] = (self.extremes, sums)
        if kind.integer:
            self.wide = np.empty(leaves * LEAF)
            self.out = (self.extremes, self.tally, np.empty(LEAF), sums)
            return
        # Patterns of the least and the largest magnitude that the loops can describe: all finite
        # ones, or those whose fourth powers stay in the range of float64.
        infinity = kind.dtype.type(np.inf).view(self.signed)
        least, most = (822 << 52, 1223 << 52) if kind.itemsize == 8 else (0, infinity)
        keys = (self.signed.type(n) for n in (info.max, least, most, infinity))
        self.limits = (self.of_codes, *keys)
        # The second pass over a leaf must not count its codes again.
        self.uncounted_limits = ((unsigned.type(kind.bits - 1), 0), *self.limits[1:])
        self.uncounted = (*np.zeros((2, 2), np.uint32), np.zeros(1, np.bool_))

    def reset(self) -> None:
        """Clear all counts, which remain after an error before `drain`."""
        if self.used:
            for counters in self.counted:
                counters[:] = 0
        self.tally[:] = 0
        self.leaves = 0
        if not self.kind.exact:
            self.extremes[:] = self.widest

    def count(self, values: Array) -> None:
        """Count a block of elements of an exact kind."""
        self.used = True
        block_loops.count_codes(values, self.of_codes, self.counted, self.zeros)
        if not self.kind.has_zero:
            self.zeros[:] = 0

    def describe(self, values: Array) -> int:
        """Count a block, write its moments after those of others, and return the rare leaves."""
        self.used = True
        nodes = self.nodes[self.leaves :]
        if self.kind.integer:
            wide = self.wide[: len(values)]
            wide[:] = values
            patterns = wide.view(np.uint64)
            block_loops.count_codes(patterns, self.of_codes, self.counted, self.zeros)
            block_loops.describe_integers(values, (nodes, *self.out))
            return 0
        patterns = values.view(self.kind.unsigned)
        out = (self.zeros, nodes, *self.out)
        rare: int = block_loops.describe_floats(values, patterns, self.limits, self.counted, out)
        if rare:
            for leaf in np.flatnonzero(nodes[: -(-len(values) // LEAF), 0] < 0).tolist():
                nodes[leaf] = self._describe_rare(values[leaf * LEAF : (leaf + 1) * LEAF])
        return rare

    def _describe_rare(self, values: Array) -> Array:
        """Return the moments of a leaf with floats that are not finite, or out of range."""
        finite = values[np.isfinite(values)]
        nan = int(np.isnan(values).sum())
        self.tally[:2] += nan, len(values) - len(finite) - nan
        node, exponent, zeros = np.zeros((1, 7)), 0, np.zeros(2, np.int64)
        sums = self.out[-1]
        bits, limits = self.kind.unsigned, self.uncounted_limits
        out = (zeros, node, self.extremes, sums)
        if not len(finite) or not block_loops.describe_floats(
            finite, finite.view(bits), limits, self.uncounted, out
        ):
            return node
        # Exponents in steps of 256, so that most leaves share one and merge without scaling.
        exponent = 256 * ((int(np.frexp(np.abs(finite).max())[1]) + 128) // 256)
        # The power of two may itself be out of range.
        first = -exponent // 2
        scaled = finite * 2.0**first * 2.0 ** (-exponent - first)
        out = (zeros, node, self.extremes.copy(), sums)
        block_loops.describe_floats(scaled, scaled.view(bits), limits, self.uncounted, out)
        node[0, 6] = exponent
        return node

    def drain(self) -> tuple[Array, Array]:
        """Return the codes that were counted and their counts, and clear the counters."""
        size = block_loops.drain(*self.counted, self.codes, self.counts)
        self.used = False
        return self.codes[:size].copy(), self.counts[:size].copy()


def _tables(kind: Kind) -> Tables:
    """Return the tables of this thread, which its sketches use one after another."""
    tables: dict[str, Tables] = _thread.__dict__.setdefault("tables", {})
    if kind.name not in tables:
        tables[kind.name] = Tables(kind, BLOCK_NBYTES)
    return tables[kind.name]


def codes_of(kind: Kind, values: Array) -> Array:
    """Return the codes of elements."""
    if kind.exact:
        return values.astype(np.uint32)
    if kind.integer:
        values = values.astype(np.float64)
    bits = 8 * values.itemsize
    patterns: Array = values.view(f"u{values.itemsize}") >> (bits - kind.code_bits)
    return patterns.astype(np.uint32)
