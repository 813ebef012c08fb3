"""Quantised tensors dequantise by their definition, whole or in blocks of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sources import CountingSource
from xckpt.arrays.parts import PartReader
from xckpt.arrays.scaled import QuantizedArray
from xckpt.index import Part, Quantization, Tensor


def pack(codes: np.ndarray, bits: int, word_bits: int, axis: int, *, msb_first: bool) -> bytes:
    """Pack codes into words along an axis, the plain way."""
    per_word = word_bits // bits
    lines = np.moveaxis(codes.astype(np.int64) & ((1 << bits) - 1), axis, -1)
    words = -(-lines.shape[-1] // per_word)
    padded = np.zeros((*lines.shape[:-1], words * per_word), np.uint64)
    padded[..., : lines.shape[-1]] = lines
    places = np.arange(per_word, dtype=np.uint64) * np.uint64(bits)
    if msb_first:
        places = places[::-1]
    groups = padded.reshape(*padded.shape[:-1], words, per_word)
    packed = (groups << places).sum(axis=-1).astype(f"<u{word_bits // 8}")
    data: bytes = np.moveaxis(packed, -1, axis).tobytes()
    return data


def quantized(
    shape: tuple[int, ...], scheme: Quantization, parts: dict[str, tuple[str, bytes]]
) -> Any:
    """Make a quantised array over a file that holds these parts one after the other."""
    described, data = {}, b""
    for role, (dtype, payload) in parts.items():
        described[role] = Part(dtype, shape, len(data), len(payload))
        data += payload
    tensor = Tensor("t", "float32", shape, described, layout="quantized", quantization=scheme)
    source = CountingSource(data)
    readers = {role: PartReader(source, part) for role, part in described.items()}
    return QuantizedArray(tensor, readers)


@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple),
    st.data(),
    st.sampled_from([(4, 8), (4, 32), (2, 32), (8, 32), (8, 8)]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_blocks_of_rows_equal_the_definition(
    shape: tuple[int, ...],
    data: st.DataObject,
    widths: tuple[int, int],
    signed: bool,
    msb_first: bool,
    stored_zeros: bool,
) -> None:
    bits, word_bits = widths
    axis = data.draw(st.integers(0, len(shape) - 1))
    block = tuple(data.draw(st.integers(1, n)) for n in shape)
    grid = tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
    scale_axes = tuple(data.draw(st.permutations(range(len(shape)))))
    rng = np.random.default_rng(0)
    low = -(1 << (bits - 1)) if signed else 0
    codes = rng.integers(low, low + (1 << bits), shape)
    scales = rng.integers(1, 5, grid).astype("<f4")
    zeros = rng.integers(0, 4, grid).astype("<f4")
    code = "int8" if signed else "uint8"
    parts = {"scales": ("float32", scales.transpose(scale_axes).tobytes())}
    if word_bits == bits:
        parts["data"] = (code, codes.astype(code).tobytes())
    else:
        parts["data"] = ("uint8", pack(codes, bits, word_bits, axis, msb_first=msb_first))
    if stored_zeros:
        parts["zeros"] = ("float32", zeros.transpose(scale_axes).tobytes())
    scheme = Quantization(
        block, code, bits, word_bits, axis, msb_first, None if stored_zeros else 3,
        scale_axes=scale_axes,
    )  # fmt: skip
    blocks = tuple(np.indices(shape)[d] // block[d] for d in range(len(shape)))
    zero = zeros[blocks] if stored_zeros else 3
    expected = ((codes - zero) * scales[blocks]).astype(np.float32)
    lazy = quantized(shape, scheme, parts)
    np.testing.assert_array_equal(lazy[...], expected)
    rows = data.draw(st.slices(shape[0]))
    np.testing.assert_array_equal(lazy[rows], expected[rows])


def test_packed_zeros() -> None:
    zeros = np.array([[1, 2], [3, 0]])
    codes = np.array([[5, 6, 7, 8], [1, 2, 3, 4]])
    scheme = Quantization((1, 2), "uint8", 4, 8, 1, zero=None, packed_zeros=True)
    parts = {
        "data": ("uint8", pack(codes, 4, 8, 1, msb_first=False)),
        "scales": ("float16", np.full((2, 2), 0.5, "<f2").tobytes()),
        "zeros": ("uint8", pack(zeros, 4, 8, 1, msb_first=False)),
    }
    expected = (codes - zeros.repeat(2, axis=1)) * 0.5
    np.testing.assert_array_equal(quantized((2, 4), scheme, parts)[:], expected)


def test_four_bit_floats_with_power_of_two_scales() -> None:
    scheme = Quantization((1, 4), "float4_e2m1fn", 4, 4, 1)
    # 1.0, -6.0, 0.5, 3.0 with scales 2 and NaN (e8m0 255).
    codes = np.array([[2, 15, 1, 5], [2, 15, 1, 5]], np.uint8).ravel()
    packed = (codes[0::2] | codes[1::2] << 4).tobytes()
    parts = {"data": ("float4_e2m1fn", packed), "scales": ("float8_e8m0fnu", bytes([128, 255]))}
    got = quantized((2, 4), scheme, parts)[:]
    np.testing.assert_array_equal(got[0], [2, -12, 1, 6])
    assert np.isnan(got[1]).all()


def test_a_row_reads_its_own_codes() -> None:
    scheme = Quantization((1, 32), "uint8", 4, 32, 1)
    parts = {
        "scales": ("float32", np.ones((100, 8), "<f4").tobytes()),
        "data": ("uint8", bytes(100 * 128)),
    }
    lazy = quantized((100, 256), scheme, parts)
    lazy[7]
    assert (100 * 8 * 4 + 7 * 128, 128) in lazy.source.reads


def test_a_tensor_without_quantization_is_refused() -> None:
    with pytest.raises(ValueError, match="no quantization"):
        QuantizedArray(Tensor("t", "uint8", (1,), {}), {})


def test_a_global_scale_multiplies_the_others_first() -> None:
    # In another order the products would not be finite.
    scheme = Quantization((1, 2), "int8", 8, 8, 1, global_scale=True)
    parts = {
        "data": ("int8", np.array([[1, -2, 2, 4]], np.int8).tobytes()),
        "scales": ("float32", np.array([3e38, 2.0], "<f4").tobytes()),
        "global": ("float16", np.array(2**-10, "<f2").tobytes()),
    }
    got = quantized((1, 4), scheme, parts)[:]
    scales = np.array([3e38, 3e38, 2.0, 2.0], np.float32) * np.float32(2**-10)
    np.testing.assert_array_equal(got[0], scales * np.array([1, -2, 2, 4], np.float32))
    assert np.isfinite(got).all()
