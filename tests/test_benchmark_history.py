"""`make bench` stores its ratios by version, and prints those that changed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from benchmarks.__main__ import HISTORY
from benchmarks.history import record
from benchmarks.measuring import Result

if TYPE_CHECKING:
    from pathlib import Path


def test_changes_are_against_the_version_before(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    first = [Result("a", 2.0), Result("b", 4.0), Result("c", 1.0), Result("t", 9, "s")]
    assert record(path, "0.1.0", "open", first) == []
    assert record(path, "0.1.0", "read", [Result("a", 7.0)]) == []
    second = [Result("a", 1.0), Result("b", 6.0), Result("c", 1.2), Result("new", 5.0)]
    lines = record(path, "0.2.0", "open", second)
    assert lines == [
        "worse: b: 6.00 ×, 4.00 × in 0.1.0",
        "better: a: 1.00 ×, 2.00 × in 0.1.0",
    ]
    # Measured again, a version is not compared with itself.
    assert record(path, "0.2.0", "open", second) == lines
    stored = json.loads(path.read_text("utf-8"))
    assert list(stored) == ["0.1.0", "0.2.0"]
    assert stored["0.1.0"]["ratios"] == {"open": {"a": 2.0, "b": 4.0, "c": 1.0}, "read": {"a": 7.0}}
    assert stored["0.2.0"].keys() == {"ratios", "date", "machine"}


def test_rows_called_the_same_have_distinct_names(tmp_path: Path) -> None:
    rows = [Result("8 GiB", 3.0, "s")]
    rows += [Result("the same", 2.0, against=f"{peer}, 1.2 s") for peer in ("numpy", "torch")]
    record(tmp_path / "h.json", "0.1.0", "stats", rows)
    stored = json.loads((tmp_path / "h.json").read_text("utf-8"))["0.1.0"]["ratios"]["stats"]
    assert stored == {"8 GiB, the same / numpy": 2.0, "8 GiB, the same / torch": 2.0}


def test_results_without_a_ratio_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    record(path, "0.1.0", "open", [Result("a", 0.0), Result("b", 0.0)])
    assert record(path, "0.2.0", "open", [Result("a", 1.0), Result("b", 0.0)]) == []


def test_the_stored_history_is_readable() -> None:
    for entry in json.loads(HISTORY.read_text("utf-8")).values():
        assert entry["date"]
        assert entry["machine"]
        assert all(value >= 0 for rows in entry["ratios"].values() for value in rows.values())
