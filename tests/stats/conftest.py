"""Fixtures of the tests of statistics."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import dask
import pytest

from xckpt.scan import scanning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep sketches in a folder of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XCKPT_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def client() -> Iterator[Any]:
    """Return a client of a cluster of two processes."""
    distributed = pytest.importorskip("distributed")
    with (
        dask.config.set({"distributed.worker.memory.terminate": False}),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=":0", processes=True
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.fixture
def kill_one(client: Any) -> Iterator[Callable[..., None]]:
    """Return a progress callback that kills a worker of the cluster when it is first called."""
    victim = min(client.run(os.getpid).values())
    killed: list[int] = []

    def kill(*_: int) -> None:
        if not killed:
            killed.append(victim)
            os.kill(victim, signal.SIGKILL)

    yield kill
    assert killed


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect how many elements are scanned."""
    counted: list[int] = []
    original = scanning.scan_cuts

    def counting(task: Any, *args: Any) -> list[Any]:
        counted.extend(cut.stop - cut.start for cut in task)
        return original(task, *args)

    monkeypatch.setattr(scanning, "scan_cuts", counting)
    return counted
