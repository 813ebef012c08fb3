r"""Encodings of parts: how stored bytes become decoded ones, and the other way round.

What is decoded may be of unknown origin. Sizes that a stream claims are never trusted: the caller
says how many bytes there must be, and no more are decoded. All errors are `FormatError` with
``rule="Encoding"``, but for what does not fit in memory.

``deflate`` is a stream of RFC 1951 without a header, as zip files have them.

``zstd`` is a Zstandard stream: any number of frames, some of them skippable, with or without a
content size. A frame (RFC 8878, section 3.1.1) is a header, which may state the size of its
content; blocks; and 4 bytes of a checksum, where the header says so::

    block         3 bytes, little-endian: bit 0 marks the last one, bits 1 and 2 are its type, the
                  rest its size; of type 1 (one byte, repeated) that byte alone is stored
    skippable     50 2A 4D 18 to 5F 2A 4D 18, size u32, so many bytes

``zstd-seekable`` is ``zt.zstd-seekable/1`` of zTensor 2, which is contrib/seekable_format of
facebook/zstd: frames, then a skippable frame with the sizes of all of them. Any range is decoded
from the frames that overlap it.

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
have equally many.
"""

from __future__ import annotations

import os
import zlib
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import chain
from struct import pack, unpack, unpack_from
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np

from xckpt.errors import FormatError, UnsupportedError, shown
from xckpt.storage.limits import require_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from xckpt.storage.digests import PassingBytes
    from xckpt.storage.source import StoredRange

    Stored = memoryview | bytes | StoredRange | PassingBytes

T = TypeVar("T")

DEFAULT_LEVEL = 3

_COUNTING_NBYTES = 1 << 18  # decoded at a time where nobody wants the bytes


class LongStreamError(FormatError):
    """A stream decodes to more bytes than are wanted."""


def _malformed(reason: str, offset: int | None = None) -> FormatError:
    return FormatError(reason, offset=offset, rule="Encoding")


class StreamDecoder(ABC):
    """Decodes a stream from its start, which is the only way, of which `nbytes` bytes are wanted.

    ``is_whole`` says that the stream is to end after these.
    """

    name: ClassVar[str]
    #: What the bytes of a stream are multiplied by at most, and how many more it decodes to.
    densest: ClassVar[tuple[int, int]]

    def __init__(self, stored: Stored, nbytes: int, *, is_whole: bool) -> None:
        if nbytes > self.most(len(stored)):
            raise _malformed(f"{len(stored)} bytes of {self.name} cannot decode to {nbytes}")
        self._nbytes = nbytes
        self._begin(stored, is_whole=is_whole)

    @classmethod
    def most(cls, stored_nbytes: int) -> int:
        """Return how many bytes a stream decodes to at most."""
        times, more = cls.densest
        return stored_nbytes * times + more

    @abstractmethod
    def _begin(self, stored: Stored, *, is_whole: bool) -> None:
        """Open the stream."""

    @abstractmethod
    def _fill(self, memory: NDArray[np.uint8]) -> int:
        """Decode into memory; fewer bytes than fit are the last ones."""

    @abstractmethod
    def _expect_end(self) -> None:
        """Raise an error if the stream does not end here."""

    def _take(self, memory: NDArray[np.uint8]) -> None:
        found = self._fill(memory)
        if found < len(memory):
            short = len(memory) - found
            raise _malformed(
                f"a {self.name} stream ends {short} bytes too early: it decodes to fewer than "
                f"{self._nbytes}, or is cut short"
            )

    def _skip(self, nbytes: int) -> None:
        scratch = np.empty(min(nbytes, _COUNTING_NBYTES), np.uint8)
        for start in range(0, nbytes, _COUNTING_NBYTES):
            self._take(scratch[: nbytes - start])

    @classmethod
    def decompress(
        cls, stored: Stored, nbytes: int, out: NDArray[np.uint8] | None = None
    ) -> memoryview:
        """Decode a whole stream, which must have exactly so many bytes, as `out` has."""
        stream = cls(stored, nbytes, is_whole=True)
        decoded = _allocate(nbytes) if out is None else out
        stream._take(decoded)
        stream._expect_end()
        return decoded.data

    @classmethod
    def decompress_range(cls, stored: Stored, start: int, stop: int) -> memoryview:
        """Decode a stream from its beginning up to `stop`, in memory for what is after `start`."""
        stream = cls(stored, stop, is_whole=False)
        decoded = _allocate(stop - start)
        stream._skip(start)
        stream._take(decoded)
        return decoded.data

    @classmethod
    def decompressed_blocks(
        cls, stored: Stored, nbytes: int, block_nbytes: int, skip: int | None = None
    ) -> Iterator[memoryview]:
        """Decode so many bytes after the first `skip` ones, block by block into the same memory.

        Without `skip` the stream must end after them.
        """
        stream = cls(stored, (skip or 0) + nbytes, is_whole=skip is None)
        stream._skip(skip or 0)
        buffer = np.empty(min(block_nbytes, nbytes), np.uint8)
        for start in range(0, nbytes, block_nbytes):
            block = buffer[: nbytes - start]
            stream._take(block)
            yield block.data
        if skip is None:
            stream._expect_end()


