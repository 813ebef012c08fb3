"""Statistics have the same bits on any number of threads, on a cluster, and for any chunks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pytest
import xarray as xr

from tests.stats.checkpoints import memory_of, sparse_file, write
from xckpt.arrays.kinds import kind_named
from xckpt.errors import CheckpointError
from xckpt.statistics import stats
from xckpt.statistics.counts import Sketch
from xckpt.storage.local import LocalSource

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import ml_dtypes

    rng = np.random.default_rng(0)
    large = rng.standard_normal((2500, 2000)).astype(np.float32)
    large[7] = 0
    large[99, 5] = np.nan
    tensors: dict[str, Any] = {f"small.{i}": rng.standard_normal((i + 1, 33)) for i in range(20)}
    tensors |= {"large": large, "half": large[:300].astype(ml_dtypes.bfloat16)}
    tensors["whole"] = (np.nan_to_num(large[:500]) * 1e6).astype(np.int64)
    return write(tmp_path_factory.mktemp("scan") / "m.safetensors", tensors)


@pytest.fixture(scope="module")
def expected(path: Path) -> xr.Dataset:
    with dask.config.set(num_workers=1):
        return stats(path, cache=False)


def opened(path: Path, **options: Any) -> xr.Dataset:
    ds: xr.Dataset = xr.open_dataset(path, engine="safetensors", **options)
    return ds


@pytest.mark.parametrize("threads", [2, 5])
def test_any_number_of_threads_gives_the_same_statistics(
    path: Path, expected: xr.Dataset, threads: int
) -> None:
    with dask.config.set(num_workers=threads):
        xr.testing.assert_identical(stats(path, cache=False), expected)


@pytest.mark.parametrize("size", ["100kiB", "1MiB", "16MiB", "128MiB"])
def test_any_chunks_give_the_same_statistics(path: Path, expected: xr.Dataset, size: str) -> None:
    with dask.config.set({"array.chunk-size": size}):
        ds = opened(path)
        xr.testing.assert_equal(stats(ds, cache=False), expected)
        # The same values as arrays without a link to their file.
        computed = ds.map(lambda x: x if x.dtype.kind == "i" else x * 1.0, keep_attrs=True)
        result = stats(computed, cache=False)
    for name in ("large", "whole", "small.19"):
        np.testing.assert_array_equal(result[name], expected[name], err_msg=name)


def test_small_tensors_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    tensors = {f"w{n}": rng.standard_normal(n + 1).astype(np.float32) for n in range(300)}
    path = write(tmp_path / "m.safetensors", tensors)
    ds, reads = opened(path), []
    read_into = LocalSource.read_into

    def counting(source: LocalSource, offsets: Sequence[int], memory: memoryview) -> None:
        reads.append(len(memory))
        read_into(source, offsets, memory)

    monkeypatch.setattr(LocalSource, "read_into", counting)
    result = stats(ds, cache=False)
    assert len(reads) < 10
    assert sum(reads) == sum(array.nbytes for array in tensors.values())
    one_by_one = stats(tensors, cache=False)
    for name in tensors:
        np.testing.assert_array_equal(one_by_one[name], result[name])
    monkeypatch.undo()
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(CheckpointError, match=r"tensor 'w\d+'"):
        stats(ds, cache=False)


def test_chunks_that_are_not_contiguous(path: Path, expected: xr.Dataset) -> None:
    ds = opened(path).chunk(77)
    xr.testing.assert_equal(stats(ds, cache=False), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("client")
def test_a_cluster_gives_the_same_statistics(path: Path, expected: xr.Dataset) -> None:
    reports: list[tuple[int, int]] = []
    result = stats(opened(path), cache=False, progress=lambda *nbytes: reports.append(nbytes))
    xr.testing.assert_identical(result, stats(path, cache=False))
    xr.testing.assert_equal(result, expected)
    nbytes = path.stat().st_size - int.from_bytes(path.read_bytes()[:8], "little") - 8
    assert reports[-1] == (nbytes, nbytes)
    computed = opened(path)[["large"]] * 1.0
    np.testing.assert_array_equal(stats(computed)["large"], expected["large"])
    local = xr.Dataset({"x": ("a", np.arange(10.0))})
    assert stats(local)["x"].sel(statistic="mean") == 4.5
    deferred = stats(opened(path), cache=False, compute=False)
    xr.testing.assert_equal(deferred.compute(), expected)


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_time_only(tmp_path: Path, kill_one: Any) -> None:
    tensors = {f"w{n}": np.arange(n, n + 30, dtype=np.float32) for n in range(1200)}
    path = write(tmp_path / "m.safetensors", tensors)  # a task has at most 256 of them
    result = stats(opened(path), cache=False, progress=kill_one)
    xr.testing.assert_identical(result, stats(path, cache=False))


def test_an_error_in_a_task_leaves_the_workspace_clean() -> None:
    kind = kind_named("float32")
    Sketch(kind).update(0, np.ones(1000, np.float32))
    sketch = Sketch(kind)
    sketch.update(0, np.array([1, 2, 2], np.float32))
    assert sketch.close().counts.tolist() == [1, 2]


def test_an_interrupt_ends_all_threads(path: Path) -> None:
    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stats(path, cache=False, progress=interrupt)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not any(t.name.startswith("xckpt-stats") for t in threading.enumerate()):
            return
        time.sleep(0.01)
    pytest.fail("threads are still there")


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT for another process")
def test_ctrl_c_in_a_terminal(tmp_path: Path) -> None:
    path = sparse_file(tmp_path / "huge.safetensors", "F32", 1 << 36, 1 << 38)
    code = (
        "import sys, xckpt.statistics\n"
        "started = lambda *n: (print('on', flush=True), sys.stdout.flush())\n"
        f"xckpt.stats({str(path)!r}, cache=False, progress=started)\n"
    )
    with subprocess.Popen(  # noqa: S603  our own code
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode != 0
    assert errors.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = sparse_file(tmp_path / "large.safetensors", "F32", 1 << 28, 1 << 30)
    call = f"xckpt.stats({str(path)!r}, cache=False, progress=False)"
    assert memory_of(call) < 300 << 20
