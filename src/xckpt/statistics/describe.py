"""From the sketches of tensors to their statistics."""

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

_BEFORE = (
    *("count", "nan", "inf", "zero", "min", "max", "absmax"),
    *("mean", "std", "rms", "l2", "skew", "kurtosis"),
)
# Where there are no finite elements all else is NaN; the empty sum is zero.
_L2 = _BEFORE.index("l2")


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
    found: list[float] = describe_all([sketch], quantiles)[0].tolist()
    return found


def describe_all(sketches: Sequence[Sketch], quantiles: Sequence[float]) -> Array:
    """Compute all statistics of each tensor, of all tensors of a kind at once."""
    found = np.full((len(sketches), len(_BEFORE) + len(quantiles) + 1), math.nan)
    groups: dict[str, list[int]] = {}
    elements: dict[str, int] = {}
    for number, sketch in enumerate(sketches):
        name = sketch.kind.name
        elements[name] = elements.get(name, 0) + sketch.count
        if elements[name] >> 62:  # more than can be counted together
            name = f"{name} {number}"
        groups.setdefault(name, []).append(number)
    wanted = np.array(quantiles, np.float64)
    with np.errstate(all="ignore"):
        for numbers in groups.values():
            some = [sketches[number] for number in numbers]
            describe_some = _describe_exact if some[0].kind.exact else _describe_wide
            rows = np.full((len(some), found.shape[1]), math.nan)
            describe_some(rows, some, wanted)
            found[numbers] = rows
    return found


class _Counted:
    """The codes and counts of several tensors of a kind, one after another."""

    def __init__(self, sketches: Sequence[Sketch]) -> None:
        counted = [sketch.counted() for sketch in sketches]
        lengths = [len(codes) for codes, _ in counted]
        self.codes = np.concatenate([codes for codes, _ in counted], dtype=np.int64)
        self.counts = np.concatenate([counts for _, counts in counted])
        #: The number of the tensor that each code is of.
        self.owner = np.repeat(np.arange(len(sketches)), lengths)
        self.ends = np.append(0, np.cumsum(lengths))

    def sums(self, numbers: Array) -> Array:
        """Add up numbers of the codes of each tensor."""
        total = np.append(0, np.cumsum(numbers))
        found: Array = total[self.ends[1:]] - total[self.ends[:-1]]
        return found


def _ranks(count: Array, quantiles: Array) -> Array:
    """Return the positions of quantiles; see `rank`."""
    ranks: Array = np.rint(np.multiply.outer(count - 1, quantiles)).astype(np.int64)
    return ranks


def _with_ends(values: Array, at: Array, last: Array, low: Array, high: Array) -> Array:
    """Put the first and the last element in their places, as they are known exactly."""
    values = np.where(at == last[:, None], high[:, None], values)
    return np.where(at == 0, low[:, None], values)


def _describe_wide(rows: Array, sketches: Sequence[Sketch], quantiles: Array) -> None:
    kind = sketches[0].kind
    rows[:, :4] = [(each.count, each.nan, each.inf, each.zero) for each in sketches]
    rows[:, _L2] = 0.0
    there = [at for at, each in enumerate(sketches) if each.low is not None]
    if not there:
        return
    sketches = [sketches[at] for at in there]
    moments = np.array([each.moments() for each in sketches]).T
    n, upper, lower, m2, m3, m4, exponent = moments
    scale = exponent.astype(np.int32)
    low, high = np.array([(each.low, each.high) for each in sketches], np.float64).T
    mean, variance = upper + lower, m2 / n
    variance[[each.low == each.high for each in sketches]] = 0.0
    std = np.sqrt(variance)
    # As the C library computes them, which is not always as numpy does.
    rms = np.array(list(map(math.hypot, mean.tolist(), std.tolist())))
    cubes, squares = np.array([(v**1.5, v**2) for v in variance.tolist()]).T
    is_spread = variance * variance > 0.0
    skew = np.where(is_spread, m3 / n / cubes, math.nan)
    kurtosis = np.where(is_spread, m4 / n / squares - 3.0, math.nan)
    l2 = np.ldexp(np.sqrt(n) * rms, scale)
    mean = np.ldexp(mean, scale)
    if kind.integer:
        mean = np.array([each.total / each.count for each in sketches])
    most = np.maximum(np.abs(low), np.abs(high))
    std, rms = np.ldexp(std, scale), np.ldexp(rms, scale)
    found = (low, high, most, mean, std, rms, l2, skew, kurtosis)
    rows[there, 4 : len(_BEFORE)] = np.stack(found, axis=1)
    if len(quantiles):
        rows[there, len(_BEFORE) : -1] = _wide_quantiles(sketches, low, high, quantiles)


