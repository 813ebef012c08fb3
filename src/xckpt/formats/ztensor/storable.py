"""What the manifests of versions 1.0 and 2 can hold: names, attributes, parts of tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from xckpt.errors import CheckpointError, UnsupportedError, shown
from xckpt.formats.kit import DIMS_KEY, check_text, dims_text
from xckpt.formats.ztensor.elements import BITS, WRITTEN
from xckpt.formats.ztensor.layouts import (
    coo,
    csr,
    dense_size,
    flat,
    require_roles,
    wrong_dense_size,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from xckpt.index import Index, Part, Tensor

__all__ = [
    "LAYOUT_KEY",
    "choice",
    "root_attributes",
    "storable",
    "storable_parts",
    "unnamed_layout",
]

# The attribute of a tensor that is shown as its parts which says how the file calls its layout.
LAYOUT_KEY = "ztensor_layout"

_SCALARS = frozenset({str, int, float, bool, bytes, type(None)})


def storable(value: Any, levels: int, tensor: str | None = None) -> Any:
    """Check that CBOR without tags can hold an attribute."""
    kind = type(value)
    if kind is str:
        return check_text("an attribute", value, tensor)
    if kind is int and not -(1 << 64) <= value < 1 << 64:
        raise _no_attribute(f"{value:.3e}, an integer of more than 64 bits", tensor)
    if kind in _SCALARS:
        return value
    if kind not in {list, tuple, dict}:
        raise _no_attribute(f"of type {kind.__name__}", tensor)
    if not levels:
        raise _no_attribute("nested too deep", tensor)
    if kind is not dict:
        return [storable(item, levels - 1, tensor) for item in value]
    for key in value:
        if type(key) not in _SCALARS:
            raise _no_attribute(f"with a key of type {type(key).__name__}", tensor)
    return {
        storable(key, 0, tensor): storable(item, levels - 1, tensor) for key, item in value.items()
    }


def _no_attribute(what: str, tensor: str | None) -> UnsupportedError:
    return UnsupportedError(
        f"an attribute is {what}",
        tensor=tensor,
        rule="Attributes",
        hint="Give it as text, or leave it out",
    )


def root_attributes(
    index: Index, levels: int, tensors: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """Return the attributes of a file: its own, and the names of axes of its tensors."""
    if DIMS_KEY in index.attrs:
        raise UnsupportedError(
            f"the attribute {DIMS_KEY!r} is where names of axes are kept",
            rule="Attributes",
            hint="Rename it",
        )
    attrs = {}
    for key, value in index.attrs.items():
        if type(key) is not str:
            raise _no_attribute(f"named by a {type(key).__name__}", None)
        attrs[check_text("the attribute", key)] = storable(value, levels)
    dims = dims_text(index.tensors if tensors is None else tensors)
    if dims is not None:
        attrs[DIMS_KEY] = check_text("names of axes", dims)
    return attrs


def storable_parts(tensor: Tensor, index_types: Sequence[str]) -> dict[str, Part]:
    """Return the parts of a tensor as they are written: little-endian, with their raw sizes."""
    if tensor.order != "C":
        raise UnsupportedError("Fortran order", tensor=tensor.name, rule="Order")
    parts = {role: _bare(tensor, part) for role, part in tensor.parts.items()}
    try:
        return _checked(tensor, parts, index_types)
    except CheckpointError as error:
        raise error.located(tensor=tensor.name) from None


def _bare(tensor: Tensor, part: Part) -> Part:
    if part.dtype not in WRITTEN:
        raise UnsupportedError(
            f"no version has {shown(part.dtype)[1:-1]}",
            tensor=tensor.name,
            rule="Dtype",
            hint=f"They have {', '.join(WRITTEN)}",
        )
    return replace(
        part,
        offset=0,
        encoding=None,
        decoded_nbytes=None,
        digest=None,
        byteorder="little",
        shard=None,
        inline=None,
    )


def _checked(tensor: Tensor, parts: dict[str, Part], index_types: Sequence[str]) -> dict[str, Part]:
    if tensor.layout == "dense":
        require_roles("dense", parts, "data", exactly=True)
        data = parts["data"]
        if data.nbytes != dense_size(data.dtype, tensor.shape):
            raise wrong_dense_size(data.dtype, tensor.shape, data.nbytes, data.offset)
        return {"data": replace(data, shape=tensor.shape)}
    if tensor.layout == "sparse_csr":
        require_roles(tensor.layout, parts, "values", "indices", "indptr", exactly=True)
        return _with_indices(csr(tensor.shape, parts), ("indices", "indptr"), index_types)
    if tensor.layout == "sparse_coo":
        require_roles(tensor.layout, parts, "values", "coords", exactly=True)
        return _with_indices(coo(tensor.shape, parts), ("coords",), index_types)
    if tensor.layout == "quantized":
        return parts
    return {role: flat(part) for role, part in parts.items()}


def _with_indices(
    parts: dict[str, Part], roles: Sequence[str], index_types: Sequence[str]
) -> dict[str, Part]:
    """Return indices one of the types that they may have."""
    bits = max(BITS[parts[role].dtype] for role in roles)
    dtype = next(name for name in index_types if BITS[name] >= bits)
    for role in roles:
        part = parts[role]
        count = part.nbytes * 8 // BITS[part.dtype]
        parts[role] = replace(part, dtype=dtype, nbytes=count * BITS[dtype] // 8)
    return parts


def choice(
    what: str, wanted: str | None, known: Mapping[str | None, str | None], tensor: str
) -> str | None:
    """Return what a version has for a wanted compression or digest."""
    if wanted not in known:
        listed = ", ".join(sorted({name for name in known if name is not None}))
        raise UnsupportedError(
            f"the {what} {shown(wanted or '')}",
            tensor=tensor,
            rule=what.capitalize(),
            hint=f"Choose of {listed}",
        )
    return known[wanted]


def unnamed_layout(tensor: Tensor, defined: Iterable[str]) -> UnsupportedError:
    """Make the error for parts that are no array, where nothing says of which layout they are."""
    return UnsupportedError(
        "parts of a layout without a name",
        tensor=tensor.name,
        rule="Layout",
        hint=f"Give it the attribute {LAYOUT_KEY!r}, a text other than {', '.join(defined)}",
    )
