"""Statistics as pictures: ``ds.ckpt.plot.layers``, ``.histogram`` and ``.compare``."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xarray as xr

from xckpt.errors import shown
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
    whole_numbers,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pandas as pd
    from matplotlib.axes import Axes

    from xckpt.labels import TensorFilter
    from xckpt.labels.stacking import Stack

__all__ = ["draw_differences", "draw_histogram", "draw_layers"]

# A logarithmic axis is for values that span more.
_WIDE_SPAN = 100.0
_BAND_ALPHA = 0.2
_FEW_POINTS = 64
# So many lines at most are distinguished by name rather than by number.
_FEW_LINES = 10
_INCHES_PER_BAR = 0.26
_STATUS_WORDS = {
    "same": "same",
    "changed": "changed",
    "only_a": "only here",
    "only_b": "only in the other",
    "shape": "of another shape",
}

Values = np.ndarray[Any, np.dtype[np.float64]]


# --- a statistic along numbered modules ----------------------------------------------------------


class _Line(NamedTuple):
    """Values along the numbers of a module, and their range over all other numbers."""

    name: str
    number: int  # of the other module, where there is a line for each of its numbers
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
    along = x or (_bases(found[0])[0] if found else None)
    other = hue if isinstance(hue, str) else None
    lines = [line for each in found for line in _lines(each, column, along, other)]
    if not lines:
        what = f"numbered along {along!r}" + (f" and {other!r}" if other else "")
        raise ValueError(f"none of {len(column)} tensors is {what if along else 'numbered'}")
    ax = new_axes(ax)
    common, labels = common_path(list(dict.fromkeys(line.name for line in lines)))
    write(ax.title, labels[0] if len(labels) == 1 else common and f"{common}*", 80)
    if other is not None:
        colours = number_colours(ax, [line.number for line in lines], other)
        for line in lines:
            _draw(ax, line, {"color": colours[line.number], "linewidth": 1.0, **style})
    else:
        kinds = [hue(line.name) if callable(hue) else line.name for line in lines]
        unique = list(dict.fromkeys(kinds))
        styles = dict(zip(unique, line_styles(len(unique)), strict=True))
        handles: dict[Any, Any] = {}
        for kind, line in zip(kinds, lines, strict=True):
            handles.setdefault(kind, _draw(ax, line, {**styles[kind], **style}))
        add_legend(ax, list(handles.values()), list(map(str, unique)) if callable(hue) else labels)
    ax.set_xlabel(safe(along or ""))
    ax.set_ylabel(safe(statistic))
    whole_numbers(ax.xaxis)
    ax.grid(visible=True, alpha=0.25)
    _set_scale(ax, lines)
    return ax


def _column(
    obj: Any, statistic: str, names: TensorFilter | None, stats: xr.Dataset | None
) -> pd.Series[Any]:
    """Return the statistic of every tensor by its name in the file."""
    from xckpt.statistics import stats as compute
    from xckpt.statistics import table, tensor_names
    from xckpt.tensors import find

    if stats is None:
        stats = compute(obj if names is None else find(obj, names))
    frame = table(stats)
    if statistic not in frame:
        raise ValueError(f"there is no statistic {statistic!r}, only {', '.join(frame)}")
    # Comparisons are sorted by what changed; lines stay in the order of the file.
    known = set(frame.index)
    kept = [name for name in select(tensor_names(stats), names) if name in known]
    column: pd.Series[Any] = frame.loc[kept, statistic].astype(np.float64)
    return column


def _bases(each: Stack) -> list[str]:
    """Return the modules that are numbered; a second dimension of one name is layers_1."""
    return [re.sub(r"_\d+$", "", dim) for dim in each.dims]


def _lines(
    each: Stack, column: pd.Series[Any], along: str | None, other: str | None
) -> Iterator[_Line]:
    """Make the lines of tensors with one name; none where they are not numbered in this way."""
    bases = _bases(each)
    if along not in bases or (other is not None and other not in bases) or along == other:
        return
    at = bases.index(along)
    numbers = each.indices[at]
    values = column.reindex(each.members).to_numpy().reshape(each.shape)
    if other is None:
        parts = [(0, np.moveaxis(values, at, 0))]
    else:
        by = bases.index(other)
        parts = list(zip(each.indices[by], np.moveaxis(values, (by, at), (0, 1)), strict=True))
    for number, part in parts:
        flat = part.reshape(len(numbers), -1)
        low = middle = high = flat[:, 0]
        if flat.shape[1] > 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # where all are NaN
                low, middle, high = np.nanquantile(flat, [0.0, 0.5, 1.0], axis=1)
        yield _Line(each.name, number, numbers, middle, low, high)


def _draw(ax: Axes, line: _Line, style: dict[str, Any]) -> Any:
    """Draw a line with its band."""
    style = {"marker": "." if len(line.at) <= _FEW_POINTS else "", **style}
    (handle,) = ax.plot(line.at, line.middle, **style)
    if line.low is not line.high:
        colour = handle.get_color()
        ax.fill_between(line.at, line.low, line.high, color=colour, alpha=_BAND_ALPHA, lw=0)
    return handle


def _set_scale(ax: Axes, lines: Sequence[_Line]) -> None:
    values = np.concatenate([np.concatenate([line.low, line.high]) for line in lines])
    values = values[np.isfinite(values)]
    positive = values[values > 0]
    if (values < 0).any() or not positive.size or positive.max() < _WIDE_SPAN * positive.min():
        return
    if positive.size == values.size:
        ax.set_yscale("log")
    else:  # zeros are what matters, and a logarithm would hide them
        ax.set_yscale("symlog", linthresh=10.0 ** np.floor(np.log10(positive.min())))


# --- how elements are distributed ----------------------------------------------------------------


def draw_histogram(
    obj: Any,
    names: TensorFilter | None,
    *,
    bins: int | Sequence[float],
    scale: Any,
    log: bool,
    ax: Axes | None,
    **style: Any,
) -> Axes:
    """Draw how elements are distributed; see `xckpt.plots.Plots.histogram`."""
    from xckpt.statistics import histogram, tensor_names
    from xckpt.tensors import find

    require_matplotlib()
    result = histogram(obj if names is None else find(obj, names), bins, scale)
    counts = [
        variable.transpose("bin", ...).to_numpy().reshape(result.sizes["bin"], -1).T
        for name, variable in result.variables.items()
        if name not in result.coords
    ]
    if not counts:
        raise ValueError(f"no tensor is called {shown(str(names))}")
    shares = dict(zip(tensor_names(result), map(_shares, np.concatenate(counts)), strict=True))
    ax = new_axes(ax)
    edges = np.append(result["bin_left"].to_numpy(), result["bin_right"].to_numpy()[-1])
    found = stack(dict.fromkeys(shares, None)) if len(shares) > _FEW_LINES else []
    numbers = {
        name: each.indices[0][at * len(each.indices[0]) // len(each.members)]
        for each in found
        for at, name in enumerate(each.members)
    }
    dims = {each.dims[0] for each in found}
    if len(dims) == 1 and len(numbers) == len(shares):
        colours = number_colours(ax, numbers.values(), dims.pop())
        for name, each in shares.items():
            ax.stairs(each, edges, **{"linewidth": 1.0, "color": colours[numbers[name]], **style})
        write(ax.title, " · ".join(sorted({each.name for each in found})), 80)
    else:
        handles = [
            ax.stairs(each, edges, **{"linewidth": 1.3, **own, **style})
            for each, own in zip(shares.values(), line_styles(len(shares)), strict=True)
        ]
        common, labels = common_path(list(shares))
        add_legend(ax, handles, labels)
        write(ax.title, f"{common}*" if common else "", 80)
    if scale == "symlog" and (edges > 0).any():
        ax.set_xscale("symlog", linthresh=edges[edges > 0].min())
    if log:
        ax.set_yscale("log")
    else:
        ax.set_ylim(0, None)
    ax.set_xlabel("value")
    ax.set_ylabel("share of elements")
    ax.grid(visible=True, alpha=0.25)
    return ax


def _shares(counts: Any) -> Any:
    # A logarithm would draw nothing at the bottom.
    return np.where(counts > 0, counts / max(1, counts.sum()), np.nan)


# --- how much tensors differ ---------------------------------------------------------------------


def draw_differences(
    obj: Any,
    other: Any,
    statistic: str,
    names: TensorFilter | None,
    *,
    most: int,
    ax: Axes | None,
    **style: Any,
) -> Axes:
    """Draw how much tensors differ; see `xckpt.plots.Plots.compare`."""
    from xckpt.statistics import compare, table

    require_matplotlib()
    if isinstance(other, xr.Dataset) and "statistic" in other.dims:
        frame = table(other)
        frame = frame.loc[select(frame.index, names)]
    else:
        frame = table(compare(obj, other, tensors=names))
    if statistic not in frame or statistic == "status":
        known = ", ".join(frame.columns.drop("status"))
        raise ValueError(f"there is no statistic {statistic!r}, only {known}")
    if most < 1:
        raise ValueError(f"a picture has at least one bar, not {most}")
    changed = frame[frame["status"] == "changed"].head(most)[::-1]
    ax = new_axes(ax, 8.0, 1.6 + _INCHES_PER_BAR * max(4, len(changed)))
    values = changed[statistic].to_numpy(np.float64)
    bars = ax.barh(np.arange(len(values)), np.where(np.isfinite(values), values, 0.0), **style)
    ax.set_yticks(np.arange(len(changed)), [safe(name) for name in changed.index])
    ax.tick_params("y", length=0, labelsize="small")
    ax.spines[["top", "right"]].set_visible(False)
    ax.margins(x=0.12)
    ax.set_xlabel(safe(statistic))
    finite = values[np.isfinite(values)]
    if finite.size and finite.min() > 0 and finite.max() > _WIDE_SPAN * finite.min():
        ax.set_xscale("log")
    ax.bar_label(bars, [f"{value:.3g}" for value in values], padding=3, fontsize="small")
    counts = Counter(frame["status"])
    facts = [f"{counts[kind]:,} {word}" for kind, word in _STATUS_WORDS.items() if counts[kind]]
    kept = f", the {len(changed)} most changed" if len(changed) < counts["changed"] else ""
    summary = f"{len(frame):,} tensors: {', '.join(facts)}{kept}"
    write(ax.title, summary if len(frame) else "no tensors", 90)
    return ax
