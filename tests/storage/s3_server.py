"""An S3 server for tests: moto's, behind something that counts requests and gets in their way."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.storage.servers import Listening, url_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BUCKET = "bucket"


class S3Server(Listening):
    """Serves objects; ``options`` are what fsspec needs to reach it.

    Attributes
    ----------
    requests : list of (str, str, str or None)
        Method, path and range of each since the last `forget`.
    nbytes_sent : int
        Of bodies.
    latency : float
        Seconds that each request waits.
    failing : float
        Share of requests that fail with status 500, or whose body is cut.
    refuse : callable
        Tells by path and range whether a request always fails.
    forbid : callable
        Tells by the query of an address that is signed whether it is refused.
    """

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Silent(WSGIRequestHandler):
            def log(self, *_: Any) -> None:
                pass

        self._app = DomainDispatcherApplication(create_backend_app)
        self.latency = self.failing = 0.0
        self.refuse: Callable[[str, str | None], bool] = lambda _path, _range: False
        self.forbid: Callable[[str], bool] = lambda _query: False
        self.faults = 0
        self._random = np.random.default_rng(0)
        self._lock = threading.Lock()
        self.forget()
        server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Silent)
        super().__init__(server)
        self.url = url_of(server)
        self.options: dict[str, Any] = {
            "key": "test",
            "secret": "test",
            "config_kwargs": {"retries": {"max_attempts": 3}},
            "client_kwargs": {"endpoint_url": self.url, "region_name": "us-east-1"},
        }

    def forget(self) -> None:
        """Begin to count anew."""
        self.requests: list[tuple[str, str, str | None]] = []
        self.nbytes_sent = 0

    def put(self, **files: bytes) -> None:
        """Store objects."""
        from s3fs import S3FileSystem

        fs = S3FileSystem(**self.options)
        if not fs.exists(BUCKET):
            fs.call_s3("create_bucket", Bucket=BUCKET)
        fs.pipe({f"{BUCKET}/{name}": data for name, data in files.items()})
        self.forget()

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        asked = environ.get("HTTP_RANGE")
        with self._lock:
            self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"], asked))
            fault = self._random.random() < self.failing
            cut = fault and self._random.random() < 0.5
            self.faults += fault
        self.closing.wait(self.latency)
        if (fault and not cut) or self.refuse(environ["PATH_INFO"], asked):
            start("500 Internal Server Error", [("Content-Length", "0")])
            return [b""]
        query = environ.get("QUERY_STRING", "")
        if "Signature=" in query and self.forbid(query):
            start("403 Forbidden", [("Content-Length", "0")])
            return [b""]
        return self._counted(self._app(environ, start), cut=cut)

    def _counted(self, body: Any, *, cut: bool) -> Iterator[bytes]:
        try:
            for piece in body:
                sent = piece[: len(piece) // 2] if cut else piece
                with self._lock:
                    self.nbytes_sent += len(sent)
                yield sent
        finally:
            if hasattr(body, "close"):
                body.close()
