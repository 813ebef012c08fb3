"""Stacking: layers and experts as dimensions, beside the bare decoding of the manifest."""

from __future__ import annotations

import tempfile
from math import prod
from pathlib import Path
from typing import Any

import cbor2
import xarray as xr

from benchmarks.checkpoints import FAMILIES, write_ztensor
from benchmarks.measuring import Result, best_of, table

# Of the mixture of experts; small files take a fixed time.
BOUND = 6
BOUND_OF_JOIN = 1.5
LARGE = 10_000
BOUND_OF_HTML = 100_000  # microseconds


def family(name: str, folder: Path) -> list[Result]:
    """Open a model stacked, show its summary, and unstack it."""
    tensors = dict(FAMILIES[name]())
    path = folder / "m.zt"
    manifest = write_ztensor(path, tensors)
    floor = best_of(lambda: cbor2.loads(manifest), 3)
    opened = best_of(lambda: xr.open_dataset(path, engine="ztensor", stack=True).close(), 3)
    how: dict[str, Any] = {"engine": "ztensor", "stack": True, "join": "outer"}
    joined = best_of(lambda: xr.open_dataset(path, **how).close(), 3)
    with xr.open_dataset(path, engine="ztensor", stack=True) as ds:
        if sum(v.size for v in ds.data_vars.values()) != sum(map(prod, tensors.values())):
            raise ValueError(f"{name}: tensors are missing, or there twice")
        html = best_of(ds._repr_html_, 3)
        flat = best_of(ds.ckpt.unstack, 2)
        if list(ds.ckpt.unstack().variables) != list(tensors):
            raise ValueError(f"{name}: unstacked it has other tensors")
        count, variables = f"{len(tensors):,}", len(ds.data_vars)
    large = len(tensors) > LARGE
    loads = f"cbor2.loads of its manifest, {floor * 1e3:.1f} ms"
    what = f"{name}: {count} tensors as {variables} variables"
    return [
        Result(what, opened / floor, "x", loads, BOUND if large else None),
        Result(
            f"{name}: with join='outer'",
            joined / opened,
            "x",
            "without",
            BOUND_OF_JOIN if large else None,
        ),
        Result(f"{name}: its HTML", html * 1e6, "µs", "", BOUND_OF_HTML),
        Result(f"{name}: unstack", flat / len(tensors) * 1e6, "µs per tensor"),
    ]


def run() -> list[Result]:
    """Measure everything."""
    with tempfile.TemporaryDirectory() as folder:
        return [result for name in FAMILIES for result in family(name, Path(folder))]


if __name__ == "__main__":
    print(table(run()))
