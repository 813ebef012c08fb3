"""A sample checkpoint, one with hostile names, and a terminal."""

from __future__ import annotations

import os
import pty
import sys
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
import xarray as xr

from tests.hostile_names import HOSTILE
from xckpt.cli import main
from xckpt.sample import write_checkpoint
from xckpt.writing import save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XCKPT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("COLUMNS", raising=False)  # or piped output would have this width


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
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[str, int]]]:
    """Run the command in a terminal of 100 columns and give what it shows, and its status."""
    ours, theirs = pty.openpty()

    def run(*arguments: str, columns: int = 100) -> tuple[str, int]:
        shown = bytearray()

        def read() -> None:  # until all is written: a terminal holds some kilobytes only
            while not shown.endswith(_END):
                shown.extend(os.read(ours, 65536))

        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm")
        reader = threading.Thread(target=read)
        reader.start()
        with open(theirs, "w", encoding="utf-8", closefd=False) as stream:
            try:
                with monkeypatch.context() as patch:
                    for name in ("stdout", "stderr"):
                        patch.setattr(sys, name, stream)
                    status = main(arguments)
            finally:
                stream.flush()
                os.write(theirs, _END)
                reader.join()
        return shown.removesuffix(_END).decode(), status

    yield run
    os.close(ours)
    os.close(theirs)


_END = b"\0the end\0"
