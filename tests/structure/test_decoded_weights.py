"""Weights that are decoded have the place in the model that their codes have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import xckpt
from tests.formats.onnx_files import initializer, model, node

if TYPE_CHECKING:
    from pathlib import Path

CODES = np.arange(32, dtype="i1").reshape(4, 8)
SCALE = np.full((4, 1), 0.5, "f4")


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """Return a model with a matrix of codes that the graph decodes."""
    tensors = (initializer("fc.weight", CODES), initializer("fc.weight_scale", SCALE))
    nodes = (
        node("DequantizeLinear", ["fc.weight", "fc.weight_scale"], ["decoded"]),
        node("MatMul", ["x", "decoded"], ["y"]),
    )
    path = tmp_path / "m.onnx"
    path.write_bytes(model(*tensors, nodes=nodes))
    return path


def test_a_decoded_weight_keeps_module_axes_and_evidence(graph: Path) -> None:
    ds = xckpt.open(graph)
    np.testing.assert_array_equal(ds["fc.weight"].values, CODES * SCALE)
    (row,) = ds.ckpt.structure().itertuples()
    assert (row.role, row.module_type, row.axes) == ("weight", "linear", "in, out")
    assert "DequantizeLinear[0]" in row.evidence


def test_a_saved_copy_of_a_decoded_weight_is_a_weight(graph: Path, tmp_path: Path) -> None:
    xckpt.open(graph).load().astype("f4").ckpt.save(tmp_path / "copy.zt")
    roles = xckpt.open(tmp_path / "copy.zt").ckpt.structure()["role"]
    assert roles["fc.weight"] == "weight"


@pytest.mark.parametrize("name", ["data_format", "x_shape", "h.scales", "w_zero_point.weight"])
def test_the_names_of_codes_are_free(name: str, tmp_path: Path) -> None:
    xckpt.save({name: CODES, f"{name}_scale": SCALE}, tmp_path / "m.safetensors")
    ds = xckpt.open(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(ds[name].values, CODES * SCALE)


def test_quantised_moments_of_an_optimizer_are_not_decoded(tmp_path: Path) -> None:
    names = ["w", "optimizer.state.0.exp_avg"]
    tensors = dict.fromkeys(names, CODES) | {f"{name}_scale": SCALE for name in names}
    xckpt.save(tensors, tmp_path / "m.safetensors")
    ds = xckpt.open(tmp_path / "m.safetensors")
    assert set(ds.data_vars) == {"w", names[1], f"{names[1]}_scale"}
