"""A statistic along numbered modules: ``ds.ckpt.plot.layers``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.datasets.tensors import find
from xckpt.labels import suggest_names
from xckpt.plots.axes import (
    add_heading,
    add_legend,
    line_styles,
    new_axes,
    number_colours,
    number_text,
    require_drawable,
    safe,
    whole_numbers,
)
from xckpt.plots.roles import MOST_LINES, Role, choose, groups_of, numbers_of, outermost, roles_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import xarray as xr
    from matplotlib.axes import Axes

    from xckpt.labels import TensorFilter

#: A logarithmic axis is for values that span more.
WIDE_SPAN = 100.0
_FEW_POINTS = 64
# Of bands: the outer one has all values, the inner one those between two quantiles.
_INNER = (0.05, 0.95)
_ALPHAS = (0.18, 0.3)
_FEWEST_QUANTILES = 8
# So many bands have both of their extremes named, others the one that is farther from the rest.
_FEW_BANDS = 3

Values = np.ndarray[Any, np.dtype[np.float64]]


class _Extreme(NamedTuple):
    """The tensor with the largest or the smallest value of a line."""

    at: int
    value: float
    name: str


class _Line(NamedTuple):
    """Values along the numbers of a module, and how they are spread over all other numbers."""

    role: Role
    number: int  # of the other module, where there is a line for each of its numbers
    at: list[int]
    levels: Values  # by `at`: smallest, lower quantile, median, upper quantile, largest
    most: int  # values at one number
    extremes: tuple[_Extreme, ...]  # the lowest and the highest


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
    along = x or outermost(chosen.names)
    other = hue if isinstance(hue, str) else None
    wanted = {along, other or along}
    numbered = [name for name in chosen.names if wanted <= numbers_of(name).keys()]
    if not numbered or along is None or along == other:
        what = f"numbered along {along!r}" + (f" and {other!r}" if other else "")
        raise ValueError(f"none of {len(chosen.names)} tensors is {what if along else 'numbered'}")
    column = _column(obj, statistic, stats, known, chosen.tensors.variables_of(numbered))
    present = [name for name in numbered if name in column]
    kind = hue if callable(hue) else None
    title, lines = _lines_of(present, column, along, other, kind=kind, ndims=chosen.ndims)
    bands = sum(1 for line in lines if line.extremes)
    named = sum(len(_named(line, bands)) for line in lines)
    ax = new_axes(ax, labels=len(lines) + named)
    _draw_all(ax, lines, other or "", style)
    banded = [line for line in lines if line.most > 1]
    spread = "lines: medians; bands: all" if banded else ""
    if any(line.most >= _FEWEST_QUANTILES for line in banded):
        spread = "lines: medians; bands: 5 to 95 %, and all"
    add_heading(ax, title, spread, chosen.note, chosen.codes_note)
    ax.set_xlabel(safe(along))
    ax.set_ylabel(safe(statistic) + chosen.of_codes)
    whole_numbers(ax.xaxis)
    ax.grid(visible=True, alpha=0.25)
    _set_scale(ax, lines)
    return ax


def require_statistic(statistic: str, known: Collection[str]) -> None:
    """Refuse the name of a statistic that there is not."""
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
        some = find(obj, lambda name: name in variables)
        is_of_matrices = statistic in OF_MATRICES
        stats = spectrum(some, statistics=[statistic]) if is_of_matrices else compute(some)
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
    """Make a line for each role, or for each number of another module; bands where it is many."""
    title, roles = roles_of(names, most=len(names))
    if kind is not None:
        roles = [Role(str(kind(role.bare)), role.names, role.shared) for role in roles]
    count = len(roles)
    if other is not None:
        count = sum(len({numbers_of(name)[other] for name in role.names}) for role in roles)
    if count <= MOST_LINES:
        return title, [line for role in roles for line in _lines(role, column, along, other)]
    if kind is None:
        title, roles = roles_of(names, MOST_LINES, ndims)
    else:
        kinds: dict[str, list[str]] = {}
        for role in roles:
            kinds.setdefault(role.label, []).extend(role.names)
        roles = [Role.of(label, groups_of(each)) for label, each in kinds.items()]
    return title, [line for role in roles for line in _lines(role, column, along, None)]


def _lines(role: Role, column: Mapping[str, float], along: str, other: str | None) -> list[_Line]:
    """Make the lines of a role."""
    lines: dict[int, dict[int, list[tuple[float, str]]]] = {}
    for name in role.names:
        numbers = numbers_of(name)
        points = lines.setdefault(0 if other is None else numbers[other], {})
        points.setdefault(numbers[along], []).append((column[name], name))
    found = []
    for number in sorted(lines):
        at = sorted(lines[number])
        levels = np.full((5, len(at)), np.nan)
        every: list[_Extreme] = []
        for place, each in enumerate(at):
            known = [_Extreme(each, *one) for one in lines[number][each] if not np.isnan(one[0])]
            values = np.array([one.value for one in known])
            if known:
                # One of a few does not widen the inner band.
                lower = np.quantile(values, _INNER[0], method="higher")
                upper = np.quantile(values, _INNER[1], method="lower")
                levels[:, place] = values.min(), lower, np.median(values), upper, values.max()
            every += known
        most = max(map(len, lines[number].values()))
        extremes: tuple[_Extreme, ...] = ()
        if every and most > 1:
            extremes = (min(every, key=lambda e: e.value), max(every, key=lambda e: e.value))
        found.append(_Line(role, number, at, levels, most, extremes))
    return found


# --- drawing -------------------------------------------------------------------------------------


def _draw_all(ax: Axes, lines: Sequence[_Line], other: str, style: dict[str, Any]) -> None:
    """Draw lines in the colours of the numbers of another module, or of their roles."""
    if any(line.number for line in lines):
        colours = number_colours(ax, [line.number for line in lines], other)
        for line in lines:
            _draw(ax, line, {"color": colours[line.number], "linewidth": 1.0, **style})
        return
    kinds = {line.role.label: None for line in lines}
    styles = dict(zip(kinds, line_styles(len(kinds)), strict=True))
    drawn = [_draw(ax, line, {**styles[line.role.label], **style}) for line in lines]
    # A legend of the roles, and below each the tensors at its extremes.
    handles: list[Any] = []
    labels: list[str] = []
    bands = sum(1 for line in lines if line.extremes)
    if len(lines) == 1 and not bands:
        return  # the title says it
    for line, handle in zip(lines, drawn, strict=True):
        if line.role.label not in labels:
            handles.append(handle)
            labels.append(line.role.label if len(lines) > 1 else "median")
        for marker, each in _named(line, bands):
            look = {"marker": marker, "color": handle.get_color(), "s": 30, "zorder": 3}
            handles.append(ax.scatter([each.at], [each.value], **look))
            labels.append(f"{line.role.place(each.name)}: {number_text(each.value)}")
    add_legend(ax, handles, labels, beside=bands > 0)


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


def _named(line: _Line, bands: int) -> list[tuple[str, _Extreme]]:
    """Choose which extremes of a line are named, with their markers."""
    if not line.extremes:
        return []
    low, high = line.extremes
    if low.value == high.value:
        return []
    both = [("^", high), ("v", low)]
    if bands <= _FEW_BANDS:
        return both
    middle = float(np.nanmedian(line.levels[2]))
    return [max(both, key=lambda each: abs(each[1].value - middle))]


def _set_scale(ax: Axes, lines: Sequence[_Line]) -> None:
    values = np.concatenate([line.levels[[0, -1]].ravel() for line in lines])
    values = values[np.isfinite(values)]
    positive = values[values > 0]
    if (values < 0).any() or not positive.size or positive.max() < WIDE_SPAN * positive.min():
        return
    if positive.size == values.size:
        ax.set_yscale("log")
    else:  # zeros are what matters, and a logarithm would hide them
        ax.set_yscale("symlog", linthresh=10.0 ** np.floor(np.log10(positive.min())))
