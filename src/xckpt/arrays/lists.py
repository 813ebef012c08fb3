"""Long lists among the attributes of a file, which are read when they are looked at."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from xckpt.arrays.dense import elements
from xckpt.arrays.parts import PartReader
from xckpt.errors import FormatError, locating
from xckpt.index import StoredList

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from xckpt.storage import Source

__all__ = ["LazyList", "read_later"]


class LazyList(Sequence[Any]):
    """A list of numbers or texts in a file, which is not read before its entries are asked for.

    It is indexed like a list, and ``np.asarray`` takes it. A text that is not UTF-8 is bytes.
    """

    __slots__ = ("_entries", "reader", "stored")

    def __init__(self, reader: PartReader, stored: StoredList) -> None:
        self.reader = reader
        self.stored = stored
        self._entries: list[Any] | None = None

    def __len__(self) -> int:
        return self.stored.count

    def __getitem__(self, key: Any) -> Any:
        if self._entries is None:
            with locating(path=self.reader.source.name):
                self._entries = self._texts() if self.stored.length_nbytes else self._numbers()
        return self._entries[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def tolist(self) -> list[Any]:
        """Return all entries."""
        entries: list[Any] = self[:]
        return entries

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:  # noqa: FBT001, RUF100
        return np.array(self.tolist(), dtype)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LazyList) and (self.reader, self.stored) == (
            other.reader,
            other.stored,
        ):
            return True
        return isinstance(other, LazyList | list) and self.tolist() == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of lists

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return LazyList, (self.reader, self.stored)

    def __repr__(self) -> str:
        return repr(self.stored)

    def _bytes(self) -> memoryview:
        nbytes = self.reader.part.nbytes
        return self.reader.read(0, nbytes, nbytes)

    def _numbers(self) -> list[Any]:
        part = self.reader.part
        found = elements(self._bytes(), part.dtype, decode=True, byteorder=part.byteorder)
        entries: list[Any] = found.tolist()
        return entries

    def _texts(self) -> list[Any]:
        order = "<" if self.reader.part.byteorder == "little" else ">"
        length = Struct(order + {4: "I", 8: "Q"}[self.stored.length_nbytes])
        data, at = bytes(self._bytes()), 0
        found: list[Any] = []
        for _ in range(self.stored.count):
            start = at + length.size
            at = start + length.unpack_from(data, at)[0] if start <= len(data) else start
            if at > len(data):
                reason = "a list of texts is not what it was when the file was opened"
                raise FormatError(reason, offset=self.reader.part.offset, rule="Truncated")
            text = data[start:at]
            try:
                found.append(text.decode())
            except UnicodeDecodeError:
                found.append(text)
        return found


def read_later(attrs: Mapping[str, Any], sources: Mapping[str | None, Source]) -> dict[str, Any]:
    """Return attributes with lists that can be read in the place of those that are described."""
    return {
        name: LazyList(PartReader(sources[value.part.shard], value.part), value)
        if isinstance(value, StoredList)
        else value
        for name, value in attrs.items()
    }
