"""Requests: how long they may take, which are made again, and how another thread ends them."""

from __future__ import annotations

import asyncio
import errno
import math
import random
import re
import threading
import time
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from xckpt.errors import CheckpointError, shown
from xckpt.storage.source import populate

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

T = TypeVar("T")

#: The key of `storage_options` that is ours: fsspec does not see it.
OWN_OPTIONS = "xckpt"
#: How often a request is made before it is given up.
ATTEMPTS = 6

# Waiting for them all takes about three seconds.
_FIRST_DELAY = 0.1

_ERRNOS = {
    getattr(errno, name)
    for name in ("EIO", "EREMOTEIO", "EBUSY", "EAGAIN", "ETIMEDOUT", "ECONNRESET", "EPIPE")
    if hasattr(errno, name)
}
# Libraries whose errors are about connections where they are no errors of ours or of the system.
_NETWORK = {
    *("adlfs", "aiobotocore", "aiohttp", "azure", "botocore", "gcsfs", "http", "urllib3"),
    *("httpcore", "httpcore2", "httpx", "httpx2", "huggingface_hub", "requests"),
}

_EXTRAS = {"http": "http", "https": "http", "s3": "s3", "s3a": "s3", "hf": "hub"}


class BusyError(OSError):
    """A server asks for fewer requests, and perhaps for some seconds without."""

    seconds: float = 0


class GivenUpError(OSError):
    """A request failed as often as the library that makes it had patience for."""


class Limits(NamedTuple):
    """How slow a server may be: ``storage_options={"xckpt": {...}}``."""

    timeout: float = 30.0  # seconds within which a request must get ahead
    min_rate: float = 16384.0  # bytes a second, on average over these, that count as getting ahead


def own_options(storage_options: Mapping[str, Any] | None) -> tuple[dict[str, Any], Limits]:
    """Split what users give: what fsspec gets, and what is for this package."""
    options = dict(storage_options or {})
    own = options.pop(OWN_OPTIONS, None) or {}
    name = f"storage_options[{OWN_OPTIONS!r}]"
    unknown = [key for key in own if key not in Limits._fields] if isinstance(own, dict) else [own]
    if unknown:
        raise ValueError(f"{name} has 'timeout' and 'min_rate', and not {unknown[0]!r}")
    for key, value in own.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0 or (key, value) == ("timeout", 0):
            raise ValueError(f"{name}[{key!r}] is not a positive number: {value!r}")
    return options, Limits(**{key: float(value) for key, value in own.items()})


class Patience:
    """How long to wait for bytes, over all attempts to get them.

    Within each `timeout` seconds at least ``timeout * min_rate`` bytes must arrive, or all that are
    wanted. An attempt may be silent for half of the time, so that there is a second one.
    """

    def __init__(self, name: str, limits: Limits) -> None:
        self._name = name
        self._limits = limits
        self._start = time.monotonic()
        self._arrived = 0

    def arrived(self, nbytes: int) -> None:
        """Count bytes, and begin a new period when they are enough."""
        self._arrived += nbytes
        if self._arrived >= max(self._limits.timeout * self._limits.min_rate, 1):
            self._start, self._arrived = time.monotonic(), 0

    def left(self) -> float:
        """Return the seconds that are left; none is an error."""
        left = self._start + self._limits.timeout - time.monotonic()
        if left <= 0:
            timeout, rate = self._limits
            told = (
                f"{self._arrived} bytes came in {timeout:g} seconds, fewer than {rate:g} a second "
                f"on average. If that is how it is, give storage_options={{{OWN_OPTIONS!r}: "
                "{'timeout': ...}} more seconds, or 'min_rate' fewer bytes"
            )
            raise OSError(errno.ETIMEDOUT, told, self._name)  # a TimeoutError
        return left

    def silence(self) -> float:
        """Return how many seconds an attempt may wait for its next byte."""
        return min(self.left(), self._limits.timeout / 2)

    def blocked(self, nbytes: int) -> float:
        """Return how many seconds a call may take that brings bytes only all at once."""
        return self.silence() + nbytes / max(self._limits.min_rate, 1)

    def pause(self, failures: int, problem: Exception | None) -> None:
        """Wait before the next attempt, longer after each failure, and as long as a server says."""
        at_least = 0.0
        if isinstance(problem, BusyError):
            at_least = problem.seconds
            tell_busy()
        if at_least > self.left():
            wait = {OWN_OPTIONS: {"timeout": at_least + self._limits.timeout}}
            told = (
                f"{getattr(problem, 'strerror', problem)}; it wants no requests for {at_least:g} "
                f"seconds: try again after that, or wait with storage_options={wait}"
            )
            raise OSError(errno.ETIMEDOUT, told, self._name)
        # Unequal, or a thousand workers that failed together come back together.
        spread = random.uniform(0.5, 1)  # noqa: S311  not a secret
        seconds = max(at_least, spread * _FIRST_DELAY * 2 ** min(failures - 1, 6))
        pause(min(self.left(), seconds))
        self.left()


