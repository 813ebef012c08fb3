"""Burnpack: its three dialects, and the CBOR that burn accepts and refuses."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import cbor2
import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from tests.formats.burnpack_files import burnpack, container, dense, raw
from tests.sources import CountingSource
from xckpt import formats
from xckpt.errors import FormatError, UnsupportedError

if TYPE_CHECKING:
    from xckpt.index import Index

ONE = np.array([1, 2, 3], "<f4")


def read(data: bytes, **options: Any) -> Index:
    return formats.get("burnpack").read(CountingSource(data), **options)


def error_of(data: bytes, **options: Any) -> FormatError:
    with pytest.raises(FormatError) as caught:
        read(data, **options)
    assert caught.value.offset is not None
    assert caught.value.rule is not None
    return caught.value


def descriptor(changes: dict[Any, Any] | None = None) -> dict[Any, Any]:
    """One that is valid in `described`, changed as given; `...` leaves a field out."""
    fields = {"dtype": "U8", "shape": [8], "data_offsets": [0, 8], "param_id": 5}
    changed: dict[Any, Any] = {**fields, **(changes or {})}
    return {key: value for key, value in changed.items() if value is not ...}


def described(entry: Any, **root: Any) -> bytes:
    """Write a file with one tensor of this descriptor and 64 bytes of data."""
    return container(cbor2.dumps({"tensors": {"w": entry}, **root}), bytes(range(64)))


def hexed(entry: str) -> bytes:
    """Write a file with one tensor of this descriptor, as hexadecimal CBOR."""
    return container(bytes.fromhex("a16774656e736f7273" + "a16177" + entry), bytes(64))


def cbor(value: Any) -> str:
    encoded: bytes = cbor2.dumps(value)
    return encoded.hex()


# Header


def test_an_index_has_every_field() -> None:
    tensors = {"b": dense(ONE, param_id=(1 << 64) - 1), "a": dense(ONE[:0])}
    data = burnpack(tensors, metadata={"k": "v"})
    index = read(data)
    assert (index.format, index.version, index.attrs) == ("burnpack", "1", {"k": "v"})
    assert (index.source, index.nbytes, index.warnings) == ("memory", len(data), ())
    assert list(index.tensors) == ["a", "b"]
    tensor = index.tensors["b"]
    assert (tensor.dtype, tensor.shape, tensor.layout) == ("float32", (3,), "dense")
    assert tensor.attrs == {"param_id": "18446744073709551615"}
    assert tensor.parts["data"].offset == 256
    assert index.tensors["a"].attrs == {}


def test_only_header_and_metadata_are_read() -> None:
    data = burnpack({"w": dense(np.zeros(4096, "<f4"))})
    source = CountingSource(data)
    formats.get("burnpack").read(source)
    assert source.nbytes_read == 10 + int.from_bytes(data[6:10], "little")


@pytest.mark.parametrize(
    ("head", "rule"),
    [
        (b"", "InvalidHeader"),
        (b"NRUB\1\0\0\0\0", "InvalidHeader"),
        (b"BURN\1\0\0\0\0\0", "InvalidMagicNumber"),
        (b"PK\3\4\1\0\0\0\0\0", "InvalidMagicNumber"),
        (b"NRUB\1\0\1\0\0\0", "InvalidHeader"),
        (b"NRUB\1\0\xff\xff\xff\xff", "InvalidHeader"),
        (b"NRUB\1\0\0\0\0\0", "MetadataDeserialization"),
    ],
)
def test_headers(head: bytes, rule: str) -> None:
    assert error_of(head).rule == rule


def test_a_swapped_magic_number_is_named() -> None:
    assert "big-endian" in str(error_of(b"BURN" + bytes(6)))


def test_versions() -> None:
    data = bytearray(burnpack({"w": dense(ONE)}))
    data[4] = 0
    index = read(bytes(data))
    assert index.version == "0"
    assert "version 0" in index.warnings[0]
    data[4] = 2
    with pytest.raises(UnsupportedError, match="version 2: the newest supported version is 1"):
        read(bytes(data))


@pytest.mark.parametrize("head", [b"NRUB", b"NRUB\xff\xff", b"BURN\1\0", b"PK\3\4", b"NRU"])
def test_detection(head: bytes) -> None:
    assert formats.get("burnpack").detect(head, len(head), "m.bpk") == head.startswith(b"NRUB")


# Layouts


@given(st.lists(st.integers(0, 300), max_size=5), st.integers(0, 300), st.booleans())
def test_layouts_are_distinguished(sizes: list[int], padding: int, legacy: bool) -> None:
    tensors = {f"t{i}": dense(np.full(n, i, np.uint8)) for i, n in enumerate(sizes)}
    data = burnpack(tensors, legacy=legacy, metadata={"k": "x" * padding})
    index = read(data)
    same = (10 + int.from_bytes(data[6:10], "little")) % 256 == 0
    assert index.version == ("1-legacy" if legacy and not same else "1")
    for name, tensor in index.tensors.items():
        part = tensor.parts["data"]
        assert data[part.offset : part.offset + part.nbytes] == tensors[name]["data"]
    if not same and any(sizes):
        wrong = "aligned" if legacy else "legacy"
        try:
            forced = read(data, layout=wrong)
        except FormatError as error:
            assert error.rule == "Truncated"  # noqa: PT017  also an index is right
        else:
            assert forced.version == ("1-legacy" if wrong == "legacy" else "1")


def test_a_layout_may_be_stated() -> None:
    # Other bytes follow the only tensor, so the size of the file does not decide.
    data = burnpack({"a": dense(ONE)}, legacy=True) + b"more"
    assert "layout='legacy'" in str(error_of(data))
    index = read(data, layout="legacy")
    part = index.tensors["a"].parts["data"]
    assert data[part.offset : part.offset + 12] == ONE.tobytes()
    assert index.version == "1-legacy"
    padded = burnpack({"a": dense(ONE)})
    assert read(padded, layout="aligned") == read(padded)


@pytest.mark.parametrize("layout", ["", "Legacy", "aligned-256", 1, [], True])
def test_other_layouts_are_refused(layout: Any) -> None:
    with pytest.raises(ValueError, match=r"layout=.* is not one of 'aligned', 'legacy'"):
        read(burnpack({}), layout=layout)


def test_a_truncated_aligned_file_is_not_read_as_legacy() -> None:
    data = burnpack({"a": dense(ONE), "b": dense(ONE)})
    for size in range(len(data) - 300, len(data)):
        assert error_of(data[:size]).rule == "Truncated"


def test_bytes_after_metadata_and_data_are_ignored() -> None:
    metadata = cbor2.dumps({"tensors": {"w": descriptor()}}) + b"\xff\xff"
    index = read(container(metadata, bytes(64) + b"more"))
    assert index.tensors["w"].parts["data"].offset == 256


# Metadata that burn takes


@pytest.mark.parametrize(
    "changes",
    [
        {"param_id": None},
        {"param_id": cbor2.undefined},
        {"param_id": ...},
        {"new": {1: [2, {3: 4}]}, "newer": None},
        {"dtype": ..., b"dtype": "U8"},
        {"shape": b"\x08"},
        {"shape": b"\x02\x04"},
        {"param_id": cbor2.CBORTag(2, b"\0\0\xff\xff\xff\xff\xff\xff\xff\xff")},
        {"dtype": cbor2.CBORTag(1000, "U8")},
        {"dtype": {b"Bool": "U8"}},
        {"shape": [2, 0, 4], "data_offsets": [8, 8]},
        {"shape": [1] * 64, "data_offsets": [3, 4]},
    ],
    ids=str,
)
def test_metadata_that_burn_takes(changes: dict[Any, Any]) -> None:
    without_more = described(descriptor(changes))[: 8 - 64]
    tensor = read(without_more).tensors["w"]
    assert tensor.parts["data"].shape == tensor.shape
    assert tensor.parts["data"].nbytes == np.prod(tensor.shape)


@pytest.mark.parametrize(
    "entry",
    [
        # Maps and arrays of indefinite length, and text in chunks.
        "bf" + cbor("dtype") + cbor("U8") + cbor("shape") + "9f08ff"
        + cbor("data_offsets") + cbor([0, 8]) + "ff",
        "a3" + "7f" + cbor("dt") + cbor("ype") + "ff" + cbor("U8") + cbor("shape") + cbor([8])
        + cbor("data_offsets") + cbor([0, 8]),
        # Numbers in more bytes than they need.
        "a3" + cbor("dtype") + cbor("U8") + cbor("shape") + "811a00000008"
        + cbor("data_offsets") + "821b0000000000000000190008",
        # The first of the fields last.
        "a3" + cbor("data_offsets") + cbor([0, 8]) + cbor("shape") + cbor([8])
        + cbor("dtype") + cbor("U8"),
    ],
)  # fmt: skip
def test_encodings_that_burn_takes(entry: str) -> None:
    assert read(hexed(entry)).tensors["w"].shape == (8,)


def nested(arrays: int) -> bytes:
    unknown = cbor("x") + "81" * arrays + "00"
    return container(bytes.fromhex("a2" + cbor("tensors") + "a0" + unknown))


def test_depth() -> None:
    assert read(nested(127)).tensors == {}
    assert error_of(nested(128)).rule == "MetadataDeserialization"
    assert error_of(nested(100_000)).rule == "MetadataDeserialization"


# Metadata that burn refuses, or that makes no sense


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"dtype": ...}, "MetadataDeserialization"),
        ({"dtype": None}, "MetadataDeserialization"),
        ({"dtype": 1}, "MetadataDeserialization"),
        ({"dtype": b"U8"}, "MetadataDeserialization"),
        ({"dtype": {}}, "MetadataDeserialization"),
        ({"dtype": {"U8": None}}, "MetadataDeserialization"),
        ({"dtype": {"Bool": "Native", "QFloat": 1}}, "MetadataDeserialization"),
        ({"dtype": {"Bool": {"U8": 1}}}, "MetadataDeserialization"),
        ({"dtype": {1: "Native"}}, "MetadataDeserialization"),
        ({"dtype": "QFloat"}, "MetadataDeserialization"),
        ({"shape": ...}, "MetadataDeserialization"),
        ({"shape": 8}, "MetadataDeserialization"),
        ({"shape": [8.0]}, "MetadataDeserialization"),
        ({"shape": [True] * 3}, "MetadataDeserialization"),
        ({"shape": [-8, -1]}, "MetadataDeserialization"),
        ({"shape": [1 << 64, 0]}, "MetadataDeserialization"),
        ({"shape": [1] * 65}, "Shape"),
        ({"shape": [1 << 63, 0], "data_offsets": [0, 0]}, "Shape"),
        ({"shape": [1 << 32, 1 << 32], "data_offsets": [0, 0]}, "Shape"),
        ({"shape": [9]}, "TensorSize"),
        ({"shape": []}, "TensorSize"),
        ({"data_offsets": ...}, "MetadataDeserialization"),
        ({"data_offsets": [0]}, "MetadataDeserialization"),
        ({"data_offsets": [0, 8, 8]}, "MetadataDeserialization"),
        ({"data_offsets": {"start": 0}}, "MetadataDeserialization"),
        ({"data_offsets": [0.0, 8]}, "MetadataDeserialization"),
        ({"data_offsets": [0, True]}, "MetadataDeserialization"),
        ({"data_offsets": [-8, 0]}, "MetadataDeserialization"),
        ({"data_offsets": [8, 0]}, "DataOffsets"),
        ({"data_offsets": [57, 65]}, "Truncated"),
        ({"data_offsets": [1 << 63, (1 << 63) + 8]}, "Truncated"),
        ({"shape": [0], "data_offsets": [65, 65]}, "Truncated"),
        ({"param_id": -1}, "MetadataDeserialization"),
        ({"param_id": 1.0}, "MetadataDeserialization"),
        ({"param_id": True}, "MetadataDeserialization"),
        ({"param_id": 1 << 64}, "MetadataDeserialization"),
        ({"x" * 4097: 1}, "MetadataDeserialization"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_malformed_descriptors(changes: dict[str, Any], rule: str) -> None:
    error = error_of(described(descriptor(changes)))
    assert error.rule == rule
    assert error.tensor == "w"


@pytest.mark.parametrize("entry", [None, [], "U8", 1])
def test_descriptors_are_maps(entry: Any) -> None:
    assert error_of(described(entry)).tensor == "w"


def test_a_field_given_twice() -> None:
    entry = {**descriptor(), b"dtype": "U8"}
    assert "'dtype' twice" in str(error_of(described(entry)))
    once = cbor({"shape": [8], "data_offsets": [0, 8]})[2:]
    twice = hexed("a4" + 2 * (cbor("dtype") + cbor("U8")) + once)
    assert error_of(twice).rule == "MetadataDeserialization"


@pytest.mark.parametrize(
    "root",
    [
        [],
        {},
        {"tensors": None},
        {"tensors": []},
        {"tensors": {1: {}}},
        {"tensors": {b"w": {}}},
        {"tensors": {}, 1: 2},
        {"tensors": {}, "metadata": None},
        {"tensors": {}, "metadata": {"k": 1}},
        {"tensors": {}, "metadata": {"k": b"v"}},
        {"tensors": {}, "metadata": {1: "v"}},
        {"tensors": {}, "scalars": None},
        {"tensors": {}, "scalars": {"k": 1}},
        {"tensors": {}, "scalars": {"k": {"Int": 1.0}}},
        {"tensors": {}, "scalars": {"k": {"Int": True}}},
        {"tensors": {}, "scalars": {"k": {"Int": 1 << 63}}},
        {"tensors": {}, "scalars": {"k": {"UInt": -1}}},
        {"tensors": {}, "scalars": {"k": {"Float": 1}}},
        {"tensors": {}, "scalars": {"k": {"Bool": 1}}},
        {"tensors": {}, "scalars": {"k": {"Bool": True, "Int": 1}}},
        {"tensors": {}, "scalars": {"k": "Int"}},
    ],
    ids=str,
)
def test_malformed_metadata(root: Any) -> None:
    error = error_of(container(cbor2.dumps(root)))
    assert (error.rule, error.offset) == ("MetadataDeserialization", 10)


@pytest.mark.parametrize(
    ("first", "second", "overlap"),
    [
        ([0, 8], [8, 16], False),
        ([8, 16], [0, 8], False),
        ([0, 8], [7, 15], True),
        ([0, 16], [4, 8], True),
        ([0, 8], [0, 8], True),
        ([0, 8], [4, 4], False),
    ],
)
def test_overlaps(first: list[int], second: list[int], overlap: bool) -> None:
    entries = {
        name: descriptor({"data_offsets": offsets, "shape": [offsets[1] - offsets[0]]})
        for name, offsets in {"a": first, "b": second}.items()
    }
    data = container(cbor2.dumps({"tensors": entries}), bytes(64))
    if overlap:
        assert error_of(data).rule == "Overlap"
    else:
        assert read(data).tensors.keys() == {"a", "b"}


# Types


@pytest.mark.parametrize(
    ("dtype", "name", "nbytes", "burn_dtype"),
    [
        ("F64", "float64", 8, None),
        ("F32", "float32", 4, None),
        ("Flex32", "float32", 4, "Flex32"),
        ("F16", "float16", 2, None),
        ("BF16", "bfloat16", 2, None),
        ("I64", "int64", 8, None),
        ("I32", "int32", 4, None),
        ("I16", "int16", 2, None),
        ("I8", "int8", 1, None),
        ("U64", "uint64", 8, None),
        ("U32", "uint32", 4, None),
        ("U16", "uint16", 2, None),
        ("U8", "uint8", 1, None),
        ("Bool", "bool", 1, None),
        ({"Bool": "Native"}, "bool", 1, None),
        ({"Bool": "U8"}, "bool", 1, '{"Bool": "U8"}'),
        ({"Bool": "U32"}, "bool32", 4, '{"Bool": "U32"}'),
    ],
    ids=str,
)
def test_element_types(dtype: Any, name: str, nbytes: int, burn_dtype: str | None) -> None:
    tensor = read(burnpack({"w": raw(dtype, (2, 3), bytes(6 * nbytes))})).tensors["w"]
    assert (tensor.dtype, tensor.parts["data"].dtype) == (name, name)
    assert tensor.attrs.get("burn_dtype") == burn_dtype


@pytest.mark.parametrize("dtype", ["F8", {"Bool": "U16"}, {"Complex": {"F32": 2}}], ids=str)
def test_unknown_types_leave_the_rest_readable(dtype: Any) -> None:
    index = read(burnpack({"u": raw(dtype, (2, 3), bytes(5)), "w": dense(ONE)}))
    problem = index.tensors["u"].problem
    assert isinstance(problem, UnsupportedError)
    assert "unknown" in str(problem)
    assert "drop_variables=['u']" in str(problem)
    assert (problem.tensor, problem.offset, problem.__traceback__) == ("u", 256, None)
    assert index.tensors["u"].shape == (2, 3)
    assert index.tensors["w"].problem is None


# Scalars


@pytest.mark.parametrize(
    ("scalar", "dtype", "stored"),
    [
        ({"Int": -(1 << 63)}, "int64", struct.pack("<q", -(1 << 63))),
        ({"Int": cbor2.CBORTag(3, b"\x01")}, "int64", struct.pack("<q", -2)),
        ({"UInt": (1 << 64) - 1}, "uint64", b"\xff" * 8),
        ({"Float": 1e-3}, "float64", struct.pack("<d", 1e-3)),
        ({"Float": 0.5}, "float64", struct.pack("<d", 0.5)),
        ({"Bool": True}, "bool", b"\1"),
        ({b"Bool": False}, "bool", b"\0"),
    ],
    ids=str,
)
def test_scalars(scalar: dict[Any, Any], dtype: str, stored: bytes) -> None:
    metadata = cbor2.dumps({"tensors": {}, "scalars": {"lr": scalar}})
    (tensor,) = read(container(metadata)).tensors.values()
    part = tensor.parts["data"]
    assert (tensor.name, tensor.dtype, tensor.shape) == ("lr", dtype, ())
    assert (part.inline, part.nbytes) == (stored, len(stored))
    assert tensor.attrs == {"scalar": str(read_key(scalar))}


def read_key(scalar: dict[Any, Any]) -> str:
    (key,) = scalar
    return key.decode() if isinstance(key, bytes) else key


def test_scalars_do_not_replace_tensors() -> None:
    tensors = {"step": dense(ONE), "step:scalar": dense(ONE)}
    data = burnpack(tensors, scalars={"step": {"UInt": 1}, "step:scalar::": {"UInt": 2}})
    index = read(data)
    assert list(index.tensors) == ["step", "step:scalar", "step:scalar:", "step:scalar::"]
    assert index.tensors["step"].shape == (3,)
    assert all(tensor.name == name for name, tensor in index.tensors.items())


def test_scalars_of_unknown_kinds() -> None:
    (tensor,) = read(burnpack({}, scalars={"k": {"Str": "x"}})).tensors.values()
    assert isinstance(tensor.problem, UnsupportedError)
    assert tensor.shape == ()


# Names


@given(st.dictionaries(st.text(max_size=8), st.integers(0, 3), max_size=6))
def test_any_names(tensors: dict[str, int]) -> None:
    data = burnpack({name: dense(np.full(n, 7, np.uint8)) for name, n in tensors.items()})
    index = read(data)
    assert list(index.tensors) == sorted(tensors, key=str.encode)
    assert {name: tensor.shape[0] for name, tensor in index.tensors.items()} == tensors


def test_many_attributes() -> None:
    attrs = {"": "", "nul\0": "\0", "uni\u0301": "\N{GREEK SMALL LETTER ALPHA}", "x": "y" * 5000}
    assert read(burnpack({}, metadata=attrs)).attrs == attrs
    assert json.loads(json.dumps(attrs)) == attrs


def test_an_unreadable_tensor_may_have_any_shape() -> None:
    # No bytes bound it; the number of chunks must not follow it.
    data = burnpack({"w": {"dtype": "F128", "shape": [1 << 59], "data": bytes(16)}})
    ds = xr.open_dataset(data, engine="burnpack")
    assert ds["w"].shape == (1 << 59,)
    assert ds["w"].data.npartitions == 1


def test_large_numbers_in_messages_are_shortened() -> None:
    number = cbor2.CBORTag(2, b"\xff" * 100_000)
    entry = {"dtype": "U8", "shape": [number], "data_offsets": [0, 8]}
    error = error_of(container(cbor2.dumps({"tensors": {"w": entry}}), bytes(8)))
    assert len(str(error)) < 300


class TestBytesAfterTheLastTensor:
    """They change no value silently: the size alone does not identify the layout."""

    MORE = (b"\0", bytes(4096), b"garbage!" * 32)

    @pytest.mark.parametrize("more", MORE, ids=["a zero", "zeros", "garbage"])
    @pytest.mark.parametrize("legacy", [True, False])
    def test_starts_identify_the_layout(self, legacy: bool, more: bytes) -> None:
        data = burnpack({"a": dense(ONE), "b": dense(ONE)}, legacy=legacy)
        expected, index = read(data), read(data + more)
        assert (index.version, index.tensors) == (expected.version, expected.tensors)

    @pytest.mark.parametrize("more", [bytes(4096), b"garbage!" * 64], ids=["zeros", "garbage"])
    @pytest.mark.parametrize("first", [0.0, 1.0])
    @pytest.mark.parametrize("legacy", [True, False])
    def test_one_tensor_is_read_right_or_refused(
        self, legacy: bool, first: float, more: bytes
    ) -> None:
        array = np.full(256, first, "f4")
        array[64:] = 2
        data = burnpack({"a": dense(array)}, legacy=legacy)
        expected = read(data)
        try:
            index = read(data + more)
        except FormatError as error:
            assert error.rule == "Layout"  # noqa: PT017
            assert "layout='legacy'" in str(error.hint)  # noqa: PT017
            assert not (legacy and first)  # numbers where padding would be
        else:
            assert index.tensors == expected.tensors
        layout = "legacy" if legacy else "aligned"
        assert read(data + more, layout=layout).tensors == expected.tensors
