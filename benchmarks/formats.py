"""Flax, ONNX, Keras and Orbax: listing and reading, beside the packages that write them.

200 tensors of 1 MiB. Packages that are not installed have no row.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import xarray as xr

import xckpt
from benchmarks.measuring import Result, best_of, table
from tests.formats import flax_files, onnx_files, orbax_files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Arrays = Mapping[str, np.ndarray[Any, Any]]

__all__ = ["WRITERS"]

TENSORS = 200
SMALL = 345
SIDE = 512


def write_flax(path: Path, arrays: Arrays) -> None:
    """Write a msgpack file."""
    tree = {name: flax_files.array(array) for name, array in arrays.items()}
    path.write_bytes(flax_files.flax_file(tree))


def write_keras(path: Path, arrays: Arrays) -> None:
    """Write an HDF5 file."""
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array


def write_onnx(path: Path, arrays: Arrays) -> None:
    """Write a model without operators."""
    tensors = (onnx_files.initializer(name, array) for name, array in arrays.items())
    path.write_bytes(onnx_files.model(*tensors))


def write_orbax(path: Path, arrays: Arrays) -> None:
    """Write a folder with a database."""
    orbax_files.write(path, arrays)


#: What writes a file of each of these formats.
WRITERS: Mapping[str, Callable[[Path, Arrays], None]] = {
    "flax": write_flax,
    "keras": write_keras,
    "onnx": write_onnx,
    "orbax": write_orbax,
}


@dataclass(frozen=True, slots=True)
class Peer:
    """Another package that reads a format.

    Parameters
    ----------
    package : str
        Its name.
    list : callable
        List the names, shapes and types of a file.
    read : callable
        Read all values of a file.
    """

    package: str
    list: Callable[[Path], Any]
    read: Callable[[Path], Any]


def _peers() -> dict[str, Peer]:
    """Return the installed package of each format."""
    peers = {"keras": Peer("h5py", _list_hdf5, _read_hdf5)}
    if find_spec("flax"):
        restore: Any = import_module("flax.serialization").msgpack_restore

        def load(path: Path) -> Any:
            return restore(path.read_bytes())

        peers["flax"] = Peer("flax", load, load)  # it cannot list without reading
    if find_spec("onnx"):
        import onnx
        from onnx import numpy_helper

        def initializers(path: Path) -> Any:
            return onnx.load(path).graph.initializer

        peers["onnx"] = Peer(
            "onnx",
            lambda path: [(t.name, tuple(t.dims), t.data_type) for t in initializers(path)],
            lambda path: [numpy_helper.to_array(t) for t in initializers(path)],
        )
    if find_spec("tensorstore"):
        peers["orbax"] = Peer("tensorstore", _list_ocdbt, _read_ocdbt)
    return peers


def _list_hdf5(path: Path) -> Any:
    with h5py.File(path) as file:
        return [(name, file[name].shape, file[name].dtype) for name in file]


def _read_hdf5(path: Path) -> Any:
    with h5py.File(path) as file:
        return [file[name][()] for name in file]


def _arrays_of(path: Path) -> Any:
    """Open all arrays of a database with tensorstore, as Orbax does."""
    ts: Any = import_module("tensorstore")
    base = {"driver": "file", "path": f"{path}/"}
    keys = ts.KvStore.open({"driver": "ocdbt", "base": base}).result().list().result()
    names = [key.decode().removesuffix("/.zarray") for key in keys if key.endswith(b"/.zarray")]
    stores = [{"driver": "ocdbt", "base": base, "path": f"{name}/"} for name in names]
    futures = [ts.open({"driver": "zarr", "kvstore": store}, open=True) for store in stores]
    return [future.result() for future in futures]


def _list_ocdbt(path: Path) -> Any:
    return [(array.shape, array.dtype) for array in _arrays_of(path)]


def _read_ocdbt(path: Path) -> Any:
    futures = [array.read() for array in _arrays_of(path)]
    return [future.result() for future in futures]


def one_format(engine: str, path: Path, peer: Peer | None) -> list[Result]:
    """Measure the listing and the reading of a file."""
    listing = best_of(partial(xckpt.read_index, path)) / TENSORS * 1e6
    reading = best_of(lambda: xr.open_dataset(path, engine=engine).compute())
    megabytes = TENSORS * SIDE**2 * 4 / 1e6
    listed = f"{engine}: read_index"
    speed = Result(f"{engine}: all values", megabytes / reading, "MB/s", "ds.compute()")
    if peer is None:
        return [Result(listed, listing, "µs per tensor"), speed]
    theirs = best_of(partial(peer.list, path)) / TENSORS * 1e6
    other = best_of(partial(peer.read, path))
    return [
        Result(listed, listing, "µs per tensor", f"{peer.package}: {theirs:,.0f} µs"),
        speed,
        Result("the same, time", reading / other, "x", f"{peer.package}, {other:.2f} s"),
    ]


def small_tensors(path: Path, peer: Peer) -> list[Result]:
    """Measure opening and reading a graph of many small tensors, as networks for phones have."""
    rng = np.random.default_rng(0)
    arrays = {f"block{n}.weight": rng.random((16, 16), np.float32) for n in range(SMALL)}
    write_onnx(path, arrays)
    seconds = best_of(lambda: xckpt.open(path, chunks=None).load())
    other = best_of(partial(peer.read, path))
    what = f"onnx: open {SMALL} tensors of 1 KiB with chunks=None, and load them"
    against = f"{peer.package}, {other * 1e3:.1f} ms"
    return [Result(what, seconds / other, "x", against, 2)]


def run() -> list[Result]:
    """Measure everything."""
    rng = np.random.default_rng(0)
    arrays = {f"layers.{n}.weight": rng.random((SIDE, SIDE), np.float32) for n in range(TENSORS)}
    peers, results = _peers(), []
    with tempfile.TemporaryDirectory() as folder:
        for engine, write in WRITERS.items():
            path = Path(folder) / engine
            write(path, arrays)
            results += one_format(engine, path, peers.get(engine))
        if "onnx" in peers:
            results += small_tensors(Path(folder) / "small.onnx", peers["onnx"])
    return results


if __name__ == "__main__":
    print(table(run()))
