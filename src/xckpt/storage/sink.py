"""New files: written next to their targets under other names, and renamed when they are complete.

One file takes the place of another by one rename. Several files cannot, and readers may want the
same names always. So where the names are taken (`publish`)

1. all files are brought to the disk under temporary names;
2. companions get aliases, and a file that refers to the aliases takes the place of the main file:
   this one rename changes the old checkpoint into the new one;
3. companions get their names, then the main file does, which refers to these;
4. the aliases are removed.

Between any two of these steps, and before the main file gets its name, the folders are brought to
the disk: not all file systems keep the order of renames when the power fails. Whenever it ends, the
main file refers to files that are there, all old or all new. What is left over is removed by the
next writer, see `xckpt.storage.partial`.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
import tempfile
import threading
import weakref
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from xckpt.errors import CheckpointError, UnsupportedError, warn
from xckpt.interrupts import uninterrupted
from xckpt.storage.filesystems import as_os_error, file_system
from xckpt.storage.limits import Pool, most_open, open_file
from xckpt.storage.local import let_go, local_path
from xckpt.storage.partial import (
    alone,
    create,
    discard,
    new_aliases,
    remove_aliases,
    remove_left_over,
)
from xckpt.storage.requests import TransientError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from xckpt.storage.source import Source

_WRITE_NBYTES = 64 << 20
# What is written by one call is brought to the disk at once from this size on.
_EARLY_NBYTES = 1 << 20
_O_BINARY = getattr(os, "O_BINARY", 0)
_O_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NOBODY = -1  # no process has this number
# File systems that cannot do something say so in different ways.
_CANNOT = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENOLCK}

_NO_ACCESS = "its folder cannot be written to; save to another one"
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, or save to another disk"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "make the folder first"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _NO_ACCESS),
    errno.EFBIG: "the file system, or a limit of the process, allows no file of this size",
}
# Old files that are kept open while new ones take their names.
_MOST_HELD = 8
# Of errors that libraries raise without one.
_NUMBERS = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    TimeoutError: errno.ETIMEDOUT,
}


class Place(NamedTuple):
    """A temporary file, and the name that errors have for it: the one that the user gave."""

    path: str
    name: str
    is_upload: bool = False  # the file is not next to its target

    @contextmanager
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
        """Read back what was written: exactly so many bytes."""
        with self.named():
            with os.fdopen(open_file(self.path, os.O_RDONLY | _O_BINARY), "rb") as file:
                file.seek(offset)
                data = file.read(nbytes)
            if len(data) < nbytes:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return data


class _Descriptor:
    """An open file, which closes when it is no longer referred to."""

    __slots__ = ("__weakref__", "close", "fileno")

    def __init__(self, fileno: int) -> None:
        self.fileno = fileno
        self.close = weakref.finalize(self, let_go, fileno)


# Of files whose locks need not be kept.
_descriptors: Pool[_Descriptor] = Pool(most_open() // 2, files=True)


def _discard(path: str, owner: int) -> None:
    with uninterrupted():
        try:
            discard(path, owner)
        finally:
            descriptor = _descriptors.discard(path)
            if descriptor is not None:  # a traceback may refer to it
                descriptor.close()


class Sink:
    """A file that is complete under its name, or not there at all.

    Everything is written at positions, by any number of threads; other processes may write to
    `path` too. It pickles as a reference that does not own the file. A sink that is let go of
    without `commit` removes what it wrote. Through a symbolic link, the file that it leads to is
    replaced. Errors of the operating system name the file as the user does.
    """

    name: str  # for messages
    target: str  # where the file is to be, links resolved
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
            self.abort()  # a traceback may keep it, and so the file
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
        """Make the temporary file; it is removed with the sink."""
        self.name, self.overwrite = name, overwrite
        folder = os.path.dirname(self.target)  # noqa: PTH120
        guards = (sink.path for sink in beside if os.path.dirname(sink.path) == folder)  # noqa: PTH120
        guard = next(guards, None) if sys.platform != "win32" else None
        with uninterrupted():
            remove_left_over(self.target)
            path, fileno = create(self.target, replaced, private=private, guard=guard)
            self._own(path, _Descriptor(fileno), keep=guard is None)

    def _own(self, path: str, descriptor: _Descriptor, *, keep: bool, owner: int = 0) -> None:
        """Take over a temporary file, which stays open if its lock is to be kept."""
        self.path = path
        self._descriptor = descriptor if keep else None
        self._finalizer: weakref.finalize[..., Any] = weakref.finalize(
            self, _discard, path, owner or os.getpid()
        )
        status = os.fstat(descriptor.fileno)
        self._identity = (status.st_ino, status.st_dev)
        if not keep:
            _descriptors.get(path, lambda: descriptor)

    def opened(self) -> _Descriptor:
        """Return the open file; of many, few are open at a time."""
        if self._descriptor is not None:
            return self._descriptor
        return _descriptors.get(self.path, self._open)

    def _open(self) -> _Descriptor:
        with uninterrupted():
            descriptor = _Descriptor(open_file(self.path, os.O_RDWR | _O_BINARY | _O_NOFOLLOW))
        status = os.fstat(descriptor.fileno)
        if (status.st_ino, status.st_dev) != self._identity:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (self.name, self.target, self.path, self.overwrite)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()

    @property
    def place(self) -> Place:
        """Where other processes write, and what errors call it."""
        return Place(self.path, self.name, self._is_upload)

    def another(self) -> Sink:
        """Begin another temporary file in the same place."""
        return Sink(self.name, overwrite=True, beside=[self])

    def resize(self, nbytes: int) -> None:
        """Give the file its size; what is not written reads as zero and takes no space."""
        with self.place.named():
            if nbytes > sys.maxsize:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            os.ftruncate(self.opened().fileno, nbytes)

    def reserve(self, offset: int, nbytes: int) -> None:
        """Take space for a range of bytes, so that a memory map of it can be written to safely."""
        if nbytes == 0 or not hasattr(os, "posix_fallocate"):
            return
        try:
            with self.place.named():
                os.posix_fallocate(self.opened().fileno, offset, nbytes)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise

    def write(self, data: Any, offset: int) -> None:
        """Write contiguous bytes at a position, all of them."""
        with self.place.named():
            descriptor = self.opened()
            write_at(descriptor.fileno, data, offset)
        nbytes = memoryview(data).nbytes
        if nbytes >= _EARLY_NBYTES and hasattr(os, "posix_fadvise") and not self._is_upload:
            # The disk begins now, and not only when `sync` waits for it: on Linux this writes what
            # is not written yet, and forgets none of that.
            with suppress(OSError):
                os.posix_fadvise(descriptor.fileno, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        """Make what was written durable, under the name of the temporary file."""
        with self.place.named():
            os.fsync(self.opened().fileno)

    def commit(self) -> None:
        """Make the file durable and give it its name, in one step."""
        publish(self)

    def abort(self) -> None:
        """Remove what was written; nothing happens after `commit`."""
        with uninterrupted():
            if hasattr(self, "_finalizer"):
                # Removed first: once it is closed, it has no lock.
                try:
                    self._finalizer()
                finally:
                    if self._descriptor is not None:
                        self._descriptor.close()

    # The steps of `publish`.

    @property
    def folders(self) -> set[str]:
        """Those that names are in: of the file, and of what a link in its place leads to."""
        return {os.path.dirname(self.name), os.path.dirname(self.target)}  # noqa: PTH120

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other writers, and Ctrl-C, from changing what is under the name."""
        with uninterrupted(), ExitStack() as stack:
            with self.place.named():
                stack.enter_context(alone(self.target))
            yield

    def is_taken(self) -> bool:
        """Whether there is a file of that name."""
        with self.place.named():
            try:
                Path(self.target).lstat()
            except (FileNotFoundError, NotADirectoryError):
                return False
            return True

    def take_name(self) -> None:
        """Give the file its name, in one step."""
        with self.place.named():
            try:
                if self.overwrite:
                    Path(self.path).replace(self.target)
                else:
                    _rename_to_new(self.path, self.target, self.name)
            except OSError:
                # A server may say so of what it has done, when it was asked twice.
                if not self.has_name():
                    raise

    def has_name(self) -> bool:
        """Whether this file is the one of that name."""
        with suppress(OSError):
            status = Path(self.target).stat()
            return (status.st_ino, status.st_dev) == self._identity
        return False

    def remove(self) -> None:
        """Remove the file of that name."""
        Path(self.target).unlink(missing_ok=True)

    def add_alias(self, name: str) -> None:
        """Give the file another name in the same folder."""
        with self.place.named():
            _link_or_copy(self.path, Path(self._next_to(name)))

    def remove_alias(self, name: str) -> None:
        """Take the other name away."""
        Path(self._next_to(name)).unlink(missing_ok=True)

    def remove_aliases(self, companions: Iterable[Sink]) -> None:
        """Remove the aliases that earlier writers of this file left."""
        remove_aliases(self.target, self.folders.union(*(each.folders for each in companions)))

    def _next_to(self, name: str) -> str:
        # Where readers look for it, also through a link.
        return str(Path(self.name).with_name(name.rpartition("/")[2]))


