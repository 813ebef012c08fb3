"""zTensor 0.1: one blob per tensor."""

from __future__ import annotations

from typing import Any

import cbor2
import numpy as np
import pytest

from tests.formats.ztensor_files import V0_MAGIC, read, stored, v0_container, v0_file
from xckpt import formats
from xckpt.errors import FormatError, UnsupportedError

ztensor = formats.get("ztensor")


def entry(data: bytes = bytes(16), **changes: Any) -> dict[str, Any]:
    fields = {"name": "w", "dtype": "float32", "shape": [4], "layout": "dense", "encoding": "raw"}
    return {**fields, "data": stored(data), **changes}


def test_indefinite_lengths_are_accepted() -> None:
    (fields,) = [
        {**entry(), "offset": 64, "size": 16},
    ]
    del fields["data"]
    items = b"".join(cbor2.dumps(key) + cbor2.dumps(value) for key, value in fields.items())
    body = V0_MAGIC + bytes(56) + bytes(16)
    index = read(v0_container(b"\x81\xbf" + items + b"\xff", body))
    assert index.tensors["w"].shape == (4,)


@pytest.mark.parametrize(
    ("order", "encoding", "expected"),
    [
        (None, "raw", "little"),
        ("little", "raw", "little"),
        ("big", "raw", "big"),
        ("big", "zstd", "little"),
    ],
)
def test_raw_data_may_be_big_endian(order: str | None, encoding: str, expected: str) -> None:
    fields = entry(encoding=encoding)
    if order is not None:
        fields["data_endianness"] = order
    part = read(v0_file(fields)).tensors["w"].parts["data"]
    assert part.byteorder == expected
    assert part.encoding == (None if encoding == "raw" else "zstd")


def test_fields_of_the_writer_are_attributes() -> None:
    index = read(v0_file(entry(note="n", rank=3, checksum="crc32c:0x00000000")))
    assert index.tensors["w"].attrs == {"note": "n", "rank": 3}
    assert index.tensors["w"].parts["data"].digest == "crc32c:0x00000000"


@pytest.mark.parametrize("data", [V0_MAGIC + bytes(8), V0_MAGIC + b"\x80" + bytes([1] + [0] * 7)])
def test_files_without_tensors(data: bytes) -> None:
    assert read(data).tensors == {}


def test_rows_in_one_blob_are_split() -> None:
    indptr = np.array([0, 1, 3], "<u8").tobytes()
    indices = np.array([2, 0, 1], "<u8").tobytes()
    values = np.array([1.5, 2.5, 3.5], "<f4").tobytes()
    data = v0_file(entry(indptr + indices + values, layout="sparsecsr", shape=[2, 3]))
    tensor = read(data).tensors["w"]
    assert tensor.layout == "sparse_csr"
    for role, expected in {"indptr": indptr, "indices": indices, "values": values}.items():
        part = tensor.parts[role]
        assert data[part.offset : part.offset + part.nbytes] == expected
    assert [tensor.parts[role].shape for role in ("indptr", "indices", "values")] == [
        (3,),
        (3,),
        (3,),
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": "sparsecoo"},
        {"layout": "sparsecsr", "encoding": "zstd", "shape": [2, 3]},
        {"layout": "sparse"},
    ],
)
def test_other_layouts_are_their_bytes(changes: dict[str, Any]) -> None:
    tensor = read(v0_file(entry(**changes))).tensors["w"]
    assert tensor.layout == "structural"
    part = tensor.parts["data"]
    assert (part.dtype, part.shape) == ("uint8", (16,) if part.encoding is None else None)


@pytest.mark.parametrize(
    ("changes", "dtype"), [({"dtype": "float12"}, "float12"), ({"encoding": "lz4"}, "float32")]
)
def test_unknown_features_affect_only_their_tensor(changes: dict[str, Any], dtype: str) -> None:
    index = read(v0_file(entry(**changes), entry(name="other")))
    assert isinstance(index.tensors["w"].problem, UnsupportedError)
    assert index.tensors["w"].dtype == dtype
    assert "drop_variables=['w']" in str(index.tensors["w"].problem)
    assert index.tensors["other"].problem is None


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"shape": [5]}, "DenseSize"),
        ({"shape": None}, "Schema"),
        ({"layout": 1}, "Schema"),
        ({"dtype": 4}, "Schema"),
        ({"encoding": 1}, "Schema"),
        ({"checksum": 1}, "Schema"),
        ({"data_endianness": "middle"}, "Schema"),
        ({"layout": "sparsecsr"}, "LayoutRule"),
        ({"layout": "sparsecsr", "shape": [5, 5]}, "LayoutRule"),
        ({"layout": "sparsecsr", "shape": [0, 5]}, "LayoutRule"),
    ],
)
def test_broken_rules(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(FormatError) as caught:
        read(v0_file(entry(**changes)))
    assert (caught.value.rule, caught.value.tensor) == (rule, "w")
    assert caught.value.offset is not None


def test_two_tensors_of_one_name() -> None:
    with pytest.raises(FormatError) as caught:
        read(v0_file(entry(), entry()))
    assert (caught.value.rule, caught.value.tensor) == ("NameCollision", "w")


@pytest.mark.parametrize("root", [{}, "w", [1], [{"name": 1}]])
def test_manifests_that_are_not_a_list_of_tensors(root: Any) -> None:
    with pytest.raises(FormatError) as caught:
        read(v0_container(cbor2.dumps(root)))
    assert caught.value.rule == "Schema"