def _wide_quantiles(sketches: Sequence[Sketch], low: Array, high: Array, quantiles: Array) -> Array:
    """Find quantiles as in `spectrum`, without bringing all codes in order."""
    kind, every = sketches[0].kind, _Counted(sketches)
    # Codes ascend with the magnitude, and those with the sign bit come after all others.
    keys = every.owner << kind.code_bits | every.codes
    own = np.arange(len(sketches))[:, None] << kind.code_bits
    at = keys.searchsorted(own | kind.landmarks)
    total = np.append(0, np.cumsum(every.counts))
    zero, positive, beyond, _, minus_zero, negative, end, _ = total[at].T
    zeros, minus_zeros = np.array([(each.zero, each.negative_zero) for each in sketches]).T
    # Where negative numbers end, tiny ones with the code of a zero, zeros, tiny ones above.
    below = end - negative
    tiny_below = below + (negative - minus_zero) - minus_zeros
    to_zero = tiny_below + zeros
    tiny_above = to_zero + (positive - zero) - (zeros - minus_zeros)
    count = tiny_above + (beyond - positive)
    wanted = _ranks(count, quantiles)
    ends = [each[:, None] for each in (below, tiny_below, to_zero, tiny_above)]
    region = sum(wanted >= each for each in ends)
    places = np.where(
        region == 0,
        total.searchsorted(end[:, None] - wanted) - 1,
        total.searchsorted(positive[:, None] + wanted - ends[3], side="right") - 1,
    )
    codes = every.codes[places.clip(0, len(every.codes) - 1)]
    sign = 1 << (kind.code_bits - 1)
    codes = np.where(region == 1, sign, np.where(region == 3, 0, codes))
    values = kind.middles(codes)
    if kind.integer:
        # Up to 255 a code is one integer; beyond, the middle is as good rounded as not.
        values = np.trunc(values)
    # Zeros have no sign, whatever that of an extreme is.
    values = np.where(region == 2, 0.0, values.clip(low[:, None], high[:, None]))
    return _with_ends(values, wanted, count - 1, low, high)


def _describe_exact(rows: Array, sketches: Sequence[Sketch], quantiles: Array) -> None:
    kind, every = sketches[0].kind, _Counted(sketches)
    values, counts = kind.values[every.codes], every.counts
    rows[:, 0] = [each.count for each in sketches]
    is_finite, is_infinite = np.isfinite(values), np.isinf(values)
    kinds_of_zero = values == 0
    for column, which in ((1, np.isnan(values)), (2, is_infinite), (3, kinds_of_zero)):
        rows[:, column] = every.sums(np.where(which, counts, 0))
    rows[:, _L2] = 0.0
    unique = every.sums(is_infinite)
    # In ascending order, numbers that are equal in that of their codes.
    order = np.flatnonzero(is_finite)
    ranks = every.owner[order] << kind.code_bits | _order(kind.name)[every.codes[order]]
    order = order[np.argsort(ranks)]
    codes, counts, values, owner = (
        each[order] for each in (every.codes, counts, values, every.owner)
    )
    found, first, size = np.unique(owner, return_index=True, return_counts=True)
    unique += np.bincount(found, minlength=len(rows))
    is_next = (owner[1:] == owner[:-1]) & (values[1:] != values[:-1])
    unique += np.bincount(owner[1:][is_next], minlength=len(rows))
    rows[:, -1] = unique
    if not len(found):
        return
    low, high = values[first], values[first + size - 1]
    rows[found, 4:7] = np.stack([low, high, np.maximum(np.abs(low), np.abs(high))], axis=1)
    rows[found, 7 : len(_BEFORE)] = exact_moments(kind, codes, counts, first)
    total = np.append(0, np.cumsum(counts))
    before = total[first]
    count = total[first + size] - before
    wanted = _ranks(count, quantiles)
    places = total.searchsorted(before[:, None] + wanted, side="right") - 1
    among = values[places]
    rows[found, len(_BEFORE) : -1] = _with_ends(among, wanted, count - 1, low, high)


