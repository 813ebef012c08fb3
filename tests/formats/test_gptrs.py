"""The gptrs format module: from bytes to an index or an error that names the broken rule."""

from __future__ import annotations

import pickle
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contracts.declared import outcome
from tests.contracts.gptrs import DECLARED
from tests.formats.gptrs_files import (
    ARCHIVE,
    CHECKPOINT,
    WRITERS,
    Record,
    id_bytes,
    indexed_file,
    inline_file,
    record,
)
from tests.sources import CountingSource
from xckpt import formats
from xckpt.errors import CheckpointError, FormatError, UnsupportedError
from xckpt.identity import base_id

if TYPE_CHECKING:
    from xckpt.index import Index

gptrs = formats.get("gptrs")

FLOATS = np.arange(6, dtype="<f4").reshape(2, 3)
NUMBERS = np.arange(4, dtype="<i4")
TWO = [record("a.w", FLOATS), record("a.b", NUMBERS, flag=1)]
every_container = pytest.mark.parametrize("container", WRITERS)


def read(data: bytes) -> Index:
    return gptrs.read(CountingSource(data))


def values(data: bytes, index: Index, name: str) -> bytes:
    part = index.tensors[name].parts["data"]
    return data[part.offset : part.offset + part.nbytes]


def fails(data: bytes, rule: str, tensor: str | None = None) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read(data)
    assert caught.value.rule == rule, caught.value
    assert caught.value.tensor == tensor
    assert caught.value.offset is not None
    return caught.value


# --- what is read ---------------------------------------------------------------------------------


@every_container
def test_tensors_of_every_type(container: str) -> None:
    data = WRITERS[container](TWO)
    index = read(data)
    kind, version = container.split()
    assert (index.format, index.nbytes, index.warnings) == ("gptrs", len(data), ())
    assert index.version == ("2-bincode" if version == "bincode" else version)
    assert list(index.tensors) == ["a.w", "a.b"]
    weight, bias = index.tensors.values()
    assert (weight.dtype, weight.shape, weight.order, weight.dims) == ("float32", (2, 3), "C", None)
    assert (bias.dtype, bias.shape) == ("int32", (4,))
    assert values(data, index, "a.w") == FLOATS.tobytes()
    assert values(data, index, "a.b") == NUMBERS.tobytes()
    ids = [
        {"base_id": f"{base_id(name):032x}"} if kind == "checkpoint" else {}
        for name in index.tensors
    ]
    assert weight.attrs == {"requires_grad": False, **ids[0]}
    assert bias.attrs == {"requires_grad": True, **ids[1]}
    assert pickle.loads(pickle.dumps(index)).tensors == index.tensors


@every_container
def test_no_tensors_and_scalars(container: str) -> None:
    assert not read(WRITERS[container]([])).tensors
    scalar, empty = record("s", np.array(2.5, "<f4")), record("e", np.zeros((2, 0), "<f4"))
    index = read(WRITERS[container]([scalar, empty]))
    assert [tensor.shape for tensor in index.tensors.values()] == [(), (2, 0)]


@pytest.mark.parametrize(("tag", "dtype", "size"), [(1, "float16", 2), (2, "bfloat16", 2)])
@every_container
def test_half_precision(container: str, tag: int, dtype: str, size: int) -> None:
    index = read(WRITERS[container]([Record("h", (3,), bytes(3 * size), tag)]))
    assert index.tensors["h"].dtype == dtype


def test_nothing_but_the_index_is_read() -> None:
    big = np.zeros(1 << 20, "<f4")
    for write in WRITERS.values():
        source = CountingSource(write([record(f"t{i}", big) for i in range(3)]))
        gptrs.read(source)
        assert source.nbytes_read < 2 << 20
        if write([])[8] == 1:
            assert source.nbytes_read <= 4 * 4096


def test_an_index_larger_than_a_window() -> None:
    names = [f"{'n' * 1000}.{i}" for i in range(3000)]
    data = indexed_file([record(name, NUMBERS) for name in names])
    assert list(read(data).tensors) == names


def test_other_files_are_not_detected() -> None:
    for head in (b"", b"GPTRS", b"gptrschk", b"GPTRSXXX" + bytes(500)):
        assert not gptrs.detect(head, len(head), "model.bin")


