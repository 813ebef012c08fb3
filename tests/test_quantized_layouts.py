"""Weights in the layouts of all schemes equal a plain formula of codes and scales."""

from __future__ import annotations

import json
import pickle
import warnings
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

import xckpt
from tests.conftest import with_peak_memory
from tests.formats.safetensors_files import safetensors_file
from xckpt.errors import CheckpointWarning, UnsupportedError
from xckpt.quantization.model import is_match

if TYPE_CHECKING:
    from pathlib import Path

_TYPES = {
    "int32": "I32", "int64": "I64", "uint32": "U32", "uint8": "U8", "int8": "I8", "float16": "F16",
    "float32": "F32", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
FEW = settings(max_examples=12)


def model(config: Any, **tensors: np.ndarray) -> bytes:
    """Return a file with the tensors of a module `a` and its config."""
    header: dict[str, Any] = {"__metadata__": {"config": json.dumps(config)}}
    data = b""
    for role, array in tensors.items():
        payload = np.ascontiguousarray(array).tobytes()
        header[f"a.{role}"] = {
            "dtype": _TYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(payload)],
        }
        data += payload
    return safetensors_file(header, data)


def weight(content: Any, name: str = "a.weight") -> Any:
    """Return a weight of a model, which opens without a warning."""
    return xr.open_dataset(content, engine="safetensors")[name]


def stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack the codes of each line into a stream of words of 32 bits."""
    code_bits = np.unpackbits(codes.astype(np.uint8)[..., None], axis=-1, bitorder="little")
    line = code_bits[..., :bits].reshape(*codes.shape[:-1], -1)
    padded = np.pad(line, [(0, 0)] * (codes.ndim - 1) + [(0, -line.shape[-1] % 32)])
    packed: np.ndarray = np.packbits(padded, axis=-1, bitorder="little").view("<u4")
    return packed


def random_scales(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(1, 64, shape).astype(np.float16) / 16


def spread(grid: np.ndarray, block: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Repeat the numbers of blocks for all of their elements."""
    values = grid.astype(np.float32).repeat(block[0], axis=0).repeat(block[1], axis=1)
    return values[: shape[0], : shape[1]]


def check(content: bytes, expected: np.ndarray, data: st.DataObject) -> None:
    """Compare a weight, and a slice of it, with the expected values."""
    lazy = weight(content)
    np.testing.assert_array_equal(lazy.values, expected)
    key = tuple(data.draw(st.slices(size)) for size in expected.shape)
    np.testing.assert_array_equal(lazy[key].values, expected[key])


@FEW
@given(st.data(), st.sampled_from([2, 3, 4, 8]), st.booleans(), st.booleans(), st.booleans())
def test_gptq_layouts(
    data: st.DataObject, bits: int, ordered: bool, sym: bool, version_2: bool
) -> None:
    rng = np.random.default_rng(0)
    columns, out = 32 * data.draw(st.integers(1, 3)), 32 * data.draw(st.integers(1, 2))
    group = data.draw(st.sampled_from([32, 48, columns]))
    groups = -(-columns // group)
    codes = rng.integers(0, 1 << bits, (columns, out))
    zeros = rng.integers(0, 1 << bits, (groups, out))
    scales, index = random_scales(rng, groups, out), np.arange(columns, dtype=np.int32) // group
    if ordered:
        index = rng.permutation(index).astype(np.int32)
    stored = zeros if version_2 else (zeros - 1) % (1 << bits)
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym}
    config |= {"checkpoint_format": "gptq_v2"} if version_2 else {}
    content = model(
        {"quantization_config": config},
        qweight=stream(codes.T, bits).T.astype(np.int32),
        qzeros=stream(stored, bits).astype(np.int32),
        scales=scales,
        g_idx=index,
    )
    zero = np.full_like(zeros, 1 << (bits - 1)) if sym else zeros
    check(content, ((codes - zero[index]) * scales[index].astype(np.float32)).T, data)


