"""Files on web servers and in object stores, through obstore; a range of bytes is one request.

The version of the file in every answer is compared with the version that was opened.
obstore's synchronous calls run on threads (`requests`). Its retries are switched off for reading,
because `requests` logs its own, and also repeats requests whose answer breaks off.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import quote, urljoin, urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from xckpt.addresses import Address, hiding, real
from xckpt.errors import CheckpointError, FileChangedError, UnsupportedError, shown
from xckpt.interrupts import deliver, is_pending
from xckpt.storage.cache import FIRST_NBYTES
from xckpt.storage.limits import MORE_FILES, Locks, Pool
from xckpt.storage.remote import RemoteSource, changed, file_system_of, identified, unsupported
from xckpt.storage.requests import (
    TransientError,
    called_within,
    retried,
    run_urgently,
    split_options,
    submit,
)
from xckpt.storage.source import is_of_one_opening
from xckpt.storage.stores import (
    address_of,
    headers_of,
    lacking,
    open_store,
    options_key,
    regions,
    split_nested,
    ssl_context,
    store_kind,
    without_secrets,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from ssl import SSLContext

# obstore sends all headers but these to wherever a redirect leads, and the URL as `Referer`.
_KEPT_AT_HOME = {"authorization", "cookie"}
REDIRECTS = {301, 302, 303, 307, 308}
_MOST_REDIRECTS = 10
#: Schemes of an address and of a redirect from it that is followed.
SAFE_SCHEMES = {("http", "http"), ("http", "https"), ("https", "https")}
# Encodings of bodies that are not compressed; the last one is left over by some uploads to S3.
_NOT_COMPRESSED = {"", "identity", "aws-chunked"}
_OF_OBSTORE = "\n\nDebug source:"
_S3_HOME = "https://s3.amazonaws.com"
_RESERVED = "%/:=&?~#+!$,;'@()*[]"
# Size of the parts of an upload; S3 allows 10,000 parts.
_PART_NBYTES = 8 << 20
_MOST_PARTS = 9_000
# Pause between looks for an interrupt during an upload.
_POLL_SECONDS = 0.05

_NO_CREDENTIALS = (
    "no credentials were found in storage_options, the environment or profiles, and this machine "
    "has none; for public data, pass storage_options={'anon': True}"
)
_NO_BUCKET = "there is no such bucket; check its name, the account, and the endpoint"
_NOT_TRUSTED = (
    "the certificate of the server is not trusted; pass a file with trusted certificates as "
    "storage_options={'verify': 'ca.pem'}"
)


_NO_NAME = (
    "the name of the server cannot be looked up: check the URL, the endpoint in storage_options, "
    "and the network"
)
_COPY = "if the server always answers so, download the file and open the copy"


_MISSING_BUCKET = re.compile("NoSuchBucket|ContainerNotFound|The specified bucket does not exist")


class _ElsewhereError(OSError):
    """A bucket is in another region."""


class _Meaning(NamedTuple):
    """Meaning of an error of obstore."""

    pattern: str  # in its text
    kind: str
    reason: str = ""


# The first match counts. obstore states the kind of an error in its text only.
_MEANINGS = (
    _Meaning(r"169\.254\.16[79]\.", "refused", _NO_CREDENTIALS),
    _Meaning(r"<Region>|redirect without LOCATION", "elsewhere", "the bucket is in another region"),
    _Meaning(_MISSING_BUCKET.pattern, "missing", _NO_BUCKET),
    _Meaning(r"status code: (?:404|410)", "missing"),
    _Meaning(r"status code: (?:401|403)", "refused"),
    _Meaning(r"status code: 412", "changed", "its ETag is another"),
    _Meaning(r"status code: 416|object was only", "changed", "it is shorter than it was"),
    _Meaning(r"status code: (429|503)", "busy", "the server answered %s"),
    _Meaning(r"status code: (408|425|5\d\d)", "transient", "the server answered %s"),
    _Meaning(r"status code: 3\d\d", "final", "the server redirects to an address that is not safe"),
    _Meaning(r"status code: (\d+)", "final", "the server answered %s"),
    _Meaning(r"Range request not", "unsupported", "ignores ranges and sends the whole file"),
    _Meaning(r"(?i)Content.Range", "unsupported", "does not state which bytes it sends"),
    _Meaning(r"Content-Length Header", "unsupported", "does not state how many bytes it sends"),
    _Meaning(r"Requested (\S+), got (\S+)", "final", f"asked for bytes %s, got %s; {_COPY}"),
    _Meaning(r"following redirect", "final", "redirects go round in circles"),
    _Meaning(r"builder error|RelativeUrl", "final", "the URL is not valid"),
    _Meaning(r"TimedOut|kind: Timeout", "timeout", "no answer, or no end of it, in time"),
    _Meaning(r"InvalidCertificate", "final", _NOT_TRUSTED),
    _Meaning(r"Too many open files", "final", f"{os.strerror(errno.EMFILE)}; {MORE_FILES}"),
    _Meaning(r"dns error", "transient", _NO_NAME),
    _Meaning(r'message: "([^"]+)"', "transient", "cannot connect: %s"),
    _Meaning(r"kind: (?:Connect|Request)", "transient", "the connection failed"),
    _Meaning(r"kind: Interrupted", "transient", "the connection broke off"),
    _Meaning(r"^Object at location", "missing"),
)


def failure(error: Exception, name: str) -> Exception:
    """Translate an error of obstore, and drop addresses from its text, which may be signed."""
    text = str(error)
    if isinstance(error, CheckpointError | ImportError | OSError) and _OF_OBSTORE not in text:
        return error
    # The body of an answer follows the status, and is up to the server.
    match = re.search(r"status code: \d+", text)
    is_region = "<Region>" in text and match is not None and match[0][-3:] in {"301", "400"}
    is_bucket = match is not None and match[0][-3:] == "404" and _MISSING_BUCKET.search(text)
    text = text if match is None or is_region or is_bucket else text[: match.end()]
    for pattern, kind, reason in _MEANINGS:
        details = re.search(pattern, text)
        if details is not None:
            return _made(kind, reason % details.groups() if details.groups() else reason, name)
    if isinstance(error, ValueError | TypeError):
        return ValueError(f"cannot open {name}: {error}")
    first_line = re.sub(r"\w+://\S+", "its address", text.partition("\n")[0])
    return OSError(errno.EIO, f"the request failed: {shown(first_line)}", name)


def _made(kind: str, reason: str, name: str) -> Exception:
    match kind:
        case "missing":
            return FileNotFoundError(errno.ENOENT, reason or os.strerror(errno.ENOENT), name)
        case "refused":
            return PermissionError(errno.EACCES, reason or os.strerror(errno.EACCES), name)
        case "changed":
            return changed(name, reason)
        case "unsupported":
            return unsupported(name, reason)
        case "elsewhere":
            return _ElsewhereError(errno.EINVAL, reason, name)
        case "final":
            return OSError(errno.EINVAL, reason, name)
    return TransientError(reason, is_timeout=kind == "timeout", is_busy=kind == "busy")


def library(url: str) -> Any:
    """Import obstore; the error names the extra to install."""
    try:
        import obstore
    except ImportError as error:
        raise lacking(url, error) from error
    return obstore


class Destination(NamedTuple):
    """The store and the path to which requests for a file go."""

    store: Any
    path: str
    is_redirect: bool = False  # an address from a redirect, which may expire


# Addresses by URL and options.
_addresses: Pool[Destination] = Pool(limit=4096)
_locating = Locks(64)


class ObjectSource(RemoteSource):
    """A file of a web server, of S3, Google Cloud Storage or Azure."""

    __slots__ = ()

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(url, *split_nested(storage_options))
        if url.endswith("/") and store_kind(url) != "http":
            raise _folder(self.name)
        try:
            run_urgently(self.name, partial(retried, self.name, self._look, self.limits))
        except FileNotFoundError:
            if store_kind(url) != "http" and _is_folder(url, storage_options):
                raise _folder(self.name) from None
            raise
        if self.identity == (self.size,):
            self._remember_beginning()

    def _look(self) -> None:
        """Request the beginning of the file, and set its size and its version."""
        try:
            meta, self._first = self._answer({"range": (0, FIRST_NBYTES)}, _check_encoding)
        except (FileChangedError, UnsupportedError):
            # An empty file has no range.
            meta, _ = self._answer({}, _check_encoding)
            if meta["size"] != 0:
                raise
        self.size, self.identity = identified(self.name, meta["size"], _version(meta))
        if len(self._first) != min(FIRST_NBYTES, self.size):
            raise TransientError(f"asked for {FIRST_NBYTES} bytes at 0, got {len(self._first)}")

    def _get(self, offset: int, nbytes: int) -> memoryview:
        """Request a range of the version that was opened; see `RemoteSource`."""
        options: dict[str, Any] = {"range": (offset, offset + nbytes)}
        identity: Any = self.identity
        etag = dict(identity[1:]).get("ETag", "")
        if etag.startswith('"'):  # weak ones never match
            options["if_match"] = etag
        return self._answer(options, self._compare)[1]

    def _answer(
        self, options: dict[str, Any], check: Callable[[str, Any], None]
    ) -> tuple[Any, memoryview]:
        """Return the metadata of an answer, and its body if it is for a range."""
        obstore = library(self.name)
        for is_last in (False, True):
            address = None
            try:
                address = self._address()
                result = obstore.get(address.store, address.path, options=options)
                check(self.name, result)  # may raise before the body is read
                return result.meta, memoryview(result.bytes() if "range" in options else b"")
            except Exception as error:
                problem = failure(error, self.name)
                if not is_last and self._is_elsewhere(address, problem, str(error)):
                    continue
                if problem is error:
                    raise
                # The text of the error has the address of the request.
                is_secret = isinstance(self.name, Address) or (address and address.is_redirect)
                raise problem from (None if is_secret else error)
        raise AssertionError

    def _compare(self, name: str, result: Any) -> None:
        """Compare the version in an answer with the opened one."""
        _check_encoding(name, result)
        if result.meta["size"] != self.size:
            raise changed(name, f"it had {self.size} bytes and has {result.meta['size']} now")
        identity: Any = self.identity
        before = dict(identity[1:])
        now = dict(identified(name, self.size, _version(result.meta))[1][1:])
        for key in ("ETag", "Last-Modified"):
            old, new = before.get(key), now.get(key)
            # A proxy may turn a strong ETag into a weak one.
            is_same = (old or "").removeprefix("W/") == (new or "").removeprefix("W/")
            if not is_same and (old is not None or is_of_one_opening(identity)):
                texts = ["missing" if text is None else shown(text) for text in (old, new)]
                after = "is missing now" if new is None else f"is {texts[1]}"
                raise changed(name, f"its {key} was {texts[0]} and {after}")
            if old is not None:
                return  # servers behind one address agree on ETags more often than on times

    def _address(self) -> Destination:
        key = self._address_key()
        with _locating.of(key):  # several threads send one request
            return _addresses.get(key, self._locate)

    def _address_key(self) -> tuple[Any, ...]:
        return self.url, options_key(self.storage_options), self.limits

    def _locate(self) -> Destination:
        """Follow redirects to the final address; the user's headers go to the first server only."""
        url, options, limits = self.url, self.storage_options, self.limits
        address = Destination(*open_store(url, options, limits))
        if store_kind(url) != "http" or "store" in options:
            return address
        headers, url = headers_of(url, options), address_of(url, options)
        if "?" not in url and {name.lower() for name in headers} <= _KEPT_AT_HOME:
            return address
        context = ssl_context(options)
        end = called_within(
            limits.timeout, partial(_end_of_redirects, url, headers, context, limits.read_timeout)
        )
        if end == url:
            return address
        options = without_secrets(options)
        if _origin(end) == _origin(url):
            options["headers"] = headers
        return Destination(*open_store(end, options, limits), is_redirect=True)

    def _is_elsewhere(self, address: Destination | None, problem: Exception, text: str) -> bool:
        """Return whether the next request goes to another address."""
        is_refused = isinstance(problem, PermissionError | FileNotFoundError)
        if address and address.is_redirect and is_refused:
            _addresses.discard(self._address_key())  # it has expired
            return True
        if not isinstance(problem, _ElsewhereError) or store_kind(self.name) != "s3":
            return False
        bucket = self.name.partition("://")[2].partition("/")[0]
        region = _region_of(bucket, text, self.limits.read_timeout)
        is_new = region is not None and regions.get(bucket) != region
        if is_new:
            regions[bucket] = str(region)
            _addresses.discard(self._address_key())
        return is_new


