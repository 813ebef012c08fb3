"""Golden burnpack files through ``xarray.open_dataset``: right values, or the right error."""

from __future__ import annotations

import hashlib
import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.conftest import golden_files

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

GOOD = [
    *golden_files("burnpack/*.bpk", with_suffix=".expected.json"),
    *golden_files("burnpack/ckpt/*.bpk", with_suffix=".expected.json"),
]
BAD = golden_files("burnpack/bad/*.bpk")
LATER = {"dtype_bool_bad_store", "dtype_unknown", "qfloat_unknown_value", "scalars_unknown_variant"}
LARGE = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


def expectation(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Load what a golden file should hold."""
    expected = json.loads(path.with_suffix(".expected.json").read_text())
    return expected, dict(np.load(path.with_suffix(".expected.npz")))


def assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    """Compare values bit by bit, NaN payloads and signs of zero too."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    bits = LARGE[got.dtype.itemsize]
    np.testing.assert_array_equal(
        np.ascontiguousarray(got).reshape(-1).view(bits),
        np.ascontiguousarray(expected).reshape(-1).view(bits),
    )


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_good_files(path: Path, mmap: bool) -> None:
    expected, arrays = expectation(path)
    ds = xr.open_dataset(path, engine="burnpack", mmap=mmap)
    raw = xr.open_dataset(path, engine="burnpack", mmap=mmap, decode=False)
    assert ds.attrs == expected["metadata"]
    legacy = expected["layout"].startswith("legacy")
    assert ds.encoding["format_version"] == ("1-legacy" if legacy else "1")
    names = {
        hashlib.sha256(str(name).encode()).hexdigest(): str(name)
        for name, variable in ds.variables.items()
        if "scalar" not in variable.attrs
    }
    assert len(names) == expected["n_tensors"]
    stored = path.read_bytes()
    for tensor in expected["tensors"]:
        name = names[tensor["name_sha256"]]
        _check_tensor(ds.variables[name], tensor, arrays)
        _check_stored(raw.variables, name, tensor, stored)
        if "quant" in tensor:
            _check_parts(raw.variables, name, tensor, arrays)
    _check_scalars(ds.variables, expected["scalars"])


def _check_tensor(
    variable: xr.Variable, tensor: dict[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    assert list(variable.shape) == tensor["shape"]
    param_id = tensor["param_id"]
    assert variable.attrs.get("param_id") == (None if param_id is None else str(param_id))
    if tensor["dtype"] == "Flex32":
        assert variable.attrs["burn_dtype"] == "Flex32"
    wanted = arrays[tensor["key"]]
    if tensor["dtype"] == "BF16":
        wanted = (wanted.astype(np.uint32) << 16).view(np.float32)
    if "Bool" in tensor["dtype"]:
        wanted = wanted.astype(bool)
    assert_same_bits(variable.to_numpy(), wanted)
    if variable.ndim and variable.shape[0]:
        assert_same_bits(variable[-1:].to_numpy(), wanted[-1:])


def _check_stored(
    variables: Mapping[Any, xr.Variable], name: str, tensor: dict[str, Any], stored: bytes
) -> None:
    """Compare the stored bytes that variables show with those of the file."""
    start, end = tensor["file_range"]
    assert hashlib.sha256(stored[start:end]).hexdigest() == tensor["sha256"]
    roles = [role for role in ("data", "scales", "global") if f"{name}:{role}" in variables]
    shown = [f"{name}:{role}" for role in roles] if "quant" in tensor else [name]
    assert b"".join(variables[each].to_numpy().tobytes() for each in shown) == stored[start:end]


def _check_parts(
    variables: Mapping[Any, xr.Variable],
    name: str,
    tensor: dict[str, Any],
    arrays: Mapping[str, np.ndarray],
) -> None:
    key = tensor["key"]
    codes = variables[f"{name}:data"].to_numpy()
    assert codes.tobytes() == arrays[f"{key}.q"].tobytes()
    scales = variables[f"{name}:scales"].to_numpy().astype(np.float32)
    np.testing.assert_array_equal(scales.ravel(), arrays[f"{key}.scales"].ravel())
    assert (f"{name}:global" in variables) == bool(tensor["global_bytes"])
    if tensor["global_bytes"]:
        whole = variables[f"{name}:global"].to_numpy()
        np.testing.assert_array_equal(whole, arrays[f"{key}.global"].reshape(()))


def _check_scalars(variables: Mapping[Any, xr.Variable], scalars: dict[str, Any]) -> None:
    types = {"Int": np.int64, "UInt": np.uint64, "Float": np.float64, "Bool": np.bool_}
    found = {name: v for name, v in variables.items() if "scalar" in v.attrs}
    assert found.keys() == scalars.keys()
    for name, wanted in scalars.items():
        ((kind, value),) = wanted.items()
        got = found[name].to_numpy()
        assert (got.shape, got.dtype, found[name].attrs) == ((), types[kind], {"scalar": kind})
        assert got.item() == value


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_bad_files(path: Path) -> None:
    start = time.perf_counter()
    if path.stem in LATER:
        # What a later burn may have added to one tensor leaves the rest readable.
        ds = xr.open_dataset(path, engine="burnpack")
        with pytest.raises(xckpt.UnsupportedError) as caught:
            ds.compute()
    else:
        with pytest.raises(xckpt.CheckpointError) as caught:  # type: ignore[assignment]
            xr.open_dataset(path, engine="burnpack")
    assert str(path) in str(caught.value)
    assert caught.value.rule
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_the_content_tells_the_engine(path: Path, tmp_path: Path) -> None:
    unnamed = tmp_path / "checkpoint"
    unnamed.write_bytes(path.read_bytes())
    for found in (path, unnamed):
        with xr.open_dataset(found) as ds:
            assert ds.encoding["format"] == "burnpack"


@pytest.mark.parametrize("name", ["magic_bad", "magic_zip", "trunc_empty"])
def test_other_content_is_left_to_others(golden: Path, name: str) -> None:
    with pytest.raises(ValueError, match="did not find a match"):
        xr.open_dataset(golden / "burnpack" / "bad" / f"{name}.bpk")


def test_a_checkpoint_as_a_tree_of_modules(golden: Path) -> None:
    tree = xr.open_datatree(golden / "burnpack" / "real_mnist.bpk", engine="burnpack")
    assert tree["fc1"].to_dataset()["weight"].shape == (1600, 128)
    assert np.isfinite(tree["fc3"].to_dataset()["weight"]).all()
