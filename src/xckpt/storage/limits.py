"""How much memory a read may take, how many threads and open files: what cannot fit is not begun.

The limit of memory is ``xckpt.memory-limit`` of dask's configuration, by default what is available:
to the machine, and to the control group of this process, which is what a container is. A tensor
whose elements are repeated or implied, such as a broadcast view of a few bytes, is not gone through
element by element above ``xckpt.expansion-limit``. Open files are shared and bounded in number.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakSet

from xckpt.errors import TooLargeError
from xckpt.interrupts import uninterrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

#: Less is never refused.
UNCHECKED_NBYTES = 1 << 20
# To ask for what is available takes longer than to read so little.
_SMALL_NBYTES = 64 << 20

# Decoded elements may take 32 times their stored bytes: codes of one bit become float32.
_EXPANSION = 64
_EXPANSION_LIMIT = "16GiB"

_OPTION = "dask.config.set({'xckpt.memory-limit': '64GiB'}) sets another limit"

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_MACHINE = Path("/proc/meminfo")


def cpu_count() -> int:
    """Return how many threads to use: dask's ``num_workers``, else what this process may use."""
    import dask
    from dask.system import CPU_COUNT

    return int(dask.config.get("num_workers", None) or CPU_COUNT)


def require_memory(nbytes: int, hint: str = "Select less of it at once") -> None:
    """Raise `TooLargeError` if a read that takes so much memory may not be begun."""
    if nbytes < UNCHECKED_NBYTES:
        return
    import dask
    from dask.utils import format_bytes, parse_bytes

    stated = dask.config.get("xckpt.memory-limit", None)
    if stated is None and nbytes < _SMALL_NBYTES:
        return
    limit = available_nbytes() if stated is None else int(parse_bytes(stated))
    if nbytes <= (sys.maxsize if limit is None else limit):
        return
    what = "is available" if stated is None else "is the limit (xckpt.memory-limit)"
    said = "" if limit is None else f": {format_bytes(limit)} {what}"
    raise TooLargeError(
        f"{nbytes} bytes ({format_bytes(nbytes)}) of memory are needed at once, too many{said}",
        rule="Memory",
        hint=f"{hint}. {_OPTION}",
    )


def exceeds_expansion(nbytes: int, stored_nbytes: int) -> bool:
    """Return whether elements take far more bytes than are stored, and more than the limit."""
    if nbytes <= max(UNCHECKED_NBYTES, _EXPANSION * stored_nbytes):
        return False
    import dask
    from dask.utils import parse_bytes

    return nbytes > int(parse_bytes(dask.config.get("xckpt.expansion-limit", _EXPANSION_LIMIT)))


def require_expansion(nbytes: int, stored_nbytes: int) -> None:
    """Raise `TooLargeError` if a few stored bytes stand for too many to read them all."""
    if exceeds_expansion(nbytes, stored_nbytes):
        from dask.utils import format_bytes

        raise TooLargeError(
            f"{stored_nbytes} stored bytes stand for {nbytes} ({format_bytes(nbytes)}), too many "
            "to read them all",
            rule="Memory",
            hint="Select less of it, leave it out, or raise dask's option xckpt.expansion-limit",
        )


def available_nbytes() -> int | None:
    """Return how many bytes of memory can be had; None where that is not known."""
    found = [each for each in (_of_machine(), *_of_groups()) if each is not None]
    return min(found, default=None)


def _of_machine() -> int | None:
    with suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":", 1) for line in _MACHINE.read_text("ascii").splitlines())
        # With memory that can be written to the swap.
        free = [int(lines[name].split()[0]) for name in ("MemAvailable", "SwapFree")]
        return sum(free) * 1024
    with suppress(AttributeError, OSError, ValueError):  # macOS says how much there is
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _of_groups() -> Iterator[int]:
    """Return what is left to each control group that this process is in."""
    with suppress(OSError, ValueError):
        for line in _OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                names, root = ("memory.max", "memory.current", "inactive_file"), _GROUPS
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                root = _GROUPS / "memory"
            else:
                continue
            # Inside a container the path may be that on the outside; then the root is the group.
            group = root / path.lstrip("/")
            for folder in (group, *group.parents):
                left = _left_to(folder, *names)
                if left is not None:
                    yield left
                if folder == root:
                    break


def _left_to(group: Path, limit: str, used: str, cached: str) -> int | None:
    with suppress(OSError, ValueError):
        text = (group / limit).read_text("ascii").strip()
        if text == "max":
            return None
        # Pages of files that were not used lately are dropped when memory is short.
        statistics = (group / "memory.stat").read_text("ascii").split()
        dropped = dict(zip(statistics[::2], statistics[1::2], strict=True)).get(cached, 0)
        return max(0, int(text) - int((group / used).read_text("ascii")) + int(dropped))
    return None


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

# Those that hold open files.
_pools_of_files: WeakSet[Pool[Any]] = WeakSet()


def most_open() -> int:
    """Return how many files one pool may keep open: a quarter of what the process may have."""
    if sys.platform == "win32":
        return 64
    import resource

    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 64 if allowed == resource.RLIM_INFINITY else max(4, min(64, allowed // 4))


def open_file(path: str | os.PathLike[str], flags: int, mode: int = 0o777) -> int:
    """Return the descriptor of a file, closing idle files if too many are open."""
    try:
        return os.open(path, flags, mode)
    except OSError as error:
        if error.errno not in _TOO_MANY:
            raise
    close_idle_files()
    return os.open(path, flags, mode)


def close_idle_files() -> None:
    """Drop all open files that are kept for later."""
    for pool in list(_pools_of_files):
        pool.clear()


class Pool(Generic[T]):
    """Opened things by key; the least recently used are let go above a limit.

    Letting go drops the pool's reference and no more: whoever still uses the thing keeps it, so
    a memory map lives as long as views of it do. The things themselves are to close when they
    are no longer referred to. `measure` says what one counts for the limit, by default 1; what
    counts for more than the limit is not held. A pool of `files` gives way to other open files.

    A forked child starts with an empty pool: it must not share seek positions with its parent,
    nor wait for locks that a thread of the parent held.
    """

    def __init__(
        self, limit: int = 64, measure: Callable[[T], int] = lambda _: 1, *, files: bool = False
    ) -> None:
        self.limit = limit
        if files:
            _pools_of_files.add(self)
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
        with uninterrupted():  # a file closes when it is dropped
            dropped: list[T] = []
            with self._lock:
                if key not in self._held:
                    self._total += self._measure(opened)
                held = self._held.setdefault(key, opened)
                self._held.move_to_end(key)
                while self._total > self.limit:
                    dropped.append(self._held.popitem(last=False)[1])
                    self._total -= self._measure(dropped[-1])
            del dropped
        return held

    def make_room(self, opener: Callable[[], T]) -> T:
        """Open something; if too many files are open, close all that are idle and try again."""
        try:
            return opener()
        except OSError as error:
            if error.errno not in _TOO_MANY:
                raise
        self.clear()
        close_idle_files()
        return opener()

    def clear(self) -> None:
        """Drop everything."""
        with uninterrupted():
            with self._lock:
                idle, self._held = self._held, OrderedDict()
                self._total = 0
            del idle

    def discard(self, key: Hashable) -> T | None:
        """Drop the object held under a key, and return it; None if there is none."""
        with uninterrupted(), self._lock:
            dropped = self._held.pop(key, None)
            if dropped is not None:
                self._total -= self._measure(dropped)
        return dropped
