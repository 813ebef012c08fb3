"""Quantised tensors: burn's QuantScheme in both dialects, and the parts of a tensor's byte range.

A range has codes, scales and the global scale, without gaps::

    codes           Native        one byte each, even if they have 4 or 2 bits
                    PackedU32     in 32-bit words along an axis, the first code in the lowest bits;
                                  the last word of each line is filled up
                    PackedNative  two to a byte
    scales          one, or one for each block of the tensor in row-major order; blocks are counted
                    from the innermost axis, and the last of an axis may be cut off
    global scale    one, if both `tensor` and `block` are present

Zero points do not exist: a value is ``(global * scale) * code`` in float32. burn decodes only
signed integers, Native or packed along the innermost axis. Tensors with other codes, or with codes
for a table that is not in the file, become one variable per part; the scales are always last.

Burn up to 0.22.0-pre.2 wrote `param` and `level` instead of `tensor` and `block`. Later versions of
burn ignore these fields, and thus read a file with scales for each block as if it had one scale;
xckpt does not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.elements import nbytes_of
from xckpt.errors import CheckpointError, FormatError, UnsupportedError
from xckpt.formats.burnpack import cbor
from xckpt.index import Part, Quantization

if TYPE_CHECKING:
    from xckpt.formats.plan import WantedTensor

_NEW = frozenset({"value", "store", "mode", "tensor", "block"})
_OLD = frozenset({"value", "store", "mode", "param", "level"})
_INTEGER_BITS = {"Q8F": 8, "Q8S": 8, "Q4F": 4, "Q4S": 4, "Q2F": 2, "Q2S": 2}
_VALUES = frozenset({*_INTEGER_BITS, "E5M2", "E4M3", "E2M1"})
_MODES = frozenset({"Symmetric", "Lookup"})
# burn 0.19 used the name U32 for words along the innermost axis.
_PLAIN_STORES: dict[str, tuple[str, int | None]] = {
    "Native": ("Native", None),
    "U32": ("PackedU32", 0),
}
_SCALE_TYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "UE8M0": "float8_e8m0fnu",
    "UE4M3": "float8_e4m3fn",  # its sign bit is never set
}
_SPELLED_SCALES = {dtype: spelled for spelled, dtype in _SCALE_TYPES.items()}
_MOST_BLOCK_AXES = 5
_WORD_BITS = 32


class _ScaleFields(NamedTuple):
    """The fields of a `Scheme` about its scales."""

    tensor: str | None
    block: tuple[int, ...] | None
    block_scale: str | None
    written: bool = True


@dataclass(frozen=True, slots=True)
class Scheme:
    """A QuantScheme in burn's current form."""

    value: str
    store: str
    #: Axis along which codes are packed, counted from the innermost; None if they are not.
    packed_axis: int | None
    mode: str
    #: Type of the single scale or, if there are blocks, of the global scale; None for neither.
    tensor: str | None
    #: Extents along the innermost axes.
    block: tuple[int, ...] | None
    block_scale: str | None
    #: Whether any version of burn that wrote such a scheme can also decode it.
    written: bool = True

    @classmethod
    def parse(cls, value: Any) -> Scheme:
        """Read a QuantScheme of either dialect."""
        fields = cbor.struct("QuantScheme", value, _NEW | _OLD)
        is_old = "level" in fields or "param" in fields
        if is_old and ("tensor" in fields or "block" in fields):
            raise FormatError("a QuantScheme of two dialects at once", rule="QuantScheme")
        kind = cbor.unit("value", fields.get("value"), _VALUES)
        store, axis = cbor.variant("store", fields.get("store"))
        if store in _PLAIN_STORES:
            if axis is not cbor.UNIT:
                raise cbor.mistyped("store", fields["store"], "a variant without content")
            store, axis = _PLAIN_STORES[store]
        elif store not in {"PackedU32", "PackedNative"}:
            raise cbor.unknown("store", store)
        else:
            axis = cbor.number("the axis of 'store'", axis)
        mode = cbor.unit("mode", fields.get("mode"), _MODES)
        scales = _parse_old_scales(fields) if is_old else _parse_scales(fields)
        return cls(kind, store, axis, mode, **scales._asdict())

    @property
    def is_pinned(self) -> bool:
        """True if burn's own code decodes this scheme."""
        usual_store = self.store != "PackedNative" and not self.packed_axis
        return usual_store and self.mode == "Symmetric" and self.written

    def packs(self, rank: int) -> bool:
        """Return whether a tensor with `rank` axes has the axis along which codes are packed."""
        return self.packed_axis is None or self.packed_axis < rank

    def __str__(self) -> str:
        """Return the scheme as JSON for an attribute, in which the size of a block is a list."""
        return json.dumps({"QFloat": self._new(self.block)})

    def _new(self, size: Any) -> dict[str, Any]:
        store = self.store if self.packed_axis is None else {self.store: self.packed_axis}
        block = None if size is None else {"size": size, "dtype": self.block_scale}
        scheme = {"value": self.value, "store": store, "mode": self.mode}
        return {**scheme, "tensor": self.tensor, "block": block}

    def as_metadata(self, *, old: bool) -> dict[str, Any] | None:
        """Return the scheme as CBOR for the metadata; None if the old dialect cannot express it."""
        size = None if self.block is None else _encode_size(self.block)
        new = self._new(size)
        if not old:
            return new
        if self.mode != "Symmetric" or (size is not None and self.tensor is not None):
            return None
        return {
            "value": self.value,
            "param": self.tensor or "F32" if size is None else self.block_scale,
            "store": new["store"],
            "level": "Tensor" if size is None else {"Block": size},
            "mode": self.mode,
        }


