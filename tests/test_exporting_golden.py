"""Whatever the golden files hold, xarray writes it to netCDF and zarr and reads it back."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import xarray as xr

import xckpt
from tests.conftest import golden_files
from tests.exported import WRITERS, assert_same_values, restored, same, told, written
from xckpt.writing.sparse_parts import densified

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
# Of so many tensors one writing will do: the libraries take half a minute for each.
MANY = 300


def opened(path: Path) -> Iterator[tuple[str, xr.Dataset | xr.DataTree]]:
    """Open a file in all ways that give something else, without what has no values."""
    before: list[Any] = []
    for way, options in WAYS.items():
        ds = xr.open_dataset(path, **options)
        kinds = {
            name: (v.dims, v.dtype, type(v.data._meta) if v.chunks is not None else None)
            for name, v in ds.variables.items()
        }
        if kinds in before:
            continue
        before.append(kinds)
        yield way, ds.drop_vars(without_values(ds.variables))
        if len(ds.variables) > MANY:
            return
    tree = xr.open_datatree(path, stack=True)
    for node in tree.subtree:
        missing = without_values(node.to_dataset(inherit=False).variables)
        node.dataset = node.to_dataset(inherit=False).drop_vars(missing)
    yield "tree", tree


def without_values(variables: Any) -> list[Any]:
    """Find the variables whose values are nowhere, or cannot be read."""
    missing = []
    for name, variable in variables.items():
        try:
            variable.compute()
        except xckpt.CheckpointError:
            missing.append(name)
    return missing


def made_plain(obj: Any) -> tuple[Any, list[str]]:
    """Call what is tested, and give its warnings too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = obj.ckpt.plain()
    assert all(warning.category is xckpt.CheckpointWarning for warning in caught)
    return made, [str(warning.message) for warning in caught]


def datasets(obj: Any) -> dict[str, xr.Dataset]:
    """List the Datasets of an object by path."""
    if isinstance(obj, xr.Dataset):
        return {"/": obj}
    return {node.path: node.to_dataset(inherit=False) for node in obj.subtree}


@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_golden_files(path: Path, writer: str, tmp_path: Path) -> None:
    for way, obj in opened(path):
        plain, changes = made_plain(obj)
        assert len(changes) <= 1
        again = datasets(written(plain, tmp_path / f"{way}.plain", writer))
        assert again.keys() == datasets(plain).keys()
        before = datasets(obj)
        for (at, ds), was in zip(datasets(plain).items(), before, strict=True):
            module = told(ds.attrs)[1].get("xckpt_name", at.rpartition("/")[2])
            assert module == was.rpartition("/")[2]
            assert again[at].variables.keys() == ds.variables.keys()
            assert again[at].coords.keys() == ds.coords.keys()
            for name, variable in ds.variables.items():
                assert_same_values(again[at].variables[name], variable)
            assert_same(restored(again[at]), before[was])
        if not changes and len(before["/"].variables) <= MANY:
            # Then nothing is in the way of xarray either.
            direct = datasets(written(obj, tmp_path / f"{way}.direct", writer))
            for at, ds in before.items():
                assert_same(direct[at], ds)


def assert_same(found: xr.Dataset, wanted: xr.Dataset) -> None:
    """Compare names, values and attributes."""
    assert found.variables.keys() == wanted.variables.keys()
    assert same(found.attrs, wanted.attrs)
    for name, variable in wanted.variables.items():
        assert_same_values(found.variables[name], variable.copy(data=densified(variable.data)))
        assert same(found.variables[name].attrs, variable.attrs), name
