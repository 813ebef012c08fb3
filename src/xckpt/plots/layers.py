"""A statistic along numbered modules, ``ds.ckpt.plot.layers``."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.labels import select
from xckpt.labels.stacking import stack
from xckpt.plots.axes import (
    add_legend,
    common_path,
    line_styles,
    new_axes,
    number_colours,
    require_matplotlib,
    safe,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pandas as pd
    import xarray as xr
    from matplotlib.axes import Axes

    from xckpt.labels import TensorFilter
    from xckpt.labels.stacking import Stack

__all__ = ["draw_layers"]

# What a dimension is called that is not the only one of its name: layers_1.
_NUMBERED = re.compile(r"_\d+$")
_WIDE_SPAN = 100.0
_BAND_ALPHA = 0.2
_FEW_POINTS = 64

Values = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class _Line:
    """Values along the numbers of a module, and their range over all other numbers.

    `number` is that of the other module, where there is a line for each.
    """

    name: str
    number: int | None
    at: tuple[int, ...]
    middle: Values
    low: Values
    high: Values


def draw_layers(
    obj: Any,
    statistic: str,
    names: TensorFilter | None,
    *,
    x: str | None,
    hue: str | Callable[[str], Any] | None,
    stats: xr.Dataset | None,
    ax: Axes | None,
    **style: Any,
) -> Axes:
    """Draw a statistic along numbered modules; see `xckpt.plots.Plots.layers`."""
    require_matplotlib()
    column = _column(obj, statistic, names, stats)
    found = stack(dict.fromkeys(column.index, None))
    along = x or (_base(found[0].dims[0]) if found else None)
    other = hue if isinstance(hue, str) else None
    lines = [line for each in found for line in _lines(each, column, along, other)]
    if not lines:
        what = f"numbered along {along!r}" + (f" and {other!r}" if other else "")
        raise ValueError(f"none of {len(column)} tensors is {what if along else 'numbered'}")
    ax = new_axes(ax)
    if other is None:
        _draw_named(ax, lines, hue, style)
    else:
        colours = number_colours(ax, [line.number or 0 for line in lines], other)
        for line in lines:
            _draw(ax, line, {"color": colours[line.number or 0], "linewidth": 1.0, **style})
        _name(ax, [line.name for line in lines])
    _set_axes(ax, lines, along or "", statistic)
    return ax


def _column(
    obj: Any, statistic: str, names: TensorFilter | None, stats: xr.Dataset | None
) -> pd.Series[Any]:
    """Return the statistic of every tensor by its name in the file."""
    from xckpt.statistics import stats as compute
    from xckpt.statistics import table
    from xckpt.statistics.result import tensor_names
    from xckpt.tensors import find

    if stats is None:
        stats = compute(obj if names is None else find(obj, names))
    frame = table(stats)
    if statistic not in frame:
        raise ValueError(f"no statistic {statistic!r}; there are {', '.join(frame)}")
    # Comparisons are sorted by what changed; lines stay in the order of the file.
    known = set(frame.index)
    kept = [name for name in select(tensor_names(stats), names) if name in known]
    column: pd.Series[Any] = frame.loc[kept, statistic].astype(np.float64)
    return column


def _base(dim: str) -> str:
    return _NUMBERED.sub("", dim)


def _lines(
    each: Stack, column: pd.Series[Any], along: str | None, other: str | None
) -> list[_Line]:
    """Make the lines of tensors with one name; none where they are not numbered so."""
    bases = [_base(dim) for dim in each.dims]
    if along not in bases or (other is not None and other not in bases) or along == other:
        return []
    at = bases.index(along)
    values = column.reindex(each.members).to_numpy().reshape(each.shape)
    values = np.moveaxis(values, at, 0)
    if other is None:
        return [_line(each.name, None, each.indices[at], values)]
    bases.pop(at)
    split = np.moveaxis(values, 1 + bases.index(other), 0)
    numbers = each.indices[[_base(dim) for dim in each.dims].index(other)]
    return [
        _line(each.name, number, each.indices[at], part)
        for number, part in zip(numbers, split, strict=True)
    ]


def _line(name: str, number: int | None, at: tuple[int, ...], values: Values) -> _Line:
    flat = values.reshape(len(at), -1)
    if flat.shape[1] == 1:
        only = flat[:, 0]
        return _Line(name, number, at, only, only, only)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that there are NaN only
        low, middle, high = np.nanquantile(flat, [0.0, 0.5, 1.0], axis=1)
    return _Line(name, number, at, middle, low, high)


def _draw_named(
    ax: Axes, lines: Sequence[_Line], hue: Callable[[str], Any] | Any, style: dict[str, Any]
) -> None:
    kinds = {line.name: hue(line.name) if callable(hue) else line.name for line in lines}
    unique = list(dict.fromkeys(kinds.values()))
    styles = dict(zip(unique, line_styles(len(unique)), strict=True))
    handles: dict[Any, Any] = {}
    for line in lines:
        kind = kinds[line.name]
        handles.setdefault(kind, _draw(ax, line, {**styles[kind], **style}))
    labels = _name(ax, list(kinds))
    add_legend(ax, list(handles.values()), list(map(str, unique)) if callable(hue) else labels)


def _name(ax: Axes, names: Sequence[str]) -> list[str]:
    """Write what all names have in common above the picture, and give what they have not."""
    common, labels = common_path(list(dict.fromkeys(names)))
    title = labels[0] if len(labels) == 1 else common and f"{common}*"
    write(ax.title, title, 80)
    return labels


def _draw(ax: Axes, line: _Line, style: dict[str, Any]) -> Any:
    """Draw a line with its band."""
    style = {"marker": "." if len(line.at) <= _FEW_POINTS else "", **style}
    (handle,) = ax.plot(line.at, line.middle, **style)
    if line.low is not line.high:
        colour = handle.get_color()
        ax.fill_between(line.at, line.low, line.high, color=colour, alpha=_BAND_ALPHA, lw=0)
    return handle


def _set_axes(ax: Axes, lines: Sequence[_Line], along: str, statistic: str) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_xlabel(safe(along))
    ax.set_ylabel(safe(statistic))
    ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    ax.grid(visible=True, alpha=0.25)
    values = np.concatenate([np.concatenate([line.low, line.high]) for line in lines])
    values = values[np.isfinite(values)]
    positive = values[values > 0]
    if (values < 0).any() or not positive.size or positive.max() < _WIDE_SPAN * positive.min():
        return
    if positive.size == values.size:
        ax.set_yscale("log")
    else:  # zeros are what is to be seen, and a logarithm would hide them
        ax.set_yscale("symlog", linthresh=10.0 ** np.floor(np.log10(positive.min())))
