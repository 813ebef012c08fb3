"""Every tensor has its own path in a tree, and its name can be restored from it."""

from __future__ import annotations

import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from xckpt.labels import flat_name, tree_paths

HOSTILE = st.text(alphabet="ab./%\0 é2F58self:\udcff\udc80", max_size=8)


@given(st.sets(st.one_of(st.text(max_size=12), HOSTILE), max_size=20))
def test_paths_are_unique_and_invertible(names: set[str]) -> None:
    paths = tree_paths(names)
    assert set(paths) == names
    assert len(set(paths.values())) == len(names)
    for name, (path, leaf) in paths.items():
        assert flat_name(path, leaf, name) == name
        # Without the original name, slashes become dots.
        assert flat_name(path, leaf) in {name, name.replace("/", ".")}


@given(st.sets(HOSTILE, max_size=12))
def test_datatree_accepts_every_path(names: set[str]) -> None:
    groups: dict[str, dict[str, xr.Variable]] = {"/": {}}
    for number, (path, leaf) in enumerate(tree_paths(sorted(names)).values()):
        groups.setdefault(path, {})[leaf] = xr.Variable((), number)
    tree = xr.DataTree.from_dict({path: xr.Dataset(group) for path, group in groups.items()})
    ordered = sorted(names)
    restored = {
        flat_name(node.path, str(leaf), ordered[int(value)]): int(value)
        for node in tree.subtree
        for leaf, value in node.variables.items()
    }
    assert restored == {name: number for number, name in enumerate(ordered)}


@pytest.mark.parametrize(
    ("names", "expected"),
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
def test_path_of_name(names: list[str], expected: tuple[str, str]) -> None:
    assert tree_paths(names)[names[0]] == expected


def test_depth_of_tree_is_limited() -> None:
    name = ".".join(["a"] * 10_000)
    path, leaf = tree_paths([name])[name]
    assert path.count("/") <= 64
    assert flat_name(path, leaf) == name


def test_stated_path_is_not_split_at_dots() -> None:
    stated = {"a.b": None, "a.b.": ("a.b", ""), "..": (".", ""), "x": ("rank_0", "x")}
    paths = tree_paths(stated)
    assert paths == {
        "a.b": ("/a", "b"),
        "a.b.": ("/a.b", "%"),
        "..": ("/%2E", "%"),
        "x": ("/rank_0", "x"),
    }
    assert flat_name(*paths["a.b."]) == "a.b."


def test_same_path_of_two_tensors_raises() -> None:
    with pytest.raises(ValueError, match="same path, '/x/w'"):
        tree_paths({"a": ("x", "w"), "b": ("x", "w")})
