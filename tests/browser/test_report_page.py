"""Reports in a browser: complete, and inert whatever the names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from tests.browser.lab import guarded_page
from tests.hostile_names import HOSTILE

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser


def test_a_report_opens_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    names = [f"layers.{layer}.{name}" for layer in range(3) for name in HOSTILE]
    arrays = {n: ("x", np.arange(4, dtype="f4") + at) for at, n in enumerate(names)}
    path = tmp_path / "report.html"
    xr.Dataset(arrays).ckpt.report(path)
    with guarded_page(browser, [path.as_uri()]) as (page, complaints):
        page.goto(path.as_uri())
        assert page.locator("h1").inner_text() == "Checkpoint"
        assert page.locator("figure svg").count() == 2
        assert "<img src=x onerror=alert(1)>" in page.locator("body").inner_text()
        assert page.locator("figure").first.bounding_box() is not None
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert complaints == []
