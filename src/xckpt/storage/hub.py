"""Files on the Hugging Face Hub: ``hf://organisation/model@revision/file``.

A revision is looked up once, and everything is read of the commit that it is, which the names of
sources have. Sizes and digests of files come with the listing of their folder, so that no request
is made for a file before its header is wanted. A request for a large file is answered with the
signed address of a copy in a network of caches: this is used until it is refused, and then asked
for again. The token goes to the Hub, and to no other host.

`huggingface_hub` knows the endpoint and the token, and has the session for questions about
repositories; requests for bytes are those of `HttpSource`.
"""

from __future__ import annotations

import asyncio
import errno
import re
import time
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote

from xckpt.errors import shown
from xckpt.storage.cache import reading_header
from xckpt.storage.limits import Pool
from xckpt.storage.requests import (
    OWN_OPTIONS,
    BusyError,
    Patience,
    called_within,
    is_transient_status,
    lacking,
    own_options,
    retried,
)
from xckpt.storage.source import components
from xckpt.storage.web import HttpSource, busy_or_broken

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from aiohttp import ClientResponse
    from yarl import URL

    from xckpt.storage.source import Source

_URL = re.compile(
    r"hf://(?:(?P<kind>model|dataset|space)s/)?(?P<repo>[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(?P<path>.*))?",
    re.DOTALL,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Seconds until requests are allowed again: "resolvers";r=0;t=55
_RESET = re.compile(r";\s*t\s*=\s*([0-9]{1,4})")

#: What is read of the beginning of a file: the headers of most shards are shorter.
_FIRST_NBYTES = 1 << 17
# How long a branch is taken to be the commit that it was.
_TRUSTED_SECONDS = 10.0
_MOST_FILES = 1_000_000
_MOST_REDIRECTS = 5
_REDIRECTS = {301, 302, 303, 307, 308}
_DEFAULT_REVISION = "main"
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
# Of the storage options, what is not for the session.
_HUB_OPTIONS = {"endpoint", "token"}


class HubPath(NamedTuple):
    """Where something is on the Hub."""

    kind: str  # "model", "dataset" or "space"
    repo: str
    revision: str
    path: str  # in the repository; empty for all of it

    @property
    def url(self) -> str:
        """The URL; the revision of one that was resolved is a commit."""
        path = f"/{self.path}" if self.path else ""
        return f"hf://{self.page}@{quote(self.revision, safe='')}{path}"

    @property
    def page(self) -> str:
        """The path of the repository in a browser."""
        return self.repo if self.kind == "model" else f"{self.kind}s/{self.repo}"

    @property
    def parent(self) -> HubPath:
        """The folder that it is in."""
        return self._replace(path=self.path.rpartition("/")[0])

    @classmethod
    def parse(cls, url: str) -> HubPath:
        """Split a URL."""
        found = _URL.fullmatch(url.rstrip("/"))
        if found is None:
            told = "a repository is hf://organisation/name, with @revision and /file after it"
            raise ValueError(f"{url} is not a place on the Hub: {told}")
        revision = unquote(found["revision"] or _DEFAULT_REVISION)
        return cls(found["kind"] or "model", found["repo"], revision, found["path"] or "")


def pinned(url: str, storage_options: Mapping[str, Any] | None = None) -> str:
    """Return a URL with the commit that its revision is now."""
    return _Hub(url, storage_options).resolved(HubPath.parse(url)).url


def list_hub_folder(
    url: str, storage_options: Mapping[str, Any] | None = None
) -> tuple[str, dict[str, Path | Source]] | None:
    """Return the URL of a folder, or repository, and its files by name; None for a file."""
    hub = _Hub(url, storage_options)
    place = hub.resolved(HubPath.parse(url))
    name = place.path.rpartition("/")[2]
    if place.path and hub.entries(place.parent).get(name, ()) is not None:
        return None  # a file, or nothing
    files: dict[str, Path | Source] = {
        name: HubSource(f"{place.url}/{name}", storage_options)
        for name, entry in hub.entries(place).items()
        if entry is not None
    }
    return place.url, files


# Commits by repository and revision, with the time when they were looked up; folders by commit.
_commits: Pool[SimpleNamespace] = Pool(limit=1024)
_folders: Pool[dict[str, tuple[int, str] | None]] = Pool(limit=256)
# Where the bytes of a file are, by its address at the Hub.
_copies: Pool[SimpleNamespace] = Pool(limit=4096)


class _Hub:
    """The Hub as its users may see it: asks what is where."""

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None) -> None:
        self._url = url
        options, self._limits = own_options(storage_options)
        self._token = options.get("token")
        try:
            import huggingface_hub
        except ImportError as error:
            raise lacking(url, error) from error
        self._api = huggingface_hub.HfApi(
            endpoint=options.get("endpoint"), token=self._token, library_name="xckpt"
        )

    @property
    def endpoint(self) -> str:
        """The address of the Hub."""
        return str(self._api.endpoint)

    def address(self, file: HubPath) -> str:
        """Return where a file is to be asked for."""
        commit, path = quote(file.revision, safe=""), quote(file.path)
        return f"{self.endpoint}/{file.page}/resolve/{commit}/{path}"

    def headers(self) -> dict[str, str]:
        """Return what goes to the Hub with each request; the token is that of now."""
        from huggingface_hub.utils import build_hf_headers

        return dict(build_hf_headers(token=self._token, library_name="xckpt"))

    def resolved(self, place: HubPath) -> HubPath:
        """Replace the revision by its commit."""
        if _COMMIT.fullmatch(place.revision):
            return place
        key = (self.endpoint, place.kind, place.repo, place.revision)

        def look() -> SimpleNamespace:
            revision = quote(place.revision, safe="")
            info = next(self._asked(place, f"revision/{revision}"))
            commit = info.get("sha") if isinstance(info, dict) else None
            if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
                raise self._broken(f"does not tell the commit of revision {shown(place.revision)}")
            return SimpleNamespace(commit=commit, time=time.monotonic())

        found = _commits.get(key, look)
        if time.monotonic() - found.time >= _TRUSTED_SECONDS:
            _commits.discard(key)
            found = _commits.get(key, look)
        return place._replace(revision=found.commit)

    def entries(self, folder: HubPath) -> dict[str, tuple[int, str] | None]:
        """Return size and digest of each file in a folder of a commit; None is a folder."""

        def look() -> dict[str, tuple[int, str] | None]:
            path = f"/{quote(folder.path, safe='')}" if folder.path else ""
            found: dict[str, tuple[int, str] | None] = {}
            for page in self._asked(folder, f"tree/{folder.revision}{path}"):
                for each in page if isinstance(page, list) else [page]:
                    try:
                        found[each["path"].rpartition("/")[2]] = _entry(each)
                    except (AttributeError, KeyError, TypeError, ValueError) as error:
                        raise self._broken(f"lists what is no file: {shown(str(each))}") from error
                if len(found) > _MOST_FILES:
                    raise self._broken(f"lists more than {_MOST_FILES} files in one folder")
            return found

        return _folders.get((self.endpoint, folder), look)

    def entry(self, place: HubPath) -> tuple[int, str]:
        """Return the size and the digest of a file."""
        name = place.path.rpartition("/")[2]
        entries = self.entries(place.parent)
        entry = entries.get(name, ())
        if entry is None:
            raise IsADirectoryError(errno.EISDIR, "it is a folder", self._url)
        if len(entry) == 2:
            return entry
        told = f"{place.repo} has no file {shown(place.path)} at {shown(place.revision)}"
        alike = get_close_matches(name, entries, n=1)
        told += f"; did you mean {shown(alike[0])}?" if alike else ""
        raise FileNotFoundError(errno.ENOENT, told, self._url)

    def refusal(self, place: HubPath, status: int, headers: Mapping[str, str]) -> OSError:
        """Return what an answer of the Hub means, and what to do about it."""
        told, url = headers.get("X-Error-Message", ""), self._url
        repo, page = f"the repository {place.repo}", f"{self.endpoint}/{place.page}"
        has_token = "authorization" in self.headers()
        if is_transient_status(status):
            error = busy_or_broken(status, told, headers, url)
            limit = _RESET.search(headers.get("RateLimit", ""))
            if isinstance(error, BusyError) and limit is not None:
                error.seconds = error.seconds or float(limit[1])
            if status == 429 and not has_token:
                error.strerror = f"{error.strerror} (with a token it allows more: {_LOG_IN})"
            return error
        who = (
            "your token may not be allowed to read it"
            if has_token
            else f"if it is private, {_LOG_IN}"
        )
        match headers.get("X-Error-Code"), status:
            case "GatedRepo", _:
                log_in = "use the token of an account that was let in" if has_token else _LOG_IN
                text = f"{repo} is gated: ask for access at {page}, and {log_in}"
                return PermissionError(errno.EACCES, text, url)
            case "RevisionNotFound", _:
                text = f"{repo} has no revision {shown(place.revision)}: see {page}/branches"
                return FileNotFoundError(errno.ENOENT, text, url)
            case "EntryNotFound", _:
                text = f"{place.repo} has no {shown(place.path)} at {shown(place.revision)}"
                return FileNotFoundError(errno.ENOENT, text, url)
            case _, 401 if has_token and "Invalid" in told:
                return PermissionError(errno.EACCES, f"the token is not valid: {_LOG_IN}", url)
            case ("RepoNotFound", _) | (_, 401 | 404):
                text = f"{repo} cannot be found: check its name; {who}"
                return FileNotFoundError(errno.ENOENT, text, url)
            case _, 403:
                text = f"{repo} must not be read: {shown(told)}. Check what your token may read"
                return PermissionError(errno.EACCES, text, url)
        return OSError(errno.EINVAL, f"the Hub answered {status} {shown(told)}", url)

    def _asked(self, place: HubPath, what: str) -> Iterator[Any]:
        """Ask the API of the Hub, and return the pages of its answer."""
        from huggingface_hub.errors import OfflineModeIsEnabled
        from huggingface_hub.utils import get_session

        following = f"/api/{place.kind}s/{place.repo}/{what}"

        def request() -> Any:
            seconds, headers = patience.silence(), self.headers()
            get = partial(get_session().get, headers=headers, timeout=seconds)
            try:
                answer = called_within(seconds, lambda: get(self.endpoint + following))
            except OfflineModeIsEnabled as error:
                told = "HF_HUB_OFFLINE is set: unset it, or open the folder that was downloaded"
                raise OSError(errno.EINVAL, told, self._url) from error
            if answer.status_code != 200:
                raise self.refusal(place, answer.status_code, answer.headers)
            return answer

        while following:
            patience = Patience(self._url, self._limits)
            answer = retried(self._url, request, patience)
            try:
                yield answer.json()
            except ValueError as error:
                raise self._broken("does not answer in JSON") from error
            # Whatever host it names: the token goes to this one.
            _, mark, rest = answer.links.get("next", {}).get("url", "").partition("/api/")
            following = mark + rest

    def _broken(self, what: str) -> OSError:
        return OSError(errno.EINVAL, f"the Hub {what}", self._url)


