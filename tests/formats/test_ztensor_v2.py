"""zTensor 2: the rules of its container, its manifest, and its layouts."""

from __future__ import annotations

import struct
from typing import Any

import cbor2
import pytest
import xxhash

from tests.contracts.declared import outcome
from tests.contracts.ztensor import DECLARED
from tests.formats.ztensor_files import (
    V2_MAGIC,
    dense_v2,
    error_of,
    read,
    stored,
    v2_container,
    v2_data_shard,
    v2_file,
)
from xckpt import formats
from xckpt.errors import FormatError, UnsupportedError

ztensor = formats.get("ztensor")

DIGEST = "xxh3:0123456789abcdef"


def entry(**changes: Any) -> dict[str, Any]:
    """A dense tensor with a range that is valid in `placed`, changed as given."""
    part = {"dtype": "u8", "blob": [4096, 8], **changes.pop("part", {})}
    part = {key: value for key, value in part.items() if value is not ...}
    fields = {"shape": [8], "layout": "dense", "parts": {"data": part}, **changes}
    return {key: value for key, value in fields.items() if value is not ...}


def placed(objects: dict[Any, Any], **root: Any) -> bytes:
    """Write a file with 4096 bytes of data at 4096, its ranges as the objects have them."""
    manifest = cbor2.dumps({"objects": objects, **root}, canonical=True)
    return v2_container(manifest, V2_MAGIC + bytes(8184))


def footer(data: bytes, **changes: int) -> bytes:
    """Change fields of the footer."""
    names = ("offset", "length", "digest", "version", "reserved")
    fields = dict(zip(names, struct.unpack("<QQQII", data[-40:-8]), strict=True))
    return data[:-40] + struct.pack("<QQQII", *{**fields, **changes}.values()) + data[-8:]


# Container


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"version": 3}, "Version"),
        ({"version": 0}, "Version"),
        ({"digest": 1}, "ManifestHash"),
        ({"offset": 0}, "BlobAlignment"),
        ({"offset": 8191}, "BlobAlignment"),
        ({"offset": 1 << 40}, "ManifestBounds"),
        ({"offset": (1 << 64) - 4096}, "ManifestBounds"),
        ({"length": 1 << 20}, "ManifestBounds"),
        ({"length": (1 << 30) + 1}, "ManifestTooLarge"),
        ({"length": (1 << 64) - 1}, "ManifestTooLarge"),
        ({"length": 0}, "ManifestBounds"),
        ({"length": 0, "offset": 0}, "ManifestBounds"),
    ],
)
def test_footers(changes: dict[str, int], rule: str) -> None:
    assert error_of(footer(placed({}), **changes)).rule == rule


def test_the_reserved_word_is_ignored() -> None:
    assert read(footer(placed({"w": entry()}), reserved=7)).tensors["w"].shape == (8,)


def test_a_data_shard_has_no_tensors() -> None:
    index = read(v2_data_shard(bytes(8)))
    assert (index.version, index.tensors, index.attrs, index.shards) == ("2", {}, {}, {})


def test_the_last_generation_counts() -> None:
    first = v2_file({"w": dense_v2(b"\1" * 8, [8], "u8")})
    manifest = cbor2.dumps({"objects": {"v": entry()}}, canonical=True)
    index = read(v2_container(manifest, first))
    assert list(index.tensors) == ["v"]
    assert read(first + bytes(0)).tensors.keys() == {"w"}


def test_bytes_after_the_footer_are_an_error() -> None:
    assert error_of(placed({}) + b"\0").rule == "FooterMagic"


# Manifest


