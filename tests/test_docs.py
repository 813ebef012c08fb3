"""Each code block and each example of the documentation runs as printed, alone."""

from __future__ import annotations

import doctest
import inspect
import json
import os
import re
import shutil
import warnings
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import pytest
import xarray as xr

import xckpt
from tests import documented

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.fresh import FreshProcesses

ROOT = Path(__file__).parents[1]
# Loaded before all blocks of a page, and not named: each block imports what it uses.
LOADED = "for name in ('dask.array', 'xarray', 'xckpt.entry'): __import__(name)\ndel name"
# Fenced blocks of Python, and sessions that are indented.
BLOCK = re.compile(
    r"^(?P<indent> *)```python\n(?P<fenced>.*?)^ *```$|"
    r"(?<=\n\n)(?P<session> {4}>>> .*?\n)(?=\n(?! {4})|\Z)",
    re.DOTALL | re.MULTILINE,
)
# Blocks that cannot run here, by what they begin with.
ELSEWHERE = (
    *("from dask_jobqueue", "from dask_kubernetes", "from torch", "from jax", "from polars"),
    *("from flax", "# xckpt/formats/__init__.py", "from obspec_utils"),
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
    "docs/dimensions": documented.write_families,
    "docs/stacking": documented.write_families,
    "docs/how-to/optimizer": documented.write_optimizers,
    "docs/how-to/netcdf-and-zarr": documented.write_odd_names,
    "docs/how-to/leave-pickle-behind": documented.write_pickle,
    "docs/how-to/same-content": documented.write_steps,
    "docs/arithmetic": documented.write_models,
    "docs/how-to/combine": documented.write_models,
}
# Pages that begin with one line of Python and what it prints.
ANSWERS = {
    f"docs/how-to/{name}"
    for name in (
        *("adapter-rank", "adapters", "by-layer", "conversion", "footprint", "quantization-error"),
        *("training-checkpoints", "training-run", "where-training-went-wrong"),
        "which-layers-changed",
        "combine",
    )
}
PRINTED = re.compile(r"^```python\n([^`]*?)```\n\n```text\n(.*?)```$", re.DOTALL | re.MULTILINE)
COMPARED = """
import contextlib, doctest, io
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    exec({code!r}, {{}})
same = doctest.OutputChecker().check_output({text!r}, printed.getvalue(), {options})
assert same, printed.getvalue()
"""
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
    if page in ANSWERS:
        text = (ROOT / page).with_suffix(".md").read_text(encoding="utf-8")
        options = doctest.NORMALIZE_WHITESPACE
        printed = PRINTED.findall(text)
        assert text.partition("\n\n")[2].startswith(f"```python\n{printed[0][0]}")
        pieces |= {
            f"what block {number} prints": COMPARED.format(code=code, text=shown, options=options)
            for number, (code, shown) in enumerate(printed, 1)
        }
    assert fresh.run(pieces, files, LOADED) == {}


def test_all_pages_were_checked() -> None:
    assert len(PAGES) > 25
    assert sum(map(len, PAGES.values())) > 100
    assert len(PAGES["docs/how-to/same-content"]) == 5


# A function, class or error of the API page, with its options.
DIRECTIVE = re.compile(r"^\.\. auto[a-z]+:: (\S+)\n((?: +:.*\n)*)", re.MULTILINE)


def public_objects() -> Iterator[tuple[str, Any]]:
    """Return the functions, classes and methods of the API page by their names there."""
    for name, options in DIRECTIVE.findall((ROOT / "docs/api.md").read_text(encoding="utf-8")):
        full_name = name if name.startswith("xckpt.") else f"xckpt.{name}"
        module, _, attribute = full_name.rpartition(".")
        obj = getattr(import_module(module), attribute)
        yield full_name, obj
        if ":members:" in options:
            members = (member for member in dir(obj) if not member.startswith("_"))
            yield from ((f"{full_name}.{m}", inspect.getattr_static(obj, m)) for m in members)


EXAMPLES = {
    name: examples
    for name, obj in public_objects()
    if (examples := inspect.cleandoc(obj.__doc__ or "").partition("Examples\n--------\n")[2])
}


class ShownOutput(doctest.OutputChecker):
    """Examples need not show what they return."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_docstrings_run(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib import pyplot as plt

    here = shutil.copytree(folder, tmp_path / "here", copy_function=os.link)
    monkeypatch.chdir(here)
    text = EXAMPLES[name]
    for pattern, instead in INSTEAD.items():
        text = re.sub(pattern, instead, text)
    names = {"xckpt": xckpt, "ds": xckpt.open("m.zt"), "np": np, "xr": xr, "Path": Path}
    names |= {"json": json, "warnings": warnings}
    messages: list[str] = []
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(ShownOutput(), optionflags=options)
    test = doctest.DocTestParser().get_doctest(text, names, name, name, 0)
    with warnings.catch_warnings():  # which an example may filter
        runner.run(test, out=messages.append)
    plt.close("all")
    assert runner.tries
    assert not "".join(messages)


def test_public_functions_and_errors_have_examples() -> None:
    functions = {f"xckpt.{n}" for n in xckpt.__all__ if inspect.isroutine(getattr(xckpt, n))}
    assert functions <= EXAMPLES.keys()
    errors = {f"xckpt.{n}" for n in xckpt.__all__ if n.endswith(("Error", "Warning"))}
    assert errors <= EXAMPLES.keys()


def test_the_gallery_shows_every_kind_of_picture_in_both_themes() -> None:
    from xckpt.plots import Plots

    text = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    drawn = set(re.findall(r"\.plot\.([a-z]+)\(", text))
    assert drawn == {name for name in vars(Plots) if not name.startswith("_")}
    light, dark = (
        set(re.findall(rf"\(images/(\S+)-{theme}\.png\){{\.only-{theme}}}", text))
        for theme in ("light", "dark")
    )
    assert light == dark
    assert all((ROOT / f"docs/images/{name}-dark.png").exists() for name in dark)


def test_the_command_line() -> None:
    from xckpt.cli import commands

    text = (ROOT / "docs" / "how-to" / "command-line.md").read_text(encoding="utf-8")
    described = set(re.findall(r"`(--?[a-z-]+)", text))
    parameters = [param for command in commands.commands.values() for param in command.params]
    options = {
        name
        for parameter in parameters
        if isinstance(parameter, click.Option)
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    assert described == options
    for command in commands.commands:
        assert f"\nxckpt {command} " in text
