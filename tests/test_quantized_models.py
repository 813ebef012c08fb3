"""Quantised models, as they are downloaded, open as the weights that they stand for."""

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
from xckpt.quantization.config import find_declaration

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODELS = GOLDEN / "hf-quantized"
ABSENT = pytest.mark.skip(reason=f"no quantised models at {MODELS}")
GOOD = sorted(path.parent.name for path in MODELS.glob("*/expected.json"))
BAD = json.loads((MODELS / "bad/INDEX.json").read_text())["cases"] if GOOD else {}
# One for each way in which codes are stored.
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
# Instead of what a config has at some place.
WRONG: tuple[Any, ...] = (None, -1, True, 1.5, "x", [], {}, [[1]], {"a": {}}, 10**30)


def folders(names: Any) -> Any:
    return list(names) if GOOD else [pytest.param("absent", marks=ABSENT)]


def opened(path: Path, **options: Any) -> tuple[xr.Dataset, list[str]]:
    """Open a model, and return it with what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ds = xr.open_dataset(path, engine="safetensors", **options)
    assert all(each.category is CheckpointWarning for each in caught)
    return ds, [str(each.message) for each in caught]


def keys(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the ways to all that is in a JSON object."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        yield (*path, key)
        if isinstance(each, dict | list):
            yield from keys(each, (*path, key))


def expected(name: str) -> tuple[dict[str, Any], Any]:
    folder = MODELS / name
    return json.loads((folder / "expected.json").read_text()), arrays_in(folder / "expected.npz")


def contents(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return all that a file, or all files of a folder, store."""
    ds, _ = opened(path, decode=False)
    return {
        str(name): (str(each.dtype), each.shape, each.values.tobytes())
        for name, each in ds.variables.items()
    }


class TestModelsOfAllSchemes:
    @pytest.mark.parametrize("name", folders(GOOD))
    def test_weights_have_the_numbers_of_the_real_packages(self, name: str) -> None:
        about, arrays = expected(name)
        for path in about["open"]:
            ds, told = opened(MODELS / name / path)
            assert set(ds.variables) == {*about["tensors"], *about["plain"]}
            assert bool(told) == bool(about["warnings"])
            for weight, each in about["tensors"].items():
                values, right = ds[weight].values, arrays[each["npz"]]
                assert values.dtype == np.float32
                np.testing.assert_array_equal(values, right)
                if "zeros" not in str(each.get("numpy_formula")):
                    np.testing.assert_array_equal(np.signbit(values), np.signbit(right))

    @pytest.mark.parametrize("name", folders(SCHEMES))
    def test_a_selection_is_that_of_the_whole(self, name: str) -> None:
        about, arrays = expected(name)
        ds, _ = opened(MODELS / name)
        for weight, each in about["tensors"].items():
            right, lazy = arrays[each["npz"]], ds[weight].variable
            for key in ((slice(3, 29), slice(5, 31, 3)), (1,), (slice(None), [7, 2, 30])):
                some = np.asarray(lazy[key].values)
                np.testing.assert_array_equal(some, right[key])

    @pytest.mark.parametrize("name", folders(GOOD))
    def test_without_decoding_there_is_what_is_stored(self, name: str) -> None:
        about, _ = expected(name)
        ds, told = opened(MODELS / name, decode=False)
        assert set(ds.variables) == set(about["stored"])
        assert not told

    @pytest.mark.parametrize("name", folders(SCHEMES))
    def test_saving_keeps_what_is_stored(self, name: str, tmp_path: Path) -> None:
        about, arrays = expected(name)
        ds, _ = opened(MODELS / name)
        xckpt.save(ds, tmp_path / "a.safetensors", progress=False)
        xckpt.convert(MODELS / name, tmp_path / "b.zt", version="2", progress=False)
        stored = contents(MODELS / name)
        assert contents(tmp_path / "a.safetensors") == stored
        again = xckpt.read_index(tmp_path / "b.zt")
        for weight, each in about["tensors"].items():
            assert again.tensors[weight].layout == "quantized"
            values = xr.open_dataset(tmp_path / "b.zt", tensors=weight)[weight].values
            np.testing.assert_array_equal(values, arrays[each["npz"]])

    @pytest.mark.parametrize("name", folders(SCHEMES))
    def test_values_compare_equal_and_have_the_same_statistics(
        self, name: str, tmp_path: Path
    ) -> None:
        about, _ = expected(name)
        ds, _ = opened(MODELS / name)
        dense = tmp_path / "dense.safetensors"
        as_values = {weight: {"layout": "dense"} for weight in about["tensors"]}
        xckpt.save(ds, dense, encoding=as_values, progress=False)
        reference = xr.open_dataset(dense, engine="safetensors")
        assert {reference[weight].encoding["layout"] for weight in as_values} == {"dense"}
        compared = xckpt.compare(ds, reference, progress=False)
        assert all(float(each.sel(statistic="status")) == 0 for each in compared.values())
        weights = list(as_values)
        found = xckpt.stats(ds[weights], progress=False)
        xr.testing.assert_allclose(found, xckpt.stats(reference[weights], progress=False))


