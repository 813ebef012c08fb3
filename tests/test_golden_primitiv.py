"""Golden primitiv files through ``xarray.open_dataset``: right values, or the right error."""

from __future__ import annotations

import json
import math
import struct
import time
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.conftest import golden_files
from xckpt import formats
from xckpt.formats.primitiv import variable_name

if TYPE_CHECKING:
    from pathlib import Path

GOOD = [
    *golden_files("primitiv/*.primitiv", with_suffix=".expected.json"),
    *golden_files("primitiv/odd/*.primitiv", with_suffix=".expected.json"),
]
SHAPES = golden_files("primitiv/shape_*.primitiv", with_suffix=".expected.json")
OPTIMIZERS = golden_files("primitiv/**/*opt_*.primitiv", with_suffix=".expected.json")
BAD = golden_files("primitiv/bad/*.primitiv")
# The library itself writes these; that their names are no text is worth a warning all the same.
WARNED = {"model_non_utf8_names"}


def expectation(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Load what a golden file should hold."""
    expected = json.loads(path.with_suffix(".expected.json").read_text())
    npz = path.with_suffix(".expected.npz")
    return expected, dict(np.load(npz)) if npz.exists() else {}


def text(hexed: str) -> str:
    return bytes.fromhex(hexed).decode("utf-8", "surrogateescape")


def expected_name(entry: dict[str, Any]) -> str:
    key = [text(element) for element in entry.get("key_hex", [b"value".hex()])]
    return variable_name(key, text(entry["stat_hex"]) if "stat_hex" in entry else None)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_good_files(path: Path, mmap: bool) -> None:
    expected, arrays = expectation(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ds = xr.open_dataset(path, mmap=mmap)
    assert bool(caught) == (path.stem in WARNED)
    assert ds.encoding["format"] == "primitiv"
    head = path.read_bytes()[: formats.HEAD_BYTES]
    detected = [formats.get(name).detect(head, 1 << 20, str(path)) for name in formats.names()]
    assert detected.count(True) == 1
    assert ds.attrs["data_type"].lower() == expected["type"]
    entries = expected.get("entries", [])
    assert list(ds.variables) == [expected_name(entry) for entry in entries]
    for entry in entries:
        variable = ds.variables[expected_name(entry)]
        assert variable.encoding["offset"] == entry["payload_offset"]
        assert variable.encoding["nbytes"] == entry["payload_nbytes"]
        assert ("batch" in variable.dims) == (entry["batch"] > 1)
        assert variable.shape == tuple(entry["array_shape"])
        assert variable.dtype == np.float32
        wanted = arrays[entry["npz"]]
        # As bytes, so that NaN payloads and signs of zero count.
        assert variable.values.tobytes(order="F") == wanted.tobytes(order="F")
        if variable.ndim:
            assert variable[..., -1:].values.tobytes() == wanted[..., -1:].tobytes()
        if "key_hex" in entry:
            assert variable.attrs["key"] == [text(element) for element in entry["key_hex"]]


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
def test_good_files_as_trees(path: Path) -> None:
    expected, arrays = expectation(path)
    entries = expected.get("entries", [])
    tree = xr.open_datatree(path)
    found = {
        variable.encoding["tensor"]: (node.path, name, variable)
        for node in tree.subtree
        for name, variable in node.variables.items()
    }
    assert len(found) == len(entries)
    for entry in entries:
        folder, name, variable = found[expected_name(entry)]
        assert variable.values.tobytes(order="F") == arrays[entry["npz"]].tobytes(order="F")
        *modules, own = entry.get("key", ["value"])
        if all(element.isidentifier() for element in (*modules, own)):
            assert folder == "/" + "/".join(modules)
            assert name == (f"{own}:{entry['stat']}" if "stat" in entry else own)


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
def test_without_statistics(path: Path) -> None:
    expected, _ = expectation(path)
    ds = xr.open_dataset(path, with_stats=False)
    values = [entry for entry in expected.get("entries", []) if entry["role"] == "value"]
    assert list(ds.variables) == [expected_name(entry) for entry in values]


@pytest.mark.parametrize("path", SHAPES, ids=lambda path: path.stem)
def test_shapes(path: Path) -> None:
    expected, _ = expectation(path)
    attrs = xr.open_dataset(path).attrs
    assert (attrs["dims"], attrs["batch"]) == (expected["dims"], expected["batch"])


@pytest.mark.parametrize("path", OPTIMIZERS, ids=lambda path: path.stem)
def test_optimizers(path: Path) -> None:
    expected, _ = expectation(path)
    attrs = xr.open_dataset(path).attrs
    inferred = None if expected["class"].startswith("(") else expected["class"]
    assert attrs.get("optimizer") == inferred
    assert attrs["uint_configs"] == expected["uint_configs"]
    assert list(attrs["uint_configs"]) == expected["uint_order"]
    assert list(attrs["float_configs"]) == expected["float_order"]
    for name, bits in expected["float_bits"].items():
        value = attrs["float_configs"][name]
        assert struct.pack(">f", value) == struct.pack(">I", bits)
        assert math.isnan(value) == (expected["float_configs"][name] == "nan")


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_bad_files(path: Path) -> None:
    listed = json.loads((path.parent / "manifest.json").read_text())
    (expected,) = (entry for entry in listed if entry["file"] == path.name)
    start = time.perf_counter()
    if expected["expect"] == "error":
        with pytest.raises(xckpt.CheckpointError) as caught:
            xr.open_dataset(path, engine="primitiv")
        assert str(path) in str(caught.value)
        assert caught.value.rule
        assert caught.value.offset is not None
    else:
        with pytest.warns(xckpt.CheckpointWarning):
            ds = xr.open_dataset(path)
        for variable in ds.compute().variables.values():
            str(variable).encode()
        with pytest.warns(xckpt.CheckpointWarning):
            str(xr.open_datatree(path)).encode()
    assert time.perf_counter() - start < 1


def test_line_ends_are_told(golden: Path) -> None:
    with pytest.raises(xckpt.FormatError, match="0d 0a"):
        xr.open_dataset(golden / "primitiv/bad/crlf_damaged.primitiv", engine="primitiv")


def test_a_model_computes_what_the_library_does(golden: Path) -> None:
    folder = golden / "primitiv"
    forward = json.loads((folder / "mlp_adam_model.forward.json").read_text())
    ds = xr.open_dataset(folder / "mlp_adam_model.primitiv", with_stats=False).load()
    x = np.array(forward["x"], "f4").reshape((8, 3), order="F")
    y = np.array(forward["y"], "f4").reshape((4, 3), order="F")
    weight, bias = ds["hidden.w"].values, ds["hidden.b"].values
    hidden = np.tanh(weight @ x + bias[:, None])
    weight, bias = ds["output.w"].values, ds["output.b"].values
    np.testing.assert_allclose(weight @ hidden + bias[:, None], y, atol=1e-6)


def test_chunks_run_along_the_last_axis(golden: Path) -> None:
    import dask

    with dask.config.set({"array.chunk-size": "16B"}):
        ds = xr.open_dataset(golden / "primitiv/tensor_batch.primitiv")
    assert ds["value"].shape == (3, 3, 2)
    assert ds["value"].chunks == ((3,), (1, 1, 1), (1, 1))