def _allocate(nbytes: int) -> NDArray[np.uint8]:
    require_memory(nbytes)
    return np.empty(nbytes, np.uint8)


class DeflateDecoder(StreamDecoder):
    """Decodes a deflate stream."""

    name = "deflate"
    densest = 1032, 1024  # 258 bytes for each pair of bits, after a few bytes for its codes
    # Read and decoded at a time: zlib copies what it has not read yet with each call.
    _STORED_NBYTES, _DECODED_NBYTES = 1 << 16, 1 << 20

    def _begin(self, stored: Stored, *, is_whole: bool) -> None:
        del is_whole  # a stream says that it ends
        self._blocks: Iterator[memoryview] = (
            iter([memoryview(stored).cast("B")])
            if isinstance(stored, memoryview | bytes)
            else iter(stored)
        )
        self._block = memoryview(b"")
        self._zlib = zlib.decompressobj(-zlib.MAX_WBITS)

    def _fill(self, memory: NDArray[np.uint8]) -> int:
        done, view = 0, memory.data
        while done < len(view) and not self._zlib.eof:
            data = self._zlib.unconsumed_tail
            if not data:
                if not self._block:
                    self._block = next(self._blocks, self._block)
                data = bytes(self._block[: self._STORED_NBYTES])
                self._block = self._block[self._STORED_NBYTES :]
            try:
                piece = self._zlib.decompress(data, min(len(view) - done, self._DECODED_NBYTES))
            except zlib.error as error:
                raise _malformed(f"a deflate stream does not decode: {error}") from error
            if not data and not piece:
                break
            view[done : done + len(piece)] = piece
            done += len(piece)
        return done

    def _expect_end(self) -> None:
        if self._fill(np.empty(1, np.uint8)) or not self._zlib.eof:
            raise _malformed(f"a deflate stream does not end after {self._nbytes} bytes")


