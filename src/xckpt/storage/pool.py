"""What a process holds open, shared and bounded in number, and locks; a fork has its own."""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

__all__ = ["Locks", "Pool"]

T = TypeVar("T")


class Locks:
    """Locks by key, some of which are shared; a forked child waits for no thread of its parent."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._locks = [threading.Lock() for _ in range(self._count)]

    def of(self, key: Hashable) -> threading.Lock:
        """Return the lock of a key."""
        return self._locks[hash(key) % self._count]


_TOO_MANY = {errno.EMFILE, errno.ENFILE}


class Pool(Generic[T]):
    """Opened things by key; the least recently used are let go above a limit.

    Letting go drops the pool's reference and no more: whoever still uses the thing keeps it, so
    a memory map lives as long as views of it do. The things themselves are to close when they
    are no longer referred to. `measure` says what one counts for the limit, by default 1; what
    counts for more than the limit is not held.

    A forked child starts with an empty pool: it must not share seek positions with its parent,
    nor wait for locks that a thread of the parent held.
    """

    def __init__(self, limit: int = 64, measure: Callable[[T], int] = lambda _: 1) -> None:
        self.limit = limit
        self._measure = measure
        self._reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        # Reentrant, because the garbage collector may run a finalizer that comes back here.
        self._lock = threading.RLock()
        self._held: OrderedDict[Hashable, T] = OrderedDict()
        self._total = 0

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Hashable, opener: Callable[[], T]) -> T:
        """Return what is held under a key, opening it if need be."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
        # Outside the lock: a slow file system holds up only those who wait for it.
        opened = self.make_room(opener)
        dropped: list[T] = []
        with self._lock:
            if key not in self._held:
                self._total += self._measure(opened)
            held = self._held.setdefault(key, opened)
            self._held.move_to_end(key)
            while self._total > self.limit:
                dropped.append(self._held.popitem(last=False)[1])
                self._total -= self._measure(dropped[-1])
        return held

    def make_room(self, opener: Callable[[], T]) -> T:
        """Open something; if too many files are open, let go of all that are idle and try again."""
        try:
            return opener()
        except OSError as error:
            if error.errno not in _TOO_MANY:
                raise
        with self._lock:
            idle, self._held = self._held, OrderedDict()
        del idle
        return opener()

    def discard(self, key: Hashable) -> None:
        """Let go of what is held under a key, if anything is."""
        with self._lock:
            if key in self._held:
                self._total -= self._measure(self._held.pop(key))
