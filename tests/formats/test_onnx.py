"""ONNX models: axes from operators, external data that lead astray, odd encodings."""

from __future__ import annotations

import json
import os
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.contracts.every import declared
from tests.formats.onnx_files import field, initializer, model, node, varint
from tests.sources import CountingSource
from tests.storage.web_server import WebServer
from xckpt import formats
from xckpt.elements import stored_dtype
from xckpt.errors import UnreadableWarning
from xckpt.structure.dims import axes_of

if TYPE_CHECKING:
    from pathlib import Path

    from xckpt.index import Index

ROWS = np.arange(4096 * 64, dtype="f4").reshape(4096, 64)


def read(data: bytes, **options: Any) -> Index:
    return formats.get("onnx").read(CountingSource(data, "m.onnx"), **options)


@pytest.mark.parametrize("stem", ["conv", "linear", "recurrent", "transformer"])
def test_axes_are_named_by_operators(stem: str, golden: Path) -> None:
    path = golden / "onnx" / f"{stem}.onnx"
    expected = json.loads(path.with_suffix(".expected.json").read_text("utf-8"))["tensors"]
    dims = {tensor["name"]: tuple(tensor["dims"]) for tensor in expected if "dims" in tensor}
    index = xckpt.read_index(path)
    assert {name: axes_of(index)[name] for name in dims} == dims


def test_users_that_disagree_name_no_axes() -> None:
    nodes = (node("MatMul", ["x", "w"], ["y"]), node("Gather", ["w", "i"], ["z"]))
    assert axes_of(read(model(initializer("w", ROWS), nodes=nodes)))["w"] == ("in", "out")
    nodes = (node("MatMul", ["x", "w"], ["y"]), node("MatMul", ["w", "x"], ["z"]))
    index = read(model(initializer("w", ROWS), nodes=nodes))
    assert not axes_of(index)
    assert index["w"].attrs["used_by"] == "y: MatMul[1]"


@pytest.mark.parametrize("stem", ["wire_order", "wire_unknown"])
def test_fields_in_any_order(stem: str, golden: Path) -> None:
    path = golden / "onnx" / f"{stem}.onnx"
    expected = declared("onnx").expected(path)
    ds = xckpt.open(path)
    assert ds.encoding["format"] == "onnx"
    for name, want in expected.tensors.items():
        np.testing.assert_array_equal(ds[name].values, want.values)


def test_constants_are_optional() -> None:
    constant = field(1, "value") + field(5, initializer("", ROWS[:2]))
    data = model(initializer("w", ROWS[:1]), nodes=(node("Constant", [], ["k"], constant),))
    assert list(read(data)) == ["k", "w"]
    assert list(read(data, constants=False)) == ["w"]


