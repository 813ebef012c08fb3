"""Codes with stored scales and biases are explained within their bound, and damage is not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import xckpt
from tests.stats.checkpoints import write
from tests.stats.test_layouts import explained
from xckpt.sample import write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

Array = np.ndarray[Any, np.dtype[Any]]
F32, BF16 = np.float32, ml_dtypes.bfloat16
GROUP, NAME = 64, "model.layers.1.mlp.up_proj"


def original() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    tensors = {}
    for layer in range(3):
        base = f"model.layers.{layer}.mlp"
        for role, shape in (("up", (48, 128)), ("down", (128, 192))):
            tensors[f"{base}.{role}_proj"] = (0.05 * rng.standard_normal(shape)).astype(F32)
    tensors[NAME][3, :GROUP] = 0
    tensors[NAME][4, :GROUP] = 0.25
    tensors[NAME][5, :GROUP] = np.abs(tensors[NAME][5, :GROUP]) + F32(1)
    return tensors


def quantised(values: Array, bits: int, dtype: Any) -> dict[str, Array]:
    """Return the codes, scales and biases that `mlx.core.quantize` makes (mlx 0.32)."""
    groups = values.reshape(-1, GROUP)
    low, high = groups.min(1, keepdims=True), groups.max(1, keepdims=True)
    most = F32((1 << bits) - 1)
    is_low = np.abs(low) > np.abs(high)
    scale = np.maximum((high - low) / most, F32(1e-7)) * np.where(is_low, F32(1), F32(-1))
    edge = np.where(is_low, low, high)
    steps = np.rint(edge / scale)
    has_zero = steps != 0
    scale = np.where(has_zero, edge / np.where(has_zero, steps, F32(1)), scale).astype(F32)
    bias = np.where(has_zero, edge, F32(0))
    codes = np.clip(np.rint((groups - bias) / scale), 0, most).reshape(values.shape)
    grid = (*values.shape[:-1], -1)
    return {
        "weight": codes.astype(np.uint8),
        "scales": scale.reshape(grid).astype(dtype),
        "biases": bias.reshape(grid).astype(dtype),
    }


def pack(codes: Array, bits: int) -> Array:
    parts = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits]
    packed = np.packbits(parts.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")
    return packed.view(np.uint32)


def compared(
    ours: dict[str, Array], theirs: dict[str, dict[str, Array]], bits: int, folder: Path
) -> Any:
    tensors: dict[str, Array] = {}
    for name, parts in theirs.items():
        tensors |= {f"{name}.{part}": values for part, values in parts.items()}
        tensors[f"{name}.weight"] = pack(parts["weight"], bits)
    config = {"model_type": "llama", "quantization": {"group_size": GROUP, "bits": bits}}
    (folder / "config.json").write_text(json.dumps(config))
    write(folder / "model.safetensors", tensors)
    return explained({f"{name}.weight": x for name, x in ours.items()}, folder)


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("dtype", [np.float16, BF16, F32])
@pytest.mark.parametrize("of_half", [False, True])
def test_affine_codes_of_mlx_are_explained(
    bits: int, dtype: Any, of_half: bool, tmp_path: Path
) -> None:
    ours = original()
    sources = {n: x.astype(np.float16).astype(F32) if of_half else x for n, x in ours.items()}
    theirs = {name: quantised(x, bits, dtype) for name, x in sources.items()}
    table = compared(ours, theirs, bits, tmp_path)
    assert set(table["outcome"]) == {"explained"}, table["explanation"].to_dict()
    assert table["cause"].str.contains("quantised").all()


def test_codes_are_compared_with_numbers_computed_from_them(tmp_path: Path) -> None:
    ds = xckpt.open(write_checkpoint(tmp_path / "m.zt", layers=3, width=16))
    codes = "model.layers.0.mlp.down_proj.weight"
    assert ds[codes].encoding["layout"] == "quantized"
    for pair in ((ds, ds * 2), (ds * 2, ds)):
        assert explained(*pair).loc[codes, "cause"] == "scaled"


def _code(parts: dict[str, Array], _: Array) -> None:
    codes = parts["weight"]
    at = np.argwhere((codes[20:] > 2) & (codes[20:] < 12))[0] + [20, 0]
    codes[tuple(at)] += 2


def _exchanged(values: Array) -> None:
    values[[10, 11]] = values[[11, 10]]


DAMAGES: dict[str, Any] = {
    "a code": _code,
    "a scale": lambda parts, _: parts["scales"].__setitem__((9, 1), parts["scales"][9, 1] * 1.2),
    "scales of two rows": lambda parts, _: _exchanged(parts["scales"]),
    "a bias": lambda parts, _: parts["biases"].__setitem__(
        (9, 1), parts["biases"][9, 1] + parts["scales"][9, 1]
    ),
    "biases of two rows": lambda parts, _: _exchanged(parts["biases"]),
    "codes of two rows": lambda parts, _: _exchanged(parts["weight"]),
    "a row of codes is zero": lambda parts, _: parts["weight"].__setitem__(30, 0),
    "scales are zero": lambda parts, _: parts["scales"].__setitem__((12, 0), 0),
    "a group of zeros": lambda parts, _: parts["biases"].__setitem__((3, 0), 0.01),
    "signs of scales": lambda parts, _: parts["scales"].__imul__(-1),
    "an original element": lambda _, ours: ours.__setitem__((7, 7), ours[7, 7] + 0.1),
    "no zero code": lambda parts, _: parts["biases"].__iadd__(parts["scales"] * 0.75),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("dtype", [np.float16, BF16])
def test_damage_of_affine_codes_is_not_explained(damage: str, dtype: Any, tmp_path: Path) -> None:
    ours = original()
    theirs = {name: quantised(x, 4, dtype) for name, x in ours.items()}
    DAMAGES[damage](theirs[NAME], ours[NAME])
    table = compared(ours, theirs, 4, tmp_path)
    wrong = table.index[table["outcome"] != "explained"]
    assert list(wrong) == [f"{NAME}.weight"]