class ZstdDecoder(StreamDecoder):
    """Decodes a Zstandard stream.

    That it is cut short between two blocks cannot be seen. So a known frame is put after a stream
    that is to end, and must follow what is wanted.
    """

    name = "zstd"
    densest = 1 << 15, 0  # a block of four bytes for 128 KiB of one value
    END = bytes.fromhex("6f1c93d25ae84b07b6390dfe728145ac")

    def _begin(self, stored: Stored, *, is_whole: bool) -> None:
        import zstandard

        # In two halves: where a header is cut in two by the end of a buffer, libzstd looks for the
        # frame at the start of the next buffer, and would find a whole one there.
        frame = self.end_frame() if is_whole else b""
        parts: tuple[Stored, ...] = (stored, frame[:12], frame[12:])
        # Each part is handed over whole: a frame that lies in one buffer, with its content size, is
        # decoded straight into the destination, without a window in between.
        listed = ([part] if isinstance(part, memoryview | bytes) else part for part in parts)
        buffers = filter(len, chain.from_iterable(listed))
        chained: Any = SimpleNamespace(read=lambda _: next(buffers, b""))
        self._stream = zstandard.ZstdDecompressor().stream_reader(
            chained, read_size=max(1, *map(len, parts)), read_across_frames=True
        )

    @classmethod
    @cache
    def end_frame(cls) -> bytes:
        """Return the known frame."""
        import zstandard

        return zstandard.ZstdCompressor(write_checksum=True).compress(cls.END)

    def _fill(self, memory: NDArray[np.uint8]) -> int:
        done = 0
        with _decoding():
            while done < len(memory) and (count := self._stream.readinto(memory[done:])):
                done += count
        return done

    def _expect_end(self) -> None:
        with _decoding():
            tail = self._stream.read(len(self.END) + 1)
        if len(tail) > len(self.END):
            raise _malformed(f"a zstd stream decodes to more than {self._nbytes} bytes")
        if tail != self.END:
            raise _malformed(
                f"a zstd stream decodes to fewer than {self._nbytes} bytes, or is cut short"
            )

    def count(self, limit: int) -> int:
        """Return how many bytes there are, at most `limit`, in memory of constant size."""
        buffer = np.empty(_COUNTING_NBYTES, np.uint8)
        total, tail, end = 0, b"", self.END
        while count := self._fill(buffer):
            total += count
            tail = (tail + buffer[max(0, count - len(end)) : count].tobytes())[-len(end) :]
            if total > limit + len(end):
                reason = f"a zstd stream decodes to more than {limit} bytes"
                raise LongStreamError(reason, rule="Encoding")
        if tail != end:
            raise _malformed("a zstd stream is cut short")
        return total - len(end)


#: Encodings that can be decoded from their start only.
STREAMS: dict[str | None, type[StreamDecoder]] = {"deflate": DeflateDecoder, "zstd": ZstdDecoder}


@contextmanager
def _decoding() -> Iterator[None]:
    from zstandard import ZstdError

    try:
        yield
    except ZstdError as error:
        raise _malformed(f"a zstd stream is corrupt or cut short: {error}") from error


def decompressed_nbytes(stored: Stored, limit: int) -> int:
    """Count the bytes that a zstd stream decodes to, at most `limit`."""
    return ZstdDecoder(stored, 0, is_whole=True).count(limit)


_SKIPPABLE = range(0x184D2A50, 0x184D2A60)
_LONGEST_HEADER = 18
_UNKNOWN = (1 << 64) - 1


def stated_nbytes(head: memoryview | bytes, nbytes: int) -> int | None:
    """Return the size that the frames of a zstd stream state for it; None if they do not."""
    import zstandard

    total = at = 0
    while at < nbytes:
        if len(head) < min(nbytes, at + _LONGEST_HEADER):
            return None
        if int.from_bytes(head[at : at + 4], "little") in _SKIPPABLE:
            at += 8 + int.from_bytes(head[at + 4 : at + 8], "little")
            continue
        frame = head[at : at + _LONGEST_HEADER]
        with _decoding():
            said = zstandard.get_frame_parameters(frame)
            start = zstandard.frame_header_size(frame)
        if said.content_size == _UNKNOWN:
            return None
        total += said.content_size
        end = _end_of_blocks(head, at + start)
        if end is None:
            break
        at = end + 4 * bool(said.has_checksum)
    if total > ZstdDecoder.most(nbytes):
        raise _malformed(f"{nbytes} bytes of zstd cannot decode to {total}")
    return total


def _end_of_blocks(head: memoryview | bytes, at: int) -> int | None:
    """Return where the blocks that begin here end; None if that is after the head."""
    while at + 3 <= len(head):
        block = int.from_bytes(head[at : at + 3], "little")
        at += 3 + (1 if block >> 1 & 3 == 1 else block >> 3)
        if block & 1:
            return at
    return None


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


