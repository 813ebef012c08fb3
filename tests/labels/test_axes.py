"""Names of axes fit, whatever is asked for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xckpt.labels import AxisNamer

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
WANTED = st.sampled_from(["a", "b", "d2", "d2_1", "v", None])


def test_size_names() -> None:
    names = AxisNamer()
    assert names.name_axes("a", (768, 3072)) == ("d768", "d3072")
    assert names.name_axes("b", (768, 768, 768)) == ("d768", "d768_1", "d768_2")
    assert names.name_axes("c", ()) == ()


def test_the_last_matching_entry_of_the_caller_wins() -> None:
    names = AxisNamer({"*": ("row", "col"), "*.w": ("out", "in"), "x": (None, "col")})
    assert names.name_axes("a.w", (3, 4)) == ("out", "in")
    assert names.name_axes("b", (5, 6)) == ("row", "col")
    assert names.name_axes("x", (7, 6)) == ("d7", "col")


def test_the_caller_goes_before_the_file() -> None:
    names = AxisNamer({"x": (None, "mine")})
    assert names.name_axes("x", (2, 3), ("theirs", "other")) == ("theirs", "mine")


def test_a_wrong_count_of_names_is_an_error_that_names_the_tensor() -> None:
    with pytest.raises(ValueError, match=r"'a.w'.*3 axes"):
        AxisNamer({"*.w": ("out", "in")}).name_axes("a.w", (1, 2, 3))


def test_the_later_tensor_falls_back_where_a_name_has_another_size() -> None:
    names = AxisNamer({"*": ("out", "in")})
    assert names.name_axes("a", (3, 4)) == ("out", "in")
    assert names.name_axes("b", (3, 5)) == ("out", "d5")


def test_no_axis_is_named_like_a_variable() -> None:
    names = AxisNamer(reserved={"d3"})
    assert names.name_axes("d3", (3,)) == ("d3_1",)
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
def test_dims_that_make_no_sense(dims: dict[Any, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        AxisNamer(dims)


@given(
    st.lists(st.tuples(SHAPES, st.lists(WANTED, min_size=4, max_size=4)), max_size=12),
    st.sets(st.sampled_from(["v", "d3", "d2_1", "a"])),
)
def test_names_always_fit(tensors: list[Any], reserved: set[str]) -> None:
    names = AxisNamer(reserved=reserved)
    sizes: dict[str, int] = {}
    for number, (shape, wanted) in enumerate(tensors):
        dims = names.name_axes(f"t{number}", shape, wanted[: len(shape)])
        assert len(set(dims)) == len(dims) == len(shape)
        assert not reserved.intersection(dims)
        for dim, size in zip(dims, shape, strict=True):
            assert sizes.setdefault(dim, size) == size
