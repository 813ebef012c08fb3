"""Files of the reference implementation, read by this package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

if TYPE_CHECKING:
    from pathlib import Path

ztensor = pytest.importorskip("ztensor", reason="the reference implementation is not installed")
numpy_io = pytest.importorskip("ztensor.numpy")

DTYPES = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1"]


def arrays() -> dict[str, Any]:
    """Make arrays of all types and of odd shapes."""
    rng = np.random.default_rng(0)
    arrays = {f"t.{dtype}": rng.integers(0, 100, (5, 7)).astype(f"<{dtype}") for dtype in DTYPES}
    arrays |= {
        "empty": np.zeros((0, 3), "<f4"),
        "one": np.ones(1, "<f4"),
        "bool": rng.random(9) < 0.5,
        "Ünïcode 名": np.arange(3, dtype="<i4"),
        "deep": np.arange(16, dtype="<u1").reshape((1, 2) * 4),
    }
    return arrays


@pytest.mark.parametrize("digests", [None, True])
def test_files_saved_by_the_package(tmp_path: Path, digests: bool | None) -> None:
    path = str(tmp_path / "m.zt")
    written = arrays()
    numpy_io.save_file(written, path)
    ds = xr.open_dataset(path, engine="ztensor", verify=digests)
    assert set(ds.variables) == set(written)
    for name, array in written.items():
        got = ds.variables[name].values
        assert got.dtype == ("f4" if array.dtype == "f2" else array.dtype)
        np.testing.assert_array_equal(got, array)


def test_generations(tmp_path: Path) -> None:
    path = str(tmp_path / "m.zt")
    with ztensor.Writer(path, canonical=False) as writer:
        writer.add(
            "a", np.arange(4, dtype="<f4").tobytes(), [4], "f32", encoding="zt.zstd-seekable/1"
        )
    with ztensor.Writer(path, append=True, canonical=False) as writer:
        writer.add("b", np.arange(3, dtype="<i8").tobytes(), [3], "i64")
    ds = xr.open_dataset(path, engine="ztensor", verify=True)
    assert ds["a"].values.tolist() == [0, 1, 2, 3]
    assert ds["b"].values.tolist() == [0, 1, 2]
