"""xarray writes the contents of golden files to netCDF and zarr, and reads them back."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import xarray as xr

import xckpt
from tests.conftest import golden_files
from tests.exported import WRITERS, assert_same_values, restored, restored_attrs, same, written
from xckpt.arrays.converted import densified

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILES = [
    *golden_files("burnpack/*.bpk", with_suffix=".expected.json"),
    *golden_files("burnpack/ckpt/*.bpk", with_suffix=".expected.json"),
    *golden_files("gptrs/*.bin"),
    *golden_files("mlcp/*.checkpoint"),
    *golden_files("mlcp/*.metadata.json"),
    *golden_files("primitiv/*.primitiv", with_suffix=".expected.json"),
    *golden_files("primitiv/odd/*.primitiv", with_suffix=".expected.json"),
    *golden_files("ztensor/*.zt", with_suffix=".expected.json"),
]
WAYS: dict[str, dict[str, Any]] = {
    "decoded": {},
    "stored": {"decode": False},
    "stacked": {"stack": True},
    "sparse": {"sparse": True},
}
# Ways that are written without `plain` where it changes nothing; the others have the same arrays.
DIRECTLY = {"decoded", "tree"}
# Of more variables that are alike, the writers of xarray make nothing else, and make it slowly.
ALIKE = 4


def opened(path: Path) -> Iterator[tuple[str, Any, dict[str, xr.Dataset]]]:
    """Open a file in all ways that give different objects, without variables that have no values.

    Yields the name of the way, the lazy object, and its computed Datasets by path.
    """
    before: list[Any] = []
    for opening, options in WAYS.items():
        ds = xr.open_dataset(path, **options)
        kinds = kinds_of(ds)
        if kinds in before:
            continue
        before.append(kinds)
        lazy, computed = with_values(few(ds))
        yield opening, lazy, {"/": computed}
    tree = xr.open_datatree(path, stack=True)
    if not tree.children and kinds_of(tree.dataset) in before:
        return
    values = {}
    for node in tree.subtree:
        lazy, values[node.path] = with_values(few(node.to_dataset(inherit=False)))
        node.dataset = lazy
    yield "tree", tree, values


def kinds_of(ds: Any) -> dict[Any, Any]:
    """Return dimensions, type, and kind of array of all variables."""
    return {
        name: (v.dims, v.dtype, type(v.data._meta) if v.chunks is not None else None)
        for name, v in ds.variables.items()
    }


def few(ds: xr.Dataset) -> xr.Dataset:
    """Leave out variables after `ALIKE` others of the same kind, with the same attributes."""
    count: Counter[Any] = Counter()
    surplus = []
    for name, kind in kinds_of(ds).items():
        group = kind, frozenset(ds.variables[name].attrs)
        count[group] += 1
        if count[group] > ALIKE:
            surplus.append(name)
    return ds.drop_vars(surplus)


def with_values(ds: xr.Dataset) -> tuple[xr.Dataset, xr.Dataset]:
    """Leave out variables whose values are nowhere, or cannot be read; give the rest computed."""
    try:
        return ds, ds.compute()
    except xckpt.CheckpointError:
        readable = ds.drop_vars(
            [name for name, variable in ds.variables.items() if not has(variable)]
        )
        return readable, readable.compute()


def has(variable: xr.Variable) -> bool:
    """Return whether a variable has values."""
    try:
        variable.compute()
    except xckpt.CheckpointError:
        return False
    return True


def made_plain(obj: Any) -> tuple[Any, list[str]]:
    """Call what is tested, and give its warnings too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain = obj.ckpt.plain()
    assert all(warning.category is xckpt.CheckpointWarning for warning in caught)
    return plain, [str(warning.message) for warning in caught]


def datasets(obj: Any) -> dict[str, xr.Dataset]:
    """List the Datasets of an object by path."""
    if isinstance(obj, xr.Dataset):
        return {"/": obj}
    return {node.path: node.to_dataset(inherit=False) for node in obj.subtree}


@pytest.mark.usefixtures("in_this_thread")
@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_golden_files_survive_writers_of_xarray(path: Path, tmp_path: Path) -> None:
    for opening, obj, before in opened(path):
        plain, changes = made_plain(obj)
        assert len(changes) <= 1
        computed = plain.compute()
        exported = datasets(computed)
        if not changes and opening in DIRECTLY:
            # Then nothing is in the way of xarray either, and what is open is written.
            for at, ds in exported.items():
                assert_same(ds, before[at])
            plain, computed = obj, obj.compute()
        for writer in WRITERS:
            # One writer of netCDF gets the object in memory.
            to_write = computed if writer == "h5netcdf" else plain
            again = datasets(written(to_write, tmp_path / f"{opening}.{writer}", writer))
            assert_restorable(again, exported, before)


def assert_restorable(
    again: dict[str, xr.Dataset], plain: dict[str, xr.Dataset], before: dict[str, xr.Dataset]
) -> None:
    """Compare with the written objects, and after restoring with the opened ones."""
    assert again.keys() == plain.keys()
    for (at, ds), was in zip(plain.items(), before, strict=True):
        module = restored_attrs(ds.attrs)[1].get("xckpt_name", at.rpartition("/")[2])
        assert module == was.rpartition("/")[2]
        assert again[at].variables.keys() == ds.variables.keys()
        assert again[at].coords.keys() == ds.coords.keys()
        for name, variable in ds.variables.items():
            assert_same_values(again[at].variables[name], variable)
        assert_same(restored(again[at]), before[was])


def assert_same(actual: xr.Dataset, expected: xr.Dataset) -> None:
    """Compare names, values and attributes."""
    assert actual.variables.keys() == expected.variables.keys()
    assert same(actual.attrs, expected.attrs)
    for name, variable in expected.variables.items():
        assert_same_values(actual.variables[name], variable.copy(data=densified(variable.data)))
        assert same(actual.variables[name].attrs, variable.attrs), name
