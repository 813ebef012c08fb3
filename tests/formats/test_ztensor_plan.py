"""Planned zTensor files are read back and equal those of other writers."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import golden_files
from tests.formats.indexes import (
    attributes,
    coo,
    csr,
    dense,
    dense_tensors,
    draft_of,
    drafted,
    drafts,
    filled,
    part,
    plain,
    sparse_tensors,
)
from tests.formats.planned import draft_and_data, materialize, raw_bytes
from tests.formats.ztensor_files import read
from xckpt import formats
from xckpt.elements import ELEMENT_TYPES
from xckpt.errors import FormatError, UnsupportedError
from xckpt.formats.plan import Draft, WantedPart, WantedTensor
from xckpt.formats.ztensor import manifest
from xckpt.index import Index, Quantization

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ztensor = formats.get("ztensor")

V1_TYPES = [dtype for dtype in ztensor.can.types if dtype in manifest.LONG]
V2_NAMES = st.text(min_size=1, max_size=12).filter(lambda name: "\0" not in name)


def written(index: Draft, **options: Any) -> bytes:
    return materialize(ztensor.plan(index, **options), filled(index))


def manifest_of(file: bytes) -> dict[str, Any]:
    size = int.from_bytes(file[-8:], "little")
    manifest: dict[str, Any] = cbor2.loads(file[-8 - size : -8])
    return manifest


@given(
    drafts(
        dense_tensors(
            V1_TYPES,
            attributes(),
            compression=st.sampled_from([None, "zstd"]),
            algorithm=st.sampled_from([None, "crc32c", "sha256"]),
        )
        | sparse_tensors(V1_TYPES, ["uint64"]),
        attributes().map(lambda attrs: {"generator": "a test", **attrs}),
    )
)
def test_planned_files_of_version_1_are_read_back(index: Draft) -> None:
    if type(index.attrs["generator"]) is not str:
        index = replace(index, attrs={**index.attrs, "generator": "a test"})
    _check_round_trip(index, version="1.0")


@given(
    drafts(
        dense_tensors(
            ztensor.can.types,
            attributes(V2_NAMES),
            compression=st.sampled_from([None, "zstd-seekable"]),
            algorithm=st.sampled_from(["xxh3", "sha256"]),
        )
        | sparse_tensors(ztensor.can.types, ["uint32", "uint64"]),
        attributes(V2_NAMES),
        V2_NAMES,
    ),
    st.sampled_from([4096, 65536]),
)
def test_planned_files_of_version_2_are_read_back(index: Draft, alignment: int) -> None:
    _check_round_trip(index, version="2", alignment=alignment)


def _check_round_trip(index: Draft, **options: Any) -> None:
    data = filled(index)
    file = materialize(ztensor.plan(index, **options), data)
    actual = read(file)
    assert actual.version == options["version"]
    assert actual.warnings == ()
    assert {n: t.problem for n, t in actual.tensors.items() if t.problem} == {}
    assert list(actual.tensors) == _order(index, options["version"])
    # Raw sizes of compressed parts are not in every manifest: decode all of them.
    copy, copied = draft_and_data(actual, file)
    assert plain(_known(copy)) == plain(_known(index))
    assert copied == data
    for name, tensor in index.tensors.items():
        for role, wish in tensor.parts.items():
            got = actual.tensors[name].parts[role]
            assert got.encoding == wish.compression
            assert (got.digest or "").partition(":")[0] == (
                wish.algorithm or ("xxh3" if options["version"] == "2" else "")
            )


def _order(index: Draft, version: str) -> list[str]:
    names = sorted(index.tensors, key=str.encode)
    return sorted(names, key=lambda name: len(name.encode())) if version == "2" else names


def _known(index: Draft) -> Draft:
    """Give compressed parts their shapes, which manifests do not state."""
    tensors = {
        name: replace(
            tensor,
            parts={role: part._replace(shape=()) for role, part in tensor.parts.items()},
        )
        for name, tensor in index.tensors.items()
    }
    return replace(index, tensors=tensors)


def test_a_plan_pickles_and_finishes_alike_each_time() -> None:
    for version in ("1.0", "2"):
        index = draft_of(dense("w", attrs={"a": 1}), dense("v", "int8", compression="zstd"))
        plan = ztensor.plan(index, version=version)
        file = materialize(plan, filled(index))
        assert materialize(plan, filled(index)) == file
        assert materialize(pickle.loads(pickle.dumps(plan)), filled(index)) == file


# Files of the reference implementation


def by_offset(index: Index) -> Index:
    """Order tensors as their data are, which the order of a manifest is not."""
    placed = sorted(
        index.tensors.items(), key=lambda item: [part.offset for part in item[1].parts.values()]
    )
    return replace(index, tensors=dict(placed))


@pytest.mark.parametrize("path", golden_files("ztensor/real_v10_*.zt"), ids=lambda path: path.stem)
def test_version_1_equals_what_its_reference_writes(path: Path) -> None:
    file = path.read_bytes()
    original = by_offset(read(file))
    index, data = draft_and_data(original, file)
    # Compressed bytes differ between versions of the compressor.
    stored = {
        (name, role): file[part.offset :][: part.nbytes]
        for name, tensor in original.tensors.items()
        for role, part in tensor.parts.items()
    }
    assert materialize(ztensor.plan(index), data, stored=stored) == file


@pytest.mark.parametrize(
    ("name", "alignment"),
    [("v2_stream", 4096), ("v2_converted_from_safetensors", 4096), ("v2_empty", None)],
)
def test_version_2_equals_what_its_reference_writes(
    golden: Path, name: str, alignment: int | None
) -> None:
    file = (golden / "ztensor" / f"{name}.zt").read_bytes()
    index, data = draft_and_data(read(file), file)
    assert materialize(ztensor.plan(index, version="2", alignment=alignment), data) == file


# The data of the one are in other files; tensors of the other cannot be read.
INCOMPLETE = {"v2_sharded", "v2_forward_compat"}
COMPLETE = [
    path for path in golden_files("ztensor/*.zt", ".expected.json") if path.stem not in INCOMPLETE
]


@pytest.mark.parametrize("version", ["1.0", "2"])
@pytest.mark.parametrize("path", COMPLETE, ids=lambda path: path.stem)
def test_a_copy_of_a_golden_file_has_its_content(path: Path, version: str) -> None:
    file = path.read_bytes()
    original = read(file)
    index, data = draft_and_data(original, file)
    refusal = _refusal(index, version)
    if refusal is not None:
        assert refusal.rule in ({"Dtype", "Layout", "Digest"} if version == "1.0" else {"Digest"})
        assert refusal.hint is not None
        return
    copy = materialize(ztensor.plan(index, version=version), data)
    actual, copied = draft_and_data(read(copy), copy)
    for name, tensor in index.tensors.items():
        assert (actual.tensors[name].shape, actual.tensors[name].layout) == (
            tensor.shape,
            tensor.layout,
        )
        for role in tensor.parts:
            old, new = tensor.parts[role].dtype, actual.tensors[name].parts[role].dtype
            if old == new:
                assert copied[name, role] == data[name, role]
            else:
                assert role in {"indices", "indptr", "coords"}
    assert {**actual.attrs, "generator": ""} == {**original.attrs, "generator": ""}


def _refusal(index: Draft, version: str) -> UnsupportedError | None:
    try:
        ztensor.plan(index, version=version)
    except UnsupportedError as error:
        return error
    return None


# Version 1.0


def test_version_1_puts_blobs_in_order_and_the_manifest_behind_them() -> None:
    index = draft_of(dense("b", "int8", (70,)), dense("a", "int16", (1,)), dense("e", shape=(0,)))
    plan = ztensor.plan(index)
    assert [(planned.tensor, planned.offset) for planned in plan.parts] == [
        ("b", 64),
        ("a", 192),
        ("e", 256),
    ]
    file = written(index)
    manifest = manifest_of(file)
    assert list(manifest) == ["version", "generator", "attributes", "tensors"]
    assert list(manifest["tensors"]) == ["a", "b", "e"]
    assert list(manifest["tensors"]["a"]) == ["dtype", "shape", "format", "components"]
    assert file[256:].startswith(cbor2.dumps(manifest))
    assert file[134:192] == bytes(58)


def test_only_parts_after_a_compressed_one_have_no_offset() -> None:
    index = draft_of(dense("a"), dense("b", compression="zstd"), dense("c"))
    for version, offsets in (("1.0", [64, 128, None]), ("2", [1 << 16, 2 << 16, None])):
        plan = ztensor.plan(index, version=version)
        assert [planned.offset for planned in plan.parts] == offsets


@pytest.mark.parametrize(
    ("expected", "stated"),
    [
        ("crc32c", "crc32c:0x"),
        ("xxh3", "crc32c:0x"),
        ("sha256", "sha256:"),
    ],
)
def test_version_1_spells_digests_as_its_specification(expected: str, stated: str) -> None:
    file = written(draft_of(dense("w", algorithm=expected)))
    digest = manifest_of(file)["tensors"]["w"]["components"]["data"]["digest"]
    assert digest.startswith(stated)
    value = digest.removeprefix(stated)
    assert value == (value.upper() if "0x" in stated else value.lower())


def test_names_of_axes_are_a_text_in_the_attributes_of_the_file() -> None:
    index = draft_of(dense("w", dims=("rows", None)), dense("v"), dense("s", shape=(), dims=()))
    attrs = manifest_of(written(index))["attributes"]
    assert attrs == {"xckpt.dims": '{"w":["rows",null]}'}
    for version in ("1.0", "2"):
        reopened = read(written(index, version=version))
        assert "xckpt.dims" not in reopened.attrs
        assert {name: tensor.dims for name, tensor in reopened.tensors.items()} == {
            "w": ("rows", None),
            "v": None,
            "s": None,
        }


@pytest.mark.parametrize(
    "tensor",
    [
        *(dense("w", dtype) for dtype in sorted(set(ztensor.can.types) - set(V1_TYPES))),
        WantedTensor("w", "float32", (4,), {"data": part("int8", (4,))}, "quantized"),
        WantedTensor(
            "w",
            "int32",
            (4,),
            {"x": part("int32", (4,))},
            "structural",
            attrs={"ztensor_layout": "acme/1"},
        ),
    ],
    ids=lambda tensor: tensor.dtype,
)
def test_errors_of_version_1_name_version_2(tensor: WantedTensor) -> None:
    with pytest.raises(UnsupportedError, match=r"tensor 'w': version 1\.0 has no") as caught:
        ztensor.plan(draft_of(tensor))
    assert caught.value.hint == "Write version='2', which has it"


def test_indices_get_a_type_that_the_version_has() -> None:
    narrow = draft_of(csr("w", "int8", (2, 3), 4, "uint32"), coo("v", "int8", (2, 3), 4, "int16"))
    for version, index_type, size in (("1.0", "uint64", 8), ("2", "uint32", 4)):
        plan = ztensor.plan(narrow, version=version)
        parts = {(e.tensor, e.role): (e.part.dtype, e.part.nbytes) for e in plan.parts}
        assert parts["w", "indptr"] == (index_type, 3 * size)
        assert parts["w", "indices"] == (index_type, 4 * size)
        assert parts["v", "coords"] == (index_type, 8 * size)
    signed = ztensor.plan(draft_of(coo("v", "int8", (2, 3), 4, "int64")), version="2")
    assert [planned.part.dtype for planned in signed.parts] == ["uint64", "int8"]


# Version 2


def test_version_2_shares_one_blob_without_bytes() -> None:
    index = draft_of(dense("a"), dense("x", shape=(0,)), dense("y", "int8", (3, 0)), dense("z"))
    reopened = read(written(index, version="2")).tensors
    assert [reopened[name].parts["data"].offset for name in "axyz"] == [
        1 << 16,
        2 << 16,
        2 << 16,
        2 << 16,
    ]


def test_the_type_of_a_component_is_that_of_the_part() -> None:
    index = draft_of(
        dense("w", "complex64", attrs={"type": "complex64"}), dense("v", attrs={"type": "x"})
    )
    reopened = read(written(index, version="2")).tensors
    assert (reopened["w"].attrs, reopened["v"].attrs) == ({}, {"type": "x"})


PROFILED = {
    "groups": (
        Quantization((1, 8), "uint8", 4, 32, 1, zero=None, scale_axes=(0, 1)),
        {
            "data": part("uint32", (4, 2)),
            "scales": part("float16", (4, 2)),
            "zeros": part("uint8", (4, 2)),
        },
    ),
    "implied": (
        Quantization((4, 1), "uint8", 4, 8, 1, msb_first=True, zero=8, scale_axes=(1, 0)),
        {"data": part("uint8", (4, 8)), "scales": part("bfloat16", (16, 1))},
    ),
    "bytes": (
        Quantization((1, 16), "int8", 8, 8, 1),
        {"data": part("int8", (4, 16)), "scales": part("float32", (4, 1))},
    ),
    "microscaled": (
        Quantization((1, 8), "float4_e2m1fn", 4, 4, 1, scale_axes=(0, 1)),
        {"data": part("float4_e2m1fn", (4, 16)), "scales": part("float8_e8m0fnu", (4, 2))},
    ),
}


@pytest.mark.parametrize("case", PROFILED)
def test_a_quantisation_becomes_the_attributes_of_a_layout(case: str) -> None:
    quantization, parts = PROFILED[case]
    tensor = WantedTensor(
        "q", "float32", (4, 16), parts, "quantized", attrs={"k": 1}, quantization=quantization
    )
    actual = read(written(draft_of(tensor), version="2")).tensors["q"]
    assert actual.layout == "quantized"
    expected = quantization
    if not quantization.scale_axes:
        expected = replace(quantization, scale_axes=(0, 1))
    assert actual.quantization == expected
    assert actual.attrs["k"] == 1
    assert {role: part.shape for role, part in actual.parts.items()} == {
        role: part.shape for role, part in parts.items()
    }
    copy = drafted(read(written(draft_of(tensor), version="2")))
    again = read(written(copy, version="2")).tensors["q"]
    assert (again.attrs, again.quantization) == (actual.attrs, actual.quantization)


@pytest.mark.parametrize(
    "changes",
    [
        {"block": (2, 8)},
        {"global_scale": True},
        {"word_bits": 4},
        {"scale_axes": (1, 0)},
        {"code": "int8"},
    ],
)
def test_a_quantisation_that_no_layout_has_is_refused(changes: dict[str, Any]) -> None:
    quantization, parts = PROFILED["groups"]
    odd = replace(quantization, **changes)
    tensor = WantedTensor("q", "float32", (4, 16), parts, "quantized", quantization=odd)
    with pytest.raises(
        UnsupportedError, match="tensor 'q': no layout of version 2 describes"
    ) as caught:
        ztensor.plan(draft_of(tensor), version="2")
    assert caught.value.hint == "Save the values that it decodes to"


def structural(
    layout: Any, parts: Mapping[str, WantedPart] | None = None, **attrs: Any
) -> WantedTensor:
    attrs["ztensor_layout"] = layout
    return WantedTensor(
        "w", "uint8", (32,), parts or {"data": part("uint8", (18,))}, "structural", attrs=attrs
    )


def test_parts_of_unknown_layouts_keep_the_layout_name() -> None:
    for version in ("1.0", "2"):
        tensor = read(written(draft_of(structural("acme/1", k=1)), version=version)).tensors["w"]
        assert (tensor.layout, tensor.problem) == ("structural", None)
        assert tensor.attrs == {"k": 1, "ztensor_layout": "acme/1"}
    gguf = structural("gguf.q4_0/1", elems_per_block=32, block_bytes=18)
    assert read(written(draft_of(gguf), version="2")).tensors["w"].attrs == gguf.attrs


@pytest.mark.parametrize(
    ("tensor", "version"),
    [
        (structural(None), "1.0"),
        (structural("dense"), "1.0"),
        (structural(None), "2"),
        (structural("zt.sparse_csr/1"), "2"),
    ],
)
def test_parts_of_a_layout_without_a_name_are_refused(tensor: WantedTensor, version: str) -> None:
    with pytest.raises(UnsupportedError, match=r"without a name .*'ztensor_layout'"):
        ztensor.plan(draft_of(tensor), version=version)


def test_parts_must_be_of_the_layout_they_name() -> None:
    with pytest.raises(FormatError, match=r"tensor 'w'.*'data' has 18 bytes"):
        ztensor.plan(
            draft_of(structural("gguf.q4_0/1", elems_per_block=16, block_bytes=18)), version="2"
        )


# Both versions


@pytest.mark.parametrize("version", ["1.0", "2"])
@pytest.mark.parametrize(
    ("index", "rule"),
    [
        (draft_of(dense("\ud800")), "Name"),
        (draft_of(dense("w", dims=("\ud800", None))), "Name"),
        (draft_of(dense("w"), a="\ud800"), "Name"),
        (draft_of(dense("w"), a=1 << 64), "Attributes"),
        (draft_of(dense("w"), a=object()), "Attributes"),
        (draft_of(dense("w"), a={(): 1}), "Attributes"),
        (draft_of(dense("w", attrs={"a": {1, 2}})), "Attributes"),
        (draft_of(dense("w"), **{"xckpt.dims": "{}"}), "Attributes"),
        (Draft({}, {cast("str", 1): 2}), "Attributes"),
        (draft_of(dense("w", "bool32")), "Dtype"),
        (draft_of(dense("w", order="F")), "Order"),
        (draft_of(dense("w", compression="lz4")), "Compression"),
        (draft_of(dense("w", algorithm="md5")), "Digest"),
    ],
)
def test_features_of_no_version_are_errors(index: Draft, rule: str, version: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        ztensor.plan(index, version=version)
    assert caught.value.rule == rule


@pytest.mark.parametrize("name", ["", "a\0b", "é" * 513])
def test_version_2_has_names_of_limited_length(name: str) -> None:
    shaped = structural("acme/1", {name: part("uint8", (1,))})
    for index in (
        draft_of(dense(name)),
        draft_of(**{name: 1}),
        draft_of(dense("w", attrs={name: 1})),
        draft_of(shaped),
    ):
        with pytest.raises(UnsupportedError, match="1 to 1024 bytes"):
            ztensor.plan(index, version="2")
        assert read(written(index)).attrs


@pytest.mark.parametrize(("version", "deepest"), [("1.0", 125), ("2", 30)])
def test_attributes_nest_to_the_limit_of_readers(version: str, deepest: int) -> None:
    nested: Any = 0
    for _ in range(deepest - 1):
        nested = [nested]
    reopened = read(written(draft_of(dense("w", attrs={"a": nested})), version=version))
    assert reopened.tensors["w"].attrs == {"a": nested}
    with pytest.raises(UnsupportedError, match="nested too deep"):
        ztensor.plan(draft_of(dense("w", attrs={"a": [nested]})), version=version)
    assert read(written(draft_of(a=[nested]), version=version)).attrs["a"] == [nested]


@pytest.mark.parametrize(
    "tensor",
    [
        replace(dense("w"), shape=(7,)),
        replace(dense("w"), parts={}),
        replace(dense("w"), parts={**dense("w").parts, "more": part("int8", (1,))}),
        replace(csr("w", "int8", (2, 3), 4, "uint64"), shape=(3, 3)),
        replace(coo("w", "int8", (2, 3), 4, "uint64"), shape=(2, 3, 4)),
        coo("w", "int8", (), 4, "uint64"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tensor: WantedTensor) -> None:
    for version in ("1.0", "2"):
        with pytest.raises(FormatError, match="tensor 'w'"):
            ztensor.plan(draft_of(tensor), version=version)


@pytest.mark.parametrize(
    "options",
    [
        {"version": "1.1"},
        {"version": 2},
        {"alignment": 4096},
        {"version": "2", "alignment": 64},
        {"version": "2", "alignment": 5000},
        {"version": "2", "alignment": 0},
    ],
)
def test_options_that_do_not_exist(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"version|alignment"):
        ztensor.plan(draft_of(), **options)


def test_declared_element_types_are_valid() -> None:
    lacking = {"bool32", "int4", "int2", "int1", "uint4", "uint2", "uint1"}
    lacking |= {"float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz"}
    lacking |= {"float6_e2m3fn", "float6_e3m2fn"}
    assert set(ztensor.can.types) == set(ELEMENT_TYPES) - lacking
    assert len(set(ztensor.can.types)) == len(ztensor.can.types)


def test_each_version_digests_its_own_form_of_a_compressed_part() -> None:
    index = draft_of(dense("w", "int8", (3000,), compression="zstd", algorithm="sha256"))
    for version, covered in (("1.0", "stored"), ("2", "decoded")):
        file = written(index, version=version)
        stored = read(file).tensors["w"].parts["data"]
        assert stored.digest_of == covered
        assert raw_bytes(stored, file) == filled(index)["w", "data"]
