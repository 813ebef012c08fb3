"""Writers that are killed at random moments, or at each step that others can see."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

# Imports take longer than the writers, so they are done once: each writer is a fork. Until
# then nothing may leave threads behind, which a fork does not have.
_NURSERY = """
import gc, os, sys, tempfile
import numpy as np, dask, dask.array as da, xarray as xr
from xckpt.writing import append, save

with tempfile.TemporaryDirectory() as folder, dask.config.set(scheduler="sync"):
    for version in ("1.0", "2"):
        ds = xr.Dataset({"w": ("n", da.ones(9, chunks=4)), "v": ("n", np.ones(9))})
        wanted = {"v": {"digest": "sha256"}}
        save(ds, folder + "/m.zt", overwrite=True, version=version, encoding=wanted)
        append(ds, folder + "/m.zt", replace=True, encoding=wanted)

gc.collect()
gc.freeze()  # else each writer copies all of it when it collects
code = compile(sys.argv.pop(1), "writer", "exec")
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        sys.argv[2:] = [line.strip()]
        print("started", os.getpid(), flush=True)
        exec(code)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print("ended", os.waitstatus_to_exitcode(status), flush=True)
"""

# Ends the process like a signal that cannot be caught, before one of the calls by which others
# see a change, or by which it comes to the disk.
_DYING = """
left = int(sys.argv[2])

def dying(call):
    def called(*args, **kwargs):
        global left
        left -= 1
        if left < 0:
            os._exit(9)
        return call(*args, **kwargs)
    return called

for name in ("link", "replace", "rename", "unlink", "ftruncate", "fsync"):
    setattr(os, name, dying(getattr(os, name)))
"""


def kill_at_random_moments(
    code: str,
    target: Path,
    *,
    rounds: int,
    seconds: float,
    check: Callable[[int], None],
    states: Collection[float],
) -> None:
    """Start writers one after another, and kill each at a random moment.

    Parameters
    ----------
    code : str
        Program of a writer that runs until it is killed. numpy, dask and xckpt are imported
        already; ``sys.argv[1]`` is the target, ``sys.argv[2]`` the number of the round.
    target : Path
        File to write.
    rounds : int
        Number of writers.
    seconds : float
        Longest life of a writer.
    check : callable
        Called with the number of the round after each kill.
    states : collection
        States of the target that `check` saw. Rounds go on, and become longer, until there are
        more than three, because writers on a busy machine may not get far enough to write.
    """
    rng = np.random.default_rng(0)
    with _nursery(code, target) as start:
        for number in range(1, 8 * rounds + 1):
            writer, ended = start(number)
            time.sleep(float(rng.uniform(0, seconds * (1 + (number - 1) // rounds))))
            os.kill(writer, signal.SIGKILL)
            assert ended() == -signal.SIGKILL, "the writer ended by itself"
            check(number)
            if number >= rounds and len(states) > 3:
                return
    raise AssertionError("hardly any writer lived long enough to write")


def die_at_each_step(code: str, target: Path, check: Callable[[int], None]) -> int:
    """Start writers one after another, each of which dies one step later than the last.

    `code` is the program of a writer, as above, that ends by itself. `check` is called with the
    number of steps after each death. Return the number of steps of a complete run.
    """
    with _nursery(_DYING + code, target) as start:
        for number in range(1000):
            _, ended = start(number)
            status = ended()
            check(number)
            if status == 0:
                return number
            assert status == 9, "the writer ended with an error"
    raise AssertionError("the writer never ran to its end")


@contextmanager
def _nursery(code: str, target: Path) -> Iterator[Callable[[int], tuple[int, Callable[[], int]]]]:
    """Yield a function that starts a writer and returns its process id and a wait for its end."""
    command = [sys.executable, "-c", _NURSERY, code, str(target)]
    with subprocess.Popen(  # noqa: S603  our own
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as nursery:
        stdin, stdout = nursery.stdin, nursery.stdout
        assert stdin is not None
        assert stdout is not None

        def start(number: int) -> tuple[int, Callable[[], int]]:
            stdin.write(f"{number}\n")
            stdin.flush()
            return read_pid("started"), lambda: read_pid("ended")

        def read_pid(expected: str) -> int:
            # A wrong id would kill an unrelated process.
            line = stdout.readline()
            assert line, f"all writers are gone: {nursery.wait()}"
            word, number = line.split()
            assert word == expected
            return int(number)

        yield start
        stdin.close()
