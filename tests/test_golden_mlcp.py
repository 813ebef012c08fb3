"""Golden MLCP files through ``xarray.open_dataset``: right values, or the right error."""

from __future__ import annotations

import json
import pickle
import shutil
import time
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.conftest import golden_files

if TYPE_CHECKING:
    from pathlib import Path

CHECKPOINTS = golden_files("mlcp/*.checkpoint")
SETS = golden_files("mlcp/*.metadata.json")
BAD = golden_files("mlcp/bad/*.checkpoint")
BAD_SHARDS = golden_files("mlcp/bad/*.shard")
STORED = {"Bool": "bool", "BFloat16": "bfloat16"}
# Of the files that a reader may read or refuse, ours opens these, with warnings.
TOLERATED = {"size_huge", "size_mismatch"}


def expectation(path: Path) -> dict[str, Any]:
    """Load what a golden file should hold."""
    text = (path.parent / f"{path.name}.expected.json").read_text("utf-8")
    expected: dict[str, Any] = json.loads(text)
    return expected


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    """Load the values of a golden file by ``s{shard}_t{tensor}``; some share those of another."""
    named = expectation(path).get("same_arrays_as", f"{path.name}.expected.npz")
    own = path.parent / named
    prefix = path.name.partition(".")[0]
    found = own if own.exists() else path.parent / f"{prefix}.metadata.json.expected.npz"
    return dict(np.load(found))


def listed(shards: list[list[dict[str, Any]]]) -> list[tuple[str, str, str, tuple[int, ...]]]:
    """Give npz key, variable, data type and shape of each tensor."""
    names = [tensor["name"] for shard in shards for tensor in shard]
    return [
        (
            f"s{s}_t{t}",
            tensor["name"] if names.count(tensor["name"]) == 1 else f"{tensor['name']}@rank_{s}",
            tensor["dtype"],
            tuple(tensor["shape"]),
        )
        for s, shard in enumerate(shards)
        for t, tensor in enumerate(shard)
    ]


def tensors_of(path: Path) -> list[tuple[str, str, str, tuple[int, ...]]]:
    """Give what a golden file lists; that of `listed`."""
    expected = expectation(path)
    if "records" in expected:
        return listed(expected["records"])
    source = path.with_name("ms_two_shards_cumoff.metadata.json")
    shards = expected.get("shards") or expectation(source)["shards"]
    return listed([shard["tensors"] for shard in shards])


def assert_values(path: Path, **options: Any) -> None:
    """Compare every value bit by bit, decoded and as stored."""
    ds, raw = xr.open_dataset(path, **options), xr.open_dataset(path, decode=False, **options)
    arrays, tensors = arrays_of(path), tensors_of(path)
    assert list(ds.variables) == [name for _, name, _, _ in tensors]
    for key, name, dtype, shape in tensors:
        wanted = arrays[key]
        stored = raw.variables[name].to_numpy()
        assert stored.dtype == STORED.get(dtype, dtype.lower())
        assert stored.shape == wanted.shape == shape
        assert stored.tobytes() == wanted.tobytes()
        if dtype == "BFloat16":
            wanted = (wanted.astype("u4") << 16).view("f4")
        got = ds.variables[name].to_numpy()
        assert got.dtype == wanted.dtype
        assert got.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.stem)