def publish(
    main: Sink,
    companions: Mapping[str, Sink] | None = None,
    *,
    replaced: Iterable[Source] = (),
    referring: Callable[[Mapping[str, str]], Sink] | None = None,
    superseded: str | None = None,
) -> None:
    """Give the files of a checkpoint their names: at every moment it is the old or the new one.

    `companions` are by the names that the main file has for them; ``referring(names)`` makes a
    main file that has other names for them. `replaced` are files that the new ones were made of:
    that another writer changed one of them is an error. `superseded` is the name of a file in the
    same folder that these stand for: it is removed when they are there.
    """
    others = companions or {}
    sinks = [*others.values(), main]
    interim = None
    try:
        for sink in sinks:
            sink.sync()
        aliases = new_aliases(main.target, others)
        if others and main.overwrite and referring is not None:
            interim = referring(aliases)
            interim.sync()
        with main.alone():
            for source in replaced:
                source.check()
            for sink in sinks:
                if not sink.overwrite and sink.is_taken():
                    raise _exists(sink.name)
            if interim is None or not any(sink.is_taken() for sink in sinks):
                problem = _take_names(main, others)
            else:
                problem = _replace(main, others, interim, aliases)
            if superseded is not None:
                problem = _remove_superseded(main, superseded, problem)
    finally:
        for sink in sinks if interim is None else [*sinks, interim]:
            sink.abort()
    if problem is not None:
        warn(f"{main.name}: {problem}")


