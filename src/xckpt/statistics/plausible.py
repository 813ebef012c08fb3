"""Whether what was kept of a tensor can be true of it: else it is found again.

A record with a valid checksum may still be wrong: written by another version of this package, or
made by a program of the same user, whom nothing here can keep from it. What is checked is all that
follows from the tensor's type, size and rows, and all that one part of a record says of another.
Numbers that pass are possible, and nothing that is computed from them fails.
"""

from __future__ import annotations

import math
from functools import cache, partial
from itertools import pairwise
from struct import pack, unpack
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.statistics.accumulate import SHORTEST_ROW, Rows, Sketch
from xckpt.statistics.comparison import Comparison
from xckpt.statistics.describe import OF_REAL_NUMBERS, statistic_names
from xckpt.statistics.kinds import kind_named
from xckpt.statistics.moments import LEAF, runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.statistics.accumulate import Accumulator
    from xckpt.statistics.kinds import Kind
    from xckpt.statistics.readers import Reader

Array = np.ndarray[Any, np.dtype[Any]]

# Of rounding, far above what there is of it: relative to a sum, and to what a sum may be at most.
_SLACK = 1e-6
_NOISE = 1e-9
# Bits of a code of float32; those of all other kinds are of float64.
_SHORT_CODE = 16
# Of what a code stands for, relative to it: its middle is within half of it. Subnormal numbers are
# less than the smallest normal one from the middle.
_CODE_WIDTH = 2.0**-7
# Below it, squares lose digits.
_SMALLEST_SQUARE = 1e-290
# Far below, numbers have few digits: they are subnormal.
_TINY = 1e-300
# Beyond it, that of two finite numbers may be infinite.
_LARGEST_DIFFERENCE = 1e300
# Powers of two that elements are divided by: multiples of one of them.
_LARGEST_EXPONENT = 2048
_EXPONENT_STEP = 256


def require(kept: Accumulator, reader: Reader, stretch: tuple[int, int]) -> None:
    """Raise a ValueError if this cannot be what was found in a stretch of a tensor."""
    if isinstance(kept, Sketch):
        _require_sketch(kept, reader, stretch)
    elif isinstance(kept, Comparison):
        _require_comparison(kept, reader, stretch)


def _require_sketch(sketch: Sketch, reader: Reader, stretch: tuple[int, int]) -> None:
    kind = reader.kind
    start, stop = stretch
    _require(sketch.kind == kind and sketch.count == stop - start)
    _require(0 <= sketch.implied <= (sketch.count if reader.sparse else 0))
    _require_counts(sketch, kind)
    zeros = sketch.zero
    if kind.exact:
        zeros = int(sketch.counts[kind.values[sketch.codes] == 0].sum())
    _require(sketch.implied <= zeros)
    _require_rows(sketch, reader, stretch, zeros)
    nodes = sketch.tree.nodes
    if kind.exact:
        _require(not nodes and sketch.low is None and sketch.high is None)
        _require(not (sketch.nan or sketch.inf or sketch.zero or sketch.negative_zero))
        _require(sketch.total == 0)
        return
    at = sketch.codes.searchsorted(kind.landmarks).tolist()
    finite = _require_tallies(sketch, at, kind)
    if reader.sparse:
        start, stop = 0, sketch.count - sketch.implied
    _require_places(nodes, start, stop)
    _require(sum(node[0] for node in nodes.values()) == finite - sketch.implied)
    if finite:
        _require_extremes(sketch, at, kind)
        _require_moments(sketch, at, kind, finite)
    else:
        _require(sketch.low is None and sketch.high is None and sketch.total == 0)
        _require(not any(any(node) for node in nodes.values()))


def _require(condition: Any) -> None:
    if not condition:
        raise ValueError("not what was kept of this tensor")


def _require_counts(sketch: Sketch, kind: Kind) -> None:
    codes, counts = sketch.codes, sketch.counts
    _require(codes.ndim == counts.ndim == 1 and len(codes) == len(counts))
    if not len(codes):
        _require(sketch.count == 0)
        return
    bits = kind.bits if kind.bits < 8 and kind.dtype.kind == "V" else kind.code_bits
    _require(int(codes[-1]) < 1 << bits and bool((codes[1:] > codes[:-1]).all()))
    _require(int(counts.min()) > 0 and int(counts.max()) <= sketch.count)
    # None is larger than all; should their sum overflow all the same, it is not this one.
    _require(int(counts.sum()) == sketch.count < 1 << 62)


