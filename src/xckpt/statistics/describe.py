"""From what was found in a tensor to its statistics; and those of many short rows, from a table.

Sorting a table gives exact quantiles of every element type; rows that are too long for it are
sketched like tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.statistics.kinds import kind_named, kind_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import xarray as xr

    from xckpt.statistics.accumulate import Sketch
    from xckpt.statistics.kinds import Kind

Array = np.ndarray[Any, np.dtype[Any]]

#: Elements of a row that is sorted: 32 MiB as float64.
LONGEST_ROW = 1 << 22

#: What has no meaning for the magnitudes of complex numbers, besides quantiles, distinct values.
OF_REAL_NUMBERS = ("min", "max", "mean", "std", "skew", "kurtosis")

_BEFORE = (
    *("count", "nan", "inf", "zero", "min", "max", "absmax"),
    *("mean", "std", "rms", "l2", "skew", "kurtosis"),
)
# What is left to say where there are no finite elements; the empty sum is zero.
_NOTHING = [math.nan] * 6 + [0.0, math.nan, math.nan]


def statistic_names(quantiles: Sequence[float]) -> list[str]:
    """Name the statistics."""
    return [*_BEFORE, *(f"q{q:g}" for q in quantiles), "unique"]


@dataclass(frozen=True, slots=True)
class Spectrum:
    """The codes of finite elements in ascending order of these, and how often each occurs."""

    kind: Kind
    #: Of a kind that is not exact, zeros have the code -1: they are told apart from all that is
    #: next to them.
    codes: Array
    #: How many elements have each code; perhaps none.
    counts: Array
    #: The smallest and the largest element, of a kind that is not exact.
    low: float
    high: float

    def values(self, where: Any = slice(None)) -> Array:
        """Return elements that codes stand for."""
        kind, codes = self.kind, self.codes[where]
        if kind.exact:
            exact: Array = kind.values[codes]
            return exact
        middle = kind.middles(codes)
        if kind.integer:
            # Up to 255 a code is one integer; beyond, the middle is as good rounded as not.
            middle = np.trunc(middle)
        values: Array = np.where(codes < 0, 0.0, middle).clip(self.low, self.high)
        return values


def spectrum(sketch: Sketch) -> Spectrum:
    """Return the distribution of the finite elements."""
    kind = sketch.kind
    found, counts = sketch.counted()
    if kind.exact:
        values = kind.values[found]
        kept = np.flatnonzero(np.isfinite(values))
        order = kept[np.argsort(values[kept], kind="stable")]
        return Spectrum(kind, found[order].astype(np.int64), counts[order], -math.inf, math.inf)
    if sketch.low is None or sketch.high is None:
        nothing = np.empty(0, np.int64)
        return Spectrum(kind, nothing, nothing, -math.inf, math.inf)
    # Codes ascend with the magnitude, and those with the sign bit come after all others.
    at = found.searchsorted(kind.landmarks).tolist()
    zero, positive, beyond, _, minus_zero, negative, end, _ = at
    tiny = counts[zero:positive] - (sketch.zero - sketch.negative_zero)
    minus_tiny = counts[minus_zero:negative] - sketch.negative_zero
    below, above = counts[negative:end][::-1], counts[positive:beyond]
    ordered = np.concatenate([below, minus_tiny, [sketch.zero], tiny, above])
    codes = np.concatenate([found[minus_zero:end][::-1], [-1], found[zero:beyond]], dtype=np.int64)
    return Spectrum(kind, codes, ordered, float(sketch.low), float(sketch.high))


def rank(count: int, quantile: float) -> int:
    """Return the position of a quantile among sorted elements, as numpy's "nearest" does."""
    return round((count - 1) * quantile)


