"""Reference implementation of comparisons."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xckpt.comparison import MEASURES

Array = np.ndarray[Any, np.dtype[Any]]


def compared(a: Array, b: Array) -> dict[str, float]:
    """Compare two arrays of one shape, of types whose values are all float64."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        x, y = a.astype(np.float64).reshape(-1), b.astype(np.float64).reshape(-1)
    either_nan = np.isnan(x) | np.isnan(y)
    equal = (x == y) | (np.isnan(x) & np.isnan(y))
    finite = np.isfinite(x) & np.isfinite(y)
    counts = {
        "status": float(not equal.all()),
        "count": x.size,
        "equal_fraction": equal.mean() if x.size else 1.0,
        "nan": int((either_nan & ~equal).sum()),
        "inf": int((~finite & ~either_nan & ~equal).sum()),
    }
    if equal.all():
        nothing = dict.fromkeys(["max_abs", "rmse", "rel_l2", "nmse"], 0.0)
        return counts | nothing | {"cosine": 1.0, "sqnr_db": math.inf}
    x, y = x[finite], y[finite]
    if not x.size:
        return counts | dict.fromkeys(MEASURES[5:], math.nan)
    d = np.abs(x - y)
    squares = [math.fsum(terms * terms) for terms in (d, x, y)]
    return counts | {
        "max_abs": d.max(),
        "rmse": math.sqrt(squares[0] / x.size),
        "rel_l2": relative(squares[0], squares[1]),
        "cosine": cosine(squares, math.fsum(x * y)),
        "sqnr_db": decibels(squares[0], squares[1]),
        "nmse": relative(squares[0], squares[1]) ** 2,
    }


def decibels(noise: float, signal: float) -> float:
    if not (noise and signal):
        return -math.inf if noise else math.inf
    return 10 * math.log10(signal / noise)


def relative(difference: float, squares: float) -> float:
    if not squares:
        return math.inf if difference else 0.0
    return math.sqrt(difference / squares)


def cosine(squares: list[float], product: float) -> float:
    if not squares[0]:
        return 1.0
    if not (squares[1] and squares[2]):
        return math.nan
    return product / math.sqrt(squares[1]) / math.sqrt(squares[2])
