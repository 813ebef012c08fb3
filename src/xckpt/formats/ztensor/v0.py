"""Version 0.1: an array of tensors, one blob each.

Entries carry what their writer wanted to say of a tensor beside the fields of the format. The
sparse layouts pack all their arrays into the one blob; no published writer made such a file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xckpt.errors import CheckpointError, FormatError, shown
from xckpt.formats.ztensor.elements import BITS, LONG
from xckpt.formats.ztensor.extents import Extents
from xckpt.formats.ztensor.layouts import (
    checked_shape,
    dense_size,
    flat,
    wrong_dense_size,
)
from xckpt.formats.ztensor.manifest import attributes, decode, locate, mapping, mistyped, text
from xckpt.formats.ztensor.storable import LAYOUT_KEY
from xckpt.formats.ztensor.unknown import unknown_element, unknown_encodings
from xckpt.index import Index, Part, Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.formats import Readable

__all__ = ["MAGIC", "read"]

MAGIC = b"ZTEN0001"

_FOOTER = 8
_SMALLEST = 16
_FIELDS = frozenset(
    {
        "name",
        "offset",
        "size",
        "dtype",
        "layout",
        "shape",
        "encoding",
        "data_endianness",
        "checksum",
    }
)
_INDEX_BYTES = 8


def read(source: Readable, tail: bytes) -> Index:
    """Read the index of a file of version 0.1."""
    length = int.from_bytes(tail[-_FOOTER:], "little")
    start = locate(source.size, _FOOTER, length)
    extents = Extents(source.size, start)
    try:
        # A file of nothing but head and footer lacks even the manifest.
        empty = source.size == _SMALLEST and length == 0
        entries = [] if empty else decode(bytes(source.read(start, length)))
        if type(entries) is not list:
            raise mistyped("manifest", entries, "an array")
        tensors = _tensors(entries, extents)
    except CheckpointError as error:
        if error.offset is None:
            error.offset = start
        raise
    return Index(
        format="ztensor",
        version="0.1",
        tensors=tensors,
        source=source.name,
        nbytes=source.size,
        warnings=extents.notes.warnings(),
    )


def _tensors(entries: list[Any], extents: Extents) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for entry in entries:
        name = text("name", mapping("tensor", entry).get("name"))
        if name in tensors:
            raise FormatError("two tensors have this name", tensor=name, rule="NameCollision")
        try:
            tensors[name] = _tensor(name, entry, extents)
        except CheckpointError as error:
            raise error.located(tensor=name) from None
    return tensors


def _tensor(name: str, entry: Mapping[Any, Any], extents: Extents) -> Tensor:
    shape = checked_shape(entry.get("shape"))
    layout = text("layout", entry.get("layout"))
    spelled = text("dtype", entry.get("dtype"))
    blob = _blob(name, entry, extents)
    attrs = attributes(
        {key: value for key, value in entry.items() if key not in _FIELDS and type(key) is str}
    )
    dtype = LONG.get(spelled)
    problem = unknown_encodings(name, [(blob.encoding, blob.offset)], (None, "zstd"))
    if layout == "dense" and (dtype is None or problem is not None):
        problem = problem or unknown_element(spelled, name, blob.offset)
        parts = {"data": flat(blob)}
        return Tensor(name, dtype or spelled, shape, parts, attrs=attrs, problem=problem)
    if layout == "dense" and dtype is not None:
        return Tensor(name, dtype, shape, {"data": _dense(entry, dtype, shape, blob)}, attrs=attrs)
    if layout == "sparsecsr" and dtype is not None and blob.encoding is None:
        return Tensor(name, dtype, shape, _csr(dtype, shape, blob), "sparse_csr", attrs=attrs)
    # The coordinates and values of "sparsecoo" alternate: not an array of anything.
    return Tensor(
        name,
        dtype or "uint8",
        shape,
        {"data": flat(blob)},
        "structural",
        attrs={**attrs, LAYOUT_KEY: entry["layout"]},
        problem=problem,
    )


def _blob(name: str, entry: Mapping[Any, Any], extents: Extents) -> Part:
    offset, nbytes = extents.check(name, entry.get("offset"), entry.get("size"))
    encoding = entry.get("encoding")
    if encoding is not None:
        encoding = None if encoding == "raw" else text("encoding", encoding)
    digest = entry.get("checksum")
    if digest is not None:
        extents.check_digest(name, offset, text("checksum", digest))
    return Part("uint8", None, offset, nbytes, encoding, digest=digest)


def _dense(entry: Mapping[Any, Any], dtype: str, shape: tuple[int, ...], blob: Part) -> Part:
    if blob.encoding is None and blob.nbytes != dense_size(dtype, shape):
        raise wrong_dense_size(dtype, shape, blob.nbytes, blob.offset)
    order = entry.get("data_endianness")
    if order is not None and text("data_endianness", order) not in {"little", "big"}:
        raise FormatError(f"the byte order {shown(order)}", rule="Schema")
    return Part(
        dtype,
        shape,
        blob.offset,
        blob.nbytes,
        blob.encoding,
        digest=blob.digest,
        # Writers state it for raw data only; what they compress is little-endian.
        byteorder="big" if order == "big" and blob.encoding is None else "little",
    )


def _csr(dtype: str, shape: tuple[int, ...], blob: Part) -> dict[str, Part]:
    """Split a blob that is row pointers, column indices and values, one after the other."""
    if len(shape) != 2:
        raise FormatError(f"CSR of {len(shape)} axes: expected 2", rule="LayoutRule")
    pointers = _INDEX_BYTES * (shape[0] + 1)
    width = BITS[dtype] // 8
    nonzero, rest = divmod(blob.nbytes - pointers, _INDEX_BYTES + width)
    if nonzero < 0 or rest:
        raise FormatError(
            f"{blob.nbytes} bytes are not {pointers} of row pointers "
            f"and a multiple of {_INDEX_BYTES + width}",
            offset=blob.offset,
            rule="LayoutRule",
        )
    indices = blob.offset + pointers
    values = indices + _INDEX_BYTES * nonzero
    # The digest is of the whole blob, hence of none of them.
    return {
        "values": Part(dtype, (nonzero,), values, width * nonzero),
        "indices": Part("uint64", (nonzero,), indices, _INDEX_BYTES * nonzero),
        "indptr": Part("uint64", (shape[0] + 1,), blob.offset, pointers),
    }
