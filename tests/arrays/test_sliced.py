"""Selections of stored arrays are stored arrays with the values, shapes and chunks of dask."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import basic_indices

from tests.sources import CountingSource
from xckpt.arrays.dense import DenseArray
from xckpt.arrays.graph import TensorGraph, is_stored, tensor_array
from xckpt.arrays.keys import compose, cut_chunks, normalize
from xckpt.arrays.lazy import SlicedArray
from xckpt.arrays.parts import PartReader
from xckpt.arrays.stacked import StackedArray
from xckpt.datasets.variables import LazyVariable
from xckpt.index import Part

if TYPE_CHECKING:
    from xckpt.arrays.lazy import LazyArray

GRID, SHAPE = (4, 3), (10, 6)
VALUES = np.arange(720, dtype="<f4").reshape(*GRID, *SHAPE)
DIMS = ("layers", "experts", "d10", "d6")


def forward(key: Any) -> bool:
    """Return whether every slice has a positive step."""
    entries = key if isinstance(key, tuple) else (key,)
    return all(not isinstance(e, slice) or e.step is None or e.step > 0 for e in entries)


KEYS = basic_indices(VALUES.shape, allow_newaxis=False).filter(forward)


def stacked(source: CountingSource) -> StackedArray:
    """Make a stack of twelve tensors of one file."""
    nbytes = VALUES[0, 0].nbytes
    members = [
        DenseArray(f"t{n}", PartReader(source, Part("float32", SHAPE, n * nbytes, nbytes)), SHAPE)
        for n in range(12)
    ]
    return StackedArray("t", members, GRID)


def variable_of(
    source: CountingSource | None = None, target: int = 48, attrs: Any = None
) -> LazyVariable:
    """Make the variable of a stack; by default a chunk has two rows of a tensor."""
    lazy = stacked(source or CountingSource(VALUES.tobytes()))
    chunks = tuple((1,) * n for n in GRID) + lazy.members[0].chunks(target)
    array = tensor_array(lazy, "t-token", chunks, lazy.empty((0,) * 4))
    return LazyVariable.of(DIMS, array, attrs or {"kind": "w"}, {"tensor": "t"})


@given(KEYS, st.data())
def test_two_indices_equal_those_of_dask(first: Any, data: st.DataObject) -> None:
    ours = variable_of()
    theirs = xr.Variable(DIMS, ours.data, {"kind": "w"}, {"tensor": "t"})
    expected = VALUES
    keys = [first]
    selected = np.asarray(VALUES[first])
    if selected.ndim and 0 not in selected.shape:
        keys.append(data.draw(basic_indices(selected.shape, allow_newaxis=False).filter(forward)))
    for key in keys:
        ours, theirs, expected = ours[key], theirs[key], np.asarray(expected)[key]
    assert type(ours) is LazyVariable
    assert ours.dims == theirs.dims
    assert ours.shape == theirs.shape
    assert ours.chunks == theirs.chunks
    assert ours.dtype == theirs.dtype
    assert (ours.attrs, ours.encoding) == (theirs.attrs, theirs.encoding)
    assert is_stored(ours.data)
    np.testing.assert_array_equal(ours.data.compute(scheduler="sync"), expected)


@given(KEYS)
def test_index_arrays_and_reversed_slices_equal_numpy(key: Any) -> None:
    ours = variable_of()[key]
    # Where a chunk has no element, dask's own arrays cannot be indexed by an array either:
    # dask.array.slicing.take divides by the average size.
    assume(not any(0 in sizes for sizes in ours.chunks or ()))
    expected = np.asarray(VALUES[key])
    for axis, size in enumerate(expected.shape if expected.size else ()):
        for entry in (np.array([size - 1, 0]), slice(None, None, -1)):
            index = (slice(None),) * axis + (entry,)
            got = ours[index].data.compute(scheduler="sync")
            np.testing.assert_array_equal(got, expected[index])


@given(KEYS)
def test_lazy_arrays_slice_like_numpy(key: Any) -> None:
    lazy: LazyArray = stacked(CountingSource(VALUES.tobytes()))
    part = lazy.sliced(normalize(key, lazy.shape))
    expected = VALUES[key]
    assert part.shape == np.shape(expected)
    np.testing.assert_array_equal(part[...], expected)
    narrow, index = lazy.narrowed(normalize(key, lazy.shape))
    np.testing.assert_array_equal(narrow[index], expected)
    again, index = part.narrowed(normalize(..., part.shape))
    np.testing.assert_array_equal(again[index], expected)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(part))[...], expected)


@pytest.mark.parametrize(
    ("keys", "nbytes"),
    [
        ([{"layers": 2, "experts": 1}, {"d10": 7, "d6": slice(0, 5)}], 20),
        ([{"layers": 2}, {"experts": 1}, {"d10": 7}, {"d6": slice(1, 2)}], 4),
        ([{"layers": slice(1, 3), "experts": 0}, {"d10": 0}], 48),
        ([{"layers": np.int64(3)}, {"experts": slice(2, None)}], 240),
        ([{"layers": np.array(3)}, {"experts": slice(2, None)}], 240),
    ],
)
def test_repeated_selections_read_only_the_result(keys: list[dict[str, Any]], nbytes: int) -> None:
    source = CountingSource(VALUES.tobytes())
    array = xr.Dataset({"w": variable_of(source, target=10**6)}, {"layers": [0, 1, 2, 3]})["w"]
    for key in keys:
        array = array.isel(key)
    assert isinstance(array.data.dask, TensorGraph)
    array.compute(scheduler="sync")
    assert source.nbytes_read == nbytes


def test_a_label_selects_one_chunk() -> None:
    array = xr.Dataset({"w": variable_of(target=10**6)}, {"layers": [10, 20, 30, 40]})["w"]
    row = array.sel(layers=20, experts=2)[3, :5]
    assert len(dict(row.data.dask)) == 1
    np.testing.assert_array_equal(row, VALUES[1, 2, 3, :5])


def test_all_of_an_array_is_that_array() -> None:
    variable = variable_of()
    for key in (..., slice(None), (slice(0, 4), slice(0, 99)), {"d6": slice(None)}, ()):
        assert variable[key].data is variable.data


def test_selected_members_are_not_copied() -> None:
    lazy = stacked(CountingSource(VALUES.tobytes()))
    assert lazy.sliced(normalize((2, 1), lazy.shape)) is lazy.members[7]
    members = lazy.sliced(normalize((slice(0, 4, 2), 1), lazy.shape))
    assert isinstance(members, StackedArray)
    assert members.grid == (2,)
    assert list(members.members) == [lazy.members[1], lazy.members[7]]
    # An index of an index is one index of the whole.
    part = members.sliced(normalize((0, slice(2, 8)), members.shape))
    assert isinstance(part, SlicedArray)
    deep = part.sliced(normalize((slice(1, 3),), part.shape))
    assert isinstance(deep, SlicedArray)
    assert deep.base is lazy.members[1]


def test_selections_have_distinct_names() -> None:
    variable = variable_of()
    names = [variable[key].data.name for key in (0, 1, slice(0, 1), slice(0, 2), (0, 1))]
    assert len({variable.data.name, *names}) == 6
    assert variable[0].data.name == variable_of()[0].data.name


def test_an_index_that_does_not_fit_is_an_error() -> None:
    variable = variable_of()
    for key in (4, (0, 3), (0, 0, 0, 0, 0)):
        with pytest.raises(IndexError):
            variable[key]


def test_computed_slices_own_their_memory() -> None:
    part = variable_of(target=10**6)[0, 0, :, 0].data.compute(scheduler="sync")
    assert part.base is None
    assert part.flags.writeable


def test_a_task_carries_its_own_tensors_only() -> None:
    variable = variable_of(target=10**6)
    full = len(pickle.dumps(variable.data))
    source = variable.data.dask.lazy.source
    graph = variable.data.dask.cull({("t-token", 1, 2, 0, 0)})
    (task,) = dict(graph).values()
    assert not task.dependencies
    # The bytes of this source are in its pickle.
    assert len(pickle.dumps(task)) - len(pickle.dumps(source)) < 600 < full


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_chunks_equal_those_of_dask(sizes: list[int], data: st.DataObject) -> None:
    length = sum(sizes)
    key = data.draw(st.slices(length).filter(forward))
    theirs = da.zeros(length, chunks=(tuple(sizes),))[key].chunks
    assert cut_chunks((tuple(sizes),), normalize(key, (length,))) == theirs


@given(st.integers(1, 30), st.data())
def test_two_indices_are_combined(length: int, data: st.DataObject) -> None:
    (first,) = normalize(data.draw(st.slices(length).filter(forward)), (length,))
    chosen = np.arange(length)[first]
    (second,) = normalize(data.draw(st.slices(len(chosen))), (len(chosen),))
    np.testing.assert_array_equal(np.arange(length)[compose((first,), (second,))], chosen[second])


def test_several_schedulers_give_the_same() -> None:
    part = variable_of()[1:, 0, ::3]
    for scheduler in ("sync", "threads"):
        with dask.config.set(scheduler=scheduler):
            np.testing.assert_array_equal(part.data.compute(), VALUES[1:, 0, ::3])
