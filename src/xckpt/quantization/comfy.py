"""ComfyUI: statements of a file about the layout of its layers.

References: `comfy/utils.py`, `comfy/ops.py` of ComfyUI and comfy-kitchen. A layer has a tensor
``comfy_quant`` with a JSON object, or an entry in the metadata ``_quantization_metadata``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from xckpt.errors import shown
from xckpt.quantization.config import parse_json
from xckpt.quantization.full_bytes import full_byte_weight, require_scales
from xckpt.quantization.model import LayoutError, Model, Weight, short_name, view_as

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.index import Tensor

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
