"""Ctrl-C, held back while something may not be left half done.

Python raises `KeyboardInterrupt` between any two instructions of the main thread: for example after
a file was opened and before its descriptor is in a variable. A module whose loading is interrupted
is removed, while the submodules that it has loaded remain: many packages cannot be loaded after
that, and an interrupt in the import system itself can leave its lock held, so that all threads wait
for it forever.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["deliver", "uninterrupted"]


class _Held:
    """State of the main thread: the depth of nested blocks, and the signals held back."""

    depth = 0
    signals = 0
    handler: Any = None


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Deliver Ctrl-C at the end of the block instead of within it.

    The block is short, loads packages, or calls `deliver` wherever it waits.
    """
    is_main = threading.current_thread() is threading.main_thread()
    # Another thread is never interrupted, and a handler that is not Python's is left alone.
    if not is_main or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    if not _Held.depth:
        _Held.signals = 0
        _Held.handler = signal.signal(signal.SIGINT, _hold)
    _Held.depth += 1
    try:
        yield
    finally:
        _Held.depth -= 1
        if not _Held.depth:
            signal.signal(signal.SIGINT, _Held.handler)
            if _Held.signals:
                _Held.signals = 0
                signal.raise_signal(signal.SIGINT)


def deliver() -> None:
    """Deliver Ctrl-C that is held back: nothing is half done here."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and _Held.depth and _Held.signals:
        _Held.signals = 0
        signal.signal(signal.SIGINT, _Held.handler)
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.signal(signal.SIGINT, _hold)


def _hold(*_: Any) -> None:
    _Held.signals += 1
