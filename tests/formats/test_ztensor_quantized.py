"""Quantised layouts of zTensor 2: decoded schemes, undecoded parts, and broken rules."""

from __future__ import annotations

from typing import Any

import pytest

from tests.formats.ztensor_files import stored, v2_file
from tests.sources import CountingSource
from xckpt import formats
from xckpt.errors import FormatError
from xckpt.index import Quantization

ztensor = formats.get("ztensor")

AWQ = {
    "bits": 4,
    "group_size": 8,
    "axis": 1,
    "packing": {"word": "u32", "order": "lsb_first", "per_word": 8},
    "scale_form": "f16_factors",
    "zero_point": {"form": "none"},
}
PARTS = {"data": stored(bytes(32), dtype="u32"), "scales": stored(bytes(16), dtype="f16")}


def grouped(shape: tuple[int, ...] = (4, 16), **changes: Any) -> dict[str, Any]:
    """4-bit codes of a 4 x 16 tensor in groups of 8, changed as given."""
    parts = {**PARTS, **changes.pop("parts", {})}
    attrs = {**AWQ, **changes}
    return {
        "shape": list(shape),
        "layout": "zt.quant_group/1",
        "attributes": {key: value for key, value in attrs.items() if value is not None},
        "parts": {role: part for role, part in parts.items() if part is not None},
    }


def int8(shape: tuple[int, ...], scales: int, axis: int = 0, **changes: Any) -> dict[str, Any]:
    """8-bit codes with group size 0 and a number of scales."""
    size = 1
    for extent in shape:
        size *= extent
    return grouped(
        shape,
        bits=8,
        group_size=0,
        axis=axis,
        packing={"word": "u8", "order": "lsb_first", "per_word": 1},
        parts={
            "data": stored(bytes(size), dtype="i8"),
            "scales": stored(bytes(2 * scales), dtype="f16"),
        },
        **changes,
    )


def micro(
    dtype: str = "u8", logical: str | None = "f8_e4m3fn", size: int = 128, **changes: Any
) -> dict[str, Any]:
    """Small floats of a 2 x 64 tensor in blocks of 32."""
    logical_type = {} if logical is None else {"type": logical}
    parts = {
        "data": stored(bytes(size), dtype=dtype, **logical_type),
        "scales": stored(bytes(4), dtype="u8", type="f8_e8m0"),
        **changes.pop("parts", {}),
    }
    attrs = {"block_size": 32, "scale_form": "e8m0_exponent", **changes}
    return {
        "shape": [2, 64],
        "layout": "zt.mx/1",
        "attributes": {key: value for key, value in attrs.items() if value is not None},
        "parts": parts,
    }


def gguf(size: int = 36, **attrs: Any) -> dict[str, Any]:
    """Two blocks of 18 bytes for 32 elements each."""
    return {
        "shape": [2, 32],
        "layout": "gguf.q4_0/1",
        "attributes": {"elems_per_block": 32, "block_bytes": 18, **attrs},
        "parts": {"data": stored(bytes(size), dtype="u8")},
    }


def tensor_of(entry: dict[str, Any]) -> Any:
    return ztensor.read(CountingSource(v2_file({"q": entry}))).tensors["q"]


def shapes_of(tensor: Any) -> dict[str, Any]:
    return {role: part.shape for role, part in tensor.parts.items()}


def scheme(**changes: Any) -> Quantization:
    pinned: dict[str, Any] = {
        "block": (1, 8),
        "code": "uint8",
        "bits": 4,
        "word_bits": 32,
        "axis": 1,
        "scale_axes": (0, 1),
    }
    return Quantization(**{**pinned, **changes})


def test_groups_along_the_last_axis() -> None:
    tensor = tensor_of(grouped())
    assert (tensor.layout, tensor.dtype, tensor.strict) == ("quantized", "float32", True)
    assert shapes_of(tensor) == {"data": (4, 2), "scales": (4, 2)}
    assert tensor.quantization == scheme()
    assert tensor.attrs == AWQ


