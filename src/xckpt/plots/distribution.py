"""Distributions of elements and of singular values: ``plot.histogram``, ``plot.spectrum``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from xckpt.datasets.tensors import find
from xckpt.formatting import counted
from xckpt.options import renamed, takes
from xckpt.plots.axes import (
    add_heading,
    add_legend,
    line_styles,
    name_the_ends,
    new_axes,
    number_colours,
    number_text,
    require_drawable,
    themed,
    whole_numbers,
)
from xckpt.plots.series import (
    MOST_LINES,
    choose,
    groups_of,
    numbers_of,
    series_of,
    title_and_labels,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from xckpt.labels import TensorFilter
    from xckpt.plots.series import Chosen, Drawn, Series
    from xckpt.statistics.histograms import Distribution

# More numbered lines than this are distinguished by a scale of colours instead of names.
_FEW_LINES = 5
_FEWEST_BINS, _MOST_BINS = 10, 200
_QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)
# Opacity of the inner and of the outer band.
_ALPHAS = (0.3, 0.18)
# Up to this many series have an outer band, and names for the widest and the narrowest tensor;
# with more series, only the widest tensor is named.
_FEW_BANDS = 3
# If the bulk of the elements covers less of the range than this, it gets extra bins.
_NARROW_BULK = 0.25

Values = np.ndarray[Any, np.dtype[np.float64]]


class _Density(NamedTuple):
    """The share of a tensor's elements per unit of the axis, in each bin."""

    distribution: Distribution
    edges: Values
    values: Values

    def at(self, points: Values) -> Values:
        """Return the density at points; zero outside the bins."""
        bins = np.searchsorted(self.edges, points, side="right") - 1
        inside = (bins >= 0) & (bins < len(self.values))
        values: Values = np.where(inside, self.values[bins.clip(0, len(self.values) - 1)], 0.0)
        return values


@renamed("names", "tensors")
@takes()
@themed
def draw_histogram(
    source: Drawn,
    /,
    tensors: TensorFilter | None = None,
    *,
    exclude: TensorFilter | None = None,
    only: Literal["weights"] | None = None,
    bins: int | Sequence[float] | None = None,
    scale: str = "linear",
    log: bool = True,
    ax: Axes | None = None,
    **style: Any,
) -> Axes:
    """Draw the distributions of the elements of tensors, as densities.

    Up to twelve tensors have a line each; if they differ only by number, it determines the
    colour. More tensors become bands of quantiles, one for each role as in `layers`. The tensor
    with the largest spread has a labelled line as well, and with few roles also the one with
    the smallest. Bins are at least as wide as the spacing of the stored element type.

    Parameters
    ----------
    bins : int or sequence of float, optional
        Number of bins from the smallest to the largest element of a line or band, or their
        edges. By default at most 200, and fewer for small tensors; if a few outliers stretch
        the range, as many again for all other elements.
    scale : {"linear", "symlog"}
        Scale of the values; ``"symlog"`` is logarithmic on both sides of zero.
    log : bool, default True
        Whether the axis of densities is logarithmic, which makes outliers visible.
    **style
        Passed on to `matplotlib.axes.Axes.stairs`.

    Returns
    -------
    matplotlib.axes.Axes
        The axes, with ticks at the smallest and the largest element and at zero. A density is
        the share of the finite elements of a tensor for each unit of the values, or for each
        decade if these are logarithmic.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    ValueError
        If no tensor matches, or an argument has an unknown value.

    Examples
    --------
    >>> ds.ckpt.plot.histogram("*.q_proj.weight")
    """
    from xckpt.statistics.histograms import require_bins

    require_drawable(ax, lambda trial: trial.stairs([1.0], [0.0, 1.0], **style))
    if bins is not None:
        require_bins(bins)
    if scale not in {"linear", "symlog"}:
        raise ValueError(f"scale is 'symlog' or 'linear', not {scale!r}")
    chosen = choose(source.obj, source.filter(tensors, exclude, only))
    drawn, notes = _read_distributions(source.obj, chosen)
    axis = _Axis(drawn, bins, scale)
    low, high = min(tensor.low for tensor in drawn), max(tensor.high for tensor in drawn)
    parsed = chosen.parsed
    parsed = {tensor.name: parsed[tensor.name] for tensor in drawn}
    title, all_series = series_of(parsed, MOST_LINES, chosen.ndims)
    by_name = {tensor.name: tensor for tensor in drawn}
    members = [[by_name[name] for name in series.names] for series in all_series]
    is_banded = len(drawn) > MOST_LINES
    ax = new_axes(ax, labels=2 * len(all_series) + _FEW_BANDS if is_banded else len(drawn))
    if is_banded:
        _draw_bands(ax, all_series, members, axis, style)
        bands = "5 to 95 %, and all" if len(all_series) <= _FEW_BANDS else "5 to 95 %"
        notes = [f"lines: medians; bands: {bands}", *notes]
    else:
        title = _draw_lines(ax, all_series, drawn, axis, style) or title
    name_the_ends(ax, low, high, linthresh=axis.linthresh)
    ax.set_yscale("log" if log else "linear")
    positive = [density for density in axis.drawn if density > 0]
    if log and positive:
        ax.set_ylim(min(positive) / 2, max(positive) * 2)
    elif not log:
        ax.set_ylim(0, None)
    add_heading(ax, title, *notes)
    ax.set_xlabel("code" if chosen.scales else "value")
    ax.set_ylabel("density" if axis.linthresh is None else "density (share for each decade)")
    ax.grid(visible=True, alpha=0.25)
    return ax


