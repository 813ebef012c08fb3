"""Statistics along named dimensions: many short rows at a time, sorted in memory.

Sorting gives exact quantiles of every element type; rows that are too long for it are sketched
like tensors.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.statistics.kinds import kind_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import xarray as xr

__all__ = ["LONGEST_ROW", "describe_rows", "describe_table"]

Array = np.ndarray[Any, np.dtype[Any]]

#: Elements of a row that is sorted: 32 MiB as float64.
LONGEST_ROW = 1 << 22


def describe_rows(
    variable: xr.Variable, kept: tuple[Hashable, ...], quantiles: Sequence[float]
) -> Array:
    """Describe a variable along all dimensions but some."""
    shape = tuple(variable.sizes[dim] for dim in kept)
    rows = variable.transpose(*kept, ...)
    length = prod(rows.shape[len(kept) :])
    step = max(1, LONGEST_ROW // max(1, length))
    found = [describe_table(_values(rows, slab, length), quantiles) for slab in _slabs(shape, step)]
    whole = np.concatenate(found, axis=1) if found else describe_table(np.empty((0, 0)), quantiles)
    stored = np.dtype(variable.encoding.get("stored_dtype", variable.dtype))
    kind = kind_of(stored) or kind_of(variable.dtype)
    if kind is None or not kind.exact:
        whole[-1] = np.nan  # distinct values are counted of small types only
    return whole.reshape(len(whole), *shape)


def _slabs(shape: tuple[int, ...], step: int) -> list[tuple[Any, ...]]:
    """Cut kept dimensions into boxes of about `step` positions, in C order."""
    if not shape:
        return [()]
    inner = prod(shape[1:])
    if inner > step and len(shape) > 1:
        return [(i, *rest) for i in range(shape[0]) for rest in _slabs(shape[1:], step)]
    rows = max(1, step // max(1, inner))
    return [(slice(start, start + rows),) for start in range(0, shape[0], rows)]


def _values(rows: xr.Variable, slab: tuple[Any, ...], length: int) -> Array:
    values = rows[slab].values
    if values.dtype.kind == "c":
        values = np.abs(values)
    with np.errstate(invalid="ignore"):  # signalling NaN
        wide: Array = values.astype(np.float64)
    count = wide.size // length if length else prod(wide.shape[: len(slab)])
    return wide.reshape(count, length)


def describe_table(table: Array, quantiles: Sequence[float]) -> Array:
    """Describe each row of a table."""
    finite = np.isfinite(table)
    n = finite.sum(axis=1)
    size = np.full(len(table), table.shape[1], np.float64)
    nan, inf = np.isnan(table).sum(axis=1), np.isinf(table).sum(axis=1)
    zero = (table == 0).sum(axis=1)
    ordered = np.sort(np.where(finite, table, np.nan), axis=1)
    low, high = _at(ordered, np.zeros_like(n), n), _at(ordered, n - 1, n)
    chosen = [_at(ordered, np.rint((n - 1) * q).astype(np.int64), n) for q in quantiles]
    mean, std, skew, kurtosis = _moments(table, finite, n, low, high)
    rms = np.hypot(mean, std)
    l2 = np.where(n > 0, np.sqrt(n) * rms, 0.0)
    distinct = _distinct(table, ordered, n)
    head = [
        size,
        nan,
        inf,
        zero,
        low,
        high,
        np.maximum(np.abs(low), np.abs(high)),
        mean,
        std,
        rms,
        l2,
    ]
    return np.array([*head, skew, kurtosis, *chosen, distinct], np.float64)


def _at(ordered: Array, where: Array, n: Array) -> Array:
    if not ordered.shape[1]:
        return np.full(len(ordered), np.nan)
    found = np.take_along_axis(ordered, np.maximum(where, 0)[:, None], axis=1)[:, 0]
    return np.where(n > 0, found, np.nan)


def _moments(table: Array, finite: Array, n: Array, low: Array, high: Array) -> list[Array]:
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        center = np.where(finite, table, 0.0).sum(axis=1) / n
        center = np.where(low == high, low, center)
        d = np.where(finite, table - center[:, None], 0.0)
        m = d.sum(axis=1) / n
        d = np.where(finite, d - m[:, None], 0.0)
        m2, m3, m4 = ((d**power).sum(axis=1) / n for power in (2, 3, 4))
        m2 = np.where(low == high, 0.0, m2)
        skew = np.where(m2 > 0, m3 / m2**1.5, np.nan)
        kurtosis = np.where(m2 > 0, m4 / m2**2 - 3.0, np.nan)
        return [center + m, np.sqrt(m2), skew, kurtosis]


def _distinct(table: Array, ordered: Array, n: Array) -> Array:
    steps = (ordered[:, 1:] > ordered[:, :-1]).sum(axis=1) + (n > 0)
    infinite = (table == np.inf).any(axis=1).astype(int) + (table == -np.inf).any(axis=1)
    return np.asarray(steps + infinite)
