"""A browser for the tests of this folder, which are skipped without one."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from tests.browser.lab import CHROMIUM, launched_browser

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser


# Not of the session: its event loop would seem to run in the tests of other folders.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Run Chromium, or skip."""
    if find_spec("playwright") is None:
        pytest.skip("playwright is not installed: pip install 'xckpt[browser]'")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: apt-get install chromium, or set CHROMIUM to its path")
    with launched_browser() as running:
        yield running
