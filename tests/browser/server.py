"""A server of notebooks in a process and a home of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self

_SECONDS_TO_START = 90


class Server:
    """A server that listens on this machine; a subclass states its command.

    Parameters
    ----------
    root : Path
        Folder with notebooks and files.
    environment : dict, optional
        More environment variables.
    """

    def __init__(self, root: Path, environment: dict[str, str] | None = None) -> None:
        self.root = root
        self.port = _free_port()
        self.home = Path(tempfile.mkdtemp(prefix="xckpt-server-"))
        self._environment = environment or {}

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """The end of what it printed."""
        return (self.home / "log").read_text(errors="replace")[-3000:]

    def command(self) -> list[str]:
        """Return its command."""
        raise NotImplementedError

    def status_url(self) -> str:
        """Return an address that answers as soon as it has started."""
        raise NotImplementedError

    def variables(self) -> dict[str, str]:
        """Return its environment variables."""
        return {
            **os.environ,
            "HOME": str(self.home),
            "NO_PROXY": "127.0.0.1,localhost",
            "XCKPT_CACHE_DIR": str(self.home / "cache"),
            **self._environment,
        }

    def __enter__(self) -> Self:
        with (self.home / "log").open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603  our own arguments
                self.command(),
                cwd=self.root,
                env=self.variables(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # The server ends its kernels.
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self.home, ignore_errors=True)

    def _wait(self) -> None:
        stop = time.monotonic() + _SECONDS_TO_START
        while time.monotonic() < stop and self._process.poll() is None:
            try:
                with urllib.request.urlopen(self.status_url(), timeout=2):  # noqa: S310  our own
                    return
            except OSError:
                time.sleep(0.2)
        raise RuntimeError(f"{type(self).__name__} did not start:\n{self.log}")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
