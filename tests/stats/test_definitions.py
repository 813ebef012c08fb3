"""Statistics are defined in one table, and are exact or nearly so as it states."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.stats.reference import dtype_of, sketch_of
from xckpt.arrays.kinds import kind_of
from xckpt.statistics import statistic_names, stats
from xckpt.statistics.describe import ApproximateElements, ExactElements
from xckpt.statistics.rows import TableElements

if TYPE_CHECKING:
    from xckpt.statistics.definitions import Elements

PAGE = Path(__file__).parents[2] / "docs/how-to/statistics.md"


def test_every_statistic_is_documented() -> None:
    page, docstring = PAGE.read_text(), stats.__doc__ or ""
    for name in statistic_names((), channels=True):
        assert f"`{name}`" in page, name
    for name in statistic_names(()):
        assert f"``{name}``" in docstring, name


@pytest.mark.parametrize(
    "name", ["float32", "float64", "bfloat16", "float8_e4m3fn", "int8", "int64"]
)
def test_elements_that_meet_a_condition_are_counted(name: str) -> None:
    rng = np.random.default_rng(0)
    tensors = [(rng.standard_normal(900) * 40).astype(dtype_of(name)) for _ in range(3)]
    tensors += [np.zeros(7, dtype_of(name)), tensors[0][:0]]
    if np.dtype(dtype_of(name)).kind in "fV":
        tensors[1][:6] = [np.nan, -0.0, 0.0, 1e-40, -1e-40, 3]
    sketches = [sketch_of(tensor) for tensor in tensors]
    counted: Any = ExactElements if sketches[0].kind.exact else ApproximateElements
    for condition in (lambda x: x < 0, lambda x: x == 0, lambda x: np.abs(x) < 2, np.isfinite):
        with np.errstate(invalid="ignore"):
            wide = [tensor.astype(np.float64) for tensor in tensors]
        expected = [int((condition(values) & np.isfinite(values)).sum()) for values in wide]
        assert counted(sketches).count_where(condition).tolist() == expected
        rows: list[Elements] = [
            TableElements(values[None], kind_of(values.dtype)) for values in wide
        ]
        assert [int(row.count_where(condition)[0]) for row in rows] == expected
