"""The notebooks run, in less than a minute each, and are stored without outputs."""

from __future__ import annotations

import asyncio
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Run all notebooks in one kernel: to start one takes longer than most of them."""
    from jupyter_client.manager import AsyncKernelManager

    manager: Any = AsyncKernelManager(kernel_name="python3")
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("XCKPT_CACHE_DIR", "IPYTHONDIR"):
            patch.setenv(variable, str(tmp_path_factory.mktemp(variable)))
        yield manager
    asyncio.run(manager.shutdown_kernel(now=True))


# A notebook has no name of the one before; `%reset` takes those that processes start with too.
_ANEW = "%reset_selective -f ."


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path: Path, folder: Path, kernel: Any) -> None:
    from nbclient import NotebookClient

    notebook = read(path)
    notebook.cells.insert(0, importlib.import_module("nbformat").v4.new_code_cell(_ANEW))
    resources = {"metadata": {"path": str(folder)}}
    client: Any = NotebookClient(notebook, timeout=_LONGEST_SECONDS, km=kernel, resources=resources)
    start = time.monotonic()
    try:
        client.execute()
    finally:
        client.kc.stop_channels()
    assert time.monotonic() - start < _LONGEST_SECONDS
    assert not list(folder.iterdir())
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    messages = [output.text for output in outputs if output.get("name") == "stderr"]
    assert not messages
    assert any("image/png" in output.get("data", ()) for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs(path: Path) -> None:
    for cell in code(path):
        assert cell.outputs == []
        assert cell.execution_count is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_begin_with_a_title_and_a_question(path: Path) -> None:
    first = read(path).cells[0]
    assert first.cell_type == "markdown"
    title, *lines = first.source.splitlines()
    assert title.startswith("# ")
    assert "?" in "".join(lines)


def test_the_readme_lists_all_notebooks() -> None:
    text = (NOTEBOOKS[0].parent / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((\S+\.ipynb)\)", text) == [path.name for path in NOTEBOOKS]
