"""Errors of channels, tensors against channels: ``ds.ckpt.plot.error``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import xarray as xr

from xckpt.formatting import counted
from xckpt.labels.filters import select_or_raise
from xckpt.notebook.folding import ascending
from xckpt.notebook.short_names import apart, short_names
from xckpt.options import renamed, takes
from xckpt.plots.axes import (
    add_heading,
    label_rows,
    new_axes,
    require_drawable,
    safe,
    whole_numbers,
)
from xckpt.plots.layers import require_statistic
from xckpt.plots.series import require_any, series_of
from xckpt.plots.theme import themed
from xckpt.structure.numbering import is_index

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.axes import Axes

    from xckpt.comparison.cells import Reduced
    from xckpt.labels import TensorFilter
    from xckpt.plots.series import Drawn
    from xckpt.structure.numbering import ParsedName
    from xckpt.typing import Array

# More rows or columns than a picture has pixels would hide the worst ones.
_MOST_ROWS, _MOST_COLUMNS = 256, 512
_MOST_LABELS = 32
_MOST_SERIES = 24
_WIDEST_LABEL, _WIDEST_BLOCK = 40, 32
_INCHES_PER_ROW, _POINTS_PER_CHARACTER = 0.24, 5.0
_UNKNOWN, _EQUAL = "#e6007e", "#9e9e9e"
# Statistics whose smallest value is the worst.
_GOOD_IF_LARGE = frozenset({"equal_fraction", "cosine", "sqnr_db"})


@renamed("names", "tensors")
@takes()
@themed
def draw_error(
    source: Drawn,
    /,
    other: Any = None,
    statistic: str = "sqnr_db",
    tensors: TensorFilter | None = None,
    *,
    exclude: TensorFilter | None = None,
    only: Literal["weights"] | None = None,
    dim: Reduced = -1,
    ax: Axes | None = None,
    **style: Any,
) -> Axes:
    """Draw the error of each channel, with a row for each tensor, such as a layer.

    Parameters
    ----------
    other : path, Index, xarray.Dataset, xarray.DataArray or xarray.DataTree, optional
        Checkpoint to compare with, such as the quantised model; or the result of
        `xckpt.compare` with `dim`. By default the object is such a result itself.
    statistic : str, default "sqnr_db"
        A statistic of `xckpt.compare`.
    dim : str, int, iterable of these, or mapping of these to int, default -1
        Dimensions to reduce, as for `xckpt.compare`; the others are channels.
    ax : matplotlib.axes.Axes, optional
        Where to draw; by default in a new figure.
    **style
        Passed on to `matplotlib.axes.Axes.imshow`.

    Returns
    -------
    matplotlib.axes.Axes
        The axes, with channels along the columns. Tensors with fewer channels are stretched to
        the full width. Many tensors are grouped in blocks whose names differ only in numbers.
        If there is no room for all channels or tensors, the worst of several neighbours is
        shown. Equal channels are grey; channels that are zero on one side only are pink.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    TypeError
        If there is nothing to compare with.
    ValueError
        If no tensor matches or is in both, the statistic does not exist, or there is only one
        value for each tensor.

    Examples
    --------
    >>> ds.ckpt.plot.error("quantised.safetensors", tensors="*.q_proj.weight")
    """
    from xckpt.comparison import MEASURES, compare
    from xckpt.statistics.grouping import structure_of_names

    require_drawable(ax, lambda trial: trial.imshow([[0.0]], **style))
    require_statistic(statistic, [measure for measure in MEASURES if measure != "status"])
    result = source.obj if other is None else other
    is_result = isinstance(result, xr.Dataset) and "statistic" in result.dims
    if other is None and not is_result:
        raise TypeError("plot.error() takes a checkpoint to compare with, or is of a comparison")
    chosen = source.chosen(tensors, exclude, only)
    if not is_result:
        result = compare(source.obj, other, tensors=chosen, dim=dim)
    rows, left_out = _channels_of(result, statistic, chosen)
    order = ascending(list(rows))
    rows = {name: rows[name] for name in np.array(list(rows), object)[order]}
    title, labels = short_names(list(rows))
    blocks: list[_Block] = []
    structure = structure_of_names(rows, result.encoding.get("origin"))
    parsed = {name: structure.siblings_key(name) for name in rows}
    if len(rows) > _MOST_LABELS:
        rows, blocks = _by_series(rows, parsed)
    height, sizes = len(rows), {row.size for row in rows.values()}
    width = min(max(sizes), _MOST_COLUMNS)
    worst = np.fmin if statistic in _GOOD_IF_LARGE else np.fmax
    values = np.empty((height, width))
    for line, row in zip(values, rows.values(), strict=True):
        places = np.arange(width) * row.size // width
        # The worst of neighbours in a longer row, or repeated values.
        line[:] = worst.reduceat(row, places) if row.size >= width else row[places]
    if height > _MOST_ROWS:  # keep the worst of neighbours
        values = worst.reduceat(values, np.arange(_MOST_ROWS) * height // _MOST_ROWS, axis=0)
    ax = new_axes(ax, 8.0, 1.8 + _INCHES_PER_ROW * min(max(height, 4), _MOST_LABELS))
    image = _draw_image(ax, values, (max(sizes) if len(sizes) == 1 else 1, height), style)
    ax.figure.colorbar(image, ax=ax, extend="both").set_label(safe(statistic))
    _label_rows(ax, list(parsed.values()), labels, blocks)
    _label_columns(ax, sizes)
    equal = sum(int(np.isposinf(row).sum()) for row in rows.values())
    widest = max((len(block.label) for block in blocks), default=0)
    if title in {"", "*"} or blocks:  # a note has the number of too many tensors
        is_cut = height > _MOST_ROWS
        title = f"{statistic} of channels" if is_cut else counted(height, "tensor")
    add_heading(
        ax,
        title,
        f"{height:,} tensors, the worst of neighbours" if height > _MOST_ROWS else "",
        f"{max(sizes):,} channels, the worst of neighbours" if max(sizes) > width else "",
        f"{counted(equal, 'channel')} equal" if equal else "",
        f"without {counted(left_out, 'tensor')}: alone, or of one channel" if left_out else "",
        left=100 + _POINTS_PER_CHARACTER * widest,
    )
    return ax


class _Block(NamedTuple):
    """Neighbouring rows of tensors whose names differ only in their indices."""

    first: int
    last: int
    label: str


def _label_rows(
    ax: Axes, parsed: list[ParsedName], labels: list[str], blocks: list[_Block]
) -> None:
    """Label each row, or each block if there are blocks."""
    ax.tick_params("y", length=0, labelsize="small")
    if not blocks:
        ax.set_yticks(range(len(parsed)), [safe(label, _WIDEST_LABEL) for label in labels])
        if all(map(is_index, labels)) and parsed[0].modules:
            ax.set_ylabel(safe(parsed[0].modules[-1]))
        return
    ax.set_yticks([])
    middles = [(block.first + block.last) / 2 for block in blocks]
    label_rows(ax, middles, [block.label for block in blocks])
    for block in blocks[1:]:
        ax.axhline(block.first - 0.5, color=_EQUAL, linewidth=0.6)


def _label_columns(ax: Axes, sizes: set[int]) -> None:
    if len(sizes) == 1:
        whole_numbers(ax.xaxis)
        ax.set_xlabel("channel")
    else:
        ax.set_xticks([-0.5, 0.5], ["first", "last"])
        ax.set_xlabel(f"channels of each tensor, {min(sizes):,} to {max(sizes):,}")


def _by_series(
    rows: Mapping[str, Array], parsed: Mapping[str, ParsedName]
) -> tuple[dict[str, Array], list[_Block]]:
    """Return the rows sorted by series, and the block of each series."""
    _, all_series = series_of(parsed, _MOST_SERIES)
    ordered: dict[str, Array] = {}
    blocks = []
    for series in all_series:
        first = len(ordered)
        ordered |= {name: rows[name] for name in series.names}
        times = f"  ×{len(series.names):,}" if len(series.names) > 1 else ""
        blocks.append(_Block(first, len(ordered) - 1, times))
    labels = apart([series.label for series in all_series], _WIDEST_BLOCK)
    pairs = zip(blocks, labels, strict=True)
    return ordered, [block._replace(label=label + block.label) for block, label in pairs]


def _channels_of(
    result: xr.Dataset, statistic: str, chosen: TensorFilter | None
) -> tuple[dict[str, Array], int]:
    """Return the values of the channels of tensors, and the number of tensors without values."""
    from xckpt.statistics import channel_values

    values = channel_values(result, statistic)
    selected = {name: values[name] for name in select_or_raise(values, chosen)}
    require_any(selected)
    rows = {name: row for name, row in selected.items() if not np.isnan(row).all()}
    rows = {name: row for name, row in rows.items() if row.size > 1} or rows
    if not rows:
        count = counted(len(selected), "tensor")
        raise ValueError(f"none of {count} is in both with the same shape")
    if max(row.size for row in rows.values()) == 1:
        raise ValueError("there is one value for each tensor: compare with dim=-1 for channels")
    return rows, len(selected) - len(rows)


def _draw_image(ax: Axes, values: Array, size: tuple[int, int], style: dict[str, Any]) -> Any:
    """Draw values as an image, with a colour for each infinity: equal channels, and zeros."""
    from matplotlib import colormaps

    finite = values[np.isfinite(values)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    width, height = size
    look: dict[str, Any] = {
        "vmin": low,
        "vmax": high if high > low else low + 1,
        "cmap": "viridis",
        "aspect": "auto",
        "interpolation": "nearest",
    } | style
    colours = colormaps[look["cmap"]] if isinstance(look["cmap"], str) else look["cmap"]
    look["cmap"] = colours.with_extremes(bad=(0, 0, 0, 0), over=_EQUAL, under=_UNKNOWN)
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    # Put infinities beyond the ends of the colours; NaN is transparent.
    beyond = look["vmax"] - look["vmin"]
    drawable = np.nan_to_num(values, nan=np.nan, posinf=high + beyond, neginf=low - beyond)
    return ax.imshow(drawable, extent=extent, **look)
