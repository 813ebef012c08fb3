"""Differences between checkpoints: ``ds.ckpt.plot.compare``, ``.error`` and ``.steps``.

`compare` draws a bar for each tensor, `error` the errors of channels, tensors against channels, and
`steps` the changes from step to step of a training run.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import xarray as xr

from xckpt.datasets.tensors import OpenTensors
from xckpt.formatting import counted
from xckpt.labels.filters import select_or_raise
from xckpt.notebook.folding import ascending
from xckpt.notebook.short_names import apart, short_names
from xckpt.options import renamed, takes
from xckpt.plots.axes import (
    add_heading,
    label_cells,
    label_rows,
    mark_beyond,
    near_limits,
    new_axes,
    new_panels,
    require_drawable,
    safe,
    themed,
    whole_numbers,
)
from xckpt.plots.layers import WIDE_SPAN, require_statistic
from xckpt.plots.series import Drawn, codes_left_out, require_any, series_of
from xckpt.structure import Role
from xckpt.structure.numbering import ParsedName, is_index

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd
    from matplotlib.axes import Axes

    from xckpt.comparison.cells import Reduced
    from xckpt.health.runs import StepChanges
    from xckpt.labels import TensorFilter
    from xckpt.typing import Array

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
    chosen = source.filter(tensors, exclude, only)
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
    codes = OpenTensors(source.obj).structure.scales
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
    _draw_bars(ax, bars, names, statistic, **style)
    ax.set_xlabel(safe(statistic) + of_codes)
    return ax


def _draw_bars(
    ax: Axes, bars: pd.DataFrame, names: list[str], statistic: str, **style: Any
) -> None:
    """Draw a bar for each row of a table, with its value as the label."""
    values = bars[statistic].to_numpy(np.float64)
    lengths = np.where(np.isfinite(values), values, 0.0)
    drawn = ax.barh(np.arange(len(values)), lengths, **style)
    ax.set_yticks(np.arange(len(bars)), names)
    ax.tick_params("y", length=0, labelsize="small")
    ax.spines[["top", "right"]].set_visible(False)
    ax.margins(x=0.12)
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


# --- errors of channels ---------------------------------------------------------------------------

# More rows or columns than a picture has pixels would hide the worst ones.
_MOST_ROWS, _MOST_COLUMNS = 256, 512
_MOST_LABELS = 32
_MOST_SERIES = 24
_WIDEST_LABEL, _WIDEST_BLOCK = 40, 32
_INCHES_PER_ROW = 0.24
_UNKNOWN, _EQUAL = "#e6007e", "#9e9e9e"
# Statistics whose smallest value is the worst.
_GOOD_IF_LARGE = frozenset({"equal_fraction", "cosine", "sqnr_db"})


@renamed("names", "tensors")
@takes()
@themed
def draw_error(
    source: Drawn,
    /,
    other: Any = None,
    statistic: str = "sqnr_db",
    tensors: TensorFilter | None = None,
    *,
    exclude: TensorFilter | None = None,
    only: Literal["weights"] | None = None,
    dim: Reduced = -1,
    ax: Axes | None = None,
    **style: Any,
) -> Axes:
    """Draw the error of each channel, with a row for each tensor, such as a layer.

    Parameters
    ----------
    other : path, Index, xarray.Dataset, xarray.DataArray or xarray.DataTree, optional
        Checkpoint to compare with, such as the quantised model; or the result of
        `xckpt.compare` with `dim`. By default the object is such a result itself.
    statistic : str, default "sqnr_db"
        A statistic of `xckpt.compare`.
    dim : str, int, iterable of these, or mapping of these to int, default -1
        Dimensions to reduce, as for `xckpt.compare`; the others are channels.
    **style
        Passed on to `matplotlib.axes.Axes.imshow`.

    Returns
    -------
    matplotlib.axes.Axes
        The axes, with channels along the columns. Tensors with fewer channels are stretched to
        the full width. Many tensors are grouped in blocks whose names differ only in numbers.
        If there is no room for all channels or tensors, the worst of several neighbours is
        shown. Equal channels are grey; channels that are zero on one side only are pink.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    TypeError
        If there is nothing to compare with.
    ValueError
        If no tensor matches or is in both, the statistic does not exist, or there is only one
        value for each tensor.

    Examples
    --------
    >>> ds.ckpt.plot.error("quantised.safetensors", tensors="*.q_proj.weight")
    """
    from xckpt.comparison import MEASURES, compare
    from xckpt.statistics.grouping import structure_of_names

    require_drawable(ax, lambda trial: trial.imshow([[0.0]], **style))
    require_statistic(statistic, [measure for measure in MEASURES if measure != "status"])
    result = source.obj if other is None else other
    is_result = isinstance(result, xr.Dataset) and "statistic" in result.dims
    if other is None and not is_result:
        raise TypeError("plot.error() takes a checkpoint to compare with, or is of a comparison")
    chosen = source.filter(tensors, exclude, only)
    if not is_result:
        result = compare(source.obj, other, tensors=chosen, dim=dim)
    rows, left_out = _channels_of(result, statistic, chosen)
    order = ascending(list(rows))
    rows = {name: rows[name] for name in np.array(list(rows), object)[order]}
    title, labels = short_names(list(rows))
    blocks: list[_Block] = []
    structure = structure_of_names(rows, result.encoding.get("origin"))
    parsed = {name: structure.siblings_key(name) for name in rows}
    if len(rows) > _MOST_LABELS:
        rows, blocks = _by_series(rows, parsed)
    height, sizes = len(rows), {row.size for row in rows.values()}
    width = min(max(sizes), _MOST_COLUMNS)
    values = _worst_values(list(rows.values()), width, statistic)
    ax = new_axes(ax, 8.0, 1.8 + _INCHES_PER_ROW * min(max(height, 4), _MOST_LABELS))
    image = _draw_image(ax, values, (max(sizes) if len(sizes) == 1 else 1, height), style)
    ax.figure.colorbar(image, ax=ax, extend="both").set_label(safe(statistic))
    _label_rows(ax, list(parsed.values()), labels, blocks)
    _label_columns(ax, sizes)
    equal = sum(int(np.isposinf(row).sum()) for row in rows.values())
    widest = max((len(block.label) for block in blocks), default=0)
    if title in {"", "*"} or blocks:  # a note has the number of too many tensors
        is_cut = height > _MOST_ROWS
        title = f"{statistic} of channels" if is_cut else counted(height, "tensor")
    add_heading(
        ax,
        title,
        f"{height:,} tensors, the worst of neighbours" if height > _MOST_ROWS else "",
        f"{max(sizes):,} channels, the worst of neighbours" if max(sizes) > width else "",
        f"{counted(equal, 'channel')} equal" if equal else "",
        f"without {counted(left_out, 'tensor')}: alone, or of one channel" if left_out else "",
        left=100 + _POINTS_PER_CHARACTER * widest,
    )
    return ax


def _worst_values(rows: Sequence[Array], width: int, statistic: str) -> Array:
    """Return rows of one width, with the worst of neighbours that share a place."""
    worst = np.fmin if statistic in _GOOD_IF_LARGE else np.fmax
    values = np.empty((len(rows), width))
    for line, row in zip(values, rows, strict=True):
        places = np.arange(width) * row.size // width
        # The worst of neighbours in a longer row, or repeated values.
        line[:] = worst.reduceat(row, places) if row.size >= width else row[places]
    if len(rows) > _MOST_ROWS:
        starts = np.arange(_MOST_ROWS) * len(rows) // _MOST_ROWS
        values = worst.reduceat(values, starts, axis=0)
    return values


class _Block(NamedTuple):
    """Neighbouring rows of tensors whose names differ only in their indices."""

    first: int
    last: int
    label: str


def _label_rows(
    ax: Axes, parsed: list[ParsedName], labels: list[str], blocks: list[_Block]
) -> None:
    """Label each row, or each block if there are blocks."""
    ax.tick_params("y", length=0, labelsize="small")
    if not blocks:
        ax.set_yticks(range(len(parsed)), [safe(label, _WIDEST_LABEL) for label in labels])
        if all(map(is_index, labels)) and parsed[0].modules:
            ax.set_ylabel(safe(parsed[0].modules[-1]))
        return
    ax.set_yticks([])
    middles = [(block.first + block.last) / 2 for block in blocks]
    label_rows(ax, middles, [block.label for block in blocks])
    for block in blocks[1:]:
        ax.axhline(block.first - 0.5, color=_EQUAL, linewidth=0.6)


def _label_columns(ax: Axes, sizes: set[int]) -> None:
    if len(sizes) == 1:
        whole_numbers(ax.xaxis)
        ax.set_xlabel("channel")
    else:
        ax.set_xticks([-0.5, 0.5], ["first", "last"])
        ax.set_xlabel(f"channels of each tensor, {min(sizes):,} to {max(sizes):,}")


def _by_series(
    rows: Mapping[str, Array], parsed: Mapping[str, ParsedName]
) -> tuple[dict[str, Array], list[_Block]]:
    """Return the rows sorted by series, and the block of each series."""
    _, all_series = series_of(parsed, _MOST_SERIES)
    ordered: dict[str, Array] = {}
    blocks = []
    for series in all_series:
        first = len(ordered)
        ordered |= {name: rows[name] for name in series.names}
        times = f"  ×{len(series.names):,}" if len(series.names) > 1 else ""
        blocks.append(_Block(first, len(ordered) - 1, times))
    labels = apart([series.label for series in all_series], _WIDEST_BLOCK)
    pairs = zip(blocks, labels, strict=True)
    return ordered, [block._replace(label=label + block.label) for block, label in pairs]


def _channels_of(
    result: xr.Dataset, statistic: str, chosen: TensorFilter | None
) -> tuple[dict[str, Array], int]:
    """Return the values of the channels of tensors, and the number of tensors without values."""
    from xckpt.statistics import channel_values

    values = channel_values(result, statistic)
    selected = {name: values[name] for name in select_or_raise(values, chosen)}
    require_any(selected)
    rows = {name: row for name, row in selected.items() if not np.isnan(row).all()}
    rows = {name: row for name, row in rows.items() if row.size > 1} or rows
    if not rows:
        count = counted(len(selected), "tensor")
        raise ValueError(f"none of {count} is in both with the same shape")
    if max(row.size for row in rows.values()) == 1:
        raise ValueError("there is one value for each tensor: compare with dim=-1 for channels")
    return rows, len(selected) - len(rows)


def _draw_image(ax: Axes, values: Array, size: tuple[int, int], style: dict[str, Any]) -> Any:
    """Draw values as an image, with a colour for each infinity: equal channels, and zeros."""
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
    # Put infinities beyond the ends of the colours; NaN is transparent.
    beyond = look["vmax"] - look["vmin"]
    drawable = np.nan_to_num(values, nan=np.nan, posinf=high + beyond, neginf=low - beyond)
    return ax.imshow(drawable, extent=extent, **look)


# --- steps of a run -------------------------------------------------------------------------------

_INCHES_PER_LAYER, _FRAME = 0.2, 0.9
_TALLEST = 10.0
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
    changes = changes_of(source.obj, source.filter(tensors, exclude, only))
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
    label_cells(ax, "y", names)
    label_cells(ax, "x", [f"{step:,}" for step in changes.steps[1:]])
    unchanged = int(np.count_nonzero(norms == 0))
    grey = f"grey: no change ({counted(unchanged, 'place')})" if unchanged else ""
    return [grey, *notes]