def _take_names(main: Sink, companions: Mapping[str, Sink]) -> str | None:
    """Give files their names, those of companions being free; return what goes wrong then."""
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
    if main.overwrite:  # an interrupted writer may have left a file that refers to aliases
        main.remove_aliases(companions.values())
    return problem


def _replace(
    main: Sink, companions: Mapping[str, Sink], interim: Sink, aliases: Mapping[str, str]
) -> str | None:
    """Replace several files; return what goes wrong when the new ones are there already."""
    sinks = [*companions.values(), main]
    with ExitStack() as stack:
        try:
            for label, sink in companions.items():
                sink.add_alias(aliases[label])
            _sync_folders(main, companions.values())
            for sink in sinks[:_MOST_HELD] if sys.platform != "win32" else ():
                # To free the space of a file takes longer than all renames.
                with suppress(OSError):
                    stack.callback(let_go, os.open(sink.target, os.O_RDONLY | os.O_NONBLOCK))
            interim.take_name()
        except BaseException:
            if not interim.has_name():
                for label, sink in companions.items():
                    with suppress(OSError):
                        sink.remove_alias(aliases[label])
            raise
        # The new checkpoint is there now. Readers that know no aliases refuse it until the last
        # rename. If the power fails, the old main file must not be back next to new companions,
        # nor the last one be there next to old ones.
        try:
            _sync_folders(main, companions.values())
            for sink in companions.values():
                sink.take_name()
            _sync_folders(main, companions.values())
            main.take_name()
        except OSError as error:
            return (
                f"the new checkpoint is complete and in place, but {error.strerror or error}: "
                "files of it have temporary names, which not all readers find. Save it again"
            )
    problem = _unsynced(main, companions.values())
    for label, sink in companions.items():
        with suppress(OSError):
            sink.remove_alias(aliases[label])
    main.remove_aliases(companions.values())
    return problem


def _unsynced(main: Sink, companions: Iterable[Sink]) -> str | None:
    """Make names durable, and return what goes wrong: the files have them."""
    try:
        _sync_folders(main, companions)
    except OSError as error:
        return (
            "the new file is complete and in place, but its folder was not brought to the disk "
            f"({error.strerror or error}): after a power failure the old file may be back. "
            "Check the disk, and save again"
        )
    return None


def _remove_superseded(main: Sink, name: str, problem: str | None) -> str | None:
    """Remove a file that the new ones stand for, and return what goes wrong: they are there."""
    if problem is not None:  # they may be gone after a power failure
        return f"{problem}. What it replaces, {name}, was not removed"
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
    """Write contiguous bytes to an open file at a position, all of them."""
    view = memoryview(data).cast("B")
    while view:
        # One call writes at most 2 GiB, and cannot be interrupted by Ctrl-C while it does.
        piece = view[:_WRITE_NBYTES]
        if hasattr(os, "pwrite"):
            done = os.pwrite(fileno, piece, offset)
        else:  # Windows: positions belong to the descriptor, so threads take turns
            with _taking_turns:
                os.lseek(fileno, offset, os.SEEK_SET)
                done = os.write(fileno, piece)
        view = view[done:]
        offset += done


_taking_turns = threading.Lock()


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
        raise _exists(name)
    return status


def _exists(name: str) -> FileExistsError:
    """Return the error for a file that may not be replaced."""
    text = f"{os.strerror(errno.EEXIST)} (overwrite=True replaces it)"
    return FileExistsError(errno.EEXIST, text, name)