def _read_distributions(obj: Any, chosen: Chosen) -> tuple[list[Distribution], list[str]]:
    """Return the distributions of the chosen tensors, and notes on what the picture leaves out."""
    from xckpt.scan.entries import contents_of, entries_of
    from xckpt.statistics.histograms import distributions

    variables, names = chosen.tensors.variables_of(chosen.names), set(chosen.names)
    entries = entries_of(contents_of(find(obj, lambda name: name in variables)))
    numeric = [tensor for tensor in distributions(entries) if tensor.name in names]
    finite = [distribution for distribution in numeric if distribution.count]
    if not finite:
        reason = "are numbers" if not numeric else "have a finite element"
        raise ValueError(f"none of {counted(len(names), 'tensor')} {reason}")
    notes = [chosen.note]
    nonfinite = [distribution for distribution in numeric if distribution.other]
    if nonfinite:
        total = sum(distribution.other for distribution in nonfinite)
        place = nonfinite[0].name if len(nonfinite) == 1 else counted(len(nonfinite), "tensor")
        notes.append(f"without {total:,} NaN or infinite in {place}")
    return finite, [*notes, chosen.codes_note]


class _Axis:
    """The bins of a picture, and the densities of tensors in them."""

    def __init__(self, members: Sequence[Distribution], bins: Any, scale: str) -> None:
        self.bins, self.scale = bins, scale
        self.linthresh: float | None = None
        #: All densities drawn so far, for the limits of the axis.
        self.drawn: list[float] = []
        if scale == "symlog":
            self.edges = self._shared_edges(members)
            if (self.edges > 0).any():
                self.linthresh = float(self.edges[self.edges > 0].min())

    def densities(self, members: Sequence[Distribution]) -> list[_Density]:
        """Return the densities of tensors, in shared bins aligned to the numbers of each type."""
        from xckpt.statistics.histograms import edges_on_grid

        edges = self._edges(members)
        densities = []
        for member in members:
            aligned = edges if np.ndim(self.bins) else edges_on_grid(member.kind, edges)
            widths = np.diff(self._positions(aligned))
            densities.append(
                _Density(member, aligned, member.counts(aligned) / member.count / widths)
            )
        return densities

    def _edges(self, members: Sequence[Distribution]) -> Values:
        if self.scale == "symlog":
            return self.edges
        edges = self._shared_edges(members)
        if np.ndim(self.bins):
            return edges
        low, high = (np.median([member.bulk[end] for member in members]) for end in (0, 1))
        if 0 < high - low < _NARROW_BULK * (edges[-1] - edges[0]):
            edges = np.union1d(edges, np.linspace(low, high, len(edges)))
        return edges

    def _shared_edges(self, members: Sequence[Distribution]) -> Values:
        from xckpt.statistics.histograms import bin_edges, require_bins

        bins = self.bins
        if bins is None:
            # Rice's rule: few elements in many bins would be noise.
            count = float(np.median([member.count for member in members]))
            bins = int(np.clip(2 * count ** (1 / 3), _FEWEST_BINS, _MOST_BINS))
        return bin_edges(require_bins(bins), self.scale, [member.span for member in members])

    def _positions(self, edges: Values) -> Values:
        """Return the positions of edges on the axis, in decades if it is logarithmic."""
        if self.linthresh is None:
            return edges
        from matplotlib.scale import SymmetricalLogTransform

        transform = SymmetricalLogTransform(10, self.linthresh, 1)
        positions: Values = transform.transform(edges) / self.linthresh
        return positions


# --- a line for each tensor ----------------------------------------------------------------------


