"""``ds.ckpt[name]``, ``ds.ckpt.sel()`` and ``ds.ckpt.isel()``: selection by names in the file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.test_stacking import DENSE, EXPERTS, LAYERS, moe
from xckpt.datasets.tensors import flatten

if TYPE_CHECKING:
    from pathlib import Path

ARRAYS = moe()
OPENERS: dict[str, Any] = {
    "flat": xr.open_dataset,
    "stacked": lambda path: xr.open_dataset(path, stack=True),
    "layers only": lambda path: xr.open_dataset(path, stack="layers"),
    "tree": xr.open_datatree,
    "stacked tree": lambda path: xr.open_datatree(path, stack=True),
    "joined": lambda path: xr.open_dataset(path, stack=True, join="outer"),
    "joined tree": lambda path: xr.open_datatree(path, stack=True, join="outer"),
}
every_kind = pytest.mark.parametrize("opened", OPENERS.values(), ids=OPENERS)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moe") / "moe.zt"
    # Axes of the same name in all layers: tensors of different dimensions are not stacked.
    dims = {k: [f"{k.split('.')[-1]}_{axis}" for axis in range(v.ndim)] for k, v in ARRAYS.items()}
    dims |= {k: [f"expert_{axis}" for axis in range(2)] for k in ARRAYS if "experts" in k}
    xckpt.save(xr.Dataset({k: (dims[k], v) for k, v in ARRAYS.items()}), path)
    assert "layers.norm" in xr.open_dataset(path, stack="layers")
    return path


def members(obj: Any) -> set[str]:
    """Return the names of the tensors that an object has."""
    flat = obj.ckpt.unstack()
    return set(flat.ckpt._ipython_key_completions_())


def named(*parts: str) -> set[str]:
    return {name for name in ARRAYS if all(part in name for part in parts)}


@every_kind
def test_any_tensor_of_the_file_by_its_name(path: Path, opened: Any) -> None:
    obj = opened(path)
    for name, array in ARRAYS.items():
        values = obj.ckpt[name]
        np.testing.assert_array_equal(values.values, array)
        assert values.name == name
    with pytest.raises(KeyError, match=r"layers\.3\.norm"):
        obj.ckpt["layers.3.nrom"]


def test_an_object_that_was_changed_in_place(path: Path) -> None:
    ds = xr.open_dataset(path)
    dt = xr.open_datatree(path)
    for obj in (ds, dt):
        np.testing.assert_array_equal(obj.ckpt["embed"].values, ARRAYS["embed"])
        obj["embed"] = obj["embed"] * 0
        obj["new"] = obj["embed"] + 1
        assert (obj.ckpt["embed"] == 0).all()
        assert (obj.ckpt["new"] == 1).all()
        del obj["embed"]
        with pytest.raises(KeyError, match="no tensor 'embed'"):
            obj.ckpt["embed"]
    stacked = xr.open_dataset(path, stack="layers")
    assert stacked.ckpt["layers.1.norm"].shape == (4,)
    stacked["layers"] = np.arange(10, 10 + LAYERS)
    np.testing.assert_array_equal(stacked.ckpt["layers.11.norm"].values, ARRAYS["layers.1.norm"])
    with pytest.raises(KeyError):
        stacked.ckpt["layers.1.norm"]


@every_kind
def test_one_number_of_a_module_wherever_it_is(path: Path, opened: Any) -> None:
    obj = opened(path)
    for layer in range(LAYERS):
        selection = obj.ckpt.sel(layers=layer)
        assert members(selection) == named(f"layers.{layer}.")
        for name in members(selection):
            np.testing.assert_array_equal(selection.ckpt[name].values, ARRAYS[name])
    selection = obj.ckpt.sel(layers=3, experts=1)
    assert members(selection) == {"layers.3.experts.1.w"}
    np.testing.assert_array_equal(
        selection.ckpt["layers.3.experts.1.w"].values, ARRAYS["layers.3.experts.1.w"]
    )


@every_kind
def test_several_numbers_and_slices(path: Path, opened: Any) -> None:
    obj = opened(path)
    of_two = named("layers.1.") | named("layers.3.")
    assert members(obj.ckpt.sel(layers=[1, 3])) == of_two
    assert members(obj.ckpt.isel(layers=[1, -1])) == of_two
    assert members(obj.ckpt.sel(layers=slice(DENSE, None))) == named("layers.2.") | named(
        "layers.3."
    )
    assert members(obj.ckpt.isel(layers=slice(None, 1))) == named("layers.0.")
    assert members(obj.ckpt.sel(experts=[0], layers=slice(None))) == named("experts.0.")
    assert members(obj.ckpt.sel(layers=[0, 3]).ckpt.isel(layers=-1)) == named("layers.3.")


@every_kind
def test_missing_names_are_errors(path: Path, opened: Any) -> None:
    obj = opened(path)
    with pytest.raises(KeyError, match="layers=4; there are 0 to 3"):
        obj.ckpt.sel(layers=4)
    with pytest.raises(KeyError, match="'blocks'; there are 'experts', 'layers'"):
        obj.ckpt.sel(blocks=0)
    with pytest.raises(KeyError, match="no tensor has layers=0, experts=1"):
        obj.ckpt.sel(layers=0, experts=1)
    with pytest.raises(IndexError):
        obj.ckpt.isel(experts=EXPERTS)
    for wrong in ("a", 1.5, True, [[1]]):
        with pytest.raises(TypeError, match="layers takes a number"):
            obj.ckpt.sel(layers=wrong)


def test_nothing_is_read(path: Path) -> None:
    ds = xr.open_dataset(path, stack=True).ckpt.sel(layers=slice(1, 3))
    assert all(
        variable.chunks is not None for variable in ds.variables.values() if variable.ndim > 1
    )
    assert ds.attrs == xr.open_dataset(path).attrs
    assert ds.encoding["format"] == "ztensor"


@pytest.mark.parametrize("kind", ["stacked", "stacked tree"])
@pytest.mark.parametrize("expected", ["*.experts.*", "*.mlp.w", "layers.[23].*", "*.w"])
def test_dimensions_are_called_as_in_the_whole_file(path: Path, kind: str, expected: str) -> None:
    opener = xr.open_dataset if kind == "stacked" else xr.open_datatree
    full = flatten(opener(path, stack=True)).variables
    selected = flatten(opener(path, stack=True, tensors=expected)).variables
    assert selected
    assert {name: selected[name].dims for name in selected} == {
        name: full[name].dims for name in selected
    }
