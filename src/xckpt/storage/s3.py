"""Files in S3: each answer tells which version of the object, and which range, it is."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from typing import TYPE_CHECKING, Any

from xckpt.errors import shown
from xckpt.storage.local import empty
from xckpt.storage.network import GivenUpError, content_range, version_text, words_of
from xckpt.storage.remote import FsspecSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.storage.network import Patience

__all__ = ["S3Source"]

_CHANGED = {"PreconditionFailed": "its ETag is another", "412": "its ETag is another"}
_SHORTER = {"InvalidRange": "it is shorter than it was", "416": "it is shorter than it was"}
_PIECE_NBYTES = 1 << 20
_SERVER_ERROR = 500


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
                fs.loop, _request, fs, path, offset, nbytes, condition=condition, patience=patience
            )
        except OSError as error:
            if _status(error) >= _SERVER_ERROR:
                # botocore made five attempts, as `config_kwargs` of the storage options say.
                told = f"the store answered {_status(error)}: {words_of(error)}"
                raise GivenUpError(errno.EIO, told, self.name) from error
            raise
        return found


async def _request(
    fs: Any,
    path: str,
    offset: int,
    nbytes: int,
    *,
    condition: Mapping[str, str],
    patience: Patience,
) -> tuple[dict[str, Any], memoryview]:
    from aiohttp import ClientError
    from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]

    bucket, key, version = fs.split_path(path)
    if version is not None:
        condition = {**condition, "VersionId": version}
    span = f"bytes={offset}-{offset + nbytes - 1}"
    async with asyncio.timeout(patience.silence()):
        answer = await fs._call_s3("get_object", Bucket=bucket, Key=key, Range=span, **condition)  # noqa: SLF001
    memory = empty(nbytes)
    done = 0
    # What came before a connection broke is not requested again.
    with contextlib.suppress(ClientError, BotoCoreError, ConnectionError, TimeoutError):
        async with asyncio.timeout(patience.silence()) as limit, answer["Body"] as body:
            while done < nbytes and (piece := await body.read(_PIECE_NBYTES)):
                count = min(len(piece), nbytes - done)
                memory[done : done + count] = piece[:count]
                done += count
                patience.arrived(count)
                limit.reschedule(asyncio.get_running_loop().time() + patience.silence())
    return answer, memory[:done]


def _status(error: BaseException) -> int:
    """Return the HTTP status that s3fs made an error of; 0 where there was no answer."""
    answer = getattr(error.__cause__, "response", None)
    said = answer.get("ResponseMetadata", {}) if isinstance(answer, dict) else {}
    return int(said.get("HTTPStatusCode", 0))


def _code(error: BaseException) -> str:
    """Return the code of S3 that s3fs made an error of."""
    answer = getattr(error.__cause__, "response", None)
    return str(answer["Error"].get("Code")) if isinstance(answer, dict) else ""
