"""FP8 and int8 files of ComfyUI open as their weights; other layouts stay as stored.

The layouts are those of `convert_old_quants` and `_load_quantized_module` in ComfyUI, and of
musubi-tuner for scales of groups.
"""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import xarray as xr

import xckpt
from xckpt.errors import CheckpointWarning

if TYPE_CHECKING:
    from pathlib import Path

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def opened(path: Path) -> tuple[xr.Dataset, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CheckpointWarning)
        ds = xckpt.open(path)
    return ds, [str(warning.message) for warning in caught]


def saved(path: Path, tensors: dict[str, Any], **attrs: Any) -> list[Path]:
    """Write a file as ComfyUI does, and copies of it in other formats."""
    ds = xr.Dataset({name: ([f"{name}_{i}" for i in range(np.ndim(array))], array)
                     for name, array in tensors.items()}, attrs=attrs)  # fmt: skip
    xckpt.save(ds, path / "a.safetensors", progress=False)
    copies = [path / "a.safetensors", path / "b.safetensors", path / "c.zt"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        xckpt.convert(copies[0], copies[1], progress=False)
        xckpt.convert(copies[0], copies[2], version="2", progress=False)
    return copies


def stating(**statement: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(json.dumps(statement).encode(), np.uint8)


def float8(rng: np.random.Generator, *shape: int, dtype: Any = E4M3) -> np.ndarray[Any, Any]:
    values: np.ndarray[Any, Any] = rng.normal(0, 90, shape).astype(dtype)
    return values


class TestScaleWeight:
    @pytest.mark.parametrize("marker", [np.zeros(2, E4M3), np.zeros(0, E5M2), np.zeros(1, "f4")])
    @pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
    @pytest.mark.parametrize("dtype", [E4M3, E5M2])
    def test_weight_is_multiplied_with_its_scale_only(
        self, marker: Any, prefix: str, dtype: Any, tmp_path: Path
    ) -> None:
        codes = float8(np.random.default_rng(0), 16, 16, dtype=dtype)
        tensors = {
            f"{prefix}q.weight": codes,
            f"{prefix}q.scale_weight": np.float32(0.25),
            f"{prefix}q.scale_input": np.float32(8),
            f"{prefix}scaled_fp8": marker,
        }
        for path in saved(tmp_path, tensors):
            ds, messages = opened(path)
            np.testing.assert_array_equal(
                ds[f"{prefix}q.weight"].values, codes.astype(np.float32) * np.float32(0.25)
            )
            assert f"{prefix}q.scale_input" in ds.variables
            assert f"{prefix}q.scale_weight" not in ds.variables
            assert not messages

    @pytest.mark.parametrize("grid", [(1,), (16, 1), (16, 2, 1), (16, 16, 1), (16, 2)])
    def test_scales_of_rows_and_groups(self, grid: tuple[int, ...], tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        codes, scale = float8(rng, 16, 16), rng.uniform(0.5, 9, grid).astype(np.float32)
        tensors = {"q.weight": codes, "q.scale_weight": scale}
        groups = scale.reshape(len(scale), -1)
        expected = codes.astype(np.float32) * groups.repeat(16 // groups.shape[1], axis=1)
        for path in saved(tmp_path, tensors):
            ds, messages = opened(path)
            np.testing.assert_array_equal(ds["q.weight"].values, expected)
            assert not messages

    @pytest.mark.parametrize("grid", [(16,), (16, 3, 1), (2, 16, 1), (0,), (1, 16, 2, 1)])
    def test_scales_of_another_shape_warn(self, grid: tuple[int, ...], tmp_path: Path) -> None:
        codes = float8(np.random.default_rng(0), 16, 16)
        tensors = {"q.weight": codes, "q.scale_weight": np.ones(grid, np.float32)}
        for path in saved(tmp_path, tensors):
            ds, (message,) = opened(path)
            np.testing.assert_array_equal(ds["q.weight"].values, codes.astype(np.float32))
            assert "scale_weight" in message

    def test_layers_without_a_scale_are_floats(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        norm = float8(rng, 4)
        tensors = {
            "q.weight": float8(rng, 4, 4),
            "q.scale_weight": np.float32(2),
            "norm.weight": norm,
            "scaled_fp8": np.zeros(2, E4M3),
        }
        ds, messages = opened(saved(tmp_path, tensors)[0])
        np.testing.assert_array_equal(ds["norm.weight"].values, norm.astype(np.float32))
        assert not messages


CERTAIN: dict[str, dict[str, Any]] = {
    "float8": {"format": "float8_e4m3fn", "full_precision_matrix_mult": True},
    "int8": {"format": "int8_tensorwise"},
    "not rotated": {"format": "int8_tensorwise", "convrot": False, "params": {"convrot": True}},
}
UNCERTAIN: dict[str, dict[str, Any]] = {
    "rotated": {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 16},
    "rotated by parameters": {"format": "int8_tensorwise", "params": {"convrot": True}},
    "rotated 4 bit": {"format": "convrot_w4a4"},
    "8 bit of 4": {"format": "asym_w4a8_int8", "group_size": 16},
    "awq": {"format": "awq_w4a16"},
    "another type": {"format": "float8_e5m2"},
    "unknown": {"format": "int8_of_tomorrow"},
    "no format": {},
    "number": {"format": 8},
}


class TestStatementsAboutLayers:
    @pytest.mark.parametrize("where", ["tensor", "metadata"])
    @pytest.mark.parametrize("case", CERTAIN)
    @pytest.mark.parametrize("grid", [(), (1,), (16, 1)])
    def test_stated_layout_is_decoded(
        self, where: str, case: str, grid: tuple[int, ...], tmp_path: Path
    ) -> None:
        rng = np.random.default_rng(0)
        is_float = case == "float8"
        codes: Any = float8(rng, 16, 16) if is_float else rng.integers(-9, 9, (16, 16), np.int8)
        scale = rng.uniform(0.5, 9, grid).astype(np.float32)
        for path in self._files(tmp_path, where, CERTAIN[case], codes, scale):
            ds, messages = opened(path)
            expected = codes.astype(np.float32) * scale
            np.testing.assert_array_equal(ds["q.weight"].values, expected)
            assert list(ds.variables) == ["q.weight"]
            assert not messages

    @pytest.mark.parametrize("where", ["tensor", "metadata"])
    @pytest.mark.parametrize("case", UNCERTAIN)
    def test_other_layouts_stay_as_stored(self, where: str, case: str, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        codes = rng.integers(-9, 9, (16, 16), np.int8)
        scale = np.full((16, 1), 2, np.float32)
        for path in self._files(tmp_path, where, UNCERTAIN[case], codes, scale):
            ds, (message,) = opened(path)
            np.testing.assert_array_equal(ds["q.weight"].values, codes)
            assert "'q.weight' stays as stored" in message

    @pytest.mark.parametrize("where", ["tensor", "metadata"])
    @pytest.mark.parametrize("grid", [(16,), (16, 3), (4, 4)])
    def test_scales_of_another_shape_warn(
        self, where: str, grid: tuple[int, ...], tmp_path: Path
    ) -> None:
        codes = np.ones((16, 16), np.int8)
        scale = np.full(grid, 2, np.float32)
        for path in self._files(tmp_path, where, CERTAIN["int8"], codes, scale):
            ds, messages = opened(path)
            if ds["q.weight"].dtype == np.int8:
                assert len(messages) == 1
            else:
                assert grid == (4, 4)

    def test_int8_without_a_statement_stays_as_stored(self, tmp_path: Path) -> None:
        ones = np.ones((16, 16), np.int8)
        tensors = {
            "q.weight": ones,
            "q.weight_scale": np.full((16, 1), 2, np.float32),
            "q.comfy_quant": stating(format="int8_tensorwise"),
            "k.weight": ones,
            "k.weight_scale": np.full((16, 1), 2, np.float32),
        }
        for path in saved(tmp_path, tensors):
            ds, (message,) = opened(path)
            assert ds["q.weight"].dtype == np.float32
            assert ds["k.weight"].dtype == np.int8
            assert "'k.weight'" in message

    @pytest.mark.parametrize("metadata", ["", "[]", "{", '{"layers": []}', '{"layers": {"q": 1}}'])
    def test_damaged_metadata_decode_nothing_wrong(self, metadata: str, tmp_path: Path) -> None:
        codes = float8(np.random.default_rng(0), 4, 4)
        tensors = {"q.weight": codes, "q.weight_scale": np.float32(2)}
        ds, _ = opened(saved(tmp_path, tensors, _quantization_metadata=metadata)[0])
        factor = 2 if "q.weight_scale" not in ds.variables else 1
        np.testing.assert_array_equal(ds["q.weight"].values, codes.astype(np.float32) * factor)

    def _files(self, path: Path, where: str, statement: Any, codes: Any, scale: Any) -> list[Path]:
        tensors = {"q.weight": codes, "q.weight_scale": scale}
        if where == "tensor":
            return saved(path, {**tensors, "q.comfy_quant": stating(**statement)})
        metadata = json.dumps({"format_version": "1.0", "layers": {"q": statement}})
        return saved(path, tensors, _quantization_metadata=metadata)


class TestScalesInTheOrderOfTensorCores:
    """Tiles of 128 rows and 4 groups, in an order of their own; codes have the high half first."""

    NVFP4 = ("nvfp4", np.uint8, (128, 32), E4M3, (128, 4))
    MXFP8 = ("mxfp8", E4M3, (128, 128), np.uint8, (128, 4))

    @pytest.mark.parametrize("layout", [NVFP4, MXFP8])
    @pytest.mark.parametrize("is_stated", [True, False])
    def test_codes_stay_as_stored(self, layout: Any, is_stated: bool, tmp_path: Path) -> None:
        format, code_type, shape, scale_type, grid = layout
        tensors: dict[str, Any] = {
            "q.weight": np.ones(shape, code_type),
            "q.weight_scale": np.ones(grid, scale_type),
        }
        if format == "nvfp4":
            tensors["q.weight_scale_2"] = np.float32(2)
        if is_stated:
            tensors["q.comfy_quant"] = stating(format=format)
        for path in saved(tmp_path, tensors):
            ds, (message,) = opened(path)
            assert set(ds.variables) == set(tensors)
            assert "'q.weight' stays as stored" in message
            assert "order of tensor cores" in message

    def test_shape_without_tiles_is_in_rows(self, tmp_path: Path) -> None:
        tensors = {
            "q.weight": np.full((8, 64), 2, E4M3),
            "q.weight_scale": np.full((8, 2), 128, np.uint8),
        }
        for path in saved(tmp_path, tensors):
            ds, messages = opened(path)
            np.testing.assert_array_equal(ds["q.weight"].values, np.full((8, 64), 4, np.float32))
            assert not messages
