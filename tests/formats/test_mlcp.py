"""The mlcp format module: from bytes to an index or an error that names the broken rule."""

from __future__ import annotations

import json
import pickle
import struct
import time
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.formats.mlcp_files import (
    NUMBERS,
    NUMPY,
    Tensor,
    checkpoint,
    fields,
    shard_entry,
    shard_file,
    tensor,
    write_set,
)
from tests.sources import CountingSource
from xckpt import formats
from xckpt.elements import stored_dtype
from xckpt.errors import CheckpointError, FormatError, PayloadMissingError, UnsupportedError
from xckpt.formats.mlcp.records import NetCursor
from xckpt.index import Part
from xckpt.storage import open_source

if TYPE_CHECKING:
    from pathlib import Path

    from xckpt.index import Index

mlcp = formats.get("mlcp")

WEIGHT = tensor("a.w", np.arange(6, dtype="<f4").reshape(2, 3))
BIAS = tensor("a.b", np.arange(3, dtype="<f8"))
STEP = tensor("step", np.array(7, "<i8"))
EMPTY = tensor("e", np.zeros((0, 3), "<f4"))
TWO = [[WEIGHT, STEP], [BIAS, EMPTY]]
READINGS = ("inline", "per_shard", "tail")


def read(data: bytes, **options: Any) -> Index:
    return mlcp.read(CountingSource(data), **options)


def opened(path: Path, **options: Any) -> Index:
    return mlcp.read(open_source(path), **options)


def value(data: bytes, index: Index, name: str) -> bytes:
    part = index.tensors[name].parts["data"]
    return data[part.offset : part.offset + part.nbytes]


def beside(path: Path, index: Index, name: str) -> bytes:
    part = index.tensors[name].parts["data"]
    assert part.shard is not None
    shard = index.shards[part.shard]
    actual = path.parent / shard.candidates[0]
    assert actual.stat().st_size == shard.size
    return actual.read_bytes()[part.offset : part.offset + part.nbytes]


