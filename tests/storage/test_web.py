"""Files of web servers: numbers of requests, and servers that misbehave."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import pytest
import xarray as xr

from tests.storage.web_server import WebServer
from tests.test_stacking import zt
from xckpt.errors import CheckpointWarning, FileChangedError, UnsupportedError
from xckpt.scan.statistics_cache import is_lasting
from xckpt.storage import Location, Source, open_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytest.importorskip("obstore", reason="needs obstore: pip install 'xckpt[remote]'")

DATA = np.random.default_rng(0).bytes(3 << 20)
FIRST = "bytes=0-65535"


@pytest.fixture
def web() -> Iterator[WebServer]:
    with WebServer(**{"m.zt": DATA}) as web:
        yield web


@pytest.fixture
def source(web: WebServer) -> Source:
    """Open the file, and forget the request for that."""
    source = open_source(f"{web.url}/m.zt")
    web.forget()
    return source


class TestReading:
    def test_opening_is_one_request(self, web: WebServer) -> None:
        source = open_source(f"{web.url}/m.zt")
        assert web.requests == [("GET", "/m.zt", FIRST)]
        assert source.size == len(DATA)
        assert source == open_source(f"{web.url}/m.zt")
        assert pickle.loads(pickle.dumps(source)).read(5, 5) == DATA[5:10]

    def test_a_read_is_one_request_for_its_bytes(self, web: WebServer, source: Source) -> None:
        assert source.read(1_000_000, 100_000) == DATA[1_000_000:1_100_000]
        assert source.view(0, 10) == DATA[:10]
        assert source.read(len(DATA) - 1, 1) == DATA[-1:]
        assert len(source.read(5, 0)) == len(source.view(5, 0)) == 0
        last = len(DATA) - 1
        assert web.gets == ["bytes=1000000-1099999", "bytes=0-9", f"bytes={last}-{last}"]
        assert web.nbytes_sent == 100_011

    def test_the_whole_file(self, web: WebServer, source: Source) -> None:
        assert source.read(0, len(DATA)) == DATA
        assert b"".join(source.blocks(0, len(DATA))) == DATA
        assert web.nbytes_sent == 2 * len(DATA)

    def test_reads_are_writable_and_views_are_not(self, source: Source) -> None:
        assert not source.read(0, 100).readonly
        assert source.view(0, 100).readonly

    def test_connections_are_reused(self, web: WebServer, source: Source) -> None:
        for start in range(0, len(DATA) - (1 << 20), 1 << 18):
            assert source.read(start, 1 << 20) == DATA[start : start + (1 << 20)]
        assert len(web.gets) > 5
        # A connection is free again a moment after its answer is here.
        assert len(web.connections) <= 2

    def test_threads(self, source: Source) -> None:
        with ThreadPoolExecutor(8) as threads:
            places = range(0, 64_000, 1000)
            read = list(threads.map(lambda at: source.read(at, 1000), places))
        assert read == [DATA[at : at + 1000] for at in places]

    def test_ranges_are_few_requests(self, web: WebServer, source: Source) -> None:
        ranges = [(2_500_000, 10), (0, 10), (100, 10), (2_500_005, 100)]
        pieces = source.read_ranges(ranges)
        assert [bytes(piece) for piece in pieces] == [DATA[a : a + n] for a, n in ranges]
        assert sorted(map(str, web.gets)) == ["bytes=0-109", "bytes=2500000-2500104"]

    def test_an_empty_file(self, web: WebServer) -> None:
        web.behaviour.files["/empty"] = b""
        assert open_source(f"{web.url}/empty").size == 0
        web.behaviour.ranges = False
        assert open_source(f"{web.url}/empty").size == 0

    def test_siblings(self, web: WebServer, source: Source) -> None:
        web.behaviour.files["/b/n%20o.zt"] = b"other"
        assert bytes(source.sibling("b/n o.zt").read(0, 5)) == b"other"
        with pytest.raises(FileNotFoundError):
            source.sibling("none.zt")

    @pytest.mark.parametrize("path", ["a//b", "a%20b", "a%2Fb", "%C3%BC", "a.b~c=d,e@f", "a;b&c"])
    @pytest.mark.parametrize("query", ["", "?", "?X-Signature=a%2Bb%3D&d=/"])
    def test_addresses_are_used_as_they_are(self, web: WebServer, path: str, query: str) -> None:
        web.behaviour.files[f"/{path}"] = DATA[:100]
        source = open_source(f"{web.url}/{path}{query}")
        assert source.read(5, 5) == DATA[5:10]
        assert {target for _, target, _ in web.requests} == {f"/{path}{query}".rstrip("?")}


class TestOptions:
    def test_headers_and_parameters_are_sent(self, web: WebServer) -> None:
        options = {"headers": {"X-Token": "1"}, "params": {"key": "value"}}
        source = open_source(f"{web.url}/m.zt", storage_options=options)
        assert source.read(0, 5) == DATA[:5]
        assert {path for _, path, _ in web.requests} == {"/m.zt?key=value"}
        assert {headers["X-Token"] for headers in web.headers} == {"1"}

    def test_a_store_that_the_user_made(self, web: WebServer) -> None:
        from obstore.store import HTTPStore, MemoryStore

        store = HTTPStore.from_url(web.url, client_options={"allow_http": True})
        source = open_source(f"{web.url}/m.zt", storage_options={"store": store})
        assert pickle.loads(pickle.dumps(source)).read(5, 5) == DATA[5:10]
        memory = MemoryStore()
        memory.put("a/m.zt", DATA)
        source = open_source("s3://any/a/m.zt", storage_options={"store": memory})
        assert source.read(5, 5) == DATA[5:10]

    def test_an_encrypted_connection(self, tmp_path: Path) -> None:
        pytest.importorskip("cryptography", reason="needs cryptography: pip install cryptography")
        with WebServer(**{"m.zt": DATA}) as web:
            certificate = web.encrypt(tmp_path)
            url = f"{web.url.replace('http://127.0.0.1', 'https://localhost')}/m.zt"
            with pytest.raises(OSError, match=r"certificate .* not trusted.*'verify'"):
                open_source(url, storage_options={"retries": 0})
            for options in ({"ssl": False}, {"verify": False}, {"verify": str(certificate)}):
                # Headers make the address be asked for first, by other means.
                for more in ({}, {"headers": {"X-Token": "1"}}):
                    source = open_source(url, storage_options={**options, **more})
                    for start in (0, 1 << 20, 5):
                        assert source.read(start, 2 << 20) == DATA[start : start + (2 << 20)]

    @pytest.mark.parametrize("option", ["account", "connection string"])
    def test_blobs_of_azure(self, web: WebServer, option: str) -> None:
        web.behaviour.files["/me/box/a/m.zt"] = DATA[:100]
        web.behaviour.modified = "Mon, 01 Jun 2026 00:00:00 GMT"  # which Azure always sends
        options = {"account_name": "me", "endpoint_url": f"{web.url}/me"}
        if option == "connection string":
            options = {"connection_string": f"AccountName=me;BlobEndpoint={web.url}/me"}
        source = open_source("az://box/a/m.zt", storage_options={**options, "sas_token": "sig=x"})
        assert source.read(5, 5) == DATA[5:10]
        assert {path for _, path, _ in web.requests} == {"/me/box/a/m.zt?sig=x"}

    def test_a_proxy(self, web: WebServer) -> None:
        url = "http://host.invalid/m.zt"
        for options in ({"proxy": web.url}, {"client_options": {"proxy_url": web.url}}):
            assert open_source(url, storage_options=options).read(5, 5) == DATA[5:10]
        assert {path for _, path, _ in web.requests} == {url}

    @pytest.mark.parametrize(
        "limits",
        [{"time_out": 1}, {"timeout": 0}, {"timeout": "1"}, {"retries": -1}, {"timeout": 1e999}],
    )
    def test_invalid_limits(self, web: WebServer, limits: dict[str, Any]) -> None:
        for options in ({"xckpt": limits}, limits):
            with pytest.raises(ValueError, match="storage_options"):
                open_source(f"{web.url}/m.zt", storage_options=options)

    def test_an_unknown_option_lists_the_known_ones(self, web: WebServer) -> None:
        with pytest.raises(ValueError, match=r"unknown key 'hedaers' .* http.*headers.*verify"):
            open_source(f"{web.url}/m.zt", storage_options={"hedaers": {}})

    def test_the_former_rate_option_is_explained(self, web: WebServer) -> None:
        with pytest.warns(FutureWarning, match=r"'min_rate'.*'read_timeout'"):
            open_source(f"{web.url}/m.zt", storage_options={"xckpt": {"min_rate": 1000}})

    def test_package_options_are_not_passed_to_globs_and_uploads(self) -> None:
        from xckpt.opening.files import files_of
        from xckpt.storage.uploads import UploadSink

        memory = "memory://" + uuid4().hex
        sink = UploadSink(f"{memory}/m.zt", storage_options=QUICK)
        sink.write(b"bytes", 0)
        sink.commit()
        files = files_of(Location.of(f"{memory}/*.zt", QUICK))
        (place,) = files.places.values()
        assert bytes(open_source(place).read(0, 5)) == b"bytes"


class TestVersions:
    @pytest.mark.parametrize("before", ['"first"', None])
    def test_a_file_that_changed(self, web: WebServer, before: str | None) -> None:
        web.behaviour.etag = before
        web.behaviour.modified = "Mon, 01 Jan 2024 00:00:00 GMT"
        source = open_source(f"{web.url}/m.zt")
        assert source.read(0, 5) == DATA[:5]
        web.behaviour.etag = before and '"second"'
        web.behaviour.modified = "Mon, 01 Jan 2024 00:00:01 GMT"
        web.forget()
        with pytest.raises(FileChangedError, match="ETag" if before else "Last-Modified"):
            source.read(0, 5)
        assert web.gets == ["bytes=0-4"]

    def test_servers_may_look_at_the_version_themselves(
        self, web: WebServer, source: Source
    ) -> None:
        assert source.read(0, 5) == DATA[:5]
        assert web.headers[-1]["If-Match"] == '"first"'
        web.behaviour.status = 412
        with pytest.raises(FileChangedError, match="ETag"):
            source.read(0, 5)

    @pytest.mark.parametrize("strong_first", [True, False])
    def test_a_weak_etag_of_a_proxy_is_the_same_version(
        self, web: WebServer, strong_first: bool
    ) -> None:
        etags = ['"first"', 'W/"first"'] if strong_first else ['W/"first"', '"first"']
        web.behaviour.etag = etags[0]
        source = open_source(f"{web.url}/m.zt")
        web.behaviour.etag = etags[1]
        assert source.read(0, 5) == DATA[:5]
        assert ("If-Match" in web.headers[-1]) == strong_first

    @pytest.mark.parametrize("length", [len(DATA) + 1, 1000])
    def test_another_size_is_a_change_without_any_etag(self, web: WebServer, length: int) -> None:
        web.behaviour.etag = None
        with pytest.warns(CheckpointWarning, match="neither ETag nor Last-Modified"):
            source = open_source(f"{web.url}/m.zt")
        web.behaviour.files["/m.zt"] = bytes(length)
        for offset in (0, 2_000_000):
            with pytest.raises(FileChangedError):
                source.read(offset, 5)

    @pytest.mark.parametrize("lost", ["etag", "modified"])
    def test_an_answer_without_the_version_that_was_promised(
        self, web: WebServer, lost: str
    ) -> None:
        web.behaviour.etag = '"first"' if lost == "etag" else None
        web.behaviour.modified = "Mon, 01 Jan 2024 00:00:00 GMT"
        source = open_source(f"{web.url}/m.zt")
        setattr(web.behaviour, lost, None)
        web.behaviour.files["/m.zt"] = bytes(len(DATA))
        for call in (lambda: source.read(2_000_000, 5), source.check):
            with pytest.raises(FileChangedError, match=r"was .* and is missing now"):
                call()

    @pytest.mark.parametrize("found", ["etag", "modified"])
    def test_a_version_that_was_missing_at_first(self, web: WebServer, found: str) -> None:
        web.behaviour.etag = None
        with pytest.warns(CheckpointWarning, match="neither ETag nor Last-Modified"):
            source = open_source(f"{web.url}/m.zt")
        date = "Mon, 01 Jan 2024 00:00:00 GMT"
        setattr(web.behaviour, found, date if found == "modified" else '"first"')
        with pytest.raises(FileChangedError, match="was missing and is"):
            source.read(2_000_000, 5)

    def test_an_equal_etag_needs_no_time(self, web: WebServer) -> None:
        web.behaviour.modified = "Mon, 01 Jan 2024 00:00:00 GMT"
        source = open_source(f"{web.url}/m.zt")
        web.behaviour.modified = None
        assert source.read(0, 5) == DATA[:5]

    def test_a_file_that_is_gone(self, web: WebServer, source: Source) -> None:
        web.behaviour.files.clear()
        with pytest.raises(FileChangedError, match="no longer there"):
            source.read(0, 5)

    def test_another_content_without_any_validator(
        self, web: WebServer, later: Callable[[float], None]
    ) -> None:
        web.behaviour.etag = None
        with pytest.warns(CheckpointWarning, match="neither ETag nor Last-Modified"):
            source = open_source(f"{web.url}/m.zt")
        with pytest.warns(CheckpointWarning):
            again = open_source(f"{web.url}/m.zt")
        assert source != again
        assert not is_lasting(source.name, source.identity)
        assert pickle.loads(pickle.dumps(source)) == source
        web.forget()
        assert source.read(1_000_000, 5) == DATA[1_000_000:1_000_005]
        assert len(web.requests) == 1
        later(20)
        assert source.read(1_000_000, 5) == DATA[1_000_000:1_000_005]
        later(20)
        web.behaviour.files["/m.zt"] = bytes(len(DATA))
        with pytest.raises(FileChangedError, match="begins with other bytes"):
            source.read(1_000_000, 5)
        with pytest.raises(FileChangedError):
            again.check()


class TestAnswers:
    def test_a_server_that_ignores_ranges(self, web: WebServer, source: Source) -> None:
        web.behaviour.ranges = False
        for call in (lambda: source.read(0, 10), lambda: open_source(f"{web.url}/m.zt")):
            with pytest.raises(UnsupportedError, match=r"ignores ranges.*Download it") as caught:
                call()
            assert web.url in str(caught.value)

    @pytest.mark.parametrize("honest", [True, False])
    def test_a_short_answer(self, web: WebServer, source: Source, honest: bool) -> None:
        web.behaviour.cut = 3
        web.behaviour.honest_length = honest
        with pytest.raises(OSError, match=r"got 97|broke off") as caught:
            source.read(500, 100)
        assert not isinstance(caught.value, FileChangedError)
        assert web.url in str(caught.value)
        assert web.gets == ["bytes=500-599"] * 8
        with pytest.raises(OSError, match=r"got 65533|broke off"):
            open_source(f"{web.url}/m.zt")

    def test_an_answer_with_other_bytes(self, web: WebServer, source: Source) -> None:
        web.behaviour.shift = 1
        with pytest.raises(OSError, match=r"asked for bytes 500\.\.600, got 501\.\.601"):
            source.read(500, 100)

    def test_an_answer_without_a_content_range(self, web: WebServer, source: Source) -> None:
        web.behaviour.content_range = False
        with pytest.raises(UnsupportedError, match="does not state which bytes"):
            source.read(500, 100)

    def test_a_compressed_answer(self, web: WebServer, source: Source) -> None:
        web.behaviour.encoding = "gzip"
        for call in (lambda: source.read(500, 100), lambda: open_source(f"{web.url}/m.zt")):
            with pytest.raises(UnsupportedError, match="compressed"):
                call()

    @pytest.mark.parametrize(
        ("status", "kind"), [(403, PermissionError), (401, PermissionError), (503, OSError)]
    )
    def test_refusals(
        self, web: WebServer, source: Source, status: int, kind: type[OSError]
    ) -> None:
        web.behaviour.status = status
        for call in (lambda: source.read(0, 5), lambda: open_source(f"{web.url}/m.zt")):
            with pytest.raises(kind) as caught:
                call()
            assert not isinstance(caught.value, FileNotFoundError | FileChangedError)
            assert source.name in str(caught.value)
            if status == 503:
                assert "the server answered 503, at attempt 8" in str(caught.value)

    def test_a_missing_file(self, web: WebServer) -> None:
        with pytest.raises(FileNotFoundError, match=r"none\.zt"):
            open_source(f"{web.url}/none.zt")

    def test_a_server_that_is_not_running(self) -> None:
        with WebServer(**{"m.zt": DATA}) as web:
            source = open_source(f"{web.url}/m.zt")
        for call in (lambda: source.read(0, 5), lambda: open_source(f"{web.url}/m.zt")):
            with pytest.raises(OSError, match=r"cannot connect: Connection refused") as caught:
                call()
            assert not isinstance(caught.value, FileNotFoundError)

    def test_a_name_that_cannot_be_looked_up(self) -> None:
        with pytest.raises(OSError, match="cannot be looked up: check the URL"):
            open_source("http://no-such-host.invalid/m.zt", storage_options={"retries": 0})

    def test_a_server_that_shortens_every_range(self, web: WebServer, source: Source) -> None:
        web.behaviour.headers = {"Content-Range": f"bytes 500-549/{len(DATA)}"}
        with pytest.raises(OSError, match=r"got 500\.\.550; .*download the file"):
            source.read(500, 100)

    def test_occasional_failures_are_retried(self, web: WebServer) -> None:
        web.behaviour.failing, web.behaviour.latency = 0.2, 0.02
        ranges = [(offset, 8000) for offset in range(0, len(DATA) - 8000, 16_000)]
        source = open_source(f"{web.url}/m.zt")
        with ThreadPoolExecutor(8) as threads:
            read = list(threads.map(lambda extent: source.read(*extent), ranges))
        assert read == [DATA[a : a + n] for a, n in ranges]
        assert web.faults > 20


QUICK = {"xckpt": {"timeout": 1.2, "read_timeout": 0.3}}


class TestTime:
    def test_a_silent_server_is_a_time_out(self, web: WebServer) -> None:
        source = open_source(f"{web.url}/m.zt", storage_options=QUICK)
        web.behaviour.silent = True
        for call in (
            lambda: source.read(0, 5),
            lambda: pickle.loads(pickle.dumps(source)).read(0, 5),
            lambda: open_source(f"{web.url}/m.zt", storage_options=QUICK),
            lambda: source.sibling("n.zt"),
        ):
            web.forget()
            start = time.monotonic()
            with pytest.raises(TimeoutError, match=r"'timeout'.*'read_timeout'") as caught:
                call()
            assert 0.5 < time.monotonic() - start < 5  # on a busy machine
            assert web.url in str(caught.value)
            assert len(web.requests) == 2

    @pytest.mark.parametrize("trickle", [0.05, float("inf")])
    def test_a_stalled_body_is_a_time_out(self, web: WebServer, trickle: float) -> None:
        source = open_source(f"{web.url}/m.zt", storage_options=QUICK)
        web.behaviour.trickle = trickle
        start = time.monotonic()
        with pytest.raises(TimeoutError, match="no end of it, in time"):
            source.read(0, 5000)
        assert time.monotonic() - start < 5

    def test_a_slow_body_is_read(self, web: WebServer) -> None:
        options = {"timeout": 30, "read_timeout": 0.5}
        source = open_source(f"{web.url}/m.zt", storage_options=options)
        web.behaviour.trickle = 0.02
        start = time.monotonic()
        assert source.read(0, 60) == DATA[:60]
        assert time.monotonic() - start > 1  # longer than the limit, which is for silence


class TestHostileServers:
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
    @pytest.mark.filterwarnings("ignore::xckpt.errors.CheckpointWarning")
    def test_absurd_headers_are_errors_with_the_url(
        self, web: WebServer, headers: dict[str, Any]
    ) -> None:
        url = f"{web.url}/m.zt"
        source = open_source(url, storage_options=QUICK)
        web.behaviour.headers = headers
        calls: list[Callable[[], object]] = [
            lambda: source.read(0, 100),
            lambda: open_source(url, storage_options=QUICK).read(0, 10),
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

    @pytest.mark.parametrize(
        "location", ["/m.zt", "http://[::1", "http://a b:99999/", "ftp://h/m", "file:///m.zt"]
    )
    @pytest.mark.parametrize("query", ["", "?a=b"])
    def test_redirects_that_lead_nowhere_are_final(
        self, web: WebServer, location: str, query: str
    ) -> None:
        url = f"{web.url}/m.zt{query}"
        source = open_source(url)
        web.behaviour.location = location
        for call in (lambda: source.read(0, 10), lambda: open_source(url)):
            web.forget()
            with pytest.raises(OSError, match=r"m\.zt") as caught:
                call()
            assert not isinstance(caught.value, FileNotFoundError | FileChangedError)
            assert len(web.requests) <= 22  # that are followed in one attempt

    @pytest.mark.parametrize("url", ["http://[::1/m.zt", "http://h:999999/m.zt", "http:///m.zt"])
    def test_invalid_urls(self, url: str) -> None:
        with pytest.raises((OSError, ValueError)) as caught:
            open_source(url)
        assert url in str(caught.value)
        assert not isinstance(caught.value, FileNotFoundError)


class TestCredentials:
    """Credentials for one server are not sent to others by a redirect."""

    @pytest.fixture
    def other_host(self, web: WebServer) -> Iterator[WebServer]:
        with WebServer(**{"m.zt": DATA}) as other_host:
            web.behaviour.location = f"{other_host.url}/m.zt"
            yield other_host

    @pytest.mark.parametrize(
        ("options", "user", "query"),
        [
            ({"headers": {"Authorization": "Bearer SECRET"}}, "", ""),
            ({"headers": {"X-Api-Key": "SECRET", "Cookie": "sid=SECRET"}}, "", ""),
            ({"client_kwargs": {"headers": {"X-Api-Key": "SECRET"}}}, "", ""),
            ({"client_options": {"default_headers": {"X-Api-Key": "SECRET"}}}, "", ""),
            ({"client_kwargs": {"auth": ("user", "SECRET")}}, "", ""),
            ({"params": {"token": "SECRET"}}, "", ""),
            ({}, "user:SECRET@", ""),
            ({}, "", "?token=SECRET"),
        ],
    )
    def test_credentials_are_not_sent_to_another_server(
        self, web: WebServer, other_host: WebServer, options: Any, user: str, query: str
    ) -> None:
        url = f"{web.url.replace('://', f'://{user}')}/m.zt{query}"
        source = open_source(url, storage_options=options)
        assert pickle.loads(pickle.dumps(source)).read(5, 5) == DATA[5:10]
        sent = [str([*headers.items()]) for headers in web.headers] + [repr(web.requests)]
        # "user:SECRET" as it is sent.
        assert any("SECRET" in header or "dXNlcjpTRUNSRVQ" in header for header in sent)
        assert other_host.headers
        for headers in other_host.headers:
            text = str([*headers.items()])
            assert "SECRET" not in text
            assert "Authorization" not in text

    def test_credentials_follow_redirects_to_the_same_server(self, web: WebServer) -> None:
        web.behaviour.files["/here"] = DATA
        web.behaviour.moved = {"/m.zt": "/here"}
        options = {"headers": {"X-Api-Key": "SECRET"}}
        source = open_source(f"{web.url}/m.zt", storage_options=options)
        web.forget()
        assert source.read(5, 5) == DATA[5:10]
        assert [path for _, path, _ in web.requests] == ["/here"]
        assert web.headers[0]["X-Api-Key"] == "SECRET"

    def test_an_expired_address_is_renewed(self, web: WebServer, other_host: WebServer) -> None:
        options = {"headers": {"X-Api-Key": "SECRET"}}
        source = open_source(f"{web.url}/m.zt", storage_options=options)
        other_host.behaviour.files["/new"] = other_host.behaviour.files.pop("/m.zt")
        web.behaviour.location = f"{other_host.url}/new"
        assert source.read(5, 5) == DATA[5:10]


class TestLogging:
    def test_requests_repetitions_and_hits_are_reported(
        self, web: WebServer, source: Source, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.DEBUG, logger="xckpt"):
            web.behaviour.busy = 1
            source.read(100, 50)
            open_source(f"{web.url}/m.zt?token=SECRET")
        lines = caplog.text.splitlines()
        assert len(lines) == 2
        assert "repeat in" in lines[0]
        assert "the server answered 429" in lines[0]
        assert "50 bytes at 100 in" in lines[1]
        assert all(f"{web.url}/m.zt" in line for line in lines)
        assert "SECRET" not in caplog.text


def read_some(source: Source) -> bytes:
    return bytes(source.read(1000, 50))


class Rows:
    """Rows of a tensor, as PyTorch's loader takes them."""

    def __init__(self, ds: xr.Dataset) -> None:
        self.ds = ds

    def __len__(self) -> int:
        return len(self.ds["w"])

    def __getitem__(self, row: int) -> Any:
        return self.ds["w"][row].values


