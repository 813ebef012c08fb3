"""The elements of a tensor, ``ds.ckpt.plot.heatmap``, and how few of them are read for it."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import dask.array as da
import numpy as np

from xckpt.arrays.sparse import dense_values
from xckpt.datasets.tensors import OpenTensors
from xckpt.errors import shown
from xckpt.formatting import counted
from xckpt.plots.axes import (
    add_heading,
    add_legend,
    new_axes,
    require_drawable,
    safe,
    whole_numbers,
)
from xckpt.plots.series import codes_drawn, codes_of
from xckpt.plots.theme import themed

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes

_MOST_ELEMENTS = 1 << 24
# Of tensors with more than two axes, as many of the last ones lie along the columns as fit.
_WIDEST_FOLD = 1 << 16
_MANY_FRAMES_NBYTES = 256 << 20
_FEWEST_LONG_ROWS = 16
# Blocks along the rows of a picture of all of them.
_MOST_ROWS = 256
_MOST_MARKS = 1000
_START = np.array([0])
_NAN_COLOUR = "#e6007e"
_DEAD_COLOUR = "#d9731a"
_ROBUST = (1.0, 99.0)

Array = np.ndarray[Any, np.dtype[Any]]


class Sample(NamedTuple):
    """A few elements of a tensor, as a matrix, and what is known of the whole tensor."""

    values: Array
    shape: tuple[int, int]
    #: Which rows were read, and how many columns of them.
    rows: Array
    read: int
    #: Rows of zeros among them.
    dead: Array

    def describe(self) -> str:
        """Return the rows and elements that were read, as a text; empty if all were."""
        nrows, ncolumns = self.shape
        if self.values.shape == self.shape:
            return ""
        count = len(self.rows)
        rows = f"all {nrows:,} rows" if count == nrows else f"{count:,} of {nrows:,} rows"
        if self.read < ncolumns:
            rows += f", {self.read:,} of {ncolumns:,} elements of each"
        is_reduced = self.values.shape != (count, self.read)
        return rows + (", largest of each block" if is_reduced else "")


@themed
def draw_heatmap(
    obj: Any,
    name: str,
    *,
    size: tuple[int | str, int],
    robust: bool,
    known: xr.Dataset | None,
    ax: Axes | None,
    **style: Any,
) -> Axes:
    """Draw the elements of a tensor; see `xckpt.plots.Plots.heatmap`."""
    require_drawable(ax, lambda trial: trial.imshow([[0.0]], **style))
    rows, columns = size
    if columns < 1 or (rows != "all" and (isinstance(rows, str) or rows < 1)):
        raise ValueError(
            f"a picture has at least one row, or 'all', and at least one column, not {size}"
        )
    tensors = OpenTensors(obj)
    variable = tensors.variable(name)
    if not variable.size:
        raise ValueError(f"{shown(name)} has no elements")
    if isinstance(rows, str):
        sample = blocks_of(variable.data, _MOST_ROWS, columns)
    else:
        sample = sampled(variable.data, rows, columns, by_row=_has_cheap_rows(variable))
    ax = new_axes(ax, 7.0, 5.4)
    options = _colours(sample.values, robust=robust) | style
    nrows, ncolumns = sample.shape
    image = ax.imshow(
        np.ma.masked_invalid(sample.values),
        extent=(-0.5, ncolumns - 0.5, nrows - 0.5, -0.5),
        **{"aspect": "auto", "interpolation": "nearest", **options},
    )
    bar = ax.figure.colorbar(image, ax=ax, extend="both" if robust else "neither")
    image.set_cmap(image.get_cmap().with_extremes(bad=_NAN_COLOUR))
    scales = codes_of(tensors).get(name)
    if scales is not None:
        bar.set_label("code")
    _mark(ax, sample)
    split = _split(variable.shape)
    ax.set_ylabel(safe(" × ".join(map(str, variable.dims[:split]))))
    ax.set_xlabel(safe(" × ".join(map(str, variable.dims[split:]))))
    for axis, length in ((ax.yaxis, nrows), (ax.xaxis, ncolumns)):
        whole_numbers(axis)
        if length == 1:
            axis.set_ticks([])
    notes = sample.describe(), _what_is_known(tensors, name, known, sample), codes_drawn(scales)
    add_heading(ax, name, *notes)
    return ax


def _mark(ax: Axes, sample: Sample) -> None:
    """Mark rows of zeros, and rows with what is not finite, at the right edge; explain both."""
    from matplotlib.lines import Line2D

    height, nrows = len(sample.values), sample.shape[0]
    unknown = ~np.isfinite(sample.values)
    infinite = f"NaN or infinite, in {counted(int(unknown.sum()), 'block')}"
    at = np.flatnonzero(unknown.any(axis=1))
    dead = sample.dead if len(sample.dead) < len(sample.rows) else sample.dead[:0]
    marks = [
        (_NAN_COLOUR, (at + 0.5) * nrows / height - 0.5, infinite),
        (_DEAD_COLOUR, dead, f"{counted(len(dead), 'row')} of zeros"),
    ]
    handles, labels = [], []
    for colour, places, text in marks:
        if not len(places):
            continue
        look: dict[str, Any] = {
            "color": colour,
            "marker": "<",
            "markersize": 5,
            "linestyle": "",
            "clip_on": False,
        }
        if len(places) > _MOST_MARKS:  # nobody could tell them apart
            places = places[np.unique(places * _MOST_MARKS // nrows, return_index=True)[1]]  # noqa: PLW2901
        ax.plot(
            np.full(len(places), 1.012),
            places,
            transform=ax.get_yaxis_transform(),
            markeredgewidth=0,
            **look,
        )
        handles.append(Line2D([], [], **look))
        labels.append(text)
    add_legend(ax, handles, labels, below="labels")


def _what_is_known(
    tensors: OpenTensors, name: str, known: xr.Dataset | None, sample: Sample
) -> str:
    """Say how many NaN, infinities and dead rows there are in all, if statistics know it."""
    from xckpt.health import findings
    from xckpt.statistics import known_stats

    found = known_stats(tensors[name])
    if found is None and known is not None:
        (home,) = tensors.variables_of([name])
        found = known[[home]] if home in known else None
    if found is None:
        return ""
    rules = findings(found)
    own = rules[rules["tensor"] == name]
    faults = {rule: int(value) for rule, value in zip(own["rule"], own["value"], strict=True)}
    words = {"nan": "NaN", "inf": "infinities", "dead_rows": "rows of zeros"}
    facts = [f"{faults[rule]:,} {word}" for rule, word in words.items() if rule in faults]
    if not facts:
        return ""
    where = "" if len(sample.rows) == sample.shape[0] else ': rows="all" shows where'
    return f"{', '.join(facts)} in all{where}"


def _colours(values: Array, *, robust: bool) -> dict[str, Any]:
    """Choose colours: from both sides of zero where there are numbers on both."""
    known = values[np.isfinite(values)]
    if not known.size:
        return {}
    low, high = np.percentile(known, _ROBUST) if robust else (known.min(), known.max())
    if low >= 0 or high <= 0:
        return {"vmin": float(low), "vmax": float(high), "cmap": "viridis"}
    limit = float(max(-low, high))
    return {"vmin": -limit, "vmax": limit, "cmap": "RdBu_r"}


# --- what is read --------------------------------------------------------------------------------


def _has_cheap_rows(variable: xr.Variable) -> bool:
    """Return whether reading a row takes less than reading a chunk, as far as is known."""
    encoding = variable.encoding
    parts = encoding.get("parts", {"data": encoding}).values()
    compressions = {part.get("stored_compression") for part in parts} - {None}
    if encoding.get("layout") in {None, "sparse_coo"} or compressions - {"zstd-seekable"}:
        return False
    # A row decodes the frame that it is in, which is 1 MiB as a rule.
    return not compressions or variable.nbytes > _MANY_FRAMES_NBYTES


def sampled(array: Any, rows: int, columns: int, *, by_row: bool = True) -> Sample:
    """Read from each block of an array the element of largest magnitude in its middle row.

    Rows of a dask array are read one by one, or else from chunks that are read once for all of
    their rows. Where rows are long, only parts of them are read.
    """
    split = _split(array.shape)
    shape = prod(array.shape[:split]), prod(array.shape[split:])
    height, width = min(rows, shape[0]), min(columns, shape[1])
    if height * shape[1] > _MOST_ELEMENTS:
        height = min(height, max(_FEWEST_LONG_ROWS, _MOST_ELEMENTS // shape[1]))
    edges = np.arange(height + 1) * shape[0] // height
    chosen = [np.unravel_index(row, array.shape[:split]) for row in (edges[:-1] + edges[1:]) // 2]
    starts = np.arange(width) * shape[1] // width
    part = _MOST_ELEMENTS // (height * width)
    rows_read = (edges[:-1] + edges[1:]) // 2
    if height * shape[1] <= _MOST_ELEMENTS or len(array.shape) - split > 1:
        lines = [line.reshape(-1) for line in _read([array[tuple(row)] for row in chosen], by_row)]
        values = np.concatenate([_extremes(line, starts) for line in lines])
        dead = np.array([row for row, line in zip(rows_read, lines, strict=True) if not line.any()])
        read = shape[1]
    else:
        parts = _read([array[(*row, slice(a, a + part))] for row in chosen for a in starts], by_row)
        values = np.concatenate([_extremes(each.reshape(-1), _START) for each in parts])
        dead, read = np.array([]), min(part * width, shape[1])
    return Sample(values.reshape(height, width), shape, rows_read, read, dead)


def blocks_of(array: Any, rows: int, columns: int) -> Sample:
    """Read all of an array, chunk by chunk, and keep the largest magnitude of each block."""
    import dask

    split = _split(array.shape)
    shape = prod(array.shape[:split]), prod(array.shape[split:])
    size = min(rows, shape[0]), min(columns, shape[1])
    if isinstance(array, da.Array):
        starts = [np.cumsum([0, *along]).tolist() for along in array.chunks]
        chunks = array.to_delayed()
        tasks = [
            dask.delayed(_chunk_extremes)(
                chunks[at],
                [s[i] for s, i in zip(starts, at, strict=True)],
                array.shape,
                split,
                size,
            )
            for at in np.ndindex(chunks.shape)
        ]
        found = dask.compute(*tasks)
    else:
        found = (_chunk_extremes(array, [0] * array.ndim, array.shape, split, size),)
    values = np.zeros(size)
    is_dead = np.ones(shape[0], bool)
    for place, extremes, row_numbers, zeros in found:
        values[place] = _larger(values[place], extremes)
        is_dead[row_numbers] &= zeros
    return Sample(values, shape, np.arange(shape[0]), shape[1], np.flatnonzero(is_dead))


def _chunk_extremes(
    chunk: Any, start: list[int], shape: tuple[int, ...], split: int, size: tuple[int, int]
) -> tuple[Any, Array, Array, Array]:
    """Return the extremes of the blocks that a chunk has a part in, and its rows of zeros."""
    values = _numbers(chunk)
    rows = _flat_indices(start[:split], values.shape[:split], shape[:split])
    columns = _flat_indices(start[split:], values.shape[split:], shape[split:])
    table = values.reshape(len(rows), len(columns))
    zeros: Array = np.logical_not(table.any(axis=1))
    places = []
    lengths = prod(shape[:split]), prod(shape[split:])
    for axis, (numbers, length, count) in enumerate(
        zip((rows, columns), lengths, size, strict=True)
    ):
        block = np.searchsorted(np.arange(1, count) * length // count, numbers, side="right")
        first = np.flatnonzero(np.diff(block, prepend=-1))
        table = _extremes(table, first, axis)
        places.append(block[first])
    return np.ix_(*places), table, rows, zeros


def _flat_indices(start: list[int], sizes: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    """Return the positions of a box in an array that is laid out flat."""
    if not shape:
        return np.zeros(1, np.int64)
    grid = np.ix_(*[np.arange(a, a + n) for a, n in zip(start, sizes, strict=True)])
    flat: Array = np.ravel_multi_index(grid, shape).ravel()
    return flat


def _split(shape: tuple[int, ...]) -> int:
    """Return how many axes lie along the rows."""
    split = min(1, len(shape) - 1) if shape else 0
    while 0 < split < len(shape) - 1 and prod(shape[split:]) > _WIDEST_FOLD:
        split += 1
    return split


def _read(parts: list[Any], alone: bool) -> list[Array]:  # noqa: FBT001  the only other one
    """Compute slices in one go, as numbers that can be drawn."""
    import dask

    if alone:  # optimised together, slices of one chunk would share the read of all of it
        parts = [each for part in parts for each in dask.optimize(part)]
    return [_numbers(part) for part in dask.compute(*parts)]


def _numbers(part: Any) -> Array:
    """Return elements as numbers that can be drawn."""
    values = dense_values(part)
    if values.dtype.kind == "c":
        values = np.abs(values.astype(np.complex128))
    return values.astype(np.float64 if values.dtype.itemsize > 2 else np.float32)


def _extremes(values: Array, starts: Array, axis: int = 0) -> Array:
    """Return the element of largest magnitude of each block along an axis."""
    high = np.maximum.reduceat(values, starts, axis)
    return _larger(high, np.minimum.reduceat(values, starts, axis))


def _larger(one: Array, other: Array) -> Array:
    """Return the numbers of larger magnitude, or NaN."""
    larger: Array = np.where((np.abs(other) > np.abs(one)) | np.isnan(other), other, one)
    return larger
