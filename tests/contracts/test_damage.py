"""Damaged files give values or an error of the package, never anything else."""

from __future__ import annotations

import contextlib
import re
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from tests.contracts.declared import assert_told, computed, outcome
from tests.contracts.every import DECLARED
from tests.sources import CountingSource
from xckpt import CheckpointError, CheckpointWarning, formats
from xckpt.index import Index, Tensor

if TYPE_CHECKING:
    from tests.contracts.declared import Declared


class Small(NamedTuple):
    """A complete file of a few hundred bytes."""

    declared: Declared
    label: str
    data: bytes


SMALL = [Small(declared, *file) for declared in DECLARED for file in declared.small_files().items()]


def of_files(files: list[Small]) -> pytest.MarkDecorator:
    """Make a test one of each of some files."""
    return pytest.mark.parametrize(
        "small", files, ids=[f"{s.declared.name}-{s.label}" for s in files]
    )


small_files = of_files(SMALL)
every_format = pytest.mark.parametrize("declared", DECLARED, ids=lambda declared: declared.name)


def read(declared: Declared, data: bytes) -> dict[Any, Any]:
    """Compute what can be, of a file whose index can be read."""
    values: dict[Any, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        ds = xr.open_dataset(data, engine=declared.name, decode=False, verify=True)
        # A size that fits the file may still be huge where it is sparse or repeated.
        small = {
            name: variable for name, variable in ds.variables.items() if variable.nbytes < 1 << 20
        }
        with contextlib.suppress(CheckpointError):
            return computed(small)
        for name, variable in small.items():
            try:
                values[name] = variable.values
            except CheckpointError as error:
                assert_told(error, len(data))
    return values


@small_files
def test_intact_files_are_read(small: Small) -> None:
    declared, _, data = small
    index = outcome(declared, data)
    assert isinstance(index, Index)
    assert formats.detect(CountingSource(data, "m.bin")).name == declared.name
    readable = {name for name, tensor in index.tensors.items() if tensor.problem is None}
    assert len(read(declared, data)) >= len(readable)


@small_files
def test_files_cut_short_at_every_byte(small: Small) -> None:
    """The rest is refused, or has the same values as far as it goes."""
    declared, label, data = small
    full = read(declared, data)
    # Some files are mostly padding.
    lengths = {*range(min(len(data), 1500)), *range(0, len(data), max(1, len(data) // 500))}
    for length in sorted({*lengths, *range(max(0, len(data) - 300), len(data))}):
        if (label, length) in declared.also_complete:
            continue
        if isinstance(outcome(declared, data[:length]), Index):
            assert declared.may_be_cut
            for name, values in read(declared, data[:length]).items():
                assert values.size == 0 or np.array_equal(values, full[name], equal_nan=True)


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
            read(declared, bytes(changed))


@small_files
@given(data=st.data())
def test_any_byte_changed_in_any_way(small: Small, data: st.DataObject) -> None:
    declared, _, full = small
    changed = bytearray(full)
    at = data.draw(st.integers(0, len(full) - 1))
    changed[at] ^= data.draw(st.integers(1, 255))
    if isinstance(outcome(declared, bytes(changed)), Index):
        read(declared, bytes(changed))


@of_files([declared for declared in SMALL if declared.declared.guards_data])
def test_any_flipped_bit_outside_the_data(small: Small) -> None:
    """Values are correct, or there is an error."""
    declared, _, data = small
    full = outcome(declared, data)
    assert isinstance(full, Index)
    meanings = {name: meaning(tensor, data) for name, tensor in full.tensors.items()}
    parts = [part for tensor in full.tensors.values() for part in tensor.parts.values()]
    stored = [range(p.offset, p.offset + p.nbytes) for p in parts if p.inline is None]
    texts = [range(*match.span()) for match in re.finditer(rb"[\n\x20-\x7e]{64,}", data)]
    for at in set(range(len(data))).difference(*stored):
        # Of metadata that are text, one bit of each byte.
        for bit in [at % 8] if any(at in text for text in texts) else range(8):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            index = outcome(declared, bytes(changed))
            if isinstance(index, Index):
                for name in index.tensors.keys() & meanings.keys():
                    tensor = index.tensors[name]
                    if tensor.problem is None and tensor.size:
                        assert meaning(tensor, bytes(changed)) == meanings[name]


def meaning(tensor: Tensor, data: bytes) -> Any:
    """Return everything that determines the values of a tensor, except values in the header."""
    return (
        tensor.dtype,
        tensor.shape,
        tensor.quantization,
        {
            role: (p.dtype, p.shape, data[p.offset : p.offset + p.nbytes])
            for role, p in tensor.parts.items()
            if p.inline is None
        },
    )


@pytest.mark.parametrize(
    ("declared", "kind"),
    [
        pytest.param(declared, kind, id=f"{declared.name}-{kind}")
        for declared in DECLARED
        for kind in declared.hostile()
    ],
)
@given(data=st.data())
def test_changed_bytes_raise_errors_or_return_values(
    declared: Declared, kind: str, data: st.DataObject
) -> None:
    for file in data.draw(declared.hostile()[kind]):
        outcome(declared, file)


@every_format
@given(data=st.data())
def test_a_valid_head_with_other_bytes_after_it(declared: Declared, data: st.DataObject) -> None:
    _, start = data.draw(st.sampled_from(sorted(declared.small_files().items())))
    begin = start[: data.draw(st.integers(0, min(64, len(start))))]
    outcome(declared, begin + data.draw(st.binary(max_size=200)))


@every_format
@pytest.mark.parametrize("data", [b"", b"\0", bytes(600), b"[]", b"\xff" * 600])
def test_other_content_is_refused(declared: Declared, data: bytes) -> None:
    assert isinstance(outcome(declared, data), CheckpointError)
    file_format = formats.get(declared.name)
    for content in (data, b"{}", b"\x89HDF" + bytes(600)):
        assert not file_format.detect(content[: formats.HEAD_BYTES], len(content), "m.bin")