def _entry(listed: Mapping[str, Any]) -> tuple[int, str] | None:
    """Return the size and the digest of a file, which is that of its content; None for a folder."""
    if listed["type"] != "file":
        return None
    size, digest = listed["size"], (listed.get("lfs") or listed)["oid"]
    if type(size) is not int or not 0 <= size < 1 << 63 or type(digest) is not str:
        raise ValueError("no size, or no digest")
    return size, digest


class HubSource(HttpSource):
    """A file of a commit on the Hub; `storage_options` may have "token" and "endpoint"."""

    __slots__ = ()

    # Files in git itself have 10 MiB at most; whether ranges of them are sent is not promised.
    _most_skipped = 10 << 20

    def __init__(
        self, url: str, storage_options: Mapping[str, Any] | None = None, *, first: int = 0
    ) -> None:
        self.name = url
        self.storage_options, self.limits = own_options(storage_options)
        self._file_system()  # a missing package is not a failed request
        hub = _Hub(url, self.storage_options)
        place = hub.resolved(HubPath.parse(url))
        self.name = place.url
        self.size, digest = hub.entry(place)
        self.identity = (self.size, ("sha", digest))
        self._first = memoryview(b"")

    def reading_header(self) -> AbstractContextManager[Source]:
        """Read ahead, and remember; see `Source.reading_header`."""
        options = {key: v for key, v in self.storage_options.items() if key != "token"}
        return reading_header(self, memoryview(b""), options, ahead=_FIRST_NBYTES)

    def sibling(self, name: str) -> Source:
        """Open another file next to this one, of the same commit; see `Source.sibling`."""
        options = {**self.storage_options, OWN_OPTIONS: self.limits._asdict()}
        folder = HubPath.parse(self.name).parent.url
        return type(self)("/".join([folder, *components(name)]), options)

    def _check_unchanged(self, patience: Patience, *, trusted: float) -> None:
        """Do nothing: a commit does not change, and each answer has the size of its file."""

    def _url_to_fs(self) -> tuple[Any, str]:
        from fsspec import filesystem

        options = {key: v for key, v in self.storage_options.items() if key not in _HUB_OPTIONS}
        # As huggingface_hub does, use the proxies that the environment names.
        options["client_kwargs"] = {"trust_env": True, **options.get("client_kwargs", {})}
        hub = _Hub(self.name, self.storage_options)
        return filesystem("http", **options), hub.address(HubPath.parse(self.name))

    async def _answered(self, fs: Any, url: str, headers: dict[str, str]) -> ClientResponse:
        """Request bytes where they are known to be, or else from the Hub, which says where."""
        from yarl import URL

        options = self._asking(fs, headers)
        session = await fs.set_session()
        copy = _copies.get(url, lambda: SimpleNamespace(url=None, lock=asyncio.Lock()))
        ours, known = URL(url, encoded=True), copy.url
        if known is not None:
            answer = await self._get(session, known, ours, options)
            if answer.status < 400 or is_transient_status(answer.status) or answer.status == 416:
                return answer
            answer.release()
        async with copy.lock:
            if copy.url is known:  # nobody else has asked meanwhile
                copy.url = None
                answer, copy.url = await self._redirected(session, ours, options)
                return answer
            known = copy.url or ours
        return await self._get(session, known, ours, options)

    async def _redirected(
        self, session: Any, ours: URL, options: dict[str, Any]
    ) -> tuple[ClientResponse, URL | None]:
        """Ask the Hub; return the answer that has the bytes, and where it came from."""
        at = ours
        for _ in range(_MOST_REDIRECTS):
            answer = await self._get(session, at, ours, options)
            try:
                following = self._following(answer, at, ours)
            except BaseException:
                answer.close()
                raise
            if following is None:
                return answer, at if answer.status < 300 else None
            answer.release()
            at = following
        raise OSError(errno.EINVAL, "redirects go round in circles", self.name)

    def _following(self, answer: ClientResponse, at: URL, ours: URL) -> URL | None:
        """Return where an answer sends to; None if it is the last one."""
        from yarl import URL

        if at.origin() == ours.origin():
            self._check_resolved(answer)
        location = answer.headers.get("Location")
        if answer.status not in _REDIRECTS or location is None:
            return None
        with suppress(ValueError):
            found = at.join(URL(location, encoded=True))
            if found.host and (found.scheme == "https" or ours.scheme == found.scheme == "http"):
                return found
        # The address is not shown: it may be signed.
        raise OSError(errno.EINVAL, "the Hub sends to an address that is not safe", self.name)

    async def _get(
        self, session: Any, at: URL, ours: URL, options: dict[str, Any]
    ) -> ClientResponse:
        headers = options["headers"]
        if at.origin() == ours.origin():
            hub = _Hub(self.name, self.storage_options)
            headers = {**await asyncio.to_thread(hub.headers), **headers}
        answer: ClientResponse = await session.get(
            at, **{**options, "headers": headers, "allow_redirects": False}
        )
        return answer

    def _check_resolved(self, answer: ClientResponse) -> None:
        """Compare what the Hub says of a file with what it said as this was listed."""
        identity: Any = self.identity
        known = {
            "X-Repo-Commit": HubPath.parse(self.name).revision,
            "X-Linked-Size": str(self.size),
            "X-Linked-ETag": identity[1][1],
        }
        for name, before in known.items():
            now = answer.headers.get(name, before).removeprefix("W/").strip('"')
            # Digests of one kind are compared: files in git itself have two of them.
            is_same_kind = name != "X-Linked-ETag" or len(now) == len(before)
            if now != before and is_same_kind:
                raise self._changed(f"its {name} was {shown(before)} and is {shown(now)}")

    def _check_status(self, response: ClientResponse) -> None:
        if response.status >= 400:
            hub = _Hub(self.name, self.storage_options)
            # Only the Hub says why; others tell no more than the status.
            if str(response.url).startswith(f"{hub.endpoint}/"):
                raise hub.refusal(HubPath.parse(self.name), response.status, response.headers)
        super()._check_status(response)
