"""Parts that all pictures share: axes, safe and short labels, legends, and colours."""

from __future__ import annotations

from contextlib import contextmanager
from functools import wraps
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, ParamSpec

import numpy as np

from xckpt.formatting import columns, printable, shortened, wrapped
from xckpt.notebook.short_names import apart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.text import Text

    _P = ParamSpec("_P")

_WIDTH = 44
_LABEL_WIDTH = 56
# Heights of a label in a legend, and of everything above and below the axes.
_INCHES_OF_LABEL = 0.175
_INCHES_OF_FRAME = 1.3
_FEW_LABELS = 5
_COLUMNS = 3
_NOTE_WIDTH = 120
# Mean width of a character, in font sizes; measured in DejaVu Sans.
_CHARACTER_WIDTH = 0.6
# Height of the labels of an axis.
_INCHES_OF_LABELS = 0.5
# Smallest distance between ticks, so that their labels do not overlap.
_INCHES_OF_TICK = 0.6
# Additional colours after matplotlib's own, visible on white and on black.
_MORE_COLOURS = ("#8c6d31", "#5254a3", "#ad494a", "#637939")
# The mark of values beyond the colours, and how many of them have their place in a note.
_MARK, _MOST_NAMED = "x", 3
# The share of values at each end that can be far from the others, and how few values have far ones.
_FRINGE, _FEWEST_VALUES = 0.1, 5
_LINE_STYLES = ("-", "--", ":", "-.")


def require_drawable(ax: Any, draw: Callable[[Axes], object] | None = None) -> None:
    """Raise an error for invalid axes or matplotlib options, before a picture is computed."""
    require_matplotlib()
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    if ax is not None and not isinstance(ax, Axes):
        raise TypeError(f"ax is one matplotlib.axes.Axes, not {type(ax).__name__}")
    if draw is not None:  # it raises for invalid options
        draw(Figure().add_subplot())


def new_axes(ax: Axes | None, width: float = 8.0, height: float = 4.5, *, labels: int = 0) -> Axes:
    """Return `ax`, or new axes of a size in inches with room for so many labels beside them."""
    from matplotlib import pyplot as plt

    height = max(height, _INCHES_OF_FRAME + labels * _INCHES_OF_LABEL)
    # The constrained layout makes room for legends next to the axes.
    return plt.subplots(figsize=(width, height), layout="constrained")[1] if ax is None else ax


