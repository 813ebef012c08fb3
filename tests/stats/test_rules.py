"""Rules of findings: statistics that break them, and statistics that do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xarray as xr

from tests.stats.checkpoints import model
from xckpt.health import findings
from xckpt.statistics import stats


def findings_of(**tensors: Any) -> list[tuple[Any, ...]]:
    ds = xr.Dataset(
        {
            name: (tuple(f"{name}{axis}" for axis in range(np.ndim(values))), values)
            for name, values in tensors.items()
        }
    )
    frame = findings(stats(ds))
    assert list(frame.columns) == ["tensor", "rule", "value", "severity", "explanation"]
    assert frame["explanation"].all()
    return list(frame.drop(columns="explanation").itertuples(index=False, name=None))


def normal(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_a_good_model_has_no_findings() -> None:
    tensors = {name.replace(".", "_"): array for name, array in model().items()}
    assert findings_of(**tensors) == []
    assert findings_of(shift=1000 + normal(50), single=np.array([5.0]), zero=np.array([0.0])) == []


def test_each_rule_has_a_finding() -> None:
    broken, infinite, exploding, dead = (normal(100, 100) for _ in range(4))
    broken[0, :3] = np.nan
    infinite[1, 1] = -np.inf
    exploding[5, 5] = 1e6
    dead[[3, 50]] = 0
    rows = findings_of(
        zeros=np.zeros((4, 4), np.float16),
        ones=np.ones((7, 2)),
        exploding=exploding,
        dead=dead,
        broken=broken,
        infinite=infinite,
    )
    assert [row[:2] for row in rows] == [
        ("broken", "nan"),
        ("infinite", "inf"),
        ("zeros", "all_zero"),
        ("ones", "constant"),
        ("exploding", "exploding"),
        ("dead", "dead_rows"),
    ]
    assert [row[3] for row in rows] == ["error"] * 2 + ["warning"] * 4
    values = {row[0]: row[2] for row in rows}
    assert values | {"exploding": 0} == {
        "broken": 3,
        "infinite": 1,
        "zeros": 16,
        "exploding": 0,
        "dead": 2,
        "ones": 1,
    }
    assert 99 < values["exploding"] < 101


def test_dead_rows_of_small_types_and_of_a_row_cut_by_leaves() -> None:
    for name in ("float16", "int8"):
        values = np.ones((9, 5000), name)
        values[[2, 8]] = 0
        assert [row[1:3] for row in findings_of(x=values)] == [("dead_rows", 2.0)]


def test_stacked_tensors_are_named(tmp_path: Any) -> None:
    from tests.stats.checkpoints import write

    tensors = model()
    tensors["layers.1.b"][4] = np.nan
    tensors["layers.2.w"][7] = 0
    path = write(tmp_path / "m.safetensors", tensors)
    for stack in (False, True):
        frame = findings(stats(xr.open_dataset(path, engine="safetensors", stack=stack)))
        assert frame["tensor"].tolist() == ["layers.1.b", "layers.2.w"]
        assert frame["rule"].tolist() == ["nan", "dead_rows"]


def test_statistics_that_are_missing_are_named() -> None:
    st = stats(xr.Dataset({"x": ("a", [1.0, 2.0])}))
    with pytest.raises(ValueError, match="need the statistics max, min"):
        findings(st.sel(statistic=["count", "nan", "inf", "zero", "absmax", "std"]))
