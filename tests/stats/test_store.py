"""What is kept between calls, and what is not believed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
import xarray as xr

from tests.stats.checkpoints import model, settled, write
from tests.stats.reference import sketch_of
from xckpt.statistics import histogram, scan, stats
from xckpt.statistics.accumulate import Sketch
from xckpt.statistics.readers import ArrayReader
from xckpt.statistics.store import FOLDER
from xckpt.storage import cache

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return settled(write(tmp_path / "m.safetensors", model()))


def test_a_second_call_reads_nothing(path: Path, read: list[int]) -> None:
    first = stats(path)
    assert sum(read) == sum(array.size for array in model().values())
    read.clear()
    xr.testing.assert_identical(stats(path), first)
    assert histogram(path)["embed"].sum() == 64 * 32
    xr.testing.assert_equal(
        stats(path, quantiles=[0.5])["embed"].sel(statistic="mean"),
        first["embed"].sel(statistic="mean"),
    )
    assert read == []


def test_only_when_asked_for(path: Path, read: list[int], cache_folder: Path) -> None:
    stats(path, cache=False)
    assert not cache_folder.exists()
    stats(path)
    read.clear()
    stats(path, cache=False)
    assert read


def test_a_changed_file_is_read_again(path: Path, read: list[int]) -> None:
    stats(path)
    write(path, model(seed=1))
    settled(path)
    os.utime(path, (1, 1))
    read.clear()
    changed = stats(path)
    assert sum(read) == sum(array.size for array in model().values())
    xr.testing.assert_identical(changed, stats(path, cache=False))


def test_a_file_that_was_just_written_is_not_kept(tmp_path: Path, cache_folder: Path) -> None:
    path = write(tmp_path / "now.safetensors", model())
    os.utime(path)
    stats(path)
    assert not cache_folder.exists()


def test_an_interrupted_scan_goes_on(
    path: Path, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "_TASK_NBYTES", 1)
    ds = xr.open_dataset(path, engine="safetensors")

    def interrupt(done: int, _: int) -> None:
        if done > 9000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stats(ds, progress=interrupt)
    before = len(read)
    read.clear()
    resumed = stats(ds)
    assert 0 < len(read) < len(model())
    assert before < len(model()) + 2
    xr.testing.assert_identical(resumed, stats(ds, cache=False))


def test_a_large_tensor_goes_on_where_it_was(
    tmp_path: Path, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xckpt.statistics.scan._STRETCH", 1 << 14)
    monkeypatch.setattr(scan, "_TASK_NBYTES", 1 << 14)
    values = np.random.default_rng(0).standard_normal((1000, 200)).astype(np.float32)
    path = settled(write(tmp_path / "m.safetensors", {"w": values}))

    def interrupt(done: int, _: int) -> None:
        if done > values.nbytes / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stats(path, progress=interrupt)
    read.clear()
    told: list[tuple[int, int]] = []
    resumed = stats(path, progress=lambda *nbytes: told.append(nbytes))
    assert 0 < sum(read) < values.size * 0.6
    assert told[-1] == (4 * sum(read), 4 * sum(read))
    xr.testing.assert_identical(resumed, stats(path, cache=False))


@pytest.mark.usefixtures("sketches_only")
@pytest.mark.parametrize("damage", ["cut", "flip", "foreign", "empty"])
def test_damaged_files_are_ignored(path: Path, damage: str, read: list[int]) -> None:
    first = stats(path)
    (kept,) = _kept()
    data = bytearray(kept.read_bytes())
    if damage == "cut":
        data = data[: len(data) * 2 // 3]
    elif damage == "flip":
        data[len(data) // 2] ^= 0xFF
    else:
        data = bytearray(b"something else" if damage == "foreign" else b"")
    kept.write_bytes(data)
    xr.testing.assert_identical(stats(path), first)
    # It was repaired, and keeps everything again.
    read.clear()
    xr.testing.assert_identical(stats(path), first)
    assert read == []


def test_where_nothing_can_be_written_nothing_is_kept(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XCKPT_CACHE_DIR", "/dev/null/nowhere")
    assert stats(path)["embed"].sel(statistic="count") == 64 * 32


def test_sketches_come_back_as_they_were() -> None:
    for name in ("float32", "float64", "int64", "uint8"):
        values = (np.random.default_rng(0).standard_normal(50_000) * 40).astype(name)
        sketch = sketch_of(values, row=7)
        found = Sketch.unpack(sketch.pack(), ArrayReader(values))
        for field in ("kind", "count", "size", "low", "high", "total", "zero", "nan", "inf"):
            assert getattr(found, field) == getattr(sketch, field), field
        assert found.tree.nodes == sketch.tree.nodes
        for field in ("length", "dead", "open"):
            assert getattr(found.rows, field) == getattr(sketch.rows, field), field
        np.testing.assert_array_equal(found.codes, sketch.codes)
        np.testing.assert_array_equal(found.counts, sketch.counts)


def test_the_least_recently_used_files_go_first(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats(path)
    (old,) = _kept()
    settled(old)
    monkeypatch.setattr("xckpt.statistics.store.LARGEST_FOLDER", old.stat().st_size * 3 // 2)
    stats(settled(write(tmp_path / "other.safetensors", model())))
    (left,) = _kept()
    assert left != old


def _kept() -> list[Path]:
    folder = cache.folder(FOLDER)
    assert folder is not None
    return list(folder.iterdir())
