"""Meaning is read from names of tensors in one room only.

Patterns elsewhere match other texts, what a user types, or names that a library gives to the
files and tensors of its own format.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import xckpt

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(xckpt.__file__).parent
#: Rooms whose patterns are over tensor names by purpose, or which know no tensors.
FREE = ("structure", "formats", "storage", "cli", "testing", "labels/filters.py")
#: Other modules with patterns, by the texts that these match.
ALLOWED = {
    "names of files": {
        *("opening/names.py", "opening/files.py", "opening/steps.py", "opening/hints.py"),
        *("writing/manifests.py", "sample.py", "index.py"),
    },
    "texts for readers": {
        *("formatting.py", "notebook/text.py", "notebook/html.py"),
        *("accessor/reporting.py", "options.py", "backend.py"),
    },
    "patterns that a user types, and names of dimensions": {
        *("labels/renaming.py", "labels/axes.py", "writing/fitting.py", "accessor/__init__.py"),
        "quantization/model.py",
    },
    "escapes and spelling": {
        *("labels/paths.py", "writing/plain.py", "writing/gathering.py", "addresses.py"),
        *("elements.py", "identity.py", "notebook/folding.py", "notebook/changes.py"),
    },
    "names in the files of adapters and optimizers": {
        *("datasets/adapters.py", "datasets/adapter_methods.py"),
        *("datasets/optimizers.py", "datasets/optimizers.py"),
    },
    "names of one tensor in two projects": {
        *("labels/conventions.py", "comparison/names.py"),
    },
    "numbers that siblings have apart from one another": {
        *("comparison/explaining/siblings.py", "comparison/explaining/naming_votes.py"),
    },
}
#: Modules that take a name apart without its structure, by the reason.
TAKEN_APART = {
    "the user names the modules": {"datasets/stacking.py"},
    "equal parts of names are shown once": {"notebook/short_names.py", "notebook/summary.py"},
    "the index of a layer is 0 in GGUF's table": {"labels/conventions.py"},
}
#: Compiles a pattern, or matches one.
MATCHING = {"compile", "search", "match", "fullmatch", "split", "sub", "findall", "finditer"}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(FREE):
            yield name, ast.parse(path.read_text())


def uses_patterns(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "re"
        and node.attr in MATCHING
        for node in ast.walk(tree)
    )


def imported(tree: ast.Module) -> set[str]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {f"{node.module}.{alias.name}" for node in nodes for alias in node.names}


def test_every_pattern_outside_of_the_structure_has_a_reason() -> None:
    with_patterns = {name for name, tree in modules() if uses_patterns(tree)}
    assert with_patterns == set.union(*ALLOWED.values())


def test_conventions_of_names_are_used_by_the_structure_only() -> None:
    users = {
        name
        for name, tree in modules()
        if any(text.startswith("xckpt.structure.conventions") for text in imported(tree))
    }
    assert not users


def test_names_are_taken_apart_by_the_structure() -> None:
    users = {
        name for name, tree in modules() if "xckpt.structure.numbering.parse_name" in imported(tree)
    }
    assert users == set.union(*TAKEN_APART.values())