class SeekTable(NamedTuple):
    """Where the frames of a seekable stream begin, and where the last one ends."""

    stored: NDArray[np.uint64]  # offsets in the stream
    decoded: NDArray[np.uint64]  # offsets in what it decodes to
    checksums: NDArray[np.uint32] | None  # low 32 bits of XXH64 of each decoded frame


def read_seek_table(
    read: Callable[[int, int], memoryview], offset: int, nbytes: int, decoded_nbytes: int
) -> SeekTable:
    """Read and check the seek table at the end of a seekable stream."""
    end = offset + nbytes
    if nbytes < _TABLE_HEAD_NBYTES + _FOOTER_NBYTES:
        raise _malformed(f"{nbytes} bytes are too few for a seek table", offset)
    tail = read(end - min(nbytes, _TAIL_NBYTES), min(nbytes, _TAIL_NBYTES))
    at = end - _FOOTER_NBYTES
    count, flags, magic = unpack("<IBI", tail[-_FOOTER_NBYTES:])
    if magic != _FOOTER_MAGIC:
        raise _malformed(f"a seek table ends with {_FOOTER_MAGIC:#x}, found {magic:#x}", at + 5)
    if flags & _RESERVED_BITS:
        raise _malformed(f"reserved bits are set in a seek table: {flags:#010b}", at + 4)
    width = 3 if flags & _CHECKSUM_BIT else 2
    size = _TABLE_HEAD_NBYTES + count * width * 4 + _FOOTER_NBYTES
    if size > nbytes:
        raise _malformed(f"a seek table of {count} frames does not fit in {nbytes} bytes", offset)
    table = tail[len(tail) - size :] if size <= len(tail) else read(end - size, size)
    if [*unpack_from("<II", table)] != [_TABLE_MAGIC, size - _TABLE_HEAD_NBYTES]:
        raise _malformed(f"no seek table of {count} frames begins here", end - size)
    entries = np.frombuffer(table, "<u4", count * width, _TABLE_HEAD_NBYTES).reshape(count, width)
    _check_entries(entries, nbytes - size, decoded_nbytes, end - size)
    checksums = entries[:, 2].astype(np.uint32) if width == 3 else None
    offsets = np.zeros((2, count + 1), np.uint64)
    np.cumsum(entries[:, :2].T, axis=1, dtype=np.uint64, out=offsets[:, 1:])
    return SeekTable(offsets[0], offsets[1], checksums)


def _check_entries(
    entries: NDArray[np.uint32], stored_nbytes: int, decoded_nbytes: int, at: int
) -> None:
    stored, decoded = entries[:, 0], entries[:, 1]
    expected = {"stored": stored_nbytes, "decoded": decoded_nbytes}
    for (what, size), sizes in zip(expected.items(), (stored, decoded), strict=True):
        total = int(sizes.sum(dtype=np.uint64))
        if total != size:
            raise _malformed(f"the {what} sizes of frames add up to {total}, not {size}", at)
    if len(entries) == 0:
        return
    if not stored.all() or not decoded.all():
        raise _malformed("a seek table has an empty frame", at)
    size = int(decoded[0])
    if size > _LARGEST_FRAME:
        raise _malformed(f"a frame has {size} bytes, more than {_LARGEST_FRAME}", at)
    if (decoded[:-1] != size).any() or decoded[-1] > size:
        raise _malformed("frames before the last one differ in size", at)


