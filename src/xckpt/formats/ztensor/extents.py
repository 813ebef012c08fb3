"""Byte ranges in a file of version 0 or 1: bounds, and what their specifications let pass."""

from __future__ import annotations

from typing import Any

from xckpt.errors import FormatError, shown
from xckpt.formats.kit import Notes
from xckpt.formats.ztensor.manifest import mistyped

__all__ = ["Extents"]

_ALIGNMENT = 64
_HEAD = 8
_DIGESTS = frozenset({"crc32c", "sha256"})


class Extents:
    """The ranges of one file.

    Parameters
    ----------
    size : int
        Size of the file in bytes.
    data_end : int
        Where the manifest begins.
    """

    __slots__ = ("_data_end", "_size", "notes")

    def __init__(self, size: int, data_end: int) -> None:
        self._size = size
        self._data_end = data_end
        self.notes = Notes()

    def check(self, tensor: str, offset: Any, nbytes: Any) -> tuple[int, int]:
        """Check a range."""
        if type(offset) is not int or offset < 0:
            raise mistyped("offset", offset, "a non-negative integer")
        if type(nbytes) is not int or nbytes < 0:
            raise mistyped("length", nbytes, "a non-negative integer")
        end = offset + nbytes
        if end > self._size:
            raise FormatError(
                f"bytes {offset} to {end} are not in a file of {self._size}", rule="BlobBounds"
            )
        if offset % _ALIGNMENT:
            self._note("not at a multiple of 64, which is slower to read", tensor, offset)
        if nbytes and (offset < _HEAD or end > self._data_end):
            self._note("overlapping the head or the manifest", tensor, offset)
        return offset, nbytes

    def check_digest(self, tensor: str, offset: int, digest: str) -> None:
        """Note a digest of an unknown algorithm. A malformed one fails when the part is read."""
        algorithm, colon, _ = digest.partition(":")
        if colon and algorithm not in _DIGESTS:
            self._note(
                f"with a digest of the unknown algorithm {shown(algorithm)}, not verified",
                tensor,
                offset,
            )

    def _note(self, reason: str, tensor: str, offset: int) -> None:
        self.notes.add(reason, f"tensor {shown(tensor)} at byte {offset}")
