"""New files: written next to their targets under other names, and renamed when they are complete.

One rename replaces one file. It cannot replace several, and readers may expect the same names. So
if the names are taken, `publish` takes four steps:

1. All files are synced to the disk under temporary names.
2. Companions get aliases, and a file that refers to the aliases replaces the main file: this one
   rename changes the old checkpoint into the new one.
3. Companions get their names, then the main file does, which refers to these.
4. The aliases are removed.

Between any two steps, and before the main file gets its name, the folders are synced: not all file
systems keep the order of renames when the power fails. Wherever the writer is interrupted, the main
file refers to existing files, all old or all new. The next writer removes leftovers, see
`xckpt.storage.partial`.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
import threading
import weakref
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from xckpt.errors import UnsupportedError, warn
from xckpt.interrupts import uninterrupted
from xckpt.storage.limits import open_file
from xckpt.storage.local import let_go, local_path
from xckpt.storage.partial import (
    Place,
    TemporaryFile,
    alone,
    create,
    descriptors,
    discard,
    new_aliases,
    remove_aliases,
    remove_left_over,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from xckpt.storage.source import Source

_WRITE_NBYTES = 64 << 20
# Writes of at least this size start going to the disk immediately.
_EARLY_NBYTES = 1 << 20
_O_BINARY = getattr(os, "O_BINARY", 0)
_O_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NOBODY = -1  # not the number of any process
# Errors that file systems raise for unsupported operations.
_CANNOT = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENOLCK}

# Replaced files that stay open during the renames, at most.
_MOST_HELD = 8


class Sink:
    """A new file, which appears under its name only when it is complete."""

    # Any number of threads write at positions; other processes may write to `path` too. A sink that
    # is dropped without `commit` removes the temporary file.
    name: str  # for messages
    target: str  # final path of the file; of a symbolic link, the file that it points to
    path: str  # of the temporary file
    _is_upload: ClassVar[bool] = False

    def __init__(
        self,
        target: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        beside: Iterable[Sink] = (),
    ) -> None:
        name = local_path(os.fspath(target))
        try:
            with Place(name, name).named():
                self.target = os.path.realpath(name)
                replaced = _status_of_target(self.target, name, overwrite=overwrite)
                self._create(name, replaced, beside, overwrite=overwrite)
        except BaseException:
            self.abort()  # a traceback may keep the sink alive, and so the file
            raise

    def _create(
        self,
        name: str,
        replaced: os.stat_result | None,
        beside: Iterable[Sink],
        *,
        overwrite: bool,
        private: bool = False,
    ) -> None:
        """Create the temporary file; it is removed with the sink."""
        self.name, self.overwrite = name, overwrite
        folder = os.path.dirname(self.target)  # noqa: PTH120
        guards = (sink.path for sink in beside if os.path.dirname(sink.path) == folder)  # noqa: PTH120
        guard = next(guards, None) if sys.platform != "win32" else None
        with uninterrupted():
            remove_left_over(self.target)
            path, fileno = create(self.target, replaced, private=private, guard=guard)
            self._own(path, TemporaryFile(fileno), keep=guard is None)

    def _own(self, path: str, descriptor: TemporaryFile, *, keep: bool, owner: int = 0) -> None:
        """Take ownership of a temporary file, which stays open if `keep`, to hold its lock."""
        self.path = path
        self._descriptor = descriptor if keep else None
        self._finalizer: weakref.finalize[..., Any] = weakref.finalize(
            self, discard, path, owner or os.getpid()
        )
        status = os.fstat(descriptor.fileno)
        self._identity = (status.st_ino, status.st_dev)
        if not keep:
            descriptors.get(path, lambda: descriptor)

    def opened(self) -> TemporaryFile:
        """Return the open file, reopening it if the pool has closed it."""
        if self._descriptor is not None:
            return self._descriptor
        return descriptors.get(self.path, self._open)

    def _open(self) -> TemporaryFile:
        with uninterrupted():
            descriptor = TemporaryFile(open_file(self.path, os.O_RDWR | _O_BINARY | _O_NOFOLLOW))
        status = os.fstat(descriptor.fileno)
        if (status.st_ino, status.st_dev) != self._identity:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        # A reference that does not own the file.
        return _attached, (self.name, self.target, self.path, self.overwrite)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()

    @property
    def place(self) -> Place:
        """The temporary file, for writers in other processes, and its name in errors."""
        return Place(self.path, self.name, self._is_upload)

    def another(self) -> Sink:
        """Create another temporary file for the same target."""
        return Sink(self.name, overwrite=True, beside=[self])

    def resize(self, nbytes: int) -> None:
        """Set the size of the file; unwritten bytes are zero and take no space."""
        with self.place.named():
            if nbytes > sys.maxsize:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            os.ftruncate(self.opened().fileno, nbytes)

    def reserve(self, offset: int, nbytes: int) -> None:
        """Reserve space for a range of bytes, so that writing to a memory map of it is safe."""
        if nbytes == 0 or not hasattr(os, "posix_fallocate"):
            return
        try:
            with self.place.named():
                os.posix_fallocate(self.opened().fileno, offset, nbytes)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise

    def write(self, data: Any, offset: int) -> None:
        """Write contiguous bytes at a position."""
        with self.place.named():
            descriptor = self.opened()
            write_at(descriptor.fileno, data, offset)
        nbytes = memoryview(data).nbytes
        if nbytes >= _EARLY_NBYTES and hasattr(os, "posix_fadvise") and not self._is_upload:
            # Start writing to the disk now, before `sync` waits for it. On Linux this call writes
            # dirty pages and does not drop them.
            with suppress(OSError):
                os.posix_fadvise(descriptor.fileno, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        """Make the written bytes durable, under the name of the temporary file."""
        with self.place.named():
            os.fsync(self.opened().fileno)

    def commit(self) -> None:
        """Make the file durable and give it its name, in one step."""
        publish(self)

    def abort(self) -> None:
        """Remove the temporary file; do nothing after `commit`."""
        with uninterrupted():
            if hasattr(self, "_finalizer"):
                # Close it after the removal, because closing it releases the lock.
                try:
                    self._finalizer()
                finally:
                    if self._descriptor is not None:
                        self._descriptor.close()

    # The steps of `publish`.

    @property
    def folders(self) -> set[str]:
        """Folders of the file's names: of the link, if it is one, and of the link's target."""
        return {os.path.dirname(self.name), os.path.dirname(self.target)}  # noqa: PTH120

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock of the name against other writers, and defer Ctrl-C."""
        with uninterrupted(), ExitStack() as stack:
            with self.place.named():
                stack.enter_context(alone(self.target))
            yield

    def is_taken(self) -> bool:
        """Return whether the target exists."""
        with self.place.named():
            try:
                Path(self.target).lstat()
            except (FileNotFoundError, NotADirectoryError):
                return False
            return True

    def take_name(self) -> None:
        """Rename the file to its target, in one step."""
        with self.place.named():
            try:
                if self.overwrite:
                    Path(self.path).replace(self.target)
                else:
                    _rename_to_new(self.path, self.target, self.name)
            except OSError:
                # A server may report an error for a repeated request that has succeeded.
                if not self.has_name():
                    raise

    def has_name(self) -> bool:
        """Return whether the target is this file."""
        with suppress(OSError):
            status = Path(self.target).stat()
            return (status.st_ino, status.st_dev) == self._identity
        return False

    def remove(self) -> None:
        """Remove the target."""
        Path(self.target).unlink(missing_ok=True)

    def add_alias(self, name: str) -> None:
        """Give the file another name in the same folder."""
        with self.place.named():
            _link_or_copy(self.path, Path(self._next_to(name)))

    def remove_alias(self, name: str) -> None:
        """Remove an alias, if it exists."""
        Path(self._next_to(name)).unlink(missing_ok=True)

    def remove_aliases(self, companions: Iterable[Sink]) -> None:
        """Remove aliases left by earlier writers of this file."""
        remove_aliases(self.target, self.folders.union(*(sink.folders for sink in companions)))

    def _next_to(self, name: str) -> str:
        # Readers look next to the name, which may be a link, and not next to its target.
        return str(Path(self.name).with_name(name.rpartition("/")[2]))


