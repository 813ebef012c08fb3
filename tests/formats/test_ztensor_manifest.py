"""Decoding of hostile and of merely odd CBOR, and the deterministic encoding of version 2."""

from __future__ import annotations

import math
import pickle
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xckpt.errors import FormatError
from xckpt.formats.ztensor import manifest

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 64), (1 << 64) - 1)
    | st.floats()
    | st.text()
    | st.binary()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def rule_of(data: bytes, decode: Any = manifest.decode) -> str | None:
    with pytest.raises(FormatError) as caught:
        decode(data)
    return caught.value.rule


@pytest.mark.parametrize(
    ("encoded", "value"),
    [
        ("a1616101", {"a": 1}),
        ("bf616101ff", {"a": 1}),  # indefinite, as real files of version 0.1 are
        ("a1616118" + "05", {"a": 5}),  # a longer head than needed
        ("a2616202616101", {"b": 2, "a": 1}),
        ("d9d9f7a1616101", {"a": 1}),  # "this is CBOR"
        ("c074" + b"2013-03-21T20:04:00Z".hex(), "2013-03-21T20:04:00Z"),  # a date
        ("d8236161", "a"),  # a regular expression
        ("d81c80", []),  # to be referred to
        ("c24101", b"\x01"),  # a big number
        ("a1d9d9f7616101", {"a": 1}),
        ("da00010000a0", {}),
    ],
)
def test_versions_0_and_1_take_any_cbor_and_no_tag(encoded: str, value: Any) -> None:
    decoded = manifest.decode(bytes.fromhex(encoded))
    assert decoded == value
    assert type(decoded) is type(value)


@pytest.mark.parametrize(
    ("encoded", "rule"),
    [
        ("", "CborSyntax"),
        ("a1", "CborSyntax"),
        ("ff", "CborSyntax"),
        ("1c", "CborSyntax"),
        ("61ff", "CborSyntax"),
        ("0000", "CborSyntax"),
        ("a2616100616101", "CborDuplicateKey"),
        ("81" * 129 + "00", "CborDepth"),
        ("c0" * 100_000 + "00", "CborDepth"),
        ("81" * 100_000 + "00", "CborDepth"),
        ("bb00000001000000006161", "CborSyntax"),
        ("9b0000010000000000", "CborSyntax"),
        ("7b1000000000000000", "CborSyntax"),
        ("5b1000000000000000", "CborSyntax"),
        ("d81d00", None),  # without its tag, a reference is a number
    ],
)
def test_manifests_that_are_not_cbor(encoded: str, rule: str | None) -> None:
    if rule is None:
        assert manifest.decode(bytes.fromhex(encoded)) == 0
    else:
        assert rule_of(bytes.fromhex(encoded)) == rule


@pytest.mark.parametrize(
    ("encoded", "rule"),
    [
        ("9fff", "CborSyntax"),
        ("c100", "CborSyntax"),
        ("d9d9f7a0", "CborSyntax"),
        ("f7", "CborSyntax"),
        ("f0", "CborSyntax"),
        ("a000", "CborSyntax"),
        ("81" * 34 + "00", "CborDepth"),
        ("1805", "CborDeterminism"),
        ("190005", "CborDeterminism"),
        ("1b0000000000000005", "CborDeterminism"),
        ("3805", "CborDeterminism"),
        ("780161", "CborDeterminism"),
        ("580161", "CborDeterminism"),
        ("9800", "CborDeterminism"),
        ("b800", "CborDeterminism"),
        ("a2616202616101", "CborDeterminism"),
        ("a262616101616200", "CborDeterminism"),  # "aa" before "b"
        ("a220001818" + "00", "CborDeterminism"),  # -1 before 24
        ("fa3f800000", "CborDeterminism"),
        ("fb3ff8000000000000", "CborDeterminism"),
        ("f97e01", "CborDeterminism"),
        ("fa7fc00000", "CborDeterminism"),
        ("fb7ff8000000000000", "CborDeterminism"),
        ("81f9fe00", "CborDeterminism"),
    ],
)
def test_manifests_that_version_2_refuses(encoded: str, rule: str) -> None:
    assert rule_of(bytes.fromhex(encoded), manifest.decode_deterministic) == rule


@pytest.mark.parametrize(
    ("encoded", "value"),
    [
        ("81" * 33, None),
        ("a21818002000", {24: 0, -1: 0}),  # bytewise: the longer key first
        ("a2190100006161" + "00", {256: 0, "a": 0}),
        ("f97e00", math.nan),
        ("f98000", -0.0),
        ("fb3ff199999999999a", 1.1),
        ("fa47c35000", 100000.0),
        ("1bffffffffffffffff", (1 << 64) - 1),
        ("3bffffffffffffffff", -(1 << 64)),
    ],
)
def test_manifests_that_version_2_accepts(encoded: str, value: Any) -> None:
    data = bytes.fromhex(encoded)
    if value is None:
        data = data[:-1] + b"\x80"
        assert manifest.decode_deterministic(data)
    else:
        assert repr(manifest.decode_deterministic(data)) == repr(value)


@given(VALUES)
def test_deterministic_encoding_is_taken(value: Any) -> None:
    data = cbor2.dumps(value, canonical=True)
    assert repr(manifest.decode_deterministic(data)) == repr(manifest.decode(data))


@given(VALUES)
def test_any_other_encoding_of_a_value_is_refused(value: Any) -> None:
    data = cbor2.dumps(value)
    if data != cbor2.dumps(value, canonical=True):
        assert rule_of(data, manifest.decode_deterministic) == "CborDeterminism"


@given(st.binary(max_size=60))
def test_any_bytes_parse_or_raise_a_format_error(data: bytes) -> None:
    for decode in (manifest.decode, manifest.decode_deterministic):
        try:
            decode(data)
        except FormatError as error:
            assert error.rule is not None  # noqa: PT017 (either outcome is right)


def test_attributes_can_be_pickled() -> None:
    value = manifest.decode(bytes.fromhex("a26161f7616281a1616301"))
    attrs = manifest.attributes(value)
    assert attrs == {"a": None, "b": [{"c": 1}]}
    assert pickle.loads(pickle.dumps(attrs)) == attrs


@pytest.mark.parametrize("encoded", ["01", "80", "a10101", "a16161f0", "a16161a1800100"[:-2]])
def test_fields_that_are_not_attributes(encoded: str) -> None:
    value = manifest.decode(bytes.fromhex(encoded))
    assert rule_of(value, manifest.attributes) in {"Schema", "CborSyntax"}


def test_a_manifest_lies_within_the_file() -> None:
    assert manifest.locate(16, 8, 0) == 8
    assert manifest.locate(100, 8, 84) == 8
    assert manifest.locate(100, 16, 20) == 64
    for size, footer, length, rule in [
        (100, 8, 85, "ManifestBounds"),
        (100, 16, 77, "ManifestBounds"),
        (100, 8, (1 << 64) - 1, "ManifestBounds"),
        (1 << 31, 8, (1 << 30) + 1, "ManifestTooLarge"),
    ]:
        with pytest.raises(FormatError) as caught:
            manifest.locate(size, footer, length)
        assert caught.value.rule == rule
        assert caught.value.offset == size - footer
