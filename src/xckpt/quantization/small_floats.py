"""Floats of 4 and 6 bits with a scale for each group: gpt-oss, ModelOpt, and helpers for others.

ModelOpt also has integers of 4 bits.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from xckpt.quantization.model import (
    FLOATS,
    LayoutError,
    Model,
    Weight,
    check_grid,
    decoded_nbytes,
    make_quantization,
    short_name,
    view_as,
)

if TYPE_CHECKING:
    from xckpt.index import Tensor
    from xckpt.quantization.model import Shape


def small_float_weight(
    model: Model,
    name: str,
    codes: Tensor,
    *,
    scales: str,
    scale_type: str,
    group: int,
    bits: int = 4,
    global_scale: str | None = None,
    global_divides: bool = False,
) -> Weight:
    """Return a weight of small floats; `scales` and `global_scale` are names of tensors."""
    if not codes.ndim:
        raise LayoutError("shape", f"{short_name(codes.name)} has no axes")
    scale_tensor = model.require(scales, {scale_type, "uint8"})
    nbits = decoded_nbytes(codes) * 8
    rows = codes.shape[:-1]
    shape = (*rows, nbits // max(prod(rows), 1) // bits)
    axis = codes.ndim - 1
    block = (1,) * axis + (group,)
    check_grid(shape, block, scale_tensor)
    if prod(shape) * bits != nbits or shape[-1] % group:
        reason = (
            f"{short_name(codes.name)} has shape {list(codes.shape)}, not whole groups of {group}"
        )
        raise LayoutError("grid", reason)
    parts = {"data": view_as(codes, "uint8"), "scales": view_as(scale_tensor, scale_type)}
    if global_scale is not None:
        parts["global"] = model.require_scalar(global_scale)
    quantization = make_quantization(
        block=block,
        code="float4_e2m1fn" if bits == 4 else "float6_e2m3fn",
        bits=bits,
        word_bits=8,
        axis=axis,
        stream=bits != 4,
        global_scale=global_scale is not None,
        global_divides=global_divides,
    )
    return Weight(name, shape, quantization, parts)


def check_scale_order(shape: Shape, scales: Tensor, *, group: int) -> None:
    """Raise if undeclared scales may be in rows or in the order of tensor cores."""
    # That order, which ComfyUI stores, pads scales to tiles of 128 rows and 4 groups.
    grid = (*shape[:-1], shape[-1] // group)
    if len(shape) > 1 and scales.shape == grid and not grid[-2] % 128 and not grid[-1] % 4:
        reason = f"{short_name(scales.name)} may be in rows or in the order of tensor cores"
        raise LayoutError("scale order", f"{reason}, and no config declares the method")


def match_gpt_oss(model: Model, name: str, codes: Tensor) -> Weight | None:
    """Match ``_blocks`` of gpt-oss, which are MXFP4 and stored as the transpose."""
    stem = name.removesuffix("_blocks")
    if stem == name or (f"{stem}_scales" not in model.tensors and model.method != "mxfp4"):
        return None
    model.require(name, {"uint8"})
    scales = model.require(f"{stem}_scales", {"uint8"})
    shape = list(codes.shape)
    if codes.ndim < 3 or codes.shape[-1] != 16:
        raise LayoutError("shape", f"{short_name(name)} has shape {shape}, not blocks of 16 bytes")
    if scales.shape != codes.shape[:-1]:
        scales_shape = f"{short_name(scales.name)} has shape {list(scales.shape)}"
        raise LayoutError("grid", f"{scales_shape}, but blocks of shape {shape} need {shape[:-1]}")
    *leading, rows, groups = codes.shape[:-1]
    axis = len(leading)
    transposed = (*range(axis), axis + 1, axis)
    quantization = make_quantization(
        block=(1,) * axis + (32, 1),
        code="float4_e2m1fn",
        bits=4,
        word_bits=8,
        axis=axis,
        scale_axes=transposed,
        axes=transposed,
    )
    parts = {
        "data": view_as(codes, shape=(*leading, rows, groups * 16)),
        "scales": view_as(scales, "float8_e8m0fnu"),
    }
    return Weight(stem, (*leading, groups * 32, rows), quantization, parts)


def match_modelopt(model: Model, name: str, codes: Tensor) -> Weight | None:
    """Match bytes of two codes each: NVFP4, or integers with a scale for each group of a row."""
    if codes.dtype != "uint8" or not name.endswith(".weight"):
        return None
    is_declared = model.method == "modelopt"
    scale_name, global_name = f"{name}_scale", f"{name}_scale_2"
    if scale_name not in model.tensors:
        if is_declared:
            raise LayoutError("no scale", f"{short_name(scale_name)} is missing")
        return None
    scales = model.tensors[scale_name]
    if scales.dtype == "float8_e4m3fn":
        if model.method is None:
            shape = (*codes.shape[:-1], *(size * 2 for size in codes.shape[-1:]))
            check_scale_order(shape, scales, group=16)
        return small_float_weight(
            model,
            name,
            codes,
            scales=scale_name,
            scale_type="float8_e4m3fn",
            group=16,
            global_scale=global_name,
        )
    if not is_declared:
        return None
    scales = model.require(scale_name, FLOATS)
    if codes.ndim != 2 or scales.ndim != 2:
        shapes = f"weight has shape {list(codes.shape)}, its scales {list(scales.shape)}"
        raise LayoutError("shape", f"{shapes}; both need two axes")
    rows, columns, groups = codes.shape[0] * 2, codes.shape[1], scales.shape[1]
    if not groups or columns % groups:
        raise LayoutError("grid", f"{groups} groups do not divide {columns} columns")
    block = (1, max(columns // groups, 1))
    check_grid((rows, columns), block, scales)
    parts = {"data": view_as(codes), "scales": view_as(scales)}
    has_global = global_name in model.tensors
    if has_global:
        parts["global"] = model.require_scalar(global_name)
    quantization = make_quantization(
        block=block, code="int8", bits=4, word_bits=8, axis=0, global_scale=has_global
    )
    return Weight(name, (rows, columns), quantization, parts)
