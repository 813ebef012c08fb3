"""Where files of this user's cache lie, and how they are made and read.

The folders are in ``xckpt`` in the cache folder of the platform (``~/.cache`` on Linux), or in what
the environment variable ``XCKPT_CACHE_DIR`` names. Where that is empty, or the user has no home,
nothing is kept. Folders and files are open to their owner alone. What another user owns or may
write to is not read: a checksum says that a file is whole, and not who made it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

__all__ = ["append", "folder", "make_room", "read", "write"]

_FLAGS = getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


def folder(name: str) -> Path | None:
    """Return the folder of one kind of files, which need not exist; None if nothing is kept."""
    chosen = os.environ.get("XCKPT_CACHE_DIR")
    if chosen is None:
        from platformdirs import user_cache_path

        try:
            base = user_cache_path("xckpt", appauthor=False, opinion=False)
        except RuntimeError:  # no home
            return None
        # Without a home this is "~/.cache", which would be a folder called "~".
        return base / name if base.is_absolute() else None
    try:
        return Path(chosen).expanduser() / name if chosen else None
    except RuntimeError:  # it begins with a "~" that stands for nothing
        return None


def read(path: Path, most: int) -> bytes | None:
    """Return what a file has, if it has at most so many bytes and only this user can write it."""
    try:
        if not _is_private(path.parent.stat()):
            return None
        with os.fdopen(os.open(path, os.O_RDONLY | _FLAGS), "rb") as file:
            status = os.fstat(file.fileno())
            if not (stat.S_ISREG(status.st_mode) and _is_private(status)):
                return None
            content = file.read(most + 1)
        os.utime(path)  # what was used least recently makes room first
    except (OSError, ValueError):
        return None
    return content if len(content) <= most else None


def write(path: Path, content: bytes) -> bool:
    """Make or replace a file, whole or not at all; return whether that could be done."""
    try:
        _make_private(path.parent)
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except (OSError, ValueError):
        return False
    return True


def append(path: Path, content: bytes) -> bool:
    """Add to the end of a file that was read before, by one write; return whether it was done."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | _FLAGS)
        try:
            if _is_private(os.fstat(descriptor)):
                return os.write(descriptor, content) == len(content)
        finally:
            os.close(descriptor)
    return False


def make_room(folder: Path, most: int) -> None:
    """Remove the files that were not used for longest, until the others have at most `most`."""
    with contextlib.suppress(OSError):
        found = [(path.stat(), path) for path in folder.iterdir()]
        found.sort(key=lambda pair: pair[0].st_mtime, reverse=True)
        total = 0
        for status, path in found:
            total += status.st_size
            if total > most:
                path.unlink(missing_ok=True)


def _make_private(folder: Path) -> None:
    if not folder.parent.is_dir():
        _make_private(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if not _is_private(status):
        raise PermissionError(f"others may write to {folder}")
    if hasattr(os, "geteuid") and status.st_mode & 0o077:
        folder.chmod(0o700)


def _is_private(status: os.stat_result) -> bool:
    """Return whether this user owns a file or folder, and nobody else may write to it."""
    if not hasattr(os, "geteuid"):
        return True  # Windows: the folder is in the user's profile
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022
