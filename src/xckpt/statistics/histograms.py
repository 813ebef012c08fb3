"""`histogram`: how the elements of every tensor are distributed, from the sketches of a scan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from operator import index
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import xarray as xr

from xckpt.index import paused_collector
from xckpt.progress import Progress
from xckpt.scan.entries import contents_of, entries_of, laid
from xckpt.scan.scanning import gather
from xckpt.scan.statistics_cache import rows_of
from xckpt.statistics.counts import Sketch
from xckpt.statistics.describe import spectrum

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from numpy.typing import ArrayLike

    from xckpt.progress import ProgressOption
    from xckpt.scan.entries import Describable, Described
    from xckpt.scan.kinds import Kind
    from xckpt.scan.readers import Reader
    from xckpt.statistics.describe import Spectrum
    from xckpt.typing import Dataset

Array = np.ndarray[Any, np.dtype[Any]]

# The logarithmic part of a symmetric scale spans so many powers of ten below the largest value.
_DECADES = 8
# Between these quantiles is what is not an outlier.
_BULK = (0.005, 0.995)


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution of the finite elements of a tensor; NaN without any."""

    name: str
    count: int  # of finite elements
    other: int  # elements that are NaN or infinite
    low: float
    high: float
    mean: float
    smallest: float  # magnitude but zero
    bulk: tuple[float, float]  # the range of all but a hundredth of the elements
    _reader: Reader
    # Packed, because sketches of thousands of tensors take too much memory.
    _sketch: bytes

    @property
    def kind(self) -> Kind:
        """The kind of its elements."""
        return self._reader.kind

    @property
    def span(self) -> tuple[float, float, float]:
        """The smallest and the largest element, and the smallest magnitude but zero."""
        return self.low, self.high, self.smallest

    def counts(self, edges: Array) -> Array:
        """Count the elements in bins."""
        return _count(spectrum(Sketch.unpack(self._sketch, self._reader)), edges)


def distributions(entries: Sequence[Described]) -> list[Distribution]:
    """Find how the elements of tensors are distributed, from the sketches of a scan."""
    readers = [reader for entry in entries for reader in entry.readers]

    def finish(number: int, sketch: Sketch) -> Distribution:
        return _distribution(readers[number], sketch)

    with Progress(None, "histogram") as bar:
        found: list[Distribution] = gather(readers, Sketch, finish, bar, cache=True, stretched=True)
    return found


def histogram(
    obj: Describable,
    bins: int | ArrayLike = 100,
    scale: Literal["symlog", "linear"] = "symlog",
    *,
    progress: ProgressOption = None,
    cache: bool = True,
    storage_options: dict[str, Any] | None = None,
) -> Dataset:
    """Count the finite elements of every tensor in bins that all tensors share.

    It is made from the sketches of `stats`: after a call of that it reads nothing.

    Parameters
    ----------
    obj : path, mapping, Index, xarray.Dataset, xarray.DataArray or xarray.DataTree
        What to describe.
    bins : int or sequence of float
        Number of bins between the smallest and the largest element of all tensors, or the edges.
    scale : {"symlog", "linear"}
        How edges are spaced: equally, or logarithmically on both sides of one bin around zero,
        whose edges are a hundred-millionth of the largest magnitude, or the smallest one that
        occurs if that is larger. Ignored where edges are given.
    progress : bool or callable, optional
        As for `stats`.
    cache : bool
        As for `stats`.
    storage_options : dict, optional
        As for `stats`.

    Returns
    -------
    xarray.Dataset
        Each variable with the dimension ``bin`` first, then those along which tensors are
        stacked, of integers. The coordinates ``bin``, ``bin_left`` and ``bin_right`` have the
        middles and the edges. A bin has its left edge, the last bin both.

    Raises
    ------
    ValueError
        If there is no bin, edges do not ascend, or there is no such scale.

    Notes
    -----
    Elements of 8 and 16 bits are counted exactly. Larger ones are known by their sign, exponent
    and seven bits of their fraction, and all that agree in these are counted together, where the
    number in their middle belongs. The outer edges are the smallest and the largest element.
    Others of the symmetric scale are rounded to numbers with so few bits, so that the counts are
    exact, but for elements that are themselves a negative edge, which may be on its left; otherwise
    elements within 2**-7 of an edge, relative to it, may be counted on its other side.

    Examples
    --------
    >>> h = xckpt.histogram("m.zt")  # doctest: +SKIP
    >>> h["lm_head"].plot.step(x="bin")  # doctest: +SKIP
    """
    if scale not in {"symlog", "linear"}:
        raise ValueError(f"scale is 'symlog' or 'linear', not {scale!r}")
    asked = require_bins(bins)
    contents = contents_of(obj, storage_options)
    with paused_collector():
        entries = entries_of(contents)
    readers = [reader for entry in entries for reader in entry.readers]
    # Packed, because sketches of thousands of tensors take too much memory.
    packed: dict[int, bytes] = {}
    with Progress(progress, "histogram") as bar:

        def scan(numbers: list[int]) -> list[list[float]]:
            def finish(number: int, sketch: Sketch) -> list[float]:
                packed[numbers[number]] = sketch.pack()
                return _span(sketch)

            some = [readers[number] for number in numbers]
            return gather(some, Sketch, finish, bar, cache=cache, stretched=True)

        def count(numbers: list[int]) -> Iterator[Any]:
            scan([number for number in numbers if number not in packed])
            for number in numbers:
                sketch = Sketch.unpack(packed.pop(number), readers[number])
                yield _count(spectrum(sketch), edges).view(np.float64)

        spans = rows_of(readers, ("span",), 3, scan, enabled=cache)
        edges = bin_edges(asked, scale, spans[~np.isnan(spans[:, 0])].tolist())
        # As bits of integers: sparse tensors may have more elements than floats tell apart.
        about = ("tallies", *edges.tolist())
        width = len(edges) - 1
        rows = rows_of(readers, about, width, count, enabled=cache)
    variables: dict[Hashable, Any] = {}
    stop = 0
    for entry in entries:
        start, stop = stop, stop + len(entry.readers)
        counts = laid(rows[start:stop].view(np.int64), entry.shape, entry.gone)
        variables[entry.name] = xr.Variable(("bin", *entry.dims), counts, None, entry.encoding)
    stacked = {dim for entry in entries for dim in entry.dims}
    coords: dict[Hashable, Any] = {
        name: coord
        for name, coord in contents.coords.items()
        if coord.dims and set(coord.dims) <= stacked
    }
    coords["bin"] = edges[:-1] / 2 + edges[1:] / 2
    coords["bin_left"] = ("bin", edges[:-1])
    coords["bin_right"] = ("bin", edges[1:])
    return cast("Dataset", xr.Dataset(variables, coords))


