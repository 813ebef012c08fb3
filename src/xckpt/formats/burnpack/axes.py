"""Names of axes within one module.

The file does not say what a module is, and what a weight's axes are depends on it: a linear layer
has ``weight [d_input, d_output]``, an embedding ``weight [n_embedding, d_model]``, a convolution
``weight [channels_out, channels_in, kernel...]``, a transposed one ``[channels_in, channels_out,
kernel...]``. So axes are named only where a bias tells which of them the outputs are; where both
have one size, the usual layer is meant, which is neither transposed nor of the layout ``Col``. A
weight that stands alone is left to the sizes, but for the kernel of a convolution.

Reference: the layers of crates/burn-nn of github.com/tracel-ai/burn, 0.21.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["module_axes"]

_Names = tuple[str | None, ...]
_Shape = tuple[int, ...]

_NORM = ("gamma", "beta", "running_mean", "running_var")
_KERNELS = {
    3: ("kernel",),
    4: ("kernel_height", "kernel_width"),
    5: ("kernel_depth", "kernel_height", "kernel_width"),
}


def module_axes(shapes: Mapping[str, _Shape]) -> dict[str, _Names]:
    """Name the axes of the tensors of one module."""
    if "gamma" in shapes:
        return _norm(shapes)
    weight, bias = shapes.get("weight"), shapes.get("bias")
    if weight is None:
        return {}
    size = bias[0] if bias is not None and len(bias) == 1 else None
    if len(weight) == 2 and size is not None:
        return _linear(weight, size)
    if len(weight) in _KERNELS:
        return _convolution(weight, size)
    return {}


def _norm(shapes: Mapping[str, _Shape]) -> dict[str, _Names]:
    """Name the one axis that all tensors of a normalisation have."""
    found = [name for name in _NORM if name in shapes]
    if len({shapes[name] for name in found}) > 1 or len(shapes["gamma"]) != 1:
        return {}
    return dict.fromkeys(found, ("channels",))


def _linear(weight: _Shape, size: int) -> dict[str, _Names]:
    """Tell inputs from outputs by the bias; layers of the layout ``Col`` are transposed."""
    if size == weight[1]:
        return {"weight": ("d_input", "d_output"), "bias": ("d_output",)}
    if size == weight[0]:
        return {"weight": ("d_output", "d_input"), "bias": ("d_output",)}
    return {}


def _convolution(weight: _Shape, size: int | None) -> dict[str, _Names]:
    """Tell a convolution from a transposed one by the bias."""
    kernel = _KERNELS[len(weight)]
    if size == weight[0]:
        return {
            "weight": ("channels_out", "channels_in", *kernel),
            "bias": ("channels_out",),
        }
    if size == weight[1]:
        return {
            "weight": ("channels_in", "channels_out", *kernel),
            "bias": ("channels_out",),
        }
    return {"weight": (None, None, *kernel)}
