"""Tasks on a `dask.distributed` cluster, where one is active; nothing imports it otherwise."""

from __future__ import annotations

import sys
from threading import local
from typing import TYPE_CHECKING, Any
from uuid import uuid4

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from xckpt.statistics.scan import Operation, Task

__all__ = ["active_client", "run"]

_thread = local()


class _Never:
    """Stands for an event that nobody sets: the cluster cancels tasks itself."""

    def is_set(self) -> bool:
        return False


def active_client() -> Any:
    """Return the client of the active cluster; None if there is none, or inside its workers."""
    distributed = sys.modules.get("distributed")
    if distributed is None:
        return None
    try:
        distributed.get_worker()
    except ValueError:
        pass
    else:
        # This is a task itself: to wait for others from within it could wait forever.
        return None
    try:
        client = distributed.default_client()
    except ValueError:
        return None
    return None if client.asynchronous else client


def run(
    client: Any,
    tasks: Iterable[Task],
    operation: Operation,
    deliver: Callable[[Task, list[Any]], None],
) -> None:
    """Do tasks on a cluster."""
    from distributed import as_completed

    token = f"xckpt-stats-{uuid4().hex}"
    # A task whose worker died is done again by another; it depends on nothing but the file.
    futures = {
        client.submit(_work, task, operation, pure=False, key=f"{token}-{n}"): task
        for n, task in enumerate(tasks)
    }
    done: Any = as_completed  # untyped
    try:
        for future, results in done(list(futures), with_results=True):
            deliver(futures.pop(future), results)
            future.release()
    finally:
        client.cancel(list(futures))


def _work(task: Task, operation: Operation) -> list[Any]:
    """Do one task in a worker."""
    from xckpt.statistics.scan import scan_spans
    from xckpt.statistics.workspace import Workspace

    if not hasattr(_thread, "workspace"):
        _thread.workspace = Workspace()
    return scan_spans(task, operation, _thread.workspace, _Never())
