"""Files behind URLs, through fsspec: one request for each range, no block cache.

Requests that fail for reasons that pass are made again, after a while; of a body that was cut
short, the rest is requested.
"""

from __future__ import annotations

import errno
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from xckpt.errors import FileChangedError, UnsupportedError
from xckpt.storage import retrying
from xckpt.storage.local import empty
from xckpt.storage.pool import Pool
from xckpt.storage.siblings import components
from xckpt.storage.source import Source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

__all__ = ["FsspecSource", "is_url"]

# Two letters at least: "C:" is a drive.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+(://|::)")

_EXTRAS = {"http": "http", "https": "http", "s3": "s3", "s3a": "s3"}

# What file systems say of the version of a file, under the names they have for it.
_VERSION_KEYS = (
    "ETag",
    "etag",
    "VersionId",
    "version_id",
    "generation",
    "md5Hash",
    "content_md5",
    "blob_id",
    "sha",
    "LastModified",
    "Last-Modified",
    "last_modified",
    "mtime",
    "modified",
    "updated",
    "created",
    "ino",
)

# How long an answer about the version of a file is trusted before it costs another request.
_TRUSTED_SECONDS = 10.0
_FREE_TO_ASK = frozenset({"memory", "file", "local"})
_LARGEST_CONCURRENCY = 8
# Of so many bytes one more failure is tolerated.
_NBYTES_PER_FAILURE = 16 << 20


class _LastCheck:
    """When this process last found a file to be the one that was opened."""

    __slots__ = ("time",)

    def __init__(self) -> None:
        self.time = float("-inf")


_checks: Pool[_LastCheck] = Pool(limit=1024)


def is_url(path: str) -> bool:
    """Return whether a text is a URL, as opposed to a path."""
    return _URL.match(path) is not None