def test_over_http_a_row_reads_only_its_bytes() -> None:
    pytest.importorskip("obstore", reason="needs obstore: pip install 'xckpt[remote]'")
    outside = initializer("b", ROWS, location="w.bin", offset="16", length=str(ROWS.nbytes))
    files = {"m.onnx": model(initializer("a", ROWS), outside), "w.bin": bytes(16) + ROWS.tobytes()}
    with WebServer(**files) as web:
        ds = xr.open_dataset(f"{web.url}/m.onnx", engine="onnx")
        for name in ("a", "b"):
            web.forget()
            np.testing.assert_array_equal(ds[name][2000].values, ROWS[2000])
            assert web.nbytes_sent == ROWS[0].nbytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a model, next to a file that is none of its business."""
    (tmp_path / "secret").write_bytes(bytes(16))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "w.bin").write_bytes(ROWS.tobytes())
    return folder


LOCATIONS = ["../secret", "/etc/hosts", "a/../../secret", "w.bin\0", "", ".", "..\\secret", "C:x"]


@pytest.mark.parametrize("location", [*LOCATIONS, "file:///etc/hosts", "m.onnx", "*", "absent"])
def test_locations_outside_are_refused(location: str, folder: Path) -> None:
    values = ROWS[0, :4]
    data = model(initializer("w", values, location=location), initializer("b", values))
    (folder / "m.onnx").write_bytes(data)
    with pytest.warns(UnreadableWarning, match="'w'"):
        ds = xckpt.open(folder / "m.onnx")
    np.testing.assert_array_equal(ds["b"].values, values)
    with pytest.raises(xckpt.CheckpointError) as caught:
        ds["w"].values  # noqa: B018
    assert caught.value.tensor == "w"
    assert isinstance(caught.value, xckpt.MissingShardError) == (location == "absent")


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs symbolic links")
def test_links_out_of_the_folder_are_refused_unless_the_model_is_one(folder: Path) -> None:
    values = np.zeros(4, "f4")
    (folder / "m.onnx").write_bytes(model(initializer("w", values, location="d/link", length="16")))
    (folder / "d").mkdir()
    (folder / "d" / "link").symlink_to(folder.parent / "secret")
    with pytest.warns(UnreadableWarning, match="leads out of the folder"):
        ds = xckpt.open(folder / "m.onnx")
    with pytest.raises(xckpt.FormatError, match="leads out of the folder"):
        ds["w"].values  # noqa: B018
    # As in the cache of Hugging Face.
    (folder / "m.onnx").rename(folder.parent / "blob")
    (folder / "m.onnx").symlink_to(folder.parent / "blob")
    np.testing.assert_array_equal(xckpt.open(folder / "m.onnx")["w"].values, values)


def test_a_link_within_the_folder_is_followed(folder: Path) -> None:
    (folder / "link").symlink_to("w.bin")
    data = model(initializer("w", ROWS, location="./link", length=str(ROWS.nbytes)))
    (folder / "m.onnx").write_bytes(data)
    np.testing.assert_array_equal(xckpt.open(folder / "m.onnx")["w"][3].values, ROWS[3])


@pytest.mark.parametrize("entry", ["+8", "1_0", " 8", "\uff18", "-8", "9" * 30, "1e3", "8.0"])
def test_offsets_are_plain_digits(entry: str, folder: Path) -> None:
    data = model(initializer("w", ROWS[0], location="w.bin", offset=entry))
    (folder / "m.onnx").write_bytes(data)
    with pytest.raises(xckpt.FormatError, match=r"offset and length|before the end of its data"):
        xckpt.open(folder / "m.onnx", missing="raise")


def test_a_length_that_is_missing_takes_the_shape_with_a_warning(folder: Path) -> None:
    (folder / "m.onnx").write_bytes(model(initializer("w", ROWS[:2], location="w.bin")))
    with pytest.warns(xckpt.CheckpointWarning, match="without a length"):
        ds = xckpt.open(folder / "m.onnx")
    np.testing.assert_array_equal(ds["w"].values, ROWS[:2])


# Element types, ids, and the field for values that are not raw.
TYPED = {
    "float32": (1, 4),
    "float64": (11, 10),
    "complex64": (14, 4),
    "int32": (6, 5),
    "int8": (3, 5),
    "uint16": (4, 5),
    "bool": (9, 5),
    "float16": (10, 5),
    "bfloat16": (16, 5),
    "float8_e4m3fn": (17, 5),
    "int64": (7, 7),
    "uint64": (13, 11),
    "uint32": (12, 11),
}


def numbers_of(values: Any) -> list[int]:
    """Return the numbers of a field: integers, or the bits of small floats."""
    if values.dtype.kind in "iub":
        return [int(value) for value in values.ravel()]
    return [int(bits) for bits in values.ravel().view(f"u{values.dtype.itemsize}")]


def typed(name: str, values: Any, packing: str) -> bytes:
    """Return a tensor with its values in a typed field."""
    type_id, number = TYPED[values.dtype.name]
    head = b"".join([field(1, extent) for extent in values.shape])
    head += field(2, type_id) + field(8, name)
    if number in {4, 10}:
        width = 4 if number == 4 else 8
        data = values.tobytes()
        tag = varint(number << 3 | (5 if width == 4 else 1))
        items = [data[at : at + width] for at in range(0, len(data), width)]
    else:
        tag, items = varint(number << 3), [varint(item) for item in numbers_of(values)]
    if packing == "packed":
        return head + field(number, b"".join(items))
    if packing == "in two":
        return head + field(number, b"".join(items[:7])) + field(number, b"".join(items[7:]))
    return head + b"".join([tag + item for item in items])


@pytest.mark.parametrize(
    ("packing", "dtype", "count"),
    [
        *[(p, dtype, 12) for p in ("packed", "in two", "unpacked") for dtype in TYPED],
        *[("packed", dtype, 70_000) for dtype in TYPED],
        *[(p, d, 20_000) for p in ("in two", "unpacked") for d in ("float32", "int64")],
    ],
)
def test_typed_fields_of_any_size_have_their_values(
    dtype: str, packing: str, count: int, tmp_path: Path
) -> None:
    values = np.random.default_rng(0).integers(-100, 100, (count // 2, 2))
    values = values.astype(stored_dtype(dtype))
    data = model(initializer("w", ROWS[:1]), typed("n", values, packing))
    ds = xckpt.open(data, decode=False)
    assert ds["n"].dtype == values.dtype
    assert ds["n"].values.tobytes() == values.tobytes()
    assert ds["n"][count // 4].values.tobytes() == values[count // 4].tobytes()
    assert xckpt.verify(data).ok
    (tmp_path / "m.onnx").write_bytes(data)
    xckpt.convert(tmp_path / "m.onnx", tmp_path / "m.npz")
    assert xckpt.open(tmp_path / "m.npz", decode=False)["n"].values.ravel()[-1] == values[-1, -1]


def test_large_packed_numbers_are_read_on_demand() -> None:
    values = np.arange(1 << 20, dtype="i8").reshape(1024, 1024)
    source = CountingSource(model(typed("n", values, "packed")), "m.onnx")
    index = formats.get("onnx").read(source)
    assert index["n"].problem is None
    assert source.nbytes_read < 100_000
    floats = CountingSource(model(typed("x", ROWS, "packed")), "m.onnx")
    part = formats.get("onnx").read(floats)["x"].parts["data"]
    assert (part.encoding, part.inline, part.nbytes) == (None, None, ROWS.nbytes)


@pytest.mark.parametrize("change", ["one more", "one less", "cut", "too long", "too short"])
def test_packed_numbers_that_do_not_fit_their_shape(change: str) -> None:
    values = np.arange(80_000, dtype="i8") << 20
    data = b"".join(map(varint, numbers_of(values)))
    data = {
        "one more": data + b"\1",
        "one less": data[:-4],
        "cut": data[:-1],
        "too long": data[:-4] + b"\x80" * 11 + b"\1",
        "too short": data[:1000] + b"\1" * 69_000,
    }[change]
    numbers = field(1, len(values)) + field(2, 7) + field(8, "n") + field(7, data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnreadableWarning)  # of a field with too few bytes
        ds = xckpt.open(model(initializer("w", ROWS[:1]), numbers))
    np.testing.assert_array_equal(ds["w"].values, ROWS[:1])
    with pytest.raises(xckpt.FormatError) as caught:
        ds["n"].values  # noqa: B018
    assert caught.value.tensor == "n"


def test_numbers_in_many_places_are_decoded_up_to_a_limit() -> None:
    half = field(10, bytes(1 << 24))
    numbers = field(1, 1 << 22) + field(2, 11) + field(8, "n") + half + half + field(10, bytes(8))
    index = read(model(initializer("w", ROWS[:1]), numbers))
    assert isinstance(index["n"].problem, xckpt.UnsupportedError)
    assert "Save the model again" in str(index["n"].problem)
    assert index["w"].problem is None


def test_a_number_with_another_wire_type_is_an_unknown_field() -> None:
    values = np.arange(3, dtype="i4")
    odd = varint(5 << 3 | 5) + b"\1\2\3\4"
    index = read(model(typed("n", values, "unpacked") + odd))
    assert index["n"].problem is None


def test_rows_of_indices_need_axes() -> None:
    # One value of a sparse tensor without axes, whose indices have no columns.
    values, indices = initializer("w", np.ones(1, "f4")), initializer("", np.zeros((1, 0), "i8"))
    sparse = field(1, values) + field(2, indices)
    index = read(field(1, 10) + field(7, field(15, sparse)))
    assert index["w"].problem is not None
    assert index["w"].problem.rule == "Indices"


def test_a_model_is_converted_with_its_values(golden: Path, tmp_path: Path) -> None:
    path = golden / "onnx" / "native_fields.onnx"
    xckpt.convert(path, tmp_path / "m.npz")
    source, converted = xckpt.open(path), xckpt.open(tmp_path / "m.npz")
    for name in source.variables:
        np.testing.assert_array_equal(source[name].values, converted[name].values)
    assert xckpt.verify(path).ok


class TestMissingData:
    """A model whose data were renamed with it, or are gone."""

    def model(self, folder: Path, *others: str, size: int = 32) -> Path:
        external = [
            initializer(name, np.ones(4, "f4"), location="original.onnx_data", offset=offset)
            for name, offset in (("v", "0"), ("w", "16"))
        ]
        path = folder / "renamed.onnx"
        path.write_bytes(model(initializer("b", np.ones(2, "f4")), *external))
        for name in others:
            (folder / name).write_bytes(bytes(size))
        return path

    def test_one_warning_names_the_file(self, tmp_path: Path) -> None:
        with pytest.warns(xckpt.CheckpointWarning, match="'original.onnx_data'") as caught:
            ds = xckpt.open(self.model(tmp_path))
        assert len(caught) == 1
        assert "('v', 'w')" in str(caught[0].message)
        assert ds["b"].values.tolist() == [1, 1]
        with pytest.raises(xckpt.MissingShardError, match="original") as error:
            ds["w"].values  # noqa: B018
        assert error.value.hint == "Put it next to the model"

    @pytest.mark.parametrize("name", ["renamed.onnx_data", "renamed.onnx.data"])
    def test_data_that_were_renamed_with_the_model(self, name: str, tmp_path: Path) -> None:
        path = self.model(tmp_path, name)
        with pytest.warns(xckpt.CheckpointWarning, match=f"'{name}' is there"):
            ds = xckpt.open(path)
        with pytest.raises(xckpt.MissingShardError) as caught:
            ds["w"].values  # noqa: B018
        assert "rename it to 'original.onnx_data'" in str(caught.value.hint)

    def test_a_file_that_is_too_small_is_another_one(self, tmp_path: Path) -> None:
        path = self.model(tmp_path, "renamed.onnx_data", size=8)
        with pytest.warns(xckpt.CheckpointWarning) as caught:
            xckpt.open(path)
        assert "renamed" not in str(caught[0].message).rpartition(path.name)[2]
