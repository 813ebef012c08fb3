"""Detection, the choice of the version, and the golden files, without any array."""

from __future__ import annotations

import json
import pickle
import re
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.conftest import GOLDEN, golden_files
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
from tests.sources import CountingSource
from xckpt import formats
from xckpt.errors import FormatError, UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path

    from xckpt.index import Index, Part

ztensor = formats.get("ztensor")

# The element types that expectations name as the file spells them.
SPELLED = {
    "u8": "uint8",
    "f8_e4m3fn": "float8_e4m3fn",
    "f8_e5m2": "float8_e5m2",
    "f8_e4m3fnuz": "float8_e4m3fnuz",
    "f8_e5m2fnuz": "float8_e5m2fnuz",
    "f8_e8m0": "float8_e8m0fnu",
    "f4_e2m1": "float4_e2m1fn",
}
CASES = GOLDEN / "ztensor" / "conformance" / "cases.json"


def read(data: bytes, name: str = "memory") -> Index:
    return ztensor.read(CountingSource(data, name))


def one_of_each() -> dict[str, bytes]:
    data = np.arange(6, dtype="<f4").tobytes()
    entry = {"name": "w", "dtype": "float32", "shape": [2, 3], "layout": "dense"}
    return {
        "0.1": v0_file({**entry, "data": stored(data, encoding="raw")}),
        "1.0": v1_file({"w": dense_v1(data, [2, 3], "float32")}),
        "1.2.0": v12_file({"w": dense_v12(data, [2, 3], "f32")}),
        "2": v2_file({"w": dense_v2(data, [2, 3], "f32")}),
    }


@pytest.mark.parametrize("version", one_of_each())
def test_every_version_is_told_from_the_others(version: str) -> None:
    data = one_of_each()[version]
    index = read(data)
    assert (index.format, index.version, index.nbytes) == ("ztensor", version, len(data))
    (tensor,) = index.tensors.values()
    assert (tensor.name, tensor.dtype, tensor.shape, tensor.layout) == (
        "w",
        "float32",
        (2, 3),
        "dense",
    )
    part = tensor.parts["data"]
    assert np.frombuffer(data, "<f4", 6, part.offset).tolist() == [0, 1, 2, 3, 4, 5]
    assert tensor.strict == (version == "2")


@pytest.mark.parametrize("version", one_of_each())
def test_only_head_footer_and_manifest_are_read(version: str) -> None:
    data = np.zeros(1 << 18).tobytes()
    entry = {"name": "w", "dtype": "float64", "shape": [1 << 18], "layout": "dense"}
    source = CountingSource(
        {
            "0.1": lambda: v0_file({**entry, "data": stored(data, encoding="raw")}),
            "1.0": lambda: v1_file({"w": dense_v1(data, [1 << 18], "float64")}),
            "1.2.0": lambda: v12_file({"w": dense_v12(data, [1 << 18], "f64")}),
            "2": lambda: v2_file({"w": dense_v2(data, [1 << 18], "f64")}),
        }[version]()
    )
    ztensor.read(source)
    assert source.nbytes_read < 300
    assert len(source.reads) == 3


@pytest.mark.parametrize("version", one_of_each())
def test_an_index_pickles(version: str) -> None:
    index = read(one_of_each()[version])
    assert pickle.loads(pickle.dumps(index)) == index


@pytest.mark.parametrize("version", one_of_each())
def test_the_registry_detects_it_by_content(version: str) -> None:
    assert formats.detect(CountingSource(one_of_each()[version])).name == "ztensor"


def test_what_is_not_detected() -> None:
    assert not ztensor.detect(b"", 0, "m.zt")
    assert not ztensor.detect(b"ZTEN100", 7, "m.zt")
    assert not ztensor.detect(b"zten1000" + bytes(56), 64, "m.zt")
    assert not ztensor.detect(b"\x89PNG\r\n\x1a\n", 8, "m.zt")


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (b"", "FileTooSmall"),
        (b"ZTEN1000", "FileTooSmall"),
        (b"\x89ZT2\r\n\x1a\n" + bytes(39), "FileTooSmall"),
        (bytes(64), "HeaderMagic"),
        (b"ZTEN9999" + bytes(64), "HeaderMagic"),
    ],
)
def test_files_that_are_something_else(data: bytes, rule: str) -> None:
    with pytest.raises(FormatError) as caught:
        read(data)
    assert caught.value.rule == rule
    assert caught.value.offset == 0


