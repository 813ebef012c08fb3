"""A model with layers and experts, and figures that are closed after each test."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
import xarray as xr

import xckpt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LAYERS, EXPERTS = 6, 3


@pytest.fixture(autouse=True)
def figures(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    monkeypatch.setenv("XCKPT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    plt.close("all")  # of tests elsewhere
    yield
    try:
        for number in plt.get_fignums():
            plt.figure(number).canvas.draw()  # labels are laid out, warnings are errors
    finally:
        plt.close("all")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint in which each standard deviation identifies a tensor."""
    from xckpt.writing import save

    rng = np.random.default_rng(0)
    tensors = {"embed": rng.normal(0, 1, (40, 8))}
    for layer in range(LAYERS):
        tensors[f"m.layers.{layer}.attn.w"] = rng.normal(0, 1, (8, 8)) * (layer + 1)
        for expert in range(EXPERTS):
            values = rng.normal(0, 1, (8, 16)) * (1 + layer + 10 * expert)
            tensors[f"m.layers.{layer}.experts.{expert}.up"] = values
    path = tmp_path_factory.mktemp("plots") / "m.zt"
    variables = {
        name: ((f"d{len(values)}", f"e{values.shape[1]}"), values.astype(np.float32))
        for name, values in tensors.items()
    }
    save(xr.Dataset(variables), path)
    return path


@pytest.fixture
def flat(model: Path) -> xr.Dataset:
    return xr.open_dataset(model, engine="ztensor")


@pytest.fixture
def unreadable(model: Path, tmp_path: Path) -> xr.Dataset:
    """Open a model that is then cut, so that every read of it is an error."""
    path = tmp_path / "m.zt"
    path.write_bytes(model.read_bytes())
    ds = xr.open_dataset(path, engine="ztensor")
    os.truncate(path, 100)
    with pytest.raises(xckpt.FileChangedError):
        ds["embed"].load()
    return ds


@pytest.fixture
def stacked(model: Path) -> xr.Dataset:
    return xr.open_dataset(model, engine="ztensor", stack=True)
