"""Reading 1 GiB of raw data whole: time beside numpy.fromfile, and peak memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

import dask
import numpy as np
import xarray as xr

from benchmarks.checkpoints import write_ztensor
from benchmarks.measuring import Result, best_of, in_fresh_process, table

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
    return results


if __name__ == "__main__":
    print(table(run()))
