"""Planned gptrs files equal those of gpt.rs, and never contain anything it refuses."""

from __future__ import annotations

import struct
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import golden_files
from tests.formats.gptrs_files import GPT, id_bytes
from tests.formats.indexes import drafted
from tests.formats.planned import materialize
from tests.sources import CountingSource
from xckpt import formats
from xckpt.errors import UnsupportedError
from xckpt.formats.plan import Draft, WantedPart, WantedTensor
from xckpt.identity import base_id

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from xckpt.index import Index, Tensor

gptrs = formats.get("gptrs")

# Files that gpt.rs's own programs wrote; others were made by hand.
EXPORTED = [
    *golden_files("gptrs/chk_[!v]*_exporter.bin"),
    *golden_files("gptrs/chk_[!u]*_python.bin"),
    *golden_files("gptrs/*_rust_saver.bin"),
    *golden_files("gptrs/sten_v2_python.bin"),
]
OTHERS = golden_files("gptrs/*.bin")

ATTRS = {"kind": "gpt", "config": GPT}


def tensor(
    name: str, shape: tuple[int, ...] = (2, 3), dtype: str = "float32", **fields: Any
) -> WantedTensor:
    part = WantedPart(dtype, shape, 4 * prod(shape))
    return WantedTensor(name, dtype, shape, {"data": part}, **fields)


def draft_of(*tensors: WantedTensor, **attrs: Any) -> Draft:
    return Draft({tensor.name: tensor for tensor in tensors}, attrs)


def read(data: bytes) -> Index:
    return gptrs.read(CountingSource(data))


def values_of(index: Index, data: bytes) -> dict[tuple[str, str], bytes]:
    parts = {name: tensor.parts["data"] for name, tensor in index.tensors.items()}
    return {(n, "data"): data[p.offset : p.offset + p.nbytes] for n, p in parts.items()}


def noise(index: Index | Draft) -> dict[tuple[str, str], bytes]:
    """Return distinct bytes for every tensor."""
    return {
        (name, "data"): bytes((7 * number + i) % 251 for i in range(tensor.parts["data"].nbytes))
        for number, (name, tensor) in enumerate(drafted(index).tensors.items())
    }


def written(index: Index | Draft, **options: Any) -> bytes:
    return materialize(gptrs.plan(drafted(index), **options), noise(index))


def described(index: Index) -> dict[str, Tensor]:
    """Give the tensors, wherever their data are."""
    return {
        name: replace(tensor, parts={"data": replace(tensor.parts["data"], offset=0)})
        for name, tensor in index.tensors.items()
    }


# --- what gpt.rs writes ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", EXPORTED, ids=lambda path: path.stem)
def test_files_of_gpt_rs_come_back_byte_for_byte(path: Path) -> None:
    data = path.read_bytes()
    index = read(data)
    assert materialize(gptrs.plan(drafted(index)), values_of(index, data)) == data


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.stem)
def test_other_files_come_back_as_version_2(path: Path) -> None:
    data = path.read_bytes()
    old = read(data)
    halves = {name for name, tensor in old.tensors.items() if tensor.dtype not in gptrs.can.types}
    if old.warnings or halves:
        with pytest.raises(UnsupportedError):
            gptrs.plan(drafted(old))
        old = replace(
            old, tensors={n: t for n, t in old.tensors.items() if n.isascii() and n not in halves}
        )
    copy = materialize(gptrs.plan(drafted(old)), values_of(old, data))
    new = read(copy)
    assert (new.version, new.warnings, new.attrs) == ("2", (), old.attrs)
    assert list(new.tensors) == sorted(old.tensors)
    assert values_of(new, copy) == values_of(old, data)
    with_axes = {name: tensor for name, tensor in described(old).items() if tensor.shape}
    assert {name: described(new)[name] for name in with_axes} == with_axes


