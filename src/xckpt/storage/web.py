"""Files of web servers: each answer tells which version of the file, and which range, it is."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from typing import TYPE_CHECKING, Any, cast

from xckpt.errors import UnsupportedError
from xckpt.storage import retrying
from xckpt.storage.local import empty
from xckpt.storage.remote import FsspecSource

if TYPE_CHECKING:
    from aiohttp import ClientResponse

__all__ = ["HttpSource"]

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_GONE = {404, 410}
_DENIED = {401, 403}
_OUT_OF_RANGE = 416
_WHOLE = 200
_PARTIAL = 206


class HttpSource(FsspecSource):
    """A file of a web server.

    The session, and with it proxies, certificates and headers, is that of fsspec. The requests
    are made here, because an answer has to be looked at before its body is read: a server that
    ignores the range sends all of a file of any size, and the headers that tell that the file
    changed cost no request of their own.
    """

    __slots__ = ()

    def _look(self, first: int) -> tuple[dict[str, Any], memoryview]:
        if not first:
            return super()._look(first)
        from fsspec.asyn import sync

        fs, url = self._file_system()
        found = sync(fs.loop, self._request_first, fs, url, first)
        # What is wrong, if something is, asking without a range tells better.
        return super()._look(0) if found is None else found

    async def _request_first(
        self, fs: Any, url: str, nbytes: int
    ) -> tuple[dict[str, Any], memoryview] | None:
        async with await self._get(fs, url, 0, nbytes) as response:
            if retrying.is_transient_status(response.status):
                raise self._refused(response)
            size = _size_told(response)
            if size is None or response.headers.get("Content-Encoding", "identity") != "identity":
                return None
            said = {key: response.headers.get(key) for key in ("ETag", "Last-Modified")}
            return {"size": size, **said}, await _body(response, min(nbytes, size))

    def _fetch(self, offset: int, nbytes: int) -> memoryview:
        from aiohttp import ClientError
        from fsspec.asyn import sync

        fs, url = self._file_system()
        try:
            data: memoryview = sync(fs.loop, self._request, fs, url, offset, nbytes)
        except ClientError as error:
            raise OSError(errno.EIO, f"the request failed: {error}", self.name) from error
        return data

    async def _request(self, fs: Any, url: str, offset: int, nbytes: int) -> memoryview:
        async with await self._get(fs, url, offset, nbytes) as response:
            self._check_status(response)
            self._check_version(response)
            self._check_answer(response, offset, nbytes)
            return await _body(response, nbytes)

    async def _get(self, fs: Any, url: str, offset: int, nbytes: int) -> Any:
        session = await fs.set_session()
        options = dict(fs.kwargs)
        options["headers"] = {
            **options.get("headers", {}),
            "Range": f"bytes={offset}-{offset + nbytes - 1}",
            "Accept-Encoding": "identity",
        }
        return session.get(fs.encode_url(url), **options)

    def _refused(self, response: ClientResponse) -> OSError:
        passes = retrying.is_transient_status(response.status)
        answer = f"the server answered {response.status} {response.reason}"
        return OSError(errno.EIO if passes else errno.EINVAL, answer, self.name)

    def _check_status(self, response: ClientResponse) -> None:
        status = response.status
        if status in _GONE:
            raise self._changed("it is no longer there")
        if status == _OUT_OF_RANGE:
            raise self._changed("it is shorter than it was")
        if status in _DENIED:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), self.name)
        if status not in {_WHOLE, _PARTIAL}:
            raise self._refused(response)

    def _check_version(self, response: ClientResponse) -> None:
        known = dict(self._said())
        for key in ("ETag", "Last-Modified"):
            before, now = known.get(key), response.headers.get(key)
            if before is None or now is None:
                continue
            # A proxy may turn a strong ETag into a weak one.
            if before.removeprefix("W/") != now.removeprefix("W/"):
                raise self._changed(f"its {key} was {before} and is {now}")
            return  # servers behind one address agree on ETags more often than on times

    def _check_answer(self, response: ClientResponse, offset: int, nbytes: int) -> None:
        """Check that the body is, or begins with, the range that was asked for."""
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise self._unsupported("sends the file compressed")
        if response.status == _WHOLE:
            if response.content_length not in {None, self.size}:
                raise self._changed(f"it had {self.size} bytes, now {response.content_length}")
            if offset != 0:
                raise self._unsupported("ignores the range of a request and sends the whole file")
            return
        found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if found is None:
            if response.content_length != nbytes:
                raise OSError(errno.EIO, "an answer does not tell which bytes it has", self.name)
            return
        if found[3] not in {"*", str(self.size)}:
            raise self._changed(f"it had {self.size} bytes and has {found[3]} now")
        if int(found[1]) != offset:
            raise OSError(errno.EIO, f"asked for bytes from {offset}, got {found[0]}", self.name)

    def _said(self) -> tuple[tuple[str, str], ...]:
        """Return what the server said of the version of the file when it was opened."""
        return cast("tuple[Any, ...]", self.identity)[1:]

    def _unsupported(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"the server {what}",
            path=self.name,
            hint=f"Download it, or open 'simplecache::{self.name}'",
        )


async def _body(response: ClientResponse, nbytes: int) -> memoryview:
    """Read the body, or no more than its beginning; shorter where the body is."""
    from aiohttp import ClientError

    memory = empty(nbytes)
    done = 0
    # What came before a connection broke is not requested again.
    with contextlib.suppress(ClientError, ConnectionError, TimeoutError):
        async for piece in response.content.iter_any():
            count = min(len(piece), nbytes - done)
            memory[done : done + count] = piece[:count]
            done += count
            if count < len(piece):
                break  # the rest of the file: the connection is dropped with it
    return memory[:done]


def _size_told(response: ClientResponse) -> int | None:
    """Find the size of the file in the answer to a request for its first bytes."""
    if response.status == _WHOLE:
        return response.content_length
    if response.status != _PARTIAL:
        return None
    found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if found is None or found[3] == "*" or int(found[1]) != 0:
        return None
    return int(found[3])