def publish(
    main: Sink,
    # By their names in the main file.
    companions: Mapping[str, Sink] | None = None,
    *,
    # Files that the new ones were made from; no other writer may have changed them.
    replaced: Iterable[Source] = (),
    # Returns a main file with other names for the companions.
    referring: Callable[[Mapping[str, str]], Sink] | None = None,
    # Name of a file in the same folder that is removed once the new files are in place.
    superseded: str | None = None,
) -> None:
    """Rename the files of a checkpoint so that it is the old or the new one at every moment."""
    companions = companions or {}
    sinks = [*companions.values(), main]
    interim = None
    try:
        for sink in sinks:
            sink.sync()
        aliases = new_aliases(main.target, companions)
        if companions and main.overwrite and referring is not None:
            interim = referring(aliases)
            interim.sync()
        with main.alone():
            for source in replaced:
                source.check()
            for sink in sinks:
                if not sink.overwrite and sink.is_taken():
                    raise file_exists(sink.name)
            if interim is None or not any(sink.is_taken() for sink in sinks):
                problem = _take_names(main, companions)
            else:
                problem = _replace(main, companions, interim, aliases)
            if superseded is not None:
                problem = _remove_superseded(main, superseded, problem)
    finally:
        for sink in sinks if interim is None else [*sinks, interim]:
            sink.abort()
    if problem is not None:
        warn(f"{main.name}: {problem}")