NAMES = st.text(st.characters(codec="ascii"), max_size=12) | st.sampled_from(
    ["blocks.10.w", "blocks.9.w", "a..b", ".", "", "a/b", "\0"]
)
SHAPES = st.lists(st.integers(0, 4) | st.just(1), min_size=1, max_size=4).map(tuple)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    tensors=st.dictionaries(
        NAMES, st.tuples(SHAPES, st.sampled_from(gptrs.can.types), st.booleans()), max_size=5
    ),
    kind=st.none() | st.text(),
    config=JSON,
    ids=st.sampled_from([None, "stored"]),
)
def test_planned_files_are_read_back(
    tensors: Mapping[str, tuple[Any, str, bool]], kind: str | None, config: Any, ids: str | None
) -> None:
    attrs = {} if kind is None else {"kind": kind, "config": config}
    index = draft_of(
        *(
            tensor(name, shape, dtype, attrs={"requires_grad": flag})
            for name, (shape, dtype, flag) in tensors.items()
        ),
        **attrs,
    )
    data = written(index, ids=ids if kind is not None else None)
    copy = read(data)
    assert copy.nbytes == len(data)
    assert not copy.warnings
    has_ids = ids is not None and kind is not None and bool(tensors)
    assert copy.attrs == attrs | ({"ids": "stored"} if has_ids else {})
    assert list(copy.tensors) == sorted(tensors)
    assert values_of(copy, data) == noise(index)
    for name, (shape, dtype, flag) in tensors.items():
        identity = {} if kind is None else {"base_id": f"{base_id(name):032x}"}
        got = copy.tensors[name]
        assert (got.shape, got.dtype) == (shape, dtype)
        assert got.attrs == {"requires_grad": flag, **identity}
    assert materialize(gptrs.plan(drafted(copy)), values_of(copy, data)) == data


def test_names_are_sorted_by_their_bytes() -> None:
    names = ["\U0001f600", "\uffff", "b", "B", "a.b", "a", "é"]
    data = written(draft_of(*map(tensor, names)))
    assert list(read(data).tensors) == ["B", "a", "a.b", "b", "é", "\uffff", "\U0001f600"]


def test_a_scalar_gets_an_axis() -> None:
    index = draft_of(tensor("s", ()), **ATTRS)
    data = written(index)
    copy = read(data)
    assert copy.tensors["s"].shape == (1,)
    assert values_of(copy, data) == noise(index)


# --- checkpoints and archives ---------------------------------------------------------------------


def test_a_kind_makes_a_checkpoint() -> None:
    index = draft_of(tensor("w"))
    assert written(index).startswith(b"GPTRSTEN\x02\0\0\0")
    file = written(index, kind="gpt", config=GPT)
    assert file.startswith(b"GPTRSCHK\x02\0\0\0")
    assert file == written(replace(index, attrs=ATTRS))
    assert read(written(index, kind="custom")).attrs == {"kind": "custom", "config": None}


def test_options_come_before_attributes() -> None:
    index = draft_of(tensor("w"), **ATTRS, ids="stored")
    assert read(written(index, kind="custom", config=[1])).attrs == {
        "kind": "custom",
        "config": [1],
        "ids": "stored",
    }
    assert "ids" not in read(written(index, ids="zero")).attrs
    archive = written(index, container="tensors")
    assert archive.startswith(b"GPTRSTEN")
    assert not read(archive).attrs


def test_ids_are_hashes_of_names() -> None:
    index = draft_of(tensor("lm_head", attrs={"base_id": "0" * 32}), **ATTRS)
    name = struct.pack("<I", 7) + b"lm_head"
    assert name + bytes(16) in written(index)
    assert name + id_bytes("lm_head") in written(index, ids="stored")


def test_the_config_is_compact_ascii_in_its_own_order() -> None:
    runtime = {"weight_streaming": {"enabled": True, "device_budget_bytes": 9}}
    attrs = {"runtime": runtime, "config": {"b": 1e-05, "a": "é"}, "kind": "x", "more": 1}
    data = written(draft_of(**attrs))
    text = (
        b'{"kind":"x","config":{"b":1e-05,"a":"\\u00e9"},'
        b'"runtime":{"weight_streaming":{"enabled":true,"device_budget_bytes":9}}}'
    )
    assert data[12:] == struct.pack("<I", len(text)) + text + struct.pack("<II", 4, 0)


def test_names_of_axes() -> None:
    dims = ("vocab_size", "embed_dim")
    embedding = tensor("tok_embeddings.weight", (7, 4), dims=dims)
    index = draft_of(replace(embedding, dims=("vocab_size", "e")), tensor("x", dims=("é", None)))
    data = written(replace(index, attrs=ATTRS))
    copy = read(data)
    assert {name: tensor.dims for name, tensor in copy.tensors.items()} == {
        "tok_embeddings.weight": ("vocab_size", "e"),
        "x": ("é", None),
    }
    assert copy.attrs == ATTRS
    assert materialize(gptrs.plan(drafted(copy)), values_of(copy, data)) == data
    assert read(written(index)).tensors["x"].dims is None


def test_capabilities_of_the_format() -> None:
    writer = formats.writable("gptrs")
    can = writer.can
    assert can.types == ("float32", "int32")
    assert tuple(writer.write_options) == ("container", "kind", "config", "ids")
    assert set(can.tensor_attrs or ()) == {"requires_grad", "base_id"}
    assert isinstance(can.file_attrs, tuple)
    assert set(can.file_attrs) == {"kind", "config", "runtime", "ids"}
    assert (can.layouts, can.orders, can.compressions) == (("dense",), ("C",), ())


