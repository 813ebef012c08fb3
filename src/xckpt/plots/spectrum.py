"""The singular values of a matrix: ``ds.ckpt.plot.spectrum``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.plots.axes import add_heading, new_axes, number_text, require_drawable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_spectrum"]

# Of the density, next to the values, as shares of their axes.
_DENSITY = (1.02, 0.0, 0.35, 1.0)
_MOST_BINS = 60


def draw_spectrum(obj: Any, name: str, *, minus: Any, ax: Axes | None, **style: Any) -> Axes:
    """Draw singular values; see `xckpt.plots.Plots.spectrum`."""
    from xckpt.datasets.tensors import OpenTensors
    from xckpt.statistics import spectrum
    from xckpt.statistics.singular import power_law

    require_drawable(ax, lambda trial: trial.plot([], [], **style))
    found = spectrum(OpenTensors(obj)[name], name, minus=minus, values=True).variables[name].values
    values = found[found > 0]
    if not len(values):
        raise ValueError(f"{name!r} has no singular values above 0")
    if ax is None:
        ax = new_axes(None, width=7.5)
        figure: Any = ax.get_figure()
        figure.set_layout_engine(None)
        ax.set_position((0.1, 0.12, 0.6, 0.74))
    ax.plot(np.arange(1, len(values) + 1), values, **{"marker": ".", "markersize": 3, **style})
    ax.set_yscale("log")
    ax.set_xlabel("number, largest first")
    ax.set_ylabel("singular value")
    ax.grid(visible=True, alpha=0.25)
    alpha, start = power_law(np.square(values))
    _draw_density(ax, values, alpha, start)
    share = values / values[0]
    told = f"stable rank {number_text(float(np.sum(share**2)))}"
    fitted = "" if np.isnan(alpha) else f"alpha {alpha:.2f} of the tail"
    add_heading(ax, name if minus is None else f"{name}, the difference", told, fitted)
    return ax


def _draw_density(ax: Axes, values: Any, alpha: float, start: float) -> None:
    """Draw how many values there are along the same axis, and the law of the largest."""
    side = ax.inset_axes(_DENSITY, sharey=ax)
    if values[-1] < values[0]:
        bins = min(_MOST_BINS, max(5, len(values) // 8))
        edges = np.geomspace(values[-1], values[0], bins + 1)
        counts, _ = np.histogram(values, edges)
        widths = np.diff(np.log10(edges))
        side.stairs(
            counts / len(values) / widths, edges, orientation="horizontal", fill=True, alpha=0.4
        )
    if np.isfinite(alpha):
        tail = np.geomspace(np.sqrt(start), values[0], 50)
        of_tail = float(np.mean(np.square(values) >= start))
        # Of the logarithm of a value, where its square has the density of a power law.
        density = of_tail * 2 * (alpha - 1) * np.log(10) * (tail / tail[0]) ** (-2 * (alpha - 1))
        side.plot(density, tail, color="C3", linewidth=1.5)
        side.axhline(tail[0], color="C3", linewidth=0.8, linestyle=":")
    side.set_xlabel("density")
    side.set_xlim(left=0)
    side.tick_params(labelleft=False)
    side.grid(visible=True, alpha=0.25)
