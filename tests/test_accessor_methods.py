"""Methods of ``ds.ckpt``: signatures, documentation and completion."""

from __future__ import annotations

import pydoc
from inspect import getdoc, signature
from typing import Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from xckpt.accessor import CheckpointAccessor
from xckpt.options import Forwarded
from xckpt.plots import Plots

# Methods that call the function of the same name, and its parameters that only a path needs.
FUNCTIONS = {
    "stats": {"storage_options"},
    "histogram": {"storage_options"},
    "spectrum": set(),
    "table": set(),
    "save": set(),
    "manifest": {"engine", "storage_options"},
}
METHODS = [name for name in dir(CheckpointAccessor) if not name.startswith("_")]


@pytest.fixture(scope="module")
def ds() -> xr.Dataset:
    return xckpt.open({"h.0.w": np.eye(3), "h.1.w": np.eye(3)})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_method_has_the_signature_of_its_function(ds: xr.Dataset, name: str) -> None:
    _, *expected = signature(getattr(xckpt, name)).parameters.values()
    expected = [parameter for parameter in expected if parameter.name not in FUNCTIONS[name]]
    method: Any = getattr(ds.ckpt, name)
    assert list(signature(method).parameters.values()) == expected
    assert next(iter(signature(getattr(CheckpointAccessor, name)).parameters)) == "self"
    assert method.__name__ == name
    assert method.__qualname__ == f"CheckpointAccessor.{name}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_describes_the_parameters_of_a_method(ds: xr.Dataset, name: str) -> None:
    function: Any = getattr(xckpt, name)
    text = pydoc.plain(pydoc.render_doc(getattr(ds.ckpt, name)))
    assert str(getdoc(function)).splitlines()[0] in text
    first, *parameters = signature(function).parameters
    for parameter in parameters:
        is_described = f"    {parameter} : " in text or f"    **{parameter}" in text
        assert is_described == (parameter not in FUNCTIONS[name])
    assert f"    {first} : " not in text


@pytest.mark.parametrize("name", METHODS)
def test_everything_public_is_documented(name: str) -> None:
    text = str(getdoc(getattr(CheckpointAccessor, name)))
    assert text[0].isupper()
    if name not in {"format", "names", "plot"}:
        assert "\nReturns\n" in text or name == "report"


def test_methods_are_completed(ds: xr.Dataset) -> None:
    assert {*FUNCTIONS, "find", "compare", "plot"} <= {*dir(ds.ckpt)}


def test_statistics_by_a_method_are_those_of_the_function(ds: xr.Dataset) -> None:
    xr.testing.assert_identical(ds.ckpt.stats(), xckpt.stats(ds))
    xr.testing.assert_identical(
        ds["h.0.w"].ckpt.histogram(bins=3), xckpt.histogram(ds["h.0.w"], bins=3)
    )
    with pytest.raises(TypeError, match="not this DataTree"):
        xr.DataTree(ds).ckpt.table()
    with pytest.raises(ValueError, match="not a result of stats"):
        ds.ckpt.table()


@pytest.mark.parametrize("owner", [CheckpointAccessor, Plots])
def test_methods_are_declared_once_as_functions(owner: type) -> None:
    # `explore` and `param_key` use what the accessor remembers.
    methods = {
        n: m
        for n, m in vars(owner).items()
        if not n.startswith("_") and (callable(m) or isinstance(m, Forwarded))
    }
    assert {n for n, m in methods.items() if not isinstance(m, Forwarded)} <= {
        "explore",
        "param_key",
    }


def test_tables_have_the_selected_tensors(ds: xr.Dataset) -> None:
    assert ds.ckpt.summary("role", tensors="h.0.*")["tensors"].tolist() == [1]
    assert list(ds.ckpt.structure(exclude="h.0.*").index) == ["h.1.w"]
    assert ds.ckpt.footprint("h.0.*")["parameters"] == 9
    assert ds.ckpt.modules("h.1.*")["numbers"].tolist() == ["1"]
    assert "h" in repr(ds.ckpt.tree(tensors="*"))
