"""Files on this machine, open file objects, and bytes in memory."""

from __future__ import annotations

import errno
import io
import mmap
import os
import stat
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np

from xckpt.errors import CheckpointError, FileChangedError, UnsupportedError, named, shown
from xckpt.interrupts import uninterrupted
from xckpt.storage.limits import Pool, cpu_count, most_open
from xckpt.storage.prefetch import is_being_read
from xckpt.storage.source import Source, components
from xckpt.threads import Threads

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

_FILE = "file://"
# One call reads at most 2 GiB, and cannot be interrupted by Ctrl-C while it does.
_READ_NBYTES = 64 << 20
# Part of a long read that is worth a thread, and the size of a huge page.
_SHARE_NBYTES = 16 << 20
_HUGE_PAGE = 2 << 20
# Size of one request for read-ahead.
_READAHEAD_NBYTES = 256 << 10
# The overhead of a read is about the time to copy this many bytes.
_WORTH_SKIPPING = 16 << 10

# By default, a map keeps a duplicate of the descriptor open for as long as it lives.
_UNTRACKED: dict[str, Any] = (
    {"trackfd": False} if sys.version_info >= (3, 13) and sys.platform != "win32" else {}
)


def is_file_url(text: str) -> bool:
    """Return whether a text is a ``file://`` URL."""
    return text[: len(_FILE)].lower() == _FILE


def local_path(path: str) -> str:
    """Return the absolute path of a local file, given its path or ``file://`` URL."""
    file_path, is_url = path, is_file_url(path)
    if is_url:
        from urllib.request import url2pathname  # imports all of http and email

        host, slash, url_path = path[len(_FILE) :].partition("/")
        if host not in {"", "localhost"}:
            raise ValueError(f"{path} names the machine {host!r}; open the file by its path")
        file_path = url2pathname(slash + url_path)
    if "\0" in file_path:
        raise ValueError(f"the path {shown(path)} has a null character, which no path can have")
    if is_url:
        return file_path
    # Path.expanduser raises for unknown users, and absolute() keeps "..".
    return os.path.abspath(os.path.expanduser(file_path))  # noqa: PTH100, PTH111


def let_go(fileno: int) -> None:
    """Close a file that is no longer needed, ignoring errors."""
    with suppress(OSError):
        os.close(fileno)


class FileVersion:
    """A version of a file, identified by size, times and inode."""

    # The device number is left out: on network file systems each machine assigns its own, and a
    # source must be equal on all workers of a cluster.
    __slots__ = ("_latest", "identity")

    def __init__(self, status: os.stat_result) -> None:
        self._latest = _change_of(status)
        self.identity: tuple[int, ...] = (
            status.st_size,
            status.st_mtime_ns,
            status.st_ino,
            self._latest[0],
        )

    def matches(self, status: os.stat_result) -> bool:
        """Return whether a file still has the same bytes, judging by its status."""
        if (status.st_size, status.st_mtime_ns, status.st_ino) != self.identity[:3]:
            return False
        # The time of the last change (`st_ctime`) reveals writers that restore the time of
        # modification. It also moves when the file gets another name, owner or permissions, which
        # does not affect its bytes.
        before, now = self._latest, _change_of(status)
        if now[0] != before[0] and now[1:] == before[1:]:
            return False
        self._latest = now
        return True


def _change_of(status: os.stat_result) -> tuple[int, ...]:
    """Return when a file was last changed, and attributes that may explain the change."""
    # On Windows st_ctime is the time of creation.
    changed = 0 if sys.platform == "win32" else status.st_ctime_ns
    return changed, status.st_nlink, status.st_mode, status.st_uid, status.st_gid


