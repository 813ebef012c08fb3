"""Codes in full bytes: FP8 of all makers, and int8 of compressed-tensors.

References: DeepSeek-V3 and transformers 5.23 for FP8 in blocks, compressed-tensors 0.20.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from xckpt.quantization.compressed_tensors import (
    FULL_BYTES,
    Params,
    fit_params,
    parse_block,
    scale_block,
)
from xckpt.quantization.model import (
    FLOATS,
    LayoutError,
    Model,
    Weight,
    check_grid,
    make_quantization,
    short_name,
    view_as,
)
from xckpt.quantization.small_floats import small_float_weight

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.index import Tensor

_FLOAT8 = frozenset({"float8_e4m3fn", "float8_e5m2"})
_SCALE_TYPES = FLOATS | {"float8_e8m0fnu", "uint8"}


def float8_problem(config: Mapping[str, Any]) -> str | None:
    """Return why a declaration of FP8 is unsupported, or None."""
    block = config.get("weight_block_size")
    if block is None or parse_block(block) is not None:
        return None
    return f"'weight_block_size' is {block!r:.40}, not a pair of positive integers"


def match_full_bytes(model: Model, name: str, codes: Tensor) -> Weight | None:
    """Match codes of eight bits with scales."""
    module = name.removesuffix(".weight")
    names = [f"{name}_scale_inv", f"{name}_scale"]
    if module != name:
        names.append(f"{module}.scale")
    scale_name = next((scales for scales in names if scales in model.tensors), None)
    is_compressed = model.method == "compressed-tensors"
    if codes.dtype == "int8" and scale_name == f"{module}.scale":
        # The experts of DeepSeek-V4 have two floats in a byte.
        return small_float_weight(
            model, name, codes, scales=scale_name, scale_type="float8_e8m0fnu", group=32
        )
    is_undeclared = model.method is None and scale_name is not None
    is_int8 = codes.dtype == "int8" and (is_compressed or is_undeclared)
    if codes.dtype not in _FLOAT8 and not is_int8:
        return None
    if scale_name is None:
        if model.method is None:
            return None
        expected = names[0] if model.method == "fp8" else names[1]
        raise LayoutError("no scale", f"{short_name(expected)} is missing")
    if not codes.ndim:
        raise LayoutError("shape", f"{short_name(name)} has no axes")
    scales = model.require(scale_name, _SCALE_TYPES)
    match = partial(_full_byte_weight, model, name, codes, scales)
    if is_compressed:
        return fit_params(model, module, match)
    if model.method == "mxfp8":
        return match(Params(strategy="group", group=32))
    block = parse_block(model.config.get("weight_block_size"))
    return match(Params(block=block, strategy=None if block is None else "block"))


def _full_byte_weight(
    model: Model, name: str, codes: Tensor, scales: Tensor, params: Params
) -> Weight:
    is_float = codes.dtype in _FLOAT8
    if params.format not in FULL_BYTES | {None}:
        raise LayoutError("format", f"the format {params.format!r} has no codes in full bytes")
    bits = {None, 8} if is_float else {None, *range(1, 9)}
    if params.kind not in {None, "float" if is_float else "int"} or params.bits not in bits:
        declared = f"{params.kind!r} of {params.bits} bits"
        raise LayoutError("type", f"codes have type {codes.dtype}, not {declared}")
    has_exponents = scales.dtype == "uint8"  # as microscaling formats have
    if has_exponents:
        if not is_float or params.group not in {32, None}:
            reason = f"{short_name(scales.name)} has exponents, which only groups of 32 floats have"
            raise LayoutError("type", reason)
        params = replace(params, group=32)
    block = scale_block(codes.shape, scales, params)
    parts = {
        "data": view_as(codes),
        "scales": view_as(scales, "float8_e8m0fnu" if has_exponents else None),
    }
    zeros = model.find_zeros(f"{name}_zero_point", "int8", symmetric=params.symmetric)
    if zeros is not None:
        check_grid(codes.shape, block, zeros)
        parts["zeros"] = view_as(zeros)
    quantization = make_quantization(
        block=block,
        code=codes.dtype,
        bits=8,
        word_bits=8,
        axis=codes.ndim - 1,
        zero=0 if zeros is None else None,
        reciprocal=model.config.get("weight_scale_semantics") == "inverse",
    )
    return Weight(name, codes.shape, quantization, parts)
