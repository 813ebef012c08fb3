"""A sample checkpoint, one with hostile names, and a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

from tests.hostile_names import HOSTILE
from xckpt.sample import write_checkpoint
from xckpt.writing import save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XCKPT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("cli") / "m.zt", layers=4, width=16)


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "hostile.zt"
    values = np.array([[np.nan, 1.0], [2.0, 3.0]], np.float32)
    save(xr.Dataset(dict.fromkeys(HOSTILE, (("a", "b"), values))), path)
    return path


@pytest.fixture
def terminal() -> Iterator[Callable[..., tuple[str, int]]]:
    """Run the command in a terminal of 100 columns and give what it shows, and its status."""
    ours, theirs = pty.openpty()

    def run(*arguments: str, columns: int = 100) -> tuple[str, int]:
        environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
        streams: dict[str, Any] = {"stdout": theirs, "stderr": theirs, "stdin": theirs}
        with subprocess.Popen(  # noqa: S603  our own module
            [sys.executable, "-m", "xckpt", *arguments], env=environment, **streams
        ) as process:
            # Read until all is written: a terminal holds some kilobytes only.
            chunks = []
            while process.poll() is None or _is_readable(ours):
                if _is_readable(ours):
                    chunks.append(os.read(ours, 65536))
        return b"".join(chunks).decode(), process.returncode

    yield run
    os.close(ours)
    os.close(theirs)


def _is_readable(descriptor: int) -> bool:
    import select

    return bool(select.select([descriptor], [], [], 0.05)[0])
