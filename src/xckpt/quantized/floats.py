"""Small floats that share bytes: NVFP4 and MXFP4 of several makers, and those of bitsandbytes.

Integers of the same makers too: of ModelOpt, and LLM.int8. Reference: bitsandbytes 0.50.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from xckpt.index import Codebook
from xckpt.quantized.model import (
    FLOATS,
    Model,
    Unfit,
    Weight,
    cdiv,
    check_grid,
    check_shape,
    is_size,
    leaf,
    nbytes,
    quantization,
    single,
    stored_as,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.index import Part, Tensor

_STATE = "quant_state.bitsandbytes__"
# 1/127 as the package has it.
_INT8_FACTOR = 7.874015718698502e-3
# Of float32.
_LARGEST = 3.4e38


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
        "data": stored_as(data, "uint8"),
        "scales": stored_as(scales, dtype),
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
        "data": stored_as(data, shape=(*lead, rows, groups * 16)),
        "scales": stored_as(scales, "float8_e8m0fnu"),
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
    parts = {"data": stored_as(data), "scales": stored_as(scales)}
    has_shared = f"{name}_scale_2" in model.tensors
    if has_shared:
        parts["global"] = single(model, f"{name}_scale_2")
    return Weight(name, shape, quantization(block, "int8", 4, 8, 0, global_scale=has_shared), parts)


# --- bitsandbytes ---------------------------------------------------------------------------------


def bitsandbytes(model: Model, name: str, data: Tensor) -> Weight | None:
    """Read 4-bit codes with a table, or 8-bit integers with a scale for each row."""
    stem = name.removesuffix(".weight")
    kinds = [kind for kind in ("nf4", "fp4") if f"{name}.{_STATE}{kind}" in model.tensors]
    if not kinds and not {f"{name}.absmax", f"{name}.quant_map"} & model.tensors.keys():
        is_known = f"{stem}.SCB" in model.tensors or model.method == "bitsandbytes"
        is_int8 = data.dtype == "int8" and stem != name and is_known
        return _int8(model, name, stem, data) if is_int8 else None
    if len(kinds) != 1:
        raise Unfit("no state", f"there is no {_STATE}nf4, or more than one")
    state = model.need(f"{name}.{_STATE}{kinds[0]}", {"uint8"})
    about = model.state(state)
    if about.get("quant_type") != kinds[0]:
        reason = f"the type is {str(about.get('quant_type'))[:40]!r}, but its name says {kinds[0]}"
        raise Unfit("state", reason)
    shape = check_shape(about.get("shape"))
    count = prod(shape)
    if nbytes(data) != cdiv(count, 2):
        raise Unfit("shape", f"{nbytes(data)} bytes for a shape of {list(shape)}")
    block = _size(about, "blocksize")
    blocks = cdiv(count, block)
    scales = model.need(f"{name}.absmax", {"float32", "uint8"})
    parts = {
        "data": stored_as(data, "uint8", (nbytes(data),)),
        "scales": _list_of(scales, blocks),
        "table": _list_of(model.need(f"{name}.quant_map", {"float32"}), 16),
    }
    book = Codebook(block)
    if scales.dtype == "uint8":
        offset, nested = about.get("nested_offset"), _size(about, "nested_blocksize")
        is_number = isinstance(offset, float) or type(offset) is int
        if offset is None or not is_number or not abs(offset) < _LARGEST:
            raise Unfit("state", f"'nested_offset' is {str(offset)[:40]!r}")
        absmax = model.need(f"{name}.nested_absmax", {"float32"})
        parts["scale_scales"] = _list_of(absmax, cdiv(blocks, nested))
        table = model.need(f"{name}.nested_quant_map", {"float32"})
        parts["scale_table"] = _list_of(table, 256)
        book = Codebook(block, nested, float(offset))
    parts["state"] = stored_as(state)
    return Weight(name, shape, book, parts)


def _size(about: Mapping[str, Any], key: str) -> int:
    """Return the size of blocks."""
    size = about.get(key)
    if not is_size(size):
        raise Unfit("state", f"{key!r} is {str(size)[:40]!r}")
    return size


def _list_of(tensor: Tensor, count: int) -> tuple[Tensor, Part]:
    if tensor.size != count:
        raise Unfit("count", f"{leaf(tensor.name)} has {tensor.size} entries, not {count}")
    return stored_as(tensor)


def _int8(model: Model, name: str, stem: str, data: Tensor) -> Weight:
    scales = model.need(f"{stem}.SCB", {"float32"})
    if data.ndim != 2:
        raise Unfit("shape", f"{leaf(name)} is {list(data.shape)}")
    format = model.find(f"{stem}.weight_format")
    if format is not None and any(model.content(format) or b"\1"):
        raise Unfit("order", "weight_format says that its bytes are in an order of tiles")
    block = (1, max(data.shape[1], 1))
    check_grid(data.shape, block, scales)
    parts = {"data": stored_as(data), "scales": stored_as(scales)}
    scheme = quantization(block, "int8", 8, 8, 1, factor=_INT8_FACTOR)
    return Weight(name, data.shape, scheme, parts)
