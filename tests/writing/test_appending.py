"""Appending adds new tensors to the old ones, and other readers see no state in between."""

from __future__ import annotations

import errno
import os
import stat
import sys
from typing import TYPE_CHECKING, Any

import dask.array as da
import numpy as np
import pytest
import sparse
import xarray as xr

from tests.writing.killed import kill_at_random_moments
from tests.writing.saved import ENGINES, assert_same_bits
from xckpt import CheckpointWarning, FileChangedError, UnsupportedError, read_index
from xckpt.storage.partial import PARTIAL_SUFFIX
from xckpt.storage.sink import Sink
from xckpt.writing import append, convert, save, verify

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VERSIONS = ["1.0", "2"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def opened(path: Path, **options: Any) -> xr.Dataset:
    return xr.open_dataset(path, engine="ztensor", verify=True, **options)


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    """Give a version of files that grow."""
    return str(request.param)


@pytest.fixture
def model(version: str, tmp_path: Path) -> Path:
    """A file with a tensor that is compressed, one that is large, attributes and axes."""
    rng = np.random.default_rng(0)
    ds = xr.Dataset(
        {
            "w": (("out", "in"), rng.random((300, 1000))),
            "packed": ("in", rng.integers(0, 3, 1000)),
            "b": ("out", rng.random(300, "f4")),
        },
        attrs={"licence": "MIT", "epoch": "1"},
    )
    encoding = {"packed": {"compression": "zstd"}, "*": {"digest": "sha256"}}
    save(ds, tmp_path / "m.zt", encoding=encoding, version=version)
    return tmp_path / "m.zt"


def test_the_old_bytes_stay_and_all_tensors_are_there(model: Path) -> None:
    before, old = model.read_bytes(), opened(model).load()
    noise = np.random.default_rng(1).random((40, 1000))
    new = xr.Dataset(
        {
            "head": (("vocab", "in"), noise),
            "lazy": (("vocab", "in"), da.from_array(noise, chunks=(7, 300))),
            "columns": (("in", "vocab"), da.from_array(noise, chunks=(20, 30)).T),
            "small": ("vocab", np.arange(40, dtype=">i2")),
            "none": ((), np.float32(2.5)),
        },
        attrs={"epoch": "2", "seed": "7"},
    )
    packed = {"compression": "zstd", "digest": "sha256"}
    append(new, model, encoding={"lazy": packed, "head": packed})
    assert model.read_bytes().startswith(before)
    reopened = opened(model)
    assert reopened.attrs == {"licence": "MIT", "epoch": "2", "seed": "7"} | {
        name: value for name, value in reopened.attrs.items() if name == "generator"
    }
    assert set(reopened.variables) == set(old.variables) | set(new.variables)
    for ds in (old, new):
        for name, variable in ds.variables.items():
            assert reopened[name].dims == variable.dims
            assert_same_bits(reopened[name].values, variable.values)
    assert reopened["lazy"].encoding["stored_compression"].startswith("zstd")
    assert verify(model).ok
    assert names(model.parent) == ["m.zt"]


def test_appending_many_times(model: Path) -> None:
    for number in range(5):
        append(xr.Dataset({f"g{number}": ("n", np.full(1000, number))}), model)
    ds = opened(model)
    assert [int(ds[f"g{n}"].max()) for n in range(5)] == list(range(5))
    assert ds["w"].shape == (300, 1000)


def test_sparse_tensors_and_trees(model: Path) -> None:
    eye = sparse.COO.from_numpy(np.eye(5))
    tree = xr.DataTree.from_dict({"/a/b": xr.Dataset({"s": (("r", "c"), eye)})})
    append(tree, model)
    assert read_index(model).tensors["a.b.s"].layout == "sparse_csr"
    assert np.array_equal(opened(model)["a.b.s"].values, np.eye(5))


def test_existing_names_are_refused_without_replace(model: Path) -> None:
    before = model.read_bytes()
    new = xr.Dataset({"b": ("out", np.ones(300)), "c": ("out", np.ones(300))})
    with pytest.raises(ValueError, match=r"has a tensor 'b'; replace=True"):
        append(new, model)
    assert model.read_bytes() == before
    append(new, model, replace=True)
    assert opened(model)["b"].values.tolist() == [1.0] * 300
    assert verify(model).ok
    grown = model.stat().st_size
    convert(model, model, overwrite=True, version=read_index(model).version)
    assert model.stat().st_size < grown, "what was replaced is left out"
    assert opened(model)["b"].values.tolist() == [1.0] * 300


def test_tensors_of_the_file_itself_under_new_names(model: Path) -> None:
    ds = opened(model)
    append(ds.rename({name: f"copy.{name}" for name in ds.variables}), model)
    again = opened(model)
    for name in ("w", "packed", "b"):
        assert_same_bits(again[f"copy.{name}"].values, again[name].values)
    with pytest.raises(FileChangedError):
        ds["w"].compute()


def test_losses_warn_and_faults_raise(model: Path) -> None:
    before = model.read_bytes()
    ds = xr.Dataset({"v": ("n", np.zeros(2))}, coords={"name": ("n", ["a", "b"])})
    with pytest.warns(CheckpointWarning, match="without numbers.*'name'") as caught:
        append(ds, model)
    assert caught[0].filename == __file__
    after = model.read_bytes()
    assert after.startswith(before)
    with pytest.raises(UnsupportedError, match=r"m\.zt: tensor 'v'.*holds numbers"):
        append(xr.Dataset({"v": ("n", ["text"])}), model)
    with pytest.raises(TypeError, match="no option 'dialect'"):
        append(ds[["v"]], model, dialect="0.20")
    with pytest.raises(ValueError, match="version"):
        append(ds[["v"]].rename(v="u"), model, version="3")
    assert model.read_bytes() == after


@pytest.mark.filterwarnings("ignore:.*without a place:xckpt.CheckpointWarning")
@pytest.mark.parametrize("engine", [e for e in ENGINES if e != "ztensor"])
def test_formats_without_appending(engine: str, tmp_path: Path) -> None:
    ds = xr.Dataset({"w": ("n", np.zeros(2, "f4"))})
    save(ds, tmp_path / "m", engine)
    before = (tmp_path / "m").read_bytes()
    with pytest.raises(
        UnsupportedError, match=rf"cannot be added to files of format '{engine}'.*\.merge"
    ):
        append(ds, tmp_path / "m")
    assert (tmp_path / "m").read_bytes() == before


def test_appending_needs_an_existing_file(tmp_path: Path) -> None:
    ds = xr.Dataset({"w": ("n", np.zeros(2, "f4"))})
    with pytest.raises(FileNotFoundError):
        append(ds, tmp_path / "m.zt")
    bytes_: Any = b"bytes"
    with pytest.raises(TypeError, match="path or URL"):
        append(ds, bytes_)
    for name in ("a", "b"):
        save(ds.rename(w=name), tmp_path / f"{name}.zt")
    with pytest.raises(UnsupportedError, match="several files"):
        append(ds, tmp_path / "*.zt")
    assert names(tmp_path) == ["a.zt", "b.zt"]


def test_appending_to_a_url(tmp_path: Path) -> None:
    save(xr.Dataset({"a": ("n", np.arange(3))}), "memory://appended/m.zt")
    append(xr.Dataset({"b": ("n", np.arange(4))}), "memory://appended/m.zt")
    ds = xr.open_dataset("memory://appended/m.zt", engine="ztensor")
    assert (ds["a"].values.tolist(), ds["b"].values.tolist()) == ([0, 1, 2], [0, 1, 2, 3])
    append(xr.Dataset({"c": ("n", np.arange(5))}), "memory://appended/m.zt")
    assert len(read_index("memory://appended/m.zt").tensors) == 3
    assert names(tmp_path) == []


def test_permissions_stay_and_links_are_followed(model: Path) -> None:
    model.chmod(0o640)
    link = model.with_name("link.zt")
    link.symlink_to("m.zt")
    append(xr.Dataset({"c": ("n", np.ones(3))}), link)
    assert link.is_symlink()
    assert stat.S_IMODE(model.stat().st_mode) == 0o640
    assert "c" in read_index(model).tensors


def test_an_error_leaves_the_old_file(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(_: np.ndarray) -> np.ndarray:
        raise RuntimeError("no such luck")

    before = model.read_bytes()
    bad = da.map_blocks(fail, da.ones(4, chunks=1), dtype="f8", meta=np.empty(0))
    with pytest.raises(RuntimeError, match="no such luck"):
        append(xr.Dataset({"c": ("n", bad)}), model)
    monkeypatch.setattr(Sink, "write", full)
    with pytest.raises(OSError, match="No space left"):
        append(xr.Dataset({"c": ("n", np.ones(4))}), model)
    assert model.read_bytes() == before
    assert names(model.parent) == ["m.zt"]


@pytest.mark.skipif(sys.platform == "win32", reason="no locks that others do not notice")
def test_one_of_two_concurrent_writers_is_refused(model: Path) -> None:
    refused: list[Any] = []

    def meanwhile(done: int, _: int) -> None:
        if not refused:
            with pytest.raises(BlockingIOError, match="another process appends") as error:
                append(xr.Dataset({"d": ("n", np.ones(3))}), model)
            refused.append(error)
        assert done

    append(xr.Dataset({"c": ("n", np.ones(3))}), model, progress=meanwhile)
    assert len(refused) == 1
    append(xr.Dataset({"d": ("n", np.ones(3))}), model)
    assert {"c", "d", "w"} <= set(read_index(model).tensors)


def test_concurrent_changes_of_another_process_survive(model: Path) -> None:

    def replacing(block: np.ndarray) -> np.ndarray:
        if block.size:
            save(xr.Dataset({"other": ("n", np.ones(3))}), model, overwrite=True)
        return block

    lazy = da.ones(3, chunks=3).map_blocks(replacing, dtype="f8", meta=np.empty(0))
    with pytest.raises(FileChangedError):
        append(xr.Dataset({"c": ("n", lazy)}), model)
    assert set(read_index(model).tensors) == {"other"}


@pytest.mark.parametrize("kind", ["append", "convert", "save", "computed", "stacked", "delayed"])
def test_computed_results_of_the_old_file_undo_nothing(
    kind: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer is there first when all is read and written, but for the name."""
    sync, replacement = Sink.sync, xr.Dataset({"other": ("n", np.ones(3))})

    def meanwhile(sink: Sink) -> None:
        sync(sink)
        monkeypatch.setattr(Sink, "sync", sync)
        save(replacement, model, overwrite=True)

    layers = {f"layers.{n}.w": ("n", np.full(4, n, "f8")) for n in range(3)}
    append(xr.Dataset(layers), model)
    ds = opened(model)
    small = ds[["b"]]
    stacked = opened(model, stack=True)[["layers.w"]]
    later = save(small * 2, model, overwrite=True, compute=False)
    write: dict[str, Callable[[], object]] = {
        "append": lambda: append(xr.Dataset({"c": ("n", np.ones(3))}), model),
        "convert": lambda: convert(model, model, overwrite=True, tensors="b"),
        "save": lambda: save(small, model, overwrite=True),
        "computed": lambda: save(small * 2, model, overwrite=True),
        "stacked": lambda: save(stacked + 1, model, overwrite=True),
        "delayed": later.compute,
    }
    monkeypatch.setattr(Sink, "sync", meanwhile)
    with pytest.raises(FileChangedError, match=r"m\.zt"):
        write[kind]()
    assert set(read_index(model).tensors) == {"other"}
    assert names(model.parent) == ["m.zt"]
    monkeypatch.setattr(Sink, "sync", meanwhile)
    save(xr.Dataset({"mine": ("n", np.ones(3))}), model, overwrite=True)
    assert set(read_index(model).tensors) == {"mine"}, "made of nothing that was lost"


def test_a_url_that_another_writer_replaced_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://replaced/m.zt"
    sync, replacement = Sink.sync, xr.Dataset({"other": ("n", np.ones(3))})

    def meanwhile(sink: Sink) -> None:
        sync(sink)
        monkeypatch.setattr(Sink, "sync", sync)
        save(replacement, url, overwrite=True)

    save(xr.Dataset({"a": ("n", np.arange(3))}), url)
    monkeypatch.setattr(Sink, "sync", meanwhile)
    with pytest.raises(FileChangedError, match="memory://replaced"):
        append(xr.Dataset({"b": ("n", np.arange(4))}), url)
    assert set(read_index(url).tensors) == {"other"}


def test_the_kernel_copies_the_old_file(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(os, "copy_file_range"):
        pytest.skip("this system has no such call")
    copied: list[int] = []
    copy = os.copy_file_range

    def counted(*args: Any) -> int:
        copied.append(copy(*args))
        return copied[-1]

    monkeypatch.setattr(os, "copy_file_range", counted)
    parts = [part for t in read_index(model).tensors.values() for part in t.parts.values()]
    old = model.stat().st_size
    append(xr.Dataset({"c": ("n", np.ones(3))}), model)
    assert sum(part.nbytes for part in parts) < sum(copied) <= old, "all but holes"


APPENDER = """
number = int(sys.argv[2])
noise = np.random.default_rng(number).random((256, 4096))
while True:
    ds = xr.Dataset({
        "lazy": (("a", "b"), da.from_array(noise, chunks=(64, 1000))),
        "array": (("a", "b"), noise),
        "number": ((), np.int64(number)),
    })
    append(ds, sys.argv[1], replace=True, encoding={"array": {"digest": "sha256"}})
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no fork, and no such signal")
def test_kill_at_any_moment_leaves_a_whole_file(version: str, tmp_path: Path) -> None:
    target = tmp_path / "m.zt"
    first = xr.Dataset({"w": ("n", np.arange(1000.0))})
    save(first, target, version=version)
    states = set()

    def check(number: int) -> None:
        with opened(target) as ds:
            assert ds["w"].values.tolist() == list(range(1000))
            if "number" in ds:
                written = int(ds["number"])
                noise = np.random.default_rng(written).random((256, 4096))
                assert np.array_equal(ds["array"].values, noise)
                assert np.array_equal(ds["lazy"].values, noise)
                assert written <= number
                states.add(written)
        leftovers = [path for path in tmp_path.iterdir() if path.name.endswith(PARTIAL_SUFFIX)]
        assert len(leftovers) <= 1, "the next writer removes what is left over"
        save(opened(target)[["w"]], target, version=version, overwrite=True)

    kill_at_random_moments(APPENDER, target, rounds=30, seconds=0.15, check=check, states=states)
