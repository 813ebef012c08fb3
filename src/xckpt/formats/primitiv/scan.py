"""A scan of MessagePack objects that jumps over long ones without reading them.

``msgpack.Unpacker`` cannot: it hands over what it read, and its position is not that in the file.
"""

from __future__ import annotations

from struct import unpack
from typing import TYPE_CHECKING, NamedTuple

from xckpt.errors import FormatError, UnsupportedError

if TYPE_CHECKING:
    from xckpt.formats import Readable

__all__ = ["ARRAY", "BIN", "FLOAT32", "MAP", "STR", "UINT32", "Kind", "Scan"]

_WINDOW = 4096
# Where values are small, reading some of them costs less than a read for each header.
_LARGEST_NEAR_STEP, _STEPS_AHEAD = 1 << 15, 4
# What the bytes of damaged files may claim is no reason to read them as one name.
_LONGEST_TEXT = 1 << 24
UINT32 = 0xCE
FLOAT32 = 0xCA


class Kind(NamedTuple):
    """A MessagePack type that begins with a length.

    Parameters
    ----------
    name : str
        As the specification of MessagePack has it.
    short : range
        Type bytes that are the length too, from 0.
    long : dict of int to int
        Other type bytes, and the number of bytes of the length that follows.
    """

    name: str
    short: range
    long: dict[int, int]


_SHORT_TEXT = range(0xA0, 0xC0)
STR = Kind("str", _SHORT_TEXT, {0xD9: 1, 0xDA: 2, 0xDB: 4})
BIN = Kind("bin", range(0), {0xC4: 1, 0xC5: 2, 0xC6: 4})
ARRAY = Kind("array", range(0x90, 0xA0), {0xDC: 2, 0xDD: 4})
MAP = Kind("map", range(0x80, 0x90), {0xDE: 2, 0xDF: 4})


class Scan:
    """A position in a file, and a window on the bytes from there on.

    Parameters
    ----------
    source : Readable
        The file.
    """

    __slots__ = ("_source", "_start", "_window", "at", "size")

    def __init__(self, source: Readable) -> None:
        self.at = 0
        self.size = source.size
        self._source = source
        self._start = 0
        self._window = b""

    def uint32(self, what: str) -> int:
        """Read an integer of type uint32, the only one that primitiv knows."""
        return int.from_bytes(self._number(UINT32, "uint32", what), "big")

    def uint32s(self, count: int, what: str) -> list[int]:
        """Read some integers that follow each other; see `uint32`."""
        found = self._peek(5 * count)
        if found[::5].count(UINT32) == count and len(found) == 5 * count:
            self.at += 5 * count
            return list(unpack(">" + "xI" * count, found))
        # One at a time, to find which is wrong.
        return [self.uint32(what) for _ in range(count)]

    def float32(self, what: str) -> float:
        """Read a number of type float32; see `uint32`."""
        value: float = unpack(">f", self._number(FLOAT32, "float32", what))[0]
        return value

    def length(self, kind: Kind, what: str) -> int:
        """Read the length that an object begins with."""
        begin = self.at - self._start
        # Most are short and in the window: the rest of this method is for the others.
        code = self._window[begin] if begin < len(self._window) else self._first(what)
        if code in kind.short:
            self.at += 1
            return code - kind.short.start
        width = kind.long.get(code)
        if width is None:
            raise self._mistyped(what, code, kind.name)
        found = self._peek(1 + width)
        if len(found) <= width:
            raise self._ended(what)
        self.at += 1 + width
        return int.from_bytes(found[1:], "big")

    def text(self, what: str) -> str:
        """Read a str; a byte that is not UTF-8 becomes a lone surrogate."""
        begin = self.at - self._start
        window = self._window
        # Most are short and in the window; a call for each step would take three times as long.
        if begin < len(window) and window[begin] in _SHORT_TEXT:
            end = begin + 1 + window[begin] - _SHORT_TEXT.start
            if end <= len(window):
                self.at = self._start + end
                return window[begin + 1 : end].decode("utf-8", "surrogateescape")
        return self._long_text(what).decode("utf-8", "surrogateescape")

    def skip(self, nbytes: int, what: str) -> int:
        """Jump over bytes, all of which must be in the file."""
        start = self.at
        if nbytes > self.size - start:
            raise FormatError(
                f"{what}: {nbytes} bytes, but the file ends after {self.size - start}",
                offset=start,
                rule="EndOfFile",
                hint="The file may be truncated",
            )
        self.at += nbytes
        return start

    def hint(self, offset: int) -> str | None:
        """Return what may have led to an error there, where the bytes around it show."""
        start = max(0, offset - 5)
        around = bytes(self._source.read(start, min(12, self.size - start)))
        if b"\r\n" not in around:
            return None
        return (
            "Bytes 0d 0a are here: the file may have been written or copied in a text mode that "
            "ends lines so, as primitiv does on Windows; what it held is not certain any more"
        )

    def _peek(self, nbytes: int) -> bytes:
        """Return the next bytes, fewer at the end of the file, and stay where it is."""
        begin = self.at - self._start
        found = self._window[begin : begin + nbytes]
        if len(found) == nbytes or self._start + len(self._window) == self.size:
            return found
        step = self.at - self._start
        window = max(_WINDOW, _STEPS_AHEAD * step) if step <= _LARGEST_NEAR_STEP else _WINDOW
        self._start = self.at
        wanted = min(max(nbytes, window), self.size - self.at)
        self._window = bytes(self._source.read(self.at, wanted))
        return self._window[:nbytes]

    def _long_text(self, what: str) -> bytes:
        nbytes = self.length(STR, what)
        found = self._peek(min(nbytes, _LONGEST_TEXT))
        start = self.skip(nbytes, what)
        if nbytes > _LONGEST_TEXT:
            raise UnsupportedError(
                f"{what}: {nbytes} bytes, but at most {_LONGEST_TEXT} are read",
                offset=start,
                rule="TextLength",
            )
        return found

    def _first(self, what: str) -> int:
        found = self._peek(1)
        if not found:
            raise self._ended(what)
        return found[0]

    def _number(self, code: int, name: str, what: str) -> bytes:
        found = self._peek(5)
        if found and found[0] != code:
            raise self._mistyped(what, found[0], f"0x{code:02x} ({name})")
        if len(found) < 5:
            raise self._ended(what)
        self.at += 5
        return found[1:]

    def _mistyped(self, what: str, code: int, expected: str) -> FormatError:
        return FormatError(
            f"{what}: type byte 0x{code:02x}, expected {expected}", offset=self.at, rule="Type"
        )

    def _ended(self, what: str) -> FormatError:
        return FormatError(
            f"{what}: the file ends here",
            offset=self.at,
            rule="EndOfFile",
            hint="The file may be truncated",
        )
