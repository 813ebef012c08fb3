"""Writing: a save beside safetensors, a conversion beside cp, and the memory of both."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import safetensors.numpy
import xarray as xr

from benchmarks.checkpoints import mixture_of_experts, write_ztensor
from benchmarks.measuring import Result, in_fresh_process, table
from xckpt.writing import convert, save

if TYPE_CHECKING:
    from collections.abc import Callable

NBYTES = 1 << 30
LARGE_NBYTES = 12 << 30
ROUNDS = 5
BOUND_OF_MEMORY = 600  # MiB


def alternating(ours: Callable[[], None], theirs: Callable[[], None]) -> tuple[float, float]:
    """Time two functions in turn, under the same load of the disk; return the best of each."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for function, seconds in zip((ours, theirs), times, strict=True):
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
    return min(times[0]), min(times[1])


def durable(path: Path) -> None:
    """Wait until a file is on the disk, as `xckpt.save` does."""
    fileno = os.open(path, os.O_RDWR)
    os.fsync(fileno)
    os.close(fileno)


def saving(folder: Path) -> Result:
    """Save arrays from memory."""
    rng = np.random.default_rng(0)
    arrays = {f"w{i}": rng.integers(0, 255, NBYTES // 128, np.uint8) for i in range(128)}
    ds = xr.Dataset({name: (f"d{array.size}", array) for name, array in arrays.items()})

    def theirs() -> None:
        safetensors.numpy.save_file(arrays, folder / "theirs.safetensors")
        durable(folder / "theirs.safetensors")

    def ours() -> None:
        save(ds, folder / "ours.safetensors", overwrite=True)

    seconds, floor = alternating(ours, theirs)
    against = f"safetensors.numpy.save_file and fsync, {floor:.2f} s"
    return Result("save of 1 GiB from numpy", seconds / floor, "x", against, 1.25)


def copying(folder: Path) -> Result:
    """Convert a file of real bytes to another format."""
    source = folder / "ours.safetensors"

    def theirs() -> None:
        subprocess.run(["cp", source, folder / "copy"], check=True)  # noqa: S603, S607
        durable(folder / "copy")

    def ours() -> None:
        convert(source, folder / "new.bpk", overwrite=True)

    seconds, floor = alternating(ours, theirs)
    against = f"cp and fsync, {floor:.2f} s"
    return Result("convert of 1 GiB to another format", seconds / floor, "x", against, 2)


def memory(folder: Path, what: str, code: str, bound: float | None = BOUND_OF_MEMORY) -> Result:
    """Measure the peak growth of anonymous memory of a process that writes."""
    measured = in_fresh_process(f"""
import xarray as xr, dask.array
from xckpt.writing import convert, save
source, target = {str(folder / "large.zt")!r}, {str(folder / "large.out")!r}
watched = watch()
{code}
print(json.dumps({{"most": watched()}}))
""")
    (folder / "large.out").unlink()
    return Result(what, measured["most"] / (1 << 20), "MiB", "anonymous, above the imports", bound)


def write_large(path: Path) -> None:
    """Write a file of 12 GiB, all holes."""
    columns = 1 << 14
    rows = LARGE_NBYTES // 12 // 2 // columns
    write_ztensor(path, {f"w{i}": [rows, columns] for i in range(12)}, "bfloat16")


def large(folder: Path) -> list[Result]:
    """Write 12 GiB of holes, which take no disk space where they are copied."""
    write_large(folder / "large.zt")
    opened = "xr.open_dataset(source, engine='ztensor')"
    results = [
        memory(
            folder,
            "convert of 12 GiB to another format",
            "convert(source, target, 'safetensors')",
        ),
        memory(
            folder,
            "convert of 4 GiB with zstd",
            "convert(source, target, 'ztensor', tensors='w[0-3]',"
            " encoding={'*': {'compression': 'zstd'}})",
        ),
        memory(
            folder,
            "save of 2 GiB that are computed (bfloat16 as float32, doubled, back)",
            f"ds = {opened}[['w0', 'w1']]\n"
            "save(ds * 2, target, 'safetensors', encoding={'*': {'dtype': 'bfloat16'}})",
            bound=None,  # each thread computes with chunks of 128 MiB
        ),
        memory(
            folder,
            "convert of 1 GiB to column-major order",
            "convert(source, target, 'primitiv', tensors='w0')",
        ),
    ]
    (folder / "large.zt").unlink()
    return results


def timed(function: Callable[[], object]) -> float:
    """Return the time of one call in seconds."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def copied(source: Path, *options: str) -> float:
    """Return the time of cp and of writing to the disk, in seconds."""
    target = source.with_name("copy")

    def copy() -> None:
        subprocess.run(["cp", *options, source, target], check=True)  # noqa: S603, S607
        durable(target)

    seconds = timed(copy)
    target.unlink()
    return seconds


def converted(source: Path) -> float:
    """Return the time of a conversion to another format, in seconds."""
    target = source.with_name("converted.safetensors")
    seconds = timed(lambda: convert(source, target))
    target.unlink()
    return seconds


def throughput(folder: Path) -> list[Result]:
    """Convert 12 GiB beside cp: holes, which cp skips, and bytes, which it copies."""
    holes, full = folder / "large.zt", folder / "full.zt"
    write_large(holes)
    ours, theirs = (min(f(holes) for _ in range(ROUNDS)) for f in (converted, copied))
    against = f"cp and fsync, {theirs * 1e3:,.0f} ms: it skips them too"
    results = [Result("convert of 12 GiB of holes", ours * 1e3, "ms", against, 500)]
    if shutil.disk_usage(folder).free > 3 * LARGE_NBYTES:
        theirs = copied(holes, "--sparse=never")
        against = f"cp --sparse=never and fsync, {theirs:.1f} s"
        results.append(
            Result("convert of 12 GiB of holes, beside bytes", ours / theirs, "x", against, 2)
        )
        subprocess.run(["cp", "--sparse=never", holes, full], check=True)  # noqa: S603, S607
        durable(full)
        ours, theirs = (min(times) for times in zip(*_in_turns(full), strict=True))
        against = f"cp and fsync, {theirs:.1f} s"
        results.append(Result("convert of 12 GiB of bytes", ours / theirs, "x", against, 2))
        full.unlink()
    holes.unlink()
    return results


def _in_turns(source: Path) -> list[tuple[float, float]]:
    return [(converted(source), copied(source)) for _ in range(2)]


def many(folder: Path) -> Result:
    """Convert the tensors of a large mixture of experts, made small."""
    tensors = {name: [max(1, n // 64) for n in shape] for name, shape in mixture_of_experts()}
    write_ztensor(folder / "moe.zt", tensors)
    start = time.perf_counter()
    convert(folder / "moe.zt", folder / "moe.safetensors")
    seconds = time.perf_counter() - start
    what = f"convert of {len(tensors):,} small tensors"
    return Result(what, seconds / len(tensors) * 1e6, "µs per tensor", "", 100)


def run() -> list[Result]:
    """Measure everything."""
    folder = Path(tempfile.mkdtemp())
    try:
        return [saving(folder), copying(folder), many(folder), *throughput(folder), *large(folder)]
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    print(table(run()))