def new_panels(heights: Sequence[float], width: float = 8.0, columns: int = 1) -> list[Axes]:
    """Return the axes of a new figure, row by row, for panels of given heights in inches."""
    from matplotlib import pyplot as plt

    rows = -(-len(heights) // columns)
    inches = [max(heights[row * columns : (row + 1) * columns]) for row in range(rows)]
    grid: Any = plt.subplots(
        rows,
        columns,
        figsize=(width, sum(inches)),
        height_ratios=inches,
        layout="constrained",
        squeeze=False,
    )[1]
    panels: list[Axes] = list(grid.flat)
    for unused in panels[len(heights) :]:
        unused.remove()
    return panels[: len(heights)]


def safe(text: str, width: int = _WIDTH) -> str:
    """Return a text from a file as a label: printable, short, and not read as a formula."""
    return shortened(printable(text), width).replace("$", r"\$")


def write(text: Text, content: str, width: int = _WIDTH) -> None:
    """Set the content of a text to a string from a file: printable, short, never a formula."""
    text.set_text(shortened(printable(content), width))
    text.set_parse_math(False)


def add_heading(
    ax: Axes, title: str, *notes: str, left: float = 50.0, is_wide: bool = False
) -> None:
    """Write a title, and below it notes in small letters."""
    # The heading takes the width of the axes, or of a figure with one column. A wide title takes
    # the width of any figure; notes cannot, since the layout makes room for them.
    from matplotlib.font_manager import FontProperties

    # In points. The layout comes later, and takes `left` from axes that fill the figure: the width
    # of the labels at the left of the axes.
    figure: Any = ax.get_figure(root=True)
    figure_width, spec = figure.get_size_inches()[0] * 72, ax.get_subplotspec()
    is_alone = spec is not None and spec.get_gridspec().ncols == 1
    room = float(figure_width - left if is_alone else ax.get_position().width * figure_width)
    lines = [""]
    for note in filter(None, notes):
        size = FontProperties(size="small").get_size_in_points() * _CHARACTER_WIDTH
        joined = f"{lines[-1]} · {note}" if lines[-1] else note
        lines[-1:] = [joined] if len(joined) * size < room else [lines[-1], note]
    lines = [shortened(printable(line), _NOTE_WIDTH) for line in filter(None, lines)]
    room = figure_width - left if is_wide else room
    width = max(20, int(room / (float(ax.title.get_fontsize()) * _CHARACTER_WIDTH)))
    # A sentence has several lines, and the middle of a name is left out.
    titles = wrapped(printable(title), width, 3, indent="") if ", " in title else [title]
    write(ax.title, titles[0], width)
    ax.title.set(x=0, ha="left", text="\n".join([ax.title.get_text(), *titles[1:]]))
    if lines:
        text = ax.annotate(
            "", (0, 1), (0, 4), "axes fraction", "offset points", ha="left", va="bottom"
        )
        text.set(text="\n".join(lines), fontsize="small", alpha=0.8, parse_math=False)
        ax.set_title(ax.get_title(), pad=8 + 11 * len(lines), parse_math=False, x=0, ha="left")


def add_legend(
    ax: Axes,
    handles: Sequence[Artist],
    labels: Sequence[str],
    *,
    below: Literal["axes", "labels"] | None = None,
    beside: bool = False,
) -> None:
    """Add a legend: inside the axes if it is small, otherwise beside them."""
    # `below` places it below the axes or their labels, and `beside` always beside the axes. Labels
    # without room are omitted, and the title of the legend states how many are shown.
    if not handles:
        return
    figure: Any = ax.get_figure(root=True)
    height = ax.get_position().height * figure.get_size_inches()[1]
    capacity = max(_FEW_LABELS, int(height / _INCHES_OF_LABEL))
    count = len(handles) if len(handles) <= capacity else capacity - 1
    place: dict[str, Any] = {"loc": "best"}
    if below:
        from matplotlib.transforms import ScaledTranslation

        down = -_INCHES_OF_LABELS if below == "labels" else 0.0
        place = {
            "loc": "upper center",
            "bbox_to_anchor": (0.5, -0.01),
            "bbox_transform": ax.transAxes + ScaledTranslation(0, down, figure.dpi_scale_trans),
            "ncols": min(count, _COLUMNS),
        }
    elif (beside or len(handles) > _FEW_LABELS) and figure.get_layout_engine() is not None:
        place = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5)}
    # Matplotlib omits labels that begin with an underscore, and interprets formulas.
    blank = [" "] * count
    legend = ax.legend(list(handles[:count]), blank, frameon=False, fontsize="small", **place)
    for text, label in zip(legend.get_texts(), labels, strict=False):
        write(text, label, _LABEL_WIDTH)
    if count < len(handles):
        legend.set_title(f"the first {count} of {len(handles)}")
        legend.get_title().set_fontsize("small")


# --- labels in the picture -----------------------------------------------------------------------

_GAP_OF_LABELS = 1.25  # in font sizes
_SMALL = 8.5  # points


class Label(NamedTuple):
    """A text for a point of a picture, in the colour of its line."""

    x: float
    y: float
    text: str
    colour: Any


def label_ends(ax: Axes, labels: Sequence[Label], width: int = _WIDTH) -> None:
    """Write labels at the right of the axes, for the ends of lines, without overlap."""
    _label_margin(ax, labels, 1.02, "data", width)


