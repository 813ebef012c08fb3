"""Floats of 4 and 6 bits with a scale for each group, tables of 16 values, and LLM.int8.

gpt-oss and ModelOpt have such floats, and ModelOpt also integers of 4 bits. bitsandbytes 0.50 has
the tables NF4 and FP4, and LLM.int8. Other schemes use the helpers.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from xckpt.index import Codebook, Part, Tensor
from xckpt.quantization.model import (
    CODE_ORDER,
    FLOATS,
    LayoutError,
    Model,
    Weight,
    ceil_div,
    check_grid,
    check_shape,
    decoded_nbytes,
    is_size,
    make_quantization,
    short_name,
    view_as,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

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


# --- bitsandbytes ---------------------------------------------------------------------------------

_STATE = "quant_state.bitsandbytes__"
# 1/127 as in the package.
_INT8_FACTOR = 7.874015718698502e-3
_MAX_FLOAT32 = 3.4e38


def names_with_state(model: Model) -> set[str]:
    """Return the names of codes of any type that have scales or a table next to them."""
    return {
        name.removesuffix(ending)
        for name in model.tensors
        for ending in (".absmax", ".quant_map")
        if name.endswith(ending)
    }


def match_bitsandbytes(model: Model, name: str, codes: Tensor) -> Weight | None:
    """Match 4-bit codes with a table, or 8-bit integers with a scale for each row."""
    types = [
        code_type for code_type in ("nf4", "fp4") if f"{name}.{_STATE}{code_type}" in model.tensors
    ]
    if not types and not {f"{name}.absmax", f"{name}.quant_map"} & model.tensors.keys():
        module = name.removesuffix(".weight")
        is_known = f"{module}.SCB" in model.tensors or model.method == "bitsandbytes"
        is_int8 = codes.dtype == "int8" and module != name and is_known
        return _match_int8(model, name, module, codes) if is_int8 else None
    if len(types) != 1:
        raise LayoutError("no state", f"it needs either {_STATE}nf4 or {_STATE}fp4")
    return _match_codebook(model, name, codes, types[0])


def _match_codebook(model: Model, name: str, codes: Tensor, code_type: str) -> Weight:
    """Match 4-bit codes; a JSON object in another tensor has their parameters."""
    state_tensor = model.require(f"{name}.{_STATE}{code_type}", {"uint8"})
    state = model.read_json(state_tensor)
    if state.get("quant_type") != code_type:
        stated = state.get("quant_type")
        raise LayoutError("state", f"{_STATE}{code_type} states the type {stated!r:.40}")
    shape = check_shape(state.get("shape"))
    size, nbytes = prod(shape), decoded_nbytes(codes)
    if nbytes != ceil_div(size, 2):
        raise LayoutError("shape", f"there are {nbytes} bytes of codes for the shape {list(shape)}")
    block = _size_in(state, "blocksize")
    blocks = ceil_div(size, block)
    scales = model.require(f"{name}.absmax", {"float32", "uint8"})
    table = model.require(f"{name}.quant_map", {"float32"})
    parts = {
        "data": view_as(codes, "uint8", (nbytes,)),
        "scales": _check_size(scales, blocks),
        "table": _check_size(table, 16),
    }
    codebook = Codebook(block)
    if scales.dtype == "uint8":
        offset, scale_block = state.get("nested_offset"), _size_in(state, "nested_blocksize")
        is_number = isinstance(offset, float) or type(offset) is int
        if offset is None or not is_number or not abs(offset) < _MAX_FLOAT32:
            raise LayoutError("state", f"'nested_offset' is {offset!r:.40}, not a number")
        scale_scales = model.require(f"{name}.nested_absmax", {"float32"})
        scale_table = model.require(f"{name}.nested_quant_map", {"float32"})
        parts["scale_scales"] = _check_size(scale_scales, ceil_div(blocks, scale_block))
        parts["scale_table"] = _check_size(scale_table, 256)
        codebook = Codebook(block, scale_block, float(offset))
    parts["state"] = view_as(state_tensor)
    return Weight(name, shape, codebook, parts)


def _size_in(state: Mapping[str, Any], key: str) -> int:
    """Return the size of a block."""
    size = state.get(key)
    if not is_size(size):
        raise LayoutError("state", f"{key!r} is {size!r:.40}, not the size of a block")
    return size


def _check_size(tensor: Tensor, size: int) -> tuple[Tensor, Part]:
    if tensor.size != size:
        reason = f"{short_name(tensor.name)} has {tensor.size} elements, not {size}"
        raise LayoutError("count", reason)
    return view_as(tensor)


def _match_int8(model: Model, name: str, module: str, codes: Tensor) -> Weight:
    scales = model.require(f"{module}.SCB", {"float32"})
    if codes.ndim != 2:
        raise LayoutError("shape", f"{short_name(name)} has {codes.ndim} axes, not two")
    order = model.find(f"{module}{CODE_ORDER}")
    # Contents that cannot be read may state such an order.
    if order is not None and any(model.content(order) or b"\1"):
        raise LayoutError("order", "weight_format states that codes are in the order of tiles")
    block = (1, max(codes.shape[1], 1))
    check_grid(codes.shape, block, scales)
    quantization = make_quantization(
        block=block, code="int8", bits=8, word_bits=8, axis=1, factor=_INT8_FACTOR
    )
    parts = {"data": view_as(codes), "scales": view_as(scales)}
    return Weight(name, codes.shape, quantization, parts)
