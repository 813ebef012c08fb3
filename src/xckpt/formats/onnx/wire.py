"""Fields of protobuf messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xckpt.errors import FormatError, UnsupportedError
from xckpt.formats import kit

if TYPE_CHECKING:
    from collections.abc import Iterator

VARINT, FIXED_64, BYTES, GROUP, END, FIXED_32 = range(6)

_MOST_GROUPS = 100
_LONGEST_TEXT = 1 << 16


class Wire(kit.Cursor):
    """A reader of protobuf fields."""

    __slots__ = ()

    def varint(self) -> int:
        """Read a number of at most 64 bits."""
        value, start = 0, self.at
        for shift in range(0, 70, 7):
            [byte] = self.take(1, "a number")
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & 0xFFFFFFFFFFFFFFFF
        raise FormatError("a number has more than 10 bytes", offset=start, rule="Varint")

    def entries(self) -> Iterator[tuple[int, int, int]]:
        """Yield number, wire type and value of the fields of the area that was entered.

        The value of bytes is their size; the reader is at their start, and goes on after them.
        """
        while self.left:
            offset = self.at
            tag = self.varint()
            number, wire = tag >> 3, tag & 7
            if wire == GROUP:
                self._skip_group(number)
                continue
            start, value = self._value(number, wire, offset)
            yield number, wire, value
            self.at = start + (value if wire == BYTES else 0)

    def _value(self, number: int, wire: int, offset: int) -> tuple[int, int]:
        """Return where a value ends, or bytes start, and the value or the size of the bytes."""
        if not number or wire not in {VARINT, FIXED_64, BYTES, FIXED_32}:
            reason = f"no field has number {number} and wire type {wire}"
            raise FormatError(reason, offset=offset, rule="Wire")
        if wire in {FIXED_64, FIXED_32}:
            value = self.at
            self.skip(8 if wire == FIXED_64 else 4, "a number")
            return self.at, value
        value = self.varint()
        if wire == BYTES:
            self.require(value, "a field")
        return self.at, value

    def _skip_group(self, number: int) -> None:
        """Skip a group, and groups in it."""
        groups = [number]
        while groups:
            offset = self.at
            tag = self.varint()
            number, wire = tag >> 3, tag & 7
            if wire == GROUP and len(groups) < _MOST_GROUPS:
                groups.append(number)
            elif wire == END and number == groups[-1]:
                groups.pop()
            elif wire in {GROUP, END}:
                raise FormatError("groups are nested wrongly", offset=offset, rule="Group")
            else:
                start, value = self._value(number, wire, offset)
                self.at = start + (value if wire == BYTES else 0)

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
