"""The error of each channel of many tensors: ``ds.ckpt.plot.error``."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from xckpt.labels import select, similar
from xckpt.notebook.formatting import counted
from xckpt.plots.axes import add_heading, new_axes, require_drawable, safe, whole_numbers
from xckpt.plots.layers import require_statistic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from xckpt.labels import TensorFilter
    from xckpt.statistics.channels import Reduced

__all__ = ["draw_error"]

# More rows or columns than a picture has pixels would hide the worst ones.
_MOST_ROWS, _MOST_COLUMNS = 256, 512
_MOST_LABELS = 32
_WIDEST_NAME = 40
_INCHES_PER_ROW = 0.24
_UNKNOWN, _EQUAL = "#e6007e", "#9e9e9e"
# Of these a small value is the worse one.
_GOOD_IF_LARGE = frozenset({"equal_fraction", "cosine", "sqnr_db"})

Array = np.ndarray[Any, np.dtype[Any]]


def draw_error(
    obj: Any,
    other: Any,
    statistic: str,
    names: TensorFilter | None,
    *,
    dim: Reduced,
    ax: Axes | None,
    **style: Any,
) -> Axes:
    """Draw a statistic of each channel; see `xckpt.plots.Plots.error`."""
    from xckpt.statistics import MEASURES, channel_values, compare

    require_drawable(ax, lambda trial: trial.imshow([[0.0]], **style))
    require_statistic(statistic, [each for each in MEASURES if each != "status"])
    result = obj if other is None else other
    is_result = isinstance(result, xr.Dataset) and "statistic" in result.dims
    if other is None and not is_result:
        raise TypeError("plot.error() takes a checkpoint to compare with, or is of a comparison")
    if not is_result:
        result = compare(obj, other, tensors=names, dim=dim)
    every = channel_values(result, statistic)
    found = {name: every[name] for name in select(every, names)}
    if not found:
        known = f"{names!r}{similar(every, names or ())}"
        raise ValueError(f"no tensor is called {known}" if every else "there are no tensors")
    rows = {name: each for name, each in found.items() if not np.isnan(each).all()}
    rows = {name: each for name, each in rows.items() if each.size > 1} or rows
    if not rows:
        raise ValueError(f"none of {counted(len(found), 'tensor')} is in both with the same shape")
    if max(each.size for each in rows.values()) == 1:
        raise ValueError("there is one value for each tensor: compare with dim=-1 for channels")
    values = np.full((len(rows), max(each.size for each in rows.values())), np.nan)
    for row, each in zip(values, rows.values(), strict=True):
        row[: each.size] = each
    worst = np.fmin if statistic in _GOOD_IF_LARGE else np.fmax
    height, width = values.shape
    shown = _reduced(_reduced(values, _MOST_ROWS, 0, worst), _MOST_COLUMNS, 1, worst)
    title, labels = _title_and_labels(list(rows))
    ax = new_axes(ax, 8.0, 1.8 + _INCHES_PER_ROW * min(max(height, 4), _MOST_LABELS))
    image = _drawn(ax, shown, (width, height), style)
    ax.figure.colorbar(image, ax=ax, extend="both").set_label(safe(statistic))
    if height <= _MOST_LABELS:
        ax.set_yticks(range(height), [safe(label, _WIDEST_NAME) for label in labels])
        ax.tick_params("y", length=0, labelsize="small")
    else:
        whole_numbers(ax.yaxis)
        ax.set_ylabel("tensor")
    whole_numbers(ax.xaxis)
    ax.set_xlabel("channel")
    add_heading(ax, title, *_notes(values, shown.shape, len(found) - height))
    return ax


def _title_and_labels(names: list[str]) -> tuple[str, list[str]]:
    """Return what all names have, with a star for the rest, which is the label of each."""
    split = [name.split(".") for name in names]
    head = _common(split)
    tail = _common([each[len(head) :][::-1] for each in split])[::-1]
    labels = [".".join(each[len(head) : len(each) - len(tail)]) for each in split]
    star = ["*"] if any(labels) else []
    return ".".join([*head, *star, *tail]), labels if star else names


def _common(lists: list[list[str]]) -> list[str]:
    """Return what all lists begin with."""
    columns = zip(*lists, strict=False)
    return [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, columns)]


def _reduced(values: Array, most: int, axis: int, worst: Any) -> Array:
    """Keep the worst of neighbours where there are too many."""
    count = values.shape[axis]
    if count <= most:
        return values
    starts = np.arange(most) * count // most
    reduced: Array = worst.reduceat(values, starts, axis=axis)
    return reduced


def _drawn(ax: Axes, values: Array, size: tuple[int, int], style: dict[str, Any]) -> Any:
    """Draw values; infinite ones, of what is equal or was zero, have colours of their own."""
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
    # Infinities are beyond both ends of the colours, NaN is none.
    beyond = look["vmax"] - look["vmin"]
    held = np.nan_to_num(values, nan=np.nan, posinf=high + beyond, neginf=low - beyond)
    return ax.imshow(held, extent=extent, **look)


def _notes(values: Array, shape: tuple[int, ...], left_out: int) -> list[str]:
    """Say what is not in the picture."""
    notes = []
    for what, size, drawn in zip(("tensors", "channels"), values.shape, shape, strict=True):
        if drawn < size:
            notes.append(f"{size:,} {what}, the worst of neighbours")
    equal = int(np.isposinf(values).sum())
    if equal:
        notes.append(f"{counted(equal, 'channel')} equal")
    if left_out:
        notes.append(f"without {counted(left_out, 'tensor')}: alone, or of one channel")
    return notes
