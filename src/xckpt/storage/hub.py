"""Files on the Hugging Face Hub: ``hf://organisation/model@revision/file``.

A revision is resolved once to its commit, from which everything is read; the names of sources
contain the commit. The listing of a folder has the sizes and digests of its files, so that the
first request for a file reads its header. For large files the Hub redirects to a signed address,
which is used until it is refused. The token is sent to the Hub only.

`huggingface_hub` provides the endpoint, the token and the session for requests about repositories.
This module reads the answers, within limits of time and size.
"""

from __future__ import annotations

import errno
import json
import re
import sys
import time
from contextlib import AbstractContextManager, contextmanager, suppress
from difflib import get_close_matches
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote, urljoin, urlsplit

from xckpt.errors import shown
from xckpt.storage.cache import reading_header
from xckpt.storage.limits import Pool
from xckpt.storage.objects import REDIRECTS, SAFE_SCHEMES, Destination, ObjectSource
from xckpt.storage.remote import RemoteSource, changed
from xckpt.storage.requests import Limits, TransientError, called_within, logger, retried
from xckpt.storage.source import Source, components
from xckpt.storage.stores import address_of, lacking, open_store, split_nested, without_secrets

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


_URL = re.compile(
    r"hf://(?:(?P<kind>model|dataset|space)s/)?(?P<repo>[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(?P<path>.*))?",
    re.DOTALL,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Seconds until requests are allowed again: "resolvers";r=0;t=55
_RESET = re.compile(r";\s*t\s*=\s*([0-9]{1,6})")
_SECONDS = re.compile("[0-9]{1,6}")

#: Size of the first request for a file: the headers of most shards are shorter.
_FIRST_NBYTES = 1 << 17
# Time for which a branch is assumed to stay at the same commit.
_TRUSTED_SECONDS = 10.0
_MOST_FILES = 1_000_000
_MOST_PAGES = 10_000
_MOST_SECONDS = 25.0
_LARGEST_ANSWER = 64 << 20
# Files in git itself are smaller; the Hub does not guarantee range requests for them.
_LARGEST_IN_GIT = 10 << 20
_LENGTH_OF_GIT_ID = 40
_MOST_REDIRECTS = 5
_PIECE_NBYTES = 1 << 16
# Longest pause that the Hub may request, in seconds.
_LONGEST_WAIT = 60.0
_DEFAULT_REVISION = "main"
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
# Storage options that are not sent to the server of the data.
_HUB_OPTIONS = {"endpoint", "token"}
_LIBRARIES = {"httpcore", "httpcore2", "httpx", "httpx2", "requests", "urllib3"}


class HubPath(NamedTuple):
    """A repository, folder or file on the Hub, at a revision."""

    kind: str  # "model", "dataset" or "space"
    repo: str
    revision: str
    path: str  # in the repository; empty for all of it

    @property
    def url(self) -> str:
        """The ``hf://`` URL."""
        path = f"/{self.path}" if self.path else ""
        return f"hf://{self.page}@{quote(self.revision, safe='')}{path}"

    @property
    def page(self) -> str:
        """The path of the repository in a browser."""
        return self.repo if self.kind == "model" else f"{self.kind}s/{self.repo}"

    @property
    def parent(self) -> HubPath:
        """The folder that contains it."""
        return self._replace(path=self.path.rpartition("/")[0])

    @classmethod
    def parse(cls, url: str) -> HubPath:
        """Split a URL."""
        match = _URL.fullmatch(url.rstrip("/"))
        if match is None:
            form = "a repository is hf://organisation/name, with @revision and /file after it"
            raise ValueError(f"{url} is not a URL of the Hub: {form}")
        revision = unquote(match["revision"] or _DEFAULT_REVISION)
        return cls(match["kind"] or "model", match["repo"], revision, match["path"] or "")


def pinned(url: str, storage_options: Mapping[str, Any] | None = None) -> str:
    """Return a URL with the current commit of its revision."""
    return _Hub(url, storage_options).resolved(HubPath.parse(url)).url


def entries_in(
    url: str, storage_options: Mapping[str, Any] | None = None
) -> tuple[str, dict[str, bool]] | None:
    """Return the URL of a folder, and whether each of its entries is a file; None for a file."""
    hub = _Hub(url, storage_options)
    place = hub.resolved(HubPath.parse(url))
    name = place.path.rpartition("/")[2]
    if place.path and hub.entries(place.parent).get(name, ()) is not None:
        return None  # a file, or nothing
    return place.url, {name: entry is not None for name, entry in hub.entries(place).items()}


def glob_hub(pattern: str, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """Return the URLs of the files that match; two stars match folders, too."""
    from fsspec.utils import glob_translate

    hub = _Hub(pattern, storage_options)
    place = hub.resolved(HubPath.parse(pattern))
    is_match = re.compile(glob_translate(place.path)).match
    fixed = place._replace(path=place.path.partition("*")[0]).parent
    depth = sys.maxsize if "**" in place.path else place.path.count("/")
    urls, folders = [], [fixed]
    while folders:
        folder = folders.pop()
        for name, entry in hub.entries(folder).items():
            inner = folder._replace(path=f"{folder.path}/{name}".lstrip("/"))
            if entry is not None and is_match(inner.path):
                urls.append(inner.url)
            elif entry is None and inner.path.count("/") < depth:
                folders.append(inner)
    return urls


# Commits by repository and revision, with the time when they were looked up; folders by commit.
_commits: Pool[SimpleNamespace] = Pool(limit=1024)
_folders: Pool[dict[str, tuple[int, str] | None]] = Pool(limit=256)


class _Answer(NamedTuple):
    """A successful answer of the Hub."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str  # of the request, or of the redirect


class _Hub:
    """The interface of the Hub, with the token of the user: commits, listings and addresses."""

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None) -> None:
        self._url = url
        options, self._limits = split_nested(storage_options)
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
        """Return the address of a file at the Hub."""
        commit, path = quote(file.revision, safe=""), quote(file.path)
        return f"{self.endpoint}/{file.page}/resolve/{commit}/{path}"

    def headers(self) -> dict[str, str]:
        """Return the headers of requests to the Hub, with the current token."""
        from huggingface_hub.utils import build_hf_headers

        return dict(build_hf_headers(token=self._token, library_name="xckpt"))

    def resolved(self, place: HubPath) -> HubPath:
        """Replace the revision by its commit."""
        if _COMMIT.fullmatch(place.revision):
            return place
        key = (self.endpoint, place.kind, place.repo, place.revision)

        def look() -> SimpleNamespace:
            revision = quote(place.revision, safe="")
            info, _ = self._page(place, f"{self._api_of(place)}/revision/{revision}")
            commit = info.get("sha") if isinstance(info, dict) else None
            if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
                raise self._broken(f"does not send the commit of revision {shown(place.revision)}")
            return SimpleNamespace(commit=commit, time=time.monotonic())

        latest = _commits.get(key, look)
        if time.monotonic() - latest.time >= _TRUSTED_SECONDS:
            _commits.discard(key)
            latest = _commits.get(key, look)
        return place._replace(revision=latest.commit)

    def entries(self, folder: HubPath) -> dict[str, tuple[int, str] | None]:
        """Return size and digest of each file in a folder of a commit; None is a folder."""
        return _folders.get((self.endpoint, folder), partial(self._list, folder))

    def _list(self, folder: HubPath) -> dict[str, tuple[int, str] | None]:
        path = f"/{quote(folder.path, safe='')}" if folder.path else ""
        following = f"{self._api_of(folder)}/tree/{folder.revision}{path}"
        entries: dict[str, tuple[int, str] | None] = {}
        deadline = time.monotonic() + self._limits.timeout
        for _ in range(_MOST_PAGES):
            count = len(entries)
            page, following = self._page(folder, following)
            for listed in page if isinstance(page, list) else [page]:
                try:
                    entries[listed["path"].rpartition("/")[2]] = _entry(listed)
                except (AttributeError, KeyError, TypeError, ValueError) as error:
                    raise self._broken(f"lists {shown(str(listed))} as a file") from error
            if not following:
                return entries
            if len(entries) == count or len(entries) > _MOST_FILES or time.monotonic() > deadline:
                break
        raise self._broken(f"lists a folder without end; {len(entries)} files so far")

    def entry(self, place: HubPath) -> tuple[int, str]:
        """Return the size and the digest of a file."""
        name = place.path.rpartition("/")[2]
        entries = self.entries(place.parent)
        entry = entries.get(name, ())
        if entry is None:
            raise IsADirectoryError(errno.EISDIR, "it is a folder", self._url)
        if len(entry) == 2:
            return entry
        text = f"{place.repo} has no file {shown(place.path)} at {shown(place.revision)}"
        matches = get_close_matches(name, entries, n=1)
        text += f"; did you mean {shown(matches[0])}?" if matches else ""
        raise FileNotFoundError(errno.ENOENT, text, self._url)

    def _api_of(self, place: HubPath) -> str:
        return f"/api/{place.kind}s/{place.repo}"

    def _page(self, place: HubPath, path: str) -> tuple[Any, str]:
        """Return a page of an answer of the API, and the path of the next page or ''."""
        answer = self.answer(place, "GET", self.endpoint + path, _LARGEST_ANSWER)
        try:
            content = json.loads(answer.body)
        except (ValueError, RecursionError) as error:
            raise self._broken("does not answer in JSON") from error
        # Only the path counts: the token must not be sent to another host.
        following = re.search(r'<([^<>]*)>;\s*rel="?next', answer.headers.get("Link") or "")
        _, mark, path = following[1].partition("/api/") if following else ("", "", "")
        return content, mark + path

    def answer(
        self, place: HubPath, method: str, url: str, most: int, source: HubSource | None = None
    ) -> _Answer:
        """Send a request, follow redirects on the Hub, and raise for failures."""
        limits = self._limits
        if source is None:  # the interface, which answers quickly
            limits = limits._replace(timeout=min(limits.timeout, _MOST_SECONDS))
        for hop in range(_MOST_REDIRECTS):
            request = partial(self._request, place, method, url, most, limits)
            request = partial(called_within, limits.timeout, request)
            answer = retried(self._url, request, limits)
            if source is not None:
                source.compare(answer.headers, (method, hop))
            if answer.status not in REDIRECTS or "Location" not in answer.headers:
                return answer
            url = self._joined(url, answer.headers["Location"])
            if urlsplit(url)[:2] != urlsplit(self.endpoint)[:2]:
                return answer._replace(url=url)
        raise OSError(errno.EINVAL, "redirects go round in circles", self._url)

    def _joined(self, url: str, location: str) -> str:
        with suppress(ValueError):
            joined = urljoin(url, location)
            schemes = urlsplit(url).scheme, urlsplit(joined).scheme
            if urlsplit(joined).hostname and schemes in SAFE_SCHEMES:
                return address_of(joined)
        raise self._unsafe()

    def _unsafe(self) -> OSError:
        """Return an error whose message omits the address, which may be signed."""
        text = "the Hub redirects to an address that is not safe"
        return OSError(errno.EINVAL, text, self._url)

    def _request(self, place: HubPath, method: str, url: str, most: int, limits: Limits) -> _Answer:
        from huggingface_hub.errors import OfflineModeIsEnabled
        from huggingface_hub.utils import get_session

        start = time.monotonic()
        try:
            answer = self._read(get_session(), method, url, most, limits)
        except OfflineModeIsEnabled as error:
            text = "HF_HUB_OFFLINE is set: unset it, or open the folder that was downloaded"
            raise OSError(errno.EINVAL, text, self._url) from error
        except Exception as error:
            if type(error) is ValueError:  # of requests, which parses the target of a redirect
                raise self._unsafe() from None
            # The session is from one of several libraries.
            if type(error).__module__.partition(".")[0] not in _LIBRARIES:
                raise
            is_timeout = "timeout" in type(error).__name__.lower()
            text = f"the Hub does not answer: {shown(str(error) or type(error).__name__)}"
            raise TransientError(text, is_timeout=is_timeout) from error
        logger.debug("%s %s in %.3f s: %s", method, answer.status, time.monotonic() - start, url)
        if answer.status >= 400:
            raise self.refusal(place, answer.status, answer.headers)
        return answer

    def _read(self, session: Any, method: str, url: str, most: int, limits: Limits) -> _Answer:
        """Make a request, and raise if the answer has more than `most` bytes."""
        sent = {**self.headers(), "Accept-Encoding": "identity"}
        body, deadline = bytearray(), time.monotonic() + limits.timeout
        with _opened(session, method, url, sent, limits) as (status, headers, pieces):
            if status < 400 and headers.get("Content-Encoding", "identity") != "identity":
                raise self._broken("sends its answer compressed")
            for piece in pieces if status < 400 else ():
                body += piece
                if len(body) > most:
                    raise self._broken(f"sends more than {most} bytes for {shown(url)}")
                if time.monotonic() > deadline:
                    raise TransientError("the answer of the Hub has no end", is_timeout=True)
        return _Answer(status, headers, bytes(body), url)

    def refusal(self, place: HubPath, status: int, headers: Mapping[str, str]) -> OSError:
        """Translate the answer to a refused request into an error with advice."""
        message, url = headers.get("X-Error-Message", ""), self._url
        repo, page = f"the repository {place.repo}", f"{self.endpoint}/{place.page}"
        has_token = "authorization" in {name.lower() for name in self.headers()}
        if status in {408, 425, 429} or status >= 500:
            return self._busy(status, headers, has_token=has_token)
        advice = "your token may not be allowed to read it"
        advice = advice if has_token else f"if it is private, {_LOG_IN}"
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
            case _, 401 if has_token and "Invalid" in message:
                return PermissionError(errno.EACCES, f"the token is not valid: {_LOG_IN}", url)
            case ("RepoNotFound", _) | (_, 401 | 404):
                text = f"{repo} cannot be found: check its name; {advice}"
                return FileNotFoundError(errno.ENOENT, text, url)
            case _, 403:
                text = f"{repo} must not be read: {shown(message)}. Check what your token may read"
                return PermissionError(errno.EACCES, text, url)
        return OSError(errno.EINVAL, f"the Hub answered {status} {shown(message)}", url)

    def _busy(self, status: int, headers: Mapping[str, str], *, has_token: bool) -> OSError:
        """Return the error for a busy Hub; it is transient unless the requested pause is long."""
        text = f"the Hub answered {status} {shown(headers.get('X-Error-Message', ''))}"
        if status == 429 and not has_token:
            text += f" (with a token it allows more: {_LOG_IN})"
        after = _SECONDS.fullmatch(headers.get("Retry-After", ""))
        reset = _RESET.search(headers.get("RateLimit", ""))
        seconds = float(after[0] if after else reset[1] if reset else 0)
        if seconds > _LONGEST_WAIT:
            text += f"; it wants no requests for {seconds:g} seconds: try again after that"
            return OSError(errno.ETIMEDOUT, text, self._url)
        return TransientError(text, is_busy=status in {429, 503}, seconds=seconds)

    def _broken(self, failure: str) -> OSError:
        return OSError(errno.EINVAL, f"the Hub {failure}", self._url)


@contextmanager
def _opened(
    session: Any, method: str, url: str, headers: Mapping[str, str], limits: Limits
) -> Iterator[tuple[int, Mapping[str, str], Iterator[bytes]]]:
    """Begin a request; return the status, the headers, and an iterator over the body."""
    options: dict[str, Any] = {"headers": headers, "timeout": limits.read_timeout}
    if callable(getattr(session, "stream", None)):  # of httpx
        with session.stream(method, url, follow_redirects=False, **options) as answer:
            yield answer.status_code, answer.headers, answer.iter_raw()
    else:  # of requests, with huggingface_hub before 1.0
        with session.request(method, url, allow_redirects=False, stream=True, **options) as answer:
            pieces = answer.raw.stream(_PIECE_NBYTES, decode_content=False)
            yield answer.status_code, answer.headers, pieces


def _entry(listed: Mapping[str, Any]) -> tuple[int, str] | None:
    """Return the size and the digest of a file; None for a folder."""
    if listed["type"] != "file":
        return None
    size, digest = listed["size"], (listed.get("lfs") or listed)["oid"]
    if type(size) is not int or not 0 <= size < 1 << 63 or type(digest) is not str:
        raise ValueError("no size, or no digest")
    return size, digest


# Names of the headers with versions, by file and step of a request.
_versions: Pool[frozenset[str]] = Pool(limit=4096)
# Files in git itself by URL.
_small: Pool[bytes | None] = Pool(limit=32 << 20, measure=lambda body: len(body or b""))


class HubSource(ObjectSource):
    """A file of a commit on the Hub; `storage_options` may have "token" and "endpoint"."""

    __slots__ = ()

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        hub = _Hub(url, storage_options)
        place = hub.resolved(HubPath.parse(url))
        RemoteSource.__init__(self, place.url, *split_nested(storage_options))
        self.size, digest = hub.entry(place)
        self.identity = (self.size, ("sha", digest))

    @property
    def _digest(self) -> str:
        identity: Any = self.identity
        _, (_, digest) = identity
        return str(digest)

    def reading_header(self) -> AbstractContextManager[Source]:
        """Return a source with read-ahead and a cache; see `Source.reading_header`."""
        options = {key: v for key, v in self.storage_options.items() if key != "token"}
        return reading_header(self, memoryview(b""), options, ahead=_FIRST_NBYTES)

    def sibling(self, name: str) -> Source:
        """Open another file next to this one, of the same commit; see `Source.sibling`."""
        folder = HubPath.parse(self.name).parent.url
        return HubSource("/".join([folder, *components(name)]), self.options)

    def compare(self, headers: Mapping[str, str], step: tuple[str, int]) -> None:
        """Compare the version in an answer of the Hub with the one in its listing.

        An answer to the same step of a request must not lack what an earlier one had.
        """
        expected = {
            "X-Repo-Commit": HubPath.parse(self.name).revision,
            "X-Linked-Size": str(self.size),
            "X-Linked-ETag": self._digest,
        }
        names = {name for name in expected if name in headers}
        earlier = _versions.get((self.name, self.identity, step), lambda: frozenset(names))
        for name in sorted(earlier - names):
            raise changed(self.name, f"its {name} was {shown(expected[name])} and is missing now")
        for name, before in expected.items():
            now = headers.get(name, before).removeprefix("W/").strip('"')
            # Files in git itself have digests of two kinds, which cannot be compared.
            is_same_kind = name != "X-Linked-ETag" or len(now) == len(before)
            if now != before and is_same_kind:
                raise changed(self.name, f"its {name} was {shown(before)} and is {shown(now)}")

    def _get(self, offset: int, nbytes: int) -> memoryview:
        """Request a range, or all of a small file that is in git itself; see `RemoteSource`."""
        if self.size > _LARGEST_IN_GIT or len(self._digest) != _LENGTH_OF_GIT_ID:
            return super()._get(offset, nbytes)
        body = _small.get((self.name, self.identity), self._whole)
        if body is None:
            return super()._get(offset, nbytes)
        return memoryview(body)[offset : offset + nbytes]

    def _whole(self) -> bytes | None:
        """Request the whole file; None if the Hub redirects to another server."""
        hub, place = self._hub(), HubPath.parse(self.name)
        answer = hub.answer(place, "GET", hub.address(place), _LARGEST_IN_GIT, self)
        if answer.status in REDIRECTS:
            return None
        if len(answer.body) != self.size:
            raise changed(self.name, f"it had {self.size} bytes and has {len(answer.body)} now")
        return answer.body

    def _hub(self) -> _Hub:
        return _Hub(self.name, self.options)

    def _locate(self) -> Destination:
        """Request the address of the file's data from the Hub."""
        hub, place = self._hub(), HubPath.parse(self.name)
        answer = hub.answer(place, "HEAD", hub.address(place), 0, self)
        options = without_secrets(self.storage_options)
        options = {key: value for key, value in options.items() if key not in _HUB_OPTIONS}
        is_elsewhere = answer.status in REDIRECTS
        if not is_elsewhere:
            options["headers"] = hub.headers()
        return Destination(*open_store(answer.url, options, self.limits), is_redirect=is_elsewhere)
