"""How much each layer changes from step to step of a training run: ``ds.ckpt.plot.steps``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.labels.stacking import numbered
from xckpt.notebook.folding import ascending
from xckpt.notebook.formatting import counted
from xckpt.plots.axes import add_heading, new_axes, require_drawable, safe

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from xckpt.labels import TensorFilter

__all__ = ["draw_steps"]

_INCHES_PER_ROW = 0.2
_TALLEST = 10.0
_MOST_LABELS = 40
_UNCHANGED = "#8886"


def draw_steps(
    obj: Any, names: TensorFilter | None, *, relative: bool, ax: Axes | None, **style: Any
) -> Axes:
    """Draw the change of each layer at each step; see `xckpt.plots.Plots.steps`."""
    from xckpt.statistics import changes_of

    require_drawable(ax, lambda trial: trial.imshow([[0.0]], **style))
    changes = changes_of(obj, names)
    rows: dict[str, list[int]] = {}
    for at, name in enumerate(changes.names):
        rows.setdefault(_layer(name), []).append(at)
    layers = [list(rows)[at] for at in ascending(list(rows))]
    norms = np.array([_norm(changes.norm[rows[layer]]) for layer in layers])
    if relative:
        with np.errstate(invalid="ignore", divide="ignore"):
            size = changes.norm / changes.relative
            norms /= np.array([_norm(size[rows[layer]]) for layer in layers])
    from matplotlib.colors import LogNorm

    ax = new_axes(ax, 8.0, min(_TALLEST, 1.8 + _INCHES_PER_ROW * max(6, len(layers))))
    shown = np.ma.masked_where(~(np.isfinite(norms) & (norms > 0)), norms)
    options: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest"}
    if shown.count() and shown.max() > shown.min():
        options["norm"] = LogNorm(shown.min(), shown.max())
    image = ax.imshow(shown, **options | style)
    image.set_cmap(image.get_cmap().with_extremes(bad=_UNCHANGED))
    of = "norm of the change" + (", relative to that of the weights" if relative else "")
    ax.figure.colorbar(image, ax=ax).set_label(of)
    still = int(np.count_nonzero(norms == 0))
    grey = f"grey: no change ({counted(still, 'place')})" if still else ""
    title = f"{counted(len(changes.names), 'tensor')}, {counted(len(changes.steps), 'step')}"
    add_heading(ax, title, grey)
    _label(ax.yaxis, [safe(layer) for layer in layers])
    _label(ax.xaxis, [f"{step:,}" for step in changes.steps[1:]])
    ax.set_xlabel(safe(changes.dim))
    return ax


def _norm(norms: Any) -> Any:
    """Return the norm of tensors together at each step; NaN where none is known."""
    known = np.isfinite(norms)
    total = np.sqrt((np.where(known, norms, 0.0) ** 2).sum(axis=0))
    return np.where(known.any(axis=0), total, np.nan)


def _layer(name: str) -> str:
    """Return a name up to its first number, or its module where there is none."""
    parts = name.split(".")
    template = numbered(parts).template
    depth = template.index(None) + 1 if None in template else max(1, len(parts) - 1)
    return ".".join(parts[:depth])


def _label(axis: Any, labels: list[str]) -> None:
    """Put labels at places, fewer where there are many."""
    every = -(-len(labels) // _MOST_LABELS)
    if axis.axis_name == "x":
        every = -(-len(labels) // (_MOST_LABELS // 4))
    axis.set_ticks(list(range(0, len(labels), max(1, every))), labels[:: max(1, every)])
    for text in axis.get_ticklabels():
        text.set_parse_math(False)
