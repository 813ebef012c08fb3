"""Ctrl-C during imports: the next call in the same process works."""

from __future__ import annotations

import os
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

# Sends SIGINT when a module is loaded in the main thread, at random, and calls again until a call
# is not interrupted. Only xckpt is imported before the first call.
PROGRAM = """
import os, random, signal, sys, threading, time
import xckpt

path, first = sys.argv[1:]
new = path.replace("m.npz", "new")
chance = random.Random(first)
loads = set()
due = 0  # loads before the next SIGINT


class Interrupting:
    def find_spec(self, name, path, target=None):
        global due
        if threading.current_thread() is threading.main_thread():
            loads.add(name)
            due -= 1
            if due == 0:
                os.kill(os.getpid(), signal.SIGINT)


def call(function):
    global due
    interrupts = 0
    while True:
        due = chance.choice([1, 2, 5, 10, 20, 50])
        try:
            result = function()
            time.sleep(0.05)  # a signal during the last import comes after it
        except KeyboardInterrupt:
            interrupts += 1
        else:
            due = 0
            print(interrupts, len(loads))
            return result


def opened_by_xarray():
    import xarray as xr

    return xr.open_dataset(path, engine="npz")["w"].values


signal.alarm(100)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
sys.meta_path.insert(0, Interrupting())
quiet = {"progress": False, "cache": False}
calls = {
    "open": lambda: xckpt.open(path)["w"].values,
    "open_dataset": opened_by_xarray,
    "open_steps": lambda: xckpt.open_steps([path], step=[1])["w"].values,
    "read_index": lambda: len(xckpt.read_index(path).tensors),
    "references": lambda: len(xckpt.references(path)),
    "stats": lambda: xckpt.stats(path, **quiet),
    "table": lambda: xckpt.table(xckpt.stats(path, **quiet)),
    "histogram": lambda: xckpt.histogram(path, **quiet),
    "compare": lambda: xckpt.compare(path, path, **quiet),
    "findings": lambda: len(xckpt.findings(path, **quiet)),
    "spectrum": lambda: xckpt.spectrum(path, **quiet),
    "report": lambda: xckpt.report(path, new + ".html", overwrite=True, **quiet),
    "save": lambda: xckpt.save(
        xckpt.open(path), new + ".zt", progress=False, overwrite=True
    ),
    "convert": lambda: xckpt.convert(path, path + ".zt", progress=False, overwrite=True),
    "append": lambda: xckpt.append(xckpt.open(path).rename(w="v"), new + ".zt", progress=False),
    "verify": lambda: xckpt.verify(path, progress=False),
    "plot": lambda: xckpt.open(path).ckpt.plot.histogram(),
    "summary": lambda: repr(xckpt.open(path).ckpt),
}
results = {name: call(calls[name]) for name in sorted(calls, key=lambda name: name != first)}
assert results["open"].tolist() == [[1, 2], [3, 5]]
assert results["stats"]["w"].sel(statistic="max").item() == 5
assert results["compare"]["w"].sel(statistic="cosine").item() == 1
assert xckpt.manifest(path) == xckpt.manifest(path + ".zt")
assert len(loads) > 500
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a process cannot send SIGINT to itself")
@pytest.mark.parametrize("first", ["open", "report", "save"])
def test_after_ctrl_c_at_each_import_the_next_call_works(tmp_path: Path, first: str) -> None:
    path = tmp_path / "m.npz"
    np.savez(path, w=np.array([[1.0, 2.0], [3.0, 5.0]], np.float32))
    done = subprocess.run(  # noqa: S603  our own
        [sys.executable, "-c", PROGRAM, str(path), first],
        capture_output=True,
        text=True,
        env={**os.environ, "MPLBACKEND": "agg", "XCKPT_CACHE_DIR": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # Packages are loaded together, however many modules they have.
    assert all(int(line.split()[0]) < 100 for line in done.stdout.splitlines()), done.stdout


# Sends SIGINT before each of the last lines that run at the end of the last import of a call.
AT_THE_END = """
import os, signal, sys, time
import xckpt

path = sys.argv[1]
signal.signal(signal.SIGINT, signal.default_int_handler)


class Interrupting:
    def __init__(self, moment):
        self.moment, self.lines = moment, 0

    def __call__(self, frame, event, _):
        code = frame.f_code
        if not code.co_filename.endswith("interrupts.py"):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.moment:
                sys.settrace(None)
                os.kill(os.getpid(), signal.SIGINT)
        return self


def in_a_fork(moment):
    \"\"\"Call in a fork; return the number of lines, or whether it was interrupted.\"\"\"
    read, write = os.pipe()
    if not os.fork():
        signal.alarm(60)
        interrupting = Interrupting(moment)
        sys.settrace(interrupting)
        try:
            xckpt.read_index(path)
            sys.settrace(None)
            time.sleep(0.2)
        except KeyboardInterrupt:
            interrupting.lines = -1
        finally:
            os.write(write, str(interrupting.lines).encode())
            os._exit(0)
    os.wait()
    return int(os.read(read, 100))


lines = in_a_fork(None)
assert lines > 20
moments = range(lines - 8, lines + 1)
assert [moment for moment in moments if in_a_fork(moment) != -1] == []
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a process cannot send SIGINT to itself")
def test_ctrl_c_at_the_end_of_the_last_import_is_not_lost(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", w=np.ones(3))
    done = subprocess.run(  # noqa: S603  our own
        [sys.executable, "-c", AT_THE_END, str(tmp_path / "m.npz")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_half_imported_distributed_package_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.npz"
    np.savez(path, w=np.ones((2, 2)))
    monkeypatch.setitem(sys.modules, "distributed", ModuleType("distributed"))
    assert xckpt.stats(path, cache=False)["w"].sel(statistic="max").item() == 1
    assert xr.open_dataset(path, engine="npz")["w"].sum().compute() == 4