def read_frames(
    read: Callable[[int, int], memoryview], offset: int, table: SeekTable, start: int, stop: int
) -> memoryview:
    """Decode a range of a seekable stream, from the frames that overlap it."""
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
        raise _malformed(f"{len(data)} bytes of zstd cannot decode to {nbytes}")
    decoded = _allocate(nbytes)

    def decode(number: int) -> None:
        begin, end = (each - ends[0] for each in ends[number : number + 2])
        low, high = (each - decoded_ends[0] for each in decoded_ends[number : number + 2])
        out = decoded[low:high]
        at = offset + ends[number]
        try:
            ZstdDecoder.decompress(data[begin:end], len(out), out)
        except FormatError as error:
            error.offset = at
            raise
        if table.checksums is None:
            return
        expected, found = (
            int(table.checksums[first + number]),
            xxh64_intdigest(out.data) & 0xFFFFFFFF,
        )
        if found != expected:
            text = f"a frame has the checksum {found:#x}, its table says {expected:#x}"
            raise _malformed(text, at)

    workers = min(_MOST_THREADS, os.cpu_count() or 1, last - first)
    _mapped(decode, range(last - first), workers if nbytes >= _THREADS_FROM_NBYTES else 1)
    return decoded.data[start - decoded_ends[0] : stop - decoded_ends[0]]


def _mapped(function: Callable[[Any], T], items: Sequence[Any], threads: int) -> list[T]:
    if min(threads, len(items)) < 2:
        return [function(each) for each in items]
    with ThreadPoolExecutor(min(threads, len(items))) as executor:
        return list(executor.map(function, items))


class Encoder(Protocol):
    """Compresses one part."""

    def add(self, data: Any) -> bytes:
        """Take more bytes, and return what of the stream is ready."""

    def end(self) -> bytes:
        """Return the rest of the stream."""


def new_encoder(
    encoding: str, nbytes: int, *, level: int = DEFAULT_LEVEL, threads: int = 1
) -> Encoder:
    """Begin to compress a part."""
    if encoding == "zstd":
        import zstandard

        # Workers cost memory and time to start, and make another stream than a single thread.
        compressor = zstandard.ZstdCompressor(level=level, threads=threads if threads > 1 else 0)
        # One frame that states its content size: many readers rely on that.
        return _StreamEncoder(compressor.compressobj(size=nbytes))
    if encoding == "deflate":
        return _StreamEncoder(zlib.compressobj(min(level, 9), wbits=-zlib.MAX_WBITS))
    if encoding == "zstd-seekable":
        return _SeekableEncoder(level, threads)
    raise UnsupportedError(
        f"the compression {shown(encoding)} is not known",
        rule="Encoding",
        hint="Known are: zstd, zstd-seekable, deflate",
    )


class _StreamEncoder:
    def __init__(self, compressor: Any) -> None:
        self.add: Callable[[Any], bytes] = compressor.compress
        self.end: Callable[[], bytes] = compressor.flush


class _SeekableEncoder:
    """Frames of equal size, with checksums of their own, so that the table needs none."""

    # What the writer of the reference implementation chooses; a row of a tensor decodes one frame.
    _FRAME_NBYTES = 1 << 20

    def __init__(self, level: int, threads: int) -> None:
        self._level = level
        self._threads = threads
        self._rest = b""
        self._sizes: list[tuple[int, int]] = []

    def add(self, data: Any) -> bytes:
        view, size = memoryview(data).cast("B"), self._FRAME_NBYTES
        if self._rest:
            view = memoryview(self._rest + bytes(view))
        whole = len(view) // size * size
        self._rest = bytes(view[whole:])
        return self._frames([view[at : at + size] for at in range(0, whole, size)])

    def end(self) -> bytes:
        last = self._frames([memoryview(self._rest)] if self._rest else [])
        entries = np.array(self._sizes, "<u4").tobytes()
        head = pack("<II", _TABLE_MAGIC, len(entries) + _FOOTER_NBYTES)
        return last + head + entries + pack("<IBI", len(self._sizes), 0, _FOOTER_MAGIC)

    def _frames(self, pieces: list[memoryview]) -> bytes:
        import zstandard

        def frame(piece: memoryview) -> bytes:
            compressor = zstandard.ZstdCompressor(level=self._level, write_checksum=True)
            return compressor.compress(piece)

        frames = _mapped(frame, pieces, self._threads)
        self._sizes += [(len(f), len(p)) for f, p in zip(frames, pieces, strict=True)]
        return b"".join(frames)
