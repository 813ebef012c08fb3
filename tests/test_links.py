"""Indexes can name files in their own folder only; symbolic links there are followed."""

from __future__ import annotations

import json
import os
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.formats.mlcp_files import tensor, write_set
from tests.test_sharding import A, B, assert_all, sharded
from xckpt.errors import FormatError, PayloadMissingError

if TYPE_CHECKING:
    from collections.abc import Callable

WEIGHT = tensor("w", np.arange(6, dtype="<f4").reshape(2, 3))
OTHER = tensor("v", np.ones(4, "<f4"))


def hub_cache(files: Path, root: Path) -> Path:
    """Lay files out as Hugging Face's cache does: names of a revision lead to blobs."""
    snapshot = root / "models--a--b" / "snapshots" / "0123abcd"
    blobs = root / "models--a--b" / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for path in files.iterdir():
        blob = blobs / sha256(path.read_bytes()).hexdigest()
        path.rename(blob)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


def annex(files: Path, root: Path) -> Path:
    """Lay files out as git-annex and DVC do: each in a separate folder of a store."""
    work = root / "repository"
    work.mkdir(parents=True)
    for path in files.iterdir():
        key = sha256(path.read_bytes()).hexdigest()
        place = root / "repository" / ".store" / key[:2] / key / key
        place.parent.mkdir(parents=True)
        path.rename(place)
        (work / path.name).symlink_to(os.path.relpath(place, work))
    return work


def other_disk(files: Path, root: Path) -> Path:
    """Put links to all files but the index into a folder that has the index itself."""
    work, disk = root / "work", root / "disk"
    for folder in (work, disk):
        folder.mkdir(parents=True)
    for path in files.iterdir():
        if path.name.endswith(".json"):
            path.rename(work / path.name)
        else:
            path.rename(disk / path.name)
            (work / path.name).symlink_to(disk / path.name)
    return work


LAYOUTS = pytest.mark.parametrize("layout", [hub_cache, annex, other_disk])


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    return folder


@LAYOUTS
def test_an_index_of_shards_behind_links(
    files: Path, tmp_path: Path, layout: Callable[[Path, Path], Path]
) -> None:
    name = sharded(files).name
    path = layout(files, tmp_path / "new") / name
    with xr.open_dataset(path, engine="safetensors") as ds:
        assert_all(ds, A, B)
    (shard, *_) = sorted(path.parent.glob("*00001*"))
    with xr.open_dataset(shard) as ds:
        assert_all(ds, A)
    assert xckpt.verify(path).ok


@LAYOUTS
@pytest.mark.parametrize("suffix", [".shard", ".bin"])
def test_metadata_and_files_of_shards_behind_links(
    files: Path, tmp_path: Path, layout: Callable[[Path, Path], Path], suffix: str
) -> None:
    name = write_set(files, [[WEIGHT], [OTHER]], suffix=suffix).name
    path = layout(files, tmp_path / "new") / name
    with xr.open_dataset(path, engine="mlcp") as ds:
        np.testing.assert_array_equal(ds["w"], np.arange(6).reshape(2, 3))
        np.testing.assert_array_equal(ds["v"], np.ones(4))


@pytest.mark.parametrize("name", ["../m.safetensors", "/etc/passwd", "a/../../m", "C:\\m"])
def test_shards_outside_the_folder_of_an_index_are_refused(files: Path, name: str) -> None:
    path = sharded(files, embed=name)
    (files / "model-00001-of-00002.safetensors").rename(files.parent / "m.safetensors")
    with pytest.raises(FormatError, match=r"safetensors\.index\.json: .*same folder"):
        xr.open_dataset(path, engine="safetensors")


@pytest.mark.parametrize("place", ["../m_shard_0.shard", "/m_shard_0.shard", "a/m_shard_0.shard"])
def test_folders_in_metadata_are_ignored(files: Path, tmp_path: Path, place: str) -> None:
    path = write_set(files, [[WEIGHT]])
    document = json.loads(path.read_text())
    document["shards"][0]["filePath"] = place
    path.write_text(json.dumps(document))
    with xr.open_dataset(path, engine="mlcp") as ds:
        np.testing.assert_array_equal(ds["w"], np.arange(6).reshape(2, 3))
    # Where it is not in the folder, it is not looked for elsewhere.
    (files / "m_shard_0.shard").rename(tmp_path / "m_shard_0.shard")
    with pytest.raises(PayloadMissingError):
        xr.open_dataset(path, engine="mlcp", missing="raise")
