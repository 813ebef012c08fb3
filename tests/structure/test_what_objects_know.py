"""Computed, selected, saved and in-memory objects keep what is known about their tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.formats.onnx_files import initializer, model, node

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """Return a model with a kernel, and a setting of an operator whose name is that of a weight."""
    tensors: dict[str, Any] = {"a": np.ones((8, 4, 3, 3), "f4"), "low.weight": np.ones(4, "f4")}
    nodes = (node("Conv", ["x", "a"], ["y"]), node("Clip", ["y", "low.weight"], ["z"]))
    path = tmp_path / "m.onnx"
    path.write_bytes(model(*(initializer(n, v) for n, v in tensors.items()), nodes=nodes))
    return path


OPERATIONS: dict[str, Callable[[xr.Dataset], xr.Dataset]] = {
    "opened": lambda ds: ds,
    "loaded": lambda ds: ds.load(),
    "selected": lambda ds: ds[["a", "low.weight"]],
    "copied": lambda ds: ds.copy(deep=True),
    "assigned": lambda ds: ds.assign({"more": ds["a"]}).drop_vars("more"),
    "found": lambda ds: ds.ckpt.find("*"),
}
#: Operations after which xarray keeps attributes in its current version.
COMPUTED: dict[str, Callable[[xr.Dataset], xr.Dataset]] = {
    "multiplied": lambda ds: ds * 2,
    "subtracted": lambda ds: ds - ds,
    "converted": lambda ds: ds.astype("f8"),
    "masked": lambda ds: ds.where(ds > 0),
}


def roles(ds: xr.Dataset) -> dict[str, str]:
    return dict(ds.ckpt.structure()["role"])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_objects_keep_the_facts_of_the_file(operation: str, graph: Path) -> None:
    ds = OPERATIONS[operation](xckpt.open(graph))
    assert roles(ds) == {"a": "weight", "low.weight": "constant"}
    assert ds.ckpt.structure().loc["a", "axes"] == "out, in, height, width"


@pytest.mark.parametrize("operation", COMPUTED)
def test_computed_objects_know_what_their_attributes_state(operation: str, graph: Path) -> None:
    with xr.set_options(keep_attrs=True):
        ds = COMPUTED[operation](xckpt.open(graph))
    assert roles(ds) == {"a": "weight", "low.weight": "constant"}
    assert ds.ckpt.structure().loc["a", "axes"] == "out, in, height, width"
    assert ds.ckpt.footprint()["parameters"] == 288


def test_a_saved_copy_states_the_facts_as_attributes(graph: Path, tmp_path: Path) -> None:
    xckpt.open(graph).ckpt.save(tmp_path / "copy.zt")
    assert roles(xckpt.open(tmp_path / "copy.zt")) == {"a": "weight", "low.weight": "constant"}


def test_a_state_dict_has_a_summary_and_a_structure() -> None:
    state = {"embed": np.ones((4, 3)), "layers": {"0": {"norm": {"running_mean": np.ones(3)}}}}
    ds = xckpt.open(state)
    assert repr(ds.ckpt).startswith("<Checkpoint in memory>  2 tensors · 12 params")
    assert "<Checkpoint" in str(ds.ckpt._repr_html_()) or "in memory" in ds.ckpt._repr_html_()
    assert roles(ds) == {"embed": "weight", "layers.0.norm.running_mean": "statistic"}


STEPS: dict[str, Callable[[xr.Dataset], xr.Dataset]] = {
    "sel": lambda run: run.sel(step=200),
    "isel": lambda run: run.isel(step=-1),
    "dropped": lambda run: run.sel(step=200, drop=True),
    "mean": lambda run: run.mean("step"),
    "rolling": lambda run: run.rolling(step=2).mean().isel(step=-1),
    "computed": lambda run: run.sel(step=200) * 2,
    "unstacked": lambda run: run.sel(step=200).ckpt.unstack(),
    "interpolated": lambda run: run.interp(step=150),
    "between numbers": lambda run: run.interp(step=150.5),
    "nearest": lambda run: run.sel(step=210, method="nearest"),
    "grouped": lambda run: run.groupby("step").mean().isel(step=0),
    "renumbered": lambda run: run.assign_coords(step=[1, 2, 3]).isel(step=0),
}


@pytest.mark.parametrize("selection", STEPS)
@pytest.mark.parametrize("stack", [False, True])
def test_a_step_of_a_run_has_the_names_of_the_model(
    selection: str, stack: bool, tmp_path: Path
) -> None:
    names = ["layers.0.w", "layers.1.w"]
    for step in (100, 200, 300):
        tensors = {name: np.full((2, 3), step, "f4") for name in names}
        xckpt.save(tensors, tmp_path / f"step-{step}.zt")
    run = xckpt.open_steps(str(tmp_path / "step-*.zt"), stack=stack)
    one = STEPS[selection](run)
    one.ckpt.save(tmp_path / "one.zt", cast="allow")
    assert list(xckpt.read_index(tmp_path / "one.zt")) == names
    assert sorted(one.ckpt.stats(progress=False).ckpt.table().index) == names
    assert sorted(one.ckpt.structure().index) == names


@pytest.mark.parametrize("stack", [False, True])
def test_interpolated_steps_are_steps_of_the_run(stack: bool, tmp_path: Path) -> None:
    for step in (100, 200, 300):
        tensors = {f"layers.{n}.w": np.full((2, 3), step, "f4") for n in (0, 1)}
        xckpt.save(tensors, tmp_path / f"step-{step}.zt")
    run = xckpt.open_steps(str(tmp_path / "step-*.zt"), stack=stack).interp(step=[150, 250])
    run.ckpt.save(tmp_path / "two.zt", cast="allow")
    names = [f"step.{step}.layers.{n}.w" for step in (150, 250) for n in (0, 1)]
    two = xckpt.open(tmp_path / "two.zt")
    assert sorted(map(str, two.data_vars)) == names
    assert float(two["step.150.layers.0.w"][0, 0]) == 150
