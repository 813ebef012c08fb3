"""A web server for tests that counts requests and bytes, and misbehaves on request."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xckpt
from tests.storage.servers import Handler, Listening, http_server, url_of

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Behaviour:
    """Settings of the server's answers."""

    files: dict[str, bytes] = field(default_factory=dict)
    etag: str | None = '"first"'
    replaced_after: float = float("inf")  # requests after which the ETag is another
    modified: str | None = None
    ranges: bool = True  # False: the whole file with status 200, as plain http.server does
    content_range: bool = True
    shift: int = 0  # shifts the bytes and the Content-Range
    cut: int = 0  # bytes missing at the end of each body
    honest_length: bool = False  # whether a cut body has the Content-Length of its bytes
    encoding: str | None = None
    status: int | None = None  # for every request
    latency: float = 0.0
    together: int = 0  # no answer comes before so many requests are there,
    patience: float = 20.0  # or so many seconds have gone
    failing: float = 0.0  # share of requests that fail with 500, or whose body is cut
    trickle: float | None = None  # seconds between the bytes of a body; infinite: none comes
    silent: bool = False  # never answers
    busy: int = 0  # how many of the next requests are answered with 429
    headers: dict[str, str] = field(default_factory=dict)  # replace the default headers
    location: str | None = None  # where every request is sent to
    moved: dict[str, str] = field(default_factory=dict)  # where requests for a path are sent to


def assert_row_is_one_request(files: dict[str, bytes], opened: str, name: str, values: Any) -> None:
    """Serve a checkpoint, open a file of it, and read the row in the middle of a tensor."""
    pytest.importorskip("obstore", reason="needs obstore: pip install 'xckpt[remote]'")
    with WebServer(**files) as web:
        ds = xckpt.open(f"{web.url}/{opened}")
        before, middle = len(web.gets), len(values) // 2
        row = ds[name][middle].values
        [byte_range] = web.gets[before:]
        start, stop = map(int, str(byte_range).removeprefix("bytes=").split("-"))
        assert stop + 1 - start == row.nbytes
    np.testing.assert_array_equal(row, values[middle])


