"""Fixtures of the contracts."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def one_thread(in_this_thread: None) -> None:
    """Compute in this thread."""
