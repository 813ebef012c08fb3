"""Statistics of tensors, computed from their sketches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.scan.kinds import kind_named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.scan.kinds import Kind
    from xckpt.statistics.counts import Sketch

Array = np.ndarray[Any, np.dtype[Any]]

#: Statistics that the magnitudes of complex numbers lack, besides quantiles and distinct values.
OF_REAL_NUMBERS = ("min", "max", "mean", "std", "skew", "kurtosis")

_FIXED_NAMES = (
    *("count", "nan", "inf", "zero", "min", "max", "absmax"),
    *("mean", "std", "rms", "l2", "skew", "kurtosis"),
)
# Zero without finite elements, as an empty sum; other statistics of values are NaN then.
_L2 = _FIXED_NAMES.index("l2")


def statistic_names(quantiles: Sequence[float]) -> list[str]:
    """List the names of the statistics, in the order of the columns of `describe_all`."""
    return [*_FIXED_NAMES, *(f"q{q:g}" for q in quantiles), "unique"]


@dataclass(frozen=True, slots=True)
class Spectrum:
    """Codes of the finite elements, in ascending order of the elements, and their counts."""

    kind: Kind
    #: In a kind that is not exact, zeros have the code -1, because tiny elements share their code.
    codes: Array
    #: Number of elements with each code; may be zero.
    counts: Array
    #: The smallest and the largest element; infinite if the kind is exact.
    low: float
    high: float

    def values(self, where: Any = slice(None)) -> Array:
        """Return the elements that codes represent, rounded unless the kind is exact."""
        kind, codes = self.kind, self.codes[where]
        if kind.exact:
            exact: Array = kind.values[codes]
            return exact
        middle = kind.middles(codes)
        if kind.integer:
            # Codes up to 255 are single integers. Beyond, rounding the middle costs no accuracy.
            middle = np.trunc(middle)
        values: Array = np.where(codes < 0, 0.0, middle).clip(self.low, self.high)
        return values


def spectrum(sketch: Sketch) -> Spectrum:
    """Return the distribution of the finite elements."""
    kind = sketch.kind
    all_codes, counts = sketch.counted()
    if kind.exact:
        values = kind.values[all_codes]
        finite = np.flatnonzero(np.isfinite(values))
        order = finite[np.argsort(values[finite], kind="stable")]
        return Spectrum(kind, all_codes[order].astype(np.int64), counts[order], -math.inf, math.inf)
    if sketch.low is None or sketch.high is None:
        no_codes = np.empty(0, np.int64)
        return Spectrum(kind, no_codes, no_codes, -math.inf, math.inf)
    # Codes ascend with the magnitude; codes with the sign bit come last.
    bounds = all_codes.searchsorted(kind.landmarks).tolist()
    zero, positive, beyond, _, minus_zero, negative, end, _ = bounds
    tiny = counts[zero:positive] - (sketch.zero - sketch.negative_zero)
    minus_tiny = counts[minus_zero:negative] - sketch.negative_zero
    below, above = counts[negative:end][::-1], counts[positive:beyond]
    ordered = np.concatenate([below, minus_tiny, [sketch.zero], tiny, above])
    codes = np.concatenate(
        [all_codes[minus_zero:end][::-1], [-1], all_codes[zero:beyond]], dtype=np.int64
    )
    return Spectrum(kind, codes, ordered, float(sketch.low), float(sketch.high))


def rank(count: int, quantile: float) -> int:
    """Return the position of a quantile among sorted elements, like numpy's "nearest" method."""
    return round((count - 1) * quantile)


def describe(sketch: Sketch, quantiles: Sequence[float]) -> list[float]:
    """Compute all statistics of a tensor, in the order of `statistic_names`."""
    row: list[float] = describe_all([sketch], quantiles)[0].tolist()
    return row


def describe_all(sketches: Sequence[Sketch], quantiles: Sequence[float]) -> Array:
    """Return a row of statistics for each tensor; each kind is computed in one go."""
    table = np.full((len(sketches), len(_FIXED_NAMES) + len(quantiles) + 1), math.nan)
    groups: dict[str, list[int]] = {}
    elements: dict[str, int] = {}
    for number, sketch in enumerate(sketches):
        name = sketch.kind.name
        elements[name] = elements.get(name, 0) + sketch.count
        if elements[name] >> 62:  # sums over the group would overflow int64
            name = f"{name} {number}"
        groups.setdefault(name, []).append(number)
    levels = np.array(quantiles, np.float64)
    with np.errstate(all="ignore"):
        for numbers in groups.values():
            group = [sketches[number] for number in numbers]
            describe_group = _describe_exact if group[0].kind.exact else _describe_wide
            rows = np.full((len(group), table.shape[1]), math.nan)
            describe_group(rows, group, levels)
            table[numbers] = rows
    return table


