"""A Hugging Face Hub for tests, with its content network on another port; counts requests."""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.storage.servers import Handler, Listening, http_server, url_of

if TYPE_CHECKING:
    from collections.abc import Callable

TOKEN = "hf_of_this_test"  # noqa: S105  it opens nothing
#: Larger files are not in git itself.
_LARGE = 4096


class Request(NamedTuple):
    host: str  # "hub" or "copies"
    path: str
    range: str | None
    token: str | None


@dataclass
class Repository:
    """A repository: files by path for each commit, and commits of branches and tags."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    def push(self, files: dict[str, bytes], revision: str = "main") -> str:
        commit = secrets.token_hex(20)
        self.commits[commit] = files
        self.revisions[revision] = commit
        return commit


@dataclass
class Behaviour:
    page: int = 1000  # entries of a listing in one answer
    lasting: int | None = None  # requests until a signed address expires
    busy: dict[str, int] = field(default_factory=dict)  # by host: requests that get 429
    retry_after: str | None = None
    rate_limit: str | None = None
    cut: int = 0  # of how many bodies of copies half is missing
    listing: str | None = None  # instead of one
    location: str | None = None  # redirection of large files
    stuck_after: int | None = None  # requests for copies, until one is not answered
    tampered: dict[str, str] = field(default_factory=dict)  # headers of answers to resolve
    hostile: Callable[[Any], None] | None = None  # answers requests to the interface


class HubServer(Listening):
    """The Hub at ``url``; ``repositories`` by their names."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.behaviour = Behaviour()
        self.requests: list[Request] = []
        self.nbytes_sent = 0
        self.blobs: dict[str, bytes] = {}
        self.signed: dict[str, int] = {}  # signature: how often it was used
        self.lock = threading.Lock()
        self.is_stuck = threading.Event()
        servers = [http_server(_Handler, hub=self, host=name) for name in ("hub", "copies")]
        self.url, self.copies = map(url_of, servers)
        super().__init__(*servers)

    def count(self, host: str) -> int:
        return sum(request.host == host for request in self.requests)


