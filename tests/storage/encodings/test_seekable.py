from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh64_intdigest

from tests.sources import CountingSource
from xckpt.errors import FormatError
from xckpt.storage.seekable import read_frames, read_seek_table

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = np.random.default_rng(0).integers(0, 20, 300_000, "u1").tobytes()


def read_seekable(
    read: Any, offset: int, nbytes: int, decoded_nbytes: int, start: int, stop: int
) -> memoryview:
    """Decode a range of a seekable stream, reading only its table and the frames needed."""
    table = read_seek_table(read, offset, nbytes, decoded_nbytes)
    return read_frames(read, offset, table, start, stop)


@dataclass
class Seekable:
    """A seekable stream, with ways to break it."""

    data: bytes = DATA
    frame_nbytes: int = 10_000
    checksums: bool = False
    sizes: Callable[[list[list[int]]], list[list[int]]] = lambda entries: entries
    magic: int = 0x184D2A5E
    footer_magic: int = 0x8F92EAB1
    count: int | None = None
    table_nbytes: int | None = None
    descriptor: int = 0

    def build(self) -> bytes:
        pieces = [
            self.data[i : i + self.frame_nbytes]
            for i in range(0, len(self.data), self.frame_nbytes)
        ]
        frames = [
            zstandard.ZstdCompressor(write_checksum=True).compress(content) for content in pieces
        ]
        entries = [
            [len(stored), len(piece), *([xxh64_intdigest(piece) & 0xFFFFFFFF] * self.checksums)]
            for stored, piece in zip(frames, pieces, strict=True)
        ]
        table = np.array(self.sizes(entries), "<u4").tobytes()
        count = len(frames) if self.count is None else self.count
        table_nbytes = len(table) + 9 if self.table_nbytes is None else self.table_nbytes
        descriptor = self.descriptor | (0x80 if self.checksums else 0)
        footer = struct.pack("<IBI", count, descriptor, self.footer_magic)
        return b"".join([*frames, struct.pack("<II", self.magic, table_nbytes), table, footer])


@pytest.mark.parametrize("checksums", [True, False])
@given(a=st.integers(0, len(DATA)), b=st.integers(0, len(DATA)))
@settings(max_examples=50)
def test_ranges_of_a_seekable_stream(checksums: bool, a: int, b: int) -> None:
    stored = SEEKABLE[checksums]
    source = CountingSource(b"x" * 100 + stored + b"y" * 100)
    start, stop = min(a, b), max(a, b)
    got = read_seekable(source.read, 100, len(stored), len(DATA), start, stop)
    assert got == DATA[start:stop]


SEEKABLE = {checksums: Seekable(checksums=checksums).build() for checksums in (True, False)}


def test_only_the_frames_needed_are_read() -> None:
    stored = Seekable(frame_nbytes=100).build()  # the table is larger than the first guess
    source = CountingSource(bytes(64) + stored)
    table = read_seek_table(source.read, 64, len(stored), len(DATA))
    assert len(source.reads) == 2
    source.reads.clear()
    assert read_frames(source.read, 64, table, 1050, 1350) == DATA[1050:1350]
    first, last = int(table.stored[10]), int(table.stored[14])
    assert source.reads == [(64 + first, last - first)]
    source.reads.clear()
    assert read_frames(source.read, 64, table, 1000, 1100) == DATA[1000:1100]
    assert source.reads == [(64 + first, int(table.stored[11]) - first)]
    source.reads.clear()
    assert len(read_frames(source.read, 64, table, 500, 500)) == 0
    assert source.reads == []


def test_one_row_costs_two_reads() -> None:
    source = CountingSource(SEEKABLE[False])
    read_seekable(source.read, 0, source.size, len(DATA), 5000, 5100)
    assert len(source.reads) == 2
    assert source.nbytes_read < 4096 + 10_000


