"""The summary in a browser: readable in light and dark, and inert whatever the names."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.lab import guarded_page
from tests.notebook.checkpoints import mixture_of_experts, row
from tests.notebook.rendering import render_html
from xckpt.notebook.summary import TensorFinding, new_summary

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page

    from xckpt.notebook.summary import Summary

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "\"><script>alert(2)</script><a title='",
    "</td></table><style>@import 'x'</style>",
    "evil\u202egnp.weight\x1b[31m\x00",
)
THEMES = {
    "light": "background: #fff; color: rgba(0, 0, 0, 0.87)",
    "dark": "background: #111; color: rgba(255, 255, 255, 0.87)",
}
# Texts and their contrast with the page.
CONTRASTS = """(elements) => elements.map((element) => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => rgb.slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, n) => sum + c * [0.2126, 0.7152, 0.0722][n], 0);
  const ground = numbers(getComputedStyle(document.body).backgroundColor);
  const [r, g, b, alpha = 1] = numbers(getComputedStyle(element).color);
  let seen = alpha;
  for (let one = element; one; one = one.parentElement) {
    seen *= Number(getComputedStyle(one).opacity);
  }
  const mixed = [r, g, b].map((c, n) => c * seen + ground[n] * (1 - seen));
  const [dark, bright] = [light(mixed), light(ground)].sort((a, b) => a - b);
  return [(bright + 0.05) / (dark + 0.05), element.innerText];
}).filter(([_, text]) => text)"""


@contextmanager
def summary_page(
    browser: Browser, folder: Path, summary: Summary, theme: str = "light", **options: Any
) -> Iterator[Page]:
    """Show a summary on a page, on which nothing may go wrong."""
    file = folder / "summary.html"
    body = f"<body style='{THEMES[theme]}'>{render_html(summary, ['ds.ckpt.explore()'])}"
    file.write_text(f"<!doctype html><meta charset=utf-8>{body}", encoding="utf-8")
    with guarded_page(browser, [file.as_uri()], **options) as (page, complaints):
        page.goto(file.as_uri())
        yield page
        assert complaints == []


def a_mixture_of_experts() -> Summary:
    return new_summary(
        mixture_of_experts(),
        title="qwen-moe.zt",
        format="ztensor",
        version="1.0",
        attrs={"license": "MIT"},
        dims={"hidden": 5120},
        notes=["1 warning: version 1.1 is newer"],
        findings=[TensorFinding("lm_head.weight", "nan", 512.0, "error")],
    )


@pytest.mark.parametrize("theme", THEMES)
def test_every_text_has_contrast(browser: Browser, tmp_path: Path, theme: str) -> None:
    with summary_page(browser, tmp_path, a_mixture_of_experts(), theme) as page:
        page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
        texts = page.locator("div *:not(:has(*)):visible").evaluate_all(CONTRASTS)
        keys = [contrast for contrast, text in texts if text == "■"]
        assert len(keys) == 3 + 10
        assert min(keys) >= 3
        assert len(texts) > 60
        assert min(measured for measured in texts if measured[1] != "■") >= [4.5]


def test_bars_are_as_wide_as_their_shares(browser: Browser, tmp_path: Path) -> None:
    summary = a_mixture_of_experts()
    with summary_page(browser, tmp_path, summary) as page:
        bar = page.locator("div[style*='height:9px']")
        full_width = bar.evaluate("(element) => element.clientWidth")
        widths = bar.locator("span").evaluate_all("(all) => all.map((one) => one.clientWidth)")
        shares = [total.nbytes / summary.nbytes for total in summary.dtypes]
        assert widths == pytest.approx([share * full_width for share in shares], abs=2)


def test_lists_open_with_the_keyboard(browser: Browser, tmp_path: Path) -> None:
    with summary_page(browser, tmp_path, a_mixture_of_experts()) as page:
        assert not page.get_by_text("hidden 5,120").is_visible()
        assert page.locator("details").count() == 3  # how they are stored, dimensions, attributes
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert page.get_by_text("hidden 5,120").is_visible()


@pytest.mark.parametrize("width", [1200, 600, 360])
def test_the_summary_fits_into_any_width(browser: Browser, tmp_path: Path, width: int) -> None:
    viewport = {"width": width, "height": 900}
    with summary_page(browser, tmp_path, a_mixture_of_experts(), viewport=viewport) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        heights = page.locator("tbody tr").evaluate_all("(all) => all.map((r) => r.clientHeight)")
        assert max(heights) < 80


def test_markup_in_names_is_inert(browser: Browser, tmp_path: Path) -> None:
    summary = new_summary(
        [row(name, "float32", 4) for name in HOSTILE],
        title=HOSTILE[0],
        format=HOSTILE[1],
        version=HOSTILE[2],
        attrs=dict.fromkeys(HOSTILE, HOSTILE[3]),
        dims=dict.fromkeys(HOSTILE, 4),
        notes=HOSTILE,
        findings=[TensorFinding(name, name, 1.0, name) for name in HOSTILE],
    )
    with summary_page(browser, tmp_path, summary) as page:
        assert page.locator("img, script, style, a").count() == 0
        shown = page.locator("tbody td:first-child").all_inner_texts()
        assert shown == [*HOSTILE[:3], r"evil\u202egnp.weight\x1b[31m\x00"]
