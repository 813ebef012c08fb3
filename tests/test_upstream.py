"""Private parts of dask and xarray: their current form, and the behaviour without them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from xckpt import upstream
from xckpt.upstream import dask_arrays, xarray_variables

CONTRACTS = ("tests/contracts/test_opening.py", "tests/contracts/test_xarray_suite.py")


@pytest.mark.skipif(upstream.IS_PLAIN, reason="they are switched off")
def test_private_parts_of_dependencies_are_unchanged() -> None:
    assert dask_arrays.is_fast()
    assert xarray_variables.IS_FAST


@pytest.mark.parametrize("attrs", [None, {"a": 1}])
def test_fast_variables_equal_those_of_xarray(attrs: dict[str, int] | None) -> None:
    values = np.arange(3)
    ours = xarray_variables.make_variable(xr.Variable, ("x",), values, attrs, {"b": 2})
    theirs = xr.Variable(("x",), values, attrs, {"b": 2})
    xr.testing.assert_identical(ours, theirs)
    assert ours.encoding == theirs.encoding


@pytest.mark.skipif(upstream.IS_PLAIN, reason="this is the other run")
def test_contracts_hold_with_public_interfaces_only() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CONTRACTS]
    done = subprocess.run(  # noqa: S603  our own interpreter and tests
        [*command, "-k", "safetensors or ztensor"],
        env={**os.environ, "XCKPT_PLAIN": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
