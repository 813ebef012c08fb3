"""Compressed streams are decoded by this package and by others, for any cuts of the input."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from xckpt.errors import FormatError, UnsupportedError
from xckpt.storage import encodings
from xckpt.storage.seekable import new_encoder, read_frames, read_seek_table

MiB = 1 << 20


def compressed(encoding: str, data: bytes, cuts: list[int], **options: int) -> bytes:
    encoder = new_encoder(encoding, len(data), **options)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    return b"".join([*map(encoder.add, pieces), encoder.end()])


def sample(nbytes: int) -> bytes:
    return np.random.default_rng(0).integers(0, 3, nbytes, np.uint8).tobytes()


@given(
    st.sampled_from([0, 1, 1000, MiB - 1, MiB, MiB + 1, 3 * MiB + 7]),
    st.lists(st.integers(0, 4 * MiB), max_size=3),
    st.integers(1, 3),
)
def test_round_trips(nbytes: int, cuts: list[int], threads: int) -> None:
    data = sample(nbytes)
    plain = compressed("zstd", data, cuts, threads=threads)
    assert encodings.STREAMS["zstd"].decompress(plain, nbytes) == data
    assert zstandard.ZstdDecompressor().decompress(plain) == data
    seekable = compressed("zstd-seekable", data, cuts, threads=threads)
    read = memoryview(seekable)
    table = read_seek_table(lambda o, n: read[o : o + n], 0, len(seekable), nbytes)
    decoded = read_frames(lambda o, n: read[o : o + n], 0, table, 0, nbytes)
    assert decoded == data
    assert set(np.diff(table.decoded)[:-1].tolist()) <= {MiB}


@pytest.mark.parametrize("nbytes", [0, 1, 999, 1000, 1001, 5000])
def test_blocks_of_a_plain_stream(nbytes: int) -> None:
    data = sample(nbytes)
    stored = compressed("zstd", data, [])
    blocks = [bytes(b) for b in encodings.STREAMS["zstd"].decompressed_blocks(stored, nbytes, 1000)]
    assert b"".join(blocks) == data
    assert {len(block) for block in blocks[:-1]} <= {1000}
    for wrong, count in [(stored, nbytes + 1), (stored, nbytes - 1), (stored[:-1], nbytes)]:
        if count >= 0:  # nothing is fewer than no bytes
            with pytest.raises(FormatError, match="zstd"):
                list(encodings.STREAMS["zstd"].decompressed_blocks(wrong, count, 1000))


def test_cuts_and_threads_do_not_matter_to_a_seekable_stream() -> None:
    data = sample(3 * MiB + 7)
    streams = {
        compressed("zstd-seekable", data, cuts, threads=threads)
        for cuts in ([], [5], [MiB, MiB + 9])
        for threads in (1, 2)
    }
    assert len(streams) == 1


def test_an_empty_seekable_stream_is_its_table() -> None:
    assert len(compressed("zstd-seekable", b"", [])) == 17


def test_the_level_changes_the_size() -> None:
    data = sample(MiB)
    assert len(compressed("zstd", data, [], level=19)) < len(compressed("zstd", data, [], level=1))


def test_an_unknown_encoding() -> None:
    with pytest.raises(UnsupportedError, match="'lz4'"):
        new_encoder("lz4", 1)
