"""Fields of protobuf messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xckpt.errors import FormatError, UnsupportedError
from xckpt.formats import kit

if TYPE_CHECKING:
    from collections.abc import Iterator

VARINT, FIXED_64, BYTES, GROUP, END, FIXED_32 = range(6)
# Bytes after the tag, or after the size of bytes.
_NBYTES = {VARINT: 0, FIXED_64: 8, BYTES: 0, FIXED_32: 4}
_MOST_GROUPS = 100
_LONGEST_TEXT = 1 << 16


class Wire(kit.Cursor):
    """A reader of protobuf fields."""

    __slots__ = ()

    def integer(self) -> int:
        """Read a number, whose bits after the 64th do not count."""
        return self.varint("a number") & 0xFFFFFFFFFFFFFFFF

    def entries(self) -> Iterator[tuple[int, int, int]]:
        """Yield number, wire type and value of the fields of the area that was entered."""
        # The value of bytes is their size; the reader is at their start, and goes on after them.
        # The value of a fixed number is its offset. Groups are skipped.
        groups: list[int] = []
        while self.left or groups:
            offset = self.at
            tag = self.integer()
            number, wire = tag >> 3, tag & 7
            if wire == GROUP or (wire == END and groups):
                if wire == GROUP and len(groups) < _MOST_GROUPS:
                    groups.append(number)
                elif wire == GROUP or groups.pop() != number:
                    raise FormatError("groups are nested wrongly", offset=offset, rule="Group")
                continue
            if not number or wire not in _NBYTES:
                reason = f"no field has number {number} and wire type {wire}"
                raise FormatError(reason, offset=offset, rule="Wire")
            value = self.integer() if wire in {VARINT, BYTES} else self.at
            nbytes = value if wire == BYTES else _NBYTES[wire]
            self.require(nbytes, "a field")
            end = self.at + nbytes
            if not groups:
                yield number, wire, value
            self.at = end

    def string(self, nbytes: int, label: str) -> str:
        """Read a text of bounded size, with escapes for bytes that are not UTF-8."""
        if nbytes > _LONGEST_TEXT:
            reason = f"{label} has {nbytes} bytes, more than {_LONGEST_TEXT}"
            raise UnsupportedError(reason, offset=self.at, rule="TextLength")
        return self.take(nbytes, label).decode(errors="backslashreplace")

    def pair(self, nbytes: int) -> tuple[str, str, int]:
        """Read the fields 1 and 2 of a small message: texts, or for field 2 a number."""
        key, value, number = "", "", 0
        with self.inside(nbytes, "a message"):
            for entry, wire, size in self.entries():
                if entry == 1 and wire == BYTES:
                    key = self.string(size, "a key")
                elif entry == 2 and wire == BYTES:
                    value = self.string(size, "a value")
                elif entry == 2 and wire == VARINT:
                    number = signed(size)
        return key, value, number


def signed(value: int, bits: int = 64) -> int:
    """Return an unsigned number as a signed one."""
    return value - (1 << bits) if value >> (bits - 1) else value
