from __future__ import annotations

import itertools
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xckpt.errors import FormatError
from xckpt.storage.encodings import STREAMS
from xckpt.storage.seekable import new_encoder

decompress = STREAMS["deflate"].decompress
decompress_range = STREAMS["deflate"].decompress_range
decompressed_blocks = STREAMS["deflate"].decompressed_blocks

DATA = np.random.default_rng(0).integers(0, 20, 300_000, "u1").tobytes()


def deflated(data: bytes, level: int = 6) -> bytes:
    return zlib.compress(data, level, wbits=-15)


@given(
    st.binary(max_size=2000) | st.integers(0, 300_000).map(lambda n: DATA[:n]),
    st.integers(0, 9),
    st.integers(0, 300_000),
    st.integers(1, 100_000),
)
def test_streams_are_read_whole_in_part_and_by_blocks(
    data: bytes, level: int, at: int, block: int
) -> None:
    stored, at = deflated(data, level), min(at, len(data))
    assert decompress(stored, len(data)) == data
    assert decompress_range(memoryview(stored), at // 2, at) == data[at // 2 : at]
    blocks = [bytes(b) for b in decompressed_blocks(stored, len(data) - at, block, skip=at)]
    assert b"".join(blocks) == data[at:]
    assert all(len(full) == block for full in blocks[:-1])


@pytest.mark.parametrize("encoding", ["deflate", "zstd"])
def test_later_blocks_of_a_stream(encoding: str) -> None:
    encoder = new_encoder(encoding, len(DATA))
    stored = encoder.add(DATA) + encoder.end()
    blocks = STREAMS[encoding].decompressed_blocks(stored, 1000, 300, 70_000)
    assert b"".join([bytes(block) for block in blocks]) == DATA[70_000:71_000]


@pytest.mark.parametrize("nbytes", [len(DATA) - 1, len(DATA) + 1, 0])
def test_a_wrong_decoded_size_is_an_error(nbytes: int) -> None:
    with pytest.raises(FormatError, match=r"deflate.*\[Encoding\]"):
        decompress(deflated(DATA), nbytes)


def test_a_stream_cut_anywhere_is_an_error() -> None:
    stored = deflated(DATA[:5000])
    for length in range(len(stored)):
        with pytest.raises(FormatError, match=r"\[Encoding\]"):
            decompress(stored[:length], 5000)


def test_bytes_that_are_not_a_stream() -> None:
    with pytest.raises(FormatError, match=r"does not decode.*\[Encoding\]"):
        decompress(b"\xff" * 100, 50)


def test_more_than_a_stream_can_have_is_not_allocated() -> None:
    stored = deflated(bytes(1 << 24), 9)
    assert len(decompress(stored, 1 << 24)) == 1 << 24
    for claimed in (1 << 40, 1 << 62):
        with pytest.raises(FormatError, match="cannot decode to"):
            decompress(stored, claimed)
        with pytest.raises(FormatError, match="cannot decode to"):
            next(decompressed_blocks(stored, claimed, 100))


@given(st.lists(st.integers(0, len(DATA)), max_size=3), st.integers(1, 22))
def test_written_streams_are_read_back(cuts: list[int], level: int) -> None:
    encoder = new_encoder("deflate", len(DATA), level=level)
    edges = [0, *sorted(cuts), len(DATA)]
    pieces = [encoder.add(DATA[a:b]) for a, b in itertools.pairwise(edges)]
    assert zlib.decompress(b"".join([*pieces, encoder.end()]), wbits=-15) == DATA
