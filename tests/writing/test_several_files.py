"""A checkpoint of several files: never one of old and new ones."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import dask.array as da
import numpy as np
import pytest
import xarray as xr

from xckpt import read_index
from xckpt.storage.sink import Sink
from xckpt.writing import convert, save, verify

if TYPE_CHECKING:
    from pathlib import Path

RANKS = 3
FILES = ["m.metadata.json", *(f"m_shard_{rank}.shard" for rank in range(RANKS))]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def dataset(value: float, *, lazy: bool = False) -> xr.Dataset:
    """Make a tensor for each rank, all of one value."""
    variables: dict[str, Any] = {}
    for rank in range(RANKS):
        array: Any = np.full((40, 50), value, "f4")
        array = da.from_array(array, chunks=(7, 30)) if lazy else array
        variables[f"w{rank}"] = (("o", "i"), array, {"rank": rank})
    return xr.Dataset(variables)


def values(path: Path) -> set[float]:
    with xr.open_dataset(path, engine="mlcp") as ds:
        return {float(v) for name in ds.variables for v in np.unique(ds[name].values)}


@pytest.mark.parametrize("lazy", [False, True])
def test_data_are_in_a_file_for_each_rank(lazy: bool, tmp_path: Path) -> None:
    target = tmp_path / "m.metadata.json"
    save(dataset(1, lazy=lazy), target, "mlcp")
    assert names(tmp_path) == FILES
    index = read_index(target)
    assert {index.tensors[f"w{rank}"].parts["data"].shard for rank in range(RANKS)} == set(
        FILES[1:]
    )
    assert values(target) == {1}
    assert verify(target).ok
    later = save(dataset(2, lazy=lazy), target, "mlcp", compute=False, overwrite=True)
    assert values(target) == {1}
    later.compute()
    assert values(target) == {2}
    assert names(tmp_path) == FILES


def test_the_option_and_the_name_go_together(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"PREFIX\.metadata\.json"):
        save(dataset(1), tmp_path / "m.checkpoint", "mlcp", multi_shard=True)
    save(dataset(1), tmp_path / "one.metadata.json", "mlcp", multi_shard=False)
    assert names(tmp_path) == ["one.metadata.json"]


def test_in_place(tmp_path: Path) -> None:
    target = tmp_path / "m.metadata.json"
    save(dataset(1), target, "mlcp")
    convert(target, target, tensors="w[01]", overwrite=True)
    assert set(read_index(target).tensors) == {"w0", "w1"}
    assert values(target) == {1}


def test_a_companion_is_not_overwritten_unasked(tmp_path: Path) -> None:
    (tmp_path / FILES[2]).write_bytes(b"somebody else's")
    with pytest.raises(FileExistsError, match=FILES[2]):
        save(dataset(1), tmp_path / "m.metadata.json", "mlcp")
    assert names(tmp_path) == [FILES[2]]


def test_a_url(tmp_path: Path) -> None:
    target = "memory://several/m.metadata.json"
    for value in (1, 2):
        save(dataset(value), target, "mlcp", overwrite=True)
        with xr.open_dataset(target, engine="mlcp") as ds:
            assert float(ds["w2"].max()) == value
    assert names(tmp_path) == []


@pytest.mark.parametrize("renamed", range(len(FILES)))
def test_an_end_between_two_renames_leaves_no_mixture(
    renamed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "m.metadata.json"
    save(dataset(1), target, "mlcp")
    publish = Sink._publish
    done: list[str] = []

    def interrupted(sink: Sink) -> None:
        if len(done) == renamed:
            raise KeyboardInterrupt
        done.append(sink.target)
        publish(sink)

    monkeypatch.setattr(Sink, "_publish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(dataset(2), target, "mlcp", overwrite=True)
    monkeypatch.undo()
    assert not target.exists(), "rather nothing than old metadata of new shards"
    assert set(names(tmp_path)) == set(FILES[1:])
    save(dataset(3), target, "mlcp", overwrite=True)
    assert values(target) == {3}
    assert names(tmp_path) == FILES


def test_a_disk_that_fails_leaves_the_old_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "m.metadata.json"
    save(dataset(1), target, "mlcp")
    sync = os.fsync
    calls: list[int] = []

    def failing(fileno: int) -> None:
        calls.append(fileno)
        if len(calls) == len(FILES):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(fileno)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output error"):
        save(dataset(2), target, "mlcp", overwrite=True)
    assert values(target) == {1}
    assert names(tmp_path) == FILES
