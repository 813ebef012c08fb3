"""Compression of parts, as bytes come: Zstandard streams, plain and seekable, and deflate."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from xckpt.errors import UnsupportedError, shown

__all__ = ["DEFAULT_LEVEL", "Encoder", "new_encoder"]

DEFAULT_LEVEL = 3

# What the writer of the reference implementation chooses; a row of a tensor decodes one frame.
_FRAME_NBYTES = 1 << 20
_TABLE_MAGIC = 0x184D2A5E
_FOOTER_MAGIC = 0x8F92EAB1
_FOOTER_NBYTES = 9


class Encoder(Protocol):
    """Compresses one part."""

    def add(self, data: Any) -> bytes:
        """Take more bytes, and give what of the stream is ready."""

    def end(self) -> bytes:
        """Return the rest of the stream."""


def new_encoder(
    encoding: str, nbytes: int, *, level: int = DEFAULT_LEVEL, threads: int = 1
) -> Encoder:
    """Begin to compress a part."""
    if encoding == "zstd":
        return _Stream(nbytes, level, threads)
    if encoding == "zstd-seekable":
        return _Seekable(level, threads)
    if encoding == "deflate":
        return _Deflate(level)
    raise UnsupportedError(
        f"the compression {shown(encoding)} is not known",
        rule="Encoding",
        hint="Known are: zstd, zstd-seekable, deflate",
    )


class _Stream:
    """One frame that states its content size: many readers rely on that."""

    def __init__(self, nbytes: int, level: int, threads: int) -> None:
        import zstandard

        # Workers cost memory and time to start, and make another stream than a single thread.
        compressor = zstandard.ZstdCompressor(level=level, threads=threads if threads > 1 else 0)
        self._compressor = compressor.compressobj(size=nbytes)

    def add(self, data: Any) -> bytes:
        return self._compressor.compress(data)

    def end(self) -> bytes:
        return self._compressor.flush()


class _Deflate:
    """A stream without a header, whose checksum is elsewhere."""

    def __init__(self, level: int) -> None:
        self._compressor = zlib.compressobj(min(level, 9), wbits=-zlib.MAX_WBITS)

    def add(self, data: Any) -> bytes:
        return self._compressor.compress(data)

    def end(self) -> bytes:
        return self._compressor.flush()


class _Seekable:
    """Frames of equal size with a table of them at the end; see `xckpt.storage.encodings.seekable`.

    The frames have checksums, so the table needs none.
    """

    def __init__(self, level: int, threads: int) -> None:
        self._level = level
        self._threads = threads
        self._rest = b""
        self._sizes: list[tuple[int, int]] = []

    def add(self, data: Any) -> bytes:
        view = memoryview(data).cast("B")
        if self._rest:
            view = memoryview(self._rest + bytes(view))
        whole = len(view) // _FRAME_NBYTES * _FRAME_NBYTES
        self._rest = bytes(view[whole:])
        return self._frames(
            [view[at : at + _FRAME_NBYTES] for at in range(0, whole, _FRAME_NBYTES)]
        )

    def end(self) -> bytes:
        last = self._frames([memoryview(self._rest)] if self._rest else [])
        entries = b"".join(
            number.to_bytes(4, "little") for sizes in self._sizes for number in sizes
        )
        footer = (
            len(self._sizes).to_bytes(4, "little") + b"\0" + _FOOTER_MAGIC.to_bytes(4, "little")
        )
        head = _TABLE_MAGIC.to_bytes(4, "little")
        head += (len(entries) + _FOOTER_NBYTES).to_bytes(4, "little")
        return last + head + entries + footer

    def _frames(self, pieces: list[memoryview]) -> bytes:
        if len(pieces) > 1 and self._threads > 1:
            with ThreadPoolExecutor(min(self._threads, len(pieces))) as threads:
                frames = list(threads.map(self._frame, pieces))
        else:
            frames = [self._frame(piece) for piece in pieces]
        self._sizes += [(len(f), len(p)) for f, p in zip(frames, pieces, strict=True)]
        return b"".join(frames)

    def _frame(self, piece: memoryview) -> bytes:
        import zstandard

        return zstandard.ZstdCompressor(level=self._level, write_checksum=True).compress(piece)
