"""Large models as several safetensors files with an index, as Hugging Face's libraries do."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr
from safetensors.numpy import load_file, save_file

import xckpt
from xckpt.errors import CheckpointWarning, FileChangedError, MissingShardError
from xckpt.formatting import parse_size
from xckpt.storage.local import LocalSource

if TYPE_CHECKING:
    from collections.abc import Callable

# Bytes of the tensors, in their order: 400, 400, 1000, 40.
SHAPES = {"a": (10, 10), "b": (100,), "c": (250,), "d": (10,)}
FILES = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


def tensors(value: float = 1.0) -> dict[str, np.ndarray[Any, Any]]:
    return {
        name: np.full(shape, value + number, np.float32)
        for number, (name, shape) in enumerate(SHAPES.items())
    }


def dataset(value: float = 1.0) -> xr.Dataset:
    return xr.Dataset(
        {n: ([f"{n}{k}" for k in range(a.ndim)], a) for n, a in tensors(value).items()}
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save_it(folder: Path, value: float = 1.0, **options: Any) -> None:
    xckpt.save(dataset(value), folder / "model.safetensors", max_shard_size=900, **options)


def convert_it(folder: Path, value: float = 1.0, **options: Any) -> None:
    source = folder.parent / "source.zt"
    xckpt.save(dataset(value), source, overwrite=True)
    xckpt.convert(source, folder / "model.safetensors", max_shard_size=900, **options)


@pytest.fixture(params=[save_it, convert_it])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Callable[..., None]]:
    folder = tmp_path / "model"
    folder.mkdir()
    request.param(folder)
    return folder, request.param


def check(folder: Path, value: float = 1.0) -> None:
    assert names(folder) == [*FILES, "model.safetensors.index.json"]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    weight_map = {"a": FILES[0], "b": FILES[0], "c": FILES[1], "d": FILES[2]}
    assert index == {"metadata": {"total_size": 1840}, "weight_map": weight_map}
    loaded = {name: array for file in FILES for name, array in load_file(folder / file).items()}
    assert loaded.keys() == SHAPES.keys()
    for name, array in tensors(value).items():
        np.testing.assert_array_equal(loaded[name], array)


def test_files_and_their_index(written: tuple[Path, Any]) -> None:
    folder, _ = written
    check(folder)
    for path in (folder, folder / "model.safetensors.index.json"):
        with xr.open_dataset(path, engine="safetensors") as ds:
            assert list(ds.data_vars) == list(SHAPES)
            assert ds.attrs["format"] == "pt"
            np.testing.assert_array_equal(ds["c"], tensors()["c"])
    assert xckpt.verify(folder).ok


def test_shards_are_replaced_together(written: tuple[Path, Any]) -> None:
    folder, write = written
    with pytest.raises(FileExistsError, match=r"index\.json|model-0000"):
        write(folder, 2.0)
    check(folder)
    write(folder, 2.0, overwrite=True)
    check(folder, 2.0)


def test_shards_replace_the_single_file(written: tuple[Path, Any], tmp_path: Path) -> None:
    _, write = written
    folder = tmp_path / "other"
    folder.mkdir()
    save_file(tensors(), folder / "model.safetensors")
    with pytest.raises(FileExistsError):
        write(folder, 2.0)
    assert names(folder) == ["model.safetensors"]
    write(folder, 2.0, overwrite=True)
    check(folder, 2.0)


def test_shards_of_the_old_checkpoint_that_stay_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    xckpt.save(dataset(), path, max_shard_size=500)
    old = [name for name in names(tmp_path) if "-of-" in name]
    with pytest.warns(CheckpointWarning, match=f"shards.* stay.*{old[0]}.*{old[-1]}"):
        xckpt.save(dataset(2.0), path, max_shard_size=1100, overwrite=True)
    assert set(old) < set(names(tmp_path))
    xckpt.save(dataset(2.0), tmp_path / "new.safetensors", max_shard_size=1100)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_that_an_index_would_hide_is_refused(overwrite: bool, tmp_path: Path) -> None:
    save_it(tmp_path)
    with pytest.raises(ValueError, match=r"prefer to model\.safetensors: .*remove them"):
        xckpt.save(dataset(), tmp_path / "model.safetensors", overwrite=overwrite)
    assert "model.safetensors" not in names(tmp_path)
    check(tmp_path)


def test_a_file_becomes_several_in_place(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path)
    xckpt.convert(path, path, max_shard_size=900, overwrite=True)
    check(tmp_path)


@pytest.mark.parametrize("at", range(len(FILES)))
def test_concurrent_readers_get_one_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    save_it(tmp_path)
    sibling, opened = LocalSource.sibling, list[str]()

    def meanwhile(source: LocalSource, name: str) -> LocalSource:
        file = sibling(source, name)
        opened.append(name)
        if len(opened) == at + 1:
            save_it(tmp_path, 2.0, overwrite=True)
        return file

    monkeypatch.setattr(LocalSource, "sibling", meanwhile)
    with pytest.raises(FileChangedError, match=r"index\.json"):
        xckpt.read_index(tmp_path)


@pytest.mark.parametrize("links", [True, False])
def test_folders_are_synced_between_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, links: bool
) -> None:
    """If the power fails, a file system may have done any of the renames since and not others."""
    save_it(tmp_path)
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(fileno: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(fileno).st_mode)
        steps.append("folder" if is_folder else "file")
        fsync(fileno)

    def renamed(old: str, new: str) -> None:
        steps.append(Path(new).name)
        replace(old, new)

    def no_links(*_: Any) -> None:
        raise OSError(errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    save_it(tmp_path, 2.0, overwrite=True)
    main = "model.safetensors.index.json"
    # The last one is for the single file that they stand for, if there was one.
    assert [step for step in steps if step != "file"] == [
        *("folder", main, "folder", *FILES, "folder", main, "folder", "folder")
    ]
    assert "file" not in steps[steps.index(main) :]


def test_a_file_that_cannot_be_removed_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, unlink = tmp_path / "model.safetensors", os.unlink
    save_file(tensors(), path)

    def failing(name: Any) -> None:
        if Path(name) == path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)
        unlink(name)

    monkeypatch.setattr(os, "unlink", failing)
    message = r"index\.json: the new checkpoint is complete.* model\.safetensors, .*: remove it"
    with pytest.warns(CheckpointWarning, match=message):
        save_it(tmp_path, 2.0, overwrite=True)
    monkeypatch.undo()
    path.unlink()
    check(tmp_path, 2.0)


def test_a_small_model_is_one_file(tmp_path: Path) -> None:
    xckpt.save(dataset(), tmp_path / "model.safetensors", max_shard_size="5GB")
    assert names(tmp_path) == ["model.safetensors"]
    plain = xckpt.read_index(tmp_path / "model.safetensors")
    xckpt.save(dataset(), tmp_path / "again.safetensors")
    assert xckpt.read_index(tmp_path / "again.safetensors").attrs == plain.attrs


@pytest.mark.parametrize("engine", [None, "safetensors"])
def test_the_index_may_be_named(engine: str | None, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    ds = dataset().assign_attrs(format="pt", b="c")
    xckpt.save(ds, path, engine, max_shard_size=900)
    check(tmp_path)
    with pytest.raises(FileExistsError):
        xckpt.save(ds, path, engine, max_shard_size=900)
    xckpt.save(ds + 1, path, engine, max_shard_size=900, overwrite=True)
    check(tmp_path, 2)
    assert xr.open_dataset(path).attrs["total_size"] == 1840


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "1GB"}])
def test_a_named_index_is_written_for_one_file_too(options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    xckpt.save(dataset(), path, **options)
    assert names(tmp_path) == ["model-00001-of-00001.safetensors", path.name]
    xr.testing.assert_equal(xr.open_dataset(path).compute(), dataset())


def test_only_shards_have_an_index(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the ending of 'm\.zt\.index\.json'"):
        xckpt.save(dataset(), tmp_path / "m.zt.index.json")


def test_deferred_saving_of_shards(tmp_path: Path) -> None:
    later = xckpt.save(
        dataset().chunk(), tmp_path / "model.safetensors", compute=False, max_shard_size="900 B"
    )
    assert names(tmp_path) == []
    later.compute()
    check(tmp_path)


def test_saving_shards_to_a_url(tmp_path: Path) -> None:
    url = "memory://shards/model.safetensors"
    for value in (1.0, 2.0):
        xckpt.save(dataset(value), url, max_shard_size=900, overwrite=True)
        with xr.open_dataset(f"{url}.index.json", engine="safetensors") as ds:
            np.testing.assert_array_equal(ds["d"], tensors(value)["d"])
    assert names(tmp_path) == []


def test_an_error_leaves_no_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("xckpt.storage.sink.Sink.take_name", fail)
    with pytest.raises(OSError, match="space"):
        save_it(tmp_path)
    assert names(tmp_path) == []


def test_metadata_go_into_every_file(tmp_path: Path) -> None:
    ds = dataset().assign_attrs(format="np", total_size=7, by="me")
    with pytest.warns(CheckpointWarning, match="total_size"):
        xckpt.save(ds, tmp_path / "model.safetensors", max_shard_size=900)
    index = xckpt.read_index(tmp_path)
    assert index.attrs == {"format": "np", "by": "me", "total_size": 1840}


def test_results_in_memory_keep_the_total_size_of_their_index(tmp_path: Path) -> None:
    xckpt.save(dataset(), tmp_path / "a.safetensors", max_shard_size=900)
    ds = (xckpt.open(tmp_path / "a.safetensors.index.json") * 2).compute()
    assert ds.attrs["total_size"] == 1840
    xckpt.save(ds, tmp_path / "b.safetensors", max_shard_size=900)
    index = xckpt.read_index(tmp_path / "b.safetensors.index.json")
    assert index.attrs["total_size"] == 1840


@pytest.mark.parametrize("how", ["convert", "save", "compute"])
def test_shards_of_other_formats_lose_no_total_size(how: str, tmp_path: Path) -> None:
    weight_map = {name: f"model-{name}.npz" for name in "ab"}
    (tmp_path / "in").mkdir()
    for name, file in weight_map.items():
        xckpt.save({name: np.ones((8, 8), "f4")}, tmp_path / "in" / file)
    index = {"metadata": {"total_size": 512}, "weight_map": weight_map}
    (tmp_path / "in/model.safetensors.index.json").write_text(json.dumps(index))
    options: Any = {"dtype": "float16", "cast": "allow", "max_shard_size": 200}
    if how == "convert":
        xckpt.convert(tmp_path / "in", f"{tmp_path}/out/", **options)
    else:
        ds = xckpt.open(tmp_path / "in")
        (ds if how == "save" else (ds * 2).compute()).ckpt.save(f"{tmp_path}/out/", **options)
    assert xckpt.open(tmp_path / "out").attrs["total_size"] == 256


def test_a_file_without_an_index_has_no_note_of_its_size(tmp_path: Path) -> None:
    xckpt.save(dataset(), tmp_path / "model.safetensors", max_shard_size=900)
    xckpt.open(tmp_path)[["a", "b"]].ckpt.save(f"{tmp_path}/out/")
    assert "as total_size" not in repr(xckpt.open(tmp_path / "out").ckpt)


def test_the_old_file_stays_until_its_shards_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(fileno: int) -> None:
        if stat.S_ISDIR(os.fstat(fileno).st_mode) and (tmp_path / FILES[0]).exists():
            calls.append(fileno)
            if len(calls) > 1:  # after all names are there
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    calls: list[int] = []
    save_file(tensors(), tmp_path / "model.safetensors")
    monkeypatch.setattr(os, "fsync", failing)
    message = r"not be synced to the disk .*file model\.safetensors, which it replaces"
    with pytest.warns(CheckpointWarning, match=message):
        save_it(tmp_path, 2.0, overwrite=True)
    (tmp_path / "model.safetensors").unlink()
    check(tmp_path, 2.0)


@pytest.mark.parametrize("size", ["many", "", "5XB", 0, -1, 1.5, True, "0"])
def test_invalid_sizes_are_errors(tmp_path: Path, size: Any) -> None:
    with pytest.raises(ValueError, match=r"max_shard_size must be a number of bytes"):
        xckpt.save(dataset(), tmp_path / "model.safetensors", max_shard_size=size)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("size", "nbytes"), [("1KB", 1000), ("1kib", 1024), ("0.9 kB", 900), (900, 900)]
)
def test_shard_sizes_in_every_spelling(size: Any, nbytes: int) -> None:
    assert parse_size("size", size) == nbytes


def test_a_missing_shard_is_reported(tmp_path: Path) -> None:
    save_it(tmp_path)
    (tmp_path / FILES[1]).unlink()
    with pytest.warns(xckpt.CheckpointWarning, match="missing"):
        index = xckpt.read_index(tmp_path)
    assert isinstance(index.tensors["c"].problem, MissingShardError)


def test_other_formats_refuse_shards(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="max_shard_size"):
        xckpt.save(dataset(), tmp_path / "model.zt", max_shard_size=900)
