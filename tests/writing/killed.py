"""Writers that are killed at random moments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Imports take longer than most of what follows, so they are done once: each writer is a fork. Until
# then nothing may leave threads behind, which a fork does not have.
_NURSERY = """
import os, sys, tempfile
import numpy as np, dask, dask.array as da, xarray as xr
from xckpt.writing import append, save

with tempfile.TemporaryDirectory() as folder, dask.config.set(scheduler="sync"):
    for version in ("1.0", "2"):
        ds = xr.Dataset({"w": ("n", da.ones(9, chunks=4)), "v": ("n", np.ones(9))})
        wanted = {"v": {"digest": "sha256"}}
        save(ds, folder + "/m.zt", overwrite=True, version=version, encoding=wanted)
        append(ds, folder + "/m.zt", replace=True, encoding=wanted)

code = compile(sys.argv.pop(1), "writer", "exec")
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        sys.argv[2:] = [line.strip()]
        print(os.getpid(), flush=True)
        exec(code)
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


def kill_at_random_moments(
    code: str, target: Path, *, rounds: int, seconds: float, check: Callable[[int], None]
) -> None:
    """Start writers one after another, and kill each of them.

    Parameters
    ----------
    code : str
        Of a writer, which finds numpy, dask and what writes; ``sys.argv[1]`` is the target,
        ``sys.argv[2]`` the number of the round. It goes on until it is killed.
    target : Path
        The file.
    rounds : int
        How many writers.
    seconds : float
        How long the longest lives.
    check : callable
        Is called with the number of the round when the writer is gone.
    """
    rng = np.random.default_rng(0)
    command = [sys.executable, "-c", _NURSERY, code, str(target)]
    with subprocess.Popen(  # noqa: S603  our own
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as nursery:
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        for number in range(1, rounds + 1):
            nursery.stdin.write(f"{number}\n")
            nursery.stdin.flush()
            writer = int(nursery.stdout.readline())
            time.sleep(float(rng.uniform(0, seconds)))
            os.kill(writer, signal.SIGKILL)
            assert nursery.stdout.readline() == "gone\n", "the writer ended by itself"
            check(number)
        nursery.stdin.close()