class OpenFile:
    """An open regular file for any number of threads; closed with the last reference to it."""

    __slots__ = ("__weakref__", "_lock", "fileno")

    def __init__(self, path: str) -> None:
        # Checked before opening, because opening a pipe would wait for a writer.
        mode = Path(path).stat().st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(mode):
            raise UnsupportedError(
                "not a regular file", path=path, hint="Copy it to a file, or pass its bytes"
            )
        self._lock = threading.Lock()
        with uninterrupted():
            self.fileno = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
            weakref.finalize(self, let_go, self.fileno)

    def status(self, name: str) -> os.stat_result:
        """Return the status of the file; errors have its name."""
        try:
            return os.fstat(self.fileno)
        except OSError as error:
            raise named(error, name) from error

    def expect(self, offset: int, nbytes: int) -> None:
        """Start reading a range into the page cache, unless it is cached."""
        if self._is_cached(offset) and self._is_cached(offset + nbytes - 1):
            return
        if not hasattr(os, "posix_fadvise"):
            return
        # A call reads no more than the device accepts in one request.
        for start in range(offset, offset + nbytes, _READAHEAD_NBYTES):
            count = min(_READAHEAD_NBYTES, offset + nbytes - start)
            os.posix_fadvise(self.fileno, start, count, os.POSIX_FADV_WILLNEED)

    def _is_cached(self, offset: int) -> bool:
        try:
            os.preadv(self.fileno, [bytearray(1)], offset, os.RWF_NOWAIT)
        except (AttributeError, OSError):  # the read would block, or is unsupported
            return False
        return True

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Fill memory from a position in the file, and return the number of bytes read."""
        try:
            preadv = os.preadv
        except AttributeError:
            # Windows: positions belong to the descriptor, so threads take turns.
            with self._lock, io.FileIO(self.fileno, closefd=False) as file:
                file.seek(offset)
                return _read_fully(memory, lambda part, _: file.readinto(part) or 0)
        nbytes = memory.nbytes
        if nbytes <= _READ_NBYTES and preadv(self.fileno, [memory], offset) == nbytes:
            return nbytes
        return _read_fully(memory, lambda part, done: preadv(self.fileno, [part], offset + done))


def _read_fully(memory: memoryview, read: Callable[[memoryview, int], int]) -> int:
    """Fill memory by reads that may be short, and return the number of bytes read."""
    done = 0
    while done < len(memory):
        count = read(memory[done : done + _READ_NBYTES], done)
        if count == 0:
            break
        done += count
    return done


# Threads that read much at a time, among which processors are divided.
_long_readers: set[int] = set()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_long_readers.clear)

# Descriptors and maps in one pool, because before Python 3.13 a map costs a descriptor as well.
_pool: Pool[Any] = Pool(most_open(), files=True)


class LocalSource(Source):
    """A file of the local file system."""

    __slots__ = ("_version", "mmap")

    is_free_to_check = True
    is_near = True
    identity: tuple[int, ...]

    def __init__(self, path: str, *, mmap: bool = False) -> None:
        self.name = local_path(path)
        # Whether `view` maps the file into memory. If another program truncates the file while a
        # view of it is in use, SIGBUS then ends the process; without maps, reads raise.
        self.mmap = mmap
        descriptor = _pool.make_room(lambda: OpenFile(self.name))
        status = descriptor.status(self.name)
        self._version = FileVersion(status)
        self.identity = self._version.identity
        self.size = status.st_size
        _pool.get(self._key(OpenFile), lambda: descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        # Each task of a cluster contains a source, so its pickle omits the names of attributes.
        return _restored, (self.name, self.mmap, self._version)

    @property
    def worth_skipping(self) -> int | None:
        """See `Source.worth_skipping`; None for maps, which read only the pages in use."""
        return None if self.mmap else _WORTH_SKIPPING

    def expect(self, offset: int, nbytes: int) -> None:
        """Start reading bytes that are needed soon; see `Source.expect`."""
        try:
            self.descriptor().expect(offset, nbytes)
        except (OSError, CheckpointError):
            return  # the read raises it

    def read_into(self, offsets: Sequence[int], memory: memoryview) -> None:
        """Read ranges of bytes into given memory; see `Source.read_into`."""
        nbytes = len(memory) // len(offsets)
        self.check_range(min(offsets), nbytes)
        self.check_range(max(offsets), nbytes)
        fill = self._fill_on_threads if nbytes >= 2 * _SHARE_NBYTES else self._fill
        for number, offset in enumerate(offsets):
            fill(offset, memory[number * nbytes : (number + 1) * nbytes])
        self.check(offsets[0])  # only a check after the reads covers them

    def _fill_on_threads(self, offset: int, memory: memoryview) -> None:
        """Fill memory on several threads, because the kernel first has to provide its pages."""
        reader = threading.get_ident()
        _long_readers.add(reader)
        try:
            most = max(1, cpu_count() // len(_long_readers))
            count = min(len(memory) // _SHARE_NBYTES, most)
            share = -(-len(memory) // (count * _HUGE_PAGE)) * _HUGE_PAGE
            starts = range(0, len(memory), share)
            if len(starts) == 1:
                self._fill(offset, memory)
                return
            with Threads(len(starts), "xckpt-read") as threads:
                calls = [
                    threads.submit(self._fill, offset + start, memory[start : start + share])
                    for start in starts
                ]
                for call in calls:
                    call.result()
        finally:
            _long_readers.discard(reader)

    def blocks_in(self, memory: memoryview, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Read a range of bytes block by block into given memory; see `Source.blocks_in`."""
        self.check_range(offset, nbytes)
        read_into, end, size = self.descriptor().read_into, offset + nbytes, len(memory)
        announced = offset
        for start in range(offset, end, size):
            if start + size > end:
                size = end - start
                memory = memory[:size]
            if start >= announced:
                announced = min(end, start + max(size, _SHARE_NBYTES))
                is_being_read(self.name, announced - start)
            try:
                is_filled = read_into(memory, start) == size
            except OSError:
                is_filled = False
            if not is_filled:  # another read finds out why
                self._fill(start, memory, is_counted=True)
            if start + size == end:
                self.check(offset)  # only a check after the reads covers them
            yield memory

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a range of bytes of the file's memory map; see `Source.view`."""
        if not self.mmap:
            return self.read(offset, nbytes)
        self.check_range(offset, nbytes)
        self.check(offset)
        is_being_read(self.name, nbytes)
        if nbytes == 0:  # an empty file cannot be mapped
            return memoryview(b"")
        try:
            mapped = _pool.get(self._key(mmap.mmap), self._open_map)
        except FileChangedError:
            raise
        except OSError:  # the file system does not support maps, or address space is short
            return self.read(offset, nbytes)
        return memoryview(mapped)[offset : offset + nbytes]

    def sibling(self, name: str) -> LocalSource:
        """Open another file relative to the folder of this one; see `Source.sibling`."""
        path = Path(self.name).parent.joinpath(*components(name))
        return LocalSource(str(path), mmap=self.mmap)

    def folders(self) -> tuple[str, ...]:
        """Return the names of the folders next to this file; see `Source.folders`."""
        return tuple(
            sorted([path.name for path in Path(self.name).parent.iterdir() if path.is_dir()])
        )

    def leads_out_of(self, other: Source) -> bool:
        """Return whether links lead out of a folder; see `Source.leads_out_of`."""
        folder = Path(other.name).parent.resolve()
        return not Path(self.name).resolve().is_relative_to(folder)

    def close(self) -> None:
        """Close the file in this process; see `Source.close`."""
        with uninterrupted():
            _pool.discard(self._key(OpenFile))
            _pool.discard(self._key(mmap.mmap))

    def descriptor(self) -> OpenFile:
        """Return the open file, reopened if necessary; raise an error if it has changed."""
        descriptor: OpenFile = _pool.get(self._key(OpenFile), self._open_descriptor)
        return descriptor

    def check(self, offset: int | None = None) -> None:
        """Raise an error if the file is no longer the one that was opened."""
        try:
            status = os.stat(self.name)  # noqa: PTH116  half the time of Path.stat, for each read
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._changed("it is no longer there", offset) from error
        self._compare(status, offset)

    def _key(self, kind: type) -> tuple[Any, ...]:
        # The source itself would be slower: its __hash__ and __eq__ are Python.
        return kind, self.name, self.identity

    def _fill(
        self, offset: int, memory: memoryview, *, is_retry: bool = False, is_counted: bool = False
    ) -> None:
        if not is_counted:
            is_being_read(self.name, len(memory))
        try:
            count = self.descriptor().read_into(memory, offset)
        except CheckpointError as error:
            error.located(offset=offset)
            raise
        except OSError as error:
            if error.errno != errno.ESTALE or is_retry:
                action = f", reading {len(memory)} bytes at {offset}"
                raise named(error, self.name, action) from error
            # The server dropped the handle, or the file was replaced: reopening it shows which.
            self.close()
            self._fill(offset, memory, is_retry=True, is_counted=True)
            return
        if count < len(memory):
            short = f"it ends {len(memory) - count} bytes before the end of a read"
            raise self._changed(short, offset)

    def _open_descriptor(self) -> OpenFile:
        try:
            descriptor = OpenFile(self.name)
        except FileNotFoundError as error:
            raise self._changed("it is no longer there") from error
        self._compare(descriptor.status(self.name))
        return descriptor

    def _open_map(self) -> mmap.mmap:
        descriptor = self.descriptor()
        try:
            return mmap.mmap(descriptor.fileno, self.size, access=mmap.ACCESS_READ, **_UNTRACKED)
        except ValueError as error:
            raise self._changed("it is shorter than it was") from error

    def _compare(self, status: os.stat_result, offset: int | None = None) -> None:
        if not self._version.matches(status):
            resized = f"it had {self.size} bytes and has {status.st_size} now"
            modified = "it was written to, or replaced by another file"
            raise self._changed(resized if status.st_size != self.size else modified, offset)

    def _changed(self, change: str, offset: int | None = None) -> FileChangedError:
        self.close()
        return FileChangedError(
            f"the file changed after it was opened: {change}",
            path=self.name,
            offset=offset,
            hint="Open it again; on a cluster, all workers must see the same file at this path",
        )


