"""Limits on memory, threads and open files; a read that cannot fit does not start.

The memory limit is ``xckpt.memory-limit`` in dask's configuration; by default, the memory available
to the machine and to the control group of this process, such as a container. A tensor whose
elements are repeated or implied, such as a broadcast view of a few bytes, is not expanded above
``xckpt.expansion-limit``. Open files are shared and bounded in number.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections import OrderedDict
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakSet

from xckpt.errors import TooLargeError
from xckpt.interrupts import uninterrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

#: Smaller reads are never refused.
UNCHECKED_NBYTES = 1 << 20
# Querying the available memory takes longer than a read of this size.
_SMALL_NBYTES = 64 << 20

# Decoded elements may take 32 times their stored bytes: codes of one bit become float32.
_EXPANSION = 64
_EXPANSION_LIMIT = "16GiB"

_OPTION = "dask.config.set({'xckpt.memory-limit': '64GiB'}) sets another limit"

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_MACHINE = Path("/proc/meminfo")


def cpu_count() -> int:
    """Return the number of threads: dask's ``num_workers``, or the CPUs of this process."""
    import dask
    from dask.system import CPU_COUNT

    return int(dask.config.get("num_workers", None) or CPU_COUNT)


def require_memory(nbytes: int, hint: str = "Select less of it at once") -> None:
    """Raise `TooLargeError` if a read would take more memory than the limit."""
    if nbytes < UNCHECKED_NBYTES:
        return
    import dask
    from dask.utils import format_bytes, parse_bytes

    option = dask.config.get("xckpt.memory-limit", None)
    if option is None and nbytes < _SMALL_NBYTES:
        return
    limit = available_nbytes() if option is None else int(parse_bytes(option))
    if nbytes <= (sys.maxsize if limit is None else limit):
        return
    origin = "is available" if option is None else "is the limit (xckpt.memory-limit)"
    reason = "" if limit is None else f": {format_bytes(limit)} {origin}"
    raise TooLargeError(
        f"{nbytes} bytes ({format_bytes(nbytes)}) of memory are needed at once, too many{reason}",
        rule="Memory",
        hint=f"{hint}. {_OPTION}",
    )


def exceeds_expansion(nbytes: int, stored_nbytes: int) -> bool:
    """Return whether elements take far more memory than their stored bytes, above the limit."""
    if nbytes <= max(UNCHECKED_NBYTES, _EXPANSION * stored_nbytes):
        return False
    import dask

    return nbytes > _parsed(dask.config.get("xckpt.expansion-limit", _EXPANSION_LIMIT))


@lru_cache
def _parsed(size: str | float) -> int:
    from dask.utils import parse_bytes

    return int(parse_bytes(size))


def require_expansion(nbytes: int, stored_nbytes: int) -> None:
    """Raise `TooLargeError` if a few stored bytes expand to more than the limit."""
    if exceeds_expansion(nbytes, stored_nbytes):
        from dask.utils import format_bytes

        raise TooLargeError(
            f"{stored_nbytes} stored bytes expand to {nbytes} ({format_bytes(nbytes)}), too many "
            "to read them all",
            rule="Memory",
            hint="Select less of it, leave it out, or raise dask's option xckpt.expansion-limit",
        )


def available_nbytes() -> int | None:
    """Return the number of bytes of available memory; None if it is unknown."""
    machine = _available_to_machine()
    sizes = [*_available_to_groups()] if machine is None else [machine, *_available_to_groups()]
    return min(sizes, default=None)


def _available_to_machine() -> int | None:
    with suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":", 1) for line in _MACHINE.read_text("ascii").splitlines())
        # The swap counts, because other memory can be moved there.
        free = [int(lines[name].split()[0]) for name in ("MemAvailable", "SwapFree")]
        return sum(free) * 1024
    with suppress(AttributeError, OSError, ValueError):  # macOS: total memory
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _available_to_groups() -> Iterator[int]:
    """Yield the available memory of each control group of this process that has a limit."""
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
            # Inside a container the path may be the one outside; then the root is the group.
            group = root / path.lstrip("/")
            for folder in (group, *group.parents):
                available = _available_to_group(folder, *names)
                if available is not None:
                    yield available
                if folder == root:
                    break


