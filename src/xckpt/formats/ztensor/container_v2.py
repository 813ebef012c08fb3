"""The container of version 2: head, footer, and where the manifest is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.errors import CheckpointError, FormatError
from xckpt.formats.ztensor.manifest import LARGEST, decode_deterministic, mapping

if TYPE_CHECKING:
    from xckpt.formats import Readable

__all__ = [
    "ALIGNMENT",
    "FOOTER_NBYTES",
    "LONGEST_NAME",
    "MAGIC",
    "SMALLEST",
    "VERSION",
    "Footer",
    "read_manifest",
]

MAGIC = b"\x89ZT2\r\n\x1a\n"
VERSION = 2
ALIGNMENT = 4096
FOOTER_NBYTES = 40
SMALLEST = 48
LONGEST_NAME = 1024


class Footer(NamedTuple):
    """Where the manifest of a file is.

    Parameters
    ----------
    offset, length : int
        Its range, in bytes.
    digest : int
        Its XXH3-64.
    """

    offset: int
    length: int
    digest: int


def read_manifest(source: Readable) -> tuple[Footer, dict[Any, Any]] | None:
    """Read footer and manifest of a file of version 2."""
    footer = _footer(source)
    if footer is None:
        return None
    data = bytes(source.read(footer.offset, footer.length))
    try:
        _check_hash(data, footer.digest)
        return footer, mapping("manifest", decode_deterministic(data))
    except CheckpointError as error:
        error.offset = footer.offset
        raise


def _footer(source: Readable) -> Footer | None:
    size = source.size
    if size < SMALLEST:
        raise FormatError(
            f"{size} bytes: expected {SMALLEST} or more", offset=0, rule="FileTooSmall"
        )
    footer = bytes(source.read(size - FOOTER_NBYTES, FOOTER_NBYTES))
    if footer[32:] != MAGIC:
        raise FormatError(
            f"the file ends {footer[32:]!r}, not with the magic",
            offset=size - 8,
            rule="FooterMagic",
            hint="It may be truncated",
        )
    version = int.from_bytes(footer[24:28], "little")
    if version != VERSION:
        raise FormatError(f"version {version}: expected 2", offset=size - 16, rule="Version")
    found = Footer(*(int.from_bytes(footer[at : at + 8], "little") for at in (0, 8, 16)))
    return _checked_footer(found, size)


def _checked_footer(footer: Footer, size: int) -> Footer | None:
    at = size - FOOTER_NBYTES
    if footer.length == 0:
        if footer.offset or footer.digest:
            raise FormatError(
                "a data shard with the offset or the hash of a manifest",
                offset=at,
                rule="ManifestBounds",
            )
        return None
    if footer.length > LARGEST:
        raise FormatError(
            f"a manifest of {footer.length} bytes is larger than {LARGEST}",
            offset=at + 8,
            rule="ManifestTooLarge",
        )
    if footer.offset % ALIGNMENT or footer.offset == 0:
        raise FormatError(
            f"the manifest's offset {footer.offset} is no positive multiple of {ALIGNMENT}",
            offset=at,
            rule="BlobAlignment",
        )
    if footer.offset + footer.length > at:
        raise FormatError(
            f"the manifest ends at {footer.offset + footer.length}, the data at {at}",
            offset=at,
            rule="ManifestBounds",
        )
    return footer


def _check_hash(data: bytes, expected: int) -> None:
    import xxhash

    found = xxhash.xxh3_64_intdigest(data)
    if found != expected:
        raise FormatError(
            f"the manifest's hash is {found:016x}, the footer says {expected:016x}",
            rule="ManifestHash",
        )
