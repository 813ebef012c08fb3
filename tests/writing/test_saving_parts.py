"""Tensors that are opened as parts are saved as whole tensors."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import sparse
import xarray as xr

from tests.conftest import golden_files
from tests.formats.burnpack_files import burnpack, dense, quantized
from tests.formats.ztensor_files import dense_v2, stored, v2_file
from tests.writing.saved import assert_same_bits
from xckpt import CheckpointError, CheckpointWarning, UnsupportedError, read_index
from xckpt.writing import convert, save

if TYPE_CHECKING:
    from pathlib import Path

PARTS = [
    path
    for path in golden_files("*/*", with_suffix=".expected.json")
    if any(
        word in str(path) for word in ("sparse", "quant", "layouts", "objects", "unknown_format")
    )
]
OPTIONS: dict[str, dict[str, Any]] = {"ztensor": {"version": "2"}}


def saved(obj: Any, path: Path, engine: str) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        save(obj, path, engine, overwrite=True, **OPTIONS.get(engine, {}))
    return path.read_bytes()


@pytest.mark.parametrize("path", PARTS)
@pytest.mark.parametrize("stack", [False, True])
def test_golden_files_open_as_parts_are_saved_whole(
    path: Path, stack: bool, tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        index = read_index(path)
        full = xr.open_dataset(path, engine=index.format)
        parts = xr.open_dataset(path, engine=index.format, decode=False, stack=stack)
    layouts = {tensor.layout for tensor in index.tensors.values()}
    try:
        expected = saved(full, tmp_path / "whole", index.format)
    except CheckpointError as error:
        with pytest.raises(type(error)):
            saved(parts, tmp_path / "parts", index.format)
        return
    assert saved(parts, tmp_path / "parts", index.format) == expected
    after = read_index(tmp_path / "parts")
    assert {tensor.layout for tensor in after.tensors.values()} == layouts
    assert set(after.tensors) == set(index.tensors)


def test_golden_files_with_parts_exist() -> None:
    layouts = {tensor.layout for path in PARTS for tensor in _quietly(path).tensors.values()}
    assert layouts >= {"sparse_csr", "sparse_coo", "quantized", "structural"}


def _quietly(path: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        return read_index(path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file with sparse tensors that have axes, attributes and compressed parts."""
    rng = np.random.default_rng(0)
    dense = rng.integers(0, 3, (20, 30)).astype("f4")
    cube = rng.integers(0, 2, (4, 5, 6)).astype("i2")
    ds = xr.Dataset(
        {
            "a.csr": (("out", "in"), sparse.COO.from_numpy(dense), {"note": "x"}),
            "coo": (("i", "j", "k"), sparse.COO.from_numpy(cube)),
            "w": ("out", rng.random(20)),
        }
    )
    encoding = {"*": {"digest": "sha256", "compression": "zstd-seekable"}, "w": {"digest": "xxh3"}}
    save(ds, tmp_path / "m.zt", encoding=encoding, version="2")
    return tmp_path / "m.zt"


def opened(path: Path, **options: Any) -> xr.Dataset:
    return xr.open_dataset(path, engine="ztensor", **options)


def test_bytes_axes_attributes_and_compression_come_back(model: Path, tmp_path: Path) -> None:
    parts = opened(model, decode=False)
    assert {"a.csr:values", "a.csr:indptr", "coo:coords"} <= set(parts.variables)
    assert saved(parts, tmp_path / "again.zt", "ztensor") == model.read_bytes()
    assert saved(parts.copy(deep=True), tmp_path / "again.zt", "ztensor") == model.read_bytes()
    tree = xr.open_datatree(model, engine="ztensor", decode=False)
    assert saved(tree, tmp_path / "again.zt", "ztensor") == model.read_bytes()


def test_all_parts_may_be_renamed_alike(model: Path, tmp_path: Path) -> None:
    parts = opened(model, decode=False)
    new = {n: str(n).replace("coo:", "other:") for n in parts.variables if "coo:" in str(n)}
    saved(parts.rename(new), tmp_path / "again.zt", "ztensor")
    index = read_index(tmp_path / "again.zt")
    assert set(index.tensors) == {"a.csr", "other", "w"}
    assert index.tensors["other"].layout == "sparse_coo"
    variable = opened(tmp_path / "again.zt")["other"]
    assert_same_bits(variable.values, opened(model)["coo"].values)


def test_changed_or_incomplete_parts_are_saved_as_tensors(model: Path, tmp_path: Path) -> None:
    parts = opened(model, decode=False)
    for changed, separate in [
        (parts.drop_vars("coo:coords"), {"coo:values"}),
        (parts.assign({"coo:values": parts["coo:values"] * 2}), {"coo:values", "coo:coords"}),
        (parts.rename({"coo:values": "v"}), {"v", "coo:coords"}),
        (parts.isel({parts["coo:coords"].dims[1]: slice(3)}), {"coo:values", "coo:coords"}),
    ]:
        saved(changed, tmp_path / "again.zt", "ztensor")
        index = read_index(tmp_path / "again.zt")
        assert set(index.tensors) == {"a.csr", "w", *separate}
        assert {index.tensors[name].layout for name in separate} == {"dense"}


def test_equal_parts_of_two_files_are_two_tensors(model: Path, tmp_path: Path) -> None:
    second_path = tmp_path / "other.zt"
    second_path.write_bytes(model.read_bytes())
    names = {"values", "coords"}
    first = opened(model, decode=False)[[f"coo:{role}" for role in names]]
    second = opened(second_path, decode=False)[[f"coo:{role}" for role in names]]
    second = second.rename({f"coo:{role}": f"second:{role}" for role in names})
    saved(first.merge(second), tmp_path / "both.zt", "ztensor")
    assert set(read_index(tmp_path / "both.zt").tensors) == {"coo", "second"}