def fails(data: bytes, rule: str, **options: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read(data, **options)
    assert caught.value.rule == rule, caught.value
    assert caught.value.offset is not None
    return caught.value


def fails_beside(path: Path, rule: str) -> CheckpointError:
    with pytest.raises(FormatError) as caught:
        opened(path)
    assert caught.value.rule == rule, caught.value
    return caught.value


# --- where the data are ---------------------------------------------------------------------------


@pytest.mark.parametrize("stated_by", [None, "marker", "option"])
@pytest.mark.parametrize("reading", READINGS)
def test_payloads_in_every_position(reading: str, stated_by: str | None) -> None:
    custom: Any = {"customFields": {"payload": reading}} if stated_by == "marker" else {}
    data = checkpoint(TWO, reading, **custom)
    index = read(data, payload=reading) if stated_by == "option" else read(data)
    assert index.attrs["payload"] == reading
    assert index.warnings == ()
    for tensors, rank in zip(TWO, (0, 1), strict=True):
        for written in tensors:
            actual = index.tensors[str(written.name)]
            assert value(data, index, str(written.name)) == written.data
            assert actual.shape == tuple(written.shape)
            assert (actual.dtype, actual.problem, actual.path) == (NUMPY[written.dtype], None, None)
            assert actual.attrs == {"rank": rank}
    assert pickle.loads(pickle.dumps(index)).tensors == index.tensors


@pytest.mark.parametrize("listed", ["null", "empty"])
@pytest.mark.parametrize("reading", [*READINGS, "none"])
def test_shards_that_are_not_listed(reading: str, listed: str) -> None:
    shards: Any = None if listed == "null" else []
    custom: Any = {"customFields": {"payload": "tail"}} if reading == "tail" else {}
    data = checkpoint(TWO, reading, shards=shards, **custom)
    index = read(data)
    assert index.attrs["payload"] == reading
    assert [tensor.attrs["rank"] for tensor in index.tensors.values()] == [0, 0, 1, 1]
    if reading != "none":
        assert value(data, index, "a.b") == BIAS.data
    alone = read(checkpoint([], shards=shards, sharding=fields(TWO)["sharding"]))
    assert alone.warnings == ()


def test_data_behind_an_unknown_number_of_shards_need_a_marker() -> None:
    fails(checkpoint(TWO, "tail", shards=None), "Truncated")


def test_one_shard() -> None:
    for reading in ("per_shard", "tail"):
        data = checkpoint([[WEIGHT, BIAS]], reading)
        index = read(data)
        assert index.attrs["payload"] == "tail"
        assert value(data, index, "a.b") == BIAS.data


def test_tensors_without_elements_need_no_data() -> None:
    data = checkpoint([[EMPTY], [BIAS]])
    index = read(data)
    assert index.attrs["payload"] == "none"
    assert index.tensors["e"].problem is None
    assert value(data, index, "e") == b""
    assert isinstance(index.tensors["a.b"].problem, PayloadMissingError)


def test_a_size_without_elements_is_a_contradiction() -> None:
    index = read(checkpoint([[Tensor("e", (0, 3), b"", nbytes=4)]]))
    assert isinstance(index.tensors["e"].problem, PayloadMissingError)


def test_sizes_that_fit_several_places_are_ambiguous() -> None:
    # Four zero bytes are a shard without tensors, or a number.
    first, second = bytes(8) + b"data", b"data" + bytes(8)
    data = checkpoint([[Tensor("w", (3,), first)], [], []], "per_shard")
    assert data == checkpoint([[Tensor("w", (3,), second)], [], []], "tail")
    assert "payload=" in str(fails(data, "Ambiguous"))
    assert value(data, read(data, payload="per_shard"), "w") == first
    assert value(data, read(data, payload="tail"), "w") == second


@pytest.mark.parametrize("reading", READINGS)
def test_data_are_not_read(reading: str) -> None:
    big = [Tensor(f"t{number}", (1 << 20,), bytes(4 << 20)) for number in range(2)]
    source = CountingSource(checkpoint([big, [WEIGHT]], reading))
    assert mlcp.read(source).attrs["payload"] == reading
    assert source.nbytes_read < 1 << 17


@pytest.mark.parametrize("option", READINGS)
def test_a_payload_that_does_not_fit(option: str) -> None:
    shards = [[WEIGHT, STEP], [BIAS]]
    fails(checkpoint(shards), "Truncated" if option == "inline" else "Payload", payload=option)
    for reading in READINGS:
        if reading != option:
            with pytest.raises(FormatError):
                read(checkpoint(shards, reading), payload=option)


@pytest.mark.parametrize("option", READINGS)
def test_sizes_that_do_not_fit_the_shape(option: str) -> None:
    fails(checkpoint([[Tensor("w", (3,), bytes(8))]], option), "Size", payload=option)


def test_unexplained_bytes_are_an_error() -> None:
    data = checkpoint(TWO, tail=b"junk")
    error = fails(data, "Payload")
    assert error.offset == len(data) - 4
    assert "4 bytes" in str(error)
    assert "payload='none'" in str(error)
    index = read(data, payload="none")
    assert index.attrs["payload"] == "none"
    assert index.warnings == ("4 bytes follow the last record, and are not read",)
    fails(checkpoint(TWO, "tail", tail=b"x"), "Payload")
    fails(checkpoint(TWO, "tail")[:-1], "Payload")
    fails(checkpoint(TWO, "tail", customFields={"payload": "none"}), "Payload")
    fails(checkpoint(TWO, tail=b"junk"), "Payload", payload="companion")


def test_files_without_payload_have_no_values() -> None:
    data = checkpoint(TWO)
    index = read(data)
    assert index.attrs["payload"] == "none"
    assert index.shards == {}
    assert [(t.name, t.shape, t.parts) for t in index.tensors.values()] == [
        ("a.w", (2, 3), {}),
        ("step", (), {}),
        ("a.b", (3,), {}),
        ("e", (0, 3), {"data": Part("float32", (0, 3), 0, 0)}),
    ]
    problems = {tensor.problem for tensor in index.tensors.values() if tensor.size}
    (problem,) = problems
    assert isinstance(problem, PayloadMissingError)
    assert isinstance(problem, LookupError)
    assert "no values" in str(problem)
    for options in ({"payload": "none"}, {}):
        marked = read(checkpoint(TWO, customFields={"payload": "none"}), **options)
        assert marked.attrs["payload"] == "none"


def test_an_unknown_payload_option() -> None:
    with pytest.raises(ValueError, match="payload='middle' is not one of 'none', 'inline'"):
        read(checkpoint(TWO), payload="middle")
    with pytest.raises(ValueError, match="are in other files"):
        read(json.dumps(fields(TWO)).encode(), payload="tail")


@pytest.mark.parametrize("text", ["head", "", "Tail", "companion "])
def test_foreign_custom_fields_are_ignored(text: str) -> None:
    data = checkpoint(TWO, "inline", customFields={"payload": text})
    assert read(data).attrs["payload"] == "inline"


# --- tensors --------------------------------------------------------------------------------------


def test_element_types() -> None:
    assert list(NUMBERS) == list(mlcp.types)
    shard = [
        Tensor(name, (2,), bytes(2 * stored_dtype(NUMPY[name]).itemsize), name) for name in NUMBERS
    ]
    for data in (checkpoint([shard], "tail"), json.dumps(fields([shard])).encode()):
        index = read(data)
        assert {name: index.tensors[name].dtype for name in NUMBERS} == NUMPY


@pytest.mark.parametrize("name", ["float32", "1", "", "Float32 ", "Float32, Int8", "Complex64"])
def test_other_element_types(name: str) -> None:
    metadata = fields([[WEIGHT]])
    data = checkpoint([[Tensor("w", (), b"", name)]], metadata=metadata)
    error = fails(data, "DataType")
    assert error.tensor == "w"
    metadata["shards"][0]["tensors"][0]["dataType"] = name
    fails(json.dumps(metadata).encode(), "DataType")


@pytest.mark.parametrize("number", [-1, 13, 1.0, True, None])
def test_other_numbers_of_element_types(number: Any) -> None:
    metadata = fields([[WEIGHT]])
    metadata["shards"][0]["tensors"][0]["dataType"] = number
    fails(json.dumps(metadata).encode(), "DataType")


def test_element_types_by_name_in_metadata() -> None:
    metadata = fields([[WEIGHT]])
    metadata["shards"][0]["tensors"][0]["dataType"] = "Float32"
    assert read(json.dumps(metadata).encode()).tensors["a.w"].dtype == "float32"


@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        ((-1,), "Shape"),
        ((1 << 62, 4), "Shape"),
        ((0, 1 << 62, 4), "Shape"),
        ((1 << 61,), "Shape"),
        ((1,) * 65, "Shape"),
    ],
)
def test_impossible_shapes(shape: tuple[int, ...], rule: str) -> None:
    data = checkpoint([[Tensor("w", shape, b"")]], shards=None)
    assert fails(data, rule).tensor == "w"
    metadata = fields([[Tensor("w", shape, b"")]])
    fails(json.dumps(metadata).encode(), "Metadata" if len(shape) > 64 else rule)


