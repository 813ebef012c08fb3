"""What a variable of Keras is follows from the class of its layer and its quantisation."""

from __future__ import annotations

import io
import json
import zipfile
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pytest

import xckpt
from xckpt.structure import structure_of

if TYPE_CHECKING:
    from pathlib import Path

OUT, IN = 6, 4
FLOAT, INT8 = np.ones((IN, OUT), "f4"), np.ones((IN, OUT), "i1")
PACKED, BIAS, HISTORY = np.ones((IN // 2, OUT), "i1"), np.ones(OUT, "f4"), np.ones(1024, "f4")
ONE = np.float32(1)
# Variables of a dense layer by mode, as Keras 3.15 saves them.
MODES: dict[str, list[Any]] = {
    "": [FLOAT, BIAS],
    "int8": [INT8, BIAS, BIAS],
    "int4": [PACKED, BIAS, np.ones((1, OUT), "f4"), np.ones((1, OUT), "i1"), np.ones(IN, "f4")],
    "float8": [FLOAT, BIAS, ONE, HISTORY, ONE, HISTORY, ONE, HISTORY],
}


def weights(layers: dict[str, list[Any]]) -> bytes:
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        for name, variables in layers.items():
            group = file.create_group(f"layers/{name}/vars")
            group.attrs["name"] = name
            for number, values in enumerate(variables):
                group[str(number)] = values
    return buffer.getvalue()


def model(path: Path, layers: dict[str, list[Any]], configs: list[dict[str, Any]]) -> Path:
    config = {"class_name": "Sequential", "config": {"name": "m", "layers": configs}}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata.json", json.dumps({"keras_version": "3.15.1"}))
        archive.writestr("config.json", json.dumps(config))
        archive.writestr("model.weights.h5", weights(layers))
    return path


def dense(mode: str, *, use_bias: bool) -> dict[str, Any]:
    policy: Any = "float32"
    if mode:
        inner = {"mode": mode, "source_name": "float32"}
        policy = {"class_name": "QuantizedDTypePolicy", "config": inner}
    config = {"name": "dense", "units": OUT, "use_bias": use_bias, "dtype": policy}
    return {"class_name": "Dense", "config": config}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("has_config", [True, False])
def test_quantised_layers_have_the_parameters_of_the_layer(
    mode: str, use_bias: bool, has_config: bool, tmp_path: Path
) -> None:
    variables = MODES[mode] if use_bias else [*MODES[mode][:1], *MODES[mode][2:]]
    layers = {"dense": variables}
    path = tmp_path / "m.weights.h5"
    if has_config:
        path = model(tmp_path / "m.keras", layers, [dense(mode, use_bias=use_bias)])
    else:
        path.write_bytes(weights(layers))
    ds = xckpt.open(path)
    assert ds.ckpt.footprint()["parameters"] == IN * OUT + OUT * use_bias
    table = ds.ckpt.structure()
    kernel = "codes" if mode.startswith("int") else "weight"
    others = len(variables) - 1 - use_bias
    assert table["role"].tolist() == [kernel, *["weight"] * use_bias, *["scale"] * others]
    assert table["param"].tolist()[: 1 + use_bias] == ["weight", "bias"][: 1 + use_bias]
    # Packed codes have no axes of their own.
    assert (table["axes"].iloc[0] == "in, out") == (mode != "int4")


CLASSES: dict[str, tuple[list[Any], list[str]]] = {
    "RMSNormalization": ([BIAS], ["scale"]),
    "PReLU": ([BIAS], ["alpha"]),
    "Attention": ([ONE], ["scale"]),
    "BatchNormalization": ([BIAS] * 4, ["gamma", "beta", "moving_mean", "moving_variance"]),
    "Normalization": ([BIAS, BIAS, np.int64(3)], ["mean", "variance", "count"]),
}


@pytest.mark.parametrize("name", CLASSES)
def test_variables_have_the_names_of_their_class(name: str, tmp_path: Path) -> None:
    variables, names = CLASSES[name]
    configs = [{"class_name": name, "config": {"name": "mine"}}]
    path = model(tmp_path / "m.keras", {"mine": variables}, configs)
    index = xckpt.read_index(path)
    assert [tensor.attrs["variable"] for tensor in index.values()] == names
    roles = [role.value for role in structure_of(index).roles.values()]
    statistics = {"moving_mean", "moving_variance", "mean", "variance", "count"}
    assert roles == ["statistic" if name in statistics else "weight" for name in names]


@pytest.mark.parametrize("suffix", ["", "_1"])
def test_scopes_with_a_suffix_belong_to_their_layer(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / "m.h5"
    configs = [
        {"class_name": "Conv2D", "config": {"name": "conv2d_1"}},
        {"class_name": "Dense", "config": {"name": "dense_1"}},
    ]
    with h5py.File(path, "w") as file:
        config = {"class_name": "Sequential", "config": configs}
        file.attrs["model_config"] = json.dumps(config)
        for name, shape in (("conv2d_1", (3, 3, 4, 8)), ("dense_1", (8, 2))):
            scope = f"model_weights/{name}/{name}{suffix}/kernel:0"
            file[scope] = np.ones(shape, "f4")
    table = xckpt.open(path).ckpt.structure()
    assert table["layer"].tolist() == ["conv2d_1", "dense_1"]
    assert table["module_type"].tolist() == ["convolution", "linear"]
    assert table["axes"].tolist() == ["height, width, in, out", "in, out"]
