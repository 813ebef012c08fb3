"""Differences between checkpoints, a bar for each tensor: ``ds.ckpt.plot.compare``."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xarray as xr

from xckpt.datasets.tensors import OpenTensors
from xckpt.formatting import counted
from xckpt.labels.filters import select_or_raise
from xckpt.options import renamed, takes
from xckpt.plots.axes import add_heading, new_axes, require_drawable, safe
from xckpt.plots.layers import WIDE_SPAN, require_statistic
from xckpt.plots.series import codes_left_out, codes_of, require_any
from xckpt.plots.theme import themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from xckpt.labels import TensorFilter
    from xckpt.plots.series import Drawn

_INCHES_PER_BAR = 0.26
_WIDEST_NAME, _POINTS_PER_CHARACTER = 56, 5.0
_STATUS_WORDS = {
    "same": "same",
    "changed": "changed",
    "close": "close",
    "only_a": "only here",
    "only_b": "only in the other",
    "shape": "of another shape",
    "unreadable": "unreadable",
}


@renamed("names", "tensors")
@takes()
@themed
def draw_differences(
    source: Drawn,
    /,
    other: Any,
    statistic: str = "rel_l2",
    tensors: TensorFilter | None = None,
    *,
    exclude: TensorFilter | None = None,
    only: Literal["weights"] | None = None,
    most: int = 20,
    ax: Axes | None = None,
    **style: Any,
) -> Axes:
    """Draw how much the tensors of two checkpoints differ: a bar for each that changed.

    Parameters
    ----------
    other : path, Index, xarray.Dataset, xarray.DataArray or xarray.DataTree
        Checkpoint to compare with, as for `xckpt.compare`; or the result of that function.
    statistic : str, default "rel_l2"
        A statistic of `xckpt.compare`.
    most : int, default 20
        The largest number of bars, for the tensors that changed most.
    ax : matplotlib.axes.Axes, optional
        Where to draw; by default in a new figure.
    **style
        Passed on to `matplotlib.axes.Axes.barh`.

    Returns
    -------
    matplotlib.axes.Axes
        The axes, most changed first, logarithmic where the values span more than two powers of
        ten. The title counts the tensors that are equal, or on one side only; if nothing
        changed, a sentence replaces the bars.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    ValueError
        If no tensor matches, the statistic does not exist, or `most` is not positive.

    Examples
    --------
    >>> ds.ckpt.plot.compare("tuned.zt")
    """
    from xckpt.comparison import MEASURES, compare
    from xckpt.statistics import table

    require_drawable(ax, lambda trial: trial.barh([0], [0.0], **style))
    require_statistic(statistic, [measure for measure in MEASURES if measure != "status"])
    if most < 1:
        raise ValueError(f"a picture has at least one bar, not {most}")
    chosen = source.chosen(tensors, exclude, only)
    if isinstance(other, xr.Dataset) and "statistic" in other.dims:
        frame = table(other)
        frame = frame.loc[select_or_raise(frame.index, chosen)]
    else:
        frame = table(compare(source.obj, other, tensors=chosen))
    require_any(frame.index)
    counts = Counter(frame["status"])
    parts = [
        f"{counts[status]:,} {words}" for status, words in _STATUS_WORDS.items() if counts[status]
    ]
    summary = f"{counted(len(frame), 'tensor')}: {', '.join(parts)}"
    changed = frame[frame["status"] == "changed"]
    codes = codes_of(OpenTensors(source.obj))
    is_code = changed.index.isin(list(codes))
    of_codes = " of codes" if is_code.size and is_code.all() else ""
    note = ""
    if not of_codes:
        note = codes_left_out(changed.index[is_code].tolist(), codes)
        changed = changed[~is_code]
    bars = changed.head(most)[::-1]
    ax = new_axes(ax, 8.0, 1.6 + _INCHES_PER_BAR * max(4, len(bars)))
    selection = f"the {len(bars):,} most changed" if len(bars) < len(changed) else ""
    names = [safe(name, _WIDEST_NAME) for name in bars.index]
    left = 50 + _POINTS_PER_CHARACTER * max(map(len, names), default=0)
    add_heading(ax, summary, selection, note, left=left)
    if bars.empty:
        _explain_no_bars(ax, counts["same"], counts.total())
        return ax
    values = bars[statistic].to_numpy(np.float64)
    lengths = np.where(np.isfinite(values), values, 0.0)
    drawn = ax.barh(np.arange(len(values)), lengths, **style)
    ax.set_yticks(np.arange(len(bars)), names)
    ax.tick_params("y", length=0, labelsize="small")
    ax.spines[["top", "right"]].set_visible(False)
    ax.margins(x=0.12)
    ax.set_xlabel(safe(statistic) + of_codes)
    positive = lengths[lengths > 0]
    if positive.size and lengths.min() >= 0 and positive.max() > WIDE_SPAN * positive.min():
        if positive.size == lengths.size:
            ax.set_xscale("log")
        else:  # bars of length zero have labels
            ax.set_xscale("symlog", linthresh=10.0 ** np.floor(np.log10(positive.min())))
    labels = [f"{value:.3g}" for value in values]
    for n, count in enumerate((bars["nan"] + bars["inf"]).tolist() if "nan" in bars else []):
        labels[n] += f", {counted(int(count), 'element')} not finite" if count else ""
    ax.bar_label(drawn, labels, padding=3, fontsize="small")
    return ax


def _explain_no_bars(ax: Axes, same: int, count: int) -> None:
    """Write into the middle of the picture why it has no bars."""
    text = "No tensor that is in both has changed."
    if not same:
        text = "No tensor is in both with the same shape."
    elif same == count:
        text = "All tensors are equal." if same > 1 else "The tensor is equal in both."
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    ax.text(0.5, 0.5, text, ha="center", va="center", size="large", transform=ax.transAxes)
