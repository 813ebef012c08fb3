"""What is known of some elements: taken up block by block, merged with its like, kept as bytes.

An `Accumulator` stands for runs of the elements of one tensor, or of a pair of tensors. Whole
leaves go into a `moments.Tree` at their position; elements of leaves that are not complete wait
until another accumulator brings the rest. So results depend on nothing but the elements.
"""

from __future__ import annotations

import math
import threading
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from xckpt.statistics import kernels
from xckpt.statistics.kernels import LANES, PAGE, SUMS, TINY, WIDTH
from xckpt.statistics.kinds import kind_named
from xckpt.statistics.moments import EMPTY, LEAF, Moments, Tree, merge, runs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from xckpt.statistics.kinds import Kind

Array = np.ndarray[Any, np.dtype[Any]]

#: Bytes of a block that is read; more than one leaf, to call the kernels seldom.
BLOCK_NBYTES = 4 << 20
#: Shorter rows are columns of something else.
SHORTEST_ROW = 2

# The counters of a table have 32 bits.
_MOST_PENDING = 1 << 31
# Integers up to this are float64.
_WHOLE = 1 << 53
_LOWER_BITS = 0x7FF

_thread = threading.local()


class Accumulator:
    """What is known of some elements of a tensor; pickles, and gets small once it is closed."""

    #: Elements of a leaf.
    leaf = LEAF
    #: Number of elements.
    count: int
    #: Number of elements that the leaves are cut from; -1 as long as nobody knows.
    size: int
    tree: Tree[Any]
    #: By leaf: starts and elements of what is there of leaves that are not complete.
    pieces: dict[int, list[tuple[int, tuple[Array, ...]]]]

    @classmethod
    def begin(cls, reader: Any, argument: Any) -> Accumulator:
        """Return one for elements of a tensor; `argument` is what is asked of this tensor."""
        raise NotImplementedError

    @classmethod
    def unpack(cls, data: bytes, reader: Any) -> Accumulator:
        """Return what `pack` was called on."""
        raise NotImplementedError

    def pack(self) -> bytes:
        """Return bytes to keep, of one that has no pieces."""
        raise NotImplementedError

    def update(self, start: int, values: Any) -> None:
        """Add a run of elements."""
        columns = self._columns(values)
        stop = start + len(columns[0])
        # Whole leaves; the last one of the tensor is whole as well.
        first = min(-(-start // self.leaf) * self.leaf, stop)
        last = stop if stop == self.size else max(first, stop // self.leaf * self.leaf)
        for low, high in ((start, first), (first, last), (last, stop)):
            if low < high:
                part = tuple(column[low - start : high - start] for column in columns)
                self._add_run(low, part, is_whole=low == first < last)

    def close(self) -> Self:
        """Let go of what only this thread has; there are no more elements."""
        return self

    def imply(self, zeros: int, row: int = 0, dead: int = 0) -> None:
        """Add zeros that a sparse tensor does not store, which ends what it stores."""
        self.count += zeros

    def merge(self, other: Self) -> None:
        """Add what another one found in other elements."""
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
            whole = zip(*(columns for _, columns in ordered), strict=True)
            self._complete(leaf * self.leaf, tuple(np.concatenate(column) for column in whole))


# --- one tensor ----------------------------------------------------------------------------------


class Sketch(Accumulator):
    """Counts of bit patterns, and moments, of some elements of a tensor."""

    def __init__(self, kind: Kind, size: int, row: int = 0) -> None:
        self.kind = kind
        self.size = size
        self.count = 0
        #: The codes that occur, ascending, and how often.
        self.codes: Array = np.empty(0, np.uint32)
        self.counts: Array = np.empty(0, np.int64)
        #: Of a kind that is not exact: how many there are, the smallest and the largest finite
        #: element, and the sum of integers.
        self.nan = self.inf = self.zero = self.negative_zero = 0
        self.low: float | int | None = None
        self.high: float | int | None = None
        self.total = 0
        #: Zeros that are not stored: in `count`, `counts` and `zero`, but not in `tree`.
        self.implied = 0
        self.tree: Tree[Moments] = Tree(merge, EMPTY)
        self.pieces = {}
        self.rows = Rows(row if row >= SHORTEST_ROW else 0)
        self._dense: Array | None = None
        self._tables: Tables | None = None
        self._pending = 0

    @classmethod
    def begin(cls, reader: Any, argument: Any) -> Sketch:  # noqa: ARG003
        """Return one for elements of a tensor."""
        # How many values a sparse one stores is known once repeated ones are added up.
        return cls(reader.kind, *((-1, 0) if reader.sparse else (reader.size, reader.row)))

    def moments(self) -> Moments:
        """Return the moments of all finite elements of a kind that is not exact."""
        total = self.tree.total()
        return merge(total, (float(self.implied), *EMPTY[1:])) if self.implied else total

    def counted(self) -> tuple[Array, Array]:
        """Return the codes that occur, ascending, and how often."""
        if self._dense is not None:
            codes = np.flatnonzero(self._dense)
            self.codes, self.counts = codes.astype(np.uint32), self._dense[codes]
            self._dense = None
        return self.codes, self.counts

    def _add_run(self, start: int, columns: tuple[Array, ...], *, is_whole: bool) -> None:
        if self._tables is None:
            self._tables = _tables(self.kind)
            self._tables.reset()
        values = prepared(columns[0], self.kind)
        step = BLOCK_NBYTES // self.kind.itemsize // LEAF * LEAF
        for at in range(0, len(values), step):
            self._add_block(self._tables, start + at, values[at : at + step], is_whole=is_whole)

    def _add_block(self, tables: Tables, start: int, values: Array, *, is_whole: bool) -> None:
        tables.count(values)
        self.count += len(values)
        self._pending += len(values)
        if self._pending > _MOST_PENDING:
            self._drain(tables)
        leaves = -(-len(values) // LEAF)
        if not self.kind.exact:
            if is_whole:
                first = start // LEAF
                for level, number in runs(first, leaves):
                    nodes = tables.nodes[(number << level) - first :]
                    if level and tables.rare:
                        for each, node in enumerate(nodes[: 1 << level].tolist()):
                            self.tree.add(0, (number << level) + each, tuple(node))
                        continue
                    if level:
                        kernels.fold(nodes, 1 << level)
                    self.tree.add(level, number, tuple(nodes[0].tolist()))
            else:
                self._add_piece(start, (values.copy(),))
        if tables.zeros[:leaves].any():
            self._add_zeros(tables, start, values, tables.zeros[:leaves])
        elif self.rows.length:
            self.rows.add(start, len(values))

    def _add_zeros(self, tables: Tables, start: int, values: Array, zeros: Array) -> None:
        """Count zeros of floats, of which only the codes were counted, and rows of zeros."""
        length, unsigned = self.rows.length, self.kind.unsigned
        skipped = start % length if length else 0
        alive = np.zeros((skipped + len(values) - 1) // length + 1 if length else 0, np.bool_)
        magnitude = unsigned.type(self.kind.magnitude)
        negative = kernels.find_zeros(
            values.view(unsigned), magnitude, skipped, length, zeros, alive
        )
        tables.tally[2:] += int(zeros.sum()), negative
        if length:
            self.rows.add(start, len(values), alive)

    def _drain(self, tables: Tables) -> None:
        self._pending = 0
        self._add_counts(*tables.drain())

    def _add_counts(self, codes: Array, counts: Array) -> None:
        # A table of all codes only for tensors in several parts, of which few are open at a time.
        if self._dense is None and not len(self.codes):
            self.codes, self.counts = codes, counts
            return
        if self._dense is None:
            self._dense = np.zeros(1 << self.kind.code_bits, np.int64)
            self._dense[self.codes] = self.counts
        self._dense[codes] += counts

    def close(self) -> Self:
        """Take what was counted out of the tables of this thread."""
        tables, self._tables = self._tables, None
        if tables is None:
            return self
        self._drain(tables)
        self.counted()
        if self.kind.exact:
            return self
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
            keys = keys ^ ((keys >> (self.kind.bits - 1)) & tables.how[1])
            self.low, self.high = keys.view(self.kind.dtype).tolist()
        return self

    def imply(self, zeros: int, row: int = 0, dead: int = 0) -> None:
        """Complete the last leaf, now that its end is known; count zeros that are not stored."""
        self.size = self.count
        pieces, self.pieces = self.pieces, {}
        for start, columns in (piece for some in pieces.values() for piece in some):
            self._add_piece(start, columns)
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

    def merge(self, other: Sketch) -> None:
        """Add what another one found in other elements."""
        self._add_counts(*other.counted())
        for name in ("nan", "inf", "zero", "negative_zero", "total", "implied"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.low is not None and other.high is not None:
            self.low = other.low if self.low is None else min(self.low, other.low)
            self.high = other.high if self.high is None else max(self.high, other.high)
        self.rows.merge(other.rows)
        super().merge(other)

    def _complete(self, start: int, columns: tuple[Array, ...]) -> None:
        tables = Tables(self.kind, LEAF * self.kind.itemsize)
        tables.reset()
        tables.count(columns[0])
        self.tree.add(0, start // LEAF, tuple(tables.nodes[0].tolist()))

    def pack(self) -> bytes:
        """Return bytes to keep."""
        import msgpack

        data: bytes = msgpack.packb(self._fields(), default=str)
        return data

    def _fields(self) -> dict[str, Any]:
        """Return what is kept; integers of more than 64 bits, which msgpack has not, as text."""
        codes, counts = self.counted()
        steps = codes.copy()
        steps[1:] -= codes[:-1]
        return {name: getattr(self, name) for name in _NUMBERS} | {
            "row": self.rows.length,
            "dead": self.rows.dead,
            "kind": self.kind.name,
            "codes": _narrowed(steps),
            "counts": _narrowed(counts),
            "extremes": [self.low, self.high],
            "nodes": [[*place, *node] for place, node in self.tree.nodes.items()],
            "open": [[row, *seen] for row, seen in self.rows.open.items()],
        }

    @classmethod
    def unpack(cls, data: bytes, reader: Any) -> Self:
        """Return what `pack` was called on; whatever is wrong with it is an error."""
        import msgpack

        fields = msgpack.unpackb(data)
        sketch = cls(kind_named(fields["kind"]), reader.size)
        sketch._restore(fields, reader)
        return sketch

    def _restore(self, fields: Mapping[str, Any], reader: Any) -> None:
        for name in _NUMBERS:
            setattr(self, name, _whole(fields[name]))
        self.codes = np.cumsum(_widened(fields["codes"]), dtype=np.uint32)
        self.counts = _widened(fields["counts"]).astype(np.int64)
        self.low, self.high = fields["extremes"]
        self.tree.nodes = {(node[0], node[1]): tuple(node[2:]) for node in fields["nodes"]}
        if len(self.tree.nodes) != len(fields["nodes"]):
            raise ValueError("two nodes have one place")
        self.rows = Rows(_whole(fields["row"]), _whole(fields["dead"]))
        self.rows.open = {row: (seen, alive) for row, seen, alive in fields["open"]}


_NUMBERS = ("count", "nan", "inf", "zero", "negative_zero", "total", "implied")
_WIDTHS = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}


def _narrowed(numbers: Array) -> bytes:
    """Return numbers in as few bytes as hold the largest, after how many these are."""
    most = int(numbers.max(initial=0))
    width = 1 if most < 1 << 8 else 2 if most < 1 << 16 else 4 if most < 1 << 32 else 8
    return bytes([width]) + numbers.astype(_WIDTHS[width]).tobytes()


def _widened(data: bytes) -> Array:
    """Return the numbers that `_narrowed` was called on."""
    return np.frombuffer(data, _WIDTHS[data[0]], offset=1)


def _whole(number: Any) -> int:
    if type(number) not in {int, str}:
        raise TypeError("not a number of elements")
    return int(number)


class Rows:
    """Counts rows without any element but zeros; those that were seen in part wait for the rest."""

    __slots__ = ("dead", "length", "open")

    def __init__(self, length: int, dead: int = 0) -> None:
        #: Elements in a row; 0 where rows are not counted.
        self.length = length
        self.dead = dead
        #: By number of the row: how many of its elements were seen, whether one was not zero.
        self.open: dict[int, tuple[int, bool]] = {}

    def add(self, start: int, count: int, alive: Array | None = None) -> None:
        """Add a run of elements: which of its rows have one that is not zero; None for all."""
        first, last = start // self.length, (start + count - 1) // self.length
        ends = (True, True) if alive is None else (bool(alive[0]), bool(alive[-1]))
        if first == last:
            self._see(first, count, alive=ends[0])
            return
        self._see(first, (first + 1) * self.length - start, alive=ends[0])
        self._see(last, start + count - last * self.length, alive=ends[1])
        if alive is not None:
            self.dead += len(alive) - 2 - int(np.count_nonzero(alive[1:-1]))

    def merge(self, other: Rows) -> None:
        """Add what another count found in other elements of the same tensor."""
        self.length = self.length or other.length
        self.dead += other.dead
        for row, (seen, alive) in other.open.items():
            self._see(row, seen, alive=alive)

    def _see(self, row: int, count: int, *, alive: bool) -> None:
        seen, before = self.open.pop(row, (0, False))
        if seen + count < self.length:
            self.open[row] = (seen + count, alive or before)
        elif not (alive or before):
            self.dead += 1


class Tables:
    """Memory that the kernels write to, for one kind of elements."""

    def __init__(self, kind: Kind, nbytes: int) -> None:
        self.kind = kind
        leaves = -(-nbytes // kind.itemsize // LEAF)
        counters = np.zeros((2, 1 << kind.code_bits), np.uint32)
        self.counted = *counters, np.zeros(counters.shape[1] // PAGE, np.bool_)
        self.codes = np.empty(counters.shape[1], np.uint32)
        self.counts = np.empty(counters.shape[1], np.int64)
        self.used = False
        self.zeros = np.zeros(leaves, np.int64)
        bits = kind.bits if kind.exact else kind.code_bits
        minus = 1 << (bits - 1) if kind.has_negative_zero else 0
        #: The type of patterns that are counted: of integers, those of the same as float64.
        unsigned = np.dtype(np.uint64) if kind.integer else kind.unsigned
        shift = 0 if kind.exact else 8 * unsigned.itemsize - kind.code_bits
        #: The lowest bit of a code within a pattern, and the code of minus zero.
        self.of_codes = (unsigned.type(shift), minus)
        #: Of floats how many are NaN, infinite, zero, and negative zeros; of integers, the sums of
        #: their lower and upper halves.
        self.tally = np.zeros(4, np.int64)
        self.extremes = np.zeros(2, np.int64)
        if kind.exact:
            return
        self.nodes = np.zeros((leaves, 7))
        self.signed = np.dtype(f"i{kind.itemsize}")
        key_type = kind.dtype if kind.integer else self.signed
        self.extremes = np.zeros(2, key_type)
        info = np.iinfo(key_type)
        self.widest = (info.max, info.min)
        # Vectors are stored there all the time, at best each in a line of the cache.
        memory = np.empty(5 * LANES)
        start = -memory.__array_interface__["data"][0] // memory.itemsize % WIDTH
        sums = memory[start : start + 4 * LANES]
        self.out: tuple[Array, ...] = (self.zeros, self.nodes, self.extremes, sums)
        if kind.integer:
            self.wide = np.empty(leaves * LEAF)
            self.out = (self.nodes, self.extremes, self.tally, np.empty(LEAF), sums)
            return
        # Patterns of magnitudes that are described without another look: all but infinity, or those
        # whose fourth powers do not leave the range of float64.
        infinity = kind.dtype.type(np.inf).view(self.signed)
        least, most = (822 << 52, 1223 << 52) if kind.itemsize == 8 else (0, infinity)
        keys = (self.signed.type(n) for n in (info.max, least, most, infinity))
        self.how = (self.of_codes, *keys)
        # What is looked at once more is not counted once more.
        self.elsewhere = ((unsigned.type(kind.bits - 1), 0), *self.how[1:])
        self.uncounted = (*np.zeros((2, 2), np.uint32), np.zeros(1, np.bool_))

    def reset(self) -> None:
        """Forget what was counted; the counters are empty unless an error came before `drain`."""
        if self.used:
            for each in self.counted:
                each[:] = 0
        self.tally[:] = 0
        if not self.kind.exact:
            self.extremes[:] = self.widest

    def count(self, values: Array) -> None:
        """Run the kernels over a block."""
        self.used = True
        kind = self.kind
        self.rare = 0
        if kind.exact:
            kernels.count_codes(values, self.of_codes, self.counted, self.zeros)
            if not kind.has_zero:
                self.zeros[:] = 0
        elif kind.integer:
            wide = self.wide[: len(values)]
            wide[:] = values
            patterns = wide.view(np.uint64)
            kernels.count_codes(patterns, self.of_codes, self.counted, self.zeros)
            kernels.describe_integers(values, self.out)
        else:
            self.rare = self._describe(values, self.how, self.counted, self.out)
        if self.rare:
            for leaf in np.flatnonzero(self.nodes[: -(-len(values) // LEAF), 0] < 0).tolist():
                self.nodes[leaf] = self._look_again(values[leaf * LEAF : (leaf + 1) * LEAF])

    def _describe(self, values: Array, how: Any, counted: Any, out: Any) -> int:
        patterns = values.view(self.kind.unsigned)
        rare: int = kernels.describe_floats(values, patterns, how, counted, out)
        return rare

    def _look_again(self, values: Array) -> Array:
        """Return the moments of a leaf of floats that are not all finite, or are very large."""
        finite = values[np.isfinite(values)]
        nan = int(np.isnan(values).sum())
        self.tally[:2] += nan, len(values) - len(finite) - nan
        node, exponent, zeros = np.zeros((1, 7)), 0, np.zeros(1, np.int64)
        sums = self.out[-1]
        out = (zeros, node, self.extremes, sums)
        if not len(finite) or not self._describe(finite, self.elsewhere, self.uncounted, out):
            return node
        # Few different powers, so that leaves seldom have to be brought to a common one.
        exponent = 256 * ((int(np.frexp(np.abs(finite).max())[1]) + 128) // 256)
        # The power of two may itself be out of range.
        first = -exponent // 2
        scaled = finite * 2.0**first * 2.0 ** (-exponent - first)
        out = (zeros, node, self.extremes.copy(), sums)
        self._describe(scaled, self.elsewhere, self.uncounted, out)
        node[0, 6] = exponent
        return node

    def drain(self) -> tuple[Array, Array]:
        """Take the codes that were counted, and how often, out of the counters."""
        found = kernels.drain(*self.counted, self.codes, self.counts)
        self.used = False
        return self.codes[:found].copy(), self.counts[:found].copy()


def _tables(kind: Kind) -> Tables:
    """Return the tables of this thread, which uses them for one sketch after another."""
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


# --- two tensors ---------------------------------------------------------------------------------

#: Sums of the squares of the differences, of those of both sides, and of the products, and the
#: power of two that the elements were divided by.
Sums = tuple[float, float, float, float, float]

_NO_SUMS: Sums = (0.0, 0.0, 0.0, 0.0, 0.0)
_COUNTS = ("count", "equal", "finite", "nan", "inf")


class Comparison(Accumulator):
    """What is known of some pairs of elements."""

    def __init__(self, kinds: tuple[str, str], size: int, *, omits_zeros: bool = False) -> None:
        #: Names of kinds, or "complex128".
        self.kinds = kinds
        self.size = size
        self.omits_zeros = omits_zeros
        self.count = 0
        #: Pairs of one number, or both NaN; both finite, which is what the sums are about; and not
        #: equal because of a NaN, or else of an infinity.
        self.equal = self.finite = self.nan = self.inf = 0
        #: The largest difference.
        self.largest = 0.0
        self.tree: Tree[Sums] = Tree(_merged, _NO_SUMS)
        self.pieces = {}

    @classmethod
    def begin(cls, reader: Any, argument: Any) -> Comparison:  # noqa: ARG003
        """Return one for pairs of elements."""
        return cls(reader.kinds, reader.size, omits_zeros=reader.omits_zeros)

    @staticmethod
    def _columns(values: Mapping[str, Array]) -> tuple[Array, ...]:
        return values["a"], values["b"]

    def _add_run(self, start: int, columns: tuple[Array, ...], *, is_whole: bool) -> None:
        self.count += len(columns[0])
        if is_whole:
            self._complete(start, columns)
        else:
            self._add_piece(start, tuple(column.copy() for column in columns))

    def _complete(self, start: int, columns: tuple[Array, ...]) -> None:
        with np.errstate(invalid="ignore", over="ignore"):  # signalling NaN, infinities
            nodes = self._compare(*columns)
        for (level, number), node in _folded(start // LEAF, nodes):
            self.tree.add(level, number, node)

    def close(self) -> Self:
        """Add the pairs of zeros that were left out."""
        if self.omits_zeros:
            self.imply(self.size - self.count)
        return self

    def imply(self, zeros: int, row: int = 0, dead: int = 0) -> None:
        """Add pairs of zeros that neither side stores."""
        self.count += zeros
        self.equal += zeros
        self.finite += zeros

    def merge(self, other: Comparison) -> None:
        """Add what another one found in other pairs."""
        for name in ("equal", "finite", "nan", "inf"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest = max(self.largest, other.largest)
        super().merge(other)

    def pack(self) -> bytes:
        """Return bytes to keep."""
        import msgpack

        counts = [str(getattr(self, name)) for name in _COUNTS]
        nodes = [[*place, *node] for place, node in self.tree.nodes.items()]
        data: bytes = msgpack.packb([counts, self.largest, nodes])
        return data

    @classmethod
    def unpack(cls, data: bytes, reader: Any) -> Comparison:
        """Return what `pack` was called on; whatever is wrong with it is an error."""
        import msgpack

        counts, largest, nodes = msgpack.unpackb(data)
        found = cls(reader.kinds, reader.size)
        for name, count in zip(_COUNTS, counts, strict=True):
            setattr(found, name, int(count, 10))  # of text only
        found.largest = float(largest)
        found.tree.nodes = {(int(node[0]), int(node[1])): tuple(node[2:]) for node in nodes}
        if len(found.tree.nodes) != len(nodes):
            raise ValueError("two nodes have one place")
        return found

    def _compare(self, a: Array, b: Array) -> Array:
        """Compare whole leaves; return the sums of each."""
        if set(self.kinds) & {"int64", "uint64", "complex128"}:
            compare = self._compare_complex if "complex128" in self.kinds else self._compare_whole
            leaves = range(0, len(a), LEAF)
            return np.array([compare(a[at : at + LEAF], b[at : at + LEAF]) for at in leaves])
        # The float that has all values of both sides.
        narrow = all(name == "float32" or kind_named(name).exact for name in self.kinds)
        memory = _pair_memory("float32" if narrow else "float64")
        first, second = (memory.side(n, (a, b)[n], self.kinds[n]) for n in (0, 1))
        nodes = np.empty((-(-len(a) // LEAF), SUMS + 1))
        tally, largest = np.zeros(4, np.int64), np.zeros(1)
        kernels.compare_floats(first, second, (nodes, tally, largest, *memory.out))
        equal, finite, nan, inf = tally.tolist()
        self._count(equal, finite, nan, inf, float(largest[0]))
        for leaf in np.flatnonzero(np.isnan(nodes[:, SUMS])).tolist():
            x, y = (side[0][leaf * LEAF : (leaf + 1) * LEAF] for side in (first, second))
            both = np.isfinite(x) & np.isfinite(y)
            nodes[leaf] = _scaled_sums(x[both], y[both])
        return nodes

    def _compare_whole(self, a: Array, b: Array) -> list[float]:
        """Compare integers of 64 bits with whatever else."""
        x, x_rest = in_two_parts(a, self.kinds[0])
        y, y_rest = in_two_parts(b, self.kinds[1])
        both = np.isfinite(x) & np.isfinite(y)
        nan = np.count_nonzero(np.isnan(x) | np.isnan(y))
        inf = np.count_nonzero(np.isinf(x) | np.isinf(y))
        if not both.all():
            x, x_rest, y, y_rest = x[both], x_rest[both], y[both], y_rest[both]
        # Exact where it is not large: see `in_two_parts`.
        difference = (x - y) + (x_rest - y_rest)
        largest = float(np.abs(difference).max(initial=0.0))
        self._count(np.count_nonzero(difference == 0), len(x), nan, inf, largest)
        return _sums(x, y, difference)

    def _compare_complex(self, a: Array, b: Array) -> list[float]:
        """Compare complex numbers: a difference is the magnitude of one, sums are over both."""
        x, y = _complex(a, self.kinds[0]), _complex(b, self.kinds[1])
        both = np.isfinite(x) & np.isfinite(y)
        ours, theirs = np.isnan(x), np.isnan(y)
        equal = (x == y) | (ours & theirs)
        nan = np.count_nonzero(~both & ~equal & (ours | theirs))
        inf = np.count_nonzero(~both & ~equal & ~(ours | theirs))
        x, y = x[both], y[both]
        difference = x - y
        largest = float(np.abs(difference).max(initial=0.0))
        self._count(np.count_nonzero(equal), len(x), nan, inf, largest)
        return _sums(x.view(np.float64), y.view(np.float64), difference.view(np.float64))

    def _count(self, equal: Any, finite: int, nan: Any, inf: Any, largest: float) -> None:
        self.equal += int(equal)
        self.finite += int(finite)
        self.nan += int(nan)
        self.inf += int(inf)
        self.largest = max(self.largest, largest)


def _folded(first: int, nodes: Array) -> Iterable[tuple[tuple[int, int], Sums]]:
    """Merge neighbouring leaves as far as they make nodes of the tree."""
    is_scaled = bool(nodes[:, SUMS].any())
    for level, number in runs(first, len(nodes)):
        start = (number << level) - first
        some = nodes[start : start + (1 << level)]
        while len(some) > 1 and not is_scaled:
            some = some[0::2] + some[1::2]
        rows: list[Any] = [tuple(row) for row in some.tolist()]
        while len(rows) > 1:
            rows = [_merged(rows[i], rows[i + 1]) for i in range(0, len(rows), 2)]
        yield (level, number), rows[0]


def _merged(a: Sums, b: Sums) -> Sums:
    if a[4] != b[4]:
        # Sums of zeros have no power of two of their own.
        if not any(a[:4]):
            return b
        if not any(b[:4]):
            return a
        common = max(a[4], b[4])
        a, b = _brought(a, common), _brought(b, common)
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4]


def _brought(a: Sums, exponent: float) -> Sums:
    shift = int(2 * (a[4] - exponent))
    d, x, y, p = (math.ldexp(number, shift) for number in a[:4])
    return d, x, y, p, exponent


class _PairMemory:
    """Memory that a thread uses for one leaf of pairs after another."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self.nothing = np.empty(0, dtype), np.empty(0, np.uint16), np.empty(0, np.uint32)
        self.widened = np.empty(LEAF, dtype), np.empty(LEAF, dtype)
        self.out = np.empty(LEAF), np.empty((2, LEAF), dtype), np.empty((SUMS + 1) * LANES)

    def side(self, number: int, values: Array, name: str) -> tuple[Array, ...]:
        """Return one side as the kernel wants it."""
        kind = kind_named(name)
        values = prepared(values, kind)
        wide, bits, table = self.nothing
        if not kind.exact:
            wide = values if values.dtype == self.dtype else values.astype(self.dtype)
        elif self.dtype == np.float64:
            wide = kind.values[values]
        else:
            # One type of patterns, so that there is one kernel to compile.
            bits = values if values.dtype == np.uint16 else values.astype(np.uint16)
            table = table if name == "bfloat16" else _float32_patterns(name)
        return wide, bits, table, self.widened[number]


def _pair_memory(name: str) -> _PairMemory:
    memories: dict[str, _PairMemory] = _thread.__dict__.setdefault("pairs", {})
    if name not in memories:
        memories[name] = _PairMemory(np.dtype(name))
    return memories[name]


@cache
def _float32_patterns(name: str) -> Array:
    """Return the float32, as patterns, that the codes of an exact kind stand for."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        patterns: Array = kind_named(name).values.astype(np.float32).view(np.uint32)
    return patterns


def as_floats(values: Array, name: str) -> Array:
    """Return numbers as float32 where all of the kind are, else as float64."""
    kind = kind_named(name)
    if kind.exact:
        floats: Array = _float32_patterns(name)[prepared(values, kind)].view(np.float32)
        return floats
    values = prepared(values, kind)
    return values.astype(np.float64) if kind.integer else values


def in_two_parts(values: Array, name: str) -> tuple[Array, Array]:
    """Return two float64 for each element, whose sum it is exactly."""
    kind = kind_named(name)
    values = prepared(values, kind)
    if name not in {"int64", "uint64"}:
        wide = kind.values[values] if kind.exact else values.astype(np.float64)
        return wide, np.zeros(len(wide))
    lower = values & values.dtype.type(_LOWER_BITS)
    lower[(values <= _WHOLE) & (values >= (-_WHOLE if kind.dtype.kind == "i" else 0))] = 0
    return (values - lower).astype(np.float64), lower.astype(np.float64)


def _complex(values: Array, name: str) -> Array:
    if name == "complex128":
        return values.astype(np.complex128)
    first, second = in_two_parts(values, name)
    return (first + second).astype(np.complex128)


def _sums(x: Array, y: Array, difference: Array) -> list[float]:
    lanes = np.empty((SUMS + 1) * LANES)
    kernels.add_up(x, y, difference, lanes)
    found: list[float] = lanes[: SUMS * LANES : LANES].tolist()
    if not TINY < found[1] + found[2] < math.inf:
        return _scaled_sums(x, y)
    return [*found, 0.0]


def _scaled_sums(x: Array, y: Array) -> list[float]:
    """Add up squares that leave the range of float64: those of elements divided by one number."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    largest = max(np.abs(x).max(initial=0.0), np.abs(y).max(initial=0.0))
    # Few different ones, so that leaves seldom have to be brought to a common one.
    exponent = 256 * ((math.frexp(largest)[1] + 128) // 256) if largest else 0
    x, y = np.ldexp(x, -exponent), np.ldexp(y, -exponent)
    lanes = np.empty((SUMS + 1) * LANES)
    kernels.add_up(x, y, x - y, lanes)
    return [*lanes[: SUMS * LANES : LANES].tolist(), float(exponent)]