def label_rows(ax: Axes, rows: Sequence[float], labels: Sequence[str]) -> None:
    """Write labels at the left of the rows of an image, without overlap."""
    from matplotlib import rcParams

    ink = rcParams["text.color"]
    points = [Label(0.0, row, text, ink) for row, text in zip(rows, labels, strict=True)]
    _label_margin(ax, points, -0.03, ax.get_yaxis_transform(), _WIDTH)


def _label_margin(ax: Axes, labels: Sequence[Label], x: float, points: Any, width: int) -> None:
    """Write labels at `x`, in widths of the axes, with lines to their points."""
    gap = _GAP_OF_LABELS * _SMALL / 72 / inches(ax)[1]
    heights = _fractions(ax, labels)[:, 1]
    order = np.argsort(heights, kind="stable")
    texts = apart([label.text for label in labels], width)
    is_left = x < 0
    for number, y in zip(order.tolist(), spread(heights[order], gap), strict=True):
        label = labels[number]
        line = {"arrowstyle": "-", "color": label.colour, "lw": 0.6, "alpha": 0.6}
        line |= {"shrinkA": 0, "shrinkB": 0, "relpos": (int(is_left), 0.5)}
        place = (label.x, label.y), (x, y), points, "axes fraction"
        text = ax.annotate("", *place, line, annotation_clip=False, va="center", fontsize=_SMALL)
        text.set(color=label.colour, ha="right" if is_left else "left")
        write(text, texts[number], width)


def spread(positions: Any, gap: float) -> list[float]:
    """Move ascending positions as little as possible, to distances of at least `gap`."""
    clusters: list[list[float]] = []  # pairs of the mean without gaps, and the number of positions
    for number, position in enumerate(positions):
        mean, count = float(position) - number * gap, 1.0
        while clusters and clusters[-1][0] > mean:
            previous_mean, previous_count = clusters.pop()
            mean = (mean * count + previous_mean * previous_count) / (count + previous_count)
            count += previous_count
        clusters.append([mean, count])
    means = [mean for mean, count in clusters for _ in range(int(count))]
    moved = [mean + number * gap for number, mean in enumerate(means)]
    # Shift all positions into the axes, as far as there is room.
    down = max(0.0, moved[-1] - 1) if moved else 0.0
    moved = [position - down for position in moved]
    up = max(0.0, -moved[0]) if moved else 0.0
    return [position + up for position in moved]


def label_points(ax: Axes, labels: Sequence[Label]) -> None:
    """Write labels next to points, inside the axes and without overlap if there is room."""
    width, height = inches(ax)
    used: list[tuple[float, float, float, float]] = []
    line = _SMALL * 1.3 / 72 / height
    for label, (x, y) in zip(labels, _fractions(ax, labels), strict=True):
        content = shortened(printable(label.text), _WIDTH)
        room = columns(content) * _SMALL * _CHARACTER_WIDTH / 72 / width
        # Towards the nearer edge of the axes first.
        offsets = [0.3, -1.4, 1.5, -2.6] if y > 0.5 else [-1.4, 0.3, -2.6, 1.5]
        boxes = [
            (start, bottom, start + room, bottom + line)
            for bottom in [y + offset * line for offset in offsets]
            for start in (x - room / 2, x + 0.01, x - room - 0.01)
        ]
        inside = [box for box in boxes if box[0] >= 0 and box[2] <= 1 and 0 <= box[1] <= 1 - line]
        free = [box for box in inside if not any(_overlap(box, label_box) for label_box in used)]
        best = (free or inside or boxes)[0]
        used.append(best)
        text = ax.text(best[0], best[1], "", transform=ax.transAxes, fontsize=_SMALL)
        text.set(color=label.colour, va="bottom", ha="left")
        write(text, content)


def _overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _fractions(ax: Axes, labels: Sequence[Label]) -> Any:
    """Return the positions of points as fractions of the width and the height of the axes."""
    ax.autoscale_view()
    points = np.array([(label.x, label.y) for label in labels], np.float64).reshape(-1, 2)
    return (ax.transScale + ax.transLimits).transform(points)


