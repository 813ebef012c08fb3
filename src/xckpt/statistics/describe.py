"""Statistics of tensors, computed from their sketches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.kinds import Kind, kind_named
from xckpt.statistics.definitions import Elements, describe_elements

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xckpt.statistics.counts import Sketch
    from xckpt.typing import Array


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
        return np.where(codes < 0, 0.0, kind.middles(codes)).clip(self.low, self.high)


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


def describe_all(
    sketches: Sequence[Sketch], quantiles: Sequence[float], *, channels: bool = False
) -> Array:
    """Return a row of statistics for each of at least one tensor; each kind in one go."""
    groups: dict[str, list[int]] = {}
    total: dict[str, int] = {}
    for number, sketch in enumerate(sketches):
        name = sketch.kind.name
        total[name] = total.get(name, 0) + sketch.count
        if total[name] >> 62:  # sums over the group would overflow int64
            name = f"{name} {number}"
        groups.setdefault(name, []).append(number)
    tables = []
    for numbers in groups.values():
        group = [sketches[number] for number in numbers]
        tables.append(describe_elements(elements_of(group), quantiles, channels=channels))
    return np.concatenate(tables)[np.argsort(np.concatenate(list(groups.values())))]


def elements_of(sketches: Sequence[Sketch]) -> ExactElements | ApproximateElements:
    """Return the elements of tensors of one kind."""
    return (ExactElements if sketches[0].kind.exact else ApproximateElements)(sketches)


class _CodePool:
    """Codes and counts of several tensors of the same kind, in the order of the tensors."""

    def __init__(self, codes: Array, counts: Array, owner: Array, ends: Array) -> None:
        self.codes = codes
        self.counts = counts
        #: Position of the tensor that each code belongs to.
        self.owner = owner
        #: The codes of tensor n are those from ``ends[n]`` to ``ends[n + 1]``.
        self.ends = ends

    @classmethod
    def of(cls, sketches: Sequence[Sketch]) -> _CodePool:
        """Concatenate the codes and counts of sketches."""
        counted = [sketch.counted() for sketch in sketches]
        lengths = [len(codes) for codes, _ in counted]
        codes = np.concatenate([codes for codes, _ in counted], dtype=np.int64)
        counts = np.concatenate([counts for _, counts in counted])
        owner = np.repeat(np.arange(len(sketches)), lengths)
        return cls(codes, counts, owner, np.append(0, np.cumsum(lengths)))

    def take(self, positions: Array) -> _CodePool:
        """Return the codes at some positions, which are ascending by tensor."""
        owner = self.owner[positions]
        ends = owner.searchsorted(np.arange(len(self.ends)))
        return _CodePool(self.codes[positions], self.counts[positions], owner, ends)

    def sums(self, numbers: Array) -> Array:
        """Return the sum for each tensor of numbers that belong to its codes."""
        total = np.append(0, np.cumsum(numbers))
        tensor_sums: Array = total[self.ends[1:]] - total[self.ends[:-1]]
        return tensor_sums

    def count_where(self, mask: Array) -> Array:
        """Count the elements of each tensor whose codes are selected."""
        return self.sums(np.where(mask, self.counts, 0))


def ranks_of(count: Array, quantiles: Array) -> Array:
    """Return the positions of quantiles; see `rank`."""
    ranks: Array = np.rint(np.multiply.outer(count - 1, quantiles)).astype(np.int64)
    return ranks


def replace_ends(values: Array, ranks: Array, last_rank: Array, low: Array, high: Array) -> Array:
    """Replace quantiles that are the first or the last element, which are known exactly."""
    values = np.where(ranks == last_rank[:, None], high[:, None], values)
    return np.where(ranks == 0, low[:, None], values)


class _SketchedElements(Elements):
    """Elements of one kind, from the sketches of their tensors."""

    kind: Kind
    #: Positions of the tensors with finite elements.
    positions: Any

    def __init__(self, sketches: Sequence[Sketch]) -> None:
        self.kind = sketches[0].kind
        self.count = np.array([sketch.count for sketch in sketches])

    def _spread(self, values: Any, fill: float = math.nan) -> Array:
        """Return an array for all tensors, from numbers of the tensors with finite elements."""
        spread = np.full((len(self.count), *np.shape(values)[1:]), fill)
        spread[self.positions] = values
        return spread


class ApproximateElements(_SketchedElements):
    """Elements of more than 16 bits; codes have their leading bits, rounded."""

    def __init__(self, sketches: Sequence[Sketch]) -> None:
        super().__init__(sketches)
        self.pool = _CodePool.of(sketches)
        counts = [(s.nan, s.inf, s.zero, s.negative_zero) for s in sketches]
        self.nan, self.inf, self.zero, self.negative_zero = np.array(counts).T
        self.unique = np.full(len(sketches), math.nan)
        self.positions = [n for n, sketch in enumerate(sketches) if sketch.low is not None]
        sketches = [sketches[position] for position in self.positions]
        extremes = np.array([(s.low, s.high) for s in sketches], np.float64).reshape(-1, 2)
        self.low, self.high = self._spread(extremes).T
        with np.errstate(all="ignore"):
            self._set_moments(sketches)

    def _set_moments(self, sketches: Sequence[Sketch]) -> None:
        moments = np.array([sketch.moments() for sketch in sketches]).reshape(-1, 7).T
        n, upper, lower, m2, m3, m4, exponent = moments
        scale = exponent.astype(np.int32)
        mean, variance = upper + lower, m2 / n
        variance[[sketch.low == sketch.high for sketch in sketches]] = 0.0
        std = np.sqrt(variance)
        # As the C library computes them; numpy rounds some results differently.
        rms = np.array(list(map(math.hypot, mean.tolist(), std.tolist())))
        cubes, squares = np.array([(v**1.5, v**2) for v in variance.tolist()]).reshape(-1, 2).T
        is_spread = variance * variance > 0.0
        self.skew = self._spread(np.where(is_spread, m3 / n / cubes, math.nan))
        self.kurtosis = self._spread(np.where(is_spread, m4 / n / squares - 3.0, math.nan))
        self.l2 = self._spread(np.ldexp(np.sqrt(n) * rms, scale), 0.0)
        if self.kind.integer:
            mean = np.array([sketch.total / sketch.count for sketch in sketches])
        else:
            mean = np.ldexp(mean, scale)
        self.mean = self._spread(mean)
        self.std, self.rms = (self._spread(np.ldexp(x, scale)) for x in (std, rms))

    def count_where(self, condition: Callable[[Array], Array]) -> Array:
        """Count the elements by their codes; zeros share codes with tiny elements."""
        codes, owner, counts = self.pool.codes, self.pool.owner, self.pool.counts.copy()
        minus_zero = self.kind.landmarks[4]
        for code, zeros in ((0, self.zero - self.negative_zero), (minus_zero, self.negative_zero)):
            is_code = codes == code
            counts[is_code] -= zeros[owner[is_code]]
        values = self.kind.middles(codes).clip(self.low[owner], self.high[owner])
        total = self.pool.sums(np.where(np.isfinite(values) & condition(values), counts, 0))
        counted: Array = total + self.zero * condition(np.zeros(1))
        return counted

    def quantiles(self, levels: Array) -> Array:
        """Return quantiles as `spectrum` orders the elements, without sorting the codes."""
        kind, pool = self.kind, self.pool
        if not self.positions:
            return np.full((len(self.count), len(levels)), math.nan)
        # Codes ascend with the magnitude; codes with the sign bit come last.
        keys = pool.owner << kind.code_bits | pool.codes
        prefixes = np.arange(len(self.count))[:, None] << kind.code_bits
        bounds = keys.searchsorted(prefixes | kind.landmarks)
        total = np.append(0, np.cumsum(pool.counts))
        zero, positive, beyond, _, minus_zero, negative, end, _ = total[bounds].T
        # Ranks at which the regions end: negative, tiny negative with the code of zero, zero, tiny
        # positive with the code of zero.
        below = end - negative
        tiny_below = below + (negative - minus_zero) - self.negative_zero
        to_zero = tiny_below + self.zero
        tiny_above = to_zero + (positive - zero) - (self.zero - self.negative_zero)
        count = tiny_above + (beyond - positive)
        ranks = ranks_of(count, levels)
        ends = [end_rank[:, None] for end_rank in (below, tiny_below, to_zero, tiny_above)]
        region = sum(ranks >= end_rank for end_rank in ends)
        places = np.where(
            region == 0,
            total.searchsorted(end[:, None] - ranks) - 1,
            total.searchsorted(positive[:, None] + ranks - ends[3], side="right") - 1,
        )
        codes = pool.codes[places.clip(0, len(pool.codes) - 1)]
        sign = 1 << (kind.code_bits - 1)
        values = kind.middles(np.where(region == 1, sign, np.where(region == 3, 0, codes)))
        # Zeros are positive, whatever the sign of an extreme that is zero.
        low, high = self.low, self.high
        values = np.where(region == 2, 0.0, values.clip(low[:, None], high[:, None]))
        return replace_ends(values, ranks, count - 1, low, high)


class ExactElements(_SketchedElements):
    """Elements of at most 16 bits; each code is a value."""

    def __init__(self, sketches: Sequence[Sketch]) -> None:
        super().__init__(sketches)
        kind, pool = self.kind, _CodePool.of(sketches)
        values = kind.values[pool.codes]
        is_infinite = np.isinf(values)
        masks = (np.isnan(values), is_infinite, values == 0)
        self.nan, self.inf, self.zero = (pool.count_where(mask) for mask in masks)
        # Sort by tensor and value; equal values stay in the order of their codes.
        order = np.flatnonzero(np.isfinite(values))
        keys = pool.owner[order] << kind.code_bits | _order(kind.name)[pool.codes[order]]
        # A stable sort is quick, because the codes of a tensor are two ordered runs.
        self.pool = finite = pool.take(order[np.argsort(keys, kind="stable")])
        self.values = values = kind.values[finite.codes]
        is_new = (np.diff(values, prepend=math.nan) != 0) | (np.diff(finite.owner, prepend=-1) != 0)
        self.unique = pool.sums(is_infinite) + finite.sums(is_new)
        self.positions = np.flatnonzero(np.diff(finite.ends))
        first = finite.ends[self.positions]
        self.low = self._spread(values[first])
        self.high = self._spread(values[finite.ends[self.positions + 1] - 1])
        moments = np.array(exact_moments(kind, finite.codes, finite.counts, first)).reshape(-1, 6)
        self.mean, self.std, self.rms, l2, self.skew, self.kurtosis = self._spread(moments).T
        self.l2 = np.where(np.isnan(l2), 0.0, l2)

    def count_where(self, condition: Callable[[Array], Array]) -> Array:
        """Count the elements by their values."""
        return self.pool.count_where(condition(self.values))

    def quantiles(self, levels: Array) -> Array:
        """Return quantiles from the sorted values."""
        total = np.append(0, np.cumsum(self.pool.counts))
        before, end = (total[self.pool.ends[self.positions + n]] for n in (0, 1))
        targets = ranks_of(end - before, levels)
        places = total.searchsorted(before[:, None] + targets, side="right") - 1
        low, high = self.low[self.positions], self.high[self.positions]
        values = replace_ends(self.values[places], targets, end - before - 1, low, high)
        return self._spread(values)


@cache
def _order(name: str) -> Array:
    """Return the position of each code of an exact kind when sorted by value."""
    values = kind_named(name).values
    order = np.empty(len(values), np.int64)
    order[np.argsort(values, kind="stable")] = np.arange(len(values))
    return order


# --- exact moments -------------------------------------------------------------------------------


def exact_moments(kind: Kind, codes: Array, counts: Array, first: Array) -> list[list[float]]:
    """Return mean, std, rms, l2, skew and kurtosis for each tensor, each rounded only once."""
    # `codes` has the codes of all tensors one after another, each in ascending order of the values;
    # `first` has the position where each tensor begins.
    moments: list[list[float]] = []
    if not len(first):
        return moments
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
    """Return the sums of the first four powers for each tensor, and the exponent of its unit."""
    # The values of a tensor are integers times ``2**exponent``.
    significands, exponents = _integers(kind.name)
    exponent = exponents[codes]
    # Values ascend, so they form runs with the same exponent.
    is_start = np.diff(exponent, prepend=exponent[0]) != 0
    is_start[first] = True
    starts = np.flatnonzero(is_start)
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
    """Return the exact sum of ``counts * powers`` for each group."""
    # An int64 sum has `free_bits` bits left for the counts.
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
