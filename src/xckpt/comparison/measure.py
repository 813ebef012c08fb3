"""Statistics of pairs of elements, after the relation between both tensors if it is known."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from xckpt.arrays.kinds import kind_named, prepared
from xckpt.arrays.streams import LEAF, ChunkedZip, Zip
from xckpt.comparison.pair_loops import SUMS, TINY, add_up, compare_floats, fold_sums
from xckpt.comparison.pairs import SameBytes, stored_pair
from xckpt.elements import ELEMENT_TYPES
from xckpt.labels.filters import suggest_names
from xckpt.progress import Progress
from xckpt.scan.scanning import Accumulator, MergeTree, gather, runs
from xckpt.scan.statistics_cache import open_rows
from xckpt.statistics.tables import STATUSES
from xckpt.statistics.vector_kernel import LANES

if TYPE_CHECKING:
    from xckpt.progress import ProgressOption
    from xckpt.typing import Array

#: Statistics of a comparison, in the order of `measures_of`.
MEASURES = (
    *("status", "count", "equal_fraction", "nan", "inf"),
    *("max_abs", "rmse", "rel_l2", "cosine", "sqnr_db", "nmse"),
)

#: Numbers of a pair of tensors from which its measures follow: counts of elements; the sums of the
#: squares of the differences, of the squares of each side, and of the products; the largest
#: difference; and the exponent of the power of two that divides the elements in the sums.
PAIR_COLUMNS = (
    *("count", "equal", "finite", "nan", "inf"),
    *("differences", "first", "second", "products", "largest", "exponent"),
)
#: The numbers of these that the measures of several pairs need besides their own measures.
PAIR_SUMS = ("finite", "differences", "first", "second", "products", "exponent")

#: Measures that are larger, the more two tensors differ.
BOUNDED = ("nan", "inf", "max_abs", "rmse", "rel_l2", "nmse")
_CHANGED, _CLOSE = STATUSES.index("changed"), STATUSES.index("close")

# Integers up to this are float64.
_WHOLE = 1 << 53
_LOWER_BITS = 0x7FF
# Leaves whose sums are merged at once.
_LEAVES_AT_ONCE = 1024

#: The sums of the squares of the differences, of the squares of each side, and of the products, and
#: the exponent of the power of two by which the elements were divided.
Sums = tuple[float, float, float, float, float]

_NO_SUMS: Sums = (0.0, 0.0, 0.0, 0.0, 0.0)
_COUNTS = ("count", "equal", "finite", "nan", "inf")

_thread = threading.local()


class Comparison(Accumulator):
    """Counts and sums over pairs of elements."""

    record = "comparison"
    leaf = LEAF

    def __init__(self, kinds: tuple[str, str], size: int, *, omits_zeros: bool = False) -> None:
        #: Names of kinds, or "complex128".
        self.kinds = kinds
        self.size = size
        self.omits_zeros = omits_zeros
        self.count = 0
        #: Numbers of pairs: equal, or both NaN; both finite, which the sums are over; different
        #: because of a NaN; and different because of an infinity, without a NaN.
        self.equal = self.finite = self.nan = self.inf = 0
        #: The largest difference.
        self.largest = 0.0
        self.tree: MergeTree[Sums] = MergeTree(_merge_sums, _NO_SUMS)
        self._memory: _PairMemory | None = None

    @classmethod
    def begin(cls, stream: Any, argument: Any) -> Comparison:  # noqa: ARG003
        """Return an empty comparison for a stream of pairs."""
        return cls(stream.kinds, stream.size, omits_zeros=stream.omits_zeros)

    def update(self, start: int, *columns: Array) -> None:
        """Add pairs."""
        count = len(columns[0])
        self.count += count
        memory = self._memory
        if memory is None:
            self._memory = memory = _pair_memory(self.kinds)
            memory.leaves = 0
            memory.tally[:] = 0.0
        if memory.dtype is None:
            self._fold(start // LEAF, self._compare_others(*columns))
            return
        leaves = -(-count // LEAF)
        if memory.leaves + leaves > len(memory.nodes):
            self._fold_pending(memory)
            memory.make_room(leaves)
        self._compare_floats(memory, *columns)
        memory.leaves += leaves
        memory.end = start // LEAF + leaves

    def close(self) -> Self:
        """Add what is in the memory of this thread, and the zeros that the stream omitted."""
        memory, self._memory = self._memory, None
        if memory is not None and memory.dtype is not None:
            self._fold_pending(memory)
            equal, finite, nan, inf, largest = memory.tally.tolist()
            self._count(equal, int(finite), nan, inf, largest)
        if self.omits_zeros:
            self.imply(self.size - self.count)
        return self

    def imply(self, zeros: int, row: int = 0, dead: int = 0) -> None:
        """Add pairs of zeros that neither side stores."""
        self.count += zeros
        self.equal += zeros
        self.finite += zeros

    def merge(self, other: Comparison) -> None:
        """Add the counts and sums of other pairs."""
        for name in ("equal", "finite", "nan", "inf"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest = max(self.largest, other.largest)
        super().merge(other)

    def row(self) -> list[float]:
        """Return the counts and sums, in the order of `PAIR_COLUMNS`.

        Some are NaN for tensors with the same bytes, because their elements were not decoded.
        """
        finite: float = self.finite
        *sums, exponent = self.tree.total()
        if self.count and not self.tree.nodes and self.equal == self.count:
            finite, sums = math.nan, [0.0, *[math.nan] * 3]
        counts = (self.count, self.equal, finite, self.nan, self.inf)
        return [*counts, *sums, self.largest, exponent]

    def pack(self) -> bytes:
        """Serialise the comparison for the cache."""
        import msgpack

        counts = [str(getattr(self, name)) for name in _COUNTS]
        nodes = [[*place, *node] for *place, node in self.tree.nodes]
        data: bytes = msgpack.packb([counts, self.largest, nodes])
        return data

    @classmethod
    def unpack(cls, data: bytes, stream: Any) -> Comparison:
        """Restore a comparison from the bytes that `pack` returned."""
        import msgpack

        counts, largest, nodes = msgpack.unpackb(data)
        comparison = cls(stream.kinds, stream.size)
        for name, count in zip(_COUNTS, counts, strict=True):
            setattr(comparison, name, int(count))
        comparison.largest = largest
        comparison.tree.nodes = [(node[0], node[1], tuple(node[2:])) for node in nodes]
        return comparison

    def _compare_floats(self, memory: _PairMemory, a: Array, b: Array) -> None:
        """Compare whole leaves of numbers that float64 holds; their sums follow the others."""
        first, second = memory.side(0, a, self.kinds[0]), memory.side(1, b, self.kinds[1])
        nodes = memory.nodes[memory.leaves :]
        if compare_floats(first, second, (nodes, *memory.out)):
            unknown = np.isnan(nodes[: -(-len(a) // LEAF), SUMS])
            for number in np.flatnonzero(unknown).tolist():
                x, y = (side[0][number * LEAF : (number + 1) * LEAF] for side in (first, second))
                both_finite = np.isfinite(x) & np.isfinite(y)
                nodes[number] = _scaled_sums(x[both_finite], y[both_finite])

    def _fold_pending(self, memory: _PairMemory) -> None:
        """Move the sums in the memory of this thread into the tree."""
        self._fold(memory.end - memory.leaves, memory.nodes[: memory.leaves])
        memory.leaves = 0

    def _compare_others(self, a: Array, b: Array) -> Array:
        """Compare complex numbers and integers of 64 bits; return the sums of each leaf."""
        compare = self._compare_complex if "complex128" in self.kinds else self._compare_integers
        leaves = [slice(start, start + LEAF) for start in range(0, len(a), LEAF)]
        with np.errstate(invalid="ignore", over="ignore"):  # signalling NaN, infinities
            return np.array([compare(a[leaf], b[leaf]) for leaf in leaves])

    def _compare_integers(self, a: Array, b: Array) -> list[float]:
        """Compare integers of 64 bits with numbers of any real kind; return the sums."""
        x, x_lower = in_two_parts(a, self.kinds[0])
        y, y_lower = in_two_parts(b, self.kinds[1])
        both_finite = np.isfinite(x) & np.isfinite(y)
        nan = np.count_nonzero(np.isnan(x) | np.isnan(y))
        inf = np.count_nonzero(np.isinf(x) | np.isinf(y))
        if not both_finite.all():
            x, x_lower = x[both_finite], x_lower[both_finite]
            y, y_lower = y[both_finite], y_lower[both_finite]
        # Small differences are exact, because both parts are (see `in_two_parts`).
        difference = (x - y) + (x_lower - y_lower)
        largest = float(np.abs(difference).max(initial=0.0))
        self._count(np.count_nonzero(difference == 0), len(x), nan, inf, largest)
        return _sums(x, y, difference)

    def _compare_complex(self, a: Array, b: Array) -> list[float]:
        """Compare complex numbers; return the sums over their real and imaginary parts."""
        x, y = _complex(a, self.kinds[0]), _complex(b, self.kinds[1])
        both_finite = np.isfinite(x) & np.isfinite(y)
        x_nan, y_nan = np.isnan(x), np.isnan(y)
        equal = (x == y) | (x_nan & y_nan)
        nan = np.count_nonzero(~both_finite & ~equal & (x_nan | y_nan))
        inf = np.count_nonzero(~both_finite & ~equal & ~(x_nan | y_nan))
        x, y = x[both_finite], y[both_finite]
        difference = x - y
        largest = float(np.abs(difference).max(initial=0.0))
        self._count(np.count_nonzero(equal), len(x), nan, inf, largest)
        return _sums(x.view(np.float64), y.view(np.float64), difference.view(np.float64))

    def _fold(self, first: int, nodes: Array) -> None:
        """Add the sums of consecutive leaves to the tree."""
        is_scaled = np.count_nonzero(nodes[:, SUMS])
        for level, number in runs(first, len(nodes)):
            start = (number << level) - first
            if is_scaled:
                for leaf in range(start, start + (1 << level)):
                    self.tree.add(0, first + leaf, tuple(nodes[leaf].tolist()))
            else:
                fold_sums(nodes[start:], 1 << level)
                self.tree.add(level, number, tuple(nodes[start].tolist()))

    def _count(self, equal: Any, finite: int, nan: Any, inf: Any, largest: float) -> None:
        self.equal += int(equal)
        self.finite += int(finite)
        self.nan += int(nan)
        self.inf += int(inf)
        self.largest = max(self.largest, largest)


def _merge_sums(a: Sums, b: Sums) -> Sums:
    if a[4] != b[4]:
        # Sums of zeros fit any exponent.
        if not any(a[:4]):
            return b
        if not any(b[:4]):
            return a
        common = max(a[4], b[4])
        a, b = _rescale(a, common), _rescale(b, common)
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4]


def _rescale(a: Sums, exponent: float) -> Sums:
    shift = int(2 * (a[4] - exponent))
    d, x, y, p = (math.ldexp(number, shift) for number in a[:4])
    return d, x, y, p, exponent


class _PairMemory:
    """Buffers that a thread reuses for the blocks of pairs of some kinds."""

    def __init__(self, kinds: tuple[str, str]) -> None:
        #: The narrowest float that represents all values of both sides; None if no float does.
        self.dtype: np.dtype[Any] | None = None
        # Numbers of pairs: equal, finite, different by a NaN, and by an infinity; the largest
        # difference.
        self.tally = np.zeros(5)
        #: Sums of the leaves before the leaf `end`, of which there are `leaves`.
        self.nodes = np.empty((_LEAVES_AT_ONCE, SUMS + 1))
        self.leaves = self.end = 0
        if not all(ELEMENT_TYPES[name].fits_float64 for name in kinds):
            return
        is_narrow = all(name == "float32" or kind_named(name).exact for name in kinds)
        self.dtype = dtype = np.dtype("float32" if is_narrow else "float64")
        self.empty = np.empty(0, dtype), np.empty(0, np.uint16), np.empty(0, np.uint32)
        self.widened = np.empty(LEAF, dtype), np.empty(LEAF, dtype)
        sums = np.empty((SUMS + 1) * LANES)
        self.out = self.tally, np.empty(LEAF), np.empty((2, LEAF), dtype), sums

    def make_room(self, leaves: int) -> None:
        """Enlarge the memory if a block has more leaves."""
        if len(self.nodes) < leaves:
            self.nodes = np.empty((leaves, SUMS + 1))

    def side(self, number: int, values: Array, name: str) -> tuple[Array, ...]:
        """Return one side of a block as `compare_floats` takes it."""
        kind = kind_named(name)
        values = prepared(values, kind)
        wide, bits, table = self.empty
        if not kind.exact:
            wide = values
            if values.dtype != self.dtype:
                with np.errstate(invalid="ignore"):  # signalling NaN
                    wide = values.astype(self.dtype)
        elif self.dtype == np.float64:
            wide = kind.values[values]
        else:
            # One type of patterns needs only one compiled kernel.
            bits = values if values.dtype == np.uint16 else values.astype(np.uint16)
            table = table if name == "bfloat16" else _float32_patterns(name)
        return wide, bits, table, self.widened[number]


def _pair_memory(kinds: tuple[str, str]) -> _PairMemory:
    memories: dict[tuple[str, str], _PairMemory] = _thread.__dict__.setdefault("pairs", {})
    if kinds not in memories:
        memories[kinds] = _PairMemory(kinds)
    return memories[kinds]


@cache
def _float32_patterns(name: str) -> Array:
    """Return the patterns of the float32 values of all codes of an exact kind."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        patterns: Array = kind_named(name).values.astype(np.float32).view(np.uint32)
    return patterns


