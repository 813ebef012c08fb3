"""Ctrl-C, deferred during operations that must not be interrupted, such as imports.

Python raises `KeyboardInterrupt` between any two instructions of the main thread, for example after
a file was opened and before its descriptor is in a variable. `xckpt.imports` defers it while a
module is loaded. A deferred Ctrl-C is announced after a second, and the next one is not deferred.
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

# Seconds until a deferred signal is announced.
_PATIENCE = 1.0
_MESSAGE = "stopping after this step; press Ctrl-C again to stop at once"
# Signals in so many seconds are one: a key that is held down repeats, and launchers forward the
# signal that the terminal sends to their child as well.
_SAME_PRESS = 0.1
_PAUSE = 0.01


class _Deferred:
    """State of the main thread."""

    #: The depth of nested `uninterrupted` blocks.
    depth = 0
    #: The code whose import of a module is in progress.
    importer: FrameType | None = None
    #: The time of the first signal that is not delivered yet.
    since: float | None = None
    #: The time of the last signal.
    last = 0.0
    #: Whether the user was told that the signal is deferred.
    is_announced = False
    #: Whether the signal waits only for the import system to return to the importer.
    is_due = False
    #: Whether the next signal is the deferred one, sent again.
    is_repeated = False
    handler: Any = None


def _is_main() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _install() -> bool:
    """Defer Ctrl-C from now on; return False where that is impossible or pointless."""
    # Other threads are never interrupted, and handlers that are not Python's stay in place.
    if not _is_main():
        return False
    handler = signal.getsignal(signal.SIGINT)
    if handler is _hold:
        return True
    if handler is None or handler is signal.SIG_IGN:
        return False
    _Deferred.handler = handler
    _Deferred.since, _Deferred.is_due = None, False
    signal.signal(signal.SIGINT, _hold)
    return True


def _restore() -> None:
    # Packages may install handlers while they are imported.
    if signal.getsignal(signal.SIGINT) is _hold:
        signal.signal(signal.SIGINT, _Deferred.handler)


class uninterrupted:  # noqa: N801  as `contextlib.suppress`
    """Deliver Ctrl-C at the end of the block instead of within it."""

    # The block must be short, or call `deliver` while it waits. A generator would keep the objects
    # of the block alive if Ctrl-C came while `contextlib` leaves it.
    __slots__ = ("_is_deferring",)

    def __enter__(self) -> None:
        self._is_deferring = _install()
        if self._is_deferring:
            _Deferred.depth += 1

    def __exit__(self, *_: object) -> None:
        if not self._is_deferring:
            return
        _Deferred.depth -= 1
        if not (_Deferred.depth or _Deferred.importer):
            if _Deferred.since is None:
                _restore()
            else:
                _deliver()


def is_pending() -> bool:
    """Return whether a Ctrl-C is deferred."""
    return _Deferred.since is not None


def deliver() -> None:
    """Deliver a deferred Ctrl-C, at a point where an interrupt is safe."""
    if _is_main() and is_pending():
        _deliver()


def forget(message: str) -> None:
    """Drop a deferred Ctrl-C when the work has ended, and inform the user."""
    if _is_main() and is_pending():
        _Deferred.since = None
        _print(message)


def begin_import(importer: FrameType) -> bool:
    """Defer Ctrl-C while code imports a module; return False if it is not deferred."""
    if not _install():
        return False
    _Deferred.importer = importer
    return True


def end_import() -> None:
    """Deliver a deferred Ctrl-C as soon as the import system has returned to the importer."""
    if not (_Deferred.depth or is_pending()):
        _restore()
        if is_pending():  # it came before the handler was restored
            signal.signal(signal.SIGINT, _hold)
    if not _Deferred.depth and is_pending():
        _Deferred.is_due = True
    else:
        _Deferred.importer = None


def _deliver() -> None:
    _Deferred.since, _Deferred.is_due = None, False
    _restore()
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        if _Deferred.depth:
            _install()
        else:
            _Deferred.importer = None


def _hold(_: int, frame: FrameType | None) -> None:
    is_repeated, _Deferred.is_repeated = _Deferred.is_repeated, False
    now = time.monotonic()
    silence, _Deferred.last = now - _Deferred.last, now
    if not (_Deferred.depth or _is_importing(frame)):
        _deliver()
    elif _Deferred.since is None:
        _Deferred.since, _Deferred.is_announced = now, False
        # Without the locks of `threading`, which the interrupted code may hold.
        _thread.start_new_thread(_watch, (_Deferred.since,))
    elif _Deferred.is_announced and not is_repeated and silence > _SAME_PRESS:
        _deliver()


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether the import system works for the importer."""
    is_inside = False
    while frame is not None and _Deferred.importer is not None:
        if frame is _Deferred.importer:
            return is_inside
        is_inside = is_inside or frame.f_code.co_filename.startswith("<frozen importlib")
        frame = frame.f_back
    return False


def _print(message: str) -> None:
    with suppress(Exception):  # the stream may be closed
        sys.stderr.write(f"xckpt: {message}\n")
        sys.stderr.flush()


def _watch(since: float) -> None:
    """Announce a deferred signal, and send it again until the import system has returned."""
    while _Deferred.since == since:
        time.sleep(_PAUSE)
        if not _Deferred.is_announced and time.monotonic() - since > _PATIENCE:
            _Deferred.is_announced = True
            _print(_MESSAGE)
        if _Deferred.is_due and _Deferred.since == since:
            _Deferred.is_repeated = True
            if hasattr(signal, "pthread_kill"):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            else:
                _thread.interrupt_main()
