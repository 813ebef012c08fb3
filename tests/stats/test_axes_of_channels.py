"""Findings speak of output and input channels, whatever the position of their axes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pytest

import xckpt
from tests.formats.onnx_files import initializer, model, node
from xckpt.structure import Described, Structure

if TYPE_CHECKING:
    from pathlib import Path

Array = np.ndarray[Any, np.dtype[Any]]


def kernel(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype("f4")


def explanations(path: Path, rule: str) -> dict[str, str]:
    frame = xckpt.findings(path, progress=False, cache=False)
    frame = frame[frame["rule"] == rule]
    return dict(zip(frame["tensor"], frame["explanation"], strict=True))


def keras(path: Path, **kernels: Array) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in kernels.items():
            group = file.create_group(f"layers/{name}/vars")
            group["0"], group["1"] = values, np.ones(values.shape[-1], "f4") + values.max()
            group.attrs["name"] = name
    return path


def test_kernels_of_keras_end_with_their_outputs(tmp_path: Path) -> None:
    conv, dense = kernel(3, 3, 16, 32), kernel(100, 50)
    conv[..., 5] = conv[:, :, 11] = 0
    dense[:, 9] = 0
    path = keras(tmp_path / "m.weights.h5", conv2d=conv, dense=dense)
    dead = explanations(path, "dead_rows")
    assert dead["layers/conv2d/vars/0"] == "1 of 32 output channels is zero: number 5"
    assert dead["layers/dense/vars/0"] == "1 of 50 output channels is zero: number 9"
    inputs = explanations(path, "dead_columns")
    assert inputs == {"layers/conv2d/vars/0": "1 of 16 input channels is zero: number 11"}


def test_kernels_of_torch_begin_with_their_outputs(tmp_path: Path) -> None:
    conv = kernel(32, 16, 3, 3)
    conv[7] = conv[:, 3] = 0
    xckpt.save({"conv.weight": conv, "norm.weight": kernel(32)}, tmp_path / "m.safetensors")
    path = tmp_path / "m.safetensors"
    assert explanations(path, "dead_rows")["conv.weight"].startswith("1 of 32 output channels")
    assert explanations(path, "dead_columns")["conv.weight"].startswith("1 of 16 input channels")


@pytest.mark.parametrize("inputs", [64, 8192])
def test_a_channel_is_counted_among_all_of_its_tensor(inputs: int, tmp_path: Path) -> None:
    weight = kernel(2, 200, inputs)
    weight[1, 181, 20] = weight[1, 181, 28] = 60
    nodes = (node("LSTM", ["x", "w", "r"], ["y"]),)
    path = tmp_path / "m.onnx"
    tensors = {"w": weight, "r": kernel(2, 200, 8)}
    path.write_bytes(model(*(initializer(n, v) for n, v in tensors.items()), nodes=nodes))
    text = explanations(path, "outlier_channels")["w"]
    number, total = (181, 200) if inputs == 64 else (381, 400)
    assert f"output channel of {total:,} " in text
    assert text.endswith(f"in output channel {number:,}")


CASES = [
    (("height", "width", "in", "out"), ((3,), (2,))),
    (("out", "in", "height", "width"), ((0,), (1,))),
    (("in", "out"), ((1,), (0,))),
    (("directions", "out", "in"), ((0, 1), (2,))),
    (("in", "heads", "head"), ((1, 2), (0,))),
    (("heads", "head", "out"), ((2,), (0, 1))),
]


@pytest.mark.parametrize(("axes", "expected"), CASES)
def test_channels_follow_from_the_names_of_axes(
    axes: tuple[str, ...], expected: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    shape = (8,) * len(axes)
    structure = Structure([Described("w", "float32", shape, {"axes": axes})])
    channels = structure.channels("w")
    assert channels is not None
    assert (channels.rows, channels.columns) == expected


def test_channels_follow_from_the_family() -> None:
    """GPT-2 stores inputs first, and names of its weights do not tell."""
    shapes = {"wte.weight": (50, 8), "wpe.weight": (16, 8), "ln_f.weight": (8,)}
    for n in range(2):
        shapes |= {
            f"h.{n}.attn.c_attn.weight": (8, 24),
            f"h.{n}.attn.c_proj.weight": (8, 8),
            f"h.{n}.mlp.c_fc.weight": (8, 32),
            f"h.{n}.mlp.c_proj.weight": (32, 8),
            f"h.{n}.ln_1.weight": (8,),
            f"h.{n}.ln_2.weight": (8,),
        }
    structure = Structure([Described(name, "float32", shape) for name, shape in shapes.items()])
    assert structure.channels("h.1.mlp.c_fc.weight") == ((1,), (0,), True)
    few = Structure([Described("h.1.mlp.c_fc.weight", "float32", (8, 32))])
    assert few.channels("h.1.mlp.c_fc.weight") is None
