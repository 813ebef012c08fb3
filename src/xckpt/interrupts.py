"""Ctrl-C, deferred during operations that must not be interrupted.

Python raises `KeyboardInterrupt` between any two instructions of the main thread, for example after
a file was opened and before its descriptor is in a variable. If an import is interrupted, the
module is removed, but the submodules that it has loaded remain, and many packages cannot be
imported after that. An interrupt in the import system itself can leave its lock held, so that all
threads wait forever.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["deliver", "uninterrupted"]


class _Deferred:
    """State of the main thread: the depth of nested blocks, and the deferred signals."""

    depth = 0
    signals = 0
    handler: Any = None


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Deliver Ctrl-C at the end of the block instead of within it."""
    # The block must be short, import packages, or call `deliver` while it waits.
    is_main = threading.current_thread() is threading.main_thread()
    # Other threads are never interrupted, and handlers that are not Python's stay in place.
    if not is_main or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    if not _Deferred.depth:
        _Deferred.signals = 0
        _Deferred.handler = signal.signal(signal.SIGINT, _hold)
    _Deferred.depth += 1
    try:
        yield
    finally:
        _Deferred.depth -= 1
        if not _Deferred.depth:
            signal.signal(signal.SIGINT, _Deferred.handler)
            if _Deferred.signals:
                _Deferred.signals = 0
                signal.raise_signal(signal.SIGINT)


def deliver() -> None:
    """Deliver a deferred Ctrl-C, at a point where an interrupt is safe."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and _Deferred.depth and _Deferred.signals:
        _Deferred.signals = 0
        signal.signal(signal.SIGINT, _Deferred.handler)
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.signal(signal.SIGINT, _hold)


def _hold(*_: Any) -> None:
    _Deferred.signals += 1
