"""A cluster on this machine: bytes of graph for each task, and what a task costs in all.

2,000 tensors of 64 KiB are summed by dask, with 2 and with 4 workers, and read by threads for
comparison.
"""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import dask
import xarray as xr

from benchmarks.checkpoints import write_ztensor
from benchmarks.measuring import Result, table

TENSORS = 2000
SHAPE = [128, 128]
WORKERS = (2, 4)

BOUND_OF_TASK = 2048  # bytes


def sums(path: Path) -> list[Any]:
    """Give the sum of each tensor, as a graph of its own."""
    with xr.open_dataset(path, engine="ztensor") as ds:
        return [v.data.sum() for v in ds.variables.values()]


def graph_nbytes(path: Path) -> tuple[float, int]:
    """Give the bytes of a reading task, of the graph in sum and of the largest task."""
    with xr.open_dataset(path, engine="ztensor") as ds:
        arrays = [v.data for v in ds.variables.values()]
    tasks = [task for array in arrays for task in dict(array.dask).values()]
    sizes = [len(pickle.dumps(task)) for task in tasks]
    return len(pickle.dumps(tasks)) / len(tasks), max(sizes)


def cluster(path: Path, workers: int) -> float:
    """Give the seconds of the sums on a cluster; the first time workers import what they need."""
    import distributed

    # Untyped.
    start_cluster: Any = distributed.LocalCluster
    connect: Any = distributed.Client
    options: dict[str, Any] = {"n_workers": workers, "threads_per_worker": 1, "processes": True}
    with start_cluster(dashboard_address=None, **options) as local, connect(local) as client:
        client.compute(sums(path)[: 4 * workers], sync=True)
        start = perf_counter()
        client.compute(sums(path), sync=True)
        return perf_counter() - start


def run() -> list[Result]:
    """Measure everything."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.zt"
        write_ztensor(path, {f"layers.{n}.w": SHAPE for n in range(TENSORS)}, "float32")
        mean, largest = graph_nbytes(path)
        start = perf_counter()
        dask.compute(*sums(path), scheduler="threads")
        threads = perf_counter() - start
        results = [
            Result("reading task, in the graph", mean, "bytes", "", BOUND_OF_TASK),
            Result("reading task, alone", largest, "bytes", "", BOUND_OF_TASK),
            Result("threads, in all", threads / TENSORS * 1e6, "µs per tensor"),
        ]
        for workers in WORKERS:
            seconds = cluster(path, workers)
            against = f"{TENSORS:,} tensors in {seconds:.1f} s"
            what = f"{workers} workers, in all"
            results.append(Result(what, seconds / TENSORS * 1e6, "µs per tensor", against))
    return results


if __name__ == "__main__":
    print(table(run()))