class TestProcesses:
    @pytest.mark.parametrize("method", ["spawn", "forkserver"])
    def test_a_source_pickles_to_another_process(self, source: Source, method: Any) -> None:
        read_some(source)
        assert len(pickle.dumps(source)) < 1000
        with get_context(method).Pool(1) as workers:
            assert workers.apply(read_some, (source,)) == DATA[1000:1050]

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    def test_a_read_in_a_fork_explains_what_to_do(self, source: Source) -> None:
        read_some(source)
        start = time.monotonic()
        with (
            get_context("fork").Pool(1) as workers,
            pytest.raises(UnsupportedError, match=r"forked.*'spawn' or 'forkserver'") as caught,
        ):
            workers.apply(read_some, (source,))
        assert source.name in str(caught.value)
        assert time.monotonic() - start < 10

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
    def test_a_fork_before_the_first_request_is_harmless(self, web: WebServer) -> None:
        code = (
            "import os, sys, xarray, xckpt.storage.objects\n"
            "child = os.fork()\n"
            "from xckpt.storage import open_source\n"
            "data = bytes(open_source(sys.argv[1]).read(0, 3))\n"
            "os.write(1, data.hex().encode() + b' ')\n"
            "child and os.waitpid(child, 0)\n"
        )
        command = [sys.executable, "-W", "ignore", "-c", code, f"{web.url}/m.zt"]
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)  # noqa: S603
        assert run.stdout.split() == [DATA[:3].hex()] * 2

    @pytest.mark.skipif(sys.platform == "win32", reason="has other signals")
    def test_ctrl_c_ends_a_read_at_once_and_the_process_with_it(self, web: WebServer) -> None:
        code = (
            "import sys, time\n"
            "from xckpt.storage import open_source\n"
            "source = open_source(sys.argv[1])\n"
            "print('open', flush=True)\n"
            "try:\n"
            "    source.read(0, 100)\n"
            "except KeyboardInterrupt:\n"
            "    print('interrupted', flush=True)\n"
        )
        command = [sys.executable, "-c", code, f"{web.url}/m.zt"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            web.behaviour.silent = True
            web.forget()
            while not web.requests:
                time.sleep(0.01)
            start = time.monotonic()
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "interrupted\n"
            assert process.wait() == 0
            assert time.monotonic() - start < 3  # on a busy machine

    def test_processes_of_dask(self, web: WebServer) -> None:
        web.behaviour.files["/w.zt"] = zt({"w": np.arange(1000.0)})
        ds = xr.open_dataset(f"{web.url}/w.zt", engine="ztensor")
        total = ds["w"].sum().compute(scheduler="processes", num_workers=1)
        assert float(total) == 499_500

    @pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    def test_workers_of_torch(self, web: WebServer, method: str) -> None:
        torch: Any = pytest.importorskip("torch.utils.data", reason="needs PyTorch")
        rows = np.arange(20.0).reshape(4, 5)
        web.behaviour.files["/w.zt"] = zt({"w": rows})
        ds = xr.open_dataset(f"{web.url}/w.zt", engine="ztensor")
        loader = torch.DataLoader(Rows(ds), num_workers=2, multiprocessing_context=method)
        if method == "fork":
            with pytest.raises(UnsupportedError, match="'spawn' or 'forkserver'"):
                next(iter(loader))
        else:
            assert np.array_equal(np.concatenate([batch.numpy() for batch in loader]), rows)

    def test_requests_in_flight_are_few(self, web: WebServer, source: Source) -> None:
        web.behaviour.latency = 0.2
        threads = [threading.Thread(target=read_some, args=(source,)) for _ in range(100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert 16 < web.at_once <= 32
