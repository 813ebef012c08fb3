"""Work that a widget starts and the next click makes pointless: one job at a time, in a thread."""

from __future__ import annotations

from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Background", "CancelledError"]


class CancelledError(Exception):
    """Nobody wants the result of a job any more."""


class Background:
    """Runs the newest of the jobs that it is given, in a thread that ends with the process.

    Parameters
    ----------
    failed : callable
        Called in that thread with the error of a job that was not cancelled.
    """

    def __init__(self, failed: Callable[[Exception], object]) -> None:
        self._failed = failed
        self._lock = Lock()
        self._stop = Event()
        self._thread: Thread | None = None

    def start(self, job: Callable[[Callable[..., None]], object]) -> None:
        """Run a job in place of the one that is running."""
        with self._lock:
            self._stop.set()
            self._stop = Event()
            self._thread = Thread(target=self._run, args=(job, self._stop), daemon=True)
            self._thread.start()

    def cancel(self) -> None:
        """Stop the job that is running, if any, when it asks next."""
        self._stop.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the newest job to end."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    def _run(self, job: Callable[[Callable[..., None]], object], stop: Event) -> None:
        def check(*_: object) -> None:
            if stop.is_set():
                _cancelled()

        try:
            job(check)
        except CancelledError:
            return
        except Exception as error:  # noqa: BLE001  shown to the user, as there is no caller
            if not stop.is_set():
                self._failed(error)


def _cancelled() -> NoReturn:
    raise CancelledError
