"""What the metadata says of a tensor, its range in the file, and scalars."""

from __future__ import annotations

import json
import struct as binary
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.errors import CheckpointError, FormatError, UnsupportedError, shown
from xckpt.formats.burnpack.metadata import (
    mistyped,
    optional,
    struct,
    unit,
    unknown,
    variant,
)
from xckpt.formats.burnpack.quantized import Scheme, split
from xckpt.formats.burnpack.scalars import KINDS
from xckpt.index import Part, Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "BOOLEANS",
    "ELEMENTS",
    "Listed",
    "check_ranges",
    "listed",
    "scalar",
    "tensor",
]

_FIELDS = frozenset({"dtype", "shape", "data_offsets", "param_id"})
_MOST_AXES = 64  # numpy's limit
_MOST_ELEMENTS = ((1 << 63) - 1) // 8  # numpy counts the bytes of an array in 63 bits

# Element types, and bytes of one element.
ELEMENTS = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "Flex32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "Bool": ("bool", 1),
}
BOOLEANS = {"Native": ("bool", 1), "U8": ("bool", 1), "U32": ("bool32", 4)}


class Listed(NamedTuple):
    """A tensor as the metadata lists it.

    Parameters
    ----------
    start, end : int
        Its range, relative to where data begin.
    name : str
        Its name.
    fields : dict
        Of its descriptor.
    """

    start: int
    end: int
    name: str
    fields: dict[str, Any]


def listed(entries: Mapping[str, Any]) -> list[Listed]:
    """List tensors in the order of the metadata."""
    found = []
    for name, entry in entries.items():
        try:
            fields = struct("descriptor", entry, _FIELDS)
            start, end = _range(fields.get("data_offsets"))
        except FormatError as error:
            raise error.located(tensor=name) from None
        found.append(Listed(start, end, name, fields))
    return found


def _range(value: Any) -> tuple[int, int]:
    if type(value) is not list or len(value) != 2:
        raise mistyped("data_offsets", value, "a start and an end")
    start, end = value
    if type(start) is not int or start < 0:
        raise mistyped("the start of data_offsets", start, "a non-negative integer")
    if type(end) is not int or end < 0:
        raise mistyped("the end of data_offsets", end, "a non-negative integer")
    if end < start:
        raise FormatError(f"data from {start} to {end}", rule="DataOffsets")
    return start, end


def check_ranges(found: Sequence[Listed], start: int, size: int, *, hint: str) -> None:
    """Check that ranges are in the file and do not overlap."""
    last = max(found, key=_end, default=None)
    end = start if last is None else start + last.end
    if end > size:
        raise FormatError(
            f"data end at {end}, but the file at {size}",
            offset=size,
            tensor=None if last is None else last.name,
            rule="Truncated",
            hint=hint,
        )
    ranges = sorted([(each.start, each.end, each.name) for each in found])
    for first, second in pairwise(each for each in ranges if each[0] < each[1]):
        if second[0] < first[1]:
            raise FormatError(
                f"its data overlap those of {shown(first[2])}",
                offset=start + second[0],
                tensor=second[2],
                rule="Overlap",
            )


def _end(each: Listed) -> int:
    return each.end


def tensor(entry: Listed, start: int) -> Tensor:
    """Describe a tensor."""
    try:
        return _tensor(entry.name, entry.fields, start + entry.start, entry.end - entry.start)
    except CheckpointError as error:
        raise error.located(tensor=entry.name) from None


class _Typeless(NamedTuple):
    """What is known of a tensor whatever its type."""

    name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    attrs: dict[str, Any]


def _tensor(name: str, fields: dict[str, Any], offset: int, nbytes: int) -> Tensor:
    shape = _shape(fields.get("shape"))
    attrs = _attributes(fields.get("param_id"))
    dtype = fields.get("dtype")
    element = ELEMENTS.get(dtype) if type(dtype) is str else None
    if element is None:
        return _composed(_Typeless(name, shape, offset, nbytes, attrs), dtype)
    if dtype == "Flex32":
        attrs["burn_dtype"] = dtype
    part = _dense(element, shape, offset, nbytes)
    return Tensor(name, part.dtype, shape, {"data": part}, attrs=attrs)


