"""Axes get names that fit their sizes, the variables and each other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xckpt.labels import AxisNamer

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
SUGGESTED = st.sampled_from(["a", "b", "d2", "d2_1", "v", None])


def test_unnamed_axes_are_named_after_their_sizes() -> None:
    namer = AxisNamer()
    assert namer.name_axes("a", (768, 3072)) == ("d768", "d3072")
    assert namer.name_axes("b", (768, 768, 768)) == ("d768", "d768_1", "d768_2")
    assert namer.name_axes("c", ()) == ()


def test_last_matching_glob_wins() -> None:
    namer = AxisNamer({"*": ("row", "col"), "*.w": ("out", "in"), "x": (None, "col")})
    assert namer.name_axes("a.w", (3, 4)) == ("out", "in")
    assert namer.name_axes("b", (5, 6)) == ("row", "col")
    assert namer.name_axes("x", (7, 6)) == ("d7", "col")


def test_names_of_the_caller_replace_those_of_the_file() -> None:
    namer = AxisNamer({"x": (None, "mine")})
    assert namer.name_axes("x", (2, 3), ("theirs", "other")) == ("theirs", "mine")


def test_wrong_number_of_names_raises() -> None:
    with pytest.raises(ValueError, match=r"'a.w'.*3 axes"):
        AxisNamer({"*.w": ("out", "in")}).name_axes("a.w", (1, 2, 3))


def test_axis_of_another_size_does_not_get_the_name() -> None:
    namer = AxisNamer({"*": ("out", "in")})
    assert namer.name_axes("a", (3, 4)) == ("out", "in")
    assert namer.name_axes("b", (3, 5)) == ("out", "d5")


def test_axes_never_have_names_of_variables() -> None:
    namer = AxisNamer(reserved={"d3"})
    assert namer.name_axes("d3", (3,)) == ("d3_1",)
    with pytest.raises(ValueError, match="name of a variable"):
        AxisNamer({"*": ("v",)}, reserved={"v"}).name_axes("x", (3,))


@pytest.mark.parametrize(
    ("dims", "error"),
    [
        ({"*": "ab"}, TypeError),
        ({"*": ("a", 3)}, TypeError),
        ({"*": ("a", "")}, TypeError),
        ({3: ("a",)}, TypeError),
        ({"*": ("a", "a")}, ValueError),
    ],
)
def test_invalid_dims_raise(dims: dict[Any, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        AxisNamer(dims)


@given(
    st.lists(st.tuples(SHAPES, st.lists(SUGGESTED, min_size=4, max_size=4)), max_size=12),
    st.sets(st.sampled_from(["v", "d3", "d2_1", "a"])),
)
def test_names_are_unique_and_have_one_size(tensors: list[Any], reserved: set[str]) -> None:
    namer = AxisNamer(reserved=reserved)
    sizes: dict[str, int] = {}
    for number, (shape, suggested) in enumerate(tensors):
        dims = namer.name_axes(f"t{number}", shape, suggested[: len(shape)])
        assert len(set(dims)) == len(dims) == len(shape)
        assert not reserved.intersection(dims)
        for dim, size in zip(dims, shape, strict=True):
            assert sizes.setdefault(dim, size) == size
