"""Colours for light and dark notebooks: figures without a background, in colours between both.

A kernel does not know whether the notebook that shows its pictures is light or dark. So new figures
are transparent, and all colours have a contrast of at least 3 with white and with the dark ground
of common editors. A style that the user has chosen takes precedence.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from matplotlib.axes import Axes

    _P = ParamSpec("_P")

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
