"""Files behind URLs, through fsspec: one request for each range, no block cache.

Requests that fail for reasons that pass are made again, after a while; of a body that was cut
short, the rest is requested. What does not get ahead is a `TimeoutError`: see `Patience`.
"""

from __future__ import annotations

import errno
import os
import re
import time
import uuid
from functools import partial
from hashlib import blake2b
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from xckpt.errors import FileChangedError, UnsupportedError, shown, warn
from xckpt.storage import ahead
from xckpt.storage.cache import reading_header
from xckpt.storage.limits import Pool
from xckpt.storage.requests import (
    ATTEMPTS,
    OWN_OPTIONS,
    Limits,
    Patience,
    attempted,
    called_within,
    is_transient,
    lacking,
    own_options,
    retried,
    sharers,
    words_of,
)
from xckpt.storage.source import Source, components, empty

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

T = TypeVar("T")

# Eighteen digits are less than 2**63; Python refuses to parse thousands of them.
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")
_LONGEST_VERSION = 1024

# What file systems say of the version of a file, under the names they have for it.
_VERSION_KEYS = (
    *("ETag", "etag", "VersionId", "version_id", "generation", "md5Hash", "content_md5"),
    *("blob_id", "sha", "LastModified", "Last-Modified", "last_modified", "mtime", "modified"),
    *("updated", "created", "ino", "CRC", "modify", "modificationTime", "last_write_time"),
)
# Where nothing is said of the version, the beginning is looked at now and then.
_OPENING, _BEGINNING = "opening", "beginning"
_BEGINNING_NBYTES = 1 << 16
# They read copies of their own, which nobody changes.
_COPYING = ("simplecache::", "filecache::", "blockcache::", "cached::")

# How long an answer about the version of a file is trusted before it costs another request.
_TRUSTED_SECONDS = 10.0
_FREE_TO_ASK = frozenset({"memory", "file", "local"})
# Of so many bytes one more failure is tolerated.
_NBYTES_PER_FAILURE = 16 << 20


def content_range(text: str | None) -> tuple[int, int, int | None] | None:
    """Return first byte, last byte and size of the file; None where that is not what it says."""
    found = _CONTENT_RANGE.fullmatch(text or "")
    if found is None:
        return None
    return int(found[1]), int(found[2]), None if found[3] == "*" else int(found[3])


def version_text(value: object) -> str | None:
    """Return what a server says of the version of a file; None where it is absurdly long."""
    text = None if value is None else str(value)
    return text if text is not None and len(text) <= _LONGEST_VERSION else None


# When this process last found a file to be the one that was opened, as their only attribute.
_checks: Pool[SimpleNamespace] = Pool(limit=1024)


def is_of_one_opening(identity: Any) -> bool:
    """Return whether a file, or one that it is among, is the same only while it is open."""
    return isinstance(identity, tuple) and (
        identity[:1] == (_OPENING,) or any(map(is_of_one_opening, identity))
    )


