"""`histogram`: how the elements of every tensor are distributed, from the sketches of a scan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xarray as xr

from xckpt.progress import Progress
from xckpt.statistics.accumulate import Sketch
from xckpt.statistics.describe import spectrum
from xckpt.statistics.entries import contents_of
from xckpt.statistics.scan import gather

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import ArrayLike

    from xckpt.progress import ProgressOption
    from xckpt.statistics.describe import Spectrum

Array = np.ndarray[Any, np.dtype[Any]]

# The logarithmic part of a symmetric scale spans so many powers of ten below the largest value.
_DECADES = 8


def histogram(
    obj: Any,
    bins: int | ArrayLike = 100,
    scale: Literal["symlog", "linear"] = "symlog",
    *,
    progress: ProgressOption = None,
    cache: bool = True,
) -> xr.Dataset:
    """Count the finite elements of every tensor in bins that all tensors share.

    It is made from the sketches of `stats`: after a call of that it reads nothing.

    Parameters
    ----------
    obj : path, Index, xarray.Dataset, xarray.DataArray or xarray.DataTree
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
    contents = contents_of(obj)
    entries = contents.entries()
    readers = [reader for entry in entries for reader in entry.readers]
    # Packed, because sketches of thousands of tensors take too much memory.
    with Progress(progress, "histogram") as bar:
        kept = gather(readers, Sketch, lambda _, s: _kept(s), bar, cache=cache, stretched=True)
    edges = _edges(bins, scale, [span for span, _ in kept if span is not None])
    variables: dict[Hashable, Any] = {}
    found = (
        _count(spectrum(Sketch.unpack(data, reader)), edges)
        for reader, (_, data) in zip(readers, kept, strict=True)
    )
    for entry in entries:
        rows = [next(found) for _ in entry.readers]
        values = np.array(rows, np.int64).reshape(*entry.shape, len(edges) - 1)
        counts = np.moveaxis(values, -1, 0)
        variables[entry.name] = xr.Variable(("bin", *entry.dims), counts, None, entry.encoding)
    stacked = {dim for entry in entries for dim in entry.dims}
    coords: dict[Hashable, Any] = {
        name: coord
        for name, coord in contents.coords.items()
        if coord.dims and set(coord.dims) <= stacked
    }
    coords["bin"] = (edges[:-1] + edges[1:]) / 2
    coords["bin_left"] = ("bin", edges[:-1])
    coords["bin_right"] = ("bin", edges[1:])
    return xr.Dataset(variables, coords)


def _kept(sketch: Sketch) -> tuple[tuple[float, float, float] | None, bytes]:
    """Keep a sketch, and its smallest and largest element and smallest magnitude but zero."""
    found = spectrum(sketch)
    values = found.values(found.counts > 0)
    if not len(values):
        return None, sketch.pack()
    smallest = float(np.abs(values[values != 0]).min(initial=np.inf))
    # Those that are known by their codes are clipped to the extremes; these are known.
    low, high = (values[0], values[-1]) if found.kind.exact else (found.low, found.high)
    return (float(low), float(high), smallest), sketch.pack()


def _count(found: Spectrum, edges: Array) -> Array:
    values = found.values()
    where = np.searchsorted(edges, values, side="right") - 1
    where[values == edges[-1]] = len(edges) - 2
    inside = (where >= 0) & (where < len(edges) - 1)
    counts = np.zeros(len(edges) - 1, np.int64)
    np.add.at(counts, where[inside], found.counts[inside])
    return counts


def _edges(bins: int | ArrayLike, scale: str, spans: Sequence[tuple[float, float, float]]) -> Array:
    if np.ndim(bins):
        edges = np.asarray(bins, np.float64)
        if len(edges) < 2 or not (np.diff(edges) > 0).all():
            raise ValueError("edges of bins are two or more numbers that ascend")
        return edges
    count = int(np.asarray(bins))
    if count < 1:
        raise ValueError(f"there is at least one bin, not {count}")
    low = min((span[0] for span in spans), default=0.0)
    high = max((span[1] for span in spans), default=0.0)
    if low == high:
        low, high = low - 0.5, high + 0.5
    if scale == "linear" or count < 3:
        return np.linspace(low, high, count + 1)
    smallest = min((span[2] for span in spans), default=np.inf)
    return _symmetric_edges(low, high, smallest, count)


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
    edges = np.geomspace(start, stop, count + 1) if count and stop > start else np.array([start])
    fractions, exponents = np.frexp(edges)
    digits = np.rint(fractions * 256)
    digits[0] = np.floor(fractions[0] * 256)
    rounded: Array = np.ldexp(digits / 256, exponents)
    if len(edges) == 1:
        return np.maximum(rounded, stop)
    return np.append(rounded[:-1][rounded[:-1] < stop], stop)
