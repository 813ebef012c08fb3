"""Several files as one checkpoint: lists, globs, indexes of shards."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any
from uuid import uuid4

import dask.array as da
import fsspec
import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.formats.safetensors_files import entry, safetensors_file
from tests.test_stacking import zt
from xckpt.errors import (
    CheckpointWarning,
    FileChangedError,
    FormatError,
    MissingShardError,
    UnreadableWarning,
)
from xckpt.formatting import natural_key

A = {"embed": np.arange(12, dtype="<f4").reshape(3, 4), "layers.0.w": np.ones((2, 2), "<f4")}
B = {"layers.1.w": np.full((2, 2), 2, "<f4"), "head": np.arange(4, dtype="<f4")}


def write(folder: Path, files: dict[str, dict[str, Any]], **attrs: Any) -> list[str]:
    for name, arrays in files.items():
        (folder / name).write_bytes(zt(arrays, attrs))
    return [str(folder / name) for name in files]


def opened(files: Any, **options: Any) -> xr.Dataset:
    """Open several files; xarray's hints know of one."""
    return xr.open_dataset(files, engine="ztensor", **options)


def assert_all(ds: xr.Dataset, *parts: dict[str, Any]) -> None:
    expected: dict[str, Any] = {}
    for part in parts:
        expected |= part
    assert list(ds.data_vars) == list(expected)
    for name, values in expected.items():
        assert isinstance(ds[name].data, da.Array)
        np.testing.assert_array_equal(ds[name], values)


def test_a_list_is_one_checkpoint(tmp_path: Path) -> None:
    paths = write(tmp_path, {"b.zt": A, "a.zt": B}, license="MIT")
    ds = opened(paths)
    assert_all(ds, A, B)
    assert ds.attrs == {"license": "MIT"}
    assert ds["head"].encoding["shard"] == paths[1]
    assert ds.encoding["source"] == f"{paths[0]} and 1 more"
    ds.close()
    assert_all(opened([Path(paths[0]), Path(paths[1]).read_bytes()]), A, B)


@pytest.mark.parametrize("pattern", ["m-*.zt", "m-?*.zt", "m-[0-9]*.zt"])
def test_a_glob_is_one_checkpoint_in_natural_order(tmp_path: Path, pattern: str) -> None:
    write(tmp_path, {"m-10.zt": B, "m-9.zt": A})
    for path in (tmp_path / pattern, str(tmp_path / pattern)):
        assert_all(xr.open_dataset(path, engine="ztensor"), A, B)
    assert_all(xr.open_dataset(str(tmp_path / pattern)), A, B)
    index = xckpt.read_index(tmp_path / pattern)
    assert list(index.tensors) == [*A, *B]
    assert index.nbytes == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_a_name_with_the_marks_of_a_glob_is_a_name(tmp_path: Path) -> None:
    write(tmp_path, {"m[1]*.zt": A, "m1.zt": B})
    assert_all(xr.open_dataset(tmp_path / "m[1]*.zt", engine="ztensor"), A)


def test_layers_in_different_files_are_stacked(tmp_path: Path) -> None:
    paths = write(tmp_path, {"a.zt": A, "b.zt": B})
    ds = opened(paths, stack=True)
    assert ds["layers.w"].shape == (2, 2, 2)
    np.testing.assert_array_equal(ds["layers.w"].sel(layers=1), B["layers.1.w"])
    tree = xr.open_datatree(paths, engine="ztensor")  # type: ignore[arg-type]  # xarray's hint
    np.testing.assert_array_equal(tree["layers/1/w"], B["layers.1.w"])


def test_sharded_datasets_pickle_and_files_have_distinct_task_names(tmp_path: Path) -> None:
    paths = write(tmp_path, {"a.zt": A, "b.zt": B})
    ds = opened(paths)
    again = pickle.loads(pickle.dumps(ds))
    assert_all(again, A, B)
    before = ds["embed"].data.name
    assert before == opened(paths)["embed"].data.name
    (tmp_path / "b.zt").write_bytes(zt({**B, "head": B["head"] + 1}))
    assert before != opened(paths)["embed"].data.name
    with pytest.raises(FileChangedError, match=r"b\.zt"):
        again["head"].compute()


def test_a_tensor_in_two_files_is_an_error_that_names_both(tmp_path: Path) -> None:
    paths = write(tmp_path, {"a.zt": A, "b.zt": {"embed": A["embed"]}})
    with pytest.raises(FormatError, match=r"'embed'.*a\.zt and .*b\.zt") as caught:
        opened(paths)
    assert caught.value.tensor == "embed"


def test_files_that_disagree_on_attributes(tmp_path: Path) -> None:
    (tmp_path / "a.zt").write_bytes(zt(A, {"rank": 0, "license": "MIT"}))
    (tmp_path / "b.zt").write_bytes(zt(B, {"rank": 1, "license": "MIT", "more": "b"}))
    with pytest.warns(CheckpointWarning, match="disagree on the attributes 'rank'"):
        ds = xr.open_dataset(str(tmp_path / "*.zt"), engine="ztensor")
    assert ds.attrs == {"rank": 0, "license": "MIT", "more": "b"}


