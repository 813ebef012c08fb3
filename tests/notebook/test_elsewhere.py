"""The explorer where no Python runs: in a notebook as HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xckpt

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("anywidget", reason="the explorer is an anywidget")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a checkpoint."""
    layers = {f"layers.{n}.weight": np.ones((3, 2), "f4") for n in range(4)}
    xckpt.save(layers, tmp_path / "m.npz")
    return tmp_path


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
