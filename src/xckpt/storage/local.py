"""Local files: memory maps for views, positional reads for copies, and a check for changes."""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import os
import stat
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from xckpt.errors import FileChangedError, UnsupportedError
from xckpt.storage.pool import Pool
from xckpt.storage.siblings import components
from xckpt.storage.source import Source

__all__ = ["Descriptor", "LocalSource", "empty", "file_identity", "is_mapped", "release"]

_FAULTED_AROUND = 1 << 20

# A map made without `trackfd` keeps a duplicate of the descriptor open for as long as it lives.
_UNTRACKED: dict[str, Any] = (
    {"trackfd": False} if sys.version_info >= (3, 13) and sys.platform != "win32" else {}
)


def empty(nbytes: int) -> memoryview:
    """Allocate memory to read into; unlike that of a `bytearray` it is not zeroed first.

    Parameters
    ----------
    nbytes : int
        Number of bytes.

    Returns
    -------
    memoryview
        Writable, of undefined content.
    """
    return np.empty(nbytes, np.uint8).data


def file_identity(status: os.stat_result) -> tuple[int, int, int]:
    """Return what tells one version of a file from another: size, time in ns, inode.

    The device number is not part of it: for network file systems each machine makes up its own,
    and a source must be the same to all workers of a cluster.

    Parameters
    ----------
    status : os.stat_result
        Of the file.

    Returns
    -------
    tuple of int
        Comparable and hashable.
    """
    return status.st_size, status.st_mtime_ns, status.st_ino


class Descriptor:
    """An open file that reads at any position, from any number of threads.

    It closes when it is no longer referred to.

    Parameters
    ----------
    path : str
        A regular file.

    Raises
    ------
    OSError
        If it cannot be opened.
    UnsupportedError
        If it is a pipe or a device.
    """

    __slots__ = ("__weakref__", "_lock", "fileno")

    def __init__(self, path: str) -> None:
        # First, because opening a pipe would wait for a writer.
        mode = Path(path).stat().st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(mode):
            raise UnsupportedError(
                "not a regular file", path=path, hint="Copy it to a file, or pass its bytes"
            )
        self.fileno = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self._lock = threading.Lock()
        weakref.finalize(self, os.close, self.fileno)

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Fill memory from a position in the file.

        Parameters
        ----------
        memory : memoryview
            Writable bytes.
        offset : int
            Position of the first byte.

        Returns
        -------
        int
            How many bytes were read; fewer than asked for only at the end of the file.
        """
        done = 0
        while done < len(memory):
            count = self._read_once(memory[done:], offset + done)
            if count == 0:
                break
            done += count
        return done

    def _read_once(self, memory: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self.fileno, [memory], offset)
        # Windows: positions belong to the descriptor, so threads take turns.
        with self._lock, io.FileIO(self.fileno, closefd=False) as file:
            file.seek(offset)
            return file.readinto(memory) or 0


# Descriptors and maps in one pool, because before Python 3.13 a map costs a descriptor as well.
_pool: Pool[Any] = Pool()


class LocalSource(Source):
    """A file of the local file system.

    Parameters
    ----------
    path : str
        Made absolute at once, so that a later change of the working directory does no harm.
    mmap : bool
        Whether `view` may map the file into memory. A file that another program cuts short while
        a view of it is read ends the process (``SIGBUS``); without maps that is an error.

    Raises
    ------
    OSError
        If the file cannot be opened: `FileNotFoundError`, `IsADirectoryError`, `PermissionError`.
    UnsupportedError
        If it is a pipe or a device.
    """

    __slots__ = ("mmap",)

    def __init__(self, path: str, *, mmap: bool = True) -> None:
        # Path.expanduser fails where there is no such user, and absolute() keeps "..".
        self.name = os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111
        self.mmap = mmap
        descriptor = Descriptor(self.name)
        status = os.fstat(descriptor.fileno)
        self.identity = file_identity(status)
        self.size = status.st_size
        _pool.get(self._key(Descriptor), lambda: descriptor)

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Read a range of bytes into memory of its own; see `Source.read`."""
        self._check_range(offset, nbytes)
        memory = empty(nbytes)
        self.read_into(offset, memory)
        return memory

    def read_into(self, offset: int, memory: memoryview) -> None:
        """Read a range of bytes into given memory; see `Source.read_into`."""
        nbytes = len(memory)
        self._check_range(offset, nbytes)
        found = self._descriptor().read_into(memory, offset)
        if found < nbytes:
            raise self._changed(f"it ends {nbytes - found} bytes before the end of a read")
        self._check_unchanged()  # once is enough, and only afterwards does it cover the read

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Give a range of bytes of the file's memory map; see `Source.view`."""
        if not self.mmap:
            return self.read(offset, nbytes)
        self._check_range(offset, nbytes)
        self._check_unchanged()
        if nbytes == 0:  # an empty file cannot be mapped
            return memoryview(b"")
        try:
            mapped = _pool.get(self._key(mmap.mmap), self._open_map)
        except FileChangedError:
            raise
        except OSError:  # the file system has no maps, or address space is short
            return self.read(offset, nbytes)
        return memoryview(mapped)[offset : offset + nbytes]

    def sibling(self, name: str) -> LocalSource:
        """Open another file relative to the folder of this one; see `Source.sibling`."""
        path = Path(self.name).parent.joinpath(*components(name))
        return LocalSource(str(path), mmap=self.mmap)

    def close(self) -> None:
        """Let go of what this process holds open for the file; see `Source.close`."""
        _pool.discard(self._key(Descriptor))
        _pool.discard(self._key(mmap.mmap))

    def _key(self, kind: type) -> tuple[Any, ...]:
        # Not the source itself: its __hash__ and __eq__ are Python, and a scan reads often.
        return kind, self.name, self.identity

    def _read_each(self, ranges: Any) -> list[memoryview]:
        return [self.view(offset, nbytes) for offset, nbytes in ranges]

    def _descriptor(self) -> Descriptor:
        descriptor: Descriptor = _pool.get(self._key(Descriptor), self._open_descriptor)
        return descriptor

    def _open_descriptor(self) -> Descriptor:
        try:
            descriptor = Descriptor(self.name)
        except FileNotFoundError as error:
            raise self._changed("it is no longer there") from error
        self._compare(os.fstat(descriptor.fileno))
        return descriptor

    def _open_map(self) -> mmap.mmap:
        descriptor = self._descriptor()
        try:
            return mmap.mmap(descriptor.fileno, self.size, access=mmap.ACCESS_READ, **_UNTRACKED)
        except ValueError as error:
            raise self._changed("it is shorter than it was") from error

    def _check_unchanged(self) -> None:
        try:
            status = os.stat(self.name)  # noqa: PTH116  for each read: half the time of Path.stat
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._changed("it is no longer there") from error
        self._compare(status)

    def _compare(self, status: os.stat_result) -> None:
        found = file_identity(status)
        if found == self.identity:
            return
        if status.st_size != self.size:
            raise self._changed(f"it had {self.size} bytes and has {status.st_size} now")
        raise self._changed("it was written to, or replaced by another file")

    def _changed(self, how: str) -> FileChangedError:
        self.close()
        return FileChangedError(
            f"the file changed after it was opened: {how}",
            path=self.name,
            hint="Open it again; on a cluster, all workers must see the same file at this path",
        )