def _restored(name: str, mmap: bool, version: FileVersion) -> LocalSource:  # noqa: FBT001  pickle
    source = object.__new__(LocalSource)
    source.name, source.mmap, source._version = name, mmap, version
    source.identity, source.size = version.identity, version.identity[0]
    return source


def is_mapped(view: object) -> bool:
    """Return whether an array or memoryview is a view of a memory map."""
    while not isinstance(view, mmap.mmap):
        if isinstance(view, np.ndarray):
            view = view.base
        elif isinstance(view, memoryview):
            view = view.obj
        else:
            return False
    return True


class BytesSource(Source):
    """Bytes in memory, not copied, that must not change. It pickles with its contents."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        from xxhash import xxh3_128_hexdigest

        self._data = memoryview(data).cast("B").toreadonly()
        self.name = "<bytes>"
        self.size = len(self._data)
        self.identity = (self.size, xxh3_128_hexdigest(self._data))

    def __reduce__(self) -> tuple[type[BytesSource], tuple[bytes]]:
        return BytesSource, (bytes(self._data),)

    def read_into(self, offsets: Sequence[int], memory: memoryview) -> None:
        """Copy ranges of the bytes; see `Source.read_into`."""
        nbytes = len(memory) // len(offsets)
        for number, offset in enumerate(offsets):
            memory[number * nbytes : (number + 1) * nbytes] = self.view(offset, nbytes)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a range of the bytes without a copy; see `Source.view`."""
        self.check_range(offset, nbytes)
        return self._data[offset : offset + nbytes]

    def blocks(self, offset: int, nbytes: int, block_nbytes: int = 1 << 20) -> Iterator[memoryview]:
        """Yield blocks of the bytes without a copy; see `Source.blocks`."""
        data = self.view(offset, nbytes)
        for start in range(0, nbytes, block_nbytes):
            yield data[start : start + block_nbytes]

    def sibling(self, name: str) -> Source:
        """Raise `UnsupportedError`: bytes have no folder; see `Source.sibling`."""
        raise _without_folder(self, name)


