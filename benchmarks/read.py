"""Reading 1 GiB of raw data whole: time beside other readers, and peak memory; a cold file."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import xarray as xr
from safetensors.numpy import load_file

import xckpt
from benchmarks.checkpoints import write_ztensor
from benchmarks.measuring import Result, best_of, in_fresh_process, table
from xckpt.statistics import stats

if TYPE_CHECKING:
    from collections.abc import Callable

NBYTES = 1 << 30


def _fill(path: Path) -> None:
    """Replace the holes by bytes, so that both readers copy from the page cache."""
    with path.open("r+b") as file:
        file.seek(64)
        block = np.random.default_rng(0).integers(0, 256, 1 << 24, np.uint8).tobytes()
        for _ in range(NBYTES // len(block)):
            file.write(block)


def one_file(path: Path, what: str, chunk: str = "128MiB", bound: float = 1.3) -> list[Result]:
    """Measure a file."""
    floor = best_of(lambda: np.fromfile(path, np.float32), 7)
    with dask.config.set({"array.chunk-size": chunk}):
        ours = best_of(lambda: xr.open_dataset(path, engine="ztensor").compute(), 7)
    memory = in_fresh_process(f"""
import xarray as xr, dask.array, xckpt.datasets.variables
before = peak()["resident"]
forget_peak()
with dask.config.set({{"array.chunk-size": {chunk!r}}}):
    ds = xr.open_dataset({str(path)!r}, engine="ztensor").compute()
after = peak()
print(json.dumps({{"peak": after["resident"] - before}}))
""")
    against = f"np.fromfile, {floor:.2f} s"
    return [
        Result(f"ds.compute() of 1 GiB, {what}", ours / floor, "x", against, bound),
        Result(
            f"peak resident memory of that, {what}",
            memory["peak"] / NBYTES,
            "x",
            "the data",
            1.1,
        ),
    ]


def beside_safetensors(path: Path, folder: Path) -> list[Result]:
    """Measure reading into memory and using every element once, beside safetensors."""
    peer = folder / "peer.safetensors"
    xckpt.convert(path, peer, progress=False)
    peer_load = best_of(lambda: [a.max() for a in load_file(peer).values()], 7)
    seconds = best_of(
        lambda: [v.values.max() for v in xckpt.open(peer).compute().variables.values()], 7
    )
    peer.unlink()
    what = "ds.compute() of 1 GiB, and its largest element"
    load = f"safetensors.numpy.load_file, {peer_load:.2f} s"
    return [Result(what, seconds / peer_load, "x", load, 0.8)]


def _cold(path: Path, function: Callable[[], Any]) -> tuple[float, int]:
    """Return the time of a call on a cold file, and the bytes that it read from the disk.

    Only reads of this process count.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before, start = _from_disk(), time.perf_counter()
    function()
    return time.perf_counter() - start, _from_disk() - before


def _from_disk() -> int:
    lines = Path("/proc/self/io").read_text("ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def cold_file(path: Path) -> list[Result]:
    """Measure a file that is not in the page cache, in turn with dd."""
    uses: dict[str, Callable[[], Any]] = {
        "stats": lambda: stats(path, progress=False, cache=False),
        "ds.compute()": lambda: xr.open_dataset(path, engine="ztensor").compute(),
    }
    dd = ["dd", f"if={path}", "of=/dev/null", "bs=16M", "status=none"]
    read = partial(subprocess.run, dd, check=True)
    times: dict[str, list[float]] = {name: [] for name in ("dd", *uses)}
    nbytes = {}
    for use in uses.values():
        use()  # compiled
    for _ in range(4):
        times["dd"].append(_cold(path, read)[0])
        for name, use in uses.items():
            seconds, nbytes[name] = _cold(path, use)
            times[name].append(seconds)
    floor = min(times["dd"])
    results = []
    for name in uses:
        speed = f"dd with blocks of 16 MiB, {NBYTES / floor / 1e9:.2f} GB/s"
        what = f"{name} of 1 GiB, cold"
        results += [
            Result(what, min(times[name]) / floor, "x", speed, 1 / 0.9),
            Result(f"{what}: from the disk", nbytes[name] / path.stat().st_size, "x", "the file"),
        ]
    return results


def run() -> list[Result]:
    """Measure everything."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for what, tensors in {
            "one tensor": {"w": [NBYTES // 4096, 1024]},
            "128 tensors of 8 MiB": {f"w{i}": [2048, 1024] for i in range(128)},
        }.items():
            path = Path(folder) / "big.zt"
            write_ztensor(path, tensors, "float32")
            _fill(path)
            results += one_file(path, what)
            if len(tensors) == 1:
                results += one_file(path, "one tensor in 128 chunks", "8MiB", 1.5)
            else:
                results += beside_safetensors(path, Path(folder))
                results += cold_file(path)
    return results


if __name__ == "__main__":
    print(table(run()))
