"""Bytes after the end of a file are named with their offset, or the file is refused by rule."""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.contracts.every import declared
from tests.formats.gguf_files import gguf_file

# The others refuse such bytes, or allow gaps anywhere.
WARNING = ("gguf", "primitiv", "torch", "npz")
FILES = [
    pytest.param(name, data, id=f"{name}-{label}")
    for name in (*WARNING, "flax", "onnx", "orbax", "safetensors")
    for label, data in declared(name).small_files().items()
]


@pytest.mark.parametrize(("name", "data"), FILES)
@pytest.mark.parametrize("more", [bytes(4096), b"garbage!" * 8], ids=["zeros", "garbage"])
def test_trailing_bytes_change_no_value_silently(name: str, data: bytes, more: bytes) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        expected = xr.open_dataset(data, engine=name).compute()
        caught.clear()
        try:
            ds = xr.open_dataset(data + more, engine=name)
        except xckpt.CheckpointError as error:
            assert error.offset is not None  # noqa: PT017
            return
    xr.testing.assert_equal(ds.compute(), expected)
    texts = [str(warning.message) for warning in caught]
    assert name in WARNING
    assert any(re.search(rf"\b{len(more)}\b", text) for text in texts)
    assert any(re.search(rf"\b{len(data)}\b", text) for text in texts)


@pytest.mark.parametrize("name", ["npz", "torch", "keras"])
def test_archives_with_trailing_bytes_name_the_end(name: str) -> None:
    files = declared(name).small_files().values()
    archives = [data for data in files if data.startswith(b"PK")]
    assert archives
    for data in archives:
        with pytest.raises(xckpt.FormatError, match="5 bytes follow") as caught:
            xr.open_dataset(data + b"more!", engine=name)
        assert caught.value.offset == len(data)
        assert f"cut the file to {len(data)} bytes" in str(caught.value.hint)
        with pytest.raises(xckpt.FormatError, match="missing"):
            xr.open_dataset(data[:-1], engine=name)


def test_safetensors_with_trailing_bytes_name_the_end() -> None:
    [data, *_] = declared("safetensors").small_files().values()
    with pytest.raises(xckpt.FormatError) as caught:
        xr.open_dataset(data + b"more!", engine="safetensors")
    assert f"cut the file to {len(data)} bytes" in str(caught.value.hint)


REMOVED: dict[int, Any] = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"}
REMOVED |= {36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 99: "unknown", 2**31: "unknown"}


@pytest.mark.parametrize("kind", REMOVED)
def test_types_that_ggml_lacks_have_a_remedy(kind: int) -> None:
    tensors = [("w", [32], kind, 0), ("x", [4], 0, 32)]
    data = gguf_file({}, tensors, bytes(32) + np.ones(4, "f4").tobytes())
    ds = xr.open_dataset(data, engine="gguf")
    assert ds["x"].values.tolist() == [1, 1, 1, 1]
    with pytest.raises(xckpt.UnsupportedError, match=REMOVED[kind]) as caught:
        ds["w"].values  # noqa: B018
    hint = str(caught.value.hint)
    base = {31: "Q4_0,", 36: "IQ4_NL,"}.get(kind, "uanti")
    assert base in hint