def describe(sketch: Sketch, quantiles: Sequence[float]) -> list[float]:
    """Compute all statistics of a tensor."""
    found = spectrum(sketch)
    if found.kind.exact:
        head, unique = _exact_head(sketch, found)
    else:
        head, unique = _wide_head(found.kind, sketch), math.nan
    return [*head, *_quantiles(found, quantiles, head[4], head[5]), unique]


def _quantiles(found: Spectrum, quantiles: Sequence[float], low: float, high: float) -> list[float]:
    cumulated = np.cumsum(found.counts)
    if not len(cumulated):
        return [math.nan] * len(quantiles)
    last = int(cumulated[-1]) - 1
    at = [rank(last + 1, q) for q in quantiles]
    values = found.values(np.searchsorted(cumulated, at, side="right")).tolist()
    # The first and the last are known exactly.
    ends = {last: high, 0: low}
    return [ends.get(position, value) for position, value in zip(at, values, strict=True)]


def _exact_head(sketch: Sketch, found: Spectrum) -> tuple[list[float], float]:
    kind = found.kind
    codes, counts = sketch.counted()
    values = found.values()
    # -0.0 and 0.0 are one value, and next to each other.
    unique = int(np.count_nonzero(values[1:] != values[:-1])) + bool(len(values))
    nan = inf = 0
    if len(values) < len(codes):
        every = kind.values[codes]
        nan, inf = int(counts[np.isnan(every)].sum()), int(counts[np.isinf(every)].sum())
        unique += len(np.unique(every[np.isinf(every)]))
    zero = int(found.counts[values == 0].sum())
    head: list[float] = [sketch.count, nan, inf, zero]
    if not len(values):
        return [*head, *_NOTHING], unique
    low, high = float(values[0]), float(values[-1])
    moments = exact_moments(kind, found.codes, found.counts)
    return [*head, low, high, max(abs(low), abs(high)), *moments], unique


def _wide_head(kind: Kind, sketch: Sketch) -> list[float]:
    head: list[float] = [sketch.count, sketch.nan, sketch.inf, sketch.zero]
    n, upper, lower, m2, m3, m4, exponent = sketch.moments()
    if sketch.low is None or sketch.high is None:
        return [*head, *_NOTHING]
    low, high = float(sketch.low), float(sketch.high)
    head += [low, high, max(abs(low), abs(high))]
    scale = int(exponent)
    mean, variance = upper + lower, m2 / n
    if sketch.low == sketch.high:
        variance = 0.0
    rms = math.hypot(mean, math.sqrt(variance))
    skew = kurtosis = math.nan
    if variance * variance > 0.0:
        skew, kurtosis = m3 / n / variance**1.5, m4 / n / variance**2 - 3.0
    l2 = scaled(math.sqrt(n) * rms, scale)
    mean = sketch.total / sketch.count if kind.integer else scaled(mean, scale)
    std = scaled(math.sqrt(variance), scale)
    return [*head, mean, std, scaled(rms, scale), l2, skew, kurtosis]


def scaled(value: float, exponent: int) -> float:
    """Return a number times a power of two, which may be infinite."""
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.copysign(math.inf, value)


# --- exact moments -------------------------------------------------------------------------------


def exact_moments(kind: Kind, codes: Array, counts: Array) -> list[float]:
    """Return mean, std, rms, l2, skew and kurtosis of counted values, each rounded only once."""
    n = int(counts.sum())
    (s1, s2, s3, s4), unit = _power_sums(kind, codes, counts)
    # The variance times the square of the count, and so on, as integers.
    second = n * s2 - s1**2
    skew = kurtosis = math.nan
    if second:
        third = n * n * s3 - 3 * n * s1 * s2 + 2 * s1**3
        skew = math.copysign(_root(third * third, second**3, 0), third)
        fourth = n**3 * s4 - 4 * n * n * s1 * s3 + 6 * n * s1 * s1 * s2 - 3 * s1**4
        kurtosis = _quotient(fourth - 3 * second**2, second**2, 0)
    mean, std = _quotient(s1, n, unit), _root(second, n**2, unit)
    return [mean, std, _root(s2, n, unit), _root(s2, 1, unit), skew, kurtosis]


