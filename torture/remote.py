"""A server that lies, fails and stalls, and names of files that lead elsewhere.

A checkpoint with digests is opened over HTTP and all its values are read, with a limit of two
seconds for a request. Within fifteen seconds, either the values are right, or a documented error
names the URL. No request may go to any other address.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import count
from shutil import rmtree
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import cbor2
import dask
import numpy as np
import xarray as xr

import xckpt
from tests.formats import mlcp_files, torch_files
from tests.formats.ztensor_files import V2_MAGIC, v2_container
from tests.storage.web_server import WebServer
from torture.lying import LyingServer, Request, answer
from torture.trial import Tally
from xckpt.errors import CheckpointError, CheckpointWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from torture.trial import Trial

_PATIENT = {"xckpt": {"timeout": 2.0}}
_MOST_SECONDS = 15.0
_PATH = "/m.zt"
_AT_ONCE = 8

VALUES = {
    name: np.arange(size, dtype=dtype).reshape(2, -1)
    for name, size, dtype in (("a", 60_000, "f4"), ("b", 60_000, "f8"), ("c", 10, "i4"))
}


def checkpoint(folder: Path) -> bytes:
    """Return the bytes of a checkpoint with digests, longer than the part that opening reads."""
    path = folder / "written.zt"
    ds = xr.Dataset({name: ((f"{name}0", f"{name}1"), array) for name, array in VALUES.items()})
    xckpt.save(ds, path, encoding={"*": {"digest": "crc32c"}}, progress=False)
    return path.read_bytes()


# --- lies -----------------------------------------------------------------------------------------


def _after_opening(
    lie: Callable[[Request], Iterable[bytes]],
) -> Callable[[Request], Iterable[bytes]]:
    """Apply a lie from the third request on, when the file is open."""
    return lambda request: lie(request) if request.number >= 2 else answer(request)


def _pieces(request: Request, seconds: float, *, start: int = 0) -> Iterator[bytes]:
    response = b"".join(answer(request))
    header_end = start or response.index(b"\r\n\r\n") + 4
    yield response[:header_end]
    for position in range(header_end, len(response)):
        request.wait(seconds)
        yield response[position : position + 1]


def _endless_chunks(request: Request) -> Iterator[bytes]:
    yield from answer(request, b"", Content_Length=None, Transfer_Encoding="chunked")
    while True:
        yield b"10000\r\n" + bytes(1 << 16) + b"\r\n"


def _headers_without_end(_: Request) -> Iterator[bytes]:
    yield b"HTTP/1.1 206 Partial Content\r\n"
    for number in count():
        yield b"X-%d: %s\r\n" % (number, b"x" * 1000)


def _send_nothing(request: Request) -> Iterator[bytes]:
    request.wait(60)
    yield b""


def _span(request: Request, by: int) -> str:
    return f"bytes {request.first + by}-{request.last + by}/{len(request.data)}"


def _shifted_body(request: Request) -> bytes:
    start = max(0, request.first - 1)
    return (request.data + bytes(2))[start : start + len(request.body)]


def _lies_by_name(other_host: str) -> dict[str, Callable[[Request], Iterable[bytes]]]:
    """Return the lies of a server by their name in the table."""

    def redirected(location: str) -> Callable[[Request], Iterable[bytes]]:
        return lambda r: answer(r, b"", status="302 Found", Location=location, Content_Range=None)

    def refused(status: str, **headers: str) -> Callable[[Request], Iterable[bytes]]:
        return lambda r: answer(r, b"", status=status, Content_Range=None, ETag=None, **headers)

    def every(share: int, lie: Callable[[Request], Iterable[bytes]]) -> Any:
        return lambda r: answer(r) if r.number % share else lie(r)

    return {
        "none": answer,
        "200 and the whole file instead of a range": lambda r: answer(
            r, r.data, status="200 OK", Content_Range=None
        ),
        "other bytes than requested, with their Content-Range": _after_opening(
            lambda r: answer(r, _shifted_body(r), Content_Range=_span(r, -1))
        ),
        "other bytes than requested, with the requested Content-Range": _after_opening(
            lambda r: answer(r, _shifted_body(r))
        ),
        "zeros instead of the data": _after_opening(lambda r: answer(r, bytes(len(r.body)))),
        "a Content-Range of another size": _after_opening(
            lambda r: answer(r, Content_Range=f"bytes {r.first}-{r.last}/{len(r.data) + 1}")
        ),
        "an invalid Content-Range": _after_opening(
            lambda r: answer(r, Content_Range="bytes 9-1/x")
        ),
        "206 without Content-Range": _after_opening(lambda r: answer(r, Content_Range=None)),
        "half of a body, then the end": lambda r: answer(
            r, r.body[: max(1, len(r.body) // 2)], Content_Length=str(len(r.body))
        ),
        "half of a body, with its length": lambda r: answer(r, r.body[: max(1, len(r.body) // 2)]),
        "no bytes of the body": _after_opening(
            lambda r: answer(r, b"", Content_Length=str(len(r.body)))
        ),
        "a longer body": lambda r: answer(r, r.body + bytes(9999)),
        "an endless body": _after_opening(_endless_chunks),
        "a Content-Length of 2**62": _after_opening(
            lambda r: answer(r, Content_Length=str(1 << 62))
        ),
        "a negative Content-Length": _after_opening(lambda r: answer(r, Content_Length="-5")),
        "chunks with invalid sizes": _after_opening(
            lambda r: answer(
                r, b"zz\r\n" + r.body, Content_Length=None, Transfer_Encoding="chunked"
            )
        ),
        "a new ETag after opening": _after_opening(lambda r: answer(r, ETag='"second"')),
        "another file with the same ETag": _after_opening(lambda r: answer(r, r.body[::-1])),
        "a new size after opening": _after_opening(
            lambda r: answer(r, Content_Range=f"bytes {r.first}-{r.last}/{len(r.data) - 9}")
        ),
        "the file vanishes": _after_opening(refused("404 Not Found")),
        "access is withdrawn": _after_opening(refused("403 Forbidden")),
        "416 for an existing range": _after_opening(refused("416 Range Not Satisfiable")),
        "500, always": refused("500 Internal Server Error"),
        "503 every second time": every(2, refused("503 Service Unavailable")),
        "429 every third time, Retry-After: 1": every(
            3, refused("429 Too Many Requests", Retry_After="1")
        ),
        "429 always, Retry-After: 9999": refused("429 Too Many Requests", Retry_After="9999"),
        "a redirect to itself": redirected(_PATH),
        "endless redirects": lambda r: redirected(f"{_PATH}?{r.number}")(r),
        "a redirect to file:///etc/passwd": redirected("file:///etc/passwd"),
        "a redirect to no address": redirected("http://"),
        "a redirect that expires": lambda r: (
            answer(r)
            if r.path.endswith(f"?{r.number - 1}")
            else refused("403 Forbidden")(r)
            if "?" in r.path
            else redirected(f"{r.path}?{r.number}")(r)
        ),
        "a redirect to another host": redirected(f"{other_host}{_PATH}"),
        "a byte of the body every 50 ms": _after_opening(lambda r: _pieces(r, 0.05)),
        "a byte of the headers every 200 ms": _after_opening(lambda r: _pieces(r, 0.2, start=1)),
        "endless headers": _after_opening(_headers_without_end),
        "no answer at all": _after_opening(_send_nothing),
        "the connection closed at once": _after_opening(lambda _: [b""]),
        "something that is not HTTP": _after_opening(lambda _: [b"SSH-2.0-OpenSSH_9.9\r\n" * 9]),
        "Content-Encoding: gzip": _after_opening(
            lambda r: answer(r, zlib.compress(r.body, wbits=31), Content_Encoding="gzip")
        ),
        "a gzip bomb": _after_opening(lambda r: answer(r, _bomb(), Content_Encoding="gzip")),
    }


@cache
def _bomb() -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(256)) + packer.flush()


def read(url: str) -> str:
    """Open a checkpoint and read all values; return the outcome.

    Raises if values are wrong, or if an error does not name the URL.
    """
    try:
        ds = xr.open_dataset(url, engine="ztensor", verify=True, storage_options=_PATIENT)
        for name, expected in VALUES.items():
            values = ds[name].values
            if values.tobytes() != expected.tobytes():
                raise AssertionError(f"wrong values of {name!r}, and no error")
    except (CheckpointError, OSError) as error:
        if url not in str(error):
            raise AssertionError(f"the URL is not in: {error!r}") from error
        return f"{type(error).__name__}"
    return "right values"


def run(trial: Trial) -> Iterator[Tally]:
    """Try each lie, then faults at random, then names that lead elsewhere."""
    os.environ["XCKPT_CACHE_DIR"] = str(trial.folder / "cache")
    warnings.simplefilter("ignore", CheckpointWarning)
    data = checkpoint(trial.folder)
    with LyingServer(data) as other_host, dask.config.set(scheduler="sync"):
        lies = _lies_by_name(other_host.url)
        read(f"{other_host.url}{_PATH}")  # imports would count as time of the first lie
        other_host.paths.clear()
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            futures = [threads.submit(_try_lie, trial, data, *lie) for lie in lies.items()]
            for future in futures:
                yield future.result()
        strays = len(other_host.paths)
        yield Tally(
            "requests to another host, except after a redirect",
            1,
            0,
            0.0,
            f"{strays} after a redirect",
        )
        yield from _faults(trial, data)
        yield from _names(trial)


def _try_lie(
    trial: Trial, data: bytes, title: str, lie: Callable[[Request], Iterable[bytes]]
) -> Tally:
    start, failures = time.monotonic(), 0
    try:
        with LyingServer(data, lie, {_PATH: data}) as server:
            outcome = read(f"{server.url}{_PATH}")
            requests = len(server.paths)
        seconds = time.monotonic() - start
        if seconds > _MOST_SECONDS:
            raise TimeoutError(f"it took {seconds:.0f} seconds")  # noqa: TRY301
        outcome += f" in {seconds:.1f} s, {requests} requests"
    except Exception as error:  # noqa: BLE001  any is what is looked for
        outcome = f"{type(error).__name__}: {error}"[:200]
        failures = 1
        trial.fail("remote", {"lie.txt": title.encode()}, error)
    return Tally(title, 1, failures, 0.0, outcome)


def _faults(trial: Trial, data: bytes) -> Iterator[Tally]:
    """Fail 20 % of requests at random, for a third of the time."""
    start, cases, failures = time.monotonic(), 0, 0
    faults = requests = 0
    outcomes: dict[str, int] = {}
    stop = start + max(2.0, trial.remaining / 3)
    with WebServer(**{"m.zt": data}) as server:
        server.behaviour.failing = 0.2
        server.random = np.random.default_rng(trial.seed)
        while time.monotonic() < stop and cases < 1000:
            cases += 1
            try:
                outcome = read(f"{server.url}{_PATH}")
            except Exception as error:  # noqa: BLE001
                failures += 1
                trial.fail("remote", {"lie.txt": b"20 % faults"}, error)
                continue
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
        faults, requests = server.faults, len(server.requests)
    outcome = f"{faults:,} of {requests:,} requests failed; "
    outcome += ", ".join(f"{number:,} {title}" for title, number in sorted(outcomes.items()))
    yield Tally(
        "20 % of requests fail or are cut", cases, failures, time.monotonic() - start, outcome
    )


# --- names that lead elsewhere --------------------------------------------------------------------

NAMES = (
    *("../secret", "a/../../secret", "./../secret", "/secret", "//127.0.0.1/secret", "..", "."),
    *("..\\secret", "C:secret", "\\\\h\\secret", "%2e%2e/secret", "..%2fsecret", "%2e%2e%2fsecret"),
    *("http://OTHER/secret", "OTHER", "file:///etc/passwd", "memory://secret", "s3://b/secret"),
    *("?secret", "#secret", "a?b=../secret", ";secret", "@OTHER/secret", "secret\0", "~/secret"),
    *("simplecache::http://OTHER/secret", "zip://secret::m", "\n../secret", "$HOME/secret", "a//b"),
)  # fmt: skip


def _files_naming(name: str) -> dict[str, dict[str, bytes]]:
    """Return the files of checkpoints whose data are in a file of the given name, by format."""
    import json

    tensor = mlcp_files.tensor("w", np.ones(3, "f4"))
    fields = mlcp_files.fields([[tensor]])
    fields["shards"][0]["filePath"] = name
    split = {"weight_map": {"w": name}}
    digest = "xxh3:" + "0" * 16
    shards = {name: {"size": 8192, "digest": digest}}
    part = {"blob": [4096, 12], "dtype": "f32", "shard": name}
    sharded = {
        "shards": shards,
        "objects": {"w": {"shape": [3], "layout": "dense", "parts": {"data": part}}},
    }
    files = torch_files.distributed({"w": {(0,): np.ones(3, "f4")}}, {"w": (3,)})
    encoded = name.encode()
    listed = files[".metadata"].replace(
        torch_files.text("__0_0.distcp"),
        b"X" + len(encoded).to_bytes(4, "little") + encoded,
    )
    return {
        "mlcp": {"m.metadata.json": json.dumps(fields).encode()},
        "safetensors": {"m.safetensors.index.json": json.dumps(split).encode()},
        "ztensor": {"m.zt": v2_container(cbor2.dumps(sharded, canonical=True), V2_MAGIC)},
        "torch": {".metadata": listed},
    }


@contextmanager
def _watched() -> Iterator[list[str]]:
    """Collect the paths of files that are opened in the block."""
    opened: list[str] = []
    _watching.append(opened)
    try:
        yield opened
    finally:
        _watching.remove(opened)


_watching: list[list[str]] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event == "open" and isinstance(arguments[0], str):
        for opened in _watching:
            opened.append(arguments[0])


def _names(trial: Trial) -> Iterator[Tally]:
    """Open checkpoints that refer to files elsewhere, in folders and on the web."""
    sys.addaudithook(_audit)
    for place, check in (("in a folder", _in_folder), ("on the web", _on_the_web)):
        start, cases, failures = time.monotonic(), 0, trial.failures
        for format_name, files in _files_naming("m").items():  # an allowed name has to be looked up
            opened = check(trial.folder / place, "m", format_name, files)
            siblings = {path.rpartition("/")[2] for path in opened if "/inner/" in path}
            if not siblings - files.keys():
                trial.fail(f"name {format_name} {place}", files, "nobody looks for the file")
            rmtree(trial.folder / place, ignore_errors=True)
        for name in NAMES:
            for format_name, files in _files_naming(name).items():
                cases += 1
                try:
                    check(trial.folder / f"{place} {cases}", name, format_name, files)
                except Exception as error:  # noqa: BLE001
                    trial.fail(f"name {format_name} {place}", files, error)
        broken, seconds = trial.failures - failures, time.monotonic() - start
        summary = "nothing outside the folder was touched"
        yield Tally(f"names of shards outside the folder, {place}", cases, broken, seconds, summary)


def _touch(obj: str, engine: str) -> None:
    """Open a checkpoint and read all readable variables."""
    try:
        ds = xr.open_dataset(obj, engine=engine, storage_options=_PATIENT if "://" in obj else None)
        for variable in ds.variables.values():
            try:
                variable.values  # noqa: B018
            except (CheckpointError, OSError):
                continue
    except (CheckpointError, OSError):
        return


def _in_folder(folder: Path, name: str, engine: str, files: dict[str, bytes]) -> list[str]:
    inner = folder / "inner"
    inner.mkdir(parents=True)
    for decoy in (folder / "secret", inner / "m", inner / "m-m.zt"):
        decoy.write_bytes(bytes(8192))
    for label, data in files.items():
        (inner / label).write_bytes(data)
    path = str(inner / next(iter(files)))
    with _watched() as opened:
        _touch(path, engine)
    outside = [
        opened_path
        for opened_path in map(os.path.abspath, opened)
        if "secret" in opened_path and not opened_path.startswith(str(inner) + os.sep)
    ]
    if outside or any(
        "passwd" in opened_path and opened_path.strip("/") == "etc/passwd" for opened_path in opened
    ):
        raise AssertionError(f"{name!r} opens {outside or opened}")
    return opened


def _on_the_web(_: Path, name: str, engine: str, files: dict[str, bytes]) -> list[str]:
    secret = {"/secret": bytes(8192), "/folder/secret": bytes(8192)}
    with LyingServer(b"", files=secret) as other_host:
        host = other_host.url.removeprefix("http://")
        contents = {label: data.replace(b"OTHER", host.encode()) for label, data in files.items()}
        served = secret | {f"/folder/inner/{label}": data for label, data in contents.items()}
        with LyingServer(b"", files=served) as server:
            _touch(f"{server.url}/folder/inner/{next(iter(files))}", engine)
            requested = list(server.paths)
        if other_host.paths:
            raise AssertionError(f"{name!r} leads to another host: {other_host.paths}")
    for path in requested:
        plain = unquote(path.partition("?")[0])
        parts = plain.split("/")
        if not path.startswith("/folder/inner/") or ".." in parts:
            raise AssertionError(f"{name!r} leads to {path}")
    return requested


def again(path: Path) -> None:
    """Repeat the lie of a recorded failure, or open its checkpoint again."""
    import tempfile
    from pathlib import Path as RealPath

    from torture.trial import read_evidence

    files = read_evidence(path)
    with tempfile.TemporaryDirectory() as name:
        folder = RealPath(name)
        if "lie.txt" not in files:
            sys.addaudithook(_audit)
            engine = path.name.split("-")[1]
            _in_folder(folder / "files", "?", engine, files)
            _on_the_web(folder / "web", "?", engine, files)
            return
        os.environ["XCKPT_CACHE_DIR"] = str(folder / "cache")
        data = checkpoint(folder)
        with LyingServer(data) as other:
            lie = _lies_by_name(other.url).get(files["lie.txt"].decode(), answer)
            with LyingServer(data, lie, {_PATH: data}) as server:
                print(read(f"{server.url}{_PATH}"))