def inches(ax: Axes) -> tuple[float, float]:
    """Return the width and height of axes, before the layout makes room for labels."""
    figure: Any = ax.get_figure(root=True)
    place, size = ax.get_position(), figure.get_size_inches()
    return place.width * size[0], place.height * size[1]


# Smallest distance between labels of cells, and their widest text.
_INCHES_OF_CELL, _POINTS_OF_CHARACTER, _WIDEST_OF_CELL = 0.15, 5.2, 28
# Intervals of labels that are easy to count.
_STRIDES = [digit * 10**power for power in range(7) for digit in (1, 2, 5)]


def label_cells(ax: Axes, axis: Literal["x", "y"], texts: Sequence[str], name: str = "") -> None:
    """Label rows or columns of an image, at equal intervals if space is short."""
    room = inches(ax)[axis == "y"]
    stride = next(n for n in _STRIDES if len(texts) * _INCHES_OF_CELL <= n * room)
    shown = [safe(text, _WIDEST_OF_CELL) for text in texts[::stride]]
    target = ax.yaxis if axis == "y" else ax.xaxis
    target.set_ticks(list(range(0, len(texts), stride)), shown)
    ax.tick_params(axis, length=0, labelsize="small")
    longest = max(map(len, shown)) * _POINTS_OF_CHARACTER / 72
    if axis == "x" and longest > stride * room / len(texts):
        ax.tick_params("x", rotation=90)
    target.set_label_text(safe(name))


def line_styles(count: int) -> list[dict[str, Any]]:
    """Return colours for lines, combined with dashes if there are more lines than colours."""
    from matplotlib import rcParams

    colours = rcParams["axes.prop_cycle"].by_key().get("color", ["C0"])
    if len(colours) < count <= len(colours) + len(_MORE_COLOURS):
        colours = [*colours, *_MORE_COLOURS]
    cycle = [
        {"color": colour, "linestyle": style} for style, colour in product(_LINE_STYLES, colours)
    ]
    return [cycle[number % len(cycle)] for number in range(count)]


