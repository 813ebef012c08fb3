"""Files behind URLs, through fsspec: one request for each range, no block cache.

Requests that fail for reasons that pass are made again, after a while; of a body that was cut
short, the rest is requested. What does not get ahead is a `TimeoutError`: see `network.Patience`.
"""

from __future__ import annotations

import errno
import os
import re
import time
import uuid
import warnings
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from xckpt.errors import CheckpointWarning, FileChangedError, UnsupportedError
from xckpt.storage import network
from xckpt.storage.header import reading_header
from xckpt.storage.network import OWN_OPTIONS, Patience, on_thread, version_text, words_of
from xckpt.storage.pool import Pool
from xckpt.storage.source import Source, components

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

__all__ = ["FsspecSource", "is_of_one_opening", "is_url"]

T = TypeVar("T")

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
    "CRC",
    "modify",
    "modificationTime",
    "last_write_time",
)
# Where nothing is said of the version: of the beginning, which is looked at now and then.
_OPENING, _BEGINNING = "opening", "beginning"
_BEGINNING_NBYTES = 1 << 16
# They read copies of their own, which nobody changes.
_COPYING = ("simplecache::", "filecache::", "blockcache::", "cached::")

# How long an answer about the version of a file is trusted before it costs another request.
_TRUSTED_SECONDS = 10.0
_FREE_TO_ASK = frozenset({"memory", "file", "local"})
# Of so many bytes one more failure is tolerated.
_NBYTES_PER_FAILURE = 16 << 20


class _LastCheck:
    """When this process last found a file to be the one that was opened."""

    __slots__ = ("time",)

    def __init__(self) -> None:
        self.time = float("-inf")


_checks: Pool[_LastCheck] = Pool(limit=1024)


def is_of_one_opening(identity: Any) -> bool:
    """Return whether a file, or one that it is among, is the same only while it is open."""
    return isinstance(identity, tuple) and (
        identity[:1] == (_OPENING,) or any(map(is_of_one_opening, identity))
    )


def is_url(path: str) -> bool:
    """Return whether a text is a URL, as opposed to a path."""
    return _URL.match(path) is not None


