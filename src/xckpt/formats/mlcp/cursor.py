"""The fields of a file one after the other, as .NET's ``BinaryWriter`` leaves them."""

from __future__ import annotations

from struct import Struct

from xckpt.errors import FormatError
from xckpt.formats.kit import Cursor

__all__ = ["NetCursor", "written_string"]

_I32 = Struct("<i")
_LARGEST_I32 = (1 << 31) - 1


class NetCursor(Cursor):
    """Reads what .NET's ``BinaryWriter`` wrote."""

    __slots__ = ()

    def integer(self, what: str) -> int:
        """Read a 32-bit integer with a sign."""
        return self.number(_I32, what)

    def count(self, what: str, size: int = 1) -> int:
        """Read how many things follow."""
        at = self.at
        found = self.number(_I32, what)
        if found < 0:
            raise FormatError(f"{what}: {found} is below zero", offset=at, rule="Negative")
        if found * size > self.left:
            self._require(found * size, what)
        return found

    def string(self, what: str) -> str:
        """Read a text that begins with its length in groups of 7 bits, the lowest first."""
        at = self.at
        length = self.take(1, what)[0]
        if length >= 0x80:
            length = self._long_length(length & 0x7F, at, what)
        return self.text(length, what)

    def _long_length(self, length: int, at: int, what: str) -> int:
        for shift in (7, 14, 21, 28):
            byte = self.take(1, what)[0]
            length |= (byte & 0x7F) << shift
            if byte < 0x80 and length <= _LARGEST_I32:
                return length
        reason = f"{what}: its length is not one of 31 bits in at most 5 bytes"
        raise FormatError(reason, offset=at, rule="StringLength")


def written_string(text: str) -> bytes:
    """Write a text after its length in groups of 7 bits, the lowest first."""
    data = text.encode()
    left, length = len(data), bytearray()
    while left >= 0x80:
        length.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*length, left]) + data
