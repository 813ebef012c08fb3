"""The statistics of a tensor: their names, their meanings, and their definitions by elements.

A new statistic is a line in `STATISTICS`. It gets the `Elements` of several tensors, and returns
an array with a number for each of them. Next to it stands how the numbers of several tensors merge.

`Groups` has the sums over tensors from which the statistics of a group follow exactly.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from xckpt.arrays.kinds import Kind
    from xckpt.typing import Array


class Elements:
    """The elements of several tensors: each attribute is an array with a number per tensor.

    Every statistic but `count` and `nan` is of elements other than NaN: the positions that a
    stack lacks are filled with NaN, and only these two are corrected for them.
    """

    #: How the elements are counted; None for elements that have no code.
    kind: Kind | None
    count: Array
    nan: Array
    inf: Array
    zero: Array
    # All others are of the finite elements, and NaN without any.
    low: Array
    high: Array
    mean: Array
    std: Array
    rms: Array
    #: Zero without finite elements, as an empty sum.
    l2: Array
    skew: Array
    kurtosis: Array
    #: Number of distinct values, infinities included; NaN for types of more than 16 bits.
    unique: Array

    def quantiles(self, levels: Array) -> Array:
        """Return the finite elements at these quantiles, in a row for each tensor."""
        raise NotImplementedError

    def count_where(self, condition: Callable[[Array], Array]) -> Array:
        """Count the finite elements that meet a condition; approximate for large types."""
        # Elements of more than 16 bits are rounded to eight significant bits, except for zeros,
        # subnormal elements and the extremes.
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Statistic:
    """A number that describes a tensor."""

    name: str
    description: str
    compute: Callable[[Elements], Array]
    #: Returns the statistic of all elements of each group; None if it does not follow from the
    #: statistics of the tensors.
    merge: Callable[[Groups], Array] | None = None
    _: KW_ONLY
    #: Whether complex numbers have it; it describes their magnitudes.
    complex: bool = False
    #: Whether it is computed only with ``channels=True``.
    channels: bool = False
    #: Whether tables show it as an integer.
    whole: bool = False


def _subnormal(elements: Elements) -> Array:
    float_format = None if elements.kind is None else elements.kind.element.float_format
    if float_format is None:
        return np.full(len(elements.count), np.nan)
    smallest = float_format.smallest_normal
    tiny = elements.count_where(lambda x: (x != 0) & (np.abs(x) < smallest))
    return np.where(elements.count > 0, tiny, np.nan)


def _count(name: str, description: str, compute: Callable[[Elements], Array]) -> Statistic:
    """Return the statistic that counts elements; groups have the sum of the counts."""

    def merge(groups: Groups) -> Array:
        return groups.total(name)

    return Statistic(name, description, compute, merge, complex=True, whole=True)


#: In the order of the results: a new line goes to the end. Quantiles come right before `unique`.
STATISTICS = (
    _count("count", "number of elements", lambda t: t.count),
    _count("nan", "number of NaN elements", lambda t: t.nan),
    _count("inf", "number of infinite elements", lambda t: t.inf),
    _count("zero", "number of elements that are 0", lambda t: t.zero),
    Statistic("min", "smallest finite element", lambda t: t.low, lambda g: g.least("min")),
    Statistic("max", "largest finite element", lambda t: t.high, lambda g: g.largest("max")),
    Statistic(
        "absmax",
        "largest finite magnitude",
        lambda t: np.maximum(np.abs(t.low), np.abs(t.high)),
        lambda g: g.largest("absmax"),
        complex=True,
    ),
    Statistic("mean", "mean of the finite elements", lambda t: t.mean, lambda g: g.mean),
    Statistic(
        "std", "standard deviation of the population (``ddof=0``)", lambda t: t.std, lambda g: g.std
    ),
    Statistic("rms", "root of the mean square", lambda t: t.rms, lambda g: g.rms, complex=True),
    Statistic("l2", "root of the sum of the squares", lambda t: t.l2, lambda g: g.l2, complex=True),
    Statistic("skew", "standardised third moment", lambda t: t.skew, lambda g: g.skew),
    Statistic(
        "kurtosis", "0 for a normal distribution", lambda t: t.kurtosis, lambda g: g.kurtosis
    ),
    Statistic("unique", "number of distinct values, for 8- and 16-bit types", lambda t: t.unique),
    Statistic(
        "subnormal",
        "elements that are too small for all digits of their type",
        _subnormal,
        lambda g: g.total("subnormal"),
        complex=True,
        channels=True,
    ),
)


#: Position of the first quantile among the statistics.
FIRST_QUANTILE = [statistic.name for statistic in STATISTICS].index("unique")


def statistic_names(quantiles: Sequence[float], *, channels: bool = False) -> list[str]:
    """List the names of the statistics, in the order of the results."""
    from xckpt.statistics.channel_sketches import OF_CHANNELS

    names = [statistic.name for statistic in _chosen(channels=channels)]
    names[FIRST_QUANTILE:FIRST_QUANTILE] = [f"q{q:g}" for q in quantiles]
    return [*names, *(OF_CHANNELS if channels else ())]


def describe_elements(
    elements: Elements, quantiles: Sequence[float], *, channels: bool = False
) -> Array:
    """Return the statistics of each tensor, in the order of `statistic_names`."""
    with np.errstate(all="ignore"):
        columns = [statistic.compute(elements) for statistic in _chosen(channels=channels)]
        of_levels = elements.quantiles(np.array(quantiles, np.float64)).T
    columns[FIRST_QUANTILE:FIRST_QUANTILE] = of_levels
    return np.stack(columns, axis=1)


def of_real_numbers(quantiles: Sequence[float], *, channels: bool = False) -> Array:
    """Return which of the statistics complex numbers lack, as a mask."""
    mask = [not statistic.complex for statistic in _chosen(channels=channels)]
    mask[FIRST_QUANTILE:FIRST_QUANTILE] = [True] * len(quantiles)
    return np.array(mask)


def _chosen(*, channels: bool) -> list[Statistic]:
    return [statistic for statistic in STATISTICS if channels or not statistic.channels]


# --- sums of groups -------------------------------------------------------------------------------


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
