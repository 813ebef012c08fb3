"""Numbered modules: which components of a name are indices. Only this page says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

__all__ = ["Numbered", "is_index", "numbered"]

# What an index stands after where it stands first, as the layers of a bare sequence do.
_FIRST = "index"
# Digits of an index: coordinates have 64-bit integers, and int refuses more than 4300 digits.
_LONGEST_INDEX = 18


class Numbered(NamedTuple):
    """A name taken apart: its components with None for indices, what these number, and they."""

    template: tuple[str | None, ...]
    bases: tuple[str, ...]
    indices: tuple[str, ...]


def is_index(component: str) -> bool:
    """Return whether a component of a name is a whole number; zeros may stand in front."""
    # isdigit alone takes "³" and other scripts.
    return component.isdigit() and component.isascii() and len(component) <= _LONGEST_INDEX


def numbered(components: Sequence[str], only: Collection[str] | None = None) -> Numbered:
    """Find the indices in a name: all, or those that stand after certain components."""
    template: list[str | None] = []
    bases: list[str] = []
    indices: list[str] = []
    base = _FIRST
    for component in components:
        # Asked first, because of a hundred thousand names most components are words.
        if component.isdigit() and is_index(component) and (only is None or base in only):
            template.append(None)
            bases.append(base or _FIRST)
            indices.append(component)
        else:
            template.append(component)
            base = component
    return Numbered(tuple(template), tuple(bases), tuple(indices))