def _check_encoding(url: str, result: Any) -> None:
    if dict(result.attributes).get("Content-Encoding", "") not in _NOT_COMPRESSED:
        raise unsupported(url, "sends the file compressed")


def _version(meta: Any) -> dict[str, str | None]:
    """Return the version in an answer; obstore reports a missing time as 1970."""
    modified = meta["last_modified"]
    text = None if modified is None or modified.year < 1971 else modified.isoformat()
    return {"ETag": meta["e_tag"], "Last-Modified": text}


def _is_folder(url: str, storage_options: Mapping[str, Any] | None) -> bool:
    with suppress(OSError, CheckpointError):
        return Bucket(url, storage_options).is_folder(url.partition("://")[2])
    return False


def _folder(url: str) -> IsADirectoryError:
    text = f"it is a folder; its files are {url.rstrip('/')}/*"
    return IsADirectoryError(errno.EISDIR, text, url)


# --- addresses -----------------------------------------------------------------------------------


class _Staying(HTTPRedirectHandler):
    """A handler that raises redirects as errors."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _end_of_redirects(
    url: str, headers: Mapping[str, str], context: SSLContext, timeout: float
) -> str:
    """Follow redirects and return the last address; send headers to the first server only."""
    start = url
    opener = build_opener(_Staying, HTTPSHandler(context=context))
    for _ in range(_MOST_REDIRECTS):
        sent = {**headers, "Range": "bytes=0-0"} if _origin(url) == _origin(start) else {}
        request = Request(quote(url, safe=_RESERVED), headers=sent)  # noqa: S310
        try:
            with opener.open(request, timeout=timeout):
                return url
        except HTTPError as error:
            following = error.headers.get("Location")
            if error.code not in REDIRECTS or following is None:
                return url  # obstore gets the same answer
        except OSError:
            return url
        url = address_of(urljoin(url, following))
        if (urlsplit(start).scheme, urlsplit(url).scheme) not in SAFE_SCHEMES:
            reason = "the server redirects to an address that is not safe"
            raise OSError(errno.EINVAL, reason, hiding(start))
    raise OSError(errno.EINVAL, "redirects go round in circles", hiding(start))


def _origin(url: str) -> tuple[str, str]:
    return urlsplit(url)[:2]


def _region_of(bucket: str, text: str, timeout: float) -> str | None:
    """Return the region of a bucket, which the answer of S3 may contain."""
    stated = re.search(r"<Region>([a-z0-9-]{1,40})</Region>", text)
    if stated is not None:
        return stated[1]
    opener = build_opener(_Staying)
    request = Request(f"{_S3_HOME}/{quote(bucket)}", method="HEAD")  # noqa: S310
    with suppress(OSError):
        try:
            with opener.open(request, timeout=timeout) as answer:
                headers = answer.headers
        except HTTPError as error:  # the region is public
            headers = error.headers
        region: str | None = headers.get("x-amz-bucket-region")
        return region
    return None


# --- objects -------------------------------------------------------------------------------------


class Bucket:
    """The objects of a store, as a file system with the methods of fsspec that are used here."""

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None) -> None:
        if store_kind(url) == "http":
            hint = "Save it to a local file, and upload that"
            raise UnsupportedError("cannot write to a web server", path=url, hint=hint)
        options, limits = split_nested(storage_options)
        self._url = hiding(url)
        self._store = self._run(open_store, real(url), options, limits, retries=limits.retries)[0]

    def exists(self, path: str) -> bool:
        """Return whether an object exists."""
        try:
            self._call("head", _key(path))
        except FileNotFoundError:
            return False
        return True

    def put_file(self, local: str, path: str) -> None:
        """Upload a file as an object, which appears when it is complete."""
        upload = _Upload(library(self._url), self._store, _key(path), Path(local))
        with self._translating():
            future = submit(self._url, upload, is_urgent=True)
            while not future.done():
                with suppress(TimeoutError):
                    future.result(_POLL_SECONDS)
                if is_pending() and upload.stop():
                    deliver()
            future.result()

    def cp_file(self, path: str, new: str) -> None:
        """Copy an object."""
        self._call("copy", _key(path), _key(new))

    def rm_file(self, path: str) -> None:
        """Remove an object."""
        self._call("delete", _key(path))

    def is_folder(self, path: str) -> bool:
        """Return whether objects have names below a path."""
        listed = self._call("list_with_delimiter", _key(path))
        return bool(listed["objects"] or listed["common_prefixes"])

    def ls(self, path: str, *, detail: bool) -> list[dict[str, str]]:
        """Return the name and the type of the objects and folders in a folder."""
        del detail
        bucket = path.partition("/")[0]
        listed = self._call("list_with_delimiter", _key(path) or None)
        files = [{"name": f"{bucket}/{m['path']}", "type": "file"} for m in listed["objects"]]
        folders = [f"{bucket}/{prefix}" for prefix in listed["common_prefixes"]]
        return [*files, *({"name": name, "type": "directory"} for name in folders)]

    def glob(self, pattern: str) -> list[str]:
        """Return the paths of the objects that match."""
        from fsspec.utils import glob_translate

        bucket, _, pattern = pattern.partition("/")
        folder = pattern.partition("*")[0].rpartition("/")[0]
        if "/" in pattern.removeprefix(folder).lstrip("/"):
            listed = self._run(lambda: library(self._url).list(self._store, folder).collect())
        else:
            listed = self._call("list_with_delimiter", folder)["objects"]
        is_match = re.compile(glob_translate(pattern)).match
        return [f"{bucket}/{meta['path']}" for meta in listed if is_match(meta["path"])]

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        return self._run(getattr(library(self._url), name), self._store, *arguments, **options)

    def _run(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        with self._translating():
            return run_urgently(self._url, partial(call, *arguments, **options))

    @contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            problem = failure(error, self._url)
            if isinstance(problem, TransientError):
                problem = OSError(errno.EIO, str(problem), self._url)
            if isinstance(self._url, Address):  # which the text of the error has
                raise problem from None
            raise problem from error


def file_system(url: str, storage_options: Mapping[str, Any] | None) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    if store_kind(url) is not None:
        return Bucket(url, storage_options), real(url).partition("://")[2]
    return file_system_of(real(url), split_options(storage_options)[0])


class _Upload:
    """The upload of a file as an object, which can be stopped until its last request begins."""

    def __init__(self, obstore: Any, store: Any, key: str, local: Path) -> None:
        self._obstore, self._store, self._key, self._local = obstore, store, key, local
        self._lock = threading.Lock()
        self._is_stopped = self._is_final = False

    def __call__(self) -> None:
        nbytes = max(_PART_NBYTES, self._local.stat().st_size // _MOST_PARTS)
        writer = self._obstore.open_writer(self._store, self._key, buffer_size=nbytes)
        with self._local.open("rb") as file:
            while piece := file.read(nbytes):
                if self._is_stopped:
                    return
                writer.write(piece)
        with self._lock:
            if self._is_stopped:
                return
            self._is_final = True
        writer.close()

    def stop(self) -> bool:
        """Stop before the last request; return False if it has begun."""
        with self._lock:
            self._is_stopped = not self._is_final
        return self._is_stopped


def _key(path: str) -> str:
    # Paths of fsspec begin with the name of the bucket.
    return path.partition("/")[2]
