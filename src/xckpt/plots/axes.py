"""What all pictures share: axes, labels that are safe and short, legends, colours of lines."""

from __future__ import annotations

from itertools import product, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.notebook.formatting import printable, shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.text import Text

__all__ = [
    "add_legend",
    "common_path",
    "line_styles",
    "luminance",
    "new_axes",
    "number_colours",
    "require_matplotlib",
    "safe",
    "whole_numbers",
    "write",
]

_WIDTH = 44
_MOST_LABELS = 24
_FEW_LABELS = 5
_COLUMNS = 3
_LINE_STYLES = ("-", "--", ":", "-.")


def require_matplotlib() -> None:
    """Say what is missing before anything is computed for a picture."""
    try:
        import matplotlib.pyplot  # noqa: F401, ICN001  whether it is there
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'xckpt[plot]'") from error


def new_axes(ax: Axes | None, width: float = 8.0, height: float = 4.5) -> Axes:
    """Return the axes to draw into: those of the caller, or those of a new figure (in inches)."""
    from matplotlib import pyplot as plt

    # Legends next to the axes get their room from the constrained layout.
    return plt.subplots(figsize=(width, height), layout="constrained")[1] if ax is None else ax


def safe(text: str, width: int = _WIDTH) -> str:
    """Make a text from a file fit for a label: printable, short, and not a formula."""
    return shortened(printable(text), width).replace("$", r"\$")


def write(text: Text, content: str, width: int = _WIDTH) -> None:
    """Set a text of a picture to one from a file, whatever is in it."""
    text.set_text(shortened(printable(content), width))
    text.set_parse_math(False)


def add_legend(
    ax: Axes, handles: Sequence[Artist], labels: Sequence[str], *, below: bool = False
) -> None:
    """Add a legend: inside where it is small, else next to the axes, or below them."""
    if not handles:
        return
    kept = len(handles) if len(handles) <= _MOST_LABELS else _MOST_LABELS - 1
    place: dict[str, Any] = {"loc": "best"}
    if below:
        place = {
            "loc": "upper center",
            "bbox_to_anchor": (0.5, -0.01),
            "ncols": min(kept, _COLUMNS),
        }
    elif len(handles) > _FEW_LABELS:
        place = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5)}
    # Matplotlib would leave out labels that begin with an underscore, and read formulas.
    blank = [" "] * kept
    legend = ax.legend(list(handles[:kept]), blank, frameon=False, fontsize="small", **place)
    for text, label in zip(legend.get_texts(), labels, strict=False):
        write(text, label)
    if kept < len(handles):
        legend.set_title(f"the first {kept} of {len(handles)}")
        legend.get_title().set_fontsize("small")


def line_styles(count: int) -> list[dict[str, Any]]:
    """Return the colours of lines and, when these are used up, dashes."""
    from matplotlib import rcParams

    colours = rcParams["axes.prop_cycle"].by_key().get("color", ["C0"])
    cycle = [
        {"color": colour, "linestyle": style} for style, colour in product(_LINE_STYLES, colours)
    ]
    return [cycle[number % len(cycle)] for number in range(count)]


def number_colours(ax: Axes, numbers: Iterable[int], label: str) -> dict[int, Any]:
    """Return a colour for each number, in their order, and explain them by a bar."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    known = sorted(set(numbers))
    scale = Normalize(known[0], known[-1])
    # One end of the map is too pale for lines on white, the other too dark for lines on black.
    span = (0.0, 0.92) if luminance(ax.get_facecolor()) > 0.5 else (0.2, 1.0)
    colours = colormaps["viridis"](np.linspace(*span, 256))
    listed = LinearSegmentedColormap.from_list("numbers", colours)
    bar = ax.figure.colorbar(ScalarMappable(scale, listed), ax=ax)
    bar.set_label(safe(label))
    whole_numbers(bar.ax.yaxis)
    return {number: listed(scale(number)) for number in known}


def whole_numbers(axis: Any) -> None:
    """Put the ticks of an axis at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", integer=True))


def luminance(colour: Any) -> float:
    """Return how light a colour is to the eye, from 0 (black) to 1 (white)."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def common_path(names: Sequence[str]) -> tuple[str, list[str]]:
    """Return the modules that all names are in, with a dot at the end, and the rests."""
    if len(names) < 2:
        return "", list(names)
    columns = zip(*(name.split(".")[:-1] for name in names), strict=False)
    shared = takewhile(lambda parts: len(set(parts)) == 1, columns)
    common = "".join(f"{parts[0]}." for parts in shared)
    return common, [name[len(common) :] for name in names]
