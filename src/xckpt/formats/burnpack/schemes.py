"""QuantSchemes to be written: of which a tensor is, and how each dialect spells it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from xckpt.errors import CheckpointError, UnsupportedError
from xckpt.formats.burnpack.quantized import MOST_BLOCK_AXES, SCALE_TYPES, Scheme, split

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.index import Part, Quantization, Tensor

__all__ = ["placed_parts", "scheme_of", "spelled_scheme"]

_SPELLED_SCALES = {dtype: spelled for spelled, dtype in SCALE_TYPES.items()}


def scheme_of(tensor: Tensor) -> Scheme:
    """Return the scheme of a quantised tensor."""
    stated = tensor.attrs.get("burn_dtype")
    if type(stated) is str:
        try:
            return _parsed(json.loads(stated))
        except (ValueError, TypeError, LookupError, CheckpointError, RecursionError):
            pass
    scheme = _computed(tensor)
    if scheme is None:
        raise _no_scheme(tensor)
    return scheme


def _no_scheme(tensor: Tensor) -> UnsupportedError:
    return UnsupportedError(
        "quantised as burn does not",
        tensor=tensor.name,
        rule="QuantScheme",
        hint="Save the values that it decodes to",
    )


def _parsed(value: Any) -> Scheme:
    """Parse a scheme from the form that attributes have, where a block's size is a plain list."""
    fields = dict(value["QFloat"])
    if fields["block"] is not None:
        block = fields["block"]
        fields["block"] = {"size": _spelled_size(block["size"]), "dtype": block["dtype"]}
    return Scheme.parse(fields)


def _spelled_size(extents: Any) -> dict[str, Any]:
    filling = [1] * (MOST_BLOCK_AXES - len(extents))
    return {"storage": [*extents, *filling], "len": len(extents)}


def _computed(tensor: Tensor) -> Scheme | None:
    """Find the scheme that means what a quantisation does; whether it fits shows its parts."""
    quantization, data, scales = tensor.quantization, *map(tensor.parts.get, ("data", "scales"))
    if quantization is None or data is None or scales is None or quantization.zero != 0:
        return None
    packed = quantization.word_bits == 32
    whole = all(
        extent >= size for extent, size in zip(quantization.block, tensor.shape, strict=True)
    )
    scale = _SPELLED_SCALES.get(scales.dtype)
    shared = tensor.parts.get("global")
    if scale is None or (shared is not None and shared.dtype not in _SPELLED_SCALES):
        return None
    block = _without_leading_ones(quantization.block)
    if not whole and (len(block) > MOST_BLOCK_AXES or max(block) > 255):
        return None
    return Scheme(
        value=f"Q{quantization.bits}F",
        store="PackedU32" if packed else "Native",
        packed_axis=0 if packed else None,
        mode="Symmetric",
        tensor=_SPELLED_SCALES[shared.dtype] if shared is not None else scale if whole else None,
        block=None if whole else block,
        block_scale=None if whole else scale,
    )


def _without_leading_ones(block: tuple[int, ...]) -> tuple[int, ...]:
    while len(block) > 1 and block[0] == 1:
        block = block[1:]
    return block


def placed_parts(tensor: Tensor, scheme: Scheme) -> Mapping[str, Part]:
    """Place the parts of a quantised tensor in its range."""
    total = sum(part.nbytes for part in tensor.parts.values())
    if not scheme.packs(tensor.ndim):
        raise _no_scheme(tensor)
    try:
        parts, quantization = split(scheme, tensor.shape, 0, total)
    except CheckpointError:
        raise _no_scheme(tensor) from None
    found, expected = (
        {r: (p.dtype, p.nbytes) for r, p in each.items()} for each in (tensor.parts, parts)
    )
    if found != expected or quantization != _with_own_axes(tensor):
        raise _no_scheme(tensor)
    return parts


def _with_own_axes(tensor: Tensor) -> Quantization | None:
    """Return how a tensor is quantised, with the axes of scales only where they are transposed."""
    quantization = tensor.quantization
    if quantization is None or quantization.scale_axes != tuple(range(tensor.ndim)):
        return quantization
    return replace(quantization, scale_axes=())


def spelled_scheme(scheme: Scheme, *, old: bool) -> dict[str, Any] | None:
    """Spell a scheme as the metadata does."""
    store = scheme.store if scheme.packed_axis is None else {scheme.store: scheme.packed_axis}
    size = None if scheme.block is None else _spelled_size(scheme.block)
    if old:
        return _spelled_old(scheme, store, size)
    return {
        "value": scheme.value,
        "store": store,
        "mode": scheme.mode,
        "tensor": scheme.tensor,
        "block": None if size is None else {"size": size, "dtype": scheme.block_scale},
    }


def _spelled_old(
    scheme: Scheme, store: str | dict[str, int], size: dict[str, Any] | None
) -> dict[str, Any] | None:
    if scheme.mode != "Symmetric" or (size is not None and scheme.tensor is not None):
        return None
    return {
        "value": scheme.value,
        "param": scheme.tensor or "F32" if size is None else scheme.block_scale,
        "store": store,
        "level": "Tensor" if size is None else {"Block": size},
        "mode": scheme.mode,
    }
