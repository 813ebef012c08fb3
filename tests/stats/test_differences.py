"""`compare` of every kind of object: pairs, names, the Dataset and the DataFrame."""

from __future__ import annotations

import math
import pickle
import re
from typing import TYPE_CHECKING, Any

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import xarray as xr

import xckpt
from tests.stats.checkpoints import model, write
from tests.stats.pairs import compared
from xckpt.comparison import MEASURES, compare
from xckpt.datasets.stack_records import StackRecord
from xckpt.statistics import STATUSES, table

if TYPE_CHECKING:
    from pathlib import Path

Array = np.ndarray[Any, np.dtype[Any]]


def opened(path: Path, **options: Any) -> xr.Dataset:
    ds: xr.Dataset = xr.open_dataset(path, engine="safetensors", **options)
    return ds


def tuned() -> dict[str, Array]:
    """Change the model here and there, a lot and a little."""
    tensors = model()
    tensors["embed"] = tensors["embed"] + np.float32(0.01)
    tensors["layers.1.w"] = (tensors["layers.1.w"].astype(np.float32) * -1).astype(
        tensors["layers.1.w"].dtype
    )
    tensors["layers.2.b"] = tensors["layers.2.b"].copy()
    tensors["layers.2.b"][3] = np.nan
    del tensors["mask"]
    tensors["steps"] = np.zeros(3, np.int64)
    tensors["extra"] = np.ones((2, 3), np.float32)
    return tensors


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return write(tmp_path / "a.safetensors", model())


@pytest.fixture
def b(tmp_path: Path) -> Path:
    return write(tmp_path / "b.safetensors", tuned())


def measured(result: xr.Dataset, name: str) -> dict[str, float]:
    values = result.variables[name].to_numpy().tolist()
    return dict(zip(result["statistic"].to_numpy().tolist(), values, strict=True))


def check(measures: dict[str, float], a: Array, b: Array) -> None:
    for measure, expected in compared(a, b).items():
        np.testing.assert_allclose(measures[measure], expected, rtol=1e-12, err_msg=measure)


def test_a_variable_for_each_tensor_of_both(a: Path, b: Path) -> None:
    result = compare(a, b)
    assert result["statistic"].to_numpy().tolist() == list(MEASURES)
    assert list(result.data_vars) == [*opened(a).data_vars, "extra"]
    ours, theirs = model(), tuned()
    for name in ours:
        if name in theirs and name != "steps":
            check(measured(result, name), ours[name], theirs[name])
    assert result.attrs["source"] == str(a)
    assert result.attrs["compared_with"] == str(b)


def test_the_status_explains_missing_comparisons(a: Path, b: Path) -> None:
    result = compare(a, b)
    statuses = {n: result.attrs["status"][int(v[0])] for n, v in result.data_vars.items()}
    assert statuses == {
        "embed": "changed",
        "layers.0.w": "same",
        "layers.0.b": "same",
        "layers.1.w": "changed",
        "layers.1.b": "same",
        "layers.2.w": "same",
        "layers.2.b": "changed",
        "steps": "shape",
        "mask": "only_a",
        "none": "same",
        "extra": "only_b",
    }
    assert result["steps"].attrs["shapes"] == "steps: (1,) and (3,)"
    assert measured(result, "mask")["count"] == 30
    assert measured(result, "extra")["count"] == 6
    assert np.isnan(result["mask"].sel(statistic=list(MEASURES[2:]))).all()


def test_a_table_is_sorted_by_change(a: Path, b: Path) -> None:
    frame = table(compare(a, b))
    changed = ["steps", "mask", "extra", "layers.2.b", "layers.1.w", "embed"]
    assert frame.index[:6].tolist() == changed
    assert set(frame["status"][6:]) == {"same"}
    assert frame["status"].tolist()[:3] == ["shape", "only_a", "only_b"]
    assert list(frame["status"].cat.categories) == list(STATUSES)
    assert frame["count"].dtype == np.int64
    assert frame.query("status == 'changed'").index.tolist() == changed[3:]
    assert frame.loc["layers.1.w", "cosine"] == pytest.approx(-1)
    assert frame.loc["layers.1.w", "rel_l2"] == 2.0
    assert frame.loc["layers.2.b", "nan"] == 1
    assert frame.loc["layers.2.b", "rel_l2"] == 0.0
    assert list(table(compare(a, a))["status"].unique()) == ["same"]


def test_all_ways_to_name_checkpoints_give_the_same(a: Path, b: Path) -> None:
    first = compare(a, b)
    tree = xr.open_datatree(b, engine="safetensors")
    for source in (str(b), opened(b), xckpt.read_index(b), tree, opened(b, chunks={})):
        result = compare(str(a), source, cache=False)
        xr.testing.assert_equal(first, result[list(first)])
    pair = compare(opened(a)["embed"], opened(b)["layers.1.b"])
    assert measured(pair, "embed")["status"] == STATUSES.index("shape")
    renamed = compare(opened(a)["embed"], opened(b)["embed"].rename("other"))
    xr.testing.assert_equal(renamed["embed"], first["embed"])


