"""Files on other machines: each read is a request, unless its bytes have been prefetched.

`RemoteSource` reads through requests of any kind. `FsspecSource` makes them with fsspec, for
protocols that obstore lacks (see `objects`) and for chained URLs, such as ``zip://``. Its answers
have no version, so the version is requested separately, every ten seconds.
"""

from __future__ import annotations

import errno
import os
import time
import uuid
from abc import abstractmethod
from functools import partial
from hashlib import blake2b
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import numpy as np

from xckpt.addresses import hidden, hiding, real
from xckpt.errors import CheckpointError, FileChangedError, UnsupportedError, shown, warn
from xckpt.storage import prefetch
from xckpt.storage.cache import FIRST_NBYTES, reading_header
from xckpt.storage.limits import Pool
from xckpt.storage.requests import (
    OWN_OPTIONS,
    REQUEST_NBYTES,
    Limits,
    TransientError,
    called_within,
    loggable,
    logger,
    retried,
    split_options,
    submit,
    wait_for,
)
from xckpt.storage.source import OPENING, Source, components, is_of_one_opening

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from contextlib import AbstractContextManager

# Time for which the version of a file counts as checked, before another request checks it.
TRUSTED_SECONDS = 10.0
_LONGEST_VERSION = 1024
_NOTHING = memoryview(b"")

# Part of the identity of a file without a version, whose beginning is read again now and then.
_BEGINNING = "beginning"

# Times of the last check that files are unchanged, in this process, by name and identity.
_checks: Pool[SimpleNamespace] = Pool(limit=1024)


