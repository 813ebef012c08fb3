"""Statistics along named dimensions."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
import pytest
import xarray as xr

from tests.stats.reference import exact_stats
from xckpt.statistics import QUANTILES, stats


def dataset() -> xr.Dataset:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((6, 5, 40))
    values[2, 3, :] = 0
    values[1, 1, 7] = np.nan
    values[1, 2, 7] = -np.inf
    values[0, 0, :] = np.nan
    return xr.Dataset(
        {
            "x": (("layer", "row", "column"), values),
            "lazy": (("layer", "row", "column"), da.from_array(values, chunks=(2, 5, 11))),
            "other": (("layer",), np.arange(6)),
        },
        {"layer": [0, 1, 2, 5, 6, 7]},
    )


@pytest.mark.parametrize("dim", ["row", "column", ("layer", "column"), ("layer", "row")])
@pytest.mark.parametrize("small", [False, True])
def test_each_row_is_described_alone(
    dim: Any, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small:  # rows are long then, and sketched like tensors; or a few at a time
        monkeypatch.setattr("xckpt.statistics.describe.LONGEST_ROW", 64)
        monkeypatch.setattr("xckpt.statistics.entries.LONGEST_ROW", 64)
    ds = dataset()
    st = stats(ds, dim=dim)
    reduced = (dim,) if isinstance(dim, str) else dim
    kept = [d for d in ("layer", "row", "column") if d not in reduced]
    assert st["x"].dims == ("statistic", *kept)
    assert ("other" in st) == ("layer" in reduced)
    rows = ds["x"].transpose(*kept, ...).values
    for position in np.ndindex(*rows.shape[: len(kept)]):
        wanted = exact_stats(rows[position])
        found = dict(zip(st["statistic"].values, st["x"].values[:, *position], strict=True))
        for name in ("count", "nan", "inf", "zero", "min", "max", "absmax"):
            np.testing.assert_equal(found[name], wanted[name])
        for name in ("mean", "std", "rms", "l2", "skew", "kurtosis"):
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-11, atol=1e-13)
        for quantile in QUANTILES:
            name = f"q{quantile:g}"
            np.testing.assert_allclose(found[name], wanted[name], rtol=2.0**-8)
    np.testing.assert_allclose(st["lazy"], st["x"], rtol=1e-13)


def test_coordinates_of_kept_dimensions_stay() -> None:
    st = stats(dataset(), dim=["row", "column"])
    assert st["layer"].values.tolist() == [0, 1, 2, 5, 6, 7]


def test_distinct_values_are_counted_of_small_types() -> None:
    ds = xr.Dataset({"i": (("a", "b"), np.array([[1, 1, 2], [3, 3, 3]], np.int8))})
    assert stats(ds, dim="b")["i"].sel(statistic="unique").values.tolist() == [2, 1]
    wide = stats(ds.astype(np.float32), dim="b")["i"]
    assert wide.sel(statistic="unique").isnull().all()


def test_a_dimension_that_is_nowhere() -> None:
    with pytest.raises(ValueError, match="no variable has the dimension 'z'"):
        stats(dataset(), dim="z")
