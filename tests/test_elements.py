"""The table of element types agrees with numpy, ml_dtypes and struct."""

from __future__ import annotations

import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from xckpt.elements import BLOCK_TYPES, ELEMENT_TYPES, WIDE_FLOATS, code_values, stored_dtype

AVAILABLE = [
    name
    for name, row in ELEMENT_TYPES.items()
    if row.carrier is None and (row.numpy_code or hasattr(ml_dtypes, name))
]
FLOATS = [name for name in AVAILABLE if ELEMENT_TYPES[name].kind == "float"]
INTEGERS = [name for name in AVAILABLE if ELEMENT_TYPES[name].kind == "integer"]
SMALL = [name for name in AVAILABLE if ELEMENT_TYPES[name].bits <= 16]


@pytest.mark.parametrize("name", FLOATS)
def test_formats_of_floats(name: str) -> None:
    finfo: Any = ml_dtypes.finfo  # untyped
    row, info = ELEMENT_TYPES[name], finfo(stored_dtype(name))
    assert row.float_format is not None
    assert row.bits == info.bits
    assert row.float_format.exponent_bits == info.nexp
    assert row.fraction_bits == info.nmant
    assert row.float_format.smallest == float(info.smallest_subnormal)
    assert row.float_format.smallest_normal == float(info.smallest_normal)
    assert row.float_format.largest == float(info.max)


@pytest.mark.parametrize("name", INTEGERS)
def test_ranges_of_integers(name: str) -> None:
    iinfo: Any = ml_dtypes.iinfo  # untyped
    row, info = ELEMENT_TYPES[name], iinfo(stored_dtype(name))
    assert row.bits == info.bits
    assert row.range == (info.min, info.max + 1)
    assert row.fits_float64 is (int(float(info.max)) == info.max)


@pytest.mark.parametrize("name", SMALL)
def test_values_of_all_codes(name: str) -> None:
    row, values = ELEMENT_TYPES[name], code_values(name)
    patterns = np.arange(1 << row.bits, dtype=f"u{stored_dtype(name).itemsize}")
    with np.errstate(invalid="ignore"):  # signalling NaN
        expected = patterns.view(stored_dtype(name)).astype(np.float64)
    np.testing.assert_array_equal(values[: len(patterns)], expected)
    assert row.zeros == np.count_nonzero(expected == 0)
    has_infinities = np.isinf(expected).sum() == 2
    has_payloads = np.isnan(expected).sum() == 2 * ((1 << row.fraction_bits) - 1)
    assert row.is_ieee_float is bool(has_infinities and has_payloads)


@pytest.mark.parametrize("name", [name for name, row in ELEMENT_TYPES.items() if row.struct_code])
def test_codes_of_struct_and_numpy(name: str) -> None:
    row = ELEMENT_TYPES[name]
    assert struct.calcsize(f"<{row.struct_code}") * 8 == row.bits
    assert np.dtype(row.numpy_code) == np.dtype(name)
    data = struct.pack(f"={row.struct_code}", 1)
    assert np.frombuffer(data, name).tolist() == [1]


def test_complex_types_have_the_format_of_their_components() -> None:
    for name, component in (("complex64", "float32"), ("complex128", "float64")):
        assert ELEMENT_TYPES[name].float_format == ELEMENT_TYPES[component].float_format
        assert np.dtype(ELEMENT_TYPES[name].numpy_code) == np.dtype(name)
        assert not ELEMENT_TYPES[name].fits_float64


def test_wide_floats_need_no_scales() -> None:
    assert {"float64", "float32", "float16", "bfloat16"} == WIDE_FLOATS


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_have_room_for_their_codes(name: str) -> None:
    block = BLOCK_TYPES[name]
    if block.codes is not None:
        bits = ELEMENT_TYPES[block.codes.dtype].bits
        assert bits in {4, 8}
        assert (block.codes.stop - block.codes.start) * 8 == block.size * bits
        assert 0 <= block.codes.start < block.codes.stop <= block.nbytes
    assert all(0 <= offset <= block.nbytes - 2 for offset in block.halves or ())
