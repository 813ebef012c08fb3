"""How elements and singular values are distributed: ``plot.histogram``, ``plot.spectrum``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.datasets.tensors import find
from xckpt.formatting import counted
from xckpt.plots.axes import (
    add_heading,
    add_legend,
    line_styles,
    name_the_ends,
    new_axes,
    number_colours,
    number_text,
    require_drawable,
)
from xckpt.plots.series import (
    MOST_LINES,
    choose,
    groups_of,
    numbers_of,
    series_of,
    title_and_labels,
)
from xckpt.plots.theme import themed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from xckpt.labels import TensorFilter
    from xckpt.plots.series import Chosen, Series
    from xckpt.statistics.histograms import Distribution

# So many lines at most are told apart by name rather than by number.
_FEW_LINES = 5
_FEWEST_BINS, _MOST_BINS = 10, 200
_QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)
# Of the inner band and of the outer one.
_ALPHAS = (0.3, 0.18)
# More bands than this have no outer one, and only a name for the tensor that is spread most.
_FEW_BANDS = 3
# Where all but few elements are in less of the range than this, they have bins of their own.
_NARROW_BULK = 0.25

Values = np.ndarray[Any, np.dtype[np.float64]]


class _Density(NamedTuple):
    """Elements for each unit of the axis, as parts of all of a tensor."""

    found: Distribution
    edges: Values
    values: Values

    def at(self, points: Values) -> Values:
        """Return the density at points."""
        where = np.searchsorted(self.edges, points, side="right") - 1
        inside = (where >= 0) & (where < len(self.values))
        values: Values = np.where(inside, self.values[where.clip(0, len(self.values) - 1)], 0.0)
        return values


@themed
def draw_histogram(
    obj: Any,
    names: TensorFilter | None,
    *,
    bins: int | Sequence[float] | None,
    scale: Any,
    log: bool,
    ax: Axes | None,
    **style: Any,
) -> Axes:
    """Draw how elements are distributed; see `xckpt.plots.Plots.histogram`."""
    from xckpt.statistics.histograms import require_bins

    require_drawable(ax, lambda trial: trial.stairs([1.0], [0.0, 1.0], **style))
    if bins is not None:
        require_bins(bins)
    if scale not in {"linear", "symlog"}:
        raise ValueError(f"scale is 'symlog' or 'linear', not {scale!r}")
    chosen = choose(obj, names)
    found, notes = _found(obj, chosen)
    axis = _Axis(found, bins, scale)
    low, high = min(each.low for each in found), max(each.high for each in found)
    title, every = series_of([each.name for each in found], MOST_LINES, chosen.ndims)
    by_name = {each.name: each for each in found}
    members = [[by_name[name] for name in series.names] for series in every]
    is_banded = len(found) > MOST_LINES
    ax = new_axes(ax, labels=len(found) if not is_banded else 2 * len(every) + _FEW_BANDS)
    if is_banded:
        _draw_bands(ax, every, members, axis, style)
        bands = "5 to 95 %, and all" if len(every) <= _FEW_BANDS else "5 to 95 %"
        notes = [f"lines: medians; bands: {bands}", *notes]
    else:
        title = _draw_lines(ax, every, found, axis, style) or title
    name_the_ends(ax, low, high, linthresh=axis.linthresh)
    ax.set_yscale("log" if log else "linear")
    drawn = [density for density in axis.drawn if density > 0]
    if log and drawn:
        ax.set_ylim(min(drawn) / 2, max(drawn) * 2)
    elif not log:
        ax.set_ylim(0, None)
    add_heading(ax, title, *notes)
    ax.set_xlabel("code" if chosen.scales else "value")
    ax.set_ylabel("density" if axis.linthresh is None else "density (share for each decade)")
    ax.grid(visible=True, alpha=0.25)
    return ax


def _found(obj: Any, chosen: Chosen) -> tuple[list[Distribution], list[str]]:
    """Return the distributions of tensors, and notes about elements without one."""
    from xckpt.scan.entries import contents_of, entries_of
    from xckpt.statistics.histograms import distributions

    homes, names = chosen.tensors.variables_of(chosen.names), set(chosen.names)
    entries = entries_of(contents_of(find(obj, lambda name: name in homes)))
    every = [distribution for distribution in distributions(entries) if distribution.name in names]
    finite = [distribution for distribution in every if distribution.count]
    if not finite:
        reason = "are numbers" if not every else "have a finite element"
        raise ValueError(f"none of {counted(len(names), 'tensor')} {reason}")
    notes = [chosen.note]
    nonfinite = [distribution for distribution in every if distribution.other]
    if nonfinite:
        total = sum(distribution.other for distribution in nonfinite)
        place = nonfinite[0].name if len(nonfinite) == 1 else counted(len(nonfinite), "tensor")
        notes.append(f"without {total:,} NaN or infinite in {place}")
    return finite, [*notes, chosen.codes_note]


class _Axis:
    """Bins, and densities in them."""

    def __init__(self, members: Sequence[Distribution], bins: Any, scale: str) -> None:
        self.bins, self.scale = bins, scale
        self.linthresh: float | None = None
        #: Densities in the picture.
        self.drawn: list[float] = []
        if scale == "symlog":
            self.edges = self._shared(members)
            if (self.edges > 0).any():
                self.linthresh = float(self.edges[self.edges > 0].min())

    def densities(self, members: Sequence[Distribution]) -> list[_Density]:
        """Return the densities of tensors, in bins that all of them share but for their types."""
        from xckpt.statistics.histograms import edges_on_grid

        edges = self._edges(members)
        densities = []
        for member in members:
            own_edges = edges if np.ndim(self.bins) else edges_on_grid(member.kind, edges)
            widths = np.diff(self._along(own_edges))
            densities.append(
                _Density(member, own_edges, member.counts(own_edges) / member.count / widths)
            )
        return densities

    def _edges(self, members: Sequence[Distribution]) -> Values:
        if self.scale == "symlog":
            return self.edges
        edges = self._shared(members)
        if np.ndim(self.bins):
            return edges
        low, high = (np.median([member.bulk[end] for member in members]) for end in (0, 1))
        if 0 < high - low < _NARROW_BULK * (edges[-1] - edges[0]):
            edges = np.union1d(edges, np.linspace(low, high, len(edges)))
        return edges

    def _shared(self, members: Sequence[Distribution]) -> Values:
        from xckpt.statistics.histograms import bin_edges, require_bins

        bins = self.bins
        if bins is None:
            # Rice's rule: few elements in many bins would be noise.
            usual = float(np.median([member.count for member in members]))
            bins = int(np.clip(2 * usual ** (1 / 3), _FEWEST_BINS, _MOST_BINS))
        return bin_edges(require_bins(bins), self.scale, [member.span for member in members])

    def _along(self, edges: Values) -> Values:
        """Return positions on the axis, in decades if it is logarithmic."""
        if self.linthresh is None:
            return edges
        from matplotlib.scale import SymmetricalLogTransform

        transform = SymmetricalLogTransform(10, self.linthresh, 1)
        along: Values = transform.transform(edges) / self.linthresh
        return along


# --- a line for each tensor ----------------------------------------------------------------------


def _draw_lines(
    ax: Axes,
    every: Sequence[Series],
    found: Sequence[Distribution],
    axis: _Axis,
    style: dict[str, Any],
) -> str:
    """Draw a line for each tensor; return the title if it differs from that of their roles."""
    densities = [each for one in found for each in axis.densities([one])]
    styles = line_styles(len(found))
    numbers = [numbers_of(each.name) for each in found]
    is_numbered = len(every) == 1 and len(found) > _FEW_LINES and len(numbers[0]) == 1
    if is_numbered:
        (base,) = numbers[0]
        colours = number_colours(ax, [each[base] for each in numbers], base)
        styles = [{"color": colours[each[base]]} for each in numbers]
    handles = [
        _stairs(ax, axis, each.edges, each.values, {"linewidth": 1.2, **own, **style})
        for each, own in zip(densities, styles, strict=True)
    ]
    if not is_numbered:
        title, labels = title_and_labels([groups_of([each.name]) for each in found])
        if len(found) > 1:
            add_legend(ax, handles, labels)
        return title
    return ""


def _stairs(ax: Axes, axis: _Axis, edges: Values, values: Values, style: dict[str, Any]) -> Any:
    axis.drawn += values.tolist()
    # A logarithm would draw nothing at the bottom.
    return ax.stairs(np.where(values > 0, values, np.nan), edges, **style)


# --- bands of many -------------------------------------------------------------------------------


def _draw_bands(
    ax: Axes,
    every: Sequence[Series],
    members: Sequence[Sequence[Distribution]],
    axis: _Axis,
    style: dict[str, Any],
) -> None:
    """Draw bands of quantiles, and the tensors that are spread most and least."""
    handles: list[Any] = []
    labels: list[str] = []
    few = len(every) <= _FEW_BANDS
    for series, found, own in zip(every, members, line_styles(len(every)), strict=True):
        own = {"linewidth": 1.3, **own, **style}  # noqa: PLW2901
        densities = axis.densities(found)
        edges = densities[0].edges
        for each in densities[1:]:
            if not np.array_equal(edges, each.edges):  # of another type
                edges = np.union1d(edges, each.edges)
        middles = (edges[1:] + edges[:-1]) / 2
        levels = np.quantile([each.at(middles) for each in densities], _QUANTILES, axis=0)
        handles.append(_stairs(ax, axis, edges, levels[2], own))
        times = f"  ×{len(found):,}" if len(found) > 1 else ""
        labels.append((series.label if len(every) > 1 else "median") + times)
        if len(found) == 1:
            continue
        axis.drawn += levels[-1 if few else -2].tolist()
        colour = handles[-1].get_edgecolor()
        for at, alpha in zip((1, 0) if few else (1,), _ALPHAS, strict=False):
            look = {"color": colour, "alpha": alpha, "linewidth": 0}
            ax.stairs(levels[-1 - at], edges, baseline=levels[at], fill=True, **look)
        for each, dashes, end in _extremes(densities)[: None if few else 1]:
            span = f"{number_text(each.found.low)} to {number_text(each.found.high)}"
            labels.append(f"{series.place(each.found.name)}: {span}")
            if few:
                thin = {**own, "linewidth": 1.0, "linestyle": dashes}
                handles.append(_stairs(ax, axis, each.edges, each.values, thin))
            else:  # lines of so many would hide each other
                look = {"marker": "v", "s": 30, "color": colour, "zorder": 3, "clip_on": False}
                place = ax.get_xaxis_transform()
                handles.append(ax.scatter([end], [0.01], transform=place, **look))
    add_legend(ax, handles, labels, beside=True)


def _extremes(densities: Sequence[_Density]) -> list[tuple[_Density, str, float]]:
    """Return the tensors that are spread most and least, with dashes and their far ends."""
    centre = np.median([each.found.mean for each in densities])

    def far_end(each: _Density) -> float:
        return max(each.found.low, each.found.high, key=lambda end: abs(end - centre))

    def reach(each: _Density) -> float:
        return float(abs(far_end(each) - centre))

    both = [(max(densities, key=reach), "--"), (min(densities, key=reach), "-.")]
    if reach(both[0][0]) == reach(both[1][0]):
        return []
    return [(each, dashes, far_end(each)) for each, dashes in both]


# --- singular values -----------------------------------------------------------------------------

# Of the density at the right of the values: its part of the figure, or its place in their axes.
_RATIOS, _INSET = (3, 1), (1.02, 0.0, 0.35, 1.0)
_MOST_BINS_OF_VALUES = 60


@themed
def draw_spectrum(obj: Any, name: str, *, minus: Any, ax: Axes | None, **style: Any) -> Axes:
    """Draw singular values; see `xckpt.plots.Plots.spectrum`."""
    from matplotlib import pyplot as plt

    from xckpt.datasets.tensors import OpenTensors
    from xckpt.statistics import spectrum
    from xckpt.statistics.singular import power_law

    require_drawable(ax, lambda trial: trial.plot([], [], **style))
    result = spectrum(OpenTensors(obj)[name], name, minus=minus, values=True).variables[name]
    values = result.values[result.values > 0]
    if not len(values):
        raise ValueError(f"{name!r} has no singular values above 0")
    if ax is not None:
        side = ax.inset_axes(_INSET, sharey=ax)
    else:
        options: Any = {"figsize": (7.5, 4.2), "layout": "constrained", "width_ratios": _RATIOS}
        panels: Any = plt.subplots(1, 2, sharey=True, **options)[1]
        ax, side = panels
    ax.plot(np.arange(1, len(values) + 1), values, **{"marker": ".", "markersize": 3, **style})
    ax.set_yscale("log")
    ax.set_xlabel("number, largest first")
    ax.set_ylabel("singular value")
    ax.grid(visible=True, alpha=0.25)
    alpha, start = power_law(np.square(values))
    _draw_density(side, values, alpha, start)
    notes = [f"stable rank {number_text(float(np.sum(np.square(values / values[0]))))}"]
    if not np.isnan(alpha):
        notes.append(f"alpha {alpha:.2f} of the tail")
    if minus is not None:
        (floor,) = result.attrs["noise_floor"]
        notes.append(_draw_floor(ax, values, floor))
    add_heading(ax, name if minus is None else f"{name}, the difference", *notes)
    return ax


def _draw_floor(ax: Axes, values: Values, floor: float) -> str:
    """Draw the largest value that rounding explains; return what it says of the rank."""
    if np.isnan(floor):
        return "rank unknown: the rounding of quantised tensors is not known"
    ax.axhline(floor, color="C1", linewidth=1, linestyle="--")
    text = ax.text(0.99, floor, "rounding", transform=ax.get_yaxis_transform(), color="C1")
    text.set(ha="right", va="bottom", fontsize="small")
    return f"rank {np.count_nonzero(values > floor):,} above the rounding"


def _draw_density(side: Axes, values: Values, alpha: float, start: float) -> None:
    """Draw how many values there are along the same axis, and the law of the largest."""
    from matplotlib.ticker import MaxNLocator

    if values[-1] < values[0]:
        bins = min(_MOST_BINS_OF_VALUES, max(5, len(values) // 8))
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
    side.xaxis.set_major_locator(MaxNLocator(3))
    side.tick_params(labelleft=False)
    side.grid(visible=True, alpha=0.25)
