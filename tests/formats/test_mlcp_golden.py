"""Golden MLCP files, beyond what the contracts check for every format."""

from __future__ import annotations

import pickle
import shutil
from typing import TYPE_CHECKING

import pytest
import xarray as xr

import xckpt
from tests.conftest import golden_files
from xckpt.errors import UnreadableWarning

if TYPE_CHECKING:
    from pathlib import Path

BAD_SHARDS = golden_files("mlcp/bad/*.shard")


@pytest.mark.parametrize("path", BAD_SHARDS, ids=lambda path: path.stem)
def test_bad_files_of_shards(path: Path, tmp_path: Path) -> None:
    with pytest.raises(xckpt.UnsupportedError, match="one shard of a checkpoint"):
        xr.open_dataset(path)
    folder = path.parents[1]
    shutil.copy(folder / "ms_two_shards_cumoff.metadata.json", tmp_path)
    shutil.copy(folder / "ms_two_shards_cumoff_shard_1.shard", tmp_path)
    damaged = tmp_path / "ms_two_shards_cumoff_shard_0.shard"
    shutil.copyfile(path, damaged)
    metadata = tmp_path / "ms_two_shards_cumoff.metadata.json"
    if path.stem == "shard_data_len_8_bytes_spec":
        with pytest.warns(xckpt.CheckpointWarning, match="148 bytes, but 144 in the metadata"):
            ds = xr.open_dataset(metadata)
        expected = xr.open_dataset(folder / metadata.name)
        xr.testing.assert_identical(ds.compute(), expected.compute())
        return
    with pytest.raises(xckpt.FormatError) as caught:
        xr.open_dataset(metadata)
    assert str(damaged) in str(caught.value)


def test_a_missing_shard(golden: Path, tmp_path: Path) -> None:
    name = "ms_two_shards_cumoff"
    for suffix in (".metadata.json", "_shard_1.shard"):
        shutil.copy(golden / "mlcp" / f"{name}{suffix}", tmp_path)
    with pytest.warns(UnreadableWarning, match=r"2 of 4 tensors .*'layer.bias'"):
        ds = xr.open_dataset(tmp_path / f"{name}.metadata.json")
    full = xr.open_dataset(golden / "mlcp" / f"{name}.metadata.json")
    assert {n: v.shape for n, v in ds.items()} == {n: v.shape for n, v in full.items()}
    present = ["head.weight", "head.scale"]
    xr.testing.assert_equal(ds[present].compute(), full[present].compute())
    for shown in (ds, pickle.loads(pickle.dumps(ds))):
        with pytest.raises(xckpt.PayloadMissingError, match=f"{name}_shard_0.shard") as caught:
            shown["layer.bias"].compute()
        assert isinstance(caught.value, FileNotFoundError)
        assert caught.value.tensor == "layer.bias"


def test_equal_names_in_a_tree(golden: Path) -> None:
    path = golden / "mlcp" / "meta_same_names_across_shards.checkpoint"
    tree = xr.open_datatree(path, engine="mlcp")
    assert set(tree.groups) == {"/", "/rank_0", "/rank_1"}
    assert tree["rank_1/w"].shape == (2, 3)
    assert tree["rank_0/w"].attrs == {"rank": 0, "name": "w"}
    with pytest.raises(xckpt.PayloadMissingError):
        tree["rank_1/b"].to_numpy()
