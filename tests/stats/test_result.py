"""`stats` of every kind of object: the resulting Dataset and DataFrame."""

from __future__ import annotations

import pickle
import threading
from typing import TYPE_CHECKING, Any

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import xarray as xr

import xckpt
from tests.stats.checkpoints import model, write
from tests.stats.reference import NAMES, exact_stats, stats_of
from xckpt.statistics import stats, table

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "m.safetensors", model())


def opened(path: Path, **options: Any) -> xr.Dataset:
    ds: xr.Dataset = xr.open_dataset(path, engine="safetensors", **options)
    return ds


def test_a_variable_for_each_tensor_and_a_value_for_each_statistic(path: Path) -> None:
    st = stats(path)
    assert st["statistic"].to_numpy().tolist() == NAMES
    tensors = model()
    assert set(st.data_vars) == set(tensors)
    for name, values in tensors.items():
        assert st.variables[name].dims == ("statistic",)
        exact = exact_stats(values)
        for statistic in ("count", "nan", "zero", "min", "max", "mean", "std", "unique"):
            value = st[name].sel(statistic=statistic).item()
            np.testing.assert_allclose(value, exact[statistic], rtol=1e-14, err_msg=statistic)


def test_all_ways_to_name_a_checkpoint_give_the_same(path: Path) -> None:
    first = stats(path)
    tree = xr.open_datatree(path, engine="safetensors")
    sources: list[Any] = [
        str(path),
        opened(path),
        xckpt.read_index(path),
        tree,
        opened(path, chunks={}),
    ]
    for source in sources:
        result = stats(source, cache=False)
        xr.testing.assert_equal(first, result[list(first)])
    single = stats(opened(path)["embed"])
    xr.testing.assert_equal(single["embed"], first["embed"])


def test_the_function_is_not_hidden_by_the_package_of_its_name(path: Path) -> None:
    import xckpt.statistics

    assert xckpt.stats is xckpt.statistics.stats
    xr.testing.assert_identical(xckpt.stats(path), stats(path))


def test_element_types_are_the_stored_ones(path: Path) -> None:
    st = stats(opened(path))
    assert not np.isnan(st["layers.0.w"].sel(statistic="unique"))
    xr.testing.assert_identical(st, stats(opened(path, decode=False)))


def test_stacked_dimensions_stay(path: Path) -> None:
    st = stats(opened(path, stack=True))
    flat = stats(path)
    weights = st["layers.w"]
    assert weights.dims == ("statistic", "layers")
    assert weights["layers"].to_numpy().tolist() == [0, 1, 2]
    for layer in range(3):
        np.testing.assert_array_equal(weights.sel(layers=layer), flat[f"layers.{layer}.w"])
    assert weights.attrs["dead_rows"] == [0, 0, 0]


def test_a_table_has_the_names_of_the_file(path: Path) -> None:
    flat, stacked = table(stats(path)), table(stats(opened(path, stack=True)))
    assert list(flat.index) == list(opened(path).data_vars)
    main = ["nan", "inf", "mean", "std", "min", "max", "count"]  # as the result itself shows
    assert list(flat.columns) == [*main, *(name for name in NAMES if name not in main)]
    assert list(table(stats(path), columns=["std", "q0.5"])) == ["std", "q0.5"]
    with pytest.raises(ValueError, match="no column 'stdd'; similar names: 'std'"):
        table(stats(path), columns="stdd")
    assert flat["count"].dtype == np.int64
    pd.testing.assert_frame_equal(flat, stacked.loc[flat.index])
    selection = stats(opened(path, stack=True)).sel(layers=[2], statistic=["mean", "std"])
    assert list(table(selection[["layers.w"]]).index) == ["layers.2.w"]
    layer = stats(opened(path, stack=True)).sel(layers=1)
    assert "layers.1.b" in table(layer).index


def test_a_table_of_something_else_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match=r"not a result of stats.*ds\.ckpt\.stats\(\)"):
        table(opened(path))


def test_computed_stacks_keep_their_dimensions(path: Path) -> None:
    ds = opened(path, stack=True)
    expected = stats(ds)
    # Of float32, which they are now, distinct values are not counted.
    loaded = stats(ds.load(), exact_quantiles=True)["layers.b"].drop_sel(statistic="unique")
    stored = expected["layers.b"].drop_sel(statistic="unique")
    xr.testing.assert_allclose(loaded, stored, rtol=1e-12)
    part = opened(path, stack=True).isel(layers=slice(1, 3))
    xr.testing.assert_equal(
        stats(part)["layers.b"].sel(statistic="mean"),
        expected["layers.b"].sel(statistic="mean", layers=[1, 2]),
    )
    assert "layers.2.b" in table(stats(part)).index


