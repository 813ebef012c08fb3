"""Golden zTensor files through ``xarray.open_dataset``: right values, or the right error."""

from __future__ import annotations

import json
import re
import time
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.conftest import golden_files

if TYPE_CHECKING:
    from pathlib import Path

GOOD = golden_files("ztensor/*.zt", with_suffix=".expected.json")
BAD = golden_files("ztensor/bad/*.zt")


def expectation(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Load what a golden file should hold."""
    expected = json.loads(path.with_suffix(".expected.json").read_text())
    npz = path.with_suffix(".expected.npz")
    arrays = dict(np.load(npz)) if npz.exists() else {}
    return expected, arrays


def assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    """Compare values bit by bit, NaN payloads and signs of zero too."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    kind = {2: "u2", 4: "u4", 8: "u8", 16: "u8"}
    if got.dtype.kind in "fc":
        width = kind[got.dtype.itemsize if got.dtype.kind == "f" else got.dtype.itemsize // 2]
        got = np.ascontiguousarray(got).reshape(-1).view(width)
        expected = np.ascontiguousarray(expected).reshape(-1).view(width)
    np.testing.assert_array_equal(got, expected)


def stored_bits(array: np.ndarray, stored_as: str) -> np.ndarray:
    """View an array as the bit patterns that expectations keep for types numpy lacks."""
    if "bits-of" not in stored_as:
        return array
    return np.ascontiguousarray(array).view(stored_as.partition("-")[0])


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_good_files(path: Path, mmap: bool) -> None:
    expected, arrays = expectation(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ds = xr.open_dataset(path, engine="ztensor", mmap=mmap)
        raw = xr.open_dataset(path, engine="ztensor", mmap=mmap, decode=False)
    told = [w for w in caught if issubclass(w.category, xckpt.CheckpointWarning)]
    assert bool(told) == bool(expected["warnings"])
    if not expected.get("attributes_unchecked"):
        _check_attributes(dict(ds.attrs), expected)
    for name, tensor in expected["tensors"].items():
        if tensor["read"] == "error":
            with pytest.raises(xckpt.CheckpointError, match=re.escape(repr(name))):
                ds[name].compute()
        elif tensor["dense"] is None:
            assert name not in ds.variables
            _check_parts(ds, name, tensor, arrays)
        else:
            _check_dense(ds[name], tensor["dense"], arrays)
            _check_stored(raw, name, tensor, arrays)


def _check_attributes(attrs: dict[str, Any], expected: dict[str, Any]) -> None:
    wanted = expected["attributes"] or {}
    got = {key: value for key, value in attrs.items() if key != "generator" or key in wanted}
    hexed = json.loads(json.dumps(got, default=lambda value: {"__bytes_hex__": bytes(value).hex()}))
    assert hexed == wanted
    if expected.get("generator"):
        assert attrs["generator"] == expected["generator"]


def _check_dense(
    variable: xr.DataArray, dense: dict[str, str], arrays: dict[str, np.ndarray]
) -> None:
    wanted = arrays[dense.get("f32_npz", dense["npz"])]
    if "bits-of-bfloat16" in dense["stored_as"] and "f32_npz" not in dense:
        wanted = (wanted.astype(np.uint32) << 16).view(np.float32)
    got = variable.compute()
    if wanted.dtype.kind == "f" and "float8" in dense["stored_as"]:
        # ml_dtypes and the expectation may differ in the sign of NaN, which float8 does not have.
        np.testing.assert_array_equal(got.values, wanted)
    else:
        assert_same_bits(got.values, wanted)
    if variable.ndim:
        np.testing.assert_array_equal(variable[-1:].compute().values, wanted[-1:])


def _check_stored(
    raw: xr.Dataset, name: str, tensor: dict[str, Any], arrays: dict[str, np.ndarray]
) -> None:
    if name not in raw.variables:
        _check_parts(raw, name, tensor, arrays)
        return
    stored_as = tensor["dense"]["stored_as"]
    if "bits-of" in stored_as:
        got = stored_bits(raw[name].compute().values, stored_as)
        assert_same_bits(got, arrays[tensor["dense"]["npz"]])


def _check_parts(
    ds: xr.Dataset, name: str, tensor: dict[str, Any], arrays: dict[str, np.ndarray]
) -> None:
    for role, part in tensor["parts"].items():
        got = ds[f"{name}:{role}"].compute().values
        assert got.tobytes() == arrays[part["npz"]].tobytes()


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
def test_bad_files(path: Path) -> None:
    text = path.with_suffix(".txt").read_text()
    when = text[1 : text.index("]")]
    start = time.perf_counter()
    opened = _open_or_error(path)
    if isinstance(opened, xckpt.CheckpointError):
        assert when.startswith(("open", "either")), opened
        _check_message(opened, path)
    elif when == "either":
        opened.compute()
    else:
        assert when != "open"
        name = when.rpartition("read:")[2].split()[0]
        with pytest.raises(xckpt.CheckpointError) as caught:
            opened[name].compute()
        _check_message(caught.value, path)
        assert caught.value.tensor == name
    assert time.perf_counter() - start < 1


def _open_or_error(path: Path) -> xr.Dataset | xckpt.CheckpointError:
    try:
        return xr.open_dataset(path, engine="ztensor", verify=True)
    except xckpt.CheckpointError as error:
        return error


def _check_message(error: xckpt.CheckpointError, path: Path) -> None:
    assert str(path) in str(error)
    assert error.rule


@pytest.mark.parametrize("verify", [None, True])
def test_sparse_files_as_sparse_chunks(golden: Path, verify: bool | None) -> None:
    import sparse

    for name in ("v1_sparse_csr", "v1_sparse_coo", "v2_layouts"):
        path = golden / "ztensor" / f"{name}.zt"
        expected, arrays = expectation(path)
        ds = xr.open_dataset(path, engine="ztensor", sparse=True, verify=verify)
        for tensor, described in expected["tensors"].items():
            if "sparse" not in described["format"]:
                continue
            data = ds[tensor].data
            assert isinstance(data._meta, sparse.COO)
            block = data.compute()
            assert isinstance(block, sparse.COO)
            dense = xr.DataArray(block.todense(), dims=ds[tensor].dims)
            _check_dense(dense, described["dense"], arrays)


CONFORMANCE = golden_files("ztensor/conformance/*/*.zt")


@pytest.mark.parametrize("path", CONFORMANCE, ids=lambda path: path.stem)
def test_conformance(path: Path) -> None:
    """Give the verdict that the reference implementation's corpus expects, of values too."""
    case = json.loads((path.parents[1] / "cases.json").read_text())[path.stem]
    verdict, _, rule = case["expect"].partition(":")
    arguments = re.findall(r'"(\w+)"', case["op"])
    if case["op"] == "open":
        if verdict == "Reject":
            with pytest.raises(xckpt.FormatError, match=re.escape(path.name)) as caught:
                xr.open_dataset(path, engine="ztensor")
            assert caught.value.rule == rule
        else:
            assert not xr.open_dataset(path, engine="ztensor").nbytes < 0
        return
    tensor = xr.open_dataset(path, engine="ztensor", verify=True)[arguments[0]]
    if verdict == "Valid":
        tensor.compute()
        return
    expected = xckpt.UnsupportedError if verdict == "Unsupported" else xckpt.CheckpointError
    with pytest.raises(expected, match=re.escape(path.name)) as raised:
        tensor.compute()
    assert raised.value.rule == rule or verdict == "Unsupported"
