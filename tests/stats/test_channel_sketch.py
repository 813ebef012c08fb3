"""Statistics of rows and columns equal numpy's, and cost other statistics nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dask.array as da
import ml_dtypes
import numpy as np
import pytest
import xarray as xr

from tests.stats.checkpoints import model, settled, write
from xckpt.statistics import QUANTILES, histogram, statistic_names, stats
from xckpt.statistics.channel_sketches import OUTLYING

if TYPE_CHECKING:
    from pathlib import Path

Array = np.ndarray[Any, np.dtype[Any]]

TYPES = [
    *(np.float32, np.float64, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn),
    *(np.int8, np.int32, np.uint64, np.bool_),
]


def weight(dtype: Any, rows: int = 300, columns: int = 70) -> Array:
    """Return a matrix with dead and outlying channels that no leaf begins with."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((rows, columns)).clip(-3, 3)
    if np.dtype(dtype).kind in "iub":
        values = np.abs(values) * 5 + 1
    values[[7, 100, 299]] = 0
    values[:, [0, 64]] = 0
    values[17] *= 0.001
    if np.dtype(dtype).kind not in "iub":
        values[20, 33] = 60
    return values.astype(dtype)


def expected(values: Array) -> dict[str, float]:
    """Return what numpy finds."""
    wide = np.abs(values.astype(np.float64))
    rows, columns = wide.max(axis=1), wide.max(axis=0)
    far = OUTLYING * values.astype(np.float64).std()
    return {
        "dead_columns": int(np.count_nonzero(columns == 0)),
        "faint_rows": int(np.sum((rows > 0) & (rows < np.median(rows[rows > 0]) / 100))),
        "outlier_rows": int(np.count_nonzero(rows > far)),
        "outlier_columns": int(np.count_nonzero(columns > far)),
        "top_row": int(rows.argmax()),
        "top_column": int(columns.argmax()),
    }


def channels_of(obj: Any, name: str = "w") -> dict[str, float]:
    statistics = stats(obj, channels=True, progress=False)[name]
    return dict(
        zip(
            statistics["statistic"].to_numpy().tolist(), statistics.to_numpy().tolist(), strict=True
        )
    )


@pytest.mark.parametrize("dtype", TYPES)
def test_channels_of_every_element_type(dtype: Any) -> None:
    values = weight(dtype)
    channels = channels_of(xr.Dataset({"w": (("a", "b"), values)}))
    reference = expected(values)
    if np.dtype(dtype).kind in "iub":
        reference = {"dead_columns": reference["dead_columns"]}
    else:
        info: Any = ml_dtypes.finfo  # untyped
        is_tiny = np.abs(values.astype(float)) < float(info(dtype).smallest_normal)
        assert channels["subnormal"] == np.count_nonzero((values != 0) & is_tiny)
    assert {name: channels[name] for name in reference} == reference


@pytest.mark.parametrize("rows", [300, 5000])
@pytest.mark.parametrize("order", ["C", "F"])
def test_channels_of_every_layout_and_cut(rows: int, order: str, tmp_path: Path) -> None:
    values = weight(np.float32, rows)
    ds = xr.Dataset({"w": (("a", "b"), values)})
    np.savez(tmp_path / "m.npz", w=np.asarray(values, order=order))  # type: ignore[call-overload]
    reference = expected(values)
    lazy = xr.Dataset({"w": (("a", "b"), da.from_array(values, (max(1, rows // 7), 70)))})
    for obj in (tmp_path / "m.npz", ds, lazy):
        channels = channels_of(obj)
        assert {name: channels[name] for name in reference} == reference


def test_stacked_experts_have_rows_along_the_last_axis() -> None:
    values = np.random.default_rng(0).standard_normal((3, 400, 200)).astype(np.float32)
    values[..., 5] = 0
    values[1, 399, 7] = 1000
    channels = channels_of(xr.Dataset({"w": (("e", "a", "b"), values)}))
    assert (channels["dead_columns"], channels["top_row"], channels["top_column"]) == (1, 799, 7)


def test_nonfinite_elements_are_neither_dead_nor_outliers() -> None:
    values = weight(np.float32)
    values[5, 3], values[6, 0] = np.nan, np.inf
    channels = channels_of(xr.Dataset({"w": (("a", "b"), values)}))
    assert (channels["dead_columns"], channels["outlier_columns"], channels["top_row"]) == (
        1,
        1,
        20,
    )


@pytest.mark.parametrize(
    ("dtype", "narrow", "bits"),
    [
        (np.float32, ml_dtypes.bfloat16, 16),
        (np.float32, np.float16, 13),
        (np.float64, np.float32, 29),
    ],
)
def test_spare_bits(dtype: Any, narrow: Any, bits: int) -> None:
    values = np.random.default_rng(0).standard_normal((5000, 9)).astype(narrow).astype(dtype)
    ds = xr.Dataset({"w": (("a", "b"), values)})
    assert channels_of(ds)["spare_bits"] == bits
    values[4999, 8] = np.nextafter(values[4999, 8], dtype(9))
    assert channels_of(ds)["spare_bits"] < bits


class TestCost:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return settled(write(tmp_path / "m.safetensors", model() | {"w": weight(np.float32)}))

    def test_other_statistics_do_not_change(self, path: Path) -> None:
        plain, more = stats(path), stats(path, channels=True, cache=False)
        assert plain["w"].attrs == {"dead_rows": 3}
        names = plain["statistic"].to_numpy().tolist()
        assert more["statistic"].to_numpy().tolist() == statistic_names(QUANTILES, channels=True)
        for name in plain:
            xr.testing.assert_equal(more[name].sel(statistic=names), plain[name])

    def test_one_pass_computes_all_statistics(self, path: Path, read: list[int]) -> None:
        first = stats(path, channels=True)
        assert sum(read) == sum(tensor.size for tensor in model().values()) + 300 * 70
        read.clear()
        xr.testing.assert_identical(stats(path, channels=True), first)
        stats(path)
        histogram(path)
        assert read == []

    def test_statistics_along_a_dimension_have_no_channels(self, path: Path) -> None:
        with pytest.raises(ValueError, match="leave out dim="):
            stats(path, channels=True, dim="d32_1")