def _require_rows(sketch: Sketch, reader: Reader, stretch: tuple[int, int], zeros: int) -> None:
    rows = sketch.rows
    length = reader.row if reader.sparse or reader.row >= SHORTEST_ROW else 0
    _require(rows.length == length and rows.dead >= 0)
    if not length:
        _require(not rows.dead and not rows.open)
        return
    # As many rows of zeros as their number allows, and no fewer than it enforces.
    least = zeros - -(-sketch.count // length) * (length - 1)
    _require(least <= rows.dead + len(rows.open) and rows.dead * length <= zeros)
    start, stop = stretch
    if not rows.open and (reader.sparse or start % length == stop % length == 0):
        return
    expected = Rows(length)
    if not reader.sparse and start < stop:
        expected.add(start, stop - start)
    seen = {number: (found, True) for number, (found, _) in rows.open.items()}
    _require(seen == expected.open and all(type(a) is bool for _, a in rows.open.values()))


def _require_tallies(sketch: Sketch, at: list[int], kind: Kind) -> int:
    """Check the special numbers against the codes; return how many elements are finite."""
    counts = sketch.counts
    _require(0 <= sketch.negative_zero <= sketch.zero and min(sketch.nan, sketch.inf) >= 0)
    zero, positive, infinity, nan, below, negative, last, rest = at
    # A NaN may have the code of an infinity, of which it differs in the lower bits.
    infinite = _sum(counts, infinity, nan) + _sum(counts, last, rest)
    special = infinite + _sum(counts, nan, below) + _sum(counts, rest, len(counts))
    _require(sketch.nan + sketch.inf == special and sketch.inf <= infinite)
    plus_zero, minus_zero = _sum(counts, zero, positive), _sum(counts, below, negative)
    _require(sketch.negative_zero <= minus_zero)
    _require(sketch.zero - sketch.negative_zero <= plus_zero)
    if kind.integer:
        _require(sketch.zero == plus_zero and not (special or minus_zero))
    else:
        _require(sketch.total == 0)
    return sketch.count - special


def _sum(counts: Array, start: int, stop: int) -> int:
    return int(counts[start:stop].sum()) if start < stop else 0


def _require_places(nodes: dict[tuple[int, int], Any], start: int, stop: int) -> None:
    """Check that nodes stand for all leaves of a range, merged as far as they go."""
    first = start // LEAF
    _require(nodes.keys() == set(runs(first, -(-stop // LEAF) - first)))


def _require_extremes(sketch: Sketch, at: list[int], kind: Kind) -> None:
    low, high = sketch.low, sketch.high
    _require(low is not None and high is not None)
    if low is None or high is None:
        return
    kinds = {int} if kind.integer else {int, float}
    _require({type(low), type(high)} <= kinds and math.isfinite(low) and low <= high)
    codes = sketch.codes
    # Codes ascend with the magnitude, and those below zero come last.
    _, _, end, _, below, _, last, _ = at
    least = codes[last - 1] if last > below else codes[0]
    most = codes[end - 1] if end else codes[below]
    sign = 1 << (kind.code_bits - 1)
    for number, expected in ((low, int(least)), (high, int(most))):
        code = _code(number, kind)
        # -0.0 and 0.0 are equal.
        _require(code == expected or {code, expected} == {0, sign})


def _code(number: float, kind: Kind) -> int:
    """Return the code of an element; what its type does not have is an error."""
    if kind.integer:
        bounds = np.iinfo(kind.dtype)
        _require(bounds.min <= number <= bounds.max)
    form = "<f" if kind.code_bits == _SHORT_CODE else "<d"
    data = pack(form, number)
    _require(kind.integer or unpack(form, data) == (number,))
    return int.from_bytes(data, "little") >> (8 * len(data) - kind.code_bits)


def _require_moments(sketch: Sketch, at: list[int], kind: Kind, finite: int) -> None:
    low, high = float(sketch.low or 0), float(sketch.high or 0)
    for node in sketch.tree.nodes.values():
        _require_node(node, low, high)
        _require(node[6] == 0.0 or kind.name == "float64")
    n, upper, lower, m2, m3, m4, exponent = sketch.moments()
    mean = upper + lower
    if kind.integer:
        _require(finite * (sketch.low or 0) <= sketch.total <= finite * (sketch.high or 0))
        _require(abs(sketch.total / finite - mean) <= _SLACK * max(abs(low), abs(high)))
    # The sums of powers of the numbers in the middle of the codes are nearly those of the elements.
    square = mean * mean
    third = m3 + 3 * mean * m2 + mean * square * n
    fourth = m4 + 4 * mean * m3 + 6 * square * m2 + square * square * n
    one, two, three, four = _sums_of_powers(sketch, at, kind, int(exponent))
    tiny = math.ldexp(1.0, (-126 if kind.code_bits == _SHORT_CODE else -1022) - int(exponent))
    _require(not abs(mean * n - one) > _CODE_WIDTH * math.sqrt(n * two) + n * tiny)
    _require(not abs(m2 + square * n - two) > 2 * _CODE_WIDTH * two + n * tiny**2)
    _require(
        not abs(third - three) > 3 * _CODE_WIDTH * math.sqrt(two) * math.sqrt(four) + n * tiny**3
    )
    _require(not abs(fourth - four) > 4 * _CODE_WIDTH * four + n * tiny**4)


def _sums_of_powers(sketch: Sketch, at: list[int], kind: Kind, exponent: int) -> list[float]:
    """Add up powers of the numbers in the middle of the codes; those beyond float64 are NaN."""
    counts = sketch.counts.astype(np.float64)
    if kind.code_bits == _SHORT_CODE:
        sums: list[float] = (counts @ _float32_powers().take(sketch.codes, axis=0)).tolist()
        return sums
    one = kind.middles(sketch.codes)
    if at[4] > at[2] or len(counts) > at[6]:  # there are some that are not finite
        finite = np.r_[: at[2], at[4] : at[6]]
        one, counts = one[finite], counts[finite]
    if exponent:
        one = np.ldexp(one, -exponent)
    two = one * one
    return [float(counts @ powers) for powers in (one, two, one * two, two * two)]


@cache
def _float32_powers() -> Array:
    """Return four powers of the middle of each code, zero for what is not finite."""
    one = kind_named("float32").middles(np.arange(1 << _SHORT_CODE))
    one[~np.isfinite(one)] = 0.0
    return np.stack([one, one**2, one**3, one**4], axis=1)


def _require_node(node: Sequence[float], low: float, high: float) -> None:
    _require(len(node) == 7 and all(type(number) is float for number in node))
    _require(all(map(math.isfinite, node)))
    n, upper, lower, m2, m3, m4, exponent = node
    _require(n >= 0 and n.is_integer() and _is_exponent(exponent))
    if n == 0:
        _require(not any(node))
        return
    low, high = (math.ldexp(end, -int(exponent)) for end in (low, high))
    size, width = max(abs(low), abs(high)), high - low
    slack = _NOISE * size
    _require(low - slack <= upper + lower <= high + slack)
    width += slack
    most = n * width * width
    _require(0 <= m2 <= most and abs(m3) <= most * width and 0 <= m4 <= most * width * width)


def _is_exponent(number: float) -> bool:
    return abs(number) <= _LARGEST_EXPONENT and number % _EXPONENT_STEP == 0


# --- comparisons ---------------------------------------------------------------------------------


def _require_comparison(found: Comparison, reader: Any, stretch: tuple[int, int]) -> None:
    count, equal, finite = found.count, found.equal, found.finite
    special = count - finite
    _require(stretch == (0, count) and count == reader.size and 0 <= finite <= count)
    _require(min(found.nan, found.inf) >= 0 and found.nan + found.inf <= special)
    different = finite - (equal - (special - found.nan - found.inf))
    _require(0 <= different <= finite)
    largest = found.largest
    _require(largest >= 0 and (largest > 0) == (different > 0))
    for place, node in found.tree.nodes.items():
        _require(all(0 <= at < 1 << 60 for at in place) and place[0] < 60)
        _require(all(type(number) is float and math.isfinite(number) for number in node))
        d, a, b, product, exponent = node
        _require(_is_exponent(exponent) and min(d, a, b) >= 0)
        _require(abs(product) <= math.sqrt(a) * math.sqrt(b) * (1 + _SLACK))
        _require(abs((a - product) + (b - product) - d) <= _SLACK * (a + b))
    if not reader.omits_zeros and equal != count:
        _require_places(found.tree.nodes, 0, count)
    if equal == count or not finite:
        return
    d, *_, exponent = found.tree.total()
    _require((d > 0) <= (different > 0))
    try:
        root = math.ldexp(math.sqrt(d), int(exponent))
    except OverflowError:
        return
    # Squares of differences may be too small for float64, or too large.
    if math.isinf(largest):
        _require(root > _LARGEST_DIFFERENCE)
    elif d > _SMALLEST_SQUARE:
        most = largest * math.sqrt(different)
        _require(largest * (1 - _SLACK) <= root <= most * (1 + _SLACK))


# --- finished numbers ----------------------------------------------------------------------------


def are_statistics(
    rows: Array, readers: Sequence[Reader], quantiles: Sequence[float], more: Sequence[str] = ()
) -> Array:
    """Return which rows can be the statistics of these tensors, and the number of dead rows."""
    names = [*statistic_names(quantiles), *more]
    by_name = dict(zip([*names, "dead"], rows.T, strict=True))
    count, nan, inf, zero = (by_name[name] for name in ("count", "nan", "inf", "zero"))
    size = np.array([reader.size for reader in readers], np.float64)
    good: Array = (count == size) & _are_counts(nan, inf, zero) & (nan + inf + zero <= count)
    row = np.array([reader.row for reader in readers], np.float64)
    dead, unique = by_name["dead"], by_name["unique"]
    good &= np.isnan(dead) | (_are_counts(dead) & (dead * row <= zero))
    good &= np.isnan(unique) | (_are_counts(unique) & (unique <= count))
    for name in more:  # numbers of elements, channels and bits
        good &= np.isnan(by_name[name]) | (_are_counts(by_name[name]) & (by_name[name] <= 1 << 62))
    n = count - nan - inf
    most, rms, l2 = (by_name[name] for name in ("absmax", "rms", "l2"))
    empty = np.isnan(most) & np.isnan(rms) & (l2 == 0)
    close = partial(np.isclose, rtol=_SLACK, atol=_TINY)
    slack = _SLACK * most + _TINY
    size_agrees = (most >= 0) & (rms <= most + slack) & close(l2, np.sqrt(n) * rms)
    size_agrees &= (most == 0) == (zero == n)
    low, high, mean, std = (by_name[name] for name in ("min", "max", "mean", "std"))
    real = (low <= high) & (most == np.maximum(np.abs(low), np.abs(high))) & (std >= 0)
    real &= (low - slack <= mean) & (mean <= high + slack)
    real &= close(rms, np.hypot(mean, std)) & ((std == 0) | (low < high))
    ascending = [by_name[f"q{quantile:g}"] for quantile in sorted(quantiles)]
    for before, after in pairwise([low, *ascending, high]):
        real &= before <= after
    magnitude = np.all([np.isnan(by_name[name]) for name in OF_REAL_NUMBERS], axis=0)
    are_complex = np.array([reader.complex for reader in readers], bool)
    kind_agrees = np.where(are_complex, magnitude, real)
    good &= np.where(n > 0, size_agrees & kind_agrees, empty)
    return good


def _are_counts(*numbers: Array) -> Array:
    counts: Array = np.all([(each >= 0) & (each == np.floor(each)) for each in numbers], axis=0)
    return counts


def are_measures(rows: Array, readers: Sequence[Reader]) -> Array:
    """Return which rows can be the measures of a comparison of these pairs."""
    status, count, equal, nan, inf, largest, rmse, relative, cosine, sqnr, nmse = rows.T
    size = np.array([reader.size for reader in readers], np.float64)
    same = (status == 0) & (equal == 1) & (nan + inf + largest + rmse + relative == 0)
    changed = (status == 1) & (equal >= 0) & (equal < 1) & _are_counts(nan, inf)
    changed &= nan + inf <= count * (1 - equal) * (1 + _SLACK) + _SLACK
    ordered = (rmse >= 0) & (rmse <= largest * (1 + _SLACK) + _TINY) & (relative >= 0)
    ordered &= np.isnan(cosine) | (np.abs(cosine) <= 1)
    with np.errstate(divide="ignore"):
        decibels = -20 * np.log10(relative)
    # A ratio of sums that float64 does not hold has decibels all the same.
    ordered &= np.isclose(sqnr, decibels, rtol=_SLACK, atol=_SLACK) | (relative == 0)
    ordered &= np.isclose(nmse, relative**2, rtol=_SLACK, atol=_TINY)
    nothing = np.isnan(rows[:, 5:]).all(axis=1)
    same &= (cosine == 1) & (sqnr == math.inf) & (nmse == 0)
    good: Array = (count == size) & (same | (changed & (ordered | nothing)))
    return good


def are_spans(rows: Array, readers: Sequence[Reader]) -> Array:  # noqa: ARG001  nothing follows
    """Return which rows can be the smallest and largest element and the smallest magnitude."""
    low, high, smallest = rows.T
    finite = np.isfinite(low) & np.isfinite(high) & (low <= high)
    magnitude = (smallest > 0) & ((smallest <= np.maximum(-low, high)) | np.isinf(smallest))
    found: Array = (finite & magnitude) | np.isnan(rows).all(axis=1)
    return found


def are_tallies(rows: Array, readers: Sequence[Reader]) -> Array:
    """Return which rows can be the numbers of elements of these tensors in some bins."""
    size = np.array([reader.size for reader in readers], np.float64)
    good: Array = (rows >= 0).all(axis=1) & (rows.sum(axis=1, dtype=np.float64) <= size)
    return good
