"""What xarray expects of an engine beyond opening: lazy arrays, groups, asynchronous loading."""

from __future__ import annotations

import asyncio
import pickle
from typing import TYPE_CHECKING, Any

import dask.array as da
import numpy as np
import pytest
import xarray as xr
from dask.callbacks import Callback

import xckpt
from xckpt.sample import write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("sample") / "m.zt", layers=3, width=32)


@pytest.fixture
def no_graph() -> Any:
    """Fail if dask computes anything."""

    def fail(*_: Any) -> None:
        raise AssertionError("dask computes")

    with Callback(start=fail):
        yield


class TestWithoutDask:
    @pytest.mark.parametrize(
        "opened",
        [
            lambda path: xr.open_dataset(path, dask=False),
            lambda path: xckpt.open(path, dask=False),
            lambda path: xckpt.open(path, chunks=None),
        ],
    )
    def test_variables_are_lazy_and_not_of_dask(self, opened: Any, path: Path) -> None:
        ds = opened(path)
        expected = xckpt.open(path)
        assert ds.chunks == {}
        for name, variable in ds.variables.items():
            assert not variable._in_memory
            assert variable.dims == expected.variables[name].dims
            assert variable.encoding["preferred_chunks"]

    @pytest.mark.usefixtures("no_graph")
    def test_values(self, path: Path) -> None:
        ds = xckpt.open(path, dask=False)
        with xckpt.open(path) as other:
            names = list(other.variables)
        for name in names:
            rows = ds.variables[name][:2]
            assert not ds.variables[name]._in_memory
            np.testing.assert_array_equal(ds.variables[name].values[:2], rows.values)
            assert ds.variables[name]._in_memory

    @pytest.mark.parametrize(
        "key",
        [3, slice(2, 9, 3), slice(None, None, -1), [5, 1, 1], np.array([0, 31]), -1],
        ids=str,
    )
    @pytest.mark.parametrize("axis", [0, 1])
    def test_selections(self, key: Any, axis: int, path: Path) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        lazy, full = (xckpt.open(path, dask=d).variables[name] for d in (False, True))
        chosen = {lazy.dims[axis]: key}
        np.testing.assert_array_equal(lazy.isel(chosen).values, full.isel(chosen).values)
        vectorized = xr.Variable("p", [3, 0, 2])
        points = dict.fromkeys(lazy.dims, vectorized)
        np.testing.assert_array_equal(lazy.isel(points).values, full.isel(points).values)

    def test_stacks(self, path: Path) -> None:
        lazy, full = (xckpt.open(path, dask=d, stack=True) for d in (False, True))
        assert list(lazy.variables) == list(full.variables)
        for name in full.data_vars:
            selected = lazy.variables[name][1]
            np.testing.assert_array_equal(selected.values, full.variables[name][1].values)
            assert not lazy.variables[name]._in_memory

    def test_chunks_of_the_user(self, path: Path) -> None:
        ds = xr.open_dataset(path, dask=False, chunks={})
        for variable in ds.data_vars.values():
            assert isinstance(variable.data, da.Array)
        one = xr.open_dataset(path, dask=False, chunks=-1)
        assert {v.data.npartitions for v in one.data_vars.values()} == {1}

    def test_statistics_and_copies_read_it_in_blocks(self, path: Path, tmp_path: Path) -> None:
        ds = xckpt.open(path, dask=False)
        st, expected = xckpt.stats(ds, cache=False), xckpt.stats(path, cache=False)
        frames = [result.ckpt.table()[["mean", "std", "max"]] for result in (st, expected)]
        assert len(frames[0]) == len(ds.data_vars)
        first, second = (frame.loc[frames[0].index].to_numpy() for frame in frames)
        np.testing.assert_allclose(first, second, rtol=1e-6)
        assert not any(v._in_memory for v in ds.variables.values())
        with pytest.warns(xckpt.CheckpointWarning, match="quantised tensors"):
            ds.ckpt.save(tmp_path / "copy.zt")
        assert xckpt.manifest(tmp_path / "copy.zt") == xckpt.manifest(ds)
        assert repr(ds.ckpt)

    def test_it_pickles_by_reference(self, path: Path) -> None:
        ds = xckpt.open(path, dask=False)
        data = pickle.dumps(ds)
        name = "model.layers.0.mlp.up_proj.weight"
        assert len(data) < path.stat().st_size / 2
        again = pickle.loads(data)
        np.testing.assert_array_equal(again.variables[name].values, ds.variables[name].values)


class TestAsync:
    @pytest.mark.skipif(not hasattr(xr.Dataset, "load_async"), reason="xarray has no load_async")
    def test_all_variables_are_loaded(self, path: Path) -> None:
        ds = xckpt.open(path, dask=False)
        loaded = asyncio.run(ds.load_async())
        for name, variable in xckpt.open(path).variables.items():
            assert loaded.variables[name]._in_memory
            np.testing.assert_array_equal(loaded.variables[name].values, variable.values)

    @pytest.mark.skipif(not hasattr(xr.Dataset, "load_async"), reason="xarray has no load_async")
    def test_selections_are_loaded(self, path: Path) -> None:
        variable = xckpt.open(path, dask=False)["model.layers.0.mlp.up_proj.weight"]
        loaded = asyncio.run(variable.isel({variable.dims[0]: [4, 2]}).load_async())
        np.testing.assert_array_equal(loaded, variable.values[[4, 2]])


class TestGroups:
    def test_a_dataset(self, path: Path) -> None:
        tree = xr.open_datatree(path)
        for group in ("model/layers/0/mlp/up_proj", "/model/layers/0/mlp/up_proj/"):
            ds = xr.open_dataset(path, group=group)
            node = tree["model/layers/0/mlp/up_proj"]
            assert list(ds.variables) == list(node.variables) != []
            for name, variable in ds.variables.items():
                assert variable.dims == node.variables[name].dims
                np.testing.assert_array_equal(variable.values, node.variables[name].values)

    def test_the_root(self, path: Path) -> None:
        ds = xr.open_dataset(path, group="/")
        assert list(ds.variables) == list(xr.open_datatree(path).variables)

    def test_a_module_without_tensors_of_its_own(self, path: Path) -> None:
        assert not xr.open_dataset(path, group="model/layers").variables
        tree = xr.open_datatree(path, group="model/layers")
        assert list(tree.children) == ["0", "1", "2"]

    def test_a_tree(self, path: Path) -> None:
        part = xr.open_datatree(path, group="model/layers/1")
        whole = xr.open_datatree(path)["model/layers/1"]
        assert [node.path for node in part.subtree] == [
            node.path.removeprefix("/model/layers/1") or "/" for node in whole.subtree
        ]
        assert set(xr.open_groups(path, group="model/layers/1")) <= {n.path for n in part.subtree}

    def test_the_encoding_names_the_file(self, path: Path) -> None:
        ds = xr.open_dataset(path, group="model/layers/1")
        assert ds.encoding["source"] == str(path)
        ds.close()

    def test_an_unknown_group(self, path: Path) -> None:
        with pytest.raises(ValueError, match="no module is 'model/layer/0'"):
            xr.open_dataset(path, group="model/layer/0")
        with pytest.raises(ValueError, match="similar names: 'model/layers/0"):
            xr.open_datatree(path, group="model/layer/0/mlp/up_proj")
        for wrong in (0, b"model", ["model"], True):
            with pytest.raises(TypeError, match="group is the path of a module"):
                xr.open_dataset(path, group=wrong)
