"""Moments of values that are counted one by one, without any error but the last rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.statistics.kinds import kind_named

if TYPE_CHECKING:
    from xckpt.statistics.kinds import Kind

__all__ = ["PowerSums", "power_sums"]

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class PowerSums:
    """Sums of the powers of integers, which times `unit` are the values.

    Parameters
    ----------
    count : int
        Number of values.
    sums : tuple of int
        Of the first to the fourth powers.
    exponent : int
        Of the unit, which is a power of two.
    """

    count: int
    sums: tuple[int, int, int, int]
    exponent: int

    def mean(self) -> float:
        """Return the mean, rounded once."""
        return _quotient(self.sums[0], self.count, self.exponent)

    def std(self) -> float:
        """Return the standard deviation of the population, rounded once."""
        return _root(self._central2(), self.count**2, self.exponent)

    def rms(self) -> float:
        """Return the root of the mean of the squares, rounded once."""
        return _root(self.sums[1], self.count, self.exponent)

    def l2(self) -> float:
        """Return the root of the sum of the squares, rounded once."""
        return _root(self.sums[1], 1, self.exponent)

    def skew(self) -> float:
        """Return the third standardised moment, rounded once; NaN where all values are equal."""
        n, (s1, s2, s3, _) = self.count, self.sums
        third = n * n * s3 - 3 * n * s1 * s2 + 2 * s1**3
        second = self._central2()
        if not second:
            return math.nan
        return math.copysign(_root(third * third, second**3, 0), third)

    def kurtosis(self) -> float:
        """Return the fourth standardised moment less 3, rounded once; NaN likewise."""
        n, (s1, s2, s3, s4) = self.count, self.sums
        fourth = n**3 * s4 - 4 * n * n * s1 * s3 + 6 * n * s1 * s1 * s2 - 3 * s1**4
        second = self._central2() ** 2
        return _quotient(fourth - 3 * second, second, 0) if second else math.nan

    def _central2(self) -> int:
        """Return the variance times the square of the count."""
        return self.count * self.sums[1] - self.sums[0] ** 2


def power_sums(kind: Kind, codes: Array, counts: Array) -> PowerSums:
    """Add up the powers of counted values as integers."""
    significands, exponents = _integers(kind.name)
    order = np.argsort(exponents[codes], kind="stable")
    codes, counts = codes[order], counts[order]
    exponent = exponents[codes]
    starts = np.flatnonzero(np.diff(exponent, prepend=exponent[0] - 1))
    shifts = (exponent[starts] - exponent[0]).tolist()
    values = significands[codes]
    sums = [0, 0, 0, 0]
    for power in range(1, 5):
        for shift, total in zip(shifts, _grouped(values, counts, power, starts), strict=True):
            sums[power - 1] += total << (power * shift)
    return PowerSums(int(counts.sum()), (sums[0], sums[1], sums[2], sums[3]), int(exponent[0]))


def _grouped(values: Array, counts: Array, power: int, starts: Array) -> list[int]:
    """Add up ``counts * values**power`` for each group, exactly."""
    largest = int(np.abs(values).max()) ** power
    room = 63 - largest.bit_length() - len(values).bit_length()
    if room < 8:
        powers = values.astype(object) ** power
        return [int(total) for total in np.add.reduceat(powers * counts.astype(object), starts)]
    powers = values**power
    totals = [0] * len(starts)
    for low in range(0, int(counts.max()).bit_length(), room):
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
