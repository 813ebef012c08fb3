"""Codes without a declaration open as their weight, or as stored with a warning: never as another.

A scale next to int8 codes is applied if its shape has an axis for each axis of the codes. A vector
may belong to rows or to columns, and Keras divides by its scales.
"""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import h5py
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import xckpt
from tests.formats import flax_files, onnx_files, orbax_files
from xckpt.errors import CheckpointWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import xarray as xr

    Arrays = Mapping[str, np.ndarray[Any, Any]]


def write_hdf5(tensors: Arrays, path: Path) -> None:
    with h5py.File(path, "w") as file:
        for name, array in tensors.items():
            file[name.replace(".", "/")] = array


def write_onnx(tensors: Arrays, path: Path) -> None:
    path.write_bytes(onnx_files.model(*map(onnx_files.initializer, tensors, tensors.values())))


def write_flax(tensors: Arrays, path: Path) -> None:
    arrays = {name: flax_files.array(array) for name, array in tensors.items()}
    path.write_bytes(flax_files.flax_file(arrays))


def write_orbax(tensors: Arrays, path: Path) -> None:
    path.mkdir()
    orbax_files.write(path, {name: array for name, array in tensors.items() if array.ndim})


def write_with_xckpt(tensors: Arrays, path: Path) -> None:
    xckpt.save(dict(tensors), path, progress=False)


CONTAINERS: dict[str, Callable[[Arrays, Path], None]] = {
    "a.safetensors": write_with_xckpt,
    "a.npz": write_with_xckpt,
    "a.zt": write_with_xckpt,
    "a.gguf": write_with_xckpt,
    "a.h5": write_hdf5,
    "a.onnx": write_onnx,
    "a.msgpack": write_flax,
    "orbax": write_orbax,
}


