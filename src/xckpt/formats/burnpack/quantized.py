"""Quantised tensors: burn's QuantScheme in both dialects, and what lies where in a tensor's range.

A range holds codes, scales and the global scale, back to back::

    codes           Native        one byte each, also those of 4 and 2 bits
                    PackedU32     in 32-bit words along an axis, the first code in the lowest bits;
                                  the last word of each line is filled up
                    PackedNative  two to a byte
    scales          one, or one for each block of the tensor in row-major order; blocks are counted
                    from the innermost axis, and the last of an axis may be cut off
    global scale    one, where there are both `tensor` and `block`

There are no zero points: a value is ``(global * scale) * code`` in float32. burn itself splits
only signed integers, Native or packed along the innermost axis. What it does not split, and codes
that are looked up in a table the file does not hold, are shown as their parts: scales lie at the
end whatever the codes are.

Burn up to 0.22.0-pre.2 wrote `param` and `level` where later versions have `tensor` and `block`.
These must not be taken for fields to ignore, as burn does: a file with scales for each block then
reads as one with a single scale.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from typing import Any

from xckpt.elements import nbytes_of
from xckpt.errors import FormatError
from xckpt.formats.burnpack.metadata import (
    UNIT,
    mistyped,
    optional,
    struct,
    unit,
    unknown,
    variant,
)
from xckpt.index import Part, Quantization

__all__ = ["MOST_BLOCK_AXES", "SCALE_TYPES", "Scheme", "split"]

_NEW = frozenset({"value", "store", "mode", "tensor", "block"})
_OLD = frozenset({"value", "store", "mode", "param", "level"})
_INTEGER_BITS = {"Q8F": 8, "Q8S": 8, "Q4F": 4, "Q4S": 4, "Q2F": 2, "Q2S": 2}
_VALUES = frozenset({*_INTEGER_BITS, "E5M2", "E4M3", "E2M1"})
_MODES = frozenset({"Symmetric", "Lookup"})
# U32 is what 0.19 called words along the innermost axis.
_PLAIN_STORES: dict[str, tuple[str, int | None]] = {
    "Native": ("Native", None),
    "U32": ("PackedU32", 0),
}
SCALE_TYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "UE8M0": "float8_e8m0fnu",
    "UE4M3": "float8_e4m3fn",  # its sign bit is never set
}
MOST_BLOCK_AXES = 5
_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class Scheme:
    """A QuantScheme in the form that burn has now.

    Parameters
    ----------
    value : str
        Kind of codes.
    store : str
        ``"Native"``, ``"PackedU32"`` or ``"PackedNative"``.
    packed_axis : int or None
        The axis that codes are packed along, counted from the innermost.
    mode : str
        ``"Symmetric"`` or ``"Lookup"``.
    tensor : str or None
        Type of the one scale, or of the global scale where there are blocks; None for neither.
    block : tuple of int or None
        Extents of a block along the innermost axes.
    block_scale : str or None
        Type of the scales of blocks.
    written : bool
        Whether any burn that wrote such a scheme could compute with it.
    """

    value: str
    store: str
    packed_axis: int | None
    mode: str
    tensor: str | None
    block: tuple[int, ...] | None
    block_scale: str | None
    written: bool = True

    @classmethod
    def parse(cls, value: Any) -> Scheme:
        """Read a QuantScheme of either dialect."""
        fields = struct("QuantScheme", value, _NEW | _OLD)
        old = "level" in fields or "param" in fields
        if old and ("tensor" in fields or "block" in fields):
            raise FormatError("a QuantScheme of two dialects at once", rule="QuantScheme")
        kind = unit("value", fields.get("value"), _VALUES)
        store, axis = _store(fields.get("store"))
        mode = unit("mode", fields.get("mode"), _MODES)
        scales = _old_scales(fields) if old else _new_scales(fields)
        return cls(kind, store, axis, mode, *scales)

    @property
    def is_pinned(self) -> bool:
        """Whether burn's own code says how codes become numbers, their kind apart."""
        usual_store = self.store != "PackedNative" and not self.packed_axis
        return usual_store and self.mode == "Symmetric" and self.written

    def packs(self, rank: int) -> bool:
        """Return whether a tensor of so many axes has the one that codes are packed along."""
        return self.packed_axis is None or self.packed_axis < rank

    def __str__(self) -> str:
        store = self.store if self.packed_axis is None else {self.store: self.packed_axis}
        block = None
        if self.block is not None:
            block = {"size": self.block, "dtype": self.block_scale}
        scheme = {"value": self.value, "store": store, "mode": self.mode}
        return json.dumps({"QFloat": {**scheme, "tensor": self.tensor, "block": block}})