@FEW
@given(st.data(), st.integers(1, 8), st.booleans(), st.booleans())
def test_packed_integers_of_compressed_tensors(
    data: st.DataObject, bits: int, symmetric: bool, by_channel: bool
) -> None:
    rng = np.random.default_rng(0)
    rows, group = data.draw(st.integers(1, 40)), 16
    columns = data.draw(st.integers(1, 70)) if by_channel else 16 * data.draw(st.integers(1, 4))
    group = columns if by_channel else group
    codes = rng.integers(0, 1 << bits, (rows, columns))
    grid = (rows, columns // group)
    zeros = np.full(grid, 1 << (bits - 1)) if symmetric else rng.integers(0, 1 << bits, grid)
    scales = random_scales(rng, *grid)
    strategy = {"strategy": "channel"} if by_channel else {"strategy": "group", "group_size": group}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}
    tensors: dict[str, Any] = {
        "weight_packed": stream(codes, bits).astype(np.int32),
        "weight_scale": scales,
        "weight_shape": np.array([rows, columns]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = stream(zeros.T, bits).T.astype(np.int32)
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "version": "0.20.0",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    zero = zeros.repeat(group, axis=1)
    scale = scales.astype(np.float32).repeat(group, axis=1)
    check(model({"quantization_config": config}, **tensors), (codes - zero) * scale, data)


@FEW
@given(st.data(), st.sampled_from([2, 3, 4, 8]), st.sampled_from(["tensor", "block"]))
def test_packed_integers_with_zero_points_of_a_byte(
    data: st.DataObject, bits: int, strategy: str
) -> None:
    """Zero points of a tensor or of blocks are not packed, and have no offset."""
    rng = np.random.default_rng(0)
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 70))
    block = (
        (rows, columns) if strategy == "tensor" else data.draw(st.sampled_from([(8, 16), (5, 7)]))
    )
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    half = 1 << (bits - 1)
    codes = rng.integers(-half, half, (rows, columns))
    zeros = rng.integers(-half, half, grid).astype(np.int8)
    scales = random_scales(rng, *grid)
    weights: dict[str, Any] = {"num_bits": bits, "symmetric": False, "strategy": strategy}
    weights |= {"block_structure": list(block)} if strategy == "block" else {}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "version": "0.20.0",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    is_single = strategy == "tensor"
    content = model(
        {"quantization_config": config},
        weight_packed=stream(codes + half, bits).astype(np.int32),
        weight_scale=scales.reshape(-1) if is_single else scales,
        weight_zero_point=zeros.reshape(-1) if is_single else zeros,
        weight_shape=np.array([rows, columns]),
    )
    zero, scale = (spread(grid, block, codes.shape) for grid in (zeros, scales))
    check(content, (codes - zero) * scale, data)


@FEW
@given(st.data())
def test_awq_layout(data: st.DataObject) -> None:
    rng = np.random.default_rng(0)
    groups, out = data.draw(st.integers(1, 4)), 8 * data.draw(st.integers(1, 9))
    codes, zeros = rng.integers(0, 16, (groups * 32, out)), rng.integers(0, 16, (groups, out))
    scales = random_scales(rng, groups, out)
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])

    def packed(codes: np.ndarray) -> np.ndarray:
        words = codes.reshape(len(codes), -1, 8)[..., order].reshape(codes.shape)
        return stream(words, 4).astype(np.int32)

    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    content = model(
        {"quantization_config": config},
        qweight=packed(codes),
        qzeros=packed(zeros),
        scales=scales,
    )
    zero = zeros.repeat(32, axis=0)
    scale = scales.astype(np.float32).repeat(32, axis=0)
    check(content, ((codes - zero) * scale).T, data)


@FEW
@given(st.data(), st.sampled_from([1, 2, 3, 4, 5, 6, 8]), st.sampled_from([32, 64]))
def test_mlx_layouts(data: st.DataObject, bits: int, group: int) -> None:
    rng = np.random.default_rng(0)
    rows, groups = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    codes = rng.integers(0, 1 << bits, (2, rows, groups * group))
    scales, biases = random_scales(rng, 2, rows, groups), -random_scales(rng, 2, rows, groups)
    config = {"quantization": {"group_size": group, "bits": bits}}
    content = model(config, weight=stream(codes, bits), scales=scales, biases=biases)
    scale = scales.astype(np.float32).repeat(group, axis=-1)
    bias = biases.astype(np.float32).repeat(group, axis=-1)
    check(content, codes.astype(np.float32) * scale + bias, data)