def _draw_lines(
    ax: Axes,
    all_series: Sequence[Series],
    tensors: Sequence[Distribution],
    axis: _Axis,
    style: dict[str, Any],
) -> str:
    """Draw a line for each tensor; return a title, or "" to keep the title of the series."""
    densities = [density for tensor in tensors for density in axis.densities([tensor])]
    styles = line_styles(len(tensors))
    parsed = {name: parts for series in all_series for name, parts in series.parsed.items()}
    numbers = [numbers_of(parsed[tensor.name]) for tensor in tensors]
    is_numbered = len(all_series) == 1 and len(tensors) > _FEW_LINES and len(numbers[0]) == 1
    if is_numbered:
        (module,) = numbers[0]
        indices = [by_module[module] for by_module in numbers]
        colours = number_colours(ax, indices, module)
        styles = [{"color": colours[index]} for index in indices]
    handles = [
        _draw_stairs(
            ax, axis, density.edges, density.values, {"linewidth": 1.2, **line_style, **style}
        )
        for density, line_style in zip(densities, styles, strict=True)
    ]
    if not is_numbered:
        groups = [groups_of({tensor.name: parsed[tensor.name]}) for tensor in tensors]
        title, labels = title_and_labels(groups)
        if len(tensors) > 1:
            add_legend(ax, handles, labels)
        return title
    return ""


def _draw_stairs(
    ax: Axes, axis: _Axis, edges: Values, values: Values, style: dict[str, Any]
) -> Any:
    """Draw the outline of a histogram, with gaps at empty bins."""
    axis.drawn += values.tolist()
    # Zeros would pull the outline down to the bottom of a logarithmic axis.
    return ax.stairs(np.where(values > 0, values, np.nan), edges, **style)


# --- bands of many -------------------------------------------------------------------------------


def _draw_bands(
    ax: Axes,
    all_series: Sequence[Series],
    members: Sequence[Sequence[Distribution]],
    axis: _Axis,
    style: dict[str, Any],
) -> None:
    """Draw bands of quantiles, and the widest and the narrowest tensor of each series."""
    handles: list[Any] = []
    labels: list[str] = []
    are_few = len(all_series) <= _FEW_BANDS
    styles = line_styles(len(all_series))
    for series, tensors, line_style in zip(all_series, members, styles, strict=True):
        options = {"linewidth": 1.3, **line_style, **style}
        densities = axis.densities(tensors)
        edges = densities[0].edges
        for density in densities[1:]:
            if not np.array_equal(edges, density.edges):  # of another type
                edges = np.union1d(edges, density.edges)
        middles = (edges[1:] + edges[:-1]) / 2
        levels = np.quantile([density.at(middles) for density in densities], _QUANTILES, axis=0)
        handles.append(_draw_stairs(ax, axis, edges, levels[2], options))
        times = f"  ×{len(tensors):,}" if len(tensors) > 1 else ""
        labels.append((series.label if len(all_series) > 1 else "median") + times)
        if len(tensors) == 1:
            continue
        axis.drawn += levels[-1 if are_few else -2].tolist()
        colour = handles[-1].get_edgecolor()
        for level, alpha in zip((1, 0) if are_few else (1,), _ALPHAS, strict=False):
            look = {"color": colour, "alpha": alpha, "linewidth": 0}
            ax.stairs(levels[-1 - level], edges, baseline=levels[level], fill=True, **look)
        for density, dashes, end in _extremes(densities)[: None if are_few else 1]:
            tensor = density.distribution
            span = f"{number_text(tensor.low)} to {number_text(tensor.high)}"
            labels.append(f"{series.place(tensor.name)}: {span}")
            if are_few:
                thin = {**options, "linewidth": 1.0, "linestyle": dashes}
                handles.append(_draw_stairs(ax, axis, density.edges, density.values, thin))
            else:  # lines of so many would hide each other
                look = {"marker": "v", "s": 30, "color": colour, "zorder": 3, "clip_on": False}
                place = ax.get_xaxis_transform()
                handles.append(ax.scatter([end], [0.01], transform=place, **look))
    add_legend(ax, handles, labels, beside=True)


def _extremes(densities: Sequence[_Density]) -> list[tuple[_Density, str, float]]:
    """Return the widest and the narrowest tensor, if they differ, with dashes and far ends."""
    # The far end is the extreme that is farther from the centre, the median of the means.
    centre = np.median([density.distribution.mean for density in densities])

    def far_end(density: _Density) -> float:
        tensor = density.distribution
        return max(tensor.low, tensor.high, key=lambda end: abs(end - centre))

    def reach(density: _Density) -> float:
        return float(abs(far_end(density) - centre))

    widest, narrowest = max(densities, key=reach), min(densities, key=reach)
    if reach(widest) == reach(narrowest):
        return []
    return [(widest, "--", far_end(widest)), (narrowest, "-.", far_end(narrowest))]


