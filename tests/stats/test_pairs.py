"""Comparisons of all types, layouts and memory orders agree with numpy."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction
from itertools import combinations_with_replacement, pairwise, product
from math import prod
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pytest
import xarray as xr
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.sources import CountingSource
from tests.sparse_arrays import coo, csr, tensor_of
from tests.stats.pairs import compared
from tests.stats.reference import FLOATS, LARGE_INTEGERS, SMALL_INTEGERS, dtype_of
from tests.stats.test_readers import GOLDEN, readable
from xckpt.arrays.dense import DenseArray
from xckpt.arrays.parts import PartReader
from xckpt.arrays.streams import (
    LEAF,
    ArrayStream,
    SparseStream,
    SparseZip,
    StoredStream,
    Zip,
    of_tensor,
    whole_leaves,
)
from xckpt.comparison import MEASURES, compare
from xckpt.comparison.measure import Comparison, compare_pairs, measures_of
from xckpt.comparison.pairs import pair_of, stored_pair
from xckpt.errors import CheckpointError
from xckpt.index import Part

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from xckpt.arrays.streams import ElementStream

Array = np.ndarray[Any, np.dtype[Any]]

TYPES = (*FLOATS, *SMALL_INTEGERS, *LARGE_INTEGERS)


def compare_readers(
    first: ElementStream, second: ElementStream, nbytes: int = 1 << 20, cuts: Sequence[int] = ()
) -> Comparison:
    """Compare in this thread, in spans between cuts."""
    pair: Any = pickle.loads(pickle.dumps(pair_of(first, second)))
    total = Comparison(pair.kinds, pair.size)
    bounds = [0, *cuts, pair.size]
    for start, stop in pairwise(bounds):
        part = Comparison.begin(pair, None)
        for at, sides in whole_leaves(pair.blocks(start, stop, np.empty(nbytes, np.uint8))):
            part.update(at, *sides)
        total.merge(part.close())
    assert total.count == pair.size
    return total


def measures(comparison: Comparison) -> list[float]:
    *row, exponent = comparison.row()
    [values] = measures_of(np.array([row]), int(exponent)).tolist()
    return list(values)


def compare_arrays(a: Array, b: Array, **options: Any) -> dict[str, float]:
    values = measures(compare_readers(ArrayStream(a), ArrayStream(b), **options))
    return dict(zip(MEASURES, values, strict=True))


def check(actual: dict[str, float], a: Array, b: Array) -> None:
    expected = compared(a, b)
    for measure in ("status", "count", "equal_fraction", "nan", "inf", "max_abs"):
        np.testing.assert_equal(actual[measure], expected[measure], err_msg=measure)
    for measure in ("rmse", "rel_l2", "cosine", "sqnr_db", "nmse"):
        # Decibels of ten near zero.
        slack = 1e-12 if measure == "sqnr_db" else 1e-13
        np.testing.assert_allclose(
            actual[measure], expected[measure], rtol=1e-13, atol=slack, err_msg=measure
        )


def sample(name: str, seed: int, size: int = LEAF + 1000) -> Array:
    """Give elements of a type: many small ones, and all that is special about it."""
    dtype = dtype_of(name)
    rng = np.random.default_rng(seed)
    if dtype.kind in "iu" and dtype.itemsize >= 4:
        info = np.iinfo(dtype)
        values = rng.integers(0, 5, size).astype(dtype)
        values[::7] = rng.integers(info.min >> 20, info.max >> 20, len(values[::7]))
        return values
    if dtype.itemsize <= 2:
        bits = rng.integers(0, 1 << 8 * dtype.itemsize, size).astype(f"u{dtype.itemsize}")
        if dtype.kind == "b":
            bits &= 1
        if "int4" in name or "float4" in name or "float6" in name:
            bits &= 0xF
        # More that is equal and finite.
        bits[size // 2 :] = bits[0]
        with np.errstate(invalid="ignore"):
            patterns: Array = bits.view(dtype)
            return patterns
    values = rng.integers(-3, 4, size) * rng.choice([1.0, 0.5, 1e-30], size)
    values[::9] = rng.standard_normal(len(values[::9]))
    values[3::500] = np.nan
    values[4::500] = np.inf
    values[5::700] = -np.inf
    values[6::300] = -0.0
    chosen: Array = values.astype(dtype)
    return chosen


@pytest.mark.parametrize(("first", "second"), [*combinations_with_replacement(TYPES, 2)], ids=str)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_all_pairs_of_types(first: str, second: str) -> None:
    a, b = sample(first, 1), sample(second, 2)
    # From the other type, so that much is equal.
    with np.errstate(invalid="ignore", over="ignore"):
        near = b.astype(np.float64)
        near[~np.isfinite(near) & (dtype_of(first).kind not in "fV")] = 1
        if dtype_of(first).kind in "fV" and first != "float8_e8m0fnu":
            a[::2] = near[::2].astype(a.dtype)
    check(compare_arrays(a, b), a, b)
    check(compare_arrays(b, a), b, a)


@pytest.mark.parametrize("name", TYPES)
def test_every_value_is_equal_to_itself(name: str) -> None:
    a = sample(name, 1)
    result = compare_arrays(a, a.copy())
    assert list(result.values()) == [0, a.size, 1, 0, 0, 0, 0, 0, 1, math.inf, 0]


def test_a_wider_copy_is_the_same() -> None:
    for name in ("bfloat16", "float16", "float8_e4m3fn", "int8", "bool"):
        a = sample(name, 1)
        with np.errstate(invalid="ignore"):
            for wide in ("float32", "float64"):
                assert compare_arrays(a, a.astype(wide))["status"] == 0
    ints = np.array([1, -5, 1 << 30], np.int32)
    assert compare_arrays(ints, ints.astype(np.int64))["status"] == 0
    assert compare_arrays(ints, ints.astype(np.complex64))["status"] == 0


def test_equality_of_special_values() -> None:
    nan = np.uint32(0x7FC00001).view(np.float32)
    a = np.array([np.nan, np.nan, 0.0, np.inf, np.inf, np.inf, 1.0, -np.inf], np.float32)
    b = np.array([nan, 1.0, -0.0, np.inf, -np.inf, 2.0, np.nan, np.nan], np.float32)
    result = compare_arrays(a, b)
    assert result["equal_fraction"] == 3 / 8
    assert (result["nan"], result["inf"]) == (3, 2)
    # Of the finite pairs only zero is left.
    assert [result[name] for name in MEASURES[5:]] == [0, 0, 0, 1, math.inf, 0]
    none = compare_arrays(a[4:6], b[4:6])
    assert np.isnan([none[name] for name in MEASURES[5:]]).all()


def test_zeros() -> None:
    zeros, filled = np.zeros(5, np.float32), np.ones(5, np.float32)
    result = compare_arrays(zeros, filled)
    assert (result["rel_l2"], result["rmse"]) == (math.inf, 1.0)
    assert (result["sqnr_db"], result["nmse"]) == (-math.inf, math.inf)
    assert math.isnan(result["cosine"])
    result = compare_arrays(filled, zeros)
    assert result["rel_l2"] == 1.0
    assert (result["sqnr_db"], result["nmse"]) == (0.0, 1.0)
    assert math.isnan(result["cosine"])
    assert compare_arrays(zeros, -zeros)["status"] == 0
    assert compare_arrays(zeros.astype(np.float64), zeros)["cosine"] == 1


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1, 1), (LEAF,), (LEAF + 1,)])
def test_sizes(shape: tuple[int, ...]) -> None:
    a = np.full(shape, 2.0, np.float32)
    check(compare_arrays(a, a), a, a)
    check(compare_arrays(a, a + np.float32(1)), a, a + np.float32(1))


@pytest.mark.parametrize("scale", [1e-200, 1e-310, 1e160, 1e300])
@pytest.mark.parametrize("mixed", [False, True])
def test_squares_that_leave_the_range(scale: float, mixed: bool) -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal(3 * LEAF) * scale
    if mixed:
        a[:LEAF] /= scale
    b = a * 1.5
    b[5] = np.nan
    result = compare_arrays(a, b)
    finite = np.isfinite(b)
    largest = np.abs(a).max()
    x, y = a[finite] / largest, b[finite] / largest
    assert result["max_abs"] == np.abs(a - b)[finite].max()
    assert result["rel_l2"] == pytest.approx(0.5, rel=1e-9)
    assert result["cosine"] == pytest.approx(1)
    rmse = float(np.sqrt(np.square(x - y).mean())) * largest
    assert result["rmse"] == pytest.approx(rmse, rel=1e-9, abs=1e-320)


def test_a_difference_beyond_the_range() -> None:
    a = np.array([1.7e308, 1.0])
    result = compare_arrays(a, -a)
    assert result["max_abs"] == math.inf
    assert result["cosine"] == -1
    assert result["rel_l2"] == 2


WHOLE = st.integers(-(1 << 63), (1 << 64) - 1) | st.builds(
    lambda power, off: max(-(1 << 63), min((1 << 64) - 1, (1 << power) + off)),
    st.integers(0, 64),
    st.integers(-3, 3),
)


@given(st.lists(st.tuples(WHOLE, st.integers(-3, 3)), min_size=1, max_size=20), st.data())
def test_integers_of_64_bits_are_exact(pairs: list[tuple[int, int]], data: st.DataObject) -> None:
    kinds = [data.draw(st.sampled_from(["int64", "uint64"])) for _ in range(2)]
    bounds = [np.iinfo(kind) for kind in kinds]
    sides = [
        [max(int(info.min), min(int(info.max), value)) for value in values]
        for info, values in zip(
            bounds, ([v for v, _ in pairs], [v + d for v, d in pairs]), strict=True
        )
    ]
    arrays = [np.array(side, kind) for side, kind in zip(sides, kinds, strict=True)]
    result = compare_arrays(*arrays)
    differences = [abs(x - y) for x, y in zip(*sides, strict=True)]
    assert result["equal_fraction"] == differences.count(0) / len(pairs)
    largest = max(differences)
    assert result["max_abs"] == (largest if largest <= 1 << 53 else pytest.approx(largest, 1e-15))


@given(
    st.lists(st.tuples(WHOLE, st.integers(-2, 2)), min_size=1, max_size=9),
    st.sampled_from(["int64", "uint64"]),
)
def test_integers_are_compared_with_floats_exactly(pairs: list[tuple[int, int]], kind: str) -> None:
    info = np.iinfo(kind)
    integers = [max(int(info.min), min(int(info.max), value)) for value, _ in pairs]
    floats = np.array(integers, np.float64)
    for at, (_, steps) in enumerate(pairs):
        for _ in range(abs(steps)):
            floats[at] = np.nextafter(floats[at], math.copysign(math.inf, steps))
    result = compare_arrays(np.array(integers, kind), floats)
    exact = [abs(Fraction(x) - Fraction(y)) for x, y in zip(integers, floats.tolist(), strict=True)]
    assert result["equal_fraction"] == exact.count(Fraction(0)) / len(pairs)
    assert result["max_abs"] == pytest.approx(float(max(exact)), rel=1e-15, abs=1e-300)


def test_complex_numbers() -> None:
    rng = np.random.default_rng(0)
    a = (rng.standard_normal(LEAF + 9) + 1j * rng.standard_normal(LEAF + 9)).astype(np.complex64)
    b = a * np.complex64(1.0 + 0.5j)
    b[0], b[1], b[2] = a[0], np.nan, np.inf
    result = compare_arrays(a, b)
    x, y = a.astype(np.complex128), b.astype(np.complex128)
    finite = np.r_[0, 3 : len(a)]
    d = np.abs(x - y)[finite]
    assert result["equal_fraction"] == 1 / len(a)
    assert (result["nan"], result["inf"]) == (1, 1)
    assert result["max_abs"] == d.max()
    assert result["rmse"] == pytest.approx(np.sqrt((d**2).mean()), rel=1e-13)
    assert result["rel_l2"] == pytest.approx(
        np.linalg.norm(d) / np.linalg.norm(x[finite]), rel=1e-13
    )
    product = (
        np.vdot(x[finite], y[finite]).real / np.linalg.norm(x[finite]) / np.linalg.norm(y[finite])
    )
    assert result["cosine"] == pytest.approx(product, rel=1e-13)
    ds = xr.Dataset({"z": ("n", a)})
    assert compare(ds, xr.Dataset({"z": ("n", b)}))["z"].values.tolist() == list(result.values())
    assert compare(ds, ds.chunk(n=100))["z"].sel(statistic="status") == 0


@given(
    hnp.arrays(np.float32, st.integers(0, 40)),
    st.integers(0, 40),
    st.sampled_from([None, np.nan, np.inf, -0.0, 1e30]),
)
def test_any_pair_of_arrays(a: Array, at: int, put: float | None) -> None:
    b = a.copy()
    if put is not None and len(b):
        b[at % len(b)] = put
    check(compare_arrays(a, b), a, b)


# --- the same bits ------------------------------------------------------------------------------


def test_blocks_and_spans_do_not_matter() -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal(5 * LEAF + 77).astype(np.float32)
    b = (a * 1.01).astype(np.float16)
    b[3 * LEAF + 5] = np.nan
    expected = measures(compare_readers(ArrayStream(a), ArrayStream(b)))
    for nbytes, cuts in product((1 << 17, 1 << 20, 1 << 22), ([], [LEAF], [2 * LEAF, 3 * LEAF])):
        result = compare_readers(ArrayStream(a), ArrayStream(b), nbytes, cuts)
        assert measures(result) == expected


@given(st.lists(st.integers(0, 3 * LEAF + 7), max_size=6))
def test_chunks_anywhere_do_not_matter(cuts: list[int]) -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal(3 * LEAF + 7)
    b = a + 1e-3
    pair = pair_of(ArrayStream(a), ArrayStream(b))
    assert isinstance(pair, Zip)
    total = Comparison(pair.kinds, pair.size)
    bounds = pairwise(sorted([0, *cuts, len(a)]))
    blocks = ((start, (a[start:stop], b[start:stop])) for start, stop in bounds)
    for start, sides in whole_leaves(blocks):
        part = Comparison(pair.kinds, pair.size)
        part.update(start, *sides)
        total.merge(part.close())
    assert measures(total) == measures(compare_readers(ArrayStream(a), ArrayStream(b)))


def test_comparisons_survive_packing() -> None:
    a = np.random.default_rng(0).standard_normal(5 * LEAF + 3)
    comparison = compare_readers(ArrayStream(a), ArrayStream(a * 2))
    unpacked = Comparison.unpack(comparison.pack(), pair_of(ArrayStream(a), ArrayStream(a)))
    assert vars(unpacked) | {"tree": unpacked.tree.nodes} == vars(comparison) | {
        "tree": comparison.tree.nodes
    }


# --- layouts ------------------------------------------------------------------------------------

VALUES = np.random.default_rng(0).standard_normal((60, 50)).astype(np.float32)


def dense(values: Array, dtype: str, data: bytes, order: str = "C", **part: Any) -> DenseArray:
    described = Part(dtype, values.shape, 0, len(data), **part)
    reader = PartReader(CountingSource(data), described)
    return DenseArray("t", reader, values.shape, order=order)


def layouts(values: Array) -> dict[str, ElementStream]:
    """Give readers of one tensor that is stored in many ways."""
    compress = zstandard.ZstdCompressor(level=1).compress
    c, f = values.tobytes(), values.tobytes("F")
    zstd: dict[str, Any] = {"encoding": "zstd", "decoded_nbytes": values.nbytes}
    lazy = {
        "C": dense(values, "float32", c),
        "F": dense(values, "float32", f, "F"),
        "big": dense(values, "float32", values.astype(">f4").tobytes(), byteorder="big"),
        "big F": dense(values, "float32", values.astype(">f4").tobytes("F"), "F", byteorder="big"),
        "zstd": dense(values, "float32", compress(c), **zstd),
        "zstd F": dense(values, "float32", compress(f), "F", **zstd),
        "csr": csr(values),
        "coo": coo(values, shuffle=True),
    }
    readers: dict[str, ElementStream] = {name: of_tensor(array) for name, array in lazy.items()}
    return readers | {"memory": ArrayStream(np.asfortranarray(values))}


@pytest.mark.parametrize("piece", [1000, 4 << 20])
@pytest.mark.parametrize("sliceable", [False, True])
def test_layouts_and_memory_orders(
    piece: int, sliceable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xckpt.arrays.streams.PIECE_NBYTES", piece)
    monkeypatch.setattr("xckpt.comparison.pairs.is_mapped", lambda _: sliceable)
    a = VALUES.copy()
    a[np.random.default_rng(1).random(a.shape) < 0.7] = 0
    b = a * np.float32(1.25)
    b[7] = 0
    b[8, 3], a[9, 9] = np.nan, 0
    ours, theirs = layouts(a), layouts(b)
    expected = compared(a, b)
    for (name, first), (second_layout, second) in product(ours.items(), theirs.items()):
        result = measures(compare_readers(first, second, 1 << 18))
        np.testing.assert_allclose(
            result, [expected[m] for m in MEASURES], rtol=1e-13, err_msg=f"{name}, {second_layout}"
        )
        same = compare_readers(first, layouts(a)[second_layout])
        assert same.equal == same.count == a.size, f"{name}, {second_layout}"


def test_equal_stored_bytes_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    a = VALUES.copy()
    a[np.random.default_rng(1).random(a.shape) < 0.7] = 0
    b = a.copy()
    b[-1, -1] += 1
    names = ["big", "big F", "zstd", "zstd F", "csr", "coo"]
    ours, same, theirs = layouts(a), layouts(a), layouts(b)
    decoded: list[str] = []
    for kind in (StoredStream, SparseZip):
        original: Any = kind.blocks

        def blocks(self: Any, *args: Any, _original: Any = original) -> Any:
            decoded.append(type(self).__name__)
            return _original(self, *args)

        monkeypatch.setattr(kind, "blocks", blocks)
    for theirs_or_copy, status in ((same, 0), (theirs, 1)):
        pairs = [pair_of(ours[name], theirs_or_copy[name], name) for name in names]
        rows = compare_pairs(pairs, progress=False, cache=False)
        assert rows[:, :2].tolist() == [[status, a.size]] * len(names)
        assert bool(decoded) == bool(status)
    assert decoded.count("StoredStream") == 8
    assert decoded.count("SparseZip") == 2


def test_stored_bytes_of_different_meaning_are_decoded() -> None:
    ours = layouts(VALUES)
    for name, second in product(ours, ours):
        is_raw = "C" in (name, second) or "F" in (name, second) or "memory" in (name, second)
        pair = stored_pair(pair_of(ours[name], ours[second]))
        assert (pair is None) == (is_raw or name != second), (name, second)
    lazy = ours["zstd"].array
    checked = DenseArray("t", PartReader(lazy.source, lazy.reader.part, True), lazy.shape)  # noqa: FBT003
    assert stored_pair(pair_of(of_tensor(checked), ours["zstd"])) is None


def test_three_axes_in_both_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xckpt.arrays.streams.PIECE_NBYTES", 400)
    monkeypatch.setattr("xckpt.comparison.pairs.is_mapped", lambda _: True)
    values = np.arange(11 * 13 * 17, dtype=np.float32).reshape(11, 13, 17)
    c = of_tensor(dense(values, "float32", values.tobytes()))
    f = of_tensor(dense(values, "float32", values.tobytes("F"), "F"))
    for first, second in ((c, f), (f, c), (f, f)):
        assert compare_readers(first, second).equal == values.size
    moved = of_tensor(dense(values, "float32", values[::-1].tobytes("F"), "F"))
    check(
        dict(zip(MEASURES, measures(compare_readers(c, moved)), strict=True)), values, values[::-1]
    )


def test_sparse_tensors_are_never_made_dense() -> None:
    shape = (1 << 40, 1 << 20)
    readers = []
    for columns in ([7, 9], [7, 10]):
        parts = {"values": np.array([3, 4], "<f4"), "coords": np.array([[5, 1 << 39], columns])}
        readers.append(of_tensor(tensor_of("sparse_coo", shape, parts)))
    assert all(isinstance(reader, SparseStream) for reader in readers)
    assert isinstance(pair_of(readers[0], readers[1]), SparseZip)
    result = compare_readers(readers[0], readers[1])
    assert result.count == result.finite == prod(shape)
    assert result.equal == prod(shape) - 2
    assert measures(result)[6:9] == pytest.approx(
        [math.sqrt(32 / prod(shape)), 32**0.5 / 5, 9 / 25]
    )


def test_many_stored_values_of_sparse_tensors() -> None:
    """So many rows and elements that they are read in blocks."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((200_000, 6)).astype(np.float32)
    b = a + np.float32(1e-3)
    a[rng.random(a.shape) < 0.6] = 0
    b[rng.random(a.shape) < 0.6] = 0
    first, second = (
        of_tensor(csr(a)),
        of_tensor(coo(b, shuffle=True)),
    )
    check(dict(zip(MEASURES, measures(compare_readers(first, second)), strict=True)), a, b)