class _Pool:
    """Codes and counts of several tensors of the same kind, concatenated."""

    def __init__(self, sketches: Sequence[Sketch]) -> None:
        counted = [sketch.counted() for sketch in sketches]
        lengths = [len(codes) for codes, _ in counted]
        self.codes = np.concatenate([codes for codes, _ in counted], dtype=np.int64)
        self.counts = np.concatenate([counts for _, counts in counted])
        #: Position of the tensor that each code belongs to.
        self.owner = np.repeat(np.arange(len(sketches)), lengths)
        self.ends = np.append(0, np.cumsum(lengths))

    def sums(self, numbers: Array) -> Array:
        """Return the sum for each tensor of numbers that belong to its codes."""
        total = np.append(0, np.cumsum(numbers))
        tensor_sums: Array = total[self.ends[1:]] - total[self.ends[:-1]]
        return tensor_sums


def _ranks(count: Array, quantiles: Array) -> Array:
    """Return the positions of quantiles; see `rank`."""
    ranks: Array = np.rint(np.multiply.outer(count - 1, quantiles)).astype(np.int64)
    return ranks


def _replace_ends(values: Array, ranks: Array, last_rank: Array, low: Array, high: Array) -> Array:
    """Replace quantiles that are the first or the last element, which are known exactly."""
    values = np.where(ranks == last_rank[:, None], high[:, None], values)
    return np.where(ranks == 0, low[:, None], values)


def _describe_wide(rows: Array, sketches: Sequence[Sketch], quantiles: Array) -> None:
    kind = sketches[0].kind
    rows[:, :4] = [(sketch.count, sketch.nan, sketch.inf, sketch.zero) for sketch in sketches]
    rows[:, _L2] = 0.0
    positions = [position for position, sketch in enumerate(sketches) if sketch.low is not None]
    if not positions:
        return
    sketches = [sketches[position] for position in positions]
    moments = np.array([sketch.moments() for sketch in sketches]).T
    n, upper, lower, m2, m3, m4, exponent = moments
    scale = exponent.astype(np.int32)
    low, high = np.array([(sketch.low, sketch.high) for sketch in sketches], np.float64).T
    mean, variance = upper + lower, m2 / n
    variance[[sketch.low == sketch.high for sketch in sketches]] = 0.0
    std = np.sqrt(variance)
    # As the C library computes them; numpy rounds some results differently.
    rms = np.array(list(map(math.hypot, mean.tolist(), std.tolist())))
    cubes, squares = np.array([(v**1.5, v**2) for v in variance.tolist()]).T
    is_spread = variance * variance > 0.0
    skew = np.where(is_spread, m3 / n / cubes, math.nan)
    kurtosis = np.where(is_spread, m4 / n / squares - 3.0, math.nan)
    l2 = np.ldexp(np.sqrt(n) * rms, scale)
    mean = np.ldexp(mean, scale)
    if kind.integer:
        mean = np.array([sketch.total / sketch.count for sketch in sketches])
    absmax = np.maximum(np.abs(low), np.abs(high))
    std, rms = np.ldexp(std, scale), np.ldexp(rms, scale)
    statistics = (low, high, absmax, mean, std, rms, l2, skew, kurtosis)
    rows[positions, 4 : len(_FIXED_NAMES)] = np.stack(statistics, axis=1)
    if len(quantiles):
        rows[positions, len(_FIXED_NAMES) : -1] = _wide_quantiles(sketches, low, high, quantiles)