def test_possible_shapes() -> None:
    shapes = [(1,) * 64, (0, 1 << 60), ((1 << 61) - 1,)]
    shard = [Tensor(f"t{i}", s, b"", nbytes=4 * prod(s)) for i, s in enumerate(shapes)]
    index = read(checkpoint([shard]))
    assert [tensor.shape for tensor in index.tensors.values()] == shapes


def test_sizes_that_contradict_the_shape() -> None:
    wrong = Tensor("w", (2, 3), bytes(25))
    index = read(checkpoint([[wrong, WEIGHT]]))
    assert index.warnings == ("tensor 'w': the size is not what the shape makes",)
    assert isinstance(index.tensors["w"].problem, PayloadMissingError)
    for reading in READINGS:
        assert fails_somehow(checkpoint([[wrong, WEIGHT]], reading))
    error = fails(checkpoint([[Tensor("w", (2,), b"", nbytes=-8)]], shards=None), "Size")
    assert error.tensor == "w"


def fails_somehow(data: bytes) -> str | None:
    with pytest.raises(FormatError) as caught:
        read(data)
    return caught.value.rule


def test_two_tensors_of_one_name_in_a_shard() -> None:
    fails(checkpoint([[WEIGHT, WEIGHT]]), "DuplicateName")
    fails(json.dumps(fields([[WEIGHT, WEIGHT]])).encode(), "DuplicateName")


def test_names() -> None:
    names = ["", "größe/層", "a\0b", ".", "n" * 5000]
    shard = [Tensor(name, (), bytes(4)) for name in names]
    assert list(read(checkpoint([shard], "tail")).tensors) == names
    fails(checkpoint([[Tensor(b"\xff", (), b"")]], shards=None), "Utf8")


# --- equal names ----------------------------------------------------------------------------------


def test_names_in_several_shards() -> None:
    shards = [
        [Tensor("a.w", (), b"0000"), Tensor("a.b", (), b"1111")],
        [Tensor("a.w", (), b"2222"), Tensor("c", (), b"3333")],
    ]
    data = checkpoint(shards, "tail")
    index = read(data)
    assert {name: value(data, index, name) for name in index.tensors} == {
        "a.w@rank_0": b"0000",
        "a.b": b"1111",
        "a.w@rank_1": b"2222",
        "c": b"3333",
    }
    actual = index.tensors["a.w@rank_1"]
    assert actual.name == "a.w@rank_1"
    assert actual.attrs == {"rank": 1, "name": "a.w"}
    assert [tensor.path for tensor in index.tensors.values()] == [
        ("rank_0", "a", "w"),
        ("rank_0", "a", "b"),
        ("rank_1", "a", "w"),
        ("rank_1", "c"),
    ]


def test_a_name_that_ends_like_another_variable() -> None:
    index = read(checkpoint([[Tensor("w", (), b""), Tensor("w@rank_1", (), b"")]], shards=None))
    assert list(index.tensors) == ["w", "w@rank_1@rank_0"]
    assert index.tensors["w@rank_1@rank_0"].attrs["name"] == "w@rank_1"


