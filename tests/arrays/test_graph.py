"""Graphs of stored arrays: the interface of dask, tasks on demand, and small pickles."""

from __future__ import annotations

import pickle
from functools import partial
from mmap import mmap as MemoryMap  # noqa: N812
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr
from dask.callbacks import Callback
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import basic_indices

from tests.conftest import calls_of
from tests.sources import CountingSource
from xckpt.arrays.dense import DenseArray
from xckpt.arrays.graph import tensor_array
from xckpt.arrays.parts import PartReader
from xckpt.index import Part
from xckpt.storage import Source, is_mapped, open_source

if TYPE_CHECKING:
    from pathlib import Path

VALUES = np.arange(6000, dtype="<f4").reshape(20, 3, 100)


def array_of(source: Source | None = None, target: int = 2400, order: Any = "C") -> da.Array:
    """Make an array of several chunks."""
    source = source or CountingSource(VALUES.tobytes(order))
    part = Part("float32", VALUES.shape, 0, VALUES.nbytes)
    lazy = DenseArray("t", PartReader(source, part), VALUES.shape, order=order)
    return tensor_array(lazy, "t-token", lazy.chunks(target), lazy.empty((0, 0, 0)))


def test_the_graph_has_the_interface_of_a_dask_graph() -> None:
    ours = array_of()
    theirs = da.Array(ours.dask, ours.name, ours.chunks, dtype=ours.dtype)
    assert ours.chunks == theirs.chunks == ((2,) * 10, (3,), (100,))
    for name in dir(theirs):
        value = None if name.startswith("_") else getattr(theirs, name)
        if isinstance(value, int | str | tuple | np.dtype):
            assert getattr(ours, name) == value, name
    assert type(ours) is da.Array
    assert repr(ours) == repr(theirs)
    assert theirs.__dask_keys__() == ours.__dask_keys__()
    assert dask.base.tokenize(ours) == dask.base.tokenize(theirs)


@given(basic_indices(VALUES.shape, allow_newaxis=False))
def test_indexing_equals_numpy(key: Any) -> None:
    np.testing.assert_array_equal(array_of()[key].compute(), VALUES[key])


@pytest.mark.parametrize("order", ["C", "F"])
def test_computing(order: Any) -> None:
    array = array_of(order=order)
    np.testing.assert_array_equal(array.compute(), VALUES)
    np.testing.assert_array_equal(array.T.compute(), VALUES.T)
    np.testing.assert_array_equal(array[[3, 1]].compute(), VALUES[[3, 1]])
    np.testing.assert_array_equal((array + 1).sum(axis=0).compute(), (VALUES + 1).sum(axis=0))
    assert array.persist().compute().shape == VALUES.shape
    np.testing.assert_array_equal(array.rechunk((20, 1, 7)).compute(), VALUES)


@pytest.mark.parametrize(
    ("key", "nbytes"),
    [(5, 1200), ((5, 1), 400), ((5, 1, slice(0, 10)), 40), (slice(4, 7), 3600)],
)
def test_a_slice_reads_only_its_own_bytes(key: Any, nbytes: int) -> None:
    source = CountingSource(VALUES.tobytes())
    array_of(source)[key].compute(scheduler="sync")
    assert source.nbytes_read == nbytes


def test_tasks_are_made_on_demand() -> None:
    array = array_of()
    layer = array.dask.layers["t-token"]
    assert not layer.is_materialized()
    assert len(layer) == 10 == len(dict(layer)) == len(set(layer))
    assert layer.get_output_keys() == set(dask.core.flatten(array.__dask_keys__()))
    culled = array.dask.cull({("t-token", 3, 0, 0)})
    assert set(culled.to_dict()) == {("t-token", 3, 0, 0)}
    for key in (
        "t-token",
        ("t-token", 0),
        ("t-token", 10, 0, 0),
        ("x", 0, 0, 0),
        ("t-token", 0, 0, "a"),
    ):
        assert key not in layer


def test_a_slice_creates_only_its_tasks() -> None:
    array = array_of(target=8)
    assert array.npartitions == 3000
    create = partial(array[3, 1, 10:12].compute, scheduler="sync")
    np.testing.assert_array_equal(create(), VALUES[3, 1, 10:12])
    assert calls_of(create) < 3000


def test_the_graph_combines_with_other_dask_arrays() -> None:
    mixed = xr.Dataset({"a": ("x", array_of()[0, 0]), "b": ("x", da.ones(100))})
    np.testing.assert_array_equal((mixed["a"] + mixed["b"]).compute(), VALUES[0, 0] + 1)
    assert mixed.compute()["a"].shape == (100,)


def test_the_graph_pickles_as_its_lazy_array(tmp_path: Path) -> None:
    path = tmp_path / "values"
    path.write_bytes(VALUES.tobytes())
    array = array_of(open_source(path), target=8)
    array.dask  # noqa: B018  a graph of 3,000 tasks is made, and not pickled
    pickled = pickle.dumps(array)
    assert len(pickled) < 2000
    np.testing.assert_array_equal(pickle.loads(pickled).compute(), VALUES)


