"""Golden files of gpt.rs through ``xarray.open_dataset``: right values, or the right error."""

from __future__ import annotations

import json
import time
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.conftest import golden_files
from xckpt.backend import GptrsBackend
from xckpt.formats.gptrs import base_id, param_key

if TYPE_CHECKING:
    from pathlib import Path

GOOD = golden_files("gptrs/*.bin")
BAD = golden_files("gptrs/bad/*.bin")

# Channels and kernels differ from layer to layer, and the classifier of the golden resnet34 has
# fewer inputs than a resnet34.
UNNAMED = {"out_channels", "in_channels", "kernel_h", "kernel_w", "in_features"}
# Of the files that a reader may read or refuse, ours reads these, some with a warning.
TOLERATED = {"config_no_kind": True, "config_runtime_bad": False, "name_empty": False}


def expectation(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Load what a golden file should hold."""
    expected = json.loads((path.parent / f"{path.name}.expected.json").read_text("utf-8"))
    return expected, dict(np.load(path.parent / f"{path.name}.expected.npz"))


def opened(path: Path, **options: Any) -> tuple[xr.Dataset, list[str]]:
    """Open a file without naming the engine, and return its warnings as well."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ds = xr.open_dataset(path, **options)
    assert all(issubclass(w.category, xckpt.CheckpointWarning) for w in caught)
    return ds, [str(w.message) for w in caught]


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_values(path: Path, mmap: bool) -> None:
    expected, arrays = expectation(path)
    ds, _ = opened(path, mmap=mmap)
    raw, _ = opened(path, mmap=mmap, decode=False)
    assert list(ds.variables) == [entry["name"] for entry in expected["entries"]]
    for number, entry in enumerate(expected["entries"]):
        wanted = arrays[f"k{number}"]
        stored = raw.variables[entry["name"]]
        assert stored.shape == wanted.shape == tuple(entry["dims"])
        assert stored.values.tobytes() == wanted.tobytes()
        if entry["dtype"] == "bf16":
            assert stored.dtype == "bfloat16"
            wanted = (wanted.astype("u4") << 16).view("f4")
        got = ds.variables[entry["name"]].values
        assert got.dtype == wanted.dtype
        assert got.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_descriptions(path: Path) -> None:
    expected, _ = expectation(path)
    ds, told = opened(path)
    dialect = "-bincode" if expected["index_encoding"] == "bincode1" else ""
    assert ds.encoding["format"] == "gptrs"
    assert ds.encoding["format_version"] == f"{expected['version']}{dialect}"
    is_checkpoint = expected["magic"] == "GPTRSCHK"
    if is_checkpoint:
        assert {key: ds.attrs.get(key) for key in ("kind", "config", "runtime")} == {
            key: expected[key] for key in ("kind", "config", "runtime")
        }
        wanted = {"kind", "config"} | ({"runtime"} if expected["runtime"] else set())
        has_ids = any(int(entry.get("stored_base_id") or "0", 16) for entry in expected["entries"])
        assert ds.attrs.keys() == wanted | ({"ids"} if has_ids else set())
        assert ds.attrs.get("ids") == ("stored" if has_ids else None)
    else:
        assert not ds.attrs
    for entry in expected["entries"]:
        variable = ds.variables[entry["name"]]
        assert variable.encoding["offset"] == entry["offset"]
        assert variable.encoding["nbytes"] == entry["byte_len"]
        attrs = {"requires_grad": entry["requires_grad"]}
        if entry.get("computed_base_id") is not None:
            attrs["base_id"] = entry["computed_base_id"]
        assert variable.attrs == attrs
    refused = is_checkpoint and not all(entry["name"].isascii() for entry in expected["entries"])
    assert len(told) == refused


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_axes(path: Path) -> None:
    expected, _ = expectation(path)
    ds, _ = opened(path)
    for entry in expected["entries"]:
        dims = ds.variables[entry["name"]].dims
        wanted = entry.get("suggested_axes") or [None] * len(dims)
        if entry["name"].endswith(".attention.w_out"):
            wanted = ["attn_dim", "embed_dim"]
        for dim, size, name in zip(dims, entry["dims"], wanted, strict=True):
            if name is None or name in UNNAMED:
                assert str(dim).partition("_")[0] == f"d{size}"
            else:
                assert dim == name


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_trees(path: Path) -> None:
    expected, arrays = expectation(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", xckpt.CheckpointWarning)
        tree = xr.open_datatree(path, engine="gptrs", decode=False)
    values = {
        variable.encoding["tensor"]: variable.values
        for node in tree.subtree
        for variable in node.variables.values()
    }
    assert len(values) == len(expected["entries"])
    for number, entry in enumerate(expected["entries"]):
        assert values[entry["name"]].tobytes() == arrays[f"k{number}"].tobytes()


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_bad_files(path: Path) -> None:
    verdict = json.loads((path.parent / "INDEX.json").read_text("utf-8"))[path.name]["verdict"]
    start = time.perf_counter()
    if path.stem in TOLERATED:
        assert verdict == "either"
        ds, told = opened(path, engine="gptrs")
        assert bool(told) == TOLERATED[path.stem]
        ds.compute()
    else:
        with pytest.raises(xckpt.CheckpointError) as caught:
            xr.open_dataset(path, engine="gptrs")
        assert str(path) in str(caught.value)
        assert caught.value.rule
        assert caught.value.offset is not None
    assert time.perf_counter() - start < 1


def test_ids(golden: Path) -> None:
    vectors = json.loads((golden / "gptrs" / "base_id_vectors.json").read_text("utf-8"))
    assert len(vectors) == 21
    for vector in vectors:
        number = base_id(vector["name"])
        assert number == int(vector["base_id_dec"])
        assert f"{number:032x}" == vector["base_id_hex"]
        assert number.to_bytes(16, "little").hex() == vector["le_bytes"]
        for namespace, column in ((0, "key_ns0"), (1, "key_ns1"), (2**127 + 5, "key_ns_2^127+5")):
            assert f"{param_key(namespace, number):032x}" == vector[column]


def test_remote_files_are_ours_by_a_suffix_that_no_others_use() -> None:
    engine = GptrsBackend()
    assert engine.guess_can_open("https://example.org/input.TEN?v=1")
    assert engine.guess_can_open("s3://bucket/model.gptrs")
    assert not engine.guess_can_open("https://example.org/pytorch_model.bin")