def _take_names(main: Sink, companions: Mapping[str, Sink]) -> str | None:
    """Rename files to new names; return a warning if the names may not be durable."""
    try:
        for sink in companions.values():
            sink.take_name()
        if companions:
            _sync_folders(main, companions.values())
        main.take_name()
    except BaseException:
        if not main.has_name():
            for sink in companions.values():
                if sink.has_name():
                    with suppress(OSError):
                        sink.remove()
        raise
    problem = _unsynced(main, [])
    if main.overwrite:  # an interrupted writer may have left aliases
        main.remove_aliases(companions.values())
    return problem


def _replace(
    main: Sink, companions: Mapping[str, Sink], interim: Sink, aliases: Mapping[str, str]
) -> str | None:
    """Replace several files; return a warning if a step fails after the switch to the new ones."""
    sinks = [*companions.values(), main]
    with ExitStack() as stack:
        try:
            for label, sink in companions.items():
                sink.add_alias(aliases[label])
            _sync_folders(main, companions.values())
            for sink in sinks[:_MOST_HELD] if sys.platform != "win32" else ():
                # Open files keep their space until later: freeing it takes longer than all renames.
                with suppress(OSError):
                    stack.callback(let_go, os.open(sink.target, os.O_RDONLY | os.O_NONBLOCK))
            interim.take_name()
        except BaseException:
            if not interim.has_name():
                for label, sink in companions.items():
                    with suppress(OSError):
                        sink.remove_alias(aliases[label])
            raise
        # The new checkpoint is in place. Readers that do not know aliases refuse it until the last
        # rename. After a power failure, the old main file must not be next to new companions, nor
        # the final one next to old companions.
        try:
            _sync_folders(main, companions.values())
            for sink in companions.values():
                sink.take_name()
            _sync_folders(main, companions.values())
            main.take_name()
        except OSError as error:
            return (
                f"the new checkpoint is complete, but some of its files have temporary names, "
                f"which not all readers accept ({error.strerror or error}). Save it again"
            )
    problem = _unsynced(main, companions.values())
    for label, sink in companions.items():
        with suppress(OSError):
            sink.remove_alias(aliases[label])
    main.remove_aliases(companions.values())
    return problem


