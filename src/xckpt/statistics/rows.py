"""The statistics of many short rows of a variable, from tables of their elements.

A block of a scan has whole rows. Sorting them gives exact quantiles of every element type, and each
row is described by itself, whatever block it is in. Rows that are too long for a table are sketched
like tensors.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from xckpt.arrays.kinds import Kind, kind_of, magnitudes
from xckpt.arrays.streams import (
    LEAF,
    TURNED_NBYTES,
    ArrayStream,
    StoredStream,
    Transposed,
    of_tensor,
)
from xckpt.scan.entries import Entry, unread_values
from xckpt.scan.scanning import Accumulator, gather
from xckpt.statistics.definitions import Elements, describe_elements, of_real_numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xckpt.arrays.streams import ElementStream
    from xckpt.progress import Progress
    from xckpt.typing import Array

# Integers up to here, and their sums, are exact as float64.
_EXACT = 1 << 53
# Binary exponents beyond which fourth powers of distances can leave the range of float64.
_LARGEST_EXPONENT = 150
# Elements of a table, unless a row has more.
_TABLE_SIZE = 1 << 20


class _RowOptions(NamedTuple):
    """Options that describe the rows of a variable."""

    length: int
    #: The stored type of the elements.
    kind: Kind | None
    quantiles: Sequence[float]

    def describe(self, table: Array) -> Array:
        """Return a row of statistics for each row of a table."""
        return describe_elements(TableElements(table, self.kind), self.quantiles)


class _Rows(Accumulator):
    """The statistics of a run of rows."""

    leaf = LEAF

    def __init__(self, kind: Kind, options: _RowOptions) -> None:
        self.kind, self.options = kind, options
        self.count = 0
        self.tables: list[Array] = []

    @classmethod
    def begin(cls, stream: ElementStream, argument: _RowOptions) -> _Rows:
        """Return no rows of a variable."""
        return cls(stream.kind, argument)

    def update(self, start: int, *columns: Array) -> None:
        """Describe the next rows."""
        (values,) = columns
        if values.dtype.kind == "c":
            values = magnitudes(values)
        elif self.kind.exact:
            values = values.view(self.kind.dtype)  # raw elements come as bit patterns
        self.count += len(values)
        table = values.reshape(-1, self.options.length)
        step = max(1, _TABLE_SIZE // self.options.length)
        for first in range(0, len(table), step):
            part = table[first : first + step]
            if not (part.dtype.kind in "iu" and part.dtype.isbuiltin):
                with np.errstate(invalid="ignore"):  # signalling NaN
                    part = part.astype(np.float64)
            self.tables.append(self.options.describe(part))

    def merge(self, other: _Rows) -> None:
        """Add the rows that follow."""
        self.count += other.count
        self.tables += other.tables


def describe_rows(
    entries: Sequence[Entry], quantiles: Sequence[float], progress: Progress
) -> list[Array]:
    """Describe variables at each position along some dimensions; the statistics come first."""
    streams = list(map(_stream_of_rows, entries))
    options = []
    for stream, entry in zip(streams, entries, strict=True):
        variable = entry.variable
        stored = variable.encoding.get("stored_dtype", variable.dtype)
        kind = kind_of(stored) or kind_of(variable.dtype)
        options.append(_RowOptions(stream.row, kind, quantiles))

    def finish(number: int, rows: _Rows) -> Array:
        entry, stream = entries[number], streams[number]
        tables = rows.tables
        if not tables:
            tables = [options[number].describe(np.empty((prod(entry.shape), 0)))]
        statistics = np.concatenate(tables)
        if stream.complex:
            statistics[:, of_real_numbers(quantiles)] = np.nan
        return statistics.T.reshape(statistics.shape[1], *entry.shape)

    return gather(streams, _Rows, finish, progress, arguments=options)


def _stream_of_rows(entry: Entry) -> ElementStream:
    """Return the elements of a variable, row after row."""
    variable, lazy = entry.variable, entry.stored
    rows = variable.transpose(*entry.dims, ...)
    axes = [variable.dims.index(dim) for dim in rows.dims]
    is_turned = axes != sorted(axes)
    stream = None if lazy is None or is_turned else of_tensor(lazy)
    if not isinstance(stream, StoredStream) or stream.is_turned:
        array = unread_values(rows) if lazy is None else lazy
        stream = ArrayStream(Transposed(array, axes) if is_turned and lazy is not None else array)
        stream.local = lazy is None
        stream.whole = stream.loads = getattr(lazy, "is_stream", False)
        if is_turned:
            stream.piece_nbytes = TURNED_NBYTES
        row_nbytes = prod(rows.shape[len(entry.dims) :]) * rows.dtype.itemsize
        stream.piece_nbytes = max(stream.piece_nbytes, row_nbytes)
    stream.name = str(entry.name)
    stream.tensor = stream.tensor or stream.name
    stream.row = prod(rows.shape[len(entry.dims) :])
    stream.leaf = max(1, stream.row)
    return stream


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
            moments = _moments(wide, finite, self.low, self.high)
            if table.dtype.kind in "iu" and wide.size:
                large = np.abs(wide).max(axis=1) * wide.shape[1] > _EXACT
                if large.any():
                    moments[:, large] = _moments_of_integers(table[large])
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
        elements = [_at(self._ordered, rank, n) for rank in ranks]
        return np.array(elements).reshape(len(ranks), len(n)).T

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


def _moments(wide: Array, finite: Array, low: Array, high: Array) -> Array:
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
    return np.stack([*scaled, skew, kurtosis])


def _moments_of_integers(table: Array) -> Array:
    """Return the same moments for integers whose sums float64 does not hold exactly."""
    if table.itemsize < 8:
        table = table.astype(np.int64)
    low, high = table.min(axis=1), table.max(axis=1)
    # Unsigned, since a difference of two signed integers can be too large for one.
    distances = table.view(np.uint64) - low.view(np.uint64)[:, None]
    everywhere = np.ones(table.shape, np.bool_)
    wide = distances.astype(np.float64)
    center = wide.sum(axis=1) / table.shape[1]
    # The exact mean follows from the sum of integers.
    _, variance, skew, kurtosis = _central_moments(wide - center[:, None], everywhere, low == high)
    lower = (table.view(np.uint64) & np.uint64(0xFFFFFFFF)).sum(axis=1).tolist()
    upper = (table >> 32).sum(axis=1).tolist()
    halves = zip(upper, lower, strict=True)
    mean = np.array([((high << 32) + low) / table.shape[1] for high, low in halves])
    std = np.sqrt(variance)
    rms = np.hypot(mean, std)
    return np.stack([mean, std, rms, np.sqrt(table.shape[1]) * rms, skew, kurtosis])


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
