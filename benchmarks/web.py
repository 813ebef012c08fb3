"""A web server as slow as an object store: a latency of answers, and a rate of each connection.

``python -m benchmarks.web FOLDER LATENCY RATE`` prints its port. ``/-/counts`` tells the requests
so far, the bytes of their bodies, and how many were answered at the same time at most.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import re
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.request import urlopen

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Counts", "Server", "serving"]

_PIECE = 1 << 18
_RANGE = re.compile(rb"range: *bytes=(\d+)-(\d+)", re.IGNORECASE)


class Counts(NamedTuple):
    """The answers of a server since the last query."""

    requests: int
    nbytes: int
    at_once: int


class Server(NamedTuple):
    """A server in a separate process."""

    url: str

    def counts(self) -> Counts:
        """Return the counts, which begin again at 0."""
        with urlopen(f"{self.url}/-/counts") as answer:  # noqa: S310  our own
            return Counts(*json.load(answer))


@contextmanager
def serving(folder: Path, latency: float = 0, rate: float = 0) -> Iterator[Server]:
    """Serve the files of a folder, with a latency in seconds and a rate in bytes per second."""
    command = [sys.executable, "-m", "benchmarks.web", str(folder), str(latency), str(rate)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603  our own
    with process:
        try:
            port = int((process.stdout or sys.stdin).readline())
            yield Server(f"http://127.0.0.1:{port}")
        finally:
            process.kill()


class _Answering:
    def __init__(self, folder: Path, latency: float, rate: float) -> None:
        self.latency, self.rate = latency, rate
        self.files = {
            f"/{path.relative_to(folder)}".encode(): memoryview(
                mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            )
            for path in folder.rglob("*")
            if path.is_file()
            for file in [path.open("rb")]
        }
        self.requests = self.nbytes = self.now = self.at_once = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                method, target, _ = request.split(b" ", 2)
                path = target.partition(b"?")[0]
                if path == b"/-/counts":
                    text = json.dumps([self.requests, self.nbytes, self.at_once]).encode()
                    self.requests = self.nbytes = self.at_once = 0
                    await self.send(writer, b"200 OK", text, b"", is_paced=False)
                    continue
                self.now += 1
                self.requests += 1
                self.at_once = max(self.at_once, self.now)
                try:
                    await self.answer(writer, method, path, _RANGE.search(request))
                finally:
                    self.now -= 1

    async def answer(
        self,
        writer: asyncio.StreamWriter,
        method: bytes,
        path: bytes,
        asked: re.Match[bytes] | None,
    ) -> None:
        await asyncio.sleep(self.latency)
        data = self.files.get(path)
        if data is None:
            await self.send(writer, b"404 Not Found", b"", b"")
            return
        headers, status = b'ETag: "1"\r\nAccept-Ranges: bytes\r\n', b"200 OK"
        size = len(data)
        if asked:
            first, last = int(asked[1]), min(int(asked[2]), size - 1)
            data, status = data[first : last + 1], b"206 Partial Content"
            headers += b"Content-Range: bytes %d-%d/%d\r\n" % (first, last, size)
        if method == b"HEAD":
            writer.write(b"HTTP/1.1 200 OK\r\n%sContent-Length: %d\r\n\r\n" % (headers, size))
            return
        self.nbytes += len(data)
        await self.send(writer, status, data, headers)

    async def send(
        self,
        writer: asyncio.StreamWriter,
        status: bytes,
        body: bytes | memoryview,
        headers: bytes,
        *,
        is_paced: bool = True,
    ) -> None:
        writer.write(b"HTTP/1.1 %s\r\n%sContent-Length: %d\r\n\r\n" % (status, headers, len(body)))
        loop = asyncio.get_running_loop()
        start = loop.time()
        for at in range(0, len(body), _PIECE):
            writer.write(body[at : at + _PIECE])
            await writer.drain()
            if is_paced and self.rate:
                wait = start + min(at + _PIECE, len(body)) / self.rate - loop.time()
                if wait > 0:
                    await asyncio.sleep(wait)


async def _main(folder: str, latency: str, rate: str) -> None:
    answering = _Answering(Path(folder), float(latency), float(rate))
    server = await asyncio.start_server(answering.connected, "127.0.0.1", 0, limit=1 << 16)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
