"""Files as they are planned, opened as Datasets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

from tests.formats.indexes import dense, index_of
from tests.formats.planned import materialize
from xckpt import formats

if TYPE_CHECKING:
    from pathlib import Path

WEIGHT = np.arange(12, dtype="<f4").reshape(3, 4)
MASK = np.array([True, False, True])
DATA = {("w", "data"): WEIGHT.tobytes(), ("mask", "data"): MASK.tobytes()}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "1.0": ("ztensor", {}, {"digest": "crc32c"}),
    "1.0 zstd": ("ztensor", {}, {"encoding": "zstd", "digest": "sha256"}),
    "2": ("ztensor", {"version": "2"}, {}),
    "2 zstd": ("ztensor", {"version": "2"}, {"encoding": "zstd-seekable", "digest": "sha256"}),
    "burnpack": ("burnpack", {}, {}),
    "burnpack 0.20": ("burnpack", {"dialect": "0.20"}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_values_attributes_and_dimensions(tmp_path: Path, case: str) -> None:
    format_name, options, of = CASES[case]
    attrs = {"param_id": "7"}
    index = index_of(
        dense("w", "float32", (3, 4), dims=("rows", "columns"), attrs=attrs, **of),
        dense("mask", "bool", (3,), dims=("rows",), **of),
        note="made",
    )
    path = tmp_path / "m.bin"
    path.write_bytes(materialize(formats.get_writer(format_name).plan(index, **options), DATA))
    with xr.open_dataset(path, engine=format_name, verify=True) as ds:
        assert ds["w"].dims == ("rows", "columns")
        assert ds["mask"].dims == ("rows",)
        assert ds["w"].attrs == attrs
        assert ds.attrs["note"] == "made"
        np.testing.assert_array_equal(ds["w"].values, WEIGHT)
        np.testing.assert_array_equal(ds["mask"].values, MASK)