@pytest.mark.parametrize("stacked", [(True, False), (False, True), (True, True)])
def test_stacked_and_flat_objects_compare_alike(
    a: Path, b: Path, stacked: tuple[bool, bool]
) -> None:
    flat = compare(a, b)
    result = compare(opened(a, stack=stacked[0]), opened(b, stack=stacked[1]))
    if not stacked[0]:
        xr.testing.assert_equal(result, flat)
        return
    weights = result["layers.w"]
    assert weights.dims == ("statistic", "layers")
    for layer in range(3):
        np.testing.assert_array_equal(weights.sel(layers=layer), flat[f"layers.{layer}.w"])
    pd.testing.assert_frame_equal(table(result).sort_index(), table(flat).sort_index())
    assert table(result).index[:6].tolist() == table(flat).index[:6].tolist()


def test_part_of_a_stack(a: Path, b: Path) -> None:
    part = opened(b, stack=True).isel(layers=[0, 2])
    result = compare(opened(a, stack=True), part)
    status = result["layers.w"].sel(statistic="status").to_numpy()
    assert [STATUSES[int(code)] for code in status] == ["same", "only_a", "same"]
    result = compare(part, a)
    only_b = [n for n, v in result.data_vars.items() if v.to_numpy().reshape(-1)[0] == 3]
    assert set(only_b) == {"layers.1.b", "layers.1.w", "mask"}
    assert "layers.1.w" in table(result).index
    # The two sides have different numbers of layers.
    assert result["layers.w"].sizes == {"statistic": len(MEASURES), "layers": 2}


def test_a_variable_named_like_a_tensor_of_the_other_file() -> None:
    stacked = StackRecord(("m.", None, ".w"), ("n",), indices=((0, 1),))
    ours = xr.Dataset({"m.w": (("n", "x"), np.ones((2, 3)))}, {"n": [0, 1]})
    ours["m.w"].encoding["stack"] = stacked
    theirs = xr.Dataset({"m.w": ("x", np.ones(3)), "m.0.w": ("x", np.ones(3))})
    result = compare(ours, theirs)
    assert list(result.data_vars) == ["m.w", "m.w (b)"]
    assert table(result)["status"].to_dict() == {
        "m.1.w": "only_a",
        "m.w": "only_b",
        "m.0.w": "same",
    }


def by_function(name: str) -> str:
    return name.replace("layers", "h")


@pytest.mark.parametrize(
    "names",
    [
        {f"layers.{i}.{leaf}": f"h.{i}.{leaf}" for i in range(3) for leaf in "wb"},
        by_function,
        (r"^layers\.(\d+)", r"h.\1"),
        (re.compile("layers"), "h"),
    ],
)
def test_names_map_different_spellings(a: Path, tmp_path: Path, names: Any) -> None:
    theirs = {name.replace("layers", "h"): values for name, values in tuned().items()}
    b = write(tmp_path / "renamed.safetensors", theirs)
    result = compare(a, b, names=names)
    plain = compare(a, write(tmp_path / "plain.safetensors", tuned()))
    xr.testing.assert_equal(result, plain)
    # The result has the names of a.
    assert "layers.0.w" in table(result).index


def test_several_tensors_may_map_to_the_same_one(a: Path) -> None:
    result = compare(a, a, names={"layers.0.b": "layers.1.b"})
    check(measured(result, "layers.0.b"), model()["layers.0.b"], model()["layers.1.b"])
    assert measured(result, "layers.1.b")["status"] == 0


def test_checkpoints_without_common_names_warn(a: Path, tmp_path: Path) -> None:
    b = write(tmp_path / "b.safetensors", {"x": np.ones(3)})
    with pytest.warns(xckpt.CheckpointWarning, match="use names=.auto. to match"):
        compare(a, b)


