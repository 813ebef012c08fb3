"""Small floats that share bytes: NVFP4 and MXFP4 of several makers; and ModelOpt's integers."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from xckpt.quantized.model import (
    FLOATS,
    Model,
    Unfit,
    Weight,
    check_grid,
    leaf,
    nbytes,
    quantization,
    single,
    stored_as,
)

if TYPE_CHECKING:
    from xckpt.index import Tensor

__all__ = ["blocks", "modelopt", "small_floats"]


def small_floats(
    model: Model,
    name: str,
    data: Tensor,
    scale: str,
    dtype: str,
    *,
    group: int,
    bits: int = 4,
    shared: str | None = None,
    divides: bool = False,
) -> Weight:
    """Read packed floats of 4 or 6 bits; `shared` is the name of a factor of all scales."""
    if not data.ndim:
        raise Unfit("shape", f"{leaf(data.name)} has no axes")
    scales = model.need(scale, {dtype, "uint8"})
    size = nbytes(data) * 8
    shape = (*data.shape[:-1], size // max(prod(data.shape[:-1]), 1) // bits)
    block = (*(1,) * (data.ndim - 1), group)
    check_grid(shape, block, scales)
    if prod(shape) * bits != size or shape[-1] % group:
        raise Unfit("grid", f"{leaf(data.name)} is {list(data.shape)}, not whole groups of {group}")
    parts = {
        "data": (data, stored_as(data, "uint8")),
        "scales": (scales, stored_as(scales, dtype)),
    }
    if shared is not None:
        parts["global"] = single(model, shared)
    code = "float4_e2m1fn" if bits == 4 else "float6_e2m3fn"
    scheme = quantization(
        block, code, bits, 8, data.ndim - 1, stream=bits != 4,
        global_scale=shared is not None, global_divides=divides,
    )  # fmt: skip
    return Weight(name, shape, scheme, parts)


def blocks(model: Model, name: str, data: Tensor) -> Weight | None:
    """Read ``_blocks`` of gpt-oss: the transpose of what is stored."""
    stem = name.removesuffix("_blocks")
    if stem == name or (f"{stem}_scales" not in model.tensors and model.method != "mxfp4"):
        return None
    model.need(name, {"uint8"})
    scales = model.need(f"{stem}_scales", {"uint8"})
    if data.ndim < 3 or data.shape[-1] != 16:
        raise Unfit("shape", f"{leaf(name)} is {list(data.shape)}: blocks have 16 bytes")
    if scales.shape != data.shape[:-1]:
        reason = f"{leaf(scales.name)} is {list(scales.shape)}, blocks {list(data.shape)}"
        raise Unfit("grid", reason)
    *lead, rows, groups = data.shape[:-1]
    count = len(lead)
    axes = (*range(count), count + 1, count)
    scheme = quantization(
        (*(1,) * count, 32, 1), "float4_e2m1fn", 4, 8, count, scale_axes=axes, axes=axes
    )
    parts = {
        "data": (data, stored_as(data, shape=(*lead, rows, groups * 16))),
        "scales": (scales, stored_as(scales, "float8_e8m0fnu")),
    }
    return Weight(stem, (*lead, groups * 32, rows), scheme, parts)


def modelopt(model: Model, name: str, data: Tensor) -> Weight | None:
    """Read bytes of two codes each: NVFP4, or rows of integers."""
    scale = f"{name}_scale"
    if data.dtype != "uint8" or not name.endswith(".weight") or scale not in model.tensors:
        if data.dtype == "uint8" and name.endswith(".weight") and model.method == "modelopt":
            raise Unfit("no scale", f"there is no {leaf(scale)}")
        return None
    if model.tensors[scale].dtype == "float8_e4m3fn":
        shared = f"{name}_scale_2"
        return small_floats(model, name, data, scale, "float8_e4m3fn", group=16, shared=shared)
    if model.method != "modelopt":
        return None
    scales = model.need(scale, FLOATS)
    if data.ndim != 2 or scales.ndim != 2:
        raise Unfit("shape", f"{leaf(name)} is {list(data.shape)}")
    shape, groups = (data.shape[0] * 2, data.shape[1]), scales.shape[1]
    if not groups or shape[1] % groups:
        raise Unfit("grid", f"{groups} groups do not divide {shape[1]}")
    block = (1, max(shape[1] // groups, 1))
    check_grid(shape, block, scales)
    parts = {"data": (data, stored_as(data)), "scales": (scales, stored_as(scales))}
    has_shared = f"{name}_scale_2" in model.tensors
    if has_shared:
        parts["global"] = single(model, f"{name}_scale_2")
    return Weight(name, shape, quantization(block, "int8", 4, 8, 0, global_scale=has_shared), parts)
