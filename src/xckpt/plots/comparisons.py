"""What differs between checkpoints: ``ds.ckpt.plot.compare``, ``error`` and ``steps``."""

from __future__ import annotations

from collections import Counter
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from xckpt.datasets.tensors import OpenTensors
from xckpt.labels import select
from xckpt.labels.numbering import parse_name, strip_separator
from xckpt.notebook.folding import ascending
from xckpt.notebook.formatting import counted
from xckpt.plots.axes import add_heading, new_axes, require_drawable, safe, whole_numbers
from xckpt.plots.layers import WIDE_SPAN, require_statistic
from xckpt.plots.roles import codes_left_out, codes_of, require_any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from xckpt.labels import TensorFilter
    from xckpt.statistics.channels import Reduced

_INCHES_PER_BAR = 0.26
_WIDEST_NAME = 56
_STATUS_WORDS = {
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
    from xckpt.statistics import MEASURES, compare, table

    require_drawable(ax, lambda trial: trial.barh([0], [0.0], **style))
    require_statistic(statistic, [each for each in MEASURES if each != "status"])
    if most < 1:
        raise ValueError(f"a picture has at least one bar, not {most}")
    if isinstance(other, xr.Dataset) and "statistic" in other.dims:
        frame = table(other)
        frame = frame.loc[select(frame.index, names)]
    else:
        frame = table(compare(obj, other, tensors=names))
    tensors = OpenTensors(obj)
    require_any(frame.index.tolist(), [row.name for row in tensors.rows], names)
    counts = Counter(frame["status"])
    facts = [f"{counts[kind]:,} {word}" for kind, word in _STATUS_WORDS.items() if counts[kind]]
    summary = f"{counted(len(frame), 'tensor')}: {', '.join(facts)}"
    changed = frame[frame["status"] == "changed"]
    codes = codes_of(tensors)
    is_code = changed.index.isin(list(codes))
    of_codes = " of codes" if is_code.size and is_code.all() else ""
    note = ""
    if not of_codes:
        note = codes_left_out(changed.index[is_code].tolist(), codes)
        changed = changed[~is_code]
    bars = changed.head(most)[::-1]
    ax = new_axes(ax, 8.0, 1.6 + _INCHES_PER_BAR * max(4, len(bars)))
    kept = f"the {len(bars):,} most changed" if len(bars) < len(changed) else ""
    add_heading(ax, summary, kept, note)
    if bars.empty:
        _say(ax, counts["same"], counts.total())
        return ax
    values = bars[statistic].to_numpy(np.float64)
    drawn = ax.barh(np.arange(len(values)), np.where(np.isfinite(values), values, 0.0), **style)
    ax.set_yticks(np.arange(len(bars)), [safe(name, _WIDEST_NAME) for name in bars.index])
    ax.tick_params("y", length=0, labelsize="small")
    ax.spines[["top", "right"]].set_visible(False)
    ax.margins(x=0.12)
    ax.set_xlabel(safe(statistic) + of_codes)
    finite = values[np.isfinite(values)]
    if finite.size and finite.min() > 0 and finite.max() > WIDE_SPAN * finite.min():
        ax.set_xscale("log")
    ax.bar_label(drawn, [f"{value:.3g}" for value in values], padding=3, fontsize="small")
    return ax


def _say(ax: Axes, same: int, count: int) -> None:
    """Say in the middle of a picture without bars what there is to say."""
    text = "No tensor that is in both has changed."
    if not same:
        text = "No tensor is in both with the same shape."
    elif same == count:
        text = "All tensors are equal." if same > 1 else "The tensor is equal in both."
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    ax.text(0.5, 0.5, text, ha="center", va="center", size="large", transform=ax.transAxes)


# --- each channel --------------------------------------------------------------------------------

# More rows or columns than a picture has pixels would hide the worst ones.
_MOST_ROWS, _MOST_COLUMNS = 256, 512
_MOST_LABELS = 32
_WIDEST_LABEL = 40
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
    from xckpt.statistics import MEASURES, compare

    require_drawable(ax, lambda trial: trial.imshow([[0.0]], **style))
    require_statistic(statistic, [each for each in MEASURES if each != "status"])
    result = obj if other is None else other
    is_result = isinstance(result, xr.Dataset) and "statistic" in result.dims
    if other is None and not is_result:
        raise TypeError("plot.error() takes a checkpoint to compare with, or is of a comparison")
    if not is_result:
        result = compare(obj, other, tensors=names, dim=dim)
    rows, left_out = _channels_of(result, statistic, names)
    values = np.full((len(rows), max(each.size for each in rows.values())), np.nan)
    for row, each in zip(values, rows.values(), strict=True):
        row[: each.size] = each
    worst = np.fmin if statistic in _GOOD_IF_LARGE else np.fmax
    height, width = values.shape
    shown = values
    for axis, most in enumerate((_MOST_ROWS, _MOST_COLUMNS)):
        count = values.shape[axis]
        if count > most:  # the worst of neighbours is kept
            shown = worst.reduceat(shown, np.arange(most) * count // most, axis=axis)
    title, labels = _title_and_labels(list(rows))
    ax = new_axes(ax, 8.0, 1.8 + _INCHES_PER_ROW * min(max(height, 4), _MOST_LABELS))
    image = _drawn(ax, shown, (width, height), style)
    ax.figure.colorbar(image, ax=ax, extend="both").set_label(safe(statistic))
    if height <= _MOST_LABELS:
        ax.set_yticks(range(height), [safe(label, _WIDEST_LABEL) for label in labels])
        ax.tick_params("y", length=0, labelsize="small")
    else:
        whole_numbers(ax.yaxis)
        ax.set_ylabel("tensor")
    whole_numbers(ax.xaxis)
    ax.set_xlabel("channel")
    notes = [
        f"{size:,} {what}, the worst of neighbours"
        for what, size, drawn in zip(
            ("tensors", "channels"), values.shape, shown.shape, strict=True
        )
        if drawn < size
    ]
    if equal := int(np.isposinf(values).sum()):
        notes.append(f"{counted(equal, 'channel')} equal")
    if left_out:
        notes.append(f"without {counted(left_out, 'tensor')}: alone, or of one channel")
    add_heading(ax, title, *notes)
    return ax


def _channels_of(
    result: xr.Dataset, statistic: str, names: TensorFilter | None
) -> tuple[dict[str, Array], int]:
    """Return the values of the channels of tensors, and how many tensors have none."""
    from xckpt.statistics import channel_values

    every = channel_values(result, statistic)
    found = {name: every[name] for name in select(every, names)}
    require_any(found, every, names)
    rows = {name: each for name, each in found.items() if not np.isnan(each).all()}
    rows = {name: each for name, each in rows.items() if each.size > 1} or rows
    if not rows:
        raise ValueError(f"none of {counted(len(found), 'tensor')} is in both with the same shape")
    if max(each.size for each in rows.values()) == 1:
        raise ValueError("there is one value for each tensor: compare with dim=-1 for channels")
    return rows, len(found) - len(rows)


def _title_and_labels(names: list[str]) -> tuple[str, list[str]]:
    """Return what all names have, with a star for the rest, which is the label of each."""
    split = [parse_name(name).pieces for name in names]
    head = _common(split)
    tail = _common([each[len(head) :][::-1] for each in split])[::-1]
    rest = ["".join(each[len(head) : len(each) - len(tail)]) for each in split]
    labels = list(map(strip_separator, rest))
    if not any(labels):
        return names[0], names
    front = {text.removesuffix(label) for text, label in zip(rest, labels, strict=True)}
    return "".join([*head, *(front if len(front) == 1 else ()), "*", *tail]), labels


def _common(lists: list[list[str]]) -> list[str]:
    """Return what all lists begin with."""
    columns = zip(*lists, strict=False)
    return [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, columns)]


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


# --- from step to step ---------------------------------------------------------------------------

_INCHES_PER_LAYER = 0.2
_TALLEST = 10.0
_MOST_LAYERS = 40
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
        # A name up to its first number, or its module where there is none.
        found = parse_name(name)
        layer = found.outermost or "".join(found.pieces[:-1]) or name
        rows.setdefault(layer, []).append(at)
    layers = [list(rows)[at] for at in ascending(list(rows))]
    norms = np.array([_norm(changes.norm[rows[layer]]) for layer in layers])
    if relative:
        with np.errstate(invalid="ignore", divide="ignore"):
            size = changes.norm / changes.relative
            norms /= np.array([_norm(size[rows[layer]]) for layer in layers])
    from matplotlib.colors import LogNorm

    ax = new_axes(ax, 8.0, min(_TALLEST, 1.8 + _INCHES_PER_LAYER * max(6, len(layers))))
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


def _label(axis: Any, labels: list[str]) -> None:
    """Put labels at places, fewer where there are many."""
    most = _MOST_LAYERS // 4 if axis.axis_name == "x" else _MOST_LAYERS
    every = max(1, -(-len(labels) // most))
    axis.set_ticks(list(range(0, len(labels), every)), labels[::every])
    for text in axis.get_ticklabels():
        text.set_parse_math(False)