def _power_sums(kind: Kind, codes: Array, counts: Array) -> tuple[list[int], int]:
    """Add up four powers of integers which times two to the power that is given are the values."""
    significands, exponents = _integers(kind.name)
    exponent = exponents[codes]
    # Values ascend: those with one exponent are next to each other.
    starts = np.append(0, np.flatnonzero(exponent[1:] != exponent[:-1]) + 1)
    unit = int(exponent.min())
    shifts = (exponent[starts] - unit).tolist()
    values = significands[codes]
    largest, square = int(np.abs(values).max()), values * values
    sums = []
    # Where they leave the range of int64, `_grouped` makes its own.
    for power, powers in enumerate((values, square, square * values, square * square), 1):
        room = 63 - (largest**power).bit_length() - len(values).bit_length()
        if room < 8:
            powers = values.astype(object) ** power  # noqa: PLW2901
        totals = _grouped(powers, counts, room, starts)
        sums.append(sum([t << (power * shift) for t, shift in zip(totals, shifts, strict=True)]))
    return sums, unit


def _grouped(powers: Array, counts: Array, room: int, starts: Array) -> list[int]:
    """Add up ``counts * powers`` for each group, exactly; `room` is for so many bits of counts."""
    if powers.dtype == object:
        return [int(total) for total in np.add.reduceat(powers * counts.astype(object), starts)]
    bits = int(counts.max()).bit_length()
    if bits <= room:
        found: list[int] = np.add.reduceat(powers * counts, starts).tolist()
        return found
    totals = [0] * len(starts)
    for low in range(0, bits, room):
        digits = (counts >> low) & ((1 << room) - 1)
        found = np.add.reduceat(powers * digits, starts).tolist()
        totals = [total + (each << low) for total, each in zip(totals, found, strict=True)]
    return totals


@cache
def _integers(name: str) -> tuple[Array, Array]:
    """Write each value as an integer times a power of two; zero where it is not finite."""
    values = kind_named(name).values
    values = np.where(np.isfinite(values), values, 0.0)
    if (values == np.rint(values)).all() and np.abs(values).max() <= 1 << 16:
        return values.astype(np.int64), np.zeros(values.size, np.int64)
    fractions, exponents = np.frexp(values)
    digits = 1
    while (fractions * 2.0**digits % 1).any():
        digits += 1
    return (fractions * 2.0**digits).astype(np.int64), exponents.astype(np.int64) - digits


def _quotient(numerator: int, denominator: int, exponent: int) -> float:
    """Return ``numerator / denominator * 2**exponent``, rounded once."""
    if exponent < 0:
        return numerator / (denominator << -exponent)
    return (numerator << exponent) / denominator


def _root(numerator: int, denominator: int, exponent: int) -> float:
    """Return ``sqrt(numerator / denominator) * 2**exponent``, rounded once."""
    if numerator == 0:
        return 0.0
    # So many bits that the quotient has 128, its root 64, and a last one for what is cut off.
    shift = (128 - numerator.bit_length() + denominator.bit_length() + 1) // 2
    if shift >= 0:
        numerator <<= 2 * shift
    else:
        denominator <<= -2 * shift
    quotient, left = divmod(numerator, denominator)
    root = math.isqrt(quotient)
    sticky = left != 0 or root * root != quotient
    return math.ldexp(float(root << 1 | sticky), exponent - shift - 1)


# --- rows of a table -----------------------------------------------------------------------------


