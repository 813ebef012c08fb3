"""Headers of remote files: few requests, and harmless cache entries."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from tests.sources import CountingSource
from tests.stats.checkpoints import settled
from tests.storage.web_server import WebServer
from tests.test_stacking import zt
from xckpt.storage.cache import HeaderSource, Segment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("obstore", reason="needs obstore: pip install 'xckpt[remote]'")

SIZE = 1 << 20
DATA = np.random.default_rng(0).bytes(SIZE)
ARRAYS = {f"t{n}": np.full((2, 2), n, "<f4") for n in range(2000)}


@given(st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, 200_000)), max_size=20))
def test_no_byte_is_requested_twice(reads: list[tuple[int, int]]) -> None:
    source = CountingSource(DATA)
    ahead = HeaderSource(source)
    for offset, nbytes in reads:
        stop = min(SIZE, offset + nbytes)
        assert ahead.read(offset, stop - offset) == DATA[offset:stop]
    ranges = sorted(source.reads)
    assert all(a + n <= b for (a, n), (b, _) in pairwise(ranges))
    assert ahead.requests == len(ranges)


def test_remembered_bytes_are_bounded() -> None:
    ahead = HeaderSource(CountingSource(bytes(160 << 20)))
    for offset in range(0, 160 << 20, 1 << 20):
        assert ahead.read(offset, 10) == bytes(10)
        assert sum(len(data) for _, data in ahead.segments) <= 64 << 20
    assert not ahead.complete


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    monkeypatch.setenv("XCKPT_CACHE_DIR", str(tmp_path))
    with WebServer(**{"m.zt": zt(ARRAYS)}) as web:
        yield web


def assert_opens(web: WebServer, requests: int) -> None:
    web.requests.clear()
    ds = xr.open_dataset(f"{web.url}/m.zt", engine="ztensor")
    assert len(ds.variables) == len(ARRAYS)
    assert len(web.requests) == requests
    np.testing.assert_array_equal(ds["t77"], ARRAYS["t77"])


def test_a_second_open_is_one_request(web: WebServer, tmp_path: Path) -> None:
    assert_opens(web, 2)
    assert_opens(web, 1)
    (entry,) = (tmp_path / "headers").iterdir()
    assert entry.stat().st_mode & 0o077 == 0


@pytest.mark.filterwarnings("ignore:.*neither ETag:xckpt.errors.CheckpointWarning")
@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
def test_headers_without_a_strong_version_are_not_cached(
    web: WebServer, tmp_path: Path, etag: str | None
) -> None:
    web.behaviour.etag = etag
    assert_opens(web, 2)
    assert_opens(web, 2)
    assert not (tmp_path / "headers").exists()


def test_another_version_is_read_anew(web: WebServer) -> None:
    assert_opens(web, 2)
    web.behaviour.etag = '"second"'
    assert_opens(web, 2)
    # A server that gives one ETag to all its files.
    web.behaviour.files["/m.zt"] = b"\0" + web.behaviour.files["/m.zt"][1:]
    with pytest.raises(ValueError, match=r"m\.zt"):
        xr.open_dataset(f"{web.url}/m.zt", engine="ztensor")


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "head", "of another", "garbage"])
def test_a_damaged_entry_is_ignored(web: WebServer, tmp_path: Path, damage: str) -> None:
    assert_opens(web, 2)
    (entry,) = (tmp_path / "headers").iterdir()
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= damage == "flipped"
    data[13] ^= damage == "head"
    intact = bytes(data)
    changed = {"empty": b"", "cut": intact[:-5], "garbage": b"\x80" * 100}.get(damage, intact)
    if damage == "of another":
        changed = changed.replace(b"m.zt", b"n.zt")
    entry.write_bytes(changed)
    assert_opens(web, 2)
    assert_opens(web, 1)


def test_nothing_is_cached_without_permission(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XCKPT_CACHE_DIR", "")
    assert_opens(web, 2)
    assert_opens(web, 2)
    monkeypatch.setenv("XCKPT_CACHE_DIR", str(tmp_path / "file" / "below"))
    (tmp_path / "file").write_text("no folder")
    assert_opens(web, 2)


def test_the_oldest_entries_make_room(web: WebServer, tmp_path: Path) -> None:
    assert_opens(web, 2)
    (first,) = (tmp_path / "headers").iterdir()
    oldest = first.with_name("of large files")
    oldest.touch()
    os.truncate(oldest, 512 << 20)
    settled(oldest, 60)
    settled(first, 30)
    web.behaviour.etag = '"second"'
    assert_opens(web, 2)
    assert len(list((tmp_path / "headers").iterdir())) == 2
    assert first.exists()
    assert not oldest.exists()


class Skipping(CountingSource):
    @property
    def worth_skipping(self) -> int:
        return 10


def test_ranges_are_remembered_separately() -> None:
    data = bytes(range(256)) * 1000
    source = Skipping(data)
    header = HeaderSource(source)
    header.keep(Segment(0, memoryview(data)[:100]))
    ranges = [(5000, 10), (90, 20), (0, 5), (5005, 10), (200_000, 8), (5000, 10), (7000, 0)]
    for _ in range(2):
        pieces = header.read_ranges(ranges)
        assert [bytes(piece) for piece in pieces] == [data[at : at + n] for at, n in ranges]
    # Overlapping ranges are read like a header, with the bytes that follow.
    assert source.reads[:2] == [(5000, 10), (200_000, 8)]
    assert len(source.reads) == 4
    assert all(data[at : at + len(segment)] == segment for at, segment in header.segments)
