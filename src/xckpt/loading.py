"""Loading packages so that Ctrl-C leaves none of them half loaded.

A module whose loading is interrupted is removed, while the submodules that it has loaded remain.
Many packages cannot be loaded after that, and an interrupt in the import system itself can leave
its lock held, so that all threads wait for it forever.
"""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["uninterrupted"]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Deliver Ctrl-C at the end of the block instead of within it.

    Every block that may load large packages in the main thread is put into it.
    """
    interrupts: list[int] = []
    try:
        previous = signal.getsignal(signal.SIGINT)
        if previous is not None:  # else it is not Python's
            signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    except ValueError:  # another thread, where Ctrl-C is never delivered
        previous = None
    try:
        yield
    finally:
        if previous is not None:
            signal.signal(signal.SIGINT, previous)
        if interrupts:
            signal.raise_signal(signal.SIGINT)
