"""The explorer on a bare page, with a model that holds the state a kernel would send."""

from __future__ import annotations

import base64
import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import xckpt.notebook
from tests.browser.lab import guarded_page

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from playwright.sync_api import Browser, Page, Route

    from xckpt.tensor_rows import Row

__all__ = ["STATISTICS", "explorer_page", "send_statistics", "shown_rows"]

STATISTICS = ("count", "nan", "mean", "std", "q0.5")
_SOURCE = Path(xckpt.notebook.__file__).parent
_ADDRESS = "http://explorer.invalid/"

# The interface that anywidget gives to a view, as far as the explorer uses it.
_HARNESS = """
import * as explorer from "./explorer.js";
const bytes = (text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
class Model {
  constructor(state) { this.state = state; this.listeners = {}; this.sent = []; }
  get(key) { return this.state[key]; }
  set(key, value) {
    if (this.state[key] === value) return;
    this.state[key] = value;
    this.emit(`change:${key}`);
  }
  save_changes() {}
  on(event, listener) { (this.listeners[event] ??= []).push(listener); }
  off(event, listener) {
    this.listeners[event] = this.listeners[event].filter((one) => one !== listener);
  }
  emit(event, ...more) { (this.listeners[event] ?? []).forEach((listener) => listener(...more)); }
  send(message, callbacks, buffers) { this.sent.push([message, buffers]); }
  tell(message, buffers) { this.emit("msg:custom", message, buffers.map(bytes)); }
}
const { bytes: packed, plain } = await (await fetch("./state.json")).json();
for (const [key, value] of Object.entries(packed)) plain[key] = bytes(value);
window.explorer = explorer;
window.model = new Model(plain);
const start = performance.now();
window.close_ = explorer.default.render({ model: window.model, el: document.body });
window.took = performance.now() - start;
window.ready = true;
"""


@contextmanager
def explorer_page(
    browser: Browser,
    rows: Sequence[Row],
    *,
    style: str = "",
    errors: Sequence[str] = (),
    **options: Any,
) -> Iterator[tuple[Page, list[str]]]:
    """Show the explorer of some tensors.

    Parameters
    ----------
    browser : Browser
        Running.
    rows : sequence of Row
        The tensors.
    style : str
        More style of the page.
    errors : sequence of str
        About the file.
    **options
        Of the page.

    Yields
    ------
    page, complaints
        As of `guarded_page`; ``model`` is the explorer's model.
    """
    html = (
        "<!doctype html><meta charset=utf-8><link rel=stylesheet href=explorer.css>"
        "<link rel=icon href=data:,>"
        f"<style>body {{ margin: 16px; {style} }}</style><body>"
        '<script type=module src="harness.js"></script>'
    )
    answers = {
        "": (html, "text/html"),
        "harness.js": (_HARNESS, "text/javascript"),
        "explorer.js": ((_SOURCE / "explorer.js").read_text("utf-8"), "text/javascript"),
        "explorer.css": ((_SOURCE / "explorer.css").read_text("utf-8"), "text/css"),
        "state.json": (_state(rows, errors), "application/json"),
    }
    with guarded_page(browser, [_ADDRESS], **options) as (page, complaints):

        def answer(route: Route) -> None:
            body, kind = answers[route.request.url.removeprefix(_ADDRESS)]
            route.fulfill(body=body, content_type=f"{kind}; charset=utf-8")

        page.route(f"{_ADDRESS}**", answer)
        page.goto(_ADDRESS)
        page.wait_for_function("window.ready")
        yield page, complaints


def _state(rows: Sequence[Row], errors: Sequence[str]) -> str:
    from xckpt.notebook.explorer import _Table

    state = _Table(rows, STATISTICS, errors).get_state()
    packed = {k: base64.b64encode(v).decode() for k, v in state.items() if isinstance(v, bytes)}
    plain = {k: v for k, v in state.items() if isinstance(v, str | int | float | list)}
    return json.dumps({"bytes": packed, "plain": plain})


def send_statistics(page: Page, rows: Sequence[int], values: Any) -> None:
    """Send statistics to the explorer, as the kernel does."""
    arrays = (np.array(rows, "<u4"), np.array(values, "<f8"))
    buffers = [base64.b64encode(array.tobytes()).decode() for array in arrays]
    page.evaluate("(buffers) => model.tell({ tell: 'statistics' }, buffers)", buffers)


def shown_rows(page: Page) -> list[str]:
    """Return the names in the visible rows, as displayed."""
    names = page.locator(".xckpt-list .xckpt-row:visible .xckpt-name").all_inner_texts()
    return [name.replace("\n", "") for name in names]
