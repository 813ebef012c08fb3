"""Misleading names change no role, no count of parameters and no finding where facts are stated."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import h5py
import numpy as np
import pytest

import xckpt
from tests.formats import torch_files
from tests.formats.deepspeed_files import listed
from tests.formats.torch_files import mapping, number, text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import xarray as xr

    from xckpt.typing import Array

RANDOM = np.random.default_rng(0)
OUT, IN = 24, 16


def normal(*shape: int) -> Array:
    return (RANDOM.normal(size=shape) / 4).astype("f4")


def dead(array: Array) -> Array:
    """Return a copy with one output that is zero, which is a finding."""
    array = array.copy()
    array[..., 3] = 0
    return array


# Layers of Keras by class, with their variables.
LAYERS: list[tuple[str, dict[str, Array]]] = [
    ("Conv2D", {"kernel": dead(normal(3, 3, IN, OUT)), "bias": normal(OUT)}),
    (
        "BatchNormalization",
        {
            "gamma": np.ones(OUT, "f4"),
            "beta": normal(OUT),
            "moving_mean": normal(OUT),
            "moving_variance": np.abs(normal(OUT)) + 1,
        },
    ),
    ("Embedding", {"embeddings": normal(40, IN)}),
    ("Dense", {"kernel": normal(IN, OUT), "bias": normal(OUT)}),
]
NEUTRAL = ["first", "second", "third", "fourth"]
NAMES = [
    ["running_mean", "optimizer", "scale", "codes"],
    ["step", "running_var", "ema", "mask"],
    ["conv2d_norm", "dense", "optimizer_state", "num_batches_tracked"],
    ["exp_avg", "kernel_scale", "rng_state", "stft"],
]


def keras_2(path: Path, names: Sequence[str]) -> Path:
    """Write a model as Keras 2 does, with the layers under their own names."""
    config = [
        {"class_name": kind, "config": {"name": name}}
        for name, (kind, _) in zip(names, LAYERS, strict=True)
    ]
    with h5py.File(path, "w") as file:
        file.attrs["model_config"] = json.dumps({"class_name": "Sequential", "config": config})
        for name, (_, variables) in zip(names, LAYERS, strict=True):
            for variable, values in variables.items():
                file[f"model_weights/{name}/{name}/{variable}:0"] = values
    return path


class Described(NamedTuple):
    """What is known about a file, with the names of the layers of another one."""

    tensors: dict[str, Any]
    parameters: int
    findings: list[Any]


def described(ds: xr.Dataset, names: Sequence[str]) -> Described:
    def renamed(tensor: str) -> str:
        _, layer, _, variable = tensor.split("/")
        return f"{NEUTRAL[names.index(layer)]}/{variable}"

    table = ds.ckpt.structure()[["role", "module_type", "param", "axes"]]
    findings = ds.ckpt.findings(progress=False)[["tensor", "rule", "severity"]]
    return Described(
        {renamed(name): (*row,) for name, *row in table.itertuples()},
        int(ds.ckpt.footprint()["parameters"]),
        sorted((renamed(tensor), *row) for _, tensor, *row in findings.itertuples()),
    )


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0])
def test_keras_layers_with_misleading_names(names: list[str], tmp_path: Path) -> None:
    expected = described(xckpt.open(keras_2(tmp_path / "a.h5", NEUTRAL)), NEUTRAL)
    assert expected.findings, "the dead output is a finding"
    assert described(xckpt.open(keras_2(tmp_path / "b.h5", names)), names) == expected


# A model of PyTorch: names, and names that mislead.
TORCH = {
    "net.0.weight": normal(OUT, IN),
    "net.0.bias": normal(OUT),
    "net.1.weight": normal(OUT),
    "net.2.weight": dead(normal(OUT, OUT).T).T,
}
MISLEADING = [
    ["net.running_mean", "net.running_var", "net.pe", "net.mask"],
    ["net.0.window", "net.0.filterbank", "net.1.moving_mean", "net.1.betas"],
    ["ema.weight", "ema.bias", "stft.weight", "loss_scaler.weight"],
]


def torch_file(names: Sequence[str]) -> bytes:
    """Write a model with an optimizer that lists its parameters by name."""
    storages, model = {}, {}
    for key, (name, values) in enumerate(zip(names, TORCH.values(), strict=True)):
        storages[str(key)] = np.ascontiguousarray(values).tobytes()
        model[name] = torch_files.whole(str(key), np.ascontiguousarray(values))
    groups = {
        "lr": number(1),
        "params": listed(*map(number, range(len(names)))),
        "param_names": listed(*map(text, names)),
    }
    optimizer = {"state": mapping({}), "param_groups": listed(mapping(groups))}
    value = {"model": mapping(model), "optimizer": mapping(optimizer)}
    return torch_files.archive(mapping(value), storages)


def judged(names: Sequence[str]) -> tuple[list[str], int, list[tuple[int, str]]]:
    """Return roles, parameters and findings of a model; findings have the number of the tensor."""
    ds = xckpt.open(torch_file(names))
    findings = ds.ckpt.findings(progress=False)[["tensor", "rule"]]
    numbers = {f"model.{name}": place for place, name in enumerate(names)}
    return (
        ds.ckpt.structure()["role"].tolist(),
        int(ds.ckpt.footprint()["parameters"]),
        sorted((numbers[tensor], rule) for _, tensor, rule in findings.itertuples()),
    )


@pytest.mark.parametrize("names", MISLEADING, ids=lambda names: names[0])
def test_parameters_of_torch_with_misleading_names(names: list[str]) -> None:
    roles, parameters, findings = judged(list(TORCH))
    assert roles == ["weight"] * len(TORCH)
    assert parameters == sum(values.size for values in TORCH.values())
    assert findings
    assert judged(names) == (roles, parameters, findings)
