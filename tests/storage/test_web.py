from __future__ import annotations

import contextlib
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import pytest

from tests.storage.web_server import WebServer
from xckpt.errors import CheckpointWarning, FileChangedError, UnsupportedError
from xckpt.statistics.store import _is_lasting
from xckpt.storage import Source, open_source, remote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytest.importorskip("aiohttp", reason="needs aiohttp: pip install 'xckpt[http]'")

DATA = np.random.default_rng(0).bytes(3 << 20)


@pytest.fixture
def web() -> Iterator[WebServer]:
    with WebServer(**{"m.zt": DATA}) as web:
        yield web


@pytest.fixture
def source(web: WebServer) -> Source:
    return open_source(f"{web.url}/m.zt")


def test_a_read_is_one_request_for_its_bytes(web: WebServer, source: Source) -> None:
    assert source.size == len(DATA)
    assert web.gets == []
    assert source.read(1_000_000, 100_000) == DATA[1_000_000:1_100_000]
    assert source.view(0, 10) == DATA[:10]
    assert source.read(len(DATA) - 1, 1) == DATA[-1:]
    assert len(source.read(5, 0)) == 0
    assert web.gets == [
        "bytes=1000000-1099999",
        "bytes=0-9",
        f"bytes={len(DATA) - 1}-{len(DATA) - 1}",
    ]
    assert web.nbytes_sent == 100_011
    assert len(web.requests) == 4


def test_the_whole_file(web: WebServer, source: Source) -> None:
    assert source.read(0, len(DATA)) == DATA
    assert web.nbytes_sent == len(DATA)


def test_connections_are_used_again(web: WebServer, source: Source) -> None:
    for start in range(0, len(DATA) - (1 << 20), 1 << 18):
        assert source.read(start, 1 << 20) == DATA[start : start + (1 << 20)]
    assert len(web.gets) > 5
    assert len(web.connections) == 1


def test_an_encrypted_connection(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="needs cryptography: pip install cryptography")
    with WebServer(**{"m.zt": DATA}) as web:
        web.encrypt(tmp_path)
        url = f"{web.url.replace('http:', 'https:')}/m.zt"
        source = open_source(url, storage_options={"ssl": False})
        for start in (0, 1 << 20, 5):
            assert source.read(start, 2 << 20) == DATA[start : start + (2 << 20)]


def test_threads(source: Source) -> None:
    with ThreadPoolExecutor(8) as threads:
        got = threads.map(
            lambda i: source.read(i * 1000, 1000) == DATA[i * 1000 :][:1000], range(64)
        )
    assert all(got)


def test_ranges_are_few_requests(web: WebServer, source: Source) -> None:
    asked = [(2_500_000, 10), (0, 10), (100, 10), (2_500_005, 100)]
    pieces = source.read_ranges(asked, gap=1000)
    assert [bytes(piece) for piece in pieces] == [DATA[a : a + n] for a, n in asked]
    assert sorted(map(str, web.gets)) == ["bytes=0-109", "bytes=2500000-2500104"]


def read_some(source: Source) -> bytes:
    return bytes(source.read(1000, 50))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_another_process(source: Source, method: str) -> None:
    if method == "fork" and not hasattr(os, "fork"):
        pytest.skip("no fork on this system")
    read_some(source)
    assert len(pickle.dumps(source)) < 1000
    with get_context(method).Pool(1) as workers:
        assert workers.apply(read_some, (source,)) == DATA[1000:1050]


def test_headers_of_the_user_are_sent(web: WebServer) -> None:
    options = {"headers": {"X-Token": "1"}, "params": {"key": "value"}}
    source = open_source(f"{web.url}/m.zt", storage_options=options)
    assert source.read(0, 5) == DATA[:5]
    assert {path for _, path, _ in web.requests} == {"/m.zt?key=value"}
    assert web.gets == ["bytes=0-4"]


def test_siblings(web: WebServer, source: Source) -> None:
    web.behaviour.files["/b/n.zt"] = b"other"
    assert bytes(source.sibling("b/n.zt").read(0, 5)) == b"other"
    with pytest.raises(FileNotFoundError):
        source.sibling("none.zt")


