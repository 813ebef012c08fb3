"""Each code block of the documentation runs as printed, alone, in a fresh process."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

import click
import pytest

from tests import documented
from tests.conftest import GOLDEN

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fresh import FreshProcesses

ROOT = Path(__file__).parents[1]
# Fenced blocks of Python, and sessions that are indented.
BLOCK = re.compile(
    r"^(?P<indent> *)```python\n(?P<fenced>.*?)^ *```$|"
    r"(?<=\n\n)(?P<session> {4}>>> .*?\n)(?=\n(?! {4})|\Z)",
    re.DOTALL | re.MULTILINE,
)
# Blocks that cannot run here, by what they begin with.
ELSEWHERE = (
    *("from dask_jobqueue", "from dask_kubernetes", "from torch", "# xckpt/formats/__init__.py"),
)
# Substitutes for services that this machine lacks.
HERE = '"file://" + __import__("os").path.abspath'
INSTEAD = {
    r'"s3://bucket/m-\*\.zt"': '"m-*.zt"',
    r'"s3://bucket/(?:run/)?(.*?)"': rf'{HERE}("\1")',
    r'"https://example\.org/(.*?)"': rf'{HERE}("\1")',
    r'"hf://[^/"]+/([^@/"]+)(?:@[^/"]+)?': r'"\1',
    r'storage_options=\{"anon": True\}': "storage_options={}",
    r'"remote_options": \{"anon": True\}': '"remote_options": {}',
    '"s3"': '"file"',
    r"LocalCluster\(.*?\)": "LocalCluster(n_workers=1, processes=False, dashboard_address=':0')",
}
# Pages that bring their files.
FILES: dict[str, Callable[[Path], None]] = {
    "docs/stacking": documented.write_families,
    "docs/how-to/optimizer": documented.write_optimizers,
    "docs/how-to/netcdf-and-zarr": documented.write_odd_names,
    "docs/how-to/leave-pickle-behind": documented.write_pickle,
    "docs/how-to/same-content": documented.write_steps,
}
WITH_GOLDEN = {"docs/how-to/hub", "docs/how-to/quantized-models", "docs/sharded"}
# As `doctest` compares what a session shows; "..." may be anything.
SESSION = """
import doctest
options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
runner = doctest.DocTestRunner(optionflags=options)
runner.run(doctest.DocTestParser().get_doctest({text!r}, {{}}, "page", "page", 0))
assert runner.tries and not runner.failures
"""


def pages() -> dict[str, list[str]]:
    """Return the blocks of each page that has some."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    blocks_by_page = {}
    for path in paths:
        blocks = [
            dedent(match["fenced"] or match["session"])
            for match in BLOCK.finditer(path.read_text(encoding="utf-8"))
        ]
        if blocks:
            blocks_by_page[str(path.relative_to(ROOT).with_suffix(""))] = blocks
    return blocks_by_page


PAGES = pages()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    documented.write_files(folder)
    return folder


@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_runs_alone(
    page: str, request: pytest.FixtureRequest, tmp_path: Path, fresh: FreshProcesses
) -> None:
    if page in WITH_GOLDEN and not GOLDEN.is_dir():
        pytest.skip(f"no golden files at {GOLDEN}")
    if page in FILES:
        FILES[page](tmp_path)
        files = tmp_path
    else:
        files = request.getfixturevalue("folder")
    pieces = {}
    for number, block in enumerate(PAGES[page], 1):
        if block.startswith(ELSEWHERE):
            continue
        code = block
        for pattern, instead in INSTEAD.items():
            code = re.sub(pattern, instead, code)
        pieces[f"block {number}"] = SESSION.format(text=code) if ">>>" in code else code
    assert fresh.run(pieces, files) == {}


def test_all_pages_were_checked() -> None:
    assert len(PAGES) > 25
    assert sum(map(len, PAGES.values())) > 100
    assert len(PAGES["docs/how-to/same-content"]) == 5


def test_the_command_line() -> None:
    from xckpt.cli import commands

    text = (ROOT / "docs" / "how-to" / "command-line.md").read_text(encoding="utf-8")
    described = set(re.findall(r"`(--?[a-z-]+)", text))
    parameters = [param for command in commands.commands.values() for param in command.params]
    options = {
        name
        for parameter in parameters
        if isinstance(parameter, click.Option)
        for name in parameter.opts
    }
    assert described == options
    for command in commands.commands:
        assert f"\nxckpt {command} " in text
