"""Names of axes fit, whatever is asked for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xckpt.labels import AxisNames

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
WANTED = st.sampled_from(["a", "b", "d2", "d2_1", "v", None])


def test_size_names() -> None:
    names = AxisNames()
    assert names.of("a", (768, 3072)) == ("d768", "d3072")
    assert names.of("b", (768, 768, 768)) == ("d768", "d768_1", "d768_2")
    assert names.of("c", ()) == ()


def test_the_last_matching_entry_of_the_caller_wins() -> None:
    names = AxisNames({"*": ("row", "col"), "*.w": ("out", "in"), "x": (None, "col")})
    assert names.of("a.w", (3, 4)) == ("out", "in")
    assert names.of("b", (5, 6)) == ("row", "col")
    assert names.of("x", (7, 6)) == ("d7", "col")


def test_the_caller_goes_before_the_file() -> None:
    names = AxisNames({"x": (None, "mine")})
    assert names.of("x", (2, 3), ("theirs", "other")) == ("theirs", "mine")


def test_a_wrong_count_of_names_is_an_error_that_names_the_tensor() -> None:
    with pytest.raises(ValueError, match=r"'a.w'.*3 axes"):
        AxisNames({"*.w": ("out", "in")}).of("a.w", (1, 2, 3))


def test_the_later_tensor_falls_back_where_a_name_has_another_size() -> None:
    names = AxisNames({"*": ("out", "in")})
    assert names.of("a", (3, 4)) == ("out", "in")
    assert names.of("b", (3, 5)) == ("out", "d5")


def test_no_axis_is_named_like_a_variable() -> None:
    names = AxisNames(reserved={"d3"})
    assert names.of("d3", (3,)) == ("d3_1",)
    with pytest.raises(ValueError, match="name of a variable"):
        AxisNames({"*": ("v",)}, reserved={"v"}).of("x", (3,))


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
        AxisNames(dims)


@given(
    st.lists(st.tuples(SHAPES, st.lists(WANTED, min_size=4, max_size=4)), max_size=12),
    st.sets(st.sampled_from(["v", "d3", "d2_1", "a"])),
)
def test_names_always_fit(tensors: list[Any], reserved: set[str]) -> None:
    names = AxisNames(reserved=reserved)
    sizes: dict[str, int] = {}
    for number, (shape, wanted) in enumerate(tensors):
        dims = names.of(f"t{number}", shape, wanted[: len(shape)])
        assert len(set(dims)) == len(dims) == len(shape)
        assert not reserved.intersection(dims)
        for dim, size in zip(dims, shape, strict=True):
            assert sizes.setdefault(dim, size) == size
