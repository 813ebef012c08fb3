"""Progress of long operations in bytes: shown by a bar, passed to a function, or ignored.

A function is called as ``f(done, total)``, in bytes. `done` never decreases; `total` grows if an
operation turns out to need more reads, as for exact quantiles.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

if TYPE_CHECKING:
    from collections.abc import Callable

    ProgressOption = bool | Callable[[int, int], object] | None

# Shorter operations need no bar, unless the user requests one.
_DELAY_SECONDS = 0.5

# Tasks of a dask graph have the name of an observer, which exists only in this process.
_observers: dict[str, Progress] = {}


class Progress:
    """A thread-safe counter of processed bytes, with a bar or a function."""

    def __init__(self, option: ProgressOption, label: str, total: int = 0) -> None:
        self.name = uuid4().hex  # for `report`
        self._done = 0
        self._total = total  # `expect` adds more
        self._label = label
        self._call = option if callable(option) else None
        # By default, a bar appears in a terminal or notebook after a while.
        self._delay = 0.0 if option is True else _DELAY_SECONDS
        self._is_shown = option is True or (
            option is None
            and ("ipykernel" in sys.modules or bool(sys.stderr and sys.stderr.isatty()))
        )
        self._bar: Any = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        _observers[self.name] = self
        if self._total:
            self.expect(0)
        return self

    def __exit__(self, *error: object) -> None:
        _observers.pop(self.name, None)
        if self._call is not None and not self._total and error[0] is None:
            self._call(0, 0)  # everything is in the cache
        if self._bar is not None:
            if not self._delay:
                self._bar.refresh()  # shows the bar even if the operation was very fast
            self._bar.close()

    @property
    def done(self) -> int:
        """Number of processed bytes."""
        return self._done

    def expect(self, nbytes: int) -> None:
        """Add to the number of bytes to process."""
        with self._lock:
            self._total += nbytes
            if not (self._is_shown and self._total):  # cached results need no bar
                return
            if self._bar is None:
                self._bar = _bar(self._total, self._label, self._delay)
            elif nbytes:
                self._bar.total = self._total

    def advance(self, nbytes: int) -> None:
        """Add to the number of processed bytes."""
        with self._lock:
            self._done += nbytes
            if self._bar is not None:
                self._bar.update(nbytes)
            if self._call is not None:
                self._call(self._done, self._total)


def report(observer: str, nbytes: int) -> None:
    """Add the bytes that a task has processed; has no effect in another process."""
    progress = _observers.get(observer)
    if progress is not None:
        progress.advance(nbytes)


def _bar(total: int, label: str, delay: float) -> Any:
    with warnings.catch_warnings():
        # tqdm warns if ipywidgets are missing or too old, and shows the bar as text.
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm

        return tqdm(
            total=total,
            desc=label,
            unit="iB",
            unit_scale=True,
            unit_divisor=1024,
            delay=delay,
            leave=False,
            **_size(),
        )


def _size() -> dict[str, int]:
    """Return a size for terminals without one, where tqdm would show nothing."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (AttributeError, OSError, ValueError):
        return {}
    assumed = shutil.get_terminal_size()
    return {} if columns else {"ncols": assumed.columns, "nrows": assumed.lines}