def describe_rows(
    variable: xr.Variable, kept: tuple[Hashable, ...], quantiles: Sequence[float]
) -> Array:
    """Describe a variable along all dimensions but some."""
    shape = tuple(variable.sizes[dim] for dim in kept)
    rows = variable.transpose(*kept, ...)
    length = prod(rows.shape[len(kept) :])
    step = max(1, LONGEST_ROW // max(1, length))
    found = [describe_table(_values(rows, slab, length), quantiles) for slab in _slabs(shape, step)]
    whole = np.concatenate(found, axis=1) if found else describe_table(np.empty((0, 0)), quantiles)
    stored = np.dtype(variable.encoding.get("stored_dtype", variable.dtype))
    kind = kind_of(stored) or kind_of(variable.dtype)
    if kind is None or not kind.exact:
        whole[-1] = np.nan  # distinct values are counted of small types only
    return whole.reshape(len(whole), *shape)


def _slabs(shape: tuple[int, ...], step: int) -> list[tuple[Any, ...]]:
    """Cut kept dimensions into boxes of about `step` positions, in C order."""
    if not shape:
        return [()]
    inner = prod(shape[1:])
    if inner > step and len(shape) > 1:
        return [(i, *rest) for i in range(shape[0]) for rest in _slabs(shape[1:], step)]
    rows = max(1, step // max(1, inner))
    return [(slice(start, start + rows),) for start in range(0, shape[0], rows)]


def _values(rows: xr.Variable, slab: tuple[Any, ...], length: int) -> Array:
    values = rows[slab].values
    if values.dtype.kind == "c":
        values = np.abs(values)
    with np.errstate(invalid="ignore"):  # signalling NaN
        wide: Array = values.astype(np.float64)
    count = wide.size // length if length else prod(wide.shape[: len(slab)])
    return wide.reshape(count, length)


def describe_table(table: Array, quantiles: Sequence[float]) -> Array:
    """Describe each row of a table."""
    finite = np.isfinite(table)
    n = finite.sum(axis=1)
    size = np.full(len(table), table.shape[1], np.float64)
    nan, inf = np.isnan(table).sum(axis=1), np.isinf(table).sum(axis=1)
    zero = (table == 0).sum(axis=1)
    ordered = np.sort(np.where(finite, table, np.nan), axis=1)
    low, high = _at(ordered, np.zeros_like(n), n), _at(ordered, n - 1, n)
    chosen = [_at(ordered, np.rint((n - 1) * q).astype(np.int64), n) for q in quantiles]
    mean, std, skew, kurtosis = _moments(table, finite, n, low, high)
    rms = np.hypot(mean, std)
    l2 = np.where(n > 0, np.sqrt(n) * rms, 0.0)
    distinct = (ordered[:, 1:] > ordered[:, :-1]).sum(axis=1) + (n > 0)
    for infinity in (np.inf, -np.inf):
        distinct = distinct + (table == infinity).any(axis=1)
    head = [size, nan, inf, zero, low, high, np.maximum(np.abs(low), np.abs(high))]
    return np.array([*head, mean, std, rms, l2, skew, kurtosis, *chosen, distinct], np.float64)


def _at(ordered: Array, where: Array, n: Array) -> Array:
    if not ordered.shape[1]:
        return np.full(len(ordered), np.nan)
    found = np.take_along_axis(ordered, np.maximum(where, 0)[:, None], axis=1)[:, 0]
    return np.where(n > 0, found, np.nan)


def _moments(table: Array, finite: Array, n: Array, low: Array, high: Array) -> list[Array]:
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        center = np.where(finite, table, 0.0).sum(axis=1) / n
        center = np.where(low == high, low, center)
        d = np.where(finite, table - center[:, None], 0.0)
        m = d.sum(axis=1) / n
        d = np.where(finite, d - m[:, None], 0.0)
        m2, m3, m4 = ((d**power).sum(axis=1) / n for power in (2, 3, 4))
        m2 = np.where(low == high, 0.0, m2)
        skew = np.where(m2 > 0, m3 / m2**1.5, np.nan)
        kurtosis = np.where(m2 > 0, m4 / m2**2 - 3.0, np.nan)
        return [center + m, np.sqrt(m2), skew, kurtosis]