def lacking(url: str, error: ImportError) -> ImportError:
    """Return an error that says what to install for a URL."""
    protocols = re.split(r"://|::", url)
    extra = next((_EXTRAS[each] for each in protocols if each in _EXTRAS), None)
    how = "" if extra is None else f". Install it with: pip install 'xckpt[{extra}]'"
    return ImportError(f"cannot open {url}: {error}{how}")


def called_within(seconds: float, call: Callable[[], T]) -> T:
    """Call a function; one that never returns is left behind on a thread."""
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  it is raised where it is waited for
            future.set_exception(error)

    # A thread of an executor would keep the process from ending.
    threading.Thread(target=run, name="xckpt-blocking-call", daemon=True).start()
    return wait_for(future, seconds)


def is_transient_status(status: int) -> bool:
    """Return whether a request with this HTTP status is worth retrying."""
    return status in {408, 425, 429} or 500 <= status < 600


def is_transient(error: BaseException) -> bool:
    """Return whether what failed may succeed the next time."""
    if isinstance(error, CheckpointError | FileNotFoundError | PermissionError | GivenUpError):
        return False
    # An invalid URL stays one; so does a number that is none.
    if isinstance(error, ValueError | LookupError):
        return False
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if _is_of_network(error):
        # Answers that cannot be parsed have the status 400, redirects that never end have 0.
        status = getattr(error, "status", None)
        return is_transient_status(status) if isinstance(status, int) else True
    return isinstance(error, OSError) and error.errno in _ERRNOS


def _is_of_network(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in _NETWORK


def words_of(error: BaseException) -> str:
    """Return what an error of a library says; parts of it may come from a server."""
    return shown(str(error)) if str(error) else type(error).__name__


def as_os_error(error: Exception, name: str, what: str = "request") -> Exception:
    """Return errors of libraries, and bare ones, as one of the operating system with the URL."""
    is_bare = isinstance(error, ValueError | LookupError) and not isinstance(error, OSError)
    if isinstance(error, CheckpointError) or not (is_bare or _is_of_network(error)):
        return error
    number = errno.EIO if is_transient(error) else errno.EINVAL
    return OSError(number, f"the {what} failed: {words_of(error)}", name)


def attempted(name: str, request: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Make a request once; return what came, or what went wrong if that passes."""
    try:
        return request(), None
    except Exception as error:
        told = as_os_error(error, name)
        if is_transient(told):
            return None, told
        if told is error:
            raise
        raise told from error


def retried(name: str, request: Callable[[], T], patience: Patience) -> T:
    """Make a request until it succeeds, fails for good, or takes too long."""
    problem: Exception | None = None
    for failures in range(ATTEMPTS):
        if failures:
            patience.pause(failures, problem)
        answer, problem = attempted(name, request)
        if problem is None:
            return answer  # type: ignore[return-value]
    patience.left()
    reason = getattr(problem, "strerror", None) or problem
    told = f"the request failed {ATTEMPTS} times, the last time with: {reason}"
    raise OSError(errno.EIO, told, name) from problem


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
