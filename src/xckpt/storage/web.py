"""Files of web servers and in S3: each answer tells which version, and which range, it is."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from typing import TYPE_CHECKING, Any, cast

from xckpt.errors import UnsupportedError, shown
from xckpt.storage.local import empty
from xckpt.storage.network import (
    GivenUpError,
    content_range,
    is_transient_status,
    version_text,
    words_of,
)
from xckpt.storage.remote import FsspecSource

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from aiohttp import ClientResponse

    from xckpt.storage.network import Patience

__all__ = ["HttpSource", "S3Source"]

_VERSION = ("ETag", "Last-Modified")
_GONE = {404, 410}
_DENIED = {401, 403}
_OUT_OF_RANGE = 416
_WHOLE = 200
_PARTIAL = 206

# What stores answer to the condition that an object has a certain ETag, or a certain size.
_CHANGED = {"PreconditionFailed": "its ETag is another", "412": "its ETag is another"}
_SHORTER = {"InvalidRange": "it is shorter than it was", "416": "it is shorter than it was"}
_PIECE_NBYTES = 1 << 20
_SERVER_ERROR = 500


class HttpSource(FsspecSource):
    """A file of a web server.

    The session, and with it proxies, certificates and headers, is that of fsspec. The requests
    are made here, because an answer has to be looked at before its body is read: a server that
    ignores the range sends all of a file of any size, and the headers that tell that the file
    changed cost no request of their own.
    """

    __slots__ = ()

    def _look(self, first: int, patience: Patience) -> tuple[dict[str, Any], memoryview]:
        if not first:
            return super()._look(first, patience)
        found: Any = self._requested(0, first, patience, self._first_answer)
        # What is wrong, if something is, asking without a range tells better.
        return super()._look(0, patience) if found is None else found

    def _first_answer(self, response: ClientResponse) -> dict[str, Any] | None:
        if is_transient_status(response.status):
            raise self._refused(response)
        size = _size_told(response)
        if size is None or response.headers.get("Content-Encoding", "identity") != "identity":
            return None
        return {"size": size, **{key: response.headers.get(key) for key in _VERSION}}

    def _fetch(self, offset: int, nbytes: int, patience: Patience) -> memoryview:
        def checked(response: ClientResponse) -> dict[str, Any]:
            self._check_status(response)
            self._check_version(response)
            self._check_answer(response, offset, nbytes)
            return {"size": offset + nbytes}

        found: Any = self._requested(offset, nbytes, patience, checked)
        return cast("memoryview", found[1])

    def _requested(
        self,
        offset: int,
        nbytes: int,
        patience: Patience,
        look: Callable[[ClientResponse], dict[str, Any] | None],
    ) -> tuple[dict[str, Any], memoryview] | None:
        """Request a range, and read its body if what `look` makes of the headers is something."""
        from fsspec.asyn import sync

        fs, url = self._file_system()
        how = {"patience": patience, "look": look}
        return sync(fs.loop, self._request, fs, url, offset, nbytes, **how)  # type: ignore[no-any-return]

    async def _request(
        self, fs: Any, url: str, offset: int, nbytes: int, *, patience: Patience, look: Any
    ) -> tuple[dict[str, Any], memoryview] | None:
        from aiohttp import ClientTimeout

        session = await fs.set_session()
        options = dict(fs.kwargs)
        options["headers"] = {
            **options.get("headers", {}),
            "Range": f"bytes={offset}-{offset + nbytes - 1}",
            "Accept-Encoding": "identity",
        }
        if "timeout" not in fs.client_kwargs:
            # Ours looks at what arrives; that of aiohttp ends large bodies after five minutes.
            options.setdefault("timeout", ClientTimeout(total=None))
        async with asyncio.timeout(patience.silence()):
            answer = await session.get(fs.encode_url(url), **options)
        async with answer as response:
            found = look(response)
            if found is None:
                return None
            wanted = min(nbytes, found["size"] - offset)
            return found, await _body(response.content.iter_any(), wanted, patience)

    def _refused(self, response: ClientResponse) -> OSError:
        passes = is_transient_status(response.status)
        answer = f"the server answered {response.status} {shown(response.reason or '')}"
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
        identity: Any = self.identity  # what the server said when the file was opened
        known = dict(identity[1:])
        for key in _VERSION:
            before, now = known.get(key), version_text(response.headers.get(key))
            if before is None or now is None:
                continue
            # A proxy may turn a strong ETag into a weak one.
            if before.removeprefix("W/") != now.removeprefix("W/"):
                raise self._changed(f"its {key} was {shown(before)} and is {shown(now)}")
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
        found = content_range(response.headers.get("Content-Range"))
        if found is None:
            if response.content_length != nbytes:
                raise OSError(errno.EIO, "an answer does not tell which bytes it has", self.name)
            return
        first, last, size = found
        if size not in {None, self.size}:
            raise self._changed(f"it had {self.size} bytes and has {size} now")
        if first != offset:
            told = f"asked for bytes from {offset}, got {first}-{last}"
            raise OSError(errno.EIO, told, self.name)

    def _unsupported(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"the server {what}",
            path=self.name,
            hint=f"Download it, or open 'simplecache::{self.name}'",
        )


async def _body(
    pieces: AsyncIterator[bytes], nbytes: int, patience: Patience, *others: type[Exception]
) -> memoryview:
    """Read a body, or no more than its beginning; shorter where the body is."""
    from aiohttp import ClientError

    memory = empty(nbytes)
    done = 0
    # What came before a connection broke is not requested again.
    with contextlib.suppress(ClientError, ConnectionError, TimeoutError, *others):
        async with asyncio.timeout(patience.silence()) as limit:
            async for piece in pieces:
                count = min(len(piece), nbytes - done)
                memory[done : done + count] = piece[:count]
                done += count
                if count < len(piece):
                    break  # the rest of the file: the connection is dropped with it
                patience.arrived(count)
                limit.reschedule(asyncio.get_running_loop().time() + patience.silence())
    return memory[:done]


def _size_told(response: ClientResponse) -> int | None:
    """Find the size of the file in the answer to a request for its first bytes."""
    if response.status == _WHOLE:
        return response.content_length
    found = content_range(response.headers.get("Content-Range"))
    return found[2] if response.status == _PARTIAL and found and found[0] == 0 else None


class S3Source(FsspecSource):
    """An object of a store that speaks the protocol of S3.

    Credentials, endpoints and sessions are those of s3fs. The requests are made here: each says
    which version of the object it is for, so that no other one is ever read, and no request of its
    own has to ask.
    """

    __slots__ = ()

    def _look(self, first: int, patience: Patience) -> tuple[dict[str, Any], memoryview]:
        if not first:
            return super()._look(first, patience)
        try:
            answer, data = self._get(0, first, {}, patience)
        except OSError as error:
            # An object of no byte has no range; of what is missing, asking tells more.
            if not isinstance(error, FileNotFoundError) and _code(error) not in _SHORTER:
                raise
            return super()._look(0, patience)
        found = content_range(answer.get("ContentRange"))
        if found is None or found[0] != 0 or found[2] is None:
            return super()._look(0, patience)
        told = ("ETag", "LastModified", "VersionId")
        info = {key: answer[key] for key in told if answer.get(key) is not None}
        return {"size": found[2], **info}, data

    def _fetch(self, offset: int, nbytes: int, patience: Patience) -> memoryview:
        identity: Any = self.identity
        said = dict(identity[1:])
        condition = {"IfMatch": said["ETag"]} if said.get("ETag") else {}
        try:
            answer, data = self._get(offset, nbytes, condition, patience)
        except OSError as error:
            how = (_CHANGED | _SHORTER).get(_code(error))
            if how is not None:
                raise self._changed(how) from error
            raise
        # Not all that speak the protocol know conditions.
        now = version_text(answer.get("ETag"))
        if condition and now not in {None, said["ETag"]}:
            raise self._changed(f"its ETag was {shown(said['ETag'])} and is {shown(str(now))}")
        return data

    def _get(
        self, offset: int, nbytes: int, condition: Mapping[str, str], patience: Patience
    ) -> tuple[dict[str, Any], memoryview]:
        from fsspec.asyn import sync

        fs, path = self._file_system()
        try:
            found: tuple[dict[str, Any], memoryview] = sync(
                fs.loop,
                _get_object,
                fs,
                path,
                offset,
                nbytes,
                condition=condition,
                patience=patience,
            )
        except OSError as error:
            if _status(error) >= _SERVER_ERROR:
                # botocore made five attempts, as `config_kwargs` of the storage options say.
                told = f"the store answered {_status(error)}: {words_of(error)}"
                raise GivenUpError(errno.EIO, told, self.name) from error
            raise
        return found


async def _get_object(
    fs: Any,
    path: str,
    offset: int,
    nbytes: int,
    *,
    condition: Mapping[str, str],
    patience: Patience,
) -> tuple[dict[str, Any], memoryview]:
    from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]

    bucket, key, version = fs.split_path(path)
    if version is not None:
        condition = {**condition, "VersionId": version}
    span = f"bytes={offset}-{offset + nbytes - 1}"
    async with asyncio.timeout(patience.silence()):
        answer = await fs._call_s3("get_object", Bucket=bucket, Key=key, Range=span, **condition)  # noqa: SLF001
    async with answer["Body"] as body:
        return answer, await _body(_pieces(body), nbytes, patience, BotoCoreError)


async def _pieces(body: Any) -> AsyncIterator[bytes]:
    while piece := await body.read(_PIECE_NBYTES):
        yield piece


def _status(error: BaseException) -> int:
    """Return the HTTP status that s3fs made an error of; 0 where there was no answer."""
    answer = getattr(error.__cause__, "response", None)
    said = answer.get("ResponseMetadata", {}) if isinstance(answer, dict) else {}
    return int(said.get("HTTPStatusCode", 0))


def _code(error: BaseException) -> str:
    """Return the code of S3 that s3fs made an error of."""
    answer = getattr(error.__cause__, "response", None)
    return str(answer["Error"].get("Code")) if isinstance(answer, dict) else ""