def test_other_objects_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="list of files is empty"):
        opened([])
    with pytest.raises(FileNotFoundError, match=r"none-\*\.zt"):
        xr.open_dataset(str(tmp_path / "none-*.zt"), engine="ztensor")
    paths = write(tmp_path, {"a.zt": A})
    with pytest.raises(FileNotFoundError, match=r"b\.zt"):
        opened([*paths, str(tmp_path / "b.zt")])
    with pytest.raises(ValueError, match="twice"):
        opened(paths * 2)


def test_a_glob_of_urls() -> None:
    fs = fsspec.filesystem("memory")
    folder = f"/{uuid4().hex}"
    fs.pipe({f"{folder}/m-2.zt": zt(A), f"{folder}/m-10.zt": zt(B), f"{folder}/n.zt": zt(B)})
    assert_all(xr.open_dataset(f"memory:/{folder}/m-*.zt", engine="ztensor"), A, B)
    with pytest.raises(FileNotFoundError):
        xr.open_dataset(f"memory:/{folder}/q-*.zt", engine="ztensor")


# --- model.safetensors.index.json -----------------------------------------------------------------


def sharded(folder: Path, **changes: Any) -> Path:
    """Write two shards and their index."""
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weight_map: dict[str, str] = {}
    parts: list[dict[str, Any]] = [A, B]
    for name, arrays in zip(names, parts, strict=True):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        data = b""
        for tensor, values in arrays.items():
            end = len(data) + values.nbytes
            header[tensor] = entry("F32", list(values.shape), len(data), end)
            data += values.tobytes()
        (folder / name).write_bytes(safetensors_file(header, data))
        weight_map |= dict.fromkeys(arrays, name)
    root = {"metadata": {"total_size": 96}, "weight_map": weight_map | changes}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(root))
    return path