ODD = st.sampled_from(["w", "@rank_0", "@rank_1", "@rank_-1", "rank_0.w", ".", ""])
HOSTILE = st.lists(ODD, min_size=1, max_size=3).map("".join)


@given(st.lists(st.lists(HOSTILE, unique=True, max_size=4), min_size=1, max_size=3))
def test_no_two_tensors_get_one_name(names: list[list[str]]) -> None:
    shards = [[Tensor(name, (), b"") for name in shard] for shard in names]
    index = read(checkpoint(shards))
    expected = [(rank, name) for rank, shard in enumerate(names) for name in shard]
    results = [
        (tensor.attrs["rank"], tensor.attrs.get("name", tensor.name))
        for tensor in index.tensors.values()
    ]
    assert results == expected
    if len({tensor.path for tensor in index.tensors.values()}) > 1:
        assert len({tensor.path for tensor in index.tensors.values()}) == len(expected)


def test_a_deep_name_in_a_tree() -> None:
    deep = ".".join("abc" * 40)
    index = read(checkpoint([[Tensor(deep, (), b"")], [Tensor(deep, (), b"")]]))
    for actual in index.tensors.values():
        assert actual.path is not None
        assert len(actual.path) == 65
        assert ".".join(actual.path[1:]) == deep


def test_ranks() -> None:
    entries = [shard_entry([WEIGHT], 5), shard_entry([WEIGHT], -3)]
    index = read(checkpoint([[WEIGHT], [WEIGHT]], "tail", shards=entries))
    assert list(index.tensors) == ["a.w@rank_5", "a.w@rank_-3"]


def test_ranks_that_are_all_zero() -> None:
    entries = [shard_entry([WEIGHT], 0), shard_entry([WEIGHT], 0)]
    index = read(checkpoint([[WEIGHT], [WEIGHT]], "tail", shards=entries))
    assert list(index.tensors) == ["a.w@rank_0", "a.w@rank_1"]
    assert index.warnings == ("the metadata of shard 1 have rank 0, which another shard has too",)
    fails(json.dumps(fields([], shards=entries)).encode(), "Rank")


# --- metadata -------------------------------------------------------------------------------------


def test_attributes() -> None:
    training = {"epoch": 3, "step": 1 << 40, "learningRate": 3e-05, "optimizerState": {"a": [1]}}
    metadata = fields(TWO, training=training, customFields={"notes": "é"}, somethingNew=[None])
    index = read(checkpoint(TWO, metadata=metadata, version="2.0"))
    assert index.version == "2.0"
    text = json.dumps(metadata, indent=2)
    assert index.attrs == {**metadata, "payload": "none", "metadata_json": text}
    assert index.warnings == ()


def test_almost_no_metadata() -> None:
    index = read(checkpoint(TWO, metadata=b" {} "))
    assert index.attrs == {"payload": "none", "metadata_json": " {} "}
    assert len(index.tensors) == 4


@pytest.mark.parametrize(
    ("metadata", "version"),
    [({}, "1.0.0"), ({"version": None}, ""), ({"version": "3"}, "3")],
)
def test_version_of_metadata_alone(metadata: dict[str, Any], version: str) -> None:
    assert read(json.dumps(metadata).encode()).version == version


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"a": 1,}',
        '{"a": 1} {}',
        '{"a": 1 /* one */}',
        "{'a': 1}",
        '{"training": {"learningRate": NaN}}',
        '{"a": -Infinity}',
        '{"a": 1e999}',
        '{"a": "\\ud800"}',
        '{"\\udc00": 1}',
        '{"a": "\t"}',
        '{"a": 01}',
        "\ufeff{}",
        '{"a": ' + "[" * 64 + "]" * 64 + "}",
        '{"a": ' * 100_000,
        '{"a": ' + "1" * 5000 + "}",
    ],
)
def test_metadata_that_are_not_json(text: str) -> None:
    assert fails(checkpoint(TWO, metadata=text.encode()), "Json").offset == 14


@pytest.mark.parametrize("text", ["null", "[]", "1", '"{}"'])
def test_metadata_that_are_not_an_object(text: str) -> None:
    fails(checkpoint(TWO, metadata=text.encode()), "Metadata")


def test_metadata_that_are_not_utf8() -> None:
    fails(checkpoint(TWO, metadata=b'{"a": "\xff"}'), "Json")


