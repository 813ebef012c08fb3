"""The statistics of a tensor: their names, what they mean, and how each follows from its elements.

A new statistic is a line in `STATISTICS`. It gets the `Elements` of several tensors, and returns
an array with a number for each of them. Next to it stands how the numbers of several tensors merge.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xckpt.arrays.kinds import Kind
    from xckpt.statistics.group_sums import Groups
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
