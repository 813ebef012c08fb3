"""Sparse arrays from memory and from dask are written sparse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dask.array as da
import numpy as np
import pytest
import sparse
import xarray as xr

from xckpt import CheckpointWarning, UnsupportedError, read_index
from xckpt.writing import save

if TYPE_CHECKING:
    from pathlib import Path


def matrix() -> np.ndarray:
    dense = np.zeros((12, 7), "f4")
    dense[[0, 0, 3, 11, 11], [1, 6, 2, 0, 6]] = [1.5, -2, -0.0, 7, np.nan]
    return dense


def forms(dense: np.ndarray) -> dict[str, Any]:
    coo = sparse.COO.from_numpy(dense) if dense.size else sparse.zeros(dense.shape)
    bits = np.ascontiguousarray(dense).view("u4")
    positions = np.nonzero(bits)
    exact = sparse.COO(np.stack(positions), dense[positions], shape=dense.shape)
    return {
        "coo": exact,
        "gcxs": sparse.GCXS(exact),
        "dask": da.from_array(exact, chunks=(5, 3)),
        "rows": da.from_array(exact, chunks=(1, -1)),
        "plain": coo,
    }


@pytest.mark.parametrize("form", ["coo", "gcxs", "dask", "rows"])
@pytest.mark.parametrize("version", ["1.0", "2"])
def test_round_trip_of_a_matrix(form: str, version: str, tmp_path: Path) -> None:
    dense = matrix()
    ds = xr.Dataset({"w": (("r", "c"), forms(dense)[form])})
    save(ds, tmp_path / "m.zt", version=version)
    tensor = read_index(tmp_path / "m.zt").tensors["w"]
    assert tensor.layout == "sparse_csr"
    assert tensor.parts["values"].shape == (5,)
    values = xr.open_dataset(tmp_path / "m.zt", engine="ztensor")["w"].values
    assert values.tobytes() == dense.tobytes()


@pytest.mark.parametrize("shape", [(40,), (3, 4, 5), (0, 4), (4, 0, 2)])
@pytest.mark.parametrize("lazy", [True, False])
def test_any_number_of_axes(shape: tuple[int, ...], lazy: bool, tmp_path: Path) -> None:
    dense = np.random.default_rng(0).integers(0, 2, shape).astype("f8")
    array: Any = sparse.COO.from_numpy(dense)
    if lazy:
        array = da.from_array(array, chunks=2)
    dims = [f"a{i}" for i in range(len(shape))]
    save(xr.Dataset({"w": (dims, array)}), tmp_path / "m.zt", version="2")
    variable = xr.open_dataset(tmp_path / "m.zt", engine="ztensor")["w"]
    assert variable.encoding["layout"] == ("sparse_csr" if len(shape) == 2 else "sparse_coo")
    assert np.array_equal(variable.values, dense)


@pytest.mark.parametrize("sparsely", [True, False])
@pytest.mark.parametrize("load", [True, False])
def test_sparse_tensors_stay_sparse(sparsely: bool, load: bool, tmp_path: Path) -> None:
    ds = xr.Dataset({"w": (("r", "c"), forms(matrix())["coo"])})
    save(ds, tmp_path / "m.zt", version="2")
    opened = xr.open_dataset(tmp_path / "m.zt", engine="ztensor", sparse=sparsely)
    save(opened.load() if load else opened, tmp_path / "again.zt", version="2")
    assert (tmp_path / "again.zt").read_bytes() == (tmp_path / "m.zt").read_bytes()


def test_dense_layout_where_necessary_or_requested(tmp_path: Path) -> None:
    ds = xr.Dataset({"w": (("r", "c"), forms(matrix())["dask"])})
    with pytest.warns(CheckpointWarning, match="sparse_csr tensors written dense: 'w'"):
        save(ds, tmp_path / "m.safetensors")
    save(ds, tmp_path / "m.zt", encoding={"w": {"layout": "dense"}})
    for name, engine in (("m.safetensors", "safetensors"), ("m.zt", "ztensor")):
        opened = xr.open_dataset(tmp_path / name, engine=engine)
        assert opened["w"].encoding["layout"] == "dense"
        assert opened["w"].values.tobytes() == matrix().tobytes()
    with pytest.raises(UnsupportedError, match="sparse_csr tensors have no place"):
        save(ds, tmp_path / "n.safetensors", cast="never")


def test_unstored_elements_are_zero(tmp_path: Path) -> None:
    filled = sparse.COO(np.zeros((2, 0), int), np.zeros(0), shape=(3, 3), fill_value=1.0)
    with pytest.raises(UnsupportedError, match=r"'w': the fill value of the array is 1\.0"):
        save(xr.Dataset({"w": (("r", "c"), filled)}), tmp_path / "m.zt")


def test_an_array_that_changes_between_passes_is_an_error(tmp_path: Path) -> None:
    calls: list[int] = []

    def unsteady(block: Any) -> Any:
        calls.append(1)
        dense = np.zeros(block.shape)
        dense.reshape(-1)[: len(calls)] = 1
        return sparse.COO.from_numpy(dense)

    meta = sparse.COO.from_numpy(np.zeros((0, 0)))
    array = da.zeros((4, 4), chunks=4).map_blocks(unsteady, dtype="f8", meta=meta)
    with pytest.raises(UnsupportedError, match="computed twice"):
        save(xr.Dataset({"w": (("r", "c"), array)}), tmp_path / "m.zt")
    assert list(tmp_path.iterdir()) == []


def test_sparse_arrays_in_memory_are_not_chunked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks would be computed one by one, each with code that numba compiles first."""

    def chunk(*_: object, **__: object) -> None:
        pytest.fail("an array in memory was chunked")

    values = np.array([[0, 1.5], [-2, 0]], "float32")
    ds = xr.Dataset({"w": (("r", "c"), sparse.COO.from_numpy(values))})
    monkeypatch.setattr(xr.Variable, "chunk", chunk)
    save(ds, tmp_path / "m.zt")
    with pytest.warns(CheckpointWarning, match="sparse chunks become dense"):
        plain = ds.ckpt.plain()
    np.testing.assert_array_equal(plain["w"].data, values)
    with xr.open_dataset(tmp_path / "m.zt") as again:
        np.testing.assert_array_equal(again["w"].values, values)