def test_an_index_of_shards(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    for ds in (xr.open_dataset(path, engine="safetensors"), xr.open_dataset(path)):
        assert_all(ds, A, B)
        assert ds.attrs == {"total_size": 96, "format": "pt"}
        assert ds.encoding["source"] == str(path)
        assert ds["head"].encoding["shard"] == "model-00002-of-00002.safetensors"


def test_a_missing_shard_lists_its_tensors_and_fails_when_they_are_read(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.warns(
        CheckpointWarning, match=r"2 of 4 tensors .* the file '.*00002.*' is missing"
    ):
        ds = xr.open_dataset(path, engine="safetensors")
    assert set(ds.data_vars) == {*A, *B}
    np.testing.assert_array_equal(ds["embed"], A["embed"])
    with pytest.raises(MissingShardError, match="model-00002-of-00002") as caught:
        ds["head"].compute()
    assert caught.value.tensor == "head"
    assert "head" in repr(ds)
    for shown in (repr(ds.ckpt), ds.ckpt._repr_html_()):
        assert f"{len(B)} tensors cannot be read" in shown
    assert re.search(r"head +unknown +unknown +0 B", repr(ds.ckpt))
    sizes = ds.ckpt.summary()
    assert set(sizes.loc[sizes["dtype"] == "unknown", "shape"]) == {"unknown"}
    assert sizes.loc[sizes["dtype"] == "unknown", "parameters"].sum() == 0
    with pytest.warns(CheckpointWarning) as warned:
        st = ds.ckpt.stats()
    assert set(st.data_vars) == set(A)
    (message,) = [str(warning.message) for warning in warned]  # one for all of them
    assert "cannot be read ('layers.1.w', 'head'): the file 'model-00002-of-00002" in message
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(MissingShardError, match="all of its files are missing"):
        xr.open_dataset(path, engine="safetensors")


@pytest.mark.parametrize("damage", ["empty", "in the header", "in the data", "other bytes"])
@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("engine", ["safetensors", None])
def test_a_damaged_shard_is_like_a_missing_one(
    tmp_path: Path, damage: str, position: int, engine: str | None
) -> None:
    path = sharded(tmp_path)
    damaged = tmp_path / f"model-0000{position + 1}-of-00002.safetensors"
    parts: list[dict[str, Any]] = [A, B]
    data, lost = damaged.read_bytes(), list(parts[position])
    if damage == "in the data":
        lost = lost[-1:]  # the header has the others
    intact = {name: values for name, values in {**A, **B}.items() if name not in lost}
    cut = {"empty": 0, "in the header": 20, "in the data": len(data) - 5, "other bytes": 0}[damage]
    damaged.write_bytes(b"PK and more" * 20 if damage == "other bytes" else data[:cut])
    with pytest.warns(UnreadableWarning, match=f"cannot be read .*{damaged.name}: "):
        ds = xr.open_dataset(path, engine=engine)
    assert set(ds.data_vars) == {*A, *B}
    for name, values in intact.items():
        np.testing.assert_array_equal(ds[name], values)
    for name in lost:
        with pytest.raises(FormatError, match=damaged.name) as caught:
            ds[name].compute()
        assert caught.value.tensor == name
        assert caught.value.hint
    for shown in (repr(ds.ckpt), ds.ckpt._repr_html_()):
        assert re.search(f"{len(lost)} tensors? cannot be read", shown)
    with pytest.warns(UnreadableWarning, match=damaged.name):
        assert set(ds.ckpt.stats(cache=False).data_vars) == set(intact)
    report = xckpt.verify(path)
    [finding] = report.findings
    assert finding.tensor in lost or all(name in finding.message for name in lost)
    assert not report.ok
    with pytest.raises(FormatError, match=damaged.name):
        xckpt.convert(path, tmp_path / "m.zt")
    assert not (tmp_path / "m.zt").exists()
    damaged.write_bytes(data)
    assert_all(xr.open_dataset(path, engine=engine), A, B)


def test_a_damaged_file_of_several_without_an_index_is_an_error(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    path.unlink()
    damaged = tmp_path / "model-00002-of-00002.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:20])
    every: list[Any] = [tmp_path, tmp_path / "*.safetensors", sorted(tmp_path.iterdir())]
    for files in every:
        with pytest.raises(FormatError, match=damaged.name):
            xr.open_dataset(files, engine="safetensors")


def test_an_error_of_all_shards_is_an_error(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    with pytest.raises(FormatError, match="00001-of-00002"):
        xr.open_dataset(path, engine="ztensor")


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 10**5, "\xff"],
)
def test_an_invalid_index_of_shards(tmp_path: Path, content: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(FormatError, match=r"index\.json"):
        xr.open_dataset(path, engine="safetensors")


@pytest.mark.parametrize("name", ["../m.safetensors", "/etc/passwd", "a/../../m", "C:\\m", ""])
def test_an_index_of_shards_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(FormatError, match="same folder"):
        xr.open_dataset(sharded(tmp_path, embed=name), engine="safetensors")


def test_an_index_of_shards_names_a_number_of_any_length(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="999"):
        xr.open_dataset(sharded(tmp_path, embed="9" * 5000), engine="safetensors")


def test_numbers_sort_by_value() -> None:
    names = ["a10", "a9b2", "a9b10", "b", "1", "a009", "10", "9", "a"]
    assert sorted(names, key=natural_key) == [
        "1", "9", "10", "a", "a009", "a9b2", "a9b10", "a10", "b"
    ]  # fmt: skip
    assert natural_key("9" * 4999) < natural_key("1" + "0" * 4999)


# --- folders --------------------------------------------------------------------------------------


def shards(folder: Path) -> None:
    write(folder, {"model-00001-of-00002.zt": A, "model-00002-of-00002.zt": B})


def test_a_folder_of_shards(tmp_path: Path) -> None:
    shards(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 4}')
    (tmp_path / "README.md").write_text("# A model")
    for ds in (xr.open_dataset(tmp_path), opened(str(tmp_path))):
        assert_all(ds, A, B)
        assert ds.attrs["config"] == {"hidden_size": 4}
        assert ds.encoding["source"] == str(tmp_path)
    table = xckpt.table(xckpt.stats(tmp_path, progress=False))
    assert set(table.index) == {*A, *B}
    xckpt.convert(tmp_path, tmp_path.parent / "whole.zt", overwrite=True)
    xr.testing.assert_equal(opened(tmp_path.parent / "whole.zt"), opened(tmp_path))


def test_a_folder_with_an_index(tmp_path: Path) -> None:
    write(tmp_path, {"a.zt": A, "b.zt": B, "unrelated.zt": A})
    weight_map = {**dict.fromkeys(A, "a.zt"), **dict.fromkeys(B, "b.zt")}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    ds = opened(tmp_path)
    assert_all(ds, A, B)
    assert ds.attrs["total_size"] == 1
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"embed": "no.bin"}}')
    assert_all(opened(tmp_path), A, B)


def test_a_folder_with_one_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, {"model.zt": A})
    (tmp_path / "config.json").write_text("not JSON")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "empty").touch()
    ds = xr.open_dataset(tmp_path)
    assert_all(ds, A)
    assert "config" not in ds.attrs


def test_an_ambiguous_folder(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="no checkpoint is in this folder; it has no files"):
        xckpt.read_index(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(IsADirectoryError, match=r"it has 'notes.txt'"):
        xckpt.read_index(tmp_path)
    write(tmp_path, {"step_9.zt": A, "step_10.zt": A})
    for opening in (xckpt.read_index, xr.open_dataset):
        with pytest.raises(IsADirectoryError, match=r"2 checkpoints .* 'step_9.zt', 'step_10.zt'"):
            opening(tmp_path)


def test_a_folder_that_lacks_a_shard(tmp_path: Path) -> None:
    write(tmp_path, {"model-00001-of-00003.zt": A, "model-00003-of-00003.zt": B})
    with pytest.raises(MissingShardError, match="of 3 shards these are missing: 2"):
        xckpt.read_index(tmp_path)
