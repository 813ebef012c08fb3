"""What a process holds open: descriptors and memory maps, shared, bounded in number."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

__all__ = ["Pool"]

T = TypeVar("T")


class Pool(Generic[T]):
    """Opened things by key; the least recently used are let go above a limit.

    Letting go drops the pool's reference and no more: whoever still uses the thing keeps it, so
    a memory map lives as long as views of it do. The things themselves are to close when they
    are no longer referred to.

    A forked child starts with an empty pool: it must not share seek positions with its parent,
    nor wait for locks that a thread of the parent held.

    Parameters
    ----------
    limit : int
        How many are held at most.

    Examples
    --------
    >>> pool: Pool[list[int]] = Pool(limit=2)
    >>> pool.get("a", list) is pool.get("a", list)
    True
    """

    def __init__(self, limit: int = 64) -> None:
        self.limit = limit
        self._reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        # Reentrant, because the garbage collector may run a finalizer that comes back here.
        self._lock = threading.RLock()
        self._held: OrderedDict[Hashable, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Hashable, opener: Callable[[], T]) -> T:
        """Return what is held under a key, opening it if need be.

        Parameters
        ----------
        key : hashable
            What it is.
        opener : callable
            Opens it. Its errors pass through.

        Returns
        -------
        object
            The same one for all callers until it is let go.
        """
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
        # Outside the lock: a slow file system holds up only those who wait for it.
        opened = opener()
        dropped: list[T] = []
        with self._lock:
            held = self._held.setdefault(key, opened)
            self._held.move_to_end(key)
            while len(self._held) > self.limit:
                dropped.append(self._held.popitem(last=False)[1])
        return held

    def discard(self, key: Hashable) -> None:
        """Let go of what is held under a key, if anything is.

        Parameters
        ----------
        key : hashable
            What it is.
        """
        with self._lock:
            self._held.pop(key, None)
