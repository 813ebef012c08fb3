"""Whatever the bytes are: an index or an error of ours, soon."""

from __future__ import annotations

import pickle
import struct
from typing import TYPE_CHECKING, Any

import cbor2
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.formats.ztensor_files import (
    V0_MAGIC,
    V1_MAGIC,
    V2_MAGIC,
    dense_v1,
    dense_v2,
    dense_v12,
    stored,
    v0_container,
    v0_file,
    v1_container,
    v1_file,
    v2_container,
    v2_file,
    v12_container,
    v12_file,
)
from tests.sources import CountingSource
from xckpt import formats
from xckpt.errors import CheckpointError, FormatError

if TYPE_CHECKING:
    from xckpt.index import Index

ztensor = formats.get("ztensor")

DATA = np.arange(12, dtype="<f4").tobytes()


def small_files() -> dict[str, bytes]:
    """One file of each version, with a layout of several parts."""
    sparse = {"values": stored(bytes(4)), "indices": stored(bytes(8)), "indptr": stored(bytes(16))}
    dense = {"name": "w", "shape": [3, 4], "dtype": "float32", "layout": "dense"}
    return {
        "0.1": v0_file({**dense, "data": stored(DATA, checksum="crc32c:0x00000000")}),
        "1.0": v1_file(
            {
                "w": dense_v1(DATA, [3, 4], "float32", digest="crc32c:0x00000000"),
                "s": {
                    "dtype": "float32",
                    "shape": [1, 9],
                    "format": "sparse_csr",
                    "components": sparse,
                },
            },
            attributes={"k": [1.5, None]},
        ),
        "1.2": v12_file(
            {"w": dense_v12(DATA, [3, 4], "f32"), "z": dense_v12(b"?", [9], "u8", encoding="zstd")}
        ),
        "2": v2_file(
            {
                "w": dense_v2(DATA, [3, 4], "f32", digest="xxh3:00"),
                "z": dense_v2(b"?", [9], "u8", encoding="x/1", decoded_length=9),
            },
            attributes={"k": [1.5, None]},
        ),
    }


def outcome(data: bytes) -> Index | CheckpointError:
    try:
        index = ztensor.read(CountingSource(data))
    except CheckpointError as error:
        assert_told(error, data)
        return error
    for tensor in index.tensors.values():
        if tensor.problem is not None:
            assert_told(tensor.problem, data)
            assert tensor.problem.tensor == tensor.name
    assert pickle.loads(pickle.dumps(index)).tensors.keys() == index.tensors.keys()
    return index


def assert_told(error: CheckpointError, data: bytes) -> None:
    assert error.rule is not None
    assert error.offset is not None
    assert 0 <= error.offset <= max(len(data), 1)


@pytest.mark.parametrize("version", small_files())
def test_every_byte_of_the_manifest_flipped(version: str) -> None:
    data = small_files()[version]
    start = data.index(b"float32" if version == "0.1" else b"w") - 60
    for at in range(max(start, 8), len(data)):
        for mask in (0x01, 0x20, 0x80, 0xFF):
            flipped = bytearray(data)
            flipped[at] ^= mask
            result = outcome(bytes(flipped))
            if version == "2" and at >= data.index(b"objects") - 2 and at not in reserved(data):
                assert isinstance(result, FormatError)


def reserved(data: bytes) -> range:
    return range(len(data) - 12, len(data) - 8)


@pytest.mark.parametrize("version", ["2"])
@pytest.mark.parametrize("mask", [0x01, 0x04, 0x20, 0x80, 0xFF])
def test_flipped_manifests_under_the_right_hash(version: str, mask: int) -> None:
    data = small_files()[version]
    start, length = struct.unpack("<QQ", data[-40:-24])
    for at in range(start, start + length):
        flipped = bytearray(data)
        flipped[at] ^= mask
        digest = xxhash.xxh3_64_intdigest(flipped[start : start + length])
        flipped[-24:-16] = struct.pack("<Q", digest)
        outcome(bytes(flipped))


