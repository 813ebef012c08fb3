"""What was kept is believed only if it can be true: forged and damaged records change nothing."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import pytest
import xarray as xr
import zstandard
from xxhash import xxh3_64_intdigest

import xckpt
from tests.conftest import golden_files
from tests.stats.reference import FLOATS, LARGE_INTEGERS, SMALL_INTEGERS, dtype_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

Array = np.ndarray[Any, np.dtype[Any]]

pytestmark = pytest.mark.usefixtures("sketches_only")

# Those that a file can have.
NOT_IN_FILES = {"float8_e3m4", "float6_e2m3fn", "int4", "uint4"}
TYPES = [n for n in (*FLOATS, *SMALL_INTEGERS, *LARGE_INTEGERS) if n not in NOT_IN_FILES]

# A file of what is kept: this, then records of a key, a length and a checksum each.
MAGIC = b"xckpt sketches 2"
HEAD = struct.Struct("<16sIQ")


def settled(path: Path, tensors: dict[str, Array]) -> Path:
    """Write a checkpoint that looks as if it had been there for a while."""
    xckpt.save(
        xr.Dataset({n: ([f"{n}.{k}" for k in range(a.ndim)], a) for n, a in tensors.items()}),
        path,
        progress=False,
    )
    os.utime(path, (1, 1))
    return path


def kept(cache_folder: Path) -> Path:
    """Return the only file of what is kept."""
    (path,) = (cache_folder / "stats-1").iterdir()
    return path


def payloads(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Take records apart: keys and what they have."""
    assert data.startswith(MAGIC)
    at = len(MAGIC)
    while at < len(data):
        key, length, _ = HEAD.unpack_from(data, at)
        at += HEAD.size + length
        yield key, data[at - length : at]


def joined(records: list[tuple[bytes, bytes]]) -> bytes:
    """Make a file of records, with right checksums."""
    heads = [HEAD.pack(key, len(data), xxh3_64_intdigest(data)) for key, data in records]
    return MAGIC + b"".join(h + data for h, (_, data) in zip(heads, records, strict=True))


def sketches(data: bytes) -> list[tuple[bytes, bytes]]:
    """Take sketches apart: their number, keys and lengths, then all of them in one zstd frame."""
    found = []
    for _, record in payloads(data):
        (count,) = struct.unpack_from("<I", record)
        lengths = struct.unpack_from(f"<{count}I", record, 4 + 16 * count)
        whole = zstandard.ZstdDecompressor().decompress(record[4 + 20 * count :])
        starts = [sum(lengths[:n]) for n in range(count)]
        found += [
            (record[4 + 16 * n : 20 + 16 * n], whole[start : start + lengths[n]])
            for n, start in enumerate(starts)
        ]
    return found


def of_sketches(found: list[tuple[bytes, bytes]]) -> bytes:
    """Make a file of sketches, with right checksums."""
    keys, data = zip(*found, strict=True)
    lengths = struct.pack(f"<{len(data)}I", *map(len, data))
    frame = zstandard.ZstdCompressor(level=1).compress(b"".join(data))
    head = struct.pack("<I", len(data)) + b"".join(keys) + lengths
    return joined([(bytes(16), head + frame)])


