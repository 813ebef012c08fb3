"""What is to be read in a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def legend_texts(ax: Axes) -> list[str]:
    """Give the labels of a legend, none where there is no legend."""
    legend = ax.get_legend()
    return [] if legend is None else [text.get_text() for text in legend.get_texts()]


def notes(ax: Axes) -> str:
    """Give what is written below the title."""
    places = {text: getattr(text, "xy", None) for text in ax.texts}
    return next((text.get_text() for text, place in places.items() if place == (0, 1)), "")
