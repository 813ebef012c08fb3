"""float16 is shown as float32, so that sums do not overflow, and stays float16 in files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.writing.saved import ENGINES, OPTIONS
from xckpt import formats

if TYPE_CHECKING:
    from pathlib import Path

WRITING = [
    format_name for format_name in ENGINES if "float16" in formats.get(format_name).can.types
]

# The sums of the values and of their squares exceed the largest float16.
VALUES = np.random.default_rng(0).normal(3, 40, (300, 200)).astype(np.float16)
PATTERNS = np.arange(1 << 16, dtype=np.uint16).view(np.float16)


@pytest.fixture(params=WRITING)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"half{formats.get(request.param).suffixes[0]}"
    ds = xr.Dataset({"w": (("i", "j"), VALUES), "every": ("k", PATTERNS)})
    xckpt.save(ds, path, request.param, **OPTIONS.get(request.param, {}))
    return path


def test_moments_are_those_of_the_numbers(path: Path) -> None:
    w = xr.open_dataset(path)["w"]
    assert {array.dtype.name for array in (w, w.data, w.data._meta)} == {"float32"}
    wide = VALUES.astype(np.float64)
    np.testing.assert_allclose([w.mean(), w.std(), w.sum()], [f(wide) for f in MOMENTS], rtol=1e-5)
    assert w.encoding["stored_dtype"] == np.float16
    assert w.encoding["nbytes"] == VALUES.nbytes


MOMENTS = (np.mean, np.std, np.sum)


def test_the_stored_type_is_there(path: Path) -> None:
    ds = xr.open_dataset(path, decode=False)
    assert ds["every"].values.tobytes() == PATTERNS.tobytes()


def test_every_pattern_is_written_again(path: Path) -> None:
    again = path.with_name(f"again{path.suffix}")
    options = OPTIONS.get(xckpt.read_index(path).format, {})
    ds = xr.open_dataset(path)
    for form in (ds, ds.chunk(9999), ds.load()):
        xckpt.save(form, again, overwrite=True, **options)
        assert again.read_bytes() == path.read_bytes()
    xckpt.convert(path, again, overwrite=True)
    assert xckpt.read_index(again).tensors["w"].dtype == "float16"


def test_statistics_are_those_of_the_stored_elements(path: Path) -> None:
    shown, stored = xr.open_dataset(path), xr.open_dataset(path, decode=False)
    xr.testing.assert_equal(xckpt.stats(shown, cache=False), xckpt.stats(stored, cache=False))
    table = xckpt.stats(shown, cache=False)["w"].sel(statistic=["q0.5", "max"])
    assert set(table.values) <= set(VALUES.reshape(-1).astype(np.float64))


def test_compared_with_another_type_of_16_bits(path: Path) -> None:
    bfloat_path = path.with_name("other.zt")
    xckpt.save(xr.Dataset({"w": (("i", "j"), VALUES.astype(ml_dtypes.bfloat16))}), bfloat_path)
    differences = xckpt.compare(xr.open_dataset(path)[["w"]], bfloat_path)["w"]
    expected = np.abs(VALUES.astype("f8") - VALUES.astype(ml_dtypes.bfloat16).astype("f8")).max()
    assert differences.sel(statistic="max_abs").item() == expected
