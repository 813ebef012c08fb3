"""Zstandard streams of unknown origin, decoded whole, in part, or only counted.

A stream is any number of frames, some of them skippable, with or without a content size. Sizes
that a stream claims are never trusted: the caller says how many bytes there must be, and no
more are decoded. All errors are `FormatError` with ``rule="Encoding"``, but for what does not fit
in memory.

A frame (RFC 8878, section 3.1.1) is a header, which may state the size of its content; blocks; and
4 bytes of a checksum, where the header says so::

    block         3 bytes, little-endian: bit 0 marks the last one, bits 1 and 2 are its type, the
                  rest its size; of type 1 (one byte, repeated) that byte alone is stored
    skippable     50 2A 4D 18 to 5F 2A 4D 18, size u32, so many bytes
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.errors import FormatError
from xckpt.storage.limits import require_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from xckpt.storage.source import Blocks

    Stored = memoryview | bytes | Blocks

__all__ = [
    "LongStreamError",
    "allocate",
    "decompress",
    "decompress_into",
    "decompress_range",
    "decompressed_blocks",
    "decompressed_nbytes",
    "malformed",
    "stated_nbytes",
]

# The densest block there is: four bytes for 128 KiB of one value.
_HIGHEST_RATIO = 1 << 15

_COUNTING_NBYTES = 1 << 18

_SKIPPABLE = range(0x184D2A50, 0x184D2A60)
_LONGEST_HEADER = 18
_UNKNOWN = (1 << 64) - 1

# Ends every stream that is decoded to its end, see `_closed`.
_END = bytes.fromhex("6f1c93d25ae84b07b6390dfe728145ac")


def decompress(stored: Stored, nbytes: int) -> memoryview:
    """Decode a whole stream."""
    decoded = allocate(stored, nbytes)
    decompress_into(stored, decoded)
    return decoded.data


def decompress_range(stored: Stored, start: int, stop: int) -> memoryview:
    """Decode a stream from its beginning up to `stop`, in memory for what is behind `start`."""
    _check_ratio(stored, stop)
    decoded = allocate(stored, stop - start)
    with _decoding():
        stream = _stream(stored)
        found = _skip(stream, start)
        if found == start:
            found += _fill(stream, decoded)
    if found < stop:
        raise malformed(f"a zstd stream ends after {found} of {stop} bytes")
    return decoded.data


class LongStreamError(FormatError):
    """A stream decodes to more bytes than are wanted."""


def decompressed_nbytes(stored: Stored, limit: int) -> int:
    """Count the bytes that a stream decodes to, at most `limit`, in memory of constant size."""
    buffer = np.empty(_COUNTING_NBYTES, np.uint8)
    total, tail = 0, b""
    with _decoding():
        stream = _closed(stored)
        while count := stream.readinto(buffer):
            total += count
            tail = (tail + buffer[max(0, count - len(_END)) : count].tobytes())[-len(_END) :]
            if total > limit + len(_END):
                reason = f"a zstd stream decodes to more than {limit} bytes"
                raise LongStreamError(reason, rule="Encoding")
    if tail != _END:
        raise malformed("a zstd stream is cut short")
    return total - len(_END)


def stated_nbytes(head: memoryview | bytes, nbytes: int) -> int | None:
    """Return the size that the headers of a stream's frames state for it; None if they do not."""
    total = at = 0
    while at < nbytes:
        if len(head) < min(nbytes, at + _LONGEST_HEADER):
            return None
        if int.from_bytes(head[at : at + 4], "little") in _SKIPPABLE:
            at += 8 + int.from_bytes(head[at + 4 : at + 8], "little")
            continue
        content, start, has_checksum = _frame_header(head[at : at + _LONGEST_HEADER])
        if content == _UNKNOWN:
            return None
        total += content
        end = _end_of_blocks(head, at + start)
        if end is None:
            break
        at = end + 4 * has_checksum
    if total > nbytes * _HIGHEST_RATIO:
        raise malformed(f"{nbytes} bytes of zstd cannot decode to {total}")
    return total


def _frame_header(data: memoryview | bytes) -> tuple[int, int, bool]:
    """Return the size of the content, that of the header, and whether there is a checksum."""
    import zstandard

    with _decoding():
        said = zstandard.get_frame_parameters(data)
        return said.content_size, zstandard.frame_header_size(data), bool(said.has_checksum)


