"""Only repeated modules of the model become dimensions, unless the caller names others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import xckpt
from tests.formats.onnx_files import initializer, model, node

if TYPE_CHECKING:
    from pathlib import Path

    import xarray as xr

NOT_MODULES = {
    "entries of an optimizer": [f"optimizer.state.{i}.exp_avg" for i in range(3)],
    "ids of Python": [f"optimizer_state.state.{140178894882496 + i}.exp_avg" for i in range(3)],
    "variables of a layer": ["layers/dense/vars/0", "layers/dense/vars/1"],
    "norms of a block": ["block.norm_1.weight", "block.norm_2.weight"],
    "halves of a gate": ["mlp.wi_0.kernel", "mlp.wi_1.kernel"],
    "tensors in a list": ["alphas.0", "alphas.1"],
}
LAYERS = ["model.layers.0.w.weight", "model.layers.1.w.weight"]


def opened(names: list[str], path: Path) -> xr.Dataset:
    xckpt.save({name: np.ones((4, 4), "f4") for name in names}, path)
    return xckpt.open(path, stack=True)


@pytest.mark.parametrize("kind", NOT_MODULES)
def test_other_numbers_are_not_dimensions(kind: str, tmp_path: Path) -> None:
    names = [*NOT_MODULES[kind], *LAYERS]
    ds = opened(names, tmp_path / "m.zt")
    assert set(ds.data_vars) == {*NOT_MODULES[kind], "model.layers.w.weight"}
    stacked = xckpt.open(tmp_path / "m.zt").ckpt.stack()
    assert set(stacked.data_vars) == set(ds.data_vars)


def test_numbers_of_values_in_a_graph_are_not_dimensions(tmp_path: Path) -> None:
    tensors = {name: np.ones((4, 4), "f4") for name in ("260", "262", "x.203", "x.204")}
    nodes = [node("MatMul", ["x", name], [f"y{name}"]) for name in tensors]
    path = tmp_path / "m.onnx"
    path.write_bytes(model(*(initializer(n, v) for n, v in tensors.items()), nodes=tuple(nodes)))
    assert set(xckpt.open(path, stack=True).data_vars) == set(tensors)


def test_the_caller_may_name_other_numbered_modules(tmp_path: Path) -> None:
    names = NOT_MODULES["entries of an optimizer"]
    opened(names, tmp_path / "m.zt")
    ds = xckpt.open(tmp_path / "m.zt", stack="state")
    assert ds["optimizer.state.exp_avg"].dims[0] == "state"


def test_an_optimizer_stays_apart_in_the_steps_of_a_run(tmp_path: Path) -> None:
    names = [*NOT_MODULES["entries of an optimizer"], *LAYERS]
    for step in (100, 200):
        tensors = {name: np.full((4, 4), step, "f4") for name in names}
        xckpt.save(tensors, tmp_path / f"step-{step}.zt")
    run = xckpt.open_steps(str(tmp_path / "step-*.zt"), stack=True)
    dims = {name: variable.dims[:-2] for name, variable in run.data_vars.items()}
    assert dims == {
        **dict.fromkeys(NOT_MODULES["entries of an optimizer"], ("step",)),
        "model.layers.w.weight": ("step", "layers"),
    }


def test_steps_of_some_tensors_are_stacked_without_a_warning(tmp_path: Path) -> None:
    names = [*LAYERS, "experts.0.up.weight", "experts.1.up.weight"]
    for step in (100, 200):
        tensors = {name: np.full((4, 4), step, "f4") for name in names}
        xckpt.save(tensors, tmp_path / f"step-{step}.zt")
    run = xckpt.open_steps(str(tmp_path / "step-*.zt"), stack=True, tensors="model.*")
    assert run["model.layers.w.weight"].dims[:2] == ("step", "layers")