def number_colours(ax: Axes, numbers: Iterable[int], label: str) -> dict[int, Any]:
    """Return a colour for each number, from low to high, and add a colour bar for them."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    ascending = sorted(set(numbers))
    scale = Normalize(ascending[0], ascending[-1])
    background: Any = ax.get_facecolor()
    if background[3] == 0:  # transparent: the page may be light or dark
        colours: Any = SCALE
    else:
        # One end of the map is too pale for lines on white, the other too dark for lines on black.
        span = (0.0, 0.92) if luminance(background) > 0.5 else (0.2, 1.0)
        colours = colormaps["viridis"](np.linspace(*span, 256))
    colour_map = LinearSegmentedColormap.from_list("numbers", colours)
    bar = ax.figure.colorbar(ScalarMappable(scale, colour_map), ax=ax)
    bar.set_label(safe(label))
    whole_numbers(bar.ax.yaxis)
    return {number: colour_map(scale(number)) for number in ascending}


def near_limits(ascending: Any, far: float = 2.0) -> tuple[float, float]:
    """Return the smallest and the largest value without far ones, which would hide the others."""
    # A value is far if it is beyond the others by more than `far` times their span.
    low, high = float(ascending[0]), float(ascending[-1])
    if len(ascending) < _FEWEST_VALUES:
        return low, high
    fringe = max(1, int(_FRINGE * len(ascending)))
    inner = ascending[fringe:-fringe]
    first, last = float(inner[0]), float(inner[-1])
    if first == last:  # most values are the same, and the others interesting
        distinct = np.unique(ascending)
        if len(distinct) == len(ascending) or len(distinct) < _FEWEST_VALUES:
            return low, high
        low, high = near_limits(distinct, far)
        return min(low, first), max(high, first)
    span = far * (last - first)
    near = ascending[(ascending >= first - span) & (ascending <= last + span)]
    return float(near[0]), float(near[-1])


def mark_beyond(
    ax: Axes, image: Any, values: Any, place_text: Callable[[int, int], str]
) -> tuple[Literal["neither", "both", "min", "max"], list[str]]:
    """Mark the values beyond the colours; return these ends of the colours, and notes."""
    # `place_text` names a row and a column; the farthest values are in the notes.
    low, high = image.norm.vmin, image.norm.vmax
    margin = 1e-9 * (abs(low) + abs(high))
    with np.errstate(invalid="ignore"):
        is_beyond = np.isfinite(values) & ((values < low - margin) | (values > high + margin))
    places = [(row, column) for row, column in np.argwhere(is_beyond).tolist()]
    if not places:
        return "neither", []
    places.sort(key=lambda place: -abs(values[place] - (low + high) / 2))
    cells = [image.cmap(image.norm(values[place])) for place in places]
    colours = ["black" if luminance(cell) > 0.5 else "white" for cell in cells]
    rows, columns = np.array(places).T
    ax.scatter(columns, rows, marker=_MARK, s=14, color=colours, linewidths=0.9)
    notes = [f"{_MARK} beyond the colours"]
    notes += [
        f"{number_text(values[place])} at {place_text(*place)}" for place in places[:_MOST_NAMED]
    ]
    notes += [f"{len(places) - _MOST_NAMED:,} more"] if len(places) > _MOST_NAMED else []
    is_above = {bool(values[place] > high) for place in places}
    return "both" if len(is_above) == 2 else "max" if True in is_above else "min", notes


def whole_numbers(axis: Any) -> None:
    """Put the ticks of an axis at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))


