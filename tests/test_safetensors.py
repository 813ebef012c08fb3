"""safetensors files through ``xarray.open_dataset``: what the package wrote, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dask.array as da
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

import xckpt
from tests.formats.safetensors_files import entry, safetensors_file

if TYPE_CHECKING:
    from pathlib import Path

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = ["float16", "float32", "float64", "complex64"]
NARROW = [
    *["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"],
    *["float8_e4m3fnuz", "float8_e5m2fnuz"],
]


def every_bit_pattern(dtype: str) -> np.ndarray:
    """Make an array of many values, NaN with all payloads of the narrow types among them."""
    size = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
    codes = np.arange(2**16 if size > 1 else 2**8, dtype=f"u{min(size, 2)}")
    if size > 2:
        codes = (codes.astype("u8") * 0x9E3779B97F4A7C15).view(f"u{min(size, 4)}")
    return codes.view(getattr(ml_dtypes, dtype, dtype)).reshape(4, -1)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A file with all element types that numpy and ml_dtypes can give the package."""
    arrays = {f"m.{dtype}": every_bit_pattern(dtype) for dtype in [*INTEGERS, *FLOATS, *NARROW]}
    arrays["m.bool"] = np.array([[True, False, True]])
    arrays["scalar"] = np.array(2.5)
    arrays["none"] = np.zeros((3, 0), "f4")
    path = tmp_path_factory.mktemp("safetensors") / "m.safetensors"
    safetensors.numpy.save_file(arrays, path, {"format": "np", "licence": "MIT"})
    return path, arrays


def test_stored_values(written: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, arrays = written
    ds = xr.open_dataset(path, decode=False)
    assert ds.attrs == {"format": "np", "licence": "MIT"}
    assert ds.encoding["format"] == "safetensors"
    assert set(ds.variables) == set(arrays)
    for name, array in arrays.items():
        assert isinstance(ds[name].data, da.Array)
        values = ds[name].values
        assert (values.dtype, values.shape) == (array.dtype, array.shape)
        assert values.tobytes() == array.tobytes()


def test_decoded_values(written: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, arrays = written
    ds = xr.open_dataset(path, engine="safetensors")
    for name, array in arrays.items():
        narrow = name.removeprefix("m.") in NARROW
        expected = array.astype("f4") if narrow else array
        assert ds[name].dtype == expected.dtype
        assert ds[name].encoding["dtype"] == array.dtype
        with np.errstate(invalid="ignore"):  # numpy 2.0 warns of NaN in complex numbers
            np.testing.assert_array_equal(ds[name].values, expected)
            if array.ndim:
                np.testing.assert_array_equal(ds[name][-1:, 1:].values, expected[-1:, 1:])


def test_numpy_reads_the_same(written: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, _ = written
    plain = [f"m.{dtype}" for dtype in [*INTEGERS, *FLOATS, "bool"]]
    ds = xr.open_dataset(path, engine="safetensors", tensors=plain)
    with safetensors.safe_open(path, "np") as file:
        for name in plain:
            assert ds[name].values.tobytes() == file.get_tensor(name).tobytes()


def test_tree(written: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, _ = written
    tree = xr.open_datatree(path, engine="safetensors")
    assert tree.attrs["format"] == "np"
    assert set(tree.children) == {"m"}
    assert float(tree["scalar"]) == 2.5
    np.testing.assert_array_equal(tree["m/bool"].values, [[True, False, True]])


def test_content_tells_the_engine(written: tuple[Path, Any], tmp_path: Path) -> None:
    path, arrays = written
    other = tmp_path / "renamed.bin"
    other.write_bytes(path.read_bytes())
    assert set(xr.open_dataset(other).variables) == set(arrays)
    assert xckpt.read_index(other).format == "safetensors"
    (tmp_path / "x.safetensors").write_text("no such thing, in spite of its name")
    with pytest.raises(ValueError, match="did not find a match"):
        xr.open_dataset(tmp_path / "x.safetensors")


def test_a_truncated_file_is_an_error_that_tells(written: tuple[Path, Any], tmp_path: Path) -> None:
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(written[0].read_bytes()[:-1])
    with pytest.raises(xckpt.FormatError, match=r"cut\.safetensors: .* \[MetadataIncomplete"):
        xr.open_dataset(cut)


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
    assert ds["w"].encoding["dtype"] == "F6_E2M3"
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
