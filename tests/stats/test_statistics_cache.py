"""The cache of statistics: a repeated call is fast, and a cached result is never wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.conftest import GOLDEN
from tests.stats.checkpoints import model, settled, sparse_file, write
from tests.stats.reference import FLOATS, LARGE_INTEGERS, SMALL_INTEGERS, dtype_of
from xckpt.arrays.kinds import kind_named
from xckpt.comparison import measure
from xckpt.scan import statistics_cache
from xckpt.scan.statistics_cache import key_of, open_records, open_rows
from xckpt.statistics import computing, exact_quantiles, histograms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Array = np.ndarray[Any, np.dtype[Any]]

# Types that a file can have.
NOT_IN_FILES = {"float8_e3m4", "float6_e2m3fn", "int4", "uint4"}
TYPES = [n for n in (*FLOATS, *SMALL_INTEGERS, *LARGE_INTEGERS) if n not in NOT_IN_FILES]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return settled(write(tmp_path / "m.safetensors", model()))


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the names of tensors whose elements or sketches are looked at."""
    names: list[str] = []

    def recording(gather: Any) -> Any:
        def wrapped(readers: Any, *args: Any, **kwargs: Any) -> Any:
            names.extend(reader.name for reader in readers)
            return gather(readers, *args, **kwargs)

        return wrapped

    for module in (computing, exact_quantiles, histograms, measure):
        monkeypatch.setattr(module, "gather", recording(module.gather))
    return names


def cached_file(cache_folder: Path) -> Path:
    """Return the file of the only checkpoint in the cache."""
    (path,) = (cache_folder / statistics_cache.FOLDER).iterdir()
    return path


TENSOR: Any = SimpleNamespace(
    kind=kind_named("float32"), identity=((("data", "/of/m.zt", (9, 1, 1, 1)),), "w")
)
NOISE = np.random.default_rng(0).bytes(24 << 20)


def rows_of_size(nbytes: int, number: int) -> bool:
    """Cache a row of some bytes, and return whether it had to be computed."""
    row = np.frombuffer(NOISE[:nbytes], "<f8")
    with open_rows([TENSOR], (number,), len(row), enabled=True) as rows:
        rows.add([row] * len(rows.missing))
    assert rows.values.tobytes() == row.tobytes()
    return bool(rows.missing)


def save(path: Path, tensors: dict[str, Array]) -> Path:
    """Write a checkpoint of any element types that looks as if it had been there for a while."""
    variables = {
        name: ([f"{name}.{axis}" for axis in range(array.ndim)], array)
        for name, array in tensors.items()
    }
    xckpt.save(xr.Dataset(variables), path, progress=False)
    return settled(path)


def random_bits(name: str, rng: np.random.Generator, size: int) -> Array:
    """Give elements of any bits, where all bits stand for numbers."""
    dtype = dtype_of(name)
    if name == "bool":
        return rng.random(size) < 0.5
    if name == "float4_e2m1fn":
        small: Array = rng.integers(0, 16, size).astype(np.uint8).view(dtype)
        return small
    return np.frombuffer(rng.bytes(size * dtype.itemsize), dtype)


