"""Tensors are chosen by glob, globs, regular expression or function."""

from __future__ import annotations

import re
from typing import Any

import pytest

from xckpt.labels import select
from xckpt.labels.filters import suggest_filters, suggest_names

NAMES = ["emb", "blocks.0.w", "blocks.0.b", "blocks.10.w", "head"]


@pytest.mark.parametrize(
    ("wanted", "chosen"),
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
def test_select(wanted: Any, chosen: list[str]) -> None:
    assert select(NAMES, wanted) == chosen


@pytest.mark.parametrize("wanted", [3, [3], {"a": 1}.values()])
def test_what_cannot_choose_is_a_type_error(wanted: Any) -> None:
    with pytest.raises(TypeError, match="tensors takes a glob"):
        select(NAMES, wanted)


def test_names_similar_to_one_that_is_missing() -> None:
    assert suggest_names(NAMES, "heed") == "; similar names: 'head'"
    assert suggest_names(NAMES, "something else") == ""


@pytest.mark.parametrize(
    ("wanted", "hint"),
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
def test_filters_in_place_of_one_without_a_match(wanted: Any, hint: str) -> None:
    assert suggest_filters(NAMES, wanted) == hint
