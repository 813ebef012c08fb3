"""Files of Keras and h5py: names, axes, shards, filters, and the files that need h5py."""

from __future__ import annotations

import io
import json
import sys
import zlib
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.conftest import golden_files
from tests.contracts.keras import archive, hdf5
from tests.storage.web_server import assert_row_is_one_request
from xckpt.structure.dims import axes_of

if TYPE_CHECKING:
    from pathlib import Path

W = np.arange(24, dtype="f4").reshape(4, 6)
B = np.ones(6, "f4")


@pytest.mark.parametrize("path", golden_files("keras/*.expected.json"), ids=lambda p: p.name)
def test_axes_and_byte_ranges_of_golden_files(path: Path) -> None:
    document = json.loads(path.read_text("utf-8"))
    index = xckpt.read_index(path.parent / document["file"])
    for expected in document["tensors"]:
        tensor = index[expected["name"]]
        assert (tensor.dtype, list(tensor.shape)) == (expected["dtype"], expected["shape"])
        assert list(tensor.path or ()) == expected["path"]
        if "dims" in expected:
            assert list(axes_of(index).get(tensor.name, ())) == expected["dims"]
        part = tensor.parts.get("data")
        if "offset" in expected and part is not None and part.encoding is None:
            assert (part.offset, part.nbytes) == (expected["offset"], expected["nbytes"])
        for chunk in expected.get("stored_chunks", ()):
            stored = [(p.origin, p.offset) for p in tensor.parts.values()]
            assert (tuple(chunk["origin"]), chunk["offset"]) in stored


def test_variables_have_the_names_of_their_layers(tmp_path: Path) -> None:
    path = tmp_path / "m.keras"
    path.write_bytes(archive(hdf5({"layers/dense/vars/0": W, "layers/dense/vars/1": B})))
    ds = xckpt.open(path)
    kernel, bias = ds["layers/dense/vars/0"], ds["layers/dense/vars/1"]
    assert kernel.dims == ("in", "out")
    assert kernel.attrs == {"layer": "first", "variable": "kernel"}
    assert (bias.dims, bias.attrs["variable"]) == (("out",), "bias")
    assert ds.attrs["keras_version"] == "3.15.1"
    assert ds.attrs["config"]["class_name"] == "M"


def test_the_scale_of_a_quantised_kernel_is_not_a_bias() -> None:
    codes = np.zeros((4, 6), "i1")
    index = xckpt.read_index(hdf5({"layers/dense/vars/0": codes, "layers/dense/vars/1": B}))
    assert index["layers/dense/vars/0"].attrs["variable"] == "kernel"
    assert index["layers/dense/vars/1"].attrs["variable"] == "kernel_scale"


def test_numbers_in_paths_are_sorted_by_value() -> None:
    index = xckpt.read_index(hdf5({f"optimizer/vars/{n}": B for n in range(12)}))
    assert list(index) == [f"optimizer/vars/{n}" for n in range(12)]
    assert index["optimizer/vars/1"].attrs["variable"] == "learning_rate"


