"""All statistics in one pass: time beside numpy and xarray, and peak memory of a large file."""

from __future__ import annotations

import tempfile
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import xarray as xr

from benchmarks.checkpoints import write_ztensor
from benchmarks.measuring import Result, best_of, in_fresh_process, table
from xckpt.statistics import stats

if TYPE_CHECKING:
    from collections.abc import Callable

GIB = 1 << 30
ROW = 4096


def _fill(path: Path, nbytes: int, dtype: Any) -> None:
    """Fill the holes with random weights, which brings the file into the page cache."""
    rng = np.random.default_rng(0)
    with path.open("r+b") as file:
        file.seek(64)
        for start in range(0, nbytes, 1 << 24):
            count = min(1 << 24, nbytes - start) // np.dtype(dtype).itemsize
            values = rng.standard_normal(count, np.float32) * np.float32(0.02)
            file.write(values.astype(dtype).tobytes())


def _mapped(path: Path, nbytes: int, dtype: Any) -> np.ndarray[Any, Any]:
    return np.memmap(path, np.uint8, "r", offset=64, shape=(nbytes,)).view(dtype)


def _four(values: Any) -> tuple[Any, ...]:
    return values.mean(), values.std(), values.min(), values.max()


def _ours(path: Path) -> Callable[[], xr.Dataset]:
    return lambda: stats(path, progress=False, cache=False)