class FileObjectSource(Source):
    """An open binary file object that can seek. It pickles if the object does."""

    __slots__ = ("_file", "_folder", "_lock", "_version")

    def __init__(self, file: Any) -> None:
        if isinstance(file.read(0), str):
            raise TypeError(f"{file!r} is opened in text mode; open it in mode 'rb'")
        if not file.seekable():
            raise TypeError(f"{file!r} cannot seek; read it into an io.BytesIO first")
        self._file = file
        self._lock = threading.Lock()
        status = _status_of(file)
        candidates = [getattr(file, key, None) for key in ("full_name", "name", "path")]  # fsspec
        names = [name for name in candidates if isinstance(name, str)]
        self.name, self._folder = names[0] if names else f"<{type(file).__name__}>", None
        if names and status is not None:
            path = Path(names[0]).absolute()
            self.name, self._folder = str(path), str(path.parent)
        position = file.tell()
        self.size = int(file.seek(0, os.SEEK_END))
        file.seek(position)
        self._version = None if status is None else FileVersion(status)
        version: Hashable = uuid4().hex if self._version is None else self._version.identity
        self.identity = (self.size, version)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        try:
            self._file.__reduce_ex__(protocol)
        except TypeError as error:
            raise TypeError(
                f"{self._file!r} cannot be pickled, so neither can arrays that read from it; "
                "open the checkpoint by its path or URL instead"
            ) from error
        names = ("_file", "_folder", "_version", "name", "size", "identity")
        state = {name: getattr(self, name) for name in names}
        return object.__new__, (FileObjectSource,), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._lock = threading.Lock()

    def read_into(self, offsets: Sequence[int], memory: memoryview) -> None:
        """Read ranges of bytes into given memory; see `Source.read_into`."""
        nbytes = len(memory) // len(offsets)
        for number, offset in enumerate(offsets):
            self.check_range(offset, nbytes)
            self._fill(offset, memory[number * nbytes : (number + 1) * nbytes])
        self.check(offsets[0])

    def _fill(self, offset: int, memory: memoryview) -> None:
        try:
            with self._lock:  # reads take turns, and restore the position of the object
                position = self._file.tell()
                try:
                    self._file.seek(offset)
                    count = _read_fully(memory, self._read_some)
                finally:
                    self._file.seek(position)
        except OSError as error:
            raise named(error, self.name) from error
        if count < len(memory):
            raise self._changed(offset)

    def _read_some(self, memory: memoryview, _: int) -> int:
        if hasattr(self._file, "readinto"):
            return self._file.readinto(memory) or 0
        data = self._file.read(len(memory))
        memory[: len(data)] = data
        return len(data)

    def check(self, offset: int | None = None) -> None:
        """Raise an error if the file on disk changed; see `Source.check`."""
        status = None if self._version is None else _status_of(self._file)
        if status is not None and self._version is not None and not self._version.matches(status):
            raise self._changed(offset)

    def _changed(self, offset: int | None) -> FileChangedError:
        reason = "the file changed after it was opened"
        return FileChangedError(reason, path=self.name, offset=offset, hint="Open it again")

    def sibling(self, name: str) -> Source:
        """Open another file in the folder of the one on disk; see `Source.sibling`."""
        if self._folder is None:
            raise _without_folder(self, name)
        return LocalSource(str(Path(self._folder, *components(name))))


def _without_folder(source: Source, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"this is one file without a folder, but it refers to another file, {name!r}",
        path=source.name,
        hint="Open it by its path or URL",
    )


def _status_of(file: Any) -> os.stat_result | None:
    try:
        return os.fstat(file.fileno())
    except (AttributeError, OSError):  # not a file of the operating system, such as io.BytesIO
        return None