# --- singular values -----------------------------------------------------------------------------

# The panel of the density, at the right: width ratios in a new figure, or bounds in given axes.
_RATIOS, _INSET = (3, 1), (1.02, 0.0, 0.35, 1.0)
_MOST_BINS_OF_VALUES = 60


@themed
def draw_spectrum(
    source: Drawn, /, name: str, *, minus: Any = None, ax: Axes | None = None, **style: Any
) -> Axes:
    """Draw the singular values of a matrix, and their density next to them.

    The line in the density is a power law, fitted to the tail of their squares; a dotted line
    marks the start of the tail.

    Parameters
    ----------
    name : str
        Name of a tensor in the file, also one that is stacked, or of a variable.
    minus : path, Index, xarray.Dataset or xarray.DataTree, optional
        Draw the singular values of the difference to this checkpoint, and the largest one
        that rounding to the stored types explains.
    ax : matplotlib.axes.Axes, optional
        Where to draw; by default in a new figure. The density is drawn at its right.
    **style
        Passed on to `matplotlib.axes.Axes.plot`.

    Returns
    -------
    matplotlib.axes.Axes
        The axes of the values, which are logarithmic.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    KeyError
        If the tensor does not exist, or is not a matrix.
    ValueError
        If all its elements are zeros, or some are not finite.

    Examples
    --------
    >>> ds.ckpt.plot.spectrum("model.layers.0.mlp.up_proj.weight")
    """
    from matplotlib import pyplot as plt

    from xckpt.datasets.tensors import OpenTensors
    from xckpt.statistics import spectrum
    from xckpt.statistics.singular import power_law

    require_drawable(ax, lambda trial: trial.plot([], [], **style))
    result = spectrum(OpenTensors(source.obj)[name], name, minus=minus, values=True).variables[name]
    values = result.values[result.values > 0]
    if np.isnan(result.values[0]):  # the last ones are, if rounding hides them
        raise ValueError(f"{name!r} has elements that are NaN or infinite")
    if not len(values):
        raise ValueError(f"{name!r} has no singular values above 0")
    is_new = ax is None
    if ax is not None:
        side = ax.inset_axes(_INSET, sharey=ax)
    else:
        options: Any = {"figsize": (7.5, 4.2), "layout": "constrained", "width_ratios": _RATIOS}
        panels: Any = plt.subplots(1, 2, sharey=True, **options)[1]
        ax, side = panels
    ax.plot(np.arange(1, len(values) + 1), values, **{"marker": ".", "markersize": 3, **style})
    ax.set_yscale("log")
    ax.set_xlabel("number, largest first")
    whole_numbers(ax.xaxis)
    ax.set_ylabel("singular value")
    ax.grid(visible=True, alpha=0.25)
    alpha, start = power_law(np.square(values))
    _draw_density(side, values, alpha, start)
    notes = ["of the difference"] if minus is not None else []
    notes += [f"stable rank {number_text(float(np.sum(np.square(values / values[0]))))}"]
    if not np.isnan(alpha):
        notes.append(f"alpha {alpha:.2f} of the tail")
    if minus is not None:
        (floor,) = result.attrs["noise_floor"]
        rank = "rank unknown: the rounding of quantised tensors is not known"
        if not np.isnan(floor):
            rank = f"rank {np.count_nonzero(values > floor):,} above the rounding"
            ax.axhline(floor, color="C1", linewidth=1, linestyle="--")
            text = ax.text(0.99, floor, "rounding", transform=ax.get_yaxis_transform(), color="C1")
            text.set(ha="right", va="bottom", fontsize="small")
        notes.append(rank)
    add_heading(ax, name, *notes, is_wide=is_new)
    return ax


def _draw_density(side: Axes, values: Values, alpha: float, start: float) -> None:
    """Draw the density of the values along the same axis, and the power law of the largest."""
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
        tail_share = float(np.mean(np.square(values) >= start))
        # The squares follow a power law; this is the density of the logarithms of the values.
        density = tail_share * 2 * (alpha - 1) * np.log(10) * (tail / tail[0]) ** (-2 * (alpha - 1))
        side.plot(density, tail, color="C3", linewidth=1.5)
        side.axhline(tail[0], color="C3", linewidth=0.8, linestyle=":")
    side.set_xlabel("density")
    side.set_xlim(left=0)
    side.xaxis.set_major_locator(MaxNLocator(3))
    side.tick_params(labelleft=False)
    side.grid(visible=True, alpha=0.25)