def _composed(found: _Typeless, dtype: Any) -> Tensor:
    """Describe a tensor whose type has more to it than a name."""
    kind, content = variant("dtype", dtype)
    if kind in ELEMENTS and kind != "Bool":
        raise mistyped("dtype", dtype, "a variant without content")
    try:
        if kind == "QFloat":
            return _quantized(found, Scheme.parse(content))
        if kind != "Bool":
            raise unknown("dtype", kind)
        store = unit("Bool", content, BOOLEANS)
    except UnsupportedError as problem:
        return _unreadable(found, kind, problem)
    if store != "Native":
        found.attrs["burn_dtype"] = json.dumps({"Bool": store})
    part = _dense(BOOLEANS[store], found.shape, found.offset, found.nbytes)
    return Tensor(found.name, part.dtype, found.shape, {"data": part}, attrs=found.attrs)


def _shape(value: Any) -> tuple[int, ...]:
    # A list of small numbers may be a byte string.
    if type(value) is not list and type(value) is not bytes:
        raise mistyped("shape", value, "an array")
    shape = tuple(value)
    for extent in shape:
        if type(extent) is not int or extent < 0:
            raise mistyped("an extent of shape", extent, "a non-negative integer")
    if len(shape) > _MOST_AXES:
        raise FormatError(f"{len(shape)} axes are more than {_MOST_AXES}", rule="Shape")
    # Zeros do not make up for the others: numpy cannot represent such an array.
    if (prod(shape) or prod(filter(None, shape))) > _MOST_ELEMENTS:
        raise FormatError(f"an array of the shape {shape} cannot be", rule="Shape")
    return shape


def _attributes(param_id: Any) -> dict[str, Any]:
    if type(param_id) is int and param_id >= 0:
        # Text: most of these numbers have more bits than JSON and netCDF keep.
        return {"param_id": str(param_id)}
    if optional(param_id) is not None:
        raise mistyped("param_id", param_id, "a non-negative integer")
    return {}


def _dense(element: tuple[str, int], shape: tuple[int, ...], offset: int, nbytes: int) -> Part:
    dtype, width = element
    if nbytes != width * prod(shape):
        raise FormatError(
            f"{nbytes} bytes != {width * prod(shape)} for {dtype} of shape {shape}",
            offset=offset,
            rule="TensorSize",
        )
    return Part(dtype, shape, offset, nbytes)


def _quantized(found: _Typeless, scheme: Scheme) -> Tensor:
    found = found._replace(attrs={**found.attrs, "burn_dtype": str(scheme)})
    if not scheme.packs(len(found.shape)):
        problem = FormatError(
            f"codes are packed along axis {scheme.packed_axis}, counted from the innermost, of a "
            f"tensor of {len(found.shape)} axes",
            rule="QuantScheme",
        )
        return _unreadable(found, "QFloat", problem)
    parts, quantization = split(scheme, found.shape, found.offset, found.nbytes)
    return Tensor(
        found.name,
        parts["data"].dtype,
        found.shape,
        parts,
        "structural" if quantization is None else "quantized",
        attrs=found.attrs,
        quantization=quantization,
    )


def _unreadable(found: _Typeless, kind: str, problem: CheckpointError) -> Tensor:
    problem.located(tensor=found.name)
    problem.offset = found.offset
    problem.hint = f"The rest opens with drop_variables=[{shown(found.name)}]"
    return Tensor(
        found.name,
        kind,
        found.shape,
        {"data": Part("uint8", (found.nbytes,), found.offset, found.nbytes)},
        attrs=found.attrs,
        # A traceback would keep all of the metadata alive.
        problem=problem.with_traceback(None),
    )


def scalar(name: str, value: Any, offset: int) -> Tensor:
    """Describe a scalar, whose value is in the metadata."""
    kind, content = variant(f"scalar {shown(name)}", value)
    if kind not in KINDS:
        problem = unknown("scalar", kind)
        return _unreadable(_Typeless(name, (), offset, 0, {"scalar": kind}), kind, problem)
    dtype, python_type, layout = KINDS[kind]
    if type(content) is not python_type:
        raise mistyped(f"scalar {shown(name)}", content, kind)
    try:
        data = binary.pack(layout, content)
    except binary.error:
        raise mistyped(f"scalar {shown(name)}", content, f"{kind} of 64 bits") from None
    part = Part(dtype, (), offset, len(data), inline=data)
    return Tensor(name, dtype, (), {"data": part}, attrs={"scalar": kind})
