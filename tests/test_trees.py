"""``xr.open_datatree``: the tree that xarray builds of modules, about as fast as a Dataset."""

from __future__ import annotations

import copy
import pickle
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from benchmarks.checkpoints import mixture_of_experts, write_ztensor
from xckpt.backend import ZTensorBackend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NAMES = ("w", "a.w", "a.b.c.w", "a.b.c.v", "a.b.x", "a.b", "layers.0.w", "layers.1.w", "e..w")


def trees(folder: Path) -> dict[str, Path]:
    """Write checkpoints of modules: plain ones, and with coordinates of some modules."""
    flat = xr.Dataset({name: ("x", np.arange(4.0) + n) for n, name in enumerate(NAMES)})
    words = {"vocab": ["a", "b"]}
    inherited = xr.DataTree.from_dict(
        {
            "/": xr.Dataset({"w": ("vocab", [1.0, 2.0])}, {"vocab": [5, 7]}, words),
            "/a/b": xr.Dataset({"w": (("vocab", "y"), np.ones((2, 3)))}, {"y": [1, 2, 3]}),
            "/a/c": xr.Dataset({"v": ("y", np.ones(2))}, {"y": [4, 5]}),
            "/empty": xr.Dataset(attrs=words),
        }
    )
    paths = {"flat": folder / "flat.zt", "inherited": folder / "inherited.zt"}
    xckpt.save(flat, paths["flat"])
    xckpt.save(inherited, paths["inherited"])
    return paths


@pytest.mark.parametrize("options", [{}, {"stack": True}, {"chunks": {}}, {"cache": False}])
@pytest.mark.parametrize("kind", ["flat", "inherited"])
def test_a_tree_equals_the_one_that_xarray_builds(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    path = trees(tmp_path)[kind]
    tree = xr.open_datatree(path, engine="ztensor", **options)
    expected = xr.DataTree.from_dict(xr.open_groups(path, engine="ztensor", **options))
    assert type(tree) is xr.DataTree
    xr.testing.assert_identical(tree, expected)
    assert [node.path for node in tree.subtree] == [node.path for node in expected.subtree]
    for node, expected_node in zip(tree.subtree, expected.subtree, strict=True):
        assert node.parent is None or node.parent.children[str(node.name)] is node
        assert node.to_dataset().sizes == expected_node.to_dataset().sizes
        for name, variable in node.variables.items():
            assert variable.encoding.keys() == expected_node.variables[name].encoding.keys()
            assert variable.chunks == expected_node.variables[name].chunks


def test_a_tree_can_be_changed_and_copied_like_any_other(tmp_path: Path) -> None:
    path = trees(tmp_path)["flat"]
    for tree in (
        xr.open_datatree(path, engine="ztensor"),
        xr.open_datatree(path, engine="ztensor", create_default_indexes=False),
        ZTensorBackend().open_datatree(path),
    ):
        xr.testing.assert_identical(pickle.loads(pickle.dumps(tree)), tree)
        xr.testing.assert_identical(copy.deepcopy(tree), tree)
        doubled = tree.map_over_datasets(lambda ds: ds * 2)
        xr.testing.assert_equal(doubled["a/b/c"].to_dataset(), 2 * tree["a/b/c"].to_dataset())
        tree["a/new"] = xr.Dataset({"v": ("x", np.ones(4))})
        assert tree["a/new"].path == "/a/new"
        tree["a/y"] = xr.Dataset({"v": ("y", np.ones(4))}, {"y": np.arange(4)})
        with pytest.raises(ValueError, match="aligned"):
            tree["a/y/worse"] = xr.Dataset({"v": ("y", np.ones(3))}, {"y": np.arange(3)})
        tree.close()


def test_an_index_of_a_module_hides_no_variable_below_it(tmp_path: Path) -> None:
    xckpt.save(
        xr.Dataset(
            {"a.w": ("x", [1.0, 2.0]), "a.b.c.x": ("y", [3.0, 4.0, 5.0])},
            {"a.x": ("x", [7, 8]), "d.x": ("x", [7, 8])},
        ),
        tmp_path / "m.zt",
    )
    tree = xr.open_datatree(tmp_path / "m.zt", engine="ztensor")
    assert tree["a/b/c"].to_dataset()["x"].values.tolist() == [3, 4, 5]
    assert tree["a"].to_dataset()["x"].values.tolist() == [7, 8]
    assert tree["a"].to_dataset().indexes.keys() == set()
    assert tree["d"].to_dataset().indexes.keys() == {"x"}


def test_conflicting_modules_are_refused_as_by_xarray() -> None:
    # A file cannot bring them: its names of axes are made to fit.
    from xckpt.upstream.xarray_trees import make_tree

    first, second = (xr.Dataset({"w": ("y", np.ones(n))}, {"y": np.arange(n)}) for n in (2, 3))
    for modules in ({"/": first, "/a": second}, {"/": first, "/w": xr.Dataset()}):
        with pytest.raises((ValueError, KeyError)) as error:
            make_tree(modules)
        with pytest.raises(type(error.value)):
            xr.DataTree.from_dict(modules)


def test_a_tree_of_thousands_of_modules_opens_in_a_small_multiple_of_a_dataset(
    tmp_path: Path,
) -> None:
    path = tmp_path / "moe.zt"
    write_ztensor(path, dict(mixture_of_experts(layers=6, experts=256)))
    flat, tree = least_seconds(
        [partial(opener, path, engine="ztensor") for opener in (xr.open_dataset, xr.open_datatree)]
    )
    # About twice as long; by way of `DataTree.from_dict` it would be 20 times.
    assert tree < 4 * flat


def least_seconds(functions: list[Callable[[], Any]]) -> list[float]:
    """Return the least time of a processor that each takes; they are called by turns."""
    seconds = [[] for _ in functions]  # type: ignore[var-annotated]
    for _ in range(3):
        for times, function in zip(seconds, functions, strict=True):
            start = time.process_time()
            function()
            times.append(time.process_time() - start)
    return [min(times) for times in seconds]
