"""Filters select tensors by name, and suggest names or globs if nothing matches."""

from __future__ import annotations

import re
from typing import Any

import pytest

from xckpt.labels import select
from xckpt.labels.filters import suggest_filters, suggest_names

NAMES = ["emb", "blocks.0.w", "blocks.0.b", "blocks.10.w", "head"]


@pytest.mark.parametrize(
    ("name_filter", "selected"),
    [
        (None, NAMES),
        ("*.w", ["blocks.0.w", "blocks.10.w"]),
        ("w", []),
        (["head", "*.b"], ["blocks.0.b", "head"]),
        ([], []),
        (re.compile(r"\d{2}"), ["blocks.10.w"]),
        (lambda name: name.startswith("e"), ["emb"]),
        (["head", "emb"], ["emb", "head"]),
    ],
)
def test_select(name_filter: Any, selected: list[str]) -> None:
    assert select(NAMES, name_filter) == selected


@pytest.mark.parametrize("name_filter", [3, [3], {"a": 1}.values()])
def test_invalid_filter_raises(name_filter: Any) -> None:
    with pytest.raises(TypeError, match="tensors takes a glob"):
        select(NAMES, name_filter)


def test_similar_names_are_suggested_for_missing_one() -> None:
    assert suggest_names(NAMES, "heed") == "; similar names: 'head'"
    assert suggest_names(NAMES, "something else") == ""


@pytest.mark.parametrize(
    ("name_filter", "hint"),
    [
        ("*.10.ww", "; did you mean '*.10.w'?"),
        (["block.[0-9].b", "haed*"], "; did you mean 'blocks.[0-9].b', 'head*'?"),
        ("blocks", "; did you mean 'blocks.*'?"),
        ("BLOCKS.0", "; did you mean 'blocks.0.*'?"),
        ("10.w", "; did you mean '*10.w*'?"),
        ("0.w", "; did you mean '*0.w*'?"),
        ("blck", "; did you mean 'blocks.*'?"),
        ("heed", "; similar names: 'head'"),
        ("*.something.*", ""),
        ("", ""),
        (re.compile("x"), ""),
    ],
)
def test_globs_are_suggested_for_filter_without_match(name_filter: Any, hint: str) -> None:
    assert suggest_filters(NAMES, name_filter) == hint
