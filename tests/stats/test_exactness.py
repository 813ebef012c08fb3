"""Statistics agree with exact arithmetic, for every element type and special value."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stats.reference import (
    FLOATS,
    LARGE_INTEGERS,
    NAMES,
    SMALL_FLOATS,
    SMALL_INTEGERS,
    dtype_of,
    exact_stats,
    sketch_of,
    stats_of,
)
from xckpt.statistics import QUANTILES
from xckpt.statistics.describe import describe_all

if TYPE_CHECKING:
    from collections.abc import Mapping

Array = np.ndarray[Any, np.dtype[Any]]

COUNTED = ("count", "nan", "inf", "zero", "min", "max", "absmax", "unique")


def random_values(name: str, count: int, seed: int = 0) -> Array:
    """Give values of a type, with everything that it has besides numbers."""
    rng = np.random.default_rng(seed)
    dtype = dtype_of(name)
    if dtype.kind == "b":
        return rng.random(count) < 0.3
    if "int" in name:
        bits = 8 * dtype.itemsize
        if name in {"int4", "uint4"}:
            return rng.integers(-8 if name == "int4" else 0, 8, count).astype(dtype)
        info = np.iinfo(dtype)
        shifts = rng.integers(0, bits - 1, count).astype(dtype)
        shifted: Array = rng.integers(info.min, info.max, count, dtype, endpoint=True) >> shifts
        return shifted
    values = (rng.standard_normal(count) * 3).astype(np.float32).astype(dtype)
    odd = np.array([0.0, -0.0, np.nan, np.inf, -np.inf], np.float32).astype(dtype)
    values[: min(5, count)] = odd[: min(5, count)]
    return values


def same(a: float, b: float) -> bool:
    """Return whether numbers are equal or both NaN, whatever the sign of zero."""
    return a == b or (math.isnan(a) and math.isnan(b))


def assert_same(actual: Mapping[str, float], expected: Mapping[str, float], rel: float) -> None:
    for name in NAMES:
        if name in COUNTED or math.isnan(expected[name]):
            assert same(actual[name], expected[name]), name
        elif name.startswith("q"):
            assert actual[name] == pytest.approx(expected[name], rel=2.0**-8, abs=0), name
        else:
            assert actual[name] == pytest.approx(expected[name], rel=rel, abs=1e-14), name


def assert_identical(actual: Mapping[str, float], expected: Mapping[str, float]) -> None:
    for name in NAMES:
        assert same(actual[name], expected[name]), (name, actual[name], expected[name])


@pytest.mark.parametrize("count", [0, 1, 2, 5, 300, 20_000])
@pytest.mark.parametrize("name", [*FLOATS, *SMALL_INTEGERS, *LARGE_INTEGERS])
def test_all_statistics_of_every_type(name: str, count: int) -> None:
    values = random_values(name, count)
    assert_same(stats_of(values), exact_stats(values), rel=1e-12)


@pytest.mark.parametrize("name", [*SMALL_FLOATS, *SMALL_INTEGERS])
def test_small_types_are_exact_to_the_last_bit(name: str) -> None:
    values = random_values(name, 30_000, seed=1)
    assert_identical(stats_of(values), exact_stats(values))


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int16"])
def test_every_bit_pattern_is_counted(name: str) -> None:
    dtype = dtype_of(name)
    codes = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}")
    values = np.concatenate([codes, codes[::7]]).view(dtype)
    with np.errstate(invalid="ignore"):
        assert_identical(stats_of(values), exact_stats(values))


@pytest.mark.parametrize("name", ["float32", "float64", "int32", "int64", "uint64"])
def test_large_types_beside_extended_precision(name: str) -> None:
    values = random_values(name, 300_000, seed=2)
    statistics = stats_of(values)
    wide = values.astype(np.longdouble)
    wide = wide[np.isfinite(wide)]
    mean = wide.mean()
    std = np.sqrt(((wide - mean) ** 2).mean())
    assert statistics["mean"] == pytest.approx(float(mean), rel=1e-15, abs=1e-17)
    assert statistics["std"] == pytest.approx(float(std), rel=1e-14)
    skew, kurtosis = (float((((wide - mean) / std) ** p).mean()) for p in (3, 4))
    assert statistics["skew"] == pytest.approx(skew, rel=1e-12, abs=1e-14)
    assert statistics["kurtosis"] == pytest.approx(kurtosis - 3, rel=1e-12, abs=1e-13)


def test_a_mean_far_from_zero_costs_no_digits() -> None:
    rng = np.random.default_rng(3)
    for mean in (1e6, 1e12):
        values = mean + rng.standard_normal(40_000) * 1e-3 * max(1.0, mean / 1e8)
        statistics = stats_of(values)
        exact = exact_stats(values)
        for name in ("mean", "std", "skew", "kurtosis"):
            assert statistics[name] == pytest.approx(exact[name], rel=1e-9, abs=1e-9), name
        # Squares of the values themselves have no digit of it left.
        assert statistics["std"] == pytest.approx(float(exact["std"]), rel=1e-12)


def test_float32_far_from_zero() -> None:
    values = (1e6 + np.random.default_rng(4).integers(0, 3, 40_000) * 0.0625).astype(np.float32)
    assert_same(stats_of(values), exact_stats(values), rel=1e-12)


def test_integers_beyond_the_digits_of_float64() -> None:
    rng = np.random.default_rng(5)
    values = (1 << 62) + rng.integers(0, 1000, 40_000)
    statistics = stats_of(values)
    exact = exact_stats(values)
    assert statistics["mean"] == exact["mean"]
    assert statistics["std"] == pytest.approx(exact["std"], rel=1e-12)
    assert sketch_of(values).total == int(values.astype(object).sum())
    assert sketch_of(values).low == int(values.min())


@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "int64", "uint8"])
def test_ten_million_times_one_value(name: str) -> None:
    value = 3 if "int" in name else 0.1
    values = np.full(10_000_000, value, dtype_of(name))
    statistics = stats_of(values)
    exactly = float(values[0])
    for statistic in ("min", "max", "mean", "q0.001", "q0.5", "q0.999"):
        assert statistics[statistic] == exactly, statistic
    assert statistics["std"] == 0.0
    assert statistics["rms"] == pytest.approx(exactly, rel=1e-15)
    assert math.isnan(statistics["skew"])
    assert math.isnan(statistics["kurtosis"])


@pytest.mark.parametrize("scale", [1e300, 1e200, 1e-200, 1e-300])
def test_float64_whose_squares_are_out_of_range(scale: float) -> None:
    values = np.random.default_rng(6).standard_normal(50_000) * scale
    statistics = stats_of(values)
    unit = exact_stats(values / scale)
    for name in ("mean", "std", "rms", "l2"):
        assert statistics[name] / scale == pytest.approx(unit[name], rel=1e-9), name
    for name in ("skew", "kurtosis"):
        assert statistics[name] == pytest.approx(unit[name], rel=1e-9, abs=1e-9), name
    mixed = np.concatenate([values, np.ones(50_000)])
    assert stats_of(mixed)["absmax"] == max(1.0, np.abs(values).max())
    assert np.isfinite(stats_of(mixed)["kurtosis"])


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_subnormal_numbers_and_zeros_of_both_signs(name: str) -> None:
    dtype = np.dtype(name)
    tiny = np.finfo(dtype).smallest_subnormal
    values = np.array([-tiny, -0.0, -0.0, 0.0, tiny, tiny * 5, 1.0], dtype)
    statistics = stats_of(values, [0.0, 0.2, 0.4, 0.5, 1.0])
    assert statistics["zero"] == 3
    assert statistics["min"] == -tiny
    assert statistics["q0.2"] == statistics["q0.4"] == statistics["q0.5"] == 0.0
    assert statistics["q1"] == 1.0


def test_tensors_of_nan_alone() -> None:
    for name in ("float32", "float64", "float16", "bfloat16"):
        statistics = stats_of(np.full(40_000, np.nan, dtype_of(name)))
        assert (statistics["count"], statistics["nan"], statistics["l2"]) == (40_000, 40_000, 0.0)
        assert all(math.isnan(statistics[s]) for s in ("min", "max", "mean", "std", "q0.5"))


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=60),
    st.sampled_from(["float32", "float64", "float16", "bfloat16"]),
)
@settings(max_examples=150)
def test_statistics_of_any_floats(numbers: list[float], name: str) -> None:
    with np.errstate(over="ignore"):
        values = np.array(numbers, np.float32).astype(dtype_of(name))
    statistics, exact = stats_of(values), exact_stats(values)
    for statistic in (*COUNTED, "mean", "std", "rms", "l2"):
        if name == "float64" and statistic in {"std", "rms", "l2"} and exact["absmax"] < 1e-37:
            continue  # exact_stats itself is at the limits there
        spread = 1e-13 * exact["absmax"] if exact["absmax"] == exact["absmax"] else 0
        np.testing.assert_allclose(
            statistics[statistic], exact[statistic], rtol=1e-13, atol=spread, err_msg=statistic
        )
    if values.dtype.itemsize == 2:
        for quantile in QUANTILES:
            assert same(statistics[f"q{quantile:g}"], exact[f"q{quantile:g}"])


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40))
@settings(max_examples=100)
def test_statistics_of_any_integers(numbers: list[int]) -> None:
    values = np.array(numbers, np.int64)
    sketch = sketch_of(values)
    assert sketch.total == sum(numbers)
    assert (sketch.low, sketch.high) == (min(numbers), max(numbers))
    statistics, exact = stats_of(values), exact_stats(values)
    assert statistics["mean"] == exact["mean"]
    np.testing.assert_allclose(statistics["std"], exact["std"], rtol=1e-12)


@pytest.mark.parametrize("name", ["float32", "float64", "int64", "uint8", "bfloat16", "float16"])
def test_tensors_described_together_equal_those_described_alone(name: str) -> None:
    rng = np.random.default_rng(3)
    tensors = [(rng.standard_normal(size) * 30).astype(dtype_of(name)) for size in (1, 0, 700, 5)]
    tensors += [np.zeros(9, dtype_of(name)), -tensors[2][:300]]
    if tensors[0].dtype.kind in "fV":
        special = [np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0, -1.0, 1e-40]
        tensors += [np.array(special, dtype_of(name)), np.full(3, np.nan, dtype_of(name))]
    sketches = [sketch_of(tensor) for tensor in tensors]
    alone = np.array([describe_all([sketch], QUANTILES)[0] for sketch in sketches])
    together = describe_all([*sketches, *sketches[::-1]], QUANTILES)
    np.testing.assert_array_equal(together, [*alone, *alone[::-1]])
    np.testing.assert_array_equal(np.signbit(together), np.signbit([*alone, *alone[::-1]]))


def test_a_quantile_that_is_zero_has_no_sign() -> None:
    statistics = stats_of(np.array([-0.0, -0.0, 0.0, 1.0, 2.0], np.float32), [0.25])
    assert math.copysign(1, statistics["q0.25"]) == 1