# --- parts, and tensors that are called like parts ------------------------------------------------

PER_TENSOR = {"mode": "Symmetric", "tensor": None, "block": None}
QUANTISED = {**PER_TENSOR, "value": "Q8S", "store": "Native"}
ODD = {**PER_TENSOR, "value": "E2M1", "store": {"PackedNative": 0}}


def clashing_burnpack() -> bytes:
    """Write tensors that open as parts, next to tensors that are named like these parts."""
    values = np.arange(2, dtype="f4")
    tensors = {
        "w": quantized((2, 4), bytes(range(8)) + values[1:].tobytes(), QUANTISED),
        "w:scales": dense(values),
        "odd": quantized((2, 4), bytes(range(4)) + values[1:].tobytes(), ODD),
        "odd:data": dense(values + 1),
        "odd:data:": dense(values + 2),
        "layers.0.w": quantized((4,), bytes(8), QUANTISED),
        "layers.1.w": quantized((4,), bytes(range(8)), QUANTISED),
        "layers.1.w:scales": dense(values + 3),
        "w:": quantized((4,), bytes(8), QUANTISED),
    }
    return burnpack(tensors)


def clashing_ztensor() -> bytes:
    """Write the same for zTensor: sparse tensors, and one of an unknown layout."""
    values = np.arange(2, dtype="f4")
    index = {"dtype": "u32"}
    coo = {
        "shape": [4],
        "layout": "zt.sparse_coo/1",
        "parts": {
            "values": stored(values.tobytes(), dtype="f32"),
            "coords": stored(np.array([1, 3], "u4").tobytes(), **index),
        },
    }
    odd = {
        "shape": [7],
        "layout": "other.layout/1",
        "parts": {"a": stored(b"12", dtype="u8"), "a:": stored(b"345", dtype="u8")},
    }
    objects: dict[str, Any] = {"w": coo, "layers.0.w": coo, "layers.1.w": coo, "odd": odd}
    for at, name in enumerate(["w:values", "w:coords", "w:coords:", "layers.0.w:values", "odd:a"]):
        objects[name] = dense_v2((values + at).tobytes(), [2], "f32")
    return v2_file(objects)


CLASHING = {"burnpack": clashing_burnpack, "ztensor": clashing_ztensor}


@pytest.mark.parametrize("engine", CLASHING)
@pytest.mark.parametrize("stack", [False, True])
@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("tree", [False, True])
def test_tensors_named_like_parts_of_others(
    engine: str, stack: bool, decode: bool, tree: bool, tmp_path: Path
) -> None:
    path, options = tmp_path / "model", OPTIONS.get(engine, {})
    path.write_bytes(CLASHING[engine]())
    convert(path, tmp_path / "converted", engine, **options)
    open_it = xr.open_datatree if tree else xr.open_dataset
    opened = open_it(path, engine=engine, stack=stack, decode=decode)
    save(opened, tmp_path / "saved", engine, **options)  # without a warning
    assert (tmp_path / "saved").read_bytes() == (tmp_path / "converted").read_bytes()
    before, after = read_index(path).tensors, read_index(tmp_path / "saved").tensors
    assert {n: (t.layout, t.shape) for n, t in after.items()} == {
        name: (tensor.layout, tensor.shape) for name, tensor in before.items()
    }


@pytest.mark.parametrize("engine", CLASHING)
@pytest.mark.parametrize("stack", [False, True])
def test_values_of_tensors_named_like_parts(engine: str, stack: bool, tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(CLASHING[engine]())
    ds = xr.open_dataset(path, engine=engine, decode=False, stack=stack)
    if stack:
        ds = ds.ckpt.unstack()
    computed = ds.compute()  # all at once: equal names in a graph would be equal values
    tensors = read_index(path).tensors
    content = path.read_bytes()
    for name, tensor in tensors.items():
        if tensor.layout == "dense":
            part = tensor.parts["data"]
            assert computed[name].values.tobytes() == content[part.offset :][: part.nbytes]
    parts = sum(len(t.parts) for t in tensors.values() if t.layout != "dense")
    assert len(ds.variables) == parts + sum(t.layout == "dense" for t in tensors.values())


def test_parts_that_are_tensors_elsewhere_have_free_names(tmp_path: Path) -> None:
    path = tmp_path / "m.bpk"
    path.write_bytes(clashing_burnpack())
    full = xr.open_dataset(path)[["odd:data", "odd:data:"]]
    with pytest.raises(UnsupportedError, match="cast='exact' writes its parts"):
        convert(path, tmp_path / "m.safetensors", tensors="odd", cast="never")
    with pytest.warns(CheckpointWarning, match="tensors written as their parts: 'odd'"):
        convert(path, tmp_path / "m.safetensors", tensors=["odd", "odd:*"])
    tensors = read_index(tmp_path / "m.safetensors").tensors
    assert set(tensors) == {"odd:data", "odd:data:", "odd:data::", "odd:scales"}
    ds = xr.open_dataset(tmp_path / "m.safetensors")
    for name in full.variables:
        assert_same_bits(ds[name].values, full[name].values)
    assert ds["odd:data::"].values.tolist() == [0, 1, 2, 3]


def test_parts_without_their_encoding(model: Path, tmp_path: Path) -> None:
    for decode in (True, False):
        bare = opened(model, decode=decode).drop_encoding()
        saved(bare, tmp_path / "again.zt", "ztensor")
        assert {n: t.layout for n, t in read_index(tmp_path / "again.zt").tensors.items()} == {
            "a.csr": "sparse_csr",
            "coo": "sparse_coo",
            "w": "dense",
        }
