"""On a cluster: small tasks, and workers that die."""

from __future__ import annotations

import os
import pickle
import signal
import time
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pytest
import xarray as xr

from tests.test_stacking import zt

if TYPE_CHECKING:
    from collections.abc import Iterator
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


@pytest.fixture
def client() -> Iterator[Any]:
    distributed: Any = pytest.importorskip("distributed")
    options: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "processes": True}
    with (
        dask.config.set({"distributed.worker.memory.terminate": False}),
        distributed.LocalCluster(dashboard_address=":0", **options) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


def _slow_sum(block: Any) -> Any:
    time.sleep(0.02)
    return block.sum(keepdims=True)


@pytest.mark.slow
def test_a_killed_worker_costs_time_and_nothing_else(path: Path, client: Any) -> None:
    with xr.open_dataset(path, engine="ztensor") as ds:
        sums = [
            ds.variables[f"layers.{n}.w"].data.map_blocks(_slow_sum, chunks=((1,),), dtype="f4")
            for n in range(200)
        ]
    futures = client.compute(sums)
    time.sleep(0.5)
    victim = next(iter(client.run(os.getpid).values()))
    os.kill(victim, signal.SIGKILL)
    assert [float(each[0]) for each in client.gather(futures)] == [4.0 * n for n in range(200)]