def test_invalid_names_raise(a: Path) -> None:
    with pytest.raises(ValueError, match="not a regular expression"):
        compare(a, a, names=("(", ""))
    with pytest.raises(TypeError, match="a mapping, a function"):
        compare(a, a, names=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a path, a mapping"):
        compare(a, 5)  # type: ignore[arg-type]


def test_two_tensors_of_one_name_are_refused(a: Path) -> None:
    ds = opened(a, stack=True)
    ds = ds.assign({"layers.0.w": ds["layers.w"].isel(layers=0, drop=True)})
    with pytest.raises(ValueError, match=r"two tensors of b are called 'layers\.0\.w'"):
        compare(xr.Dataset(), ds)


def test_only_some_tensors(a: Path, b: Path) -> None:
    result = compare(a, b, tensors="layers.*.w")
    assert list(result.data_vars) == ["layers.0.w", "layers.1.w", "layers.2.w"]
    assert list(compare(a, b, tensors=re.compile("^e")).data_vars) == ["embed", "extra"]
    stacked = compare(opened(a, stack=True), b, tensors=["layers.1.?", "none"])
    assert set(stacked.data_vars) == {"layers.b", "layers.w", "none"}
    assert set(table(stacked).index) == {"layers.1.w", "layers.1.b", "none"}
    assert table(stacked).index[0] == "layers.1.w"


def test_deferred_comparisons_come_from_one_pass(a: Path, b: Path) -> None:
    lazy = compare(a, b, compute=False)
    assert all(v.chunks is not None for n, v in lazy.variables.items() if n != "statistic")
    xr.testing.assert_equal(lazy.compute(), compare(a, b))
    xr.testing.assert_equal(pickle.loads(pickle.dumps(lazy)).compute(), compare(a, b))
    stacked = compare(opened(a, stack=True), b, compute=False)
    xr.testing.assert_equal(stacked.compute(), compare(opened(a, stack=True), b))


def test_arrays_from_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xckpt.arrays.streams.PIECE_NBYTES", 1000)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 70))
    y = x + rng.standard_normal((300, 70)).astype(np.float32) * 1e-3
    ours = {
        "numpy": x,
        "dask": da.from_array(x, chunks=(7, 70)),
        "square": da.from_array(x, chunks=(100, 9)),
        "computed": da.from_array(x / 2, chunks=50) * 2,
        "fortran": np.asfortranarray(x),
    }
    theirs = {
        "numpy": da.from_array(y, chunks=(50, 70)),
        "dask": da.from_array(y, chunks=33),
        "square": y,
        "computed": y,
        "fortran": y,
    }
    first, second = (
        xr.Dataset({name: (("m", "n"), array) for name, array in arrays.items()})
        for arrays in (ours, theirs)
    )
    result = compare(first, second)
    for name in ours:
        check(measured(result, name), x, y)
    # Where chunks are runs of elements, the bits do not depend on them.
    for name in ("dask", "computed", "fortran"):
        np.testing.assert_array_equal(result[name], result["numpy"], err_msg=name)


@pytest.mark.parametrize("engine", ["zarr", "h5netcdf"])
@pytest.mark.parametrize("chunks", [None, {}])
def test_files_of_other_formats(a: Path, b: Path, tmp_path: Path, engine: Any, chunks: Any) -> None:
    ds = opened(b)[["embed", "layers.1.w", "extra"]]
    ds = ds.load().drop_encoding()
    if engine == "zarr":
        ds.to_zarr(tmp_path / "x", consolidated=False)
        options: dict[str, Any] = {"consolidated": False}
    else:
        ds.to_netcdf(tmp_path / "x", engine=engine)
        options = {}
    expected = compare(a, b)
    with xr.open_dataset(tmp_path / "x", engine=engine, chunks=chunks, **options) as lazy:
        forwards, backwards = compare(a, lazy), compare(lazy, a)
    for name in ("embed", "layers.1.w"):
        np.testing.assert_array_equal(forwards[name], expected[name], err_msg=name)
    assert measured(backwards, "embed")["max_abs"] == measured(expected, "embed")["max_abs"]
    assert measured(backwards, "extra")["status"] == STATUSES.index("only_a")


def test_unknown_chunk_sizes() -> None:
    x = da.from_array(np.arange(100.0), chunks=10)
    positive = x[x > 50]
    ds = xr.Dataset({"x": ("n", np.arange(51.0, 100.0))})
    computed = xr.Dataset({"x": ("n", positive.compute_chunk_sizes())})
    assert measured(compare(ds, computed), "x")["status"] == 0


def test_sparse_blocks_of_dask() -> None:
    import sparse

    dense = np.random.default_rng(0).standard_normal((40, 30))
    dense[dense < 1] = 0
    array = da.from_array(dense, chunks=(10, 30)).map_blocks(sparse.COO)
    result = compare(
        xr.Dataset({"s": (("m", "n"), array)}), xr.Dataset({"s": (("m", "n"), dense + 1)})
    )
    check(measured(result, "s"), dense, dense + 1)


def test_progress_counts_the_bytes_of_both(a: Path, b: Path) -> None:
    reports: list[tuple[int, int]] = []
    compare(a, b, progress=lambda *nbytes: reports.append(nbytes), cache=False)
    assert reports == sorted(reports)
    ours, theirs = model(), tuned()
    pairs = [name for name in ours if name in theirs and ours[name].shape == theirs[name].shape]
    nbytes = sum(ours[name].nbytes + theirs[name].nbytes for name in pairs)
    assert reports[-1] == (nbytes, nbytes)


def test_a_tensor_that_cannot_be_read_is_named(a: Path, tmp_path: Path) -> None:
    b = write(tmp_path / "short.safetensors", model())
    ds = opened(b)
    with b.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(xckpt.FileChangedError, match=r"short\.safetensors.*changed"):
        compare(a, ds)


def test_empty_and_scalar_datasets() -> None:
    result = compare(xr.Dataset(), xr.Dataset())
    assert not result.data_vars
    assert table(result).empty
    number = xr.Dataset({"x": ((), 2.0)})
    assert measured(compare(number, number), "x")["status"] == 0
    changed = measured(compare(number, number + 1), "x")
    assert (changed["max_abs"], changed["rel_l2"]) == (1.0, 0.5)
    assert math.isclose(changed["cosine"], 1.0)