@pytest.mark.parametrize("before", ['"first"', None])
def test_a_file_that_changed(web: WebServer, before: str | None) -> None:
    web.behaviour.etag = before
    web.behaviour.modified = "Mon, 01 Jan 2024 00:00:00 GMT"
    source = open_source(f"{web.url}/m.zt")
    assert source.read(0, 5) == DATA[:5]
    web.behaviour.etag = before and '"second"'
    web.behaviour.modified = "Mon, 01 Jan 2024 00:00:01 GMT"
    with pytest.raises(FileChangedError, match="ETag" if before else "Last-Modified"):
        source.read(0, 5)
    assert web.gets == ["bytes=0-4"] * 2


def test_a_weak_etag_of_a_proxy_is_the_same_version(web: WebServer, source: Source) -> None:
    web.behaviour.etag = 'W/"first"'
    assert source.read(0, 5) == DATA[:5]


@pytest.mark.parametrize("length", [len(DATA) + 1, 1000])
def test_another_size_is_a_change_without_any_etag(web: WebServer, length: int) -> None:
    web.behaviour.etag = None
    with pytest.warns(CheckpointWarning, match="neither ETag nor time"):
        source = open_source(f"{web.url}/m.zt")
    web.behaviour.files["/m.zt"] = bytes(length)
    for offset in (0, 2_000_000):
        with pytest.raises(FileChangedError):
            source.read(offset, 5)


def test_a_file_that_is_gone(web: WebServer, source: Source) -> None:
    web.behaviour.files.clear()
    with pytest.raises(FileChangedError, match="no longer there"):
        source.read(0, 5)


def test_a_server_that_ignores_ranges(web: WebServer) -> None:
    web.behaviour.ranges = False
    source = open_source(f"{web.url}/m.zt")
    assert source.read(0, 10) == DATA[:10]
    assert source.read(0, len(DATA)) == DATA
    for offset, nbytes in ((1, 10), (10, len(DATA) - 10), (len(DATA) - 1, 1)):
        with pytest.raises(UnsupportedError, match=r"ignores the range.*simplecache"):
            source.read(offset, nbytes)


def test_the_way_out_for_servers_that_ignore_ranges(web: WebServer) -> None:
    web.behaviour.ranges = False
    source = open_source(f"simplecache::{web.url}/m.zt")
    assert source.read(1_000_000, 10) == DATA[1_000_000:1_000_010]
    requests = len(web.gets)
    assert source.read(2_000_000, 10) == DATA[2_000_000:2_000_010]
    assert len(web.gets) == requests


@pytest.mark.parametrize("honest", [True, False])
@pytest.mark.parametrize("content_range", [True, False])
def test_a_short_answer(web: WebServer, source: Source, honest: bool, content_range: bool) -> None:
    web.behaviour.cut = 3
    web.behaviour.honest_length = honest
    web.behaviour.content_range = content_range
    with pytest.raises(OSError, match=r"got 97|does not tell|failed") as caught:
        source.read(500, 100)
    assert not isinstance(caught.value, FileChangedError)


def test_an_answer_with_other_bytes(web: WebServer, source: Source) -> None:
    web.behaviour.shift = 1
    with pytest.raises(OSError, match="asked for bytes from 500"):
        source.read(500, 100)


def test_an_answer_without_its_range_is_believed_by_length(web: WebServer, source: Source) -> None:
    web.behaviour.content_range = False
    assert source.read(500, 100) == DATA[500:600]


def test_a_compressed_answer(web: WebServer, source: Source) -> None:
    web.behaviour.encoding = "gzip"
    with pytest.raises(UnsupportedError, match="compressed"):
        source.read(500, 100)


@pytest.mark.parametrize(
    ("status", "kind"), [(403, PermissionError), (401, PermissionError), (503, OSError)]
)
def test_refusals(web: WebServer, source: Source, status: int, kind: type[OSError]) -> None:
    web.behaviour.status = status
    for call in (lambda: source.read(0, 5), lambda: open_source(f"{web.url}/m.zt")):
        with pytest.raises(kind) as caught:
            call()
        assert not isinstance(caught.value, FileNotFoundError | FileChangedError)
        assert source.name in str(caught.value)


def test_a_missing_file(web: WebServer) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.zt"):
        open_source(f"{web.url}/none.zt")


def test_no_server_at_all() -> None:
    with WebServer(**{"m.zt": DATA}) as web:
        source = open_source(f"{web.url}/m.zt")
    for call in (lambda: source.read(0, 5), lambda: open_source(f"{web.url}/m.zt")):
        with pytest.raises(OSError, match=r"connect|failed") as caught:
            call()
        assert not isinstance(caught.value, FileNotFoundError)


