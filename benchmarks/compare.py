"""Two checkpoints compared, of different formats and element types, beside the speed of a scan."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import xarray as xr

from benchmarks.checkpoints import WRITERS, write_ztensor
from benchmarks.measuring import Result, best_of, in_fresh_process, table
from xckpt.comparison import compare
from xckpt.opening import read_index
from xckpt.statistics import stats
from xckpt.statistics import table as frame

GIB = 1 << 30
ROW = 4096
TENSORS = 8
#: A tensor that is other than its rounded self, and by how much.
CHANGED = {"w5": 1.0, "w2": 0.1}


def _write(path: Path, tensors: dict[str, list[int]], dtype: str) -> None:
    if path.suffix == ".zt":
        write_ztensor(path, tensors, dtype)
    else:
        WRITERS[path.suffix.removeprefix(".")](path, tensors)


def _fill(path: Path, dtype: Any, *, changed: bool = False) -> None:
    """Fill the holes with random weights, equal in every file except for rounding."""
    for name, tensor in read_index(path).tensors.items():
        rng = np.random.default_rng(int(name[1:]))
        part = tensor.parts["data"]
        scale = np.float32(0.02 * (1 + (CHANGED.get(name, 0.0) if changed else 0.0)))
        with path.open("r+b") as file:
            file.seek(part.offset)
            for _ in range(0, tensor.size, 1 << 22):
                values = rng.standard_normal(min(1 << 22, tensor.size), np.float32) * scale
                file.write(values.astype(dtype).tobytes())


def _tensors(nbytes: int, itemsize: int) -> dict[str, list[int]]:
    return {f"w{i}": [nbytes // TENSORS // itemsize // ROW, ROW] for i in range(TENSORS)}


def _file(folder: Path, name: str, nbytes: int, dtype: Any, **options: bool) -> Path:
    path = folder / name
    _write(path, _tensors(nbytes, np.dtype(dtype).itemsize), np.dtype(dtype).name)
    _fill(path, dtype, **options)
    return path


def _mapped(path: Path) -> np.ndarray[Any, Any]:
    start = read_index(path).tensors["w0"].parts["data"].offset
    return np.memmap(path, np.uint8, "r", start, (GIB,)).view(np.uint64)


def element_types(folder: Path) -> list[Result]:
    """Measure 2 GiB of float32 against as many elements in bfloat16, in another format."""
    ours = _file(folder, "a.burnpack", 2 * GIB, np.float32)
    scan = best_of(lambda: stats(ours, progress=False, cache=False))
    theirs = _file(folder, "b.zt", GIB, ml_dtypes.bfloat16, changed=True)
    seconds = best_of(lambda: compare(ours, theirs, progress=False, cache=False))
    result = frame(compare(ours, theirs, progress=False, cache=False))
    first = ", ".join(result.index[: len(CHANGED)])
    if list(result.index[: len(CHANGED)]) != list(CHANGED):
        raise AssertionError(f"{first} changed most, not {', '.join(CHANGED)}")
    theirs.unlink()
    speeds = 2 * GIB / scan / 1e9, 3 * GIB / seconds / 1e9
    kinds = "2 GiB of float32 (Burnpack) with 1 GiB of bfloat16 (zTensor)"
    context = f"of stats of the float32, {speeds[0]:.1f} GB/s"
    results = [
        Result(kinds, speeds[1], "GB/s", f"of both; changed most: {first}"),
        Result("the same, stats' speed / its speed", speeds[0] / speeds[1], "x", context, 1 / 0.4),
    ]
    changed = _file(folder, "c.safetensors", 2 * GIB, np.float32, changed=True)
    seconds = best_of(lambda: compare(ours, changed, progress=False, cache=False))
    speed = 4 * GIB / seconds / 1e9
    title = "2 GiB of float32 with 2 GiB of float32 (safetensors), a quarter of it changed"
    results += [
        Result(title, speed, "GB/s", "of both"),
        Result("the same, stats' speed / its speed", speeds[0] / speed, "x", context, 1 / 0.4),
    ]
    for path in (ours, changed):
        path.unlink()
    return results


def identical(folder: Path) -> list[Result]:
    """Measure files with the same bytes, against reading both and comparing them with numpy."""
    ours = _file(folder, "a.zt", GIB, np.float32)
    theirs = _file(folder, "b.safetensors", GIB, np.float32)
    seconds = best_of(lambda: compare(ours, theirs, progress=False, cache=False))
    a, b = _mapped(ours), _mapped(theirs)
    floor = best_of(lambda: np.array_equal(a, b))
    for path in (ours, theirs):
        path.unlink()
    return [
        Result("1 GiB of float32 with the same bytes", 2 * GIB / seconds / 1e9, "GB/s", "of both"),
        Result("the same", seconds / floor, "x", f"np.array_equal of memmaps, {floor:.2f} s"),
    ]


def many_tensors(folder: Path) -> list[Result]:
    """Measure 2,000 small tensors of open files."""
    paths = [folder / "many.zt", folder / "many.safetensors"]
    for path in paths:
        _write(path, {f"w{i}": [64, 64] for i in range(2000)}, "float32")
    a, b = (xr.open_dataset(path, engine=read_index(path).format) for path in paths)
    seconds = best_of(lambda: compare(a, b, progress=False, cache=False))
    scan = best_of(lambda: stats(a, progress=False, cache=False))
    again = best_of(lambda: compare(a, b, progress=False))
    return [
        Result("2,000 tensors of 16 KiB each", seconds * 1000, "ms", "Datasets to Dataset"),
        Result("the same", seconds / scan, "x", f"stats of one of them, {scan * 1000:.0f} ms"),
        Result("the same, called again", again * 1000, "ms", "from the cache"),
    ]


def first_use(folder: Path) -> list[Result]:
    """Measure the first comparison, which compiles the kernels."""
    paths = [folder / "first.zt", folder / "first.safetensors"]
    for path in paths:
        _write(path, {"w": [64, 64]}, "float32")
    measured = in_fresh_process(f"""
