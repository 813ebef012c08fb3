"""Axes get names that fit their sizes, the variables and each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xckpt import CheckpointWarning
from xckpt.labels import AxisNamer

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
SUGGESTED = st.sampled_from(["a", "b", "d2", "d2_1", "v", None])


def test_unnamed_axes_are_named_after_their_sizes() -> None:
    namer = AxisNamer()
    assert namer.name_axes("a", (768, 3072)) == ("d768", "d3072")
    assert namer.name_axes("b", (768, 768, 768)) == ("d768_1", "d768_2", "d768_3")
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


def test_axis_of_another_size_gets_its_extent_appended() -> None:
    namer = AxisNamer({"*": ("out", "in")})
    tensors = {"a": np.ones((3, 5)), "b": np.ones((3, 4)), "c": np.ones((3, 4))}
    namer.survey(tensors, {})
    assert namer.name_axes("a", (3, 5)) == ("out", "in_5")
    assert namer.name_axes("b", (3, 4)) == ("out", "in")
    with pytest.warns(CheckpointWarning, match=r"'in' \(in_5\)"):
        namer.warn_of_refused("m")


@given(st.permutations(range(6)))
def test_names_do_not_depend_on_the_order_of_tensors(order: list[int]) -> None:
    shapes = [(3, 4), (4, 3), (3, 5), (5,), (4, 4), (3, 3)]
    tensors = {f"t{n}": np.empty(shapes[n]) for n in order}
    namer = AxisNamer({"t?": ("out", "in"), "t3": ("in",), "t5": ("x", None)})
    namer.survey(tensors, {"t4": ("y", "y")})
    names = {name: namer.name_axes(name, array.shape) for name, array in tensors.items()}
    assert names == {
        "t0": ("out_3", "in_4"),
        "t1": ("out", "in_3"),
        "t2": ("out_3", "in"),
        "t3": ("in",),
        "t4": ("out", "in_4"),
        "t5": ("x", "d3_1"),
    }


def test_equal_axes_share_no_name_with_a_vector() -> None:
    namer = AxisNamer()
    assert namer.name_axes("w", (8, 8)) == ("d8_1", "d8_2")
    assert namer.name_axes("norm", (8,)) == ("d8",)
    assert namer.name_axes("pooler", (8, 8), ("embd", "embd")) == ("embd_1", "embd_2")
    assert namer.name_axes("mixed", (8, 8), ("embd", None)) == ("embd", "d8_1")
    # The axis of a stack is no axis of its tensors.
    assert namer.name_axes("stack", (8, 8), None, ("layers",)) == ("layers", "d8")


def test_names_from_extents_on_request() -> None:
    namer = AxisNamer("size")
    assert namer.name_axes("w", (8, 8)) == ("d8", "d8_1")
    with pytest.raises(ValueError, match="expected 'size'"):
        AxisNamer("sizes")  # type: ignore[arg-type]


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