def as_floats(values: Array, name: str) -> Array:
    """Return numbers as float32 if it holds all numbers of the kind, else as float64."""
    kind = kind_named(name)
    if name == "bfloat16":
        # Half the time of a table.
        wide: Array = (prepared(values, kind).astype(np.uint32) << np.uint32(16)).view(np.float32)
        return wide
    if kind.exact:
        floats: Array = _float32_patterns(name)[prepared(values, kind)].view(np.float32)
        return floats
    values = prepared(values, kind)
    return values.astype(np.float64) if kind.integer else values


def in_two_parts(values: Array, name: str) -> tuple[Array, Array]:
    """Split each element into two float64 numbers; their sum is exactly the element."""
    kind = kind_named(name)
    values = prepared(values, kind)
    if kind.element.fits_float64:
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
    add_up(x, y, difference, lanes)
    sums: list[float] = lanes[: SUMS * LANES : LANES].tolist()
    if not TINY < sums[1] + sums[2] < math.inf:
        return _scaled_sums(x, y)
    return [*sums, 0.0]


def _scaled_sums(x: Array, y: Array) -> list[float]:
    """Return the sums for elements whose squares leave the range of float64, scaled to fit."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    largest = max(np.abs(x).max(initial=0.0), np.abs(y).max(initial=0.0))
    # Multiples of 256, so that leaves seldom have to be rescaled to a common exponent.
    exponent = 256 * ((math.frexp(largest)[1] + 128) // 256) if largest else 0
    x, y = np.ldexp(x, -exponent), np.ldexp(y, -exponent)
    lanes = np.empty((SUMS + 1) * LANES)
    add_up(x, y, x - y, lanes)
    return [*lanes[: SUMS * LANES : LANES].tolist(), float(exponent)]


def measures_of(table: Array, exponent: Array | int = 0) -> Array:
    """Return the statistics of pairs of tensors, or of cells, a row for each, as in `MEASURES`.

    The columns of the table are the `PAIR_COLUMNS` without the exponent.
    """
    count, equal, finite, nan, inf, d, a, b, product, largest = table.T
    with np.errstate(all="ignore"):
        rmse = np.ldexp(np.sqrt(d / finite), exponent)
        nmse = np.where(d > 0, d / a, 0.0)
        cosine = np.clip(product / (np.sqrt(a) * np.sqrt(b)), -1.0, 1.0)
        ratio = a / d
        is_in_range = (ratio > 0) & np.isfinite(ratio)
        sqnr = 10 * np.where(is_in_range, np.log10(ratio), np.log10(a) - np.log10(d))
        # Without elements, all elements are equal.
        equal_fraction = np.where(count, equal / count, 1.0)
    cosine, sqnr = np.where(d == 0, [[1.0], [np.inf]], [cosine, sqnr])
    # Counts of 2**53 and more are rounded, and may be equal by that.
    is_same = (equal == count) & (d == 0) & (nan + inf == 0)
    differences = np.stack([largest, rmse, np.sqrt(nmse), cosine, sqnr, nmse])
    differences = np.where((finite == 0) & ~is_same, np.nan, differences)
    differences[1] = np.where(is_same, 0.0, differences[1])
    return np.stack([~is_same, count, equal_fraction, nan, inf, *differences]).T


# --- all pairs of a comparison --------------------------------------------------------------------


def compare_pairs(
    pairs: Sequence[Zip | ChunkedZip], *, progress: ProgressOption, cache: bool
) -> Array:
    """Return the statistics of each pair of tensors, as rows in the order of `MEASURES`."""
    return measures_of_pairs(summed(pairs, progress=progress, cache=cache))


def measures_of_pairs(table: Array) -> Array:
    """Return the `MEASURES` of pairs of tensors, from rows of `PAIR_COLUMNS`."""
    return measures_of(table[:, :-1], table[:, -1].astype(np.int64))


def summed(
    pairs: Sequence[Zip | ChunkedZip],
    *,
    progress: ProgressOption,
    cache: bool,
    # From the positions of uncached pairs to their comparisons, instead of `compared`.
    find: Callable[[list[int], Progress], Sequence[Comparison]] | None = None,
) -> Array:
    """Return the `PAIR_COLUMNS` of each pair of tensors."""
    cache_key = ("comparison", *PAIR_COLUMNS)
    with (
        Progress(progress, "comparison") as bar,
        open_rows(pairs, cache_key, len(PAIR_COLUMNS), enabled=cache) as rows,
    ):
        batch = [pairs[number] for number in rows.missing]
        comparisons = find(rows.missing, bar) if find else compared(batch, bar, cache=cache)
        rows.add(comparison.row() for comparison in comparisons)
    return rows.values


def compared(pairs: Sequence[Zip | ChunkedZip], bar: Progress, *, cache: bool) -> list[Comparison]:
    """Compare pairs of tensors; the same stored bytes are not decoded."""
    finish = lambda _, comparison: comparison  # noqa: E731
    compare_bytes = partial(with_same_bytes, pairs, bar)
    return gather(pairs, Comparison, finish, bar, cache=cache, shortcut=compare_bytes)


def with_same_bytes(
    pairs: Sequence[Zip | ChunkedZip], bar: Progress, numbers: Iterable[int]
) -> Iterator[tuple[int, Comparison]]:
    """Yield comparisons of tensors that have the same stored bytes, which are not decoded."""
    stored = {n: pair for n in numbers if (pair := stored_pair(pairs[n])) is not None}
    if not stored:
        return
    results = gather(list(stored.values()), SameBytes, lambda _, result: result.are_same, bar)
    for number, are_same in zip(stored, results, strict=True):
        if are_same:
            comparison = Comparison.begin(pairs[number], None)
            comparison.imply(comparison.size)
            yield number, comparison


# --- bounds of measures ---------------------------------------------------------------------------


def checked_bounds(fail_above: Any) -> dict[str, float]:
    """Return the bounds of measures; raise if one is unknown, or not a number."""
    if fail_above is None:
        return {}
    if not isinstance(fail_above, Mapping):
        text = f"fail_above takes measures with bounds, {{'rel_l2': 1e-3}}, not {fail_above!r}"
        raise TypeError(text)
    bounds: dict[str, float] = {}
    for name, value in fail_above.items():
        if name not in BOUNDED:
            reason = "falls as tensors differ more" if name in MEASURES else "is no measure"
            hint = suggest_names(BOUNDED, str(name)) if name not in MEASURES else ""
            raise ValueError(f"fail_above: {name!r} {reason}{hint}; there are {', '.join(BOUNDED)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise ValueError(
                f"fail_above: the bound of {name} is a number of at least 0: {value!r}"
            )
        bounds[name] = float(value)
    return bounds


def mark_close(arrays: list[Any], bounds: Mapping[str, float]) -> list[Any]:
    """Give changed tensors within all bounds the status close; statistics are the first axis."""
    # Without bounds of their own, NaN and infinities are never close.
    limits = {"nan": 0.0, "inf": 0.0, **bounds} if bounds else {}
    for array in arrays if limits else ():
        within = [array[MEASURES.index(name)] <= limit for name, limit in limits.items()]
        is_close = (array[0] == _CHANGED) & np.all(within, axis=0)
        array[0] = np.where(is_close, _CLOSE, array[0])
    return arrays


def bounded(find: Callable[..., list[Any]], bounds: Mapping[str, float], inputs: Any) -> list[Any]:
    """Return what a comparison finds, with the status of close tensors."""
    return mark_close(find(inputs), bounds)
