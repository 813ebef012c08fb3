"""Headers with values of wrong types give an error of the package or a usable file."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import warnings
from io import StringIO
from itertools import islice
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pytest
import xarray as xr
import zstandard

import xckpt
from tests.conftest import golden_files
from tests.formats import gptrs_files, mlcp_files, primitiv_files
from tests.formats.burnpack_files import PER_TENSOR, burnpack, dense, quantized
from tests.formats.headers import changed, header_of
from tests.formats.ztensor_files import (
    dense_v1,
    dense_v2,
    dense_v12,
    stored,
    v0_file,
    v1_file,
    v2_file,
    v12_file,
)
from xckpt.cli import main
from xckpt.errors import UnreadableWarning

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VALUES = np.arange(6, dtype="<f4").reshape(2, 3)
DATA = VALUES.tobytes()
# Of golden files: how many changes are tried, and how large a file may be.
_SAMPLED = 10
_LARGEST = 1 << 16
# Variables that are computed of a file whose header was taken.
_COMPUTED = 4


def ztensor_0() -> bytes:
    entry = {"name": "w", "shape": [2, 3], "dtype": "float32", "layout": "dense"}
    fields = {"encoding": "raw", "data_endianness": "big", "checksum": "crc32c:0x00000000"}
    return v0_file({**entry, "note": [1], "data": stored(DATA, **fields)})


def ztensor_1() -> bytes:
    parts = {
        "values": stored(zstandard.compress(DATA[:8]), encoding="zstd"),
        "coords": stored(np.array([[0, 1], [0, 2]], "<u8").tobytes()),
    }
    coo = {"dtype": "float32", "shape": [2, 3], "format": "sparse_coo", "components": parts}
    group = {"dtype": "uint8", "shape": [4], "format": "quantized_4bit", "components": parts}
    dims = json.dumps({"w": ["row", "column"]})
    data = dense_v1(DATA, [2, 3], "float32", digest="sha256:00")
    return v1_file({"w": data, "s": coo, "q": group}, attributes={"xckpt.dims": dims, "k": [None]})


def ztensor_12() -> bytes:
    parts = {
        "values": stored(DATA[:8], dtype="f32"),
        "indices": stored(bytes(16), dtype="u64"),
        "indptr": stored(np.array([0, 1, 2], "<u8").tobytes(), dtype="u64"),
    }
    csr = {"shape": [2, 3], "format": "sparse_csr", "components": parts}
    packed = zstandard.compress(bytes(9))
    small = dense_v12(
        packed,
        [9],
        "u8",
        type="f8_e5m2",
        encoding="zstd",
        uncompressed_length=9,
        digest="sha256:00",
    )
    return v12_file({"w": dense_v12(DATA, [2, 3], "f32"), "s": csr, "z": small}, generator="g")


def ztensor_2() -> bytes:
    group = {
        "shape": [2, 4],
        "layout": "zt.quant_group/1",
        "parts": {"data": stored(bytes(4), dtype="u8"), "scales": stored(bytes(8), dtype="f32")},
        "attributes": {
            "bits": 4,
            "group_size": 4,
            "axis": 1,
            "packing": {"word": "u8", "order": "lsb_first", "per_word": 2},
            "scale_form": "f32_factors",
            "zero_point": {"form": "implied", "value": 8},
        },
    }
    parts = {
        "values": stored(DATA[:8], dtype="f32"),
        "coords": stored(np.array([[0, 1], [0, 2]], "<u4").tobytes(), dtype="u32"),
    }
    coo = {"shape": [2, 3], "layout": "zt.sparse_coo/1", "parts": parts}
    away = dense_v2(b"", [0], "f32", shard="a", digest="xxh3:00")
    shards = {"a": {"size": 1 << 20, "digest": "sha256:00"}}
    objects = {"w": dense_v2(DATA, [2, 3], "f32"), "q": group, "s": coo, "a": away}
    return v2_file(objects, attributes={"k": [1.5, {"a": None}]}, shards=shards)


def burnpack_3() -> bytes:
    tensors = {"w": dense(VALUES, param_id=7), "q": quantized((4,), bytes(8), PER_TENSOR)}
    return burnpack(tensors, metadata={"k": "v"}, scalars={"s": {"Int": 3}})


def gptrs_2() -> bytes:
    config = gptrs_files.tagged("gpt", gptrs_files.GPT, runtime={"weight_streaming": {}})
    return gptrs_files.indexed_file([gptrs_files.record("w", VALUES)], config)


def gptrs_1() -> bytes:
    # No offsets count from the start of the file, so that a config of any length will do.
    config = gptrs_files.tagged("gpt", gptrs_files.GPT)
    return gptrs_files.inline_file([gptrs_files.record("w", VALUES)], config)


def mlcp_checkpoint() -> bytes:
    shards = [[mlcp_files.tensor("w", VALUES)]]
    training = {"epoch": 1, "step": 2, "learningRate": 0.5, "optimizerType": "SGD"}
    return mlcp_files.checkpoint(shards, "tail", training=training, customFields={"payload": "x"})


def mlcp_metadata() -> bytes:
    shards = [[mlcp_files.tensor("w", VALUES)]]
    infos = [tensor.entry(0) for tensor in shards[0]]
    return json.dumps(mlcp_files.fields(shards, tensorInfos=infos)).encode()


def primitiv_model() -> bytes:
    tensor = primitiv_files.tensor(VALUES)
    written = primitiv_files.parameter(tensor, ("m", tensor))
    return primitiv_files.file(primitiv_files.MODEL, primitiv_files.model((("w",), written)))


def safetensors_file() -> bytes:
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    text = json.dumps({"__metadata__": {"k": "v"}, "w": entry}).encode()
    return len(text).to_bytes(8, "little") + text + DATA


def shard_index() -> bytes:
    return json.dumps({"metadata": {"k": 1}, "weight_map": {"w": "w.zt", "v": "v.zt"}}).encode()


FILES: dict[str, Callable[[], bytes]] = {
    "0.zt": ztensor_0,
    "1.zt": ztensor_1,
    "12.zt": ztensor_12,
    "2.zt": ztensor_2,
    "3.bpk": burnpack_3,
    "2.gptrs": gptrs_2,
    "1.gptrs": gptrs_1,
    "m.checkpoint": mlcp_checkpoint,
    "m.metadata.json": mlcp_metadata,
    "m.model": primitiv_model,
    "m.safetensors": safetensors_file,
    "m.safetensors.index.json": shard_index,
}


@pytest.mark.parametrize("name", FILES)
def test_header_values_of_any_type_are_handled(name: str, tmp_path: Path) -> None:
    data = FILES[name]()
    header = header_of(data)
    assert header is not None
    path = tmp_path / name
    path.write_bytes(header.rebuilt(header.value))
    for tensor in ("w", "v"):  # tensors in the index of shards
        file = v1_file({tensor: dense_v1(DATA, [2, 3], "float32")})
        (tmp_path / f"{tensor}.zt").write_bytes(file)
    with warnings.catch_warnings():
        # Files next to some of them are missing.
        warnings.simplefilter("ignore", UnreadableWarning)
        assert xckpt.read_index(path).tensors
    for place, value in changed(header.value):
        assert_takes(path, header.rebuilt, value, place)


@pytest.mark.parametrize(
    "golden_file",
    [
        path
        for pattern in ("ztensor/*.zt", "burnpack/*.bpk", "gptrs/chk_v1*.bin", "mlcp/*.checkpoint")
        for path in golden_files(pattern)
    ]
    + [*golden_files("mlcp/*.metadata.json"), *golden_files("primitiv/*.primitiv")],
    ids=lambda path: path.name,
)
def test_header_values_of_any_type_in_golden_files(golden_file: Path, tmp_path: Path) -> None:
    data = golden_file.read_bytes()
    header = header_of(data) if len(data) <= _LARGEST else None
    if header is None:
        return
    # The same ones each time.
    choice = random.Random(golden_file.name)  # noqa: S311
    values = list(changed(header.value))
    for place, value in choice.sample(values, min(_SAMPLED, len(values))):
        assert_takes(tmp_path / golden_file.name, header.rebuilt, value, place)


def assert_takes(path: Path, rebuilt: Callable[[Any], bytes], value: Any, place: Any) -> None:
    try:
        data = rebuilt(value)
    except (TypeError, ValueError, OverflowError):
        return  # the encoding of this header has no such value
    path.write_bytes(data)
    try:
        _use(path)
    except Exception as error:
        error.add_note(f"at {place}")
        raise


def _use(path: Path) -> None:
    with warnings.catch_warnings(), contextlib.redirect_stdout(StringIO()):
        warnings.simplefilter("ignore", xckpt.CheckpointWarning)
        try:
            index = xckpt.read_index(path)
        except (xckpt.CheckpointError, FileNotFoundError) as error:
            _assert_named(error, path)
            return
        assert pickle.loads(pickle.dumps(index)).tensors.keys() == index.tensors.keys()
        assert repr(index)
        assert main(["info", "--json", str(path)]) == 0
        _compute(xr.open_dataset(path, engine=index.format))
        _compute(xr.open_dataset(path, engine=index.format, decode=False, stack=True))
        assert repr(xckpt.verify(path, progress=False))


def _assert_named(error: Exception, path: Path) -> None:
    assert str(path.parent) in str(error)


def _compute(ds: xr.Dataset) -> None:
    assert repr(ds.ckpt)
    for variable in islice(ds.variables.values(), _COMPUTED):
        if variable.size < 1 << 16:
            with contextlib.suppress(xckpt.CheckpointError), dask.config.set(scheduler="sync"):
                assert variable.values.shape == variable.shape
