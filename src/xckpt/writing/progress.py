"""Progress by bytes: a bar, a function, or nothing."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

if TYPE_CHECKING:
    from collections.abc import Callable

    Wanted = bool | Callable[[int, int], object] | None

__all__ = ["Progress", "report"]

# What is done within seconds needs no bar.
_DELAY = 2.0

# Tasks of a dask graph are told a name, and find who listens if they run in this process.
_observers: dict[str, Progress] = {}


class Progress:
    """Counts bytes that are done, and shows it.

    Parameters
    ----------
    wanted : None, bool or callable
        True shows a bar, False nothing; None shows one after two seconds where somebody can see
        it; a function is called with the bytes done so far and all of them.
    total : int
        How many bytes there are.
    what : str
        Label of the bar.

    Attributes
    ----------
    name : str
        What `report` knows it by.
    """

    def __init__(self, wanted: Wanted, total: int, what: str) -> None:
        self.name = uuid4().hex
        self._done = 0
        self._total = total
        self._call = wanted if callable(wanted) else None
        self._bar: Any = None
        self._lock = threading.Lock()
        if wanted is True or (wanted is None and _is_seen()):
            from tqdm.auto import tqdm

            delay = 0 if wanted else _DELAY
            self._bar = tqdm(
                total=total, desc=what, unit="B", unit_scale=True, unit_divisor=1024, delay=delay
            )

    def __enter__(self) -> Self:
        _observers[self.name] = self
        return self

    def __exit__(self, *error: object) -> None:
        _observers.pop(self.name, None)
        if self._bar is not None:
            self._bar.close()

    def advance(self, nbytes: int) -> None:
        """Count bytes that are done, from any thread.

        Parameters
        ----------
        nbytes : int
            How many more.
        """
        if self._bar is None and self._call is None:
            return
        with self._lock:
            self._done += nbytes
            if self._bar is not None:
                self._bar.update(nbytes)
            if self._call is not None:
                self._call(self._done, self._total)


def report(observer: str, nbytes: int) -> None:
    """Count bytes that a task has done; nothing happens in another process.

    Parameters
    ----------
    observer : str
        The `name` of a `Progress`.
    nbytes : int
        How many more.
    """
    progress = _observers.get(observer)
    if progress is not None:
        progress.advance(nbytes)


def _is_seen() -> bool:
    return "ipykernel" in sys.modules or bool(sys.stderr and sys.stderr.isatty())
