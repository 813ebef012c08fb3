"""``ds.ckpt.plain()``: an object that netCDF and zarr can hold, and that can be restored."""

from __future__ import annotations

import io
import json
import pickle
import warnings
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
import ml_dtypes
import numpy as np
import pytest
import sparse
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

import xckpt
import xckpt.backend  # registers ds.ckpt
from tests.exported import WRITERS, assert_same_values, restored, restored_attrs, same, written
from tests.formats.gptrs_files import GPT, id_bytes, indexed_file, record, tagged
from tests.formats.safetensors_files import entry, safetensors_file
from tests.hostile_names import HOSTILE

if TYPE_CHECKING:
    from pathlib import Path

# Names that netCDF's C library, h5py, zarr, the file system or xarray refuses, changes
# or hides as the name of a variable.
NAMES = [
    *["a/b", "/a", "a/", "a//b", "a/../b", "a\\b", "\\", "a\0b", "a\nb", "a\x7fb", "\udc80"],
    *["", " ", " a", "a ", "%a", "-a", ".a", ".", "..", "+", "~", "e\u0301", "zarr.json"],
    *[".zarray", ".zattrs", "_nc4_non_coord_x", "x" * 256, "é" * 130, "y" * 70_000],
    *["a%2Fb", "_%2Fa", "A", "重み", "🧠.β", *HOSTILE],
]
# The same of attributes; xarray obeys some of them.
ATTRIBUTES = [
    *[*NAMES, "CLASS", "NAME", "REFERENCE_LIST", "DIMENSION_LIST", "_FillValue", "missing_value"],
    *["scale_factor", "add_offset", "dtype", "coordinates", "_Unsigned", "_Encoding", "calendar"],
    *["_ARRAY_DIMENSIONS", "_NCProperties", "_Netcdf4Dimid", "_nc3_strict", "units", "source"],
]
VALUES: list[Any] = [
    *["x", "", "a\0b", "a\0", "\udc80", "é😀", "e\u0301", "true", "[1]", "x" * 100_000],
    *[3, -(2**63), 2**63 - 1, 2**63, 2**70, 1.5, float("nan"), float("-inf"), True, None],
    *[np.float32(1.5), np.float16(1), np.int8(3), np.bool_(1), np.uint64(2**64 - 1)],
    *[[], [1], [1, 2], [1.5, 2.5], [1.5, 2], [1, "a"], ["a"], ["a", "bc"], [True, False]],
    *[[None, 1], [2**63, 1], [[1, 2], [3, 4]], {}, {"a": {"b": [1, None]}}, (1, 2), {"k": b"\0"}],
    *[np.arange(3.0), np.zeros((2, 2)), np.zeros(0), np.ones(1), np.array(2), b"abc", b"\xff\0"],
]


