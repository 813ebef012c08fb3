"""A cluster on this machine: bytes of graph for each task, and what a task costs in all.

2,000 tensors of 64 KiB are summed by dask, on threads and with 2 and 4 workers, and so are as many
arrays of dask's own, which nothing is read for. `stats` joins small tensors in tasks.
"""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import xarray as xr

import xckpt
from benchmarks.checkpoints import write_ztensor
from benchmarks.measuring import Result, best_of, table

TENSORS = 2000
SHAPE = [128, 128]
WORKERS = (2, 4)

BOUND_OF_TASK = 2048  # bytes


def sums(path: Path) -> list[Any]:
    """Return the sum of each tensor as a separate graph."""
    with xr.open_dataset(path, engine="ztensor") as ds:
        return [v.data.sum() for v in ds.variables.values()]


def graph_nbytes(path: Path) -> tuple[float, int]:
    """Return the sizes of a reading task, of the whole graph, and of the largest task, in bytes."""
    with xr.open_dataset(path, engine="ztensor") as ds:
        arrays = [v.data for v in ds.variables.values()]
    tasks = [task for array in arrays for task in dict(array.dask).values()]
    sizes = [len(pickle.dumps(task)) for task in tasks]
    return len(pickle.dumps(tasks)) / len(tasks), max(sizes)


def own_sums() -> list[Any]:
    """Return the sums of equally many arrays in memory."""
    return [da.full(SHAPE, n, np.float32, chunks=-1).sum() for n in range(TENSORS)]


def cluster(path: Path, workers: int) -> tuple[float, float, float]:
    """Return the seconds of the sums, of dask's own sums and of statistics on a cluster.

    The first time workers import what they need.
    """
    import distributed

    # Untyped.
    start_cluster: Any = distributed.LocalCluster
    connect: Any = distributed.Client
    options: dict[str, Any] = {"n_workers": workers, "threads_per_worker": 1, "processes": True}
    with start_cluster(dashboard_address=None, **options) as local, connect(local) as client:
        client.compute(sums(path)[: 4 * workers], sync=True)
        statistics(path)
        tasks = {
            "ours": lambda: client.compute(sums(path), sync=True),
            "theirs": lambda: client.compute(own_sums(), sync=True),
            "stats": lambda: statistics(path),
        }
        ours, theirs, stats = (best_of(task, 3) for task in tasks.values())
        return ours, theirs, stats


def statistics(path: Path) -> None:
    """Compute all statistics of all tensors."""
    xckpt.stats(path, cache=False, progress=False)


def run() -> list[Result]:
    """Measure everything."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.zt"
        write_ztensor(path, {f"layers.{n}.w": SHAPE for n in range(TENSORS)}, "float32")
        mean, largest = graph_nbytes(path)
        threads = best_of(lambda: dask.compute(*sums(path), scheduler="threads"), 3)
        floor = best_of(lambda: dask.compute(*own_sums(), scheduler="threads"), 3)
        stats = best_of(lambda: statistics(path), 3)
        results = [
            Result("reading task, in the graph", mean, "bytes", "", BOUND_OF_TASK),
            Result("reading task, alone", largest, "bytes", "", BOUND_OF_TASK),
            _per_tensor(
                "threads, in all", threads, f"dask's own arrays {floor / TENSORS * 1e6:,.0f} µs"
            ),
            _per_tensor("`stats` on threads", stats),
        ]
        for workers in WORKERS:
            ours, theirs, stats = cluster(path, workers)
            context = f"dask's own arrays {theirs / TENSORS * 1e6:,.0f} µs"
            results.append(_per_tensor(f"{workers} workers, in all", ours, context))
            results.append(_per_tensor(f"`stats` on {workers} workers", stats))
    return results


def _per_tensor(what: str, seconds: float, against: str = "") -> Result:
    return Result(what, seconds / TENSORS * 1e6, "µs per tensor", against)


if __name__ == "__main__":
    print(table(run()))
