"""Kernels are compiled for what they are called with, wherever that can be kept."""

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


def test_without_a_folder_for_the_cache_they_are_compiled_each_time(
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
def test_a_folder_that_cannot_be_written_is_no_error() -> None:
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


def test_memory_of_every_kind_is_taken() -> None:
    values = np.arange(4000, dtype=np.float32)
    wanted = sketch_of(values)
    readonly = values.copy()
    readonly.flags.writeable = False
    unaligned = np.frombuffer(b"\0" + values.tobytes(), np.uint8)[1:].view(np.float32)
    strided = np.stack([values, values], axis=1)[:, 0]
    for given in (readonly, unaligned, strided, values.astype(">f4")):
        sketch = sketch_of(given)
        assert sketch.moments() == wanted.moments()
        assert sketch.counts.tolist() == wanted.counts.tolist()
