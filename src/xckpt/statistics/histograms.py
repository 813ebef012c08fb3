"""`histogram`: counts of the elements of every tensor in bins, from the sketches of a scan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from operator import index
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast

import numpy as np
import xarray as xr

from xckpt.index import paused_collector
from xckpt.options import ScanOptions, takes
from xckpt.progress import Progress
from xckpt.scan.entries import contents_of, entries_of, filter_of, laid
from xckpt.scan.scanning import gather
from xckpt.scan.statistics_cache import open_rows
from xckpt.statistics.counts import Sketch
from xckpt.statistics.describe import Spectrum, spectrum

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import ArrayLike

    from xckpt.arrays.kinds import Kind
    from xckpt.arrays.streams import ElementStream
    from xckpt.datasets.tensors import OpenTensors
    from xckpt.labels import TensorFilter
    from xckpt.scan.entries import Describable, Entry
    from xckpt.typing import Array, Dataset

# Powers of ten below the largest value that the logarithmic part of a symmetric scale spans.
_DECADES = 8
# Elements outside these quantiles are outliers.
_BULK = (0.005, 0.995)


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution of the finite elements of a tensor; NaN if it has no finite element."""

    name: str
    count: int  # of finite elements
    other: int  # elements that are NaN or infinite
    low: float
    high: float
    mean: float
    smallest: float  # nonzero magnitude
    bulk: tuple[float, float]  # quantiles that enclose 99 % of the elements
    _stream: ElementStream
    # Packed, because sketches of thousands of tensors take too much memory.
    _sketch: bytes

    @property
    def kind(self) -> Kind:
        """The kind of the elements."""
        return self._stream.kind

    @property
    def span(self) -> tuple[float, float, float]:
        """The smallest and the largest element, and the smallest nonzero magnitude."""
        return self.low, self.high, self.smallest

    def counts(self, edges: Array) -> Array:
        """Return the number of elements between every two edges."""
        return _count(spectrum(Sketch.unpack(self._sketch, self._stream)), edges)


def distributions(entries: Sequence[Entry]) -> list[Distribution]:
    """Return the distribution of each tensor of each entry, in order; scan what is not cached."""
    streams = [stream for entry in entries for stream in entry.streams]

    def finish(number: int, sketch: Sketch) -> Distribution:
        elements = spectrum(sketch)
        is_present = elements.counts > 0
        values, counts = elements.values(is_present), elements.counts[is_present]
        count = int(counts.sum())
        low, high, smallest = _span(elements, values) if count else (np.nan, np.nan, np.inf)
        mean, bulk = np.nan, (np.nan, np.nan)
        if count:
            mean = float(np.average(values, weights=counts))
            ends = np.searchsorted(np.cumsum(counts), np.multiply(_BULK, count))
            first, last = values[ends.clip(0, len(values) - 1)].tolist()
            bulk = first, last
        return Distribution(
            name=streams[number].name,
            count=count,
            other=sketch.count - count,
            low=low,
            high=high,
            mean=mean,
            smallest=smallest,
            bulk=bulk,
            _stream=streams[number],
            _sketch=sketch.pack(),
        )

    with Progress(None, "histogram") as bar:
        results: list[Distribution] = gather(
            streams, Sketch, finish, bar, cache=True, stretched=True
        )
    return results