def test_requests_that_fail_now_and_then_do_not_show(web: WebServer) -> None:
    web.behaviour.failing, web.behaviour.latency = 0.05, 0.05
    ranges = [(offset, 8000) for offset in range(0, len(DATA) - 8000, 16_000)]
    source = open_source(f"{web.url}/m.zt", first=1000)
    assert source.read_ranges(ranges, gap=0) == [DATA[a : a + n] for a, n in ranges]
    assert web.faults > 3


def test_of_a_body_that_was_cut_the_rest_is_requested(web: WebServer, source: Source) -> None:
    web.behaviour.cut = 1000
    with pytest.raises(OSError, match="got 99000"):
        source.read(0, 100_000)
    assert web.gets[:2] == ["bytes=0-99999", "bytes=99000-99999"]


def test_the_first_bytes_come_with_size_and_version(web: WebServer) -> None:
    source = open_source(f"{web.url}/m.zt", first=1000)
    assert web.requests == [("GET", "/m.zt", "bytes=0-999")]
    assert source == open_source(f"{web.url}/m.zt")
    assert pickle.loads(pickle.dumps(source)).read(5, 5) == DATA[5:10]
    web.behaviour.files["/empty"] = b""
    assert open_source(f"{web.url}/empty", first=1000).size == 0
    with pytest.raises(FileNotFoundError):
        open_source(f"{web.url}/none.zt", first=1000)
    web.behaviour.ranges = False
    assert open_source(f"{web.url}/m.zt", first=1000).size == len(DATA)


QUICK = {"xckpt": {"timeout": 0.6, "min_rate": 1000}}


def test_a_silent_server_is_a_time_out(web: WebServer) -> None:
    source = open_source(f"{web.url}/m.zt", storage_options=QUICK)
    web.behaviour.silent = True
    for call in (
        lambda: source.read(0, 5),
        lambda: pickle.loads(pickle.dumps(source)).read(0, 5),
        lambda: open_source(f"{web.url}/m.zt", storage_options=QUICK),
        lambda: open_source(f"{web.url}/m.zt", storage_options=QUICK, first=1000),
        lambda: source.sibling("n.zt"),
    ):
        web.requests.clear()
        start = time.monotonic()
        with pytest.raises(TimeoutError, match=r"'xckpt'.*'timeout'") as caught:
            call()
        assert 0.5 < time.monotonic() - start < 5  # on a busy machine
        assert web.url in str(caught.value)
        assert len(web.requests) == 2  # an attempt is silent for half of the time


@pytest.mark.parametrize("trickle", [0.05, float("inf")])
def test_a_body_that_hardly_comes_is_a_time_out(web: WebServer, trickle: float) -> None:
    source = open_source(f"{web.url}/m.zt", storage_options=QUICK)
    web.behaviour.trickle = trickle
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"bytes came in 0\.6 seconds"):
        source.read(0, 5000)
    assert time.monotonic() - start < 5


def test_a_body_that_comes_slowly_comes(web: WebServer) -> None:
    options = {"xckpt": {"timeout": 0.6, "min_rate": 10}}
    source = open_source(f"{web.url}/m.zt", storage_options=options)
    web.behaviour.trickle = 0.02
    start = time.monotonic()
    assert source.read(0, 60) == DATA[:60]
    assert time.monotonic() - start > 1  # longer than the limit, which is about what arrives


def test_a_silent_server_behind_a_cache_is_a_time_out(web: WebServer) -> None:
    web.behaviour.silent = True
    with pytest.raises(TimeoutError, match="'timeout'"):
        open_source(f"simplecache::{web.url}/m.zt", storage_options=QUICK)


@pytest.mark.parametrize(
    "own", [{"time_out": 1}, {"timeout": 0}, {"timeout": "1"}, {"min_rate": -1}, {"timeout": 1e999}]
)
def test_options_of_ours_that_are_wrong(web: WebServer, own: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="xckpt"):
        open_source(f"{web.url}/m.zt", storage_options={"xckpt": own})


