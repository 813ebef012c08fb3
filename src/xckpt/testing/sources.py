"""Files in memory, for tests."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from xckpt.storage import Source

if TYPE_CHECKING:
    from collections.abc import Sequence

_serial = itertools.count()


class CountingSource(Source):
    """Bytes in memory that count what is read of them."""

    def __init__(self, data: bytes, name: str = "memory") -> None:
        self.data = data
        self.name = name
        self.size = len(data)
        self.identity = next(_serial)
        self.reads: list[tuple[int, int]] = []

    @property
    def nbytes_read(self) -> int:
        """Bytes read so far."""
        return sum(nbytes for _, nbytes in self.reads)

    def read_into(self, offsets: Sequence[int], memory: memoryview) -> None:
        """Read and count."""
        nbytes = len(memory) // len(offsets)
        for number, offset in enumerate(offsets):
            self.check_range(offset, nbytes)
            self.reads.append((offset, nbytes))
            data = memoryview(self.data)[offset : offset + nbytes]
            memory[number * nbytes : (number + 1) * nbytes] = data

    def sibling(self, name: str) -> Source:
        """There is no folder."""
        raise FileNotFoundError(name)
