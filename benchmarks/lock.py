"""How long a scan holds the interpreter's lock for each GiB, as the slope between two sizes.

One thread of Python runs at a time, so what a scan does while it holds the lock limits the number
of cores that it can use. The slope leaves out what does not grow with the file: imports, opening,
the table of results. Calls of Python and C functions are counted as well: their number does not
depend on the load of the machine.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.checkpoints import write_ztensor
from benchmarks.measuring import Result, in_fresh_process, table

if TYPE_CHECKING:
    from collections.abc import Mapping

MIB = 1 << 20
SMALL, LARGE = 256 * MIB, 1024 * MIB
ROW = 4096
REPEATS = 3
#: From a command to the code that runs it, and the most calls for each GiB.
COMMANDS: Mapping[str, tuple[str, int]] = {
    "stats": ("xckpt.stats(a, cache=False, progress=False)", 20_000),
    "stats, channels=True": ("xckpt.stats(a, cache=False, progress=False, channels=True)", 30_000),
    "compare, of one side": ("xckpt.compare(a, b, cache=False, progress=False)", 50_000),
    "manifest": ("xckpt.manifest(a, progress=False)", 14_000),
    "verify with a manifest": ("xckpt.verify(a, manifest=digests[a], progress=False)", 14_000),
    "convert": ("xckpt.convert(a, out, overwrite=True, progress=False)", 9_000),
    "values": (
        "[ds[name].values for ds in [xckpt.open(a)] for name in list(ds.variables)]",
        60_000,
    ),
}


def _write(path: Path, nbytes: int, shift: float) -> None:
    """Write a checkpoint of float32 and bfloat16 in tensors of 64 MiB."""
    count = nbytes // (64 * MIB)
    write_ztensor(path, {f"w{n}": [64 * MIB // 4 // ROW, ROW] for n in range(count)}, "float32")
    weights = np.random.default_rng(0).standard_normal(16 * MIB, np.float32) + np.float32(shift)
    with path.open("r+b") as file:
        file.seek(64)
        for _ in range(count):
            file.write(weights.tobytes())


_CODE = """
import ctypes, os, sys, threading, time
import numpy as np
import dask, xarray, xckpt
dask.config.set(num_workers=1)
paths = {paths!r}
digests = {{a: xckpt.manifest(a, progress=False) for a, _ in paths}}
out = {out!r}

def call(a, b):
    {code}

def count(a, b):
    calls = 0
    def profile(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")
    threading.setprofile(profile)
    sys.setprofile(profile)
    call(a, b)
    sys.setprofile(None)
    threading.setprofile(None)
    return calls

# A thread without the lock looks who has it. CPython 3.12 answers for the asking thread only.
held = None
if sys.version_info < (3, 12) and sys.implementation.name == "cpython" and os.name == "posix":
    import numba
    process = ctypes.CDLL(None)
    owner, pause = process._PyThreadState_UncheckedGet, process.usleep
    owner.restype, owner.argtypes = ctypes.c_void_p, []
    pause.restype, pause.argtypes = ctypes.c_int, [ctypes.c_uint]

    @numba.njit(nogil=True)
    def look(tally):
        while not tally[2]:
            pause(100)
            tally[0] += 1
            if owner():
                tally[1] += 1

    def held(a, b):
        tally = np.zeros(3, np.int64)
        watcher = threading.Thread(target=look, args=(tally,))
        watcher.start()
        start = time.perf_counter()
        call(a, b)
        seconds = time.perf_counter() - start
        tally[2] = 1
        watcher.join()
        return seconds * tally[1] / max(1, tally[0])

small, large = paths
call(*small)
calls = count(*large) - count(*small)
seconds = None
if held is not None:
    look(np.ones(3, np.int64))
    slopes = sorted(held(*large) - held(*small) for _ in range({repeats}))
    seconds = slopes[len(slopes) // 2]
print(json.dumps({{"calls": calls, "seconds": seconds}}))
"""


def run() -> list[Result]:
    """Measure every command that reads all elements."""
    results = []
    gib = (LARGE - SMALL) / (1 << 30)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = [(folder / f"{n}.zt", folder / f"{n}b.zt") for n in ("small", "large")]
        for sides, nbytes in zip(paths, (SMALL, LARGE), strict=True):
            for path, shift in zip(sides, (0.0, 1e-3), strict=True):
                _write(path, nbytes, shift)
        texts = [tuple(map(str, sides)) for sides in paths]
        for command, (code, most) in COMMANDS.items():
            out = str(folder / "out.safetensors")
            measured: dict[str, Any] = in_fresh_process(
                _CODE.format(paths=texts, out=out, code=code, repeats=REPEATS)
            )
            calls = Result(f"calls in {command}", measured["calls"] / gib, "per GiB", "", most)
            results.append(calls)
            if measured["seconds"] is not None:
                held = measured["seconds"] / gib * 1000
                results.append(Result(f"lock held in {command}", held, "ms per GiB"))
    return results


if __name__ == "__main__":
    sys.exit(print(table(run())))
