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
    """Write a checkpoint with digests, larger than what opening reads of it."""
    path = folder / "written.zt"
    ds = xr.Dataset({name: ((f"{name}0", f"{name}1"), array) for name, array in VALUES.items()})
    xckpt.save(ds, path, encoding={"*": {"digest": "crc32c"}}, progress=False)
    return path.read_bytes()


# --- lies -----------------------------------------------------------------------------------------


def _later(lie: Callable[[Request], Iterable[bytes]]) -> Callable[[Request], Iterable[bytes]]:
    """Lie from the third request on, when the file is open."""
    return lambda request: lie(request) if request.number >= 2 else answer(request)


def _pieces(request: Request, seconds: float, *, start: int = 0) -> Iterator[bytes]:
    whole = b"".join(answer(request))
    at = start or whole.index(b"\r\n\r\n") + 4
    yield whole[:at]
    for place in range(at, len(whole)):
        request.wait(seconds)
        yield whole[place : place + 1]


def _endless(request: Request) -> Iterator[bytes]:
    yield from answer(request, b"", Content_Length=None, Transfer_Encoding="chunked")
    while True:
        yield b"10000\r\n" + bytes(1 << 16) + b"\r\n"


def _headers_without_end(_: Request) -> Iterator[bytes]:
    yield b"HTTP/1.1 206 Partial Content\r\n"
    for number in count():
        yield b"X-%d: %s\r\n" % (number, b"x" * 1000)


def _silent(request: Request) -> Iterator[bytes]:
    request.wait(60)
    yield b""


def _span(request: Request, by: int) -> str:
    return f"bytes {request.first + by}-{request.last + by}/{len(request.data)}"


def _elsewhere(request: Request) -> bytes:
    start = max(0, request.first - 1)
    return (request.data + bytes(2))[start : start + len(request.body)]