def _unsynced(main: Sink, companions: Iterable[Sink]) -> str | None:
    """Make names durable; return a warning if that fails, because the files are in place."""
    try:
        _sync_folders(main, companions)
    except OSError as error:
        return (
            "the new file is complete and in place, but its folder could not be synced to the disk "
            f"({error.strerror or error}): after a power failure, the old file may be back. "
            "Check the disk, and save again"
        )
    return None


def _remove_superseded(main: Sink, name: str, problem: str | None) -> str | None:
    """Remove a file that the new ones replace; return a warning if that fails."""
    if problem is not None:  # the new files may be gone after a power failure
        return f"{problem}. The file {name}, which it replaces, was not removed"
    try:
        main.remove_alias(name)
        _sync_folders(main, [])
    except OSError as error:
        return (
            f"the new checkpoint is complete and in place, but {name}, which it replaces, could "
            f"not be removed ({error.strerror or error}): remove it"
        )
    return None


def write_at(fileno: int, data: Any, offset: int) -> None:
    """Write contiguous bytes to an open file at a position."""
    view = memoryview(data).cast("B")
    while view:
        # One call writes at most 2 GiB, and cannot be interrupted by Ctrl-C while it does.
        block = view[:_WRITE_NBYTES]
        if hasattr(os, "pwrite"):
            count = os.pwrite(fileno, block, offset)
        else:  # Windows: positions belong to the descriptor, so threads take turns
            with _seek_lock:
                os.lseek(fileno, offset, os.SEEK_SET)
                count = os.write(fileno, block)
        view = view[count:]
        offset += count


_seek_lock = threading.Lock()


def _status_of_target(target: str, name: str, *, overwrite: bool) -> os.stat_result | None:
    try:
        status = Path(target).stat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    if not stat.S_ISREG(status.st_mode):
        raise UnsupportedError(
            "only a regular file can be replaced", path=name, hint="Save to a file and copy it"
        )
    if not overwrite:
        raise file_exists(name)
    return status


def file_exists(name: str) -> FileExistsError:
    """Return the error for a file that may not be replaced."""
    text = f"{os.strerror(errno.EEXIST)} (overwrite=True replaces it)"
    return FileExistsError(errno.EEXIST, text, name)


def _rename_to_new(path: str, target: str, name: str) -> None:
    """Rename a file; raise `FileExistsError` if the new name is taken."""
    try:
        os.link(path, target)
    except FileExistsError:
        raise file_exists(name) from None
    except (OSError, AttributeError):
        # Without hard links, another process may take the name between these two calls.
        if os.path.lexists(target):
            raise file_exists(name) from None
        Path(path).rename(target)
    else:
        with suppress(OSError):  # the next writer removes the file
            Path(path).unlink()


def _link_or_copy(path: str, new: Path) -> None:
    """Give a file a second name, or copy it if the file system lacks hard links."""
    with suppress(OSError, AttributeError):
        os.link(path, new)
        return
    with Path(path).open("rb") as file:
        fileno = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _O_BINARY, 0o600)
        with os.fdopen(fileno, "wb") as copy:
            shutil.copyfileobj(file, copy, _WRITE_NBYTES)
            shutil.copymode(path, new)
            copy.flush()
            os.fsync(fileno)


def _sync_folders(main: Sink, companions: Iterable[Sink]) -> None:
    """Make names durable, by syncing their folders."""
    folders = main.folders.union(*(sink.folders for sink in companions))
    for path in folders if sys.platform != "win32" else ():
        with main.place.named():
            folder = open_file(path, os.O_RDONLY)
            try:
                os.fsync(folder)
            except OSError as error:
                if error.errno not in _CANNOT:  # unsupported by some network file systems
                    raise
            finally:
                let_go(folder)


def _attached(name: str, target: str, path: str, overwrite: bool) -> Sink:  # noqa: FBT001  pickle
    """Return a sink for the temporary file of another process's sink."""
    sink = object.__new__(Sink)
    sink.name, sink.target, sink.overwrite = name, target, overwrite
    descriptor = TemporaryFile(open_file(path, os.O_RDWR | _O_BINARY))
    sink._own(path, descriptor, keep=False, owner=_NOBODY)
    return sink
