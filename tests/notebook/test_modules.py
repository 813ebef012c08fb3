"""Modules as a tree and as tables: every tensor is counted once, whatever its name."""

from __future__ import annotations

import pytest

from xckpt.notebook.summary import ModuleTree, sizes_table
from xckpt.tensor_rows import Row

ROWS = [
    Row("embed", "float32", (10, 4), 160),
    *(Row(f"h.{i}.w", "bfloat16", (4, 4), 32) for i in range(3)),
    *(Row(f"h.{i}.b", "float32", (4,), 16) for i in range(3)),
    Row("a\x1b[31m<b>\u202e.x", "float32", (), 4),
]


def test_numbered_modules_are_one_line() -> None:
    lines = repr(ModuleTree(ROWS, 3)).splitlines()
    assert lines[0].split() == ["embed", "1", "tensor", "160", "B"]
    assert lines[1].split() == ["h", "6", "tensors", "144", "B"]
    assert lines[2].split() == ["{0..2}", "6", "tensors", "144", "B"]
    assert [line.split()[0] for line in lines[3:5]] == ["w", "b"]
    assert len(repr(ModuleTree(ROWS, 1)).splitlines()) == 3
    assert repr(ModuleTree([], 3)) == "no tensors"


def test_numbers_in_words_ascend() -> None:
    tree = ModuleTree([Row(f"layer{n}.w", "float32", (), 4) for n in (1, 10, 2)], 1)
    assert [line.split()[0] for line in repr(tree).splitlines()] == ["layer1", "layer2", "layer10"]


def test_hostile_names_are_inert() -> None:
    tree = ModuleTree(ROWS, 3)
    assert "\x1b" not in repr(tree)
    assert "\u202e" not in repr(tree)
    assert "<b>" not in tree._repr_html_()


def test_large_trees_are_cut() -> None:
    tree = ModuleTree([Row(f"m{i}", "float32", (), 4) for i in range(1000)], 2)
    lines = repr(tree).splitlines()
    assert len(lines) == 301
    assert "smaller depth" in lines[-1]


def test_tables() -> None:
    patterns = sizes_table(ROWS, "pattern")
    assert patterns.loc["h.{0..2}.w"].to_dict() == {
        "tensors": 3,
        "shape": "4×4",
        "dtype": "bfloat16",
        "storage": "",
        "parameters": 48,
        "nbytes": 96,
        "share": 96 / 308,
    }
    dtypes = sizes_table(ROWS, "dtype")
    assert dtypes["tensors"].to_dict() == {"float32": 5, "bfloat16": 3}
    layers = sizes_table(ROWS, "layer")
    assert layers["nbytes"].to_dict() == {"": 164, "h.0": 48, "h.1": 48, "h.2": 48}
    for table in (patterns, dtypes, layers):
        assert table["share"].sum() == pytest.approx(1)
        assert table["nbytes"].is_monotonic_decreasing
    with pytest.raises(ValueError, match="'shard'"):
        sizes_table(ROWS, "shard")  # type: ignore[arg-type]
    assert sizes_table([], "pattern").empty
    assert sizes_table([], "layer").empty