def test_assigning_replaces_the_graph() -> None:
    array = array_of()
    array[0] = -1
    expected = VALUES.copy()
    expected[0] = -1
    np.testing.assert_array_equal(array.compute(), expected)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(array)).compute(), expected)


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("target", [2400, 10**9])
@pytest.mark.parametrize("order", ["C", "F"])
def test_computed_arrays_own_their_memory(
    tmp_path: Path, target: int, order: Any, mmap: bool
) -> None:
    path = tmp_path / "values"
    path.write_bytes(VALUES.tobytes(order))
    array = array_of(open_source(path, mmap=mmap), target, order)
    for result in (array.compute(), array[3].compute(), array[:2].compute()):
        assert result.flags.writeable
        base = result
        while base is not None:
            assert not isinstance(base, MemoryMap | bytes)
            base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)


class TestComputedTogether:
    """Each of many stored arrays is one task, and shared bytes are read once."""

    @pytest.fixture
    def source(self) -> CountingSource:
        return CountingSource(VALUES.tobytes())

    @pytest.fixture
    def arrays(self, source: CountingSource) -> list[da.Array]:
        reader = PartReader(source, Part("float32", VALUES.shape, 0, VALUES.nbytes))
        lazy = DenseArray("t", reader, VALUES.shape)
        chunks = lazy.chunks(10**9)
        return [tensor_array(lazy, f"t{n}", chunks, lazy.empty((0, 0, 0))) for n in range(50)]

    def test_each_array_takes_one_task(self, arrays: list[da.Array]) -> None:
        done = []
        with Callback(posttask=lambda key, *_: done.append(key)):
            results = dask.compute(*arrays)
        assert len(done) == len(results) == 50
        assert all(np.array_equal(result, VALUES) for result in results)

    @pytest.mark.parametrize("derive", [lambda array: array, da.sum], ids=["stored", "sums"])
    def test_time_is_linear_in_the_number_of_arrays(
        self, arrays: list[da.Array], derive: Any
    ) -> None:
        derived = [derive(array) for array in arrays]
        few, many = (partial(dask.compute, *derived[:n], scheduler="sync") for n in (10, 50))
        few()
        assert calls_of(many) < 6 * calls_of(few)

    @pytest.mark.parametrize("derived_first", [False, True])
    def test_one_read_for_several_results(
        self, arrays: list[da.Array], source: CountingSource, derived_first: bool
    ) -> None:
        stored = arrays[0]
        several = [stored + 1, stored] if derived_first else [stored, stored + 1]
        results = dask.compute(*several)
        assert source.nbytes_read == VALUES.nbytes
        np.testing.assert_array_equal(results[not derived_first], VALUES + 1)
        np.testing.assert_array_equal(results[derived_first], VALUES)

    def test_results_do_not_share_memory(self, arrays: list[da.Array]) -> None:
        first, again = dask.compute(arrays[0], arrays[1])
        assert not np.shares_memory(first, again)

    def test_several_chunks_and_persisted_ones(self) -> None:
        source = CountingSource(VALUES.tobytes())
        array = array_of(source)
        full, part, total = dask.compute(array, array[3], array[:2].sum())
        np.testing.assert_array_equal(full, VALUES)
        np.testing.assert_array_equal(part, VALUES[3])
        assert total == VALUES[:2].sum()
        persisted, row = dask.persist(array, array[5])
        np.testing.assert_array_equal(persisted.compute(), VALUES)
        np.testing.assert_array_equal(row.compute(), VALUES[5])
        (same,) = dask.optimize(array)
        np.testing.assert_array_equal(same.compute(), VALUES)

    @pytest.mark.parametrize(
        "config", [{"array_optimize": None}, {"optimization.fuse.active": False}]
    )
    def test_settings_of_dask_apply(self, arrays: list[da.Array], config: dict[str, Any]) -> None:
        with dask.config.set(config):
            results = dask.compute(*arrays[:3])
        assert all(np.array_equal(result, VALUES) for result in results)

    def test_the_optimize_function_pickles(self, arrays: list[da.Array]) -> None:
        done = arrays[0].__dask_optimize__
        assert pickle.loads(pickle.dumps(done)) is done


def test_chunks_are_views_of_the_map(tmp_path: Path) -> None:
    path = tmp_path / "values"
    path.write_bytes(VALUES.tobytes())
    array = array_of(open_source(path, mmap=True))
    chunks = dask.compute(*array.to_delayed().ravel())
    assert all(is_mapped(chunk) for chunk in chunks)


def test_an_error_in_a_chunk_names_file_and_tensor() -> None:
    source = CountingSource(VALUES.tobytes()[:-4])
    with pytest.raises(ValueError, match="memory: tensor 't'"):
        array_of(source).compute()


@given(st.integers(1, 30000))
def test_any_chunk_size(target: int) -> None:
    np.testing.assert_array_equal(array_of(target=target).compute(), VALUES)
