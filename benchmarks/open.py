"""Opening: 90,000 tensors, the cost of a tensor in every format, and beside other libraries."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cbor2
import numpy as np
import xarray as xr
from safetensors import safe_open

import xckpt
from benchmarks import formats as read_only
from benchmarks.checkpoints import WRITERS, mixture_of_experts, write_ztensor
from benchmarks.measuring import Result, best_of, table
from xckpt import formats

if TYPE_CHECKING:
    from collections.abc import Callable

TENSORS = 2000
TENSORS_OF_ENGINES = 10_000
LISTED = 50_000
BOUND_OF_ENGINES = 80  # microseconds for each tensor


def mixture(folder: Path) -> list[Result]:
    """Open a file with the tensors of a large mixture of experts."""
    tensors = dict(mixture_of_experts())
    path = folder / "moe.zt"
    manifest = write_ztensor(path, tensors)
    floor = best_of(lambda: cbor2.loads(manifest), 3)
    index = best_of(lambda: xckpt.read_index(path), 3)
    flat = best_of(lambda: xr.open_dataset(path, engine="ztensor").close(), 3)
    tree = best_of(lambda: xr.open_datatree(path, engine="ztensor").close(), 3)
    count = len(tensors)
    loads = f"cbor2.loads of its {len(manifest) / 1e6:.0f} MB manifest, {floor:.2f} s"
    return [
        Result(f"read_index of {count:,} tensors", index / floor, "x", loads),
        Result(f"open_dataset of {count:,} tensors", flat / floor, "x", loads, 12),
        Result("the same for each tensor", flat / count * 1e6, "µs"),
        Result(f"open_datatree of {count:,} tensors", tree / flat, "x", "open_dataset", 3),
    ]


def engines(folder: Path) -> list[Result]:
    """Open equally many tensors with each engine of xckpt."""
    count = TENSORS_OF_ENGINES
    tensors = {f"model.layers.{i // 10}.mlp.{i % 10}.weight": [64, 64] for i in range(count)}
    results = []
    for engine in formats.names():
        path = folder / engine
        WRITERS.get(engine, partial(_save, engine))(path, tensors)
        with xr.open_dataset(path, engine=engine) as ds:
            if {name: list(v.shape) for name, v in ds.variables.items()} != tensors:
                raise ValueError(f"{engine}: what was opened is not what was written")
        index = best_of(partial(xckpt.read_index, path)) / count * 1e6
        opened = best_of(partial(xr.open_dataset, path, engine=engine)) / count * 1e6
        what = f"{engine}: open_dataset of {count:,} tensors"
        of_it = f"{index:.0f} µs of it read_index"
        results.append(Result(what, opened, "µs per tensor", of_it, BOUND_OF_ENGINES))
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return results


def _save(engine: str, path: Path, tensors: dict[str, list[int]]) -> None:
    """Write zeros with xckpt, or with what the benchmarks have for formats that it only reads."""
    if engine in read_only.WRITERS:
        zeros = {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}
        read_only.WRITERS[engine](path, zeros)
        return
    arrays = {
        name: ([f"d{n}_{at}" for at, n in enumerate(shape)], np.zeros(shape, np.float32))
        for name, shape in tensors.items()
    }
    xckpt.save(xr.Dataset(arrays), path, engine)


def listing(folder: Path) -> list[Result]:
    """List the names, shapes and types of many tensors of a safetensors file."""
    path = folder / "many.safetensors"
    tensors = {f"model.layers.{i // 10}.mlp.{i % 10}.weight": [8] for i in range(LISTED)}
    WRITERS["safetensors"](path, tensors)
    floor = best_of(partial(_list_safetensors, path))
    index = best_of(lambda: xckpt.read_index(path), 3)
    opened = best_of(lambda: xckpt.open(path).close(), 3)
    path.unlink()
    library = f"safe_open, names, shapes and types, {floor * 1e3:.0f} ms"
    return [
        Result(f"read_index of {LISTED:,} tensors", index / floor, "x", library, 3),
        Result(f"xckpt.open of {LISTED:,} tensors", opened / floor, "x", library, 13),
    ]


def _list_safetensors(path: Path | str) -> None:
    with safe_open(path, "numpy") as file:
        for name in file.keys():  # noqa: SIM118  not a mapping
            piece = file.get_slice(name)
            piece.get_shape(), piece.get_dtype()


def peers(folder: Path) -> list[Result]:
    """Open equal content with each library: names, shapes and types of all tensors."""
    rng = np.random.default_rng(0)
    arrays = {f"layers.{i}.weight": rng.random((16, 16), np.float32) for i in range(TENSORS)}
    openers = _write_for_peers(folder, arrays)
    results = []
    ours = 0.0
    for name, opener in openers.items():
        seconds = best_of(opener)
        ours = ours or seconds
        against = f"{seconds / ours:.2f} × ours" if seconds != ours else f"{TENSORS:,} tensors"
        results.append(Result(name, seconds / TENSORS * 1e6, "µs per tensor", against))
    return results


def _write_for_peers(folder: Path, arrays: dict[str, np.ndarray]) -> dict[str, Callable[[], Any]]:
    import safetensors.numpy
    import ztensor
    import ztensor.numpy

    st, z2, h5, zarr = (str(folder / f"peer.{suffix}") for suffix in ("st", "zt", "h5", "zarr"))
    safetensors.numpy.save_file(arrays, st)
    ztensor.numpy.save_file(arrays, z2)
    dims = {name: (("a", "b"), array) for name, array in arrays.items()}
    xr.Dataset(dims).to_netcdf(h5, engine="h5netcdf")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        xr.Dataset(dims).to_zarr(zarr, consolidated=True)

    def list_ztensor() -> None:
        with ztensor.open(z2) as file:
            [(tensor.shape, tensor.dtype) for tensor in file.values()]

    return {
        "xckpt: xr.open_dataset (lazy, dask-backed)": lambda: xr.open_dataset(
            z2, engine="ztensor"
        ).close(),
        "xckpt: read_index": lambda: xckpt.read_index(z2),
        "ztensor: open and list": list_ztensor,
        "safetensors: safe_open and list": partial(_list_safetensors, st),
        "zarr: xr.open_dataset": lambda: xr.open_dataset(zarr, engine="zarr").close(),
        "zarr: xr.open_dataset, chunks={}": lambda: xr.open_dataset(
            zarr, engine="zarr", chunks={}
        ).close(),
        "h5netcdf: xr.open_dataset": lambda: xr.open_dataset(h5, engine="h5netcdf").close(),
        "h5netcdf: xr.open_dataset, chunks={}": lambda: xr.open_dataset(
            h5, engine="h5netcdf", chunks={}
        ).close(),
    }


def run() -> list[Result]:
    """Measure everything."""
    with tempfile.TemporaryDirectory() as folder:
        parts = (mixture, engines, listing, peers)
        return [result for part in parts for result in part(Path(folder))]


if __name__ == "__main__":
    print(table(run()))