# --- reading --------------------------------------------------------------------------------------


def _parse_scales(fields: dict[str, Any]) -> _ScaleFields:
    tensor = cbor.optional(fields.get("tensor"))
    if tensor is not None:
        tensor = cbor.unit("tensor", tensor, _SCALE_TYPES)
    block = cbor.optional(fields.get("block"))
    if block is None:
        return _ScaleFields(tensor, None, None)
    inner = cbor.struct("block", block, {"size", "dtype"})
    scale = cbor.unit("dtype of block", inner.get("dtype"), _SCALE_TYPES)
    return _ScaleFields(tensor, _parse_block_size(inner.get("size")), scale)


def _parse_old_scales(fields: dict[str, Any]) -> _ScaleFields:
    param = cbor.unit("param", fields.get("param"), _SCALE_TYPES)
    level, content = cbor.variant("level", fields.get("level"))
    if level == "Tensor":
        if content is not cbor.UNIT:
            raise cbor.mistyped("level", fields["level"], "a variant without content")
        return _ScaleFields(param, None, None)
    if level == "Block":
        return _ScaleFields(None, _parse_block_size(content), param)
    if level == "BlockTensor":
        inner = cbor.struct("BlockTensor", content, {"block", "global"})
        global_scale = cbor.unit("global", inner.get("global"), _SCALE_TYPES)
        return _ScaleFields(
            global_scale, _parse_block_size(inner.get("block")), param, written=False
        )
    raise cbor.unknown("level", level)


def _parse_block_size(value: Any) -> tuple[int, ...]:
    fields = cbor.struct("block size", value, {"storage", "len"})
    storage, count = fields.get("storage"), fields.get("len")
    if type(storage) is not list or len(storage) != _MOST_BLOCK_AXES:
        raise cbor.mistyped("'storage' of a block size", storage, f"{_MOST_BLOCK_AXES} integers")
    if type(count) is not int or not 0 < count <= _MOST_BLOCK_AXES:
        raise cbor.mistyped("'len' of a block size", count, f"1 to {_MOST_BLOCK_AXES}")
    for extent in storage[:count]:
        if type(extent) is not int or not 0 < extent < 256:
            raise cbor.mistyped("an extent of a block", extent, "1 to 255")
    return _without_leading_ones(tuple(storage[:count]))


def _without_leading_ones(block: tuple[int, ...]) -> tuple[int, ...]:
    while len(block) > 1 and block[0] == 1:
        block = block[1:]
    return block


def _encode_size(extents: Any) -> dict[str, Any]:
    padding = [1] * (_MOST_BLOCK_AXES - len(extents))
    return {"storage": [*extents, *padding], "len": len(extents)}


