"""Names of axes by the role of a tensor in its module, where all tensors agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import xarray as xr

from tests.formats.burnpack_files import burnpack, dense
from xckpt import formats

if TYPE_CHECKING:
    from pathlib import Path

C = ("channels",)
OUT = ("d_output",)
ROWS = {"weight": ("d_input", "d_output"), "bias": OUT}
COLUMNS = {"weight": ("d_output", "d_input"), "bias": OUT}
FILTER = ("kernel_height", "kernel_width", "channels_in", "channels_out")
CONV = ("channels_out", "channels_in", "kernel_height", "kernel_width")


@pytest.mark.parametrize(
    ("shapes", "axes"),
    [
        ({"weight": (6, 4), "bias": (4,)}, ROWS),
        ({"weight": (4, 6), "bias": (4,)}, COLUMNS),
        ({"weight": (4, 4), "bias": (4,)}, ROWS),
        ({"weight": (4, 6), "bias": (5,)}, {}),
        ({"weight": (4, 6)}, {}),
        ({"weight": (4, 6), "bias": (4, 6)}, {}),
        ({"bias": (4,)}, {}),
        ({"weight": (8, 3, 5, 5), "bias": (8,)}, {"weight": CONV, "bias": ("channels_out",)}),
        (
            {"weight": (3, 8, 5), "bias": (8,)},
            {"weight": ("channels_in", "channels_out", "kernel"), "bias": ("channels_out",)},
        ),
        ({"weight": (8, 8, 5, 5), "bias": (8,)}, {"weight": CONV, "bias": ("channels_out",)}),
        ({"weight": (8, 3, 5, 5)}, {"weight": (None, None, "kernel_height", "kernel_width")}),
        ({"gamma": (4,), "beta": (4,), "x": (4,)}, {"gamma": C, "beta": C}),
        ({"gamma": (4,), "beta": (5,)}, {}),
        ({"gamma": (4, 4)}, {}),
        ({}, {}),
    ],
)
def test_axes_of_burn_modules(
    shapes: dict[str, tuple[int, ...]], axes: dict[str, tuple[str | None, ...]]
) -> None:
    assert formats.get("burnpack").module_axes(shapes) == axes


@pytest.mark.parametrize(
    ("shapes", "axes"),
    [
        ({"w": (8, 4), "b": (8,)}, {"w": ("out", "in"), "b": ("out",)}),
        ({"pw2": (8, 4), "pb2": (8,)}, {"pw2": ("out", "in"), "pb2": ("out",)}),
        ({"pw_fc1": (8, 4), "pb_fc1": (8,)}, {"pw_fc1": ("out", "in"), "pb_fc1": ("out",)}),
        ({"w": (8, 4), "b": (4,)}, {}),
        ({"w": (8, 4)}, {}),
        ({"lookup": (8, 4), "b": (8,)}, {}),
        ({"pw_cnn1": (3, 3, 1, 8)}, {"pw_cnn1": FILTER}),
    ],
)
def test_axes_of_primitiv_modules(
    shapes: dict[str, tuple[int, ...]], axes: dict[str, tuple[str | None, ...]]
) -> None:
    assert formats.get("primitiv").module_axes(shapes) == axes


def test_module_axes_are_named_in_trees_only() -> None:
    shapes = {
        "fc1.weight": (6, 4),
        "fc1.bias": (4,),
        "fc2.weight": (4, 2),
        "fc2.bias": (2,),
        "blocks.0.fc.weight": (3, 4),
        "blocks.0.fc.bias": (4,),
        "blocks.1.fc.weight": (3, 4),
        "blocks.1.fc.bias": (4,),
    }
    data = burnpack({name: dense(np.zeros(shape, "<f4")) for name, shape in shapes.items()})
    tree = xr.open_datatree(data, engine="burnpack")
    assert tree["fc1/weight"].sizes == {"d_input": 6, "d_output": 4}
    assert tree["fc2/bias"].sizes == {"d_output": 2}
    stacked = xr.open_datatree(data, engine="burnpack", stack=True)
    assert stacked["blocks/fc/weight"].dims == ("blocks", "d_input", "d_output")
    assert xr.open_dataset(data, engine="burnpack")["fc1.weight"].dims == ("d6", "d4")
    chosen = xr.open_datatree(data, engine="burnpack", dims={"fc1.weight": ("rows", None)})
    assert chosen["fc1/weight"].dims == ("rows", "d_output")


def test_nodes_below_each_other_agree() -> None:
    """xarray refuses a tree with one name for two sizes on the way down."""
    shapes = {"a.weight": (6, 4), "a.bias": (4,), "a.b.weight": (5, 3), "a.b.bias": (3,)}
    data = burnpack({name: dense(np.zeros(shape, "<f4")) for name, shape in shapes.items()})
    tree = xr.open_datatree(data, engine="burnpack")
    assert tree["a/weight"].dims == ("d_input", "d_output")
    assert tree["a/b/weight"].dims == ("d_input_5", "d_output_3")


def test_axes_of_real_files(golden: Path) -> None:
    tree = xr.open_datatree(golden / "burnpack" / "real_mnist.bpk", engine="burnpack")
    assert tree["fc1/weight"].dims == ("d_input", "d_output")
    assert tree["conv1/conv/weight"].dims == CONV
    assert {v.dims for v in tree["conv1/norm"].dataset.variables.values()} == {("channels",)}
