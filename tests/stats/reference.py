"""Reference implementation of statistics."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.kinds import kind_of
from xckpt.arrays.streams import whole_leaves
from xckpt.scan.scanning import gather
from xckpt.statistics import QUANTILES, statistic_names
from xckpt.statistics.counts import Sketch
from xckpt.statistics.describe import describe_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from xckpt.arrays.streams import ElementStream

Array = np.ndarray[Any, np.dtype[Any]]

SMALL_FLOATS = (
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float8_e3m4",
    "float6_e2m3fn",
    "float4_e2m1fn",
)
FLOATS = ("float32", "float64", *SMALL_FLOATS)
SMALL_INTEGERS = ("int8", "uint8", "int16", "uint16", "int4", "uint4", "bool")
LARGE_INTEGERS = ("int32", "uint32", "int64", "uint64")
NAMES = statistic_names(QUANTILES)


def dtype_of(name: str) -> np.dtype[Any]:
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


def sketch_of(values: Array, cuts: Iterable[int] = (), row: int = 0) -> Sketch:
    """Sketch an array, in pieces that are cut at some positions."""
    kind = kind_of(values.dtype)
    assert kind is not None
    flat = values.reshape(-1)
    total = Sketch(kind, row)
    bounds = pairwise([0, *cuts, flat.size])
    for start, columns in whole_leaves((start, (flat[start:stop],)) for start, stop in bounds):
        part = Sketch(kind, row)
        part.update(start, *columns)
        total.merge(part.close())
    total.counted()
    return total


def scanned(*readers: ElementStream) -> list[Sketch]:
    """Sketch what readers read."""
    return gather(readers, Sketch, lambda _, sketch: sketch)


def stats_of(values: Array, quantiles: Sequence[float] = QUANTILES) -> dict[str, float]:
    """Describe an array."""
    statistics = describe_all([sketch_of(values)], quantiles)[0].tolist()
    return dict(zip(statistic_names(quantiles), statistics, strict=True))


def exact_stats(values: Array) -> dict[str, float]:
    """Describe an array with integers and fractions: nothing is rounded before the end."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        wide = values.astype(np.float64).reshape(-1)
    statistics = counted(values)
    finite = wide[np.isfinite(wide)]
    if not finite.size:
        return statistics
    # Integers, times a power of two.
    numbers, scale = _as_integers(values.reshape(-1) if values.dtype.kind in "iu" else finite)
    n, total = len(numbers), sum(numbers)
    squares = Fraction(sum([x * x for x in numbers])) * scale**2
    deviations = [n * x - total for x in numbers]  # from the mean, n times
    m2, m3, m4 = (
        Fraction(sum([x**p for x in deviations]), n ** (p + 1)) * scale**p for p in (2, 3, 4)
    )
    statistics |= {
        "mean": float(Fraction(total, n) * scale),
        "std": root(m2),
        "rms": root(squares / n),
        "l2": root(squares),
        "skew": math.copysign(root(m3**2 / m2**3), 1 if m3 > 0 else -1) if m2 else math.nan,
        "kurtosis": float(m4 / m2**2 - 3) if m2 else math.nan,
    }
    return statistics


def _as_integers(values: Array) -> tuple[list[int], Fraction]:
    """Return integers and their common factor."""
    if values.dtype.kind in "iu":
        return [int(x) for x in values], Fraction(1)
    ratios = [x.as_integer_ratio() for x in values.tolist()]
    largest = max(below for _, below in ratios)  # all are powers of two
    return [above * (largest // below) for above, below in ratios], Fraction(1, largest)


def counted(values: Array) -> dict[str, float]:
    """Count elements, and find extremes and quantiles, as numpy does."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        wide = values.astype(np.float64).reshape(-1)
    finite = wide[np.isfinite(wide)]
    statistics: dict[str, float] = dict.fromkeys(NAMES, math.nan)
    numbers = wide[~np.isnan(wide)]
    statistics |= {
        "count": wide.size,
        "nan": int(np.isnan(wide).sum()),
        "inf": int(np.isinf(wide).sum()),
        "zero": int((wide == 0).sum()),
        "l2": 0.0,
        "unique": len(np.unique(numbers)) if values.dtype.itemsize <= 2 else math.nan,
    }
    if finite.size:
        chosen = np.quantile(finite, np.array(QUANTILES), method="nearest")
        statistics |= {f"q{q:g}": float(v) for q, v in zip(QUANTILES, chosen, strict=True)}
        statistics |= {"min": finite.min(), "max": finite.max(), "absmax": np.abs(finite).max()}
    return statistics


def root(x: Fraction) -> float:
    """Return the square root, rounded once; infinity where float64 has no such number."""
    if not x:
        return 0.0
    shift = 256 + max(0, x.denominator.bit_length() - x.numerator.bit_length())
    scaled = (x.numerator << 2 * shift) // x.denominator
    try:
        return float(Fraction(2 * math.isqrt(scaled) + 1, 2 << shift))
    except OverflowError:
        return math.inf
