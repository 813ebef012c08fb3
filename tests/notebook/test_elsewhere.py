"""The explorer outside of JupyterLab: in marimo, and in a notebook as HTML."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xckpt

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("anywidget", reason="the explorer is an anywidget")

MARIMO = """
import marimo
app = marimo.App()

@app.cell
def _():
    import xckpt
    xckpt.open('m.npz').ckpt
    return

@app.cell
def _():
    import xckpt as module
    module.open('m.npz').ckpt.explore()
    return
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a checkpoint."""
    layers = {f"layers.{n}.weight": np.ones((3, 2), "f4") for n in range(4)}
    xckpt.save(layers, tmp_path / "m.npz")
    return tmp_path


@pytest.mark.slow
def test_marimo_exports_the_summary_and_the_widget(folder: Path) -> None:
    if find_spec("marimo") is None:
        pytest.skip("marimo is not installed")
    (folder / "page.py").write_text(MARIMO)
    subprocess.run(
        [sys.executable, "-m", "marimo", "export", "html", "page.py", "-o", "page.html"],
        cwd=folder,
        check=True,
        timeout=300,
        env=os.environ | {"HOME": str(folder)},
    )
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert "4 tensors" in page  # the summary
    assert "marimo-anywidget" in page  # the explorer
    assert "Traceback" not in page


def test_a_notebook_as_html_shows_the_summary(folder: Path) -> None:
    nbformat: Any = pytest.importorskip("nbformat")
    exporters: Any = pytest.importorskip("nbconvert")
    shown: Any = xckpt.open(folder / "m.npz").ckpt.explore()._repr_mimebundle_()
    data = shown[0] if isinstance(shown, tuple) else shown
    output = nbformat.v4.new_output("execute_result", data, execution_count=1)
    cell = nbformat.v4.new_code_cell("ds.ckpt.explore()", outputs=[output], execution_count=1)
    notebook = nbformat.v4.new_notebook(cells=[cell])
    page, _ = exporters.HTMLExporter().from_notebook_node(notebook)
    assert 'aria-label="Checkpoint m.npz: npz, 4 tensors' in page
