"""Files in memory, for tests."""

from __future__ import annotations

import itertools

from xckpt.errors import FormatError
from xckpt.storage import Source

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

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Read and count."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise FormatError(f"{nbytes} bytes are not in a file of {self.size}", offset=offset)
        self.reads.append((offset, nbytes))
        return memoryview(self.data)[offset : offset + nbytes]

    def sibling(self, name: str) -> Source:
        """There is no folder."""
        raise FileNotFoundError(name)
