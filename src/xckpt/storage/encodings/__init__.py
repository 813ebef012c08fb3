"""Encodings of parts: how stored bytes become decoded ones. The input may be anything."""

from __future__ import annotations

from xckpt.storage.encodings import deflate, zstd
from xckpt.storage.encodings.seekable import (
    SeekTable,
    read_frames,
    read_seek_table,
    read_seekable,
)
from xckpt.storage.encodings.zstd import LongStreamError, decompressed_nbytes, stated_nbytes

__all__ = [
    "STREAMS",
    "LongStreamError",
    "SeekTable",
    "decompressed_nbytes",
    "read_frames",
    "read_seek_table",
    "read_seekable",
    "stated_nbytes",
]

#: Encodings that can be decoded from their start only, each by a module with the same functions.
STREAMS = {"deflate": deflate, "zstd": zstd}
