"""Moments have the same bits for any cuts of a tensor."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stats.reference import dtype_of, sketch_of, stats_of
from xckpt.arrays.streams import LEAF
from xckpt.scan.scanning import MergeTree, runs
from xckpt.statistics import stats
from xckpt.statistics.block_loops import EMPTY, fold, merge

VALUES = np.random.default_rng(0).standard_normal(7 * LEAF + 1234).astype(np.float32) * 3 + 1


def facts(sketch: Any) -> tuple[Any, ...]:
    """Give all of a sketch, for comparison."""
    return (
        sketch.count,
        sketch.moments(),
        sketch.codes.tolist(),
        sketch.counts.tolist(),
        sketch.low,
        sketch.high,
        sketch.rows.dead,
    )


@given(st.lists(st.integers(0, VALUES.size), max_size=8).map(sorted))
@settings(max_examples=60)
def test_cuts_at_any_positions(cuts: list[int]) -> None:
    assert facts(sketch_of(VALUES, cuts, row=100)) == facts(sketch_of(VALUES, row=100))


@pytest.mark.parametrize("zeros", [(0.0, -0.0), (-0.0, 0.0)])
def test_extremes_have_one_sign_of_zero_for_any_cuts(zeros: tuple[float, float]) -> None:
    values = np.repeat(np.array(zeros, np.float32), LEAF)
    for cuts in ([], [LEAF]):
        sketch = sketch_of(values, cuts)
        assert sketch.low is not None
        assert sketch.high is not None
        assert [math.copysign(1, end) for end in (sketch.low, sketch.high)] == [-1, 1]


def test_both_implementations_of_merge_agree_exactly() -> None:
    rng = np.random.default_rng(2)
    for _ in range(40):
        nodes = rng.standard_normal((8, 7)) * 10.0 ** rng.integers(-9, 9, (8, 7))
        nodes[:, 0] = rng.integers(1, 4, 8) * 100
        nodes[:, 6] = rng.choice([0, 256])
        tree: MergeTree[Any] = MergeTree(merge, EMPTY)
        for number, node in enumerate(nodes.tolist()):
            tree.add(0, number, tuple(node))
        fold(nodes, 8)
        assert tree.total() == tuple(nodes[0].tolist())


@pytest.mark.parametrize("rare", [np.nan, np.inf, 1e300])
def test_leaves_that_need_a_second_look(rare: float) -> None:
    values = np.random.default_rng(3).standard_normal(11 * LEAF)
    values[[3 * LEAF + 1, 8 * LEAF]] = rare
    values[5 * LEAF : 6 * LEAF] = rare
    assert facts(sketch_of(values)) == facts(sketch_of(values, [LEAF * n for n in range(1, 11)]))


def test_merging_with_nothing_changes_nothing() -> None:
    node = (5.0, 1.0, 1e-17, 2.0, 3.0, 4.0, 0.0)
    assert merge(EMPTY, node) == node == merge(node, EMPTY)


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 20))
def test_runs_cover_a_range_by_aligned_nodes(first: int, count: int) -> None:
    at = first
    for level, number in runs(first, count):
        assert number << level == at
        at += 1 << level
    assert at == first + count


@pytest.mark.parametrize("row", [2, 3, 1000, LEAF, LEAF + 1, 3 * LEAF])
def test_dead_rows_are_counted_across_blocks(row: int) -> None:
    rng = np.random.default_rng(row)
    rows = VALUES.size // row
    for name in ("float32", "uint16", "int64"):
        values = (VALUES[: rows * row] * 1000).astype(name).reshape(rows, row)
        values[values == 0] = 1
        dead = rng.random(rows) < 0.5
        values[dead] = 0
        values[~dead, 0] = 0
        sketch = sketch_of(values, [row // 2, 5 * LEAF // 2], row=row)
        assert sketch.rows.dead == int(dead.sum()), name


def test_negative_zeros_make_a_dead_row() -> None:
    for name in ("float32", "float16"):
        values = np.zeros((3, 40), name)
        values[1] = -0.0
        values[2, 39] = 1
        assert sketch_of(values, row=40).rows.dead == 2


@pytest.mark.parametrize("exponent", [-85, -100, -123, -154, -161, 85, 150])
@pytest.mark.parametrize("order", ["zeros first", "zeros last", "between"])
def test_zeros_next_to_numbers_out_of_range(exponent: int, order: str) -> None:
    """Zeros have no exponent: they take on that of the values that they are merged with."""
    numbers = np.random.default_rng(0).standard_normal(3 * LEAF + 100) + 0.25
    zeros = np.zeros(2 * LEAF + 50)
    parts = [zeros, numbers] if order == "zeros first" else [numbers, zeros]
    parts = [numbers[:LEAF], zeros, numbers[LEAF:]] if order == "between" else parts
    # A power of two, so that nothing is rounded.
    scale = 2.0 ** round(exponent * np.log2(10))
    values = np.concatenate(parts)
    near, far = stats_of(values), stats_of(values * scale)
    for name in ("skew", "kurtosis"):
        assert far[name] == pytest.approx(near[name], rel=1e-12)
    for name in ("mean", "std", "rms", "l2", "min", "max", "absmax"):
        assert far[name] / scale == pytest.approx(near[name], rel=1e-14), name
    in_one_pass = facts(sketch_of(values * scale))
    for cuts in ([LEAF], [len(zeros)], [100, 2 * LEAF, 2 * LEAF + 1], [LEAF - 1, 4 * LEAF]):
        assert facts(sketch_of(values * scale, cuts)) == in_one_pass
    data = xr.Dataset({"x": ("a", values * scale)})
    described = stats(data)["x"]
    for chunks in (LEAF, 1000, 2 * LEAF + 50):
        xr.testing.assert_equal(stats(data.chunk(a=chunks))["x"], described)


def test_a_type_without_zeros_has_no_rows_of_them() -> None:
    values = np.zeros((3, 40), np.uint8).view(dtype_of("float8_e8m0fnu"))
    assert sketch_of(values, row=40).rows.dead == 0
