"""Quantised burnpack tensors: both dialects of the scheme, and values by their definition."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from tests.contracts.burnpack import DECLARED, SCHEMES
from tests.contracts.declared import outcome
from tests.formats.burnpack_files import PER_TENSOR, burnpack, dense, quantized
from tests.sources import CountingSource
from xckpt import formats
from xckpt.errors import CheckpointError, CheckpointWarning, FormatError, UnsupportedError
from xckpt.index import Quantization, Tensor
from xckpt.writing import verify

SCALE_TYPES = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "UE8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "UE4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
BITS = {"Q8S": 8, "Q8F": 8, "Q4S": 4, "Q4F": 4, "Q2S": 2, "Q2F": 2}


def new(**changes: Any) -> dict[str, Any]:
    return {**PER_TENSOR, **changes}


def old(**changes: Any) -> dict[str, Any]:
    fields = {"value": "Q8S", "param": "F32", "store": "Native", "level": "Tensor"}
    return {**fields, "mode": "Symmetric", **changes}


def size(*extents: int) -> dict[str, Any]:
    """Describe the extents of a block as burn does."""
    return {"storage": [*extents, *[1] * (5 - len(extents))], "len": len(extents)}


def tensor_of(shape: tuple[int, ...], nbytes: int, scheme: Any) -> Tensor:
    data = burnpack({"w": quantized(shape, bytes(nbytes), scheme)})
    return formats.get("burnpack").read(CountingSource(data)).tensors["w"]


def extents(tensor: Tensor) -> dict[str, tuple[str, Any, int, int]]:
    return {
        role: (part.dtype, part.shape, part.offset - 256, part.nbytes)
        for role, part in tensor.parts.items()
    }


def error_of(shape: tuple[int, ...], nbytes: int, scheme: Any) -> FormatError:
    with pytest.raises(FormatError) as caught:
        tensor_of(shape, nbytes, scheme)
    assert caught.value.tensor == "w"
    return caught.value


# Values


def packed(codes: np.ndarray, bits: int) -> bytes:
    """Pack codes into 32-bit words along the last axis, the plain way."""
    per_word = 32 // bits
    words = bytearray()
    for line in codes.reshape(-1, codes.shape[-1]):
        for at in range(0, len(line), per_word):
            word = 0
            for place, code in enumerate(line[at : at + per_word]):
                word |= (int(code) & ((1 << bits) - 1)) << (place * bits)
            words += word.to_bytes(4, "little")
    return bytes(words)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    st.sampled_from(sorted(BITS)),
    st.booleans(),
    st.none() | st.sampled_from(sorted(SCALE_TYPES)),
    st.none() | st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
    st.data(),
)
def test_values_follow_the_definition(
    shape: tuple[int, ...],
    value: str,
    words: bool,
    tensor: str | None,
    block: tuple[int, ...] | None,
    data: st.DataObject,
) -> None:
    bits = BITS[value]
    rng = np.random.default_rng(0)
    codes = rng.integers(-(1 << (bits - 1)), 1 << (bits - 1), shape)
    stored = packed(codes, bits) if words else codes.astype(np.int8).tobytes()
    scheme = new(value=value, store={"PackedU32": 0} if words else "Native", tensor=tensor)
    spread: Any
    if block is None:
        scale = np.array(0.75, SCALE_TYPES[tensor or "F32"])
        stored += scale.tobytes()
        spread = scale.astype(np.float32)
    else:
        block = block[-len(shape) :]
        scale_type = data.draw(st.sampled_from(sorted(SCALE_TYPES)))
        full = (1,) * (len(shape) - len(block)) + block
        grid = tuple(-(-n // b) for n, b in zip(shape, full, strict=True))
        scales = rng.choice([0.25, 0.5, 1, 2, 8], grid).astype(SCALE_TYPES[scale_type])
        stored += scales.tobytes()
        blocks = tuple(np.indices(shape)[axis] // full[axis] for axis in range(len(shape)))
        spread = scales.astype(np.float32)[blocks]
        scheme["block"] = {"size": size(*block), "dtype": scale_type}
        if tensor is not None:
            factor = np.array(3, SCALE_TYPES[tensor])
            stored += factor.tobytes()
            spread = factor.astype(np.float32) * spread
    expected = np.asarray(spread * codes.astype(np.float32), np.float32)
    content = burnpack({"other": dense(np.ones(3, "<f4")), "w": quantized(shape, stored, scheme)})
    variable = xr.open_dataset(content, engine="burnpack").variables["w"]
    np.testing.assert_array_equal(variable.to_numpy(), expected)
    rows = data.draw(st.slices(shape[0]))
    np.testing.assert_array_equal(variable[rows].to_numpy(), expected[rows])


def test_codes_and_scales_without_decoding() -> None:
    scheme = new(tensor="F32", block={"size": size(4), "dtype": "UE4M3"})
    data = bytes([1, 255, 3, 4, 5, 6, 7, 8]) + bytes([0x38, 0x40]) + np.float32(0.5).tobytes()
    content = burnpack({"w": quantized((8,), data, scheme, param_id=3)})
    ds = xr.open_dataset(content, engine="burnpack", decode=False)
    assert list(ds.variables) == ["w:data", "w:scales", "w:global"]
    np.testing.assert_array_equal(ds["w:data"], [1, -1, 3, 4, 5, 6, 7, 8])
    assert ds["w:scales"].astype("f4").values.tolist() == [1, 2]
    assert ds["w:global"].values == 0.5
    assert ds["w:scales"].encoding["offset"] == 256 + 8
    assert {v.attrs["param_id"] for v in ds.variables.values()} == {"3"}
    decoded = xr.open_dataset(content, engine="burnpack")["w"]
    assert decoded.dtype == np.float32
    assert decoded.values.tolist() == [0.5, -0.5, 1.5, 2, 5, 6, 7, 8]


def test_infinite_scales_are_values_too() -> None:
    data = bytes([0, 1]) + np.float32(np.inf).tobytes()
    ds = xr.open_dataset(burnpack({"w": quantized((2,), data)}), engine="burnpack")
    np.testing.assert_array_equal(ds["w"], np.array([np.nan, np.inf], np.float32))


# Schemes


@pytest.mark.parametrize(
    ("shape", "value", "words"),
    [
        ((3, 3), "Q4S", (3, 1)),
        ((2, 5, 9), "Q4F", (2, 5, 2)),
        ((4, 8), "Q4S", (4, 1)),
        ((7,), "Q8S", (2,)),
        ((2, 33), "Q2S", (2, 3)),
    ],
)
def test_words_are_filled_up_line_by_line(
    shape: tuple[int, ...], value: str, words: tuple[int, ...]
) -> None:
    nbytes = 4 * int(np.prod(words))
    scheme = new(value=value, store={"PackedU32": 0})
    tensor = tensor_of(shape, nbytes + 4, scheme)
    assert extents(tensor) == {
        "data": ("uint32", words, 0, nbytes),
        "scales": ("float32", (), nbytes, 4),
    }
    assert (tensor.dtype, tensor.layout) == ("uint32", "quantized")
    assert error_of(shape, nbytes + 3, scheme).rule == "TensorSize"
    assert error_of(shape, nbytes + 5, scheme).rule == "TensorSize"


def test_native_codes_have_a_byte_each() -> None:
    tensor = tensor_of((2, 5), 14, new(value="Q2S"))
    assert extents(tensor)["data"] == ("int8", (2, 5), 0, 10)
    assert tensor.quantization == Quantization((2, 5), "int8", 8, 8, 1)


@pytest.mark.parametrize("level", ["Tensor", "Block"])
@pytest.mark.parametrize("store", ["Native", {"PackedU32": 0}, "U32"])
def test_dialects_agree(level: str, store: Any) -> None:
    count = 1 if level == "Tensor" else 4
    block = None if level == "Tensor" else {"size": size(4), "dtype": "F16"}
    nbytes = 16 + 2 * count
    before = tensor_of(
        (2, 8),
        nbytes,
        old(param="F16", store=store, level="Tensor" if block is None else {"Block": size(4)}),
    )
    store = {"PackedU32": 0} if store == "U32" else store
    scheme = new(store=store, tensor="F16" if block is None else None, block=block)
    after = tensor_of((2, 8), nbytes, scheme)
    assert before.parts == after.parts
    assert before.quantization == after.quantization
    assert before.attrs == after.attrs


def test_the_scheme_is_an_attribute() -> None:
    scheme = new(store={"PackedU32": 0}, block={"size": size(1, 1, 4), "dtype": "F16"})
    burn_dtype = json.loads(tensor_of((2, 8), 16 + 8, scheme).attrs["burn_dtype"])
    assert burn_dtype == {
        "QFloat": {
            "value": "Q8S",
            "store": {"PackedU32": 0},
            "mode": "Symmetric",
            "tensor": None,
            "block": {"size": [4], "dtype": "F16"},
        }
    }


def test_absent_options_have_defaults() -> None:
    fields = {key: PER_TENSOR[key] for key in ("value", "store", "mode")}
    assert tensor_of((2,), 6, fields).quantization == Quantization((2,), "int8", 8, 8, 0)
    with_bytes = {key.encode(): value for key, value in PER_TENSOR.items()}
    assert tensor_of((2,), 6, with_bytes).attrs == tensor_of((2,), 6, fields).attrs


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_tensors_without_elements(shape: tuple[int, ...]) -> None:
    assert tensor_of(shape, 4, new()).quantization is not None
    blocks = tensor_of(shape, 0, new(block={"size": size(4), "dtype": "F32"}))
    assert blocks.parts["scales"].nbytes == 0
    content = burnpack({"w": quantized(shape, bytes(4))})
    assert xr.open_dataset(content, engine="burnpack")["w"].values.shape == shape


@pytest.mark.parametrize(
    ("shape", "nbytes", "scheme", "parts"),
    [
        ((2, 4), 12, new(value="E4M3"), {"data": 8, "scales": 4}),
        ((2, 4), 10, new(value="E5M2", tensor="F16"), {"data": 8, "scales": 2}),
        ((2, 4), 8, new(value="E2M1", store={"PackedNative": 0}), {"data": 4, "scales": 4}),
        ((2, 4), 12, new(store={"PackedU32": 1}), {"data": 8, "scales": 4}),
        ((2, 4), 12, new(store={"PackedNative": 0}), {"data": 8, "scales": 4}),
        ((2, 4), 12, new(mode="Lookup"), {"data": 8, "scales": 4}),
        ((), 5, new(), {"data": 1, "scales": 4}),
        (
            (2, 4),
            8 + 4 + 4,
            old(level={"BlockTensor": {"block": size(2), "global": "F32"}}, param="UE4M3"),
            {"data": 8, "scales": 4, "global": 4},
        ),
    ],
)
def test_undefined_schemes_are_shown_as_parts(
    shape: tuple[int, ...], nbytes: int, scheme: Any, parts: dict[str, int]
) -> None:
    tensor = tensor_of(shape, nbytes, scheme)
    assert (tensor.layout, tensor.quantization, tensor.problem) == ("structural", None, None)
    assert {role: part.nbytes for role, part in tensor.parts.items()} == parts
    assert tensor.parts["data"].dtype == "uint8"
    ends = [(part.offset, part.offset + part.nbytes) for part in tensor.parts.values()]
    assert ends[0][0] == 256
    assert [start for start, _ in ends[1:]] == [end for _, end in ends[:-1]]
    assert ends[-1][1] == 256 + nbytes


@pytest.mark.parametrize(
    "scheme",
    [
        new(value="Q3S"),
        new(mode="Asymmetric"),
        new(tensor="F64"),
        new(store="Packed"),
        new(store={"PackedU64": 0}),
        new(block={"size": size(2), "dtype": "F8"}),
        old(param="F8"),
        old(level="Row"),
        old(level={"Rows": 1}),
    ],
    ids=str,
)
def test_unknown_variants_are_problems_of_the_tensor(scheme: Any) -> None:
    tensor = tensor_of((2, 4), 12, scheme)
    assert isinstance(tensor.problem, UnsupportedError)
    assert tensor.dtype == "QFloat"


@pytest.mark.parametrize("store", ["PackedU32", "PackedNative"])
@pytest.mark.parametrize(("shape", "axis"), [((), 0), ((4,), 1), ((2, 4), 2), ((2, 4), 1 << 62)])
@pytest.mark.parametrize("nbytes", [0, 4, 12])
def test_an_axis_that_a_tensor_does_not_have(
    store: str, shape: tuple[int, ...], axis: int, nbytes: int
) -> None:
    scheme = new(store={store: axis})
    content = burnpack({"w": quantized(shape, bytes(nbytes), scheme), "v": dense(np.ones(2, "f4"))})
    for decode in (True, False):
        with pytest.warns(CheckpointWarning, match="QuantScheme"):
            ds = xr.open_dataset(content, engine="burnpack", decode=decode)
        with ds:
            assert ds["w"].shape == shape
            assert json.loads(ds["w"].attrs["burn_dtype"])["QFloat"]["store"] == {store: axis}
            assert ds["v"].values.tolist() == [1, 1]
            with pytest.raises(FormatError, match=f"<bytes>: tensor 'w'.* axis {axis}") as caught:
                ds["w"].compute()
            assert caught.value.rule == "QuantScheme"
    (finding,) = verify(content).findings
    assert (finding.severity, finding.tensor, finding.rule) == ("error", "w", "QuantScheme")


@pytest.mark.parametrize("axis", [0, 1])
def test_an_axis_that_a_tensor_has(axis: int) -> None:
    assert tensor_of((2, 8), 16 + 4, new(store={"PackedU32": axis})).problem is None


@pytest.mark.parametrize(
    ("scheme", "rule"),
    [
        (None, "MetadataDeserialization"),
        ([], "MetadataDeserialization"),
        ({}, "MetadataDeserialization"),
        (new(value=None), "MetadataDeserialization"),
        (new(value={"Q8S": 1}), "MetadataDeserialization"),
        (new(store={"Native": 1}), "MetadataDeserialization"),
        (new(store="PackedU32"), "MetadataDeserialization"),
        (new(store={"PackedU32": -1}), "MetadataDeserialization"),
        (new(tensor=1), "MetadataDeserialization"),
        (new(block=[4]), "MetadataDeserialization"),
        (new(block={"size": size(4)}), "MetadataDeserialization"),
        (new(block={"dtype": "F32"}), "MetadataDeserialization"),
        (new(block={"size": size(0), "dtype": "F32"}), "MetadataDeserialization"),
        (new(block={"size": size(256), "dtype": "F32"}), "MetadataDeserialization"),
        (new(block={"size": size(2.0), "dtype": "F32"}), "MetadataDeserialization"),  # type: ignore[arg-type]
        (new(block={"size": size(), "dtype": "F32"}), "MetadataDeserialization"),
        (
            new(block={"size": {"storage": [1] * 5, "len": 6}, "dtype": "F32"}),
            "MetadataDeserialization",
        ),
        (
            new(block={"size": {"storage": [4], "len": 1}, "dtype": "F32"}),
            "MetadataDeserialization",
        ),
        (new(block={"size": size(2, 2, 2), "dtype": "F32"}), "QuantScheme"),
        (old(tensor=None), "QuantScheme"),
        (new(level="Tensor"), "QuantScheme"),
        (old(level={"Tensor": 1}), "MetadataDeserialization"),
        (old(level="Block"), "MetadataDeserialization"),
        (old(param=None), "MetadataDeserialization"),
        (new(tensor="F16"), "TensorSize"),
        (new(value="E4M3", block={"size": size(1), "dtype": "F32"}), "TensorSize"),
    ],
    ids=str,
)
def test_malformed_schemes(scheme: Any, rule: str) -> None:
    assert error_of((2, 4), 12, scheme).rule == rule


@given(st.tuples(st.integers(0, 9), st.integers(0, 9)), SCHEMES, st.integers(0, 60))
def test_any_quantised_tensor_opens_or_fails(
    shape: tuple[int, int], scheme: Any, nbytes: int
) -> None:
    data = burnpack({"w": quantized(shape, bytes(nbytes), scheme)})
    if isinstance(outcome(DECLARED, data), CheckpointError):
        return
    try:
        ds = xr.open_dataset(data, engine="burnpack").compute()
    except CheckpointError:
        return
    if "w" in ds:
        assert ds["w"].shape == shape