def _wide_quantiles(sketches: Sequence[Sketch], low: Array, high: Array, quantiles: Array) -> Array:
    """Return quantiles as `spectrum` orders the elements, without sorting the codes."""
    kind, pool = sketches[0].kind, _Pool(sketches)
    # Codes ascend with the magnitude; codes with the sign bit come last.
    keys = pool.owner << kind.code_bits | pool.codes
    prefixes = np.arange(len(sketches))[:, None] << kind.code_bits
    bounds = keys.searchsorted(prefixes | kind.landmarks)
    total = np.append(0, np.cumsum(pool.counts))
    zero, positive, beyond, _, minus_zero, negative, end, _ = total[bounds].T
    zeros, minus_zeros = np.array([(sketch.zero, sketch.negative_zero) for sketch in sketches]).T
    # Ranks at which the regions end: negative, tiny negative with the code of zero, zero, tiny
    # positive with the code of zero.
    below = end - negative
    tiny_below = below + (negative - minus_zero) - minus_zeros
    to_zero = tiny_below + zeros
    tiny_above = to_zero + (positive - zero) - (zeros - minus_zeros)
    count = tiny_above + (beyond - positive)
    ranks = _ranks(count, quantiles)
    ends = [end_rank[:, None] for end_rank in (below, tiny_below, to_zero, tiny_above)]
    region = sum(ranks >= end_rank for end_rank in ends)
    places = np.where(
        region == 0,
        total.searchsorted(end[:, None] - ranks) - 1,
        total.searchsorted(positive[:, None] + ranks - ends[3], side="right") - 1,
    )
    codes = pool.codes[places.clip(0, len(pool.codes) - 1)]
    sign = 1 << (kind.code_bits - 1)
    codes = np.where(region == 1, sign, np.where(region == 3, 0, codes))
    values = kind.middles(codes)
    if kind.integer:
        # Codes up to 255 are single integers. Beyond, rounding the middle costs no accuracy.
        values = np.trunc(values)
    # Zeros are positive, whatever the sign of an extreme that is zero.
    values = np.where(region == 2, 0.0, values.clip(low[:, None], high[:, None]))
    return _replace_ends(values, ranks, count - 1, low, high)


def _describe_exact(rows: Array, sketches: Sequence[Sketch], quantiles: Array) -> None:
    kind, pool = sketches[0].kind, _Pool(sketches)
    values, counts = kind.values[pool.codes], pool.counts
    rows[:, 0] = [sketch.count for sketch in sketches]
    is_finite, is_infinite = np.isfinite(values), np.isinf(values)
    is_zero = values == 0
    for column, mask in ((1, np.isnan(values)), (2, is_infinite), (3, is_zero)):
        rows[:, column] = pool.sums(np.where(mask, counts, 0))
    rows[:, _L2] = 0.0
    unique = pool.sums(is_infinite)
    # Sort by tensor and value; equal values stay in the order of their codes.
    order = np.flatnonzero(is_finite)
    keys = pool.owner[order] << kind.code_bits | _order(kind.name)[pool.codes[order]]
    order = order[np.argsort(keys)]
    codes, counts, values, owner = (
        part[order] for part in (pool.codes, counts, values, pool.owner)
    )
    owners, first, size = np.unique(owner, return_index=True, return_counts=True)
    unique += np.bincount(owners, minlength=len(rows))
    is_next = (owner[1:] == owner[:-1]) & (values[1:] != values[:-1])
    unique += np.bincount(owner[1:][is_next], minlength=len(rows))
    rows[:, -1] = unique
    if not len(owners):
        return
    low, high = values[first], values[first + size - 1]
    rows[owners, 4:7] = np.stack([low, high, np.maximum(np.abs(low), np.abs(high))], axis=1)
    rows[owners, 7 : len(_FIXED_NAMES)] = exact_moments(kind, codes, counts, first)
    total = np.append(0, np.cumsum(counts))
    before = total[first]
    count = total[first + size] - before
    targets = _ranks(count, quantiles)
    places = total.searchsorted(before[:, None] + targets, side="right") - 1
    quantile_values = values[places]
    rows[owners, len(_FIXED_NAMES) : -1] = _replace_ends(
        quantile_values, targets, count - 1, low, high
    )


@cache
def _order(name: str) -> Array:
    """Return the position of each code of an exact kind when sorted by value."""
    values = kind_named(name).values
    order = np.empty(len(values), np.int64)
    order[np.argsort(values, kind="stable")] = np.arange(len(values))
    return order


def scaled(value: float, exponent: int) -> float:
    """Return ``value * 2**exponent``; infinity if it is out of range."""
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.copysign(math.inf, value)


# --- exact moments -------------------------------------------------------------------------------