class FsspecSource(Source):
    """A file behind a URL.

    Parameters
    ----------
    url : str
        Any URL of fsspec, also a chained one.
    storage_options : dict, optional
        For fsspec. They travel with the source when it is pickled.
    first : int
        Bytes of the beginning that are wanted at once, where they can come with the answer that
        tells size and version; see `take_first`.

    Raises
    ------
    OSError
        If the file is not there, may not be read, or is a directory.
    ImportError
        If a package for this kind of URL is not installed.
    UnsupportedError
        If the server does not tell its size.
    """

    __slots__ = ("_first", "storage_options")

    def __init__(
        self, url: str, storage_options: Mapping[str, Any] | None = None, *, first: int = 0
    ) -> None:
        self.name = url
        self.storage_options = dict(storage_options or {})
        self._first = memoryview(b"")
        info, self._first = retrying.retried(url, lambda: self._look(first))
        self.size, self.identity = self._version_of(info)
        _checks.get(self, _LastCheck).time = time.monotonic()

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        names = ("name", "size", "identity", "storage_options")
        state = {name: getattr(self, name) for name in names}
        return None, {**state, "_first": b""}

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Read a range of bytes, by one request where it succeeds; see `Source.read`."""
        self._check_range(offset, nbytes)
        pieces: list[memoryview] = []
        done = failures = 0
        while done < nbytes:
            piece, problem = self._attempt(offset + done, nbytes - done)
            pieces.append(piece)
            done += len(piece)
            if done < nbytes:
                failures += 1
                if failures >= retrying.ATTEMPTS + nbytes // _NBYTES_PER_FAILURE:
                    raise self._given_up(offset, nbytes, done, problem) from problem
                retrying.pause(failures)
        return pieces[0] if len(pieces) == 1 else _joined(pieces, nbytes)

    def check(self) -> None:
        """Ask for a byte, and by that for the version; see `Source.check`."""
        _checks.get(self, _LastCheck).time = float("-inf")
        self.read(0, min(1, self.size))

    def take_first(self) -> memoryview:
        """Hand over the bytes of the beginning that were read when the file was opened, if any."""
        first, self._first = memoryview(self._first), memoryview(b"")
        return first

    def reading_header(self) -> AbstractContextManager[Source]:
        """Read ahead, and remember; see `Source.reading_header`."""
        from xckpt.storage.header import reading_header

        return reading_header(self)

    def sibling(self, name: str) -> Source:
        """Open another file beside this one; see `Source.sibling`."""
        return type(self)(_sibling_url(self.name, components(name)), self.storage_options)

    def _attempt(self, offset: int, nbytes: int) -> tuple[memoryview, Exception | None]:
        """Make a request; give what came of the range, and what went wrong if that passes."""
        try:
            data = self._fetch(offset, nbytes)
        except FileNotFoundError as error:
            raise self._changed("it is no longer there") from error
        except Exception as error:
            if not retrying.is_transient(error):
                raise
            return memoryview(b""), error
        if len(data) < nbytes:
            self._check_unchanged(trusted=0)
        return data, None

    def _given_up(self, offset: int, nbytes: int, found: int, problem: Exception | None) -> OSError:
        told = f"asked for {nbytes} bytes at {offset}, got {found}, after {retrying.ATTEMPTS} or "
        told += "more attempts"
        if problem is not None:
            told += f"; the last one failed: {problem}"
        return OSError(errno.EIO, told, self.name)

    def _look(self, first: int) -> tuple[dict[str, Any], memoryview]:
        """Find size and version, with the first bytes where these come with the answer."""
        return self._info(), memoryview(b"")

    def _fetch(self, offset: int, nbytes: int) -> memoryview:
        """Make one request for a range; what it gives may be shorter."""
        self._check_unchanged(trusted=_TRUSTED_SECONDS)
        fs, path = self._file_system()
        return memoryview(_cat(fs, path, offset, offset + nbytes))

    def _read_each(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        if len(ranges) < 2:
            return [self.read(*each) for each in ranges]
        with ThreadPoolExecutor(min(len(ranges), _LARGEST_CONCURRENCY)) as threads:
            return list(threads.map(lambda each: self.read(*each), ranges))

    def _file_system(self) -> tuple[Any, str]:
        # fsspec keeps one instance per process and options, and knows about forks.
        from fsspec.core import url_to_fs

        try:
            return url_to_fs(self.name, **self.storage_options)  # type: ignore[no-any-return]
        except ImportError as error:
            protocols = re.split(r"://|::", self.name)
            extra = next((_EXTRAS[each] for each in protocols if each in _EXTRAS), None)
            how = "" if extra is None else f". Install it with: pip install 'xckpt[{extra}]'"
            raise ImportError(f"cannot open {self.name}: {error}{how}") from error

    def _info(self) -> dict[str, Any]:
        """Ask for what is known of the file."""
        fs, path = self._file_system()
        try:
            info: dict[str, Any] = fs.info(path)
        except FileNotFoundError as error:
            raise _real_reason(error, self.name) from error
        if info.get("type") == "directory":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.name)
        return info

    def _version_of(self, info: Mapping[str, Any]) -> tuple[int, tuple[Any, ...]]:
        """Return the size and the identity of the file."""
        size = info.get("size")
        if type(size) is not int or size < 0:
            raise UnsupportedError(
                "the server does not tell the size of the file",
                path=self.name,
                hint=f"Download it, or open 'simplecache::{self.name}'",
            )
        said = [(key, str(info[key])) for key in _VERSION_KEYS if info.get(key) is not None]
        return size, (size, *said)

    def _check_unchanged(self, trusted: float) -> None:
        fs, path = self._file_system()
        protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        if protocols & _FREE_TO_ASK:
            trusted = 0
        last = _checks.get(self, _LastCheck)
        if time.monotonic() - last.time < trusted:
            return
        fs.invalidate_cache(path)
        info = retrying.retried(self.name, self._info)
        if self._version_of(info)[1] != self.identity:
            raise self._changed("its size, time or ETag is another")
        last.time = time.monotonic()

    def _changed(self, how: str) -> FileChangedError:
        return FileChangedError(
            f"the file changed after it was opened: {how}", path=self.name, hint="Open it again"
        )


def _joined(pieces: list[memoryview], nbytes: int) -> memoryview:
    memory = empty(nbytes)
    at = 0
    for piece in pieces:
        memory[at : at + len(piece)] = piece
        at += len(piece)
    return memory


def _cat(fs: Any, path: str, start: int, stop: int) -> bytes:
    from fsspec import AbstractFileSystem

    if type(fs).cat_file is AbstractFileSystem.cat_file:
        # This one opens the file, and would read ahead by blocks.
        with fs.open(path, "rb", cache_type="none") as file:
            file.seek(start)
            return bytes(file.read(stop - start))
    return bytes(fs.cat_file(path, start=start, end=stop))


def _real_reason(error: FileNotFoundError, url: str) -> OSError:
    """Find why fsspec says that a file is missing: over HTTP it says so of any failure."""
    cause = error.__cause__
    status = getattr(cause, "status", None)
    if status in {401, 403}:
        return PermissionError(errno.EACCES, os.strerror(errno.EACCES), url)
    if status not in {None, 404, 410}:
        passes = retrying.is_transient_status(status)
        return OSError(errno.EIO if passes else errno.EINVAL, f"the server answered {status}", url)
    if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
        return OSError(cause.errno or errno.EIO, f"cannot connect: {cause}", url)
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)


def _sibling_url(url: str, parts: list[str]) -> str:
    """Replace the last component of the path, in the link of a chained URL that has one."""
    links = url.split("::")
    at = next((i for i, link in enumerate(links) if "://" in link), len(links) - 1)
    scheme, separator, rest = links[at].partition("://")
    query = ""
    if scheme in {"http", "https"}:
        # Queries stay: they carry access tokens, which are often good for the whole folder.
        rest, mark, query = rest.partition("?")
        query = mark + query
        parts = [quote(part) for part in parts]
    folder = rest.rpartition("/")[0]
    links[at] = scheme + separator + "/".join([folder, *parts] if folder else parts) + query
    return "::".join(links)