class FsspecSource(Source):
    """A file behind any URL of fsspec, also a chained one.

    `storage_options` are for fsspec, but for those under "xckpt", which are `network.Limits`; they
    travel with the source when it is pickled. `first` bytes of the beginning are wanted at once,
    where they can come with the answer that tells size and version. A file of which nothing tells
    one version from another is warned of.
    """

    __slots__ = ("_first", "limits", "storage_options")

    concurrency = 8

    def __init__(
        self, url: str, storage_options: Mapping[str, Any] | None = None, *, first: int = 0
    ) -> None:
        self.name = url
        self.storage_options, self.limits = network.own_options(storage_options)
        self._first = memoryview(b"")
        self._file_system()  # an unknown protocol or a missing package is not a failed request
        patience = Patience(url, self.limits)
        info, self._first = network.retried(url, lambda: self._look(first, patience), patience)
        self.size, self.identity = self._version_of(info)
        if self.identity == (self.size,) and not url.startswith(_COPYING):
            self._remember_beginning()
        self._last_check().time = time.monotonic()

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        names = ("name", "size", "identity", "storage_options", "limits")
        state = {name: getattr(self, name) for name in names}
        return None, {**state, "_first": b""}

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Read a range of bytes, by one request where it succeeds; see `Source.read`."""
        data = self._read(offset, nbytes)
        self._check_beginning()  # afterwards, so that it covers this read
        return data

    def _read(self, offset: int, nbytes: int) -> memoryview:
        self._check_range(offset, nbytes)
        pieces: list[memoryview] = []
        patience = Patience(self.name, self.limits)
        done = failures = 0
        while done < nbytes:
            request = partial(self._fetch, offset + done, nbytes - done, patience)
            try:
                piece, problem = network.attempted(self.name, request)
            except FileNotFoundError as error:
                raise self._changed("it is no longer there") from error
            if piece is not None:
                pieces.append(piece)
                done += len(piece)
            if done == nbytes:
                break
            if piece is not None:
                patience.left()
                self._check_unchanged(patience, trusted=0)
            failures += 1
            if failures >= network.ATTEMPTS + nbytes // _NBYTES_PER_FAILURE:
                told = f"asked for {nbytes} bytes at {offset}, got {done}, in {failures} attempts"
                told += "" if problem is None else f"; the last one failed: {problem}"
                raise OSError(errno.EIO, told, self.name) from problem
            patience.pause(failures)
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    def check(self) -> None:
        """Ask for a byte, and by that for the version; see `Source.check`."""
        self._last_check().time = float("-inf")
        self.read(0, min(1, self.size))

    def reading_header(self) -> AbstractContextManager[Source]:
        """Read ahead, and remember; see `Source.reading_header`."""
        first, self._first = memoryview(self._first), memoryview(b"")
        return reading_header(self, first, self.storage_options)

    def sibling(self, name: str) -> Source:
        """Open another file next to this one; see `Source.sibling`."""
        options = {**self.storage_options, OWN_OPTIONS: self.limits._asdict()}
        return type(self)(_sibling_url(self.name, components(name)), options)

    def _last_check(self) -> _LastCheck:
        return _checks.get((self.name, self.identity), _LastCheck)

    def _look(self, first: int, patience: Patience) -> tuple[dict[str, Any], memoryview]:
        """Find size and version, with the first bytes where these come with the answer."""
        return self._info(patience), memoryview(b"")

    def _fetch(self, offset: int, nbytes: int, patience: Patience) -> memoryview:
        """Make one request for a range; what it gives may be shorter."""
        self._check_unchanged(patience, trusted=_TRUSTED_SECONDS)
        fs, path = self._file_system()
        # The file systems of a chain may have to read all of a file.
        most = self.size if "::" in self.name else nbytes
        return memoryview(
            self._blocking(lambda: _cat(fs, path, offset, offset + nbytes), patience, most)
        )

    def _blocking(self, call: Callable[[], T], patience: Patience, nbytes: int = 0) -> T:
        """Call a function of fsspec, which may never return."""
        if self._is_free_to_ask():
            return call()
        found = on_thread(call, patience.blocked(nbytes))
        patience.arrived(nbytes)
        return found

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
        except ValueError as error:
            raise ValueError(f"cannot open {self.name}: {error}") from error

    def _info(self, patience: Patience) -> dict[str, Any]:
        """Ask for what is known of the file."""
        fs, path = self._file_system()
        try:
            info: dict[str, Any] = self._blocking(lambda: fs.info(path), patience)
        except FileNotFoundError as error:
            raise _real_reason(error, self.name) from error
        if info.get("type") == "directory":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.name)
        return info

    def _version_of(self, info: Mapping[str, Any]) -> tuple[int, tuple[Any, ...]]:
        """Return the size and the identity of the file."""
        size = info.get("size")
        if type(size) is not int or not 0 <= size < 1 << 63:
            raise UnsupportedError(
                "the server does not tell the size of the file",
                path=self.name,
                hint=f"Download it, or open 'simplecache::{self.name}'",
            )
        said = [(key, version_text(info.get(key))) for key in _VERSION_KEYS]
        return size, (size, *[each for each in said if each[1] is not None])

    def _is_free_to_ask(self) -> bool:
        fs, _ = self._file_system()
        protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        return bool(protocols & _FREE_TO_ASK)

    def _check_unchanged(self, patience: Patience, *, trusted: float) -> None:
        fs, path = self._file_system()
        last = self._last_check()
        if time.monotonic() - last.time < (0 if self._is_free_to_ask() else trusted):
            return
        fs.invalidate_cache(path)
        info = network.retried(self.name, lambda: self._info(patience), patience)
        size, identity = self._version_of(info)
        if identity != self.identity and (size != self.size or self._beginning() is None):
            raise self._changed("its size, time or ETag is another")
        if self._beginning() is None:
            last.time = time.monotonic()

    def _remember_beginning(self) -> None:
        """Make the beginning of the file tell its versions apart, and say so."""
        digest = _digest_of(self._first[:_BEGINNING_NBYTES])
        if len(self._first) < min(self.size, _BEGINNING_NBYTES):
            digest = _digest_of(self._read(0, min(self.size, _BEGINNING_NBYTES)))
        # What is computed of another opening may be of another version.
        opening = uuid.uuid4().hex
        self.identity = (self.size, (_OPENING, opening), (_BEGINNING, digest))
        warnings.warn(
            f"{self.name}: the server tells neither ETag nor time, so changes of the file while it "
            "is open are noticed only in its size and its first 64 KiB",
            CheckpointWarning,
            stacklevel=5,
        )

    def _beginning(self) -> str | None:
        """Return the digest of the beginning, where nothing else tells versions apart."""
        identity: Any = self.identity
        return identity[-1][1] if identity[1:] and identity[-1][0] == _BEGINNING else None

    def _check_beginning(self) -> None:
        wanted = self._beginning()
        if wanted is None:
            return
        last = self._last_check()
        if time.monotonic() - last.time < _TRUSTED_SECONDS:
            return
        if _digest_of(self._read(0, min(self.size, _BEGINNING_NBYTES))) != wanted:
            raise self._changed("it begins with other bytes")
        last.time = time.monotonic()

    def _changed(self, how: str) -> FileChangedError:
        return FileChangedError(
            f"the file changed after it was opened: {how}", path=self.name, hint="Open it again"
        )


def _cat(fs: Any, path: str, start: int, stop: int) -> bytes:
    from fsspec import AbstractFileSystem

    if type(fs).cat_file is AbstractFileSystem.cat_file:
        # This one opens the file, and would read ahead by blocks.
        with fs.open(path, "rb", cache_type="none") as file:
            file.seek(start)
            return bytes(file.read(stop - start))
    return bytes(fs.cat_file(path, start=start, end=stop))


def _digest_of(data: memoryview) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _real_reason(error: FileNotFoundError, url: str) -> OSError:
    """Find why fsspec says that a file is missing: over HTTP it says so of any failure."""
    cause = error.__cause__
    status = getattr(cause, "status", None)
    if status in {401, 403}:
        return PermissionError(errno.EACCES, os.strerror(errno.EACCES), url)
    is_http = any(each in {"http", "https"} for each in re.split(r"://|::", url))
    if (
        cause is None
        or isinstance(cause, FileNotFoundError)
        or status in {404, 410}
        or not (is_http or isinstance(cause, OSError))
    ):
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)
    told = f"the server answered {status}" if status else f"cannot ask for it: {words_of(cause)}"
    return OSError(errno.EIO if network.is_transient(cause) else errno.EINVAL, told, url)


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
