r"""zTensor (``.zt``): versions 0.1, 1.0, 1.1, 1.2 and 2.

All integers are little-endian, all offsets absolute. A file is a head, blobs, a CBOR manifest
that says what the blobs are, and a footer that says where the manifest is::

    version   head (8 bytes)           blobs    manifest           footer
    0.1       "ZTEN0001"               % 64     array of maps      length u64
    1.0       "ZTEN1000"               % 64     map "tensors"      length u64
    1.1, 1.2  "ZTEN1000"               % 64     map "objects"      length u64, "ZTEN1000"
    2         89 "ZT2" CR LF SUB LF    % 4096   map "objects"      40 bytes, see below

Up to version 1.2 the manifest ends where the footer begins. The head alone does not tell 1.0
from its successors: only the successors end with the magic (read as a length it would be
3.5e18, so that no file is both). The footer of version 2 is::

    offset from EOF   -40               -32               -24             -16       -12    -8
                      manifest offset   manifest length   XXH3-64 of it   version   zero   magic

Its manifest may lie anywhere at a multiple of 4096 (a file grows by appending blobs, a new
manifest and a new footer; the last footer counts). Length 0 marks a data shard: blobs for the
manifest of another file.

What the manifest says of a tensor::

    version         0.1            1.0              1.1, 1.2              2
    element type    dtype          dtype            dtype, type of part   dtype, type of part
    layout          layout         format           format                layout
    byte ranges     offset, size   components.ROLE: offset, length        parts.ROLE.blob: [o, n]
    compression     encoding       encoding         encoding              encoding
    decoded size    -              -                uncompressed_length   decoded_length
    digest          checksum       digest           digest                digest
      of bytes      as stored      as stored        as stored             decoded

Version 0.1 has one range for each tensor; the others have parts by role: ``data`` (dense),
``values, indices, indptr`` (CSR), ``values, coords`` (COO, one row of coordinates for each
axis), ``data, scales, zeros`` (quantised). A range of version 2 may lie in another file
(``shard``), and ranges are identical (shared) or disjoint.

Limits: a manifest has at most 1 GiB, a shape 64 axes. Version 2 demands RFC 8949 core
deterministic CBOR without tags, nested at most 32 deep; the others take any CBOR.

References: the zTensor 1.0 specification; github.com/pie-project/ztensor, tags 0.1.4, 1.0.1,
1.2.3 and 2.1.2, which differ from each other and from the specification where this package
says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xckpt.errors import FormatError
from xckpt.formats import Can, Format
from xckpt.formats.ztensor import container_v2, v0, v1, v2
from xckpt.formats.ztensor.elements import LONG, SHORT_1
from xckpt.formats.ztensor.plan import (
    DIGESTS,
    ENCODINGS,
    FILE_ATTRS,
    LAYOUTS,
    TENSOR_ATTRS,
    WRITES,
    plan,
    plan_append,
)

if TYPE_CHECKING:
    from xckpt.formats import Readable
    from xckpt.index import Index

__all__ = ["WRITES", "ZTensor", "detect", "plan", "plan_append", "read"]

_SMALLEST = 16  # a head and a footer of 8 bytes each


def detect(head: bytes, size: int, name: str) -> bool:  # noqa: ARG001 (the registry's signature)
    """Return whether a file is a zTensor file, of whatever version, by its magic."""
    return head.startswith((v0.MAGIC, v1.MAGIC, container_v2.MAGIC))


def read(source: Readable) -> Index:
    """Read the index of a zTensor file: head, footer and manifest, no tensor."""
    size = source.size
    if size < _SMALLEST:
        raise FormatError(
            f"{size} bytes are fewer than the {_SMALLEST} of a head and a footer",
            offset=0,
            rule="FileTooSmall",
        )
    magic = bytes(source.read(0, 8))
    if magic == container_v2.MAGIC:
        return v2.read(source)
    tail = bytes(source.read(size - 16, 16))
    if magic == v0.MAGIC:
        return v0.read(source, tail)
    if magic == v1.MAGIC:
        return v1.read(source, tail)
    raise FormatError(
        f"the file begins {magic!r}, which is no zTensor magic", offset=0, rule="HeaderMagic"
    )


class ZTensor(Format):
    """zTensor, versions 0.1 to 2 (``.zt``)."""

    name = "ztensor"
    description = "zTensor checkpoints"
    suffixes = (".zt",)
    types = {**LONG, **SHORT_1}  # noqa: RUF012  never changed
    can = Can(
        types=WRITES,
        layouts=LAYOUTS,
        compressions=ENCODINGS,
        digests=DIGESTS,
        tensor_attrs=TENSOR_ATTRS,
        file_attrs=FILE_ATTRS,
    )

    detect = staticmethod(detect)
    read = staticmethod(read)
    plan = staticmethod(plan)
    append = staticmethod(plan_append)
