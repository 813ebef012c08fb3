"""Whatever the bytes are: an index or an error of ours."""

from __future__ import annotations

import json
import pickle
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.formats.gptrs_files import (
    ARCHIVE,
    CHECKPOINT,
    GPT,
    WRITERS,
    Record,
    indexed_file,
    inline_file,
    record,
    sized,
)
from tests.sources import CountingSource
from xckpt import formats
from xckpt.errors import CheckpointError

if TYPE_CHECKING:
    from xckpt.index import Index

gptrs = formats.get("gptrs")

TWO = [
    record("a.w", np.arange(6, dtype="<f4").reshape(2, 3)),
    record("a.b", np.arange(4, dtype="<i4"), flag=1),
]
every_container = pytest.mark.parametrize("container", WRITERS)


def outcome(data: bytes) -> Index | CheckpointError:
    try:
        index = gptrs.read(CountingSource(data))
    except CheckpointError as error:
        assert_told(error, data)
        return error
    for tensor in index.tensors.values():
        part = tensor.parts["data"]
        assert part.offset + part.nbytes <= len(data)
    assert pickle.loads(pickle.dumps(index)).tensors.keys() == index.tensors.keys()
    return index


def assert_told(error: CheckpointError, data: bytes) -> None:
    assert error.rule is not None
    assert error.offset is not None
    assert 0 <= error.offset <= len(data)


@every_container
def test_every_field_set_to_extremes(container: str) -> None:
    data = WRITERS[container](TWO)
    for at in range(8, len(data) - 8):
        for extreme in (b"\xff" * 8, b"\0" * 8, b"\xff" * 4, b"\0\0\0\x80"):
            outcome(data[:at] + extreme + data[at + len(extreme) :])


NAMES = st.text(max_size=12)
EXTENTS = st.lists(st.sampled_from([0, 1, 2, 3, 2**31, 2**63, 2**64 - 1]), max_size=4)
HOSTILE = st.builds(
    Record,
    name=NAMES | st.binary(max_size=5),
    shape=EXTENTS,
    data=st.binary(max_size=24),
    tag=st.integers(0, 5),
    flag=st.integers(0, 255),
    stored_id=st.just(bytes(16)) | st.binary(min_size=16, max_size=16),
    offset=st.none() | st.integers(-100, 100) | st.integers(0, 2**64 - 1),
    nbytes=st.none() | st.integers(0, 30) | st.integers(0, 2**64 - 1),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*GPT, "kind", "config", "runtime"]), inner, max_size=8)
    ),
)
ARRAYS = st.sampled_from(["<f4", "<f2", "<i4"]).flatmap(
    lambda dtype: st.lists(st.integers(0, 3), max_size=3).map(
        lambda shape: np.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape)
    )
)


@given(st.lists(HOSTILE, max_size=3), JSON)
def test_any_descriptions(records: list[Record], config: Any) -> None:
    encoded = json.dumps(config).encode()
    for conf in (encoded, None):
        outcome(indexed_file(records, conf))
        outcome(indexed_file(records, conf, bincode=True))
        outcome(inline_file(records, conf))


@given(st.binary(max_size=120), st.sampled_from([CHECKPOINT, ARCHIVE]), st.integers(0, 3))
def test_any_bytes(data: bytes, magic: bytes, version: int) -> None:
    outcome(magic + struct.pack("<I", version) + data)
    outcome(magic + struct.pack("<I", version) + sized(b"{}") + sized(data))


@given(st.dictionaries(NAMES, ARRAYS, max_size=4), st.sampled_from(sorted(WRITERS)))
def test_any_tensors(arrays: dict[str, np.ndarray], container: str) -> None:
    records = [record(name, array) for name, array in arrays.items()]
    data = WRITERS[container](records)
    index = gptrs.read(CountingSource(data))
    assert list(index.tensors) == list(arrays)
    for name, array in arrays.items():
        assert index.tensors[name].dtype == array.dtype.name
        assert index.tensors[name].shape == array.shape
        part = index.tensors[name].parts["data"]
        assert data[part.offset : part.offset + part.nbytes] == array.tobytes()