def _distribution(reader: Reader, sketch: Sketch) -> Distribution:
    found = spectrum(sketch)
    there = found.counts > 0
    values, counts = found.values(there), found.counts[there]
    count, packed = int(counts.sum()), sketch.pack()
    other = sketch.count - count
    if not count:
        nan = np.nan
        return Distribution(
            reader.name, 0, other, nan, nan, nan, np.inf, (nan, nan), reader, packed
        )
    smallest = float(np.abs(values[values != 0]).min(initial=np.inf))
    # Those that are known by their codes are clipped to the extremes; these are known.
    low, high = (values[0], values[-1]) if found.kind.exact else (found.low, found.high)
    ends = np.searchsorted(np.cumsum(counts), np.multiply(_BULK, count)).clip(0, len(values) - 1)
    mean = float(np.average(values, weights=counts))
    return Distribution(
        *(reader.name, count, other, float(low), float(high), mean, smallest),
        (float(values[ends[0]]), float(values[ends[1]])),
        reader,
        packed,
    )


def _span(sketch: Sketch) -> list[float]:
    """Return the smallest and the largest element, and the smallest magnitude but zero."""
    found = spectrum(sketch)
    values = found.values(found.counts > 0)
    if not len(values):
        return [np.nan, np.nan, np.nan]
    smallest = float(np.abs(values[values != 0]).min(initial=np.inf))
    # Those that are known by their codes are clipped to the extremes; these are known.
    low, high = (values[0], values[-1]) if found.kind.exact else (found.low, found.high)
    return [float(low), float(high), smallest]


def _count(found: Spectrum, edges: Array) -> Array:
    values = found.values()
    where = np.searchsorted(edges, values, side="right") - 1
    where[values == edges[-1]] = len(edges) - 2
    inside = (where >= 0) & (where < len(edges) - 1)
    counts = np.zeros(len(edges) - 1, np.int64)
    np.add.at(counts, where[inside], found.counts[inside])
    return counts


def require_bins(bins: Any) -> int | Array:
    """Return the number of bins or their edges; a mistake is noticed before anything is read."""
    if np.ndim(bins):
        edges = np.asarray(bins, np.float64)
        if edges.ndim > 1 or len(edges) < 2 or not (np.diff(edges) > 0).all():
            raise ValueError("edges of bins are two or more numbers that ascend")
        return edges
    try:
        count = index(bins)
    except TypeError:
        text = f"bins are a number of bins or a sequence of their edges, not {bins!r}"
        raise TypeError(text) from None
    if count < 1:
        raise ValueError(f"there is at least one bin, not {count}")
    return count


