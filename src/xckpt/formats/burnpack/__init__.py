"""Burnpack (``.bpk``): the records of Burn, in the three dialects that share version 1.

Everything is little-endian, tensors are in C order::

    offset              size             what
    0                   4                magic, bytes "NRUB"
    4                   2                version, 1
    6                   4                size of the metadata, n
    10                  n                metadata, CBOR
    D                                    data

Metadata is a map; `metadata` and `scalars` may be absent, as may `param_id`::

    tensors    name -> {dtype, shape, data_offsets: [start, end], param_id}
    metadata   text -> text
    scalars    name -> {"Int" | "UInt" | "Float" | "Bool": value}

Offsets count from D. What burn's versions write differs, and no field says which one wrote a
file::

    burn          D                              dtype of booleans         quantised tensors
    0.19          10 + n, tensors back to back   "Bool"                    none
    0.20          next multiple of 256, and so   "Bool"                    param, level
    0.21          every tensor's start           {"Bool": "Native" | ...}  param, level
    after 0.22-pre.2                                                       tensor, block

A file of 0.19 is known by its size: the data end where the file does if and only if they begin
right after the metadata.

Names are in order of their UTF-8 bytes, data in any order. There are no digests. The limits that
burn's reader has and its writer has not (100 MiB of metadata, 100,000 tensors, 10 GiB for one)
are not imposed: what bounds every number is the size of the file.

References: crates/burn-store (0.19 to 0.21) and crates/burn-pack (since) in
github.com/tracel-ai/burn, revision 2c06be35.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from xckpt.errors import CheckpointError, FormatError, UnsupportedError
from xckpt.formats import Can, Format
from xckpt.formats.burnpack.axes import module_axes
from xckpt.formats.burnpack.metadata import decode, mapping, mistyped, struct
from xckpt.formats.burnpack.plan import (
    FILE_ATTRS,
    LAYOUTS,
    TENSOR_ATTRS,
    WRITES,
    is_inline,
    plan,
)
from xckpt.formats.burnpack.scalars import ScalarNames
from xckpt.formats.burnpack.tensors import ELEMENTS, check_ranges, listed, scalar, tensor
from xckpt.formats.kit import DIMS_KEY, with_dims
from xckpt.index import Index, Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from xckpt.formats import Readable
    from xckpt.formats.burnpack.tensors import Listed

__all__ = ["WRITES", "Burnpack", "detect", "is_inline", "module_axes", "plan", "read"]

Layout = Literal["aligned", "legacy"]

_MAGIC = b"NRUB"
_HEADER = 10
_ALIGNMENT = 256
_NEWEST = 1

_ROOT = frozenset({"tensors", "metadata", "scalars"})


def detect(head: bytes, size: int, name: str) -> bool:  # noqa: ARG001 (the registry's signature)
    """Return whether a file is a burnpack file by its magic."""
    return head.startswith(_MAGIC)


def read(source: Readable, *, layout: Layout | None = None) -> Index:
    """Read the index of a burnpack file: header and metadata, no tensor."""
    if layout is not None and layout not in get_args(Layout):
        raise ValueError(f"layout={layout!r}: expected 'aligned', 'legacy' or None")
    version, length = _header(source)
    end = _HEADER + length
    try:
        root = struct("metadata", decode(bytes(source.read(_HEADER, length))), _ROOT)
        found = listed(mapping("tensors", root.get("tensors")))
        if layout is None:
            layout = _layout(found, end, source.size)
        start = end if layout == "legacy" else _aligned(end)
        check_ranges(found, start, source.size, hint=_hint(layout, found, end, source.size))
        tensors = {each.name: tensor(each, start) for each in found}
        _add_scalars(tensors, mapping("scalars", root.get("scalars", {})))
        attrs = _attributes(root)
        tensors = with_dims(tensors, attrs.pop(DIMS_KEY, None))
    except CheckpointError as error:
        if error.offset is None:
            error.offset = _HEADER
        raise
    return Index(
        format=Burnpack.name,
        version=str(version) if layout == "aligned" else f"{version}-legacy",
        tensors=tensors,
        attrs=attrs,
        source=source.name,
        nbytes=source.size,
        warnings=() if version else ("version 0, which no burn has written, is read as 1",),
    )


def _header(source: Readable) -> tuple[int, int]:
    """Return the version and the size of the metadata."""
    if source.size < _HEADER:
        raise FormatError(
            f"{source.size} bytes are fewer than the {_HEADER} of a header",
            offset=0,
            rule="InvalidHeader",
        )
    header = bytes(source.read(0, _HEADER))
    if not header.startswith(_MAGIC):
        swapped = header.startswith(_MAGIC[::-1])
        raise FormatError(
            f"the file begins {header[:4]!r}, not {_MAGIC!r}",
            offset=0,
            rule="InvalidMagicNumber",
            hint="The bytes of its magic number are in big-endian order" if swapped else None,
        )
    version = int.from_bytes(header[4:6], "little")
    if version > _NEWEST:
        raise UnsupportedError(
            f"version {version}: the newest known is {_NEWEST}", offset=4, rule="InvalidVersion"
        )
    length = int.from_bytes(header[6:], "little")
    if length > source.size - _HEADER:
        raise FormatError(
            f"metadata of {length} bytes, but {source.size - _HEADER} follow the header",
            offset=6,
            rule="InvalidHeader",
            hint="The file may be truncated",
        )
    return version, length


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _layout(found: Sequence[Listed], end: int, size: int) -> Layout:
    """Tell the layouts apart: only burn 0.19 left no padding anywhere."""
    if end % _ALIGNMENT == 0:
        return "aligned"
    ranges = sorted([(each.start, each.end) for each in found])
    last = ranges[-1][1] if ranges else 0
    ends = [0, *(stop for _, stop in ranges)]
    contiguous = all(begin == before for (begin, _), before in zip(ranges, ends, strict=False))
    return "legacy" if end + last == size and contiguous else "aligned"


def _hint(layout: Layout, found: Sequence[Listed], end: int, size: int) -> str:
    last = max([each.end for each in found], default=0)
    if layout == "aligned" and end + last <= size:
        return "The file is truncated, or burn 0.19 wrote it: then open it with layout='legacy'"
    return "The file may be truncated"


def _add_scalars(tensors: dict[str, Tensor], scalars: Mapping[str, Any]) -> None:
    """Add scalars as tensors without axes."""
    names = ScalarNames(frozenset(tensors))
    for name, value in scalars.items():
        free = names.shown(name)
        tensors[free] = scalar(free, value, _HEADER)


def _attributes(root: Mapping[str, Any]) -> dict[str, str]:
    attrs = mapping("metadata", root.get("metadata", {}))
    for key, value in attrs.items():
        if type(value) is not str:
            raise mistyped(f"metadata {key!r}", value, "text")
    return attrs


class Burnpack(Format):
    """Burnpack, the three dialects of version 1 (``.bpk``)."""

    name = "burnpack"
    description = "Burnpack checkpoints"
    suffixes = (".bpk",)
    types = {spelled: dtype for spelled, (dtype, _) in ELEMENTS.items()}  # noqa: RUF012  never changed
    can = Can(types=WRITES, layouts=LAYOUTS, tensor_attrs=TENSOR_ATTRS, file_attrs=FILE_ATTRS)

    detect = staticmethod(detect)
    read = staticmethod(read)
    plan = staticmethod(plan)
    module_axes = staticmethod(module_axes)
    is_inline = staticmethod(is_inline)