class TestMalformedModels:
    @pytest.mark.parametrize("name", folders(BAD))
    def test_what_is_wrong_stays_as_stored_and_the_rest_reads(self, name: str) -> None:
        case = BAD[name]
        about, arrays = expected(case["from"])
        ds, told = opened(MODELS / "bad" / name)
        found = {}
        for weight, each in about["tensors"].items():
            module = weight.removesuffix(".weight")
            is_meant = case["about"] == "all" or module.endswith(tuple(case["about"]))
            if weight not in ds.variables or ds[weight].encoding["layout"] == "dense":
                found[module] = (is_meant, "parts")
                continue
            try:
                values = ds[weight].values
            except CheckpointError as error:
                found[module] = (is_meant, "error" if error.tensor == weight else str(error))
                continue
            is_right = np.array_equal(values, arrays[each["npz"]])
            found[module] = (is_meant, "right" if is_right else "other")
        allowed = {"parts": {"parts"}, "read": {"error"}, "ok": {"right", "parts", "other"}}
        for is_meant, outcome in found.values():
            right = allowed.get(case["when"], {"right", "parts", "error"})
            assert outcome in (right if is_meant else {"right"})
        if case["when"] == "parts":
            (text,) = told
            names = [module for module, (is_meant, _) in found.items() if is_meant]
            assert case["about"] == "all" or any(module in text for module in names)

    def test_parts_that_stay_are_those_that_are_stored(self) -> None:
        if not GOOD:
            pytest.skip(f"no quantised models at {MODELS}")
        folder = MODELS / "bad/ct_scale_grid_disagrees"
        ds, _ = opened(folder)
        stored, _ = opened(folder, decode=False)
        kept = [name for name in stored.variables if "q_proj" in str(name)]
        xr.testing.assert_equal(ds[kept], stored[kept].astype(ds[kept].dtypes))

    @pytest.mark.parametrize("name", folders(SCHEMES))
    def test_wrong_types_in_a_config_are_told(self, name: str) -> None:
        config = json.loads((MODELS / name / "config.json").read_text())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            index = open_index(MODELS / name, whole=False)[1]
        tensors = set(index.tensors)
        for path in keys(config):
            for wrong in WRONG:
                changed = copy.deepcopy(config)
                place = changed
                for key in path[:-1]:
                    place = place[key]
                place[path[-1]] = wrong
                declared = find_declaration({"config": changed}.get)
                found = assemble_weights(index, declared, lambda some: [b""] * len(some))
                stored = {
                    each.name
                    for tensor in found.tensors.values()
                    for each in (tensor.stored or {"": tensor}).values()
                }
                assert stored == tensors

    @pytest.mark.parametrize("name", folders(SCHEMES))
    def test_damage_is_an_error_or_other_numbers(self, name: str, tmp_path: Path) -> None:
        source = next(iter(sorted((MODELS / name).glob("*.safetensors"))))
        data, rng = source.read_bytes(), np.random.default_rng(0)
        header = int.from_bytes(data[:8], "little") + 8
        for config in (MODELS / name).glob("*.json"):
            if "expected" not in config.name and "index" not in config.name:
                (tmp_path / config.name).write_bytes(config.read_bytes())
        for at in rng.integers(8, header, 12):
            damaged = bytearray(data)
            damaged[at] ^= 1 << int(rng.integers(7))
            path = tmp_path / "model.safetensors"
            path.write_bytes(damaged)
            try:
                ds, _ = opened(path)
                for weight in ds.variables.values():
                    assert np.asarray(weight.values).shape == weight.shape
            except CheckpointError:
                pass
