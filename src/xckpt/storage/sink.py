"""A new file: written beside its target under another name, and renamed when it is complete.

See `xckpt.storage.partial` for the other name.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import threading
import weakref
from pathlib import Path
from typing import Any, Self

from xckpt.errors import UnsupportedError
from xckpt.storage.partial import create, discard, remove_left_over

__all__ = ["Sink", "write_at"]

_WRITE_NBYTES = 64 << 20
_O_BINARY = getattr(os, "O_BINARY", 0)
_NOBODY = 0  # no process has this number
# File systems that cannot do something say so in different ways.
_CANNOT = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENOLCK}


class Sink:
    """A file that is under its name complete, or not at all.

    Everything is written at positions, by any number of threads; other processes may write to
    `path` too. It pickles as a reference that does not own the file. A sink that is let go of
    without `commit` removes what it wrote.

    Parameters
    ----------
    target : str or os.PathLike
        Where the file is to be. Through a symbolic link, the file that it leads to is replaced.
    overwrite : bool
        Whether a file may be replaced.

    Attributes
    ----------
    target : str
        Absolute path.
    path : str
        Of the temporary file.

    Raises
    ------
    FileExistsError
        If the target exists and may not be replaced.
    UnsupportedError
        If the target exists and is no file.
    OSError
        If no file can be made there.
    """

    def __init__(self, target: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self.target = os.path.realpath(Path(target).expanduser())
        self.overwrite = overwrite
        replaced = _status_of_target(self.target, overwrite=overwrite)
        remove_left_over(self.target)
        self.path, self.fileno = create(self.target, replaced)
        self._finalizer: weakref.finalize[..., Any] = weakref.finalize(
            self, discard, self.fileno, self.path, os.getpid()
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (self.target, self.path, self.overwrite)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()

    def scratch(self) -> Sink:
        """Make another temporary file in the same place, which is never committed."""
        return Sink(self.target, overwrite=True)

    def resize(self, nbytes: int) -> None:
        """Give the file its size; what is not written reads as zero and takes no space.

        Parameters
        ----------
        nbytes : int
            Size of the whole file.

        Raises
        ------
        OSError
            If the file system has no files of this size.
        """
        try:
            os.ftruncate(self.fileno, nbytes)
        except OSError as error:
            raise _named(error, self.target) from None

    def reserve(self, offset: int, nbytes: int) -> None:
        """Take space for a range of bytes, so that a memory map of it can be written to safely.

        Parameters
        ----------
        offset, nbytes : int
            The range.

        Raises
        ------
        OSError
            If there is no space left.
        """
        if nbytes == 0 or not hasattr(os, "posix_fallocate"):
            return
        try:
            os.posix_fallocate(self.fileno, offset, nbytes)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise _named(error, self.target) from None

    def write(self, data: Any, offset: int) -> None:
        """Write bytes at a position.

        Parameters
        ----------
        data : bytes-like
            Contiguous.
        offset : int
            Position of the first byte.

        Raises
        ------
        OSError
            If not all of them can be written.
        """
        try:
            write_at(self.fileno, data, offset)
        except OSError as error:
            raise _named(error, self.target) from None

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read back what was written.

        Parameters
        ----------
        offset, nbytes : int
            The range.

        Returns
        -------
        bytes
            Exactly `nbytes` bytes.

        Raises
        ------
        OSError
            If they are not in the file.
        """
        with Path(self.path).open("rb") as file:
            file.seek(offset)
            data = file.read(nbytes)
        if len(data) < nbytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO), self.target)
        return data

    def commit(self) -> None:
        """Make the file durable and give it its name, in one step.

        Raises
        ------
        FileExistsError
            If there is a file of that name by now, and it may not be replaced.
        OSError
            If the data do not reach the disk.
        """
        try:
            self.sync()
            self._publish()
        except OSError as error:
            raise _named(error, self.target) from None
        finally:
            self.abort()

    def sync(self) -> None:
        """Make what was written durable, under the name of the temporary file.

        Raises
        ------
        OSError
            If the data do not reach the disk.
        """
        try:
            os.fsync(self.fileno)
        except OSError as error:
            raise _named(error, self.target) from None

    def withdraw(self) -> None:
        """Remove the file that is to be replaced, where other files replace what it refers to.

        Raises
        ------
        OSError
            If it cannot be removed.
        """
        if self.overwrite:
            self._remove()

    def _remove(self) -> None:
        Path(self.target).unlink(missing_ok=True)
        _sync_folder(self.target)

    def _publish(self) -> None:
        """Give the file its name."""
        if self.overwrite:
            Path(self.path).replace(self.target)
        else:
            _rename_to_new(self.path, self.target)
        _sync_folder(self.target)

    def abort(self) -> None:
        """Remove what was written; nothing happens after `commit`."""
        self._finalizer()


def write_at(fileno: int, data: Any, offset: int) -> None:
    """Write bytes to an open file at a position.

    Parameters
    ----------
    fileno : int
        Its descriptor.
    data : bytes-like
        Contiguous.
    offset : int
        Position of the first byte.

    Raises
    ------
    OSError
        If not all of them can be written.
    """
    view = memoryview(data).cast("B")
    while view:
        # One call writes at most 2 GiB, and cannot be interrupted by Ctrl-C while it does.
        done = _write_once(fileno, view[:_WRITE_NBYTES], offset)
        view = view[done:]
        offset += done


def _write_once(fileno: int, data: memoryview, offset: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(fileno, data, offset)
    # Windows: positions belong to the descriptor, so threads take turns.
    with _taking_turns:
        os.lseek(fileno, offset, os.SEEK_SET)
        return os.write(fileno, data)


_taking_turns = threading.Lock()


def _status_of_target(target: str, *, overwrite: bool) -> os.stat_result | None:
    try:
        status = Path(target).stat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
    if not stat.S_ISREG(status.st_mode):
        raise UnsupportedError(
            "only a regular file can be replaced", path=target, hint="Save to a file and copy it"
        )
    if not overwrite:
        raise _exists(target)
    return status


def _exists(target: str) -> FileExistsError:
    text = f"{os.strerror(errno.EEXIST)} (overwrite=True replaces it)"
    return FileExistsError(errno.EEXIST, text, target)


def _named(error: OSError, target: str) -> OSError:
    """Say which file an error of the operating system is about."""
    return type(error)(error.errno, error.strerror or str(error), target)


def _rename_to_new(path: str, target: str) -> None:
    """Rename a file, unless there is one of the new name."""
    try:
        os.link(path, target)
    except FileExistsError:
        raise _exists(target) from None
    except (OSError, AttributeError):
        # No hard links here. The name may be taken between the two calls, which only file
        # systems without hard links cannot prevent.
        if os.path.lexists(target):
            raise _exists(target) from None
        Path(path).rename(target)
    else:
        Path(path).unlink()


def _sync_folder(target: str) -> None:
    """Make a rename durable."""
    if sys.platform == "win32":
        return
    folder = os.open(Path(target).parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in _CANNOT:  # some network file systems have no such call
            raise
    finally:
        os.close(folder)


def _attached(target: str, path: str, overwrite: bool) -> Sink:  # noqa: FBT001  pickle's way
    """Open the temporary file of a sink of another process."""
    sink = object.__new__(Sink)
    sink.target, sink.path, sink.overwrite = target, path, overwrite
    sink.fileno = os.open(path, os.O_RDWR | _O_BINARY)
    sink._finalizer = weakref.finalize(sink, discard, sink.fileno, path, _NOBODY)
    return sink
