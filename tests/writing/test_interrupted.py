"""Ctrl-C between any two instructions of a save, and few descriptors: nothing is left behind."""

from __future__ import annotations

import dis
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

PACKAGE = str(Path(xckpt.__file__).parent)
# After these the interpreter looks whether a signal has come.
LOOKS = {dis.opmap[name] for name in ("CALL", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD")}


class Interrupting:
    """Sends SIGINT at one of the moments when the interpreter looks for signals in our code."""

    def __init__(self, moment: int) -> None:
        self.moment = moment
        self.moments = 0
        self.codes: dict[CodeType, bytes] = {}
        self.last: dict[FrameType, int] = {}

    def __call__(self, frame: FrameType, _: str, __: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE) and not name.endswith(("contextlib.py", "weakref.py")):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.follow

    def follow(self, frame: FrameType, event: str, _: Any) -> Any:
        if event != "opcode":
            return self.follow
        code = self.codes.get(frame.f_code) or frame.f_code.co_code
        self.codes[frame.f_code] = code
        last, self.last[frame] = self.last.get(frame), code[frame.f_lasti]
        if last in LOOKS:
            self.moments += 1
            if self.moments == self.moment:
                signal.raise_signal(signal.SIGINT)
        return self.follow

    def watch(self, function: Callable[[], Any]) -> BaseException | None:
        """Call a function, and return the interrupt."""
        sys.settrace(self)
        try:
            function()
        except KeyboardInterrupt as error:
            return error
        finally:
            sys.settrace(None)
            self.last.clear()
        return None


def descriptors() -> set[str]:
    """Return the open files of this process."""
    links = list(Path("/proc/self/fd").iterdir())
    return {str(link.readlink()) for link in links if os.path.lexists(link)}


def calls(folder: Path) -> dict[str, Callable[[], Any]]:
    """Return ways to write into a folder."""
    ds = xr.Dataset({f"w{n}": ("x", np.arange(50.0) + n) for n in range(3)})
    source = folder / "source.zt"
    xckpt.save(ds, source, progress=False)
    again: dict[str, Any] = {"overwrite": True, "progress": False}
    return {
        "save": lambda: xckpt.save(ds, folder / "m.zt", **again),
        "shards": lambda: xckpt.save(ds, folder / "m.safetensors", max_shard_size=500, **again),
        "convert": lambda: xckpt.convert(source, folder / "c.npz", **again),
        "append": lambda: xckpt.append(
            ds[["w0"]].rename(w0="z"), source, progress=False, replace=True
        ),
    }


@pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["save", "shards", "convert", "append"])
def test_nothing_outlives_the_save_after_an_interrupted_one(tmp_path: Path, kind: str) -> None:
    write = calls(tmp_path)[kind]
    write()
    write()
    counting = Interrupting(0)
    counting.watch(write)
    before = descriptors()
    interrupts = 0
    for moment in range(1, counting.moments, max(1, counting.moments // 30)):
        # Like a notebook, this keeps the last error and so all that its traceback refers to.
        error = Interrupting(moment).watch(write)
        interrupts += error is not None
        write()
        assert not [path for path in tmp_path.iterdir() if "xckpt" in path.name], moment
        del error
        if descriptors() != before:
            gc.collect()
        assert descriptors() == before, moment
    assert interrupts > 10


FEW_DESCRIPTORS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import os
import numpy as np
import xarray as xr
import xckpt

folder, again = sys.argv[1], {"overwrite": True, "progress": False}
one, other = (f"{folder}/{name}.safetensors" for name in ("one", "other"))
ds = xr.Dataset({f"w{n}": ("x", np.arange(1000.0) + n) for n in range(100)})
for number in range(2):
    xckpt.save(ds + number, one, max_shard_size=8000, **again)
    opened = xr.open_dataset(f"{one}.index.json", engine="safetensors")
    xr.testing.assert_equal(opened.compute(), ds + number)
for _ in range(2):
    xckpt.convert(f"{one}.index.json", other, max_shard_size=8000, **again)
assert xckpt.manifest(f"{one}.index.json") == xckpt.manifest(f"{other}.index.json")
xckpt.save(opened * 2, other, max_shard_size=8000, **again)
opened = xr.open_dataset(f"{other}.index.json", engine="safetensors")
xr.testing.assert_equal(opened.compute(), (ds + 1) * 2)
assert len(os.listdir(folder)) == 202, sorted(os.listdir(folder))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limits there")
def test_a_hundred_shards_are_written_with_few_descriptors(tmp_path: Path) -> None:
    done = subprocess.run(  # noqa: S603  our own interpreter and statements
        [sys.executable, "-c", FEW_DESCRIPTORS, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
