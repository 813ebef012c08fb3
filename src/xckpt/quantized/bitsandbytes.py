"""bitsandbytes: 4-bit codes with a table, and LLM.int8. Reference: bitsandbytes 0.50."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from xckpt.index import Codebook
from xckpt.quantized.model import (
    Model,
    Unfit,
    Weight,
    cdiv,
    check_grid,
    check_shape,
    leaf,
    nbytes,
    quantization,
    stored_as,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.index import Part, Tensor

__all__ = ["bitsandbytes"]

_STATE = "quant_state.bitsandbytes__"
# 1/127 as the package has it.
_INT8_FACTOR = 7.874015718698502e-3
# Of float32.
_LARGEST = 3.4e38


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
        "data": (data, stored_as(data, "uint8", (nbytes(data),))),
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
    parts["state"] = (state, stored_as(state))
    return Weight(name, shape, book, parts)


def _size(about: Mapping[str, Any], key: str) -> int:
    """Return the size of blocks."""
    size = about.get(key)
    if type(size) is not int or size <= 0:
        raise Unfit("state", f"{key!r} is {str(size)[:40]!r}")
    return size


def _list_of(tensor: Tensor, count: int) -> tuple[Tensor, Part]:
    if tensor.size != count:
        raise Unfit("count", f"{leaf(tensor.name)} has {tensor.size} entries, not {count}")
    return tensor, stored_as(tensor)


def _int8(model: Model, name: str, stem: str, data: Tensor) -> Weight:
    scales = model.need(f"{stem}.SCB", {"float32"})
    if data.ndim != 2:
        raise Unfit("shape", f"{leaf(name)} is {list(data.shape)}")
    format = model.find(f"{stem}.weight_format")
    if format is not None and any(model.content(format) or b"\1"):
        raise Unfit("order", "weight_format says that its bytes are in an order of tiles")
    block = (1, max(data.shape[1], 1))
    check_grid(data.shape, block, scales)
    parts = {"data": (data, stored_as(data)), "scales": (scales, stored_as(scales))}
    return Weight(
        name, data.shape, quantization(block, "int8", 8, 8, 1, factor=_INT8_FACTOR), parts
    )
