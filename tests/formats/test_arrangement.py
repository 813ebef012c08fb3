"""The stored arrangement of an object: coordinates, order and attributes; harmless if malformed."""

from __future__ import annotations

import json
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.formats.safetensors_files import entry, safetensors_file
from xckpt import CheckpointWarning, UnsupportedError
from xckpt.formats import get
from xckpt.formats.kit import ARRANGEMENT_KEY, DIMS_KEY
from xckpt.formats.plan import Draft
from xckpt.index import Arrangement
from xckpt.writing import save

SHAPES = {"w": [2, 3], "x": [3], "y": [2], "m.x": [4], "m.v": [4]}
DIMS = {"w": ["y", "x"], "x": ["x"], "y": ["y"], "m.x": ["x"], "m.v": ["x"]}


def file(text: Any, dims: Any = DIMS, **attrs: str) -> bytes:
    """Make a file with an arrangement; each tensor holds its own number."""
    header, at = {}, 0
    for name, shape in SHAPES.items():
        end = at + 4 * int(np.prod(shape))
        header[name] = entry("F32", shape, at, end)
        at = end
    arrangement = text if isinstance(text, str) else json.dumps(text)
    metadata = {DIMS_KEY: json.dumps(dims), ARRANGEMENT_KEY: arrangement, **attrs}
    values = [np.full(shape, at, "<f4") for at, shape in enumerate(SHAPES.values())]
    data = b"".join(value.tobytes() for value in values)
    return safetensors_file({"__metadata__": metadata, **header}, data)


