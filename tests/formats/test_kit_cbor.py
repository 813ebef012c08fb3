"""Core deterministic CBOR: encoding."""

from __future__ import annotations

import math
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.formats.indexes import values
from xckpt.formats.kit import encode_cbor
from xckpt.formats.ztensor.manifest import decode_deterministic

_text_only = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 64), (1 << 64) - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(values)
def test_encoded_values_are_deterministic(value: Any) -> None:
    assert decode_deterministic(encode_cbor(value)) == value


@given(_text_only)
def test_encoding_equals_that_of_cbor2_for_text_keys(value: Any) -> None:
    assert encode_cbor(value) == cbor2.dumps(value, canonical=True)


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        # RFC 8949, section 4.2.1
        (
            {10: 0, 100: 0, -1: 0, "z": 0, "aa": 0, False: 0},
            "a6 0a00 186400 2000 617a00 62616100 f400",
        ),
        (math.nan, "f97e00"),
        (-0.0, "f98000"),
        (1e5, "fa47c35000"),
        (0.1, "fb3fb999999999999a"),
        ((1 << 64) - 1, "1bffffffffffffffff"),
        (-(1 << 64), "3bffffffffffffffff"),
        ([23, 24, 255, 256, 65535, 65536], "86 17 1818 18ff 190100 19ffff 1a00010000"),
        ("é" * 12, "7818" + "c3a9" * 12),
        (b"\0", "4100"),
    ],
)
def test_encoded_examples(value: Any, encoded: str) -> None:
    assert encode_cbor(value) == bytes.fromhex(encoded)