def split(
    scheme: Scheme, shape: tuple[int, ...], offset: int, nbytes: int
) -> tuple[dict[str, Part], Quantization | None]:
    """Split the range of a quantised tensor."""
    parts = _scale_parts(scheme, shape, offset + nbytes)
    size = nbytes - sum(part.nbytes for part in parts.values())
    if size < 0:
        raise _wrong_size(f"{nbytes - size} or more", offset, nbytes)
    bits = _INTEGER_BITS.get(scheme.value)
    if bits is None or not shape or not scheme.is_pinned:
        return {"data": Part("uint8", (size,), offset, size), **parts}, None
    packed = scheme.store == "PackedU32"
    data = _packed_codes(bits, shape, offset) if packed else _native_codes(shape, offset)
    if data.nbytes != size:
        raise _wrong_size(str(nbytes - size + data.nbytes), offset, nbytes)
    return {"data": data, **parts}, Quantization(
        block=_block_extents(scheme, shape),
        code="int8",
        bits=bits if packed else 8,
        word_bits=_WORD_BITS if packed else 8,
        axis=len(shape) - 1,
        global_scale="global" in parts,
    )


def _wrong_size(expected: str, offset: int, nbytes: int) -> FormatError:
    return FormatError(
        f"{nbytes} bytes for a quantised tensor that needs {expected}",
        offset=offset,
        rule="TensorSize",
    )


def _native_codes(shape: tuple[int, ...], offset: int) -> Part:
    return Part("int8", shape, offset, prod(shape))


def _packed_codes(bits: int, shape: tuple[int, ...], offset: int) -> Part:
    per_word = _WORD_BITS // bits
    words = (*shape[:-1], -(-shape[-1] // per_word))
    return Part("uint32", words, offset, nbytes_of("uint32", prod(words)))


def _block_extents(scheme: Scheme, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the extent along each axis of what has one scale."""
    whole = tuple(max(size, 1) for size in shape)
    if scheme.block is None:
        return whole
    missing = len(shape) - len(scheme.block)
    if missing < 0:
        raise FormatError(
            f"blocks of {scheme.block} for the shape {shape}, which has fewer axes",
            rule="QuantScheme",
        )
    block = (1,) * missing + scheme.block
    return tuple(min(pair) for pair in zip(block, whole, strict=True))


def _scale_parts(scheme: Scheme, shape: tuple[int, ...], end: int) -> dict[str, Part]:
    """Place the scales, which end where the range does."""
    parts: dict[str, Part] = {}
    if scheme.block is None:
        dtype = SCALE_TYPES[scheme.tensor or "F32"]
        size = nbytes_of(dtype, 1)
        return {"scales": Part(dtype, (), end - size, size)}
    if scheme.tensor is not None:
        dtype = SCALE_TYPES[scheme.tensor]
        size = nbytes_of(dtype, 1)
        end -= size
        parts["global"] = Part(dtype, (), end, size)
    blocks = _block_extents(scheme, shape)
    grid = tuple(-(-n // extent) for n, extent in zip(shape, blocks, strict=True))
    dtype = SCALE_TYPES[scheme.block_scale or "F32"]
    size = nbytes_of(dtype, prod(grid))
    return {"scales": Part(dtype, grid, end - size, size), **parts}


def _new_scales(fields: dict[str, Any]) -> tuple[str | None, tuple[int, ...] | None, str | None]:
    tensor = optional(fields.get("tensor"))
    if tensor is not None:
        tensor = unit("tensor", tensor, SCALE_TYPES)
    block = optional(fields.get("block"))
    if block is None:
        return tensor, None, None
    inner = struct("block", block, {"size", "dtype"})
    scale = unit("dtype of block", inner.get("dtype"), SCALE_TYPES)
    return tensor, _block_size(inner.get("size")), scale


def _old_scales(
    fields: dict[str, Any],
) -> tuple[str | None, tuple[int, ...] | None, str | None, bool]:
    param = unit("param", fields.get("param"), SCALE_TYPES)
    level, content = variant("level", fields.get("level"))
    if level == "Tensor":
        if content is not UNIT:
            raise mistyped("level", fields["level"], "a variant without content")
        return param, None, None, True
    if level == "Block":
        return None, _block_size(content), param, True
    if level == "BlockTensor":
        inner = struct("BlockTensor", content, {"block", "global"})
        whole = unit("global", inner.get("global"), SCALE_TYPES)
        return whole, _block_size(inner.get("block")), param, False
    raise unknown("level", level)


def _store(value: Any) -> tuple[str, int | None]:
    store, content = variant("store", value)
    if store in _PLAIN_STORES:
        if content is not UNIT:
            raise mistyped("store", value, "a variant without content")
        return _PLAIN_STORES[store]
    if store not in {"PackedU32", "PackedNative"}:
        raise unknown("store", store)
    if type(content) is not int or content < 0:
        raise mistyped("the axis of 'store'", content, "a non-negative integer")
    return store, content


def _block_size(value: Any) -> tuple[int, ...]:
    fields = struct("block size", value, {"storage", "len"})
    storage, count = fields.get("storage"), fields.get("len")
    if type(storage) is not list or len(storage) != MOST_BLOCK_AXES:
        raise mistyped("'storage' of a block size", storage, f"{MOST_BLOCK_AXES} integers")
    if type(count) is not int or not 0 < count <= MOST_BLOCK_AXES:
        raise mistyped("'len' of a block size", count, f"1 to {MOST_BLOCK_AXES}")
    extents = tuple(storage[:count])
    for extent in extents:
        if type(extent) is not int or not 0 < extent < 256:
            raise mistyped("an extent of a block", extent, "1 to 255")
    while len(extents) > 1 and extents[0] == 1:
        extents = extents[1:]
    return extents