def float32(folder: Path) -> list[Result]:
    """Measure 4 GiB of float32."""
    path, nbytes = folder / "float32.zt", 4 * GIB
    write_ztensor(path, {f"w{i}": [nbytes // 8 // 4 // ROW, ROW] for i in range(8)}, "float32")
    _fill(path, nbytes, np.float32)
    values = _mapped(path, nbytes, np.float32)
    ours = best_of(_ours(path))
    series = import_module("polars").Series(values)
    loops: dict[str, tuple[Callable[[], Any], float]] = {
        "np.sum of a memmap": (values.sum, 3),
        "numpy's mean, std, min, max": (lambda: _four(values), 1 / 3),
        "polars' mean, std, min, max of a Series": (partial(_four, series), 0.6),
    }
    results = [Result("4 GiB of float32", nbytes / ours / 1e9, "GB/s", "read and described")]
    for peer, (loop, bound) in loops.items():
        seconds = best_of(loop)
        results.append(Result("the same", ours / seconds, "x", f"{peer}, {seconds:.2f} s", bound))
    path.unlink()
    return results


def bfloat16(folder: Path) -> list[Result]:
    """Measure 2 GiB of bfloat16."""
    path, nbytes = folder / "bfloat16.zt", 2 * GIB
    write_ztensor(path, {f"w{i}": [nbytes // 8 // 2 // ROW, ROW] for i in range(8)}, "bfloat16")
    _fill(path, nbytes, ml_dtypes.bfloat16)
    values = _mapped(path, nbytes, ml_dtypes.bfloat16)
    ours = best_of(_ours(path))
    four = best_of(lambda: _four(values.astype(np.float32)))
    path.unlink()
    return [
        Result("2 GiB of bfloat16", nbytes / ours / 1e9, "GB/s", "read and described"),
        Result("the same", ours / four, "x", f"as float32, then numpy's four, {four:.2f} s", 1 / 8),
    ]


def own_loop(folder: Path) -> list[Result]:
    """Measure 1 GiB of bfloat16 beside a loop that a user of PyTorch would write."""
    if find_spec("torch") is None:
        return []
    import safetensors

    torch: Any = import_module("torch")
    path = folder / "own.safetensors"
    weights = {f"w{i}": torch.randn(1024, 4096).mul(0.02).bfloat16() for i in range(128)}
    import_module("safetensors.torch").save_file(weights, path)

    def loop() -> None:
        with safetensors.safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                values = file.get_tensor(name).float()
                torch.std_mean(values)
                torch.aminmax(values)

    ours, theirs = best_of(_ours(path)), best_of(loop)
    ratio = _processor_time(_ours(path)) / _processor_time(loop)
    four = "torch.std_mean and aminmax over safe_open"
    path.unlink()
    return [
        Result("1 GiB of bfloat16 in safetensors", ours / theirs, "x", f"{four}, {theirs:.2f} s"),
        Result("the same, processor time", ratio, "x", "as above: 23 statistics beside 4"),
    ]


def many_tensors(folder: Path) -> list[Result]:
    """Measure 2,000 small tensors of an open file."""
    path = folder / "many.zt"
    write_ztensor(path, {f"layers.{i}.w": [64, 64] for i in range(2000)}, "float32")
    _fill(path, 2000 << 14, np.float32)
    ds = xr.open_dataset(path, engine="ztensor")
    ours = best_of(lambda: stats(ds, progress=False, cache=False))
    theirs = best_of(lambda: [f().compute() for f in (ds.mean, ds.std, ds.min, ds.max)], 1)
    again = best_of(lambda: stats(ds, progress=False))
    return [
        Result("2,000 tensors of 16 KiB", ours * 1000, "ms", "all statistics"),
        Result("the same", ours / theirs, "x", f"ds.mean(), std, min, max, {theirs:.1f} s", 1 / 50),
        Result("the same, called again", again * 1000, "ms", "from the cache"),
    ]


def small_tensors(folder: Path) -> list[Result]:
    """Measure the processor time for a small tensor, which other load affects least."""
    results, count = [], 4000
    for dtype, stored in (("float32", np.float32), ("bfloat16", ml_dtypes.bfloat16)):
        path = folder / f"small.{dtype}.zt"
        write_ztensor(path, {f"layers.{i}.w": [64, 64] for i in range(count)}, dtype)
        _fill(path, count * 4096 * np.dtype(stored).itemsize, stored)
        ds = xr.open_dataset(path, engine="ztensor")
        scanned = _processor_time(partial(stats, ds, progress=False, cache=False))
        cached = _processor_time(partial(stats, ds, progress=False))
        title = f"a tensor of 4,096 {dtype}"
        time = "of processor time"
        results += [
            Result(title, scanned / count * 1e6, "µs", time, 100),
            Result(f"{title}, from the cache", cached / count * 1e6, "µs", time, 20),
        ]
    return results


def _processor_time(function: Callable[[], Any]) -> float:
    """Return the shortest processor time of several calls, in seconds."""
    times = []
    for _ in range(6):
        start = process_time()
        function()
        times.append(process_time() - start)
    return min(times)


def first_use(folder: Path) -> list[Result]:
    """Measure the first scan of a type, which compiles the kernels."""
    results = []
    for dtype in ("float32", "bfloat16"):
        path = folder / f"first.{dtype}.zt"
        write_ztensor(path, {"w": [64, 64]}, dtype)
        measured = in_fresh_process(f"""
import os, time
os.environ["NUMBA_CACHE_DIR"] = {str(folder / dtype)!r}
import xarray, dask.array, xckpt.statistics, xckpt.datasets.variables
start = time.process_time()
xckpt.stats({str(path)!r}, cache=False)
print(json.dumps({{"seconds": time.process_time() - start}}))
""")
        compiled = Result(
            f"first use of {dtype}", measured["seconds"] * 1000, "ms", "of processor time", 2000
        )
        results.append(compiled)
    return results


def memory(folder: Path) -> list[Result]:
    """Measure the peak of anonymous memory for a file of 64 GiB that is a hole."""
    path = folder / "huge.zt"
    write_ztensor(path, {f"w{i}": [GIB // ROW, ROW] for i in range(16)}, "float32")
    measured = in_fresh_process(f"""
import threading, time
import xarray, dask.array, tqdm.auto, xckpt.datasets.variables, xckpt.statistics.block_loops
before, highest, told, done = peak()["anonymous"], 0, [], threading.Event()
def watch():
    global highest
    while not done.wait(0.01):
        highest = max(highest, peak()["anonymous"])
watcher = threading.Thread(target=watch)
watcher.start()
start = time.perf_counter()
xckpt.stats({str(path)!r}, cache=False, progress=lambda *_: told.append(time.perf_counter()))
seconds = time.perf_counter() - start
done.set()
watcher.join()
gap = max(b - a for a, b in zip(told, told[1:]))
print(json.dumps({{"peak": highest - before, "seconds": seconds, "gap": gap}}))
""")
    speed = 64 * GIB / measured["seconds"] / 1e9
    return [
        Result(
            "64 GiB of float32, a sparse file: anonymous memory above the imports",
            measured["peak"] / (1 << 20),
            "MiB",
            f"at its peak, at {speed:.1f} GB/s",
            500,
        ),
        Result("longest time without progress", measured["gap"] * 1000, "ms", "of that", 1000),
    ]


def run() -> list[Result]:
    """Measure everything."""
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        for part in (float32, bfloat16, own_loop, many_tensors, small_tensors, first_use, memory):
            results += part(Path(name))
    return results


if __name__ == "__main__":
    print(table(run()))
