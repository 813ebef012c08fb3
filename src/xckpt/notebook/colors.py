"""Colours of element types, the same in every picture: legible on white and on black."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["PALETTE", "WARNING", "colors_of"]

#: Each has a contrast of 3:1 and more with white and with ``#111``. The last is for all the rest.
PALETTE = ("#2f81d6", "#d9731a", "#14958a", "#9a6bd6", "#c4528c", "#788794")
WARNING = "#d9731a"


def colors_of(kinds: Iterable[str]) -> dict[str, str]:
    """Return element types their colours."""
    last = len(PALETTE) - 1
    return {kind: PALETTE[min(number, last)] for number, kind in enumerate(kinds)}
