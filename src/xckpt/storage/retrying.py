"""Which errors of a network pass, and how long to wait for it."""

from __future__ import annotations

import errno
import random
import time
from typing import TYPE_CHECKING, TypeVar

from xckpt.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ATTEMPTS", "GivenUpError", "is_transient", "is_transient_status", "pause", "retried"]

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
_NETWORK = {"adlfs", "aiobotocore", "aiohttp", "azure", "botocore", "gcsfs", "http", "urllib3"}
_STATUSES = {408, 425, 429}

T = TypeVar("T")


class GivenUpError(OSError):
    """A request failed as often as the library that makes it had patience for."""


def is_transient_status(status: int) -> bool:
    """Return whether an HTTP status may be another one the next time."""
    return status in _STATUSES or 500 <= status < 600


def is_transient(error: Exception) -> bool:
    """Return whether what failed may succeed the next time."""
    if isinstance(error, CheckpointError | FileNotFoundError | PermissionError | GivenUpError):
        return False
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if type(error).__module__.partition(".")[0] in _NETWORK:
        return True
    return isinstance(error, OSError) and error.errno in _ERRNOS


def pause(failures: int) -> None:
    """Wait before the next attempt, longer after each failure."""
    # Unequal, or a thousand workers that failed together come back together.
    spread = random.uniform(0.5, 1)  # noqa: S311  not a secret
    time.sleep(spread * _FIRST_DELAY * 2 ** min(failures - 1, 6))


def retried(name: str, request: Callable[[], T]) -> T:
    """Make a request until it succeeds, or fails for good."""
    for failures in range(1, ATTEMPTS):
        try:
            return request()
        except Exception as error:
            if not is_transient(error):
                raise
            pause(failures)
    try:
        return request()
    except Exception as error:
        if not is_transient(error):
            raise
        told = f"the request failed {ATTEMPTS} times, the last time with: {error}"
        raise OSError(errno.EIO, told, name) from error