@pytest.mark.parametrize(
    "metadata",
    [
        {"version": 1},
        {"worldSize": None},
        {"worldSize": 1 << 31},
        {"worldSize": 2.0},
        {"ddpRank": True},
        {"sharding": []},
        {"shardingStrategy": {"shardCount": "2"}},
        {"sharding": {"strategySpecificInfo": [1]}},
        {"training": {"epoch": None}},
        {"training": {"step": -(1 << 63) - 1}},
        {"training": {"learningRate": "0.1"}},
        {"customFields": {"n": 1}},
        {"shards": {}},
        {"shards": [None]},
        {"shards": [{"rank": "0"}]},
        {"shards": [{"filePath": 1}]},
        {"shards": [{"fileSize": 0.5}]},
        {"shards": [{"tensors": {}}]},
        {"shards": [{"tensors": [1]}]},
        {"shards": [{"tensors": [{"name": None}]}]},
        {"shards": [{"tensors": [{"shape": None}]}]},
        {"shards": [{"tensors": [{"shape": [1.0]}]}]},
        {"shards": [{"tensors": [{"size": "4"}]}]},
        {"tensorInfos": [[]]},
    ],
)
def test_metadata_of_other_types(metadata: dict[str, Any]) -> None:
    fails(checkpoint([], metadata=metadata), "Metadata")
    fails(json.dumps(metadata).encode(), "Metadata")


def test_fields_that_are_repeated() -> None:
    metadata = b'{"format": "x", "format": "y", "shards": null}'
    index = read(checkpoint(TWO, metadata=metadata))
    assert index.attrs["format"] == "y"
    assert index.warnings == (
        "the metadata have the field 'format' several times: the last counts",
    )


def test_metadata_that_disagree_with_the_records() -> None:
    shards = [shard_entry([STEP, WEIGHT], 0), {"rank": 1}]
    index = read(checkpoint(TWO, shards=shards))
    assert index.warnings == ("the metadata of shard 0 list other tensors than its records",)
    assert list(index.tensors) == ["a.w", "step", "a.b", "e"]
    fails(checkpoint(TWO, "tail", shards=shards), "Payload")
    fails(checkpoint(TWO, shards=[shard_entry(TWO[0], 0)]), "Payload")
    fails(checkpoint(TWO, shards=[{"rank": rank} for rank in range(3)]), "Truncated")


def test_long_versions() -> None:
    for length in (0, 127, 128, 16384, 2_100_000):
        assert read(checkpoint(TWO, version="v" * length)).version == "v" * length


@pytest.mark.parametrize("length", ["8500", "85808000", "8580808000"])
def test_lengths_with_more_bytes_than_they_need(length: str) -> None:
    assert NetCursor(CountingSource(bytes.fromhex(length) + b"12345")).string("text") == "12345"


@pytest.mark.parametrize("length", ["8080808080", "808080808001", "ffffffff0f", "ffffffff7f"])
def test_lengths_of_more_than_31_bits(length: str) -> None:
    with pytest.raises(FormatError) as caught:
        NetCursor(CountingSource(bytes.fromhex(length) + bytes(16))).string("text")
    assert caught.value.rule == "StringLength"


# --- files beside ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cumulative", [True, False])
@pytest.mark.parametrize("suffix", [".shard", ".bin"])
def test_metadata_with_a_file_for_each_shard(tmp_path: Path, suffix: str, cumulative: bool) -> None:
    entries = [shard_entry(shard, r, cumulative=cumulative) for r, shard in enumerate(TWO)]
    path = write_set(tmp_path, TWO, suffix=suffix, shards=entries)
    index = opened(path)
    assert index.attrs["payload"] == "companion"
    assert list(index.shards) == [f"m_shard_0{suffix}", f"m_shard_1{suffix}"]
    assert index.warnings == ()
    for member in (*TWO[0], *TWO[1]):
        assert beside(path, index, str(member.name)) == member.data
    assert opened(path, payload="none").attrs["payload"] == "none"


def test_a_checkpoint_with_files_beside(tmp_path: Path) -> None:
    write_set(tmp_path, TWO)
    path = tmp_path / "m.checkpoint"
    for content in (
        checkpoint(TWO),
        checkpoint(TWO, shards=None),
        checkpoint(TWO, shards=[{"rank": 0}, {"rank": 1}]),
        checkpoint(TWO, customFields={"payload": "companion"}),
    ):
        path.write_bytes(content)
        index = opened(path)
        assert index.attrs["payload"] == "companion"
        for member in (*TWO[0], *TWO[1]):
            assert beside(path, index, str(member.name)) == member.data
    assert opened(path, payload="none").attrs["payload"] == "none"
    path.write_bytes(checkpoint(TWO, "tail"))
    assert opened(path).attrs["payload"] == "tail"