# --- the index ------------------------------------------------------------------------------------


def test_entries_may_be_anywhere() -> None:
    """Unsorted, with gaps and trailing bytes, sharing data, of an index with slack."""
    data = indexed_file(
        [
            Record("z", (2,), b"..12345678", offset=2, nbytes=8),
            Record("alias", (2,), b"", offset=2, nbytes=8),
            record("a", NUMBERS),
            Record("empty", (0,), b"", offset=-20),
        ],
        slack=b"slack",
        tail=b"tail",
    )
    index = read(data)
    assert not index.warnings
    assert values(data, index, "z") == values(data, index, "alias") == b"12345678"
    assert values(data, index, "a") == NUMBERS.tobytes()


def test_partial_overlap_warns() -> None:
    first = Record("all", (4,), bytes(16))
    within = [Record(f"part{i}", (1,), b"", offset=4 * i, nbytes=4) for i in (1, 2, 3)]
    (text,) = read(indexed_file([first, *within])).warnings
    assert "'all'" in text
    assert "'part1'" in text
    assert "and 2 more" in text


@pytest.mark.parametrize(
    ("stated", "rule"),
    [
        ({"tag": 4}, "Dtype"),
        ({"tag": 2**32 - 1}, "Dtype"),
        ({"tag": 1}, "ByteLength"),
        ({"nbytes": 20}, "ByteLength"),
        ({"nbytes": 23}, "ByteLength"),
        ({"nbytes": 2**64 - 1}, "ByteLength"),
        ({"shape": (2, 4)}, "ByteLength"),
        ({"shape": (0, 2**63), "nbytes": 0}, "Shape"),
        ({"shape": (2**63, 2), "nbytes": 0}, "Shape"),
        ({"shape": (2**33, 2**33, 2**33)}, "Shape"),
        ({"shape": (2**61,), "nbytes": 2**63}, "Shape"),
        ({"offset": -1}, "Bounds"),
        ({"offset": 1}, "Bounds"),
        ({"offset": 2**63}, "Bounds"),
        ({"shape": (0,), "nbytes": 0, "offset": 25}, "Bounds"),
        ({"stored_id": id_bytes("other")}, "BaseId"),
        ({"stored_id": id_bytes("t")[::-1]}, "BaseId"),
        ({"stored_id": id_bytes("t")[:15] + b"\0"}, "BaseId"),
    ],
)
def test_entries_that_do_not_fit(stated: dict[str, Any], rule: str) -> None:
    fields = {"name": "t", "shape": (2, 3), "data": FLOATS.tobytes(), **stated}
    fails(indexed_file([Record(**fields)]), rule, "t")
    if rule != "BaseId":
        fails(indexed_file([Record(**fields)], None), rule, "t")


def test_a_correct_id_is_accepted() -> None:
    data = indexed_file([record("t", FLOATS, stored_id=id_bytes("t"))])
    assert read(data).tensors["t"].attrs["base_id"] == id_bytes("t")[::-1].hex()


@every_container
def test_equal_names(container: str) -> None:
    fails(WRITERS[container]([TWO[0], TWO[1], TWO[0]]), "DuplicateName", "a.w")


@every_container
def test_names_in_utf_8(container: str) -> None:
    name = "poids.été"
    index = read(WRITERS[container]([record(name, FLOATS), record("ok", FLOATS)]))
    assert list(index.tensors) == [name, "ok"]
    assert "base_id" not in index.tensors[name].attrs
    assert bool(index.warnings) == container.startswith("checkpoint")
    assert all(name in text for text in index.warnings)
    fails(WRITERS[container]([Record(b"\xff", (0,), b"")]), "Name")


def test_a_name_beyond_ascii_has_no_id_to_store() -> None:
    fails(indexed_file([record("é", FLOATS, stored_id=id_bytes("é"))]), "BaseId", "é")


@every_container
def test_more_axes_than_arrays_have(container: str) -> None:
    assert read(WRITERS[container]([Record("t", (1,) * 64, bytes(4))])).tensors["t"].ndim == 64
    with pytest.raises(UnsupportedError, match="65 axes"):
        read(WRITERS[container]([Record("t", (1,) * 65, bytes(4))]))


