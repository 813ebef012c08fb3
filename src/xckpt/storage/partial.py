"""Names next to a target, and what becomes of them when their writer is killed.

The temporary file of ``m.zt`` is ``.m.zt.<random>.xckpt-partial`` in the same folder. Its writer
holds a lock on it (``flock``), which the kernel lets go of however the writer ends, on whatever
machine. So a temporary file without a lock was left over, and the next writer to that target
removes it. Where the file system has no locks nothing is removed.

Who gives a file its name holds a lock on ``.m.zt.xckpt-lock`` for as long as that takes. What
counts is the lock of the kernel, not that the file is there.

Companions of ``m.metadata.json`` have names like ``m_shard_0.xckpt-<m><random>.shard`` besides,
or instead, while they replace others; ``<m>`` is a hash of ``m.metadata.json``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import sys
import time
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from xckpt.storage.local import let_go

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PARTIAL_SUFFIX = ".xckpt-partial"
_LOCK_SUFFIX = ".xckpt-lock"
_LONGEST_WAIT = 60.0  # in seconds; a name changes in milliseconds
_PAUSE = 0.002

_LONGEST_NAME = 255
# In a folder that others may write to, a link of the name leads somewhere else.
_FLAGS = os.O_RDWR | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)


def _shortened(name: str, nbytes: int) -> str:
    """Cut a name so that so many bytes can be added to it."""
    while len(os.fsencode(name)) > _LONGEST_NAME - nbytes:
        name = name[:-1]
    return name


def _pattern(target: str) -> tuple[str, str]:
    """Return what the names of temporary files of a target begin and end with."""
    name = _shortened(Path(target).name, len(PARTIAL_SUFFIX) + 12)
    return f".{name}.", PARTIAL_SUFFIX


def create(
    target: str, replaced: os.stat_result | None, *, private: bool = False
) -> tuple[str, int]:
    """Make a temporary file for a target, lock it, and return its path and descriptor."""
    start, end = _pattern(target)
    # What is private must not be readable while it is written either.
    mode = 0o600 if private or replaced is not None else 0o666
    while True:
        path = Path(target).with_name(f"{start}{secrets.token_hex(4)}{end}")
        try:
            fileno = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, mode)
        except FileExistsError:
            continue
        try:
            is_ours = _lock(fileno)
            if replaced is not None:
                _take_over(fileno, replaced)
            # Between the two calls another writer may have taken it for a left-over, and have
            # removed it or be about to: until then it has the lock.
            if is_ours is not False and _is_same(fileno, path):
                return str(path), fileno
        except BaseException:
            discard(fileno, str(path), os.getpid())
            raise
        discard(fileno, str(path), os.getpid())


def _take_over(fileno: int, replaced: os.stat_result) -> None:
    """Give a file the owner and the permissions of the one that it is to replace."""
    if not hasattr(os, "fchown"):
        return
    made = os.fstat(fileno)
    if (made.st_uid, made.st_gid) != (replaced.st_uid, replaced.st_gid):
        with contextlib.suppress(OSError):  # only the superuser may
            os.fchown(fileno, replaced.st_uid, replaced.st_gid)
    os.fchmod(fileno, stat.S_IMODE(replaced.st_mode))


def _lock(fileno: int) -> bool | None:
    """Lock a file, and return whether it is ours; None where there are no locks."""
    if sys.platform == "win32":
        return True  # open files cannot be removed there
    import fcntl

    try:
        fcntl.flock(fileno, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # of the file system
        return None
    return True


def _is_same(fileno: int, path: Path) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fileno), found)


def remove_left_over(target: str) -> None:
    """Remove temporary files of a target whose writers ended without removing them."""
    start, end = _pattern(target)
    with contextlib.suppress(OSError), os.scandir(Path(target).parent) as entries:
        for entry in entries:
            middle = entry.name[len(start) : -len(end)]
            if not (entry.name.startswith(start) and entry.name.endswith(end)) or "." in middle:
                continue
            # Somebody else's, gone by now, or in use on Windows: none of our business.
            with contextlib.suppress(OSError):
                fileno = os.open(entry.path, _FLAGS)
                try:
                    # One that has both names was killed between the two. Who appends to it has
                    # the lock.
                    if _is_same(fileno, Path(target)) or _lock(fileno):
                        Path(entry.path).unlink()
                finally:
                    os.close(fileno)


def discard(fileno: int, path: str, owner: int) -> None:
    """Remove and close a temporary file of a process, unless it was renamed."""
    try:
        # A forked child has copies of all sinks, and the files are still its parent's.
        if os.getpid() == owner:
            # Removed first: once it is closed, it has no lock. After a commit it is not there.
            with contextlib.suppress(OSError):
                Path(path).unlink()
    finally:
        let_go(fileno)


@contextlib.contextmanager
def alone(target: str) -> Iterator[None]:
    """Keep other writers from giving a file its name for as long as the block runs."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    folder, name = os.path.split(target)
    path = Path(folder, f".{_shortened(name, len(_LOCK_SUFFIX) + 1)}{_LOCK_SUFFIX}")
    fileno = _locked(path)
    try:
        yield
    finally:
        try:
            # Removed first: who waits for the lock finds that the file is gone, and makes another.
            with contextlib.suppress(OSError):
                path.unlink()
            # Not only closed: a child that was forked meanwhile has the same lock.
            with contextlib.suppress(OSError):
                fcntl.flock(fileno, fcntl.LOCK_UN)
        finally:
            let_go(fileno)


def _locked(path: Path) -> int:
    """Open and lock a file, which is made if it is not there."""
    deadline = time.monotonic() + _LONGEST_WAIT
    while True:
        try:
            fileno = os.open(path, _FLAGS | os.O_CREAT, 0o666)
        except PermissionError:  # another user made it
            fileno = os.open(path, _FLAGS & ~os.O_RDWR)
        try:
            is_ours = _lock(fileno)
            if is_ours is None or (is_ours and _is_same(fileno, path)):
                return fileno
        except BaseException:
            let_go(fileno)
            raise
        let_go(fileno)
        if time.monotonic() > deadline:
            text = f"another process has been replacing it for {_LONGEST_WAIT:.0f} seconds"
            raise BlockingIOError(errno.EAGAIN, text)
        time.sleep(_PAUSE)


def new_aliases(target: str, labels: Iterable[str]) -> dict[str, str]:
    """Make up names for companions of a target, in their folders and with their endings."""
    tag = f".xckpt-{_hash(target)}{secrets.token_hex(4)}"
    found = {}
    for label in labels:
        folder, slash, name = label.rpartition("/")
        stem, ending = os.path.splitext(name)  # noqa: PTH122  a part of a name
        stem = _shortened(stem, len(os.fsencode(tag + ending)))
        found[label] = f"{folder}{slash}{stem}{tag}{ending}"
    return found


def remove_aliases(target: str, folders: Iterable[str]) -> None:
    """Remove companions of a target that still have such names, and are not needed any more."""
    alias = re.compile(rf".*\.xckpt-{_hash(target)}[0-9a-f]{{8}}(\.[^.]*)?", re.DOTALL)
    for folder in folders:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if alias.fullmatch(entry.name):
                    with contextlib.suppress(OSError):
                        Path(entry.path).unlink()


def _hash(target: str) -> str:
    return blake2b(os.fsencode(os.path.basename(target)), digest_size=4).hexdigest()  # noqa: PTH119
