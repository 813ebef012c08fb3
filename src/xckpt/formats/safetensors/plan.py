"""Writing safetensors files: byte for byte what the package writes.

Tensors with wide elements come first, then they are in the order of their names; the header is
padded so that data begin at a multiple of 8. (Of several metadata the package chooses an order by
chance; here it is the order of the attributes.) Names of axes are text in ``__metadata__`` under
the key ``xckpt.dims``, which other readers ignore.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from xckpt.dims import DIMS_KEY, dims_text
from xckpt.dtypes import ELEMENT_TYPES
from xckpt.errors import UnsupportedError, shown
from xckpt.formats.safetensors.header import DTYPES, LARGEST_HEADER, LENGTH_NBYTES
from xckpt.plan import Extent, Literal, Plan

if TYPE_CHECKING:
    from xckpt.index import Index, Tensor

__all__ = ["FILE_ATTRS", "TENSOR_ATTRS", "WRITES", "plan"]

WRITES = tuple(DTYPES.values())
#: Any attribute of the file: text as it is, all else as JSON text. None of a tensor.
FILE_ATTRS = None
TENSOR_ATTRS = ()


def plan(index: Index) -> Plan:
    """Lay a safetensors file out.

    Parameters
    ----------
    index : Index
        What is to be written.

    Returns
    -------
    Plan
        The header, and the data without a gap.

    Raises
    ------
    UnsupportedError
        If a name, an element type, a layout or an attribute has no place in the format.
    """
    tensors = sorted(index.tensors.values(), key=_writing_order)
    sizes = [_nbytes_written(tensor) for tensor in tensors]
    header = _written_header(index, tensors, sizes)
    offset = LENGTH_NBYTES + len(header)
    extents = []
    for tensor, nbytes in zip(tensors, sizes, strict=True):
        extents.append(Extent(tensor.name, "data", tensor.parts["data"], offset))
        offset += nbytes
    head = Literal(0, len(header).to_bytes(LENGTH_NBYTES, "little") + header)
    return Plan((head,), tuple(extents), nbytes=offset)


def _writing_order(tensor: Tensor) -> tuple[int, str]:
    if tensor.dtype not in _RANKS:
        raise _unwritable(f"there is no element type for {tensor.dtype}", "Dtype", tensor)
    return _RANKS[tensor.dtype], tensor.name


_RANKS = {dtype: -rank for rank, dtype in enumerate(DTYPES.values())}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def _nbytes_written(tensor: Tensor) -> int:
    if tensor.layout != "dense" or tensor.order != "C":
        reason = f"{tensor.layout} tensors in {tensor.order} order have no place in this format"
        raise _unwritable(reason, "Layout", tensor)
    bits = ELEMENT_TYPES[tensor.dtype].bits * tensor.size
    if bits % 8:
        raise _unwritable(f"{bits} bits of data are no whole bytes", "MisalignedSlice", tensor)
    return bits // 8


def _written_header(index: Index, tensors: list[Tensor], sizes: list[int]) -> bytes:
    entries: dict[str, Any] = {}
    metadata = {str(k): _as_text(k, v) for k, v in index.attrs.items()}
    dims = dims_text(index.tensors)
    if dims is not None:
        metadata[DIMS_KEY] = dims
    if metadata:
        entries["__metadata__"] = metadata
    start = 0
    for tensor, nbytes in zip(tensors, sizes, strict=True):
        if tensor.name == "__metadata__":
            raise _unwritable("the name has another meaning here", "Name", tensor, _RENAME)
        entries[tensor.name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (start, start + nbytes),
        }
        start += nbytes
    header = _json(entries, tensors)
    if len(header) > LARGEST_HEADER:
        reason = f"a header of {len(header)} > {LARGEST_HEADER} bytes"
        raise UnsupportedError(reason, rule="HeaderTooLarge", hint="Write several files")
    return header + b" " * (-len(header) % 8)


def _json(entries: dict[str, Any], tensors: list[Tensor]) -> bytes:
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:
        pass
    for tensor in tensors:
        if any("\ud800" <= character <= "\udfff" for character in tensor.name):
            raise _unwritable("a lone surrogate is no text", "Name", tensor, _RENAME)
    raise UnsupportedError("an attribute has a lone surrogate, which is no text", rule="Metadata")


_RENAME = "Rename it: ds.rename({old: new})"


def _as_text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UnsupportedError(
            f"the attribute {shown(str(name))} cannot be text: {error}",
            rule="Metadata",
            hint="Make it text, or remove it from ds.attrs",
        ) from None


def _unwritable(
    reason: str, rule: str, tensor: Tensor, hint: str | None = None
) -> UnsupportedError:
    return UnsupportedError(reason, tensor=tensor.name, rule=rule, hint=hint)