@FEW
@given(st.data(), st.booleans())
def test_float8_in_blocks(data: st.DataObject, by_powers: bool) -> None:
    rng = np.random.default_rng(0)
    shape = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
    block = data.draw(st.tuples(st.integers(1, 20), st.integers(1, 20)))
    codes = rng.integers(0, 0x7F, shape).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    grid = tuple([-(-n // b) for n, b in zip(shape, block, strict=True)])
    scales: Any = random_scales(rng, *grid).astype(np.float32)
    if by_powers:
        scales = rng.integers(100, 140, grid).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
    config = {"quant_method": "fp8", "weight_block_size": list(block)}
    content = model({"quantization_config": config}, weight=codes, weight_scale_inv=scales)
    scale = spread(scales, block, shape)
    check(content, codes.astype(np.float32) * scale, data)


@FEW
@given(st.data(), st.booleans(), st.sampled_from([np.uint8, np.int8]))
def test_codebook_of_bitsandbytes(data: st.DataObject, nested: bool, storage: Any) -> None:
    rng = np.random.default_rng(0)
    shape = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=3))
    block, count = data.draw(st.integers(1, 70)), int(np.prod(shape))
    codes, table = rng.integers(0, 16, count + count % 2), random_scales(rng, 16).astype(np.float32)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "shape": shape}
    blocks = -(-count // block)
    absmax = random_scales(rng, blocks).astype(np.float32)
    tensors: dict[str, Any] = {
        "weight": (codes[0::2] << 4 | codes[1::2]).astype(np.uint8).view(storage)[:, None],
        "weight.quant_map": table,
        "weight.absmax": absmax,
    }
    if nested:
        state |= {"nested_blocksize": 3, "nested_offset": 0.25}
        stored = rng.integers(0, 256, blocks).astype(np.uint8)
        outer, inner = (
            random_scales(rng, -(-blocks // 3)),
            random_scales(rng, 256).astype(np.float32),
        )
        tensors |= {
            "weight.absmax": stored,
            "weight.nested_absmax": outer.astype(np.float32),
            "weight.nested_quant_map": inner,
        }
        absmax = inner[stored] * outer.astype(np.float32).repeat(3)[:blocks] + np.float32(0.25)
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors["weight.quant_state.bitsandbytes__nf4"] = text
    content = model({"quantization_config": {"quant_method": "bitsandbytes"}}, **tensors)
    values = table[codes[:count]] * absmax.repeat(block)[:count]
    check(content, values.reshape(shape), data)


@FEW
@given(st.data(), st.booleans())
def test_small_floats_in_groups(data: st.DataObject, divides: bool) -> None:
    rng = np.random.default_rng(0)
    rows, groups = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 5))
    codes = rng.integers(0, 16, (rows, groups * 16)).astype(np.uint8)
    scales = rng.integers(1, 0x70, (rows, groups)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    global_scale = np.array([3.7], np.float32)
    packed, names = codes[:, 0::2] | codes[:, 1::2] << 4, ("weight", "weight_scale_2")
    config: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    if divides:
        names = ("weight_packed", "weight_global_scale")
        config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    tensors: dict[str, Any] = {names[0]: packed, "weight_scale": scales, names[1]: global_scale}
    content = model({"quantization_config": config}, **tensors)
    factors = scales.astype(np.float32)
    factors = factors / global_scale if divides else factors * global_scale
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    check(content, values * factors.repeat(16, axis=1), data)


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
def test_too_many_alternative_parameters_are_not_tried(method: str) -> None:
    from xckpt.elements import nbytes_of
    from xckpt.index import Index, Part, Tensor
    from xckpt.quantization import assemble_weights
    from xckpt.quantization.model import Declaration

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    groups = {
        f"{n}": {"targets": [f"re:.*{n}"], "weights": weights | {"group_size": n + 1}}
        for n in range(5000)
    }
    config: dict[str, Any] = {"format": "pack-quantized", "config_groups": groups}
    if method == "gptq":
        config = {"bits": 4, "dynamic": {f"(a+)+{n}": {"bits": 8} for n in range(5000)}}
    roles = ("qweight", "scales") if method == "gptq" else ("weight_packed", "weight_scale")
    tensors = {}
    for n in range(2000):
        for role, dtype, shape in zip(roles, ("int32", "float16"), ((8, 8), (3, 8)), strict=True):
            part = Part(dtype, shape, 0, nbytes_of(dtype, shape[0] * 8))
            name = f"layers.{n}.{role}"
            tensors[name] = Tensor(name, dtype, shape, {"data": part})
    index = Index("", "", tensors)
    result = assemble_weights(
        index, Declaration(method, config), lambda tensors: [b""] * len(tensors)
    )
    # These are 10 million alternatives.
    assert "the config has too many alternative parameters to try" in "".join(result.warnings)
    assert result.tensors.keys() == index.tensors.keys()


# --- reading only what is needed ------------------------------------------------------------------


def fp8(rows: int = 8, columns: int = 4) -> dict[str, np.ndarray]:
    numbers = np.arange(rows * columns).reshape(rows, columns)
    codes = numbers.astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    return {"weight": codes, "weight_scale": np.array(2, np.float32)}


def test_reading_rows_reads_only_their_codes_and_scales() -> None:
    from tests.sources import CountingSource
    from xckpt.arrays import ReadOptions, lazy_arrays

    scales = np.ones((4096, 16), np.float32)
    codes = np.ones((4096, 256), np.uint8).view(ml_dtypes.float8_e4m3fn)
    content = model({}, weight=codes, weight_scale_inv=scales)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 16]}}
    content = model(config, weight=codes, weight_scale_inv=scales)
    tensor = xckpt.read_index(content).tensors["a.weight"]
    source = CountingSource(content)
    (lazy,) = lazy_arrays(tensor, {None: source}, ReadOptions()).values()
    assert lazy[7:9].shape == (2, 256)
    assert source.nbytes_read == 2 * 256 + 2 * 16 * 4


