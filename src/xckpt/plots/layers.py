"""A statistic along numbered modules: ``ds.ckpt.plot.layers``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.datasets.tensors import find
from xckpt.labels import suggest_names
from xckpt.plots.axes import (
    Label,
    add_heading,
    label_ends,
    label_points,
    line_styles,
    new_axes,
    new_panels,
    number_colours,
    number_text,
    require_drawable,
    safe,
    whole_numbers,
)
from xckpt.plots.panels import MOST_LINES_OF_PANEL, panels_of, positions_of
from xckpt.plots.series import (
    MOST_LINES,
    Series,
    choose,
    groups_of,
    numbers_of,
    one_of,
    outermost,
    series_of,
)
from xckpt.plots.theme import themed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import xarray as xr
    from matplotlib.axes import Axes

    from xckpt.labels import TensorFilter
    from xckpt.plots.panels import Positions

#: A logarithmic axis is for values that span more.
WIDE_SPAN = 100.0
_FEW_POINTS = 64
# The outer band has all values, the inner one those between two quantiles.
_INNER = (0.05, 0.95)
_ALPHAS = (0.18, 0.3)
_FEWEST_QUANTILES = 8
# So many bands have both of their extremes named, others the one that is farther from the rest.
_FEW_BANDS = 3
# A point of a line is named if it is so many times as far from its neighbours as these differ.
_OUT_OF_LINE, _LEAST_SPREAD = 8.0, 0.03
_FEWEST_NAMED, _MOST_NAMED = 2, 4
_LEAST_FACTOR = 0.5  # in powers of two, from the median at the position
# Inches: of a figure, of a panel, and of its frame.
_WIDTH, _HEIGHT, _FRAME, _INCHES_OF_LABEL = 8.0, 1.9, 0.4, 0.17
_FEW_PANELS, _WIDE = 3, 13.0
_LABEL_WIDTH, _NARROW_LABEL_WIDTH = 44, 30

Values = np.ndarray[Any, np.dtype[np.float64]]


class _Extreme(NamedTuple):
    """The tensor with the largest or the smallest value of a line, and that value."""

    at: int
    value: float
    name: str


class _Line(NamedTuple):
    """Values along the positions of a module, and how they are spread over all other numbers."""

    series: Series
    number: int  # of the other module, where there is a line for each of its numbers
    at: list[int]
    levels: Values  # by `at`: smallest, lower quantile, median, upper quantile, largest
    most: int  # values at one position
    extremes: tuple[_Extreme, ...]  # the lowest and the highest


class _Panel(NamedTuple):
    """Lines that share axes."""

    title: str
    lines: list[_Line]

    @property
    def is_banded(self) -> bool:
        """Whether a line stands for several values at a position."""
        return any(line.most > 1 for line in self.lines)


@themed
def draw_layers(
    obj: Any,
    statistic: str,
    names: TensorFilter | None,
    *,
    x: str | None,
    hue: str | Callable[[str], Any] | None,
    stats: xr.Dataset | None,
    known: xr.Dataset | None,
    ax: Axes | None,
    **style: Any,
) -> Axes:
    """Draw a statistic along numbered modules; see `xckpt.plots.Plots.layers`."""
    from xckpt.statistics import OF_MATRICES, QUANTILES, statistic_names

    require_drawable(ax, lambda trial: trial.plot([], [], **style))
    if stats is None:
        require_statistic(statistic, (*statistic_names(QUANTILES), *OF_MATRICES))
    else:
        require_statistic(statistic, stats["statistic"].to_numpy().tolist())
    chosen = choose(obj, names)
    other = hue if isinstance(hue, str) else None
    kind = hue if callable(hue) else None
    positions = _require_positions(chosen.names, x, other)
    called = positions.names
    column = _column(obj, statistic, stats, known, chosen.tensors.variables_of(called))
    column = {called[name]: column[name] for name in called if name in column}
    rows = [row._replace(name=called[row.name]) for row in chosen.rows if row.name in called]
    rows = [row for row in rows if row.name in column]
    divided = [[row.name for row in rows]]
    if ax is None and hue is None:
        divided = panels_of(rows, {called[name]: chosen.roles[name] for name in called})
    ndims = {row.name: len(row.shape) for row in rows}
    panels = [
        _Panel(*_lines_of(members, column, positions.along, other, kind=kind, ndims=ndims))
        for members in divided
    ]
    every = [ax] if ax is not None else _axes_for(panels)
    are_few = len(panels) <= _FEW_PANELS
    for number, (axes, panel) in enumerate(zip(every, panels, strict=True)):
        notes = () if number else (_notes_on_bands(panels), chosen.note, chosen.codes_note)
        add_heading(axes, _title_of(panel, positions), *notes)
        axes.set_ylabel(safe(statistic) + chosen.of_codes)
        _draw_panel(axes, panel, positions, other or "", style, is_wide=are_few)
    _share_positions(every, 1 if are_few else 2)
    return every[0]


def _require_positions(names: Sequence[str], x: str | None, other: str | None) -> Positions:
    """Return the positions of tensors that are also numbered in another module, if it is given."""
    positions = positions_of(names, x)
    present = {} if positions is None else positions.names
    if other is not None:
        present = {n: called for n, called in present.items() if other in numbers_of(called)}
    if positions is not None and present and positions.along != other:
        return positions._replace(names=present)
    along = x or outermost(names)
    numbered = f"numbered along {along!r}" if along else "numbered"
    numbered += f" and {other!r}" if along and other else ""
    raise ValueError(f"none of {len(names)} tensors is {numbered}")


def _axes_for(panels: Sequence[_Panel]) -> list[Axes]:
    if len(panels) == 1:
        return [new_axes(None, labels=len(panels[0].lines))]
    heights = [_FRAME + max(_HEIGHT, _INCHES_OF_LABEL * (len(panel.lines) + 1)) for panel in panels]
    is_wide = len(panels) > _FEW_PANELS
    return new_panels(heights, _WIDE if is_wide else _WIDTH, 2 if is_wide else 1)


def _share_positions(every: Sequence[Axes], columns: int) -> None:
    """Give panels the same range of positions, which are written below each column."""
    limits = [axes.get_xlim() for axes in every]
    for axes in every:
        axes.set_xlim(min(low for low, _ in limits), max(high for _, high in limits))
    for axes in every[:-columns]:
        axes.set_xlabel("")
        axes.tick_params("x", labelbottom=False)


def _notes_on_bands(panels: Sequence[_Panel]) -> str:
    if not any(panel.is_banded for panel in panels):
        return ""
    most = max(line.most for panel in panels for line in panel.lines)
    return "lines: medians; bands: " + (
        "5 to 95 %, and all" if most >= _FEWEST_QUANTILES else "all"
    )


def _title_of(panel: _Panel, positions: Positions) -> str:
    """Return the pattern of the names in a panel; stages have their own names."""
    if not positions.stages:
        return panel.title
    numbers, _, inside = panel.title.removeprefix(f"{positions.along}.").partition(".")
    if numbers.startswith("{"):
        inside = panel.title.partition("}.")[2]
    inside = inside or "*"
    return f"{positions.stages[0]} … {positions.stages[-1]}.*" if inside == "*" else f"*.{inside}"


def require_statistic(statistic: str, known: Collection[str]) -> None:
    """Refuse the name of an unknown statistic."""
    if statistic not in known:
        text = f"there is no statistic {statistic!r}, only {', '.join(known)}"
        raise ValueError(text + suggest_names(known, str(statistic)))


def _column(
    obj: Any,
    statistic: str,
    stats: xr.Dataset | None,
    known: xr.Dataset | None,
    variables: Collection[str],
) -> Mapping[str, float]:
    """Return the statistic of every tensor by its name in the file."""
    from xckpt.statistics import OF_MATRICES, spectrum, table
    from xckpt.statistics import stats as compute

    if stats is None and known is not None and statistic in known["statistic"].to_numpy():
        stats = known
    if stats is None:
        part = find(obj, lambda name: name in variables)
        is_of_matrices = statistic in OF_MATRICES
        stats = spectrum(part, statistics=[statistic]) if is_of_matrices else compute(part)
    values = table(stats)[statistic]
    return dict(zip(values.index, values.to_numpy(np.float64).tolist(), strict=True))


def _lines_of(
    names: Sequence[str],
    column: Mapping[str, float],
    along: str,
    other: str | None,
    *,
    kind: Callable[[str], Any] | None,
    ndims: Mapping[str, int],
) -> tuple[str, list[_Line]]:
    """Make a line for each series, or for each number of another module; bands of many."""
    title, every = series_of(names, most=len(names))
    if kind is not None:
        every = [Series(str(kind(s.bare)), s.names, s.shared) for s in every]
    count, most = len(every), MOST_LINES_OF_PANEL if kind is None else MOST_LINES
    if other is not None:
        count = sum(len({numbers_of(name)[other] for name in s.names}) for s in every)
        most = MOST_LINES
    if count <= most:
        return title, [line for s in every for line in _lines(s, column, along, other)]
    if kind is None:
        title, every = series_of(names, most, ndims)
    else:
        kinds: dict[str, list[str]] = {}
        for series in every:
            kinds.setdefault(series.label, []).extend(series.names)
        every = [Series.of(label, groups_of(members)) for label, members in kinds.items()]
    return title, [line for s in every for line in _lines(s, column, along, None)]


def _lines(
    series: Series, column: Mapping[str, float], along: str, other: str | None
) -> list[_Line]:
    """Make the lines of a series."""
    lines: dict[int, dict[int, list[tuple[float, str]]]] = {}
    for name in series.names:
        numbers = numbers_of(name)
        points = lines.setdefault(0 if other is None else numbers[other], {})
        points.setdefault(numbers[along], []).append((column[name], name))
    made = []
    for number in sorted(lines):
        at = sorted(lines[number])
        levels = np.full((5, len(at)), np.nan)
        every: list[_Extreme] = []
        for spread, position in zip(levels.T, at, strict=True):
            finite = [
                _Extreme(position, value, name)
                for value, name in lines[number][position]
                if not np.isnan(value)
            ]
            if finite:
                spread[:] = _levels([extreme.value for extreme in finite])
            every += finite
        most = max(map(len, lines[number].values()))
        extremes: tuple[_Extreme, ...] = ()
        if every and most > 1:
            extremes = (min(every, key=lambda e: e.value), max(every, key=lambda e: e.value))
        made.append(_Line(series, number, at, levels, most, extremes))
    return made


def _levels(values: list[float]) -> tuple[Any, ...]:
    """Return the ends of bands and the median."""
    # One of a few values does not widen the inner band.
    lower = np.quantile(values, _INNER[0], method="higher")
    upper = np.quantile(values, _INNER[1], method="lower")
    return min(values), lower, np.median(values), upper, max(values)


# --- drawing -------------------------------------------------------------------------------------


def _draw_panel(
    ax: Axes,
    panel: _Panel,
    positions: Positions,
    other: str,
    style: dict[str, Any],
    *,
    is_wide: bool,
) -> None:
    """Draw the lines of a panel, with labels at their ends and at extremes."""
    lines = panel.lines
    ax.grid(visible=True, alpha=0.25)
    ax.margins(x=0.02, y=0.22)
    is_by_number = any(line.number for line in lines)
    if is_by_number:
        colours = number_colours(ax, [line.number for line in lines], other)
        styles = [{"color": colours[line.number], "linewidth": 1.0} for line in lines]
    else:
        labels = list(dict.fromkeys(line.series.label for line in lines))
        by_label = dict(zip(labels, line_styles(len(labels)), strict=True))
        styles = [by_label[line.series.label] for line in lines]
    handles = [_draw(ax, ln, {**own, **style}) for ln, own in zip(lines, styles, strict=True)]
    _set_scale(ax, lines)
    _set_positions(ax, lines, positions)
    bands = sum(1 for line in lines if line.extremes)
    points = [
        (abs(far), Label(extreme.at, extreme.value, _named(line, extreme, positions), colour))
        for line, handle in zip(lines, handles, strict=True)
        for far, extreme in _points_to_name(line, bands)
        for colour in [handle.get_color()]
    ]
    points.sort(key=lambda point: -point[0])
    # The two that stand out most, and others that stand out nearly as much.
    labels_of_points = [
        label
        for at, (far, label) in enumerate(points[:_MOST_NAMED])
        if at < _FEWEST_NAMED or 2 * far > points[0][0]
    ]
    for label in labels_of_points:
        look = {"marker": "o", "s": 14, "color": label.colour, "zorder": 3}
        ax.scatter([label.x], [label.y], **look)
    label_points(ax, labels_of_points)
    if not is_by_number and (len(lines) > 1 or bands):
        ends = [end for pair in zip(lines, handles, strict=True) for end in _end(*pair)]
        label_ends(ax, ends, _LABEL_WIDTH if is_wide else _NARROW_LABEL_WIDTH)


def _draw(ax: Axes, line: _Line, style: dict[str, Any]) -> Any:
    """Draw a line with its bands."""
    style = {"marker": "." if len(line.at) <= _FEW_POINTS else "", **style}
    low, lower, middle, upper, high = line.levels
    (handle,) = ax.plot(line.at, middle, **style)
    if line.most > 1:
        bands = [(low, high), (lower, upper)] if line.most >= _FEWEST_QUANTILES else [(low, high)]
        for (bottom, top), alpha in zip(bands, _ALPHAS, strict=False):
            ax.fill_between(line.at, bottom, top, color=handle.get_color(), alpha=alpha, lw=0)
    return handle


def _end(line: _Line, handle: Any) -> list[Label]:
    """Return the label at the end of a line, where it has one."""
    finite = np.flatnonzero(np.isfinite(line.levels[2]))
    if not len(finite):
        return []
    last = int(finite[-1])
    value = float(line.levels[2][last])
    return [Label(line.at[last], value, line.series.label, handle.get_color())]


def _points_to_name(line: _Line, bands: int) -> list[tuple[float, _Extreme]]:
    """Return the points of a line that are named, and how far they are from the others."""
    from xckpt.health import out_of_line

    middle = line.levels[2]
    if line.extremes:
        low, high = line.extremes
        if low.value == high.value:
            return []
        medians = dict(zip(line.at, middle.tolist(), strict=True))
        if low.value > 0:
            both = [(abs(np.log2(e.value / medians[e.at])), e) for e in (high, low)]
            both = [(far, extreme) for far, extreme in both if far > _LEAST_FACTOR]
        else:
            both = [(abs(e.value - medians[e.at]), e) for e in (high, low)]
        return both if bands <= _FEW_BANDS else sorted(both, key=lambda far: far[0])[-1:]
    positive = np.flatnonzero(middle > 0)
    if len(positive) <= _OUT_OF_LINE:
        return []
    scores = np.abs(out_of_line(np.log2(middle[positive]), _LEAST_SPREAD, _OUT_OF_LINE))
    return [
        (float(scores[at]), _Extreme(line.at[positive[at]], float(middle[positive[at]]), ""))
        for at in np.flatnonzero(scores)
    ]


def _named(line: _Line, extreme: _Extreme, positions: Positions) -> str:
    """Write which tensor an extreme is, and its value."""
    place = (
        line.series.place(extreme.name)
        if extreme.name
        else f"{one_of(positions.along)} {extreme.at}"
    )
    if positions.stages:
        old = f"{one_of(positions.along)} {extreme.at}"
        place = place.replace(old, positions.stages[extreme.at], 1)
    return f"{place}: {number_text(extreme.value)}"


def _set_positions(ax: Axes, lines: Sequence[_Line], positions: Positions) -> None:
    """Put ticks at the positions, which are numbers or stages."""
    if not positions.stages:
        whole_numbers(ax.xaxis)
        ax.set_xlabel(safe(positions.along))
        return
    places = sorted({at for line in lines for at in line.at})
    ax.set_xticks(places, [safe(positions.stages[at]) for at in places])
    if len(places) > 4:
        ax.tick_params("x", labelrotation=35, labelsize="small")
        for text in ax.get_xticklabels():
            text.set(ha="right", rotation_mode="anchor")


def _set_scale(ax: Axes, lines: Sequence[_Line]) -> None:
    values = np.concatenate([line.levels[[0, -1]].ravel() for line in lines])
    values = values[np.isfinite(values)]
    positive = values[values > 0]
    if (values < 0).any() or not positive.size or positive.max() < WIDE_SPAN * positive.min():
        return
    if positive.size == values.size:
        ax.set_yscale("log")
    else:  # zeros matter, and a logarithm would hide them
        ax.set_yscale("symlog", linthresh=10.0 ** np.floor(np.log10(positive.min())))