def test_groups_along_the_first_axis_have_their_scales_lane_by_lane() -> None:
    parts = {"scales": stored(bytes(2 * 2 * 16), dtype="f16")}
    tensor = tensor_of(grouped(axis=0, group_size=2, parts=parts))
    assert tensor.quantization == scheme(block=(2, 1), scale_axes=(1, 0))
    assert shapes_of(tensor) == {"data": (4, 2), "scales": (16, 2)}


@pytest.mark.parametrize(
    ("order", "data", "zero_point", "expected"),
    [
        ("lsb_first", "i32", {"form": "none"}, {}),
        ("msb_first", "u32", {"form": "none"}, {"msb_first": True}),
        ("lsb_first", "u32", {"form": "implied", "value": 8}, {"zero": 8}),
        ("lsb_first", "u32", {"form": "implied", "value": -1}, {"zero": -1}),
    ],
)
def test_packing_and_zero_points(
    order: str, data: str, zero_point: dict[str, Any], expected: dict[str, Any]
) -> None:
    packing = {**AWQ["packing"], "order": order}  # type: ignore[dict-item]
    parts = {"data": stored(bytes(32), dtype=data)}
    tensor = tensor_of(grouped(packing=packing, zero_point=zero_point, parts=parts))
    assert tensor.quantization == scheme(**expected)


def test_stored_zero_points() -> None:
    zeros = stored(bytes(8), dtype="u8")
    zero_point = {"form": "tensor", "packing": "plain"}
    tensor = tensor_of(grouped(zero_point=zero_point, parts={"zeros": zeros}))
    assert tensor.quantization == scheme(zero=None)
    assert tensor.parts["zeros"].shape == (4, 2)


def test_packed_zero_points() -> None:
    parts = {
        "scales": stored(bytes(4 * 8 * 2), dtype="f16"),
        "zeros": stored(bytes(16), dtype="u32"),
    }
    zero_point = {"form": "tensor", "packing": "same_as_data"}
    tensor = tensor_of(grouped(group_size=2, zero_point=zero_point, parts=parts))
    assert tensor.quantization == scheme(block=(1, 2), zero=None, packed_zeros=True)
    assert shapes_of(tensor) == {"data": (4, 2), "scales": (4, 8), "zeros": (4, 1)}


def test_exponents_as_scales() -> None:
    parts = {"scales": stored(bytes(8), dtype="u8", type="f8_e8m0")}
    tensor = tensor_of(grouped(scale_form="e8m0_exponent", parts=parts))
    assert tensor.parts["scales"].dtype == "float8_e8m0fnu"
    assert tensor.quantization == scheme()


@pytest.mark.parametrize(
    ("shape", "scales", "axis", "block"),
    [
        ((4, 16), 16, 0, (4, 1)),  # a scale for each lane: the whole axis is a group
        ((4, 16), 4, 1, (1, 16)),
        ((4, 16), 4, 0, (1, 16)),  # a scale "per row of the axis"
        ((4, 16), 64, 0, (1, 1)),  # by the profile's formula for sizes
        ((7,), 1, 0, (7,)),
        ((7,), 7, 0, (1,)),
    ],
)
def test_group_size_0_follows_from_the_number_of_scales(
    shape: tuple[int, ...], scales: int, axis: int, block: tuple[int, ...]
) -> None:
    tensor = tensor_of(int8(shape, scales, axis))
    assert tensor.quantization.block == block
    assert tensor.quantization.code == "int8"
    assert (tensor.quantization.bits, tensor.quantization.word_bits) == (8, 8)
    assert tensor.parts["data"].shape == shape


