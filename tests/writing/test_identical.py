"""A saved Dataset opens identical, if the format has room for all of it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

import xckpt
from tests.writing.saved import ENGINES
from xckpt import CheckpointWarning, formats

WITH_ROOM: list[tuple[str, dict[str, Any]]] = [
    (engine, options)
    for engine in ENGINES
    if formats.get(engine).can.arrangement
    for options in ([{"version": "1.0"}, {"version": "2"}] if engine == "ztensor" else [{}])
]
with_room = pytest.mark.parametrize(
    ("engine", "options"), WITH_ROOM, ids=["".join((e, *o.values())) for e, o in WITH_ROOM]
)

NAMES = st.text("abxyz é_.:1", min_size=1, max_size=4)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('ab é"\\', max_size=4)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)
ATTRS = st.dictionaries(NAMES, VALUES, max_size=2)
TYPES = ["f2", "f4", "f8", "i4", "i8", "u1", "?"]
# Names of dimensions, also such as xarray and we give to axes without one.
DIMS = st.dictionaries(
    NAMES | st.sampled_from(["dim_0", "d2", "d3_1"]), st.integers(0, 3), max_size=3
)


@st.composite
def datasets(draw: st.DrawFn) -> xr.Dataset:
    sizes = draw(DIMS)

    def variable(dims: list[str], types: list[str]) -> xr.Variable:
        shape = [sizes[dim] for dim in dims]
        values = (
            np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(draw(st.sampled_from(types)))
        )
        return xr.Variable(dims, values, draw(ATTRS))

    chosen = st.lists(st.sampled_from(sorted(sizes)), unique=True) if sizes else st.just([])
    names = draw(st.lists(NAMES.filter(lambda name: name not in sizes), unique=True, max_size=5))
    variables = {name: variable(draw(chosen), TYPES) for name in names}
    indexes = [dim for dim in sizes if draw(st.booleans())]
    coords = {dim: variable([dim], TYPES[1:]) for dim in indexes}
    ds = xr.Dataset(variables, coords, draw(ATTRS))
    return ds.set_coords([name for name in names if draw(st.booleans())])


def without_own(reopened: xr.Dataset, saved: xr.Dataset) -> xr.Dataset:
    """Drop the attributes that a format gives every file."""
    reopened = reopened.copy()
    reopened.attrs = {name: reopened.attrs[name] for name in saved.attrs}
    for name, variable in reopened.variables.items():
        for attribute in {"rank"} - saved.variables[name].attrs.keys():
            variable.attrs.pop(attribute, None)
    return reopened


def assert_the_same(reopened: xr.Dataset, saved: xr.Dataset) -> None:
    xr.testing.assert_identical(without_own(reopened, saved), saved)
    assert list(reopened.data_vars) == list(saved.data_vars)
    assert set(reopened.xindexes) == set(saved.xindexes)
    for name, variable in saved.variables.items():
        expected = {np.dtype("f4"), variable.dtype} if variable.dtype == "f2" else {variable.dtype}
        assert reopened.variables[name].dtype in expected


@with_room
@pytest.mark.filterwarnings("ignore:.*it has no tensors")
@settings(max_examples=8)
@given(ds=datasets())
def test_any_dataset_is_restored(engine: str, options: dict[str, Any], ds: xr.Dataset) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, again = Path(folder) / "m", Path(folder) / "again"
        xckpt.save(ds, path, engine, **options)
        reopened = xr.open_dataset(path, engine=engine)
        assert_the_same(reopened, ds)
        for opened in (reopened, reopened.load()):
            xckpt.save(opened, again, engine, overwrite=True, **options)
            assert again.read_bytes() == path.read_bytes()


def model() -> xr.Dataset:
    """Return a Dataset with coordinates, attributes and many types."""
    return xr.Dataset(
        {
            "w": (("y", "x"), np.arange(6.0).reshape(2, 3), {"units": "m", "of": {"a": [1, None]}}),
            "b": ("x", np.arange(3, dtype="f4")),
            "a": ("d9", np.arange(4)),
        },
        {
            "x": [10, 20, 30],
            "y": ("y", [0.5, 1.5], {"long_name": "Y"}),
            "step": 7,
            "lat": (("y", "x"), np.ones((2, 3))),
        },
        {"title": "T", "config": {"n": [1, {"m": 2.5}]}},
    )


@with_room
class TestOptions:
    """Options of opening."""

    @pytest.fixture
    def path(self, engine: str, options: dict[str, Any], tmp_path: Path) -> Path:
        path = tmp_path / f"m{formats.get(engine).suffixes[0]}"
        xckpt.save(model(), path, engine, **options)
        return path

    def test_coordinates_select(self, path: Path) -> None:
        ds = xr.open_dataset(path)
        assert ds["w"].sel(x=20, y=1.5).values == 4
        assert ds["w"].chunks is not None
        assert ds["lat"].chunks is not None

    def test_drop_variables(self, path: Path) -> None:
        ds = xr.open_dataset(path, drop_variables=["x", "step"])
        assert_the_same(ds, model().drop_vars(["x", "step"]))

    def test_tensors(self, path: Path) -> None:
        ds = xr.open_dataset(path, tensors=["w", "y"])
        assert_the_same(ds, model()[["w"]].drop_vars(["x", "lat", "step"]))

    def test_dims_of_the_caller_win(self, path: Path) -> None:
        ds = xr.open_dataset(path, dims={"w": ("out", "in")})
        assert ds["w"].dims == ("out", "in")
        assert set(ds["w"].coords) == {"step"}
        ds = xr.open_dataset(path, dims={"x": ("time",)})
        assert ds["x"].dims == ("time",)
        assert "x" not in {*ds.dims, *ds.xindexes}
        assert "x" in ds.coords

    def test_stored_types(self, path: Path) -> None:
        assert_the_same(xr.open_dataset(path, decode=False), model())

    def test_a_part_of_a_restored_dataset(
        self, path: Path, engine: str, options: dict[str, Any]
    ) -> None:
        new, selection = path.with_name(f"part{path.suffix}"), {"x": slice(1, 3), "y": 0}
        xckpt.save(xr.open_dataset(path).isel(selection)[["w"]], new, engine, **options)
        assert_the_same(xr.open_dataset(new), model().isel(selection)[["w"]])

    def test_a_conversion_keeps_the_arrangement(self, path: Path) -> None:
        for number, (engine, options) in enumerate(WITH_ROOM):
            new = path.with_name(f"{number}{formats.get(engine).suffixes[0]}")
            xckpt.convert(path, new, engine, **options)
            ds = xr.open_dataset(new)
            xr.testing.assert_equal(ds, model())
            assert ds["w"].attrs.items() >= model()["w"].attrs.items()
            assert ds.attrs["config"] == model().attrs["config"]

    @pytest.mark.filterwarnings("ignore:.*files disagree on the attributes")
    def test_a_file_of_a_set_is_restored(
        self, path: Path, engine: str, options: dict[str, Any], tmp_path: Path
    ) -> None:
        more = xr.Dataset({"z": ("x", np.ones(3, "f4"))})
        xckpt.save(more, tmp_path / "more", engine, **options)
        both: Any = [path, tmp_path / "more"]
        ds = xr.open_dataset(both, engine=engine)
        xr.testing.assert_equal(ds, model().merge(more))

    def test_trees_are_restored(self, path: Path, engine: str, options: dict[str, Any]) -> None:
        nodes = {
            "/": model(),
            "/m": xr.Dataset({"v": ("x", np.ones(3))}, attrs={"kind": "attention"}),
            "/m/b": xr.Dataset({"q": ("z", np.ones(2))}, {"z": [1, 2], "lat": 3}),
            "/none": xr.Dataset(),
            "/none/deeper": xr.Dataset(),
        }
        tree = xr.DataTree.from_dict(nodes)
        xckpt.save(tree, path, engine, overwrite=True, **options)
        reopened = xr.open_datatree(path)
        assert [node.path for node in reopened.subtree] == [node.path for node in tree.subtree]
        for node in tree.subtree:
            assert_the_same(reopened[node.path].to_dataset(), node.to_dataset())
        before = path.read_bytes()
        xckpt.save(reopened, path, engine, overwrite=True, **options)
        assert path.read_bytes() == before


@with_room
def test_an_array_of_several_axes_named_like_one(
    engine: str, options: dict[str, Any], tmp_path: Path
) -> None:
    ds = xr.Dataset({"x": (("t", "x"), np.ones((2, 3))), "v": ("x", np.ones(3))})
    xckpt.save(ds, tmp_path / "m", engine, **options)
    assert_the_same(xr.open_dataset(tmp_path / "m", engine=engine), ds)


def test_other_programs_see_tensors(tmp_path: Path) -> None:
    saved = model()
    xckpt.save(saved, tmp_path / "m.safetensors")
    reopened = pytest.importorskip("safetensors.numpy").load_file(tmp_path / "m.safetensors")
    xckpt.save(saved, tmp_path / "m.zt", version="2")
    numpy_io = pytest.importorskip("ztensor.numpy")
    for tensors in (reopened, numpy_io.load_file(str(tmp_path / "m.zt"))):
        assert set(tensors) == set(saved.variables)
        for name, variable in saved.variables.items():
            np.testing.assert_array_equal(tensors[name].reshape(variable.shape), variable.values)


@with_room
def test_plain_datasets_need_no_extra_attributes(
    engine: str, options: dict[str, Any], tmp_path: Path
) -> None:
    ds = xr.Dataset({"a": ("d3", np.ones(3)), "b": (("d2", "d3"), np.ones((2, 3)))})
    xckpt.save(ds, tmp_path / "m", engine, **options)
    assert b"xckpt." not in (tmp_path / "m").read_bytes()


@pytest.mark.parametrize("engine", [e for e in ENGINES if not formats.get(e).can.arrangement])
def test_losses_cause_a_warning(engine: str, tmp_path: Path) -> None:
    ds = xr.Dataset({"w": ("x", np.ones(2, "f4"))}, {"x": np.ones(2, "f4")})
    with pytest.warns(CheckpointWarning, match="coordinates that open as data variables: 'x'"):
        xckpt.save(ds, tmp_path / "m", engine)
    assert set(xr.open_dataset(tmp_path / "m", engine=engine).data_vars) == {"w", "x"}


@pytest.mark.parametrize(
    ("engine", "options"),
    [pair for pair in WITH_ROOM if formats.get(pair[0]).can.tensor_attrs is not None],
)
def test_attributes_that_json_lacks_cause_a_warning(
    engine: str, options: dict[str, Any], tmp_path: Path
) -> None:
    ds = xr.Dataset({"w": ("x", np.ones(2), {"raw": b"\0", "deep": deep(40), "ok": (1, 2)})})
    with pytest.warns(CheckpointWarning, match="attributes of tensors without.*: 'raw', 'deep'$"):
        xckpt.save(ds, tmp_path / "m", engine, **options)
    assert xr.open_dataset(tmp_path / "m", engine=engine)["w"].attrs["ok"] == [1, 2]


def deep(levels: int) -> Any:
    return json.loads("[" * levels + "]" * levels)
