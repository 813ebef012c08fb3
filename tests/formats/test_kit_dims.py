"""Names of axes stored as a text in a file."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xckpt.formats.kit import dims_text, with_dims
from xckpt.index import Tensor

NAMES = st.text(min_size=1, max_size=4)


def dense(name: str, shape: tuple[int, ...] = (2, 3), dims: Any = None) -> Tensor:
    return Tensor(name, "float32", shape, {}, dims=dims)


@given(st.dictionaries(st.text(max_size=6), st.lists(st.none() | NAMES, max_size=4).map(tuple)))
def test_names_come_back(dims_by_name: dict[str, tuple[str | None, ...]]) -> None:
    tensors = {name: dense(name, shape=(1,) * len(dims)) for name, dims in dims_by_name.items()}
    text = dims_text(
        {n: dense(n, shape=(1,) * len(dims), dims=dims) for n, dims in dims_by_name.items()}
    )
    restored = with_dims(tensors, text)
    assert list(restored) == list(tensors)
    assert {name: tensor.dims for name, tensor in restored.items()} == {
        name: dims if any(dims) else None for name, dims in dims_by_name.items()
    }


def test_the_text_does_not_depend_on_the_order_of_tensors() -> None:
    tensors = {name: dense(name, dims=("é", None)) for name in "ba"}
    text = dims_text(tensors)
    assert text == dims_text(dict(reversed(tensors.items()))) == '{"a":["é",null],"b":["é",null]}'
    assert dims_text({"s": dense("s", shape=(), dims=()), "n": dense("n")}) is None


@pytest.mark.parametrize(
    "text",
    [
        None,
        {"w": ["a", "b"]},
        b"{}",
        "",
        "{",
        "null",
        "[]",
        "NaN",
        "[" * 100_000,
        '{"w": 1}',
        '{"w": "ab"}',
        '{"w": ["a"]}',
        '{"w": ["a", "b", "c"]}',
        '{"w": ["a", 1]}',
        '{"w": ["a", ""]}',
        '{"w": ["a", "\\ud800"]}',
        '{"w": {"a": 1, "b": 2}}',
        '{"other": ["a", "b"]}',
        '{"w": ["a", ' + "9" * 5000 + "]}",
    ],
)
def test_malformed_names_are_ignored(text: Any) -> None:
    tensors = {"w": dense("w"), "v": dense("v")}
    assert with_dims(tensors, text) == tensors
    if type(text) is str and text.endswith("}"):
        good = json.dumps({**json.loads(text, parse_int=float), "v": ["x", None]})
        assert with_dims(tensors, good)["v"].dims == ("x", None)
