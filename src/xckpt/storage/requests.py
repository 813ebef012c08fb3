"""Requests to other machines: their time limits, their repetition, and their threads.

All requests of a process run on at most 32 daemon threads. The caller waits for a thread, so that
Ctrl-C reaches it at once, and the interpreter does not wait for requests when it ends.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import random
import threading
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from xckpt.errors import UnsupportedError, warn
from xckpt.threads import complete

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")

#: Reports requests, repeated requests and cache hits at DEBUG.
logger = logging.getLogger("xckpt")

#: Size of one request in a long read.
REQUEST_NBYTES = 8 << 20
#: Requests in flight at a time, at most.
IN_FLIGHT = 32
#: The key of `storage_options` that holds `Limits` for every protocol.
OWN_OPTIONS = "xckpt"

# Pauses before repetitions begin with this number of seconds, and double each time.
_FIRST_PAUSE = 0.1
# The longest pause, as a multiple of the first.
_LONGEST_PAUSE = 16
# The same after status 429 or 503: first and longest pause, as multiples of `_FIRST_PAUSE`.
_BUSY, _LONGEST_BUSY = 10, 40
_IDLE_SECONDS = 10.0


class Limits(NamedTuple):
    """Limits of time and of failures for requests to a server."""

    timeout: float = 300.0  # seconds for one request; also when the last repetition starts
    read_timeout: float = 20.0  # seconds without a byte
    retries: int = 7  # repetitions of a request; a time-out uses up four of them


class TransientError(OSError):
    """A failed request that may succeed when it is repeated."""

    def __init__(
        self, reason: str, *, is_timeout: bool = False, is_busy: bool = False, seconds: float = 0
    ) -> None:
        super().__init__(reason)
        self.is_timeout, self.is_busy = is_timeout, is_busy
        self.seconds = seconds  # to wait for, at least


def split_options(
    storage_options: Mapping[str, Any] | None, *, allow_top_level: bool = False
) -> tuple[dict[str, Any], Limits]:
    """Separate `Limits`, which have the key "xckpt", from the options of a file system."""
    # With `allow_top_level` the limits may also stand next to the other options, without that key.
    options = dict(storage_options or {})
    place = f"storage_options[{OWN_OPTIONS!r}]"
    limits = options.pop(OWN_OPTIONS, None) or {}
    if not isinstance(limits, dict):
        raise ValueError(f"{place} must be a dictionary, not {limits!r}")  # noqa: TRY004
    if allow_top_level:
        limits = limits | {key: options.pop(key) for key in Limits._fields if key in options}
    if limits.pop("min_rate", None) is not None:
        text = f"'min_rate' in {place} has no effect since xckpt 0.2: use 'read_timeout'"
        warn(text, FutureWarning)
    for key, value in limits.items():
        if key not in Limits._fields:
            raise ValueError(f"{place} accepts {', '.join(Limits._fields)}, not {key!r}")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        least = 0 if key == "retries" else 1e-3
        if not is_number or not math.isfinite(value) or value < least:
            raise ValueError(f"{key!r} in storage_options must be a positive number, not {value!r}")
    return options, Limits(**limits)


def retried(url: str, request: Callable[[], T], limits: Limits) -> T:
    """Make a request; repeat it after a `TransientError` as `limits` allow."""
    start, attempts, used = time.monotonic(), 0, 0
    while True:
        try:
            return request()
        except TransientError as error:
            attempts += 1
            used += 4 if error.is_timeout else 1
            # Many workers must not repeat their requests at once.
            spread = random.uniform(0.5, 1)  # noqa: S311  not a secret
            factor, most = (_BUSY, _LONGEST_BUSY) if error.is_busy else (1, _LONGEST_PAUSE)
            pause = spread * _FIRST_PAUSE * min(factor * 2 ** (attempts - 1), most)
            pause = max(pause, error.seconds)
            elapsed = time.monotonic() - start
            if used > limits.retries or elapsed + pause >= limits.timeout:
                text = f"{error}, at attempt {attempts} after {elapsed:.1f} seconds"
                number = errno.EIO
                advice = "Try again later, or repeat more often: storage_options={'retries': ...}"
                if error.is_timeout:
                    number = errno.ETIMEDOUT
                    longer = {
                        "timeout": 2 * limits.timeout,
                        "read_timeout": 2 * limits.read_timeout,
                    }
                    advice = "If the server or the line is slow, wait longer: "
                    advice += f"storage_options={longer}"
                raise OSError(number, f"{text}. {advice}", url) from error
            logger.debug("repeat in %.2f s: %s: %s", pause, loggable(url), error)
        time.sleep(pause)


def loggable(url: str) -> str:
    """Return a URL without its query and user, which may be secrets."""
    scheme, separator, address = url.partition("?")[0].partition("://")
    host, slash, path = address.partition("/")
    return scheme + separator + host.rpartition("@")[2] + slash + path


class _Threads:
    """Daemon threads that make requests in order, urgent ones first."""

    def __init__(self) -> None:
        self._reset()
        self.is_forked = self._is_used = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._count = self._idle = 0

    def _after_fork(self) -> None:
        self.is_forked = self._is_used
        self._reset()

    def submit(self, call: Callable[[], T], *, is_urgent: bool = False) -> Future[T]:
        self._is_used = True
        future: Future[T] = Future()
        with self._changed:
            (self._waiting.appendleft if is_urgent else self._waiting.append)((future, call))
            if len(self._waiting) <= self._idle or self._count == IN_FLIGHT:
                self._changed.notify()
            else:
                self._count += 1
                threading.Thread(target=self._work, name="xckpt-request", daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._idle += 1
                    is_due = self._changed.wait(_IDLE_SECONDS)
                    self._idle -= 1
                    if not (is_due or self._waiting):
                        self._count -= 1
                        return
                future, call = self._waiting.popleft()
            # The future is never marked as running, so that it can be cancelled at any time.
            with suppress(InvalidStateError):
                if not future.cancelled():
                    complete(future, call)
            del future, call  # this frame must not keep the bytes alive


_threads = _Threads()


def submit(url: str, call: Callable[[], T], *, is_urgent: bool = False) -> Future[T]:
    """Run a request for a URL on a thread; raise in a forked process, where it would hang."""
    if _threads.is_forked:
        raise UnsupportedError(
            "this process was forked from one that had made requests, so its requests would hang",
            path=url,
            hint="Start it with 'spawn' or 'forkserver', such as multiprocessing.get_context("
            "'spawn') or DataLoader(multiprocessing_context='spawn')",
        )
    return _threads.submit(call, is_urgent=is_urgent)


def wait_for(future: Future[T]) -> T:
    """Return the result of a request; cancel it if the wait is interrupted."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def run_urgently(url: str, call: Callable[[], T]) -> T:
    """Run a request for a URL on a thread, before waiting ones, and return its result."""
    return wait_for(submit(url, call, is_urgent=True))


def called_within(seconds: float, call: Callable[[], T]) -> T:
    """Call a function on a thread; raise `TransientError`, and abandon it, if it takes longer."""
    future: Future[T] = Future()

    threading.Thread(target=complete, args=(future, call), name="xckpt-call", daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():
            raise
        raise TransientError(f"no answer in {seconds:g} seconds", is_timeout=True) from None