def test_errors_name_their_file(tmp_path: Path) -> None:
    from tests.stats.checkpoints import write

    ours = write(tmp_path / "a.safetensors", {"w": VALUES})
    theirs = write(tmp_path / "b.safetensors", {"w": VALUES})
    lazy = xr.open_dataset(theirs, engine="safetensors")
    with theirs.open("r+b") as file:
        file.truncate(500)
    with pytest.raises(CheckpointError, match=r"b\.safetensors.*'w'"):
        compare(ours, lazy)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: f"{path.parent.name}-{path.stem}")
@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
def test_golden_files(path: Path) -> None:
    ds = readable(path)
    loaded = xr.Dataset({name: v.copy() for name, v in ds.attrs["computed"].items()})
    result = compare(ds, loaded)
    assert set(result.data_vars) == set(ds.data_vars)
    status = [result.variables[name].values[0] for name in loaded.variables]
    assert not np.any(status)
    with np.errstate(invalid="ignore"):  # signalling NaN
        halves = {
            n: (v.dims, v.values.astype(np.float64) * 0.5) for n, v in loaded.variables.items()
        }
    halved = xr.Dataset(halves)
    with dask.config.set(num_workers=1):
        result = compare(ds, halved)
    for name in loaded.variables:
        variable = result.variables[name]
        expected = compared(loaded.variables[name].values, halved.variables[name].values)
        values = dict(zip(MEASURES, variable.values.reshape(len(MEASURES), -1)[:, 0], strict=True))
        if variable.ndim == 1:
            for measure in ("status", "count", "equal_fraction", "nan", "inf"):
                assert values[measure] == expected[measure], (name, measure)
            for measure in ("max_abs", "rmse", "rel_l2", "cosine"):
                np.testing.assert_allclose(values[measure], expected[measure], rtol=1e-6)