def test_offsets_in_any_order_and_shared(tmp_path: Path) -> None:
    entry = shard_entry([WEIGHT, STEP, WEIGHT], 0)
    entry["tensors"][2]["name"] = "tied"
    for info, offset in zip(entry["tensors"], (8, 0, 8), strict=True):
        info["offset"] = offset
    path = write_set(tmp_path, [[STEP, WEIGHT]], shards=[entry])
    data = (tmp_path / "m_shard_0.shard").read_bytes()
    (tmp_path / "m_shard_0.shard").write_bytes(data.replace(b"\2\0\0\0", b"\3\0\0\0", 1))
    index = opened(path)
    assert beside(path, index, "a.w") == beside(path, index, "tied") == WEIGHT.data
    assert beside(path, index, "step") == STEP.data


@pytest.mark.parametrize(("offset", "rule"), [(9, "Bounds"), (-4, "Bounds"), (4, "Overlap")])
def test_impossible_offsets(tmp_path: Path, offset: int, rule: str) -> None:
    first, second = Tensor("a", (2,), bytes(8)), Tensor("b", (2,), bytes(8))
    entry = shard_entry([first, second], 0)
    entry["tensors"][1]["offset"] = offset
    index = opened(write_set(tmp_path, [[first, second]], shards=[entry]))
    for actual in index.tensors.values():
        assert isinstance(actual.problem, FormatError)
        assert actual.problem.rule == rule


def test_data_in_another_encoding_have_no_values(tmp_path: Path) -> None:
    # As upstream's coordinator writes them: a state as JSON, and offsets of 0.
    entries = [shard_entry([WEIGHT, STEP], 0, cumulative=False)]
    path = write_set(tmp_path, [[WEIGHT, STEP]], suffix=".bin", shards=entries)
    (tmp_path / "m_shard_0.bin").write_bytes(b'{"a.w": [0, 1, 2], "step": 7, "more": "text"}')
    index = opened(path)
    assert index.attrs["payload"] == "none"
    for actual in index.tensors.values():
        assert isinstance(actual.problem, PayloadMissingError)
        assert "m_shard_0.bin" in str(actual.problem)


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    path = write_set(tmp_path, TWO)
    (tmp_path / "m_shard_0.shard").unlink()
    index = opened(path)
    assert index.attrs["payload"] == "companion"
    assert list(index.tensors) == ["a.w", "step", "a.b", "e"]
    problem = index.tensors["a.w"].problem
    assert isinstance(problem, PayloadMissingError)
    assert isinstance(problem, FileNotFoundError)
    assert "m_shard_0.shard" in str(problem)
    assert beside(path, index, "a.b") == BIAS.data
    (tmp_path / "m_shard_1.shard").unlink()
    index = opened(path)
    assert index.attrs["payload"] == "none"
    problems = {name: tensor.problem for name, tensor in index.tensors.items()}
    assert problems.pop("e") is None  # it has no elements
    assert all(isinstance(problem, FileNotFoundError) for problem in problems.values())


def test_bytes_in_memory_have_no_files_beside(tmp_path: Path) -> None:
    path = write_set(tmp_path, TWO)
    for content in (path.read_bytes(), checkpoint(TWO)):
        assert mlcp.read(open_source(content)).attrs["payload"] == "none"


@pytest.mark.parametrize(
    "stated_path", ["{}", "run/{}", "/scratch/run/{}", "../{}", "C:\\run\\{}", "run\\..\\{}"]
)
def test_files_are_looked_for_beside_by_their_last_name(tmp_path: Path, stated_path: str) -> None:
    entry = shard_entry([WEIGHT], 0, filePath=stated_path.format("other.bin"))
    path = write_set(tmp_path, [[WEIGHT]], shards=[entry])
    assert list(opened(path).shards) == ["m_shard_0.shard"]
    (tmp_path / "other.bin").write_bytes(WEIGHT.data)
    assert list(opened(path).shards) == ["other.bin"]


@pytest.mark.parametrize(
    "stated_path", ["../x.bin", "{}/x.bin", "..", "sub/..", "x/../../x.bin", "sub"]
)
def test_files_elsewhere_are_not_read(tmp_path: Path, stated_path: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "sub").mkdir()
    (tmp_path / "x.bin").write_bytes(WEIGHT.data)
    entry = shard_entry([WEIGHT], 0, filePath=stated_path.format(tmp_path))
    path = write_set(folder, [[WEIGHT]], shards=[entry])
    (folder / "m_shard_0.shard").unlink()
    index = opened(path)
    assert index.attrs["payload"] == "none"
    assert isinstance(index.tensors["a.w"].problem, FileNotFoundError)


def test_a_shard_that_was_written_to_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "best.checkpoint"
    for name in ("best.checkpoint", "step_100.checkpoint"):
        content = checkpoint([[WEIGHT]], shards=[shard_entry([WEIGHT], 0, filePath=name)])
        path.write_bytes(content)
        (tmp_path / "step_100.checkpoint").write_bytes(content)
        assert opened(path).attrs["payload"] == "none"


