"""Quantised models, as they are downloaded, open as the weights that they encode."""

from __future__ import annotations

import copy
import json
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.conftest import GOLDEN
from tests.contracts.declared import arrays_in
from xckpt.errors import CheckpointError, CheckpointWarning
from xckpt.opening import open_index
from xckpt.quantization import assemble_weights
from xckpt.quantization.model import find_declaration

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODELS = GOLDEN / "hf-quantized"
GOOD = sorted(path.parent.name for path in MODELS.glob("*/expected.json"))
BAD = json.loads((MODELS / "bad/INDEX.json").read_text())["cases"]
# A model for each way to store codes.
SCHEMES = (
    "awq_gemm_group32",
    "bnb_int8",
    "bnb_nf4_nested",
    "ct_nvfp4",
    "ct_pack_int5_dense_asym",
    "fp8_block_deepseek_shards",
    "gptq_4bit_v2_asym_actorder",
    "mlx_6bit",
    "modelopt_nvfp4",
    "mxfp4_gpt_oss",
)
# Replacements for values of a config.
ODD_VALUES: tuple[Any, ...] = (None, -1, True, 1.5, "x", [], {}, [[1]], {"a": {}}, 10**30)


def opened(path: Path, **options: Any) -> tuple[xr.Dataset, list[str]]:
    """Open a model, and return it with its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ds = xr.open_dataset(path, engine="safetensors", **options)
    assert all(warning.category is CheckpointWarning for warning in caught)
    return ds, [str(warning.message) for warning in caught]


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths to all values in a JSON object."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from paths_in(item, (*path, key))


def load_expected(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the description of a model, and the values of its weights by name."""
    folder = MODELS / name
    description = json.loads((folder / "expected.json").read_text())
    arrays = arrays_in(folder / "expected.npz")
    tensors = description["tensors"]
    return description, {weight: arrays[tensor["npz"]] for weight, tensor in tensors.items()}


