"""Codes in full bytes: FP8 of all makers, and int8 of compressed-tensors; layers of ComfyUI.

A layer of ComfyUI has a tensor ``comfy_quant`` with a JSON object, or an entry in the metadata
``_quantization_metadata``.

References: DeepSeek-V3 and transformers 5.23 for FP8 in blocks, compressed-tensors 0.20;
`comfy/utils.py`, `comfy/ops.py` of ComfyUI and comfy-kitchen.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from xckpt.errors import shown
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
    parse_json,
    short_name,
    view_as,
)
from xckpt.quantization.small_floats import check_scale_order, small_float_weight

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.index import Tensor

_FLOAT8 = frozenset({"float8_e4m3fn", "float8_e5m2"})
_EXPONENTS = frozenset({"float8_e8m0fnu", "uint8"})
_SCALE_TYPES = FLOATS | _EXPONENTS
# Endings of tensors that change values in ways that only a declaration states.
_MODIFIERS = (
    "_offset", "_zero", "_zeros", "_zero_points", "_zp", "_bias", "_biases", "_g_idx", "_scale_2",
    "_global_scale", "_codebook",
)  # fmt: skip
_REMEDY = "put the config that declares the method next to the file, or combine both yourself"


def float8_problem(config: Mapping[str, Any]) -> str | None:
    """Return why a declaration of FP8 is unsupported, or None."""
    block = config.get("weight_block_size")
    if block is None or parse_block(block) is not None:
        return None
    return f"'weight_block_size' is {block!r:.40}, not a pair of positive integers"


def match_full_bytes(model: Model, name: str, codes: Tensor) -> Weight | None:
    """Match codes of eight bits with scales."""
    is_int8 = codes.dtype == "int8"
    if codes.dtype not in _FLOAT8 and not is_int8:
        return None
    scale_names = _scale_names(model, name)
    scale_name = scale_names[0] if scale_names else None
    module = name.removesuffix(".weight")
    is_compressed = model.method == "compressed-tensors"
    has_exponents = scale_name is not None and model.tensors[scale_name].dtype in _EXPONENTS
    if is_int8 and has_exponents and scale_name == f"{module}.scale":
        # The experts of DeepSeek-V4 have two floats in a byte.
        return small_float_weight(
            model, name, codes, scales=scale_name, scale_type="float8_e8m0fnu", group=32
        )
    if scale_name is None and (is_int8 or model.method is None) and not is_compressed:
        return None
    scales = require_scales(model, name)
    if is_int8 and model.method not in {None, "compressed-tensors"}:
        raise LayoutError("int8", f"{model.method} declares no codes of type int8")
    if is_compressed:
        match = partial(full_byte_weight, model, name, codes, scales)
        return fit_params(model, module, match)
    if model.method is None:
        _check_undeclared(model, name, codes, scales)
    params = Params()
    if model.method == "mxfp8":
        params = Params(strategy="group", group=32)
    elif (block := parse_block(model.config.get("weight_block_size"))) is not None:
        params = Params(block=block, strategy="block")
    return full_byte_weight(model, name, codes, scales, params)


def _scale_names(model: Model, name: str) -> list[str]:
    """Return the names of the scales of codes, in the order in which they are tried."""
    names = [f"{name}_scale_inv", f"{name}_scale"]
    module = name.removesuffix(".weight")
    if module != name:
        names += [f"{module}.scale", f"{module}.scale_weight"]
    names = [scales for scales in names if scales in model.tensors]
    if not names and model.tensors[name].dtype == "int8":  # of EETQ and Quanto
        names = [f"{name}_scales", f"{name.removesuffix('_data')}_scale"]
        names = [scales for scales in names if scales in model.tensors]
    return names


def _is_of_keras(codes: Tensor) -> bool:
    """Return whether codes have the name of a variable of Keras, which divides by its scales."""
    variable = codes.attrs.get("variable")
    if not isinstance(variable, str):
        variable = codes.name.rpartition("/")[2].rpartition(".")[2]
    return variable in {"kernel", "embeddings", "reverse_embeddings"}


def require_scales(model: Model, name: str) -> Tensor:
    """Return the scales of codes; raise if they are missing or have another type."""
    scale_names = _scale_names(model, name)
    if not scale_names:
        expected = f"{name}_scale_inv" if model.method == "fp8" else f"{name}_scale"
        raise LayoutError("no scale", f"{short_name(expected)} is missing")
    return model.require(scale_names[0], _SCALE_TYPES)


def _check_undeclared(model: Model, name: str, codes: Tensor, scales: Tensor) -> None:
    """Raise unless types and shapes alone determine the values of a weight."""
    shape, grid = codes.shape, scales.shape
    names = [*_scale_names(model, name)[1:], *(f"{name}{ending}" for ending in _MODIFIERS)]
    modifier = next((companion for companion in names if companion in model.tensors), None)
    if modifier is not None:
        reason = f"the meaning of {short_name(modifier)} is not declared"
        raise LayoutError("undeclared companion", f"{reason}; {_REMEDY}")
    if codes.dtype == "int8":
        is_grid = len(grid) == len(shape) >= 2 and (scales.size > 1 or shape[:-1] == grid[:-1])
        is_product = scales.dtype in FLOATS and scales.name in {
            f"{name}_scale",
            f"{name}_scale_inv",
        }
        is_certain = is_grid and is_product and not _is_of_keras(codes)
    else:
        # A vector next to a square matrix fits rows and columns.
        without_axis = [shape[:axis] + shape[axis + 1 :] for axis in range(len(shape) - 1)]
        is_certain = scales.size == 1 or grid not in without_axis
    if not is_certain:
        reason = f"nothing states how to apply {short_name(scales.name)} of shape {list(grid)}"
        raise LayoutError("undeclared", f"{reason}; {_REMEDY}")
    if scales.dtype in _EXPONENTS:
        check_scale_order(shape, scales, group=32)


def full_byte_weight(
    model: Model, name: str, codes: Tensor, scales: Tensor, params: Params | None = None
) -> Weight:
    """Return the weight of codes in full bytes; by default, its blocks follow from shapes."""
    params = params or Params()
    if not codes.ndim:
        raise LayoutError("shape", f"{short_name(name)} has no axes")
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
    grid = scales.shape
    has_group_axis = len(grid) == codes.ndim + 1 and grid[-1] == 1
    if has_group_axis and grid[:-2] == codes.shape[:-1]:
        grid = grid[:-1]
    block = scale_block(codes.shape, replace(scales, shape=grid), params)
    parts = {
        "data": view_as(codes),
        "scales": view_as(scales, "float8_e8m0fnu" if has_exponents else None, grid),
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


# --- ComfyUI --------------------------------------------------------------------------------------

_MARK = ".comfy_quant"
_METADATA = "_quantization_metadata"
# Formats with one scale for a layer or a row, by the element type of their codes.
_CODES = {
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
    "int8_tensorwise": "int8",
}
# Why other formats stay as stored.
_UNSUPPORTED = {
    "nvfp4": "its scales are in the order of tensor cores",
    "mxfp8": "its scales are in the order of tensor cores",
    "convrot_w4a4": "its weights are rotated",
    "asym_w4a8_int8": "its weights are rotated",
    "awq_w4a16": "its codes have four bits and zero points of floats",
}


def match_comfy(model: Model, name: str, codes: Tensor) -> Weight | None:
    """Match a layer whose format the file states."""
    statements = model.once(_statements)
    module = name.removesuffix(".weight")
    if not statements or module == name:
        return None
    if module not in statements:
        # ComfyUI reads such codes as numbers, whatever is next to them.
        if codes.dtype in {"int8", "uint8"} and f"{name}_scale" in model.tensors:
            raise LayoutError("unstated", "ComfyUI's statements about layers do not include it")
        return None
    mark = model.find(f"{module}{_MARK}")
    statement = statements[module] if mark is None else model.read_json(mark)
    code = _code_type(statement)
    if codes.dtype != code:
        raise LayoutError("type", f"codes have type {codes.dtype}, not {code}")
    scales = require_scales(model, name)
    if scales.size != 1 and scales.ndim < codes.ndim:
        reason = f"{short_name(scales.name)} of shape {list(scales.shape)} does not state its axis"
        raise LayoutError("grid", reason)
    weight = full_byte_weight(model, name, codes, scales)
    if mark is None:
        return weight
    return replace(weight, parts={**weight.parts, "state": view_as(mark)})


def _code_type(statement: Mapping[str, Any]) -> str:
    """Return the element type of codes; raise if values do not follow from codes and scales."""
    format = statement.get("format")
    params = statement.get("params")
    options = {**(params if isinstance(params, dict) else {}), **statement}
    if not isinstance(format, str) or format not in _CODES:
        reason = _UNSUPPORTED.get(str(format), "it is unknown")
        described = shown(format) if isinstance(format, str) else f"{format!r:.40}"
        raise LayoutError(f"format {described}", f"ComfyUI's format {described}: {reason}")
    if options.get("convrot"):
        raise LayoutError("rotated", f"ComfyUI's format {shown(format)}: its weights are rotated")
    return _CODES[format]


def _statements(model: Model) -> dict[str, Mapping[str, Any]]:
    """Return the statements about layers, by name; empty for layers with a mark."""
    statements: dict[str, Mapping[str, Any]] = {}
    metadata = model.attrs.get(_METADATA)
    if isinstance(metadata, str):
        try:
            metadata = parse_json(metadata.encode("utf-8", "surrogatepass"))
        except ValueError as error:
            model.warnings.append(f"{_METADATA} is ignored: {error}")
    layers = metadata.get("layers") if isinstance(metadata, dict) else None
    if isinstance(layers, dict):
        for layer, statement in layers.items():
            statements[layer] = statement if isinstance(statement, dict) else {}
    for name in model.tensors:
        if name.endswith(_MARK):
            statements[name.removesuffix(_MARK)] = {}
    return statements
