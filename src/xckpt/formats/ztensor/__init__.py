r"""zTensor (``.zt``), a format for compressed, sparse and quantised tensors: versions 0.1 to 2.

All integers are little-endian, all offsets absolute. A file has a magic, blobs, a CBOR manifest
that describes the blobs, and a footer with the position of the manifest::

    version   head (8 bytes)           blobs    manifest           footer
    0.1       "ZTEN0001"               % 64     array of maps      length u64
    1.0       "ZTEN1000"               % 64     map "tensors"      length u64
    1.1, 1.2  "ZTEN1000"               % 64     map "objects"      length u64, "ZTEN1000"
    2         89 "ZT2" CR LF SUB LF    % 4096   map "objects"      40 bytes, see below

Up to version 1.2 the manifest ends where the footer begins. The successors of 1.0 have the same
head, but also end with the magic (as a length it would be 3.5e18, so no file of 1.0 does). The
footer of version 2 is::

    offset from EOF   -40               -32               -24             -16       -12    -8
                      manifest offset   manifest length   XXH3-64 of it   version   zero   magic

Its manifest may be at any multiple of 4096, because tensors are added by appending blobs, a new
manifest and a new footer; the last footer counts. Length 0 marks a data shard, whose blobs belong
to the manifest of another file.

The manifest describes a tensor by these fields::

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
axis), ``data, scales, zeros`` (quantised). A range of version 2 may be in another file
(``shard``), and ranges are either identical (shared) or disjoint.

Limits: 1 GiB for a manifest, 64 axes for a shape. Version 2 requires RFC 8949 core deterministic
CBOR without tags, nested at most 32 deep; the other versions accept any CBOR.

Specification: the zTensor 1.0 specification; github.com/pie-project/ztensor, tags 0.1.4, 1.0.1,
1.2.3 and 2.1.2. Comments in this package note where they differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xckpt.errors import FormatError, UnsupportedError, shown
from xckpt.formats import Can, Format, Readable
from xckpt.formats.ztensor import v1, v2
from xckpt.formats.ztensor.manifest import LAYOUT_KEY, LONG, SHORT_1, WRITTEN
from xckpt.formats.ztensor.quantized import PINNED

if TYPE_CHECKING:
    from xckpt.formats.plan import Draft, Plan
    from xckpt.index import Index

_SMALLEST = 16  # a head and a footer of 8 bytes each


class ZTensor(Format):
    """zTensor, versions 0.1 to 2 (``.zt``)."""

    name = "ztensor"
    description = "zTensor checkpoints"
    types = {**LONG, **SHORT_1}  # noqa: RUF012  never changed
    storage_attrs = ("generator", "type", LAYOUT_KEY, *PINNED)
    can = Can(  # of both written versions together
        types=WRITTEN,
        layouts=("dense", "sparse_csr", "sparse_coo", "quantized", "structural"),
        compressions=("zstd", "zstd-seekable"),
        digests=("crc32c", "sha256", "xxh3"),
        tensor_attrs=None,
        file_attrs=None,
        stated_attrs=("generator", "type", LAYOUT_KEY, *PINNED),
        arrangement=True,
    )

    def detect(self, head: bytes, size: int, name: str) -> bool:
        """Return whether a file begins with the magic of any version."""
        return head.startswith((v1.MAGIC_0, v1.MAGIC, v2.MAGIC))

    def read(self, source: Readable) -> Index:
        """Read the magic, the footer and the manifest, but no tensor."""
        if source.size < _SMALLEST:
            reason = f"the file has {source.size} bytes, fewer than the {_SMALLEST} of an empty one"
            raise FormatError(reason, offset=0, rule="FileTooSmall")
        magic = bytes(source.read(0, 8))
        if magic == v2.MAGIC:
            return v2.read(source)
        if magic in {v1.MAGIC_0, v1.MAGIC}:
            return v1.read(source, magic)
        reason = f"the file begins {magic!r}, which is not a zTensor magic"
        raise FormatError(reason, offset=0, rule="HeaderMagic")

    def plan(self, draft: Draft, *, version: str = "1.0", alignment: int | None = None) -> Plan:
        """Plan a file of version 1.0 or 2.

        Parameters
        ----------
        draft : Draft
            Contents of the file.
        version : {"1.0", "2"}
            Version 1.0 follows the specification, with 13 element types. Version 2 has more element
            types and quantised layouts; upstream's current reader requires it.
        alignment : int, optional
            Alignment of the parts in a file of version 2, in bytes: a power of two from 4096. By
            default 65536, as in the canonical form of the version. Version 1.0 always aligns to 64.
        """
        if version not in {"1.0", "2"}:
            raise ValueError(f"version={version!r}: expected '1.0' or '2'")
        if version == "2":
            return v2.plan(draft, alignment)
        _refuse_alignment(alignment)
        return v1.plan(draft)

    def append(
        self,
        source: Readable,
        draft: Draft,
        *,
        version: str | None = None,
        alignment: int | None = None,
        replace: bool = False,
    ) -> Plan:
        """Plan the addition of tensors to a file of version 1.0 or 2."""
        magic = bytes(source.read(0, 8)) if source.size >= _SMALLEST else b""
        # Files of 1.1 and 1.2 end with the magic of 1.0.
        is_1_0 = magic == v1.MAGIC and bytes(source.read(source.size - 8, 8)) != v1.MAGIC
        if not is_1_0 and magic != v2.MAGIC:
            raise UnsupportedError(
                "tensors can be added to files of version 1.0 and 2 only",
                path=source.name,
                rule="Version",
                hint="Convert it first",
            )
        file_version, old = "1.0" if is_1_0 else "2", self.read(source)
        if version is not None and version != file_version:
            raise ValueError(f"version={version!r}, but the file is of version {file_version}")
        existing = next((name for name in draft.tensors if name in old.tensors), None)
        if existing is not None and not replace:
            raise ValueError(f"the file has a tensor {shown(existing)}; replace=True replaces it")
        if not is_1_0:
            return v2.append(source, draft, old, alignment)
        _refuse_alignment(alignment)
        return v1.append(source, draft, old)


def _refuse_alignment(alignment: int | None) -> None:
    if alignment is not None:
        raise ValueError("alignment= is an option of version='2'; version 1.0 aligns to 64 bytes")
