"""Attributes of the quantised layouts of version 2, from a `Quantization`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from xckpt.errors import FormatError, UnsupportedError
from xckpt.formats.ztensor.elements import BITS
from xckpt.formats.ztensor.quantized import group_quantized, microscaled

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from xckpt.index import Part, Quantization, Tensor

__all__ = ["quantized_layout"]

_GROUPS, _MICROSCALED = "zt.quant_group/1", "zt.mx/1"
_READERS = {_GROUPS: group_quantized, _MICROSCALED: microscaled}


def quantized_layout(tensor: Tensor, parts: Mapping[str, Part]) -> tuple[str, dict[str, Any]]:
    """Find the layout that a quantised tensor can be read from again."""
    unshaped = {role: replace(part, shape=None) for role, part in parts.items()}
    for layout, attrs in _candidates(tensor, parts):
        try:
            pinned = _READERS[layout](tensor.shape, unshaped, attrs)
        except FormatError:
            continue
        if pinned is not None and pinned[1] == _with_axes(tensor):
            return layout, attrs
    raise UnsupportedError(
        "quantised as no layout of version 2 is",
        tensor=tensor.name,
        rule="Layout",
        hint="Save the values that it decodes to",
    )


def _with_axes(tensor: Tensor) -> Quantization | None:
    quantization = tensor.quantization
    if quantization is None or quantization.scale_axes:
        return quantization
    return replace(quantization, scale_axes=tuple(range(tensor.ndim)))


def _candidates(tensor: Tensor, parts: Mapping[str, Part]) -> Iterator[tuple[str, dict[str, Any]]]:
    own = dict(tensor.attrs)
    yield _MICROSCALED if "block_size" in own else _GROUPS, own
    quantization = tensor.quantization
    if quantization is None or not tensor.shape or "scales" not in parts:
        return
    along = [axis for axis, extent in enumerate(quantization.block) if extent > 1]
    if len(along) > 1:
        return
    axis = along[0] if along else tensor.ndim - 1
    scales = parts["scales"].dtype
    yield _MICROSCALED, own | _microscaled(quantization, axis)
    yield _GROUPS, own | _groups(quantization, axis, scales)


def _microscaled(quantization: Quantization, axis: int) -> dict[str, Any]:
    return {
        "axis": axis,
        "block_size": quantization.block[axis],
        "scale_form": "e8m0_exponent",
    }


def _groups(quantization: Quantization, axis: int, scales: str) -> dict[str, Any]:
    form = "f16_factors" if BITS[scales] == 16 else "f32_factors"
    return {
        "bits": quantization.bits,
        "group_size": quantization.block[axis],
        "axis": axis,
        "packing": {
            "word": f"u{quantization.word_bits}",
            "order": "msb_first" if quantization.msb_first else "lsb_first",
            "per_word": quantization.word_bits // quantization.bits,
        },
        "scale_form": "e8m0_exponent" if scales == "float8_e8m0fnu" else form,
        "zero_point": _zero_point(quantization),
    }


def _zero_point(quantization: Quantization) -> dict[str, Any]:
    if quantization.zero is None:
        packing = "same_as_data" if quantization.packed_zeros else "plain"
        return {"form": "tensor", "packing": packing}
    if quantization.zero == 0:
        return {"form": "none"}
    return {"form": "implied", "value": quantization.zero}
