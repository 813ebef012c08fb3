"""Golden MLCP files, as far as they are not like those of all formats (see contracts)."""

from __future__ import annotations

import pickle
import shutil
import warnings
from typing import TYPE_CHECKING

import pytest
import xarray as xr

import xckpt
from tests.conftest import golden_files
from tests.contracts.declared import golden_json
from tests.contracts.mlcp import DECLARED

if TYPE_CHECKING:
    from collections.abc import Mapping
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
        with pytest.warns(xckpt.CheckpointWarning, match="148 bytes, but the metadata say 144"):
            ds = xr.open_dataset(metadata)
        wanted = xr.open_dataset(folder / metadata.name)
        xr.testing.assert_identical(ds.compute(), wanted.compute())
        return
    with pytest.raises(xckpt.FormatError) as caught:
        xr.open_dataset(metadata)
    assert str(damaged) in str(caught.value)


@pytest.mark.parametrize("name", ["pay_inline", "pay_per_shard", "pay_tail"])
def test_bits_of_headers_flipped(golden: Path, name: str) -> None:
    path = golden / "mlcp" / f"{name}.checkpoint"
    content, expected = path.read_bytes(), golden_json(path)
    truth = DECLARED.expected(path).stored
    end = len(content) - sum(map(len, truth.values()))
    start = expected["header_len"]
    data: set[int] = set()
    for record in (record for shard in expected["records"] for record in shard):
        offset = record["payload_offset"] or 0
        data.update(range(offset, offset + record["size"] if offset else 0))
    assert len(set(range(len(content))) - data) == end
    for position in {*range(14), *range(start, len(content))} - data:
        for bit in (0, 2, 5, 7):
            changed = bytearray(content)
            changed[position] ^= 1 << bit
            check(bytes(changed), truth)


def check(content: bytes, truth: Mapping[str, bytes]) -> None:
    """Open and compute a damaged file: an error of ours, or right data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", xckpt.CheckpointWarning)
        try:
            ds = xr.open_dataset(content, engine="mlcp", decode=False)
        except xckpt.CheckpointError:
            return
    for name, variable in ds.variables.items():
        try:
            got = variable.to_numpy()
        except xckpt.CheckpointError:
            continue
        if (wanted := truth.get(str(name))) is not None and got.size:
            assert got.tobytes() == wanted


def test_a_missing_shard(golden: Path, tmp_path: Path) -> None:
    name = "ms_two_shards_cumoff"
    for suffix in (".metadata.json", "_shard_1.shard"):
        shutil.copy(golden / "mlcp" / f"{name}{suffix}", tmp_path)
    ds = xr.open_dataset(tmp_path / f"{name}.metadata.json")
    whole = xr.open_dataset(golden / "mlcp" / f"{name}.metadata.json")
    assert {n: v.shape for n, v in ds.items()} == {n: v.shape for n, v in whole.items()}
    there = ["head.weight", "head.scale"]
    xr.testing.assert_equal(ds[there].compute(), whole[there].compute())
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