def test_threads_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    data = 40 * DATA
    stored = bytearray(Seekable(data=data, frame_nbytes=100_000, checksums=True).build())
    end = len(data) - 10
    got = read_seekable(CountingSource(bytes(stored)).read, 0, len(stored), len(data), 5, end)
    assert got == data[5:end]
    stored[len(stored) // 2] ^= 1
    with pytest.raises(FormatError) as caught:
        read_seekable(CountingSource(bytes(stored)).read, 0, len(stored), len(data), 5, end)
    assert caught.value.rule == "Encoding"


def test_an_empty_seekable_stream() -> None:
    stored = Seekable(data=b"").build()
    assert len(stored) == 17
    assert len(read_seekable(CountingSource(stored).read, 0, 17, 0, 0, 0)) == 0


def test_ranges_outside_are_refused() -> None:
    table = read_seek_table(
        CountingSource(SEEKABLE[False]).read, 0, len(SEEKABLE[False]), len(DATA)
    )
    for start, stop in ((-1, 5), (5, 4), (0, len(DATA) + 1)):
        with pytest.raises(ValueError, match="not in"):
            read_frames(CountingSource(SEEKABLE[False]).read, 0, table, start, stop)


def shift(entries: list[list[int]]) -> list[list[int]]:
    """Move a byte from one frame to the next, so that the sums stay right."""
    entries[3][0] -= 1
    entries[4][0] += 1
    return entries


def uneven(entries: list[list[int]]) -> list[list[int]]:
    entries[3][1] -= 1
    entries[4][1] += 1
    return entries


def empty_frame(entries: list[list[int]]) -> list[list[int]]:
    entries[3][0] += entries[4][0]
    entries[4][0] = 0
    return entries


def wrong_checksum(entries: list[list[int]]) -> list[list[int]]:
    entries[3][2] ^= 1
    return entries


def wrong_sum(entries: list[list[int]]) -> list[list[int]]:
    entries[-1][0] += 1
    return entries


BROKEN = {
    "another magic number": Seekable(magic=0x184D2A50),
    "another footer": Seekable(footer_magic=0x8F92EAB0),
    "reserved bits": Seekable(descriptor=0x04),
    "more frames than bytes": Seekable(count=(1 << 32) - 1),
    "one frame more": Seekable(count=31),
    "one frame less": Seekable(count=29),
    "no frames": Seekable(count=0),
    "another table size": Seekable(table_nbytes=8),
    "wrong sum": Seekable(sizes=wrong_sum),
    "frames that begin elsewhere": Seekable(sizes=shift),
    "frames of several sizes": Seekable(sizes=uneven),
    "an empty frame": Seekable(sizes=empty_frame),
    "a wrong checksum": Seekable(sizes=wrong_checksum, checksums=True),
    "frames above 16 MiB": Seekable(data=bytes((16 << 20) + 1), frame_nbytes=(16 << 20) + 1),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_seekable_streams(kind: str) -> None:
    stored, nbytes = BROKEN[kind].build(), len(BROKEN[kind].data)
    source = CountingSource(stored)
    with pytest.raises(FormatError) as caught:
        read_seekable(source.read, 0, len(stored), nbytes, 0, nbytes)
    assert caught.value.rule == "Encoding"
    assert caught.value.offset is not None


def test_another_decoded_size_is_an_error() -> None:
    stored = SEEKABLE[False]
    for nbytes in (len(DATA) - 1, len(DATA) + 1, 1 << 62):
        with pytest.raises(FormatError, match="add up"):
            read_seek_table(CountingSource(stored).read, 0, len(stored), nbytes)


def test_a_seekable_stream_cut_anywhere() -> None:
    stored = Seekable(data=DATA[:3000], frame_nbytes=1000).build()
    for stop in range(len(stored)):
        source = CountingSource(stored[:stop])
        with pytest.raises(FormatError):
            read_seekable(source.read, 0, stop, 3000, 0, 3000)


@given(st.binary(max_size=300), st.integers(0, 1000))
def test_any_bytes_decode_or_raise(stored: bytes, nbytes: int) -> None:
    source = CountingSource(stored)
    with pytest.raises(FormatError) as caught:
        read_seekable(source.read, 0, len(stored), nbytes, 0, nbytes)
    assert caught.value.rule == "Encoding"
