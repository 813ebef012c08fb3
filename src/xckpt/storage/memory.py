"""Bytes in memory and open file objects as sources."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from xckpt.errors import FileChangedError, UnsupportedError, named
from xckpt.storage.local import FileVersion, LocalSource, empty
from xckpt.storage.siblings import components
from xckpt.storage.source import Source

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["BytesSource", "FileObjectSource"]


class BytesSource(Source):
    """Bytes in memory. It pickles with its contents.

    Parameters
    ----------
    data : bytes, bytearray or memoryview
        Not copied; it must not be modified while the source is in use.
    """

    __slots__ = ("_data",)

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        from xxhash import xxh3_128_hexdigest

        self._data = memoryview(data).cast("B").toreadonly()
        self.name = "<bytes>"
        self.size = len(self._data)
        self.identity = (self.size, xxh3_128_hexdigest(self._data))

    def __reduce__(self) -> tuple[type[BytesSource], tuple[bytes]]:
        return BytesSource, (bytes(self._data),)

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Copy a range of the bytes; see `Source.read`."""
        view = self.view(offset, nbytes)
        memory = empty(nbytes)
        memory[:] = view
        return memory

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a range of the bytes without a copy; see `Source.view`."""
        self._check_range(offset, nbytes)
        return self._data[offset : offset + nbytes]

    def sibling(self, name: str) -> Source:
        """Bytes have no folder; see `Source.sibling`."""
        raise _without_folder(self, name)


class FileObjectSource(Source):
    """An open binary file object. It pickles if the object does.

    Reads take turns, and leave the position of the object as they found it.

    Parameters
    ----------
    file : file object
        Binary and seekable, such as `io.BytesIO`, ``open(path, "rb")`` or a file of fsspec.

    Raises
    ------
    TypeError
        If it is opened in text mode or cannot seek.
    """

    __slots__ = ("_file", "_folder", "_lock", "_version")

    def __init__(self, file: Any) -> None:
        if isinstance(file.read(0), str):
            raise TypeError(f"{file!r} is opened in text mode; open it in mode 'rb'")
        if not file.seekable():
            raise TypeError(f"{file!r} cannot seek; read it into an io.BytesIO first")
        self._file = file
        self._lock = threading.Lock()
        status = _status_of(file)
        self.name, self._folder = _place_of(file, on_disk=status is not None)
        self.size = _size_of(file)
        self._version = None if status is None else FileVersion(status)
        told: Hashable = uuid4().hex if self._version is None else self._version.identity
        self.identity = (self.size, told)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        try:
            self._file.__reduce_ex__(protocol)
        except TypeError as error:
            raise TypeError(
                f"{self._file!r} cannot be pickled, so neither can what reads from it; "
                "open the checkpoint by its path or URL instead"
            ) from error
        names = ("_file", "_folder", "_version", "name", "size", "identity")
        state = {name: getattr(self, name) for name in names}
        return object.__new__, (FileObjectSource,), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._lock = threading.Lock()

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Read a range of bytes; see `Source.read`."""
        self._check_range(offset, nbytes)
        memory = empty(nbytes)
        try:
            with self._lock:
                position = self._file.tell()
                try:
                    self._file.seek(offset)
                    found = _fill(self._file, memory)
                finally:
                    self._file.seek(position)
        except OSError as error:
            raise named(error, self.name) from error
        if found < nbytes:
            raise self._changed(offset)
        self.check(offset)
        return memory

    def check(self, offset: int | None = None) -> None:
        """Look at the file; see `Source.check`."""
        if not self._is_unchanged():
            raise self._changed(offset)

    def _changed(self, offset: int | None) -> FileChangedError:
        reason = "the file changed after it was opened"
        return FileChangedError(reason, path=self.name, offset=offset, hint="Open it again")

    def sibling(self, name: str) -> Source:
        """Open another file beside the one on disk that the object reads; see `Source.sibling`."""
        if self._folder is None:
            raise _without_folder(self, name)
        return LocalSource(str(Path(self._folder, *components(name))))

    def _is_unchanged(self) -> bool:
        status = None if self._version is None else _status_of(self._file)
        return status is None or self._version is None or self._version.matches(status)


def _without_folder(source: Source, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"this is one file without a folder, but it refers to another file, {name!r}",
        path=source.name,
        hint="Open it by its path or URL",
    )


def _status_of(file: Any) -> os.stat_result | None:
    try:
        return os.fstat(file.fileno())
    except (AttributeError, OSError):  # no file of the operating system, such as io.BytesIO
        return None


def _place_of(file: Any, *, on_disk: bool) -> tuple[str, str | None]:
    """Return a name for messages, and the folder of a file on disk."""
    named = (getattr(file, key, None) for key in ("full_name", "name", "path"))  # fsspec has others
    name = next((each for each in named if isinstance(each, str)), None)
    if name is None:
        return f"<{type(file).__name__}>", None
    if not on_disk:
        return name, None
    path = Path(name).absolute()
    return str(path), str(path.parent)


def _size_of(file: Any) -> int:
    position = file.tell()
    try:
        return int(file.seek(0, os.SEEK_END))
    finally:
        file.seek(position)


def _fill(file: Any, memory: memoryview) -> int:
    done = 0
    while done < len(memory):
        if hasattr(file, "readinto"):
            count = file.readinto(memory[done:]) or 0
        else:
            piece = file.read(len(memory) - done)
            count = len(piece)
            memory[done : done + count] = piece
        if count == 0:
            break
        done += count
    return done
