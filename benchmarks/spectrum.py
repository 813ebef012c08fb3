"""Singular values of matrices in a file, beside numpy's decomposition of them in memory."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import xarray as xr

import xckpt
from benchmarks.measuring import Result, in_fresh_process, table

SHAPES = {(4096, 4096): 0.6, (4096, 11008): 0.25}
COUNT, SIDE = 64, 2048
MIB = 1 << 20


def write(path: Path, **arrays: np.ndarray) -> None:
    """Write matrices."""
    xckpt.save(
        xr.Dataset({name: ((f"{name}_r", f"{name}_c"), a) for name, a in arrays.items()}), path
    )


def seconds(function: object, *arguments: object, **options: object) -> float:
    """Time one call: these take long."""
    start = time.perf_counter()
    function(*arguments, **options)  # type: ignore[operator]
    return time.perf_counter() - start


def run() -> list[Result]:
    """Measure."""
    results = []
    rng = np.random.default_rng(0)
    np.linalg.eigvalsh(np.eye(512))
    with tempfile.TemporaryDirectory() as folder:
        for shape, bound in SHAPES.items():
            array = rng.standard_normal(shape, dtype=np.float32)
            path = Path(folder) / f"{shape[1]}.zt"
            write(path, m=array)
            ours = seconds(xckpt.spectrum, path, cache=False, progress=False)
            theirs = seconds(np.linalg.svd, array, compute_uv=False)
            what = f"{shape[0]} x {shape[1]} of float32"
            context = f"np.linalg.svd(compute_uv=False), {theirs:.1f} s"
            results.append(Result(what, ours / theirs, "x", context, bound))
        arrays = [rng.standard_normal((SIDE, SIDE), dtype=np.float32) for _ in range(COUNT)]
        path = Path(folder) / "model.zt"
        write(path, **{f"m{n}": array for n, array in enumerate(arrays)})
        ours = seconds(xckpt.spectrum, path, cache=False, progress=False)
        blas = 0.0
        for array in arrays:
            rows = array.astype(np.float64)
            blas += seconds(np.matmul, rows.T, rows)
            blas += seconds(np.linalg.eigvalsh, rows.T @ rows)
        context = f"BLAS and LAPACK alone, {blas:.1f} s"
        results.append(Result("1 GiB in 64 matrices", ours / blas, "x", context, 1.25))
        quick = seconds(
            xckpt.spectrum, path, statistics=["stable_rank"], cache=False, progress=False
        )
        results.append(Result("the same, stable_rank alone", quick / ours, "x", "all statistics"))
        path = Path(folder) / "long.zt"
        code = f"""
import numpy as np, xarray as xr, dask.array as da, xckpt, scipy.linalg, threadpoolctl
long = da.random.default_rng(0).standard_normal((200_000, 4096), chunks=(4096, 4096), dtype="f4")
xckpt.save(xr.Dataset({{"m": (("r", "c"), long)}}), {str(path)!r}, progress=False)
del long
import gc; gc.collect()
watched = watch()
xckpt.spectrum({str(path)!r}, "m", cache=False, progress=False)
print(json.dumps({{"most": watched()}}))
"""
        most = in_fresh_process(code)["most"]
        results.append(
            Result("200,000 x 4096: anonymous memory", most / MIB, "MiB", "above the imports", 700)
        )
    return results


if __name__ == "__main__":
    print(table(run()))