def _available_to_group(group: Path, limit: str, used: str, cached: str) -> int | None:
    with suppress(OSError, ValueError):
        text = (group / limit).read_text("ascii").strip()
        if text == "max":
            return None
        # The kernel drops inactive pages of files when memory is short.
        statistics = (group / "memory.stat").read_text("ascii").split()
        inactive = dict(zip(statistics[::2], statistics[1::2], strict=True)).get(cached, 0)
        return max(0, int(text) - int((group / used).read_text("ascii")) + int(inactive))
    return None


T = TypeVar("T")


class Locks:
    """Locks by key, which keys may share. A forked child gets new ones."""

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
#: Advice for a process that cannot open another file.
MORE_FILES = "close files that are not needed, or raise the limit of the process with `ulimit -n`"

# Pools that hold open files.
_pools_of_files: WeakSet[Pool[Any]] = WeakSet()


def most_open() -> int:
    """Return the number of files that a pool may keep open: a quarter of the process's limit."""
    if sys.platform == "win32":
        return 64
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 64 if limit == resource.RLIM_INFINITY else max(4, min(64, limit // 4))


def open_file(path: str | os.PathLike[str], flags: int, mode: int = 0o777) -> int:
    """Open a file and return its descriptor, closing idle files if too many are open."""
    try:
        return os.open(path, flags, mode)
    except OSError as error:
        if error.errno not in _TOO_MANY:
            raise
    close_idle_files()
    with _advising():
        return os.open(path, flags, mode)


@contextmanager
def _advising() -> Iterator[None]:
    """Add advice to errors about too many open files."""
    try:
        yield
    except OSError as error:
        if error.errno not in _TOO_MANY:
            raise
        raise OSError(error.errno, f"{error.strerror}; {MORE_FILES}", error.filename) from error


def close_idle_files() -> None:
    """Drop the open files in all pools."""
    for pool in list(_pools_of_files):
        pool.clear()


class Pool(Generic[T]):
    """Opened resources by key; above a limit, the least recently used are dropped."""

    # Dropping removes only the pool's reference: a memory map lives as long as views of it do.
    # Resources must close themselves with the last reference to them.

    def __init__(
        self, limit: int = 64, measure: Callable[[T], int] = lambda _: 1, *, files: bool = False
    ) -> None:
        self.limit = limit
        if files:  # the pool is emptied if other files cannot be opened
            _pools_of_files.add(self)
        # The share of a resource in the limit; resources above the limit are not kept.
        self._measure = measure
        self._reset()
        # A forked child must not share seek positions with its parent, nor wait for locks that a
        # thread of the parent held.
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        # Reentrant, because the garbage collector may run a finalizer that uses the pool.
        self._lock = threading.RLock()
        self._items: OrderedDict[Hashable, T] = OrderedDict()
        self._total = 0

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: Hashable, opener: Callable[[], T]) -> T:
        """Return the resource of a key, opening it if it is missing."""
        with self._lock:
            if key in self._items:
                self._items.move_to_end(key)
                return self._items[key]
        # Outside the lock, so that a slow file system does not delay other keys.
        opened = self.make_room(opener)
        with uninterrupted():  # a file closes when it is dropped
            dropped: list[T] = []
            with self._lock:
                if key not in self._items:
                    self._total += self._measure(opened)
                item = self._items.setdefault(key, opened)
                self._items.move_to_end(key)
                while self._total > self.limit:
                    dropped.append(self._items.popitem(last=False)[1])
                    self._total -= self._measure(dropped[-1])
            del dropped
        return item

    def make_room(self, opener: Callable[[], T]) -> T:
        """Open a resource; if too many files are open, close idle ones and try again."""
        try:
            return opener()
        except OSError as error:
            if error.errno not in _TOO_MANY:
                raise
        self.clear()
        close_idle_files()
        with _advising():
            return opener()

    def clear(self) -> None:
        """Drop all resources."""
        with uninterrupted():
            with self._lock:
                idle, self._items = self._items, OrderedDict()
                self._total = 0
            del idle

    def discard(self, key: Hashable) -> T | None:
        """Drop the resource of a key and return it; None if it is missing."""
        with uninterrupted(), self._lock:
            dropped = self._items.pop(key, None)
            if dropped is not None:
                self._total -= self._measure(dropped)
        return dropped
