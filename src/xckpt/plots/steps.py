"""Changes from step to step of a training run: ``ds.ckpt.plot.steps``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from xckpt.formatting import counted
from xckpt.notebook.folding import ascending
from xckpt.options import renamed, takes
from xckpt.plots.axes import (
    add_heading,
    mark_beyond,
    near_limits,
    new_axes,
    new_panels,
    require_drawable,
    safe,
)
from xckpt.plots.theme import themed
from xckpt.structure import Role

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from xckpt.health.runs import StepChanges
    from xckpt.labels import TensorFilter
    from xckpt.plots.series import Drawn

_INCHES_PER_LAYER, _FRAME = 0.2, 0.9
_TALLEST = 10.0
_MOST_LAYERS = 40
_LARGEST_JUMP = 1000.0  # that the colours include
_MOST_TICKS = 5  # of a scale of colours
_UNCHANGED = "#8886"


@renamed("names", "tensors")
@takes()
@themed
def draw_steps(
    source: Drawn,
    /,
    tensors: TensorFilter | None = None,
    *,
    exclude: TensorFilter | None = None,
    only: Literal["weights"] | None = None,
    relative: bool = True,
    ax: Axes | None = None,
    **style: Any,
) -> Axes:
    """Draw how much each layer changes from step to step of a training run.

    Each step of a Dataset of `xckpt.open_steps` is compared with the step before. A row is a
    numbered module, or a module without numbers. Parameters, buffers and the state of an
    optimizer have panels with colour scales of their own; counters are left out. Axes in `ax`
    show the first of these groups.

    Parameters
    ----------
    relative : bool, default True
        Whether to divide the norm of a change by the norm of all tensors of the layer at the later
        step.
    ax : matplotlib.axes.Axes, optional
        Where to draw; by default in a new figure.
    **style
        Passed on to `matplotlib.axes.Axes.imshow`.

    Returns
    -------
    matplotlib.axes.Axes
        The axes, with logarithmic colours; unchanged layers are grey.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    ValueError
        If the object does not have several steps, or no tensor matches.

    Examples
    --------
    >>> xckpt.open_steps("run/step-*.zt").ckpt.plot.steps()
    """
    from xckpt.health import changes_of

    require_drawable(ax, lambda trial: trial.imshow([[0.0]], **style))
    changes = changes_of(source.obj, source.chosen(tensors, exclude, only))
    groups = _group_rows(changes)
    if ax is not None:
        groups = dict([next(iter(groups.items()))])
    heights = [_FRAME + _INCHES_PER_LAYER * max(6, len(layers)) for layers in groups.values()]
    heights = [height * min(1.0, _TALLEST / sum(heights)) for height in heights]
    panels = [new_axes(ax, 8.0, heights[0])] if len(groups) == 1 else new_panels(heights)
    counts = [sum(map(len, layers.values())) for layers in groups.values()]
    left_out = len(changes.names) - sum(counts)
    omission = f"without {counted(left_out, 'tensor')} of other roles, such as counters"
    for number, (group, layers) in enumerate(groups.items()):
        notes = _draw_group(panels[number], changes, layers, relative=relative, style=style)
        title = counted(counts[number], "tensor")
        title = f"{group}: {title}" if len(groups) > 1 else title
        title += "" if number else f", {counted(len(changes.steps), 'step')}"
        add_heading(panels[number], title, *notes, omission if left_out and not number else "")
    panels[-1].set_xlabel(safe(changes.dim))
    return panels[0]


def _group_rows(changes: StepChanges) -> dict[str, dict[str, list[int]]]:
    """Return the rows of each layer, by group of roles; counters only without other tensors."""
    from xckpt.health.runs import COUNTING

    groups: dict[str, dict[str, list[int]]] = {}
    order = list(Role)
    for row in sorted(range(len(changes.names)), key=lambda row: order.index(changes.roles[row])):
        role = changes.roles[row]
        if role not in COUNTING or COUNTING.issuperset(changes.roles):
            groups.setdefault(role.group, {}).setdefault(changes.layer_of(row), []).append(row)
    return groups


def _draw_group(
    ax: Axes,
    changes: StepChanges,
    layers: dict[str, list[int]],
    *,
    relative: bool,
    style: dict[str, Any],
) -> list[str]:
    """Draw the layers of a group of roles; return notes on what the colours do not show."""
    from matplotlib.colors import LogNorm

    from xckpt.health.runs import joint_norm

    names = [list(layers)[number] for number in ascending(list(layers))]
    if relative:
        norms = np.array([changes.relative_change(layers[name]) for name in names])
    else:
        norms = np.array([joint_norm(changes.norm[layers[name]]) for name in names])
    shown = np.ma.masked_where(~(np.isfinite(norms) & (norms > 0)), norms)
    options: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest"}
    if shown.count() and shown.max() > shown.min():
        # A jump is the most interesting change; neither tiny nor huge ones fill the scale.
        low, high = np.exp(near_limits(np.sort(np.log(shown.compressed())))).tolist()
        options["norm"] = LogNorm(low, min(float(shown.max()), _LARGEST_JUMP * high))
    image = ax.imshow(shown, **options | style)
    image.set_cmap(image.get_cmap().with_extremes(bad=_UNCHANGED))

    def place_text(row: int, column: int) -> str:
        return f"{names[row]}, {changes.dim} {changes.steps[column + 1]:,}"

    extend, notes = mark_beyond(ax, image, shown.filled(np.nan), place_text)
    bar = ax.figure.colorbar(image, ax=ax, extend=extend)
    bar.set_label("relative change" if relative else "norm of the change")
    if isinstance(image.norm, LogNorm):
        ticks = np.geomspace(*image.get_clim(), _MOST_TICKS)
        bar.set_ticks(ticks.tolist(), labels=[f"{tick:.2g}" for tick in ticks])
        bar.minorticks_off()
    _label_ticks(ax.yaxis, [safe(name) for name in names])
    _label_ticks(ax.xaxis, [f"{step:,}" for step in changes.steps[1:]])
    unchanged = int(np.count_nonzero(norms == 0))
    grey = f"grey: no change ({counted(unchanged, 'place')})" if unchanged else ""
    return [grey, *notes]


def _label_ticks(axis: Any, labels: list[str]) -> None:
    """Label the rows or columns of an image, at regular intervals if there are many."""
    most = _MOST_LAYERS // 4 if axis.axis_name == "x" else _MOST_LAYERS
    stride = max(1, -(-len(labels) // most))
    axis.set_ticks(list(range(0, len(labels), stride)), labels[::stride])
    for text in axis.get_ticklabels():
        text.set_parse_math(False)
