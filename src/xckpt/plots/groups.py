"""A statistic of groups of tensors as a heat map, layers against modules: ``ds.ckpt.plot.by``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xarray as xr

from xckpt.formatting import counted
from xckpt.notebook.short_names import short_names
from xckpt.options import takes
from xckpt.plots.axes import (
    add_heading,
    label_cells,
    mark_beyond,
    near_limits,
    new_axes,
    require_drawable,
    safe,
    themed,
    whole_numbers,
)
from xckpt.plots.layers import WIDE_SPAN, require_statistic

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from matplotlib.axes import Axes

    from xckpt.labels import TensorFilter
    from xckpt.plots.series import Drawn
    from xckpt.typing import Array

_INCHES_PER_ROW, _INCHES_PER_COLUMN, _FRAME = 0.2, 0.34, 2.2
_TALLEST, _WIDEST = 11.0, 14.0
_INFINITE, _UNDEFINED = "#9e9e9e", "#e6007e"


@takes()
@themed
def draw_groups(
    source: Drawn,
    /,
    statistic: str = "std",
    *keys: str | Iterable[str],
    tensors: TensorFilter | None = None,
    exclude: TensorFilter | None = None,
    only: Literal["weights"] | None = None,
    stats: xr.Dataset | None = None,
    ax: Axes | None = None,
    **style: Any,
) -> Axes:
    """Draw a statistic of groups of tensors as a heat map, such as layers against modules.

    The object is a checkpoint, a result of `stats`, `compare` or `spectrum`, or groups from
    ``.ckpt.by``, also those of findings. The colours do not span a few values far beyond the
    others: these are marked with a cross, and the heading names them. They are logarithmic if
    the values span more than two powers of ten, and have zero in the middle if there are
    values of both signs.

    Parameters
    ----------
    statistic : str, default "std"
        A statistic of the result; of a checkpoint, one of `xckpt.stats` or `xckpt.spectrum`.
    *keys : str or list of str
        One or two keys, as for ``.ckpt.by``: rows, then columns. By default ``"layer"`` and
        ``"module"``. Groups have their own.
    stats : xarray.Dataset, optional
        Result of `xckpt.stats` for a checkpoint; by default the last one, else computed or
        taken from the cache.
    **style
        Passed on to `matplotlib.axes.Axes.imshow`.

    Returns
    -------
    matplotlib.axes.Axes
        The axes, with labels at equal intervals. Cells without tensors are transparent, those
        whose value is infinite grey, and undefined ones pink.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    ValueError
        If there are more than two keys, no tensor has them, or the groups lack the statistic.

    Examples
    --------
    >>> ds.ckpt.plot.by("kurtosis", "layer", "role")
    >>> ds.ckpt.compare("tuned.zt").ckpt.plot.by("rel_l2")
    """
    from xckpt.statistics.grouping import list_keys

    require_drawable(ax, lambda trial: trial.imshow([[0.0]], **style))
    if len(names := list_keys(keys)) > 2:
        raise ValueError(f"a picture has rows and columns, and no {len(names)} keys")
    grouped = _groups_of(source, statistic, names, stats, (tensors, exclude, only))
    values = grouped[statistic].to_numpy().astype(np.float64)
    labels = [grouped[key].to_numpy().tolist() for key in grouped[statistic].dims]
    names = [str(key) for key in grouped[statistic].dims]
    if values.ndim == 1:
        values, labels = values[:, None], [labels[0], [""]]
    rows, columns = values.shape
    texts = [_label_texts(axis_labels) for axis_labels in labels]
    width = _FRAME + max(4.0, _INCHES_PER_COLUMN * columns)
    height = _FRAME + max(1.2, _INCHES_PER_ROW * rows)
    ax = new_axes(ax, min(width, _WIDEST), min(height, _TALLEST))
    image = ax.imshow(np.ma.masked_invalid(values), **_colours(values) | style)

    def place_text(row: int, column: int) -> str:
        place = zip(names, (texts[0][row], texts[1][column]), strict=False)
        return ", ".join(f"{key} {text}" for key, text in place)

    extend, notes = mark_beyond(ax, image, values, place_text)
    bar = ax.figure.colorbar(image, ax=ax, extend=extend)
    bar.set_label(safe(statistic))
    if grouped[statistic].dtype.kind == "i":
        whole_numbers(bar.ax.yaxis)
    has_tensors = grouped["tensors"].to_numpy().reshape(values.shape) > 0
    notes = [*_fill_others(ax, values, has_tensors), *notes]
    label_cells(ax, "y", texts[0], names[0])
    label_cells(ax, "x", texts[1], names[1] if len(names) > 1 else "")
    count = counted(int(grouped["tensors"].sum()), "tensor")
    add_heading(ax, f"{statistic} of {count} by {' and '.join(names)}", *notes, left=110)
    return ax


def _groups_of(
    source: Drawn,
    statistic: str,
    keys: Sequence[str],
    known: xr.Dataset | None,
    selection: tuple[Any, Any, Any],
) -> xr.Dataset:
    """Return the groups to draw: the object itself, or a result by `keys`."""
    from xckpt.comparison import by
    from xckpt.statistics import OF_MATRICES, QUANTILES, spectrum, statistic_names, stats

    obj = source.obj
    if isinstance(obj, xr.Dataset) and "tensors" in obj and obj["tensors"].dims == tuple(obj.sizes):
        grouped = obj
        if keys:
            raise ValueError("the groups have keys already: leave them out")
    else:
        result = obj
        if not (isinstance(obj, xr.Dataset) and "statistic" in obj.dims):
            require_statistic(statistic, [*statistic_names(QUANTILES), *OF_MATRICES])
            chosen = source.filter(*selection)
            is_whole = chosen is None and source.stats is not None
            result = source.stats if known is None and is_whole else known
            if statistic in OF_MATRICES:
                result = spectrum(obj, chosen)
            elif result is None:
                result = stats(obj, chosen)
        grouped = by(result, *keys or ("layer", "module"))
    if statistic not in grouped or statistic in grouped.coords:
        reasons = [text for text in grouped.attrs.get("missing", ()) if statistic in text]
        if reasons:
            raise ValueError(f"groups have no {statistic!r}; {'; '.join(reasons)}")
        require_statistic(statistic, [str(name) for name in grouped.data_vars])
    return grouped


def _label_texts(labels: Sequence[Any]) -> list[str]:
    """Return labels without the words that all of them share."""
    texts = [str(label) for label in labels]
    if len(texts) > 1 and any("." in text for text in texts):
        texts = short_names(texts)[1]
    return texts


def _colours(values: Array) -> dict[str, Any]:
    """Return options for the colours, which a few extreme values do not spoil."""
    from matplotlib.colors import LogNorm

    options: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "cmap": "viridis"}
    finite = np.sort(values[np.isfinite(values)])
    if not finite.size:
        return options | {"vmin": 0.0, "vmax": 1.0}
    if finite[0] > 0:
        low, high = np.exp(near_limits(np.log(finite)))
        if high > WIDE_SPAN * low:
            return options | {"norm": LogNorm(low, high)}
    low, high = near_limits(finite)
    if low < 0 < high:
        limit = max(-low, high)
        return options | {"vmin": -limit, "vmax": limit, "cmap": "RdBu_r"}
    return options | {"vmin": low, "vmax": high if high > low else low + (abs(low) or 1.0)}


def _fill_others(ax: Axes, values: Array, has_tensors: Array) -> list[str]:
    """Draw groups without a finite value in other colours, and return notes on them."""
    from matplotlib.colors import to_rgba

    colours = np.zeros((*values.shape, 4))
    notes = []
    is_infinite, is_undefined = np.isinf(values), np.isnan(values) & has_tensors
    for mask, colour, text in (
        (is_infinite, _INFINITE, "grey: infinite"),
        (is_undefined, _UNDEFINED, "pink: undefined"),
    ):
        if mask.any():
            colours[mask] = to_rgba(colour)
            notes.append(text)
    if notes:
        ax.imshow(colours, aspect="auto", interpolation="nearest")
    return notes