def _end_of_blocks(head: memoryview | bytes, at: int) -> int | None:
    """Return where the blocks that begin here end; None if that is behind the head."""
    while at + 3 <= len(head):
        block = int.from_bytes(head[at : at + 3], "little")
        at += 3 + (1 if block >> 1 & 3 == 1 else block >> 3)
        if block & 1:
            return at
    return None


def decompressed_blocks(
    stored: Stored, nbytes: int, block_nbytes: int, skip: int = 0
) -> Iterator[memoryview]:
    """Decode a whole stream block by block, in memory of constant size."""
    _check_ratio(stored, nbytes)
    stream = _closed(stored)
    for start in range(0, skip, block_nbytes):
        with _decoding():
            _fill(stream, np.empty(min(block_nbytes, skip - start), np.uint8))
    buffer = np.empty(min(block_nbytes, nbytes), np.uint8)
    for start in range(0, nbytes, block_nbytes):
        block = buffer[: nbytes - start]
        with _decoding():
            found = _fill(stream, block)
        if found < len(block):
            raise malformed(f"a zstd stream decodes to fewer than {nbytes} bytes")
        yield block.data
    if not skip:
        _expect_end(stream, nbytes)


def decompress_into(stored: Stored, decoded: NDArray[np.uint8]) -> None:
    """Decode a whole stream that must fill an array exactly."""
    nbytes = len(decoded)
    with _decoding():
        stream = _closed(stored)
        _fill(stream, decoded)
    _expect_end(stream, nbytes)


def _expect_end(stream: Any, nbytes: int) -> None:
    """Check that a stream that was opened by `_closed` ends here."""
    with _decoding():
        tail = stream.read(len(_END) + 1)
    if len(tail) > len(_END):
        raise malformed(f"a zstd stream decodes to more than {nbytes} bytes")
    if tail != _END:
        raise malformed(f"a zstd stream decodes to fewer than {nbytes} bytes, or is cut short")


def allocate(stored: Stored, nbytes: int) -> NDArray[np.uint8]:
    """Allocate memory for decoded bytes of a stream, if it can have so many and they fit."""
    _check_ratio(stored, nbytes)
    require_memory(nbytes)
    return np.empty(nbytes, np.uint8)


def _check_ratio(stored: Stored, nbytes: int) -> None:
    if nbytes > len(stored) * _HIGHEST_RATIO:
        raise malformed(f"{len(stored)} bytes of zstd cannot decode to {nbytes}")


def malformed(reason: str, offset: int | None = None) -> FormatError:
    """Make the error of all encodings."""
    return FormatError(reason, offset=offset, rule="Encoding")


class _Chain:
    """Buffers one after another, as the file object that zstandard reads from."""

    __slots__ = ("_buffers",)

    def __init__(self, *parts: Stored) -> None:
        whole = (memoryview, bytes)
        listed = ([part] if isinstance(part, whole) else part for part in parts)
        self._buffers = filter(len, chain.from_iterable(listed))

    def read(self, size: int) -> memoryview | bytes:
        return next(self._buffers, b"")


def _stream(*parts: Stored) -> Any:
    import zstandard

    # Each part is handed over whole: a frame that lies in one buffer, with its content size, is
    # decoded straight into the destination, without a window in between.
    size = max(1, *map(len, parts))
    decompressor = zstandard.ZstdDecompressor()
    chain: Any = _Chain(*parts)
    return decompressor.stream_reader(chain, read_size=size, read_across_frames=True)


@cache
def _end_frame() -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(write_checksum=True).compress(_END)


def _closed(stored: Stored) -> Any:
    """Read a stream with a known frame after it."""
    # In two halves: where a header is cut in two by the end of a buffer, libzstd looks for the
    # frame at the start of the next buffer, and would find a whole one there.
    frame = _end_frame()
    return _stream(stored, frame[:12], frame[12:])


@contextmanager
def _decoding() -> Iterator[None]:
    from zstandard import ZstdError

    try:
        yield
    except ZstdError as error:
        raise malformed(f"a zstd stream is corrupt or cut short: {error}") from error


def _skip(stream: Any, nbytes: int) -> int:
    """Decode bytes that nobody wants, and return how many there were."""
    scratch = np.empty(min(nbytes, _COUNTING_NBYTES), np.uint8)
    done = 0
    while done < nbytes and (count := stream.readinto(scratch[: nbytes - done])):
        done += count
    return done


def _fill(stream: Any, decoded: NDArray[np.uint8]) -> int:
    done = 0
    while done < len(decoded) and (count := stream.readinto(decoded[done:])):
        done += count
    return done