def test_checkpoints(path: Path) -> None:
    expected = expectation(path)
    ds = xr.open_dataset(path)
    assert ds.encoding["format"] == "mlcp"
    assert ds.attrs["payload"] == expected["payload_mode"]
    wanted = [(name, shape) for _, name, _, shape in tensors_of(path)]
    assert [(name, variable.shape) for name, variable in ds.variables.items()] == wanted
    if ds.attrs["payload"] != "none":
        assert_values(path)
        return
    for _, name, dtype, _ in tensors_of(path):
        variable = ds.variables[name]
        assert variable.encoding["dtype"] == STORED.get(dtype, dtype.lower())
        with pytest.raises(xckpt.PayloadMissingError) as caught:
            variable.to_numpy()
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.stem)
def test_descriptions(path: Path) -> None:
    expected = expectation(path)
    ds = xr.open_dataset(path)
    assert json.loads(ds.attrs["metadata_json"]).items() <= ds.attrs.items()
    if "metadata" not in expected:
        return
    assert ds.encoding["format_version"] == expected["version_string"]
    assert ds.attrs.keys() == {*expected["metadata"], "payload", "metadata_json"}
    assert expected["metadata"].items() <= ds.attrs.items()
    for shard, records in enumerate(expected["records"]):
        for record in records:
            found = [
                variable
                for name, variable in ds.variables.items()
                if variable.attrs.get("name", name) == record["name"]
                and variable.attrs["rank"] == shard
            ]
            assert len(found) == 1
            assert found[0].encoding.get("offset") == record["payload_offset"]


@pytest.mark.parametrize("path", SETS, ids=lambda path: path.name.partition(".")[0])
@pytest.mark.parametrize("mmap", [True, False])
def test_sets(path: Path, mmap: bool) -> None:
    ds = xr.open_dataset(path)
    assert ds.encoding["format"] == "mlcp"
    assert ds.attrs["payload"] == "companion"
    assert ds.attrs["format"] == "multishard"
    assert_values(path, mmap=mmap)
    for shard in expectation(path).get("shards", ()):
        for tensor in shard["tensors"]:
            encoding = ds.variables[tensor["name"]].encoding
            assert (encoding["shard"], encoding["offset"]) == (
                shard["file"],
                tensor["file_offset"],
            )


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_bad_files(path: Path) -> None:
    verdict = json.loads((path.parent / "INDEX.json").read_text("utf-8"))[path.name]["verdict"]
    start = time.perf_counter()
    if path.stem in TOLERATED:
        assert verdict == "either"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ds = xr.open_dataset(path, engine="mlcp")
        assert "the size is not what the shape makes" in str(caught[-1].message)
        with pytest.raises(xckpt.PayloadMissingError):
            ds.compute()
    else:
        with pytest.raises(xckpt.CheckpointError) as failure:
            xr.open_dataset(path, engine="mlcp")
        assert str(path) in str(failure.value)
        assert failure.value.rule
        assert failure.value.offset is not None
    assert time.perf_counter() - start < 1


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


@pytest.mark.parametrize("name", ["pay_inline", "pay_per_shard", "pay_tail", "pay_none"])
def test_cut_short_at_every_byte(golden: Path, name: str) -> None:
    path = golden / "mlcp" / f"{name}.checkpoint"
    content, truth = path.read_bytes(), truth_of(path)
    for length in range(len(content)):
        check(content[:length], truth)


@pytest.mark.parametrize("name", ["pay_inline", "pay_per_shard", "pay_tail"])
def test_bits_of_headers_flipped(golden: Path, name: str) -> None:
    path = golden / "mlcp" / f"{name}.checkpoint"
    content, truth, expected = path.read_bytes(), truth_of(path), expectation(path)
    end = len(content) - sum(len(array.tobytes()) for array in truth.values())
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


def truth_of(path: Path) -> dict[str, np.ndarray]:
    """Load the values of a golden file by the names of variables."""
    arrays = dict(np.load(f"{path}.expected.npz")) if path.stem != "pay_none" else {}
    return {name: arrays[key] for key, name, _, _ in tensors_of(path) if arrays}


def check(content: bytes, truth: dict[str, np.ndarray]) -> None:
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
            assert got.tobytes() == wanted.tobytes()


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


@pytest.mark.parametrize("name", ["magic_mlcp_big_endian", "empty"])
def test_other_content_is_left_to_others(golden: Path, name: str) -> None:
    with pytest.raises(ValueError, match="did not find a match"):
        xr.open_dataset(golden / "mlcp" / "bad" / f"{name}.checkpoint")
