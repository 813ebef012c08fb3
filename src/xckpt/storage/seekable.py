"""The encoding ``zstd-seekable``: frames of Zstandard with a table of their sizes.

The format is ``zt.zstd-seekable/1`` of zTensor 2, which is contrib/seekable_format of
facebook/zstd: frames, then a skippable frame with the sizes of all of them. Any range is decoded
from the frames that overlap it.

=================  ===================================================================
bytes              table
=================  ===================================================================
4                  ``5E 2A 4D 18``
4                  size of the table after this field
8 or 12, n times   stored size, decoded size, low 32 bits of XXH64 of the decoded bytes
4                  n
1                  bit 7: entries have checksums; bits 6 to 2 are 0
4                  ``B1 EA 92 8F``
=================  ===================================================================

All integers are little-endian. A frame has at most 16 MiB of decoded bytes, and all but the last
have equally many.

`encoder` compresses new parts in any encoding, by its name.
"""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from struct import pack, unpack, unpack_from
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from xckpt.errors import FormatError, UnsupportedError, shown
from xckpt.storage.encodings import ZstdDecoder, allocate, malformed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

T = TypeVar("T")

_TABLE_MAGIC = 0x184D2A5E
_TABLE_HEAD_NBYTES = 8
_FOOTER_MAGIC = 0x8F92EAB1
_FOOTER_NBYTES = 9
_TAIL_NBYTES = 4096
_LARGEST_FRAME = 16 << 20
_RESERVED_BITS = 0b0111_1100
_CHECKSUM_BIT = 0b1000_0000

# Above this size two threads halve the time; below, starting them costs as much as they save.
_THREADS_FROM_NBYTES = 8 << 20
_MOST_THREADS = 4


class SeekTable(NamedTuple):
    """Offsets of the frames of a seekable stream, and of the end of the last one."""

    stored: NDArray[np.uint64]  # offsets in the stream
    decoded: NDArray[np.uint64]  # offsets in the decoded bytes
    checksums: NDArray[np.uint32] | None  # low 32 bits of XXH64 of each decoded frame


def read_seek_table(
    read: Callable[[int, int], memoryview], offset: int, nbytes: int, decoded_nbytes: int
) -> SeekTable:
    """Read and check the seek table at the end of a seekable stream."""
    end = offset + nbytes
    if nbytes < _TABLE_HEAD_NBYTES + _FOOTER_NBYTES:
        raise malformed(f"{nbytes} bytes are too few for a seek table", offset)
    tail = read(end - min(nbytes, _TAIL_NBYTES), min(nbytes, _TAIL_NBYTES))
    footer = end - _FOOTER_NBYTES
    count, flags, magic = unpack("<IBI", tail[-_FOOTER_NBYTES:])
    if magic != _FOOTER_MAGIC:
        raise malformed(f"a seek table ends with {_FOOTER_MAGIC:#x}, found {magic:#x}", footer + 5)
    if flags & _RESERVED_BITS:
        raise malformed(f"reserved bits are set in a seek table: {flags:#010b}", footer + 4)
    width = 3 if flags & _CHECKSUM_BIT else 2
    size = _TABLE_HEAD_NBYTES + count * width * 4 + _FOOTER_NBYTES
    if size > nbytes:
        raise malformed(f"a seek table of {count} frames does not fit in {nbytes} bytes", offset)
    table = tail[len(tail) - size :] if size <= len(tail) else read(end - size, size)
    if [*unpack_from("<II", table)] != [_TABLE_MAGIC, size - _TABLE_HEAD_NBYTES]:
        raise malformed(f"no seek table of {count} frames begins here", end - size)
    entries = np.frombuffer(table, "<u4", count * width, _TABLE_HEAD_NBYTES).reshape(count, width)
    _check_entries(entries, nbytes - size, decoded_nbytes, end - size)
    checksums = entries[:, 2].astype(np.uint32) if width == 3 else None
    offsets = np.zeros((2, count + 1), np.uint64)
    np.cumsum(entries[:, :2].T, axis=1, dtype=np.uint64, out=offsets[:, 1:])
    return SeekTable(offsets[0], offsets[1], checksums)


def _check_entries(
    entries: NDArray[np.uint32], stored_nbytes: int, decoded_nbytes: int, offset: int
) -> None:
    stored, decoded = entries[:, 0], entries[:, 1]
    expected = {"stored": stored_nbytes, "decoded": decoded_nbytes}
    for (kind, size), sizes in zip(expected.items(), (stored, decoded), strict=True):
        total = int(sizes.sum(dtype=np.uint64))
        if total != size:
            raise malformed(f"the {kind} sizes of frames add up to {total}, not {size}", offset)
    if len(entries) == 0:
        return
    if not stored.all() or not decoded.all():
        raise malformed("a seek table has an empty frame", offset)
    size = int(decoded[0])
    if size > _LARGEST_FRAME:
        raise malformed(f"a frame has {size} bytes, more than {_LARGEST_FRAME}", offset)
    if (decoded[:-1] != size).any() or decoded[-1] > size:
        raise malformed("frames before the last one differ in size", offset)