def tensors_of_all_types() -> dict[str, Array]:
    """Give tensors of all element types, shapes, and scales of numbers."""
    rng = np.random.default_rng(0)
    tensors: dict[str, Array] = {}
    for name in TYPES:
        tensors[f"{name}.bits"] = random_bits(name, rng, 3000).reshape(60, 50)
        with np.errstate(all="ignore"):
            normal = (rng.standard_normal(40_000) * 3).astype(dtype_of(name))
        tensors[f"{name}.normal"] = normal.reshape(400, 100)
        tensors[f"{name}.zeros"] = np.zeros((7, 8), dtype_of(name))
        tensors[f"{name}.few"] = normal[:2]
        tensors[f"{name}.constant"] = np.repeat(normal[1:2], 1000)
    for name in ("float32", "float64"):
        info = np.finfo(name)
        for number, scale in enumerate([info.smallest_subnormal, info.tiny, 1e-30, 1e30]):
            values = rng.integers(-9, 10, 20_000) * np.array(scale, name)
            tensors[f"{name}.scale{number}"] = values.astype(name)
        ends = [info.max, -info.max, 0, -0.0, np.nan, np.inf, -np.inf]
        tensors[f"{name}.ends"] = rng.choice(np.array(ends, name), 500)
        tensors[f"{name}.nan"] = np.full(5, np.nan, name)
        tensors[f"{name}.offset"] = (1e6 + rng.random(30_000) * 1e-3).astype(name)
    for exponent in (-320, -161, -85, 85, 161, 300):
        spread = rng.standard_normal(20_000) * 10.0**exponent
        tensors[f"float64.e{exponent}"] = np.concatenate([np.zeros(16_384), spread])
    tensors["int64.large"] = rng.integers(2**62, 2**63 - 1, 20_000)
    return tensors


# --- a repeated call -----------------------------------------------------------------------------


