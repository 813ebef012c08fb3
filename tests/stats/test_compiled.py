"""Compiled loops accept any memory layout and count each element; a cache folder is optional."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numba
import numpy as np
import pytest

from tests.stats.reference import sketch_of
from xckpt.arrays.compiling import compiled
from xckpt.arrays.streams import LEAF
from xckpt.statistics.counts import codes_of


def test_without_a_cache_folder_loops_compile_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = numba.njit

    def refusing(*functions: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return original(*functions, **options)

    monkeypatch.setattr(numba, "njit", refusing)
    assert compiled(lambda x: x + 1)(1) == 2


@pytest.mark.slow
def test_an_unwritable_cache_folder_is_not_an_error() -> None:
    code = (
        "import numpy, xarray, xckpt.statistics\n"
        "ds = xarray.Dataset({'x': ('a', numpy.arange(5, dtype='uint8'))})\n"
        "print(xckpt.stats(ds)['x'].sel(statistic='mean').item())"
    )
    nowhere = {"NUMBA_CACHE_DIR": "/dev/null/a", "HOME": "/dev/null/b", "XCKPT_CACHE_DIR": ""}
    run = subprocess.run(  # noqa: S603  our own code
        [sys.executable, "-c", code],
        env=os.environ | nowhere,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "2.0"


def test_arrays_of_every_memory_layout() -> None:
    values = np.arange(4000, dtype=np.float32)
    expected = sketch_of(values)
    readonly = values.copy()
    readonly.flags.writeable = False
    unaligned = np.frombuffer(b"\0" + values.tobytes(), np.uint8)[1:].view(np.float32)
    strided = np.stack([values, values], axis=1)[:, 0]
    for layout in (readonly, unaligned, strided, values.astype(">f4")):
        sketch = sketch_of(layout)
        assert sketch.moments() == expected.moments()
        assert sketch.counts.tolist() == expected.counts.tolist()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("signs", [(1,), (-1,), (1, -1)])
@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, LEAF, LEAF + 1030])
def test_each_element_of_a_leaf_is_counted_and_compared(
    dtype: str, signs: tuple[int, ...], size: int
) -> None:
    rng = np.random.default_rng(size)
    values = (rng.choice(signs, size) * rng.lognormal(size=size)).astype(dtype)
    # The outermost where groups of rows end, and where they do not.
    values[[0, size // 2, size - 1]] *= 100
    sketch = sketch_of(values)
    codes, counts = np.unique(codes_of(sketch.kind, values), return_counts=True)
    assert (sketch.codes == codes).all()
    assert (sketch.counts == counts).all()
    assert (sketch.low, sketch.high) == (values.min(), values.max())
