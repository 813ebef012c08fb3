"""Golden primitiv files, beyond what the contracts check for every format."""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.conftest import golden_files
from tests.contracts.declared import golden_json
from tests.contracts.primitiv import DECLARED, expected_name

if TYPE_CHECKING:
    from pathlib import Path

GOOD = DECLARED.good()
SHAPES = golden_files("primitiv/shape_*.primitiv", with_suffix=".expected.json")
OPTIMIZERS = golden_files("primitiv/**/*opt_*.primitiv", with_suffix=".expected.json")


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
def test_keys_are_tree_paths_and_batches_are_axes(path: Path) -> None:
    entries = golden_json(path).get("entries", [])
    places = {
        variable.encoding["tensor"]: (node.path, name, variable)
        for node in xr.open_datatree(path).subtree
        for name, variable in node.variables.items()
    }
    assert len(places) == len(entries)
    for entry in entries:
        folder, name, variable = places[expected_name(entry)]
        assert ("batch" in variable.dims) == (entry["batch"] > 1)
        *modules, leaf = entry.get("key", ["value"])
        if all(element.isidentifier() for element in (*modules, leaf)):
            assert folder == "/" + "/".join(modules)
            assert name == (f"{leaf}:{entry['stat']}" if "stat" in entry else leaf)


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
def test_without_statistics(path: Path) -> None:
    expected = golden_json(path)
    ds = xr.open_dataset(path, with_stats=False)
    values = [entry for entry in expected.get("entries", []) if entry["role"] == "value"]
    assert list(ds.variables) == [expected_name(entry) for entry in values]


@pytest.mark.parametrize("path", SHAPES, ids=lambda path: path.stem)
def test_shapes(path: Path) -> None:
    expected = golden_json(path)
    attrs = xr.open_dataset(path).attrs
    assert (attrs["dims"], attrs["batch"]) == (expected["dims"], expected["batch"])


@pytest.mark.parametrize("path", OPTIMIZERS, ids=lambda path: path.stem)
def test_optimizers(path: Path) -> None:
    expected = golden_json(path)
    attrs = xr.open_dataset(path).attrs
    inferred = None if expected["class"].startswith("(") else expected["class"]
    assert attrs.get("optimizer") == inferred
    assert attrs["uint_configs"] == expected["uint_configs"]
    assert list(attrs["uint_configs"]) == expected["uint_order"]
    assert list(attrs["float_configs"]) == expected["float_order"]
    for name, bits in expected["float_bits"].items():
        value = attrs["float_configs"][name]
        assert struct.pack(">f", value) == struct.pack(">I", bits)
        assert math.isnan(value) == (expected["float_configs"][name] == "nan")


def test_damaged_line_ends_are_reported(golden: Path) -> None:
    with pytest.raises(xckpt.FormatError, match="0d 0a"):
        xr.open_dataset(golden / "primitiv/bad/crlf_damaged.primitiv", engine="primitiv")


def test_a_model_computes_the_same_as_the_library(golden: Path) -> None:
    folder = golden / "primitiv"
    forward = json.loads((folder / "mlp_adam_model.forward.json").read_text())
    ds = xr.open_dataset(folder / "mlp_adam_model.primitiv", with_stats=False).load()
    x = np.array(forward["x"], "f4").reshape((8, 3), order="F")
    y = np.array(forward["y"], "f4").reshape((4, 3), order="F")
    weight, bias = ds["hidden.w"].values, ds["hidden.b"].values
    hidden = np.tanh(weight @ x + bias[:, None])
    weight, bias = ds["output.w"].values, ds["output.b"].values
    np.testing.assert_allclose(weight @ hidden + bias[:, None], y, atol=1e-6)


def test_chunks_run_along_the_last_axis(golden: Path) -> None:
    import dask

    with dask.config.set({"array.chunk-size": "16B"}):
        ds = xr.open_dataset(golden / "primitiv/tensor_batch.primitiv")
    assert ds["value"].shape == (3, 3, 2)
    assert ds["value"].chunks == ((3,), (1, 1, 1), (1, 1))
