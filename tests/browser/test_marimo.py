"""The explorer in a real marimo application, checked against Python."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip(
    "playwright", reason="playwright drives the browser: pip install 'xckpt[browser]'"
)

import numpy as np
from playwright.sync_api import TimeoutError as Timeout
from playwright.sync_api import expect

import xckpt
from tests.browser.lab import guarded_page
from tests.browser.server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

pytestmark = pytest.mark.slow

# Milliseconds, on a machine where other tests run; all in all less than the timeout of a test.
FIRST_OUTPUT, NEXT_OUTPUT = 120_000, 40_000
PAGE = """
import marimo
app = marimo.App()

@app.cell
def _():
    import xckpt
    explorer = xckpt.open("model.npz").ckpt.explore()
    explorer
    return explorer,

@app.cell
def _(explorer):
    explorer.selected = "layers.2.weight"
    return
"""


class Marimo(Server):
    """A marimo application without access to other machines."""

    def command(self) -> list[str]:
        """Return the command that serves ``page.py``."""
        return [
            *(sys.executable, "-m", "marimo", "--quiet", "--yes", "run", "page.py", "--headless"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--no-token", "--no-sandbox"),
        ]

    def status_url(self) -> str:
        """Return the address of its state."""
        return f"{self.url}/health"


@pytest.fixture
def marimo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Marimo]:
    """Serve an explorer of a checkpoint, or skip."""
    if find_spec("marimo") is None:
        pytest.skip("marimo is not installed")
    folder = tmp_path_factory.mktemp("marimo")
    rng = np.random.default_rng(0)
    tensors = {f"layers.{n}.weight": rng.normal(size=(6, 4)).astype("f4") for n in range(4)}
    xckpt.save(tensors, folder / "model.npz")
    (folder / "page.py").write_text(PAGE, encoding="utf-8")
    with Marimo(folder) as running:
        yield running


def test_a_tensor_is_searched_for_selected_and_described(marimo: Marimo, browser: Browser) -> None:
    with guarded_page(browser, [marimo.url]) as (page, complaints):
        page.goto(marimo.url, wait_until="domcontentloaded")
        box = page.locator(".xckpt-explorer")
        try:
            box.wait_for(timeout=FIRST_OUTPUT)
            # Python selects a tensor, and the page shows it.
            title = box.locator(".xckpt-title")
            expect(title).to_have_text("layers.2.weight", timeout=NEXT_OUTPUT)
            box.get_by_role("searchbox").fill("*.3.*")
            box.get_by_role("searchbox").press("ArrowDown")
            expect(title).to_have_text("layers.3.weight", timeout=NEXT_OUTPUT)
            bars = box.locator(".xckpt-histogram rect")
            expect(bars.first).to_be_visible(timeout=NEXT_OUTPUT)
        except (AssertionError, Timeout) as error:
            text = page.locator("body").inner_text()[:2000]
            raise AssertionError(f"{error}\n{complaints}\n{text}\n{marimo.log}") from error
        result: Any = xckpt.stats(marimo.root / "model.npz", cache=False)
        mean = result["layers.3.weight"].sel(statistic="mean").item()
        names = box.locator(".xckpt-plain dt").all_inner_texts()
        shown = box.locator(".xckpt-plain dd").evaluate_all("(all) => all.map((one) => one.title)")
        assert float(dict(zip(names, shown, strict=True))["mean"]) == mean
        assert complaints == []