def test_a_file_of_two_shards(tmp_path: Path) -> None:
    entries = [shard_entry([WEIGHT], rank, filePath="w.bin") for rank in (0, 1)]
    path = write_set(tmp_path, [[WEIGHT], [WEIGHT]], shards=entries)
    (tmp_path / "w.bin").write_bytes(WEIGHT.data)
    fails_beside(path, "ShardFile")


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (shard_file([WEIGHT], 1), "Rank"),
        (shard_file([WEIGHT], 0, count=2), "TensorCount"),
        (shard_file([WEIGHT], 0, tail=b"x"), "DataLength"),
        (shard_file([WEIGHT], 0)[:-1], "DataLength"),
        (shard_file([WEIGHT], 0)[:17], "DataLength"),
        (shard_file([WEIGHT], 0)[:6], "Truncated"),
        (shard_file([WEIGHT], 0).replace(b"RAHS", b"SHAR"), "Magic"),
        (b"", "Truncated"),
        (b"RAHS" + struct.pack("<ii", 0, -1) + bytes(8), "Negative"),
        (b"RAHS" + struct.pack("<ii", 0, 1_000_000_000) + bytes(8), "Truncated"),
        (b"RAHS" + struct.pack("<ii", 0, 1) + b"\xff" + bytes(8), "Utf8"),
    ],
)
def test_damaged_files_of_shards(tmp_path: Path, content: bytes, rule: str) -> None:
    path = write_set(tmp_path, [[WEIGHT]])
    (tmp_path / "m_shard_0.shard").write_bytes(content)
    assert str(tmp_path / "m_shard_0.shard") in str(fails_beside(path, rule))


def test_a_length_of_8_bytes(tmp_path: Path) -> None:
    path = write_set(tmp_path, [[WEIGHT]])
    (tmp_path / "m_shard_0.shard").write_bytes(shard_file([WEIGHT], width=8))
    index = opened(path)
    assert beside(path, index, "a.w") == WEIGHT.data


def test_checksums_and_sizes_that_disagree_warn(tmp_path: Path) -> None:
    content = shard_file([WEIGHT], checksum="abc")
    for size in (0, len(content), len(WEIGHT.data)):
        for checksum in (None, "", "abc"):
            entry = shard_entry([WEIGHT], 0, checksum=checksum, fileSize=size)
            path = write_set(tmp_path, [[WEIGHT]], shards=[entry])
            (tmp_path / "m_shard_0.shard").write_bytes(content)
            assert opened(path).warnings == ()
    entry = shard_entry([WEIGHT], 0, checksum="xyz", fileSize=7)
    path = write_set(tmp_path, [[WEIGHT]], shards=[entry])
    (tmp_path / "m_shard_0.shard").write_bytes(content)
    index = opened(path)
    assert index.warnings == (
        f"m_shard_0.shard: {len(content)} bytes, but 7 in the metadata",
        "m_shard_0.shard: the checksum is 'abc', but 'xyz' in the metadata",
    )
    assert beside(path, index, "a.w") == WEIGHT.data


def test_metadata_without_shards() -> None:
    infos = [WEIGHT.entry(0), STEP.entry(0)]
    index = read(json.dumps(fields(TWO, shards=None, tensorInfos=infos)).encode())
    assert index.attrs["payload"] == "none"
    assert list(index.tensors) == ["a.w", "step"]
    assert isinstance(index.tensors["a.w"].problem, PayloadMissingError)
    assert not read(json.dumps(fields([], shards=[])).encode()).tensors


def test_a_shard_alone() -> None:
    source = CountingSource(shard_file([WEIGHT]), "/run/step_1_shard_0.shard")
    with pytest.raises(UnsupportedError, match=r"Open 'step_1\.metadata\.json'"):
        mlcp.read(source)


# --- detection ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "name", "expected"),
    [
        (b"PCLM\x051.0.0", "x", True),
        (b"RAHS" + bytes(16), "x", True),
        (b"MLCP\x051.0.0", "m.checkpoint", False),
        (b"", "m.checkpoint", False),
        (b'{"worldSize": 1}', "m.metadata.json", True),
        (b'\r\n{ "shards" : null}', "s3://b/M.METADATA.JSON?x=1", True),
        (b'{"worldSize": 1}', "m.json", False),
        (b'{"a": "shards"}', "m.metadata.json", False),
        (b'[{"shards": 1}]', "m.metadata.json", False),
        (b"\xef\xbb\xbf{}", "m.metadata.json", False),
    ],
)
def test_detection(head: bytes, name: str, expected: bool) -> None:
    assert mlcp.detect(head, len(head), name) == expected


