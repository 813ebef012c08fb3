"""Remote files are read ahead: parallel requests, each byte once, equal results."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pytest
import xarray as xr
from dask.callbacks import Callback, local_callbacks
from hypothesis import given, settings
from hypothesis import strategies as st

import xckpt
from tests.sources import CountingSource
from tests.storage.web_server import WebServer
from xckpt.errors import FileChangedError
from xckpt.storage import open_source, prefetch, reading_ahead, remote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LARGE, SMALL = 6, 20
# Instead of 8 MiB: the checkpoints that all scans read would have gigabytes.
REQUEST = 1 << 16
WIDTH = 256  # of float32: a large one is four requests


@pytest.fixture(autouse=True)
def _small_requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (prefetch, remote):
        monkeypatch.setattr(module, "REQUEST_NBYTES", REQUEST)
    yield
    # Nothing is held: there is room for all. Requests in flight, and tasks of dask when another one
    # failed, go on for a while.
    until = time.monotonic() + 20
    while not is_all_released():
        assert time.monotonic() < until
        time.sleep(0.01)


def is_all_released() -> bool:
    """Return whether two ranges that take all memory are requested at once."""
    source = Far(bytes(3 << 20))
    ranges = [(source, 0, REQUEST), (source, 2 << 20, REQUEST)]
    with dask.config.set({"xckpt.read-ahead": 2 * REQUEST}), reading_ahead(ranges):
        return source.nbytes_read == 2 * REQUEST


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    large = {f"big.{n}": (("a", "b"), rng.normal(size=(WIDTH, WIDTH))) for n in range(LARGE)}
    small = {f"small.{n}": ("c", rng.normal(size=99)) for n in range(SMALL)}
    ds = xr.Dataset({**large, **small}).astype("f4")
    ds["big.1"] = ds["big.1"].astype("int8")
    path = tmp_path_factory.mktemp("ahead") / "m.zt"
    xckpt.save(ds, path, encoding={str(name): {"digest": "sha256"} for name in ds.variables})
    return path


@pytest.fixture
def web(path: Path) -> Iterator[WebServer]:
    with WebServer(**{"m.zt": path.read_bytes()}) as web:
        yield web


def opened(web: WebServer) -> xr.Dataset:
    return xr.open_dataset(f"{web.url}/m.zt", engine="ztensor")


def converted(source: str, folder: Path) -> bytes:
    xckpt.convert(source, folder / "m.safetensors", overwrite=True, progress=False)
    return (folder / "m.safetensors").read_bytes()


# Functions that read a whole checkpoint by its path or URL.
SCANS: dict[str, Callable[[str, Path], Any]] = {
    "stats": lambda url, _: xckpt.stats(url, cache=False, progress=False),
    "compute": lambda url, _: xr.open_dataset(url, engine="ztensor").compute(),
    "stacked": lambda url, _: xr.open_dataset(url, engine="ztensor", stack=True).compute(),
    "chunks": lambda url, _: xr.open_dataset(url, chunks={}, engine="ztensor").compute(),
    "convert": converted,
    "save": lambda url, folder: xckpt.save(
        xr.open_dataset(url, engine="ztensor"), folder / "m.zt", overwrite=True, progress=False
    ),
    "verify": lambda url, _: xckpt.verify(url, progress=False).findings,
    "compare": lambda url, _: (
        xckpt.compare(url, url, cache=False, progress=False).ckpt.table()["status"].tolist()
    ),
}
every_scan = pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS)


def assert_same(actual: Any, expected: Any) -> None:
    if isinstance(expected, xr.Dataset | xr.DataArray):
        xr.testing.assert_equal(actual, expected)
    else:
        assert actual == expected


class TestScans:
    @every_scan
    def test_scans_request_each_byte_once_in_parallel(
        self, scan: Any, web: WebServer, path: Path, tmp_path: Path
    ) -> None:
        opened(web)  # the header is kept
        web.behaviour.together, web.behaviour.patience = 9, 0.3
        web.requests.clear()
        web.nbytes_sent = web.at_once = 0
        result = scan(f"{web.url}/m.zt", tmp_path)
        assert_same(result, scan(str(path), tmp_path))
        assert web.at_once >= 9
        size = path.stat().st_size * (2 if scan is SCANS["compare"] else 1)
        assert web.nbytes_sent < size + size // 10 + REQUEST  # the head is read when it is opened
        assert len(web.gets) < size // REQUEST * 2 + 10

    @every_scan
    def test_all_tensors_of_a_small_file_share_a_request(
        self, scan: Any, web: WebServer, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.undo()  # requests of 8 MiB
        opened(web)
        web.requests.clear()
        result = scan(f"{web.url}/m.zt", tmp_path)
        assert_same(result, scan(str(path), tmp_path))
        # The rest looks for the config of a model next to it. A comparison opens two.
        of_file = [request for request in web.requests if request[1] == "/m.zt"]
        assert len(of_file) <= (4 if scan is SCANS["compare"] else 3)

    def test_small_tensors_share_requests_in_whatever_order_dask_has(self, tmp_path: Path) -> None:
        large = {f"{n}.w": np.ones((2, REQUEST // 4), "f4") for n in range(40)}
        small = {f"{n // 10}.b.{n % 10}": np.ones(9, "f4") for n in range(400)}
        xckpt.save({**large, **small}, tmp_path / "m.safetensors")
        data = (tmp_path / "m.safetensors").read_bytes()
        with WebServer(**{"m.safetensors": data}) as web:
            ds = xckpt.open(f"{web.url}/m.safetensors")
            web.requests.clear()
            ds.compute()
            assert len(web.gets) < len(data) // REQUEST * 2

    def test_computed_arrays_are_writable(self, web: WebServer) -> None:
        ds = opened(web)
        first, second = ds.compute(), ds.compute()
        for name in ds.variables:
            values = first[name].values
            assert values.flags.writeable
            values[...] = 0
        xr.testing.assert_identical(ds.compute(), second)

    def test_small_ranges_between_large_ones_are_merged(self, web: WebServer) -> None:
        source = open_source(f"{web.url}/m.zt")
        large, small, beside = REQUEST, 100, 10 * REQUEST
        places = [(n * large, 0 if n else 5, beside + n * small) for n in range(8)]
        ranges = []
        for at, skipped, next_to in places:
            ranges += [(source, at + skipped, large - skipped), (source, next_to, small)]
        web.requests.clear()
        with reading_ahead(ranges):
            pieces = [bytes(source.read(*extent[1:])) for extent in ranges]
        data = web.behaviour.files["/m.zt"]
        assert pieces == [data[at : at + nbytes] for _, at, nbytes in ranges]
        requested = [
            byte_range
            for byte_range in web.gets
            if byte_range and int(byte_range[6:].split("-")[0]) >= beside
        ]
        assert requested == [f"bytes={beside}-{beside + 8 * small - 1}"]

    @every_scan
    def test_faults(self, scan: Any, web: WebServer, path: Path, tmp_path: Path) -> None:
        expected = scan(str(path), tmp_path)
        web.behaviour.failing = 0.2
        web.behaviour.busy = 5
        assert_same(scan(f"{web.url}/m.zt", tmp_path), expected)
        assert web.faults

    @every_scan
    def test_a_file_replaced_during_a_scan(self, scan: Any, web: WebServer, tmp_path: Path) -> None:
        opened(web)  # the header is cached, so that later requests are for data
        web.behaviour.replaced_after = len(web.requests) + 5
        web.behaviour.latency = 0.01  # not everything has come
        with (
            dask.config.set({"xckpt.read-ahead": 2 * REQUEST}),
            pytest.raises(FileChangedError, match=web.url),
        ):
            scan(f"{web.url}/m.zt", tmp_path)

    def test_bytes_that_never_come(self, web: WebServer) -> None:
        options = {"xckpt": {"timeout": 0.5}}
        url = f"{web.url}/m.zt"
        ds = xr.open_dataset(url, engine="ztensor", storage_options=options)
        web.behaviour.silent = True
        with pytest.raises(TimeoutError, match=r"m\.zt"):
            ds.compute()

    def test_little_memory(self, web: WebServer) -> None:
        opened(web)
        web.nbytes_sent = 0
        ahead_nbytes: list[int] = []

        def looking(done: int, _: int) -> None:
            ahead_nbytes.append(web.nbytes_sent - done)

        with dask.config.set({"xckpt.read-ahead": 3 * REQUEST, "num_workers": 2}):
            xckpt.stats(f"{web.url}/m.zt", cache=False, progress=looking)
        # With what each of two blocks has and waits for, and the beginning of the file.
        assert 0 < max(ahead_nbytes) <= 12 * REQUEST

    @pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
    def test_an_abandoned_scan_stops_reading(
        self, error: type[BaseException], web: WebServer
    ) -> None:
        opened(web)
        web.behaviour.latency = 0.2

        def end(*_: Any) -> None:
            web.behaviour.silent = True
            raise error

        start = time.monotonic()
        with pytest.raises(error), dask.config.set({"xckpt.read-ahead": 4 * REQUEST}):
            xckpt.stats(f"{web.url}/m.zt", cache=False, progress=end)
        assert time.monotonic() - start < 10  # much less than the 30 seconds of a time-out

    def test_a_busy_server_is_retried(self, web: WebServer, path: Path) -> None:
        ds = opened(web)
        web.behaviour.busy = 40
        xr.testing.assert_identical(
            ds.compute().drop_encoding(), xr.open_dataset(path).compute().drop_encoding()
        )


class TestOtherReads:
    def test_a_row_is_one_request_for_its_own_bytes(self, web: WebServer) -> None:
        ds = opened(web)
        web.requests.clear()
        web.nbytes_sent = 0
        (ds["big.3"][7] * 2).compute()
        assert len(web.requests) == 1
        assert web.nbytes_sent == WIDTH * 4

    def test_a_long_read_is_several_requests(self, web: WebServer, path: Path) -> None:
        with closing(open_source(f"{web.url}/m.zt")) as source:
            web.behaviour.together, web.at_once = 5, 0
            assert source.read(5, 10 * REQUEST) == path.read_bytes()[5 : 5 + 10 * REQUEST]
            assert web.at_once > 4

    def test_computations_that_overlap(self, web: WebServer, path: Path) -> None:
        """dask takes callbacks away while it computes: the last one puts back what it found."""
        ds = opened(web)
        ds.compute()
        first, second = local_callbacks(), local_callbacks()
        for step in (first.__enter__, second.__enter__):
            step()
        for end in (first.__exit__, second.__exit__):
            end(None, None, None)
        assert not Callback.active
        web.requests.clear()
        ds.compute()
        assert len(web.gets) < path.stat().st_size // REQUEST * 2 + 10

    def test_chunks_that_are_used_together_are_read_together(
        self, web: WebServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not all of one tensor first, which would have to wait in memory for the other one."""
        with dask.config.set({"array.chunk-size": REQUEST}):
            ds = opened(web)
        both = ds["big.0"] + ds["big.5"]
        assert both.data.npartitions == 4
        read: list[int] = []
        read_range = remote.RemoteSource.read

        def looking(self: Any, offset: int, nbytes: int) -> memoryview:
            read.append(offset)
            return read_range(self, offset, nbytes)

        monkeypatch.setattr(remote.RemoteSource, "read", looking)
        with dask.config.set(scheduler="sync"):
            both.compute()
        first, second = set(sorted(read)[:4]), set(sorted(read)[4:])
        assert len(read) == 8
        assert max(map(read.index, first)) > min(map(read.index, second))
        assert max(map(read.index, second)) > min(map(read.index, first))

    def test_statistics_of_a_url_open_it_once(self, web: WebServer, path: Path) -> None:
        xckpt.stats(f"{web.url}/m.zt", cache=False, progress=False)
        assert web.requests[0] == ("GET", "/m.zt", "bytes=0-65535")
        # The rest looks for the config of a model next to it.
        of_file = [
            (method, byte_range) for method, name, byte_range in web.requests if name == "/m.zt"
        ]
        assert len(set(of_file)) == len(of_file)
        assert {method for method, _ in of_file} == {"GET"}

    def test_a_waiting_reader_takes_over_an_abandoned_request(self, web: WebServer) -> None:
        source = open_source(f"{web.url}/m.zt")
        web.behaviour.latency = 0.3
        with ThreadPoolExecutor(1) as pool:
            # More than are in flight at a time: the last ones are cancelled.
            with reading_ahead([(source, n * REQUEST, REQUEST) for n in range(20)]):
                waiting = pool.submit(source.read, 19 * REQUEST, 1000)
                while len(web.requests) < 2:
                    time.sleep(0.01)
            expected = web.behaviour.files["/m.zt"][19 * REQUEST :][:1000]
            assert bytes(waiting.result()) == expected

    def test_distributed_tasks_read_ahead_for_themselves(self, web: WebServer, path: Path) -> None:
        distributed = pytest.importorskip("distributed")
        opened(web)
        web.behaviour.latency = 0.2
        web.at_once = 0
        with (
            distributed.LocalCluster(
                n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0"
            ) as cluster,
            distributed.Client(cluster),
        ):
            result = xckpt.stats(f"{web.url}/m.zt", cache=False, progress=False)
        xr.testing.assert_equal(result, xckpt.stats(path, cache=False, progress=False))
        assert web.at_once > 8