class Reading:
    """Computes, and says whether anything was read."""

    def __init__(self, function: Callable[..., xr.Dataset], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __call__(self, **options: Any) -> tuple[xr.Dataset, bool]:
        told: list[int] = []
        found = self.function(*self.arguments, progress=lambda n, _: told.append(n), **options)
        return found, any(told)


# --- what is true is believed --------------------------------------------------------------------


def values_of(name: str, rng: np.random.Generator, size: int) -> Array:
    """Give elements of a type, of any bits where all of these are numbers."""
    dtype = dtype_of(name)
    if name == "bool":
        return rng.random(size) < 0.5
    if name == "float4_e2m1fn":
        small: Array = rng.integers(0, 16, size).astype(np.uint8).view(dtype)
        return small
    return np.frombuffer(rng.bytes(size * dtype.itemsize), dtype)


def of_all_types() -> dict[str, Array]:
    import ml_dtypes

    rng = np.random.default_rng(0)
    tensors: dict[str, Array] = {}
    for name in TYPES:
        tensors[f"{name}.bits"] = values_of(name, rng, 3000).reshape(60, 50)
        with np.errstate(all="ignore"):
            near = (rng.standard_normal(40_000) * 3).astype(dtype_of(name))
        tensors[f"{name}.near"] = near.reshape(400, 100)
        zeros = np.zeros((7, 8), dtype_of(name))
        tensors[f"{name}.zeros"] = zeros
        tensors[f"{name}.few"] = near[:2]
        tensors[f"{name}.constant"] = np.repeat(near[1:2], 1000)
    for name in ("float32", "float64"):
        info = np.finfo(name)
        for number, scale in enumerate([info.smallest_subnormal, info.tiny, 1e-30, 1e30]):
            values = rng.integers(-9, 10, 20_000) * np.array(scale, name)
            tensors[f"{name}.scale{number}"] = values.astype(name)
        ends = rng.choice(
            np.array([info.max, -info.max, 0, -0.0, np.nan, np.inf, -np.inf], name), 500
        )
        tensors[f"{name}.ends"] = ends.astype(name)
        tensors[f"{name}.nan"] = np.full(5, np.nan, name)
        tensors[f"{name}.far"] = (1e6 + rng.random(30_000) * 1e-3).astype(name)
    for exponent in (-320, -161, -85, 85, 161, 300):
        spread = rng.standard_normal(20_000) * 10.0**exponent
        tensors[f"float64.e{exponent}"] = np.concatenate([np.zeros(16_384), spread])
    tensors["int64.large"] = rng.integers(2**62, 2**63 - 1, 20_000)
    tensors["rows"] = rng.integers(0, 2, (5000, 3)).astype(ml_dtypes.bfloat16)
    return tensors


def test_what_is_kept_of_all_types_is_believed(tmp_path: Path) -> None:
    path = settled(tmp_path / "m.safetensors", of_all_types())
    read = Reading(xckpt.stats, path)
    # Other quantiles of subnormal numbers are found by another pass.
    first, _ = read(quantiles=(0.0, 1.0))
    again, was_read = read(quantiles=(0.0, 1.0))
    assert not was_read
    xr.testing.assert_identical(again, first)


def test_what_is_kept_of_random_numbers_is_believed(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    tensors = {}
    for number in range(200):
        name = ("float32", "float64")[number % 2]
        most = np.log10(np.finfo(name).max) - 1
        low, high = sorted(rng.uniform(-most, most, 2).tolist())
        magnitudes = 10 ** rng.uniform(low, high, int(rng.integers(1, 50)))
        values = (magnitudes * rng.choice([-1, 1], len(magnitudes))).astype(name)
        values[rng.random(len(values)) < rng.choice([0, 0.3])] = rng.choice([0, np.nan, np.inf])
        tensors[f"w{number}"] = values
    read = Reading(xckpt.stats, settled(tmp_path / "m.safetensors", tensors))
    first, _ = read()
    again, was_read = read()
    assert not was_read
    xr.testing.assert_identical(again, first)


@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
def test_what_is_kept_of_stored_layouts_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = 0
    for number, path in enumerate(golden_files("ztensor/*.zt")):
        monkeypatch.setenv("XCKPT_CACHE_DIR", str(tmp_path / str(number)))
        try:
            read = Reading(xckpt.stats, path)
            first, _ = read(quantiles=(0.0, 1.0))
        except xckpt.CheckpointError:
            continue
        again, was_read = read(quantiles=(0.0, 1.0))
        assert not was_read, path
        xr.testing.assert_identical(again, first)
        checked += 1
    assert checked > 10


def test_what_is_kept_of_comparisons_is_believed(tmp_path: Path) -> None:
    tensors = of_all_types()
    paths = [settled(tmp_path / "a.safetensors", tensors)]
    others = {name: values[::-1].copy() for name, values in tensors.items()}
    paths.append(settled(tmp_path / "b.safetensors", others))
    read = Reading(xckpt.compare, *paths)
    first, _ = read()
    again, was_read = read()
    assert not was_read
    xr.testing.assert_identical(again, first)


# --- what is damaged is not ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["stats", "compare"])
def test_flipped_bytes_change_nothing(tmp_path: Path, cache_folder: Path, kind: str) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        name: (rng.standard_normal((9, 5)) * 50).astype(name)
        for name in ("float32", "float64", "float16", "int64", "uint8")
    }
    path = settled(tmp_path / "a.safetensors", tensors)
    read = Reading(xckpt.stats, path)
    if kind == "compare":
        others = {name: values[::-1].copy() for name, values in tensors.items()}
        read = Reading(xckpt.compare, path, settled(tmp_path / "b.safetensors", others))
    first, _ = read()
    stored = kept(cache_folder)
    data = stored.read_bytes()
    for _ in range(200):
        changed = bytearray(data)
        for at in rng.integers(0, len(data), rng.integers(1, 4)):
            changed[at] ^= rng.integers(1, 256)
        stored.write_bytes(changed)
        xr.testing.assert_identical(read()[0], first)


# --- nor is what somebody made up ----------------------------------------------------------------

FORGED_TYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int32", "int64", "uint64")


def numbers_like(number: int) -> list[Any]:
    """Return what may stand where an integer is."""
    wrong = {-number - 1, 10**6, 1 << 63, -(1 << 70)}
    return [str(each) for each in sorted(wrong - {number})] + ["", "x", None, 1.5]


def forged_arrays(data: bytes, dtype: str, changes: Iterable[int]) -> list[bytes]:
    """Return what may stand where an array is, after the size of its numbers."""
    values = np.frombuffer(data, f"u{data[0]}", offset=1).astype(dtype)
    size, whole = bytes([values.itemsize]), values.tobytes()
    found = [b"", data[:-1], b"\3" + data[1:], size + whole[values.itemsize :]]
    found += [size + whole + whole, size + values[::-1].tobytes()]
    for at in (0, len(values) // 2, -1):
        for change in (*changes, 1 << 20, (1 << 31) - 1):
            changed = values.copy()
            with np.errstate(over="ignore"):
                changed[at] += np.array(change).astype(dtype)
            found.append(size + changed.tobytes())
    return [each for each in found if each not in {data, size + whole}]


def forged_node(node: list[Any]) -> Iterator[list[Any]]:
    """Change a node of the tree of moments beyond what rounding explains."""
    yield node[:-1]
    yield [*node, 0.0]
    for at, number in enumerate(node):
        wrong: list[Any] = [None, "x"]
        if at < 5 or at == 8:
            wrong += [number + 1, number - 1]
        if at > 1:
            wrong += [float("nan"), float("inf"), -number - 1.0, number * 4 + 1, 1e300, 5e-324]
        if at in (2, 5, 7):  # a number of elements, and sums that have one value for these
            wrong += [0.0, number / 2, number * 1.5]
        for each in wrong:
            if each != number and not (at == 4 and each == 5e-324):
                yield [*node[:at], each, *node[at + 1 :]]


def forgeries(fields: dict[str, Any], is_exact: bool) -> Iterator[tuple[str, Any]]:
    """Return fields with what they are replaced by."""
    for name in ("nan", "inf", "zero", "negative_zero", "total", "implied", "row", "dead", "count"):
        number = int(fields[name])
        yield from ((name, each) for each in numbers_like(number))
        yield name, str(2 * number + 3)
        if name != "dead":  # any rows may be the zeros that there are
            yield name, str(number + 1)
        if name not in {"dead", "zero"}:  # nor is it known what numbers next to zero are
            yield name, str(number - 1)
    yield from (("kind", each) for each in ("float128", "int16", "float4_e2m1fn", "", None, 7))
    # A count of each of 256 or 65,536 values is all that is known of them.
    codes = forged_arrays(fields["codes"], "u4", () if is_exact else (1, 5, -1))
    yield from (("codes", each) for each in codes)
    yield from (("counts", each) for each in forged_arrays(fields["counts"], "i8", (1, 5, -1)))
    low, high = fields["extremes"]
    ends = [
        *(1.5 * 2.0**900, -1.5 * 2.0**900, float("nan"), float("inf"), None),
        *("x", 77777, -77777, 1, str(1 << 90)),
    ]
    yield from (("extremes", [each, high]) for each in ends if each != low)
    yield from (("extremes", [low, each]) for each in ends if each != high)
    yield from (
        ("extremes", each) for each in ([high, low], [low], [], None) if each != [low, high]
    )
    nodes = fields["nodes"]
    yield from (("nodes", each) for each in ([*nodes, [0, 1, *[0.0] * 7]], [*nodes, *nodes], None))
    if nodes:
        yield "nodes", nodes[1:]
        yield from (("nodes", [each, *nodes[1:]]) for each in forged_node(nodes[0]))
    yield from (("open", each) for each in ([[0, 1, True]], [[5, 2, False]], [[0, 1]], None, [7]))


@pytest.mark.parametrize("name", FORGED_TYPES)
def test_forged_fields_change_nothing(tmp_path: Path, cache_folder: Path, name: str) -> None:
    rng = np.random.default_rng(1)
    values = (rng.standard_normal((40, 50)) * 20 + 9).astype(dtype_of(name))
    values[3] = 0
    if values.dtype.kind == "f":
        values[4, :3] = [np.nan, np.inf, -0.0]
    # As many tensors as there are forgeries of one: all are tried at once.
    tensors = {f"w{number}": values for number in range(150)}
    read = Reading(xckpt.stats, settled(tmp_path / "m.safetensors", tensors))
    first, _ = read()
    stored = kept(cache_folder)
    records = sketches(stored.read_bytes())
    assert len(records) == len(tensors)
    fields = msgpack.unpackb(records[0][1])
    made = list(forgeries(fields, not fields["nodes"]))
    assert len(made) > (150 if values.dtype.itemsize > 2 else 100)
    for start in range(0, len(made), len(records)):
        changed = []
        for number, (key, data) in enumerate(records):
            field, value = made[(start + number) % len(made)]
            changed.append(
                (key, msgpack.packb(msgpack.unpackb(data) | {field: value}, default=str))
            )
        stored.write_bytes(of_sketches(changed))
        found, was_read = read()
        assert was_read
        xr.testing.assert_identical(found, first)


def test_records_of_other_tensors_change_nothing(tmp_path: Path, cache_folder: Path) -> None:
    rng = np.random.default_rng(1)
    shapes = [(40, 50), (50, 40), (2000,), (39, 50), (4, 500)]
    tensors = {
        f"{name}.{number}": (rng.standard_normal(shape) * 20).astype(dtype_of(name))
        for name in FORGED_TYPES
        for number, shape in enumerate(shapes)
        if shape[-1] != 40 or name == "float32"
    }
    # A tensor of the same type, size and rows is not told from another.
    read = Reading(xckpt.stats, settled(tmp_path / "m.safetensors", tensors))
    first, _ = read()
    stored = kept(cache_folder)
    records = sketches(stored.read_bytes())
    for shift in range(1, len(records), 3):
        moved = [(key, records[n - shift][1]) for n, (key, _) in enumerate(records)]
        stored.write_bytes(of_sketches(moved))
        xr.testing.assert_identical(read()[0], first)


def forged_comparisons(fields: list[Any]) -> Iterator[list[Any]]:
    counts, largest, nodes = fields
    for at, count in enumerate(counts):
        for each in numbers_like(int(count)):
            yield [[*counts[:at], each, *counts[at + 1 :]], largest, nodes]
    for each in (0.0, -1.0, largest * 100, largest / 1e6, float("nan"), float("inf"), None, "x"):
        yield [counts, each, nodes]
    yield [counts, largest, []]
    yield [counts, largest, nodes * 2]
    yield [counts, largest, [[1, 0, *nodes[0][2:]]]]
    for at, number in enumerate(nodes[0]):
        for each in (None, "x", -number - 1, number * 1e4 + 1, float("nan"), float("inf")):
            yield [counts, largest, [[*nodes[0][:at], each, *nodes[0][at + 1 :]]]]
    yield fields[:2]
    yield []


@pytest.mark.parametrize("name", ["float32", "float16", "int64"])
def test_forged_comparisons_change_nothing(tmp_path: Path, cache_folder: Path, name: str) -> None:
    rng = np.random.default_rng(2)
    values = (rng.standard_normal((40, 50)) * 20).astype(name)
    others = (values + rng.integers(0, 3, values.shape)).astype(name)
    if values.dtype.kind == "f":
        values[4, :3] = others[5, :3] = [np.nan, np.inf, -0.0]
    sides = [
        settled(tmp_path / f"{side}.safetensors", {f"w{n}": each for n in range(90)})
        for side, each in (("a", values), ("b", others))
    ]
    read = Reading(xckpt.compare, *sides)
    first, _ = read()
    stored = kept(cache_folder)
    records = sketches(stored.read_bytes())
    made = list(forged_comparisons(msgpack.unpackb(records[0][1])))
    assert len(made) > 80
    for start in range(0, len(made), len(records)):
        changed = [
            (key, msgpack.packb(made[(start + n) % len(made)]))
            for n, (key, _) in enumerate(records)
        ]
        stored.write_bytes(of_sketches(changed))
        found, was_read = read()
        assert was_read
        xr.testing.assert_identical(found, first)
