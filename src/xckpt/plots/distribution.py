"""How elements are distributed, ``ds.ckpt.plot.histogram``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.errors import shown
from xckpt.labels.stacking import stack
from xckpt.plots.axes import (
    add_legend,
    common_path,
    line_styles,
    new_axes,
    number_colours,
    require_matplotlib,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import xarray as xr
    from matplotlib.axes import Axes

    from xckpt.labels import TensorFilter

__all__ = ["draw_histogram"]

# So many lines at most are told apart by name rather than by number.
_FEW = 10

Counts = np.ndarray[Any, np.dtype[np.int64]]


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
    from xckpt.statistics import histogram
    from xckpt.tensors import find

    require_matplotlib()
    result = histogram(obj if names is None else find(obj, names), bins, scale)
    counts = _counts(result)
    if not counts:
        raise ValueError(f"no tensor is called {shown(str(names))}")
    ax = new_axes(ax)
    edges = np.append(result["bin_left"].values, result["bin_right"].values[-1])
    numbers = _numbers(list(counts)) if len(counts) > _FEW else None
    if numbers is None:
        _draw_named(ax, counts, edges, style)
    else:
        _draw_numbered(ax, counts, numbers, edges, style)
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


def _counts(result: xr.Dataset) -> dict[str, Counts]:
    """Return the counts of every tensor by its name in the file."""
    from xckpt.statistics.result import tensor_names

    coords = set(result.coords)
    rows = [
        variable.transpose("bin", ...).values.reshape(result.sizes["bin"], -1).T
        for name, variable in result.variables.items()
        if name not in coords
    ]
    return dict(zip(tensor_names(result), np.concatenate(rows), strict=True)) if rows else {}


def _numbers(names: Sequence[str]) -> tuple[str, dict[str, int]] | None:
    """Return the outermost number of every tensor, if they all have one along one module."""
    found = stack(dict.fromkeys(names, None))
    dims = {each.dims[0] for each in found}
    if sum(len(each.members) for each in found) < len(names) or len(dims) != 1:
        return None
    numbers = {}
    for each in found:
        per_number = len(each.members) // len(each.indices[0])
        for at, name in enumerate(each.members):
            numbers[name] = each.indices[0][at // per_number]
    return dims.pop(), numbers


def _draw_named(ax: Axes, counts: Mapping[str, Counts], edges: Any, style: dict[str, Any]) -> None:
    handles = []
    for each, own in zip(counts.values(), line_styles(len(counts)), strict=True):
        handles.append(ax.stairs(_shares(each), edges, **{"linewidth": 1.3, **own, **style}))
    common, labels = common_path(list(counts))
    add_legend(ax, handles, labels)
    write(ax.title, f"{common}*" if common else "", 80)


def _draw_numbered(
    ax: Axes,
    counts: Mapping[str, Counts],
    numbers: tuple[str, Mapping[str, int]],
    edges: Any,
    style: dict[str, Any],
) -> None:
    dim, number_of = numbers
    colours = number_colours(ax, number_of.values(), dim)
    for name, each in counts.items():
        own = {"linewidth": 1.0, "color": colours[number_of[name]]}
        ax.stairs(_shares(each), edges, **{**own, **style})
    names = {each.name for each in stack(dict.fromkeys(counts, None))}
    write(ax.title, " · ".join(sorted(names)), 80)


def _shares(counts: Counts) -> Any:
    """Return shares; nothing where there is nothing, which a logarithm would draw at the bottom."""
    return np.where(counts > 0, counts / max(1, counts.sum()), np.nan)