def exact_moments(kind: Kind, codes: Array, counts: Array, first: Array) -> list[list[float]]:
    """Return mean, std, rms, l2, skew and kurtosis for each tensor, each rounded only once.

    `codes` has the codes of all tensors one after another, each in ascending order of the values;
    `first` has the position where each tensor begins.
    """
    moments = []
    total = np.append(0, np.cumsum(counts))
    sizes = (total[np.append(first[1:], len(counts))] - total[first]).tolist()
    for n, (s1, s2, s3, s4), unit in zip(
        sizes, *_power_sums(kind, codes, counts, first), strict=True
    ):
        # Central moments as integers: the variance times n**2, and likewise for n**3 and n**4.
        second = n * s2 - s1**2
        skew = kurtosis = math.nan
        if second:
            third = n * n * s3 - 3 * n * s1 * s2 + 2 * s1**3
            skew = math.copysign(_root(third * third, second**3, 0), third)
            fourth = n**3 * s4 - 4 * n * n * s1 * s3 + 6 * n * s1 * s1 * s2 - 3 * s1**4
            kurtosis = _quotient(fourth - 3 * second**2, second**2, 0)
        mean, std = _quotient(s1, n, unit), _root(second, n**2, unit)
        moments.append([mean, std, _root(s2, n, unit), _root(s2, 1, unit), skew, kurtosis])
    return moments


def _power_sums(
    kind: Kind, codes: Array, counts: Array, first: Array
) -> tuple[list[list[int]], list[int]]:
    """Return the sums of the first four powers of the values, in units of powers of two.

    The first list has four integers for each tensor, the second the exponent of its unit: the
    values of a tensor are integers times ``2**exponent``.
    """
    significands, exponents = _integers(kind.name)
    exponent = exponents[codes]
    # Values ascend, so they form runs with the same exponent.
    starts = np.union1d(first, np.flatnonzero(exponent[1:] != exponent[:-1]) + 1)
    units = np.minimum.reduceat(exponent, first)
    groups = np.searchsorted(starts, np.append(first, len(codes)))
    shifts = (exponent[starts] - np.repeat(units, np.diff(groups))).tolist()
    values = significands[codes]
    largest, square = int(np.abs(values).max()), values * values
    longest = int(np.diff(np.append(starts, len(codes))).max())
    sums: list[list[int]] = [[] for _ in first]
    # Powers beyond int64 become Python integers.
    for power, powers in enumerate((values, square, square * values, square * square), 1):
        room = 63 - (largest**power).bit_length() - longest.bit_length()
        if room < 8:
            powers = values.astype(object) ** power  # noqa: PLW2901
        totals = _group_sums(powers, counts, room, starts)
        shifted = [
            group_total << (power * shift)
            for group_total, shift in zip(totals, shifts, strict=True)
        ]
        for tensor_sums, (start, stop) in zip(sums, pairwise(groups.tolist()), strict=True):
            tensor_sums.append(sum(shifted[start:stop]))
    return sums, units.tolist()


def _group_sums(powers: Array, counts: Array, free_bits: int, starts: Array) -> list[int]:
    """Return the exact sum of ``counts * powers`` for each group.

    An int64 sum has `free_bits` bits left for the counts.
    """
    if powers.dtype == object:
        return [int(total) for total in np.add.reduceat(powers * counts.astype(object), starts)]
    bits = int(counts.max()).bit_length()
    if bits <= free_bits:
        parts: list[int] = np.add.reduceat(powers * counts, starts).tolist()
        return parts
    totals = [0] * len(starts)
    for low in range(0, bits, free_bits):
        digits = (counts >> low) & ((1 << free_bits) - 1)
        parts = np.add.reduceat(powers * digits, starts).tolist()
        totals = [total + (part << low) for total, part in zip(totals, parts, strict=True)]
    return totals


@cache
def _integers(name: str) -> tuple[Array, Array]:
    """Return the significand and exponent of each value, as integers; zero if it is not finite."""
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
    # Scale the quotient to 128 bits, so that the root has 64, plus a sticky bit for the remainder.
    shift = (128 - numerator.bit_length() + denominator.bit_length() + 1) // 2
    if shift >= 0:
        numerator <<= 2 * shift
    else:
        denominator <<= -2 * shift
    quotient, remainder = divmod(numerator, denominator)
    root = math.isqrt(quotient)
    sticky = remainder != 0 or root * root != quotient
    return math.ldexp(float(root << 1 | sticky), exponent - shift - 1)
