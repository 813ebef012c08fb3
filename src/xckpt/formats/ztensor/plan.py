"""Writing zTensor files: version 1.0, which the specification describes, or 2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xckpt.errors import UnsupportedError, shown
from xckpt.formats.ztensor import container_v2, plan_v1, plan_v2, v1, v2
from xckpt.formats.ztensor.elements import WRITTEN

if TYPE_CHECKING:
    from xckpt.formats import Readable
    from xckpt.index import Index
    from xckpt.plan import Plan

__all__ = [
    "DIGESTS",
    "ENCODINGS",
    "FILE_ATTRS",
    "LAYOUTS",
    "TENSOR_ATTRS",
    "WRITES",
    "plan",
    "plan_append",
]

# What either version has.
WRITES = WRITTEN
LAYOUTS = ("dense", "sparse_csr", "sparse_coo", "quantized", "structural")
ENCODINGS = ("zstd", "zstd-seekable")
DIGESTS = ("crc32c", "sha256", "xxh3")
TENSOR_ATTRS = None
FILE_ATTRS = None

_VERSIONS = ("1.0", "2")
_SMALLEST = 16  # a head and a footer of 8 bytes each


def plan(index: Index, *, version: str = "1.0", alignment: int | None = None) -> Plan:
    """Plan a zTensor file."""
    if version not in _VERSIONS:
        raise ValueError(f"version={version!r}: expected '1.0' or '2'")
    if version == "2":
        return plan_v2.plan(index, _checked_alignment(alignment))
    _refuse_alignment(alignment)
    return plan_v1.plan(index)


def plan_append(
    source: Readable,
    index: Index,
    *,
    version: str | None = None,
    alignment: int | None = None,
    replace: bool = False,
) -> Plan:
    """Plan what makes a file of version 1.0 or 2 hold more tensors."""
    found, old = _old(source)
    if version is not None and version != found:
        raise ValueError(f"version={version!r}, but the file is of version {found}")
    taken = next((name for name in index.tensors if name in old.tensors), None)
    if taken is not None and not replace:
        raise ValueError(f"the file has a tensor {shown(taken)}; replace=True replaces it")
    if found == "2":
        return plan_v2.plan_append(source, index, old, _checked_alignment(alignment))
    _refuse_alignment(alignment)
    return plan_v1.plan_append(source, index, old)


def _old(source: Readable) -> tuple[str, Index]:
    """Read the version and the index of a file that may grow."""
    magic = bytes(source.read(0, 8)) if source.size >= _SMALLEST else b""
    if magic == container_v2.MAGIC:
        return "2", v2.read(source)
    tail = bytes(source.read(source.size - 16, 16)) if magic else b""
    if magic == v1.MAGIC and not tail.endswith(v1.MAGIC):
        return "1.0", v1.read(source, tail)
    raise UnsupportedError(
        "only files of version 1.0 and 2 are added to",
        path=source.name,
        rule="Version",
        hint="Convert it first",
    )


def _checked_alignment(alignment: int | None) -> int:
    if alignment is None:
        return plan_v2.CANONICAL_ALIGNMENT
    if alignment < container_v2.ALIGNMENT or alignment & (alignment - 1):
        raise ValueError(f"alignment={alignment!r}: expected a power of two from 4096")
    return alignment


def _refuse_alignment(alignment: int | None) -> None:
    if alignment is not None:
        raise ValueError("alignment= is an option of version='2'; version 1.0 has 64")
