"""Seekable Zstandard streams: any range is decoded from the frames that overlap it.

The layout is ``zt.zstd-seekable/1`` of zTensor 2, which is that of contrib/seekable_format of
facebook/zstd: frames, then a skippable frame with the sizes of all of them.

=================  ===================================================================
bytes              table
=================  ===================================================================
4                  ``5E 2A 4D 18``
4                  size of the rest of the table
8 or 12, n times   stored size, decoded size, low 32 bits of XXH64 of the decoded bytes
4                  n
1                  bit 7: checksums are there; bits 6 to 2 are 0
4                  ``B1 EA 92 8F``
=================  ===================================================================

All integers are little-endian. A frame has at most 16 MiB of decoded bytes, and all but the last
have equally many. All errors are `FormatError` with ``rule="Encoding"``.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from xckpt.errors import FormatError
from xckpt.storage.encodings.zstd import allocate, decompress_into, malformed

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["SeekTable", "read_frames", "read_seek_table", "read_seekable"]

_TABLE_MAGIC = 0x184D2A5E
_TABLE_HEAD_NBYTES = 8
_FOOTER_MAGIC = 0x8F92EAB1
_FOOTER_NBYTES = 9
_TAIL_NBYTES = 4096
_LARGEST_FRAME = 16 << 20
_RESERVED_BITS = 0b0111_1100
_CHECKSUM_BIT = 0b1000_0000

# From here on two threads halve the time; below, starting them costs what they save.
_THREADS_FROM_NBYTES = 8 << 20
_MOST_THREADS = 4


@dataclass(frozen=True, slots=True, eq=False)
class SeekTable:
    """Where the frames of a seekable stream begin, stored and decoded.

    Parameters
    ----------
    stored, decoded : numpy.ndarray of uint64
        Offset of each frame from the start of the stream, and of the end of the last one.
    checksums : numpy.ndarray of uint32 or None
        Low 32 bits of XXH64 of each decoded frame, where the file has them.
    """

    stored: NDArray[np.uint64]
    decoded: NDArray[np.uint64]
    checksums: NDArray[np.uint32] | None


def read_seek_table(
    read: Callable[[int, int], memoryview], offset: int, nbytes: int, decoded_nbytes: int
) -> SeekTable:
    """Read and check the seek table at the end of a seekable stream."""
    end = offset + nbytes
    if nbytes < _TABLE_HEAD_NBYTES + _FOOTER_NBYTES:
        raise malformed(f"{nbytes} bytes are too few for a seek table", offset)
    tail = read(end - min(nbytes, _TAIL_NBYTES), min(nbytes, _TAIL_NBYTES))
    count, width = _parse_footer(tail[-_FOOTER_NBYTES:], end - _FOOTER_NBYTES)
    size = _TABLE_HEAD_NBYTES + count * width * 4 + _FOOTER_NBYTES
    if size > nbytes:
        raise malformed(f"a seek table of {count} frames does not fit in {nbytes} bytes", offset)
    table = tail[len(tail) - size :] if size <= len(tail) else read(end - size, size)
    magic, rest = np.frombuffer(table, "<u4", 2).tolist()
    if (magic, rest) != (_TABLE_MAGIC, size - _TABLE_HEAD_NBYTES):
        raise malformed(f"no seek table of {count} frames begins here", end - size)
    entries = np.frombuffer(table, "<u4", count * width, _TABLE_HEAD_NBYTES).reshape(count, width)
    _check_entries(entries, nbytes - size, decoded_nbytes, end - size)
    checksums = entries[:, 2].astype(np.uint32) if width == 3 else None
    return SeekTable(_offsets(entries[:, 0]), _offsets(entries[:, 1]), checksums)


def read_frames(
    read: Callable[[int, int], memoryview], offset: int, table: SeekTable, start: int, stop: int
) -> memoryview:
    """Decode a range of a seekable stream, from the frames that overlap it."""
    if not 0 <= start <= stop <= int(table.decoded[-1]):
        raise ValueError(f"{start}:{stop} is not in 0:{int(table.decoded[-1])}")
    if start == stop:
        return memoryview(b"")
    first = int(np.searchsorted(table.decoded, start, "right")) - 1
    last = int(np.searchsorted(table.decoded, stop, "left"))
    begin, end = int(table.stored[first]), int(table.stored[last])
    stored = read(offset + begin, end - begin)
    begin, end = int(table.decoded[first]), int(table.decoded[last])
    decoded = allocate(stored, end - begin)
    _Run(table, first, offset, stored, decoded).decode(range(first, last))
    return decoded.data[start - begin : stop - begin]


def read_seekable(  # noqa: PLR0917  where the stream is, and which part of it
    read: Callable[[int, int], memoryview],
    offset: int,
    nbytes: int,
    decoded_nbytes: int,
    start: int,
    stop: int,
) -> memoryview:
    """Decode a range of a seekable stream, reading only its table and the frames needed."""
    table = read_seek_table(read, offset, nbytes, decoded_nbytes)
    return read_frames(read, offset, table, start, stop)


def _parse_footer(footer: memoryview, at: int) -> tuple[int, int]:
    """Return the number of frames and of integers for each."""
    count = int.from_bytes(footer[:4], "little")
    descriptor = footer[4]
    magic = int.from_bytes(footer[5:], "little")
    if magic != _FOOTER_MAGIC:
        raise malformed(f"a seek table ends with {_FOOTER_MAGIC:#x}, found {magic:#x}", at + 5)
    if descriptor & _RESERVED_BITS:
        raise malformed(f"reserved bits are set in a seek table: {descriptor:#010b}", at + 4)
    return count, 3 if descriptor & _CHECKSUM_BIT else 2


def _check_entries(
    entries: NDArray[np.uint32], stored_nbytes: int, decoded_nbytes: int, at: int
) -> None:
    stored, decoded = entries[:, 0], entries[:, 1]
    for what, sizes, expected in (
        ("stored", stored, stored_nbytes),
        ("decoded", decoded, decoded_nbytes),
    ):
        total = int(sizes.sum(dtype=np.uint64))
        if total != expected:
            raise malformed(f"the {what} sizes of frames add up to {total}, not {expected}", at)
    if len(entries) == 0:
        return
    if not stored.all() or not decoded.all():
        raise malformed("a seek table has an empty frame", at)
    size = int(decoded[0])
    if size > _LARGEST_FRAME:
        raise malformed(f"a frame has {size} bytes, more than {_LARGEST_FRAME}", at)
    if (decoded[:-1] != size).any() or decoded[-1] > size:
        raise malformed("frames before the last one differ in size", at)


def _offsets(sizes: NDArray[np.uint32]) -> NDArray[np.uint64]:
    offsets = np.zeros(len(sizes) + 1, np.uint64)
    np.cumsum(sizes, dtype=np.uint64, out=offsets[1:])
    return offsets


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Adjacent frames, and the memory that they are decoded into."""

    table: SeekTable
    first: int
    offset: int
    stored: memoryview
    decoded: NDArray[np.uint8]

    def decode(self, numbers: range) -> None:
        workers = min(_MOST_THREADS, os.cpu_count() or 1, len(numbers))
        if workers < 2 or len(self.decoded) < _THREADS_FROM_NBYTES:
            for number in numbers:
                self._decode_frame(number)
            return
        with ThreadPoolExecutor(workers) as threads:
            for _ in threads.map(self._decode_frame, numbers):
                pass

    def _decode_frame(self, number: int) -> None:
        start, stop = self._extent(self.table.stored, number)
        out = self.decoded[slice(*self._extent(self.table.decoded, number))]
        at = self.offset + int(self.table.stored[number])
        try:
            decompress_into(self.stored[start:stop], out)
        except FormatError as error:
            error.offset = at
            raise
        if self.table.checksums is not None:
            _check_frame(out, int(self.table.checksums[number]), at)

    def _extent(self, offsets: NDArray[np.uint64], number: int) -> tuple[int, int]:
        origin = int(offsets[self.first])
        return int(offsets[number]) - origin, int(offsets[number + 1]) - origin


def _check_frame(decoded: NDArray[np.uint8], expected: int, at: int) -> None:
    from xxhash import xxh64_intdigest

    found = xxh64_intdigest(decoded.data) & 0xFFFFFFFF
    if found != expected:
        raise malformed(f"a frame has the checksum {found:#x}, its table says {expected:#x}", at)
