"""Quantised layouts of version 2: ``zt.quant_group/1``, ``zt.mx/1`` and ``gguf.TYPE/1``.

The profiles do not determine the decoding completely. xckpt assumes that codes are in C order, so
that codes of a word are neighbours on the last axis, and that scales and zero points are stored
lane by lane, where a lane is a position on all other axes. An ambiguous tensor becomes one variable
per part. Ambiguous are: codes or packed zero points whose words straddle lines; 3, 5 and 6 bits
(permitted by the profile, but excluded by its packing rule); scales that fit several meanings of
group size 0; and MXINT8, whose factor 2^-6 the profile neither states nor excludes.

Specification: spec/profiles in github.com/pie-project/ztensor, tag 2.1.2.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from xckpt.elements import ELEMENT_TYPES, WIDE_FLOATS, nbytes_of
from xckpt.errors import FormatError, UnsupportedError
from xckpt.formats.kit import number
from xckpt.formats.ztensor.manifest import SHORT, Shape, decoded_size, require_roles
from xckpt.index import Part, Quantization

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from collections.abc import Set as AbstractSet

    from xckpt.formats.plan import WantedTensor

    _Pinned = tuple[dict[str, Part], Quantization] | None

_GROUPS, _MICROSCALED = "zt.quant_group/1", "zt.mx/1"
#: The attributes that determine how tensors of these layouts are quantised.
PINNED = ("bits", "group_size", "block_size", "axis", "packing", "scale_form", "zero_point")
_SCALE_TYPES = {
    "f32_factors": WIDE_FLOATS,
    "f16_factors": WIDE_FLOATS,
    "e8m0_exponent": frozenset({"float8_e8m0fnu"}),
}
_CODE_BITS = frozenset({2, 3, 4, 5, 6, 8})
_MX_TYPES = frozenset({"float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "int8"})


# --- reading --------------------------------------------------------------------------------------


def _group_quantized(shape: Shape, parts: Mapping[str, Part], attrs: Mapping[str, Any]) -> _Pinned:
    """Read ``zt.quant_group/1``: integer codes with a scale for each group along an axis."""
    packing = _map(attrs, "packing")
    zero_point = _map(attrs, "zero_point")
    form = _choice(zero_point, "form", {"none", "implied", "tensor"})
    roles = ("data", "scales", "zeros") if form == "tensor" else ("data", "scales")
    require_roles(_GROUPS, parts, roles)
    data, scales, bits = parts["data"], parts["scales"], _choice(attrs, "bits", _CODE_BITS)
    word = SHORT[_choice(packing, "word", {"u8", "u16", "u32", "u64"})]
    if data.dtype not in {word, word.removeprefix("u")}:
        raise _broken(f"'word' is {word}, but 'data' is {data.dtype}")
    word_bits = ELEMENT_TYPES[word].bits
    msb_first = _choice(packing, "order", {"lsb_first", "msb_first"}) == "msb_first"
    axis = _axis(shape, attrs)
    _check_scale_type(scales, attrs)
    per_word, remainder = divmod(word_bits, bits)
    if remainder:
        return None
    if _uint(packing, "per_word") != per_word:
        raise _broken(f"'per_word' is {packing['per_word']}: expected {per_word}")
    _check_size("data", data, _packed_size(prod(shape), per_word, word_bits))
    block = _group_block(shape, axis, _uint(attrs, "group_size"), scales)
    if block is None or shape[-1] % per_word:
        return None
    last = len(shape) - 1
    scale_axes = _lanes_first(len(shape), axis)
    grid = _grid(shape, block, scale_axes)
    shaped = {
        "data": replace(data, shape=(*shape[:-1], shape[-1] // per_word)),
        "scales": _one_per_block("scales", scales, grid),
    }
    packed_zeros = False
    if form == "tensor":
        zeros = parts["zeros"]
        packed_zeros = _choice(zero_point, "packing", {"same_as_data", "plain"}) == "same_as_data"
        if not packed_zeros:
            shaped["zeros"] = _one_per_block("zeros", zeros, grid)
        elif grid[-1] % per_word or axis != last:
            return None
        else:
            if ELEMENT_TYPES[zeros.dtype].bits != word_bits:
                reason = f"'zeros' is {zeros.dtype}, but packed as 'data', which is {data.dtype}"
                raise _broken(reason)
            _check_size("zeros", zeros, _packed_size(prod(grid), per_word, word_bits))
            shaped["zeros"] = replace(zeros, shape=(*grid[:-1], grid[-1] // per_word))
    zero = {"none": 0, "tensor": None}.get(form, zero_point.get("value"))
    if form == "implied" and type(zero) is not int:
        raise _broken("an implied zero point without an integer 'value'")
    # Several codes in a signed word are unsigned, as in an unsigned word.
    signed = data.dtype.startswith("int") and per_word == 1
    return shaped, Quantization(
        block=block,
        code="int8" if signed else "uint8",
        bits=bits,
        word_bits=word_bits,
        axis=last,
        msb_first=msb_first,
        zero=zero,
        packed_zeros=packed_zeros,
        scale_axes=scale_axes,
        wide=scales.dtype == "float64",
    )


def _microscaled(shape: Shape, parts: Mapping[str, Part], attrs: Mapping[str, Any]) -> _Pinned:
    """Read ``zt.mx/1``: OCP microscaling, small floats with a power of two for each block."""
    require_roles(_MICROSCALED, parts, ("data", "scales"))
    data, scales = parts["data"], parts["scales"]
    _choice(attrs, "scale_form", {"e8m0_exponent"})
    _check_scale_type(scales, attrs)
    axis = _axis(shape, attrs if "axis" in attrs else {"axis": len(shape) - 1})
    extent = _uint(attrs, "block_size")
    if extent < 2 or shape[axis] % extent:
        raise _broken(f"blocks of {extent} do not divide {shape[axis]}")
    if data.dtype not in _MX_TYPES:
        raise _broken(f"elements of type {data.dtype}")
    bits = ELEMENT_TYPES[data.dtype].bits
    _check_size("data", data, nbytes_of(data.dtype, prod(shape)))
    if data.dtype == "int8":
        return None
    block = _block_along(len(shape), axis, extent)
    scale_axes = _lanes_first(len(shape), axis)
    grid = _grid(shape, block, scale_axes)
    shaped = {"data": replace(data, shape=shape), "scales": _one_per_block("scales", scales, grid)}
    last = len(shape) - 1
    return shaped, Quantization(block, data.dtype, bits, bits, last, scale_axes=scale_axes)


#: Readers by layout. A reader returns None where the profile leaves the decoding open.
READERS = {_GROUPS: _group_quantized, _MICROSCALED: _microscaled}


def check_gguf(shape: Shape, parts: Mapping[str, Part], attrs: Mapping[str, Any]) -> None:
    """Check ``gguf.TYPE/1``, whose blocks are opaque."""
    require_roles("gguf", parts, ("data",))
    if parts["data"].dtype != "uint8":
        raise _broken(f"blocks of type {parts['data'].dtype}: expected u8")
    elements, nbytes = _uint(attrs, "elems_per_block"), _uint(attrs, "block_bytes")
    if not elements or not nbytes or prod(shape) % elements:
        raise _broken(f"blocks of {elements} elements and {nbytes} bytes for the shape {shape}")
    _check_size("data", parts["data"], prod(shape) // elements * nbytes)


def _broken(reason: str) -> FormatError:
    return FormatError(reason, rule="LayoutRule")


def _map(attrs: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = attrs.get(key)
    if not isinstance(value, dict):
        raise _broken(f"the attribute {key!r} is not a map")
    return value


def _uint(attrs: Mapping[str, Any], key: str) -> int:
    return number(f"the attribute {key!r}", attrs.get(key), "LayoutRule")


def _choice(attrs: Mapping[str, Any], key: str, choices: AbstractSet[Any]) -> Any:
    value = attrs.get(key)
    if type(value) not in {str, int} or value not in choices:
        listed = ", ".join(sorted(map(str, choices)))
        raise _broken(f"the attribute {key!r} is not one of {listed}")
    return value


def _axis(shape: Shape, attrs: Mapping[str, Any]) -> int:
    if not shape:
        raise _broken("a scalar has no axis to share scales along")
    axis = _uint(attrs, "axis")
    if axis >= len(shape):
        raise _broken(f"'axis' is {axis}: expected less than {len(shape)}")
    return axis


def _check_scale_type(scales: Part, attrs: Mapping[str, Any]) -> None:
    form = _choice(attrs, "scale_form", _SCALE_TYPES.keys())
    if scales.dtype not in _SCALE_TYPES[form]:
        raise _broken(f"'scales' is {scales.dtype}, which is not for {form}")


def _group_block(shape: Shape, axis: int, group_size: int, scales: Part) -> Shape | None:
    """Return the extent of a group on each axis; None if several groupings fit the scales."""
    if group_size:
        if shape[axis] % group_size:
            raise _broken(f"groups of {group_size} do not divide {shape[axis]}")
        return _block_along(len(shape), axis, group_size)
    whole_axis = _block_along(len(shape), axis, max(shape[axis], 1))
    one_position = tuple(1 if at == axis else max(shape[at], 1) for at in range(len(shape)))
    all_axes = range(len(shape))
    size = decoded_size(scales)
    width = ELEMENT_TYPES[scales.dtype].bits // 8
    fitting = {
        block
        for block in (whole_axis, one_position, (1,) * len(shape))
        if prod(_grid(shape, block, all_axes)) * width == size
    }
    if not fitting:
        raise _broken(f"'scales' has {size} bytes, which fits no grouping of the shape {shape}")
    return fitting.pop() if len(fitting) == 1 else None


def _block_along(rank: int, axis: int, extent: int) -> Shape:
    return tuple(extent if at == axis else 1 for at in range(rank))


def _lanes_first(rank: int, axis: int) -> Shape:
    return (*(position for position in range(rank) if position != axis), axis)


def _grid(shape: Shape, block: Shape, axes: Iterable[int]) -> Shape:
    return tuple(shape[at] // block[at] for at in axes)


def _one_per_block(role: str, part: Part, grid: Shape) -> Part:
    _check_size(role, part, nbytes_of(part.dtype, prod(grid)))
    return replace(part, shape=grid)


def _packed_size(codes: int, per_word: int, word_bits: int) -> int:
    if codes % per_word:
        raise _broken(f"{codes} codes do not fill words of {per_word}")
    return codes // per_word * word_bits // 8


def _check_size(role: str, part: Part, expected: int) -> None:
    size = decoded_size(part)
    if size != expected:
        reason = f"{role!r} has {size} bytes: expected {expected}"
        raise FormatError(reason, offset=part.offset, rule="LayoutRule")


# --- writing --------------------------------------------------------------------------------------


def quantized_layout(tensor: WantedTensor, parts: Mapping[str, Part]) -> tuple[str, dict[str, Any]]:
    """Return the layout and attributes with which a quantised tensor reads back unchanged."""
    unshaped = {role: replace(part, shape=None) for role, part in parts.items()}
    quantization = tensor.quantization
    if quantization is not None and not quantization.scale_axes:
        quantization = replace(quantization, scale_axes=tuple(range(tensor.ndim)))
    for layout, attrs in _candidates(tensor, parts):
        try:
            pinned = READERS[layout](tensor.shape, unshaped, attrs)
        except FormatError:
            continue
        if pinned is not None and pinned[1] == quantization:
            return layout, attrs
    reason = "no layout of version 2 describes its quantisation"
    hint = "Save the values that it decodes to"
    raise UnsupportedError(reason, tensor=tensor.name, rule="Layout", hint=hint)


def _candidates(
    tensor: WantedTensor, parts: Mapping[str, Part]
) -> Iterator[tuple[str, dict[str, Any]]]:
    attrs = dict(tensor.attrs)
    yield _MICROSCALED if "block_size" in attrs else _GROUPS, attrs
    quantization = tensor.quantization
    if quantization is None or not tensor.shape or "scales" not in parts:
        return
    along = [axis for axis, extent in enumerate(quantization.block) if extent > 1]
    if len(along) > 1:
        return
    axis = along[0] if along else tensor.ndim - 1
    extent = quantization.block[axis]
    exponents = {"axis": axis, "block_size": extent, "scale_form": "e8m0_exponent"}
    yield _MICROSCALED, attrs | exponents
    scales = parts["scales"].dtype
    form = "f16_factors" if ELEMENT_TYPES[scales].bits == 16 else "f32_factors"
    zero_point: dict[str, Any] = {"form": "implied", "value": quantization.zero}
    if quantization.zero is None:
        packing = "same_as_data" if quantization.packed_zeros else "plain"
        zero_point = {"form": "tensor", "packing": packing}
    elif quantization.zero == 0:
        zero_point = {"form": "none"}
    groups = {
        "bits": quantization.bits,
        "group_size": extent,
        "axis": axis,
        "packing": {
            "word": f"u{quantization.word_bits}",
            "order": "msb_first" if quantization.msb_first else "lsb_first",
            "per_word": quantization.word_bits // quantization.bits,
        },
        "scale_form": "e8m0_exponent" if scales == "float8_e8m0fnu" else form,
        "zero_point": zero_point,
    }
    yield _GROUPS, attrs | groups
