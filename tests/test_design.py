"""The pages for developers: the files that they name exist, and calls pass those of the tables."""

from __future__ import annotations

import ast
import functools
import re
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "xckpt"
DESIGN = ROOT / "docs" / "design.md"
PAGES = [DESIGN, ROOT / "CONTRIBUTING.md"]
CODE = re.compile(r"`([\w/.]+)`")
# A call in a line of its own, and the table that follows.
TABLE = re.compile(r"^`([^`\n]+)`[^\n|]*:\n\n((?:\|.*\n)+)", re.MULTILINE)


def is_there(path: str) -> bool:
    """Return whether a path is one of the checkout, of the package, or of one of its rooms."""
    return any((base / path).exists() for base in (ROOT, ROOT / "src", PACKAGE)) or any(
        PACKAGE.glob(f"*/{path}")
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_pages_name_exist(page: Path) -> None:
    named = {name for name in CODE.findall(page.read_text("utf-8")) if name.endswith(".py")}
    assert named
    assert not [name for name in named if not is_there(name)]


@functools.cache
def names_of_package() -> set[str]:
    """Return the names of modules, and of what they define."""
    defined: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        defined.update((path.stem, path.parent.name))
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                defined.add(node.name)
    return defined


# The docstring of `upstream` names the private parts of libraries.
ROOMS = sorted({*PACKAGE.glob("*/__init__.py")} - {PACKAGE / "upstream" / "__init__.py"})


@pytest.mark.parametrize("room", ROOMS, ids=lambda path: path.parent.name)
def test_names_in_docstrings_of_rooms_exist(room: Path) -> None:
    docstring = ast.get_docstring(ast.parse(room.read_text("utf-8"))) or ""
    named = {name.split(".")[-1] for name in CODE.findall(docstring.replace("``", ""))}
    assert not named - names_of_package()


def files_of(call: Callable[[], Any]) -> set[str]:
    """Return the files of the package in which a call runs functions."""
    files: set[str] = set()
    root = f"{PACKAGE}/"

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            files.add(frame.f_code.co_filename.removeprefix(root))

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return files


@pytest.mark.parametrize(("call", "rows"), TABLE.findall(DESIGN.read_text("utf-8")))
def test_calls_pass_the_files_of_their_table(
    call: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    names = ["w", *[f"model.layers.{n}.mlp.up_proj.weight" for n in range(3)]]
    ds = xr.Dataset({name: (("i", "j"), rng.standard_normal((256, 64), "f4")) for name in names})
    xckpt.save(ds, "m.zt")
    xckpt.save(ds, "a.safetensors")
    xckpt.save(ds.astype("f2").astype("f4"), "b.safetensors")
    expression = call if call.startswith(("xckpt.", "ds[")) else f"xckpt.{call}"
    scope = {"xckpt": xckpt, "ds": xckpt.open("m.zt")}
    passed = files_of(lambda: eval(expression, scope))  # noqa: S307  of our own page
    listed = CODE.findall("\n".join(row.split("|")[1] for row in rows.splitlines()[2:]))
    assert listed
    assert not [name for name in listed if not any(is_at(path, name) for path in passed)]


def is_at(path: str, name: str) -> bool:
    """Return whether a path is that of a file or in a folder."""
    return path == name or path.startswith(f"{name}/")