def test_a_second_call_reads_nothing(path: Path, read: list[int]) -> None:
    first = xckpt.stats(path)
    assert sum(read) == sum(array.size for array in model().values())
    read.clear()
    xr.testing.assert_identical(xckpt.stats(path), first)
    assert xckpt.histogram(path)["embed"].sum() == 64 * 32
    assert read == []


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Write two checkpoints of all element types."""
    folder = tmp_path_factory.mktemp("types")
    tensors = tensors_of_all_types()
    reversed_rows = {name: values[::-1].copy() for name, values in tensors.items()}
    return [save(folder / "a.safetensors", tensors), save(folder / "b.safetensors", reversed_rows)]


class TestElementTypes:
    @pytest.mark.parametrize(
        "call",
        [
            lambda a, _: xckpt.stats(a),
            lambda a, _: xckpt.stats(a, quantiles=[0.9, 0.1]),
            lambda a, _: xckpt.stats(a, exact_quantiles=True),
            lambda a, _: xckpt.stats(a, channels=True),
            lambda a, _: xckpt.histogram(a),
            lambda a, _: xckpt.histogram(a, bins=[-1.0, 0.0, 1.0]),
            xckpt.compare,
        ],
    )
    def test_a_repeated_call_computes_nothing(
        self, paths: list[Path], scanned: list[str], call: Callable[..., xr.Dataset]
    ) -> None:
        first = call(*paths)
        assert scanned
        scanned.clear()
        xr.testing.assert_identical(call(*paths), first)
        assert scanned == []

    def test_other_options_follow_from_cached_sketches(
        self, paths: list[Path], read: list[int]
    ) -> None:
        xckpt.stats(paths[0], channels=True, quantiles=[0.0])
        read.clear()
        for channels in (False, True):
            # Other quantiles of subnormal numbers take another pass.
            again = xckpt.stats(paths[0], channels=channels, quantiles=[0.0, 1.0])
            assert read == []
            expected = xckpt.stats(paths[0], channels=channels, quantiles=[0.0, 1.0], cache=False)
            xr.testing.assert_identical(again, expected)
            read.clear()
        cached = xckpt.histogram(paths[0])
        assert read == []
        xr.testing.assert_identical(cached, xckpt.histogram(paths[0], cache=False))


@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
def test_stored_layouts_come_back_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: list[int]
) -> None:
    checked = 0
    for number, path in enumerate(sorted(GOLDEN.glob("ztensor/*.zt"))):
        monkeypatch.setenv("XCKPT_CACHE_DIR", str(tmp_path / str(number)))
        try:
            xckpt.stats(path, quantiles=[0.0])
        except xckpt.CheckpointError:
            continue
        read.clear()
        again = xckpt.stats(path, quantiles=[0.0, 1.0])
        assert sum(read) == 0, path
        xr.testing.assert_identical(again, xckpt.stats(path, quantiles=[0.0, 1.0], cache=False))
        checked += 1
    assert checked > 10


def test_a_call_for_other_selections_computes_nothing(path: Path, scanned: list[str]) -> None:
    ds = xr.open_dataset(path, engine="safetensors")
    first = xckpt.stats(ds)
    scanned.clear()
    layers = ds.ckpt.find("layers.*")
    xr.testing.assert_identical(
        xckpt.stats(layers).drop_attrs(), first[list(layers.data_vars)].drop_attrs()
    )
    stacked = ds.ckpt.stack()
    again = xckpt.stats(stacked)["layers.w"].sel(layers=2)
    np.testing.assert_array_equal(again.values, first["layers.2.w"].values)
    assert ds.ckpt.findings(xckpt.stats(ds)).equals(xckpt.findings(first))
    assert scanned == []


def test_only_new_tensors_are_computed(path: Path, scanned: list[str]) -> None:
    ds = xr.open_dataset(path, engine="safetensors")
    xckpt.stats(ds[["embed", "mask"]])
    scanned.clear()
    xckpt.stats(ds)
    assert set(scanned) == set(ds.data_vars) - {"embed", "mask"}


# --- what is not cached --------------------------------------------------------------------------


def test_nothing_is_cached_without_permission(
    path: Path, read: list[int], cache_folder: Path
) -> None:
    xckpt.stats(path, cache=False)
    assert not cache_folder.exists()
    xckpt.stats(path)
    read.clear()
    xckpt.stats(path, cache=False)
    assert read


def test_a_changed_file_is_read_again(path: Path, read: list[int]) -> None:
    before = xckpt.stats(path)
    settled(write(path, model(seed=1)), 30)
    read.clear()
    after = xckpt.stats(path)
    assert sum(read) == sum(array.size for array in model().values())
    assert not after["embed"].equals(before["embed"])
    xr.testing.assert_identical(after, xckpt.stats(path, cache=False))


def test_a_file_that_was_just_written_is_not_cached(tmp_path: Path, cache_folder: Path) -> None:
    path = write(tmp_path / "now.safetensors", model())
    os.utime(path)
    xckpt.stats(path)
    assert not cache_folder.exists()


def test_bytes_in_memory_are_not_cached(path: Path, scanned: list[str]) -> None:
    data = bytearray(path.read_bytes())
    for changed in (False, True):
        if changed:
            data[-4:] = bytes(4)
        scanned.clear()
        xckpt.stats(bytes(data))
        assert len(scanned) == len(model())


class TestUnwritableCache:
    @pytest.fixture(autouse=True)
    def nowhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XCKPT_CACHE_DIR", "/dev/null/nowhere")

    def test_rows_stay_in_memory(self, path: Path, scanned: list[str]) -> None:
        first = xckpt.stats(path)
        scanned.clear()
        xr.testing.assert_identical(xckpt.stats(path), first)
        assert scanned == []
        xckpt.stats(path, cache=False)
        assert scanned

    def test_memory_is_bounded(self) -> None:
        computed = [rows_of_size(8 << 20, number) for number in range(10)]
        assert all(computed)
        assert not rows_of_size(8 << 20, 9)
        assert rows_of_size(8 << 20, 0)


# --- interrupted calls ---------------------------------------------------------------------------


def several_tasks(path: Path, value: int = 0) -> Path:
    """Write six tensors of 16 MiB, which make a task each."""
    return settled(write(path, {f"w{n}": np.full(16 << 20, n + value, np.uint8) for n in range(6)}))


@pytest.fixture
def one_thread() -> Iterator[None]:
    with dask.config.set(num_workers=1):
        yield


@pytest.mark.usefixtures("one_thread")
def test_an_interrupted_scan_resumes(tmp_path: Path, read: list[int]) -> None:
    ds = xr.open_dataset(several_tasks(tmp_path / "m.safetensors"), engine="safetensors")

    def interrupt(done: int, _: int) -> None:
        if done > 40 << 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        xckpt.stats(ds, progress=interrupt)
    assert len(read) < 6
    read.clear()
    resumed = xckpt.stats(ds)
    assert 0 < len(read) < 6
    xr.testing.assert_identical(resumed, xckpt.stats(ds, cache=False))


@pytest.mark.usefixtures("one_thread")
def test_an_interrupted_comparison_resumes(tmp_path: Path, read: list[int]) -> None:
    paths = [several_tasks(tmp_path / f"{n}.safetensors", n) for n in range(2)]

    def interrupt(done: int, _: int) -> None:
        if done > 80 << 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        xckpt.compare(*paths, progress=interrupt)
    read.clear()
    resumed = xckpt.compare(*paths)
    assert 0 < sum(read) < 6 * 16 << 20
    xr.testing.assert_identical(resumed, xckpt.compare(*paths, cache=False))


@pytest.mark.usefixtures("one_thread")
def test_a_large_tensor_resumes_where_it_was(tmp_path: Path, read: list[int]) -> None:
    size = 5 << 27
    path = settled(sparse_file(tmp_path / "m.safetensors", "U8", size, size))

    def interrupt(done: int, _: int) -> None:
        if done > 0.8 * size:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        xckpt.stats(path, progress=interrupt)
    read.clear()
    reports: list[tuple[int, int]] = []
    resumed = xckpt.stats(path, progress=lambda *nbytes: reports.append(nbytes))
    assert 0 < sum(read) < size / 2
    assert reports[-1] == (sum(read), sum(read))
    assert resumed["w"].sel(statistic=["count", "zero"]).to_numpy().tolist() == [size, size]


# --- damaged and other records -------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    """Write two tiny checkpoints of several element types."""
    rng = np.random.default_rng(0)
    tensors = {
        name: (rng.standard_normal((9, 5)) * 50).astype(name)
        for name in ("float32", "float64", "float16", "int64", "uint8")
    }
    reversed_rows = {name: values[::-1].copy() for name, values in tensors.items()}
    return [
        save(tmp_path / "a.safetensors", tensors),
        save(tmp_path / "b.safetensors", reversed_rows),
    ]


@pytest.mark.parametrize("kind", ["stats", "compare"])
class TestDamage:
    @pytest.fixture
    def call(self, kind: str, pair: list[Path]) -> Callable[[], xr.Dataset]:
        if kind == "stats":
            return lambda: xckpt.stats(pair[0], progress=False)
        return lambda: xckpt.compare(*pair, progress=False)

    def test_flipped_bytes_change_nothing(
        self, call: Callable[[], xr.Dataset], cache_folder: Path
    ) -> None:
        rng = np.random.default_rng(0)
        first = call()
        path = cached_file(cache_folder)
        data = path.read_bytes()
        for _ in range(150):
            damaged = bytearray(data)
            for position in rng.integers(0, len(data), rng.integers(1, 4)):
                damaged[position] ^= rng.integers(1, 256)
            path.write_bytes(damaged)
            xr.testing.assert_identical(call(), first)

    def test_every_byte_of_the_heads_may_be_wrong(
        self, call: Callable[[], xr.Dataset], cache_folder: Path
    ) -> None:
        first = call()
        path = cached_file(cache_folder)
        data = path.read_bytes()
        for position in range(64):
            path.write_bytes(data[:position] + b"\xff" + data[position + 1 :])
            xr.testing.assert_identical(call(), first)

    def test_a_cut_file_changes_nothing_and_is_repaired(
        self, call: Callable[[], xr.Dataset], cache_folder: Path, read: list[int]
    ) -> None:
        first = call()
        path = cached_file(cache_folder)
        data = path.read_bytes()
        for size in range(0, len(data), 37):
            path.write_bytes(data[:size])
            xr.testing.assert_identical(call(), first)
            read.clear()
            xr.testing.assert_identical(call(), first)
            assert read == [], size

    @pytest.mark.parametrize("content", [b"", b"something else", bytes(4000)])
    def test_another_file_is_replaced(
        self, call: Callable[[], xr.Dataset], cache_folder: Path, read: list[int], content: bytes
    ) -> None:
        first = call()
        cached_file(cache_folder).write_bytes(content)
        xr.testing.assert_identical(call(), first)
        read.clear()
        xr.testing.assert_identical(call(), first)
        assert read == []

    def test_garbage_at_the_end_loses_nothing(
        self, call: Callable[[], xr.Dataset], cache_folder: Path, read: list[int]
    ) -> None:
        first = call()
        with cached_file(cache_folder).open("ab") as file:
            file.write(np.random.default_rng(0).bytes(500))
        read.clear()
        xr.testing.assert_identical(call(), first)
        assert read == []

    def test_records_of_another_version_are_ignored(
        self,
        call: Callable[[], xr.Dataset],
        read: list[int],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        first = call()
        # Another version of the package cannot be installed beside this one.
        monkeypatch.setattr(statistics_cache, "VERSION", statistics_cache.VERSION + 1)
        read.clear()
        xr.testing.assert_identical(call(), first)
        assert read
        read.clear()
        for version in (statistics_cache.VERSION, statistics_cache.VERSION - 1):
            monkeypatch.setattr(statistics_cache, "VERSION", version)
            xr.testing.assert_identical(call(), first)
            assert read == []


# --- several processes ---------------------------------------------------------------------------

_DESCRIBE_EVERY_SECOND = """
import sys, xarray as xr, xckpt
ds = xr.open_dataset(sys.argv[1], engine="safetensors")
print("ready", flush=True)
sys.stdin.readline()
for name in list(ds.data_vars)[::2]:
    xckpt.stats(ds[[name]], progress=False)
