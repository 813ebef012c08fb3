"""Tasks on a cluster: the tasks of one file go to few workers, and each worker gets its share."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from hashlib import blake2b
from time import monotonic
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np

from xckpt.arrays import LazyArray
from xckpt.arrays.graph import active_client
from xckpt.errors import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

# Seconds without workers until a warning, or without a result until tasks of dead workers move.
_PATIENCE = 3


def waiting_client() -> Any:
    """Return the client of a cluster whose tasks can be waited for; None inside its workers."""
    client = active_client()
    if client is None or client.asynchronous:
        return None
    from distributed import get_worker

    with suppress(ValueError):
        get_worker()
        # A task that waits for other tasks may block the worker that they need.
        return None
    return client


def send_out(
    tasks: Sequence[Any],
    work: Callable[[Any], Any],
    deliver: Callable[[Any, Any], None],
    array: Callable[[Any], Any],
) -> list[Any]:
    """Run tasks on an active cluster, if any; return the tasks that remain for this process."""
    # `array` returns the array that a task reads; tasks on arrays in memory are not sent.
    client = waiting_client()
    if client is None:
        return list(tasks)

    def file_and_size(task: Any) -> tuple[str, int]:
        read = array(task)
        return (read.source.name if isinstance(read, LazyArray) else ""), task.nbytes

    remote_tasks = [task for task in tasks if not isinstance(array(task), np.ndarray)]
    on_cluster(client, remote_tasks, work, deliver, file_and_size)
    return [task for task in tasks if isinstance(array(task), np.ndarray)]


def on_cluster(
    client: Any,
    tasks: Sequence[Any],
    work: Callable[[Any], Any],
    deliver: Callable[[Any, Any], None],
    file_and_size: Callable[[Any], tuple[str, int]],
) -> None:
    """Run tasks on workers, each on its preferred worker if that one has time."""
    # `file_and_size` is of a task, in bytes. If a worker dies, another one repeats its tasks, which
    # depend only on their files.
    if not tasks:
        return
    token = f"xckpt-{uuid4().hex}"
    workers = placed([file_and_size(task) for task in tasks], client.nthreads())
    submitted: dict[Any, tuple[Any, str | None]] = {}
    for number, (task, worker) in enumerate(zip(tasks, workers, strict=True)):
        target = {} if worker is None else {"workers": [worker], "allow_other_workers": True}
        future = client.submit(work, task, pure=False, key=f"{token}-{number}", **target)
        submitted[future] = task, worker

    def move(futures: set[Any]) -> dict[Any, Any]:
        """Submit tasks again that wait for a worker that has died."""
        # A task whose worker dies while no other one is there waits for that address for ever.
        # https://github.com/dask/distributed/issues/7346
        alive = client.nthreads()
        valid = {None, *alive}
        lost = [future for future in futures if submitted[future][1] not in valid]
        if not lost or not alive:
            return {}
        running = {key for keys in client.processing().values() for key in keys}
        moved = {}
        for future in lost:
            if future.key not in running:
                task, _ = submitted.pop(future)
                moved[future] = client.submit(work, task, pure=False, key=f"{future.key}-again")
                submitted[moved[future]] = task, None
        return moved

    for future, result in results_of(client, list(submitted), move):
        task, _ = submitted.pop(future)
        deliver(task, result)
        future.release()


def results_of(
    client: Any,
    futures: list[Any],
    move: Callable[[set[Any]], dict[Any, Any]] = lambda _: {},
) -> Iterator[tuple[Any, Any]]:
    """Yield futures with their results, as they arrive; cancel the others after an error."""
    # After some seconds without a result, `move` returns futures that take the place of others.
    from distributed import as_completed

    if futures:
        _report_missing_workers(client)
    start: Any = as_completed  # untyped
    completed = start(futures, with_results=True)
    remaining, replaced = set(futures), set[Any]()
    try:
        while remaining:
            if not _has_result(completed):
                moved = move(remaining)
                replaced.update(moved)
                remaining = remaining.difference(moved).union(moved.values())
                completed.update(moved.values())
                continue
            future, result = next(completed)
            if future in remaining:
                remaining.discard(future)
                yield future, result
    finally:
        client.cancel([*remaining, *replaced])


def _has_result(completed: Any) -> bool:
    """Wait some seconds for a result."""
    end = monotonic() + _PATIENCE
    while not completed.has_ready():
        if monotonic() > end:
            return False
        with completed.thread_condition:
            completed.thread_condition.wait(0.1)  # as its own iterator does
    return True


def _report_missing_workers(client: Any) -> None:
    """Warn if a cluster has no workers after some seconds."""
    if client.nthreads():
        return
    try:
        client.wait_for_workers(1, timeout=_PATIENCE)
    except TimeoutError:
        warn(
            "the cluster has no workers, and this call waits for the first one: start workers, for "
            "example with cluster.scale(4), or close the client to use the threads of this machine"
        )


def placed(tasks: Sequence[tuple[str, int]], threads: Mapping[str, int]) -> list[str | None]:
    """Return a worker for each task, given its file and size, and the threads of each worker."""
    # A file prefers the same worker in every call, which may have it open and partly in memory.
    # Tasks beyond the share of that worker go to the next one.
    if not threads:
        return [None] * len(tasks)
    per_thread = sum(nbytes for _, nbytes in tasks) / sum(threads.values())
    shares = {worker: per_thread * count for worker, count in threads.items()}

    def rank(worker: str, file: str) -> bytes:
        pair = f"{worker}\0{file}".encode("utf-8", "surrogatepass")
        return blake2b(pair, digest_size=8).digest()

    workers: dict[str, list[str]] = {}
    chosen: list[str | None] = []
    for file, nbytes in tasks:
        if file not in workers:
            workers[file] = sorted(threads, key=partial(rank, file=file))
        # A worker may exceed its share by half a task. Without any share left, take the least busy.
        best = next((w for w in workers[file] if shares[w] >= nbytes / 2), None)
        best = best or max(workers[file], key=shares.__getitem__)
        shares[best] -= nbytes
        chosen.append(best)
    return chosen
