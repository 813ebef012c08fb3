"""Whatever the bytes are: right data or an error of ours, soon."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import cbor2
import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from tests.formats.burnpack_files import burnpack, container, dense, quantized
from tests.sources import CountingSource
from xckpt import formats
from xckpt.errors import CheckpointError, FormatError

if TYPE_CHECKING:
    from xckpt.index import Index


def small_file(*, legacy: bool) -> bytes:
    tensors = {
        "w": dense(np.arange(6, dtype="<f4").reshape(2, 3), param_id=1 << 63),
        "q": quantized((3,), bytes(3) + np.float32(2).tobytes()),
        "u": {"dtype": {"Bool": "U32"}, "shape": [2], "data": bytes([1, 0, 0, 0, 0, 0, 0, 0])},
    }
    return burnpack(tensors, legacy=legacy, metadata={"k": "v"}, scalars={"lr": {"Float": 0.5}})


def outcome(data: bytes) -> Index | CheckpointError:
    try:
        index = formats.get("burnpack").read(CountingSource(data))
    except CheckpointError as error:
        assert_told(error, data)
        return error
    assert pickle.loads(pickle.dumps(index)).tensors.keys() == index.tensors.keys()
    for tensor in index.tensors.values():
        for part in tensor.parts.values():
            assert part.inline is not None or part.offset + part.nbytes <= len(data)
    return index


def assert_told(error: CheckpointError, data: bytes) -> None:
    assert error.rule is not None
    assert error.offset is not None
    assert 0 <= error.offset <= len(data)


def values(data: bytes) -> dict[Any, np.ndarray]:
    ds = xr.open_dataset(data, engine="burnpack").compute()
    return {name: variable.to_numpy() for name, variable in ds.variables.items()}


@pytest.mark.filterwarnings("ignore:.*version 0:xckpt.CheckpointWarning")
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80, 0xFF])
def test_every_byte_of_the_header_flipped(legacy: bool, mask: int) -> None:
    data = small_file(legacy=legacy)
    right = values(data)
    for at in range(10 + int.from_bytes(data[6:10], "little")):
        flipped = bytearray(data)
        flipped[at] ^= mask
        if isinstance(outcome(bytes(flipped)), CheckpointError):
            continue
        try:
            found = values(bytes(flipped))
        except CheckpointError:
            continue
        for name in found.keys() & right.keys() - {"lr"}:
            np.testing.assert_array_equal(found[name], right[name])


FIELDS = st.sampled_from(
    [
        *["tensors", "metadata", "scalars", "dtype", "shape", "data_offsets", "param_id", "Bool"],
        *["QFloat", "value", "store", "mode", "tensor", "block", "param", "level", "size", "len"],
        *["storage", "PackedU32", "PackedNative", "Block", "BlockTensor", "global", "Int", "w", ""],
    ]
)
WORDS = st.sampled_from(
    [
        *["F32", "F64", "BF16", "U8", "Bool", "Flex32", "QFloat", "Native", "U32", "Symmetric"],
        *["Lookup", "Q8S", "Q4S", "Q2F", "E4M3", "UE8M0", "F16", "Tensor", "x"],
    ]
)
NUMBERS = st.sampled_from([0, 1, 2, 4, 8, 255, 256, 1 << 40, 1 << 63, (1 << 64) - 1, 1 << 99, -1])
LEAVES = NUMBERS | WORDS | st.none() | st.booleans() | st.floats() | st.binary(max_size=3)
KEYS = FIELDS | FIELDS.map(str.encode) | st.integers(0, 30) | st.text(max_size=2)
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=30,
)
SIZES = st.fixed_dictionaries(
    {"storage": st.lists(st.integers(0, 256), min_size=4, max_size=5), "len": st.integers(0, 6)}
)
SCHEMES = st.fixed_dictionaries(
    {
        "value": WORDS,
        "mode": st.just("Symmetric"),
        "store": st.just("Native") | st.dictionaries(FIELDS, st.integers(0, 3), max_size=1),
        "tensor": st.none() | WORDS,
        "block": st.none() | st.fixed_dictionaries({"size": SIZES, "dtype": WORDS}),
    },
    optional={"level": WORDS | st.fixed_dictionaries({"Block": SIZES}), "param": WORDS},
) | st.fixed_dictionaries(
    {
        "value": WORDS,
        "store": WORDS,
        "mode": WORDS,
        "param": WORDS,
        "level": WORDS | st.fixed_dictionaries({"Block": SIZES}),
    }
)
DESCRIPTORS = st.fixed_dictionaries(
    {
        "dtype": WORDS
        | st.fixed_dictionaries({"Bool": WORDS})
        | st.fixed_dictionaries({"QFloat": SCHEMES}),
        "shape": st.lists(NUMBERS, max_size=3),
        "data_offsets": st.lists(st.integers(0, 40) | NUMBERS, min_size=2, max_size=2),
    },
    optional={"param_id": NUMBERS, "x": ANYTHING},
)


@given(ANYTHING)
def test_any_cbor(root: Any) -> None:
    outcome(container(cbor2.dumps(root), bytes(64)))


@given(st.dictionaries(KEYS, DESCRIPTORS | ANYTHING, max_size=3), ANYTHING, ANYTHING)
def test_any_tensors(tensors: dict[Any, Any], metadata: Any, scalars: Any) -> None:
    for legacy in (False, True):
        outcome(container(cbor2.dumps({"tensors": tensors}), bytes(64), legacy=legacy))
    root = {"tensors": tensors, "metadata": metadata, "scalars": scalars}
    outcome(container(cbor2.dumps(root), bytes(64)))


@given(st.tuples(st.integers(0, 9), st.integers(0, 9)), SCHEMES, st.integers(0, 60))
def test_any_quantised_tensor_opens_or_fails(
    shape: tuple[int, int], scheme: Any, nbytes: int
) -> None:
    data = burnpack({"w": quantized(shape, bytes(nbytes), scheme)})
    if isinstance(outcome(data), CheckpointError):
        return
    try:
        found = values(data)
    except CheckpointError:
        return
    if "w" in found:
        assert found["w"].shape == shape


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    outcome(b"NRUB" + data)
    outcome(container(data, bytes(64)))


def test_an_unreadable_tensor_may_have_any_shape() -> None:
    # No bytes bound it; the number of chunks must not follow it.
    data = burnpack({"w": {"dtype": "F128", "shape": [1 << 59], "data": bytes(16)}})
    ds = xr.open_dataset(data, engine="burnpack")
    assert ds["w"].shape == (1 << 59,)
    assert ds["w"].data.npartitions == 1


def test_a_large_number_is_not_spelled_out() -> None:
    number = cbor2.CBORTag(2, b"\xff" * 100_000)
    entry = {"dtype": "U8", "shape": [number], "data_offsets": [0, 8]}
    error = outcome(container(cbor2.dumps({"tensors": {"w": entry}}), bytes(8)))
    assert isinstance(error, FormatError)
    assert len(str(error)) < 300
