"""Interception of the calls by which Python reads and changes files."""

from __future__ import annotations

import fcntl
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["CHANGING", "LOOKING", "Call", "watched"]

#: Calls that change a file, a folder, or their state on the disk.
CHANGING = (
    *("open", "close", "pwrite", "ftruncate", "posix_fallocate", "copy_file_range", "fsync"),
    *("fchmod", "fchown", "link", "rename", "replace", "unlink"),
)
#: Calls that only read.
LOOKING = ("stat", "lstat", "fstat", "lseek", "preadv", "scandir", "flock")


class Call(NamedTuple):
    """A call that is about to be made.

    Parameters
    ----------
    name : str
        Name of the function.
    args : tuple
        Positional arguments.
    make : callable
        Function that makes the call and returns its result.
    """

    name: str
    args: tuple[Any, ...]
    make: Callable[[], Any]


@contextmanager
def watched(folder: Path, observer: Callable[[Call], Any]) -> Iterator[None]:
    """Pass all calls that concern a folder to ``observer(call)``, one at a time.

    `fsync` does nothing meanwhile, to save time. Writes to memory maps and reads of file objects
    are not intercepted.
    """
    root = os.fspath(folder)
    turns = threading.RLock()
    descriptors: set[int] = set()  # descriptors of files in the folder

    def concerned(args: tuple[Any, ...]) -> bool:
        return any(
            arg in descriptors if isinstance(arg, int) else str(arg).startswith(root)
            for arg in args[:2]
            if isinstance(arg, int | str | os.PathLike)
        )

    def observed(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            if not concerned(args):
                return real(*args, **options)

            def make() -> Any:
                result: Any = None if name == "fsync" else real(*args, **options)
                if name == "open":
                    descriptors.add(result)
                return result

            with turns:
                if name == "close":
                    descriptors.discard(args[0])  # another thread may get the number right after
                return observer(Call(name, args, make))

        return called

    candidates = [(fcntl if name == "flock" else os, name) for name in (*CHANGING, *LOOKING)]
    originals = [
        (module, name, getattr(module, name))
        for module, name in candidates
        if hasattr(module, name)
    ]
    try:
        for module, name, real in originals:
            setattr(module, name, observed(name, real))
        yield
    finally:
        for module, name, real in originals:
            setattr(module, name, real)
