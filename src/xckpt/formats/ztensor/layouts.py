"""Shapes, and how the parts of a tensor fit its shape: what all versions share.

Parts are given with the shape None; the functions for a layout check their sizes and return them
with their shapes.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from xckpt.errors import FormatError
from xckpt.formats.ztensor.elements import BITS, INTEGERS
from xckpt.formats.ztensor.manifest import mistyped

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from xckpt.index import Part

__all__ = [
    "checked_shape",
    "coo",
    "csr",
    "decoded_size",
    "dense_size",
    "first_dtype",
    "flat",
    "require_roles",
    "wrong_dense_size",
]

_MOST_AXES = 64  # also numpy's limit
_SIZES = 1 << 63  # numpy's sizes are signed
_COUNTS = 1 << 64


def checked_shape(value: Any) -> tuple[int, ...]:
    """Return a shape from a manifest."""
    if type(value) is not list:
        raise mistyped("shape", value, "an array")
    for extent in value:
        if type(extent) is not int or extent < 0:
            raise mistyped("shape", extent, "non-negative integers")
        if extent >= _SIZES:
            raise FormatError(f"an axis of {extent} elements", rule="Shape")
    if len(value) > _MOST_AXES:
        raise FormatError(f"{len(value)} axes are more than {_MOST_AXES}", rule="Shape")
    # Zeros do not make up for the others: numpy cannot represent such an array.
    if (prod(value) or prod(filter(None, value))) >= _COUNTS:
        raise FormatError(f"the shape {value} has more elements than 64 bits count", rule="Shape")
    return tuple(value)


def dense_size(dtype: str, shape: tuple[int, ...]) -> int:
    """Compute the size of dense data in bytes."""
    bits = BITS[dtype]
    size = (bits * prod(shape) + 7) >> 3
    if (size or bits * prod(filter(None, shape)) >> 3) >= _SIZES:
        raise FormatError(f"{dtype} of shape {shape} is larger than an array can be", rule="Shape")
    return size


def decoded_size(part: Part) -> int | None:
    """Return the size of a part in bytes after decoding."""
    return part.nbytes if part.encoding is None else part.decoded_nbytes


def wrong_dense_size(dtype: str, shape: tuple[int, ...], size: int, offset: int) -> FormatError:
    """Make the error for dense data whose size does not fit the shape."""
    expected = dense_size(dtype, shape)
    return FormatError(
        f"{size} bytes != {expected} for {dtype} of shape {shape}", offset=offset, rule="DenseSize"
    )


def require_roles(
    layout: str, parts: Mapping[str, object], *roles: str, exactly: bool = False
) -> None:
    """Check that a tensor has the parts of its layout."""
    missing = [role for role in roles if role not in parts]
    if missing:
        raise FormatError(f"{layout} without the part {missing[0]!r}", rule="LayoutRule")
    if exactly and len(parts) > len(roles):
        raise FormatError(
            f"{layout} has {len(parts)} parts: expected only {', '.join(roles)}", rule="LayoutRule"
        )


def flat(part: Part) -> Part:
    """Return a part that no layout explains its shape: a list of its elements."""
    size = decoded_size(part)
    if size is None:
        return part
    bits = BITS[part.dtype]
    if bits < 8 or size * 8 % bits:
        return replace(part, dtype="uint8", shape=(size,))
    return replace(part, shape=(size * 8 // bits,))


def csr(shape: tuple[int, ...], parts: Mapping[str, Part]) -> dict[str, Part]:
    """Check the sizes of compressed sparse rows."""
    if len(shape) != 2:
        raise FormatError(
            f"CSR of {len(shape)} axes: expected 2",
            offset=parts["indptr"].offset,
            rule="LayoutRule",
        )
    _require_integers(parts["indptr"], parts["indices"])
    pointers = _count("indptr", parts["indptr"])
    if pointers is not None and pointers != shape[0] + 1:
        raise FormatError(
            f"'indptr' has {pointers} entries: expected {shape[0] + 1} for {shape[0]} rows",
            offset=parts["indptr"].offset,
            rule="LayoutRule",
        )
    nonzero = _nonzero(_count("indices", parts["indices"]), parts["values"])
    listed = None if nonzero is None else (nonzero,)
    return {
        "values": replace(parts["values"], shape=listed),
        "indices": replace(parts["indices"], shape=listed),
        "indptr": replace(parts["indptr"], shape=(shape[0] + 1,)),
    }


def coo(shape: tuple[int, ...], parts: Mapping[str, Part]) -> dict[str, Part]:
    """Check the sizes of a coordinate list."""
    coords, values = parts["coords"], parts["values"]
    if not shape:
        raise FormatError("COO of no axes", offset=coords.offset, rule="LayoutRule")
    _require_integers(coords)
    numbers = _count("coords", coords)
    if numbers is not None and numbers % len(shape):
        raise FormatError(
            f"'coords' has {numbers} entries, which is no multiple of {len(shape)} axes",
            offset=coords.offset,
            rule="LayoutRule",
        )
    nonzero = _nonzero(None if numbers is None else numbers // len(shape), values)
    return {
        "values": replace(values, shape=None if nonzero is None else (nonzero,)),
        "coords": replace(coords, shape=None if nonzero is None else (len(shape), nonzero)),
    }


def _require_integers(*parts: Part) -> None:
    for part in parts:
        if part.dtype not in INTEGERS:
            raise FormatError(
                f"indices of type {part.dtype}: expected integers",
                offset=part.offset,
                rule="LayoutRule",
            )


def _count(role: str, part: Part) -> int | None:
    size = decoded_size(part)
    if size is None:
        return None
    width = BITS[part.dtype] // 8
    if size % width:
        raise FormatError(
            f"{role!r} has {size} bytes, which is no multiple of {width}",
            offset=part.offset,
            rule="LayoutRule",
        )
    return size // width


def _nonzero(indexed: int | None, values: Part) -> int | None:
    """Return the number of stored values, which the indices tell; packed values do not."""
    if indexed is None:
        return None if BITS[values.dtype] < 8 else _count("values", values)
    size = decoded_size(values)
    expected = (BITS[values.dtype] * indexed + 7) // 8
    if size is not None and size != expected:
        raise FormatError(
            f"'values' has {size} bytes: expected {expected} for {indexed} indices",
            offset=values.offset,
            rule="LayoutRule",
        )
    return indexed


def first_dtype(parts: Iterable[Part]) -> str:
    """Return the element type that stands for a tensor which is shown as its parts only."""
    return next((part.dtype for part in parts), "uint8")