@takes(ScanOptions)
def histogram(
    obj: Describable,
    tensors: TensorFilter | None = None,
    *,
    bins: int | ArrayLike = 100,
    scale: Literal["symlog", "linear"] = "symlog",
    **options: Unpack[ScanOptions],
) -> Dataset:
    """Count the finite elements of every tensor in bins that all tensors share.

    The counts come from the same sketches as `stats`, so a call after `stats` reads nothing.

    Parameters
    ----------
    obj : path, mapping, Index, xarray.Dataset, xarray.DataArray or xarray.DataTree
        Tensors to describe.
    bins : int or sequence of float
        Number of bins between the smallest and the largest element of all tensors, or the edges.
    scale : {"symlog", "linear"}
        Spacing of the edges: equal, or logarithmic on both sides of one bin around zero. The
        edges of that bin are a hundred-millionth of the largest magnitude, or the smallest
        magnitude if that is larger. Ignored if `bins` has the edges.

    Returns
    -------
    xarray.Dataset
        Integer counts for each variable, with the dimension ``bin`` first, then the dimensions
        along which tensors are stacked. The coordinates ``bin``, ``bin_left`` and ``bin_right``
        have the middles and the edges. A bin includes its left edge; the last bin includes both.

    Raises
    ------
    ValueError
        If the number of bins is less than one, edges do not ascend, or the scale is unknown.

    Notes
    -----
    Elements of 8 and 16 bits are counted exactly. A sketch keeps only the sign, the exponent and
    seven bits of the fraction of larger elements; elements that agree in these are counted
    together, in the bin of the number in their middle. The outer edges are the smallest and the
    largest element. The other edges of the symmetric scale are rounded to numbers with so few bits,
    so that the counts are exact, except that elements equal to a negative edge may be counted on
    its left. With other edges, elements within a relative distance of 2**-7 from an edge may be
    counted on its other side.

    Examples
    --------
    >>> h = xckpt.histogram("m.zt")
    >>> h["lm_head.weight"].plot.step(x="bin")
    """
    if scale not in {"symlog", "linear"}:
        raise ValueError(f"scale is 'symlog' or 'linear', not {scale!r}")
    given: Any = tensors
    if isinstance(given, int | np.ndarray):  # numbers select no tensors
        tensors, bins = None, given
    count_or_edges = require_bins(bins)
    contents, cache = contents_of(obj, options["storage_options"]), options["cache"]
    with paused_collector():
        entries = entries_of(contents, chosen=filter_of(tensors, options, contents))
    streams = [stream for entry in entries for stream in entry.streams]
    # Packed, because sketches of thousands of tensors take too much memory.
    packed: dict[int, bytes] = {}
    with Progress(options["progress"], "histogram") as bar:

        def scan(tensors: list[int]) -> list[list[float]]:
            def finish(position: int, sketch: Sketch) -> list[float]:
                packed[tensors[position]] = sketch.pack()
                elements = spectrum(sketch)
                return _span(elements, elements.values(elements.counts > 0))

            selected = [streams[tensor] for tensor in tensors]
            return gather(selected, Sketch, finish, bar, cache=cache, stretched=True)

        def count(tensor: int) -> Array:
            sketch = Sketch.unpack(packed.pop(tensor), streams[tensor])
            # Rows are floats, which cannot represent every large count: store the bits of integers.
            return _count(spectrum(sketch), edges).view(np.float64)

        with open_rows(streams, ("span",), 3, enabled=cache) as spans:
            spans.add(scan(spans.missing))
        has_span = ~np.isnan(spans.values[:, 0])
        edges = bin_edges(count_or_edges, scale, spans.values[has_span].tolist())
        cache_key = ("tallies", *edges.tolist())
        with open_rows(streams, cache_key, len(edges) - 1, enabled=cache) as rows:
            scan([tensor for tensor in rows.missing if tensor not in packed])
            rows.add(map(count, rows.missing))
    return _laid_out(rows.values.view(np.int64), edges, entries, contents)


def _laid_out(
    rows: Array, edges: Array, entries: Sequence[Entry], contents: OpenTensors
) -> Dataset:
    """Return the counts of each variable, with the edges of the bins as coordinates."""
    variables: dict[Hashable, Any] = {}
    stop = 0
    for entry in entries:
        start, stop = stop, stop + len(entry.streams)
        counts = laid(rows[start:stop], entry.shape, entry.gone)
        variables[entry.name] = xr.Variable(("bin", *entry.dims), counts, None, entry.encoding)
    stacked = {dim for entry in entries for dim in entry.dims}
    coords: dict[Hashable, Any] = {
        name: coord
        for name, coord in contents.common_coords.items()
        if coord.dims and set(coord.dims) <= stacked
    }
    coords["bin"] = edges[:-1] / 2 + edges[1:] / 2
    coords["bin_left"] = ("bin", edges[:-1])
    coords["bin_right"] = ("bin", edges[1:])
    result = xr.Dataset(variables, coords, {"source": contents.source} if contents.source else {})
    result.encoding["origin"] = contents.origin  # for groups by role
    return cast("Dataset", result)


def _span(elements: Spectrum, values: Array) -> list[float]:
    """Return the smallest and the largest element, and the smallest nonzero magnitude."""
    if not len(values):
        return [np.nan, np.nan, np.nan]
    smallest = float(np.abs(values[values != 0]).min(initial=np.inf))
    # In other kinds, values are middles of codes, but a sketch has the exact extremes.
    low, high = (values[0], values[-1]) if elements.kind.exact else (elements.low, elements.high)
    return [float(low), float(high), smallest]