def made_plain(obj: Any) -> tuple[Any, str]:
    """Call it, and give its one warning too, the empty text if it gave none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain = obj.ckpt.plain()
    assert [w.category for w in caught] in ([], [xckpt.CheckpointWarning])
    assert all(w.filename == __file__ for w in caught)
    return plain, "".join(str(w.message) for w in caught)


@pytest.fixture(params=WRITERS)
def writer(request: pytest.FixtureRequest) -> str:
    """A library that writes files for xarray."""
    return str(request.param)


def test_a_checkpoint_of_gpt_rs(tmp_path: Path, writer: str) -> None:
    values = np.arange(4, dtype="<f4")
    path = tmp_path / "model.bin"
    tensor = record("w", values, flag=1, stored_id=id_bytes("w"))
    path.write_bytes(indexed_file([tensor], tagged("gpt", GPT)))
    ds = xr.open_dataset(path, engine="gptrs")
    assert (ds["w"].attrs["requires_grad"], ds.attrs["config"]) == (True, GPT)
    plain, warning = made_plain(ds)
    assert "JSON text: 'requires_grad', 'config'" in warning
    assert json.loads(plain.attrs["config"]) == GPT
    assert plain["w"].attrs["requires_grad"] == "true"
    reopened = written(plain, tmp_path / "m", writer)
    assert json.loads(reopened.attrs["xckpt_json"]) == ["config"]
    assert json.loads(reopened.attrs["config"]) == GPT
    np.testing.assert_array_equal(reopened["w"], values)


# --- names ---------------------------------------------------------------------------------------


def test_names_of_variables(tmp_path: Path, writer: str) -> None:
    ds = xr.Dataset({name: ("x", np.array([at, 0.5])) for at, name in enumerate(NAMES)})
    plain, warning = made_plain(ds)
    assert "variables have other names: 'a/b', '/a'" in warning
    assert list(plain)[:2] == ["a%2Fb_2", "_%2Fa_2"]  # those names are taken
    assert {"a%2Fb", "_%2Fa", "A", "重み", "🧠.β", "_hidden"} <= set(plain)
    assert plain["a%2Fb_2"].attrs == {"xckpt_name": "a/b"}
    reopened = written(plain, tmp_path / "m", writer)
    assert set(reopened.variables) == set(plain.variables)
    again = restored(reopened)
    assert again.variables.keys() == ds.variables.keys()
    for name, variable in ds.variables.items():
        assert_same_values(again.variables[name], variable)


def test_names_of_dimensions_and_coordinates(tmp_path: Path, writer: str) -> None:
    dims = ["a/b", "b/", "c d"]
    coords = {
        "a/b": [1, 2],
        "tall one": ("c d", [1.0, 2.0]),
        "c d": ("c d", [5, 6]),
        "kind/of": ("a/b", ["x", "yy"]),
    }
    ds = xr.Dataset(
        {"w": (dims, np.zeros((2, 3, 2))), "b%2F": (dims[:2], np.zeros((2, 3)))}, coords
    )
    plain, warning = made_plain(ds)
    assert "dimensions have other names: 'a/b', 'b/'" in warning
    assert plain["w"].dims == ("a%2Fb", "b%2F_2", "c d")
    assert plain["a%2Fb"].dims == ("a%2Fb",)
    assert set(plain.coords) == {"a%2Fb", "tall%20one", "c d", "kind%2Fof"}
    reopened = written(plain, tmp_path / "m", writer)
    assert set(reopened.coords) == set(plain.coords)
    again = restored(reopened)
    assert again["w"].dims == tuple(dims)
    assert again["kind/of"].values.tolist() == ["x", "yy"]
    np.testing.assert_array_equal(again["a/b"], [1, 2])


def test_attribute_texts_along_a_stack(tmp_path: Path, writer: str) -> None:
    """Attributes that differ between stacked tensors are coordinates, whatever their text."""
    notes = ["fine", "a\0b", "\udc80", ""]
    layers = {
        f"layers.{n}.w": xr.Variable("x", np.ones(2, "f4"), {"note": note, "trained": n > 1})
        for n, note in enumerate(notes)
    }
    ds = xr.Dataset(layers).ckpt.stack()
    assert ds["layers.w:note"].dims == ("layers",)
    plain, warning = made_plain(ds)
    assert "texts became JSON texts: 'layers.w:note'" in warning
    reopened = written(plain, tmp_path / "m", writer)
    assert set(reopened.coords) == {"layers", "layers.w:note", "layers.w:trained"}
    again = restored(reopened)
    assert again["layers.w:note"].values.tolist() == notes
    assert again["layers.w:trained"].values.tolist() == [False, False, True, True]


def test_a_tree(tmp_path: Path, writer: str) -> None:
    """In an HDF5 file dimensions and groups have their names in common."""
    inner = xr.Dataset({"v ": ("heads", np.arange(2.0)), "t": (("b", "in"), np.ones((2, 3)))})
    tree = xr.DataTree.from_dict(
        {
            "/": xr.Dataset({"w": ("in", np.ones(3))}, attrs={"config": {"a": 1}}),
            "/layers .": xr.Dataset({"x": ("in", np.zeros(3))}, {"in": [1, 2, 3]}),
            "/in/-0": inner.assign_attrs(deep=[None]),
            "/in/-0/b": xr.Dataset({"u": ((), 1.5)}),
        }
    )
    plain, _ = made_plain(tree)
    assert plain["/"].to_dataset()["w"].dims == ("in_",)
    assert set(plain.groups) == {"/", "/layers .", "/in", "/in/_-0", "/in/_-0/b"}
    assert plain["/in/_-0"].attrs["xckpt_name"] == "-0"
    reopened = written(plain, tmp_path / "m", writer)
    assert set(reopened.groups) == set(plain.groups)
    again = restored(reopened["/in/_-0"].to_dataset(inherit=False))
    xr.testing.assert_equal(again, inner)
    assert restored_attrs(reopened["/in/_-0"].attrs)[0] == {"deep": [None]}
    part, _ = made_plain(tree["in"])
    assert set(part.groups) == {"/", "/_-0", "/_-0/b"}
    assert written(part, tmp_path / "p", writer)["/_-0/b/u"] == 1.5


# --- attributes ----------------------------------------------------------------------------------


def test_values_of_attributes(tmp_path: Path, writer: str) -> None:
    attrs = {f"a{at}": value for at, value in enumerate(VALUES)}
    ds = xr.Dataset({"w": ("x", np.zeros(2), attrs)}, attrs=attrs)
    plain, _ = made_plain(ds)
    reopened = written(plain, tmp_path / "m", writer)
    for got in (reopened.attrs, reopened["w"].attrs):
        back, conventions = restored_attrs(got)
        assert conventions == {}
        assert back.keys() == attrs.keys()
        for name, value in attrs.items():
            assert same(back[name], value), value


@pytest.mark.parametrize("value", ["days since 2000-01-01", 3, True])
def test_names_of_attributes(value: Any, tmp_path: Path, writer: str) -> None:
    attrs: dict[Any, Any] = dict.fromkeys([*ATTRIBUTES, 7], value)
    values = np.array([1, 0, 2], np.int8)
    ds = xr.Dataset({"w": ("x", values, attrs), "b": ("x", values != 0, attrs)}, attrs=attrs)
    plain, warning = made_plain(ds)
    assert "attributes have other names: 'a/b'" in warning
    reopened = written(plain, tmp_path / "m", writer)
    for name in ds:
        assert_same_values(reopened[name].variable, ds[name].variable)
        assert same(
            {str(n): v for n, v in restored_attrs(reopened[name].attrs)[0].items()}, _texts(attrs)
        )
    assert same({str(n): v for n, v in restored_attrs(reopened.attrs)[0].items()}, _texts(attrs))


def _texts(attrs: dict[Any, Any]) -> dict[str, Any]:
    return {str(name): value for name, value in attrs.items()}


def test_reserved_attribute_names_are_renamed(tmp_path: Path, writer: str) -> None:
    words = ["xckpt_name", "xckpt_dims", "xckpt_dtype", "xckpt_attrs", "xckpt_json"]
    attrs = {word: [word] for word in words}
    ds = xr.Dataset({"a/b": ("c/d", np.ones(2, "f2"), {**attrs, "attr_xckpt_json": 1})})
    plain, _ = made_plain(ds)
    assert plain["a%2Fb"].attrs["xckpt_name"] == "a/b"
    again = restored(written(plain, tmp_path / "m", writer))
    assert_same_values(again["a/b"].variable, ds["a/b"].variable)
    assert same(again["a/b"].attrs, ds["a/b"].attrs)


def test_units_other_than_times_are_unchanged() -> None:
    plain, warning = made_plain(xr.Dataset({"w": ("x", [1], {"units": "m s-1", "bounds": "w"})}))
    assert plain["w"].attrs == {"units": "m s-1", "bounds": "w"}
    assert warning == ""


def test_values_that_json_lacks_cause_a_warning() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    attrs = {"z": 1 + 2j, "set": {1}, "keys": {1: 2}, "deep": deep, "fine": [None]}
    plain, warning = made_plain(xr.Dataset(attrs=attrs))
    assert "does not have all of their values: 'z', 'set', 'keys'" in warning
    assert "nested too deeply were left out: 'deep'" in warning
    reopened, _ = restored_attrs(plain.attrs)
    assert reopened == {"z": "(1+2j)", "set": "{1}", "keys": {"1": 2}, "fine": [None]}
    while deep:  # the interpreter would take the levels apart one in another
        (deep,) = deep


# --- values --------------------------------------------------------------------------------------

NAN32 = np.array([0x7FC00001, 0x7F800001, 0xFFC12345], "u4").view("f4")
HALVES = np.arange(2**16, dtype="u2")
TYPED = {
    "half": HALVES.view("f2"),
    "brain": HALVES.view(ml_dtypes.bfloat16),
    "e4m3": np.arange(256, dtype="u1").view(ml_dtypes.float8_e4m3fn),
    "e5m2": np.arange(256, dtype="u1").view(ml_dtypes.float8_e5m2),
    "fp4": np.arange(16, dtype="u1").view(ml_dtypes.float4_e2m1fn),
    "c8": np.array([1 + 2j, complex(-0.0, np.nan), complex(np.inf, -0.0)], "c8"),
    "c16": np.array([[1 + 2j], [complex(-0.0, -0.0)]], "c16"),
    "zeros": np.array([complex(-0.0, -0.0)] * 3, "c8"),
    "none": np.zeros((3, 0), "c8"),
    "scalar": np.array(1 - 1j, "c16"),
    "point": np.array(0.5, "f2"),
    "bool": np.array([True, False]),
    "u64": np.array([2**64 - 1, 0], "u8"),
    "nan": NAN32,
    "minus": np.full(4, -0.0),
}


@pytest.mark.parametrize("lazy", [False, True])
def test_element_types(lazy: bool, tmp_path: Path, writer: str) -> None:
    ds = xr.Dataset({name: _variable(name, array, lazy=lazy) for name, array in TYPED.items()})
    plain, warning = made_plain(ds)
    assert "element types became wider ones: 'half', 'brain'" in warning
    assert all((v.chunks is not None) == lazy for v in plain.variables.values() if v.ndim)
    assert plain["half"].attrs == {"xckpt_dtype": "float16"}
    assert (plain["c16"].dims, plain["c16"].dtype) == (("c160", "c161", "complex"), np.float64)
    assert plain["c16"].values[0, 0].tolist() == [1, 2]
    assert plain["u64"].dtype == np.uint64
    reopened = written(plain, tmp_path / "m", writer)
    for name, variable in plain.variables.items():
        assert_same_values(reopened.variables[name], variable)
    for name, array in TYPED.items():
        back = restored(reopened)[name].values
        assert (back.dtype, back.shape) == (array.dtype, array.shape)
        assert back.tobytes() == array.tobytes()


def _variable(name: str, array: np.ndarray, *, lazy: bool) -> xr.Variable:
    dims = tuple(f"{name}{axis}" for axis in range(array.ndim))
    return xr.Variable(dims, da.from_array(array, chunks=100) if lazy else array)


@pytest.mark.parametrize("dtype", ["f4", "f2", "c8", "i4"])
def test_sparse_arrays(dtype: str, tmp_path: Path, writer: str) -> None:
    dense = np.array([[0, 1, 0], [2, 0, 0]], dtype)
    coo = sparse.COO.from_numpy(dense)
    ds = xr.Dataset({"m": (("a", "b"), coo), "l": (("a", "b"), da.from_array(coo, chunks=(1, 3)))})
    plain, warning = made_plain(ds)
    assert "sparse chunks become dense: 'm', 'l'" in warning
    again = restored(written(plain, tmp_path / "m", writer))
    for name in ds:
        np.testing.assert_array_equal(again[name], dense)
        assert again[name].dtype == dense.dtype


def test_tensors_that_cannot_be_read_are_left_out(tmp_path: Path, writer: str) -> None:
    header = {f"l.{n}.w": entry("F6_E2M3", [4], 3 * n, 3 * n + 3) for n in (0, 1)}
    header["v"] = entry("U8", [3], 6, 9)
    ds = xr.open_dataset(safetensors_file(header, bytes(range(9))), engine="safetensors")
    plain, warning = made_plain(ds)
    assert "left out, as they cannot be read: 'l.0.w', 'l.1.w'" in warning
    assert set(made_plain(ds.ckpt.stack())[0].data_vars) == {"v"}
    assert written(plain, tmp_path / "m", writer)["v"].values.tolist() == [6, 7, 8]


def test_the_complex_axis_gets_an_unused_name(tmp_path: Path, writer: str) -> None:
    ds = xr.Dataset({"w": ("complex", np.ones(3, "c8")), "complex_": ((), 1.0)})
    plain, _ = made_plain(ds)
    assert plain["w"].dims == ("complex", "complex_2")
    np.testing.assert_array_equal(restored(written(plain, tmp_path / "m", writer))["w"], ds["w"])


# --- what it costs, and what it leaves alone ------------------------------------------------------


def _raise(_: Any) -> Any:
    raise AssertionError("computed")


def test_nothing_is_computed() -> None:
    lazy = da.ones((4, 4), chunks=2, dtype="f4").map_blocks(
        _raise, dtype="f4", meta=np.ones((0, 0), "f4")
    )
    ds = xr.Dataset({"a/b": (("x", "y"), lazy), "h": (("x", "y"), lazy.astype("f2"))})
    ds["c"] = ds["h"].astype("c8")
    plain, _ = made_plain(ds)
    assert all(dask.is_dask_collection(v.data) for v in plain.variables.values())
    assert plain.variables["c"].chunks == ((2, 2), (2, 2), (2,))
    pickle.loads(pickle.dumps(plain))


def test_supported_values_are_unchanged() -> None:
    attrs = {"note": "x", "n": 3, "range": [0.0, 1.0]}
    ds = xr.Dataset({"w": ("x", np.arange(3.0), attrs)}, {"x": [3, 4, 5]}, {"title": "t"})
    ds["w"].encoding = {"zlib": True, "complevel": 4, "_FillValue": -1.0}
    plain, warning = made_plain(ds)
    assert warning == ""
    xr.testing.assert_identical(plain, ds)
    assert plain["w"].encoding == {**ds["w"].encoding, "fill_value": 0.0}
    assert made_plain(xr.Dataset())[0].identical(xr.Dataset())


def test_plain_objects_stay_unchanged() -> None:
    attrs: dict[Any, Any] = {name: [None] for name in ATTRIBUTES}
    ds = xr.Dataset(
        {"a/b": ("c/d", np.ones(2, "f2"), attrs), "z": ((), np.complex64(1))}, attrs=attrs
    )
    once, _ = made_plain(ds)
    twice, warning = made_plain(once)
    assert warning == ""
    xr.testing.assert_identical(once, twice)


@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
def test_netcdf_3(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    attrs = {"flag": True, "config": {"a": [1, None]}, "names": ["a", "b"], "text": "x"}
    values = np.arange(6, dtype="f4").reshape(2, 3)
    ds = xr.Dataset({"a/b": (("x", "y"), values, attrs), "h": ("x", np.ones(2, "f2"))}, attrs=attrs)
    path = tmp_path / "m.nc"
    ds.ckpt.plain().to_netcdf(path, engine="scipy")
    with xr.open_dataset(path, engine="scipy") as reopened:
        again = restored(reopened.load())
    np.testing.assert_array_equal(again["a/b"], values)
    assert same(again["a/b"].attrs, attrs)
    assert same(again.attrs, attrs)


TEXTS = st.text(st.characters(codec=None), max_size=6)
NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60)
@given(st.dictionaries(TEXTS, NESTED, max_size=4), st.lists(TEXTS, max_size=4, unique=True))
@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
def test_plain_objects_can_be_restored(attrs: dict[str, Any], names: list[str]) -> None:
    ds = xr.Dataset(
        {n: ("x", np.arange(2.0) + at, attrs) for at, n in enumerate(names)}, attrs=attrs
    )
    plain, _ = made_plain(ds)
    file = io.BytesIO()
    plain.to_netcdf(file, engine="h5netcdf")
    file.seek(0)
    with xr.open_dataset(file, engine="h5netcdf") as reopened:
        again = restored(reopened.load())
    assert again.variables.keys() == ds.variables.keys()
    assert same(again.attrs, attrs)
    for name, variable in ds.variables.items():
        assert_same_values(again.variables[name], variable)
        assert same(again.variables[name].attrs, attrs)
