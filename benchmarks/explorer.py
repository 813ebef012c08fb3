"""The explorer of 100,000 tensors in a real JupyterLab: until it is shown, and per key stroke."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.checkpoints import mixture_of_experts, write_ztensor
from benchmarks.measuring import Result, table
from tests.browser.lab import Lab, guarded_page, launched_browser, open_notebook, write_notebook

if TYPE_CHECKING:
    from playwright.sync_api import Page

REPEATS = 5
BOUND_OF_SHOWING = 1_000  # milliseconds
BOUND_OF_KEYS = 100
QUERY = "layers.1"
GLOB = "*.experts.7.*"

# Opening is measured elsewhere; the first widget of a session loads the code of all widgets. It
# stays open, because anywidget reports an error if one is closed before the code is loaded.
OPEN = (
    "import xarray as xr\nds = xr.open_dataset('m.zt', engine='ztensor')\nfirst = ds.ckpt.explore()"
)
CELLS = (OPEN, "ds.ckpt.explore()", *["ds.ckpt.explore()"] * REPEATS)

# Runs the cell that is selected, and waits until rows of it are painted.
SHOW = """() => new Promise((resolve) => {
  const painted = () => [...document.querySelectorAll(".xckpt-row[title]")]
    .filter((row) => row.offsetHeight).length;
  const before = painted();
  const start = performance.now();
  const look = () => {
    if (painted() > before) requestAnimationFrame(() => resolve(performance.now() - start));
    else requestAnimationFrame(look);
  };
  document.activeElement.dispatchEvent(new KeyboardEvent(
    "keydown", { key: "Enter", code: "Enter", keyCode: 13, shiftKey: true, bubbles: true }));
  look();
})"""
# Types one character after the other, and waits each time until what it changes is painted.
TYPE = """async ([text, tree]) => {
  const box = [...document.querySelectorAll(".xckpt-explorer")].at(-1);
  const search = box.querySelector("input");
  const button = box.querySelector("[aria-pressed]:not(.xckpt-wrong-only)");
  if ((button.getAttribute("aria-pressed") === "true") !== tree) button.click();
  const frame = () => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
  const times = [];
  for (let end = 1; end <= text.length; end += 1) {
    await frame();
    const start = performance.now();
    search.value = text.slice(0, end);
    search.dispatchEvent(new Event("input", { bubbles: true }));
    await frame();
    times.push(performance.now() - start);
  }
  return [Math.max(...times), box.querySelector(".xckpt-status").textContent];
}"""


def shown(page: Page) -> float:
    """Run the next cell; return the milliseconds until its explorer is painted."""
    page.locator(".jp-Notebook").press("Escape")
    milliseconds: float = page.evaluate(SHOW)
    page.wait_for_timeout(500)
    return milliseconds


def typed(page: Page, text: str, names: list[str], *, tree: bool) -> float:
    """Type a text; return the milliseconds of the slowest key stroke."""
    milliseconds, status = page.evaluate(TYPE, [text, tree])
    word = text.strip("*")
    count = sum(word in name for name in names)
    if not status.startswith(f"{count:,} of {len(names):,}"):
        raise ValueError(f"{text!r} finds {status!r}, not {count}")
    return float(milliseconds)


def run() -> list[Result]:
    """Measure everything."""
    with tempfile.TemporaryDirectory() as folder:
        tensors = dict(mixture_of_experts())
        tensors |= {f"extra.{n}.scale": [4] for n in range(100_000 - len(tensors))}
        write_ztensor(Path(folder) / "m.zt", tensors)
        write_notebook(Path(folder) / "n.ipynb", CELLS)
        with (
            Lab(Path(folder)) as lab,
            launched_browser() as browser,
            guarded_page(browser, [lab.url]) as (page, complaints),
        ):
            open_notebook(page, lab, "n.ipynb")
            results = _results(page, list(tensors))
        if complaints:
            raise ValueError(f"the browser complains: {complaints}")
    return results


def _results(page: Page, names: list[str]) -> list[Result]:
    page.locator(".jp-Cell .cm-content").first.click()
    page.keyboard.press("Shift+Enter")
    page.wait_for_function(
        "/\\[1\\]/.test(document.querySelector('.jp-InputPrompt').textContent)", timeout=120_000
    )
    what = f"{len(names):,} tensors"
    times = [shown(page) for _ in CELLS[1:]]
    keys = [
        Result(f"the slowest key stroke of {text!r}, {view}", time, "ms", what, BOUND_OF_KEYS)
        for text in (QUERY, GLOB)
        for view, tree in (("list", False), ("tree", True))
        if (time := min(typed(page, text, names, tree=tree) for _ in range(REPEATS)))
    ]
    return [
        Result("from Shift+Enter to rows, first explorer", times[0], "ms", what),
        Result("the same, another one", min(times[1:]), "ms", what, BOUND_OF_SHOWING),
        *keys,
    ]


if __name__ == "__main__":
    print(table(run()))
