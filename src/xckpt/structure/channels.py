"""Channels of a weight: which axes its outputs and its inputs run along."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

# A projection to heads has two axes of outputs.
_HEADS = ("heads", "head")
# Axes of several matrices in one tensor.
_SEVERAL = frozenset({"directions", "layers", "experts", "expert"})
_TORCH_KERNEL = re.compile(r"(^|[./])(weight|weight_v)$")
_CONV = re.compile(r"conv|proj_in|patch_embed", re.IGNORECASE)


class Channels(NamedTuple):
    """The axes of a tensor that its rows and its columns run along; others are within a channel."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    #: Whether rows are known to be output channels, and columns input channels.
    are_known: bool = False


def channels_by_axes(axes: Sequence[str | None]) -> Channels | None:
    """Return the channels of a weight whose axes have names; None if the names do not tell."""
    place = {name: position for position, name in enumerate(axes) if name is not None}
    heads = tuple([place[name] for name in _HEADS if name in place])
    several = tuple([place[name] for name in axes if name in _SEVERAL])
    if "out" in place and ("in" in place or heads):
        columns = (place["in"],) if "in" in place else heads
        return Channels((*several, place["out"]), columns, are_known=True)
    if "in" in place and heads:
        return Channels(heads, (place["in"],), are_known=True)
    if "in" in place and "multiplier" in place:  # a kernel for each channel
        return Channels((place["in"], place["multiplier"]), (), are_known=True)
    return None


def channels_of_family(axes: Sequence[str | None], outputs: int, inputs: int) -> Channels:
    """Return the channels of a weight whose family states its outputs and inputs."""
    several = [position for position, name in enumerate(axes) if name in _SEVERAL]
    return Channels((*several, outputs), (inputs,), are_known=True)


def channels_by_name(name: str, ndim: int) -> Channels | None:
    """Return the channels of a kernel of PyTorch, which begins with its outputs."""
    is_kernel = ndim in {4, 5} or (ndim == 3 and _CONV.search(name) is not None)
    if is_kernel and _TORCH_KERNEL.search(name):
        return Channels((0,), (1,), are_known=True)
    return None