def _map_of(obj: object) -> mmap.mmap | None:
    while not isinstance(obj, mmap.mmap):
        if isinstance(obj, np.ndarray):
            obj = obj.base
        elif isinstance(obj, memoryview):
            obj = obj.obj
        else:
            return None
    return obj


def is_mapped(view: object) -> bool:
    """Tell whether an array or memoryview looks into a memory map.

    Parameters
    ----------
    view : object
        Anything; what is neither an array nor a memoryview is not mapped.

    Returns
    -------
    bool
        False for copies.
    """
    return _map_of(view) is not None


def release(view: object) -> None:
    """Drop from resident memory the mapped pages that a view looks at, for example once copied.

    The view stays valid: what is used again comes back from the page cache or the disk. Nothing
    happens to what is not mapped, to maps that can be written to, and where the operating system
    has no such advice.

    Parameters
    ----------
    view : numpy.ndarray or memoryview
        Pages around it are dropped too, those that the kernel mapped along with it.
    """
    mapped = _map_of(view)
    advice = getattr(mmap, "MADV_DONTNEED", None)
    # Dropping pages of a private writable map would lose what was written.
    if mapped is None or advice is None or not memoryview(mapped).readonly:
        return
    start, stop = _extent(mapped, view)
    # The kernel maps pages around those that are touched; neighbours come back if they are used.
    start = max(0, start // mmap.PAGESIZE * mmap.PAGESIZE - _FAULTED_AROUND)
    stop = min(len(mapped), stop + _FAULTED_AROUND)
    if start < stop:
        with contextlib.suppress(OSError):  # it is advice: locked pages refuse it
            mapped.madvise(advice, start, stop - start)


def _extent(mapped: mmap.mmap, view: Any) -> tuple[int, int]:
    origin, _ = byte_bounds(np.frombuffer(mapped, np.uint8))
    first, last = byte_bounds(np.asarray(view))
    return int(first - origin), int(last - origin)