import os, time
os.environ["NUMBA_CACHE_DIR"] = {str(folder / "compiled")!r}
import xarray, dask.array, xckpt.statistics, xckpt.datasets.variables
start = time.perf_counter()
xckpt.compare(*{[str(path) for path in paths]!r}, cache=False)
print(json.dumps({{"seconds": time.perf_counter() - start}}))
""")
    return [Result("first use", measured["seconds"] * 1000, "ms", "compiled, then kept", 3000)]


def memory(folder: Path) -> list[Result]:
    """Measure the peak of anonymous memory for two files of 16 GiB and 8 GiB that are holes."""
    paths = [folder / "huge.burnpack", folder / "huge.zt"]
    shapes = {f"w{i}": [GIB // ROW, ROW] for i in range(4)}
    _write(paths[0], shapes, "float32")
    _write(paths[1], shapes, "bfloat16")
    measured = in_fresh_process(f"""
import threading
import xarray, dask.array, tqdm.auto, xckpt.statistics.block_loops, xckpt.datasets.variables
before, highest, done = peak()["anonymous"], 0, threading.Event()
def watch():
    global highest
    while not done.wait(0.01):
        highest = max(highest, peak()["anonymous"])
watcher = threading.Thread(target=watch)
watcher.start()
xckpt.compare(*{[str(path) for path in paths]!r}, cache=False, progress=False)
done.set()
watcher.join()
print(json.dumps({{"peak": highest - before}}))
""")
    title = "16 GiB of float32 with 8 GiB of bfloat16, sparse files: anonymous memory"
    return [
        Result(title, measured["peak"] / (1 << 20), "MiB", "above the imports, at its peak", 500)
    ]


def run() -> list[Result]:
    """Measure everything."""
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        for part in (element_types, identical, many_tensors, first_use, memory):
            results += part(Path(name))
    return results


if __name__ == "__main__":
    print(table(run()))
