"""`Groups`: sums over tensors in groups, from which the statistics of a group follow exactly."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.typing import Array


class Groups:
    """Tensors in groups, and the statistics of all finite elements of each group."""

    # `columns` has statistics by name, with a number for each tensor; `numbers` the groups of them.
    def __init__(self, columns: Mapping[str, Array], numbers: Array) -> None:
        order = np.argsort(numbers, kind="stable")
        self._order = order
        self._columns = columns
        #: The groups that have tensors, and the number of tensors of each.
        self.present, self._starts, self.tensors = np.unique(
            numbers[order], return_index=True, return_counts=True
        )
        self._owner = np.repeat(np.arange(len(self.present)), self.tensors)

    def __getitem__(self, name: str) -> Array:
        """Return a statistic of the tensors, sorted by group; raise `KeyError` if it is missing."""
        return self._columns[name][self._order]

    def sum(self, values: Array) -> Array:
        """Return the sum over each group of numbers in the order of the groups."""
        # Extended precision, because numpy adds up segments one number after another.
        total: Array = np.add.reduceat(values, self._starts, dtype=np.longdouble)
        return total.astype(np.float64)

    def total(self, name: str) -> Array:
        """Return the sum of a statistic over the tensors of each group."""
        return self.sum(self[name])

    def average(self, name: str) -> Array:
        """Return the mean of a statistic, weighted by the finite elements of each tensor."""
        # A share of the elements, because a sum of all of them may overflow.
        return self.sum(self._share * self._of_finite(name))

    def spread(self, values: Array) -> Array:
        """Return the number of its group for each tensor."""
        return values[self._owner]

    def highest(self, values: Array) -> Array:
        """Return the largest of the numbers of each group."""
        return np.maximum.reduceat(values, self._starts)

    def norm(self, name: str) -> Array:
        """Return the root of the sum of the squares of a statistic over each group."""
        return self._root(self[name])

    def least(self, name: str) -> Array:
        """Return the smallest of a statistic over the tensors with finite elements."""
        return -self._extreme(-self[name])

    def largest(self, name: str) -> Array:
        """Return the largest of a statistic over the tensors with finite elements."""
        return self._extreme(self[name])

    def _extreme(self, values: Array) -> Array:
        highest = self.highest(np.where(self.finite > 0, values, -np.inf))
        return np.where(self.all_finite > 0, highest, np.nan)

    @cached_property
    def finite(self) -> Array:
        """Number of finite elements of each tensor."""
        return self["count"] - self["nan"] - self["inf"]

    @cached_property
    def all_finite(self) -> Array:
        """Number of finite elements of each group."""
        return self.sum(self.finite)

    @cached_property
    def mean(self) -> Array:
        """Mean of each group."""
        low, high = self.least("mean"), self.largest("mean")
        return np.where(low == high, low, self.average("mean"))

    @cached_property
    def std(self) -> Array:
        """Standard deviation of each group."""
        return np.ldexp(np.sqrt(self._central[0]), self._exponent)

    @property
    def rms(self) -> Array:
        """Root of the mean square of each group."""
        return self._root(self._of_finite("rms"), self._share)

    @property
    def l2(self) -> Array:
        """Root of the sum of the squares of each group; zero without finite elements."""
        return np.where(self.all_finite > 0, self._root(self._of_finite("l2")), 0.0)

    @property
    def skew(self) -> Array:
        """Standardised third moment of each group."""
        variance, third, _ = self._central
        return np.where(variance > 0, third / variance**1.5, np.nan)

    @property
    def kurtosis(self) -> Array:
        """Excess kurtosis of each group."""
        variance, _, fourth = self._central
        return np.where(variance > 0, fourth / variance**2 - 3.0, np.nan)

    @cached_property
    def _share(self) -> Array:
        """Part of the finite elements of its group that each tensor has; NaN without any."""
        return self.finite / self.spread(self.all_finite)

    def _of_finite(self, name: str) -> Array:
        """Return a statistic of the tensors, zero for tensors without finite elements."""
        return np.where(self.finite > 0, self[name], 0.0)

    @cached_property
    def _exponent(self) -> Array:
        """Exponent of a power of two near the elements, so that fourth powers stay in range."""
        sizes = np.maximum(np.abs(self._of_finite("mean")), self._of_finite("std"))
        return np.frexp(self.highest(sizes))[1]

    @cached_property
    def _central(self) -> tuple[Array, Array, Array]:
        """Central moments of each group, from its tensors' moments around the common mean."""
        down = -self.spread(self._exponent)
        std = np.ldexp(self._of_finite("std"), down)
        # Halves, because a difference of large numbers may overflow.
        half = self._of_finite("mean") / 2 - self.spread(self.mean) / 2
        shift = np.where(self.finite > 0, np.ldexp(half, down + 1), 0.0)
        variance = std**2
        second = self.sum(self._share * (variance + shift**2))
        third, fourth = np.full_like(second, np.nan), np.full_like(second, np.nan)
        if {"skew", "kurtosis"} <= set(self._columns):
            is_spread = (self.finite > 0) & (std > 0)
            cubes = np.where(is_spread, std**3 * self["skew"], 0.0)
            fourths = np.where(is_spread, variance**2 * (self["kurtosis"] + 3.0), 0.0)
            third = self.sum(self._share * (cubes + 3 * shift * variance + shift**3))
            terms = fourths + 4 * shift * cubes + 6 * shift**2 * variance + shift**4
            fourth = self.sum(self._share * terms)
        return second, third, fourth

    def _root(self, values: Array, weights: Array | float = 1.0) -> Array:
        """Return the root of the weighted sum of the squares of each group."""
        exponent = np.frexp(self.highest(values))[1]
        squares = np.ldexp(values, -self.spread(exponent)) ** 2
        return np.ldexp(np.sqrt(self.sum(weights * squares)), exponent)