def _count(elements: Spectrum, edges: Array) -> Array:
    values = elements.values()
    bins = np.searchsorted(edges, values, side="right") - 1
    bins[values == edges[-1]] = len(edges) - 2
    is_inside = (bins >= 0) & (bins < len(edges) - 1)
    counts = np.zeros(len(edges) - 1, np.int64)
    np.add.at(counts, bins[is_inside], elements.counts[is_inside])
    return counts


def require_bins(bins: Any) -> int | Array:
    """Return the number of bins or their edges; raise if they are invalid."""
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
    """Return the edges of bins that cover the spans of all tensors; see `Distribution.span`."""
    if not isinstance(bins, int):
        return bins
    count = bins
    low = min((span[0] for span in spans), default=0.0)
    high = max((span[1] for span in spans), default=0.0)
    if low == high:
        low, high = low - 0.5, high + 0.5
    if scale == "linear" or count < 3:
        return np.linspace(low, high, count + 1)
    # Edges are spaced logarithmically on both sides of zero.
    smallest = min((span[2] for span in spans), default=np.inf)
    largest = max(-low, high)
    start = max(largest * 10.0**-_DECADES, min(smallest, largest / 2))
    octaves = [np.log2(max(bound / start, 1.0)) for bound in (-low, high)]
    below = min(round((count - 1) * octaves[0] / sum(octaves)), count - 1)
    negative, positive = _steps(start, -low, below), _steps(start, high, count - 1 - below)
    return np.unique(np.concatenate([-negative[::-1], positive]))


def edges_on_grid(kind: Kind, edges: Array) -> Array:
    """Move edges to halfway between the numbers that a sketch of a kind distinguishes."""
    # Merge bins without such a number with their neighbours, so that each bin is as wide as the
    # spacing of its numbers. Counts divided by these widths are densities without a comb where bins
    # are finer than the numbers, and without a step where the spacing doubles. Elements equal to
    # the first or the last edge are inside.
    if kind.exact:
        cells = _cells(kind)
        first = np.searchsorted(cells, edges[0], side="left") - 1
        last = np.searchsorted(cells, edges[-1], side="right")
        nearest = np.searchsorted((cells[1:] + cells[:-1]) / 2, edges[1:-1])
        cell_numbers = np.unique([first, *nearest, last]).clip(0, len(cells) - 1)
        on_grid: Array = cells[np.unique(cell_numbers)]
        return on_grid
    inner, low, high = _rounded(edges[1:-1], np.rint), edges[0], edges[-1]
    # A code covers a range of magnitudes up to the next code, whose first number it excludes.
    if low <= 0:
        low = low - 1 if kind.integer else np.nextafter(low, -np.inf)
    if high >= 0:
        high = high + 1 if kind.integer else np.nextafter(high, np.inf)
    low, high = _rounded(low, np.floor), _rounded(high, np.ceil)
    if kind.integer:
        # Halfway between integers, towards zero.
        inner, low, high = (
            np.copysign(np.maximum(np.rint(np.abs(bounds)), 1) - 0.5, bounds)
            for bounds in (inner, low, high)
        )
    return np.unique([low, *inner[(inner > low) & (inner < high)], high])


@cache
def _cells(kind: Kind) -> Array:
    """Return the midpoints between the finite numbers of a kind, and one beyond each end."""
    values = np.unique(kind.values[np.isfinite(kind.values)])
    middles = values[:-1] / 2 + values[1:] / 2
    ends = 2 * values[0] - middles[0], 2 * values[-1] - middles[-1]
    return np.concatenate([ends[:1], middles, ends[1:]])


def _rounded(numbers: Array, round_to_integer: Any) -> Array:
    """Round to eight significant bits, the first numbers of codes."""
    fractions, exponents = np.frexp(numbers)
    rounded: Array = np.ldexp(round_to_integer(fractions * 256) / 256, exponents)
    return rounded


def _steps(start: float, stop: float, count: int) -> Array:
    """Return edges from `start` to `stop`, all but the last rounded to eight significant bits."""
    with np.errstate(over="ignore"):  # in the last edge, which `stop` replaces
        edges = (
            np.geomspace(start, stop, count + 1) if count and stop > start else np.array([start])
        )
        rounded = _rounded(edges, np.rint)
        rounded[0] = _rounded(edges[0], np.floor)
    if len(edges) == 1:
        return np.maximum(rounded, stop)
    return np.append(rounded[:-1][rounded[:-1] < stop], stop)
