"""Stacks of tensors that nothing but their names is known of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xckpt.labels import grids
from xckpt.structure import Described, Structure

if TYPE_CHECKING:
    from collections.abc import Mapping


def find_stacks(kinds: Mapping[str, Any], *args: Any, **kwargs: Any) -> list[grids.Stack]:
    """Return the stacks of tensors by their kinds, in a model that has no others."""
    structure = Structure([Described(name, "float32", (4, 4)) for name in kinds])
    return grids.find_stacks(kinds, structure, *args, **kwargs)
