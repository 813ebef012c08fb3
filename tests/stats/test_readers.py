"""Statistics of tensors in every layout and encoding agree with numpy."""

from __future__ import annotations

import pickle
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr
import zstandard

from tests.conftest import golden_files
from tests.contracts.declared import computed
from tests.sources import CountingSource
from tests.sparse_arrays import csr, tensor_of
from tests.stats.reference import counted, exact_stats, scanned
from xckpt.arrays.dense import DenseArray
from xckpt.arrays.parts import PartReader
from xckpt.arrays.streams import ArrayStream, of_tensor
from xckpt.errors import CheckpointError, IntegrityError
from xckpt.index import Part
from xckpt.statistics import QUANTILES, stats
from xckpt.statistics.describe import describe_all
from xckpt.storage import digests

if TYPE_CHECKING:
    from pathlib import Path

    from xckpt.arrays.streams import ElementStream

NAMES = ("count", "nan", "inf", "zero", "min", "max", "absmax")


def dense(values: np.ndarray[Any, Any], dtype: str, data: bytes, **part: Any) -> DenseArray:
    described = Part(dtype, values.shape, 0, len(data), **part)
    return DenseArray("t", PartReader(CountingSource(data), described), values.shape)


def check(reader: ElementStream, values: np.ndarray[Any, Any]) -> Any:
    """Compare the statistics of a reader, whole and in two halves, with those of its array."""
    reader = pickle.loads(pickle.dumps(reader))
    (sketch,) = scanned(reader)
    (statistics,) = describe_all([sketch], QUANTILES)
    exact = exact_stats(np.asarray(values))
    for name, value in zip(NAMES, statistics, strict=False):
        assert value == exact[name] or np.isnan(exact[name]), name
    assert statistics[7] == pytest.approx(exact["mean"], rel=1e-13, abs=1e-15, nan_ok=True)
    assert statistics[8] == pytest.approx(exact["std"], rel=1e-13, nan_ok=True)
    if not reader.whole:
        blocks = list(reader.blocks(reader.size // 3, reader.size, np.empty(1 << 16, np.uint8)))
        assert sum(len(block) for _, (block,) in blocks) == reader.size - reader.size // 3
    return sketch


VALUES = np.random.default_rng(0).standard_normal((60, 50)).astype(np.float32)


def test_raw_elements_are_read_into_one_buffer() -> None:
    reader = of_tensor(dense(VALUES, "float32", VALUES.tobytes()))
    assert reader.array.is_raw
    check(reader, VALUES)
    buffer = np.empty(1 << 10, np.uint8)
    for _, (values,) in reader.blocks(0, VALUES.size, buffer):
        assert np.shares_memory(values, buffer)


def test_fortran_order() -> None:
    part = Part("float32", VALUES.shape, 0, VALUES.nbytes)
    source = CountingSource(VALUES.tobytes("F"))
    lazy = DenseArray("t", PartReader(source, part), VALUES.shape, order="F")
    assert check(of_tensor(lazy), VALUES).rows.length == 60


def test_rows_of_complex_numbers_in_fortran_order_are_those_of_their_c_order() -> None:
    values = VALUES.astype(np.complex64)
    values[7] = 0
    part = Part("complex64", values.shape, 0, values.nbytes)
    source = CountingSource(values.tobytes("F"))
    lazy = DenseArray("t", PartReader(source, part), values.shape, order="F")
    (sketch,) = scanned(of_tensor(lazy))
    assert (sketch.rows.length, sketch.rows.dead) == (50, 1)


def test_big_endian_elements() -> None:
    data = VALUES.astype(">f4").tobytes()
    reader = of_tensor(dense(VALUES, "float32", data, byteorder="big"))
    assert not reader.array.is_raw
    check(reader, VALUES)


def test_booleans_other_than_one_are_true() -> None:
    codes = np.random.default_rng(0).integers(0, 4, (9, 9)).astype(np.uint8)
    check(of_tensor(dense(codes, "bool", codes.tobytes())), codes != 0)
    words = codes.astype("<u4") << 8
    check(of_tensor(dense(words, "bool32", words.tobytes())), codes != 0)


@pytest.mark.parametrize("size", [1, 2, 7, 5000])
def test_packed_four_bit_floats(size: int) -> None:
    import ml_dtypes

    codes = np.random.default_rng(size).integers(0, 16, size + size % 2).astype(np.uint8)
    data = (codes[::2] | codes[1::2] << 4).tobytes()
    values = codes[:size].view(ml_dtypes.float4_e2m1fn)
    sketch = check(of_tensor(dense(values, "float4_e2m1fn", data)), values)
    assert sketch.kind.name == "float4_e2m1fn"


def test_tensors_of_one_and_of_zero_elements() -> None:
    for shape in ((), (0,), (3, 0), (1, 1)):
        values = np.ones(shape, np.float32)
        check(of_tensor(dense(values, "float32", values.tobytes())), values)


@pytest.mark.parametrize("digest_of", ["stored", "decoded"])
def test_compressed_elements_are_streamed(digest_of: Any) -> None:
    values = np.random.default_rng(0).integers(0, 50, 1_500_000).astype(np.float32)
    data = zstandard.ZstdCompressor(level=1).compress(values.tobytes())
    hasher = digests.Hasher("xxh3")
    hasher.update(data if digest_of == "stored" else values.tobytes())
    part: dict[str, Any] = {
        "encoding": "zstd",
        "decoded_nbytes": values.nbytes,
        "digest_of": digest_of,
    }
    reader = of_tensor(dense(values, "float32", data, digest=hasher.digest(), **part))
    assert reader.whole
    (sketch,) = scanned(reader)
    assert describe_all([sketch], [])[0, 7] == pytest.approx(values.astype(float).mean(), rel=1e-14)
    wrong = of_tensor(dense(values, "float32", data, digest="xxh3:0123456789abcdef", **part))
    with pytest.raises(IntegrityError, match="'t'"):
        scanned(wrong)


def sparse_tensor(layout: str, values: np.ndarray[Any, Any]) -> Any:
    if layout == "sparse_csr":
        return csr(values)
    # Some elements in two halves, which add up, and in no order.
    coords, stored = np.array(np.nonzero(values)), values[np.nonzero(values)]
    halves = np.r_[np.full(5, 0.25, "<f4"), stored[5:], stored[:5] - np.float32(0.25)]
    order = np.random.default_rng(0).permutation(len(halves))
    coords = np.hstack([coords, coords[:, :5]])[:, order]
    return tensor_of("sparse_coo", values.shape, {"values": halves[order], "coords": coords})


@pytest.mark.parametrize("layout", ["sparse_csr", "sparse_coo"])
@pytest.mark.parametrize("piece", [1 << 6, 4 << 20])
def test_sparse_tensors_count_implied_zeros(
    layout: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(0).integers(-8, 9, (80, 30)).astype(np.float32)
    values[np.random.default_rng(1).random(values.shape) < 0.8] = 0
    values[10:20] = 0
    lazy = sparse_tensor(layout, values)
    (unsplit,) = scanned(of_tensor(lazy))
    monkeypatch.setattr("xckpt.arrays.streams.PIECE_NBYTES", piece)
    sketch = check(of_tensor(lazy), values)
    assert sketch.rows.dead == (values == 0).all(axis=1).sum() >= 10
    assert sketch.implied == prod(values.shape) - np.count_nonzero(values)
    assert sketch.moments() == unsplit.moments()


def test_sparse_tensors_are_never_made_dense() -> None:
    shape = (1 << 40, 1 << 20)
    coords = np.array([[5, 1 << 39], [7, 9]])
    parts = {"values": np.array([3, 4], "<f4"), "coords": coords}
    lazy = tensor_of("sparse_coo", shape, parts)
    (sketch,) = scanned(of_tensor(lazy))
    (statistics,) = describe_all([sketch], [0.5])
    assert (sketch.count, sketch.zero) == (prod(shape), prod(shape) - 2)
    assert (statistics[0], statistics[3]) == (float(prod(shape)), float(prod(shape) - 2))
    assert statistics[10] == 5.0


@pytest.mark.parametrize("shape", [(7, 11, 13), (1, 1, 1000), (5,), (2, 0, 3), (1000, 1)])
def test_other_indexable_arrays(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xckpt.arrays.streams.PIECE_NBYTES", 100)
    values = np.random.default_rng(0).standard_normal(shape)
    reader = ArrayStream(values)
    for start in range(0, max(1, values.size), 17):
        for stop in (start + 1, start + 40, values.size):
            blocks = list(reader.blocks(start, min(stop, values.size), np.empty(1 << 16, np.uint8)))
            at = start
            for position, (block,) in blocks:
                assert position == at
                at += len(block)
            if blocks:
                joined = np.concatenate([block for _, (block,) in blocks])
                np.testing.assert_array_equal(joined, values.reshape(-1)[start:stop])


PATTERNS = ("ztensor/*.zt", "burnpack/*.bpk", "mlcp/*.*", "gptrs/*.bin", "primitiv/*.*")
GOLDEN = [
    path
    for pattern in PATTERNS
    for path in golden_files(pattern)
    if path.suffix not in {".npz", ".shard", ".json"} and "_shard_" not in path.name
]


def readable(path: Path) -> xr.Dataset:
    """Open a golden file with the tensors of numbers whose values can be had."""
    import xckpt

    ds = xr.open_dataset(path, engine=xckpt.read_index(path).format)
    good = {}
    for name, variable in ds.variables.items():
        try:
            values = variable.copy(data=computed({name: variable})[name])
        except CheckpointError:
            continue
        if values.dtype.kind in "biuf":
            good[name] = values
    return ds[list(good)].assign_attrs(computed=good)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: f"{path.parent.name}-{path.stem}")
@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
def test_golden_files(path: Path) -> None:
    ds = readable(path)
    st = stats(ds)
    assert set(st.data_vars) == set(ds.data_vars)
    for name, variable in ds.attrs["computed"].items():
        values = variable.values
        expected = counted(values)
        wide = values[np.isfinite(values)].astype(np.float64)
        if wide.size:
            expected["mean"], expected["std"] = float(wide.mean()), float(wide.std())
            expected["l2"] = float(np.linalg.norm(wide))
        statistics = dict(zip(st["statistic"].to_numpy(), st.variables[name].values, strict=True))
        for statistic in ("count", "nan", "inf", "zero", "min", "max", "absmax"):
            np.testing.assert_allclose(
                statistics[statistic], expected[statistic], err_msg=str(name)
            )
        # The largest numbers of both signs leave nothing of the others in numpy's mean.
        near = 1e-9 + 1e-15 * float(np.nan_to_num(expected["absmax"]))
        for statistic in ("mean", "std", "l2", "q0.05", "q0.5", "q0.999"):
            np.testing.assert_allclose(
                statistics[statistic],
                expected[statistic],
                rtol=2.0**-8,
                atol=near,
                err_msg=str(name),
            )
