"""Damaged files: an error of ours or values, never anything else."""

from __future__ import annotations

import pickle
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from tests.contracts.every import DECLARED
from tests.sources import CountingSource
from xckpt import CheckpointError, CheckpointWarning, PayloadMissingError, formats
from xckpt.index import Index

if TYPE_CHECKING:
    from tests.contracts.declared import Declared


class Small(NamedTuple):
    """A complete file of a few hundred bytes."""

    declared: Declared
    label: str
    data: bytes


small_files = pytest.mark.parametrize(
    "small",
    [
        pytest.param(Small(each, label, data), id=f"{each.name}-{label}")
        for each in DECLARED
        for label, data in each.small_files().items()
    ],
)
every_format = pytest.mark.parametrize("declared", DECLARED, ids=lambda each: each.name)


def assert_told(error: CheckpointError, size: int, *, offset: bool = False) -> None:
    """Check that an error says which rule is broken, and if so where in the file."""
    assert error.offset is not None or not offset
    assert error.rule is not None or isinstance(error, PayloadMissingError)
    assert error.offset is None or 0 <= error.offset <= size
    str(error).encode()


def outcome(declared: Declared, data: bytes) -> Index | CheckpointError:
    """Read an index; an error says what is wrong and where, and an index only what is there."""
    try:
        index = formats.get(declared.name).read(CountingSource(data))
    except CheckpointError as error:
        assert_told(error, len(data), offset=declared.tells_offsets)
        return error
    assert pickle.loads(pickle.dumps(index)).tensors.keys() == index.tensors.keys()
    for tensor in index.tensors.values():
        for part in tensor.parts.values():
            inside = part.offset + part.nbytes <= len(data) or tensor.problem is not None
            assert inside or part.shard is not None or part.inline is not None
    return index


def computed(declared: Declared, data: bytes) -> dict[Any, Any]:
    """Compute what can be, of a file whose index can be read."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        ds = xr.open_dataset(data, engine=declared.name, decode=False, verify=True)
        for name, variable in ds.variables.items():
            # A size that fits the file may still be huge where it is sparse or repeated.
            if variable.nbytes < 1 << 20:
                try:
                    found[name] = variable.values
                except CheckpointError as error:
                    assert_told(error, len(data))
    return found


@small_files
def test_whole(small: Small) -> None:
    declared, _, data = small
    index = outcome(declared, data)
    assert isinstance(index, Index)
    readable = {name for name, tensor in index.tensors.items() if tensor.problem is None}
    assert len(computed(declared, data)) >= len(readable)


@small_files
def test_cut_short_at_every_byte(small: Small) -> None:
    """What is left is refused, or has the same values as far as it has any."""
    declared, label, data = small
    whole = computed(declared, data)
    # Some files are mostly padding.
    lengths = {*range(min(len(data), 1500)), *range(0, len(data), max(1, len(data) // 500))}
    for length in sorted({*lengths, *range(max(0, len(data) - 300), len(data))}):
        if (label, length) in declared.also_complete:
            continue
        if isinstance(outcome(declared, data[:length]), Index):
            assert declared.may_be_cut
            for name, values in computed(declared, data[:length]).items():
                assert values.size == 0 or np.array_equal(values, whole[name], equal_nan=True)


@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80, 0xFF])
@small_files
def test_every_byte_changed(small: Small, mask: int) -> None:
    declared, _, data = small
    ends = {*range(min(len(data), 700)), *range(max(0, len(data) - 700), len(data))}
    for at in sorted(ends):
        if data[at] == 0 and not any(data[max(0, at - 40) : at + 40]):
            continue  # padding
        changed = bytearray(data)
        changed[at] ^= mask
        if isinstance(outcome(declared, bytes(changed)), Index) and at % 7 == 0:
            computed(declared, bytes(changed))


@small_files
@given(data=st.data())
def test_any_byte_changed_in_any_way(small: Small, data: st.DataObject) -> None:
    declared, _, whole = small
    changed = bytearray(whole)
    at = data.draw(st.integers(0, len(whole) - 1))
    changed[at] ^= data.draw(st.integers(1, 255))
    if isinstance(outcome(declared, bytes(changed)), Index):
        computed(declared, bytes(changed))


@every_format
@given(data=st.data())
def test_bytes_after_what_a_file_begins_with(declared: Declared, data: st.DataObject) -> None:
    _, start = data.draw(st.sampled_from(sorted(declared.small_files().items())))
    begin = start[: data.draw(st.integers(0, min(64, len(start))))]
    outcome(declared, begin + data.draw(st.binary(max_size=200)))


@every_format
@pytest.mark.parametrize("data", [b"", b"\0", bytes(600), b"[]", b"\xff" * 600])
def test_what_is_not_a_checkpoint(declared: Declared, data: bytes) -> None:
    assert isinstance(outcome(declared, data), CheckpointError)
    found = formats.get(declared.name)
    for other in (data, b"{}", b"\x89HDF" + bytes(600)):
        assert not found.detect(other[: formats.HEAD_BYTES], len(other), "m.bin")
