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
    can = Can(  # what either version has
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
        """Whether the magic is that of any version."""
        return head.startswith((v1.MAGIC_0, v1.MAGIC, v2.MAGIC))

    def read(self, source: Readable) -> Index:
        """Read head, footer and manifest, no tensor."""
        if source.size < _SMALLEST:
            reason = f"{source.size} bytes are fewer than the {_SMALLEST} of a head and a footer"
            raise FormatError(reason, offset=0, rule="FileTooSmall")
        magic = bytes(source.read(0, 8))
        if magic == v2.MAGIC:
            return v2.read(source)
        if magic in {v1.MAGIC_0, v1.MAGIC}:
            return v1.read(source, magic)
        reason = f"the file begins {magic!r}, which is not a zTensor magic"
        raise FormatError(reason, offset=0, rule="HeaderMagic")

    def plan(self, draft: Draft, *, version: str = "1.0", alignment: int | None = None) -> Plan:
        """Lay out a file of version 1.0, which the specification describes, or 2.

        Parameters
        ----------
        draft : Draft
            What is to be written.
        version : {"1.0", "2"}
            Version 1.0 has 13 element types. Version 2 has more of them, quantised layouts, and is
            what the maintained reader reads.
        alignment : int, optional
            Of the parts of a file of version 2, in bytes: a power of two from 4096. By default
            65536, which the canonical form of the version demands. Those of version 1.0 are at
            multiples of 64.
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
        """Lay out what makes a file of version 1.0 or 2 hold more tensors."""
        magic = bytes(source.read(0, 8)) if source.size >= _SMALLEST else b""
        # Files of 1.1 and 1.2 end with the magic of 1.0.
        plain = magic == v1.MAGIC and bytes(source.read(source.size - 8, 8)) != v1.MAGIC
        if not plain and magic != v2.MAGIC:
            raise UnsupportedError(
                "only files of version 1.0 and 2 are added to",
                path=source.name,
                rule="Version",
                hint="Convert it first",
            )
        found, old = "1.0" if plain else "2", self.read(source)
        if version is not None and version != found:
            raise ValueError(f"version={version!r}, but the file is of version {found}")
        taken = next((name for name in draft.tensors if name in old.tensors), None)
        if taken is not None and not replace:
            raise ValueError(f"the file has a tensor {shown(taken)}; replace=True replaces it")
        if not plain:
            return v2.append(source, draft, old, alignment)
        _refuse_alignment(alignment)
        return v1.append(source, draft, old)


def _refuse_alignment(alignment: int | None) -> None:
    if alignment is not None:
        raise ValueError("alignment= is an option of version='2'; version 1.0 has 64")