@pytest.mark.parametrize(
    "manifest",
    [
        [],
        5,
        {},
        {"objects": []},
        {"objects": {1: entry()}},
        {"objects": {"w": []}},
        {"objects": {}, "attributes": None},
        {"objects": {}, "attributes": {1: 1}},
        {"objects": {}, "shards": None},
        {"objects": {}, "shards": {1: {}}},
        {"objects": {}, "shards": {"s": None}},
        {"objects": {}, "shards": {"s": {"size": 4096}}},
        {"objects": {}, "shards": {"s": {"digest": DIGEST}}},
        {"objects": {}, "shards": {"s": {"size": 47, "digest": DIGEST}}},
        {"objects": {}, "shards": {"s": {"size": -1, "digest": DIGEST}}},
        {"objects": {}, "shards": {"s": {"size": 4096, "digest": "xxh3:AB"}}},
    ],
)
def test_roots_that_break_the_schema(manifest: Any) -> None:
    assert error_of(v2_container(cbor2.dumps(manifest, canonical=True))).rule == "Schema"


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"shape": ...}, "Schema"),
        ({"shape": [-1]}, "Schema"),
        ({"shape": [True]}, "Schema"),
        ({"shape": [1] * 65}, "Shape"),
        ({"shape": [1 << 32, 1 << 32]}, "Shape"),
        ({"layout": ...}, "Schema"),
        ({"layout": 5}, "Schema"),
        ({"parts": ...}, "Schema"),
        ({"parts": {}}, "Schema"),
        ({"parts": []}, "Schema"),
        ({"parts": {"data": 5}}, "Schema"),
        ({"parts": {5: {}}}, "Schema"),
        ({"attributes": None}, "Schema"),
        ({"attributes": {"": 1}}, "Name"),
        ({"attributes": {1: 1}}, "Schema"),
        ({"part": {"dtype": ...}}, "Schema"),
        ({"part": {"dtype": "f4"}}, "Schema"),
        ({"part": {"dtype": "bool"}}, "Schema"),
        ({"part": {"type": None}}, "Schema"),
        ({"part": {"type": "complex64"}}, "Schema"),
        ({"part": {"blob": ...}}, "Schema"),
        ({"part": {"blob": [4096]}}, "Schema"),
        ({"part": {"blob": [4096, 8, 0]}}, "Schema"),
        ({"part": {"blob": [4096.5, 8]}}, "Schema"),
        ({"part": {"blob": [4096, True]}}, "Schema"),
        ({"part": {"blob": [-4096, 8]}}, "Schema"),
        ({"part": {"blob": [0, 8]}}, "BlobAlignment"),
        ({"part": {"blob": [4100, 8]}}, "BlobAlignment"),
        ({"part": {"blob": [4100, 0]}}, "BlobAlignment"),
        ({"part": {"blob": [4096, 1 << 40]}}, "BlobBounds"),
        ({"part": {"blob": [4096, (1 << 64) - 1]}}, "BlobBounds"),
        ({"part": {"blob": [(1 << 64) - 4096, 4096]}}, "BlobBounds"),
        ({"part": {"shard": "s"}}, "ShardRef"),
        ({"part": {"shard": None}}, "Schema"),
        ({"part": {"shard": "../s"}}, "ShardName"),
        ({"part": {"encoding": "zt.zstd-seekable/1"}}, "Schema"),
        ({"part": {"decoded_length": 8}}, "Schema"),
        ({"part": {"encoding": None, "decoded_length": 8}}, "Schema"),
        ({"part": {"encoding": "zt.zstd-seekable/1", "decoded_length": None}}, "Schema"),
        ({"part": {"encoding": "zt.zstd-seekable/1", "decoded_length": 9}}, "DenseSize"),
        ({"part": {"digest": None}}, "Schema"),
        ({"part": {"digest": "xxh3"}}, "Schema"),
        ({"part": {"digest": "xxh3:"}}, "Schema"),
        ({"part": {"digest": "xxh3:0g"}}, "Schema"),
        ({"part": {"digest": "XXH3:00"}}, "Schema"),
        ({"part": {"digest": "xxh3:00\n"}}, "Schema"),
        ({"part": {"blob": [4096, 7]}}, "DenseSize"),
        ({"part": {"type": "f4_e2m1"}}, "DenseSize"),
    ],
)
def test_objects_that_break_rules(changes: dict[str, Any], rule: str) -> None:
    error = error_of(placed({"w": entry(**changes)}))
    assert (error.rule, error.tensor) == (rule, "w")


def test_the_size_of_dense_data_does_not_wrap() -> None:
    # ztensor 2.1.2 opens and even verifies this: (2**62 + 1) * 4 is 4 in 64 bits.
    changes = {"shape": [(1 << 62) + 1, 1], "part": {"dtype": "f32", "blob": [4096, 4]}}
    assert error_of(placed({"w": entry(**changes)})).rule == "Shape"


@pytest.mark.parametrize("name", ["", "a\0b", "n" * 1025, "ü" * 513])
def test_names(name: str) -> None:
    assert error_of(placed({name: entry()})).rule == "Name"
    assert error_of(placed({"w": entry(parts={name: {}})})).rule == "Name"
    assert error_of(placed({}, attributes={name: 1})).rule == "Name"
    assert error_of(placed({"w": entry(attributes={name: 1})})).rule == "Name"