def read_frames(
    read: Callable[[int, int], memoryview], offset: int, table: SeekTable, start: int, stop: int
) -> memoryview:
    """Decode a range of a seekable stream, reading only the frames that overlap it."""
    from xxhash import xxh64_intdigest

    if not 0 <= start <= stop <= int(table.decoded[-1]):
        raise ValueError(f"{start}:{stop} is not in 0:{int(table.decoded[-1])}")
    if start == stop:
        return memoryview(b"")
    first = int(np.searchsorted(table.decoded, start, "right")) - 1
    last = int(np.searchsorted(table.decoded, stop, "left"))
    ends = table.stored[first : last + 1].tolist()
    decoded_ends = table.decoded[first : last + 1].tolist()
    data = read(offset + ends[0], ends[-1] - ends[0])
    nbytes = decoded_ends[-1] - decoded_ends[0]
    if nbytes > ZstdDecoder.most(len(data)):
        raise malformed(f"{len(data)} bytes of zstd cannot decode to {nbytes}")
    decoded = allocate(nbytes)

    def decode(number: int) -> None:
        begin, end = (position - ends[0] for position in ends[number : number + 2])
        low, high = (position - decoded_ends[0] for position in decoded_ends[number : number + 2])
        out = decoded[low:high]
        frame_offset = offset + ends[number]
        try:
            ZstdDecoder.decompress(data[begin:end], len(out), out)
        except FormatError as error:
            error.offset = frame_offset
            raise
        if table.checksums is None:
            return
        expected = int(table.checksums[first + number])
        checksum = xxh64_intdigest(out.data) & 0xFFFFFFFF
        if checksum != expected:
            text = f"a frame has the checksum {checksum:#x}, but its table states {expected:#x}"
            raise malformed(text, frame_offset)

    workers = min(_MOST_THREADS, os.cpu_count() or 1, last - first)
    _map(decode, range(last - first), workers if nbytes >= _THREADS_FROM_NBYTES else 1)
    return decoded.data[start - decoded_ends[0] : stop - decoded_ends[0]]


def _map(function: Callable[[Any], T], items: Sequence[Any], threads: int) -> list[T]:
    if min(threads, len(items)) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items))) as executor:
        return list(executor.map(function, items))


class SeekableEncoder:
    """Encoder for frames of equal size, which contain checksums, so that the table needs none."""

    # As in the reference implementation; reading one row of a tensor decodes a whole frame.
    _FRAME_NBYTES = 1 << 20

    def __init__(self, level: int, threads: int) -> None:
        self._level = level
        self._threads = threads
        self._pending = b""
        self._sizes: list[tuple[int, int]] = []

    def add(self, data: Any) -> bytes:
        """Compress more bytes; see `xckpt.storage.seekable.Encoder`."""
        view, size = memoryview(data).cast("B"), self._FRAME_NBYTES
        if self._pending:
            view = memoryview(self._pending + bytes(view))
        end = len(view) // size * size
        self._pending = bytes(view[end:])
        return self._compress([view[start : start + size] for start in range(0, end, size)])

    def end(self) -> bytes:
        """Finish the stream with its table; see `xckpt.storage.seekable.Encoder`."""
        last = self._compress([memoryview(self._pending)] if self._pending else [])
        entries = np.array(self._sizes, "<u4").tobytes()
        head = pack("<II", _TABLE_MAGIC, len(entries) + _FOOTER_NBYTES)
        return last + head + entries + pack("<IBI", len(self._sizes), 0, _FOOTER_MAGIC)

    def _compress(self, blocks: list[memoryview]) -> bytes:
        import zstandard

        def compress(block: memoryview) -> bytes:
            compressor = zstandard.ZstdCompressor(level=self._level, write_checksum=True)
            return compressor.compress(block)

        frames = _map(compress, blocks, self._threads)
        self._sizes += [(len(f), len(b)) for f, b in zip(frames, blocks, strict=True)]
        return b"".join(frames)


DEFAULT_LEVEL = 3


class Encoder(Protocol):
    """Compressor for one part."""

    def add(self, data: Any) -> bytes:
        """Compress more bytes, and return the bytes of the stream that are ready."""

    def end(self) -> bytes:
        """Finish the stream, and return its remaining bytes."""


def new_encoder(
    encoding: str, nbytes: int, *, level: int = DEFAULT_LEVEL, threads: int = 1
) -> Encoder:
    """Return an encoder for a part of `nbytes` bytes."""
    if encoding == "zstd":
        import zstandard

        # Worker threads cost memory and time to start, and change the compressed bytes.
        compressor = zstandard.ZstdCompressor(level=level, threads=threads if threads > 1 else 0)
        # One frame with its content size, because many readers require it.
        return _StreamEncoder(compressor.compressobj(size=nbytes))
    if encoding == "deflate":
        return _StreamEncoder(zlib.compressobj(min(level, 9), wbits=-zlib.MAX_WBITS))
    if encoding == "zstd-seekable":
        return SeekableEncoder(level, threads)
    raise UnsupportedError(
        f"the compression {shown(encoding)} is unsupported",
        rule="Encoding",
        hint="Supported are zstd, zstd-seekable and deflate",
    )


class _StreamEncoder:
    def __init__(self, compressor: Any) -> None:
        self.add: Callable[[Any], bytes] = compressor.compress
        self.end: Callable[[], bytes] = compressor.flush
