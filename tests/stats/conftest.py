"""Fixtures of the tests of statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep sketches in a folder of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XCKPT_CACHE_DIR", str(folder))
    return folder
