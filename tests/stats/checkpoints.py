"""Small checkpoints with known values."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

Array = np.ndarray[Any, np.dtype[Any]]


def write(path: Path, tensors: dict[str, Array]) -> Path:
    """Write a safetensors file; element types are those that it knows."""
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path)
    return path


def model(layers: int = 3, seed: int = 0) -> dict[str, Array]:
    """Give the tensors of a small model of repeated layers, of several element types."""
    import ml_dtypes

    rng = np.random.default_rng(seed)
    tensors: dict[str, Array] = {"embed": rng.standard_normal((64, 32)).astype(np.float32)}
    for layer in range(layers):
        base = f"layers.{layer}"
        weight = rng.standard_normal((48, 32)) * (layer + 1)
        tensors[f"{base}.w"] = weight.astype(ml_dtypes.bfloat16)
        tensors[f"{base}.b"] = rng.standard_normal(48).astype(np.float16)
    tensors["steps"] = np.array(7, np.int64)
    tensors["mask"] = rng.random((5, 6)) < 0.5
    tensors["none"] = np.zeros((0, 4), np.float32)
    return tensors


def sparse_file(path: Path, dtype: str, shape: int | tuple[int, ...], nbytes: int) -> Path:
    """Write a large file of zeros that takes no space."""
    sizes = [shape] if isinstance(shape, int) else [*shape]
    header = f'{{"w":{{"dtype":"{dtype}","shape":{sizes},"data_offsets":[0,{nbytes}]}}}}'
    header += " " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + nbytes)
    return path


def settled(path: Path, seconds: int = 60) -> Path:
    """Make a file look as if it had been written some time ago."""
    before = time.time() - seconds
    os.utime(path, (before, before))
    return path


_WATCHED = """
import threading
def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) << 10
import xarray, dask.array, xckpt.statistics, xckpt.statistics.block_loops, xckpt.backend
before, peak, done = anonymous(), 0, threading.Event()
def watch():
    global peak
    while not done.wait(0.005):
        peak = max(peak, anonymous())
watcher = threading.Thread(target=watch)
watcher.start()
CALL
done.set()
watcher.join()
print(peak - before)
"""


def memory_of(call: str) -> int:
    """Return how many bytes of memory a call takes in another process at the most."""
    code = _WATCHED.replace("CALL", call)
    run = subprocess.run(  # noqa: S603  our own code
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return int(run.stdout)