@pytest.mark.parametrize("name", [" ", "n" * 1024, "ü" * 512, "a/b", "\n"])
def test_odd_but_valid_names(name: str) -> None:
    assert list(read(placed({name: entry()})).tensors) == [name]


def test_unknown_keys_are_ignored() -> None:
    data = placed({"w": entry(part={"hint": 1}, zzz=[None])}, future={"a": 1})
    assert read(data).tensors["w"].parts["data"].nbytes == 8


def test_attributes() -> None:
    attrs = {"n": -1, "b": b"\0", "f": 1.5, "m": {"l": [None, True, {"k": b"\1"}]}}
    index = read(placed({"w": entry(attributes=attrs)}, attributes=attrs, generator="g"))
    assert index.attrs == attrs  # version 2 has no generator
    assert index.tensors["w"].attrs == attrs


# Parts


def test_fields_of_a_part() -> None:
    index = read(v2_file({"w": dense_v2(bytes(24), [2, 3], "f32", digest=DIGEST)}))
    part = index.tensors["w"].parts["data"]
    assert (part.dtype, part.shape, part.nbytes) == ("float32", (2, 3), 24)
    assert (part.digest, part.digest_of, part.encoding) == (DIGEST, "decoded", None)
    assert index.tensors["w"].strict


@pytest.mark.parametrize(
    ("dtype", "logical", "count", "size", "expected"),
    [
        ("u8", "bool", 3, 3, "bool"),
        ("u8", "f8_e4m3fn", 3, 3, "float8_e4m3fn"),
        ("u8", "f8_e8m0", 3, 3, "float8_e8m0fnu"),
        ("u8", "f4_e2m1", 3, 2, "float4_e2m1fn"),
        ("f32", "complex64", 3, 24, "complex64"),
        ("f64", "complex128", 3, 48, "complex128"),
        ("bf16", None, 3, 6, "bfloat16"),
    ],
)
def test_types(dtype: str, logical: str | None, count: int, size: int, expected: str) -> None:
    fields = {} if logical is None else {"type": logical}
    tensor = read(v2_file({"w": dense_v2(bytes(size), [count], dtype, **fields)})).tensors["w"]
    assert (tensor.dtype, tensor.parts["data"].dtype, tensor.attrs) == (expected, expected, {})


def test_an_unknown_digest_algorithm_warns_once() -> None:
    objects = {name: dense_v2(bytes(4), [1], "f32", digest="blake9:ab") for name in "abc"}
    (warning,) = read(v2_file(objects)).warnings
    problem = "with a digest of the unknown algorithm 'blake9', not verified"
    assert warning == f"tensor 'a' at byte 4096 and 2 more: {problem}"


def test_seekable_zstd() -> None:
    fields = {"encoding": "zt.zstd-seekable/1", "decoded_length": 4000}
    tensor = read(v2_file({"w": dense_v2(b"?", [1000], "f32", **fields)})).tensors["w"]
    part = tensor.parts["data"]
    assert (part.encoding, part.nbytes, part.decoded_nbytes) == ("zstd-seekable", 1, 4000)


@pytest.mark.parametrize("encoding", ["acme/1", "zstd", "zstd-seekable", "raw"])
@pytest.mark.parametrize("layout", ["dense", "acme/1"])
def test_unknown_encodings_affect_only_their_tensor(encoding: str, layout: str) -> None:
    part = {"encoding": encoding, "decoded_length": 8}
    index = read(placed({"v": entry(), "w": entry(part=part, layout=layout)}))
    assert isinstance(index.tensors["w"].problem, UnsupportedError)
    assert index.tensors["w"].dtype == "uint8"
    assert index.tensors["v"].problem is None


def test_unknown_types_affect_only_their_tensor() -> None:
    index = read(placed({"v": entry(), "w": entry(shape=[999], part={"type": "f6"})}))
    tensor = index.tensors["w"]
    assert (tensor.dtype, tensor.shape, tensor.layout) == ("f6", (999,), "dense")
    assert isinstance(tensor.problem, UnsupportedError)
    assert (tensor.parts["data"].dtype, tensor.parts["data"].shape) == ("uint8", (8,))
    assert index.tensors["v"].problem is None


