"""Stored bytes decode to the elements of ml_dtypes and numpy, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xckpt.arrays.dense import elements, unpack_codes
from xckpt.elements import ELEMENT_TYPES, decoded_dtype, element_type_of, stored_dtype
from xckpt.errors import FormatError

if TYPE_CHECKING:
    from random import Random

EIGHT_BIT_FLOATS = [n for n, e in ELEMENT_TYPES.items() if e.bits == 8 and n.startswith("float")]


def test_bfloat16_keeps_every_bit_of_every_pattern() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    got = elements(patterns.data.cast("B"), "bfloat16", decode=True)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got.view(np.uint32), patterns.astype(np.uint32) << 16)
    number = ~np.isnan(got)
    expected = patterns.view(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(got[number], expected[number])


@pytest.mark.parametrize("name", EIGHT_BIT_FLOATS)
def test_eight_bit_floats_decode_as_ml_dtypes(name: str) -> None:
    patterns = np.arange(256, dtype=np.uint8)
    got = elements(patterns.data, name, decode=True)
    expected = patterns.view(getattr(ml_dtypes, name)).astype(np.float32)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("name", "payload"), [("float8_e5m2", 2), ("float16", 10)])
def test_payloads_of_nan_are_kept(name: str, payload: int) -> None:
    """Both are the upper part of a float32 but for the width of the exponent."""
    bits = ELEMENT_TYPES[name].bits
    patterns = np.arange(1 << bits, dtype=f"u{bits // 8}")
    values = elements(patterns.data.cast("B"), name, decode=True)
    codes = patterns.astype(np.uint32)
    nan = codes & ((1 << bits - 1) - 1) > 31 << payload
    assert nan.sum() == 2 * (2**payload - 1)
    expected = codes >> bits - 1 << 31 | 0x7F800000 | (codes & (1 << payload) - 1) << (23 - payload)
    np.testing.assert_array_equal(values.view(np.uint32)[nan], expected[nan])


def test_float16_becomes_float32_of_the_same_values() -> None:
    """Sums of float16 overflow at 65504, and numpy adds them up in float16."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    for order in "little", "big":
        data = patterns.astype(patterns.dtype.newbyteorder(order)).tobytes()
        got = elements(memoryview(data), "float16", decode=True, byteorder=order)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, patterns.view(np.float16).astype(np.float32))
        assert np.signbit(got[1 << 15])


@pytest.mark.parametrize("name", [n for n, e in ELEMENT_TYPES.items() if e.bits >= 8])
def test_stored_types_are_views(name: str) -> None:
    data = memoryview(bytes(64))
    got = elements(data, name, decode=False)
    assert got.dtype == stored_dtype(name)
    assert got.size * ELEMENT_TYPES[name].bits == 8 * 64
    if name != "bool":
        assert np.shares_memory(got, np.frombuffer(data, np.uint8))
    assert elements(data, name, decode=True).dtype == decoded_dtype(name)


def test_32_bit_booleans() -> None:
    data = np.array([0, 1, 256, 1 << 31], "<u4").tobytes()
    got = elements(memoryview(data), "bool32", decode=True)
    assert got.dtype == np.bool_
    assert got.tolist() == [False, True, True, True]
    assert elements(memoryview(data), "bool32", decode=False).dtype == np.uint32
    with pytest.raises(FormatError, match="element 2 is 256"):
        elements(memoryview(data), "bool32", decode=True, strict=True)


def test_big_endian_becomes_native() -> None:
    data = np.array([1.5, -2.0], ">f4").tobytes()
    got = elements(memoryview(data), "float32", decode=True, byteorder="big")
    np.testing.assert_array_equal(got, [1.5, -2.0])
    assert got.dtype.isnative


def test_unaligned_bytes_become_aligned() -> None:
    data = memoryview(b"\0" + np.array([1, 2], "<i8").tobytes())[1:]
    got = elements(data, "int64", decode=True)
    np.testing.assert_array_equal(got, [1, 2])
    assert got.flags.aligned


def test_booleans() -> None:
    data = memoryview(bytes([0, 1, 2, 255]))
    np.testing.assert_array_equal(elements(data, "bool", decode=True), [False, True, True, True])
    with pytest.raises(FormatError, match="element 2 is 2"):
        elements(data, "bool", decode=True, strict=True)


@given(st.sampled_from([1, 2, 4]), st.integers(0, 20), st.randoms(use_true_random=False))
def test_unpacking_inverts_packing(bits: int, nbytes: int, random: Random) -> None:
    per_byte = 8 // bits
    codes = [random.randrange(1 << bits) for _ in range(nbytes * per_byte)]
    packed = bytes(
        sum(code << (bits * place) for place, code in enumerate(codes[at : at + per_byte]))
        for at in range(0, len(codes), per_byte)
    )
    assert unpack_codes(memoryview(packed), bits).tolist() == codes


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("bf16", "bfloat16"),
        ("BF16", "bfloat16"),
        ("torch.bfloat16", "bfloat16"),
        ("f16", "float16"),
        ("fp16", "float16"),
        ("half", "float16"),
        ("fp32", "float32"),
        ("f64", "float64"),
        ("i8", "int8"),
        ("u8", "uint8"),
        ("i64", "int64"),
        ("fp8_e4m3", "float8_e4m3fn"),
        ("f8_e4m3", "float8_e4m3fn"),
        ("F8_E5M2", "float8_e5m2"),
        ("float8_e4m3fnuz", "float8_e4m3fnuz"),
        ("fp4_e2m1", "float4_e2m1fn"),
        (np.float32, "float32"),
        (np.dtype("int16"), "int16"),
        (ml_dtypes.bfloat16, "bfloat16"),
        (bool, "bool"),
    ],
)
def test_element_types_have_aliases(alias: Any, name: str) -> None:
    assert element_type_of(alias) == name


def test_an_unknown_element_type() -> None:
    with pytest.raises(ValueError, match=r"'bflot16' is not .* did you mean 'bfloat16'"):
        element_type_of("bflot16")
    with pytest.raises(ValueError, match=r"7 is not an element type; known: float64"):
        element_type_of(7)
