"""Names of axes within one module.

primitiv multiplies from the left: ``y = matmul(w, x) + b`` with ``w {out, in}`` and ``b {out}``.
Its filters are ``{kernel_height, kernel_width, channels_in, channels_out}``. Names of parameters
are the caller's; its own examples have ``w``, ``b``, with a ``p`` before or a number behind, and
only where such a pair agrees, axes are named.

Reference: examples/ and primitiv/core/functions.h of github.com/primitiv/primitiv.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["module_axes"]

_Names = tuple[str | None, ...]
_Shape = tuple[int, ...]

_WEIGHT = re.compile(r"(p?)w((?:_\w+?)?\d*)", re.ASCII)
_FILTER = ("kernel_height", "kernel_width", "channels_in", "channels_out")


def module_axes(shapes: Mapping[str, _Shape]) -> dict[str, _Names]:
    """Name the axes of the tensors of one module."""
    axes: dict[str, _Names] = {}
    for name, shape in shapes.items():
        match = _WEIGHT.fullmatch(name)
        if match is None:
            continue
        bias = f"{match[1]}b{match[2]}"
        if len(shape) == 2 and shapes.get(bias) == shape[:1]:
            axes |= {name: ("out", "in"), bias: ("out",)}
        elif len(shape) == len(_FILTER):
            axes[name] = _FILTER
    return axes
