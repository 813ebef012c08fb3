"""Every name has one place in the tree, and comes back from it."""

from __future__ import annotations

import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from xckpt.labels import flat_name, tree_paths

HOSTILE = st.text(alphabet="ab./%\0 é2F58self:\udcff\udc80", max_size=8)


@given(st.sets(st.one_of(st.text(max_size=12), HOSTILE), max_size=20))
def test_places_are_unique_and_invertible(names: set[str]) -> None:
    placed = tree_paths(names)
    assert set(placed) == names
    assert len(set(placed.values())) == len(names)
    for name, (path, leaf) in placed.items():
        assert flat_name(path, leaf, name) == name
        # What is not known has dots where there were slashes.
        assert flat_name(path, leaf) in {name, name.replace("/", ".")}


@given(st.sets(HOSTILE, max_size=12))
def test_a_datatree_takes_every_name(names: set[str]) -> None:
    groups: dict[str, dict[str, xr.Variable]] = {"/": {}}
    for number, (path, leaf) in enumerate(tree_paths(sorted(names)).values()):
        groups.setdefault(path, {})[leaf] = xr.Variable((), number)
    tree = xr.DataTree.from_dict({path: xr.Dataset(group) for path, group in groups.items()})
    ordered = sorted(names)
    back = {
        flat_name(node.path, str(leaf), ordered[int(value)]): int(value)
        for node in tree.subtree
        for leaf, value in node.variables.items()
    }
    assert back == {name: number for number, name in enumerate(ordered)}


@pytest.mark.parametrize(
    ("names", "place"),
    [
        (["a.b.c"], ("/a/b", "c")),
        (["a"], ("/", "a")),
        (["a", "a.b"], ("/a", "%self")),
        (["a.b", "a.b.c"], ("/a/b", "%self")),
        (["a..b"], ("/a/%", "b")),
        ([""], ("/", "%")),
        (["x/y.z"], ("/x/y", "z")),
        (["x/y", "x.y"], ("/", "x%2Fy")),
        (["x/y/z", "x/y"], ("/x/y", "z")),
        (["a.%self"], ("/a", "%25self")),
        (["\udcff.a\udc80"], ("/%FF", "a%80")),
    ],
)
def test_examples(names: list[str], place: tuple[str, str]) -> None:
    assert tree_paths(names)[names[0]] == place


def test_a_name_of_ten_thousand_components_makes_no_deep_tree() -> None:
    name = ".".join(["a"] * 10_000)
    path, leaf = tree_paths([name])[name]
    assert path.count("/") <= 64
    assert flat_name(path, leaf) == name


def test_a_stated_path_is_not_split_at_dots() -> None:
    stated = {"a.b": None, "a.b.": ("a.b", ""), "..": (".", ""), "x": ("rank_0", "x")}
    placed = tree_paths(stated)
    assert placed == {
        "a.b": ("/a", "b"),
        "a.b.": ("/a.b", "%"),
        "..": ("/%2E", "%"),
        "x": ("/rank_0", "x"),
    }
    assert flat_name(*placed["a.b."]) == "a.b."


def test_two_tensors_cannot_have_one_place() -> None:
    with pytest.raises(ValueError, match="same path, '/x/w'"):
        tree_paths({"a": ("x", "w"), "b": ("x", "w")})
