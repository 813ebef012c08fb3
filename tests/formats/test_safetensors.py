"""The index of safetensors files; the package of that name is the oracle."""

from __future__ import annotations

import json
import struct
import time
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from tests.contracts.declared import assert_told
from tests.formats.safetensors_files import entry, safetensors_file
from tests.sources import CountingSource
from xckpt import formats
from xckpt.errors import CheckpointError, FormatError, UnsupportedError

detect, read = formats.get("safetensors").detect, formats.get("safetensors").read
SPELLED = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
SUB_BYTE = {"F4": "float4_e2m1fn", "F6_E2M3": "F6_E2M3", "F6_E3M2": "F6_E3M2"}
NUMPY = {name: np.dtype(getattr(ml_dtypes, dtype, dtype)) for name, dtype in SPELLED.items()}
BITS = {name: 8 * dtype.itemsize for name, dtype in NUMPY.items()}
BITS |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}

Content = dict[str, tuple[str, list[int], bytes]]

# --- beside the package ---------------------------------------------------------------------------


def by_package(data: bytes) -> Content | None:
    """Give what the package reads, None where it refuses."""
    try:
        tensors = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError:
        return None
    return {name: (t["dtype"], t["shape"], bytes(t["data"])) for name, t in tensors}


def by_us(data: bytes) -> Content | CheckpointError:
    """Give what we read in the same form, or the error of the file or of a tensor."""
    try:
        index = read(CountingSource(data))
    except CheckpointError as error:
        assert_told(error, len(data), offset=True)
        return error
    problems = [tensor.problem for tensor in index.tensors.values()]
    for problem in problems:
        if isinstance(problem, FormatError):
            assert_told(problem, len(data), offset=True)
            return problem
    spelled = {ours: theirs for theirs, ours in {**SPELLED, **SUB_BYTE}.items()}
    content = {}
    for name, tensor in index.tensors.items():
        part = tensor.parts["data"]
        stored = data[part.offset : part.offset + part.nbytes]
        assert len(stored) == part.nbytes
        content[name] = (spelled[tensor.dtype], list(tensor.shape), stored)
    return content


def is_lax(data: bytes, content: Content) -> bool:
    """Return whether the package accepted a file that the specification or numpy forbids."""
    header = data[8 : 8 + int.from_bytes(data[:8], "little")].decode()
    if not header.startswith("{") or has_duplicate_keys(header):
        return True
    entries = json.loads(header)
    entries.pop("__metadata__", None)
    as_written = all(
        type(entry) is dict and type(entry["dtype"]) is str for entry in entries.values()
    )
    representable = all(
        len(shape) <= 64
        and max(shape, default=0) < 2**63
        and prod(filter(None, shape)) * max(BITS[dtype], 32) < 2**66
        for dtype, shape, _ in content.values()
    )
    return not (as_written and representable)


def has_duplicate_keys(header: str) -> bool:
    repeated = []

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        repeated.append(len(pairs) > len(dict(pairs)))
        return dict(pairs)

    json.loads(header, object_pairs_hook=members)
    return any(repeated)


def assert_agreement(data: bytes) -> Content | CheckpointError:
    """Check that we refuse what the package refuses, and read what it reads."""
    theirs, ours = by_package(data), by_us(data)
    if theirs is None:
        assert isinstance(ours, CheckpointError)
    elif isinstance(ours, CheckpointError):
        assert is_lax(data, theirs), ours
    else:
        assert ours == theirs
    return ours


