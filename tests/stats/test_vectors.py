"""Statistics of float32 and float64 have the same bits with vectors and with plain loops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

from xckpt import histogram, stats
from xckpt.arrays.streams import LEAF
from xckpt.statistics import block_loops
from xckpt.statistics.vector_kernel import LANES, ROWS

if TYPE_CHECKING:
    from pathlib import Path

GROUP = LANES * ROWS
SIZES = (1, 7, LANES, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP + 5, LEAF, LEAF + GROUP + 3, 5 * LEAF)


def checkpoint(dtype: str) -> xr.Dataset:
    """Make tensors of many sizes, with everything that floats can be."""
    rng = np.random.default_rng(7)
    arrays: dict[str, Any] = {}
    for size in SIZES:
        values = rng.standard_normal(size) * rng.lognormal(sigma=3, size=size)
        info = np.finfo(dtype)
        arrays[f"normal.{size}"] = values
        arrays[f"far.{size}"] = 1e6 + rng.standard_normal(size)
        arrays[f"negative.{size}"] = -np.abs(values)
        arrays[f"constant.{size}"] = np.full(size, 0.1)
        arrays[f"few.{size}"] = rng.choice([-1.0, -0.0, 0.0, 2.0], size)
        arrays[f"tiny.{size}"] = rng.integers(-3, 4, size) * float(info.smallest_subnormal)
        arrays[f"large.{size}"] = rng.choice([-1.0, 0.5, 1.0], size) * float(info.max)
        arrays[f"odd.{size}"] = np.where(rng.random(size) < 0.01, np.nan, values)
        arrays[f"infinite.{size}"] = np.where(rng.random(size) < 0.001, -np.inf, values)
    return xr.Dataset({name: (f"{name}.axis", a.astype(dtype)) for name, a in arrays.items()})


def described(ds: xr.Dataset) -> tuple[Any, ...]:
    """Return all numbers that `stats` and `histogram` find."""
    table = stats(ds, cache=False, progress=False).ckpt.table()
    bins = histogram(ds[["normal.81920", "odd.16384"]], cache=False, progress=False)
    return table.to_numpy(float), *(bins[name].values for name in ("normal.81920", "odd.16384"))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_plain_loops_give_the_same_bits(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ds = checkpoint(dtype)
    by_vectors = described(ds)
    assert not block_loops.describe_floats.plain  # they compile with the versions under test
    monkeypatch.setattr(block_loops.describe_floats, "plain", True)
    for numbers, plain in zip(by_vectors, described(ds), strict=True):
        np.testing.assert_array_equal(numbers, plain)
        np.testing.assert_array_equal(np.signbit(numbers), np.signbit(plain))


# An interface of llvmlite that is gone, and one that writes another syntax.
BROKEN = """
import json
import numpy, xarray, xckpt
from llvmlite import ir
from xckpt.statistics import block_loops

def described():
    values = numpy.random.default_rng(0).standard_normal(40_000, "float32")
    ds = xarray.Dataset({"x": ("a", values)})
    return xckpt.stats(ds, cache=False, progress=False)["x"].values.tolist()

shuffle, ir.IRBuilder.shuffle_vector = ir.IRBuilder.shuffle_vector, None
without = described(), block_loops.describe_floats.plain
ir.IRBuilder.shuffle_vector = shuffle
block_loops.describe_floats.plain = None
ir.VectorType._to_string = lambda self: "<8 elements>"
changed = described(), block_loops.describe_floats.plain
print(json.dumps([without, changed]))
"""


def test_vectors_that_do_not_compile_are_replaced(tmp_path: Path) -> None:
    run = subprocess.run(  # noqa: S603  our own code
        [sys.executable, "-c", BROKEN],
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not run.stderr
    values = np.random.default_rng(0).standard_normal(40_000, "float32")
    ds = xr.Dataset({"x": ("a", values)})
    expected = stats(ds, cache=False, progress=False)["x"].values
    for result, is_plain in json.loads(run.stdout):
        np.testing.assert_array_equal(result, expected)
        assert is_plain


def test_other_errors_are_raised() -> None:
    with pytest.raises(TypeError):
        block_loops.describe_floats()
    assert not block_loops.describe_floats.plain