class Far(CountingSource):
    """Bytes in memory that count as far away."""

    is_far = True

    def request(self, offset: int, nbytes: int, *, is_urgent: bool = False) -> Future[memoryview]:
        future: Future[memoryview] = Future()
        future.set_result(self.read(offset, nbytes))
        return future


@settings(max_examples=60)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 800)), min_size=2, max_size=40),
    announced=st.randoms(use_true_random=False),
    random=st.randoms(use_true_random=False),
)
def test_ranges_in_any_order_are_requested_once(sizes: Any, announced: Any, random: Any) -> None:
    ranges, at = [], 0
    for nbytes, gap in sizes:
        ranges.append((at + gap, nbytes))
        at += gap + nbytes
    source = Far(np.random.default_rng(2).bytes(at))
    announced.shuffle(ranges)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prefetch, "REQUEST_NBYTES", 1000)
        with reading_ahead((source, *extent) for extent in ranges):
            random.shuffle(ranges)
            for offset, nbytes in ranges:
                memory = memoryview(bytearray(nbytes))
                assert prefetch.fill(source, offset, memory)
                assert memory == source.data[offset : offset + nbytes]
    spans = sorted(source.reads)
    assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))


places = st.tuples(st.integers(0, 5000), st.integers(0, 3000))


@settings(max_examples=30)
@given(
    announced=st.lists(places, max_size=30),
    unannounced=st.lists(places, max_size=30),
    in_order=st.booleans(),
)
def test_any_announced_and_read_ranges(
    announced: list[tuple[int, int]], unannounced: list[tuple[int, int]], in_order: bool
) -> None:
    data = np.random.default_rng(1).bytes(8000)
    source = Far(data)
    extents = announced if in_order else unannounced
    with (
        pytest.MonkeyPatch.context() as patched,
        dask.config.set({"xckpt.read-ahead": 4000}),
    ):
        patched.setattr(prefetch, "REQUEST_NBYTES", 1000)
        with reading_ahead((source, *extent) for extent in announced):
            for number, (offset, nbytes) in enumerate(extents):
                if number % 2:
                    piece = prefetch.view(source, offset, nbytes)
                    assert piece is None or piece == data[offset : offset + nbytes]
                    continue
                memory = memoryview(bytearray(nbytes))
                if prefetch.fill(source, offset, memory):
                    assert memory == data[offset : offset + nbytes]
    assert all(0 <= offset <= offset + nbytes <= len(data) for offset, nbytes in source.reads)
