"""A web server whose answers a function makes from the requests, byte by byte."""

from __future__ import annotations

import re
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["LyingServer", "Request", "answer"]

_RANGE = re.compile(rb"range: *bytes=(\d+)-(\d+)", re.IGNORECASE)


@dataclass
class Request:
    """A request for bytes of a file, both ends included."""

    path: str
    method: str
    data: bytes
    first: int
    last: int
    number: int
    is_range: bool
    closing: threading.Event

    @property
    def body(self) -> bytes:
        """The requested bytes."""
        return self.data[self.first : self.last + 1]

    def wait(self, seconds: float) -> None:
        """Wait; raise `ConnectionError` if the server is closing."""
        if self.closing.wait(seconds):
            raise ConnectionError


Lie = "Callable[[Request], Iterable[bytes]]"


def answer(
    request: Request,
    body: bytes | None = None,
    *,
    status: str | None = None,
    **headers: str | None,
) -> Iterable[bytes]:
    """Yield a correct answer, except for the arguments; None omits a header."""
    content = request.body if body is None else body
    response_headers: dict[str, str | None] = {
        "Content-Length": str(len(content)),
        "ETag": '"first"',
        "Accept-Ranges": "bytes",
    }
    if request.is_range:
        span = f"{request.first}-{request.first + len(request.body) - 1}"
        response_headers["Content-Range"] = f"bytes {span}/{len(request.data)}"
    response_headers |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{name}: {value}" for name, value in response_headers.items() if value is not None]
    code = status or ("206 Partial Content" if request.is_range else "200 OK")
    yield "\r\n".join([f"HTTP/1.1 {code}", *lines, "", ""]).encode("latin-1")
    if request.method != "HEAD":
        yield content


@dataclass
class LyingServer:
    """Server at ``url`` of one content under any path; ``paths`` has the requested paths."""

    data: bytes
    lie: Callable[[Request], Iterable[bytes]] = answer
    files: dict[str, bytes] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._closing = threading.Event()
        handler = type("Handler", (_Handler,), {"lying": self, "closing": self._closing})
        self._server = ThreadingTCPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(StreamRequestHandler):
    lying: LyingServer
    closing: threading.Event
    disable_nagle_algorithm = True

    def handle(self) -> None:
        self.connection.settimeout(60)
        with suppress(OSError, ValueError):
            while self._answered():
                pass
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _answered(self) -> bool:
        """Answer a request; return whether the connection can be reused."""
        lines = []
        while (line := self.rfile.readline(1 << 16)) not in {b"\r\n", b"\n", b""}:
            lines.append(line)
        if not lines:
            return False
        method, path, _ = lines[0].decode("latin-1").split(" ", 2)
        lying = self.lying
        number = len(lying.paths)
        lying.paths.append(path)
        files = lying.files
        data = files.get(path.partition("?")[0]) if files else lying.data
        if data is None:
            self.wfile.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return True
        range_ = _RANGE.search(b"".join(lines[1:]))
        first, last = (int(range_[1]), int(range_[2])) if range_ else (0, len(data) - 1)
        last = min(last, len(data) - 1)
        request = Request(path, method, data, first, last, number, range_ is not None, self.closing)
        sent, body = b"", 0
        for piece in lying.lie(request):
            self.wfile.write(piece)
            body += len(piece) if b"\r\n\r\n" in sent else 0
            sent = sent or piece
        length = re.search(rb"content-length: *(\d+)", sent, re.IGNORECASE)
        return length is not None and (method == "HEAD" or body == int(length[1]))
