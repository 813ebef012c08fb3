"""Threads for the calls of one operation, which an interrupt abandons.

The first call of a compiled loop compiles it, for seconds, and nothing can interrupt that. The
threads of `concurrent.futures` would delay Ctrl-C, and the end of the process, until then.
"""

from __future__ import annotations

import threading
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

T = TypeVar("T")
P = ParamSpec("P")


class Threads(Executor):
    """An executor with daemon threads; an interrupt leaves its block without waiting for them."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._threads: list[threading.Thread] = []
        # None ends a thread.
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call on a thread, and return its future."""
        future: Future[T] = Future()
        self._calls.put((future, partial(call, *args, **kwargs)))
        if len(self._threads) < self._count:
            thread = threading.Thread(
                target=_work, args=(self._calls,), name=f"{self._name}-thread", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # the system allows no more threads
                if not self._threads:
                    raise
                self._count = len(self._threads)
            else:
                self._threads.append(thread)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002
        """End the threads after their calls; cancel the calls that have not begun, if requested."""
        while cancel_futures:
            try:
                item = self._calls.get_nowait()
            except Empty:
                break
            if item is not None:
                item[0].cancel()
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        is_interrupt = kind is not None and not issubclass(kind, Exception)
        self.shutdown(wait=not is_interrupt, cancel_futures=kind is not None)


def complete(future: Future[T], call: Callable[[], T]) -> None:
    """Make a call, and set its result or its error."""
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001  it is raised where it is waited for
        future.set_exception(error)
    else:
        future.set_result(result)


def _work(calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (item := calls.get()) is not None:
        future, call = item
        if future.set_running_or_notify_cancel():
            complete(future, call)
        del item, future, call  # this frame must not keep results alive
