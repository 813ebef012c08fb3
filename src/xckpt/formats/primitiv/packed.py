"""MessagePack objects, read without the long ones and written as primitiv's own writer does."""

from __future__ import annotations

from struct import Struct, unpack
from typing import NamedTuple

from xckpt.errors import FormatError, UnsupportedError
from xckpt.formats import kit

# What the bytes of damaged files may claim is no reason to read them as one name.
_LONGEST_TEXT = 1 << 24
_UINT32, _FLOAT32 = 0xCE, 0xCA
_NAMES = {_UINT32: "uint32", _FLOAT32: "float32"}
_INTEGER, _FLOAT = Struct(">BI"), Struct(">Bf")


class LengthType(NamedTuple):
    """A type that begins with a length: its type bytes that are the length too, and the others.

    For each of those, how many bytes of the length follow.
    """

    name: str
    short: range
    long: dict[int, int]

    def pack(self, length: int) -> bytes:
        """Write the length that an object begins with, in the shortest form."""
        if length < len(self.short):
            return bytes([self.short[length]])
        code, width = next((c, w) for c, w in self.long.items() if length < 1 << 8 * w)
        return bytes([code]) + length.to_bytes(width, "big")


STR = LengthType("str", range(0xA0, 0xC0), {0xD9: 1, 0xDA: 2, 0xDB: 4})
BIN = LengthType("bin", range(0), {0xC4: 1, 0xC5: 2, 0xC6: 4})
ARRAY = LengthType("array", range(0x90, 0xA0), {0xDC: 2, 0xDD: 4})
MAP = LengthType("map", range(0x80, 0x90), {0xDE: 2, 0xDF: 4})


class ObjectCursor(kit.Cursor):
    """Reads objects one after the other; only the types that are expected.

    ``msgpack.Unpacker`` cannot jump over data, and its position is not that in the file.
    """

    __slots__ = ()

    def uint32(self, what: str) -> int:
        """Read an integer of type uint32, the only one that primitiv knows."""
        found: int = _INTEGER.unpack(self._number(_UINT32, what))[1]
        return found

    def uint32s(self, count: int, what: str) -> list[int]:
        """Read some integers that follow each other."""
        if 5 * count <= self.left:
            found = self.take(5 * count, what)
            if found[::5].count(_UINT32) == count:
                return list(unpack(">" + "xI" * count, found))
            self.at -= 5 * count
        # One at a time, to find which is wrong.
        return [self.uint32(what) for _ in range(count)]

    def float32(self, what: str) -> float:
        """Read a number of type float32."""
        found: float = _FLOAT.unpack(self._number(_FLOAT32, what))[1]
        return found

    def length(self, kind: LengthType, what: str) -> int:
        """Read the length that an object begins with."""
        code = self.take(1, what)[0]
        if code in kind.short:
            return code - kind.short.start
        self.at -= 1
        width = kind.long.get(code)
        if width is None:
            raise self._mistyped(what, code, kind.name)
        return int.from_bytes(self.take(1 + width, what)[1:], "big")

    def string(self, what: str) -> str:
        """Read a str; a byte that is not UTF-8 becomes a lone surrogate."""
        nbytes = self.length(STR, what)
        if nbytes > _LONGEST_TEXT:
            self._require(nbytes, what)
            reason = f"{what}: {nbytes} bytes, but at most {_LONGEST_TEXT} are read"
            raise UnsupportedError(reason, offset=self.at, rule="TextLength")
        return self.take(nbytes, what).decode("utf-8", "surrogateescape")

    def _number(self, code: int, what: str) -> bytes:
        found = self.take(1, what)[0]
        self.at -= 1
        if found != code:
            raise self._mistyped(what, found, f"0x{code:02x} ({_NAMES[code]})")
        return self.take(5, what)

    def _mistyped(self, what: str, code: int, expected: str) -> FormatError:
        reason = f"{what}: type byte 0x{code:02x}, expected {expected}"
        return FormatError(reason, offset=self.at, rule="Type")

    def _require(self, nbytes: int, what: str) -> None:
        if nbytes > self.left:
            reason = f"{what}: {nbytes} bytes, but the file ends after {self.left}"
            raise FormatError(reason, offset=self.at, rule="EndOfFile", hint=kit.TRUNCATED)


def packed_uint32(*numbers: int) -> bytes:
    """Write integers, each always in 5 bytes."""
    return b"".join([_INTEGER.pack(_UINT32, number) for number in numbers])


def packed_float32(number: float) -> bytes:
    """Write a number, always in 5 bytes."""
    return _FLOAT.pack(_FLOAT32, number)


def packed_string(text: str) -> bytes:
    """Write a str."""
    data = text.encode("utf-8", "surrogateescape")
    return STR.pack(len(data)) + data