# --- declarations ---------------------------------------------------------------------------------


def test_config_next_to_a_model_is_used_and_saved(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(model({}, **fp8()))
    assert "config" not in xr.open_dataset(path, engine="safetensors", decode=False).attrs["config"]
    content = model({}, **fp8()).replace(b'"config"', b'"others"')
    path.write_bytes(content)
    config = {"quantization_config": {"quant_method": "fp8"}, "hidden_size": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ds = xr.open_dataset(path, engine="safetensors")
    assert ds["a.weight"].dtype == np.float32
    assert ds.attrs["config"] == config
    xckpt.save(ds, tmp_path / "elsewhere.zt", version="2", progress=False)
    again = xr.open_dataset(tmp_path / "elsewhere.zt")
    xr.testing.assert_equal(again["a.weight"], ds["a.weight"])


def test_config_next_to_a_remote_model_is_used() -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    config = {"quantization_config": {"quant_method": "hqq"}}
    files.pipe("/quantised/config.json", json.dumps(config).encode())
    files.pipe("/quantised/m.safetensors", model({}, **fp8()).replace(b'"config"', b'"others"'))
    try:
        with pytest.warns(CheckpointWarning, match="quantisation method 'hqq' is unsupported"):
            xckpt.read_index("memory://quantised/m.safetensors")
    finally:
        files.rm("/quantised", recursive=True)


def test_weight_can_be_pickled() -> None:
    lazy = weight(model({}, **fp8()))
    again = pickle.loads(pickle.dumps(lazy))
    np.testing.assert_array_equal(again.values, lazy.values)


def test_decoding_of_scattered_rows_is_bounded() -> None:
    rows, columns = 32 << 10, 512
    shown = weight(model({}, **fp8(rows=rows, columns=columns)))
    key = [rows - 1, 0, rows // 2, rows // 2 + 1], slice(None, None, 3)
    lazy = shown.data.dask.lazy
    lazy[0]
    selected, peak = with_peak_memory(lambda: lazy[key])
    assert peak < 4 * rows * columns / 2
    np.testing.assert_array_equal(selected, shown.values[key[0]][:, key[1]])


LARGE = 10**30
ODD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"bits": 4, "group_size": 32, "checkpoint_format": [LARGE]}, "gptq"),
    ({"bits": 4, "group_size": 32, "checkpoint_format": {"a": "b"}}, "gptq"),
    ({"bits": 4, "group_size": LARGE}, "gptq"),
    ({"quant_method": "gptq", "bits": 4, "group_size": LARGE}, "gptq"),
    ({"quant_method": "fp8", "weight_block_size": [LARGE, 128]}, "fp8"),
    ({"quant_method": "fp8", "weight_block_size": f"128x{LARGE}"}, "fp8"),
    ({"config_groups": [{"weights": {}}]}, "fp8"),
]


@pytest.mark.parametrize(("config", "kind"), ODD_CONFIGS)
def test_odd_values_in_a_config_leave_tensors_as_stored(config: dict[str, Any], kind: str) -> None:
    words = {
        "qweight": np.zeros((4, 32), np.int32),
        "qzeros": np.zeros((1, 4), np.int32),
        "scales": np.ones((1, 32), np.float16),
        "g_idx": np.zeros(32, np.int32),
    }
    tensors = words if kind == "gptq" else fp8()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ds = xr.open_dataset(
            model({"quantization_config": config}, **tensors), engine="safetensors"
        ).load()
    if "config_groups" in config:  # which does not matter to FP8
        assert set(ds.variables) == {"a.weight"}
        return
    assert set(ds.variables) == {f"a.{role}" for role in tensors}
    assert ["stay" in str(warning.message) for warning in caught] == [True]


