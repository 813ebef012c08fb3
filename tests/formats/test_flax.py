"""Files of Flax: paths, pieces, narrow elements, names of axes, and indexes of shards."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.conftest import golden_files
from tests.formats.flax_files import CHUNKED, array, chunked, extension, flax_file
from tests.sources import CountingSource
from tests.storage.web_server import WebServer
from xckpt import formats
from xckpt.structure.dims import axes_of

if TYPE_CHECKING:
    from pathlib import Path

    from xckpt.index import Index

LAST = extension(1, [1], "int4", b"\x08")
ROWS = np.arange(4096 * 64, dtype="f4").reshape(4096, 64)


def read(tree: Any) -> Index:
    return formats.get("flax").read(CountingSource(flax_file(tree)))


@pytest.mark.parametrize("path", golden_files("flax/model_*.msgpack"), ids=lambda path: path.stem)
def test_axes_are_named_as_the_modules_use_them(path: Path) -> None:
    _check_axes(path)


@pytest.mark.parametrize("stem", ["nnx_int_keys", "scanned_layers"])
def test_axes_of_lists_and_repeated_layers(stem: str, golden: Path) -> None:
    _check_axes(golden / "flax" / f"{stem}.msgpack")


def _check_axes(path: Path) -> None:
    index = xckpt.read_index(path)
    expected = json.loads(path.with_suffix(".expected.json").read_text("utf-8"))["tensors"]
    dims = {tensor["name"]: tuple(tensor["dims"]) for tensor in expected if "dims" in tensor}
    assert {name: axes_of(index)[name] for name in dims} == dims


def test_a_state_with_an_axis_of_devices_has_no_names() -> None:
    tree = {"step": array(np.zeros(2, "i4")), "fc": {"kernel": array(np.zeros((2, 3), "f4"))}}
    assert not axes_of(read(tree))
    del tree["step"]
    assert axes_of(read(tree))["fc/kernel"] == ("in", "out")


def test_a_row_of_pieces_is_read_alone() -> None:
    """Pieces begin anywhere in a row; a row of two pieces is two reads."""
    data = flax_file({"w": chunked(ROWS, 1000)})
    source = CountingSource(data, "m.msgpack")
    index = formats.get("flax").read(source)
    assert index["w"].shape == ROWS.shape
    ds = xr.open_dataset(data, engine="flax")
    for key in (15, slice(3, 90), (slice(None), 7)):
        np.testing.assert_array_equal(ds["w"][key].values, ROWS[key])


def test_over_http_a_row_reads_only_its_bytes() -> None:
    pytest.importorskip("obstore", reason="needs obstore: pip install 'xckpt[remote]'")
    files = {"m.msgpack": flax_file({"a": {"w": array(ROWS)}, "c": chunked(ROWS, 1 << 16)})}
    with WebServer(**files) as web:
        ds = xr.open_dataset(f"{web.url}/m.msgpack")
        for name in ("a/w", "c"):
            web.forget()
            np.testing.assert_array_equal(ds[name][2000].values, ROWS[2000])
            assert web.nbytes_sent == ROWS[0].nbytes


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_narrow_elements_are_converted_by_value(suffix: str, tmp_path: Path) -> None:
    """Each has a byte, whose upper bits mean nothing."""
    tree = {
        "int4": array(np.array([[0x08, 0xF7], [0x1F, 0x00], [0x07, 0xFF]], "u1"), "int4"),
        "float4": array(np.array([0x01, 0xF9, 0x0F, 0], "u1"), "float4_e2m1fn"),
        "chunked": {
            CHUNKED: True,
            "shape": {"0": 2, "1": 2},
            "chunks": {"0": array(np.array([1, 2, 15], "u1"), "int4"), "1": LAST},
        },
    }
    path, converted = tmp_path / "m.msgpack", tmp_path / f"m.{suffix}"
    path.write_bytes(flax_file(tree))
    values = {
        "int4": [[-8, 7], [-1, 0], [7, -1]],
        "float4": [0.5, -0.5, -6.0, 0],
        "chunked": [[1, 2], [-1, -8]],
    }
    xckpt.convert(path, converted)
    for file in (path, converted):
        ds = xckpt.open(file)
        assert {name: ds[name].values.tolist() for name in values} == values
        assert ds["int4"].dtype == np.int8
    assert xckpt.verify(path).ok
    statistics = xckpt.stats(path)
    assert statistics["int4"].sel(statistic="min") == -8
    assert not [status for status in _statuses(path, converted) if status != 0]
    assert xckpt.open(path)["int4"][1:, 0].values.tolist() == [-1, 7]


def _statuses(a: Path, b: Path) -> list[float]:
    compared = xckpt.compare(a, b)
    return [float(v.sel(statistic="status")) for v in compared.data_vars.values()]


def test_paths_that_join_to_one_name_are_refused() -> None:
    w = array(np.zeros(2, "f4"))
    for tree in ({"a/b": w, "a": {"b": w}}, {"a/b": w, "a": {"b": 3}}, {1: w, "1": w}):
        with pytest.raises(xckpt.FormatError, match=r"a/b|'1'"):
            read(tree)


def test_names_that_repeat_long_keys_are_bounded() -> None:
    tree = {"k" * 60_000: {str(number): number for number in range(1000)}}
    with pytest.raises(xckpt.UnsupportedError, match="all names together"):
        read(tree)


def test_attributes_are_bounded() -> None:
    index = read({"list": list(range(20_000)), "note": "x" * 70_000, "w": array(np.zeros(1))})
    assert len(index.attrs) == 10_000
    assert list(index) == ["w"]
    assert len(index.warnings) == 2


BAD_INDEXES = {
    "index_climbs": "climbs|relative|outside|folder",
    "index_itself": "index_itself",
}


@pytest.mark.parametrize("stem", BAD_INDEXES)
def test_an_index_that_leads_astray_is_refused(stem: str, golden: Path) -> None:
    path = golden / "flax" / "bad" / f"{stem}.msgpack.index.json"
    with pytest.raises(xckpt.CheckpointError, match=BAD_INDEXES[stem]) as caught:
        xckpt.open(path)
    assert str(golden) in str(caught.value)


def test_a_tensor_in_another_file_than_listed_leaves_the_others(golden: Path) -> None:
    path = golden / "flax" / "bad" / "index_wrong_file.msgpack.index.json"
    with pytest.warns(xckpt.CheckpointWarning, match=r"'w'.*lacks it.*00001-of-00002.*has it"):
        ds = xckpt.open(path)
    assert ds["ok"].size
    with pytest.raises(xckpt.FormatError, match="lacks it"):
        ds["w"].compute()


def test_a_missing_shard_leaves_the_others(golden: Path) -> None:
    path = golden / "flax" / "bad" / "index_missing_file.msgpack.index.json"
    with pytest.warns(xckpt.CheckpointWarning, match="missing"):
        ds = xckpt.open(path)
    with pytest.raises(xckpt.MissingShardError):
        ds["w"].values  # noqa: B018


def test_a_pointer_of_git_lfs_is_named(golden: Path) -> None:
    with pytest.raises(xckpt.FormatError, match="Git LFS"):
        xckpt.open(golden / "flax" / "bad" / "lfs_pointer.msgpack")
    with pytest.raises(xckpt.FormatError, match="web page"):
        xckpt.open(golden / "flax" / "bad" / "html.msgpack", engine="flax")


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize(
    "dtype",
    [
        *("bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
        *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float6_e2m3fn", "float6_e3m2fn"),
        *("float4_e2m1fn", "int4", "int2", "int1", "uint4", "uint2", "uint1"),
    ],
)
def test_every_type_of_ml_dtypes_has_its_values(dtype: str, pieces: bool, tmp_path: Path) -> None:
    numbers = np.array([[0, 1, 0.5], [-1, 1.5, 1]], "f4").astype(getattr(ml_dtypes, dtype))
    path = tmp_path / "m.msgpack"
    path.write_bytes(flax_file({"w": chunked(numbers, 4) if pieces else array(numbers)}))
    decoded, stored = xckpt.open(path)["w"], xckpt.open(path, decode=False)["w"]
    assert str(stored.dtype) == dtype
    assert stored.values.tobytes() == numbers.tobytes()
    np.testing.assert_array_equal(decoded.values, numbers.astype(decoded.dtype))
    np.testing.assert_array_equal(decoded[1, 1:].values, numbers[1, 1:].astype(decoded.dtype))
    xckpt.convert(path, tmp_path / "m.npz")
    np.testing.assert_array_equal(xckpt.open(tmp_path / "m.npz")["w"].values, decoded.values)


@pytest.mark.parametrize("dtype", ["<U4", "datetime64[D]", "float128", "float7_e1m5", ""])
def test_unsupported_types_are_problems_of_their_tensor_whole_and_in_pieces(dtype: str) -> None:
    piece = extension(1, [2], dtype, bytes(16))
    parts = {"shape": {"0": 2, "1": 2}, "chunks": {"0": piece, "1": piece}}
    index = read({"whole": piece, "pieces": {CHUNKED: True} | parts, "w": array(ROWS[0])})
    assert index["w"].problem is None
    for name, shape in (("whole", (2,)), ("pieces", (2, 2))):
        problem = index[name].problem
        assert isinstance(problem, xckpt.UnsupportedError)
        assert repr(dtype) in str(problem)
        assert problem.tensor == name
        assert (index[name].dtype, index[name].shape) == (dtype, shape)
