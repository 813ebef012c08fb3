"""On a cluster: small tasks, files that stay with a worker, and workers that die."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pytest
import xarray as xr
from safetensors.numpy import save

import xckpt
from tests.storage.s3_server import BUCKET, S3Server, require_packages
from tests.storage.web_server import WebServer
from tests.test_stacking import zt
from xckpt.errors import CheckpointWarning
from xckpt.scan import scanning
from xckpt.scan.cluster import placed
from xckpt.storage import prefetch, remote
from xckpt.storage.local import LocalSource
from xckpt.storage.requests import IN_FLIGHT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

TENSORS = 2000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "m.zt"
    path.write_bytes(zt({f"layers.{n}.w": np.full(4, n, "<f4") for n in range(TENSORS)}))
    return path


def test_a_task_is_less_than_two_kilobytes(path: Path) -> None:
    with xr.open_dataset(path, engine="ztensor") as ds:
        tasks = [task for v in ds.variables.values() for task in dict(v.data.dask).values()]
    assert len(tasks) == TENSORS
    assert max(len(pickle.dumps(task)) for task in tasks) < 1024
    assert len(pickle.dumps(tasks)) < 1024 * TENSORS
    with xr.open_dataset(path, engine="ztensor", stack=True) as stacked:
        array = stacked["layers.w"].data
        tasks = list(dict(array.dask).values())
    assert len(tasks) == 2  # small tensors share chunks
    assert len(pickle.dumps(array)) < 1024 * TENSORS
    assert all(len(pickle.dumps(task)) < 1024 * 1024 for task in tasks)


@contextmanager
def two_processes() -> Iterator[Any]:
    distributed: Any = pytest.importorskip("distributed")
    options: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "processes": True}
    with (
        dask.config.set({"distributed.worker.memory.terminate": False}),
        distributed.LocalCluster(dashboard_address=":0", **options) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.fixture
def client() -> Iterator[Any]:
    with two_processes() as client:
        yield client


def test_without_workers_a_warning_says_what_is_missing(tmp_path: Path) -> None:
    distributed: Any = pytest.importorskip("distributed")
    xckpt.save({"w": np.ones((4, 4), "f4")}, tmp_path / "m.zt")
    with (
        distributed.LocalCluster(n_workers=0, dashboard_address=":0", processes=False) as cluster,
        distributed.Client(cluster),
    ):
        timer = threading.Timer(6, cluster.scale, [1])
        timer.start()
        with pytest.warns(CheckpointWarning, match=r"no workers.*cluster\.scale"):
            spectrum = xckpt.spectrum(tmp_path / "m.zt", cache=False, progress=False)
        timer.join()
    assert spectrum["w"].sel(statistic="rank") == 1


def test_spectra_are_the_same_to_the_bit_on_any_number_of_cores(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    rng = np.random.default_rng(0)
    shapes = [(100, 380), (700, 600), (600, 1100)]
    tensors = {f"w{n}": rng.normal(size=shape).astype("f4") for n, shape in enumerate(shapes)}
    xckpt.save(tensors, tmp_path / "m.zt")
    results = []
    for cores in (1, 2, 8):  # 8: several threads for each matrix
        with dask.config.set(num_workers=cores):
            results.append(xckpt.spectrum(tmp_path / "m.zt", cache=False, progress=False))
    request.getfixturevalue("client")
    results.append(xckpt.spectrum(tmp_path / "m.zt", cache=False, progress=False))
    for result in results[1:]:
        xr.testing.assert_identical(result, results[0])


class TestPlaces:
    """A file goes to few workers, the same ones each time, and each worker gets its share."""

    THREADS = {f"tcp://{n}": 2 for n in range(8)}  # noqa: RUF012  not changed

    def test_files_and_shares(self) -> None:
        tasks = [(f"shard {n // 10}", 100) for n in range(400)]
        workers = placed(tasks, self.THREADS)
        assert workers == placed(tasks, self.THREADS)
        assert {workers.count(worker) for worker in self.THREADS} == {50}
        pairs = set(zip((file for file, _ in tasks), workers, strict=True))
        assert 40 <= len(pairs) <= 40 + len(self.THREADS)  # one worker each, but for what is over

    def test_a_file_goes_where_it_went_before(self) -> None:
        files = [(f"shard {n}", 100) for n in range(40)]
        alone = {file: placed([(file, nbytes)], self.THREADS)[0] for file, nbytes in files}
        together = dict(zip(alone, placed(files, self.THREADS), strict=True))
        assert sum(alone[file] == together[file] for file in alone) >= 20

    def test_more_threads_get_more(self) -> None:
        workers = placed([("one", 10)] * 90, {"a": 1, "b": 2})
        assert workers.count("a") == 30

    def test_arrays_of_unknown_size_without_a_worker(self) -> None:
        assert placed([("x", 0)] * 3, {}) == [None] * 3
        assert set(placed([("x", 0)] * 3, {"a": 1})) == {"a"}
        assert placed([], {"a": 1}) == []


@pytest.fixture(scope="module")
def two_workers() -> Iterator[None]:
    distributed: Any = pytest.importorskip("distributed")
    with (
        dask.config.set({"distributed.scheduler.work-stealing": False}),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0"
        ) as cluster,
        distributed.Client(cluster),
    ):
        yield


@pytest.mark.usefixtures("two_workers")
class TestTwoWorkers:
    def test_a_shard_is_read_by_one_worker(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import distributed

        for shard in range(8):  # each has as many tensors as a task
            tensors = {f"layers.{shard}.{n}": np.full(8, n, "<f4") for n in range(256)}
            (tmp_path / f"m-{shard}.zt").write_bytes(zt(tensors))
        read: list[tuple[str, str]] = []
        read_into = LocalSource.read_into

        def looking(source: LocalSource, offsets: Sequence[int], memory: memoryview) -> None:
            read.append((distributed.get_worker().address, source.name))
            read_into(source, offsets, memory)

        ds = xr.open_dataset(str(tmp_path / "m-*.zt"), engine="ztensor")
        monkeypatch.setattr(LocalSource, "read_into", looking)
        stats = xckpt.stats(ds, cache=False, progress=False)
        assert len(stats.data_vars) == 8 * 256
        workers = [worker for worker, _ in read]
        assert len(set(workers)) == 2
        assert len(set(map(workers.count, workers))) == 1  # with equal shares
        assert len(set(read)) <= 9  # eight shards; one may be needed for equal shares
        first = set(read)
        read.clear()
        xckpt.stats(ds, cache=False, progress=False)
        assert set(read) == first

    def test_a_scan_of_an_object_store_has_32_requests_in_flight(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Instead of 8 MiB: all requests in flight would take hundreds of megabytes.
        for module in (remote, prefetch, scanning):
            monkeypatch.setattr(module, "REQUEST_NBYTES", 1 << 14)
        data = zt({f"w{n}": np.arange(1 << 14, dtype="<f4") + n for n in range(24)})
        with WebServer(**{"m.zt": data}) as web:
            ds = xr.open_dataset(f"{web.url}/m.zt", engine="ztensor")
            web.at_once = web.nbytes_sent = 0
            web.behaviour.together = IN_FLIGHT
            stats = xckpt.stats(ds, cache=False, progress=False)
        assert web.at_once == IN_FLIGHT  # of a process; here all workers are in one
        assert web.nbytes_sent <= len(data)  # each byte once
        xr.testing.assert_equal(stats, xckpt.stats(data, cache=False, progress=False))


def _slow_sum(block: Any) -> Any:
    time.sleep(0.02)
    return block.sum(keepdims=True)


@pytest.mark.slow
def test_a_killed_worker_costs_time_and_nothing_else(path: Path, client: Any) -> None:
    with xr.open_dataset(path, engine="ztensor") as ds:
        sums = [
            ds.variables[f"layers.{n}.w"].data.map_blocks(_slow_sum, chunks=((1,),), dtype="f4")
            for n in range(100)
        ]
    futures = client.compute(sums)
    client.gather(futures[:20])
    victim = next(iter(client.run(os.getpid).values()))
    os.kill(victim, signal.SIGKILL)
    assert [float(future[0]) for future in client.gather(futures)] == [4.0 * n for n in range(100)]


class Store:
    """A model and its copy in an object store, and two processes that read them."""

    def __init__(self, server: S3Server, client: Any) -> None:
        self.server = server
        self.client = client

    def __call__(self, scan: str) -> xr.Dataset:
        function, *models = SCANS[scan]
        urls = [f"s3://{BUCKET}/{model}.safetensors" for model in models]
        options = {"storage_options": self.server.options, "cache": False, "progress": False}
        result: xr.Dataset = function(*urls, **options)
        return result

    @property
    def transitions(self) -> int:
        """Number of changes of tasks in the scheduler of the cluster."""
        count: int = self.client.cluster.scheduler.transition_counter
        return count

    def on_threads(self, scan: str) -> xr.Dataset:
        with dask.config.set(scheduler="threads"):
            self.server.forget()
            result = self(scan)
        assert self.server.requests
        return result

    def wait_for_processes(self) -> None:
        """Wait until both processes run, again if some were killed."""
        # A process is known to the scheduler a little before its nanny knows that it has started.
        # A nanny gives up on a process that dies in between, for ever.
        nannies = list(self.client.cluster.workers.values())
        while True:
            processes = [nanny.process for nanny in nannies]
            running = [p for p in processes if p is not None and p.status.name == "running"]
            if len(running) == len(self.client.nthreads()) == len(nannies):
                return
            time.sleep(0.05)

    def kill(self, requests: int, count: int) -> threading.Thread:
        """Kill some processes once the store has received some requests."""
        self.wait_for_processes()
        victims = list(self.client.run(os.getpid).values())[:count]
        self.server.forget()

        def wait_and_kill() -> None:
            while len(self.server.requests) < requests:
                time.sleep(0.001)
            for victim in victims:
                os.kill(victim, signal.SIGKILL)

        thread = threading.Thread(target=wait_and_kill, daemon=True)
        thread.start()
        return thread


SCANS: dict[str, Any] = {
    "stats": (xckpt.stats, "m"),
    "stats by channel": (partial(xckpt.stats, dim=-1), "m"),
    "histogram": (xckpt.histogram, "m"),
    "spectrum": (xckpt.spectrum, "m"),
    "compare": (xckpt.compare, "m", "half"),
    "explain": (partial(xckpt.compare, explain=True), "m", "half"),
}


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    require_packages()
    rng = np.random.default_rng(0)
    model = {
        f"model.layers.{layer}.{module}.weight": rng.standard_normal((256, 1024)).astype("f4")
        for layer in range(12)
        for module in ("self_attn.q_proj", "mlp.up_proj")
    }
    half = {name: values.astype("f2").astype("f4") for name, values in model.items()}
    with S3Server() as server:
        server.put(**{"m.safetensors": save(model), "half.safetensors": save(half)})
        with two_processes() as client:
            yield Store(server, client)


@pytest.mark.slow
class TestProcessesWithAnObjectStore:
    @pytest.mark.parametrize("scan", SCANS)
    def test_results_are_those_of_threads_to_the_bit(self, store: Store, scan: str) -> None:
        store.server.latency = 0
        transitions = store.transitions
        expected = store.on_threads(scan)
        assert store.transitions == transitions  # the scheduler of the cluster did nothing
        assert os.getpid() not in store.client.run(os.getpid).values()
        transitions = store.transitions
        xr.testing.assert_identical(store(scan), expected)
        assert store.transitions > transitions

    def test_a_client_that_is_the_scheduler_is_used(self, store: Store) -> None:
        store.server.latency = 0
        for scheduler in (store.client, store.client.get):
            transitions = store.transitions
            with store.client.as_current(), dask.config.set(scheduler=scheduler):
                store("stats")
            assert store.transitions > transitions

    @pytest.mark.parametrize(
        ("scan", "count"), [("stats", 1), ("stats", 2), ("compare", 2), ("spectrum", 1)]
    )
    def test_killed_processes_change_no_bit(self, store: Store, scan: str, count: int) -> None:
        expected = store.on_threads(scan)
        store.server.latency = 0.05
        killing = store.kill(len(store.server.requests) // 2 + 1, count)
        result = store(scan)
        killing.join(timeout=0)
        assert not killing.is_alive()
        xr.testing.assert_identical(result, expected)