LATE = b'{"customFields": {"notes": "' + b"x" * 600 + b'"}, "worldSize": 1}'


@pytest.mark.parametrize(
    ("content", "is_detected"),
    [
        (b'{"worldSize": 1}', True),
        (LATE, True),
        (b'{"\\u0073hards": null}', True),
        (b'{"": {"a": 1}}', False),
        (b'{"": {"shards": 1}}', False),
        (b'{"a": "' + b"x" * 600 + b'"}', False),
        (b'{"version": "1.0.0"}', False),
        (b"{}", False),
    ],
)
def test_files_named_like_metadata_are_detected_once(content: bytes, is_detected: bool) -> None:
    source = CountingSource(content, "run/m.metadata.json")
    head = content[: formats.HEAD_BYTES]
    assert mlcp.detect(head, len(content), source.name) or not is_detected
    if is_detected:
        assert mlcp.read(source).format == formats.detect(source).name == "mlcp"
        return
    with pytest.raises(FormatError):
        mlcp.read(source)
    with pytest.raises(FormatError):
        formats.detect(source).read(source)


def test_json_of_any_name_is_read_as_metadata() -> None:
    assert mlcp.read(CountingSource(b'{"version": "1.0.0"}', "m.json")).tensors == {}
    with pytest.raises(FormatError, match="the file is not the metadata of a checkpoint") as caught:
        mlcp.read(CountingSource(b'{"name": "something else"}', "m.json"))
    assert caught.value.rule == "Metadata"


@pytest.mark.parametrize("content", [b"", b"PCL", b"MLCP", b"\x89HDF", b"[]", b"x{"])
def test_other_files(content: bytes) -> None:
    fails(content, "Magic")


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reading", ["none", *READINGS])
def test_truncated_at_every_byte(reading: str) -> None:
    data = checkpoint(TWO, reading)
    # The rest is a checkpoint without values; the second one counts zero tensors.
    records = len(checkpoint(TWO))
    first = checkpoint(TWO).index(BIAS.record)
    nothing_left = {("tail", records), ("per_shard", first)}
    for length in range(len(data)):
        if (reading, length) in nothing_left:
            assert read(data[:length]).attrs["payload"] == "none"
            continue
        with pytest.raises(CheckpointError):
            read(data[:length])


def test_truncated_where_sizes_fit_by_chance() -> None:
    # The rest of the second shard is as long as the data of the first, and begins with 0.
    data = checkpoint(TWO)[:-44]
    fails(data, "Truncated")
    assert value(data, read(data, payload="per_shard"), "a.w") != WEIGHT.data


def test_data_of_other_tensors_than_the_metadata_list() -> None:
    data = checkpoint([[WEIGHT]], "tail", shards=[shard_entry([BIAS], 0)])
    assert "payload='tail'" in str(fails(data, "Payload"))
    index = read(data, payload="tail")
    assert index.warnings == ("the metadata of shard 0 list other tensors than its records",)
    assert value(data, index, "a.w") == WEIGHT.data
    unfilled = read(checkpoint([[WEIGHT]], "tail", shards=[shard_entry([], 0)]))
    assert unfilled.attrs["payload"] == "tail"
    assert unfilled.warnings == ()


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<i", (1 << 31) - 1),
        struct.pack("<ii", 1, (1 << 31) - 1) + bytes(32),
        struct.pack("<ii", 1, 0) + b"\x07Float32" + struct.pack("<i", (1 << 31) - 1) + bytes(32),
    ],
)
def test_counts_beyond_the_file(content: bytes) -> None:
    start = time.process_time()
    fails(checkpoint([], metadata={"shards": None}) + content, "Truncated")
    assert time.process_time() - start < 1


def test_a_body_of_zeros_is_not_read_to_its_end() -> None:
    source = CountingSource(checkpoint([], metadata={}) + bytes(1 << 22))
    with pytest.raises(FormatError) as caught:
        mlcp.read(source)
    assert caught.value.rule == "Shards"


def test_every_bit_of_the_header_of_a_shard_flipped(tmp_path: Path) -> None:
    content = shard_file([WEIGHT], checksum="abc")
    path = write_set(tmp_path, [[WEIGHT]], shards=[shard_entry([WEIGHT], 0, checksum="abc")])
    for position in range(len(content) - len(WEIGHT.data)):
        for bit in range(8):
            changed = bytearray(content)
            changed[position] ^= 1 << bit
            (tmp_path / "m_shard_0.shard").write_bytes(changed)
            try:
                index = opened(path)
            except FormatError:
                continue
            assert 12 <= position < 15
            assert "checksum" in index.warnings[0]
            assert beside(path, index, "a.w") == WEIGHT.data
