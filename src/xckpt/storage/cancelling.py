"""Requests that another thread can end, and that tell it when a server is busy."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, TypeVar

from xckpt.storage.limits import populate

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ["Cancellation", "pause", "run", "sharers", "tell_busy", "wait_for"]

T = TypeVar("T")


class Cancellation:
    """Ends what one thread waits for; that thread calls `begin` first.

    `busy` is called when a server asks for fewer requests; `sharers` is how many threads share
    the line.
    """

    def __init__(self, busy: Callable[[], None], sharers: int) -> None:
        self.busy = busy
        self.sharers = sharers
        self.event = threading.Event()
        self.future: Future[Any] | None = None

    def begin(self) -> None:
        """Make it that of this thread."""
        _of_thread.cancellation = self

    def cancel(self) -> None:
        """End what is waited for, now and later, by a `CancelledError`."""
        self.event.set()
        future = self.future
        if future is not None:
            future.cancel()


class _OfThread(threading.local):
    cancellation: Cancellation | None = None


_of_thread = _OfThread()


def wait_for(future: Future[T], seconds: float | None = None) -> T:
    """Wait for what comes; when the wait is ended, so is what makes it."""
    ours = _of_thread.cancellation
    try:
        if ours is not None:
            ours.future = future
            if ours.event.is_set():
                future.cancel()
        return future.result(seconds)
    except BaseException:
        future.cancel()
        raise
    finally:
        if ours is not None:
            ours.future = None


def run(
    loop: asyncio.AbstractEventLoop,
    request: Callable[[], Coroutine[Any, Any, T]],
    memory: memoryview,
) -> T:
    """Run a coroutine that fills memory on the loop of another thread."""
    future = asyncio.run_coroutine_threadsafe(request(), loop)
    populate(memory)  # before the first byte comes: that thread has enough to do afterwards
    return wait_for(future)


def pause(seconds: float) -> None:
    """Wait before the next attempt."""
    ours = _of_thread.cancellation
    if (threading.Event() if ours is None else ours.event).wait(seconds):
        raise CancelledError


def sharers() -> int:
    """Return how many threads make requests like this one at the same time."""
    ours = _of_thread.cancellation
    return 1 if ours is None else ours.sharers


def tell_busy() -> None:
    """Tell who made the requests of this thread that there should be fewer."""
    ours = _of_thread.cancellation
    if ours is not None:
        ours.busy()