@pytest.mark.parametrize("first", [0, 1000, 1 << 16])
def test_another_content_without_any_validator(
    web: WebServer, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.behaviour.etag = None
    with pytest.warns(CheckpointWarning, match="neither ETag nor time"):
        source = open_source(f"{web.url}/m.zt", first=first)
    with pytest.warns(CheckpointWarning):
        again = open_source(f"{web.url}/m.zt", first=first)
    assert source != again
    assert not _is_lasting(source.name, source.identity)
    assert pickle.loads(pickle.dumps(source)) == source
    web.requests.clear()
    assert source.read(1_000_000, 5) == DATA[1_000_000:1_000_005]
    assert len(web.requests) == 1
    monkeypatch.setattr(remote, "_TRUSTED_SECONDS", -1)
    assert source.read(1_000_000, 5) == DATA[1_000_000:1_000_005]
    web.behaviour.files["/m.zt"] = bytes(len(DATA))
    with pytest.raises(FileChangedError, match="begins with other bytes"):
        source.read(1_000_000, 5)
    with pytest.raises(FileChangedError):
        again.check()


def test_a_copy_of_a_file_without_validators_is_not_warned_of(web: WebServer) -> None:
    web.behaviour.etag = None
    assert open_source(f"simplecache::{web.url}/m.zt").read(5, 5) == DATA[5:10]


DIGITS = "9" * 5000


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Range": f"bytes 0-99/{DIGITS}"},
        {"Content-Range": f"bytes {DIGITS}-99/100"},
        {"Content-Range": "bytes 0-99/\u0661\u0662"},
        {"Content-Range": "none"},
        {"Content-Range": f"bytes 0-99/{DIGITS}", "Content-Length": None},
        {"Content-Length": DIGITS},
        {"Content-Length": "9" * 19},
        {"ETag": "e" * 5000},
        {"ETag": '"\x1b[2J"'},
        {"Last-Modified": "\x80\xff"},
    ],
)
@pytest.mark.parametrize("first", [0, 1000])
@pytest.mark.filterwarnings("ignore::xckpt.errors.CheckpointWarning")
def test_absurd_headers_are_errors_with_the_url(
    web: WebServer, headers: dict[str, Any], first: int
) -> None:
    source = open_source(f"{web.url}/m.zt")
    web.behaviour.headers = headers
    if "Content-Range" not in headers or first:
        web.behaviour.ranges = "Content-Range" in headers
    calls: list[Callable[[], object]] = [
        lambda: source.read(0, 100),
        lambda: open_source(f"{web.url}/m.zt", first=first).read(0, 10),
    ]
    for call in calls:
        with contextlib.suppress(OSError, UnsupportedError):  # and nothing else
            call()
            continue
        with pytest.raises((OSError, UnsupportedError)) as caught:
            call()
        assert web.url in str(caught.value)
        assert "\x1b" not in str(caught.value)
        assert not isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize("location", ["/m.zt", "http://[::1", "http://a b:99999/", "ftp://h/m"])
def test_redirects_that_lead_nowhere_are_final(web: WebServer, location: str) -> None:
    source = open_source(f"{web.url}/m.zt")
    web.behaviour.location = location
    web.requests.clear()
    with pytest.raises(OSError, match=r"m\.zt") as caught:
        source.read(0, 10)
    assert not isinstance(caught.value, FileNotFoundError | FileChangedError)
    assert len(web.requests) <= 11  # what aiohttp follows in one attempt
    for first in (0, 1000):
        with pytest.raises(OSError, match=r"m\.zt") as caught:
            open_source(f"{web.url}/m.zt", first=first)
        assert not isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize("url", ["http://[::1/m.zt", "http://h:999999/m.zt", "http:///m.zt"])
def test_invalid_urls(url: str) -> None:
    for first in (0, 1000):
        with pytest.raises((OSError, ValueError)) as caught:
            open_source(url, first=first)
        assert url in str(caught.value)
        assert not isinstance(caught.value, FileNotFoundError)


def test_our_options_do_not_reach_a_glob_or_an_upload() -> None:
    from xckpt.opening.sharding import list_files
    from xckpt.storage.sink import UploadSink

    memory = "memory://" + uuid4().hex
    sink = UploadSink(f"{memory}/m.zt", storage_options=QUICK)
    sink.write(b"bytes", 0)
    sink.commit()
    listed = list_files(f"{memory}/*.zt", QUICK)
    assert listed is not None
    (url,) = listed.files.values()
    assert bytes(open_source(url, storage_options=QUICK).read(0, 5)) == b"bytes"