def test_unsupported_method_warns_once() -> None:
    content = model({"quantization_config": {"quant_method": "hqq"}}, **fp8())
    with pytest.warns(
        CheckpointWarning, match="quantisation method 'hqq' is unsupported"
    ) as caught:
        ds = xr.open_dataset(content, engine="safetensors")
    assert len(caught) == 1
    assert set(ds.variables) == {"a.weight", "a.weight_scale"}


def test_config_is_not_read_for_unquantised_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.safetensors"
    xckpt.save(xr.Dataset({"a.weight": (("x",), np.ones(3, np.float32))}), path)
    monkeypatch.setattr("xckpt.opening.read_sibling", None)
    assert set(xr.open_dataset(path, engine="safetensors").variables) == {"a.weight"}


# --- writing -------------------------------------------------------------------------------------


def test_renamed_weight_is_saved_as_stored(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "fp8"}}
    ds = xr.open_dataset(model(config, **fp8()), engine="safetensors")
    path = tmp_path / "m.safetensors"
    xckpt.save(ds.rename({"a.weight": "b.c.weight"}), path, progress=False)
    stored = xr.open_dataset(path, engine="safetensors", decode=False)
    assert set(stored.variables) == {"b.c.weight", "b.c.weight_scale"}
    np.testing.assert_array_equal(weight(path, "b.c.weight").values, ds["a.weight"].values)


def test_weight_whose_stored_names_cannot_change_is_saved_dense(tmp_path: Path) -> None:
    codes = np.zeros((8, 8), np.int32)
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "sym": True}}
    tensors: dict[str, Any] = {"qweight": codes, "scales": np.ones((1, 8), np.float16)}
    ds = xr.open_dataset(model(config, **tensors), engine="safetensors")
    path = tmp_path / "m.safetensors"
    with pytest.warns(CheckpointWarning, match="called otherwise are written dense"):
        xckpt.save(ds.rename({"a.weight": "kernel"}), path, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = xr.open_dataset(path, engine="safetensors")
    np.testing.assert_array_equal(again["kernel"].values, ds["a.weight"].values)


def test_casting_codes_raises(tmp_path: Path) -> None:
    ds = xr.open_dataset(model({}, **fp8()), engine="safetensors")
    path, half = tmp_path / "m.safetensors", {"*": {"dtype": "float16"}}
    with pytest.raises(UnsupportedError, match="layout='dense'"):
        xckpt.save(ds, path, encoding=half, progress=False)
    values = {"*": {"dtype": "bfloat16", "layout": "dense"}}
    xckpt.save(ds, path, encoding=values, cast="allow", progress=False)
    np.testing.assert_allclose(weight(path).values, ds["a.weight"].values, rtol=2**-8)


def test_quantised_layers_can_be_stacked(tmp_path: Path) -> None:
    layers = {f"layers.{n}.a.{role}": array for n in range(3) for role, array in fp8().items()}
    content = model({}, **layers)
    ds = xr.open_dataset(content, engine="safetensors", stack=True)
    flat = xr.open_dataset(content, engine="safetensors")
    assert ds["a.layers.a.weight"].dims[0] == "layers"
    xckpt.save(ds, tmp_path / "m.safetensors", progress=False)
    again = xr.open_dataset(tmp_path / "m.safetensors", engine="safetensors")
    xr.testing.assert_equal(again, flat)


# --- patterns ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        (r"model\.layers\.\d+\.mlp\..*", "model.layers.12.mlp.up_proj", True),
        (r"model\.layers\.\d+\.mlp\..*", "model.layers.x.mlp.up_proj", False),
        (r".*self_attn\.(q|k|v)_proj$", "model.layers.0.self_attn.k_proj", True),
        (r".*self_attn\.(q|k|v)_proj$", "model.layers.0.self_attn.k_proj.0", False),
        (r".*down_proj$", "model.down_proj.0.down_proj", True),
        (r"lm_head", "lm_head", True),
        (r"(a+)+$", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!", None),
        (r"*[", "a", None),
        (r"(a|b)*c", "abc", None),
        (r"\w+\w+\w+x", "a" * 300, None),
        ("a" * 2000, "a", None),
    ],
)
def test_pattern_matches_unless_it_could_take_long(
    pattern: str, name: str, expected: bool | None
) -> None:
    assert is_match(pattern, name) is expected


def test_many_stars_do_not_backtrack() -> None:
    assert is_match(".*a" * 100 + "b", "a" * 200) is False