class FsspecSource(Source):
    """A file behind any URL of fsspec, also a chained one.

    `storage_options` are for fsspec, but for those under "xckpt", which are `Limits`; they
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
        self.storage_options, self.limits = own_options(storage_options)
        self._first = memoryview(b"")
        self._file_system()  # an unknown protocol or a missing package is not a failed request
        patience = Patience(url, self.limits)

        def look() -> tuple[dict[str, Any], memoryview]:
            found = self._look(first, patience) if first else None
            return found or (self._info(patience), memoryview(b""))

        info, self._first = retried(url, look, patience)
        self.size, self.identity = self._version_of(info)
        if self.identity == (self.size,) and not url.startswith(_COPYING):
            self._remember_beginning()
        self._last_check().time = time.monotonic()

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        names = ("name", "size", "identity", "storage_options", "limits")
        state = {name: getattr(self, name) for name in names}
        return None, {**state, "_first": b""}

    @property
    def far(self) -> Source | None:
        """See `Source.far`."""
        return None if self._is_free_to_ask() else self

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Read a range of bytes, a long one by several requests; see `Source.read`."""
        self._check_range(offset, nbytes)
        memory = self.take(offset, nbytes)
        if memory is None:
            memory = empty(nbytes)
            self._request(offset, memory)
        return memory

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return what is read ahead without a copy, else read it; see `Source.view`."""
        self._check_range(offset, nbytes)
        found = ahead.take(self, offset, nbytes, shared=True)
        return self.read(offset, nbytes) if found is None else found

    def blocks(self, offset: int, nbytes: int, block_nbytes: int = 1 << 20) -> Iterator[memoryview]:
        """Return what is read ahead as it comes, else read it; see `Source.blocks`."""
        self._check_range(offset, nbytes)
        if not ahead.is_read_ahead(self):
            yield from super().blocks(offset, nbytes, block_nbytes)
            return
        for start in range(offset, offset + nbytes, block_nbytes):
            yield self.view(start, min(block_nbytes, offset + nbytes - start))

    def take(self, offset: int, nbytes: int) -> memoryview | None:
        """Return what is read ahead; see `Source.take`."""
        return ahead.take(self, offset, nbytes)

    def read_into(self, offset: int, memory: memoryview) -> None:
        """Read a range of bytes into given memory; see `Source.read_into`."""
        self._check_range(offset, len(memory))
        if ahead.take(self, offset, len(memory), memory) is None:
            self._request(offset, memory)

    def _request(self, offset: int, memory: memoryview) -> None:
        """Read what is not read ahead, by several requests if it is long."""
        if len(memory) < 2 * ahead.REQUEST_NBYTES:
            self.fetch_into(offset, memory)
            return
        with ahead.reading_ahead([(self, offset, len(memory))]):
            if ahead.take(self, offset, len(memory), memory) is None:
                self.fetch_into(offset, memory)

    def fetch_into(
        self, offset: int, memory: memoryview, came: Callable[[int], None] | None = None
    ) -> None:
        """Read a range of bytes, by one request where it succeeds; see `Source.fetch_into`."""
        # What only the beginning tells from another version is not there before it was looked at.
        self._fill(offset, memory, came if self._beginning() is None else None)
        self._check_beginning()  # afterwards, so that it covers this read

    def _fill(
        self, offset: int, memory: memoryview, came: Callable[[int], None] | None = None
    ) -> None:
        nbytes = len(memory)
        self._check_range(offset, nbytes)
        timeout, min_rate = self.limits
        patience = Patience(self.name, Limits(timeout, min_rate / sharers()))
        done = failures = 0

        def arrived(count: int) -> None:
            if came is not None:
                came(done + count)

        while done < nbytes:
            request = partial(self._fetch, offset + done, memory[done:], patience, arrived)
            try:
                count, problem = attempted(self.name, request)
            except FileNotFoundError as error:
                raise self._changed("it is no longer there") from error
            done += count or 0
            if done == nbytes:
                break
            if count is not None:
                patience.left()
                self._check_unchanged(patience, trusted=0)
            failures += 1
            if failures >= ATTEMPTS + nbytes // _NBYTES_PER_FAILURE:
                told = f"asked for {nbytes} bytes at {offset}, got {done}, in {failures} attempts"
                told += "" if problem is None else f"; the last one failed: {problem}"
                raise OSError(errno.EIO, told, self.name) from problem
            patience.pause(failures, problem)

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

    def _last_check(self) -> SimpleNamespace:
        never = partial(SimpleNamespace, time=float("-inf"))
        return _checks.get((self.name, self.identity), never)

    def _look(self, first: int, patience: Patience) -> tuple[dict[str, Any], memoryview] | None:
        """Request the first bytes; None where the answer does not tell size and version."""
        return None

    def _fetch(
        self, offset: int, memory: memoryview, patience: Patience, came: Callable[[int], None]
    ) -> int:
        """Make one request for a range, and return how much it gave; `came` is told meanwhile."""
        self._check_unchanged(patience, trusted=_TRUSTED_SECONDS)
        nbytes = len(memory)
        fs, path = self._file_system()

        def cat() -> bytes:
            from fsspec import AbstractFileSystem

            if type(fs).cat_file is not AbstractFileSystem.cat_file:
                return bytes(fs.cat_file(path, start=offset, end=offset + nbytes))
            # This one opens the file, and would read ahead by blocks.
            with fs.open(path, "rb", cache_type="none") as file:
                file.seek(offset)
                return bytes(file.read(nbytes))

        # The file systems of a chain may have to read all of a file.
        most = self.size if "::" in self.name else nbytes
        data = self._blocking(cat, patience, most)[:nbytes]
        memory[: len(data)] = data
        return len(data)

    def _blocking(self, call: Callable[[], T], patience: Patience, nbytes: int = 0) -> T:
        """Call a function of fsspec, for as long as there is patience."""
        if self._is_free_to_ask():
            return call()
        found = called_within(patience.blocked(nbytes), call)
        patience.arrived(nbytes)
        return found

    @property
    def _options(self) -> dict[str, Any]:
        """What fsspec gets."""
        return self.storage_options

    def _file_system(self) -> tuple[Any, str]:
        try:
            return self._url_to_fs()
        except ImportError as error:
            raise lacking(self.name, error) from error
        except ValueError as error:
            raise ValueError(f"cannot open {self.name}: {error}") from error

    def _url_to_fs(self) -> tuple[Any, str]:
        # fsspec keeps one instance per process and options, and knows about forks.
        from fsspec.core import url_to_fs

        return url_to_fs(self.name, **self._options)  # type: ignore[no-any-return]

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
            raise self._unsupported("does not tell the size of the file")
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
        info = retried(self.name, lambda: self._info(patience), patience)
        size, identity = self._version_of(info)
        if identity != self.identity and (size != self.size or self._beginning() is None):
            raise self._changed("its size, time or ETag is another")
        if self._beginning() is None:
            last.time = time.monotonic()

    def _remember_beginning(self) -> None:
        """Make the beginning of the file tell its versions apart, and say so."""
        digest = self._digest_of_beginning(self._first)
        # What is computed of another opening may be of another version.
        opening = uuid.uuid4().hex
        self.identity = (self.size, (_OPENING, opening), (_BEGINNING, digest))
        warn(
            f"{self.name}: the server tells neither ETag nor time, so changes of the file while it "
            "is open are noticed only in its size and its first 64 KiB",
        )

    def _beginning(self) -> str | None:
        """Return the digest of the beginning, where nothing else tells versions apart."""
        identity: Any = self.identity
        return identity[-1][1] if identity[1:] and identity[-1][0] == _BEGINNING else None

    def _digest_of_beginning(self, known: memoryview | bytes = b"") -> str:
        nbytes = min(self.size, _BEGINNING_NBYTES)
        data = memoryview(known)[:nbytes]
        if len(data) < nbytes:
            data = empty(nbytes)
            self._fill(0, data)
        return blake2b(data, digest_size=16).hexdigest()

    def _check_beginning(self) -> None:
        wanted = self._beginning()
        if wanted is None:
            return
        last = self._last_check()
        if time.monotonic() - last.time < _TRUSTED_SECONDS:
            return
        if self._digest_of_beginning() != wanted:
            raise self._changed("it begins with other bytes")
        last.time = time.monotonic()

    def _check_answer(self, told: Mapping[str, Any]) -> None:
        """Compare what an answer says of the version with what was said before."""
        identity: Any = self.identity
        known = dict(identity[1:])
        for key in ("ETag", "Last-Modified"):
            before, now = known.get(key), version_text(told.get(key))
            if before is None or now is None:
                continue
            # A proxy may turn a strong ETag into a weak one.
            if before.removeprefix("W/") != now.removeprefix("W/"):
                raise self._changed(f"its {key} was {shown(before)} and is {shown(now)}")
            return  # servers behind one address agree on ETags more often than on times

    def _changed(self, how: str) -> FileChangedError:
        return FileChangedError(
            f"the file changed after it was opened: {how}", path=self.name, hint="Open it again"
        )

    def _unsupported(self, what: str) -> UnsupportedError:
        hint = f"Download it, or open 'simplecache::{self.name}'"
        return UnsupportedError(f"the server {what}", path=self.name, hint=hint)


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
    return OSError(errno.EIO if is_transient(cause) else errno.EINVAL, told, url)


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
