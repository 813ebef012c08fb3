"""Temporary files next to a target, their locks, and their removal after a writer was killed.

The temporary file of ``m.zt`` is ``.m.zt.<random>.xckpt-partial`` in the same folder. Its writer
holds a lock on it (``flock``), which the kernel releases however and wherever the writer ends.
Therefore a temporary file without a lock is a leftover, and the next writer to that target removes
it. On file systems without locks, leftovers stay.

A lock needs an open file, and a checkpoint may have more files than a process may have open.
Therefore its writer locks one temporary file in each folder, the guard. The names of the others
begin with the random part of the guard's name: ``.m-2.zt.<random><more>.xckpt-partial``.

While a writer renames a file to its target, it holds a lock on ``.m.zt.xckpt-lock``. Only the lock
of the kernel counts; the lock file may exist without it.

While companions of ``m.metadata.json`` replace others, they have aliases such as
``m_shard_0.xckpt-<m><random>.shard``, where ``<m>`` is a hash of ``m.metadata.json``.
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
import weakref
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from xckpt.errors import CheckpointError
from xckpt.interrupts import deliver, uninterrupted
from xckpt.storage.limits import Pool, most_open, open_file
from xckpt.storage.local import let_go

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PARTIAL_SUFFIX = ".xckpt-partial"
_LOCK_SUFFIX = ".xckpt-lock"
_LONGEST_WAIT = 60.0  # in seconds; a name changes in milliseconds
_PAUSE = 0.002

_LONGEST_NAME = 255
# Length of the random part of a guard's name.
_RANDOM_LENGTH = 8
# O_NOFOLLOW: in a folder that others may write to, a link with this name could lead elsewhere.
_FLAGS = os.O_RDWR | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)

_NO_ACCESS = "its folder cannot be written to; save to another one"
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, or save to another disk"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "make the folder first"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _NO_ACCESS),
    errno.EFBIG: "the file system, or a limit of the process, allows no file of this size",
}
# Error numbers for exceptions that libraries raise without one.
_NUMBERS = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    TimeoutError: errno.ETIMEDOUT,
}


class Place(NamedTuple):
    """A temporary file, and the name for it in errors: the one that the user gave."""

    path: str
    name: str
    is_upload: bool = False  # the file is not in the folder of its target

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Make errors of the operating system name the file as the user does."""
        try:
            yield
        except OSError as error:
            if isinstance(error, CheckpointError) or error.filename == self.name:
                raise
            number = error.errno or _NUMBERS.get(type(error), errno.EIO)
            text = error.strerror or str(error)
            advice = _ADVICE.get(number)
            if self.is_upload:
                advice = f"in {os.path.dirname(self.path)}; TMPDIR names another folder"  # noqa: PTH120
            text = text if advice is None else f"{text} ({advice})"
            raise OSError(number, text, self.name) from error

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read back exactly `nbytes` written bytes; raise `OSError` if there are fewer."""
        with self.named():
            fileno = open_file(self.path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
            with os.fdopen(fileno, "rb") as file:
                file.seek(offset)
                data = file.read(nbytes)
            if len(data) < nbytes:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return data


class TemporaryFile:
    """An open file, which is closed with the last reference to it."""

    __slots__ = ("__weakref__", "close", "fileno")

    def __init__(self, fileno: int) -> None:
        self.fileno = fileno
        self.close = weakref.finalize(self, let_go, fileno)


# Open temporary files that do not hold a lock.
descriptors: Pool[TemporaryFile] = Pool(most_open() // 2, files=True)


def _shortened(name: str, nbytes: int) -> str:
    """Cut a name so that `nbytes` bytes can be added to it."""
    while len(os.fsencode(name)) > _LONGEST_NAME - nbytes:
        name = name[:-1]
    return name


def _pattern(target: str) -> tuple[str, str]:
    """Return the beginning and the end of the names of a target's temporary files."""
    name = _shortened(Path(target).name, len(PARTIAL_SUFFIX) + 2 + 2 * _RANDOM_LENGTH)
    return f".{name}.", PARTIAL_SUFFIX


def create(
    target: str, replaced: os.stat_result | None, *, private: bool = False, guard: str | None = None
) -> tuple[str, int]:
    """Create a temporary file for a target, and return its path and descriptor."""
    # The file is locked, unless `guard` is the path of a locked temporary file in the same folder.
    start, end = _pattern(target)
    # A private file must not be readable to others while it is written either.
    mode = 0o600 if private or replaced is not None else 0o666
    while True:
        random = secrets.token_hex(4)
        random = random if guard is None else guard_of(guard) + random
        path = Path(target).with_name(f"{start}{random}{end}")
        try:
            fileno = open_file(path, _FLAGS | os.O_CREAT | os.O_EXCL, mode)
        except FileExistsError:
            continue
        try:
            is_ours = guard is not None or _lock(fileno)
            if replaced is not None:
                _take_over(fileno, replaced)
            # Between creation and lock, another writer may have locked the file as a leftover, in
            # order to remove it. Then try again with another name.
            if is_ours is not False and _is_same(fileno, path):
                return str(path), fileno
        except BaseException:
            discard(str(path), os.getpid())
            let_go(fileno)
            raise
        discard(str(path), os.getpid())
        let_go(fileno)


