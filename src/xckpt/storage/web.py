"""Files of web servers and in S3: each answer tells which version, and which range, it is."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from xckpt.errors import shown
from xckpt.storage.ahead import IN_FLIGHT
from xckpt.storage.limits import Pool
from xckpt.storage.remote import FsspecSource, content_range
from xckpt.storage.requests import (
    BusyError,
    GivenUpError,
    is_transient_status,
    run,
    tell_busy,
    words_of,
)
from xckpt.storage.source import empty

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from aiohttp import ClientResponse

    from xckpt.storage.requests import Patience

_WHOLE, _PARTIAL = 200, 206

# What stores answer to the condition that an object has a certain ETag, or a certain size.
_CHANGED = dict.fromkeys(("PreconditionFailed", "412"), "its ETag is another")
_SHORTER = dict.fromkeys(("InvalidRange", "416"), "it is shorter than it was")
_PIECE_NBYTES = 1 << 20
_BUSY = {429, 503}
_SECONDS = re.compile("[0-9]{1,4}")


class HttpSource(FsspecSource):
    """A file of a web server.

    The session, and with it proxies, certificates and headers, is that of fsspec. The requests
    are made here, because an answer has to be looked at before its body is read: a server that
    ignores the range sends all of a file of any size, and the headers that tell that the file
    changed cost no request of their own.
    """

    __slots__ = ()

    # How much of a file is thrown away where its beginning is sent, too.
    _most_skipped = 0

    def _look(self, first: int, patience: Patience) -> tuple[dict[str, Any], memoryview] | None:
        def told(response: ClientResponse) -> dict[str, Any] | None:
            if is_transient_status(response.status):
                raise self._refused(response)
            headers = response.headers
            size = response.content_length if response.status == _WHOLE else None
            found = content_range(headers.get("Content-Range"))
            if response.status == _PARTIAL and found and found[0] == 0:
                size = found[2]
            if size is None or headers.get("Content-Encoding", "identity") != "identity":
                return None  # what is wrong, if something is, asking without a range tells better
            return {"size": size, **{key: headers.get(key) for key in ("ETag", "Last-Modified")}}

        memory = empty(first)
        found = self._requested(0, memory, patience, told)
        return found and (found[0], memory[: found[1]])

    def _fetch(
        self, offset: int, memory: memoryview, patience: Patience, came: Callable[[int], None]
    ) -> int:
        def checked(response: ClientResponse) -> dict[str, Any]:
            self._check_status(response)
            self._check_answer(response.headers)
            self._check_body(response, offset, len(memory))
            return {"size": self.size, "skip": offset * (response.status == _WHOLE)}

        found: Any = self._requested(offset, memory, patience, checked, came)
        return cast("int", found[1])

    def _requested(
        self,
        offset: int,
        memory: memoryview,
        patience: Patience,
        look: Callable[[ClientResponse], dict[str, Any] | None],
        came: Callable[[int], None] | None = None,
    ) -> tuple[dict[str, Any], int] | None:
        """Request a range, and read its body if what `look` makes of the headers is something."""
        fs, url = self._file_system()
        asked = f"bytes={offset}-{offset + len(memory) - 1}"

        async def request() -> tuple[dict[str, Any], int] | None:
            async with asyncio.timeout(patience.silence()):
                answer = await self._answered(fs, url, {"Range": asked})
            async with answer as response:
                found = look(response)
                if found is None:
                    return None
                wanted = memory[: found["size"] - offset]
                body = _AnswerBody(wanted, patience, came, skip=found.get("skip", 0))
                return found, await body.read(response.content.iter_any(), response)

        return run(fs.loop, request, memory)

    async def _answered(self, fs: Any, url: str, headers: dict[str, str]) -> ClientResponse:
        session = await fs.set_session()
        options = self._asking(fs, headers)
        return cast("ClientResponse", await session.get(fs.encode_url(url), **options))

    def _asking(self, fs: Any, headers: dict[str, str]) -> dict[str, Any]:
        """Return the options of a request."""
        from aiohttp import ClientTimeout

        options = dict(fs.kwargs)
        headers = {**options.get("headers", {}), **headers, "Accept-Encoding": "identity"}
        if "timeout" not in fs.client_kwargs:
            # Ours looks at what arrives; that of aiohttp ends large bodies after five minutes.
            options.setdefault("timeout", ClientTimeout(total=None))
        return {**options, "headers": headers}

    def _refused(self, response: ClientResponse) -> OSError:
        return busy_or_broken(response.status, response.reason or "", response.headers, self.name)

    def _check_status(self, response: ClientResponse) -> None:
        status = response.status
        if status in {404, 410}:
            raise self._changed("it is no longer there")
        if status == 416:
            raise self._changed("it is shorter than it was")
        if status in {401, 403}:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), self.name)
        if status not in {_WHOLE, _PARTIAL}:
            raise self._refused(response)

    def _check_body(self, response: ClientResponse, offset: int, nbytes: int) -> None:
        """Check that the body is, or begins with, the range that was asked for."""
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise self._unsupported("sends the file compressed")
        if response.status == _WHOLE:
            if response.content_length not in {None, self.size}:
                raise self._changed(f"it had {self.size} bytes, now {response.content_length}")
            if offset > self._most_skipped:
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


def busy_or_broken(status: int, reason: str, headers: Mapping[str, str], name: str) -> OSError:
    """Return the error that an answer without bytes is."""
    answer = f"the server answered {status} {shown(reason)}"
    if status in _BUSY:
        busy = BusyError(errno.EIO, answer, name)
        told = headers.get("Retry-After", "")
        busy.seconds = float(told) if _SECONDS.fullmatch(told) else 0
        return busy
    return OSError(errno.EIO if is_transient_status(status) else errno.EINVAL, answer, name)


class _RefusedError(Exception):
    """A signed address was not answered with what was asked for."""


# The signed addresses of objects, and whether they were ever good for something.
_addresses: Pool[SimpleNamespace] = Pool(limit=1024)


class S3Source(HttpSource):
    """An object of a store that speaks the protocol of S3.

    Credentials, endpoints and sessions are those of s3fs. The requests are made here: each says
    which version of the object it is for, so that no other one is ever read, and no request of its
    own has to ask.

    To make and sign a request takes botocore longer than its 8 MiB. So an address is signed once,
    which is good for any range. What is not answered as it should be is asked for through botocore,
    which knows about retries, redirects and errors.
    """

    __slots__ = ()

    @property
    def _options(self) -> dict[str, Any]:
        # By default botocore has ten connections.
        config = {"max_pool_connections": IN_FLIGHT}
        given = self.storage_options.get("config_kwargs")
        return {**self.storage_options, "config_kwargs": {**config, **(given or {})}}

    def _look(self, first: int, patience: Patience) -> tuple[dict[str, Any], memoryview] | None:
        try:
            memory = empty(first)
            answer, count = self._get(0, memory, patience)
        except OSError as error:
            # An object of no byte has no range; of what is missing, asking tells more.
            if not isinstance(error, FileNotFoundError) and _refusal(error)[1] not in _SHORTER:
                raise
            return None
        found = content_range(answer.get("ContentRange"))
        if found is None or found[0] != 0 or found[2] is None:
            return None
        told = {key: answer.get(key) for key in ("ETag", "LastModified", "VersionId")}
        return {"size": found[2], **told}, memory[:count]

    def _fetch(
        self, offset: int, memory: memoryview, patience: Patience, came: Callable[[int], None]
    ) -> int:
        address, (fs, _) = self._address(), self._file_system()
        # Some of what these ask for has to be in headers that are signed.
        if not fs.s3_additional_kwargs and not address.refused:
            try:
                found = super()._fetch(offset, memory, patience, came)
            except _RefusedError as error:
                (status,) = error.args
                address.url = None
                address.refused = not address.good and status in {400, 401, 403}
                if status in _BUSY:
                    tell_busy()
            else:
                address.good = True
                return found
        condition = {name.replace("-", ""): etag for name, etag in self._condition().items()}
        try:
            # Not all that speak the protocol know conditions.
            return self._get(offset, memory, patience, self._check_answer, came, **condition)[1]
        except OSError as error:
            how = (_CHANGED | _SHORTER).get(_refusal(error)[1])
            if how is not None:
                raise self._changed(how) from error
            raise

    def _address(self) -> SimpleNamespace:
        def begin() -> SimpleNamespace:
            return SimpleNamespace(url=None, lock=asyncio.Lock(), good=False, refused=False)

        options = sorted(map(repr, self.storage_options.items()))
        return _addresses.get((self.name, *options), begin)

    async def _answered(self, fs: Any, url: str, headers: dict[str, str]) -> ClientResponse:
        from aiohttp import ClientResponse
        from botocore.awsrequest import AWSPreparedRequest  # type: ignore[import-untyped]
        from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]

        await fs.set_session()
        bucket, key, version = fs.split_path(url)
        client, address = await fs.get_s3(bucket), self._address()
        async with address.lock:
            if address.url is None:
                which = {"Bucket": bucket, "Key": key, **fs.req_kw}
                which |= {} if version is None else {"VersionId": version}
                address.url = await client.generate_presigned_url("get_object", Params=which)
            signed = address.url
        headers |= self._condition()
        request = AWSPreparedRequest("GET", signed, headers, None, stream_output=True)
        try:
            session = client._endpoint.http_session  # noqa: SLF001  has its proxies and certificates
            answer = (await session.send(request)).raw
        except (AttributeError, BotoCoreError):
            raise _RefusedError(0) from None  # the error would have the signature
        if not isinstance(answer, ClientResponse):  # there are other libraries
            raise _RefusedError(400)
        return answer

    def _condition(self) -> dict[str, str]:
        etag = dict(cast("Any", self.identity)[1:]).get("ETag")
        return {"If-Match": etag} if etag else {}

    def _check_status(self, response: ClientResponse) -> None:
        if response.status not in {_WHOLE, _PARTIAL}:
            raise _RefusedError(response.status)

    def _check_body(self, response: ClientResponse, offset: int, nbytes: int) -> None:
        found = content_range(response.headers.get("Content-Range"))
        if found is None or found[0] != offset:
            raise _RefusedError(0)

    def _get(
        self,
        offset: int,
        memory: memoryview,
        patience: Patience,
        look: Callable[[dict[str, Any]], object] = lambda _: None,
        came: Callable[[int], None] | None = None,
        **condition: str,
    ) -> tuple[dict[str, Any], int]:
        """Request a range; `look` may raise at what the answer says before its body is read."""
        fs, path = self._file_system()
        bucket, key, version = fs.split_path(path)
        asked = f"bytes={offset}-{offset + len(memory) - 1}"
        which = {"Bucket": bucket, "Key": key, "Range": asked, **condition}
        which |= {} if version is None else {"VersionId": version}

        async def pieces(body: Any) -> AsyncIterator[bytes]:
            while piece := await body.read(_PIECE_NBYTES):
                yield piece

        async def get() -> tuple[dict[str, Any], int]:
            from botocore.exceptions import BotoCoreError

            async with asyncio.timeout(patience.silence()):
                answer = await fs._call_s3("get_object", **which)  # noqa: SLF001
            async with answer["Body"] as body:
                look(answer)
                return answer, await _AnswerBody(memory, patience, came).read(
                    pieces(body), broken=BotoCoreError
                )

        try:
            return run(fs.loop, get, memory)
        except OSError as error:
            status = _refusal(error)[0]
            if status >= 500:
                # botocore made five attempts, as `config_kwargs` of the storage options say.
                told = f"the store answered {status}: {words_of(error)}"
                raise GivenUpError(errno.EIO, told, self.name) from error
            raise


def _refusal(error: BaseException) -> tuple[int, str]:
    """Return the HTTP status and the code of S3 that s3fs made an error of; 0 for no answer."""
    answer = getattr(error.__cause__, "response", None)
    if not isinstance(answer, dict):
        return 0, ""
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return int(status), str(answer.get("Error", {}).get("Code"))


class _AnswerBody(asyncio.BufferedProtocol):
    """Reads a body, or no more than its beginning, into memory.

    aiohttp would copy what comes twice before it is copied there. So the connection of an answer
    that says how long it is writes to the memory itself, and goes back to aiohttp at the end.
    """

    def __init__(
        self,
        memory: memoryview,
        patience: Patience,
        came: Callable[[int], None] | None,
        *,
        skip: int = 0,
    ) -> None:
        self._memory, self._patience, self._came, self._skip = memory, patience, came, skip
        self._done = 0

    async def read(
        self,
        pieces: AsyncIterator[bytes],
        response: ClientResponse | None = None,
        broken: type[Exception] = ConnectionError,
    ) -> int:
        """Return how much came; what came before a connection broke is not asked for again."""
        from aiohttp import ClientError

        with contextlib.suppress(ClientError, ConnectionError, TimeoutError, broken):
            async with asyncio.timeout(self._patience.silence()) as self._limit:
                if response is not None and self._is_told(response):
                    await self._receive(response)
                else:
                    async for piece in pieces:
                        if not self._add(piece):
                            break  # the rest of the file: the connection is dropped with it
        return self._done

    def _is_told(self, response: ClientResponse) -> bool:
        """Return whether the bytes that come are the body, and none of them is too many."""
        nbytes = response.content_length
        is_fitting = nbytes is not None and 0 < nbytes <= len(self._memory)
        return is_fitting and not self._skip and "Transfer-Encoding" not in response.headers

    def _add(self, piece: bytes) -> bool:
        """Copy a piece; return whether there is room for more."""
        new = memoryview(piece)[self._skip :]
        self._skip = max(0, self._skip - len(piece))
        count = min(len(new), len(self._memory) - self._done)
        self._memory[self._done : self._done + count] = new[:count]
        self._arrived(count)
        return count == len(new)

    def _arrived(self, nbytes: int) -> None:
        self._done += nbytes
        if self._came is not None:
            self._came(self._done)
        self._patience.arrived(nbytes)
        wait = self._patience.silence()
        due = asyncio.get_running_loop().time() + wait
        # Pieces are small, and there are thousands of them in a second.
        if abs(due - (self._limit.when() or 0)) > wait / 16:
            self._limit.reschedule(due)

    async def _receive(self, response: ClientResponse) -> None:
        self._memory = self._memory[: response.content_length]
        while piece := response.content.read_nowait():  # what came with the headers
            self._add(piece)
        connection = response.connection
        protocol = None if connection is None else connection.protocol
        is_all = self._done == len(self._memory)
        if is_all or protocol is None or protocol.transport is None:
            # That was all of it, or the connection broke, which reading on tells.
            async for piece in response.content.iter_any():
                self._add(piece)
            return
        self._content, self._handler = response.content, protocol
        self._transport = protocol.transport
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.set_protocol(self)
        try:
            await self._ended
        finally:
            self._give_back()

    def _give_back(self) -> None:
        if self._transport.get_protocol() is self:
            self._transport.set_protocol(self._handler)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes belong."""
        return self._memory[self._done :]

    def buffer_updated(self, nbytes: int) -> None:
        """Count bytes; after the last one the connection is there for the next request."""
        if self._ended.done():  # the time is over, and the connection is about to be closed
            return
        error = None
        try:
            self._arrived(nbytes)
        except OSError as raised:  # too few have come
            error = raised
        if self._done == len(self._memory):
            self._give_back()
            self._content.feed_eof()
        elif error is None:
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell aiohttp, too, that the connection is closed."""
        self._give_back()
        self._handler.connection_lost(exc)
        if not self._ended.done():
            self._ended.set_result(None)
