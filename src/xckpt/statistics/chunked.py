"""Dask arrays that are not read from a checkpoint: sketches of their chunks, by dask itself.

A chunk that is a run of elements in C order has a position in the tensor, and the moments do not
depend on how the tensor is cut into such chunks. Chunks that are no runs are made into runs where
a row of them is small; else the elements are taken in the order of the chunks, and the last bits
of the moments (of nothing else) depend on how the array is chunked.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np

from xckpt.statistics import cluster
from xckpt.statistics.kinds import Kind, require_numbers
from xckpt.statistics.reader import share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from xckpt.statistics.scan import Operation

__all__ = ["ChunkedTensor", "run"]

_LARGEST_BAND = 64 << 20

_thread = threading.local()


class ChunkedTensor:
    """A dask array as a sequence of elements.

    Parameters
    ----------
    array : dask.array.Array
        Of numbers.

    Raises
    ------
    TypeError
        If the elements are no numbers.
    """

    def __init__(self, array: Any) -> None:
        if any(math.isnan(size) for sizes in array.chunks for size in sizes):
            array = array.compute_chunk_sizes()
        self.kind: Kind = require_numbers(array.dtype)
        self.array, runs = _in_runs(array)
        self.size = int(array.size)
        self.nbytes = int(array.nbytes)
        self.row = prod(array.shape[1:]) if runs and array.ndim > 1 else 0

    def chunks(self) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """Return the position of each chunk in the grid, and its first and last elements."""
        start = 0
        sizes = [list(enumerate(along)) for along in self.array.chunks]
        for combination in product(*sizes):
            stop = start + prod(size for _, size in combination)
            yield tuple(position for position, _ in combination), start, stop
            start = stop


@dataclass(frozen=True, slots=True)
class _ChunkTask:
    """What is done with a chunk; pickles."""

    operation: Operation
    kind: Kind
    size: int
    row: int
    argument: Any
    start: int

    def __call__(self, block: Any) -> Any:
        from xckpt.statistics.workspace import Workspace

        if not hasattr(_thread, "workspace"):
            _thread.workspace = Workspace()
        values = np.asarray(block.todense() if hasattr(block, "todense") else block)
        flat = values.reshape(-1)
        if flat.dtype.kind == "c":
            flat = np.abs(flat)
        start = self.operation.start
        accumulator = start(self.kind, self.size, self.row, self.argument, _thread.workspace)
        if flat.size:
            accumulator.update(self.start, flat)
        return accumulator.result()


def run(
    tensors: Sequence[tuple[ChunkedTensor, Any]],
    operation: Operation,
    receive: Callable[[int, Any], None],
    report: Callable[[int], object],
) -> None:
    """Do something with all chunks of some arrays."""
    if not tensors:
        return
    import dask
    from dask._task_spec import Task, TaskRef

    arrays = dask.optimize(*(tensor.array for tensor, _ in tensors))
    graph: dict[Any, Any] = {}
    for array in arrays:
        graph.update(array.__dask_graph__())
    token = f"xckpt-stats-{uuid4().hex}"
    sizes = {}
    for number, ((tensor, argument), array) in enumerate(zip(tensors, arrays, strict=True)):
        for position, start, stop in tensor.chunks():
            key = (token, number, *position)
            work = _ChunkTask(operation, tensor.kind, tensor.size, tensor.row, argument, start)
            graph[key] = Task(key, work, TaskRef((array.name, *position)))
            sizes[key] = share(tensor, start, stop)

    def deliver(key: Any, result: Any) -> None:
        receive(key[1], result)
        report(sizes[key])

    client = cluster.active_client()
    if client is None:
        _run_here(graph, sizes, deliver)
    else:
        _run_there(client, graph, list(sizes), deliver)


def _run_here(graph: Any, keys: Any, deliver: Callable[[Any, Any], None]) -> None:
    import dask.threaded
    from dask.base import get_scheduler
    from dask.callbacks import Callback

    def done(key: Any, result: Any, *_: Any) -> None:
        if key in keys:
            deliver(key, result)

    get = get_scheduler() or dask.threaded.get
    with Callback(posttask=done):
        get(graph, list(keys))


def _run_there(client: Any, graph: Any, keys: Any, deliver: Callable[[Any, Any], None]) -> None:
    from distributed import as_completed

    done: Any = as_completed  # untyped
    futures = client.get(graph, keys, sync=False)
    try:
        for future, result in done(futures, with_results=True):
            deliver(future.key, result)
    finally:
        client.cancel(futures)


def _in_runs(array: Any) -> tuple[Any, bool]:
    """Chunk an array so that chunks are runs, where that is cheap; say whether they are."""
    axis = next((k for k, sizes in enumerate(array.chunks) if max(sizes) > 1), array.ndim)
    split = [k for k in range(axis + 1, array.ndim) if len(array.chunks[k]) > 1]
    if not split:
        return array, True
    band = max(array.chunks[axis]) * prod(array.shape[axis + 1 :]) * array.dtype.itemsize
    if band > _LARGEST_BAND:
        return array, False
    return array.rechunk(dict.fromkeys(split, -1)), True