def test_arrays_from_anywhere() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((300, 70))
    ds = xr.Dataset(
        {
            "numpy": (("a", "b"), values),
            "dask": (("a", "b"), da.from_array(values, chunks=(7, 70))),
            "square": (("a", "b"), da.from_array(values, chunks=(100, 9))),
            "computed": (("a", "b"), da.from_array(values / 2, chunks=50) * 2),
            "fortran": (("a", "b"), np.asfortranarray(values)),
            "scalar": ((), da.from_array(np.float64(3.0))),
            "big_endian": (("a", "b"), values.astype(">f8")),
        }
    )
    st = stats(ds)
    for name in ("dask", "square", "computed", "fortran", "big_endian"):
        np.testing.assert_array_equal(st[name], st["numpy"], err_msg=name)
    assert st["scalar"].sel(statistic="mean") == 3.0
    np.testing.assert_array_equal(st["numpy"].sel(statistic="mean"), stats_of(values)["mean"])


@pytest.mark.parametrize("engine", ["zarr", "h5netcdf"])
@pytest.mark.parametrize("chunks", [None, {}])
def test_files_of_other_formats(tmp_path: Path, engine: Any, chunks: Any) -> None:
    rng = np.random.default_rng(0)
    ds = xr.Dataset({"x": (("a", "b"), rng.standard_normal((200, 50)).astype(np.float32))})
    ds["y"] = ("a", rng.integers(0, 9, 200))
    if engine == "zarr":
        ds.to_zarr(tmp_path / "x", consolidated=False)
        options: dict[str, Any] = {"consolidated": False}
    else:
        ds.to_netcdf(tmp_path / "x", engine=engine)
        options = {}
    with xr.open_dataset(tmp_path / "x", engine=engine, chunks=chunks, **options) as lazy:
        xr.testing.assert_equal(stats(lazy), stats(ds))


def test_sparse_arrays_of_dask_count_implied_zeros() -> None:
    import sparse

    dense = np.random.default_rng(0).standard_normal((40, 30))
    dense[dense < 1] = 0
    array = da.from_array(dense, chunks=(10, 30)).map_blocks(sparse.COO)
    st = stats(xr.Dataset({"s": (("a", "b"), array), "d": (("a", "b"), dense)}))
    xr.testing.assert_equal(st["s"].drop_attrs(), st["d"].rename("s").drop_attrs())


def test_variables_without_numbers_are_left_out_with_a_warning() -> None:
    ds = xr.Dataset({"text": ("a", np.array(["x", "y"])), "number": ("a", [1.0, 2.0])})
    with pytest.warns(xckpt.CheckpointWarning, match="'text' has no statistics"):
        st = stats(ds)
    assert list(st.data_vars) == ["number"]


def test_complex_numbers_have_the_statistics_of_their_magnitudes() -> None:
    ds = xr.Dataset({"z": ("a", np.array([3 + 4j, 0, np.nan]))})
    st = stats(ds)["z"]
    assert st.sel(statistic="absmax") == 5.0
    assert st.sel(statistic="nan") == st.sel(statistic="zero") == 1
    assert np.isnan(st.sel(statistic=["min", "mean", "q0.5"])).all()
    for result in (stats(ds.chunk(a=2)), stats(ds, exact_quantiles=True)):
        xr.testing.assert_equal(result["z"], st)


def test_coordinates_have_no_statistics() -> None:
    ds = xr.Dataset({"x": ("a", [1.0, 2.0])}, {"a": [10, 20], "b": ("a", [0.5, 0.6])})
    assert list(stats(ds).data_vars) == ["x"]


def test_deferred_statistics_come_from_one_scan(path: Path) -> None:
    lazy = stats(path, compute=False)
    assert all(v.chunks is not None for n, v in lazy.variables.items() if n != "statistic")
    xr.testing.assert_equal(lazy.compute(), stats(path))
    threads = threading.active_count()
    pickle.loads(pickle.dumps(lazy)).compute()
    assert threading.active_count() <= threads + 2


def test_other_quantiles(path: Path) -> None:
    st = stats(path, quantiles=[0, 1 / 3, 1])
    names = st["statistic"].to_numpy().tolist()
    assert names[: names.index("unique") + 1][-4:] == ["q0", "q0.333333", "q1", "unique"]
    embed = st["embed"]
    assert embed.sel(statistic="q0") == embed.sel(statistic="min")
    assert embed.sel(statistic="q1") == embed.sel(statistic="max")
    with pytest.raises(ValueError, match="between 0 and 1"):
        stats(path, quantiles=[1.5])


def test_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="a path, a mapping"):
        stats(42)  # type: ignore[arg-type]


def test_progress_counts_all_bytes(path: Path) -> None:
    reports: list[tuple[int, int]] = []
    stats(path, progress=lambda *nbytes: reports.append(nbytes), cache=False)
    assert reports == sorted(reports)
    nbytes = sum(array.nbytes for array in model().values())
    assert reports[-1] == (nbytes, nbytes)


def test_a_progress_bar_has_a_label(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stats(path, progress=True, cache=False)
    assert "B/s" in capsys.readouterr().err
    stats(path, progress=False, cache=False)
    stats(path, cache=False)
    assert capsys.readouterr().err == ""


def test_a_tensor_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"w": np.ones((100, 100), np.float32)})
    ds = opened(path)
    with path.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(xckpt.FileChangedError, match=r"m\.safetensors.*changed"):
        stats(ds)
