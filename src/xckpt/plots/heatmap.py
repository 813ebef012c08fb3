"""The elements of a tensor, ``ds.ckpt.plot.heatmap``, and how few of them are read for it."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.errors import shown
from xckpt.plots.axes import add_legend, new_axes, require_matplotlib, safe, whole_numbers, write
from xckpt.tensors import OpenTensors

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes

__all__ = ["Sample", "draw_heatmap", "sampled"]

_MOST_ELEMENTS = 1 << 24
# Of tensors with more than two axes, as many of the last ones lie along the columns as fit.
_WIDEST_FOLD = 1 << 16
_MANY_FRAMES_NBYTES = 256 << 20
_FEWEST_LONG_ROWS = 16
_NAN_COLOUR = "#e6007e"
_ROBUST = (1.0, 99.0)

Array = np.ndarray[Any, np.dtype[Any]]


class Sample(NamedTuple):
    """A few elements of a tensor, as a matrix, and the rows and columns of the whole tensor."""

    values: Array
    shape: tuple[int, int]


def draw_heatmap(
    obj: Any,
    name: str,
    *,
    size: tuple[int, int],
    robust: bool,
    ax: Axes | None,
    **style: Any,
) -> Axes:
    """Draw the elements of a tensor; see `xckpt.plots.Plots.heatmap`."""
    require_matplotlib()
    variable = OpenTensors(obj).variable(name)
    if not variable.size:
        raise ValueError(f"{shown(name)} has no elements")
    if min(size) < 1:
        raise ValueError(f"a picture has at least one row and one column, not {size}")
    sample = sampled(variable.data, *size, by_row=_has_cheap_rows(variable))
    ax = new_axes(ax, 7.0, 5.0)
    options = _colours(sample.values, robust=robust) | style
    rows, columns = sample.shape
    image = ax.imshow(
        np.ma.masked_invalid(sample.values),
        extent=(-0.5, columns - 0.5, rows - 0.5, -0.5),
        **{"aspect": "auto", "interpolation": "nearest", **options},
    )
    ax.figure.colorbar(image, ax=ax, extend="both" if robust else "neither")
    image.set_cmap(image.get_cmap().with_extremes(bad=_NAN_COLOUR))
    if not np.isfinite(sample.values).all():
        from matplotlib.patches import Patch

        add_legend(ax, [Patch(facecolor=_NAN_COLOUR)], ["NaN or infinite"], below=True)
    split = _split(variable.shape)
    ax.set_ylabel(safe(" × ".join(map(str, variable.dims[:split]))))
    ax.set_xlabel(safe(" × ".join(map(str, variable.dims[split:]))))
    for axis, length in ((ax.yaxis, rows), (ax.xaxis, columns)):
        whole_numbers(axis)
        if length == 1:
            axis.set_ticks([])
    write(ax.title, name, 70)
    return ax


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
    if height * shape[1] <= _MOST_ELEMENTS or len(array.shape) - split > 1:
        lines = _read([array[tuple(row)] for row in chosen], by_row)
        values = [_extremes(line.reshape(-1), starts) for line in lines]
    else:
        parts = _read([array[(*row, slice(a, a + part))] for row in chosen for a in starts], by_row)
        values = [_extremes(each.reshape(-1), np.array([0])) for each in parts]
    return Sample(np.concatenate(values).reshape(height, width), shape)


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
    found = []
    for part in dask.compute(*parts):
        values = np.asarray(part.todense() if hasattr(part, "todense") else part)
        if values.dtype.kind == "c":
            values = np.abs(values)
        found.append(values.astype(np.float64 if values.dtype.itemsize > 2 else np.float32))
    return found


def _extremes(line: Array, starts: Array) -> Array:
    """Return the element of largest magnitude of each block of a row."""
    high = np.maximum.reduceat(line, starts)
    low = np.minimum.reduceat(line, starts)
    return np.where(np.abs(low) > np.abs(high), low, high)