def test_unknown_layouts_are_shown_as_their_parts() -> None:
    parts = {
        "a": stored(bytes(12), dtype="f32"),
        "b": stored(bytes(5), dtype="f32"),
        "c": stored(bytes(5), dtype="u8", type="f6"),
        "d": stored(bytes(5), dtype="u8", type="f4_e2m1"),
    }
    entries = {"w": {"shape": [3], "layout": "acme/1", "parts": parts, "attributes": {"k": 1}}}
    tensor = read(v2_file(entries)).tensors["w"]
    assert (tensor.layout, tensor.problem) == ("structural", None)
    assert tensor.attrs == {"k": 1, "ztensor_layout": "acme/1"}
    assert {role: (part.dtype, part.shape) for role, part in tensor.parts.items()} == {
        "a": ("float32", (3,)),
        "b": ("uint8", (5,)),
        "c": ("uint8", (5,)),
        "d": ("uint8", (5,)),
    }


# Ranges


@pytest.mark.parametrize(
    ("first", "second", "overlap"),
    [
        ([4096, 8], [4096, 8], False),
        ([4096, 4096], [8192, 0], False),
        ([4096, 8], [4096, 0], False),
        ([4096, 0], [4096, 8], False),
        ([4096, 8], [4096, 4], True),
        ([4096, 4097], [8192, 8], True),
        ([8192, 8], [4096, 8], False),
    ],
)
def test_ranges_are_identical_or_disjoint(
    first: list[int], second: list[int], overlap: bool
) -> None:
    objects = {
        name: entry(part={"blob": blob}, shape=[blob[1]])
        for name, blob in {"a": first, "b": second}.items()
    }
    manifest = cbor2.dumps({"objects": objects}, canonical=True)
    data = v2_container(manifest, V2_MAGIC + bytes(12288))
    if overlap:
        assert error_of(data).rule == "BlobOverlap"
    else:
        assert len(read(data).tensors) == 2


def test_other_ranges_may_not_overlap_the_manifest() -> None:
    data = placed({"w": entry(part={"blob": [8192, 8]})})
    assert error_of(data).rule == "BlobOverlap"


# Shards


def sharded(**part: Any) -> bytes:
    shards = {"00001": {"size": 8192, "digest": "sha256:ab"}, "b": {"size": 48, "digest": DIGEST}}
    return placed({"w": entry(part={"shard": "00001", **part}), "v": entry()}, shards=shards)


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("/data/model.zt", "model"),
        ("model.v1.zt", "model.v1"),
        ("https://host/a/model.zt?token=a/b", "model"),
        ("memory", "memory"),
    ],
)
def test_shards(name: str, stem: str) -> None:
    index = read(sharded(), name)
    assert index.tensors["w"].parts["data"].shard == "00001"
    assert index.tensors["v"].parts["data"].shard is None
    shard = index.shards["00001"]
    assert (shard.size, shard.digest) == (8192, "sha256:ab")
    assert shard.candidates == (f"{stem}-00001.zt", "blobs/sha256/ab")


@pytest.mark.parametrize(
    ("part", "rule"),
    [
        ({"blob": [4096, 8192 - 4096 - 40]}, None),
        ({"blob": [4096, 8192 - 4096 - 39]}, "BlobBounds"),
        ({"blob": [4096, 8], "shard": "b"}, "BlobBounds"),
        ({"blob": [4096, 8], "shard": "c"}, "ShardRef"),
    ],
)
def test_ranges_in_shards(part: dict[str, Any], rule: str | None) -> None:
    if rule is not None:
        assert error_of(sharded(**part)).rule == rule
        return
    shards = {"00001": {"size": 8192, "digest": "sha256:ab"}}
    objects = {"w": entry(part={"shard": "00001", **part}, shape=[part["blob"][1]])}
    assert read(placed(objects, shards=shards)).tensors["w"].nbytes == part["blob"][1]


@pytest.mark.parametrize("name", ["", ".a", "a/b", "..", "a\n", "ü", "a" * 65, "a b"])
def test_shard_names(name: str) -> None:
    shards = {name: {"size": 8192, "digest": DIGEST}}
    assert error_of(placed({}, shards=shards)).rule == "ShardName"


# Sparse layouts


def sparse(layout: str, shape: list[int], **parts: Any) -> dict[str, Any]:
    return {
        "shape": shape,
        "layout": layout,
        "parts": {role: part for role, part in parts.items() if part is not None},
    }