# --- what gpt.rs would refuse ---------------------------------------------------------------------


def refused(index: Draft, rule: str, name: str | None = None, /, **options: Any) -> str:
    with pytest.raises(UnsupportedError) as caught:
        gptrs.plan(index, **options)
    error = caught.value
    assert (error.rule, error.tensor) == (rule, name)
    assert error.hint
    return str(error)


@pytest.mark.parametrize("dtype", ["int64", "float64", "float16", "bfloat16", "bool"])
def test_element_types(dtype: str) -> None:
    text = refused(draft_of(tensor("w", dtype=dtype)), "Dtype", "w")
    assert dtype in text
    assert "Convert it to a dense tensor of float32, int32" in text


def test_layouts() -> None:
    assert "sparse_csr" in refused(draft_of(tensor("w", layout="sparse_csr")), "Layout", "w")


def test_names() -> None:
    index = draft_of(tensor("ok"), tensor("poids.été"), **ATTRS)
    text = refused(index, "Name", "poids.été")
    assert "checkpoint" in text
    assert "'é'" in text
    assert "container='tensors'" in text
    assert "poids.été" in read(written(index, container="tensors")).tensors
    assert "archive" in refused(draft_of(tensor("\ud800")), "Name", "\ud800")


@pytest.mark.parametrize("flag", ["yes", 2, None, [True]])
def test_requires_grad(flag: Any) -> None:
    index = draft_of(tensor("w", attrs={"requires_grad": flag}))
    assert repr(flag) in refused(index, "RequiresGrad", "w")


def test_a_checkpoint_needs_a_kind() -> None:
    refused(draft_of(tensor("w")), "ConfigKind", container="checkpoint")
    refused(draft_of(tensor("w")), "ConfigKind", config=GPT)
    refused(draft_of(config=None), "ConfigKind")
    assert "5 is not text" in refused(draft_of(kind=5), "ConfigKind")


@pytest.mark.parametrize(
    "config",
    [float("nan"), {"a": float("inf")}, {1: 2}, {"a": (1, 2)}, {"a": object()}, b"{}", "\ud800"],
)
def test_configs_that_are_not_json(config: Any) -> None:
    refused(draft_of(kind="x", config=config), "ConfigJson")
    refused(draft_of(), "ConfigJson", kind="x", config=config)


def test_configs_that_are_too_deep_or_too_long() -> None:
    config: Any = 1
    for _ in range(126):
        config = [config]
    gptrs.plan(draft_of(kind="x", config=config))
    refused(draft_of(kind="x", config=[config]), "ConfigJson")
    long = draft_of(kind="x", config="x" * (64 << 20))
    assert "more than 67108864" in refused(long, "ConfigJson")


@pytest.mark.parametrize(
    "runtime",
    [
        [],
        {"functional_overrides": {"attention": "bogus"}},
        {"functional_overrides": None},
        {"weight_streaming": None},
        {"weight_streaming": {"enabled": 1}},
        {"weight_streaming": {"prefetch_layers": -1}},
        {"weight_streaming": {"device_budget_bytes": 2**64}},
        {"weight_streaming": {"cache_budget_cap_bytes": True}},
        {"weight_streaming": {"device_weights_percent": "0.5"}},
        {"weight_streaming": {"device_weights_percent": 1.5}},
    ],
)
def test_runtimes(runtime: Any) -> None:
    refused(draft_of(**ATTRS, runtime=runtime), "ConfigRuntime")


def test_an_index_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its names would have 4 GiB.
    monkeypatch.setattr("xckpt.formats.gptrs._LARGEST_U32", 100)
    gptrs.plan(draft_of(tensor("a")))
    assert "the index has" in refused(draft_of(tensor("a" * 50), tensor("b")), "Length")


def test_wrong_options() -> None:
    index = draft_of(tensor("w"))
    with pytest.raises(ValueError, match="container='zip' is not one of 'checkpoint', 'tensors'"):
        gptrs.plan(index, container="zip")
    with pytest.raises(ValueError, match="ids='some'"):
        gptrs.plan(index, ids="some")
    options: list[dict[str, Any]] = [{"kind": "gpt"}, {"config": {}}, {"ids": "zero"}]
    for option in options:
        with pytest.raises(ValueError, match="an archive"):
            gptrs.plan(index, container="tensors", **option)
    with pytest.raises(ValueError, match="an archive"):
        gptrs.plan(index, ids="stored")
    with pytest.raises(TypeError, match="kind=5"):
        gptrs.plan(index, kind=5)
