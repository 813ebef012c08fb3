"""Planned safetensors files equal those of the package; other contents are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from tests.formats.planned import materialize
from tests.sources import CountingSource
from xckpt.elements import ELEMENT_TYPES, nbytes_of, stored_dtype
from xckpt.errors import UnsupportedError
from xckpt.formats import get
from xckpt.formats.plan import Draft, WantedPart, WantedTensor

SAFETENSORS = get("safetensors")
plan, read = SAFETENSORS.plan, SAFETENSORS.read

PLAIN = [name for name in SAFETENSORS.can.types if ELEMENT_TYPES[name].bits >= 8]


def tensor(name: str, dtype: str, shape: tuple[int, ...], **fields: object) -> WantedTensor:
    count = int(np.prod(shape, dtype=np.int64))
    part = WantedPart(dtype, shape, nbytes_of(dtype, count))
    return WantedTensor(name, dtype, shape, {"data": part}, **fields)  # type: ignore[arg-type]


def index(*tensors: WantedTensor, **attrs: object) -> Draft:
    return Draft({tensor.name: tensor for tensor in tensors}, attrs)


shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
kinds = st.tuples(st.sampled_from(PLAIN), shapes)


@given(
    st.dictionaries(st.text(max_size=5), kinds),
    st.dictionaries(st.just("format") | st.text(), st.text(), max_size=1),
)
def test_files_equal_those_of_the_package(
    described: dict[str, tuple[str, tuple[int, ...]]], attrs: dict[str, str]
) -> None:
    described.pop("__metadata__", None)
    attrs.pop("xckpt.dims", None)
    arrays = {n: np.zeros(shape, stored_dtype(dtype)) for n, (dtype, shape) in described.items()}
    expected = index(*[tensor(name, *kind) for name, kind in described.items()])
    planned = plan(Draft(expected.tensors, attrs))
    data = {(name, "data"): array.tobytes() for name, array in arrays.items()}
    file = materialize(planned, data)
    metadata = {"format": "pt"} | attrs if attrs else {}
    theirs = safetensors.numpy.save(arrays, metadata or None)
    entries = [
        json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]) for data in (file, theirs)
    ]
    ours, package = (list(header.items()) for header in entries)
    assert ours == package
    # The package writes several entries of metadata in random order.
    assert file == theirs or (len(metadata) > 1 and sorted(file) == sorted(theirs))
    again = read(CountingSource(file))
    assert again.attrs == metadata
    assert {n: (t.dtype, t.shape) for n, t in again.tensors.items()} == described


def test_names_of_axes_are_kept() -> None:
    expected = index(tensor("w", "float32", (2, 3), dims=("out", None)), tensor("b", "int8", (2,)))
    data = {("w", "data"): bytes(24), ("b", "data"): bytes(2)}
    again = read(CountingSource(materialize(plan(expected), data)))
    assert again.tensors["w"].dims == ("out", None)
    assert again.tensors["b"].dims is None
    assert again.attrs == {"format": "pt"}


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        (tensor("w", "complex128", (1,)), "Dtype"),
        (tensor("w", "float4_e2m1fn", (3,)), "MisalignedSlice"),
        (tensor("__metadata__", "int8", (1,)), "Name"),
        (tensor("\ud800", "int8", (1,)), "Name"),
        (tensor("w", "int8", (1,), layout="structural"), "Layout"),
        (tensor("w", "int8", (2, 2), order="F"), "Order"),
    ],
)
def test_unsupported_contents_are_errors(bad: WantedTensor, rule: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        plan(index(bad))
    assert (caught.value.tensor, caught.value.rule) == (bad.name, rule)


def test_attributes_without_a_place() -> None:
    for value in (object(), "\ud800"):
        with pytest.raises(UnsupportedError, match="attribute"):
            plan(index(note=value))


def test_a_header_that_is_too_long() -> None:
    with pytest.raises(UnsupportedError, match="HeaderTooLarge"):
        plan(index(note="x" * 100_000_001))