def bin_edges(bins: int | Array, scale: str, spans: Sequence[Sequence[float]]) -> Array:
    """Return the edges of bins for tensors with a smallest, a largest and a least magnitude."""
    if not isinstance(bins, int):
        return bins
    count = bins
    low = min((span[0] for span in spans), default=0.0)
    high = max((span[1] for span in spans), default=0.0)
    if low == high:
        low, high = low - 0.5, high + 0.5
    if scale == "linear" or count < 3:
        return np.linspace(low, high, count + 1)
    smallest = min((span[2] for span in spans), default=np.inf)
    return _symmetric_edges(low, high, smallest, count)


def edges_on_grid(kind: Kind, edges: Array) -> Array:
    """Move edges to between the numbers that elements of a kind can be told apart by.

    Bins that would have none of these numbers are united with their neighbours, so that a bin is
    as wide as the numbers in it are apart: divided by the widths, counts are densities without a
    comb where bins are finer than the numbers, and without a step where their spacing doubles.
    Elements at the first and at the last edge are inside.
    """
    if kind.exact:
        cells = _cells(kind)
        first = np.searchsorted(cells, edges[0], side="left") - 1
        last = np.searchsorted(cells, edges[-1], side="right")
        nearest = np.searchsorted((cells[1:] + cells[:-1]) / 2, edges[1:-1])
        at = np.unique([first, *nearest, last]).clip(0, len(cells) - 1)
        on_grid: Array = cells[np.unique(at)]
        return on_grid
    inner, low, high = _rounded(edges[1:-1], np.rint), edges[0], edges[-1]
    # A code is of numbers from its beginning away from zero, to which the next one belongs.
    if low <= 0:
        low = low - 1 if kind.integer else np.nextafter(low, -np.inf)
    if high >= 0:
        high = high + 1 if kind.integer else np.nextafter(high, np.inf)
    low, high = _rounded(low, np.floor), _rounded(high, np.ceil)
    if kind.integer:
        inner, low, high = (_between(each) for each in (inner, low, high))
    ascending: Array = np.unique([low, *inner[(inner > low) & (inner < high)], high])
    return ascending


@cache
def _cells(kind: Kind) -> Array:
    """Return what is halfway between the finite numbers of a kind, and as far beyond the ends."""
    values = np.unique(kind.values[np.isfinite(kind.values)])
    middles = values[:-1] / 2 + values[1:] / 2
    ends = 2 * values[0] - middles[0], 2 * values[-1] - middles[-1]
    cells: Array = np.concatenate([ends[:1], middles, ends[1:]])
    return cells


def _rounded(numbers: Array, way: Any) -> Array:
    """Round to eight significant bits, which is where codes begin."""
    fractions, exponents = np.frexp(numbers)
    rounded: Array = np.ldexp(way(fractions * 256) / 256, exponents)
    return rounded


def _between(numbers: Array) -> Array:
    """Move numbers to halfway between integers, towards zero."""
    halfway: Array = np.copysign(np.maximum(np.rint(np.abs(numbers)), 1) - 0.5, numbers)
    return halfway


def _symmetric_edges(low: float, high: float, smallest: float, count: int) -> Array:
    """Space edges logarithmically on both sides of zero, as far as there are elements."""
    largest = max(-low, high)
    start = max(largest * 10.0**-_DECADES, min(smallest, largest / 2))
    spans = [np.log2(max(bound / start, 1.0)) for bound in (-low, high)]
    shares = [round((count - 1) * span / sum(spans)) for span in spans]
    negative = _steps(start, -low, min(shares[0], count - 1))
    positive = _steps(start, high, count - 1 - min(shares[0], count - 1))
    edges = np.concatenate([-negative[::-1], positive])
    unique: Array = np.unique(edges)
    return unique


def _steps(start: float, stop: float, count: int) -> Array:
    """Return edges from `start` to `stop`, all but the last rounded to eight significant bits."""
    with np.errstate(over="ignore"):  # of the last edge, which is known
        edges = (
            np.geomspace(start, stop, count + 1) if count and stop > start else np.array([start])
        )
        fractions, exponents = np.frexp(edges)
        digits = np.rint(fractions * 256)
        digits[0] = np.floor(fractions[0] * 256)
        rounded: Array = np.ldexp(digits / 256, exponents)
    if len(edges) == 1:
        return np.maximum(rounded, stop)
    return np.append(rounded[:-1][rounded[:-1] < stop], stop)
