"""The statistics of many short rows of a variable, from a table of their elements.

Sorting the table gives exact quantiles of every element type. Rows that are too long for a table
are sketched like tensors.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.kinds import kind_of, magnitudes
from xckpt.scan.entries import LONGEST_ROW
from xckpt.statistics.definitions import Elements, describe_elements, of_real_numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    import xarray as xr

    from xckpt.arrays.kinds import Kind
    from xckpt.typing import Array

# Integers up to here, and their sums, are exact as float64.
_EXACT = 1 << 53
# Binary exponents beyond which fourth powers of distances can leave the range of float64.
_LARGEST_EXPONENT = 150


def describe_rows(
    variable: xr.Variable, dims: tuple[Hashable, ...], quantiles: Sequence[float]
) -> Array:
    """Describe a variable at each position along some dimensions."""
    shape = tuple(variable.sizes[dim] for dim in dims)
    rows = variable.transpose(*dims, ...)
    length = prod(rows.shape[len(dims) :])
    step = max(1, LONGEST_ROW // max(1, length))
    tables: list[Array] = []
    for slab in _slabs(shape, step):
        values = rows[slab].values
        if values.dtype.kind == "c":
            values = magnitudes(values)
        elif not (values.dtype.kind in "iu" and values.dtype.isbuiltin):
            with np.errstate(invalid="ignore"):  # signalling NaN
                values = values.astype(np.float64)
        count = values.size // length if length else prod(values.shape[: len(slab)])
        tables.append(values.reshape(count, length))
    stored = np.dtype(variable.encoding.get("stored_dtype", variable.dtype))
    kind = kind_of(stored) or kind_of(variable.dtype)
    statistics = np.concatenate(
        [
            describe_elements(TableElements(table, kind), quantiles)
            for table in tables or [np.empty((0, 0))]
        ]
    )
    if variable.dtype.kind == "c":
        statistics[:, of_real_numbers(quantiles)] = np.nan
    return statistics.T.reshape(statistics.shape[1], *shape)


def _slabs(shape: tuple[int, ...], step: int) -> list[tuple[Any, ...]]:
    """Cut a shape into boxes of about `step` positions, in C order."""
    if not shape:
        return [()]
    inner = prod(shape[1:])
    if inner > step and len(shape) > 1:
        return [(i, *inside) for i in range(shape[0]) for inside in _slabs(shape[1:], step)]
    rows = max(1, step // max(1, inner))
    return [(slice(start, start + rows),) for start in range(0, shape[0], rows)]


class TableElements(Elements):
    """The elements of each row of a table of integers or float64."""

    def __init__(self, table: Array, kind: Kind | None) -> None:
        self.kind = kind
        self._wide = wide = table.astype(np.float64)
        self._finite = finite = np.isfinite(wide)
        self._number = n = finite.sum(axis=1)
        self.count = np.full(len(wide), wide.shape[1])
        self.nan, self.inf = np.isnan(wide).sum(axis=1), np.isinf(wide).sum(axis=1)
        self.zero = (wide == 0).sum(axis=1)
        self._ordered = ordered = np.sort(np.where(finite, wide, np.nan), axis=1)
        self.low, self.high = _at(ordered, np.zeros_like(n), n), _at(ordered, n - 1, n)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore", under="ignore"):
            if (
                table.dtype.kind in "iu"
                and wide.size
                and np.abs(wide).max() * len(wide[0]) > _EXACT
            ):
                moments = _moments_of_integers(table)
            else:
                moments = _moments(wide, finite, self.low, self.high)
        self.mean, self.std, self.rms, self.l2, self.skew, self.kurtosis = moments
        self.unique = np.full(len(wide), np.nan)
        if kind is not None and kind.exact:
            self.unique = (ordered[:, 1:] > ordered[:, :-1]).sum(axis=1) + (n > 0)
            for infinity in (np.inf, -np.inf):
                self.unique = self.unique + (wide == infinity).any(axis=1)

    def quantiles(self, levels: Array) -> Array:
        """Return quantiles from the sorted rows."""
        n = self._number
        ranks = [np.rint((n - 1) * level).astype(np.int64) for level in levels]
        return np.array([_at(self._ordered, rank, n) for rank in ranks]).reshape(-1, len(n)).T

    def count_where(self, condition: Callable[[Array], Array]) -> Array:
        """Count the elements that meet a condition."""
        counted: Array = (condition(self._wide) & self._finite).sum(axis=1)
        return counted


def _at(ordered: Array, positions: Array, n: Array) -> Array:
    """Return one element of each row, whose first `n` are numbers; NaN of a row without any."""
    if not ordered.shape[1]:
        return np.full(len(ordered), np.nan)
    elements = np.take_along_axis(ordered, np.maximum(positions, 0)[:, None], axis=1)[:, 0]
    return np.where(n > 0, elements, np.nan)


def _moments(wide: Array, finite: Array, low: Array, high: Array) -> list[Array]:
    """Return mean, std, rms, l2, skew and kurtosis of the finite elements of each row."""
    n = finite.sum(axis=1)
    exponents = np.frexp(np.where(n > 0, np.maximum(np.abs(low), np.abs(high)), 0.0))[1]
    exponents[np.abs(exponents) <= _LARGEST_EXPONENT] = 0
    if exponents.any():
        wide = np.ldexp(wide, -exponents[:, None])
        low, high = np.ldexp(low, -exponents), np.ldexp(high, -exponents)
    center = np.where(finite, wide, 0.0).sum(axis=1) / n
    center = np.where(low == high, low, center)
    distances = np.where(finite, wide - center[:, None], 0.0)
    correction, variance, skew, kurtosis = _central_moments(distances, finite, low == high)
    mean, std = center + correction, np.sqrt(variance)
    # Rounding must not lift a root of a mean above the largest element, and so to infinity.
    rms = np.minimum(np.hypot(mean, std), np.maximum(np.abs(low), np.abs(high)))
    l2 = np.where(n > 0, np.sqrt(n) * rms, 0.0)
    scaled = [np.ldexp(numbers, exponents) for numbers in (mean, std, rms, l2)]
    return [*scaled, skew, kurtosis]


def _moments_of_integers(table: Array) -> list[Array]:
    """Return the same moments for integers whose sums float64 does not hold exactly."""
    if table.itemsize < 8:
        table = table.astype(np.int64)
    low, high = table.min(axis=1), table.max(axis=1)
    # Unsigned, since a difference of two signed integers can be too large for one.
    distances = table.view(np.uint64) - low.view(np.uint64)[:, None]
    everywhere = np.ones(table.shape, np.bool_)
    wide = distances.astype(np.float64)
    center = wide.sum(axis=1) / table.shape[1]
    moments = _central_moments(wide - center[:, None], everywhere, low == high)
    lower = (table.view(np.uint64) & np.uint64(0xFFFFFFFF)).sum(axis=1).tolist()
    upper = (table >> 32).sum(axis=1).tolist()
    halves = zip(upper, lower, strict=True)
    mean = np.array([((high << 32) + low) / table.shape[1] for high, low in halves])
    std = np.sqrt(moments[1])
    rms = np.hypot(mean, std)
    return [mean, std, rms, np.sqrt(table.shape[1]) * rms, *moments[2:]]


def _central_moments(
    distances: Array, finite: Array, is_constant: Array
) -> tuple[Array, Array, Array, Array]:
    """Return mean, variance, skew and kurtosis of distances from about the mean of each row."""
    n = finite.sum(axis=1)
    mean = distances.sum(axis=1) / n
    distances = np.where(finite, distances - mean[:, None], 0.0)
    m2, m3, m4 = ((distances**power).sum(axis=1) / n for power in (2, 3, 4))
    variance = np.where(is_constant, 0.0, m2)
    skew = np.where(variance > 0, m3 / variance**1.5, np.nan)
    kurtosis = np.where(variance > 0, m4 / variance**2 - 3.0, np.nan)
    return mean, variance, skew, kurtosis
