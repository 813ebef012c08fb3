"""Tensors without elements are never read and never missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr
import xxhash

from tests.formats.mlcp_files import checkpoint, tensor, write_set
from tests.formats.ztensor_files import dense_v2, stored, v2_file
from tests.writing.saved import ENGINES, OPTIONS
from xckpt import PayloadMissingError, read_index
from xckpt.writing import convert, save, verify

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHAPES = [(0,), (0, 3), (3, 0), (2, 0, 4)]
EMPTY = {f"e{number}": np.zeros(shape, "f4") for number, shape in enumerate(SHAPES)}


def without_values(folder: Path) -> Path:
    """Write a checkpoint of MLCP that has no data at all."""
    path = folder / "m.checkpoint"
    full = tensor("w", np.ones(2, "f4"))
    path.write_bytes(checkpoint([[full, *(tensor(n, a) for n, a in EMPTY.items())]]))
    return path


def without_files(folder: Path) -> Path:
    """Write the metadata of an MLCP checkpoint without its data."""
    full = tensor("w", np.ones(2, "f4"))
    path = write_set(folder, [[full, *(tensor(n, a) for n, a in EMPTY.items())]])
    (folder / "m_shard_0.shard").unlink()
    return path


def without_a_shard(folder: Path) -> Path:
    """Write a zTensor file with parts in another one, which is not there."""
    path = folder / "m.zt"
    arrays = {"w": np.ones(2, "f4"), **EMPTY}
    objects: dict[str, Any] = {}
    for name, array in arrays.items():
        objects[name] = dense_v2(array.tobytes(), array.shape, "f32")
        objects[name]["parts"]["data"] = {
            "dtype": "f32",
            "blob": [4096, array.nbytes],
            "shard": "0",
        }
        if name in {"e0", "e2"}:
            objects[name]["parts"]["data"]["digest"] = f"xxh3:{xxhash.xxh3_64_hexdigest(b'')}"
    shards = {"0": {"digest": "sha256:" + "0" * 64, "size": 12288}}
    path.write_bytes(v2_file(objects, shards=shards))
    return path


@pytest.mark.filterwarnings("ignore::xckpt.errors.UnreadableWarning")  # of the other tensor
@pytest.mark.parametrize("write", [without_values, without_files, without_a_shard])
def test_no_data_are_missing(write: Callable[[Path], Path], tmp_path: Path) -> None:
    path = write(tmp_path)
    engine = read_index(path).format
    for decode in (True, False):
        ds = xr.open_dataset(path, engine=engine, decode=decode)
        for name, array in EMPTY.items():
            values = ds.variables[name].values
            assert (values.shape, values.dtype) == (array.shape, array.dtype)
        with pytest.raises(PayloadMissingError, match="'w'"):
            ds["w"].compute()
    names = list(EMPTY)
    save(xr.open_dataset(path, engine=engine)[names], tmp_path / "saved.zt")
    convert(path, tmp_path / "converted.zt", tensors=names)
    assert (tmp_path / "saved.zt").read_bytes() == (tmp_path / "converted.zt").read_bytes()
    assert {n: t.shape for n, t in read_index(tmp_path / "saved.zt").tensors.items()} == {
        name: array.shape for name, array in EMPTY.items()
    }
    assert [finding.tensor for finding in verify(path).findings] == ["w"]


@pytest.mark.filterwarnings("ignore:.*without a place:xckpt.CheckpointWarning")
@pytest.mark.parametrize("engine", sorted(set(ENGINES) - {"primitiv"}))
def test_checkpoints_of_empty_tensors_alone(engine: str, tmp_path: Path) -> None:
    ds = xr.Dataset(
        {n: xr.Variable([f"{n}_{i}" for i in range(a.ndim)], a) for n, a in EMPTY.items()}
    )
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    save(ds, first, engine, **OPTIONS.get(engine, {}))
    assert verify(first).ok
    with xr.open_dataset(first, engine=engine) as opened:
        for name, array in EMPTY.items():
            values = opened.variables[name].values
            assert (values.shape, values.dtype) == (array.shape, array.dtype)
        save(opened, second, engine, **OPTIONS.get(engine, {}))
    convert(first, third, engine, **OPTIONS.get(engine, {}))
    assert second.read_bytes() == third.read_bytes() == first.read_bytes()


def test_quantised_and_sparse_tensors_without_elements(tmp_path: Path) -> None:
    scheme: dict[str, Any] = {"bits": 4, "group_size": 8, "axis": 1, "scale_form": "f16_factors"}
    scheme |= {"packing": {"word": "u32", "order": "lsb_first", "per_word": 8}}
    scheme |= {"zero_point": {"form": "none"}}
    index = {"dtype": "u32"}
    objects: dict[str, Any] = {
        "q": {
            "shape": [0, 16],
            "layout": "zt.quant_group/1",
            "attributes": scheme,
            "parts": {"data": stored(b"", dtype="u32"), "scales": stored(b"", dtype="f16")},
        },
        "csr": {
            "shape": [0, 4],
            "layout": "zt.sparse_csr/1",
            "parts": {
                "values": stored(b"", dtype="f32"),
                "indices": stored(b"", **index),
                "indptr": stored(bytes(4), **index),
            },
        },
        "coo": {
            "shape": [4, 0],
            "layout": "zt.sparse_coo/1",
            "parts": {"values": stored(b"", dtype="f32"), "coords": stored(b"", **index)},
        },
    }
    path = tmp_path / "m.zt"
    path.write_bytes(v2_file(objects))
    shapes = {"q": (0, 16), "csr": (0, 4), "coo": (4, 0)}
    with xr.open_dataset(path) as ds:
        assert {name: ds.variables[name].values.shape for name in ds.variables} == shapes
        save(ds, tmp_path / "saved.zt", version="2")
    convert(path, tmp_path / "converted.zt", version="2")
    assert (tmp_path / "saved.zt").read_bytes() == (tmp_path / "converted.zt").read_bytes()
    layouts = {n: t.layout for n, t in read_index(tmp_path / "saved.zt").tensors.items()}
    assert layouts == {"q": "quantized", "csr": "sparse_csr", "coo": "sparse_coo"}
    assert verify(path).ok