def opened(path: Any) -> tuple[xr.Dataset, list[str]]:
    """Open a file, and return it with its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CheckpointWarning)
        ds = xckpt.open(path)
    return ds, [str(warning.message) for warning in caught]


def product(codes: np.ndarray[Any, Any], scale: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Multiply codes with a scale that has one number for each of equal blocks."""
    for axis, size in enumerate(codes.shape):
        scale = scale.repeat(size // scale.shape[axis], axis)
    values: np.ndarray[Any, Any] = codes.astype(np.float32) * scale
    return values


def random_codes(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
    return rng.integers(-128, 128, shape).astype(np.int8)


def random_scale(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
    return rng.uniform(0.5, 9, shape).astype(np.float32)


def converted(path: Path) -> list[Path]:
    """Convert a file, and return it with its copies."""
    paths = [path]
    for suffix in (".zt", ".safetensors", ".npz"):
        paths.append(path.with_name(f"copy{suffix}"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            xckpt.convert(path, paths[-1], progress=False)
    return paths


class TestVectorsAndScalars:
    @pytest.mark.parametrize("container", CONTAINERS)
    @pytest.mark.parametrize("names", [("d.weight", "e.weight"), ("d.kernel", "e.kernel")])
    def test_codes_stay_as_stored_with_one_warning(
        self, container: str, names: tuple[str, str], tmp_path: Path
    ) -> None:
        rng = np.random.default_rng(0)
        tensors: dict[str, Any] = {}
        for name, rows in zip(names, (8, 6), strict=True):
            tensors[name] = random_codes(rng, rows, 8)
            tensors[f"{name}_scale"] = random_scale(rng, 8)
        CONTAINERS[container](tensors, tmp_path / container)
        for path in converted(tmp_path / container):
            ds, (message,) = opened(path)
            assert len(ds.variables) == len(tensors)
            for name, array in tensors.items():
                stored = name if name in ds.variables else name.replace(".", "/")
                np.testing.assert_array_equal(ds[stored].values, array)
            assert "2 quantised weights stay as stored" in message
            assert "_scale of shape [8]" in message
            assert "config" in message

    @pytest.mark.parametrize("shape", [(), (1,), (1, 1), (4,), (6,), (4, 6, 1), (0,)])
    def test_scale_without_a_number_for_each_axis_is_not_applied(
        self, shape: tuple[int, ...], tmp_path: Path
    ) -> None:
        rng = np.random.default_rng(0)
        codes = random_codes(rng, 4, 6)
        tensors = {"a.weight": codes, "a.weight_scale": random_scale(rng, *shape)}
        xckpt.save(tensors, tmp_path / "a.npz", progress=False)
        ds, (message,) = opened(tmp_path / "a.npz")
        np.testing.assert_array_equal(ds["a.weight"].values, codes)
        assert "'a.weight' stays as stored" in message

    @pytest.mark.parametrize(
        ("name", "scale"),
        [
            ("a.weight", "a.scale"),
            ("a.weight", "a.scale_weight"),
            ("a.weight", "a.weight_scales"),
            ("a.weight._data", "a.weight._scale"),
        ],
    )
    def test_scales_with_other_names_are_not_applied(
        self, name: str, scale: str, tmp_path: Path
    ) -> None:
        rng = np.random.default_rng(0)
        tensors = {name: random_codes(rng, 4, 6), scale: random_scale(rng, 4, 1)}
        xckpt.save(tensors, tmp_path / "a.npz", progress=False)
        ds, messages = opened(tmp_path / "a.npz")
        assert ds[name].dtype == np.int8
        assert len(messages) == 1

    @pytest.mark.parametrize("name", ["w", "fc.weight"])
    def test_zero_points_of_onnx_stay(self, name: str, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        tensors: dict[str, Any] = {
            name: random_codes(rng, 8, 8),
            f"{name}_scale": random_scale(rng, 8),
            f"{name}_zero_point": np.full(8, 5, np.int8),
        }
        node = onnx_files.node("DequantizeLinear", list(tensors), ["y"])
        initializers = map(onnx_files.initializer, tensors, tensors.values())
        (tmp_path / "a.onnx").write_bytes(onnx_files.model(*initializers, nodes=(node,)))
        for path in converted(tmp_path / "a.onnx"):
            ds, messages = opened(path)
            assert set(ds.variables) == set(tensors)
            np.testing.assert_array_equal(ds[name].values, tensors[name])
            assert len(messages) == 1


class TestScalesWithAllAxes:
    @pytest.mark.parametrize("container", CONTAINERS)
    @pytest.mark.parametrize(
        ("shape", "grid"),
        [
            ((8, 8), (8, 1)),
            ((8, 8), (1, 8)),
            ((8, 8), (8, 4)),
            ((8, 8), (2, 2)),
            ((5, 6), (5, 1)),
            ((5, 6), (5, 3)),
            ((4, 3, 2, 2), (4, 1, 1, 1)),
            ((3, 4, 4), (3, 4, 1)),
        ],
    )
    def test_codes_are_multiplied(
        self, container: str, shape: tuple[int, ...], grid: tuple[int, ...], tmp_path: Path
    ) -> None:
        rng = np.random.default_rng(0)
        codes, scale = random_codes(rng, *shape), random_scale(rng, *grid)
        CONTAINERS[container]({"a.weight": codes, "a.weight_scale": scale}, tmp_path / container)
        for path in converted(tmp_path / container):
            ds, messages = opened(path)
            (name,) = ds.variables
            np.testing.assert_array_equal(ds[name].values, product(codes, scale))
            assert not messages

    @pytest.mark.parametrize(
        "companion",
        ["weight_offset", "weight_zeros", "weight_scale_2", "weight_scale_inv", "scale"],
    )
    def test_undeclared_companion_keeps_codes_as_stored(
        self, companion: str, tmp_path: Path
    ) -> None:
        rng = np.random.default_rng(0)
        tensors = {
            "a.weight": random_codes(rng, 4, 4),
            "a.weight_scale": random_scale(rng, 4, 1),
            f"a.{companion}": random_scale(rng, 4, 1),
        }
        xckpt.save(tensors, tmp_path / "a.npz", progress=False)
        ds, (message,) = opened(tmp_path / "a.npz")
        assert set(ds.variables) == set(tensors)
        assert "is not declared" in message

    def test_variables_of_keras_are_not_multiplied(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        tensors = {"b/kernel": random_codes(rng, 4, 6), "b/kernel_scale": random_scale(rng, 2, 6)}
        write_hdf5(tensors, tmp_path / "a.h5")
        for path in converted(tmp_path / "a.h5"):
            ds, messages = opened(path)
            assert ds["b/kernel"].dtype == np.int8
            assert len(messages) == 1

    def test_scales_of_fewer_axes_than_experts_are_not_applied(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        tensors = {"a.w": random_codes(rng, 2, 4, 4), "a.w_scale": random_scale(rng, 2, 4)}
        xckpt.save(tensors, tmp_path / "a.npz", progress=False)
        ds, messages = opened(tmp_path / "a.npz")
        assert ds["a.w"].dtype == np.int8
        assert len(messages) == 1

    def test_int8_in_a_model_of_another_method_stays_as_stored(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        config = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        tensors = {"a.weight": random_codes(rng, 4, 4), "a.weight_scale": random_scale(rng, 4, 1)}
        xckpt.save(tensors, tmp_path / "a.safetensors", progress=False)
        ds, (message,) = opened(tmp_path / "a.safetensors")
        assert ds["a.weight"].dtype == np.int8
        assert "gptq" in message

    def test_codes_in_another_order_stay_as_stored(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        codes = np.asfortranarray(random_codes(rng, 4, 6))
        tensors: dict[str, Any] = {"a.weight": codes, "a.weight_scale": np.ones((4, 1))}
        np.savez(tmp_path / "a.npz", **tensors)
        ds, messages = opened(tmp_path / "a.npz")
        np.testing.assert_array_equal(ds["a.weight"].values, codes)
        assert len(messages) == 1


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(sorted(CONTAINERS)))
def test_values_are_codes_or_their_product(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, container: str
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows = data.draw(st.integers(1, 6))
    columns = data.draw(st.sampled_from([rows, rows, 2, 3, 6]))
    along = data.draw(st.sampled_from(["rows", "columns"]))
    keeps_axes = data.draw(st.booleans())
    leaf = data.draw(st.sampled_from(["weight", "kernel", "w", "embeddings"]))
    codes = random_codes(rng, rows, columns)
    factors = random_scale(rng, rows, 1) if along == "rows" else random_scale(rng, 1, columns)
    tensors = {f"a.{leaf}": codes, f"a.{leaf}_scale": factors if keeps_axes else factors.ravel()}
    path = tmp_path_factory.mktemp("codes") / container
    CONTAINERS[container](tensors, path)
    ds, messages = opened(path)
    values = ds[next(name for name in ds.variables if str(name).endswith(leaf))].values
    if values.dtype == np.int8:
        np.testing.assert_array_equal(values, codes)
        assert len(messages) == 1
    else:
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, codes * factors)


class TestFloat8:
    def write(self, path: Path, codes: Any, scale: Any, **tensors: Any) -> None:
        stored = {"a.weight": codes.astype(ml_dtypes.float8_e4m3fn), "a.weight_scale": scale}
        xckpt.save({**stored, **tensors}, path, progress=False)

    @pytest.mark.parametrize("shape", [(), (1,), (6, 1), (6,)])
    def test_scale_of_a_tensor_or_of_rows_is_applied(
        self, shape: tuple[int, ...], tmp_path: Path
    ) -> None:
        rng = np.random.default_rng(0)
        codes, scale = random_codes(rng, 6, 4) // 16, random_scale(rng, *shape)
        self.write(tmp_path / "a.safetensors", codes, scale)
        ds, messages = opened(tmp_path / "a.safetensors")
        factor = scale.reshape(6, 1) if scale.size > 1 else scale.reshape(1, 1)
        np.testing.assert_array_equal(ds["a.weight"].values, codes * factor)
        assert not messages

    @pytest.mark.parametrize(
        ("shape", "grid"), [((6, 6), (6,)), ((4, 6), (6,)), ((2, 6, 6), (2, 6))]
    )
    def test_vector_that_fits_rows_and_columns_is_not_applied(
        self, shape: tuple[int, ...], grid: tuple[int, ...], tmp_path: Path
    ) -> None:
        rng = np.random.default_rng(0)
        self.write(
            tmp_path / "a.safetensors", random_codes(rng, *shape) // 16, random_scale(rng, *grid)
        )
        ds, (message,) = opened(tmp_path / "a.safetensors")
        assert set(ds.variables) == {"a.weight", "a.weight_scale"}
        assert "weight_scale" in message

    @pytest.mark.parametrize("shape", [(), (1,)])
    def test_scale_of_a_vector_of_codes_is_applied(
        self, shape: tuple[int, ...], tmp_path: Path
    ) -> None:
        self.write(tmp_path / "a.safetensors", np.arange(5), np.full(shape, 2, np.float32))
        ds, messages = opened(tmp_path / "a.safetensors")
        np.testing.assert_array_equal(ds["a.weight"].values, 2 * np.arange(5))
        assert not messages

    def test_config_decides_about_a_vector(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        codes, scale = random_codes(rng, 6, 6) // 16, random_scale(rng, 6)
        config = {"quantization_config": {"quant_method": "fbgemm_fp8"}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        self.write(tmp_path / "a.safetensors", codes, scale)
        (tmp_path / "copies").mkdir()
        xckpt.convert(
            tmp_path / "a.safetensors", tmp_path / "copies/a.zt", version="2", progress=False
        )
        xckpt.convert(tmp_path / "a.safetensors", tmp_path / "copies/b.safetensors", progress=False)
        for path in (tmp_path / "a.safetensors", *(tmp_path / "copies").iterdir()):
            ds, messages = opened(path)
            np.testing.assert_array_equal(ds["a.weight"].values, codes * scale[:, None])
            assert not messages
