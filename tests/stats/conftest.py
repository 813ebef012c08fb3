"""Fixtures of the tests of statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from xckpt.statistics import results, scan

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep sketches in a folder of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XCKPT_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect how many elements are scanned."""
    counted: list[int] = []
    original = scan.scan_cuts

    def counting(task: Any, *others: Any) -> list[Any]:
        counted.extend(cut.stop - cut.start for cut in task)
        return original(task, *others)

    monkeypatch.setattr(scan, "scan_cuts", counting)
    return counted


@pytest.fixture
def sketches_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep no finished numbers: they follow from the sketches that are kept."""
    monkeypatch.setattr(results, "origins_of", lambda readers: [None] * len(readers))
