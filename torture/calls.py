"""The calls by which Python looks at files and changes them, each made by whoever watches."""

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

#: Those that change a file, a folder, or what of them is on the disk.
CHANGING = (
    *("open", "close", "pwrite", "ftruncate", "posix_fallocate", "copy_file_range", "fsync"),
    *("fchmod", "fchown", "link", "rename", "replace", "unlink"),
)
#: Those that only look.
LOOKING = ("stat", "lstat", "fstat", "lseek", "preadv", "scandir", "flock")


class Call(NamedTuple):
    """A call that is about to be made.

    Parameters
    ----------
    name : str
        What is called.
    args : tuple
        What it is called with.
    make : callable
        Make it, and return what it returns.
    """

    name: str
    args: tuple[Any, ...]
    make: Callable[[], Any]


@contextmanager
def watched(folder: Path, observer: Callable[[Call], Any]) -> Iterator[None]:
    """Let ``observer(call)`` make all calls that concern a folder, one at a time.

    Nothing is brought to the disk meanwhile, so that it takes no time: `fsync` does nothing. What
    Python does not do itself is not seen: writes to memory maps, and reads of file objects.
    """
    root = os.fspath(folder)
    turns = threading.RLock()
    ours: set[int] = set()  # descriptors of files in the folder

    def concerned(args: tuple[Any, ...]) -> bool:
        return any(
            arg in ours if isinstance(arg, int) else str(arg).startswith(root)
            for arg in args[:2]
            if isinstance(arg, int | str | os.PathLike)
        )

    def seen(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            if not concerned(args):
                return real(*args, **options)

            def make() -> Any:
                done: Any = None if name == "fsync" else real(*args, **options)
                if name == "open":
                    ours.add(done)
                return done

            with turns:
                if name == "close":
                    ours.discard(args[0])  # another thread may get the number right after
                return observer(Call(name, args, make))

        return called

    places = [(fcntl if name == "flock" else os, name) for name in (*CHANGING, *LOOKING)]
    kept = [(place, name, getattr(place, name)) for place, name in places if hasattr(place, name)]
    try:
        for place, name, real in kept:
            setattr(place, name, seen(name, real))
        yield
    finally:
        for place, name, real in kept:
            setattr(place, name, real)
