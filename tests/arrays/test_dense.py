"""Dense arrays equal numpy's, and read only the bytes of the selection."""

from __future__ import annotations

import pickle
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, basic_indices

from tests.sources import CountingSource
from xckpt.arrays.dense import DenseArray
from xckpt.arrays.parts import PartReader
from xckpt.errors import CheckpointWarning, FormatError, IntegrityError, UnsupportedError
from xckpt.index import Part


def dense(
    payload: bytes,
    dtype: str,
    shape: tuple[int, ...],
    *,
    verify: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Make an array over a file that has three bytes before the payload."""
    keywords: dict[str, Any] = {
        k: kwargs.pop(k) for k in ("encoding", "digest", "byteorder") if k in kwargs
    }
    part = Part(dtype, shape, 3, len(payload), **keywords)
    source = CountingSource(b"xyz" + payload)
    return DenseArray("t", PartReader(source, part, verify), shape, **kwargs)


@given(st.data(), st.sampled_from("CF"), st.sampled_from([None, "zstd"]))
def test_indexing_equals_numpy(data: st.DataObject, order: Any, encoding: str | None) -> None:
    shape = data.draw(array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    array = np.arange(prod(shape), dtype="<i2").reshape(shape)
    payload = array.tobytes(order)
    if encoding:
        payload = zstandard.compress(payload)
    lazy = dense(payload, "int16", shape, order=order, encoding=encoding)
    key = data.draw(basic_indices(shape, allow_newaxis=False))
    np.testing.assert_array_equal(lazy[key], array[key])


@given(st.integers(0, 9), st.data())
def test_four_bit_elements_are_addressed_by_half_bytes(size: int, data: st.DataObject) -> None:
    codes = np.arange(size, dtype=np.uint8)
    padded = np.append(codes, np.zeros(size % 2, np.uint8))
    payload = (padded[0::2] | padded[1::2] << 4).tobytes()
    expected = codes.view(ml_dtypes.float4_e2m1fn)
    key = data.draw(st.slices(size))
    lazy = dense(payload, "float4_e2m1fn", (size,), strict=True)
    np.testing.assert_array_equal(lazy[key], expected.astype(np.float32)[key])
    stored = dense(payload, "float4_e2m1fn", (size,), decode=False)[key]
    assert stored.dtype == ml_dtypes.float4_e2m1fn
    np.testing.assert_array_equal(stored.view(np.uint8), codes[key])


def test_padding_of_four_bit_elements() -> None:
    payload = bytes([0x21, 0x43])
    assert dense(payload, "float4_e2m1fn", (3,))[:].shape == (3,)
    lazy = dense(payload, "float4_e2m1fn", (3,), strict=True)
    assert lazy[:2].shape == (2,)
    with pytest.raises(FormatError, match="padding"):
        lazy[:]


@pytest.mark.parametrize(
    ("key", "nbytes"),
    [(5, 400), ((5, 7), 4), ((5, slice(10, 20)), 40), (slice(2, 4), 800), (slice(0, 0), 0)],
)
def test_a_selection_reads_its_own_bytes(key: Any, nbytes: int) -> None:
    array = np.arange(1000, dtype="<f4").reshape(10, 100)
    lazy = dense(array.tobytes(), "float32", array.shape)
    np.testing.assert_array_equal(lazy[key], array[key])
    assert lazy.source.nbytes_read == nbytes


def test_fortran_order_reads_runs_of_the_last_axis() -> None:
    array = np.arange(1000, dtype="<f4").reshape(10, 100)
    lazy = dense(array.tobytes("F"), "float32", array.shape, order="F")
    np.testing.assert_array_equal(lazy[:, 5], array[:, 5])
    assert lazy.source.nbytes_read == 40
    assert lazy.chunks(400) == ((10,), (10,) * 10)


def test_big_endian() -> None:
    lazy = dense(np.array([1, 2], ">f4").tobytes(), "float32", (2,), byteorder="big")
    np.testing.assert_array_equal(lazy[:], [1, 2])


def test_compressed_data_is_one_chunk() -> None:
    payload = zstandard.compress(bytes(4000))
    lazy = dense(payload, "float32", (10, 100), encoding="zstd")
    assert lazy.chunks(400) == ((10,), (100,))


@pytest.mark.parametrize("size", [999, 1001])
def test_compressed_data_of_another_size_is_an_error(size: int) -> None:
    lazy = dense(zstandard.compress(bytes(size)), "uint8", (1000,), encoding="zstd")
    with pytest.raises(FormatError, match=r"tensor 't'"):
        lazy[:]


GOOD = "crc32c:0x8a9136aa"  # of 32 zero bytes


@pytest.mark.parametrize("verify", [True, None, False])
@pytest.mark.parametrize("digest", [GOOD, GOOD.replace("aa", "ab"), "crc32c:xyz"])
def test_digests_of_raw_data(verify: bool | None, digest: str) -> None:
    lazy = dense(bytes(32), "uint8", (32,), digest=digest, verify=verify)
    if digest == "crc32c:xyz" and verify is not False:
        with pytest.raises(FormatError, match="xyz"):
            lazy[:1]
    elif digest != GOOD and verify:
        with pytest.raises(IntegrityError, match=r"memory.*'t'"):
            lazy[:1]
    else:
        assert lazy[:1].tolist() == [0]


def test_tensors_without_elements_are_verified() -> None:
    assert dense(b"", "uint8", (0, 3), digest="crc32c:0x40")[:].shape == (0, 3)
    with pytest.raises(IntegrityError):
        dense(b"", "uint8", (0, 3), digest="crc32c:0x40", verify=True)[:]


def test_the_digest_of_compressed_data_is_checked_by_default() -> None:
    payload = zstandard.compress(bytes(32))
    lazy = dense(payload, "uint8", (32,), encoding="zstd", digest=GOOD)
    assert lazy[:1].tolist() == [0]
    with pytest.raises(IntegrityError):
        lazy[:]


def test_a_digest_of_an_unknown_algorithm_cannot_be_checked() -> None:
    for encoding, payload in ((None, bytes(32)), ("zstd", zstandard.compress(bytes(32)))):
        by_default = dense(payload, "uint8", (32,), encoding=encoding, digest="md5:00")
        assert by_default[:].tolist() == [0] * 32
        requested = dense(payload, "uint8", (32,), encoding=encoding, digest="md5:00", verify=True)
        with pytest.warns(CheckpointWarning, match="'md5:00' cannot be verified"):
            assert requested[:].tolist() == [0] * 32


def test_a_part_is_verified_once() -> None:
    lazy = dense(bytes(32), "uint8", (32,), digest=GOOD, verify=True)
    lazy[:1]
    read = lazy.source.nbytes_read
    lazy[:1]
    assert lazy.source.nbytes_read == read + 1


def test_dense_arrays_pickle_by_reference() -> None:
    lazy = dense(bytes(32), "uint8", (32,))
    copy = pickle.loads(pickle.dumps(lazy))
    np.testing.assert_array_equal(copy[:], lazy[:])


def test_an_empty_shape_that_numpy_refuses() -> None:
    lazy = dense(b"", "bfloat16", (0, 1 << 61))
    with pytest.raises(UnsupportedError, match="numpy has no array"):
        lazy[:]
