"""Files of all other protocols of fsspec, and of chained URLs, such as ``zip://``.

The answer to a read does not contain the version of the file, so the version is requested
separately, every ten seconds.
"""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING, Any, TypeVar

from xckpt.addresses import hidden, hiding, real
from xckpt.errors import CheckpointError, shown
from xckpt.storage import remote
from xckpt.storage.remote import (
    RemoteSource,
    changed,
    identified,
    is_of_one_opening,
)
from xckpt.storage.requests import TransientError, called_within, retried, split_options
from xckpt.storage.stores import store_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")

# Names that file systems use for the version of a file.
_VERSION_KEYS = (
    *("ETag", "etag", "VersionId", "version_id", "generation", "md5Hash", "content_md5"),
    *("blob_id", "sha", "LastModified", "Last-Modified", "last_modified", "mtime", "modified"),
    *("updated", "created", "ino", "CRC", "modify", "modificationTime", "last_write_time"),
)
# These protocols read copies, which do not change.
_COPYING = ("simplecache::", "filecache::", "blockcache::", "cached::")
_IN_THIS_PROCESS = frozenset({"memory", "file", "local"})
_TRANSIENT_NUMBERS = {
    getattr(errno, name)
    for name in ("EIO", "EREMOTEIO", "EBUSY", "EAGAIN", "ETIMEDOUT", "ECONNRESET", "EPIPE")
    if hasattr(errno, name)
}


class FsspecSource(RemoteSource):
    """A file of a file system of fsspec, which gets the `storage_options`."""

    __slots__ = ()

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self.name = hiding(url)
        self.storage_options, self.limits = split_options(storage_options)
        self._first = b""
        self._file_system()  # an unknown protocol or a missing package is not a failed request
        self.size, self.identity = retried(self.name, self._state, self.limits)
        if self.identity == (self.size,) and not url.startswith(_COPYING):
            self._remember_beginning()
        self._last_check().time = time.monotonic()

    @property
    def is_far(self) -> bool:
        """See `Source.is_far`."""
        return not self._is_here()

    def _requested(self, offset: int, nbytes: int) -> memoryview:
        if self._is_here() and nbytes:
            return self.fetch(offset, nbytes)
        return super()._requested(offset, nbytes)

    def _get(self, offset: int, nbytes: int) -> memoryview:
        """Read a range through fsspec; see `RemoteSource`."""
        fs, path = self._file_system()

        def cat() -> bytes:
            from fsspec import AbstractFileSystem

            if type(fs).cat_file is not AbstractFileSystem.cat_file:
                return bytes(fs.cat_file(path, start=offset, end=offset + nbytes))
            # The default `cat_file` opens the file with read-ahead by blocks.
            with fs.open(path, "rb", cache_type="none") as file:
                file.seek(offset)
                return bytes(file.read(nbytes))

        try:
            if (
                self._is_here()
                or time.monotonic() - self._last_check().time >= remote.TRUSTED_SECONDS
            ):
                self._compare()
            data = self._call(cat)[:nbytes]
            if len(data) == nbytes:
                return memoryview(data)
            self._compare()
        except FileNotFoundError as error:
            raise changed(self.name, "it is no longer there") from error
        raise TransientError(f"asked for {nbytes} bytes at {offset}, got {len(data)}")

    def _compare(self) -> None:
        """Compare the version of the file now with the one that was opened."""
        fs, path = self._file_system()
        fs.invalidate_cache(path)
        size, identity = self._state()
        is_known = not is_of_one_opening(self.identity)  # by more than its size and beginning
        # Where no version was known, one that appears is of another file or server.
        if size != self.size or identity != (self.identity if is_known else (self.size,)):
            raise changed(self.name, "its size, time or ETag is another")
        if is_known:
            self._last_check().time = time.monotonic()

    def _state(self) -> tuple[int, tuple[Any, ...]]:
        """Return the size and the identity of the file now."""
        fs, path = self._file_system()
        info: dict[str, Any] = self._call(lambda: fs.info(path))
        if info.get("type") == "directory":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.name)
        return identified(
            self.name, info.get("size"), {key: info.get(key) for key in _VERSION_KEYS}
        )

    def _call(self, call: Callable[[], T]) -> T:
        """Call a function of fsspec, within the time limit."""
        try:
            return call() if self._is_here() else called_within(self.limits.timeout, call)
        except (FileNotFoundError, PermissionError) as error:
            number = errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EACCES
            raise type(error)(number, os.strerror(number), self.name) from error
        except Exception as error:
            problem = as_os_error(error, self.name)
            if problem is error:
                raise
            raise problem from error

    def _is_here(self) -> bool:
        fs, _ = self._file_system()
        protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        return bool(protocols & _IN_THIS_PROCESS)

    def _file_system(self) -> tuple[Any, str]:
        return _of_fsspec(self.url, self.storage_options)


def file_system(url: str, storage_options: Mapping[str, Any] | None) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    if store_kind(url) is not None:
        from xckpt.storage.objects import Bucket

        return Bucket(url, storage_options), real(url).partition("://")[2]
    return _of_fsspec(real(url), split_options(storage_options)[0])


def _of_fsspec(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    # fsspec keeps one instance per process and options.
    from fsspec.core import url_to_fs

    try:
        fs, path = url_to_fs(url, **options)
    except ImportError as error:
        raise ImportError(hidden(f"cannot open {url}: {error}")) from error
    except ValueError as error:
        raise ValueError(hidden(f"cannot open {url}: {error}")) from error
    return fs, path


def as_os_error(error: Exception, url: str, task: str = "request") -> Exception:
    """Return an error of a file system as an `OSError`; programming errors stay unchanged."""
    if isinstance(error, CheckpointError | TransientError):
        return error
    is_timeout = isinstance(error, TimeoutError)
    if isinstance(error, OSError):
        is_transient = is_timeout or isinstance(error, ConnectionError)
        if not (is_transient or error.errno in _TRANSIENT_NUMBERS):
            return error
    reason = shown(hidden(str(error))) if str(error) else type(error).__name__
    text = f"the {task} failed: {reason}"
    if isinstance(error, ValueError | LookupError) and not isinstance(error, OSError):
        return OSError(errno.EINVAL, text, url)
    if type(error).__module__ == "builtins" and not isinstance(error, OSError):
        return error
    return TransientError(text, is_timeout=is_timeout)