def _lies(other: str) -> dict[str, Callable[[Request], Iterable[bytes]]]:
    """Return what a server does, by what it is called in the table."""

    def redirected(to: str) -> Callable[[Request], Iterable[bytes]]:
        return lambda r: answer(r, b"", status="302 Found", Location=to, Content_Range=None)

    def refused(status: str, **headers: str) -> Callable[[Request], Iterable[bytes]]:
        return lambda r: answer(r, b"", status=status, Content_Range=None, ETag=None, **headers)

    def every(share: int, lie: Callable[[Request], Iterable[bytes]]) -> Any:
        return lambda r: answer(r) if r.number % share else lie(r)

    return {
        "none": answer,
        "200 and the whole file instead of a range": lambda r: answer(
            r, r.data, status="200 OK", Content_Range=None
        ),
        "other bytes than requested, with their Content-Range": _later(
            lambda r: answer(r, _elsewhere(r), Content_Range=_span(r, -1))
        ),
        "other bytes than requested, with the requested Content-Range": _later(
            lambda r: answer(r, _elsewhere(r))
        ),
        "zeros instead of the data": _later(lambda r: answer(r, bytes(len(r.body)))),
        "a Content-Range of another size": _later(
            lambda r: answer(r, Content_Range=f"bytes {r.first}-{r.last}/{len(r.data) + 1}")
        ),
        "an invalid Content-Range": _later(lambda r: answer(r, Content_Range="bytes 9-1/x")),
        "206 without Content-Range": _later(lambda r: answer(r, Content_Range=None)),
        "half of a body, then the end": lambda r: answer(
            r, r.body[: max(1, len(r.body) // 2)], Content_Length=str(len(r.body))
        ),
        "half of a body, with its length": lambda r: answer(r, r.body[: max(1, len(r.body) // 2)]),
        "no bytes of the body": _later(lambda r: answer(r, b"", Content_Length=str(len(r.body)))),
        "a longer body": lambda r: answer(r, r.body + bytes(9999)),
        "an endless body": _later(_endless),
        "a Content-Length of 2**62": _later(lambda r: answer(r, Content_Length=str(1 << 62))),
        "a negative Content-Length": _later(lambda r: answer(r, Content_Length="-5")),
        "chunks with invalid sizes": _later(
            lambda r: answer(
                r, b"zz\r\n" + r.body, Content_Length=None, Transfer_Encoding="chunked"
            )
        ),
        "a new ETag after opening": _later(lambda r: answer(r, ETag='"second"')),
        "another file with the same ETag": _later(lambda r: answer(r, r.body[::-1])),
        "a new size after opening": _later(
            lambda r: answer(r, Content_Range=f"bytes {r.first}-{r.last}/{len(r.data) - 9}")
        ),
        "the file vanishes": _later(refused("404 Not Found")),
        "access is withdrawn": _later(refused("403 Forbidden")),
        "416 for an existing range": _later(refused("416 Range Not Satisfiable")),
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
        "a redirect to another host": redirected(f"{other}{_PATH}"),
        "a byte of the body every 50 ms": _later(lambda r: _pieces(r, 0.05)),
        "a byte of the headers every 200 ms": _later(lambda r: _pieces(r, 0.2, start=1)),
        "endless headers": _later(_headers_without_end),
        "no answer at all": _later(_silent),
        "the connection closed at once": _later(lambda _: [b""]),
        "something that is not HTTP": _later(lambda _: [b"SSH-2.0-OpenSSH_9.9\r\n" * 9]),
        "Content-Encoding: gzip": _later(
            lambda r: answer(r, zlib.compress(r.body, wbits=31), Content_Encoding="gzip")
        ),
        "a gzip bomb": _later(lambda r: answer(r, _bomb(), Content_Encoding="gzip")),
    }


@cache
def _bomb() -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(256)) + packer.flush()


def read(url: str) -> str:
    """Open a checkpoint and read all of it; return what happened, or raise what is not allowed."""
    try:
        ds = xr.open_dataset(url, engine="ztensor", verify=True, storage_options=_PATIENT)
        for name, wanted in VALUES.items():
            found = ds[name].values
            if found.tobytes() != wanted.tobytes():
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
    with LyingServer(data) as other, dask.config.set(scheduler="sync"):
        lies = _lies(other.url)
        read(f"{other.url}{_PATH}")  # what is loaded on the way takes time
        other.paths.clear()
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            tried = [threads.submit(_tried, trial, data, *lie) for lie in lies.items()]
            for each in tried:
                yield each.result()
        strays = len(other.paths)
        yield Tally(
            "requests to another host, except after a redirect",
            1,
            0,
            0.0,
            f"{strays} after a redirect",
        )
        yield from _faults(trial, data)
        yield from _names(trial)


def _tried(
    trial: Trial, data: bytes, what: str, lie: Callable[[Request], Iterable[bytes]]
) -> Tally:
    start, failures = time.monotonic(), 0
    try:
        with LyingServer(data, lie, {_PATH: data}) as server:
            said = read(f"{server.url}{_PATH}")
            requests = len(server.paths)
        seconds = time.monotonic() - start
        if seconds > _MOST_SECONDS:
            raise TimeoutError(f"it took {seconds:.0f} seconds")  # noqa: TRY301
        said += f" in {seconds:.1f} s, {requests} requests"
    except Exception as error:  # noqa: BLE001  any is what is looked for
        said = f"{type(error).__name__}: {error}"[:200]
        failures = 1
        trial.fail("remote", {"lie.txt": what.encode()}, error)
    return Tally(what, 1, failures, 0.0, said)


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
                said = read(f"{server.url}{_PATH}")
            except Exception as error:  # noqa: BLE001
                failures += 1
                trial.fail("remote", {"lie.txt": b"20 % faults"}, error)
                continue
            outcomes[said] = outcomes.get(said, 0) + 1
        faults, requests = server.faults, len(server.requests)
    said = f"{faults:,} of {requests:,} requests failed; "
    said += ", ".join(f"{number:,} {what}" for what, number in sorted(outcomes.items()))
    yield Tally("20 % of requests fail or are cut", cases, failures, time.monotonic() - start, said)


# --- names that lead elsewhere --------------------------------------------------------------------

NAMES = (
    *("../secret", "a/../../secret", "./../secret", "/secret", "//127.0.0.1/secret", "..", "."),
    *("..\\secret", "C:secret", "\\\\h\\secret", "%2e%2e/secret", "..%2fsecret", "%2e%2e%2fsecret"),
    *("http://OTHER/secret", "OTHER", "file:///etc/passwd", "memory://secret", "s3://b/secret"),
    *("?secret", "#secret", "a?b=../secret", ";secret", "@OTHER/secret", "secret\0", "~/secret"),
    *("simplecache::http://OTHER/secret", "zip://secret::m", "\n../secret", "$HOME/secret", "a//b"),
)  # fmt: skip


def _naming(name: str) -> dict[str, dict[str, bytes]]:
    """Write checkpoints that say their data are in a file of some name, by format."""
    import json

    one = mlcp_files.tensor("w", np.ones(3, "f4"))
    fields = mlcp_files.fields([[one]])
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
    """Watch which files are opened by name."""
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
    """Open checkpoints whose data are said to be elsewhere, in folders and on the web."""
    sys.addaudithook(_audit)
    for where, check in (("in a folder", _in_folder), ("on the web", _on_the_web)):
        start, cases, failures = time.monotonic(), 0, trial.failures
        for format_name, files in _naming("m").items():  # what is not forbidden is looked at
            asked = check(trial.folder / where, "m", format_name, files)
            found = {path.rpartition("/")[2] for path in asked if "/inner/" in path}
            if not found - files.keys():
                trial.fail(f"name {format_name} {where}", files, "nobody looks for the file")
            rmtree(trial.folder / where, ignore_errors=True)
        for name in NAMES:
            for format_name, files in _naming(name).items():
                cases += 1
                try:
                    check(trial.folder / f"{where} {cases}", name, format_name, files)
                except Exception as error:  # noqa: BLE001
                    trial.fail(f"name {format_name} {where}", files, error)
        broken, seconds = trial.failures - failures, time.monotonic() - start
        said = "nothing outside the folder was touched"
        yield Tally(f"names of shards outside the folder, {where}", cases, broken, seconds, said)


def _touch(obj: str, engine: str) -> None:
    """Open something and read what can be read."""
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
    for each in (folder / "secret", inner / "m", inner / "m-m.zt"):
        each.write_bytes(bytes(8192))
    for label, data in files.items():
        (inner / label).write_bytes(data)
    path = str(inner / next(iter(files)))
    with _watched() as opened:
        _touch(path, engine)
    outside = [
        each
        for each in map(os.path.abspath, opened)
        if "secret" in each and not each.startswith(str(inner) + os.sep)
    ]
    if outside or any("passwd" in each and each.strip("/") == "etc/passwd" for each in opened):
        raise AssertionError(f"{name!r} opens {outside or opened}")
    return opened


def _on_the_web(_: Path, name: str, engine: str, files: dict[str, bytes]) -> list[str]:
    secret = {"/secret": bytes(8192), "/folder/secret": bytes(8192)}
    with LyingServer(b"", files=secret) as other:
        host = other.url.removeprefix("http://")
        made = {label: data.replace(b"OTHER", host.encode()) for label, data in files.items()}
        served = secret | {f"/folder/inner/{label}": data for label, data in made.items()}
        with LyingServer(b"", files=served) as server:
            _touch(f"{server.url}/folder/inner/{next(iter(files))}", engine)
            asked = list(server.paths)
        if other.paths:
            raise AssertionError(f"{name!r} leads to another host: {other.paths}")
    for path in asked:
        plain = unquote(path.partition("?")[0])
        parts = plain.split("/")
        if not path.startswith("/folder/inner/") or ".." in parts:
            raise AssertionError(f"{name!r} leads to {path}")
    return asked


def again(path: Path) -> None:
    """Try a lie again, or the name that a checkpoint has."""
    import tempfile
    from pathlib import Path as RealPath

    from torture.trial import left

    files = left(path)
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
            lie = _lies(other.url).get(files["lie.txt"].decode(), answer)
            with LyingServer(data, lie, {_PATH: data}) as server:
                print(read(f"{server.url}{_PATH}"))
