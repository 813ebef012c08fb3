"""Checkpoints of Orbax: folders, remote folders, chunks and their attributes."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np
import pytest
import xarray as xr
import zstandard

import xckpt
from tests.conftest import golden_files
from tests.contracts.orbax import mark
from tests.formats import orbax_files
from tests.formats.flax_files import array, flax_file
from tests.formats.orbax_files import MANIFEST, frame, leaf, manifest, write, zarray
from tests.storage.web_server import assert_row_is_one_request
from xckpt.errors import UnreadableWarning

if TYPE_CHECKING:
    from pathlib import Path

W = np.arange(24, dtype="f4").reshape(4, 6)
ARRAYS = {"params.dense.kernel": W, "params.dense.bias": W[0], "step": np.array(7)}


def written(folder: Path, entries: list[tuple[bytes, Any]], data: bytes = b"") -> Path:
    """Write a database of any entries."""
    node = leaf(sorted(entries))
    (folder / "d").mkdir()
    (folder / orbax_files.DATA).write_bytes(data)
    (folder / orbax_files.ROOT).write_bytes(node)
    (folder / "manifest.ocdbt").write_bytes(manifest((0, len(node))))
    return folder


@pytest.mark.parametrize("path", golden_files("orbax/*/expected.json"), ids=lambda p: p.parent.name)
def test_golden_paths_types_and_byte_ranges(path: Path) -> None:
    document = json.loads(path.read_text("utf-8"))
    folder = mark(path.parent / "ckpt" / document["open"]).parent
    index = xckpt.read_index(folder)
    assert sorted(index) == sorted(t["name"] or "tensor" for t in document["tensors"])
    for expected in document["tensors"]:
        tensor = index[expected["name"] or "tensor"]
        if tensor.problem is not None:
            continue
        assert (tensor.dtype, list(tensor.shape)) == (expected["dtype"], expected["shape"])
        assert [*(tensor.path or tensor.name.split("."))] == expected["path"]
        assert tensor.attrs.get("random_key_impl") == expected.get("random_key_impl")
        files = [(str(part.shard).rpartition(": ")[2], part) for part in tensor.parts.values()]
        ranges = {(file, part.offset) for file, part in files}
        for chunk in expected["storage"].get("chunks", ()):
            if "file" in chunk and not chunk.get("inner"):
                assert (chunk["file"], chunk["offset"]) in ranges


@pytest.mark.parametrize("compress", [False, True])
def test_a_folder_is_opened_by_any_of_its_names(tmp_path: Path, compress: bool) -> None:
    path = write(tmp_path / "ckpt", ARRAYS, compress=compress)
    for name in (path, path.parent, path.with_name("_METADATA")):
        ds = xckpt.open(name)
        assert list(ds) == list(ARRAYS)
        for key, values in ARRAYS.items():
            np.testing.assert_array_equal(ds[key].values, values)
    tree = xr.open_datatree(path, engine="orbax")
    assert "kernel" in tree["params/dense"]
    converted = tmp_path / "m.safetensors"
    xckpt.convert(path.parent, converted)
    np.testing.assert_array_equal(xckpt.open(converted)["params.dense.kernel"], W)


def test_a_row_over_http_reads_its_bytes(tmp_path: Path) -> None:
    values = np.arange(1 << 16, dtype="f4").reshape(256, 256)
    folder = write(tmp_path / "ckpt", {"w": values, "b": W[0]}).parent
    files = {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }
    assert_row_is_one_request(files, "manifest.ocdbt", "w", values)


def test_the_folder_of_a_manager_names_its_steps(tmp_path: Path) -> None:
    for step in (3, 10):
        item = tmp_path / str(step)
        item.mkdir()
        write(item / "default", ARRAYS)
        text = json.dumps({"item_handlers": {"default": "x.y"}, "metrics": {"loss": 0.5}})
        (item / "_CHECKPOINT_METADATA").write_text(text)
    with pytest.raises(IsADirectoryError, match="'3', '10'"):
        xckpt.open(tmp_path)
    ds = xckpt.open(tmp_path / "10")
    np.testing.assert_array_equal(ds["params.dense.kernel"], W)
    assert ds.attrs["metrics"] == {"loss": 0.5}
    assert ds["step"].values == 7


# The whole content of the file, as the versions write it.
STEPS: dict[str, dict[str, Any]] = {
    "0.12": {"item_handlers": {"params": "x.y", "meta": "z"}, "metrics": {}},
    "0.6.4": {"init_timestamp_nsecs": 1795735000000000000, "commit_timestamp_nsecs": 3},
    "0.9.1, not committed": {},
}


@pytest.mark.parametrize("version", STEPS)
def test_a_step_with_one_item_opens_as_that_item(version: str, tmp_path: Path) -> None:
    write(tmp_path / "params", ARRAYS)
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "metadata").write_text('{"a": 1}')
    (tmp_path / "_CHECKPOINT_METADATA").write_text(json.dumps(STEPS[version]))
    for path in (tmp_path, tmp_path / "_CHECKPOINT_METADATA"):
        ds = xckpt.open(path)
        assert list(ds) == list(ARRAYS)
        np.testing.assert_array_equal(ds["params.dense.kernel"], W)
    assert xckpt.open(tmp_path).attrs.get("commit_timestamp_nsecs") == STEPS[version].get(
        "commit_timestamp_nsecs"
    )


def test_times_of_steps_are_no_metrics_and_no_difference(tmp_path: Path) -> None:
    for step in (10, 20):
        (tmp_path / f"{step}").mkdir()
        write(tmp_path / f"{step}" / "params", ARRAYS)
        times = {"init_timestamp_nsecs": 10**18 + step, "commit_timestamp_nsecs": 10**18 + step}
        stated = times | {"metrics": {"loss": 1 / step}}
        (tmp_path / f"{step}" / "_CHECKPOINT_METADATA").write_text(json.dumps(stated))
    table = xckpt.open_steps(tmp_path).ckpt.summary(changes=True)
    assert [name for kind, name in table.index if kind == "metric"] == ["loss"]
    result = xckpt.compare(tmp_path / "10", tmp_path / "20")
    assert [key for key in result.attrs["attributes"] if "timestamp" in str(key)] == []
    assert "loss" in str(result.attrs["attributes"])


@pytest.mark.parametrize("handlers", [{"params": "x", "state": "y", "meta": "z"}, None])
def test_several_items_of_a_step_are_side_by_side(
    handlers: dict[str, str] | None, tmp_path: Path
) -> None:
    for item in ("params", "state"):
        write(tmp_path / item, ARRAYS)
    fields = {"metrics": {"loss": 0.5}} | ({"item_handlers": handlers} if handlers else {})
    (tmp_path / "_CHECKPOINT_METADATA").write_text(json.dumps(fields))
    ds = xckpt.open(tmp_path)
    names = [f"{item}.{name}" for item in ("params", "state") for name in ARRAYS]
    assert list(ds) == names
    for name in names:
        np.testing.assert_array_equal(ds[name].values, ARRAYS[name.partition(".")[2]])
    assert ds.attrs["metrics"] == {"loss": 0.5}
    assert "kernel" in xr.open_datatree(tmp_path, engine="orbax")["state/params/dense"]


def test_a_damaged_item_has_the_name_of_its_tensors(tmp_path: Path) -> None:
    for item in ("params", "state"):
        write(tmp_path / item, {"w": np.zeros(100, "f4"), "b": W[0]})
    (tmp_path / "state" / orbax_files.DATA).unlink()
    (tmp_path / "_CHECKPOINT_METADATA").write_text("{}")
    with pytest.warns(xckpt.CheckpointWarning, match="'state.w'"):
        ds = xckpt.open(tmp_path)
    assert ds["params.w"].values.sum() == 0
    with pytest.raises(xckpt.MissingShardError) as caught:
        ds["state.w"].values  # noqa: B018
    assert caught.value.tensor == "state.w"


def zarr_folder(folder: Path, values: Any) -> None:
    folder.mkdir(parents=True)
    (folder / ".zarray").write_bytes(zarray(values))
    (folder / "0").write_bytes(values.tobytes())


@pytest.mark.parametrize("has_tree", [True, False])
def test_items_that_are_one_array_or_a_random_key(has_tree: bool, tmp_path: Path) -> None:
    key = np.array([1, 2], "u4")
    for folder, values in (("arr", W[0]), ("key/jax_random_key", key)):
        zarr_folder(tmp_path / folder / "checkpoint", values)
        if has_tree:  # since 0.11
            entry = {
                "key_metadata": [{"key": "checkpoint", "key_type": 2}],
                "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
            }
            text = json.dumps({"tree_metadata": {"('checkpoint',)": entry}})
            (tmp_path / folder / "_METADATA").write_text(text)
    (tmp_path / "_CHECKPOINT_METADATA").write_text("{}")
    ds = xckpt.open(tmp_path)
    np.testing.assert_array_equal(ds["arr"].values, W[0])
    np.testing.assert_array_equal(ds["key"].values, key)


@pytest.mark.parametrize("handlers", [None, {"meta": "x"}, {}, [], {"a/../../b": "x", "": "y"}])
def test_a_step_without_arrays_is_refused(handlers: Any, tmp_path: Path) -> None:
    (tmp_path / "meta").mkdir()
    text = json.dumps({} if handlers is None else {"item_handlers": handlers})
    (tmp_path / "_CHECKPOINT_METADATA").write_text(text)
    with pytest.raises(xckpt.FormatError, match=r"_CHECKPOINT_METADATA: byte 0: .*Items|FileName"):
        xckpt.open(tmp_path)


def aggregated(folder: Path, tree: dict[str, Any], stored: dict[str, Any]) -> Path:
    """Move values into the msgpack file, as versions up to 0.5.15 write with aggregate=True."""
    path = write(folder, stored)
    document = json.loads(path.with_name("_METADATA").read_text("utf-8"))
    for name, value in tree.items():
        document["tree_metadata"][str(tuple(name.split(".")))] = {
            "key_metadata": [{"key": part, "key_type": 2} for part in name.split(".")],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": True},
        }
        if value is None:
            metadata = {"value_type": "None", "skip_deserialize": True}
            document["tree_metadata"][str((name,))]["value_metadata"] = metadata
    path.with_name("_METADATA").write_text(json.dumps(document))
    nested: dict[str, Any] = {}
    for name, value in {**tree, **{name: f"PLACEHOLDER://{name}" for name in stored}}.items():
        *outer, last = name.split(".")
        level = nested
        for key in outer:
            level = level.setdefault(key, {})
        level[last] = array(value) if isinstance(value, np.ndarray) else value
    path.with_name("checkpoint").write_bytes(flax_file(nested))
    return path


def test_values_in_the_msgpack_file_are_read_with_the_others(tmp_path: Path) -> None:
    tree = {"layer.b": W[1], "layer.half": W[0].astype("f2"), "step": 7, "nothing": None}
    path = aggregated(tmp_path / "ckpt", tree, {"layer.w": W})
    for name in (path, path.parent, path.with_name("_METADATA")):
        ds = xckpt.open(name)
        assert sorted(map(str, ds.variables)) == ["layer.b", "layer.half", "layer.w"]
        for key, values in {"layer.w": W, "layer.b": W[1], "layer.half": W[0]}.items():
            np.testing.assert_array_equal(ds[key].values, values)
        assert ds.attrs["step"] == 7
    np.testing.assert_array_equal(xr.open_datatree(path, engine="orbax")["layer"]["b"], W[1])
    assert xckpt.verify(path).ok


def test_values_whose_msgpack_file_is_missing_raise_when_read(tmp_path: Path) -> None:
    path = aggregated(tmp_path / "ckpt", {"b": W[1]}, {"w": W})
    path.with_name("checkpoint").unlink()
    with pytest.warns(xckpt.CheckpointWarning, match="'b'.*Copy the whole folder"):
        ds = xckpt.open(path)
    np.testing.assert_array_equal(ds["w"].values, W)
    with pytest.raises(xckpt.MissingShardError, match=r"'checkpoint'.*Copy the whole folder"):
        ds["b"].values  # noqa: B018


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("separator", [".", "/"])
def test_chunks_at_the_edge_are_cut(tmp_path: Path, order: Any, separator: str) -> None:
    padded = np.zeros((4, 8), "f4")
    padded[:, :6] = W
    fields = {"order": order, "dimension_separator": separator}
    entries: list[tuple[bytes, Any]] = [(b"a/b/.zarray", zarray(W, (3, 4), **fields))]
    for row, column in ((0, 0), (0, 1), (1, 0)):  # the last one is the fill value
        block = np.zeros((3, 4), "f4")
        part = padded[3 * row : 3 * row + 3, 4 * column : 4 * column + 4]
        block[: len(part)] = part
        entries.append((f"a/b/{row}{separator}{column}".encode(), block.tobytes(order)))
    ds = xckpt.open(written(tmp_path, entries))
    expected = W.copy()
    expected[3, 4:] = 0
    np.testing.assert_array_equal(ds["a/b"].values, expected)
    assert ds["a/b"][2, 5].values == expected[2, 5]


@pytest.mark.parametrize("at_start", [False, True])
def test_inner_chunks_of_shards(tmp_path: Path, at_start: bool) -> None:
    blocks = [zstandard.compress(W[:, 2 * n : 2 * n + 2].tobytes()) for n in range(3)]
    nbytes = 16 * 3 + 4
    at = nbytes if at_start else 0
    index = b""
    for n, block in enumerate(blocks):
        missing = n == 1
        index += struct.pack("<QQ", *((orbax_files.NOWHERE,) * 2 if missing else (at, len(block))))
        at += 0 if missing else len(block)
    index += struct.pack("<I", google_crc32c.value(index))
    data = blocks[0] + blocks[2]
    inner = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "zstd"}]
    sharding = {
        "chunk_shape": [4, 2],
        "codecs": inner,
        "index_codecs": [{"name": "bytes"}, {"name": "crc32c"}],
        "index_location": "start" if at_start else "end",
    }
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [4, 6],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 6]}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "fill_value": 2.5,
        "dimension_names": ["in", None],
    }
    shard = index + data if at_start else data + index
    entries: list[tuple[bytes, Any]] = [(b"w/zarr.json", json.dumps(document).encode())]
    entries.append((b"w/c/0/0", (0, len(shard))))
    ds = xckpt.open(written(tmp_path, entries, shard))
    expected = W.copy()
    expected[:, 2:4] = 2.5
    np.testing.assert_array_equal(ds["w"].values, expected)
    assert ds["w"].dims[0] == "in"


def test_a_missing_file_is_a_problem_of_its_arrays(tmp_path: Path) -> None:
    folder = write(tmp_path / "ckpt", {"w": np.zeros(100, "f4"), "b": W[0]}).parent
    (folder / orbax_files.DATA).unlink()
    with pytest.warns(UnreadableWarning, match="1 of 2 tensors cannot be read .'w'.: .* missing"):
        ds = xckpt.open(folder)
    np.testing.assert_array_equal(ds["b"], W[0])
    with pytest.raises(xckpt.MissingShardError, match="Copy the whole folder"):
        ds["w"].values  # noqa: B018


def test_huge_shapes_are_listed_without_memory(tmp_path: Path) -> None:
    huge = zarray(W, (1, 1), shape=[1 << 40, 1 << 10], fill_value=0)
    ds = xckpt.open(written(tmp_path, [(b"w/.zarray", huge)]))
    assert ds["w"][5, 5].values == 0
    with pytest.raises(xckpt.TooLargeError):
        ds["w"].values  # noqa: B018


def test_values_of_strings_and_custom_metadata_are_attributes(golden: Path) -> None:
    path = golden / "orbax" / "pytree_mixed" / "ckpt"
    assert xckpt.open(path).attrs["layers.2.name"] == "second"


@pytest.mark.parametrize(
    "field", ["compressor", "order", "dimension_separator", "dtype", "filters"]
)
@pytest.mark.parametrize("value", [[1], {"id": []}, {"id": {}}, 1.5, "x" * 300])
def test_odd_values_in_documents_are_errors_of_the_package(
    tmp_path: Path, field: str, value: Any
) -> None:
    entries = [(b"w/.zarray", zarray(W, **{field: value})), (b"w/0.0", W.tobytes())]
    with pytest.raises(xckpt.CheckpointError, match="'w'"):
        xckpt.open(written(tmp_path, entries), missing="raise")["w"].values  # noqa: B018


@pytest.mark.parametrize("kind", [[1], {"a": 1}, None, 3])
def test_odd_kinds_of_values_in_the_tree(tmp_path: Path, kind: Any) -> None:
    path = write(tmp_path / "ckpt", {"w": W})
    text = path.with_name("_METADATA").read_text("utf-8").replace('"jax.Array"', json.dumps(kind))
    path.with_name("_METADATA").write_text(text)
    np.testing.assert_array_equal(xckpt.open(path)["w"].values, W)


def test_names_of_files_that_are_too_long(tmp_path: Path) -> None:
    node = leaf([(b"w/.zarray", zarray(W)), (b"w/0.0", (0, 96))], data="d/" + "f" * 5000)
    folder = write(tmp_path / "ckpt", {"w": W}).parent
    (folder / orbax_files.ROOT).write_bytes(node)
    (folder / "manifest.ocdbt").write_bytes(manifest((0, len(node))))
    with pytest.raises(xckpt.MissingShardError, match="missing"):
        xckpt.open(folder, missing="raise")


def test_errors_in_decoded_bodies_have_no_position_in_them() -> None:
    body = bytes(16) + b"\xff" * 2000
    with pytest.raises(xckpt.FormatError, match="Varint") as caught:
        xckpt.read_index(frame(MANIFEST, body, compression=1))
    assert caught.value.offset == 0
