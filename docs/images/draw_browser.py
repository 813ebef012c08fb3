"""Draw the browser in a terminal: ``python docs/images/draw_browser.py FILE.svg``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import xckpt
from xckpt.cli.browser import Browser, Pages
from xckpt.sample import write_checkpoint


async def draw(path: str) -> None:
    """Search a sample checkpoint, select a tensor, and write the screen."""
    with TemporaryDirectory() as folder:
        sample = write_checkpoint(Path(folder) / "m.zt", layers=4, width=64)
        app = Browser(Pages(xckpt.open(sample)), "m.zt")
        async with app.run_test(size=(130, 36)) as pilot:
            for keys in ((), ("slash", *"q_proj", "enter")):
                await pilot.press(*keys)
                await pilot.pause()
                await app.workers.wait_for_complete()
                await pilot.pause()
            app.save_screenshot(path)


if __name__ == "__main__":
    asyncio.run(draw(sys.argv[1]))
