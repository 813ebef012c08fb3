"""How much memory one read may take, and how many threads: what cannot fit is not begun.

The limit is ``xckpt.memory-limit`` of dask's configuration, by default what is available: to the
machine, and to the control group of this process, which is what a container is.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.errors import TooLargeError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "UNCHECKED_NBYTES",
    "available_nbytes",
    "cpu_count",
    "empty",
    "empty_array",
    "populate",
    "require_memory",
]

#: Less is never refused.
UNCHECKED_NBYTES = 1 << 20
# To ask for what is available takes longer than to read so little.
_SMALL_NBYTES = 64 << 20
# Of memory that is used for nothing else, not even by this process, until it is touched.
_HUGE = 2 << 20

# Of Linux since 5.14; others say that they do not know it. The function of Python is for its own
# maps alone, and keeps other threads waiting.
_POPULATE_WRITE = 23
_madvise = ctypes.CDLL(None).madvise if sys.platform == "linux" else None

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


def empty(nbytes: int) -> memoryview:
    """Allocate memory to read into; unlike that of a `bytearray` it is not zeroed first."""
    return empty_array(nbytes).data


def empty_array(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Allocate memory to read into as an array."""
    wasted = -nbytes % _HUGE
    if nbytes < 2 * _HUGE or wasted > nbytes >> 4:
        return np.empty(nbytes, np.uint8)
    # From here on numpy asks for huge pages. Memory that does not begin with one has 512 small ones
    # at its ends, and each has to be faulted in: a quarter of the time of reading 8 MiB.
    memory = np.empty(nbytes + _HUGE, np.uint8)
    start = -memory.__array_interface__["data"][0] % _HUGE
    return memory[start : start + nbytes]


def populate(memory: memoryview) -> None:
    """Have the system provide memory now, where it can be asked to, not when it is written to."""
    if len(memory) >= UNCHECKED_NBYTES and _madvise is not None:
        start = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
        stop = (start + len(memory)) & -mmap.PAGESIZE
        start = (start + mmap.PAGESIZE - 1) & -mmap.PAGESIZE
        _madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _POPULATE_WRITE)


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