"""


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Write many tiny tensors."""
    rng = np.random.default_rng(0)
    tensors = {f"w{n}": rng.standard_normal((8, 4)).astype(np.float32) for n in range(60)}
    return settled(write(tmp_path / "many.safetensors", tensors))


def test_processes_lose_nothing_of_each_other(many: Path, read: list[int]) -> None:
    ds = xr.open_dataset(many, engine="safetensors")
    process = subprocess.Popen(  # noqa: S603  our own code
        [sys.executable, "-c", _DESCRIBE_EVERY_SECOND, str(many)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.stdin.write("go\n")
    process.stdin.flush()
    for name in list(ds.data_vars)[1::2]:
        xckpt.stats(ds[[name]], progress=False)
    process.communicate()
    assert process.returncode == 0
    read.clear()
    xckpt.stats(many)
    assert read == []


def test_threads_lose_nothing_of_each_other(many: Path, read: list[int]) -> None:
    ds = xr.open_dataset(many, engine="safetensors")
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda name: xckpt.stats(ds[[name]], progress=False), ds.data_vars))
    read.clear()
    xckpt.stats(ds)
    assert read == []


# --- size ----------------------------------------------------------------------------------------


def test_the_least_recently_used_files_go_first(
    path: Path, tmp_path: Path, cache_folder: Path
) -> None:
    xckpt.stats(path)
    recent = settled(cached_file(cache_folder), 30)
    oldest = recent.with_name("of a large checkpoint")
    oldest.touch()
    os.truncate(oldest, 1 << 30)
    settled(oldest, 60)
    xckpt.stats(settled(write(tmp_path / "other.safetensors", model())))
    assert recent.exists()
    assert not oldest.exists()


def test_a_full_file_still_takes_rows(cache_folder: Path) -> None:
    with open_records([TENSOR], "sketches", enabled=True) as (records,):
        assert records is not None
        for number in range(60):
            records.put(key_of(TENSOR, number), NOISE[: 4 << 20])
    assert 150 << 20 < cached_file(cache_folder).stat().st_size <= 192 << 20
    for number in range(3):
        assert rows_of_size(24 << 20, number)
    assert not rows_of_size(24 << 20, 0)
    assert cached_file(cache_folder).stat().st_size <= 256 << 20
