"""Draw the pictures of summaries in Chromium: ``python docs/images/draw_summaries.py [FOLDER]``."""

from __future__ import annotations

import os
import shutil
import sys
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from playwright.sync_api import sync_playwright

import xckpt
from benchmarks.checkpoints import mixture_of_experts, write_ztensor
from xckpt.sample import write_checkpoint

#: Style of a page by theme.
THEMES = {
    "light": "background: #fff; color: rgba(0, 0, 0, 0.87)",
    "dark": "background: #131416; color: rgba(255, 255, 255, 0.87)",
}
WIDTH = 900


def summaries(folder: Path) -> dict[str, str]:
    """Return the HTML of each summary by the name of its picture."""
    sample = xckpt.open(write_checkpoint(folder / "sample-decoder.zt", layers=12, width=256))
    sample.ckpt.findings()
    write_ztensor(folder / "deepseek-like.zt", dict(mixture_of_experts()))
    moe = xckpt.open(folder / "deepseek-like.zt", stack=True)
    html = {"summary": sample.ckpt, "summary-moe": moe.ckpt}
    return {name: checkpoint._repr_html_() for name, checkpoint in html.items()}


def draw_all(target: Path, folder: Path) -> None:
    """Draw every summary in both themes."""
    executable = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 10})
        for name, html in summaries(folder).items():
            for theme, style in THEMES.items():
                font = "font: 13px system-ui, sans-serif; margin: 0; padding: 10px"
                page.set_content(f'<body style="{style}; {font}">{html}</body>')
                picture = Image.open(BytesIO(page.screenshot(full_page=True))).convert("RGB")
                picture = picture.quantize(256, Image.Quantize.MAXCOVERAGE)
                picture.save(target / f"{name}-{theme}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    with TemporaryDirectory() as temporary:
        draw_all(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent, Path(temporary))