def opened(data: bytes, **options: Any) -> tuple[xr.Dataset, list[str]]:
    """Open a file as a Dataset and as a tree, and check that both hold all values."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ds = xr.open_dataset(data, engine="safetensors", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        tree = xr.open_datatree(data, engine="safetensors", **options)
    assert set(ds.variables) == set(SHAPES)
    for at, (name, shape) in enumerate(SHAPES.items()):
        path = "/".join(name.split("."))
        for variable in (ds.variables[name], tree[path].variable):
            np.testing.assert_array_equal(variable.values, np.full(shape, at))
    pickle.loads(pickle.dumps(ds))
    repr(tree)
    return ds, [str(warning.message) for warning in caught]


def test_a_stored_arrangement_is_applied() -> None:
    text = {
        "coords": ["x", "y", "m.x"],
        "attrs": {"w": {"units": "m"}},
        "json": ["n"],
        "order": [4, 0, 1, 2, 3],
        "modules": {"/m": {"kind": "k"}, "/none": {}},
    }
    ds, messages = opened(file(text, n="[1]"))
    assert not messages
    assert list(ds.data_vars) == ["m.v", "w"]
    assert (set(ds.coords), set(ds.xindexes)) == ({"x", "y", "m.x"}, {"x", "y"})
    assert ds["m.x"].dims == ("x_4",)
    assert (ds["w"].attrs, ds.attrs) == ({"units": "m"}, {"n": [1]})
    assert ds["w"].dims == ("y", "x")
    tree = xr.open_datatree(file(text, n="[1]"), engine="safetensors")
    assert set(tree.xindexes) == {"y"}  # there is another x below
    assert set(tree["m"].xindexes) == {"y", "x"}
    assert tree["m"].attrs == {"kind": "k"}
    assert "none" in tree.children


MISTYPED: dict[str, list[Any]] = {
    "coords": ["x", 1, None, {"x": 1}, [["x"]], [1], [None]],
    "order": ["x", [0], [0, 1, 2, 3, 3], [0, 1, 2, 3, 9], [True] * 5, [-1, 0, 1, 2, 3],
              [0.0, 1, 2, 3, 4], {"0": 1}, [[]] * 5],
    "attrs": [[], "w", {"w": []}, {"w": 3}, 7],
    "modules": [[], "/m", {"/m": 3}, 7],
    "json": ["n", 1, ["n"], [["n"]]],
}  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "null", "[]", "1", "[" * 100_000, '{"coords": "\\ud800"}',
        '{"attrs": {"w": ' + '{"a":' * 50 + "1" + "}" * 52,
        '{"attrs": {"w": {"n": ' + "9" * 5000 + "}}}",
        *[{field: value} for field, values in MISTYPED.items() for value in values],
    ],
    ids=lambda text: (text if isinstance(text, str) else json.dumps(text))[:30],
)  # fmt: skip
def test_malformed_entries_are_ignored_with_one_warning(text: Any) -> None:
    ds, messages = opened(file(text, n="{"))
    assert len(messages) == 1
    assert "'xckpt.arrangement' is malformed" in messages[0]
    assert not ds.coords
    assert ds.attrs == {"n": "{"}


@pytest.mark.parametrize(
    "text",
    [
        {"coords": ["unknown", "x", "x"], "attrs": {"unknown": {"a": 1}}, "json": ["unknown"]},
        {"modules": {path: {"a": 1} for path in ("", "/", "//", "/..", "m", "/m/x", "/m/x/y", "/w",
                                                 "/none/", "/none/deeper", "/./a", "/m//v")}},
        {"something": "else"},
    ],
    ids=["names", "paths", "fields"],
)  # fmt: skip
def test_unknown_keys_are_ignored(text: Any) -> None:
    opened(file(text))


@pytest.mark.parametrize(
    ("dims", "indexes"),
    [
        ({"x": ["x"], "w": ["x", "y"]}, {"x"}),  # sizes that are others
        ({"x": ["y"], "w": ["y", "x"]}, set()),
        ({"x": ["w"]}, set()),  # the name of a variable
        ({"w": ["x", "x"], "x": ["x"]}, {"x"}),
        ({"m.x": ["m.x"], "m.v": ["m.x"], "x": ["m.x"]}, {"m.x"}),
    ],
)
def test_names_of_axes_that_do_not_fit(dims: Any, indexes: set[str]) -> None:
    ds, _ = opened(file({"coords": ["x", "y", "m.x", "w"]}, dims))
    assert set(ds.xindexes) == indexes
    assert all(ds.sizes[dim] == ds[dim].size for dim in ds.xindexes)


def test_a_large_coordinate_is_not_read_on_opening() -> None:
    size = 17 << 20
    metadata = {DIMS_KEY: json.dumps({"x": ["x"]}), ARRANGEMENT_KEY: json.dumps({"coords": ["x"]})}
    header = {"__metadata__": metadata, "x": entry("F32", [size], 0, 4 * size)}
    ds = xr.open_dataset(safetensors_file(header, bytes(4 * size)), engine="safetensors")
    assert "x" in ds.coords
    assert not ds.xindexes
    assert ds["x"].chunks is not None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from([*SHAPES, "/m", "/"]),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.sampled_from([*SHAPES, "/m", "/m/q", "coords"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=20)
@given(
    text=st.dictionaries(st.sampled_from(["coords", "order", "attrs", "modules", "json"]), JSON),
    dims=st.dictionaries(
        st.sampled_from(sorted(SHAPES)), st.lists(st.none() | st.sampled_from("xyw"), max_size=2)
    ),
    stack=st.booleans(),
)
def test_any_arrangement_text_is_handled(text: Any, dims: Any, stack: bool) -> None:
    ds, _ = opened(file(text, dims), stack=stack)
    assert len(set(ds.variables)) == len(SHAPES)


def test_an_arrangement_of_a_tree_survives_saving_as_a_dataset(tmp_path: Any) -> None:
    ds, _ = opened(file({"coords": ["x", "y", "m.x"], "order": [4, 3, 2, 1, 0]}))
    save(ds, tmp_path / "m.safetensors")
    again = xr.open_dataset(tmp_path / "m.safetensors")
    xr.testing.assert_identical(again, ds.assign_attrs(format="pt"))
    assert list(again.data_vars) == list(ds.data_vars) == ["m.v", "w"]


def test_the_reserved_attribute_is_refused() -> None:
    for name in ("safetensors", "burnpack", "ztensor"):
        draft = Draft({}, {ARRANGEMENT_KEY: "mine"}, arrangement=Arrangement())
        with pytest.raises(UnsupportedError, match="is reserved for names of axes"):
            get(name).plan(draft)
