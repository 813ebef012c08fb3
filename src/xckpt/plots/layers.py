"""A statistic along numbered modules: ``ds.ckpt.plot.layers``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from xckpt.datasets.tensors import find
from xckpt.labels import TensorFilter, suggest_names
from xckpt.options import renamed, takes
from xckpt.plots.axes import (
    Label,
    add_heading,
    label_ends,
    label_points,
    line_styles,
    near_limits,
    new_axes,
    new_panels,
    number_colours,
    number_text,
    require_drawable,
    safe,
    themed,
    whole_numbers,
)
from xckpt.plots.series import (
    MOST_LINES,
    MOST_LINES_OF_PANEL,
    Chosen,
    Series,
    choose,
    groups_of,
    numbers_of,
    one_of,
    outermost,
    panels_of,
    positions_of,
    series_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import xarray as xr
    from matplotlib.axes import Axes

    from xckpt.plots.series import Drawn, Positions
    from xckpt.structure.numbering import ParsedName

#: Values that span a larger factor than this get a logarithmic axis.
WIDE_SPAN = 100.0
_FEW_POINTS = 64
# Quantiles at the ends of the inner band; the outer band covers all values.
_INNER = (0.05, 0.95)
_ALPHAS = (0.18, 0.3)
_FEWEST_QUANTILES = 8
# Up to this many bands have both of their extremes named; more have only the farther one named.
_FEW_BANDS = 3
# A point of a line is named if it is this many times as far from its neighbours as they differ.
_OUT_OF_LINE, _LEAST_SPREAD = 8.0, 0.03
_FEWEST_NAMED, _MOST_NAMED = 2, 4
_LEAST_FACTOR = 0.5  # in powers of two, from the median at the position
_MARGIN = 0.22  # above and below the lines, as a share of their span
# A value is beyond the axis if it is this many spans of its line away from it.
_FAR = 4.0
# In inches: width of a figure; heights of a panel, its frame, and a label.
_WIDTH, _HEIGHT, _FRAME, _INCHES_OF_LABEL = 8.0, 1.9, 0.4, 0.17
_FEW_PANELS, _WIDE = 3, 13.0
_LABEL_WIDTH, _NARROW_LABEL_WIDTH = 44, 30

Values = np.ndarray[Any, np.dtype[np.float64]]


class _Extreme(NamedTuple):
    """The largest or the smallest value of a line, with its position and its tensor."""

    position: int
    value: float
    name: str  # empty for a single value


class _Line(NamedTuple):
    """Values along the positions of a module, with their spread at each position."""

    series: Series
    number: int  # in the module of the hue, or 0
    positions: list[int]
    levels: Values  # by position: smallest, lower quantile, median, upper quantile, largest
    most: int  # largest number of values at a position
    extremes: tuple[_Extreme, ...]  # the lowest and the highest; empty without bands


class _Panel(NamedTuple):
    """Lines that share axes."""

    title: str
    lines: list[_Line]

    @property
    def is_banded(self) -> bool:
        """True if a line combines several values at a position."""
        return any(line.most > 1 for line in self.lines)


@renamed("names", "tensors")
@takes(by="groups are .plot.by('std', {value!r})")
@themed
def draw_layers(
    source: Drawn,
    /,
    statistic: str = "std",
    tensors: TensorFilter | None = None,
    *,
    exclude: TensorFilter | None = None,
    only: Literal["weights"] | None = None,
    x: str | None = None,
    hue: str | Callable[[str], Any] | None = None,
    stats: xr.Dataset | None = None,
    ax: Axes | None = None,
    **style: Any,
) -> Axes:
    """Draw a statistic along the numbered modules of a model, each kind in its own panel.

    The tensors ``layers.0.mlp.w``, ``layers.1.mlp.w``, ... make one line. Tensors numbered
    twice, like experts in layers, make a line of the medians over the other numbers, a band
    from the smallest to the largest value and, if they are eight or more, another band of the
    middle 90 %. Labels name lines at their ends, and tensors at extremes and out of line.

    Weights, gains of norms, biases and tensors of other roles are in different panels, and so
    are modules with many lines: at most six panels of eight lines each. Beyond that, lines
    whose names differ in one word are united, and then the smallest ones. With `ax`, there is a
    single panel. Modules of several names that repeat the same tensors, such as the stages of a
    ResNet or UNet, follow each other. Tensors without a number are not shown.

    Parameters
    ----------
    statistic : str, default "std"
        A statistic of `xckpt.stats`, or of `xckpt.spectrum`, which takes longer.
    x : str, optional
        Module whose numbers are on the axis; by default the outermost, usually the layers.
    hue : str or callable, optional
        Colours of lines: another numbered module, for one line for each of its numbers, or
        bands if these are more than twelve; or a function of the name without numbers. Lines
        are in one panel then. By default every line of a panel has its own colour.
    stats : xarray.Dataset, optional
        Result of `xckpt.stats` for this object, or of `xckpt.compare`; by default the last
        result of ``ds.ckpt.stats()``, else computed or taken from the cache.
    **style
        Passed on to `matplotlib.axes.Axes.plot`.

    Returns
    -------
    matplotlib.axes.Axes
        The axes of the first panel, logarithmic where the values span more than two powers of
        ten. ``ax.figure.axes`` has the axes of all panels.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    TypeError
        If `ax` is not one Axes.
    ValueError
        If no tensor matches or has a number, or the statistic does not exist.

    Examples
    --------
    >>> moe = xckpt.open("moe.zt")
    >>> moe.ckpt.plot.layers("absmax", "*.experts.*", hue="experts")
    """
    from xckpt.statistics import OF_MATRICES, QUANTILES, statistic_names

    require_drawable(ax, lambda trial: trial.plot([], [], **style))
    if stats is None:
        require_statistic(statistic, (*statistic_names(QUANTILES), *OF_MATRICES))
    else:
        require_statistic(statistic, stats["statistic"].to_numpy().tolist())
    chosen = choose(source.obj, source.filter(tensors, exclude, only))
    hue_module = hue if isinstance(hue, str) else None
    kind = hue if callable(hue) else None
    positions = _require_positions(chosen, x, hue_module)
    numbered = positions.names
    column = _column(source, statistic, stats, chosen.tensors.variables_of(numbered))
    column = {numbered[name]: column[name] for name in numbered if name in column}
    rows = [row._replace(name=numbered[row.name]) for row in chosen.rows if row.name in numbered]
    rows = [row for row in rows if row.name in column]
    names_by_panel = [[row.name for row in rows]]
    if ax is None and hue is None:
        originals = {name: original for original, name in numbered.items()}
        structure = chosen.tensors.structure
        names_by_panel = panels_of(rows, structure, originals, positions.parsed)
    ndims = {row.name: len(row.shape) for row in rows}
    panels = [
        _Panel(*_lines_of(members, column, positions, hue_module, kind=kind, ndims=ndims))
        for members in names_by_panel
    ]
    all_axes = [ax] if ax is not None else _axes_for(panels)
    are_few = len(panels) <= _FEW_PANELS
    for number, (axes, panel) in enumerate(zip(all_axes, panels, strict=True)):
        notes = () if number else (_notes_on_bands(panels), chosen.note, chosen.codes_note)
        add_heading(axes, _title_of(panel, positions), *notes)
        axes.set_ylabel(safe(statistic) + chosen.of_codes)
        _draw_panel(axes, panel, positions, hue_module or "", style, is_wide=are_few)
    _share_positions(all_axes, 1 if are_few else 2)
    return all_axes[0]


def _require_positions(chosen: Chosen, x: str | None, hue: str | None) -> Positions:
    """Return the positions of tensors, also numbered in the module `hue`; raise without any."""
    structure = chosen.tensors.structure
    positions = positions_of(chosen.names, x, hue, structure)
    numbered = {} if positions is None else positions.names
    if hue is not None:
        parsed = {} if positions is None else positions.parsed
        numbered = {name: new for name, new in numbered.items() if hue in parsed[new].modules}
    if positions is not None and numbered and positions.along != hue:
        return positions._replace(names=numbered)
    along = x or outermost(map(structure.parse, chosen.names))
    condition = f"numbered along {along!r}" if along else "numbered"
    condition += f" and {hue!r}" if along and hue else ""
    raise ValueError(f"none of {len(chosen.names)} tensors is {condition}")


def _axes_for(panels: Sequence[_Panel]) -> list[Axes]:
    """Return new axes for panels, in two columns if there are many."""
    if len(panels) == 1:
        return [new_axes(None, labels=len(panels[0].lines))]
    heights = [_FRAME + max(_HEIGHT, _INCHES_OF_LABEL * (len(panel.lines) + 1)) for panel in panels]
    is_wide = len(panels) > _FEW_PANELS
    return new_panels(heights, _WIDE if is_wide else _WIDTH, 2 if is_wide else 1)


def _share_positions(panels: Sequence[Axes], columns: int) -> None:
    """Give panels the same range of positions, labelled only below the last of each column."""
    limits = [axes.get_xlim() for axes in panels]
    for axes in panels:
        axes.set_xlim(min(low for low, _ in limits), max(high for _, high in limits))
    for axes in panels[:-columns]:
        axes.set_xlabel("")
        axes.tick_params("x", labelbottom=False)


def _notes_on_bands(panels: Sequence[_Panel]) -> str:
    """Return a note that explains bands; empty without bands."""
    if not any(panel.is_banded for panel in panels):
        return ""
    most = max(line.most for panel in panels for line in panel.lines)
    return "lines: medians; bands: " + (
        "5 to 95 %, and all" if most >= _FEWEST_QUANTILES else "all"
    )


def _title_of(panel: _Panel, positions: Positions) -> str:
    """Return the pattern of the names in a panel, with the first and the last stage if any."""
    if not positions.stages:
        return panel.title
    numbers, _, inside = panel.title.removeprefix(f"{positions.along}.").partition(".")
    if numbers.startswith("{"):
        inside = panel.title.partition("}.")[2]
    inside = inside or "*"
    return f"{positions.stages[0]} … {positions.stages[-1]}.*" if inside == "*" else f"*.{inside}"


def require_statistic(statistic: str, available: Collection[str]) -> None:
    """Raise if a statistic is not available; the message suggests similar names."""
    if statistic not in available:
        message = f"there is no statistic {statistic!r}, only {', '.join(available)}"
        if set("*.[") & set(str(statistic)):
            message = f"{statistic!r} is not a statistic: pass tensors={statistic!r}"
        raise ValueError(message + suggest_names(available, str(statistic)))


def _column(
    source: Drawn,
    statistic: str,
    stats: xr.Dataset | None,
    variables: Collection[str],
) -> Mapping[str, float]:
    """Return the statistic of every tensor by its name in the file."""
    # Without `stats`, take it from an earlier result, or compute it for `variables`.
    from xckpt.statistics import OF_MATRICES, spectrum, table
    from xckpt.statistics import stats as compute

    if stats is None and source.stats is not None:
        stats = source.stats if statistic in source.stats["statistic"].to_numpy() else None
    if stats is None:
        tensors = find(source.obj, lambda name: name in variables)
        is_of_matrices = statistic in OF_MATRICES
        stats = spectrum(tensors, statistics=[statistic]) if is_of_matrices else compute(tensors)
    values = table(stats)[statistic]
    return dict(zip(values.index, values.to_numpy(np.float64).tolist(), strict=True))


def _lines_of(
    names: Sequence[str],
    column: Mapping[str, float],
    positions: Positions,
    hue: str | None,
    *,
    kind: Callable[[str], Any] | None,
    ndims: Mapping[str, int],
) -> tuple[str, list[_Line]]:
    """Return the title and the lines of a panel."""
    # There is a line for each series, or for each of its numbers in the module `hue`. Too many
    # lines are combined into bands.
    along = positions.along
    parsed = {name: positions.parsed[name] for name in names}
    title, all_series = series_of(parsed, most=len(names))
    if kind is not None:
        all_series = [Series(str(kind(s.bare)), s.parsed, s.shared) for s in all_series]
    count, most = len(all_series), MOST_LINES_OF_PANEL if kind is None else MOST_LINES
    if hue is not None:
        numbers = [{numbers_of(parts)[hue] for parts in s.parsed.values()} for s in all_series]
        count = sum(map(len, numbers))
        most = MOST_LINES
    if count <= most:
        return title, [line for s in all_series for line in _lines(s, column, along, hue)]
    if kind is None:
        title, all_series = series_of(parsed, most, ndims)
    else:
        kinds: dict[str, dict[str, ParsedName]] = {}
        for series in all_series:
            kinds.setdefault(series.label, {}).update(series.parsed)
        all_series = [Series.of(label, groups_of(members)) for label, members in kinds.items()]
    return title, [line for s in all_series for line in _lines(s, column, along, None)]


def _lines(series: Series, column: Mapping[str, float], along: str, hue: str | None) -> list[_Line]:
    """Return the lines of a series: one, or one for each number in the module `hue`, in order."""
    points_by_number: dict[int, dict[int, list[tuple[float, str]]]] = {}
    for name, parts in series.parsed.items():
        numbers = numbers_of(parts)
        points = points_by_number.setdefault(0 if hue is None else numbers[hue], {})
        points.setdefault(numbers[along], []).append((column[name], name))
    lines = []
    for number, points in sorted(points_by_number.items()):
        positions = sorted(points)
        levels = np.full((5, len(positions)), np.nan)
        candidates: list[_Extreme] = []
        for spread, position in zip(levels.T, positions, strict=True):
            finite = [
                _Extreme(position, value, name)
                for value, name in points[position]
                if not np.isnan(value)
            ]
            if finite:
                values = [point.value for point in finite]
                # Without interpolation, a single outlier among few values does not widen the band.
                lower = np.quantile(values, _INNER[0], method="higher")
                upper = np.quantile(values, _INNER[1], method="lower")
                spread[:] = min(values), lower, np.median(values), upper, max(values)
            candidates += finite
        most = max(map(len, points.values()))
        extremes: tuple[_Extreme, ...] = ()
        if candidates and most > 1:
            lowest = min(candidates, key=lambda point: point.value)
            highest = max(candidates, key=lambda point: point.value)
            extremes = (lowest, highest)
        lines.append(_Line(series, number, positions, levels, most, extremes))
    return lines


# --- drawing -------------------------------------------------------------------------------------


def _draw_panel(
    ax: Axes,
    panel: _Panel,
    positions: Positions,
    hue: str,
    style: dict[str, Any],
    *,
    is_wide: bool,
) -> None:
    """Draw the lines of a panel, with labels at their ends and at extremes."""
    lines = panel.lines
    ax.grid(visible=True, alpha=0.25)
    ax.margins(x=0.02, y=_MARGIN)
    is_by_number = any(line.number for line in lines)
    if is_by_number:
        colours = number_colours(ax, [line.number for line in lines], hue)
        styles = [{"color": colours[line.number], "linewidth": 1.0} for line in lines]
    else:
        labels = list(dict.fromkeys(line.series.label for line in lines))
        by_label = dict(zip(labels, line_styles(len(labels)), strict=True))
        styles = [by_label[line.series.label] for line in lines]
    handles = [
        _draw_line(ax, line, {**line_style, **style})
        for line, line_style in zip(lines, styles, strict=True)
    ]
    _set_scale(ax, lines)
    bottom, top = (-np.inf, np.inf) if ax.get_autoscaley_on() else ax.get_ylim()
    _set_positions(ax, lines, positions)
    bands = sum(1 for line in lines if line.extremes)
    points = [
        (
            abs(distance),
            Label(point.position, point.value, _point_text(line, point, positions), colour),
        )
        for line, handle in zip(lines, handles, strict=True)
        for distance, point in _points_to_name(line, bands, (bottom, top))
        for colour in [handle.get_color()]
    ]
    points.sort(key=lambda point: -point[0])
    farthest = max([distance for distance, _ in points], default=0.0)
    # The two farthest points, and others at more than half of the largest distance.
    labels_of_points = [
        label
        for rank, (distance, label) in enumerate(points[:_MOST_NAMED])
        if rank < _FEWEST_NAMED or 2 * distance > farthest
    ]
    for number, label in enumerate(labels_of_points):
        marker = "^" if label.y > top else "v" if label.y < bottom else "o"
        labels_of_points[number] = label._replace(y=float(np.clip(label.y, bottom, top)))
        look = {"marker": marker, "s": 14, "color": label.colour, "zorder": 3, "clip_on": False}
        ax.scatter([label.x], [labels_of_points[number].y], **look)
    label_points(ax, labels_of_points)
    if not is_by_number and (len(lines) > 1 or bands):
        ends = [label for pair in zip(lines, handles, strict=True) for label in _end_label(*pair)]
        # Lines of one `hue` have one colour and one label.
        by_text = {n.text: n._replace(y=float(np.clip(n.y, bottom, top))) for n in ends}
        label_ends(ax, list(by_text.values()), _LABEL_WIDTH if is_wide else _NARROW_LABEL_WIDTH)


def _draw_line(ax: Axes, line: _Line, style: dict[str, Any]) -> Any:
    """Draw a line with its bands; return the artist of the line."""
    style = {"marker": "." if len(line.positions) <= _FEW_POINTS else "", **style}
    low, lower, middle, upper, high = line.levels
    (handle,) = ax.plot(line.positions, middle, **style)
    if line.most > 1:
        bands = [(low, high), (lower, upper)] if line.most >= _FEWEST_QUANTILES else [(low, high)]
        for (bottom, top), alpha in zip(bands, _ALPHAS, strict=False):
            colour = handle.get_color()
            ax.fill_between(line.positions, bottom, top, color=colour, alpha=alpha, lw=0)
    return handle


def _end_label(line: _Line, handle: Any) -> list[Label]:
    """Return the label at the end of a line; an empty list for a line without finite values."""
    finite = np.flatnonzero(np.isfinite(line.levels[2]))
    if not len(finite):
        return []
    last = int(finite[-1])
    value = float(line.levels[2][last])
    return [Label(line.positions[last], value, line.series.label, handle.get_color())]


def _points_to_name(
    line: _Line, bands: int, limits: tuple[float, float]
) -> list[tuple[float, _Extreme]]:
    """Return the points of a line to name, with their distances from the other points."""
    # `bands` is the number of lines with bands in the panel; points beyond the limits come first.
    from xckpt.health import out_of_line

    middle = line.levels[2]
    if line.extremes:
        low, high = line.extremes
        if low.value == high.value:
            return []
        medians = dict(zip(line.positions, middle.tolist(), strict=True))
        if low.value > 0:
            points = [(abs(np.log2(e.value / medians[e.position])), e) for e in (high, low)]
            points = [(factor, extreme) for factor, extreme in points if factor > _LEAST_FACTOR]
        else:
            points = [(abs(e.value - medians[e.position]), e) for e in (high, low)]
        return points if bands <= _FEW_BANDS else sorted(points, key=lambda point: point[0])[-1:]
    bottom, top = limits
    if (is_beyond := (middle < bottom) | (middle > top)).any():
        return [
            (np.inf, _Extreme(line.positions[number], float(middle[number]), ""))
            for number in np.flatnonzero(is_beyond)
        ]
    positive = np.flatnonzero(middle > 0)
    if len(positive) <= _OUT_OF_LINE:
        return []
    scores = np.abs(out_of_line(np.log2(middle[positive]), _LEAST_SPREAD, _OUT_OF_LINE))
    return [
        (float(score), _Extreme(line.positions[number], float(middle[number]), ""))
        for score, number in zip(scores, positive, strict=True)
        if score
    ]


def _point_text(line: _Line, point: _Extreme, positions: Positions) -> str:
    """Return the text of a named point: its place among the tensors of the line, and its value."""
    numbered = f"{one_of(positions.along)} {point.position}"
    place = line.series.place(point.name) if point.name else numbered
    if positions.stages:
        place = place.replace(numbered, positions.stages[point.position], 1)
    return f"{place}: {number_text(point.value)}"


def _set_positions(ax: Axes, lines: Sequence[_Line], positions: Positions) -> None:
    """Put ticks at the positions, which are numbers or stages."""
    if not positions.stages:
        whole_numbers(ax.xaxis)
        ax.set_xlabel(safe(positions.along))
        return
    ticks = sorted({position for line in lines for position in line.positions})
    ax.set_xticks(ticks, [safe(positions.stages[position]) for position in ticks])
    if len(ticks) > 4:
        ax.tick_params("x", labelrotation=35, labelsize="small")
        for text in ax.get_xticklabels():
            text.set(ha="right", rotation_mode="anchor")


def _set_scale(ax: Axes, lines: Sequence[_Line]) -> None:
    """Set the scale of the values, and the limits of the axis if some are far from the others."""
    # The scale is logarithmic for values that span a large factor, unless some are negative.
    columns = [line.levels[np.isfinite(line.levels)] for line in lines]
    columns = [np.sort(column) for column in columns if column.size]
    if not columns:
        return
    values = np.concatenate(columns)
    low, high = _limits(columns)
    positive = values[(values > 0) & (values >= low) & (values <= high)]
    if values.min() > 0:
        low_log, high_log = np.exp(_limits([np.log(column) for column in columns]))
        if high_log >= WIDE_SPAN * low_log:
            ax.set_yscale("log")
            low, high = low_log, high_log
    elif values.min() == 0 and positive.size and positive.max() >= WIDE_SPAN * positive.min():
        # Zeros matter, and a logarithm would hide them.
        ax.set_yscale("symlog", linthresh=10.0 ** np.floor(np.log10(positive.min())))
    margin = 1e-9 * (abs(low) + abs(high))
    if values.min() >= low - margin and values.max() <= high + margin:
        return
    scale = ax.yaxis.get_transform()
    bottom, top = scale.transform([low, high])
    margin = _MARGIN * (top - bottom)
    ax.set_ylim(*scale.inverted().transform([bottom - margin, top + margin]))


def _limits(columns: Sequence[Values]) -> tuple[float, float]:
    """Return the smallest and the largest value of lines, without those far from their line."""
    limits = [near_limits(column, _FAR) for column in columns]
    return min(low for low, _ in limits), max(high for _, high in limits)
