"""Planned MLCP files: the bytes of upstream, plus the data that upstream omits."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import golden_files
from tests.formats.indexes import drafted
from tests.formats.planned import materialize, materialize_all
from tests.sources import CountingSource
from xckpt import formats
from xckpt.elements import nbytes_of
from xckpt.errors import UnsupportedError
from xckpt.formats.mlcp import variable_name
from xckpt.formats.mlcp.metadata import to_json
from xckpt.formats.mlcp.records import NetCursor, read_block, written_block, written_string
from xckpt.formats.plan import Draft, WantedPart, WantedTensor

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from xckpt.index import Index

mlcp = formats.get("mlcp")

# Written by the classes of ml-framework itself, but for what follows the records.
CHECKPOINTS = golden_files("mlcp/*.checkpoint")
RECORDS = [*golden_files("mlcp/m*.checkpoint"), *golden_files("mlcp/pay_[nt]*.checkpoint")]
METADATA = golden_files("mlcp/*.metadata.json")
TAILS = golden_files("mlcp/pay_tail*.checkpoint")
SETS = golden_files("mlcp/ms_*_cumoff.metadata.json")
ANY_TIME = {"timestamp": "2024-01-08T12:30:45Z"}


def tensor(
    variable: str, /, shape: tuple[int, ...] = (2, 3), dtype: str = "float32", **attrs: Any
) -> WantedTensor:
    part = WantedPart(dtype, shape, nbytes_of(dtype, prod(shape)))
    return WantedTensor(variable, dtype, shape, {"data": part}, attrs=attrs)


def draft_of(*tensors: WantedTensor, source: str = "", **attrs: Any) -> Draft:
    return Draft({tensor.name: tensor for tensor in tensors}, ANY_TIME | attrs, source)


def noise(index: Index | Draft) -> dict[tuple[str, str], bytes]:
    return {
        (name, "data"): bytes((7 * number + i) % 251 for i in range(tensor.parts["data"].nbytes))
        for number, (name, tensor) in enumerate(drafted(index).tensors.items())
    }


class Files(CountingSource):
    """Files of one folder in memory."""

    def __init__(self, files: Mapping[str, bytes], name: str) -> None:
        super().__init__(files[name], name)
        self.files = files

    def sibling(self, name: str) -> Files:
        if name not in self.files:
            raise FileNotFoundError(name)
        return Files(self.files, name)


def read(data: bytes) -> Index:
    return mlcp.read(CountingSource(data))


def written(index: Index | Draft, **options: Any) -> bytes:
    return materialize(mlcp.plan(drafted(index), **options), noise(index))


def written_set(index: Index | Draft, **options: Any) -> dict[str, bytes]:
    draft = drafted(index)
    files = materialize_all(mlcp.plan(draft, **options), noise(draft))
    return {name or draft.path: data for name, data in files.items()}


def values_of(index: Index, files: Mapping[Any, bytes]) -> dict[tuple[str, str], bytes]:
    parts = {name: tensor.parts["data"] for name, tensor in index.tensors.items()}
    return {(n, "data"): files[p.shard][p.offset : p.offset + p.nbytes] for n, p in parts.items()}


def described(index: Index | Draft) -> dict[str, WantedTensor]:
    """Give the tensors, wherever their data are."""
    return {
        name: replace(tensor, parts={}, attrs={"rank": 0, **tensor.attrs})
        for name, tensor in drafted(index).tensors.items()
    }


def split(data: bytes) -> tuple[bytes, bytes, bytes]:
    """Split a checkpoint into what is before the metadata, the metadata, and the rest."""
    cursor = NetCursor(CountingSource(data), 4)
    cursor.string("version")
    length = cursor.count("metadata")
    return data[: cursor.at], data[cursor.at : cursor.at + length], data[cursor.at + length :]


# --- upstream's bytes -----------------------------------------------------------------------------


def net_text(text: bytes) -> bytes:
    return to_json(json.loads(text))


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.stem)
def test_metadata_in_a_checkpoint_are_what_upstream_writes(path: Path) -> None:
    _, text, _ = split(path.read_bytes())
    assert net_text(text) == text


@pytest.mark.parametrize("path", METADATA, ids=lambda path: path.name)
def test_metadata_alone_are_what_upstream_writes(path: Path) -> None:
    assert net_text(path.read_bytes()) == path.read_bytes()


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_records_are_what_upstream_writes(path: Path) -> None:
    head, text, body = split(path.read_bytes())
    cursor = NetCursor(CountingSource(body))
    count = len(json.loads(text)["shards"] or ())
    blocks = [read_block(cursor)[0] for _ in range(count)]
    assert body.startswith(b"".join(map(written_block, blocks)))
    version = NetCursor(CountingSource(head), 4).string("version")
    assert head[4:-4] == written_string(version)


@pytest.mark.parametrize("path", TAILS, ids=lambda path: path.stem)
def test_data_follow_the_last_record(path: Path) -> None:
    data = path.read_bytes()
    index = read(data)
    copy = materialize(mlcp.plan(drafted(index)), values_of(index, {None: data}))
    _, old, body = split(data)
    _, new, copied = split(copy)
    assert copied == body
    fields = json.loads(old)
    fields["customFields"] = {"payload": "tail"}
    for name in ("sharding", "shardingStrategy"):
        fields[name]["shardCount"] = len(fields["shards"])
    assert json.loads(new) == fields
    again = read(copy)
    assert materialize(mlcp.plan(drafted(again)), values_of(again, {None: copy})) == copy


@pytest.mark.parametrize("path", SETS, ids=lambda path: path.name)
def test_files_of_shards_have_no_checksum(path: Path) -> None:
    index = mlcp.read(
        Files({p.name: p.read_bytes() for p in path.parent.iterdir() if p.is_file()}, path.name)
    )
    files: dict[str | None, bytes] = {
        name: (path.parent / name).read_bytes() for name in index.shards
    }
    copies = materialize_all(mlcp.plan(drafted(index)), values_of(index, files))
    fields = json.loads(path.read_bytes())
    for shard in fields["shards"]:
        name = shard["filePath"]
        data = files[name]
        assert data[8:12] == b"\x40\0\0\0"
        assert copies[name] == data[:8] + bytes(4) + data[76:]
        shard["checksum"], shard["fileSize"] = None, shard["fileSize"] - 64
    assert json.loads(copies[""]) == fields
    assert copies[""] == net_text(copies[""])


def test_escapes() -> None:
    value: dict[str, Any] = {
        'k"\\': "\0\b\t\n\f\r\x7f<>&'+`\"\\/ ~é\U0001f600",
        "n": [True, None, 1, [], {}],
    }
    text = to_json(value)
    assert text == (
        b'{\n  "k\\u0022\\\\": "\\u0000\\b\\t\\n\\f\\r\\u007F\\u003C\\u003E\\u0026\\u0027\\u002B'
        b'\\u0060\\u0022\\\\/ ~\\u00E9\\uD83D\\uDE00",\n  "n": [\n    true,\n    null,\n    1,\n'
        b"    [],\n    {}\n  ]\n}"
    )
    assert json.loads(text) == value


@pytest.mark.parametrize(
    ("number", "text"), [(3e-05, b"3E-05"), (0.1, b"0.1"), (1e20, b"1E+20"), (2.0, b"2.0")]
)
def test_floats(number: float, text: bytes) -> None:
    assert to_json(number) == text


@pytest.mark.parametrize("value", [{1: 2}, (1,), b"x", float("nan"), "\ud800", object()])
def test_attributes_that_are_not_json(value: Any) -> None:
    refused(draft_of(more=[value]), "Metadata")


# --- what comes back ------------------------------------------------------------------------------

SHAPES = st.lists(st.integers(0, 3), max_size=4).map(tuple)
NAMES = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(
    ["w", "w@rank_1", "a.b", "@rank_0", "", "\0"]
)
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
SHARDING = st.fixed_dictionaries(
    {"strategy": TEXT, "precision": TEXT, "strategySpecificInfo": st.dictionaries(TEXT, JSON)}
)
TRAINING = st.fixed_dictionaries(
    {
        "epoch": st.integers(0, 9),
        "step": st.integers(-(2**63), 2**63 - 1),
        "learningRate": st.floats(0, 1),
        "optimizerType": st.none() | TEXT,
        "optimizerState": st.none() | st.dictionaries(TEXT, JSON),
    }
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "version": st.none() | TEXT,
        "worldSize": st.integers(0, 2**31 - 1),
        "sharding": st.none() | SHARDING,
        "training": st.none() | TRAINING,
        "customFields": st.none() | st.dictionaries(TEXT, st.none() | TEXT),
        "format": st.none() | st.sampled_from(["single_file", "pt"]),
        "more": JSON,
    },
)


@given(
    shards=st.dictionaries(
        st.integers(-1, 3),
        st.dictionaries(NAMES, st.tuples(SHAPES, st.sampled_from(mlcp.can.types)), max_size=4),
        max_size=3,
    ),
    attrs=FIELDS,
    several=st.booleans(),
)
def test_planned_files_are_read_back(
    shards: Mapping[int, Mapping[str, tuple[Any, str]]], attrs: dict[str, Any], several: bool
) -> None:
    names = [name for shard in shards.values() for name in shard]
    tensors = []
    for rank, shard in shards.items():
        for name, (shape, dtype) in shard.items():
            variable = variable_name(name, rank, repeated=names.count(name) > 1)
            name_attr = {} if variable == name else {"name": name}
            tensors.append(tensor(variable, shape, dtype, rank=rank, **name_attr))
    source = "x.metadata.json" if several else "x.checkpoint"
    index = draft_of(*tensors, source=source, **attrs)
    files = written_set(index)
    copy = mlcp.read(Files(files, source))
    assert not copy.warnings
    in_place: dict[Any, bytes] = {None: files[source], **files}
    assert values_of(copy, in_place) == noise(index)
    unplaced = {name: replace(tensor, path=None) for name, tensor in described(copy).items()}
    assert unplaced == described(index)
    in_groups = len(set(names)) < len(names)
    assert all((tensor.path is not None) == in_groups for tensor in copy.tensors.values())
    for name in attrs.keys() - {"sharding", "customFields", "format"}:
        assert copy.attrs[name] == attrs[name]
    ranks = [shard["rank"] for shard in copy.attrs["shards"]]
    assert ranks == ([rank for rank in shards if shards[rank]] or [0])
    again = written_set(replace(copy, source=source))
    assert again == files


def test_a_set_may_be_opened_by_its_metadata() -> None:
    index = draft_of(
        tensor("w@rank_0", rank=0, name="w"),
        tensor("w@rank_1", (4,), rank=1, name="w"),
        source="some/where/step_1.metadata.json",
        customFields={"payload": "tail", "a": "b"},
        format="single_file",
    )
    plan = mlcp.plan(index)
    assert list(plan.companions) == ["step_1_shard_0.shard", "step_1_shard_1.shard"]
    files = materialize_all(plan, noise(index))
    assert files["step_1_shard_1.shard"][:20].hex() == "5241485301000000000000000100000010000000"
    fields = json.loads(files[""])
    assert fields["customFields"] == {"a": "b"}
    assert fields["format"] == "multishard"
    assert [shard["fileSize"] for shard in fields["shards"]] == [44, 36]
    assert [shard["filePath"] for shard in fields["shards"]] == list(plan.companions)
    single_file = written(index, multi_shard=False)
    assert read(single_file).attrs["customFields"] == {"payload": "tail", "a": "b"}
    assert read(single_file).attrs["format"] == "single_file"


def test_metadata_with_other_names_of_shards() -> None:
    index = draft_of(
        tensor("a", rank=0), tensor("b", (4,), rank=2), source="some/where/step_1.metadata.json"
    )
    plan = mlcp.plan(index)
    assert plan.renamed is not None
    names = {"step_1_shard_0.shard": "x.shard", "step_1_shard_2.shard": "y.shard"}
    renamed = plan.renamed(names)
    old, new = (json.loads(file_plan.literals[0].data) for file_plan in (plan, renamed))
    assert renamed.nbytes == len(renamed.literals[0].data)
    assert not renamed.companions
    for before, after in zip(old["shards"], new["shards"], strict=True):
        assert after["filePath"] == names[before["filePath"]]
        assert after["checksum"], "what upstream takes to be wrong for any shard"
        assert {**after, "filePath": before["filePath"], "checksum": None} == before
    assert {**new, "shards": old["shards"], "timestamp": old["timestamp"]} == old


def test_fields_of_a_new_checkpoint() -> None:
    index = Draft({"w": tensor("w")}, {"kind": "gpt", "config": {"n": 1}})
    attrs = dict(read(written(index)).attrs)
    sharding = {"strategy": "", "shardCount": 1, "precision": "", "strategySpecificInfo": {}}
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", attrs.pop("timestamp"))
    text = attrs.pop("metadata_json")
    entry = {"name": "w", "shape": [2, 3], "dataType": 1, "offset": 0, "size": 24}
    assert attrs == {
        "version": "1.0.0",
        "worldSize": 1,
        "ddpRank": 0,
        "sharding": sharding,
        "shards": [
            {"rank": 0, "filePath": "", "fileSize": 24, "tensors": [entry], "checksum": None}
        ],
        "training": None,
        "customFields": {"payload": "tail"},
        "format": "single_file",
        "shardingStrategy": sharding,
        "tensorInfos": None,
        "kind": "gpt",
        "config": {"n": 1},
        "payload": "tail",
    }
    assert list(json.loads(text))[:4] == ["version", "timestamp", "worldSize", "ddpRank"]
    assert list(json.loads(text))[-2:] == ["kind", "config"]


def test_lists_of_tensors_are_recreated() -> None:
    stale = [{"name": "old", "shape": [1]}]
    shards = [{"rank": 2, "tensors": stale}, {"rank": 0}]
    index = draft_of(
        tensor("a", (2,), rank=0), tensor("b", (), rank=1), shards=shards, tensorInfos=stale
    )
    attrs = read(written(index)).attrs
    assert [(s["rank"], len(s["tensors"])) for s in attrs["shards"]] == [(2, 0), (0, 1), (1, 1)]
    assert attrs["sharding"]["shardCount"] == 3
    infos = [(info["name"], info["offset"]) for info in attrs["tensorInfos"]]
    assert infos == [("a", 0), ("b", 0)]
    assert read(written(draft_of(tensorInfos=[]))).attrs["tensorInfos"] == []


def test_the_last_sharding_attribute_wins() -> None:
    sharding = {"strategy": "ddp", "more": [1]}
    attrs = read(written(draft_of(sharding=None, shardingStrategy=sharding))).attrs
    expected = {"strategy": "ddp", "shardCount": 1, "precision": "", "strategySpecificInfo": {}}
    assert attrs["sharding"] == attrs["shardingStrategy"] == expected | {"more": [1]}
    attrs = read(written(draft_of(sharding=sharding, shardingStrategy=None))).attrs
    assert attrs["sharding"] is attrs["shardingStrategy"] is None


def test_renamed_variables_have_the_new_name() -> None:
    index = draft_of(tensor("new", rank=1, name="w"), tensor("w@rank_0", rank=0, name="w"))
    assert list(read(written(index)).tensors) == ["new", "w"]
    # Without the attribute this is the name itself, which reading never takes apart.
    copy = read(written(draft_of(tensor("w@rank_1"))))
    assert copy.tensors["w@rank_1@rank_0"].attrs == {"rank": 0, "name": "w@rank_1"}


@pytest.mark.parametrize("source", ["", "m.metadata.json"])
def test_names_of_axes(source: str) -> None:
    tensors = [
        replace(tensor("w@rank_0", rank=0, name="w"), dims=("row", None)),
        replace(tensor("w@rank_1", rank=1, name="w"), dims=("é", "c")),
        tensor("x", rank=1),
    ]
    index = draft_of(*tensors, source=source)
    files = written_set(index)
    copy = mlcp.read(Files(files, source))
    assert [tensor.dims for tensor in copy.tensors.values()] == [("row", None), ("é", "c"), None]
    assert written_set(replace(copy, source=source)) == files
    unnamed = {name: replace(tensor, dims=None) for name, tensor in copy.tensors.items()}
    again = mlcp.read(Files(written_set(replace(copy, tensors=unnamed, source=source)), source))
    assert "xckpt.dims" not in (again.attrs["customFields"] or {})


def test_no_tensors() -> None:
    data = written(draft_of())
    assert split(data)[2] == bytes(4)
    assert not read(data).tensors
    assert read(data).attrs["payload"] == "tail"


def test_capabilities_of_the_format() -> None:
    writer = formats.writable("mlcp")
    can = writer.can
    assert len(can.types) == len(set(can.types)) == 13
    assert (tuple(writer.write_options), can.tensor_attrs) == (("multi_shard",), ("rank", "name"))
    assert can.file_attrs is None
    assert (can.layouts, can.orders, can.compressions) == (("dense",), ("C",), ())


# --- what cannot be written -----------------------------------------------------------------------


def refused(index: Draft, rule: str, name: str | None = None, /, **options: Any) -> str:
    with pytest.raises(UnsupportedError) as caught:
        mlcp.plan(index, **options)
    error = caught.value
    assert (error.rule, error.tensor) == (rule, name)
    assert error.hint
    return str(error)


@pytest.mark.parametrize("dtype", ["complex64", "float8_e4m3fn", "bool32"])
def test_element_types(dtype: str) -> None:
    assert dtype in refused(draft_of(tensor("w", dtype=dtype)), "Dtype", "w")


def test_layouts() -> None:
    sparse = replace(tensor("w"), layout="sparse_coo")
    assert "sparse_coo" in refused(draft_of(sparse), "Layout", "w")


@pytest.mark.parametrize("rank", ["0", None, 1.0, True, 2**31])
def test_ranks(rank: Any) -> None:
    assert repr(rank) in refused(draft_of(tensor("w", rank=rank)), "Rank", "w")


def test_names() -> None:
    refused(draft_of(tensor("\udc80")), "Name", "\udc80")
    twice = draft_of(tensor("w", rank=1), tensor("w@rank_1", rank=1, name="w"))
    assert "rank 1" in refused(twice, "DuplicateName", "w@rank_1")


@pytest.mark.parametrize(
    "attrs",
    [
        {"version": 1},
        {"worldSize": None},
        {"worldSize": 2**31},
        {"ddpRank": 0.5},
        {"sharding": []},
        {"shards": {}},
        {"training": {"epoch": "1"}},
        {"customFields": {"a": 1}},
        {"customFields": "a"},
        {"more": (1, 2)},
        {"more": {1: 2}},
        {"more": float("nan")},
        {"more": "\ud800"},
        {"more": b""},
    ],
)
def test_attributes(attrs: dict[str, Any]) -> None:
    refused(draft_of(**attrs), "Metadata")
    refused(draft_of(**attrs, source="m.metadata.json"), "Metadata")


def test_attributes_that_are_too_deep() -> None:
    value: Any = 1
    for _ in range(63):
        value = [value]
    mlcp.plan(draft_of(more=value))
    assert "deeper" in refused(draft_of(more=[value]), "Metadata")


@pytest.mark.parametrize(
    "text", ["2024-01-08T12:30:45.1234567+02:00", "2024-02-29", "2024-02-29T01:02"]
)
def test_times(text: str) -> None:
    assert read(written(draft_of(timestamp=text))).attrs["timestamp"] == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "now",
        "2024-01-08 12:30:45",
        "2023-02-29",
        "2024-01-08T25:00",
        '2024-01-08"',
        "2024-01-08T12:00+15:00",
    ],
)
def test_malformed_timestamps(text: str) -> None:
    refused(draft_of(timestamp=text), "Timestamp")


def test_large_shards() -> None:
    big = [tensor(name, (2**28,)) for name in ("a", "b", "c")]
    index = draft_of(*big, source="m.metadata.json")
    assert "2147483648" in refused(index, "Length", "b")
    assert (mlcp.plan(index, multi_shard=False).nbytes or 0) > 3 << 30
    ranked = [replace(draft, attrs={"rank": rank}) for rank, draft in enumerate(big)]
    assert len(mlcp.plan(draft_of(*ranked, source="m.metadata.json")).companions) == 3


def test_long_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    # They would have 2 GiB.
    monkeypatch.setattr("xckpt.formats.mlcp._BOUND_I32", 500)
    assert "metadata have" in refused(draft_of(more="x" * 500), "Length")


def test_several_files_need_the_name_of_their_metadata() -> None:
    for source in ("", "m.checkpoint", "metadata.json"):
        with pytest.raises(ValueError, match=r"must end in \.metadata\.json"):
            mlcp.plan(draft_of(source=source), multi_shard=True)
