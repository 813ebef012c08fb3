"""Tasks on a cluster: the tasks of one file go to few workers, and each worker gets its share."""

from __future__ import annotations

from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np

from xckpt.arrays import LazyArray
from xckpt.arrays.graph import active_client

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["on_cluster", "placed", "send_out", "waiting_client"]


def waiting_client() -> Any:
    """Return the client of a cluster whose tasks can be waited for; None inside its workers."""
    client = active_client()
    if client is None or client.asynchronous:
        return None
    from distributed import get_worker

    with suppress(ValueError):
        get_worker()
        # This is a task itself: to wait for others from within it could wait forever.
        return None
    return client


def send_out(
    tasks: Sequence[Any],
    work: Callable[[Any], Any],
    deliver: Callable[[Any, Any], None],
    array: Callable[[Any], Any],
) -> list[Any]:
    """Run tasks on an active cluster, if any; return the tasks that remain for this process.

    `array` returns what a task reads: what is in memory here is not sent. Tasks know their bytes.
    """
    client = waiting_client()
    if client is None:
        return list(tasks)

    def place(task: Any) -> tuple[str, int]:
        read = array(task)
        return (read.source.name if isinstance(read, LazyArray) else ""), task.nbytes

    there = [task for task in tasks if not isinstance(array(task), np.ndarray)]
    on_cluster(client, there, work, deliver, place)
    return [task for task in tasks if isinstance(array(task), np.ndarray)]


def on_cluster(
    client: Any,
    tasks: Sequence[Any],
    work: Callable[[Any], Any],
    deliver: Callable[[Any, Any], None],
    place: Callable[[Any], tuple[str, int]],
) -> None:
    """Do tasks on workers, each where it is placed if that worker has time.

    One whose worker died is done again by another: it depends on nothing but its files. `place`
    returns the file of a task and its size in bytes.
    """
    if not tasks:
        return
    from distributed import as_completed

    token = f"xckpt-{uuid4().hex}"
    workers = placed([place(task) for task in tasks], client.nthreads())
    futures = {}
    for number, (task, worker) in enumerate(zip(tasks, workers, strict=True)):
        where = {} if worker is None else {"workers": [worker], "allow_other_workers": True}
        key = f"{token}-{number}"
        futures[client.submit(work, task, pure=False, key=key, **where)] = task
    done: Any = as_completed  # untyped
    try:
        for future, result in done(list(futures), with_results=True):
            deliver(futures.pop(future), result)
            future.release()
    finally:
        client.cancel(list(futures))


def placed(tasks: Sequence[tuple[str, int]], threads: Mapping[str, int]) -> list[str | None]:
    """Return a worker for each task, by its file and size, the threads of each worker given.

    A file goes to the worker that it went to before, which has it open and some of it in memory,
    and its last tasks to others where that one has its share.
    """
    if not threads:
        return [None] * len(tasks)
    per_thread = sum(nbytes for _, nbytes in tasks) / sum(threads.values())
    left = {worker: per_thread * count for worker, count in threads.items()}

    def preference(file: str) -> list[str]:
        def rank(worker: str) -> bytes:
            told = f"{worker}\0{file}".encode("utf-8", "surrogatepass")
            return blake2b(told, digest_size=8).digest()

        return sorted(threads, key=rank)

    workers: dict[str, list[str]] = {}
    chosen: list[str | None] = []
    for file, nbytes in tasks:
        if file not in workers:
            workers[file] = preference(file)
        # A worker may exceed its share by half a task. Without any share left, take the least busy.
        best = next((w for w in workers[file] if left[w] >= nbytes / 2), None)
        best = best or max(workers[file], key=left.__getitem__)
        left[best] -= nbytes
        chosen.append(best)
    return chosen