def test_marshalled_code_is_not_shown() -> None:
    config = {"class_name": "Lambda", "config": {"name": "x", "function": ["4wEA" * 1000, None]}}
    data = hdf5({"x/x/kernel:0": W})
    file = io.BytesIO(data)
    with h5py.File(file, "r+") as root:
        root.attrs["model_config"] = json.dumps(config)
    attrs = xckpt.read_index(file.getvalue()).attrs
    assert attrs["config"]["config"]["function"][0] == "<4000 characters>"


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("shape", [(50,), (17, 11), (6, 5, 9)])
@pytest.mark.parametrize("dtype", ["i1", "<i2", ">f4", "f8", "c16"])
def test_filters_of_chunks(shape: tuple[int, ...], dtype: str, mmap: bool, tmp_path: Path) -> None:
    values = np.random.default_rng(1).integers(0, 50, shape).astype(dtype)
    chunks = tuple(max(1, n // 2 - 1) for n in shape)
    ways: list[dict[str, Any]] = [
        {},
        {"compression": "gzip"},
        {"compression": "gzip", "shuffle": True, "fletcher32": True},
        {"compression": "lzf", "shuffle": True},
        {"compression": "lzf"},
        {"fletcher32": True},
    ]
    tensors = {f"w{n}": (values, {"chunks": chunks} | way) for n, way in enumerate(ways)}
    path = tmp_path / "m.h5"
    path.write_bytes(hdf5(tensors))
    ds = xr.open_dataset(path, engine="keras", mmap=mmap)
    last = (slice(-1, None),) * len(shape)
    for name in tensors:
        np.testing.assert_array_equal(ds[name].values, values)
        np.testing.assert_array_equal(ds[name][last].values, values[last])


def test_chunks_that_were_never_written_have_the_fill_value(tmp_path: Path) -> None:
    path = tmp_path / "m.h5"
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("w", (9, 9), "f4", chunks=(2, 4), fillvalue=7)
        dataset[2:4, :4] = 1
        file.create_dataset("v", (1 << 40,), "i4", chunks=(1024,), fillvalue=3)
        expected = dataset[...]
    ds = xckpt.open(path)
    np.testing.assert_array_equal(ds["w"].values, expected)
    assert ds["v"][1 << 39].values == 3
    with pytest.raises(xckpt.TooLargeError):
        ds["v"].values  # noqa: B018


@pytest.mark.parametrize("at", [0, 5, -5])
def test_damaged_chunks(at: int) -> None:
    packed = {"chunks": (4, 6), "compression": "gzip", "shuffle": True}
    data = bytearray(hdf5({"w": (W, packed)}))
    stored = zlib.compress(W.view("u1").reshape(24, 4).T.tobytes(), 4)
    place = data.index(stored[:8])
    data[place + (at if at >= 0 else len(stored) + at)] ^= 0xFF
    with pytest.raises(xckpt.FormatError, match="w"):
        xckpt.open(bytes(data))["w"].values  # noqa: B018


def test_an_unknown_filter_is_a_problem_of_its_tensor() -> None:
    data = hdf5({"w": (W, {"chunks": (2, 3), "scaleoffset": 2}), "v": B})
    ds = xckpt.open(data)
    np.testing.assert_array_equal(ds["v"], B)
    with pytest.raises(xckpt.UnsupportedError, match=r"filter 6 .*h5repack"):
        ds["w"].values  # noqa: B018


def test_newer_files_need_h5py(monkeypatch: pytest.MonkeyPatch) -> None:
    many = {f"g/v{n}": B * n for n in range(40)}  # links in a heap
    resized = {"w": (W, {"chunks": (2, 2), "maxshape": (None, 6)}), "v": B}  # another index
    of_groups, of_chunks = (hdf5(tensors, libver="latest") for tensors in (many, resized))
    for tensors, data in ((many, of_groups), (resized, of_chunks)):
        ds = xckpt.open(data)
        for name, values in tensors.items():
            array = values[0] if isinstance(values, tuple) else values
            np.testing.assert_array_equal(ds[name], array)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(xckpt.UnsupportedError, match=r"pip install 'xckpt\[hdf5\]'"):
        xckpt.open(of_groups)
    ds = xckpt.open(of_chunks)
    np.testing.assert_array_equal(ds["v"], B)
    with pytest.raises(xckpt.UnsupportedError, match=r"tensor 'w'.*pip install 'xckpt\[hdf5\]'"):
        ds["w"].values  # noqa: B018


@pytest.mark.parametrize("dtype", ["<f4", ">f4", ">c16"])
def test_newer_files_have_fill_values_in_their_byte_order(dtype: str) -> None:
    values = np.full((4, 6), 13, dtype)
    chunked = {"chunks": (2, 3), "maxshape": (None, None), "fillvalue": values[0, 0]}
    file = io.BytesIO()
    with h5py.File(file, "w", libver="latest") as root:
        root.create_dataset("w", (4, 6), dtype, **chunked)[:2] = values[:2]
    np.testing.assert_array_equal(xckpt.open(file.getvalue())["w"], values)


@pytest.mark.parametrize("count", [1, 40])  # with many links only h5py can read the file
def test_heaps_with_objects_of_no_bytes_are_refused(count: int) -> None:
    file = io.BytesIO()
    with h5py.File(file, "w", libver="latest") as root:
        for number in range(count):
            root[f"v{number}"] = W
        root.create_group("g").attrs["text"] = "in a heap"
    data = bytearray(file.getvalue())
    heap = data.index(b"GCOL")
    data[heap + 24] = 128  # the length of the text, after which there are zeros only
    with pytest.raises(xckpt.FormatError, match="does not fit into its heap"):
        xckpt.open(bytes(data))


def test_addresses_behind_the_end_are_refused() -> None:
    file = io.BytesIO()
    with h5py.File(file, "w", track_order=True) as root:
        for number in range(40):
            root[f"v{number}"] = W
    data = bytearray(file.getvalue())
    data[55] = 0  # of the address of a driver, which was undefined
    with pytest.raises(xckpt.FormatError, match=r"HDF5 cannot read the file.*\[Hdf5\]"):
        xckpt.open(bytes(data))


def test_positions_of_chunks_that_h5py_reports_wrongly_are_refused() -> None:
    options = {"chunks": (2, 3), "maxshape": (4, None)}
    narrow = {"chunks": (4, 3), "maxshape": (4, None)}
    ds = xckpt.open(hdf5({"v": (W, narrow), "w": (W, options)}, libver="latest"))
    np.testing.assert_array_equal(ds["v"], W)
    with pytest.raises(xckpt.UnsupportedError, match="positions of its chunks"):
        ds["w"].compute()


def test_shards_are_one_model(tmp_path: Path) -> None:
    """A layer may have variables in two files, and its name in the first of them only."""
    parts: dict[str, Any] = {"m_00000.weights.h5": {"layers/dense/vars/0": W}}
    parts["m_00001.weights.h5"] = {"layers/dense/vars/1": B}
    for name, tensors in parts.items():
        (tmp_path / name).write_bytes(hdf5(tensors))
    with h5py.File(tmp_path / "m_00001.weights.h5", "r+") as file:
        del file["layers/dense/vars"].attrs["name"]
    weight_map = {"/layers/dense/vars": [*parts]}
    path = tmp_path / "m.weights.json"
    path.write_text(json.dumps({"metadata": {"total_size": 120.0}, "weight_map": weight_map}))
    ds = xckpt.open(path)
    np.testing.assert_array_equal(ds["layers/dense/vars/0"], W)
    np.testing.assert_array_equal(ds["layers/dense/vars/1"], B)
    assert ds["layers/dense/vars/1"].attrs == {"layer": "first", "variable": "bias"}
    (tmp_path / "m_00001.weights.h5").unlink()
    with pytest.raises(xckpt.MissingShardError, match="m_00001"):
        xckpt.open(path)


def test_a_folder_with_the_members_of_an_archive(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text('{"keras_version": "3.15.1"}')
    (tmp_path / "config.json").write_text('{"class_name": "Sequential"}')
    (tmp_path / "model.weights.h5").write_bytes(hdf5({"layers/dense/vars/0": W}))
    ds = xckpt.open(tmp_path)
    np.testing.assert_array_equal(ds["layers/dense/vars/0"], W)
    assert ds.attrs["config"] == {"class_name": "Sequential"}


def test_groups_in_circles_end(tmp_path: Path) -> None:
    path = tmp_path / "m.h5"
    with h5py.File(path, "w") as file:
        file["w"] = W
        file.create_group("a")["again"] = file["/"]
        file["a/same"] = file["w"]
    with pytest.warns(xckpt.CheckpointWarning, match="several names"):
        index = xckpt.read_index(path)
    assert list(index) == ["a/same", "w"]
    assert index.shared == {"w": "a/same"}


@pytest.mark.parametrize("suffix", ["safetensors", "gguf", "npz", "zt"])
def test_convert(suffix: str, tmp_path: Path) -> None:
    packed = {"chunks": (3, 3), "compression": "gzip", "shuffle": True}
    data = hdf5({"a/w": W, "a/v": (W, packed), "a/b": (B, {"chunks": (4,), "fletcher32": True})})
    source, target = tmp_path / "m.weights.h5", tmp_path / f"m.{suffix}"
    source.write_bytes(data)
    xckpt.convert(source, target)
    copy = xckpt.open(target)
    for name, values in {"a/w": W, "a/v": W, "a/b": B}.items():
        np.testing.assert_array_equal(copy[name].values, values)


def test_files_of_netcdf_are_left_to_others(tmp_path: Path) -> None:
    path = tmp_path / "m.nc"
    xr.Dataset({"w": (("x", "y"), W)}).to_netcdf(path, engine="h5netcdf")
    with pytest.raises(xckpt.FormatError, match=r"netCDF 4.*h5netcdf"):
        xckpt.open(path)


def test_a_row_over_http_reads_its_bytes() -> None:
    values = np.arange(1 << 20, dtype="f4").reshape(1024, 1024)
    data = archive(hdf5({"layers/dense/vars/0": values}))
    assert_row_is_one_request({"m.keras": data}, "m.keras", "layers/dense/vars/0", values)


def test_one_element_of_a_chunked_tensor() -> None:
    ds = xckpt.open(hdf5({"w": (W, {"chunks": (2, 3)}), "v": (B, {"chunks": (4,)})}))
    assert ds["w"][3, 5].values == 23
    assert ds["w"].data[3, 5].compute() == 23
    assert ds["v"][5].values == 1


@pytest.mark.parametrize("make", [hdf5, lambda arrays: archive(hdf5(arrays))])
def test_numbers_of_any_length_are_sorted(make: Any) -> None:
    numbers = ["2", "10", "10" * 2200]
    names = [f"layers/dense_{number}/vars/0" for number in numbers]
    ds = xckpt.open(make(dict.fromkeys(reversed(names), B)))
    assert list(ds.variables) == names