@pytest.mark.parametrize(
    "entry",
    [
        int8((4, 4), 4),  # either reading of group size 0
        grouped(bits=3, packing={"word": "u32", "order": "lsb_first", "per_word": 10}),
        grouped((16, 4), group_size=4),  # words straddle rows
        grouped(
            zero_point={"form": "tensor", "packing": "same_as_data"},
            parts={"zeros": stored(bytes(4), dtype="u32")},
        ),
        micro("i8", None),
        micro("u8", "f6_e3m2"),
        gguf(),
    ],
)
def test_ambiguous_schemes_are_shown_as_parts(entry: dict[str, Any]) -> None:
    tensor = tensor_of(entry)
    assert (tensor.layout, tensor.problem, tensor.quantization) == ("structural", None, None)
    assert all(part.shape is not None and len(part.shape) == 1 for part in tensor.parts.values())


@pytest.mark.parametrize(
    ("dtype", "logical", "size", "bits", "code"),
    [
        ("u8", "f8_e4m3fn", 128, 8, "float8_e4m3fn"),
        ("u8", "f8_e5m2", 128, 8, "float8_e5m2"),
        ("u8", "f4_e2m1", 64, 4, "float4_e2m1fn"),
    ],
)
def test_microscaling(dtype: str, logical: str, size: int, bits: int, code: str) -> None:
    tensor = tensor_of(micro(dtype, logical, size))
    assert (tensor.layout, tensor.dtype) == ("quantized", "float32")
    assert shapes_of(tensor) == {"data": (2, 64), "scales": (2, 2)}
    assert tensor.quantization == scheme(block=(1, 32), code=code, bits=bits, word_bits=bits)


def test_microscaling_along_the_first_axis() -> None:
    tensor = tensor_of(
        micro(block_size=2, axis=0, parts={"scales": stored(bytes(64), dtype="u8", type="f8_e8m0")})
    )
    assert tensor.parts["scales"].shape == (64, 1)
    assert (tensor.quantization.block, tensor.quantization.scale_axes) == ((2, 1), (1, 0))


@pytest.mark.parametrize(
    "entry",
    [
        grouped(bits=None),
        grouped(bits=7),
        grouped(bits=[4]),
        grouped(bits=True),
        grouped(group_size=None),
        grouped(group_size=5),
        grouped(axis=2),
        grouped(axis=-1),
        grouped(packing=None),
        grouped(packing={**AWQ["packing"], "word": "u16"}),  # type: ignore[dict-item]
        grouped(packing={**AWQ["packing"], "order": "random"}),  # type: ignore[dict-item]
        grouped(packing={**AWQ["packing"], "per_word": 4}),  # type: ignore[dict-item]
        grouped(scale_form="f32"),
        grouped(zero_point=None),
        grouped(zero_point={"form": "implied"}),
        grouped(zero_point={"form": "tensor", "packing": "plain"}),
        grouped(parts={"zeros": stored(bytes(8), dtype="u8")}),
        grouped(parts={"data": stored(bytes(28), dtype="u32")}),
        grouped(parts={"data": stored(bytes(32), dtype="f32")}),
        grouped(parts={"scales": stored(bytes(8), dtype="u8")}),
        grouped(parts={"scales": stored(bytes(14), dtype="f16")}),
        grouped(parts={"scales": None}),
        grouped((), axis=0),
        int8((4, 16), 5),
        micro(block_size=None),
        micro(block_size=1),
        micro(block_size=48),
        micro(axis=2),
        micro(scale_form=None),
        micro("u8", None),
        micro(size=127),
        micro(parts={"scales": stored(bytes(4), dtype="u8")}),
        micro(parts={"scales": stored(bytes(3), dtype="u8", type="f8_e8m0")}),
        gguf(35),
        gguf(elems_per_block=0),
        gguf(elems_per_block=33),
        gguf(block_bytes=0),
        gguf(block_bytes="18"),
    ],
)
def test_broken_rules(entry: dict[str, Any]) -> None:
    with pytest.raises(FormatError) as caught:
        tensor_of(entry)
    assert (caught.value.rule, caught.value.tensor) == ("LayoutRule", "q")
    assert caught.value.offset is not None