@pytest.mark.parametrize("config", [b"{}", None])
def test_claims_that_are_too_large(config: bytes | None) -> None:
    """None of them may be believed: memory for the largest is not to be had."""
    data = indexed_file([record("t", FLOATS)], config)
    count = len(data) - 24 - (29 + 1 + 16 + (16 if config else 0)) - 4
    assert data[count : count + 4] == b"\1\0\0\0"
    rank = count + 4 + 4 + 1 + (16 if config else 0)
    claims = {count: "TensorCount", count + 4: "Truncated", rank: "Truncated"}
    claims[count - 4] = "Truncated"  # the length of the index
    for at, rule in claims.items():
        lie = bytearray(data)
        lie[at : at + 4] = b"\xff" * 4
        fails(bytes(lie), rule)
    if config is not None:
        fails(data[:12] + b"\xff" * 4 + data[16:], "Truncated")
    fails(data[: count - 4] + struct.pack("<I", 6) + data[count:], "TensorCount")


def test_records_of_version_1_that_do_not_fit() -> None:
    start = len(inline_file([]))
    for nbytes in (25, 2**63 + 8, 2**64 - 1):
        fails(inline_file([record("t", FLOATS, nbytes=nbytes)]), "Truncated", "t")
    fails(inline_file([record("t", FLOATS, nbytes=20)]) + bytes(100), "ByteLength", "t")
    data = inline_file(TWO)
    fails(data[: start - 4] + b"\xff" * 4 + data[start:], "TensorCount")
    assert list(read(data + b"tail").tensors) == ["a.w", "a.b"]


def test_bincode_must_fill_the_index() -> None:
    fails(indexed_file(TWO, bincode=True, slack=b"\0"), "IndexLength")
    fails(indexed_file([TWO[0], TWO[0]], bincode=True), "DuplicateName", "a.w")
    wrong = record("t", FLOATS, stored_id=id_bytes("other"))
    fails(indexed_file([wrong], bincode=True), "BaseId", "t")


@pytest.mark.parametrize("version", [0, 3, 9, 0x02000000])
@pytest.mark.parametrize("config", [b"{}", None])
def test_other_versions(version: int, config: bytes | None) -> None:
    data = indexed_file(TWO, config)
    with pytest.raises(UnsupportedError, match=f"version {version} is unknown; 1 and 2"):
        read(data[:8] + struct.pack("<I", version) + data[12:])


def test_containers_with_the_head_of_another() -> None:
    as_version_2 = inline_file(TWO)
    checkpoint, archive = indexed_file(TWO), indexed_file(TWO, None)
    for data in (
        as_version_2[:8] + struct.pack("<I", 2) + as_version_2[12:],
        ARCHIVE + checkpoint[8:],
        CHECKPOINT + archive[8:],
    ):
        with pytest.raises(FormatError):
            read(data)


@every_container
def test_every_field_set_to_extremes(container: str) -> None:
    data = WRITERS[container](TWO)
    for at in range(8, len(data) - 8):
        for extreme in (b"\xff" * 8, b"\0" * 8, b"\xff" * 4, b"\0\0\0\x80"):
            outcome(DECLARED, data[:at] + extreme + data[at + len(extreme) :])


ARRAYS = st.sampled_from(["<f4", "<f2", "<i4"]).flatmap(
    lambda dtype: st.lists(st.integers(0, 3), max_size=3).map(
        lambda shape: np.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape)
    )
)


@given(st.dictionaries(st.text(max_size=12), ARRAYS, max_size=4), st.sampled_from(sorted(WRITERS)))
def test_files_of_any_tensors(arrays: dict[str, np.ndarray], container: str) -> None:
    records = [record(name, array) for name, array in arrays.items()]
    data = WRITERS[container](records)
    index = gptrs.read(CountingSource(data))
    assert list(index.tensors) == list(arrays)
    for name, array in arrays.items():
        assert index.tensors[name].dtype == array.dtype.name
        assert index.tensors[name].shape == array.shape
        part = index.tensors[name].parts["data"]
        assert data[part.offset : part.offset + part.nbytes] == array.tobytes()