@cache
def _order(name: str) -> Array:
    """Return the place of each code among all of an exact kind in ascending order."""
    values = kind_named(name).values
    order = np.empty(len(values), np.int64)
    order[np.argsort(values, kind="stable")] = np.arange(len(values))
    return order


def scaled(value: float, exponent: int) -> float:
    """Return a number times a power of two, which may be infinite."""
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.copysign(math.inf, value)


# --- exact moments -------------------------------------------------------------------------------


def exact_moments(kind: Kind, codes: Array, counts: Array, first: Array) -> list[list[float]]:
    """Return mean, std, rms, l2, skew and kurtosis of counted values, each rounded only once.

    Those of several tensors follow each other, in ascending order: `first` is where they begin.
    """
    found = []
    total = np.append(0, np.cumsum(counts))
    sizes = (total[np.append(first[1:], len(counts))] - total[first]).tolist()
    for n, (s1, s2, s3, s4), unit in zip(
        sizes, *_power_sums(kind, codes, counts, first), strict=True
    ):
        # The variance times the square of the count, and so on, as integers.
        second = n * s2 - s1**2
        skew = kurtosis = math.nan
        if second:
            third = n * n * s3 - 3 * n * s1 * s2 + 2 * s1**3
            skew = math.copysign(_root(third * third, second**3, 0), third)
            fourth = n**3 * s4 - 4 * n * n * s1 * s3 + 6 * n * s1 * s1 * s2 - 3 * s1**4
            kurtosis = _quotient(fourth - 3 * second**2, second**2, 0)
        mean, std = _quotient(s1, n, unit), _root(second, n**2, unit)
        found.append([mean, std, _root(s2, n, unit), _root(s2, 1, unit), skew, kurtosis])
    return found


def _power_sums(
    kind: Kind, codes: Array, counts: Array, first: Array
) -> tuple[list[list[int]], list[int]]:
    """Add up four powers of integers which times two to the power that is given are the values."""
    significands, exponents = _integers(kind.name)
    exponent = exponents[codes]
    # Values ascend: those with one exponent are next to each other.
    starts = np.union1d(first, np.flatnonzero(exponent[1:] != exponent[:-1]) + 1)
    units = np.minimum.reduceat(exponent, first)
    groups = np.searchsorted(starts, np.append(first, len(codes)))
    shifts = (exponent[starts] - np.repeat(units, np.diff(groups))).tolist()
    values = significands[codes]
    largest, square = int(np.abs(values).max()), values * values
    longest = int(np.diff(np.append(starts, len(codes))).max())
    sums: list[list[int]] = [[] for _ in first]
    # Where they leave the range of int64, `_grouped` makes its own.
    for power, powers in enumerate((values, square, square * values, square * square), 1):
        room = 63 - (largest**power).bit_length() - longest.bit_length()
        if room < 8:
            powers = values.astype(object) ** power  # noqa: PLW2901
        totals = _grouped(powers, counts, room, starts)
        moved = [each << (power * shift) for each, shift in zip(totals, shifts, strict=True)]
        for own, (start, stop) in zip(sums, pairwise(groups.tolist()), strict=True):
            own.append(sum(moved[start:stop]))
    return sums, units.tolist()


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
