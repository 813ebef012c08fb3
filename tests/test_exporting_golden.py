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
# Of so many tensors one way of opening will do.
MANY = 300
# HDF5 looks for a dimension among all that a file has, so it is given so many at a time.
AT_ONCE = 100


def opened(path: Path) -> Iterator[tuple[str, Any, dict[str, xr.Dataset]]]:
    """Open a file in all ways that give something else, without what has no values.

    Yields the way, what is open, and its Datasets by path, computed.
    """
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
        left, computed = with_values(ds)
        yield way, left, {"/": computed}
        if len(kinds) > MANY:
            return
    tree = xr.open_datatree(path, stack=True)
    values = {}
    for node in tree.subtree:
        node.dataset, values[node.path] = with_values(node.to_dataset(inherit=False))
    yield "tree", tree, values


def with_values(ds: xr.Dataset) -> tuple[xr.Dataset, xr.Dataset]:
    """Leave out variables whose values are nowhere, or cannot be read; give the rest computed."""
    try:
        return ds, ds.compute()
    except xckpt.CheckpointError:
        readable = ds.drop_vars([name for name, each in ds.variables.items() if not has(each)])
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
        made = obj.ckpt.plain()
    assert all(warning.category is xckpt.CheckpointWarning for warning in caught)
    return made, [str(warning.message) for warning in caught]


def datasets(obj: Any) -> dict[str, xr.Dataset]:
    """List the Datasets of an object by path."""
    if isinstance(obj, xr.Dataset):
        return {"/": obj}
    return {node.path: node.to_dataset(inherit=False) for node in obj.subtree}


@pytest.mark.usefixtures("in_this_thread")
@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_golden_files(path: Path, tmp_path: Path) -> None:
    for way, obj, before in opened(path):
        plain, changes = made_plain(obj)
        assert len(changes) <= 1
        made = {at: ds.compute() for at, ds in datasets(plain).items()}
        for writer in WRITERS:
            again = written_in_parts(plain, tmp_path / f"{way}.plain.{writer}", writer)
            assert_told(again, made, before)
            if not changes and len(before["/"].variables) <= MANY:
                # Then nothing is in the way of xarray either.
                direct = written_in_parts(obj, tmp_path / f"{way}.direct.{writer}", writer)
                for at, ds in before.items():
                    assert_same(direct[at], ds)


def written_in_parts(obj: Any, path: Path, writer: str) -> dict[str, xr.Dataset]:
    """Write and open again, at most `AT_ONCE` variables of a Dataset at a time."""
    names = [*obj.variables]
    if isinstance(obj, xr.DataTree) or len(names) <= AT_ONCE:
        return datasets(written(obj, path, writer))
    parts = [names[start : start + AT_ONCE] for start in range(0, len(names), AT_ONCE)]
    path.mkdir()
    found = [written(obj[part], path / str(at), writer) for at, part in enumerate(parts)]
    variables = {name: each for part in found for name, each in part.variables.items()}
    whole = xr.Dataset(variables, attrs=found[0].attrs)
    return {"/": whole.set_coords([name for part in found for name in part.coords])}


def assert_told(
    again: dict[str, xr.Dataset], plain: dict[str, xr.Dataset], before: dict[str, xr.Dataset]
) -> None:
    """Compare with what was written, and turned back with what was open."""
    assert again.keys() == plain.keys()
    for (at, ds), was in zip(plain.items(), before, strict=True):
        module = told(ds.attrs)[1].get("xckpt_name", at.rpartition("/")[2])
        assert module == was.rpartition("/")[2]
        assert again[at].variables.keys() == ds.variables.keys()
        assert again[at].coords.keys() == ds.coords.keys()
        for name, variable in ds.variables.items():
            assert_same_values(again[at].variables[name], variable)
        assert_same(restored(again[at]), before[was])


def assert_same(found: xr.Dataset, wanted: xr.Dataset) -> None:
    """Compare names, values and attributes."""
    assert found.variables.keys() == wanted.variables.keys()
    assert same(found.attrs, wanted.attrs)
    for name, variable in wanted.variables.items():
        assert_same_values(found.variables[name], variable.copy(data=densified(variable.data)))
        assert same(found.variables[name].attrs, variable.attrs), name
