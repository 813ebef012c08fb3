"""Temporary files beside their targets, and what becomes of those whose writer ended.

The temporary file of ``m.zt`` is ``.m.zt.<random>.xckpt-partial`` in the same folder. Its writer
holds a lock on it (``flock``), which the kernel lets go of however the writer ends, on whatever
machine. So a temporary file without a lock was left over, and the next writer to that target
removes it. Where the file system has no locks nothing is removed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PARTIAL_SUFFIX", "create", "discard", "remove_left_over"]

PARTIAL_SUFFIX = ".xckpt-partial"

_LONGEST_NAME = 255
_O_BINARY = getattr(os, "O_BINARY", 0)


def _pattern(target: str) -> tuple[str, str]:
    """Give what the names of temporary files of a target begin and end with."""
    name = Path(target).name
    longest = _LONGEST_NAME - len(PARTIAL_SUFFIX) - 12
    while len(name.encode(errors="surrogateescape")) > longest:
        name = name[:-1]
    return f".{name}.", PARTIAL_SUFFIX


def create(target: str, replaced: os.stat_result | None) -> tuple[str, int]:
    """Make a temporary file and lock it.

    Parameters
    ----------
    target : str
        Absolute path of the file that it is to become.
    replaced : os.stat_result or None
        Of the file that is there now, whose owner and permissions it gets; None is an ordinary
        new file.

    Returns
    -------
    path : str
        Its path.
    fileno : int
        Its descriptor, for reading and writing.
    """
    start, end = _pattern(target)
    # What is private must not be readable while it is written either.
    mode = 0o666 if replaced is None else 0o600
    while True:
        path = Path(target).with_name(f"{start}{secrets.token_hex(4)}{end}")
        try:
            fileno = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _O_BINARY, mode)
        except FileExistsError:
            continue
        try:
            _lock(fileno)
            if replaced is not None:
                _take_over(fileno, replaced)
            # Between the two calls another writer may have taken it for a left-over.
            if _is_same(fileno, path):
                return str(path), fileno
        except BaseException:
            discard(fileno, str(path), os.getpid())
            raise
        os.close(fileno)


def _take_over(fileno: int, replaced: os.stat_result) -> None:
    """Give a file the owner and the permissions of the one that it is to replace."""
    if not hasattr(os, "fchown"):
        return
    made = os.fstat(fileno)
    if (made.st_uid, made.st_gid) != (replaced.st_uid, replaced.st_gid):
        with contextlib.suppress(OSError):  # only the superuser may
            os.fchown(fileno, replaced.st_uid, replaced.st_gid)
    os.fchmod(fileno, stat.S_IMODE(replaced.st_mode))


def _lock(fileno: int) -> bool:
    """Lock a file, if it is not locked; tell whether it is ours."""
    if sys.platform == "win32":
        return True  # open files cannot be removed there
    import fcntl

    try:
        fcntl.flock(fileno, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held by another writer, or the file system has no locks
        return False
    return True


def _is_same(fileno: int, path: Path) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fileno), found)


def _left_over(target: str) -> Iterator[Path]:
    start, end = _pattern(target)
    with contextlib.suppress(OSError), os.scandir(Path(target).parent) as entries:
        for entry in entries:
            middle = entry.name[len(start) : -len(end)]
            if entry.name.startswith(start) and entry.name.endswith(end) and "." not in middle:
                yield Path(entry.path)


def remove_left_over(target: str) -> None:
    """Remove temporary files of writers that ended without removing them.

    Parameters
    ----------
    target : str
        Absolute path of the file that they were to become.
    """
    for path in _left_over(target):
        # Somebody else's, gone by now, or in use on Windows: none of our business.
        with contextlib.suppress(OSError):
            fileno = os.open(path, os.O_RDWR | _O_BINARY)
            try:
                if _lock(fileno):
                    path.unlink()
            finally:
                os.close(fileno)


def discard(fileno: int, path: str, owner: int) -> None:
    """Remove and close a temporary file.

    Parameters
    ----------
    fileno : int
        Its descriptor.
    path : str
        Its path; nothing is removed if it was renamed.
    owner : int
        Process that made it.
    """
    # A forked child has copies of all sinks, and the files are still its parent's.
    if os.getpid() == owner:
        # Removed first: once it is closed, it has no lock. After a commit it is not there.
        with contextlib.suppress(OSError):
            Path(path).unlink()
    os.close(fileno)