def split(
    scheme: Scheme, shape: tuple[int, ...], offset: int, nbytes: int
) -> tuple[dict[str, Part], Quantization | None]:
    """Split the byte range of a quantised tensor into parts, and describe its decoding."""
    parts = _scale_parts(scheme, shape, offset + nbytes)
    size = nbytes - sum(part.nbytes for part in parts.values())
    bits = _INTEGER_BITS.get(scheme.value)
    if bits is None or not shape or not scheme.is_pinned:
        if size < 0:
            raise _wrong_size(f"{nbytes - size} or more", offset, nbytes)
        return {"data": Part("uint8", (size,), offset, size), **parts}, None
    packed = scheme.store == "PackedU32"
    words = (*shape[:-1], -(-shape[-1] // (_WORD_BITS // bits))) if packed else shape
    code = "uint32" if packed else "int8"
    data = Part(code, words, offset, nbytes_of(code, prod(words)))
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
    reason = f"{nbytes} bytes for a quantised tensor that needs {expected}"
    return FormatError(reason, offset=offset, rule="TensorSize")


def _block_extents(scheme: Scheme, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the extents of a block that shares one scale."""
    extents = tuple(max(size, 1) for size in shape)
    if scheme.block is None:
        return extents
    missing = len(shape) - len(scheme.block)
    if missing < 0:
        reason = f"blocks of {scheme.block} for the shape {shape}, which has fewer axes"
        raise FormatError(reason, rule="QuantScheme")
    block = (1,) * missing + scheme.block
    return tuple(min(pair) for pair in zip(block, extents, strict=True))


def _scale_parts(scheme: Scheme, shape: tuple[int, ...], end: int) -> dict[str, Part]:
    """Return the parts with scales, which are the last bytes of the range."""
    scales: dict[str, tuple[str, tuple[int, ...]]] = {}
    if scheme.block is None:
        scales["scales"] = _SCALE_TYPES[scheme.tensor or "F32"], ()
    else:
        blocks = _block_extents(scheme, shape)
        grid = tuple(-(-n // extent) for n, extent in zip(shape, blocks, strict=True))
        scales["scales"] = _SCALE_TYPES[scheme.block_scale or "F32"], grid
        if scheme.tensor is not None:
            scales["global"] = _SCALE_TYPES[scheme.tensor], ()
    parts = {}
    for role, (dtype, grid) in reversed(scales.items()):
        nbytes = nbytes_of(dtype, prod(grid))
        end -= nbytes
        parts[role] = Part(dtype, grid, end, nbytes)
    return {role: parts[role] for role in scales}


# --- writing --------------------------------------------------------------------------------------


def scheme_of(tensor: WantedTensor) -> Scheme:
    """Return the scheme of a quantised tensor to write."""
    stated = tensor.attrs.get("burn_dtype")
    if type(stated) is str:
        try:
            fields = dict(json.loads(stated)["QFloat"])
            if (block := fields["block"]) is not None:
                fields["block"] = {"size": _encode_size(block["size"]), "dtype": block["dtype"]}
            return Scheme.parse(fields)
        except (ValueError, TypeError, LookupError, CheckpointError, RecursionError):
            pass
    scheme = _derive_scheme(tensor)
    if scheme is None:
        raise _no_scheme(tensor)
    return scheme


def _no_scheme(tensor: WantedTensor) -> UnsupportedError:
    reason, hint = "burn has no such quantisation", "Save the values that it decodes to"
    return UnsupportedError(reason, tensor=tensor.name, rule="QuantScheme", hint=hint)


def _derive_scheme(tensor: WantedTensor) -> Scheme | None:
    """Derive a scheme from a quantisation; `placed_parts` checks that the parts fit it."""
    quantization, scales = tensor.quantization, tensor.parts.get("scales")
    if quantization is None or scales is None or "data" not in tensor.parts:
        return None
    if quantization.zero != 0:
        return None
    extents = zip(quantization.block, tensor.shape, strict=True)
    has_one_scale = all(extent >= size for extent, size in extents)
    scale = _SPELLED_SCALES.get(scales.dtype)
    shared = tensor.parts.get("global")
    if scale is None or (shared is not None and shared.dtype not in _SPELLED_SCALES):
        return None
    block = _without_leading_ones(quantization.block)
    if not has_one_scale and (len(block) > _MOST_BLOCK_AXES or max(block) > 255):
        return None
    tensor_scale = scale if has_one_scale else None
    if shared is not None:
        tensor_scale = _SPELLED_SCALES[shared.dtype]
    packed = quantization.word_bits == _WORD_BITS
    return Scheme(
        value=f"Q{quantization.bits}F",
        store="PackedU32" if packed else "Native",
        packed_axis=0 if packed else None,
        mode="Symmetric",
        tensor=tensor_scale,
        block=None if has_one_scale else block,
        block_scale=None if has_one_scale else scale,
    )


def placed_parts(tensor: WantedTensor, scheme: Scheme) -> dict[str, int]:
    """Return the offset of each part in the tensor's range; raise if burn would differ."""
    if not scheme.packs(tensor.ndim):
        raise _no_scheme(tensor)
    try:
        nbytes = sum([part.nbytes for part in tensor.parts.values()])
        parts, quantization = split(scheme, tensor.shape, 0, nbytes)
    except CheckpointError:
        raise _no_scheme(tensor) from None
    requested = tensor.quantization
    if requested is not None and requested.scale_axes == tuple(range(tensor.ndim)):
        # `split` states the axes only if they are transposed.
        requested = replace(requested, scale_axes=())
    sizes = {role: (part.dtype, part.nbytes) for role, part in tensor.parts.items()}
    expected = {role: (part.dtype, part.nbytes) for role, part in parts.items()}
    if sizes != expected or quantization != requested:
        raise _no_scheme(tensor)
    return {role: part.offset for role, part in parts.items()}