def guard_of(path: str) -> str:
    """Return the random part of the name of a guard, from a temporary file that it guards."""
    return path.removesuffix(PARTIAL_SUFFIX).rpartition(".")[2][:_RANDOM_LENGTH]


def _take_over(fileno: int, replaced: os.stat_result) -> None:
    """Give a file the owner and the permissions of the file that it replaces."""
    if not hasattr(os, "fchown"):
        return
    status = os.fstat(fileno)
    if (status.st_uid, status.st_gid) != (replaced.st_uid, replaced.st_gid):
        with contextlib.suppress(OSError):  # only the superuser may
            os.fchown(fileno, replaced.st_uid, replaced.st_gid)
    os.fchmod(fileno, stat.S_IMODE(replaced.st_mode))


def _lock(fileno: int) -> bool | None:
    """Try to lock a file, and return whether that succeeded; None if locks are unsupported."""
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
        status = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fileno), status)


def remove_left_over(target: str) -> None:
    """Remove temporary files of a target whose writers ended without removing them."""
    start, end = _pattern(target)
    with contextlib.suppress(OSError), os.scandir(Path(target).parent) as entries:
        names = [entry.name for entry in entries if entry.name.endswith(end)]
        for name in names:
            if name.startswith(start) and "." not in name[len(start) : -len(end)]:
                guard = f".{guard_of(name)}{end}"
                guards = {n for n in names if n.endswith(guard)} - {name}
                # The file may belong to another user, be gone by now, or be in use on Windows.
                with contextlib.suppress(OSError):
                    _remove_unlocked(Path(target), name, guards)


def _remove_unlocked(target: Path, name: str, guards: Iterable[str]) -> None:
    """Remove a temporary file unless a writer has locked it, or one of its guards."""
    with contextlib.ExitStack() as stack:
        for locked in (name, *guards):
            try:
                fileno = open_file(target.with_name(locked), _FLAGS)
            except FileNotFoundError:
                continue
            stack.callback(let_go, fileno)
            # A file with both names belongs to a writer that was killed between link and unlink.
            # A lock on it belongs to another writer, which appends to the target.
            if not (_is_same(fileno, target) or _lock(fileno)):
                return
        target.with_name(name).unlink()


def discard(path: str, owner: int) -> None:
    """Remove a temporary file of a process, unless it was renamed, and close it."""
    with uninterrupted():
        try:
            # A forked child has copies of all sinks, and the files are still its parent's.
            if os.getpid() == owner:
                with contextlib.suppress(OSError):
                    Path(path).unlink()
        finally:
            descriptor = descriptors.discard(path)
            if descriptor is not None:  # a traceback may refer to it
                descriptor.close()


@contextlib.contextmanager
def alone(target: str) -> Iterator[None]:
    """Keep other writers from renaming a file to this target while the block runs."""
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
            # Remove the file first: a waiting writer then notices, and creates a new one.
            with contextlib.suppress(OSError):
                path.unlink()
            # Closing is not enough, because a child that was forked meanwhile shares the lock.
            with contextlib.suppress(OSError):
                fcntl.flock(fileno, fcntl.LOCK_UN)
        finally:
            let_go(fileno)


def _locked(path: Path) -> int:
    """Open and lock a file, creating it if necessary."""
    deadline = time.monotonic() + _LONGEST_WAIT
    while True:
        deliver()
        try:
            fileno = open_file(path, _FLAGS | os.O_CREAT, 0o666)
        except PermissionError:  # it belongs to another user
            fileno = open_file(path, _FLAGS & ~os.O_RDWR)
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
    """Return temporary names for companions of a target, with the same folders and suffixes."""
    tag = f".xckpt-{_hash(target)}{secrets.token_hex(4)}"
    aliases = {}
    for label in labels:
        folder, slash, name = label.rpartition("/")
        stem, ending = os.path.splitext(name)  # noqa: PTH122  a part of a name
        stem = _shortened(stem, len(os.fsencode(tag + ending)))
        aliases[label] = f"{folder}{slash}{stem}{tag}{ending}"
    return aliases


def remove_aliases(target: str, folders: Iterable[str]) -> None:
    """Remove aliases of companions that an interrupted writer left behind."""
    alias = re.compile(rf".*\.xckpt-{_hash(target)}[0-9a-f]{{8}}(\.[^.]*)?", re.DOTALL)
    for folder in folders:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if alias.fullmatch(entry.name):
                    with contextlib.suppress(OSError):
                        Path(entry.path).unlink()


def _hash(target: str) -> str:
    return blake2b(os.fsencode(os.path.basename(target)), digest_size=4).hexdigest()  # noqa: PTH119
