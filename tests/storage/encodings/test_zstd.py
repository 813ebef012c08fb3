from __future__ import annotations

import struct
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from xckpt.errors import FormatError, TooLargeError
from xckpt.storage.encodings import ZstdDecoder, decompressed_nbytes, stated_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable

decompress, decompress_range = ZstdDecoder.decompress, ZstdDecoder.decompress_range

DATA = np.random.default_rng(0).integers(0, 20, 300_000, "u1").tobytes()


def frame(data: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


def skippable(data: bytes) -> bytes:
    return struct.pack("<II", 0x184D2A53, len(data)) + data


def flushed(data: bytes) -> bytes:
    """Compress as real writers do: piece by piece, without a content size, with empty blocks."""
    compressor = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    pieces = [compressor.compress(data[i : i + 1000]) for i in range(0, len(data), 1000)]
    pieces.append(compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
    return b"".join([*pieces, compressor.flush()])


FRAMES = st.one_of(
    st.binary(max_size=2000).map(lambda data: (data, frame(data))),
    st.binary(max_size=2000).map(lambda data: (data, frame(data, write_checksum=True))),
    st.binary(max_size=2000).map(lambda data: (data, frame(data, write_content_size=False))),
    st.binary(max_size=2000).map(lambda data: (data, flushed(data))),
    st.binary(max_size=50).map(lambda data: (b"", skippable(data))),
)
STREAMS = st.lists(FRAMES, max_size=6).map(
    lambda frames: (b"".join(a for a, _ in frames), b"".join(b for _, b in frames))
)


def decompress_prefix(stored: bytes, nbytes: int) -> memoryview:
    return decompress_range(stored, 0, nbytes)


@given(STREAMS, st.integers(0, 3000), st.integers(0, 3000))
def test_streams_of_any_frames(stream: tuple[bytes, bytes], start: int, stop: int) -> None:
    data, stored = stream
    assert decompress(stored, len(data)) == data
    assert decompressed_nbytes(stored, len(data)) == len(data)
    stop = min(stop, len(data))
    start = min(start, stop)
    assert decompress_range(stored, start, stop) == data[start:stop]
    assert decompress_prefix(stored, stop) == data[:stop]


@given(STREAMS)
def test_the_size_that_frames_state(stream: tuple[bytes, bytes]) -> None:
    data, stored = stream
    assert stated_nbytes(stored, len(stored)) in {len(data), None}


def test_the_size_of_a_stream_is_that_of_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zstandard, "ZstdDecompressor", None)
    sized, unsized = frame(DATA), frame(DATA[:3000], write_content_size=False)
    checked, one_value = frame(DATA[:10], write_checksum=True), frame(bytes(1 << 20))
    skipped = skippable(b"abcdefgh")
    streams = {
        b"": 0,
        sized: len(DATA),
        checked + skipped + sized + one_value + checked: len(DATA) + (1 << 20) + 20,
        skipped: 0,
        unsized: None,
        checked + unsized: None,
    }
    for stored, expected in streams.items():
        assert stated_nbytes(stored, len(stored)) == expected
    # The beginning of a stream whose last frame is incomplete.
    for head in (18, 100, len(sized) - 1):
        assert stated_nbytes(sized[:head], len(sized)) == len(DATA)
    assert stated_nbytes((skipped + sized)[:20], len(skipped + sized)) is None


@given(st.binary(max_size=40), st.integers(0, 100))
def test_the_size_that_any_bytes_state(stored: bytes, more: int) -> None:
    broken(stated_nbytes, stored, len(stored) + more)
    broken(stated_nbytes, frame(b"")[:4] + stored, len(stored) + more)


def test_a_stated_size_that_no_stream_can_have() -> None:
    stored = bytes.fromhex("28b52ffd e0") + (1 << 62).to_bytes(8, "little") + b"\x01\0\0"
    with pytest.raises(FormatError, match="cannot decode to 4611686018427387904"):
        stated_nbytes(stored, len(stored))


def test_streams_beyond_memory_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = frame(bytes(2 << 20))
    monkeypatch.setattr(np, "empty", None)
    with dask.config.set({"xckpt.memory-limit": "1 MiB"}):
        with pytest.raises(TooLargeError, match=r"2097152 bytes \(2.00 MiB\).*1.00 MiB is the"):
            decompress(stored, 2 << 20)
        with pytest.raises(TooLargeError):
            decompress_range(stored, 16, 2 << 20)


@given(STREAMS, st.integers(1, 40))
def test_a_wrong_decoded_size_is_an_error(stream: tuple[bytes, bytes], by: int) -> None:
    data, stored = stream
    for nbytes in (len(data) + by, len(data) - by):
        if nbytes >= 0:
            with pytest.raises(FormatError) as caught:
                decompress(stored, nbytes)
            assert caught.value.rule == "Encoding"
    with pytest.raises(FormatError):
        decompress_prefix(stored, len(data) + by)
    if len(data) >= by:
        with pytest.raises(FormatError, match=f"more than {len(data) - by}"):
            decompressed_nbytes(stored, len(data) - by)


STORED = {
    "checksum": frame(DATA[:3000], write_checksum=True),
    "no checksum": frame(DATA[:3000]),
    "no content size": frame(DATA[:3000], write_content_size=False),
    "flushed": flushed(DATA[:3000]),
    "raw blocks": frame(np.random.default_rng(1).bytes(300)),
    "two frames": frame(DATA[:1000]) + frame(DATA[1000:3000], write_checksum=True),
    "skippable last": frame(DATA[:1000]) + skippable(b"abcdefgh"),
    "one value": frame(bytes(3000)),
}


@pytest.mark.parametrize("kind", STORED)
def test_a_stream_cut_anywhere_is_an_error(kind: str) -> None:
    """Each cut is an error, unless it is between frames and the size fits."""
    stored = STORED[kind]
    nbytes = decompressed_nbytes(stored, 10_000)
    fits = {stop for stop in range(len(stored)) if not broken(decompress, stored[:stop], nbytes)}
    ends = {
        stop
        for stop in range(len(stored))
        if not broken(decompressed_nbytes, stored[:stop], nbytes)
    }
    first = len(frame(DATA[:1000]))
    assert fits == ({first} if kind == "skippable last" else set())
    assert ends == ({0, first} if kind in {"skippable last", "two frames"} else {0})


def broken(call: Callable[..., object], *args: object) -> bool:
    """Return whether a call fails, and check the type of the error."""
    try:
        call(*args)
    except FormatError as error:
        assert error.rule == "Encoding"  # noqa: PT017  most calls here may also succeed
        return True
    return False


@given(FRAMES, st.integers(1, 30))
def test_the_beginning_of_a_frame_after_a_stream_is_an_error(
    frame_: tuple[bytes, bytes], nbytes: int
) -> None:
    stored = frame(DATA[:1000]) + frame_[1][:nbytes]
    assert broken(decompressed_nbytes, stored, 10_000) == (nbytes < len(frame_[1]))
    if nbytes < len(frame_[1]):
        assert broken(decompress, stored, 1000)


@pytest.mark.parametrize("kind", STORED)
def test_a_flipped_byte_is_an_error_with_a_checksum(kind: str) -> None:
    stored = STORED[kind]
    nbytes = decompressed_nbytes(stored, 10_000)
    for at in range(len(stored)):
        flipped = bytearray(stored)
        flipped[at] ^= 0x55
        failed = broken(decompress, bytes(flipped), nbytes)
        assert failed or kind != "checksum"


@given(st.binary(max_size=300), st.integers(0, 1000))
def test_any_bytes_decode_or_raise(stored: bytes, nbytes: int) -> None:
    for call in (decompress, decompress_prefix, decompressed_nbytes):
        broken(call, stored, nbytes)


def test_an_end_mark_inside_the_data_is_data() -> None:
    end = ZstdDecoder.END
    for data in (end, ZstdDecoder.end_frame(), end * 2, DATA + end):
        stored = frame(data)
        assert decompress(stored, len(data)) == data
        assert decompressed_nbytes(stored, len(data)) == len(data)
        for nbytes in (len(data) - 16, len(data) + 16):
            with pytest.raises(FormatError):
                decompress(stored, nbytes)


def test_an_empty_stream() -> None:
    assert len(decompress(b"", 0)) == 0
    assert decompressed_nbytes(b"", 0) == 0
    with pytest.raises(FormatError):
        decompress(b"", 1)


@pytest.mark.parametrize("nbytes", [1, 1 << 18, 1 << 20, (1 << 20) + 7])
@pytest.mark.parametrize("change", [0, -1, 1, -16, 16])
def test_counting_does_not_stop_at_its_buffer(nbytes: int, change: int) -> None:
    data = bytes(max(0, nbytes + change))
    assert decompressed_nbytes(frame(data, write_content_size=False), len(data)) == len(data)


def test_a_claim_that_no_stream_can_meet_allocates_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored = frame(bytes(100))
    monkeypatch.setattr(np, "empty", None)
    for call in (decompress, decompress_prefix):
        with pytest.raises(FormatError, match="cannot decode to"):
            call(stored, 1 << 60)


def test_a_claimed_content_size_is_not_believed() -> None:
    # One segment of 2**62 bytes, by the header of the frame.
    stored = bytes.fromhex("28b52ffd e0") + (1 << 62).to_bytes(8, "little") + b"\x01\0\0"
    for call in (decompress, decompress_prefix, decompressed_nbytes):
        with pytest.raises(FormatError):
            call(stored, 16)


BOMB = """
import resource
from xckpt.errors import FormatError
from xckpt.storage.encodings import ZstdDecoder, decompressed_nbytes
decompress, decompress_range = ZstdDecoder.decompress, ZstdDecoder.decompress_range

stored = open(__import__("sys").argv[1], "rb").read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert len(decompress_range(stored, 1 << 29, (1 << 29) + 16)) == 16
for call in (decompress, decompressed_nbytes):
    try: call(stored, 16)
    except FormatError as error: assert "more than 16" in str(error), error
    else: raise AssertionError(call)
assert decompressed_nbytes(stored, 1 << 40) == 1 << 30
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no getrusage on Windows")
def test_a_bomb_takes_bounded_time_and_memory(tmp_path: Any) -> None:
    stored = frame(bytes(1 << 30))
    (tmp_path / "bomb").write_bytes(stored)
    begin = time.process_time()
    for call in (decompress, decompressed_nbytes):
        with pytest.raises(FormatError, match="more than 16"):
            call(stored, 16)
    assert time.process_time() - begin < 0.5
    run = subprocess.run(  # noqa: S603
        [sys.executable, "-c", BOMB, str(tmp_path / "bomb")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    grown = int(run.stdout) * (1 if sys.platform == "darwin" else 1024)
    assert grown < 32 << 20
