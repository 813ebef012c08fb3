"""Values of safetensors files that the package itself cannot write."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

import xckpt
from tests.formats.safetensors_files import entry, safetensors_file


@settings(max_examples=30)
@given(nps.arrays("u1", st.sampled_from([(0, 2), (1, 2), (3, 6)]), elements=st.integers(0, 15)))
def test_elements_of_4_bits(codes: np.ndarray) -> None:
    low, high = codes.reshape(-1, 2).T
    packed = (low | high << 4).astype("u1").tobytes()
    header = {"w": entry("F4", list(codes.shape), 0, len(packed))}
    file = safetensors_file(header, packed)
    expected = codes.view(ml_dtypes.float4_e2m1fn).astype("f4")
    ds = xr.open_dataset(file, engine="safetensors")
    np.testing.assert_array_equal(ds["w"].values, expected)
    np.testing.assert_array_equal(ds["w"][:, 1:].values, expected[:, 1:])
    stored = xr.open_dataset(file, engine="safetensors", decode=False)
    assert stored["w"].values.tobytes() == codes.tobytes()


def test_elements_of_6_bits_are_an_error_only_when_computed() -> None:
    header = {"w": entry("F6_E2M3", [2, 4], 0, 6), "x": entry("U8", [1], 6, 7)}
    ds = xr.open_dataset(safetensors_file(header, bytes(7)), engine="safetensors")
    assert ds["w"].shape == (2, 4)
    assert ds["w"].encoding["stored_dtype"] == "F6_E2M3"
    assert ds["x"].values == 0
    with pytest.raises(xckpt.UnsupportedError, match=r"'w'.*F6_E2M3"):
        ds["w"].compute()


def test_any_set_bit_is_true() -> None:
    file = safetensors_file({"w": entry("BOOL", [3], 0, 3)}, b"\x00\x01\x80")
    assert xr.open_dataset(file, engine="safetensors")["w"].values.tolist() == [False, True, True]


@pytest.mark.parametrize("dtype", ["U8", "F4", "F8_E5M2", "BF16", "F32"])
def test_the_largest_empty_array(dtype: str) -> None:
    file = safetensors_file({"w": entry(dtype, [0, 2**61 - 1], 0, 0)})
    assert xr.open_dataset(file, engine="safetensors")["w"].values.shape == (0, 2**61 - 1)
