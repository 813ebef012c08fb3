"""The base of the servers of tests, which listen while a block of ``with`` runs."""

from __future__ import annotations

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from socketserver import BaseServer


class Listening:
    """Servers on free ports of this machine, each in its thread."""

    def __init__(self, *servers: BaseServer) -> None:
        self._servers = servers
        #: No answer is waited for any more.
        self.closing = threading.Event()

    def __enter__(self) -> Self:
        self._threads = [
            threading.Thread(target=server.serve_forever, args=(0.01,)) for server in self._servers
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()


class Handler(BaseHTTPRequestHandler):
    """Answers requests quietly, over connections that stay open."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # a client may hang up at any time
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        """Suppress the log."""

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        raise NotImplementedError


class _Server(ThreadingHTTPServer):
    # Connections that are not accepted yet. Beyond the default of 5 the system drops attempts, and
    # 32 requests may come at once.
    request_queue_size = 128


def http_server(handler: type[Handler], **attributes: Any) -> ThreadingHTTPServer:
    """Make a server whose handlers have some more attributes."""
    return _Server(("127.0.0.1", 0), type("_Handler", (handler,), attributes))


def url_of(server: Any) -> str:
    """Return where a server listens."""
    return f"http://127.0.0.1:{server.server_port}"
