"""Ctrl-C during imports: the next call in the same process works."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import pytest
import xarray as xr

import xckpt

if TYPE_CHECKING:
    from pathlib import Path

# Sends SIGINT at the first load of every module in the main thread, and calls again until nothing
# is left to be loaded.
PROGRAM = """
import os, signal, sys, threading
import xarray as xr
import xckpt

path, first = sys.argv[1:]
loads = set()


class Interrupting:
    def find_spec(self, name, path, target=None):
        if threading.current_thread() is threading.main_thread() and name not in loads:
            loads.add(name)
            os.kill(os.getpid(), signal.SIGINT)


def call(function):
    interrupts = 0
    while True:
        try:
            result = function()
        except KeyboardInterrupt:
            interrupts += 1
        else:
            print(interrupts, len(loads))
            return result


signal.alarm(100)
sys.meta_path.insert(0, Interrupting())
quiet = {"progress": False, "cache": False}
calls = {
    "open": lambda: xr.open_dataset(path, engine="npz")["w"].values,
    "stats": lambda: xckpt.stats(path, **quiet),
    "compare": lambda: xckpt.compare(path, path, **quiet),
    "spectrum": lambda: xckpt.spectrum(path, **quiet),
    "convert": lambda: xckpt.convert(path, path + ".zt", progress=False, overwrite=True),
    "plot": lambda: xr.open_dataset(path, engine="npz").ckpt.plot.histogram(),
}
results = {name: call(calls[name]) for name in sorted(calls, key=lambda name: name != first)}
assert results["open"].tolist() == [[1, 2], [3, 5]]
assert results["stats"]["w"].sel(statistic="max").item() == 5
assert results["compare"]["w"].sel(statistic="cosine").item() == 1
assert xckpt.manifest(path) == xckpt.manifest(path + ".zt")
assert len(loads) > 500
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a process cannot send SIGINT to itself")
@pytest.mark.parametrize("first", ["open", "stats"])
def test_after_ctrl_c_at_each_import_the_next_call_works(tmp_path: Path, first: str) -> None:
    path = tmp_path / "m.npz"
    np.savez(path, w=np.array([[1.0, 2.0], [3.0, 5.0]], np.float32))
    done = subprocess.run(  # noqa: S603  our own
        [sys.executable, "-c", PROGRAM, str(path), first],
        capture_output=True,
        text=True,
        env={"MPLBACKEND": "agg", "XCKPT_CACHE_DIR": str(tmp_path), "PATH": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # Packages are loaded together, however many modules they have.
    assert all(int(line.split()[0]) < 30 for line in done.stdout.splitlines()), done.stdout


def test_a_half_imported_distributed_package_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.npz"
    np.savez(path, w=np.ones((2, 2)))
    monkeypatch.setitem(sys.modules, "distributed", ModuleType("distributed"))
    assert xckpt.stats(path, cache=False)["w"].sel(statistic="max").item() == 1
    assert xr.open_dataset(path, engine="npz")["w"].sum().compute() == 4
