"""How much tensors of two checkpoints differ, ``ds.ckpt.plot.compare``."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from xckpt.plots.axes import new_axes, require_matplotlib, safe, write

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from xckpt.labels import TensorFilter

__all__ = ["draw_differences"]

_WIDE_SPAN = 100.0
_INCHES_PER_BAR = 0.26
_WORDS = {
    "same": "same",
    "changed": "changed",
    "only_a": "only here",
    "only_b": "only in the other",
    "shape": "of another shape",
}


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
    require_matplotlib()
    frame = _table(obj, other, names)
    if statistic not in frame or statistic == "status":
        raise ValueError(f"no statistic {statistic!r}; there are {', '.join(frame)}")
    if most < 1:
        raise ValueError(f"a picture has at least one bar, not {most}")
    changed = frame[frame["status"] == "changed"].head(most)[::-1]
    ax = new_axes(ax, 8.0, 1.6 + _INCHES_PER_BAR * max(4, len(changed)))
    values = changed[statistic].to_numpy(np.float64)
    bars = ax.barh(np.arange(len(values)), np.where(np.isfinite(values), values, 0.0), **style)
    _set_axes(ax, changed, values, statistic)
    ax.bar_label(bars, [f"{value:.3g}" for value in values], padding=3, fontsize="small")
    write(ax.title, _summary(frame, len(changed)), 90)
    return ax


def _table(obj: Any, other: Any, names: TensorFilter | None) -> pd.DataFrame:
    """Return what changed, most changed first."""
    from xckpt.labels import select
    from xckpt.statistics import compare, table

    if isinstance(other, xr.Dataset) and "statistic" in other.dims:
        frame = table(other)
        return frame.loc[select(frame.index, names)]
    return table(compare(obj, other, tensors=names))


def _set_axes(ax: Axes, changed: pd.DataFrame, values: Any, statistic: str) -> None:
    ax.set_yticks(np.arange(len(changed)), [safe(name) for name in changed.index])
    ax.tick_params("y", length=0, labelsize="small")
    ax.spines[["top", "right"]].set_visible(False)
    ax.margins(x=0.12)
    ax.set_xlabel(safe(statistic))
    known = values[np.isfinite(values)]
    if known.size and known.min() > 0 and known.max() > _WIDE_SPAN * known.min():
        ax.set_xscale("log")


def _summary(frame: pd.DataFrame, shown: int) -> str:
    """Say how many tensors there are of each kind."""
    counts = Counter(frame["status"])
    facts = [f"{counts[status]:,} {word}" for status, word in _WORDS.items() if counts[status]]
    most = f", the {shown} most changed" if shown < counts["changed"] else ""
    return f"{len(frame):,} tensors: {', '.join(facts)}{most}" if len(frame) else "no tensors"
