"""The parser for VirtualiZarr: arrays of zarr that refer to the tensors of a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import xarray as xr

import xckpt
from xckpt.virtual import Parser

virtualizarr = pytest.importorskip(
    "virtualizarr", reason="VirtualiZarr is not installed: pip install 'xckpt[virtual]'"
)

if TYPE_CHECKING:
    from pathlib import Path

RNG = np.random.default_rng(0)
ARRAYS: dict[str, Any] = {
    "layers.0.weight": RNG.standard_normal((6, 8)).astype(np.float32),
    "layers.0.bias": RNG.standard_normal(8).astype(np.float16),
    "layers.1.weight": RNG.standard_normal((3, 2, 4)).astype(np.float32),
    "ids": np.arange(5, dtype=np.int32),
}


@pytest.fixture
def registry() -> Any:
    from obspec_utils.registry import ObjectStoreRegistry
    from obstore.store import LocalStore

    return ObjectStoreRegistry({"file://": LocalStore()})


def written(path: Path, arrays: dict[str, Any]) -> str:
    """Save arrays, and return the URL of the file."""
    xckpt.save(arrays, path)
    return path.as_uri()


def opened(url: str, registry: Any, **options: Any) -> xr.Dataset:
    """Open a virtual store as zarr."""
    store = Parser(**options)(url, registry)
    ds: xr.Dataset = xr.open_zarr(store, consolidated=False, zarr_format=3)
    return ds


@pytest.mark.filterwarnings("ignore:.*no general.architecture")
@pytest.mark.parametrize("suffix", ["safetensors", "gguf", "npz", "zt"])
def test_values_are_those_of_the_file(suffix: str, tmp_path: Path, registry: Any) -> None:
    path = tmp_path / f"m.{suffix}"
    ds = opened(written(path, ARRAYS), registry)
    expected = xckpt.open(path, decode=False)
    assert set(ds.variables) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert ds[name].dtype == array.dtype
        assert ds[name].dims == expected[name].dims
        np.testing.assert_array_equal(ds[name], array)


def test_virtualizarr_opens_it(tmp_path: Path, registry: Any) -> None:
    path = tmp_path / "m.safetensors"
    url = written(path, ARRAYS)
    with virtualizarr.open_virtual_dataset(url, registry, Parser()) as ds:
        assert set(ds.variables) == set(ARRAYS)
        references = ds.vz.to_kerchunk(format="dict")["refs"]
    offset = xckpt.read_index(path)["ids"].parts["data"].offset
    assert references["ids/0"][1:] == [offset, 20]


def test_chunks_of_large_tensors(tmp_path: Path, registry: Any) -> None:
    import dask

    array = np.arange(4096.0).reshape(64, 64)
    path = tmp_path / "m.safetensors"
    with dask.config.set({"array.chunk-size": "4 KiB"}):
        ds = opened(written(path, {"w": array}), registry)
    assert ds["w"].encoding["chunks"] == (8, 64)
    np.testing.assert_array_equal(ds["w"], array)


def test_orders_and_shapes(tmp_path: Path, registry: Any) -> None:
    arrays: dict[str, Any] = {
        "f": np.asfortranarray(RNG.standard_normal((3, 5))),
        "big": np.arange(4, dtype=">i4"),
        "scalar": np.array(2.5),
        "empty": np.zeros((0, 4)),
        "flags": np.array([True, False]),
    }
    np.savez(tmp_path / "m.npz", **arrays)
    ds = opened((tmp_path / "m.npz").as_uri(), registry)
    for name, array in arrays.items():
        np.testing.assert_array_equal(ds[name], array)
        assert ds[name].shape == array.shape


def test_names_with_slashes_are_groups(tmp_path: Path, registry: Any) -> None:
    path = tmp_path / "m.safetensors"
    url = written(path, {"a/b/w": ARRAYS["ids"], "a/v": ARRAYS["ids"] + 1})
    np.testing.assert_array_equal(opened(url, registry, group="a")["v"], ARRAYS["ids"] + 1)
    np.testing.assert_array_equal(opened(url, registry, group="/a/b/")["w"], ARRAYS["ids"])
    with pytest.raises(ValueError, match="no group is 'a/c'"):
        opened(url, registry, group="a/c")


class TestSelecting:
    def test_tensors_and_dims(self, tmp_path: Path, registry: Any) -> None:
        url = written(tmp_path / "m.safetensors", ARRAYS)
        ds = opened(url, registry, tensors="*.weight", dims={"layers.0.weight": ["out", "in"]})
        assert list(ds.variables) == ["layers.0.weight", "layers.1.weight"]
        assert ds["layers.0.weight"].dims == ("out", "in")

    def test_skipped_variables(self, tmp_path: Path, registry: Any) -> None:
        url = written(tmp_path / "m.safetensors", ARRAYS)
        assert "ids" not in opened(url, registry, skip_variables=["ids"])

    def test_what_zarr_lacks_is_left_out(self, tmp_path: Path, registry: Any) -> None:
        arrays = ARRAYS | {"half": np.ones(3, ml_dtypes.bfloat16)}
        url = written(tmp_path / "m.safetensors", arrays)
        with pytest.warns(xckpt.CheckpointWarning, match="zarr has no type for bfloat16: 'half'"):
            assert set(opened(url, registry).variables) == set(ARRAYS)

    def test_compressed_tensors_are_left_out(self, tmp_path: Path, registry: Any) -> None:
        np.savez_compressed(tmp_path / "m.npz", w=np.zeros(100))
        with pytest.warns(xckpt.CheckpointWarning, match=r"compressed \(deflate\): 'w'"):
            assert not opened((tmp_path / "m.npz").as_uri(), registry).variables


def test_damage_is_an_error(tmp_path: Path, registry: Any) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(xckpt.FormatError):
        Parser("safetensors")(path.as_uri(), registry)