def csr(**changes: Any) -> dict[str, Any]:
    parts = {
        "values": stored(bytes(12), dtype="f32"),
        "indices": stored(bytes(12), dtype="u32"),
        "indptr": stored(bytes(12), dtype="u32"),
    }
    return sparse("zt.sparse_csr/1", changes.pop("shape", [2, 9]), **{**parts, **changes})


def coo(**changes: Any) -> dict[str, Any]:
    parts = {"values": stored(bytes(12), dtype="f32"), "coords": stored(bytes(48), dtype="u64")}
    return sparse("zt.sparse_coo/1", changes.pop("shape", [2, 9]), **{**parts, **changes})


def test_csr() -> None:
    tensor = read(v2_file({"w": csr()})).tensors["w"]
    assert (tensor.layout, tensor.dtype, tensor.strict) == ("sparse_csr", "float32", True)
    assert {role: (part.dtype, part.shape) for role, part in tensor.parts.items()} == {
        "values": ("float32", (3,)),
        "indices": ("uint32", (3,)),
        "indptr": ("uint32", (3,)),
    }


def test_csr_of_packed_values() -> None:
    values = stored(bytes(2), dtype="u8", type="f4_e2m1")
    tensor = read(v2_file({"w": csr(values=values)})).tensors["w"]
    assert (tensor.parts["values"].dtype, tensor.parts["values"].shape) == ("float4_e2m1fn", (3,))
    values = stored(bytes(3), **values.fields)
    assert error_of(v2_file({"w": csr(values=values)})).rule == "LayoutRule"


@pytest.mark.parametrize(
    "entry",
    [
        csr(shape=[2]),
        csr(shape=[3, 9]),
        csr(values=None),
        csr(indices=None),
        csr(indptr=None),
        csr(extra=stored(b"", dtype="u8")),
        csr(indices=stored(bytes(12), dtype="i32")),
        csr(indices=stored(bytes(24), dtype="u64")),
        csr(indptr=stored(bytes(24), dtype="u64")),
        csr(indptr=stored(bytes(12), dtype="f32", type="complex64")),
        csr(indices=stored(bytes(13), dtype="u32")),
        csr(values=stored(bytes(8), dtype="f32")),
        coo(shape=[]),
        coo(values=None),
        coo(coords=None),
        coo(extra=stored(b"", dtype="u8")),
        coo(coords=stored(bytes(48), dtype="i64")),
        coo(coords=stored(bytes(40), dtype="u64")),
        coo(coords=stored(bytes(32), dtype="u64")),
    ],
)
def test_sparse_layouts_that_break_their_rules(entry: dict[str, Any]) -> None:
    error = error_of(v2_file({"w": entry}))
    assert (error.rule, error.tensor) == ("LayoutRule", "w")


def test_coo() -> None:
    tensor = read(v2_file({"w": coo()})).tensors["w"]
    assert (tensor.layout, tensor.dtype, tensor.strict) == ("sparse_coo", "float32", True)
    assert (tensor.parts["coords"].shape, tensor.parts["values"].shape) == ((2, 3), (3,))


@pytest.mark.parametrize("make", [csr, coo])
def test_sparse_values_of_an_unknown_type(make: Any) -> None:
    tensor = read(v2_file({"w": make(values=stored(bytes(7), dtype="u8", type="f6"))})).tensors["w"]
    assert tensor.layout.startswith("sparse_c")
    assert tensor.dtype == "f6"
    assert isinstance(tensor.problem, UnsupportedError)


# Damage


@pytest.mark.parametrize("mask", [0x01, 0x04, 0x20, 0x80, 0xFF])
def test_no_flipped_byte_of_manifest_and_footer_passes_its_hash(mask: int) -> None:
    data = DECLARED.small_files()["2"]
    start, length = struct.unpack("<QQ", data[-40:-24])
    for at in {*range(start, len(data))} - {*range(len(data) - 12, len(data) - 8)}:  # reserved
        flipped = bytearray(data)
        flipped[at] ^= mask
        assert isinstance(outcome(DECLARED, bytes(flipped)), FormatError)
        if at < start + length:  # and with the right hash
            digest = xxhash.xxh3_64_intdigest(flipped[start : start + length])
            outcome(DECLARED, footer(bytes(flipped), digest=digest))