def contents(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return the stored tensors of a file, or of all files of a folder."""
    ds, _ = opened(path, decode=False)
    return {
        str(name): (str(variable.dtype), variable.shape, variable.values.tobytes())
        for name, variable in ds.variables.items()
    }


class TestModelsOfAllSchemes:
    @pytest.mark.parametrize("name", GOOD)
    def test_weights_equal_those_of_the_real_packages(self, name: str) -> None:
        description, weights = load_expected(name)
        for path in description["open"]:
            ds, messages = opened(MODELS / name / path)
            assert set(ds.variables) == {*weights, *description["plain"]}
            assert bool(messages) == bool(description["warnings"])
            for weight, expected in weights.items():
                values = ds[weight].values
                assert values.dtype == np.float32
                np.testing.assert_array_equal(values, expected)
                if "zeros" not in str(description["tensors"][weight].get("numpy_formula")):
                    np.testing.assert_array_equal(np.signbit(values), np.signbit(expected))

    @pytest.mark.parametrize("name", SCHEMES)
    def test_selection_equals_selection_of_all_values(self, name: str) -> None:
        _, weights = load_expected(name)
        ds, _ = opened(MODELS / name)
        for weight, expected in weights.items():
            lazy = ds[weight].variable
            for key in ((slice(3, 29), slice(5, 31, 3)), (1,), (slice(None), [7, 2, 30])):
                np.testing.assert_array_equal(np.asarray(lazy[key].values), expected[key])

    @pytest.mark.parametrize("name", GOOD)
    def test_stored_tensors_without_decoding(self, name: str) -> None:
        description, _ = load_expected(name)
        ds, messages = opened(MODELS / name, decode=False)
        assert set(ds.variables) == set(description["stored"])
        assert not messages

    @pytest.mark.parametrize("name", SCHEMES)
    def test_saving_copies_stored_tensors(self, name: str, tmp_path: Path) -> None:
        _, weights = load_expected(name)
        ds, _ = opened(MODELS / name)
        xckpt.save(ds, tmp_path / "a.safetensors", progress=False)
        xckpt.convert(MODELS / name, tmp_path / "b.zt", version="2", progress=False)
        assert contents(tmp_path / "a.safetensors") == contents(MODELS / name)
        index = xckpt.read_index(tmp_path / "b.zt")
        for weight, expected in weights.items():
            assert index.tensors[weight].layout == "quantized"
            values = xr.open_dataset(tmp_path / "b.zt", tensors=weight)[weight].values
            np.testing.assert_array_equal(values, expected)

    @pytest.mark.parametrize("name", SCHEMES)
    def test_comparison_and_statistics_use_values(self, name: str, tmp_path: Path) -> None:
        weights = list(load_expected(name)[1])
        ds, _ = opened(MODELS / name)
        path = tmp_path / "dense.safetensors"
        encoding = {weight: {"layout": "dense"} for weight in weights}
        xckpt.save(ds, path, encoding=encoding, progress=False)
        dense = xr.open_dataset(path, engine="safetensors")
        assert {dense[weight].encoding["layout"] for weight in weights} == {"dense"}
        differences = xckpt.compare(ds, dense, progress=False)
        assert all(float(row.sel(statistic="status")) == 0 for row in differences.values())
        statistics = xckpt.stats(ds[weights], progress=False)
        xr.testing.assert_allclose(statistics, xckpt.stats(dense[weights], progress=False))


# Allowed outcomes for the malformed weights of a case, by when it must be noticed.
OUTCOMES = {"parts": {"parts"}, "read": {"error"}, "ok": {"equal", "parts", "different"}}


class TestMalformedModels:
    @pytest.mark.parametrize("name", BAD)
    def test_malformed_weight_stays_as_stored(self, name: str) -> None:
        case = BAD[name]
        _, weights = load_expected(case["from"])
        ds, messages = opened(MODELS / "bad" / name)
        malformed = []
        for weight, expected in weights.items():
            module = weight.removesuffix(".weight")
            is_malformed = case["about"] == "all" or module.endswith(tuple(case["about"]))
            allowed = {"equal"}
            if is_malformed:
                malformed.append(module)
                allowed = OUTCOMES.get(case["when"], {"equal", "parts", "error"})
            assert self._outcome(ds, weight, expected) in allowed
        if case["when"] == "parts":
            (message,) = messages
            assert case["about"] == "all" or any(module in message for module in malformed)

    def _outcome(self, ds: xr.Dataset, weight: str, expected: np.ndarray) -> str:
        """Return whether a weight is shown as its parts, raises, or has the expected values."""
        if weight not in ds.variables or ds[weight].encoding["layout"] == "dense":
            return "parts"
        try:
            values = ds[weight].values
        except CheckpointError as error:
            return "error" if error.tensor == weight else str(error)
        return "equal" if np.array_equal(values, expected) else "different"

    def test_weights_with_inconsistent_scales_stay_as_stored(self) -> None:
        folder = MODELS / "bad/ct_scale_grid_disagrees"
        ds, _ = opened(folder)
        stored, _ = opened(folder, decode=False)
        names = [name for name in stored.variables if "q_proj" in str(name)]
        xr.testing.assert_equal(ds[names], stored[names].astype(ds[names].dtypes))

    @pytest.mark.parametrize("name", SCHEMES)
    def test_odd_values_in_a_config_lose_no_tensor(self, name: str) -> None:
        config = json.loads((MODELS / name / "config.json").read_text())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            index = open_index(MODELS / name, whole=False)[1]
        for path in paths_in(config):
            for value in ODD_VALUES:
                changed = copy.deepcopy(config)
                target = changed
                for key in path[:-1]:
                    target = target[key]
                target[path[-1]] = value
                declaration = find_declaration({"config": changed}.get)
                result = assemble_weights(index, declaration, lambda tensors: [b""] * len(tensors))
                stored = {
                    part.name
                    for tensor in result.tensors.values()
                    for part in (tensor.stored or {"": tensor}).values()
                }
                assert stored == set(index.tensors)

    @pytest.mark.parametrize("name", SCHEMES)
    def test_damaged_header_raises_or_opens(self, name: str, tmp_path: Path) -> None:
        source = min((MODELS / name).glob("*.safetensors"))
        data, rng = source.read_bytes(), np.random.default_rng(0)
        header_size = int.from_bytes(data[:8], "little") + 8
        for config in (MODELS / name).glob("*.json"):
            if "expected" not in config.name and "index" not in config.name:
                (tmp_path / config.name).write_bytes(config.read_bytes())
        for position in rng.integers(8, header_size, 12):
            damaged = bytearray(data)
            damaged[position] ^= 1 << int(rng.integers(7))
            path = tmp_path / "model.safetensors"
            path.write_bytes(damaged)
            try:
                ds, _ = opened(path)
                for variable in ds.variables.values():
                    assert np.asarray(variable.values).shape == variable.shape
            except CheckpointError:
                pass
