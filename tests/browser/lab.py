"""A real JupyterLab in headless Chromium, without access to other machines."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.browser.server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from playwright.sync_api import Browser, BrowserContext, Page, Request

__all__ = [
    "CHROMIUM",
    "Lab",
    "guarded_page",
    "launched_browser",
    "open_notebook",
    "run_all",
    "write_notebook",
]

#: None where there is no Chromium.
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")

_CHROMIUM_ARGS = [
    "--no-sandbox",  # as root, in a container
    "--disable-dev-shm-usage",  # /dev/shm is small in containers
    "--disable-gpu",
    # A wall that no request gets through.
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE localhost , EXCLUDE 127.0.0.1",
]
_SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "docmanager-extension/plugin": {"autosave": False},
    # All cells are in the page, also those that are out of sight.
    "notebook-extension/tracker": {"windowingMode": "none"},
}
_IDLE = """() => {
  const status = document.querySelector('#jp-main-statusbar')?.textContent ?? '';
  const kernel = document.querySelector('.jp-Toolbar-kernelName')?.textContent ?? 'No Kernel';
  return status.includes('| Idle') && !kernel.includes('No Kernel')
    && !document.querySelector('.jp-Dialog');
}"""
# Cells after one that raised an error do not run.
_ALL_RAN = """() => {
  if (document.querySelector("[data-mime-type='application/vnd.jupyter.error']")) return true;
  const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')];
  return prompts.length && prompts.every((prompt) => /\\[\\d+\\]/.test(prompt.textContent));
}"""


class Lab(Server):
    """A JupyterLab server with a separate home, so that the user's settings are not used.

    Parameters
    ----------
    root : Path
        Folder that the server shows.
    theme : str
        ``"JupyterLab Light"`` or ``"JupyterLab Dark"``.
    environment : dict of str to str, optional
        Variables for its kernels.
    """

    def __init__(
        self,
        root: Path,
        theme: str = "JupyterLab Light",
        environment: dict[str, str] | None = None,
    ) -> None:
        super().__init__(root, environment)
        self._token = secrets.token_hex(16)
        themes = {"apputils-extension/themes": {"theme": theme}}
        for plugin, settings in (_SETTINGS | themes).items():
            file = self.home / "settings" / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(settings))

    def page_of(self, notebook: str) -> str:
        """Give the URL of a notebook in an empty workspace."""
        return f"{self.url}/lab/tree/{notebook}?reset&token={self._token}"

    def status_url(self) -> str:
        """Return the address of its state."""
        return f"{self.url}/api/status?token={self._token}"

    def command(self) -> list[str]:
        """Return a command that asks neither PyPI nor GitHub."""
        return [
            *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
            *("--ServerApp.ip=127.0.0.1", f"--ServerApp.port={self.port}"),
            *("--ServerApp.port_retries=0", f"--IdentityProvider.token={self._token}"),
            f"--ServerApp.root_dir={self.root}",
            "--LabApp.news_url=None",
            "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
            "--LabApp.extension_manager=readonly",
        ]

    def variables(self) -> dict[str, str]:
        """Return its environment variables, with folders of its own."""
        home = self.home
        return {
            "IPYTHONDIR": str(home / "ipython"),
            "JUPYTER_CONFIG_DIR": str(home / "config"),
            "JUPYTER_DATA_DIR": str(home / "data"),
            "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
            "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
            "JUPYTER_PLATFORM_DIRS": "1",
        } | super().variables()


@contextmanager
def launched_browser() -> Iterator[Browser]:
    """Run Debian's Chromium, or the one that the variable CHROMIUM names."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_CHROMIUM_ARGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def guarded_page(
    browser: Browser | BrowserContext, allowed: Sequence[str] = (), **options: Any
) -> Iterator[tuple[Page, list[str]]]:
    """Open a page, and list what should not happen.

    Parameters
    ----------
    browser : Browser or BrowserContext
        Running. The pages of one context share what they loaded.
    allowed : sequence of str
        How URLs may begin; requests for others are noted. The browser itself refuses those for
        other machines.
    **options
        Of the page, if it has a context for itself.

    Yields
    ------
    page : Page
        Empty.
    complaints : list of str
        Requests to others, messages of errors, dialogs that opened.
    """
    complaints: list[str] = []

    # A route would see them as well, but nothing is cached where there is one.
    def guard(request: Request) -> None:
        if not request.url.startswith((*allowed, "data:", "blob:")):
            complaints.append(f"request: {request.url}")

    if not hasattr(browser, "new_context"):
        page = browser.new_page()
    else:
        page = browser.new_page(**{"viewport": {"width": 1200, "height": 1000}} | options)
    page.on("request", guard)
    page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))

    def dismiss(dialog: Any) -> None:
        complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    page.on("dialog", dismiss)
    try:
        yield page, complaints
    finally:
        page.close()


def write_notebook(path: Path, cells: Sequence[str]) -> None:
    """Write a notebook of code cells that did not run."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    empty: dict[str, Any] = {"metadata": {}, "outputs": [], "execution_count": None}
    notebook = {
        "cells": [{"cell_type": "code", "source": cell, **empty} for cell in cells],
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 4,
    }
    path.write_text(json.dumps(notebook), encoding="utf-8")


def open_notebook(page: Page, lab: Lab, name: str, timeout: float = 60_000) -> None:
    """Open a notebook and wait until its kernel is idle."""
    page.goto(lab.page_of(name), wait_until="domcontentloaded")
    page.wait_for_selector("#jupyterlab-splash", state="detached", timeout=timeout)
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=timeout)
    # The notebook shows "idle" before a kernel exists; cells would not run.
    page.wait_for_function(_IDLE, timeout=timeout)


def run_all(page: Page, timeout: float = 120_000) -> None:
    """Run all cells and wait until the last one is done.

    Raises
    ------
    AssertionError
        If one raised an error; the message is its traceback.
    """
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.wait_for_function(_ALL_RAN, timeout=timeout)
    errors = page.locator("[data-mime-type='application/vnd.jupyter.error']")
    if errors.count():
        raise AssertionError(f"a cell raised an error:\n{errors.first.inner_text()[-2000:]}")
