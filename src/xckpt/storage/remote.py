"""Files on other machines: each read is a request, unless its bytes have been prefetched."""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from functools import partial
from hashlib import blake2b
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np

from xckpt.addresses import hiding, real
from xckpt.errors import FileChangedError, UnsupportedError, warn
from xckpt.storage import prefetch
from xckpt.storage.cache import FIRST_NBYTES, reading_header
from xckpt.storage.limits import Pool
from xckpt.storage.requests import (
    OWN_OPTIONS,
    REQUEST_NBYTES,
    Limits,
    loggable,
    logger,
    retried,
    submit,
    wait_for,
)
from xckpt.storage.source import Source, components

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from contextlib import AbstractContextManager

# Time for which the version of a file counts as checked, before another request checks it.
TRUSTED_SECONDS = 10.0
_LONGEST_VERSION = 1024
_NOTHING = memoryview(b"")

# Parts of the identity of a file without a version, whose beginning is read again now and then.
_OPENING, _BEGINNING = "opening", "beginning"

# Times of the last check that files are unchanged, in this process, by name and identity.
_checks: Pool[SimpleNamespace] = Pool(limit=1024)


def is_of_one_opening(identity: Any) -> bool:
    """Return whether an identity, or a part of it, is valid for one opening of a file only."""
    return isinstance(identity, tuple) and (
        identity[:1] == (_OPENING,) or any(map(is_of_one_opening, identity))
    )


class RemoteSource(Source):
    """A file on another machine."""

    __slots__ = ("_first", "limits", "storage_options")

    storage_options: dict[str, Any]  # part of the pickle
    limits: Limits
    _first: memoryview | bytes  # the beginning of the file, until its header is read

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
        data = retried(self.name, partial(self._get, offset, nbytes), self.limits)
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
        options = {**self.storage_options, OWN_OPTIONS: self.limits._asdict()}
        return type(self)(hiding(sibling_url(self.url, components(name))), options)  # type: ignore[call-arg]

    def _last_check(self) -> SimpleNamespace:
        never = partial(SimpleNamespace, time=float("-inf"))
        return _checks.get((self.name, self.identity), never)

    def _remember_beginning(self) -> None:
        """Identify a file without a version by its beginning, and warn about that."""
        self._first = self._first or self._requested(0, min(self.size, FIRST_NBYTES))
        # Another opening may find another version.
        opening = (_OPENING, uuid.uuid4().hex)
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
                read = partial(self._get, 0, min(self.size, FIRST_NBYTES))
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