class _RefusedError(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        self.status, self.code, self.message = status, code, message


class _Handler(Handler):
    hub: HubServer
    host: str

    def answer(self, *, with_body: bool) -> None:
        hub, behaviour = self.hub, self.hub.behaviour
        byte_range, token = self.headers.get("Range"), self.headers.get("Authorization")
        if self.path == "/api/agent-harnesses":  # of the client itself, once in a process
            self._answer(404, b"", {})
            return
        with hub.lock:
            hub.requests.append(Request(self.host, self.path, byte_range, token))
            is_busy = behaviour.busy.get(self.host, 0) > 0
            if is_busy:
                behaviour.busy[self.host] -= 1
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        try:
            self._route(path, query, is_busy=is_busy)
        except _RefusedError as refused:
            headers = {"X-Error-Code": refused.code, "X-Error-Message": refused.message}
            if refused.status == 429:
                headers |= {
                    "Retry-After": behaviour.retry_after or "",
                    "RateLimit": behaviour.rate_limit or "",
                }
            self._answer(refused.status, b"", {key: text for key, text in headers.items() if text})

    def _route(self, path: str, query: dict[str, list[str]], *, is_busy: bool) -> None:
        if is_busy:
            raise _RefusedError(429, message="We had to rate limit you")
        if self.hub.behaviour.hostile is not None and path.startswith("/api/"):
            self.hub.behaviour.hostile(self)
            self.close_connection = True
            return
        if self.host == "copies":
            self._copy(path)
        elif path.startswith("/api/resolve-cache/"):
            kind, _, remaining = path.removeprefix("/api/resolve-cache/").partition("/")
            repo, commit, name = self._split(remaining, 0)
            data = self._file(_named(kind, repo), commit, name)
            self._body(data, {"ETag": f'"{_blob_id(data)}"'})
        elif path.startswith(("/api/models/", "/api/datasets/")):
            kind, _, remaining = path.removeprefix("/api/").partition("/")
            self._api(kind, remaining, query)
        elif "/resolve/" in path:
            self._resolve(path)
        else:
            raise _RefusedError(401, "RepoNotFound", "Repository not found")

    def _split(self, path: str, marks: int) -> tuple[str, str, str]:
        parts = path.strip("/").split("/")
        repo, remaining = "/".join(parts[:2]), parts[2 + marks :]
        return repo, unquote(remaining[0]), unquote("/".join(remaining[1:]))

    def _repository(self, name: str) -> Repository:
        token = self.headers.get("Authorization")
        if token not in {None, f"Bearer {TOKEN}"}:
            raise _RefusedError(401, message="Invalid credentials in Authorization header")
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and token is None):
            # Clients without a token do not learn which private repositories exist.
            raise _RefusedError(
                401 if token is None else 404, "RepoNotFound", "Repository not found"
            )
        return repository

    def _commit(self, name: str, revision: str) -> tuple[str, dict[str, bytes]]:
        repository = self._repository(name)
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.commits:
            raise _RefusedError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, repository.commits[commit]

    def _file(self, name: str, revision: str, path: str) -> bytes:
        if self._repository(name).gated and self.headers.get("Authorization") is None:
            raise _RefusedError(401, "GatedRepo", f"Access to model {name} is restricted.")
        files = self._commit(name, revision)[1]
        if path not in files:
            raise _RefusedError(404, "EntryNotFound", "Entry not found")
        return files[path]

    def _api(self, kind: str, remaining: str, query: dict[str, list[str]]) -> None:
        parts = remaining.split("/")
        name, endpoint = (
            _named(kind, "/".join(parts[:2])),
            parts[2] if len(parts) > 2 else "revision",
        )
        commit, files = self._commit(name, unquote(parts[3]) if len(parts) > 3 else "main")
        if endpoint == "revision":
            siblings = [{"rfilename": path} for path in files]
            self._json({"id": name, "modelId": name, "sha": commit, "siblings": siblings})
            return
        if self.hub.behaviour.listing is not None:
            self._answer(200, self.hub.behaviour.listing.encode(), {})
            return
        folder = unquote("/".join(parts[4:]))
        entries = _tree(files, folder)
        if folder and not entries:
            raise _RefusedError(404, "EntryNotFound", f"{folder} does not exist")
        start, page = int(query.get("cursor", ["0"])[0]), self.hub.behaviour.page
        links = {}
        if start + page < len(entries):
            following = f"{self.hub.url}{urlsplit(self.path).path}?cursor={start + page}"
            links = {"Link": f'<{following}>; rel="next"'}
        self._json(entries[start : start + page], links)

    def _resolve(self, path: str) -> None:
        hub = self.hub
        kind = "datasets" if path.startswith("/datasets/") else "models"
        repo, revision, file = self._split(path.removeprefix("/datasets"), 1)
        name = _named(kind, repo)
        data = self._file(name, revision, file)
        commit = self._commit(name, revision)[0]
        headers = {"X-Repo-Commit": commit, "X-Linked-Size": str(len(data))}
        if len(data) < _LARGE:
            location = f"/api/resolve-cache/{kind}/{repo}/{commit}/{quote(file, safe='')}"
            headers |= {"ETag": f'"{_blob_id(data)}"'}
            self._answer(307, b"", {**headers, "Location": location, **hub.behaviour.tampered})
            return
        digest = hashlib.sha256(data).hexdigest()
        with hub.lock:
            hub.blobs[digest] = data
            # A client that decodes and encodes the address anew gets another one.
            signature = f"{len(hub.signed)}~a%2Bb%3D"
            hub.signed[signature] = 0
        location = (
            hub.behaviour.location or f"{hub.copies}/{digest}?Expires=9&Signature={signature}"
        )
        headers |= {"X-Linked-ETag": f'"{digest}"', "Location": location}
        self._answer(302, b"Found", {**headers, **hub.behaviour.tampered})

    def _copy(self, path: str) -> None:
        hub, behaviour = self.hub, self.hub.behaviour
        if behaviour.stuck_after is not None and hub.count("copies") > behaviour.stuck_after:
            hub.is_stuck.set()
            hub.closing.wait()
        signature = self.path.rpartition("Signature=")[2]
        with hub.lock:
            used = hub.signed.get(signature)
            if used is None or (behaviour.lasting is not None and used >= behaviour.lasting):
                raise _RefusedError(403)
            hub.signed[signature] = used + 1
        # The content network has other kinds of ETags than the Hub.
        self._body(hub.blobs[path[1:]], {"ETag": '"d41d8cd98f-7"'}, copy=True)

    def _body(self, data: bytes, headers: dict[str, str], *, copy: bool = False) -> None:
        byte_range = self.headers.get("Range")
        if byte_range is None:
            self._answer(200, data, headers)
            return
        first, last = (int(number) for number in byte_range.removeprefix("bytes=").split("-"))
        body = data[first : last + 1]
        content_range = f"bytes {first}-{first + len(body) - 1}/{len(data)}"
        with self.hub.lock:
            is_cut = copy and self.hub.behaviour.cut > 0
            self.hub.behaviour.cut -= is_cut
        self._answer(206, body, {**headers, "Content-Range": content_range}, cut=is_cut)

    def _json(self, value: Any, headers: dict[str, str] | None = None) -> None:
        self._answer(200, json.dumps(value).encode(), headers or {})

    def _answer(
        self, status: int, body: bytes, headers: dict[str, str], *, cut: bool = False
    ) -> None:
        self.send_response(status)
        for name, text in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command == "HEAD":
            return
        sent = body[: len(body) // 2] if cut else body
        with self.hub.lock:
            self.hub.nbytes_sent += len(sent)
        self.wfile.write(sent)
        self.close_connection |= cut


def _named(kind: str, repo: str) -> str:
    return repo if kind == "models" else f"{kind}/{repo}"


def _blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # noqa: S324


def _tree(files: dict[str, bytes], folder: str) -> list[dict[str, Any]]:
    prefix = f"{folder}/" if folder else ""
    entries: dict[str, dict[str, Any]] = {}
    for path, data in files.items():
        if not path.startswith(prefix):
            continue
        name, slash, _ = path.removeprefix(prefix).partition("/")
        entry: dict[str, Any] = {"path": prefix + name, "oid": _blob_id(data), "size": len(data)}
        entry["type"] = "directory" if slash else "file"
        if slash:
            entry["size"] = 0
        elif len(data) >= _LARGE:
            oid = hashlib.sha256(data).hexdigest()
            entry["lfs"] = {"oid": oid, "size": len(data), "pointerSize": 134}
        entries[name] = entry
    return list(entries.values())
