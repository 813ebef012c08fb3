"""An S3 server for tests: moto's, behind a proxy that counts requests and injects faults."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.storage.servers import Listening, url_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BUCKET = "bucket"


def require_packages() -> None:
    """Skip tests that need an S3 server where its packages are missing."""
    for package in ("obstore", "boto3", "moto", "flask", "flask_cors"):
        reason = f"needs {package}: pip install obstore 'moto[server]'"
        pytest.importorskip(package, reason=reason)


class S3Server(Listening):
    """Serves objects; ``options`` are the storage options to reach it.

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
    region : str or None
        Region of the bucket: requests that are signed for another one are refused.
    says_region : bool
        Whether such a refusal contains the region.
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
        self.region: str | None = None
        self.says_region = True
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
        self.authorizations: list[str] = []
        self.nbytes_sent = 0

    def put(self, **files: bytes) -> None:
        """Store objects."""
        import boto3

        client = boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",  # noqa: S106  it opens nothing
        )
        with suppress(client.exceptions.BucketAlreadyOwnedByYou):
            client.create_bucket(Bucket=BUCKET)
        for name, data in files.items():
            client.put_object(Bucket=BUCKET, Key=name, Body=data, ACL="public-read")
        self.forget()

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        byte_range = environ.get("HTTP_RANGE")
        with self._lock:
            self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"], byte_range))
            self.authorizations.append(environ.get("HTTP_AUTHORIZATION", ""))
            fault = self._random.random() < self.failing
            cut = fault and self._random.random() < 0.5
            self.faults += fault
        self.closing.wait(self.latency)
        if (fault and not cut) or self.refuse(environ["PATH_INFO"], byte_range):
            start("500 Internal Server Error", [("Content-Length", "0")])
            return [b""]
        if environ["REQUEST_METHOD"] == "HEAD" and environ["PATH_INFO"] == f"/{BUCKET}":
            start("403 Forbidden", [("x-amz-bucket-region", self.region or "us-east-1")])
            return [b""]
        signed = environ.get("HTTP_AUTHORIZATION", "")
        if self.region is not None and f"/{self.region}/s3/" not in signed:
            text = f"<Error><Region>{self.region}</Region></Error>" if self.says_region else ""
            status = "400 Bad Request" if self.says_region else "301 Moved Permanently"
            start(status, [("Content-Length", str(len(text)))])
            return [text.encode()]
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