@pytest.mark.parametrize(
    "path", golden_files("ztensor/*.zt", with_suffix=".expected.json"), ids=lambda path: path.stem
)
def test_good_files(path: Path) -> None:
    expected = json.loads(path.with_suffix(".expected.json").read_text())
    data = path.read_bytes()
    index = read(data, str(path))
    if expected["file_version"] is None:
        assert index.version.startswith(expected["container"])
    else:
        assert index.version == str(expected["file_version"])
    assert set(index.tensors) == set(expected["tensors"])
    assert bool(index.warnings) == bool(expected["warnings"])
    assert index.attrs.get("generator") == expected.get("generator", index.attrs.get("generator"))
    for key, value in (expected["attributes"] or {}).items():
        assert index.attrs[key] == _from_json(value)
    arrays = _arrays(path)
    for name, description in expected["tensors"].items():
        _check_tensor(path, index, name, description, arrays)


def _from_json(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"__bytes_hex__"}:
        return bytes.fromhex(value["__bytes_hex__"])
    return value


def _arrays(path: Path) -> dict[str, Any]:
    npz = path.with_suffix(".expected.npz")
    return dict(np.load(npz)) if npz.exists() else {}


def _check_tensor(
    path: Path, index: Index, name: str, expected: dict[str, Any], arrays: dict[str, Any]
) -> None:
    tensor = index.tensors[name]
    assert tensor.shape == tuple(expected["shape"])
    assert (tensor.problem is not None) == (expected["read"] == "error")
    if tensor.problem is not None:
        assert isinstance(tensor.problem, UnsupportedError)
        assert tensor.problem.tensor == name
    elif expected["dtype"] is not None:
        assert tensor.dtype == SPELLED.get(
            expected["type"] or expected["dtype"], expected["type"] or expected["dtype"]
        )
    for key, value in (expected["attributes"] or {}).items():
        assert tensor.attrs[key] == value
    if tensor.problem is None:
        assert set(tensor.parts) == set(expected["parts"])
        for role, description in expected["parts"].items():
            _check_part(path, index, tensor.parts[role], arrays[description["npz"]])


def _check_part(path: Path, index: Index, part: Part, values: Any) -> None:
    if part.shard is not None:
        assert index.shards[part.shard].candidates[0] == f"{path.stem}-{part.shard}.zt"
        path = path.parent / index.shards[part.shard].candidates[0]
        assert index.shards[part.shard].size == path.stat().st_size
    stored_bytes = path.read_bytes()[part.offset : part.offset + part.nbytes]
    if part.encoding is None and part.dtype == "bool":
        assert [byte != 0 for byte in stored_bytes] == values.ravel().tolist()
    elif part.encoding is None:
        assert stored_bytes == values.tobytes()
    elif part.decoded_nbytes is not None:
        assert part.decoded_nbytes == values.nbytes


@pytest.mark.parametrize("path", golden_files("ztensor/bad/*.zt"), ids=lambda path: path.stem)
def test_bad_files(path: Path) -> None:
    described = re.match(r"\[(open\|read|open|read|either)", path.with_suffix(".txt").read_text())
    assert described is not None
    start = time.process_time()
    found = _outcome(path.read_bytes())
    assert time.process_time() - start < 1
    if isinstance(found, FormatError):
        assert described[1] != "read"
        assert found.rule is not None
        assert found.offset is not None
        return
    assert described[1] != "open"
    problems = {name: tensor.problem for name, tensor in found.tensors.items() if tensor.problem}
    if described[1] == "open|read":
        assert set(problems) == {"t1"}
    else:
        # Of what reading shows, sizes that disagree show already.
        assert {problem.rule for problem in problems.values()} <= {"LayoutRule"}


def _outcome(data: bytes) -> Index | FormatError:
    try:
        return read(data)
    except FormatError as error:
        return error


@pytest.mark.parametrize("case", json.loads(CASES.read_text()) if CASES.exists() else [])
def test_conformance(case: str) -> None:
    expected = json.loads(CASES.read_text())[case]
    data = (CASES.parent / expected["dir"] / f"{case}.zt").read_bytes()
    verdict, colon, rule = expected["expect"].partition(":")
    if expected["op"] == "open" and colon:
        with pytest.raises(FormatError) as caught:
            read(data)
        assert caught.value.rule == rule
        assert caught.value.offset is not None
        return
    index = read(data)
    assert index.version == "2"
    assert verdict != "DataShard" or not index.tensors
    problems = [tensor.problem for tensor in index.tensors.values() if tensor.problem]
    assert bool(problems) == case.endswith(("encoding-refused", "ltype-structural"))