FIELDS = st.sampled_from(
    [
        *["version", "tensors", "objects", "attributes", "generator", "shards", "name", "offset"],
        *["length", "size", "dtype", "type", "layout", "format", "shape", "encoding", "digest"],
        *["components", "parts", "data", "values", "indices", "indptr", "coords", "blob", "shard"],
        *["checksum", "data_endianness", "decoded_length", "uncompressed_length", "scales"],
        *["bits", "group_size", "axis", "packing", "zero_point", "block_size", "w", ""],
    ]
)
WORDS = st.sampled_from(
    [
        *["1.0", "1.2.0", "f32", "u8", "u64", "float32", "uint8", "dense", "sparse_csr", "raw"],
        *["zt.sparse_csr/1", "zt.sparse_coo/1", "zt.quant_group/1", "zt.mx/1", "gguf.q4_0/1"],
        *["sparse_coo", "sparsecsr", "zstd", "zt.zstd-seekable/1", "f4_e2m1", "xxh3:00", "big"],
    ]
)
NUMBERS = st.sampled_from([0, 1, 2, 8, 9, 64, 4096, 1 << 40, 1 << 63, (1 << 64) - 1, -1, -64])
LEAVES = NUMBERS | WORDS | st.none() | st.booleans() | st.floats() | st.binary(max_size=3)
KEYS = FIELDS | st.integers(0, 30) | st.text(max_size=2)
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=30,
)
ROLES = st.sampled_from(["data", "values", "indices", "indptr", "coords", "scales", "zeros"])
PARTS = st.fixed_dictionaries(
    {},
    optional={
        "dtype": WORDS,
        "type": WORDS,
        "offset": NUMBERS,
        "length": NUMBERS,
        "blob": st.tuples(NUMBERS, NUMBERS).map(list),
        "encoding": WORDS | st.none(),
        "decoded_length": NUMBERS,
        "uncompressed_length": NUMBERS | st.none(),
        "digest": WORDS | st.just("md5:00"),
        "shard": WORDS,
    },
)
TENSORS = st.fixed_dictionaries(
    {},
    optional={
        "name": FIELDS,
        "offset": NUMBERS,
        "size": NUMBERS,
        "dtype": WORDS,
        "shape": st.lists(NUMBERS, max_size=3),
        "format": WORDS,
        "layout": WORDS,
        "components": st.dictionaries(ROLES, PARTS, max_size=4),
        "parts": st.dictionaries(ROLES, PARTS, max_size=4),
        "attributes": ANYTHING,
    },
)
BODY = bytes(4096 * 2)


def contained(manifest: Any) -> list[bytes]:
    encoded = cbor2.dumps(manifest)
    return [
        v0_container(encoded, V0_MAGIC + BODY),
        v1_container(encoded, V1_MAGIC + BODY),
        v12_container(encoded, V1_MAGIC + BODY),
        v2_container(cbor2.dumps(manifest, canonical=True), V2_MAGIC + BODY),
    ]


@given(ANYTHING)
def test_any_cbor(manifest: Any) -> None:
    for data in contained(manifest):
        outcome(data)


@given(st.dictionaries(KEYS, TENSORS | ANYTHING, max_size=3), st.sampled_from(["1.0", "1.2.0"]))
def test_any_tensors(tensors: dict[Any, Any], version: str) -> None:
    outcome(contained(list(tensors.values()))[0])
    root = {"version": version, "tensors": tensors, "objects": tensors}
    for data in contained(root):
        outcome(data)


@given(st.binary(max_size=200), st.sampled_from([V0_MAGIC, V1_MAGIC, V2_MAGIC]))
def test_any_bytes(data: bytes, magic: bytes) -> None:
    outcome(magic + data)
    outcome(magic + data + magic)
