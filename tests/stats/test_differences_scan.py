"""`compare` gives the same bits on threads, on a cluster, and for any chunks; it is cached."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pytest
import xarray as xr

from tests.stats.checkpoints import memory_of, model, settled, sparse_file, write
from xckpt.comparison import compare
from xckpt.statistics import STATUSES, stats

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    import ml_dtypes

    rng = np.random.default_rng(0)
    large = rng.standard_normal((2500, 2000)).astype(np.float32)
    tensors: dict[str, Any] = {f"small.{i}": rng.standard_normal((i + 1, 33)) for i in range(20)}
    tensors |= {"large": large, "whole": (large[:500] * 1e6).astype(np.int64)}
    changed = dict(tensors)
    changed["large"] = large.astype(ml_dtypes.bfloat16)
    changed["whole"] = tensors["whole"].astype(np.float32)
    changed["small.7"] = tensors["small.7"] * 2
    folder = tmp_path_factory.mktemp("compare")
    return write(folder / "a.safetensors", tensors), write(folder / "b.safetensors", changed)


@pytest.fixture(scope="module")
def expected(paths: tuple[Path, Path]) -> xr.Dataset:
    with dask.config.set(num_workers=1):
        return compare(*paths, cache=False)


def opened(path: Path, **options: Any) -> xr.Dataset:
    ds: xr.Dataset = xr.open_dataset(path, engine="safetensors", **options)
    return ds


@pytest.mark.parametrize("threads", [2, 5])
def test_any_number_of_threads_gives_the_same_comparison(
    paths: tuple[Path, Path], expected: xr.Dataset, threads: int
) -> None:
    with dask.config.set(num_workers=threads):
        xr.testing.assert_identical(compare(*paths, cache=False), expected)


@pytest.mark.parametrize("size", ["100kiB", "1MiB", "128MiB"])
def test_any_chunks_give_the_same_comparison(
    paths: tuple[Path, Path], expected: xr.Dataset, size: str
) -> None:
    with dask.config.set({"array.chunk-size": size}):
        a, b = map(opened, paths)
        xr.testing.assert_equal(compare(a, b, cache=False), expected)
        # The same values as arrays without a link to their file.
        computed = b.map(lambda x: x * 1.0, keep_attrs=True)
        for result in (compare(a, computed), compare(a * 1, b.chunk(70)), compare(a, b.load())):
            for name in ("large", "small.7"):
                np.testing.assert_array_equal(result[name], expected[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.usefixtures("client")
def test_a_cluster_gives_the_same_comparison(
    paths: tuple[Path, Path], expected: xr.Dataset
) -> None:
    a, b = map(opened, paths)
    reports: list[tuple[int, int]] = []
    xr.testing.assert_identical(
        compare(*paths, cache=False, progress=lambda *nbytes: reports.append(nbytes)), expected
    )
    total = sum(v.encoding["nbytes"] for ds in (a, b) for v in ds.data_vars.values())
    assert reports[-1] == (total, total)
    xr.testing.assert_equal(compare(a, b, cache=False, compute=False).compute(), expected)
    # Arrays of dask's own, and those in the memory of this process.
    for lazy in (b[["large"]] * 1.0, b[["large"]].load()):
        np.testing.assert_array_equal(compare(a[["large"]], lazy)["large"], expected["large"])


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    changed = model()
    changed["embed"] = changed["embed"] * np.float32(1.5)
    paths = write(tmp_path / "a.safetensors", model()), write(tmp_path / "b.safetensors", changed)
    for path in paths:
        settled(path, 60)
    return paths


def test_a_second_call_reads_nothing(pair: tuple[Path, Path], read: list[int]) -> None:
    first = compare(*pair)
    assert sum(read) == sum(array.size for array in model().values())
    read.clear()
    xr.testing.assert_identical(compare(*pair), first)
    assert read == []
    compare(*pair, cache=False)
    assert read


def test_cached_comparisons_depend_on_both_files(pair: tuple[Path, Path], read: list[int]) -> None:
    a, b = pair
    first = compare(a, b)
    back = compare(b, a)
    assert back["embed"].sel(statistic="rel_l2") != first["embed"].sel(statistic="rel_l2")
    assert (compare(a, a).sel(statistic="status").to_array() == 0).all()
    # The sketches of the first file are beside it, and are something else.
    described = stats(a)
    xr.testing.assert_identical(stats(a), described)
    xr.testing.assert_identical(compare(a, b), first)
    for path in pair:
        write(path, model(seed=5))
        settled(path, 30)
        read.clear()
        compare(a, b)
        assert sum(read) >= sum(array.size for array in model().values())
    assert (compare(a, b).sel(statistic="status").to_array() == 0).all()


def test_comparisons_of_a_new_file_are_not_cached(
    pair: tuple[Path, Path], cache_folder: Path
) -> None:
    for path in pair:
        os.utime(path)
        compare(*pair)
        assert not cache_folder.exists()
        settled(path, 60)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_the_files(tmp_path: Path) -> None:
    a = sparse_file(tmp_path / "a.safetensors", "F32", 1 << 28, 1 << 30)
    b = sparse_file(tmp_path / "b.safetensors", "BF16", 1 << 28, 1 << 29)
    call = f"xckpt.compare({str(a)!r}, {str(b)!r}, cache=False, progress=False)"
    assert memory_of(call) < 300 << 20


def test_statuses_do_not_change_their_numbers() -> None:
    # Users may have stored these numbers.
    before = ("same", "changed", "only_a", "only_b", "shape", "unreadable")
    assert STATUSES[: len(before)] == before
