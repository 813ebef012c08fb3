"""The notebooks run, in less than a minute each, and are stored without outputs."""

from __future__ import annotations

import importlib
import re
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

for needed in ("nbformat", "nbclient", "ipykernel", "matplotlib"):
    if find_spec(needed) is None:  # to import them takes seconds, which all workers would wait
        pytest.skip(f"{needed} is not installed", allow_module_level=True)

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
_LONGEST_SECONDS = 60


def read(path: Path) -> Any:
    nbformat: Any = importlib.import_module("nbformat")
    return nbformat.read(path, as_version=4)


def code(path: Path) -> Iterator[Any]:
    return (cell for cell in read(path).cells if cell.cell_type == "code")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XCKPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    from nbclient import NotebookClient

    notebook = read(path)
    folder = tmp_path / "work"
    folder.mkdir()
    client = NotebookClient(
        notebook,
        timeout=_LONGEST_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    start = time.monotonic()
    client.execute()
    assert time.monotonic() - start < _LONGEST_SECONDS
    assert not list(folder.iterdir())
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    said = [output.text for output in outputs if output.get("name") == "stderr"]
    assert not said
    assert any("image/png" in output.get("data", ()) for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_without_outputs(path: Path) -> None:
    for cell in code(path):
        assert cell.outputs == []
        assert cell.execution_count is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_begins_with_a_title_and_a_question(path: Path) -> None:
    first = read(path).cells[0]
    assert first.cell_type == "markdown"
    title, *rest = first.source.splitlines()
    assert title.startswith("# ")
    assert "?" in "".join(rest)


def test_the_readme_lists_them_all() -> None:
    text = (NOTEBOOKS[0].parent / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((\S+\.ipynb)\)", text) == [path.name for path in NOTEBOOKS]
