"""bitsandbytes: four bits with a table of values (NF4, FP4), and LLM.int8.

Reference: bitsandbytes 0.50.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from xckpt.index import Codebook
from xckpt.quantization.model import (
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

    from xckpt.index import Part, Tensor

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
    order = model.find(f"{module}.weight_format")
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
