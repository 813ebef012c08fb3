"""Deflate streams of unknown origin (RFC 1951, without a header), as zip files have them.

Sizes that a file claims are never trusted: the caller says how many bytes there must be, and no
more are decoded. All errors are `FormatError` with ``rule="Encoding"``.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

from xckpt.errors import FormatError
from xckpt.storage.limits import require_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xckpt.storage.source import Blocks

    Stored = memoryview | bytes | Blocks

__all__ = ["decompress", "decompress_range", "decompressed_blocks"]

# The densest stream has 258 bytes for each pair of bits, after a few bytes for its codes.
_HIGHEST_RATIO, _LARGEST_HEAD = 1032, 1 << 10
# Read and decoded at a time: zlib copies what it has not read yet with each call.
_STORED_NBYTES, _DECODED_NBYTES = 1 << 16, 1 << 20


def decompress(stored: Stored, nbytes: int) -> memoryview:
    """Decode a whole stream, which must have exactly so many bytes."""
    stream = _Stream(stored, nbytes)
    decoded = stream.take(nbytes)
    if stream.fill(memoryview(bytearray(1))) or not stream.ended:
        raise _malformed(f"a deflate stream does not end after {nbytes} bytes")
    return decoded


def decompress_range(stored: Stored, start: int, stop: int) -> memoryview:
    """Decode a stream from its beginning up to `stop`, in memory for what is after `start`."""
    stream = _Stream(stored, stop)
    stream.skip(start)
    return stream.take(stop - start)


def decompressed_blocks(
    stored: Stored, nbytes: int, block_nbytes: int, skip: int = 0
) -> Iterator[memoryview]:
    """Decode so many bytes after the first `skip` ones block by block, in memory of constant size.

    The last block may be smaller. After an error the blocks before it have been given.
    """
    stream = _Stream(stored, skip + nbytes)
    stream.skip(skip)
    for start in range(0, nbytes, block_nbytes):
        yield stream.take(min(block_nbytes, nbytes - start))


class _Stream:
    """Decodes a stream piece by piece, of which `nbytes` bytes are wanted in all."""

    def __init__(self, stored: Stored, nbytes: int) -> None:
        if nbytes > len(stored) * _HIGHEST_RATIO + _LARGEST_HEAD:
            raise _malformed(f"{len(stored)} bytes of deflate cannot decode to {nbytes}")
        self._blocks: Iterator[memoryview] = (
            iter([memoryview(stored).cast("B")])
            if isinstance(stored, memoryview | bytes)
            else iter(stored)
        )
        self._block = memoryview(b"")
        self._zlib = zlib.decompressobj(-zlib.MAX_WBITS)

    @property
    def ended(self) -> bool:
        """Whether the stream said that it ends."""
        return self._zlib.eof

    def skip(self, nbytes: int) -> None:
        """Decode bytes that nobody wants."""
        for start in range(0, nbytes, _DECODED_NBYTES):
            self.take(min(_DECODED_NBYTES, nbytes - start))

    def take(self, nbytes: int) -> memoryview:
        """Decode exactly so many bytes, in memory of their own."""
        require_memory(nbytes)
        decoded = np.empty(nbytes, np.uint8).data
        found = self.fill(decoded)
        if found < nbytes:
            raise _malformed(f"a deflate stream ends {nbytes - found} bytes too early")
        return decoded

    def fill(self, memory: memoryview) -> int:
        """Decode into memory; fewer bytes than fit are the last ones."""
        done = 0
        while done < len(memory) and not self._zlib.eof:
            data = self._zlib.unconsumed_tail
            if not data:
                if not self._block:
                    self._block = next(self._blocks, self._block)
                data = bytes(self._block[:_STORED_NBYTES])
                self._block = self._block[_STORED_NBYTES:]
            try:
                piece = self._zlib.decompress(data, min(len(memory) - done, _DECODED_NBYTES))
            except zlib.error as error:
                raise _malformed(f"a deflate stream does not decode: {error}") from error
            if not data and not piece:
                break
            memory[done : done + len(piece)] = piece
            done += len(piece)
        return done


def _malformed(reason: str) -> FormatError:
    return FormatError(reason, rule="Encoding")