class WebServer(Listening):
    """Serves files from memory at ``url``."""

    def __init__(self, **files: bytes) -> None:
        self.behaviour = Behaviour({f"/{name}": data for name, data in files.items()})
        self.forget()
        self.now = self.at_once = 0  # requests that are answered at the same time
        self.connections: list[socket.socket] = []
        self.lock = threading.Lock()
        self.random = np.random.default_rng(0)
        self.faults = 0
        server = http_server(_Handler, web=self)
        self.url = url_of(server)
        super().__init__(server)

    def forget(self) -> None:
        """Begin to count anew."""
        self.requests: list[tuple[str, str, str | None]] = []
        self.headers: list[Any] = []  # of each request
        self.nbytes_sent = 0

    @property
    def gets(self) -> list[str | None]:
        """The ranges of all GET requests."""
        return [range_ for method, _, range_ in self.requests if method == "GET"]

    def encrypt(self, folder: Path) -> Path:
        """Encrypt connections from now on; return the authority that signed the certificate."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        pem, now = serialization.Encoding.PEM, datetime.now(UTC)

        def certificate(name: str, issuer: str, key: Any, signer: Any) -> Any:
            names = [
                x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, n)]) for n in (name, issuer)
            ]
            serial = x509.random_serial_number()
            builder = x509.CertificateBuilder(
                names[1], names[0], key.public_key(), serial, now, now + timedelta(1)
            )
            hosts = x509.SubjectAlternativeName([x509.DNSName("localhost")])
            limits = x509.BasicConstraints(ca=name == issuer, path_length=None)
            builder = builder.add_extension(hosts, critical=False).add_extension(
                limits, critical=True
            )
            return builder.sign(signer, hashes.SHA256()).public_bytes(pem)

        authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
        authority = folder / "authority.pem"
        authority.write_bytes(certificate("CA", "CA", authority_key, authority_key))
        path = folder / "server.pem"
        private = key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path.write_bytes(private + certificate("localhost", "CA", key, authority_key))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        server: Any = self._servers[0]
        server.socket = context.wrap_socket(server.socket, server_side=True)
        return authority

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for connection in self.connections:  # those kept alive too
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(Handler):
    web: WebServer
    cut: float  # bytes missing at the end of the body, or a share of it
    is_counted: bool  # among the requests that are answered now

    def setup(self) -> None:
        super().setup()
        self.web.connections.append(self.connection)

    def answer(self, *, with_body: bool) -> None:
        web = self.web
        with web.lock:
            self.is_counted = with_body
            web.now += with_body
            web.at_once = max(web.at_once, web.now)
        try:
            self._answer(with_body=with_body)
        finally:
            self._count_as_answered()

    def _count_as_answered(self) -> None:
        with self.web.lock:
            self.web.now -= self.is_counted
            self.is_counted = False

    def _answer(self, *, with_body: bool) -> None:
        web, behaviour = self.web, self.web.behaviour
        byte_range = self.headers.get("Range")
        path = self.path.partition("?")[0]
        if path.startswith("http://"):  # of a client that takes this for a proxy
            path = "/" + path.split("/", 3)[3]
        with web.lock:
            web.requests.append((self.command, self.path, byte_range))
            web.headers.append(self.headers)
            fault = web.random.random() < behaviour.failing
            self.cut = behaviour.cut or (0.5 if fault and web.random.random() < 0.5 else 0)
            web.faults += fault
            if len(web.requests) > behaviour.replaced_after:
                behaviour.etag = '"second"'
        web.closing.wait(behaviour.latency)
        until = time.monotonic() + behaviour.patience
        while web.at_once < behaviour.together and time.monotonic() < until:
            time.sleep(0.01)
        if behaviour.silent:
            web.closing.wait()
            self.close_connection = True
            return
        location = behaviour.moved.get(path, behaviour.location)
        if location is not None:
            self.send_response(302)
            self.send_header("Location", location)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data = behaviour.files.get(path)
        status = behaviour.status or (404 if data is None else 200)
        with web.lock:
            behaviour.busy, status = max(0, behaviour.busy - 1), 429 if behaviour.busy else status
        if fault and not self.cut:
            status = 500
        if status != 200 or data is None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self._send(data, byte_range if behaviour.ranges else None, with_body=with_body)

    def _send(self, data: bytes, byte_range: str | None, *, with_body: bool) -> None:
        behaviour = self.web.behaviour
        body, content_range = data, None
        if byte_range is not None:
            first, last = (int(number) for number in byte_range.removeprefix("bytes=").split("-"))
            if first >= len(data):
                self.send_response(416)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            first, last = first + behaviour.shift, min(last + behaviour.shift, len(data) - 1)
            body = data[first : last + 1]
            content_range = f"bytes {first}-{last}/{len(data)}"
        cut = int(self.cut * len(body)) if 0 < self.cut < 1 else int(self.cut)
        sent = body[: len(body) - cut] if with_body else body
        self.send_response(200 if byte_range is None else 206)
        headers = {
            "Content-Length": str(len(sent if behaviour.honest_length else body)),
            "ETag": behaviour.etag,
            "Last-Modified": behaviour.modified,
            "Content-Encoding": behaviour.encoding if with_body else None,
            "Content-Range": content_range if behaviour.content_range else None,
            **behaviour.headers,
        }
        for name, value in headers.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        if with_body:
            self._send_body(sent, complete=len(sent) == len(body))

    def _send_body(self, sent: bytes, *, complete: bool) -> None:
        behaviour = self.web.behaviour
        try:
            for byte in sent if behaviour.trickle is not None else b"":
                if self.web.closing.wait(
                    None if behaviour.trickle == float("inf") else behaviour.trickle
                ):
                    self.close_connection = True
                    return
                self.wfile.write(bytes([byte]))
            if behaviour.trickle is not None:
                return
            for start in range(0, len(sent), 1 << 16):
                piece = sent[start : start + (1 << 16)]
                with self.web.lock:  # before the client has it, and a test looks
                    self.web.nbytes_sent += len(piece)
                if start + len(piece) == len(sent):
                    self._count_as_answered()  # with this piece the client can go on
                self.wfile.write(piece)
        except (BrokenPipeError, ConnectionResetError):
            complete = False
        if not complete:
            self.close_connection = True