def _rename_to_new(path: str, target: str, name: str) -> None:
    """Rename a file, unless there is one of the new name."""
    try:
        os.link(path, target)
    except FileExistsError:
        raise _exists(name) from None
    except (OSError, AttributeError):
        # No hard links here. The name may be taken between the two calls, which only file
        # systems without hard links cannot prevent.
        if os.path.lexists(target):
            raise _exists(name) from None
        Path(path).rename(target)
    else:
        with suppress(OSError):  # the next writer removes it
            Path(path).unlink()


def _link_or_copy(path: str, new: Path) -> None:
    """Give a file a second name; where there are no hard links, to a copy."""
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
    """Make names durable."""
    folders = main.folders.union(*(sink.folders for sink in companions))
    for path in folders if sys.platform != "win32" else ():
        with main.place.named():
            folder = open_file(path, os.O_RDONLY)
            try:
                os.fsync(folder)
            except OSError as error:
                if error.errno not in _CANNOT:  # some network file systems have no such call
                    raise
            finally:
                let_go(folder)


def _attached(name: str, target: str, path: str, overwrite: bool) -> Sink:  # noqa: FBT001  pickle
    """Open the temporary file of a sink of another process."""
    sink = object.__new__(Sink)
    sink.name, sink.target, sink.overwrite = name, target, overwrite
    descriptor = _Descriptor(open_file(path, os.O_RDWR | _O_BINARY))
    sink._own(path, descriptor, keep=False, owner=_NOBODY)
    return sink


class UploadSink(Sink):
    """A file of any file system that fsspec can write to.

    Stores of objects show an object when it is complete; of other file systems a reader may see
    the file grow while it is uploaded.
    """

    _is_upload = True

    def __init__(
        self,
        url: str,
        *,
        overwrite: bool = False,
        beside: Iterable[Sink] = (),
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if url.startswith("hf://"):
            hint = "Save it here, and bring it there with `hf upload organisation/model FILE`"
            raise UnsupportedError("files on the Hub are only read", path=url, hint=hint)
        self._filesystem, self._remote = file_system(url, storage_options)
        self._options = storage_options
        self._alias: str | None = None
        self._is_there = False
        if not overwrite and self.is_taken():
            raise _exists(url)
        # The target of temporary files only: their names cannot be guessed, and others cannot
        # read them.
        self.target = os.path.join(tempfile.gettempdir(), "xckpt-upload")  # noqa: PTH118
        try:
            with Place(self.target, url, is_upload=True).named():
                self._create(url, None, beside, overwrite=overwrite, private=True)
        except BaseException:
            self.abort()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            f"{self.name}: what is uploaded is written by one machine; save to a shared folder, "
            "or without a cluster"
        )

    def another(self) -> Sink:
        """Begin another temporary file for the same URL."""
        options = self._options
        return UploadSink(self.name, overwrite=True, beside=[self], storage_options=options)

    # The steps of `publish`.

    @property
    def folders(self) -> set[str]:
        """None that have to be brought to a disk."""
        return set()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """There are no locks."""
        yield

    def is_taken(self) -> bool:
        """Whether there is a file; see `Sink.is_taken`."""
        found: bool = self._filesystem.exists(self._remote)
        return found

    def take_name(self) -> None:
        """Upload the file, or copy it there from its alias."""
        self._is_there = True
        if self._alias is not None:
            with suppress(NotImplementedError):
                self._transfer(self._filesystem.cp_file, self._alias)
                return
        self._transfer(self._filesystem.put_file, self.path)

    def has_name(self) -> bool:
        """Whether it was uploaded, or may have been."""
        return self._is_there

    def remove(self) -> None:
        """Remove what was uploaded."""
        self._filesystem.rm_file(self._remote)

    def add_alias(self, name: str) -> None:
        """Upload the file under another name in the same folder."""
        alias = self._next_to(name)
        self._transfer(self._filesystem.put_file, self.path, alias)
        self._alias = alias

    def remove_alias(self, name: str) -> None:
        """Remove the other file."""
        with suppress(FileNotFoundError):
            self._filesystem.rm_file(self._next_to(name))

    def remove_aliases(self, companions: Iterable[Sink]) -> None:
        """Nothing: whether others use them is not known, without locks."""

    def _next_to(self, name: str) -> str:
        folder, slash, _ = str(self._remote).rpartition("/")
        return folder + slash + name.rpartition("/")[2]

    def _transfer(self, how: Any, start: str, end: str | None = None) -> None:
        """Copy or upload a file; errors of libraries become those of the operating system."""
        with Place(self.name, self.name).named():
            try:
                how(start, end or self._remote)
            except Exception as error:
                problem = as_os_error(error, self.name, "upload")
                if problem is error:
                    raise
                if isinstance(problem, TransientError):
                    problem = OSError(errno.EIO, str(problem), self.name)
                raise problem from error
