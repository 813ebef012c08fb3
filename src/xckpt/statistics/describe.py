"""From a sketch to the statistics of a tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.statistics.exact import power_sums
from xckpt.statistics.kinds import kind_named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.statistics.kinds import Kind
    from xckpt.statistics.sketch import Sketch

__all__ = ["Spectrum", "describe", "rank", "spectrum", "statistic_names"]

Array = np.ndarray[Any, np.dtype[Any]]

_BEFORE = (
    *("count", "nan", "inf", "zero", "min", "max", "absmax"),
    *("mean", "std", "rms", "l2", "skew", "kurtosis"),
)


def statistic_names(quantiles: Sequence[float]) -> list[str]:
    """Name the statistics."""
    return [*_BEFORE, *(f"q{q:g}" for q in quantiles), "unique"]


@dataclass(frozen=True, slots=True)
class Spectrum:
    """The codes of finite elements in ascending order of these, and how often each occurs.

    Parameters
    ----------
    kind : Kind
        Of the elements.
    codes : array of int64
        Of a kind that is not exact, zeros have the code -1: they are told apart from all that is
        next to them.
    counts : array of int64
        How many elements have each code; perhaps none.
    low, high : float
        The smallest and the largest element, of a kind that is not exact.
    """

    kind: Kind
    codes: Array
    counts: Array
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
    kind = kind_named(sketch.kind)
    if kind.exact:
        values = kind.values[sketch.codes]
        kept = np.flatnonzero(np.isfinite(values))
        order = kept[np.argsort(values[kept], kind="stable")]
        codes = sketch.codes[order].astype(np.int64)
        return Spectrum(kind, codes, sketch.counts[order], -math.inf, math.inf)
    if sketch.low is None or sketch.high is None:
        nothing = np.empty(0, np.int64)
        return Spectrum(kind, nothing, nothing, -math.inf, math.inf)
    return _wide_spectrum(kind, sketch, float(sketch.low), float(sketch.high))


def _wide_spectrum(kind: Kind, sketch: Sketch, low: float, high: float) -> Spectrum:
    sign = 1 << (kind.code_bits - 1)
    infinity = 0x7F80 if kind.code_bits == 16 else 0x7FF << 7
    # Codes ascend with the magnitude, and those with the sign bit come after all others.
    bounds = np.array([0, 1, infinity, sign, sign + 1, sign + infinity], sketch.codes.dtype)
    zero, positive, beyond, minus_zero, negative, end = np.searchsorted(sketch.codes, bounds)
    counts = sketch.counts
    tiny = counts[zero:positive] - (sketch.zero - sketch.negative_zero)
    minus_tiny = counts[minus_zero:negative] - sketch.negative_zero
    ordered = [
        counts[negative:end][::-1],
        minus_tiny,
        np.array([sketch.zero]),
        tiny,
        counts[positive:beyond],
    ]
    codes = [
        sketch.codes[minus_zero:end][::-1].astype(np.int64),
        np.array([-1]),
        sketch.codes[zero:beyond].astype(np.int64),
    ]
    return Spectrum(kind, np.concatenate(codes), np.concatenate(ordered), low, high)


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
    every = kind.values[sketch.codes]
    counts = sketch.counts
    nan, inf = int(counts[np.isnan(every)].sum()), int(counts[np.isinf(every)].sum())
    values = found.values()
    zero = int(found.counts[values == 0].sum())
    head: list[float] = [sketch.count, nan, inf, zero]
    # -0.0 and 0.0 are one value.
    unique = 0 if not len(every) else len(np.unique(every[~np.isnan(every)]))
    if not len(values):
        return [*head, *_nothing()], unique
    low, high = float(values[0]), float(values[-1])
    sums = power_sums(kind, found.codes, found.counts)
    head += [low, high, max(abs(low), abs(high)), sums.mean(), sums.std(), sums.rms(), sums.l2()]
    return [*head, sums.skew(), sums.kurtosis()], unique


def _wide_head(kind: Kind, sketch: Sketch) -> list[float]:
    head: list[float] = [sketch.count, sketch.nan, sketch.inf, sketch.zero]
    n, upper, lower, m2, m3, m4, exponent = sketch.moments()
    if sketch.low is None or sketch.high is None:
        return [*head, *_nothing()]
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
    l2 = _scaled(math.sqrt(n) * rms, scale)
    mean = sketch.total / sketch.count if kind.integer else _scaled(mean, scale)
    std = _scaled(math.sqrt(variance), scale)
    return [*head, mean, std, _scaled(rms, scale), l2, skew, kurtosis]


def _nothing() -> list[float]:
    """Return what is left to say where there are no finite elements; the empty sum is zero."""
    nan = math.nan
    return [nan, nan, nan, nan, nan, nan, 0.0, nan, nan]


def _scaled(value: float, exponent: int) -> float:
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.copysign(math.inf, value)
