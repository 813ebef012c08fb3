"""What a file is to the rest of the package: a name, a size, an identity, and random reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import TYPE_CHECKING

from xckpt.errors import FormatError
from xckpt.storage.ranges import merge, split

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from xckpt.index import Shard

__all__ = ["Blocks", "Source"]

_GAP = 1 << 20


class Source(ABC):
    """The bytes of one file, local or remote.

    A source is a light reference: it pickles by path or URL and identity, never by content
    (bytes in memory excepted). What is open for it, a descriptor or a memory map, belongs to the
    process and is shared by all equal sources in it.

    Attributes
    ----------
    name : str
        Absolute path or URL, for messages and for ``encoding["source"]``.
    size : int
        Size in bytes when it was opened.
    identity : hashable
        What tells this version of the file from others: size, time, inode, or ETag. Two sources
        with equal names and identities hold equal bytes.
    """

    __slots__ = ("identity", "name", "size")

    name: str
    size: int
    identity: Hashable

    @abstractmethod
    def read(self, offset: int, nbytes: int) -> memoryview:
        """Read a range of bytes into memory of its own."""

    @property
    def worth_skipping(self) -> int | None:
        """How many unwanted bytes cost as much as a read; None where reads are not to be split."""
        return None

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a range of bytes without a copy where the file is mapped, else read it."""
        return self.read(offset, nbytes)

    def read_into(self, offset: int, memory: memoryview) -> None:
        """Read a range of bytes into memory that is there already."""
        memory[:] = self.view(offset, len(memory))

    def read_pieces(self, offsets: Sequence[int], nbytes: int, memory: memoryview) -> None:
        """Read ranges of `nbytes` bytes each, one after another, into memory for all of them."""
        for number, offset in enumerate(offsets):
            self.read_into(offset, memory[number * nbytes : (number + 1) * nbytes])

    def blocks(self, offset: int, nbytes: int, block_nbytes: int = 1 << 20) -> Iterator[memoryview]:
        """Return a range of bytes block by block; each is valid until the next one is asked for."""
        data = self.view(offset, nbytes)
        for start in range(0, nbytes, block_nbytes):
            yield data[start : start + block_nbytes]

    def read_ranges(
        self, ranges: Sequence[tuple[int, int]], *, gap: int | None = None
    ) -> list[memoryview]:
        """Read several ranges of bytes with few requests."""
        for offset, nbytes in ranges:
            self._check_range(offset, nbytes)
        if gap is None:
            gap = self.worth_skipping or _GAP
        spans = merge(ranges, gap)
        blocks = self._read_each([(span.start, span.nbytes) for span in spans])
        return split(ranges, spans, blocks)

    def check(self) -> None:  # noqa: B027  bytes in memory do not change
        """Raise `FileChangedError` if the file is no longer the one that was opened."""

    def close(self) -> None:  # noqa: B027  nothing is open for bytes in memory
        """Let go of what this process has open for the file; the next read opens it again."""

    def reading_header(self) -> AbstractContextManager[Source]:
        """Return a source to read the header of the file from, for as long as that takes."""
        return nullcontext(self)

    @abstractmethod
    def sibling(self, name: str) -> Source:
        """Open another file by its path relative to the folder of this one."""

    def shard(self, label: str, shard: Shard) -> Source:
        """Return a file that this one refers to."""
        from xckpt.storage.shard import ShardSource  # which is a Source

        return ShardSource(self, shard, label)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Source) or type(self) is not type(other):
            return NotImplemented
        return (self.name, self.identity) == (other.name, other.identity)

    def __hash__(self) -> int:
        return hash((self.name, self.identity))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def _check_range(self, offset: int, nbytes: int) -> None:
        if not 0 <= offset <= offset + nbytes <= self.size:
            raise FormatError(
                f"the {nbytes} bytes from here on are not in the file, which has {self.size}",
                path=self.name,
                offset=offset,
            )

    def _read_each(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        return [self.read(offset, nbytes) for offset, nbytes in ranges]


class Blocks:
    """A range of bytes of a file that is read block by block; a block is valid until the next."""

    __slots__ = ("nbytes", "offset", "source")

    def __init__(self, source: Source, offset: int, nbytes: int) -> None:
        source._check_range(offset, nbytes)  # noqa: SLF001  before anything is made of that size
        self.source, self.offset, self.nbytes = source, offset, nbytes

    def __len__(self) -> int:
        return self.nbytes

    def __iter__(self) -> Iterator[memoryview]:
        return self.source.blocks(self.offset, self.nbytes)
