"""Fixtures of the tests of writing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from xckpt.errors import some

if TYPE_CHECKING:
    from collections.abc import Sequence


@pytest.fixture
def all_names_in_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """List all lost attributes, of which warnings name five, so that tests compare every name."""

    def all_of(names: Sequence[str], what: str, _: int) -> str:
        return some(names, what, len(names))

    monkeypatch.setattr("xckpt.writing.fitting.some", all_of)
