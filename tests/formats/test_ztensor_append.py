"""Appending to zTensor files leaves the old bytes and tensors intact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cbor2
import pytest

from tests.formats.indexes import dense, draft_of, filled
from tests.formats.planned import materialize, raw_bytes
from tests.formats.ztensor_files import (
    V1_MAGIC,
    dense_v1,
    dense_v2,
    read,
    v1_container,
    v1_file,
    v2_data_shard,
    v2_file,
    v12_file,
)
from tests.sources import CountingSource
from xckpt import formats
from xckpt.errors import UnsupportedError

if TYPE_CHECKING:
    from xckpt.formats.plan import Draft

ztensor = formats.get("ztensor")

VERSIONS = ["1.0", "2"]


def made(version: str) -> bytes:
    """Write a file with a tensor of each kind that matters."""
    index = draft_of(
        dense("b", dims=("x", None), attrs={"k": 1}),
        dense("a", "int8", (100,), compression="zstd", algorithm="sha256"),
        epoch=1,
        name="old",
    )
    return materialize(ztensor.plan(index, version=version), filled(index))


def appended(old: bytes, index: Draft, **options: Any) -> bytes:
    plan = ztensor.append(CountingSource(old), index, **options)
    assert plan.literals == ()
    assert all(planned.offset is None or planned.offset >= len(old) for planned in plan.parts)
    return materialize(plan, filled(index), old)


@pytest.mark.parametrize("version", VERSIONS)
def test_added_tensors_join_the_old_ones(version: str) -> None:
    old = made(version)
    more = draft_of(dense("c", "int16", dims=("y", "x")), dense("A", compression="zstd"), epoch=2)
    new = appended(old, more)
    assert new.startswith(old)
    before, after = read(old), read(new)
    assert sorted(after.tensors) == ["A", "a", "b", "c"]
    assert all(after.tensors[name] == before.tensors[name] for name in before.tensors)
    assert after.attrs == {**before.attrs, "epoch": 2}
    assert after.tensors["c"].dims == ("y", "x")
    for (name, role), raw in filled(more).items():
        assert raw_bytes(after.tensors[name].parts[role], new) == raw


@pytest.mark.parametrize("version", VERSIONS)
def test_a_file_grows_more_than_once(version: str) -> None:
    file = made(version)
    for name in ("c", "d", "e"):
        file = appended(file, draft_of(dense(name)))
    assert sorted(read(file).tensors) == ["a", "b", "c", "d", "e"]
    assert read(appended(file, draft_of())).tensors == read(file).tensors


@pytest.mark.parametrize("version", VERSIONS)
def test_a_file_that_was_cut_while_it_grew_is_the_old_one_again(version: str) -> None:
    old = made(version)
    new = appended(old, draft_of(dense("c")))
    assert read(new[: len(old)]) == read(old)


@pytest.mark.parametrize("version", VERSIONS)
def test_existing_names_are_replaced_only_on_request(version: str) -> None:
    old, more = made(version), draft_of(dense("b", "int8", (7, 1)))
    with pytest.raises(ValueError, match="has a tensor 'b'; replace=True"):
        appended(old, more)
    new = appended(old, more, replace=True)
    assert read(new).tensors["b"].shape == (7, 1)
    assert read(new).tensors["b"].dims is None
    assert raw_bytes(read(new).tensors["b"].parts["data"], new) == filled(more)["b", "data"]


def test_unknown_fields_of_the_old_manifest_stay() -> None:
    entry = {**dense_v1(bytes(4), (1,), "float32"), "new": {"field": [1, None]}}
    odd = {"dtype": "float12", "shape": [2], "format": "acme", "components": {}}
    old = v1_file({"w": entry, "odd": odd}, generator="some", newer=1.5)
    new = appended(old, draft_of(dense("v"), generator="other"))
    size = int.from_bytes(new[-8:], "little")
    root = cbor2.loads(new[-8 - size : -8])
    assert (root["generator"], root["newer"]) == ("some", 1.5)
    assert root["tensors"]["w"]["new"] == {"field": [1, None]}
    assert root["tensors"]["odd"] == odd

    objects = {"w": {**dense_v2(bytes(4), (1,), "f32"), "new": [1.5, -1]}}
    shards = {"more": {"size": 100, "digest": "sha256:00"}}
    file = v2_file(objects, shards=shards, newer={1000: 1, 3: 2.5}, attributes={"k": {300: "x"}})
    new = appended(file, draft_of(dense("v")))
    assert read(new).shards.keys() == {"more"}
    assert read(new).attrs == {"k": {300: "x"}}
    for text in ("newer", "new"):
        assert cbor2.dumps(text) in new[len(file) :]


def test_the_root_may_lack_attributes() -> None:
    old = v1_container(cbor2.dumps({"version": "1.0", "tensors": {}}))
    index = read(appended(old, draft_of(dense("w", dims=("x", "y")), generator="me")))
    assert index.attrs == {"generator": "me"}
    assert index.tensors["w"].dims == ("x", "y")
    assert "attributes" not in v2_file({}).decode("latin-1")
    assert read(appended(v2_file({}), draft_of(dense("w"), a=1))).attrs == {"a": 1}


@pytest.mark.parametrize(
    "file", [v12_file({}), v2_data_shard(b"x"), V1_MAGIC, b"", b"ZTEN0001" + bytes(8) + b"\x80"]
)
def test_other_formats_cannot_be_appended_to(file: bytes) -> None:
    with pytest.raises(UnsupportedError):
        appended(file, draft_of())


def test_options_are_those_of_the_version() -> None:
    more = draft_of(dense("c"))
    with pytest.raises(ValueError, match=r"of version 1\.0"):
        appended(made("1.0"), more, version="2")
    with pytest.raises(ValueError, match="alignment"):
        appended(made("1.0"), more, alignment=4096)
    old = made("2")
    file = appended(old, more, version="2", alignment=4096)
    assert read(file).tensors["c"].parts["data"].offset == -(-len(old) // 4096) * 4096
    with pytest.raises(UnsupportedError, match=r"version 1\.0 has no complex64"):
        appended(made("1.0"), draft_of(dense("c", "complex64")))