class RemoteSource(Source):
    """A file on another machine."""

    __slots__ = ("_first", "limits", "storage_options")

    storage_options: dict[str, Any]  # part of the pickle
    limits: Limits
    _first: memoryview | bytes  # the beginning of the file, until its header is read

    def __init__(self, url: str, storage_options: dict[str, Any], limits: Limits) -> None:
        self.name, self.storage_options, self.limits = hiding(url), storage_options, limits
        self._first = b""

    @property
    def options(self) -> dict[str, Any]:
        """The options to open another file with."""
        return {**self.storage_options, OWN_OPTIONS: self.limits._asdict()}

    @property
    def url(self) -> str:
        """The URL for requests, with its secrets."""
        return real(self.name)

    @property
    def is_far(self) -> bool:
        """See `Source.is_far`."""
        return True

    @abstractmethod
    def _get(self, offset: int, nbytes: int) -> memoryview:
        """Make one request for a range of the opened version; runs on any thread."""

    def _get_all(self, offset: int, nbytes: int) -> memoryview:
        """Make one request, and raise if the file is gone or bytes are missing."""
        try:
            data = self._get(offset, nbytes)
        except FileNotFoundError as error:
            raise changed(self.name, "it is no longer there") from error
        if len(data) != nbytes:
            raise TransientError(f"asked for {nbytes} bytes at {offset}, got {len(data)}")
        return data

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        names = ("name", "size", "identity", "storage_options", "limits")
        return None, {**{name: getattr(self, name) for name in names}, "_first": b""}

    def read_into(self, offsets: Sequence[int], memory: memoryview) -> None:
        """Read ranges of bytes into given memory; see `Source.read_into`."""
        nbytes = len(memory) // len(offsets)
        for number, offset in enumerate(offsets):
            self.check_range(offset, nbytes)
            self._fill(offset, memory[number * nbytes : (number + 1) * nbytes])

    def _fill(self, offset: int, memory: memoryview) -> None:
        if prefetch.is_active(self) and prefetch.fill(self, offset, memory):
            return
        if self._is_long(len(memory)):
            with self.reading_ahead([(offset, len(memory))]):
                if prefetch.fill(self, offset, memory):
                    return
        data = self._requested(offset, len(memory))
        np.copyto(np.frombuffer(memory, np.uint8), np.frombuffer(data, np.uint8))

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a range of bytes, read-only; without a copy if one request fetched it."""
        self.check_range(offset, nbytes)
        is_active = prefetch.is_active(self)
        data = prefetch.view(self, offset, nbytes) if is_active else None
        if data is None and not is_active and not self._is_long(nbytes):
            return self._requested(offset, nbytes)
        return self.read(offset, nbytes).toreadonly() if data is None else data

    def _is_long(self, nbytes: int) -> bool:
        """Return whether a range is fetched by several requests."""
        return nbytes >= 2 * REQUEST_NBYTES and self.is_far

    def blocks(self, offset: int, nbytes: int, block_nbytes: int = 1 << 20) -> Iterator[memoryview]:
        """Yield a range of bytes block by block; see `Source.blocks`."""
        self.check_range(offset, nbytes)
        # Ranges that are requested already would be requested twice.
        is_requested = prefetch.is_active(self)
        with self.reading_ahead([] if is_requested else [(offset, nbytes)]):
            for start in range(offset, offset + nbytes, block_nbytes):
                yield self.view(start, min(block_nbytes, offset + nbytes - start))

    def reading_ahead(self, ranges: Sequence[tuple[int, int]]) -> AbstractContextManager[None]:
        """Request ranges before they are read; see `Source.reading_ahead`."""
        return prefetch.reading_ahead([(self, *extent) for extent in ranges])

    def request(self, offset: int, nbytes: int, *, is_urgent: bool = False) -> Future[memoryview]:
        """Request a range of bytes on another thread."""
        return submit(self.name, partial(self.fetch, offset, nbytes), is_urgent=is_urgent)

    def fetch(self, offset: int, nbytes: int) -> memoryview:
        """Request a range of bytes, and repeat the request after transient failures."""
        self._first = b""  # values are read after the header
        start = time.monotonic()
        data = retried(self.name, partial(self._get_all, offset, nbytes), self.limits)
        took = time.monotonic() - start
        logger.debug("%d bytes at %d in %.3f s: %s", nbytes, offset, took, loggable(self.name))
        self._check_beginning()  # afterwards, so that it covers this read
        return data

    def _requested(self, offset: int, nbytes: int) -> memoryview:
        """Make one request and wait for it."""
        return wait_for(self.request(offset, nbytes, is_urgent=True)) if nbytes else _NOTHING

    def check(self) -> None:
        """Request one byte, whose answer has the version; see `Source.check`."""
        self._last_check().time = float("-inf")
        self._requested(0, min(1, self.size))

    def reading_header(self) -> AbstractContextManager[Source]:
        """Return a source with read-ahead and a cache for the header; see `Source`."""
        first, self._first = memoryview(self._first), b""
        return reading_header(self, first, self.storage_options)

    def sibling(self, name: str) -> Source:
        """Open another file next to this one; see `Source.sibling`."""
        url = hiding(sibling_url(self.url, components(name)))
        return type(self)(url, self.options)  # type: ignore[call-arg]

    def _last_check(self) -> SimpleNamespace:
        never = partial(SimpleNamespace, time=float("-inf"))
        return _checks.get((self.name, self.identity), never)

    def _remember_beginning(self) -> None:
        """Identify a file without a version by its beginning, and warn about that."""
        self._first = self._first or self._requested(0, min(self.size, FIRST_NBYTES))
        # Another opening may find another version.
        opening = (OPENING, uuid.uuid4().hex)
        self.identity = (self.size, opening, (_BEGINNING, _digest(self._first)))
        warn(
            f"{self.name}: the server sends neither ETag nor Last-Modified, so changes of the file "
            "while it is open are noticed only in its size and its first 64 KiB"
        )
        self._last_check().time = time.monotonic()

    def _check_beginning(self) -> None:
        identity: Any = self.identity
        if identity[1:] and identity[-1][0] == _BEGINNING:
            last = self._last_check()
            if time.monotonic() - last.time >= TRUSTED_SECONDS:
                read = partial(self._get_all, 0, min(self.size, FIRST_NBYTES))
                if _digest(retried(self.name, read, self.limits)) != identity[-1][1]:
                    raise changed(self.name, "it begins with other bytes")
                last.time = time.monotonic()


def identified(
    url: str, size: object, version: Mapping[str, object]
) -> tuple[int, tuple[Any, ...]]:
    """Return the size and the identity of a file from the answer of a server."""
    if type(size) is not int or not 0 <= size < 1 << 63:
        raise unsupported(url, "does not send the size of the file")
    texts = [(key, str(value)) for key, value in version.items() if value is not None]
    return size, (size, *[pair for pair in texts if len(pair[1]) <= _LONGEST_VERSION])


def changed(url: str, difference: str) -> FileChangedError:
    """Return the error for a file that changed after it was opened."""
    reason = f"the file changed after it was opened: {difference}"
    return FileChangedError(reason, path=url, hint="Open it again")


def unsupported(url: str, lack: str) -> UnsupportedError:
    """Return the error for a server that lacks something."""
    return UnsupportedError(f"the server {lack}", path=url, hint="Download it, and open the copy")


def _digest(data: memoryview | bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def sibling_url(url: str, parts: list[str]) -> str:
    """Replace the last component of the path in a URL, which may be chained."""
    links = url.split("::")
    at = next((i for i, link in enumerate(links) if "://" in link), len(links) - 1)
    scheme, separator, path = links[at].partition("://")
    query = ""
    if scheme in {"http", "https"}:
        # Queries stay: they carry access tokens, which are often good for the whole folder.
        path, mark, query = path.partition("?")
        query = mark + query
        parts = [quote(part) for part in parts]
    folder = path.rpartition("/")[0]
    links[at] = scheme + separator + "/".join([folder, *parts] if folder else parts) + query
    return "::".join(links)


# --- fsspec ---------------------------------------------------------------------------------------

T = TypeVar("T")

# Names that file systems use for the version of a file.
_VERSION_KEYS = (
    "ETag", "etag", "VersionId", "version_id", "generation", "md5Hash", "content_md5", "blob_id",
    "sha", "LastModified", "Last-Modified", "last_modified", "mtime", "modified", "updated",
    "created", "ino", "CRC", "modify", "modificationTime", "last_write_time",
)  # fmt: skip
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
        super().__init__(url, *split_options(storage_options))
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

        if self._is_here() or time.monotonic() - self._last_check().time >= TRUSTED_SECONDS:
            self._compare()
        data = self._call(cat)[:nbytes]
        if len(data) < nbytes:
            self._compare()
        return memoryview(data)

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
        return file_system_of(self.url, self.storage_options)


def file_system_of(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the file system of fsspec for a URL, and the path in it."""
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
