"""Gibibytes per second of commands on more and more cores, beside reading the bytes.

Each figure is of a process of its own, which is bound to as many cores. A bare `preadv` into memory
that is used again is the floor of whatever reads all bytes: the time of a command is given as a
multiple of it on the same cores.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.checkpoints import write_ztensor
from benchmarks.measuring import Result, in_fresh_process, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MIB = 1 << 20
TENSORS, TENSOR, ROW = 8, 256 * MIB, 8192
MATRICES, SIDE = 16, 1024
#: From a command to the code that runs it on one of the two files.
COMMANDS: Mapping[str, str] = {
    "preadv": "floor(a)",
    "stats": "xckpt.stats(a, cache=False, progress=False)",
    "compare, of one side": "xckpt.compare(a, b, cache=False, progress=False)",
    "values": "[ds[name].values for ds in [xckpt.open(a)] for name in list(ds.variables)]",
    "spectrum": "xckpt.spectrum(matrices, cache=False, progress=False)",
}

_CODE = """
import os, threading, time
from concurrent.futures import ThreadPoolExecutor
os.sched_setaffinity(0, {cores!r})
import xckpt
a, b, matrices = {paths!r}
count, block = len({cores!r}), 4 << 20

def floor(path):
    file, memory = os.open(path, os.O_RDONLY), threading.local()
    def read(lot):
        if not hasattr(memory, "buffer"):
            memory.buffer = memoryview(bytearray(block))
        for offset in lot:
            os.preadv(file, [memory.buffer], offset)
    offsets = range(0, os.fstat(file).st_size, block)
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(read, [offsets[number::count] for number in range(count)]))
    os.close(file)

def call():
    {code}

call()
times = []
while len(times) < 5 and sum(times) < 10:
    start = time.perf_counter()
    call()
    times.append(time.perf_counter() - start)
print(json.dumps(dict(seconds=min(times))))
"""


def _write(path: Path, count: int, shape: list[int], shift: float) -> None:
    """Write a checkpoint of float32 in tensors of one shape."""
    write_ztensor(path, {f"w{n}": shape for n in range(count)}, "float32")
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(shape, np.float32) + np.float32(shift)
    with path.open("r+b") as file:
        file.seek(64)
        for _ in range(count):
            file.write(weights.tobytes())


def _counts(most: int) -> Iterator[int]:
    """Yield numbers of cores: 1, 2, 4, ..., and all."""
    count = 1
    while count < most:
        yield count
        count *= 2
    yield most


def run() -> list[Result]:
    """Measure on 1, 2, 4, ... cores, where processes can be bound to some."""
    if not hasattr(os, "sched_setaffinity") or not hasattr(os, "preadv"):
        return []
    available = sorted(os.sched_getaffinity(0))
    results = []
    with tempfile.TemporaryDirectory() as name:
        paths = [Path(name) / f"{letter}.zt" for letter in "abm"]
        for path, shift in zip(paths[:2], (0.0, 1e-3), strict=True):
            _write(path, TENSORS, [TENSOR // 4 // ROW, ROW], shift)
        _write(paths[2], MATRICES, [SIDE, SIDE], 0.0)
        gib = TENSORS * TENSOR / (1 << 30)
        for count in _counts(len(available)):
            floor = 0.0
            for command, code in COMMANDS.items():
                measured = in_fresh_process(
                    _CODE.format(
                        cores=set(available[:count]), paths=[str(path) for path in paths], code=code
                    )
                )
                seconds: float = measured["seconds"]
                floor = floor or seconds
                cores = f"{count} core" + "s" * (count > 1)
                if command == "spectrum":
                    context = f"{MATRICES} matrices of {SIDE} rows and columns"
                    results.append(Result(f"{command}, {cores}", seconds, "s", context))
                else:
                    context = f"{gib / seconds:.1f} GiB/s"
                    results.append(Result(f"{command}, {cores}", seconds / floor, "x", context))
    return results


if __name__ == "__main__":
    sys.exit(print(table(run())))