def luminance(colour: Any) -> float:
    """Return the perceived lightness of a colour, from 0 (black) to 1 (white)."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def name_the_ends(ax: Axes, low: float, high: float, *, linthresh: float | None = None) -> None:
    """Put ticks at the extremes and at zero, and regular ticks between them."""
    # With `linthresh`, the scale is a symmetric logarithm, linear up to that magnitude.
    from matplotlib.ticker import FuncFormatter, Locator, MaxNLocator, SymmetricalLogLocator

    figure: Any = ax.get_figure(root=True)
    regular: Any = MaxNLocator(7)
    if linthresh is not None:
        ax.set_xscale("symlog", linthresh=linthresh)
        regular = SymmetricalLogLocator(base=10, linthresh=linthresh)
        regular.set_params(numticks=9)

    class Ends(Locator):
        """A locator with ticks at the extremes, and regular ticks if there is room."""

        def __call__(self) -> Any:
            start, stop = sorted(self.axis.get_view_interval())  # type: ignore[union-attr]
            return self.tick_values(start, stop)

        def tick_values(self, vmin: float, vmax: float) -> Any:
            scaled = ax.transScale.transform
            span = np.ptp(scaled([(vmin, 1.0), (vmax, 1.0)])[:, 0])
            inches = ax.get_window_extent().width / figure.dpi
            room = _INCHES_OF_TICK / max(inches, _INCHES_OF_TICK) * span
            ticks = [extreme for extreme in (low, high) if vmin <= extreme <= vmax]
            # By magnitude, so that zero gets its tick first.
            for value in sorted([0.0, *regular.tick_values(vmin, vmax)], key=abs):
                positions = scaled([(tick, 1.0) for tick in [value, *ticks]])[:, 0]
                if vmin <= value <= vmax and (abs(positions[1:] - positions[0]) > room).all():
                    ticks.append(float(value))
            return np.array(sorted(ticks))

    ax.xaxis.set_major_locator(Ends())
    ax.xaxis.set_major_formatter(FuncFormatter(_tick_text))
    ax.minorticks_off()


def number_text(value: float) -> str:
    """Return a number with three digits, and a minus sign instead of a hyphen."""
    return f"{value:.3g}".replace("-", "\N{MINUS SIGN}")


def _tick_text(value: float, _: object = None) -> str:
    """Return the label of a tick, with powers of ten as a formula."""
    digits, _, exponent = number_text(value).partition("e")
    if not exponent:
        return digits
    power = int(exponent.replace("\N{MINUS SIGN}", "-"))
    times = {"1": "", "\N{MINUS SIGN}1": "\N{MINUS SIGN}"}.get(digits, f"{digits}·")
    return rf"{times}$10^{{{power}}}$"


# --- colours for light and dark notebooks ---------------------------------------------------------

# A kernel does not know whether the notebook that shows its pictures is light or dark. So new
# figures are transparent, and all colours have a contrast of at least 3 with white and with the
# dark ground of common editors. A style that the user has chosen takes precedence.

#: Colour of texts, ticks and frames.
INK = "#767b82"
# The backend of notebooks paints a light or dark ground behind a transparent figure whose tick
# labels are all darker or all lighter than grey. This colour is a little lighter, INK darker.
_LIGHTER_INK = "#7c8187"
#: Colours of lines.
COLOURS = (
    "#2f7fd0", "#d9731a", "#2e9e4f", "#d64550", "#8e6fd1", "#1a94a6", "#cf5b9e", "#a5713b",
    "#8a8f1d", "#6a74d9", "#4d8f6b", "#b8860b",
)  # fmt: skip
#: Colours of numbers, from low to high.
SCALE = ("#2f74d0", "#8a64cc", "#cf5b9e", "#d9632f", "#c08412")

_COLOURED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")


def require_matplotlib() -> None:
    """Raise `ImportError` if matplotlib is missing, before a picture is computed."""
    try:
        import matplotlib.pyplot  # noqa: F401, ICN001  whether it is there
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'xckpt[plot]'") from error


def themed(draw: Callable[_P, Axes]) -> Callable[_P, Axes]:
    """Draw new figures in these colours, unless matplotlib has another style than its own."""

    @wraps(draw)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> Axes:
        require_matplotlib()
        if kwargs.get("ax") is not None or not _is_plain():
            return draw(*args, **kwargs)
        from cycler import cycler

        style: Any = dict.fromkeys(_COLOURED, INK)
        style |= {"figure.facecolor": "none", "axes.facecolor": "none"}
        style |= {"axes.prop_cycle": cycler(color=COLOURS)}
        with styled(style):
            ax = draw(*args, **kwargs)
            # Ticks are made when the figure is drawn, with the style of that time.
            for axes in ax.get_figure(root=True).axes:  # type: ignore[union-attr]
                axes.tick_params("x", which="both", color=INK, labelcolor=INK)
                axes.tick_params("y", which="both", color=INK, labelcolor=_LIGHTER_INK)
                for axis in (axes.xaxis, axes.yaxis):
                    axis.get_offset_text().set_color(INK)
        return ax

    return drawn


@contextmanager
def styled(style: Mapping[str, Any]) -> Iterator[None]:
    """Set parameters of matplotlib for a while."""
    # Unlike `matplotlib.rc_context`, this resets no other parameters: the backend of notebooks
    # makes figures interactive when it is loaded, which is when the first figure is drawn.
    from matplotlib import rcParams

    parameters: Any = rcParams
    before = {key: parameters[key] for key in style}
    parameters.update(style)
    try:
        yield
    finally:
        parameters.update(before)


def _is_plain() -> bool:
    """Return whether matplotlib has the colours that it has by default: black on white."""
    from matplotlib import rcParams, rcParamsDefault
    from matplotlib.colors import to_rgb

    keys: Any = ("figure.facecolor", "axes.facecolor", *_COLOURED)
    return all(to_rgb(rcParams[key]) == to_rgb(rcParamsDefault[key]) for key in keys)
