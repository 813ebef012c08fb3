"""Texts and colours of a figure, for assertions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.text import Annotation

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def legend_texts(ax: Axes) -> list[str]:
    """Return the labels of the legend; empty without a legend."""
    legend = ax.get_legend()
    return [] if legend is None else [text.get_text() for text in legend.get_texts()]


def notes(ax: Axes) -> str:
    """Give what is written below the title."""
    places = {text: getattr(text, "xy", None) for text in ax.texts}
    return next((text.get_text() for text, place in places.items() if place == (0, 1)), "")


def end_labels(ax: Axes) -> list[str]:
    """Give the labels at the ends of lines, from the lowest to the highest."""
    ends = [text for text in ax.texts if isinstance(text, Annotation) and text.xy != (0, 1)]
    return [text.get_text() for text in ends]


def point_labels(ax: Axes) -> list[str]:
    """Return the labels of points, the most extreme first."""
    return [text.get_text() for text in ax.texts if not isinstance(text, Annotation)]