TEXTS = st.text(st.characters(codec="utf-8"), max_size=6)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Draw an array of any type that numpy and ml_dtypes have, with any bits."""
    dtype = NUMPY[draw(st.sampled_from(sorted(NUMPY)))]
    shape = draw(nps.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    nbytes = prod(shape) * dtype.itemsize
    return np.frombuffer(draw(st.binary(min_size=nbytes, max_size=nbytes)), dtype).reshape(shape)


@given(
    st.dictionaries(TEXTS.filter(lambda name: name != "__metadata__"), arrays(), max_size=5),
    # Of neither tensors nor texts the package makes a header that it refuses itself.
    st.none() | st.dictionaries(TEXTS, TEXTS, min_size=1, max_size=3),
)
def test_files_of_the_package_are_read(
    written: dict[str, np.ndarray], metadata: dict[str, str] | None
) -> None:
    data = safetensors.numpy.save(written, metadata)
    index = read(CountingSource(data))
    assert index.attrs == (metadata or {})
    assert index.tensors.keys() == written.keys()
    for name, array in written.items():
        tensor = index.tensors[name]
        assert (tensor.name, tensor.dtype, tensor.shape) == (name, array.dtype.name, array.shape)
    assert assert_agreement(data) == by_package(data)


SMALL = safetensors.numpy.save(
    {"w": np.arange(6, dtype="<f4").reshape(2, 3), "b": np.arange(10, dtype="<i2")}, {"k": "v"}
)
HEADER_END = 8 + int.from_bytes(SMALL[:8], "little")
TELLING = b'\0\t "{}[]:,\\-+.0123456789aeEuU_\x7f\x80\xc3\xff'


def test_every_byte_of_the_header_changed() -> None:
    refused = 0
    for at in range(HEADER_END):
        for byte in {*TELLING, *(SMALL[at] ^ 1 << bit for bit in range(8))} - {SMALL[at]}:
            changed = SMALL[:at] + bytes([byte]) + SMALL[at + 1 :]
            refused += isinstance(assert_agreement(changed), CheckpointError)
    assert refused > 3000


def test_every_byte_of_the_header_left_out_and_doubled() -> None:
    header = SMALL[8:HEADER_END]
    for at in range(len(header)):
        for changed in (header[:at] + header[at + 1 :], header[: at + 1] + header[at:]):
            assert_agreement(safetensors_file(changed, SMALL[HEADER_END:]))
            assert_agreement(SMALL[:8] + changed + SMALL[HEADER_END:])


PIECES = st.sampled_from(
    [
        *['{"w":', '"dtype":', '"shape":', '"data_offsets":', '"__metadata__":', '"w"', '"x":'],
        *['"F32"', '"F4"', '"F6_E2M3"', '"BF16"', '"k":"v"', "[0,4]", "[]", "[2,2]", "[1]", "null"],
        *["{", "}", "[", "]", ",", ":", '"', "\\", " ", "\n", "0", "1", "4", "-0", "1.0", "1e999"],
        *["NaN", "-", "true", '"\\ud800"', '"\\ud83d\\ude00"', "18446744073709551616", "9" * 310],
    ]
)


@given(st.data())
def test_headers_patched_together(data: st.DataObject) -> None:
    header = SMALL[8:HEADER_END].decode()
    for piece in data.draw(st.lists(PIECES, max_size=4)):
        start = data.draw(st.integers(0, len(header)))
        stop = data.draw(st.integers(start, min(start + 8, len(header))))
        header = header[:start] + piece + header[stop:]
    assert_agreement(safetensors_file(header, SMALL[HEADER_END:]))


SIZES = st.integers(0, 5) | st.sampled_from([2**31, 2**62, 2**63, 2**64 - 1, 2**64, -1, 0.5, None])
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*SPELLED, *SUB_BYTE, "F31", "", None]),
        "shape": st.lists(SIZES, max_size=4),
        "data_offsets": st.lists(SIZES, min_size=2, max_size=3),
    },
    optional={"x": st.none() | st.lists(st.none(), max_size=2)},
)


@given(
    st.dictionaries(st.sampled_from(["a", "b", "c", "__metadata__"]), ENTRIES, max_size=3),
    st.binary(max_size=16),
)
def test_headers_with_any_entries(header: dict[str, Any], data: bytes) -> None:
    assert_agreement(safetensors_file(header, data))


@given(st.lists(st.tuples(st.sampled_from([*SPELLED, *SUB_BYTE]), st.integers(0, 9)), max_size=5))
def test_tensors_of_any_size_one_after_another(tensors: list[tuple[str, int]]) -> None:
    end, header = 0, {}
    for at, (dtype, count) in enumerate(tensors):
        begin, end = end, end + BITS[dtype] * count // 8
        header[f"t{at}"] = entry(dtype, [count], begin, end)
    assert_agreement(safetensors_file(header, bytes(end)))


# --- one by one -----------------------------------------------------------------------------------

ONE = '{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]%s}}'


def one(**changed: Any) -> dict[str, Any]:
    """Describe a file with one tensor of four bytes, some fields of it changed."""
    return {"w": {**entry("F32", [1], 0, 4), **changed}}


HEADER = "InvalidHeaderDeserialization"
REFUSED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "HeaderTooSmall"),
    "half a length": (bytes(7), "HeaderTooSmall"),
    "no header": (bytes(8), "InvalidHeaderStart"),
    "header too long by one": (safetensors_file("{}", length=3), "InvalidHeaderLength"),
    "header over the cap": (safetensors_file("{}", length=100_000_001), "HeaderTooLarge"),
    "header at the cap": (safetensors_file("{}", length=100_000_000), "InvalidHeaderLength"),
    "header of 2**63 bytes": (safetensors_file("{}", length=2**63), "HeaderTooLarge"),
    "header of 2**64 - 1 bytes": (safetensors_file("{}", length=2**64 - 1), "HeaderTooLarge"),
    "an array": (safetensors_file("[]"), "InvalidHeaderStart"),
    "byte order mark": (safetensors_file(b"\xef\xbb\xbf{}"), "InvalidHeaderStart"),
    "UTF-16": (safetensors_file("{}".encode("utf-16-le")), HEADER),
    "not UTF-8": (safetensors_file(b'{"\xff":{}}'), HEADER),
    "surrogate in UTF-8": (safetensors_file(b'{"\xed\xa0\x80":{}}'), HEADER),
    "lone surrogate": (safetensors_file(ONE.replace("w", "\\ud800") % "", bytes(4)), HEADER),
    "lone surrogate ignored": (safetensors_file(ONE % ',"x":"\\uDC00"', bytes(4)), HEADER),
    "control character": (safetensors_file('{"\x01":{}}'), HEADER),
    "something after": (safetensors_file("{}{}"), HEADER),
    "zeros after": (safetensors_file("{}\0\0"), HEADER),
    "cut": (safetensors_file('{"w":'), HEADER),
    "not a number": (safetensors_file(ONE % ',"x":NaN', bytes(4)), HEADER),
    "infinity": (safetensors_file(ONE % ',"x":[-Infinity]', bytes(4)), HEADER),
    "float too large": (safetensors_file(ONE % ',"x":1e999', bytes(4)), HEADER),
    "integer too large": (safetensors_file(ONE % (',"x":' + "9" * 309), bytes(4)), HEADER),
    "5,000 digits": (safetensors_file(ONE % (',"x":' + "9" * 5000), bytes(4)), HEADER),
    "leading zero": (safetensors_file(ONE.replace("[1]", "[01]") % "", bytes(4)), HEADER),
    "128 levels": (safetensors_file(ONE % f',"x":{"[" * 126}{"]" * 126}', bytes(4)), HEADER),
    "100,000 levels": (safetensors_file(ONE % f',"x":{"[" * 10**5}', bytes(4)), HEADER),
    "100,000 open objects": (safetensors_file('{"x":' * 10**5), HEADER),
    "duplicate field": (safetensors_file(ONE % ',"shape":[1]', bytes(4)), HEADER),
    "duplicate metadata": (safetensors_file('{"__metadata__":{},"__metadata__":{}}'), HEADER),
    "metadata: number": (safetensors_file({"__metadata__": {"a": 1}}), HEADER),
    "metadata: null": (safetensors_file({"__metadata__": {"a": None}}), HEADER),
    "metadata: array": (safetensors_file({"__metadata__": []}), HEADER),
    "metadata: a tensor": (safetensors_file({"__metadata__": one()["w"]}, bytes(4)), HEADER),
    "tensor: null": (safetensors_file({"w": None}), HEADER),
    "tensor: without fields": (safetensors_file({"w": {}}), HEADER),
    "dtype: null": (safetensors_file(one(dtype=None), bytes(4)), HEADER),
    "dtype: unknown": (safetensors_file(one(dtype="F31"), bytes(4)), "Dtype"),
    "dtype: of numpy": (safetensors_file(one(dtype="float32"), bytes(4)), "Dtype"),
    "shape: number": (safetensors_file(one(shape=1), bytes(4)), HEADER),
    "shape: boolean": (safetensors_file(one(shape=[True]), bytes(4)), HEADER),
    "shape: float": (safetensors_file(one(shape=[1.0]), bytes(4)), HEADER),
    "shape: negative": (safetensors_file(one(shape=[-1]), bytes(4)), HEADER),
    "shape: minus zero": (safetensors_file(ONE.replace("[1]", "[-0]") % ""), HEADER),
    "shape: 2**64": (safetensors_file(one(shape=[2**64])), HEADER),
    "shape: 300 digits": (safetensors_file(one(shape=[10**300])), HEADER),
    "shape: overflow": (safetensors_file(one(shape=[2**33, 2**33])), "TensorInvalidInfo"),
    "shape: overflow to 4 bytes": (
        safetensors_file(one(shape=[2**62 + 1], dtype="F32"), bytes(4)),
        "TensorInvalidInfo",
    ),
    "shape: overflow times 0": (
        safetensors_file(one(shape=[2**62, 2**62, 0], data_offsets=[0, 0])),
        "ValidationOverflow",
    ),
    "offsets: one": (safetensors_file(one(data_offsets=[0]), bytes(4)), "InvalidOffset"),
    "offsets: three": (safetensors_file(one(data_offsets=[0, 4, 4]), bytes(4)), HEADER),
    "offsets: reversed": (safetensors_file(one(data_offsets=[4, 0]), bytes(4)), "InvalidOffset"),
    "offsets: negative": (safetensors_file(one(data_offsets=[-4, 0]), bytes(4)), HEADER),
    "offsets: 2**64": (safetensors_file(one(data_offsets=[2**64, 2**64 + 4]), bytes(4)), HEADER),
    "offsets: beyond the file": (
        safetensors_file(one(shape=[2], data_offsets=[0, 8]), bytes(4)),
        "MetadataIncompleteBuffer",
    ),
    "offsets: a petabyte": (
        safetensors_file(one(shape=[2**48], data_offsets=[0, 2**50]), bytes(4)),
        "MetadataIncompleteBuffer",
    ),
    "size too small": (safetensors_file(one(shape=[2]), bytes(4)), "TensorInvalidInfo"),
    "size too large": (safetensors_file(one(shape=[]), bytes(8)), "MetadataIncompleteBuffer"),
    "half a byte": (safetensors_file(one(dtype="F4", shape=[7]), bytes(4)), "MisalignedSlice"),
    "rounded up": (
        safetensors_file(one(dtype="F6_E2M3", shape=[5]), bytes(4)),
        "MisalignedSlice",
    ),
    "gap before": (safetensors_file(one(data_offsets=[4, 8]), bytes(8)), "InvalidOffset"),
    "gap between": (
        safetensors_file({**one(), "x": entry("U8", [1], 5, 6)}, bytes(6)),
        "InvalidOffset",
    ),
    "bytes after": (safetensors_file(one(), bytes(5)), "MetadataIncompleteBuffer"),
    "overlap": (
        safetensors_file({**one(), "x": entry("U8", [4], 3, 7)}, bytes(7)),
        "InvalidOffset",
    ),
    "a thousand tensors in one place": (
        safetensors_file({f"w{i}": entry("F32", [256], 0, 1024) for i in range(1000)}, bytes(1024)),
        "InvalidOffset",
    ),
    "empty tensor inside another": (
        safetensors_file({**one(), "x": entry("U8", [0], 2, 2)}, bytes(4)),
        "InvalidOffset",
    ),
}


@pytest.mark.parametrize("nbytes", [4, -1])
def test_a_truncated_file_is_reported_as_truncated(nbytes: int) -> None:
    data = safetensors_file(one(), bytes(4))
    error = by_us(data[: nbytes if nbytes < 0 else 8 + nbytes])
    assert isinstance(error, CheckpointError)
    assert str(error.hint).startswith("The file may be truncated")
    error = by_us(data + b"more")
    assert isinstance(error, CheckpointError)
    assert f"cut the file to {len(data)} bytes" in str(error.hint)


@pytest.mark.parametrize("case", REFUSED)
def test_files_refused_by_both(case: str) -> None:
    data, rule = REFUSED[case]
    start = time.process_time()
    error = by_us(data)
    assert time.process_time() - start < 1
    assert isinstance(error, CheckpointError)
    assert error.rule == rule
    assert by_package(data) is None


EMPTY = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
LAX: dict[str, bytes] = {
    "leading blank": safetensors_file(" {}"),
    "duplicate tensor": safetensors_file(
        ONE[:-1] % "" + "," + ONE[1:].replace("F32", "U32") % "", bytes(4)
    ),
    "duplicate key of metadata": safetensors_file('{"__metadata__":{"a":"b","a":"c"}}'),
    "duplicate ignored field": safetensors_file(ONE % ',"x":1,"x":1', bytes(4)),
    "tensor as array": safetensors_file({"w": ["F32", [1], [0, 4]]}, bytes(4)),
    "dtype as object": safetensors_file(one(dtype={"F32": None}), bytes(4)),
    "too large when decoded": safetensors_file(
        {"w": entry("F8_E4M3", [0, 2**61], 0, 0)},
    ),
    "axis of 2**63": safetensors_file(one(shape=[2**63, 0], data_offsets=[0, 0])),
    "65 axes": safetensors_file(one(shape=[1] * 65), bytes(4)),
    "100,000 large axes": safetensors_file(one(shape=[0, *[2**62] * 100_000], data_offsets=[0, 0])),
    "one duplicate among 20,000 tensors": safetensors_file(
        "{" + ",".join(f'"t{i}":{EMPTY}' for i in [*range(20_000), 19_999]) + "}"
    ),
}


@pytest.mark.parametrize("case", LAX)
def test_files_refused_by_xckpt_only(case: str) -> None:
    start = time.process_time()
    error = by_us(LAX[case])
    assert time.process_time() - start < 2
    assert isinstance(error, FormatError)
    assert by_package(LAX[case]) is not None


READ: dict[str, bytes] = {
    "no tensors": safetensors_file("{}"),
    "padding": safetensors_file("{}      "),
    "other blanks after": safetensors_file("{ \n}\r\n\t"),
    "scalar": safetensors_file(one(shape=[]), bytes(4)),
    "empty name": safetensors_file({"": one()["w"]}, bytes(4)),
    "NUL in the name": safetensors_file({"\0": one()["w"]}, bytes(4)),
    "surrogate pair": safetensors_file(ONE.replace("w", "\\ud83d\\ude00") % "", bytes(4)),
    "metadata null": safetensors_file({"__metadata__": None}),
    "ignored fields": safetensors_file(one(x={"y": [1.5, None, True]}, z=-1), bytes(4)),
    "large ignored number": safetensors_file(ONE % (',"x":' + "9" * 308), bytes(4)),
    "127 levels": safetensors_file(ONE % f',"x":{"[" * 125}{"]" * 125}', bytes(4)),
    "another order": safetensors_file(
        {"a": entry("U8", [2], 4, 6), "b": entry("F32", [1], 0, 4)}, bytes(6)
    ),
    "empty tensors": safetensors_file(
        {
            "a": entry("U8", [2], 0, 2),
            "b": entry("U8", [0, 2**60], 2, 2),
            "c": entry("F4", [0], 0, 0),
            "d": entry("U8", [1], 2, 3),
        },
        bytes(3),
    ),
    "not aligned": safetensors_file(
        {"a": entry("U8", [1], 0, 1), "b": entry("F64", [1], 1, 9)}, bytes(9)
    ),
}


@pytest.mark.parametrize("case", READ)
def test_odd_files_read_by_both(case: str) -> None:
    assert by_us(READ[case]) == by_package(READ[case])


def test_the_index_of_a_file() -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "b": entry("F32", [2], 8, 16),
        "a.w": entry("BF16", [2, 2], 0, 8),
    }
    index = read(CountingSource(safetensors_file(header, bytes(16)), "m.safetensors"))
    start = 8 + len(json.dumps(header))
    assert (index.format, index.source, index.nbytes) == (
        "safetensors",
        "m.safetensors",
        start + 16,
    )
    assert index.attrs == {"format": "pt"}
    assert list(index.tensors) == ["a.w", "b"]
    part = index.tensors["a.w"].parts["data"]
    assert (part.dtype, part.shape, part.offset, part.nbytes) == ("bfloat16", (2, 2), start, 8)


def test_only_the_header_is_read() -> None:
    source = CountingSource(safetensors_file(one(), bytes(4)))
    read(source)
    assert source.nbytes_read == source.size - 4


@pytest.mark.parametrize("length", [1000, 10**8, 10**8 + 1, 2**64 - 1])
def test_a_claimed_header_length_is_bounded(length: int) -> None:
    source = CountingSource(safetensors_file("{}", length=length))
    with pytest.raises(FormatError):
        read(source)
    assert source.reads == [(0, 8)]


def test_elements_of_6_bits_are_listed() -> None:
    header = {"w": entry("F6_E3M2", [8], 0, 6), "x": entry("U8", [1], 6, 7)}
    index = read(CountingSource(safetensors_file(header, bytes(7))))
    tensor = index.tensors["w"]
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == ("F6_E3M2", (8,), 6)
    assert isinstance(tensor.problem, UnsupportedError)
    assert index.tensors["x"].problem is None


def test_errors_name_the_tensor() -> None:
    data = safetensors_file({**one(), "x\u202e": entry("U8", [2], 4, 5)}, bytes(5))
    with pytest.raises(FormatError, match=r"tensor 'x\\u202e': byte 8: 1 bytes of data, but U8"):
        read(CountingSource(data))


# --- detection ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in READ if case != "no tensors"])
def test_detection(case: str) -> None:
    source = CountingSource(READ[case])
    assert detect(READ[case][:512], len(READ[case]), "m.bin")
    assert formats.detect(source).name == "safetensors"


def test_a_truncated_file_is_detected() -> None:
    """The error then names the reason."""
    assert detect(SMALL[:20], 20, "m.safetensors")


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"{}",
        bytes(8),
        bytes(512),
        b"ZTEN1000" + bytes(56),
        b"\x89HDF\r\n\x1a\n" + bytes(56),
        struct.pack("<Q", 100_000_001) + b'{"',
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 9) + b"{1",
    ],
)
def test_other_files(head: bytes) -> None:
    assert not detect(head, 1 << 20, "m.safetensors")
