"""Appended files, read by the reference implementations of both versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dask.array as da
import numpy as np
import pytest
import xarray as xr

from tests import test_interop_ztensor_written as written
from xckpt.writing import append, save

if TYPE_CHECKING:
    from pathlib import Path

ztensor = pytest.importorskip("ztensor", reason="the reference implementation is not installed")

old_release = written.old_release  # a fixture


def grown(path: Path, **options: Any) -> dict[str, np.ndarray]:
    """Write a file, append to it twice, once replacing a tensor, and return its contents."""
    rng = np.random.default_rng(0)
    arrays = {name: rng.random((20, 30)) for name in "abc"} | {"i": np.arange(5)}
    generations = [("a", "i"), ("b", "c"), ("a",)]
    for number, names in enumerate(generations):
        if number == 2:
            arrays["a"] = rng.random((3, 4))
        values = {n: da.from_array(arrays[n], chunks=2) if n == "b" else arrays[n] for n in names}
        dims = {n: [f"{n}{axis}" for axis in range(arrays[n].ndim)] for n in names}
        ds = xr.Dataset({n: (dims[n], values[n]) for n in names}, attrs={f"g{number}": "x"})
        if number == 0:
            save(ds, path, **options)
        else:
            append(ds, path, replace=True)
    return arrays


def test_the_maintained_reader_reads_appended_files(tmp_path: Path) -> None:
    arrays = grown(tmp_path / "m.zt", version="2")
    assert ztensor.verify(str(tmp_path / "m.zt")).undigested == 0
    source = ztensor.open(str(tmp_path / "m.zt"))
    assert set(source) == set(arrays)
    assert {"g0": "x", "g1": "x", "g2": "x"}.items() <= source.attributes.items()
    for name, array in arrays.items():
        assert tuple(source[name].shape) == array.shape
        assert source[name]["data"].tobytes() == array.tobytes()


def test_the_maintained_writer_appends_to_appended_files(tmp_path: Path) -> None:
    arrays = grown(tmp_path / "m.zt", version="2")
    with ztensor.Writer(str(tmp_path / "m.zt"), canonical=False, append=True) as writer:
        writer.add("theirs", bytes(8), [2], "f32")
    append(xr.Dataset({"ours": ("n", np.ones(3))}), tmp_path / "m.zt")
    ds = xr.open_dataset(tmp_path / "m.zt", engine="ztensor", verify=True)
    assert set(ds.variables) == {*arrays, "theirs", "ours"}
    assert ds["theirs"].values.tolist() == [0, 0]
    for name, array in arrays.items():
        assert np.array_equal(ds[name].values, array)


def test_the_release_of_version_1_reads_appended_files(tmp_path: Path, old_release: Path) -> None:
    arrays = grown(tmp_path / "m.zt")
    assert written.read_old(old_release, str(tmp_path / "m.zt")) == {
        name: [array.dtype.name, list(array.shape), "dense", {"data": array.tobytes().hex()}]
        for name, array in arrays.items()
    }
