"""Planned burnpack files are read back and equal those of burn."""

from __future__ import annotations

import json
import pickle
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import cbor2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import golden_files
from tests.formats.burnpack_files import burnpack as packed
from tests.formats.burnpack_files import quantized
from tests.formats.indexes import (
    WHOLE_BYTES,
    csr,
    dense,
    dense_tensors,
    draft_of,
    drafts,
    filled,
    part,
    plain,
    texts,
)
from tests.formats.planned import draft_and_data, materialize
from tests.sources import CountingSource
from xckpt import formats
from xckpt.elements import stored_dtype
from xckpt.errors import UnsupportedError
from xckpt.formats.plan import Draft, WantedPart, WantedTensor
from xckpt.index import Index, Quantization

if TYPE_CHECKING:
    from pathlib import Path

burnpack = formats.get("burnpack")

DIALECTS = ["0.20", "0.21", "0.22"]


def read(data: bytes) -> Index:
    return burnpack.read(CountingSource(data))


def written(index: Draft, **options: Any) -> bytes:
    plan = burnpack.plan(index, **options)
    file = materialize(plan, filled(index))
    assert len(file) == plan.nbytes
    return file


def metadata_of(file: bytes) -> dict[str, Any]:
    size = int.from_bytes(file[6:10], "little")
    root: dict[str, Any] = cbor2.loads(file[10 : 10 + size])
    assert file[10 + size : -(-(10 + size) // 256) * 256].strip(b"\0") == b""
    return root


# Round trips


ATTRS = st.fixed_dictionaries({}, optional={"param_id": st.integers(0, (1 << 64) - 1).map(str)})
SCALARS = {"Int": ("int64", "<q"), "UInt": ("uint64", "<Q"), "Float": ("float64", "<d")}


@st.composite
def scalars(draw: st.DrawFn) -> WantedTensor:
    kind = draw(st.sampled_from([*SCALARS, "Bool"]))
    if kind == "Bool":
        return scalar("", kind, "bool", bytes([draw(st.integers(0, 1))]))
    return scalar("", kind, SCALARS[kind][0], draw(st.binary(min_size=8, max_size=8)))


def scalar(name: str, kind: str, dtype: str, data: bytes | None) -> WantedTensor:
    return dense(name, dtype, (), attrs={"scalar": kind}, inline=data)


@given(
    drafts(dense_tensors(burnpack.can.types, ATTRS) | scalars(), st.dictionaries(texts, texts)),
    st.sampled_from(["0.21", "0.22"]),
)
def test_planned_files_are_read_back(index: Draft, dialect: str) -> None:
    data = filled(index)
    file = materialize(burnpack.plan(index, dialect=dialect), data)
    assert read(file).version == "1"
    actual, copied = draft_and_data(read(file), file)
    assert plain(_without_stores(actual)) == plain(index)
    for (name, role), raw in copied.items():
        inline = index.tensors[name].parts[role].inline
        assert raw == (data[name, role] if inline is None else inline)
    tensors = [name for name in index.tensors if not burnpack.is_inline(index.tensors[name])]
    assert list(actual.tensors)[: len(tensors)] == sorted(tensors)


def _without_stores(index: Draft) -> Draft:
    """Leave out what burn calls an element type that has one name only."""
    tensors = {}
    for name, tensor in index.tensors.items():
        attrs = {key: value for key, value in tensor.attrs.items() if key != "burn_dtype"}
        tensors[name] = replace(tensor, attrs=attrs)
    return replace(index, tensors=tensors)


def test_a_plan_pickles_and_knows_its_size() -> None:
    index = draft_of(dense("w"), dense("v", "int8", (1,)))
    plan = burnpack.plan(index)
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert plan.nbytes == plan.parts[-1].offset + 1  # type: ignore[operator]  # all are known
    assert [planned.offset for planned in plan.parts] == [256, 512]


# Files of burn


def by_offset(index: Index) -> Index:
    """Order tensors as their data are, which the order of the metadata is not."""
    placed = sorted(
        index.tensors.items(), key=lambda item: [part.offset for part in item[1].parts.values()]
    )
    return replace(index, tensors=dict(placed))


# Forms that burn reads but does not write: the copy has their content in another form.
OTHERS = {"boundary_legacy_0", "cbor_reordered", "legacy_0.19", "trailing_bytes"}


@pytest.mark.parametrize(
    "path",
    [*golden_files("burnpack/*.bpk"), *golden_files("burnpack/ckpt/*.bpk")],
    ids=lambda path: path.stem,
)
def test_a_copy_of_a_golden_file_equals_it(path: Path) -> None:
    file = path.read_bytes()
    index, data = draft_and_data(by_offset(read(file)), file)
    dialect = "0.20" if "0.20" in path.stem else "0.22"
    copy = materialize(burnpack.plan(index, dialect=dialect), data)
    assert (copy == file) == (path.stem not in OTHERS)
    actual, copied = draft_and_data(read(copy), copy)
    assert plain(actual) == plain(index)
    assert copied == data


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_order_of_the_index_is_that_of_the_data(dialect: str) -> None:
    index = draft_of(dense("b"), dense("a", "int8", (257,)), dense("e", shape=(0,)), dense("c"))
    file = written(index, dialect=dialect)
    root = metadata_of(file)
    assert list(root) == ["tensors"]
    assert {name: entry["data_offsets"] for name, entry in root["tensors"].items()} == {
        "a": [256, 513],
        "b": [0, 24],
        "c": [768, 792],
        "e": [768, 768],
    }
    assert list(root["tensors"]) == ["a", "b", "c", "e"]
    assert list(root["tensors"]["a"]) == ["dtype", "shape", "data_offsets"]


# Element types


@pytest.mark.parametrize(
    ("dtype", "attrs", "dialect", "spelled"),
    [
        ("bool", {}, "0.20", "Bool"),
        ("bool", {}, "0.21", {"Bool": "Native"}),
        ("bool", {}, "0.22", {"Bool": "Native"}),
        ("bool", {"burn_dtype": '{"Bool": "U8"}'}, "0.22", {"Bool": "U8"}),
        ("bool", {"burn_dtype": '{"Bool": "U8"}'}, "0.20", "Bool"),
        ("bool", {"burn_dtype": '{"Bool": "U32"}'}, "0.22", {"Bool": "Native"}),
        ("bool32", {}, "0.22", {"Bool": "U32"}),
        ("float32", {"burn_dtype": "Flex32"}, "0.22", "Flex32"),
        ("float64", {"burn_dtype": "Flex32"}, "0.22", "F64"),
        ("bfloat16", {}, "0.20", "BF16"),
        ("uint8", {}, "0.22", "U8"),
    ],
)
def test_element_types_are_spelled_as_the_dialect_does(
    dtype: str, attrs: dict[str, Any], dialect: str, spelled: Any
) -> None:
    file = written(draft_of(dense("w", dtype, attrs=attrs)), dialect=dialect)
    assert metadata_of(file)["tensors"]["w"]["dtype"] == spelled


@pytest.mark.parametrize("dtype", sorted(set(WHOLE_BYTES) - set(burnpack.can.types)))
def test_element_types_that_burn_lacks_are_refused(dtype: str) -> None:
    with pytest.raises(
        UnsupportedError, match=f"tensor 'w': burnpack does not support {dtype}"
    ) as caught:
        burnpack.plan(draft_of(dense("w", dtype)))
    assert "float32" in str(caught.value.hint)


def test_wide_booleans_are_not_in_the_first_dialect() -> None:
    with pytest.raises(UnsupportedError, match=r"tensor 'w': burn 0\.21 or newer") as caught:
        burnpack.plan(draft_of(dense("w", "bool32")), dialect="0.20")
    assert caught.value.hint == "Pass dialect='0.21'"


# Attributes


def test_param_ids_are_preserved_or_generated() -> None:
    index = draft_of(dense("b", attrs={"param_id": str((1 << 64) - 1)}), dense("a"), dense("c"))
    entries = metadata_of(written(index))["tensors"]
    assert entries["b"]["param_id"] == (1 << 64) - 1
    assert "param_id" not in entries["a"]
    file = written(index, param_ids="make")
    arrays = {name: entry["param_id"] for name, entry in metadata_of(file)["tensors"].items()}
    assert arrays["b"] == (1 << 64) - 1
    assert len(set(arrays.values())) == 3
    assert file == written(index, param_ids="make")
    assert read(file).tensors["a"].attrs == {"param_id": str(arrays["a"])}


@pytest.mark.parametrize("value", ["", "-1", "1.5", "²", str(1 << 64), "1" * 5000, True, 1.0])
def test_a_param_id_is_an_unsigned_integer(value: Any) -> None:
    with pytest.raises(UnsupportedError, match="tensor 'w': the param_id") as caught:
        burnpack.plan(draft_of(dense("w", attrs={"param_id": value})))
    assert caught.value.rule == "ParamId"


def test_attributes_of_the_file_are_texts() -> None:
    index = draft_of(b="2", a="", epoch=7, done=True, names=["é", None])
    root = metadata_of(written(index))
    assert root == {
        "tensors": {},
        "metadata": {
            "a": "",
            "b": "2",
            "done": "true",
            "epoch": "7",
            "names": '["é", null]',
            "xckpt.arrangement": '{"json":["done","epoch","names"]}',
        },
    }
    assert read(written(index)).attrs == index.attrs
    assert list(root["metadata"]) == sorted(root["metadata"])


def test_names_of_axes_are_a_text_in_the_metadata() -> None:
    index = draft_of(dense("w", dims=("rows", None)), dense("v"), producer="test")
    file = written(index)
    assert metadata_of(file)["metadata"] == {
        "producer": "test",
        "xckpt.dims": '{"w":["rows",null]}',
    }
    actual = read(file)
    assert actual.attrs == {"producer": "test"}
    assert [tensor.dims for tensor in actual.tensors.values()] == [None, ("rows", None)]


def test_names_of_axes_that_are_malformed_are_ignored() -> None:
    for text in ("", "{", '{"w": ["a"]}', '{"w": 1}'):
        metadata = {"xckpt.dims": text, "other": "x"}
        entry = {"dtype": "F32", "shape": [2, 3], "data": bytes(24)}
        actual = read(packed({"w": entry}, metadata=metadata))
        assert (actual.tensors["w"].dims, actual.attrs) == (None, {"other": "x"})


# Scalars


@pytest.mark.parametrize(
    ("value", "size"),
    [(0.5, 3), (1 / 3, 9), (float(1 << 40), 5), (float("inf"), 3), (float("nan"), 3)],
)
def test_scalars_are_as_short_as_burn_writes_them(value: float, size: int) -> None:
    data = struct.pack("<d", value)
    index = draft_of(scalar("lr", "Float", "float64", data))
    file = written(index)
    root = metadata_of(file)
    assert root["tensors"] == {}
    encoded = cbor2.dumps("scalars") + b"\xa1" + cbor2.dumps("lr") + b"\xa1" + cbor2.dumps("Float")
    at = file.index(encoded) + len(encoded)
    assert int.from_bytes(file[6:10], "little") + 10 - at == size
    assert read(file).tensors["lr"].parts["data"].inline == data


def test_a_scalar_named_like_a_tensor_keeps_its_name() -> None:
    packed_value = struct.pack("<q", 1)
    root = {"w": {"Int": 1}, "w:scalar": {"Int": 1}, "v:scalar": {"Int": 1}, "x": {"Int": 1}}
    entry = {"dtype": "F32", "shape": [1], "data": bytes(4)}
    file = packed({"w": entry}, scalars=root)
    index, data = draft_and_data(read(file), file)
    assert list(index.tensors) == ["w", "v:scalar", "w:scalar", "w:scalar:scalar", "x"]
    again = read(materialize(burnpack.plan(index), data))
    assert plain(again) == plain(index)
    plain_scalar = draft_of(dense("w"), scalar("w:scalar", "Int", "int64", packed_value))
    assert metadata_of(written(plain_scalar))["scalars"] == {"w": {"Int": 1}}


@given(
    st.sets(st.text("ab:", max_size=3) | st.sampled_from(["a:scalar", "a:scalar:"]), max_size=4),
    st.sets(
        st.builds("{}{}".format, st.sampled_from(["a", "b", ""]), st.text(":", max_size=2))
        | st.builds(lambda n, k: n + ":scalar" * k, st.sampled_from("ab"), st.integers(0, 10))
        | st.sampled_from(["a:scalar:", "a:scalar::scalar", "b:scalar:scalar:"]),
        max_size=6,
    ),
)
def test_names_of_scalars_survive_any_tensor_names(tensors: set[str], scalars: set[str]) -> None:
    entry = {"dtype": "F32", "shape": [1], "data": bytes(4)}
    values = {name: {"Int": at} for at, name in enumerate(sorted(scalars))}
    file = packed(dict.fromkeys(sorted(tensors), entry), scalars=values)
    index, data = draft_and_data(read(file), file)
    assert len(index.tensors) == len(tensors) + len(scalars)
    assert {name for name, tensor in index.tensors.items() if not tensor.attrs} == tensors
    assert metadata_of(materialize(burnpack.plan(index), data)).get("scalars", {}) == values


@given(
    st.sets(st.text("ab:", max_size=3) | st.sampled_from(["a:scalar", "a:scalar:"]), max_size=4),
    st.sets(st.builds("{}:scalar{}".format, st.text("ab", max_size=1), st.text(":", max_size=2))),
)
def test_scalars_never_merge(tensors: set[str], scalars: set[str]) -> None:
    data = struct.pack("<q", 1)
    drafts = [scalar(name, "Int", "int64", data) for name in sorted(scalars - tensors)]
    file = written(draft_of(*map(dense, sorted(tensors)), *drafts))
    assert len(metadata_of(file).get("scalars", {})) == len(drafts)
    assert len(read(file).tensors) == len(tensors) + len(drafts)


@pytest.mark.parametrize(
    ("kind", "dtype", "value", "expected"),
    [
        ("Int", "int8", -128, -128),
        ("Int", "uint32", 7, 7),
        ("Int", "uint64", (1 << 63) - 1, (1 << 63) - 1),
        ("UInt", "int64", 7, 7),
        ("UInt", "uint8", 255, 255),
        ("Float", "float32", 0.5, 0.5),
        ("Float", "float16", -0.0, -0.0),
        ("Float", "bfloat16", 1.5, 1.5),
        ("Float", "int64", 1 << 53, float(1 << 53)),
    ],
)
def test_a_scalar_may_be_of_any_type_that_holds_it(
    kind: str, dtype: str, value: Any, expected: Any
) -> None:
    data = np.array(value).astype(stored_dtype(dtype)).tobytes()
    file = written(draft_of(scalar("s", kind, dtype, data)))
    ((found_kind, actual),) = metadata_of(file)["scalars"]["s"].items()
    assert (found_kind, type(actual), repr(actual)) == (kind, type(expected), repr(expected))


@pytest.mark.parametrize(
    ("kind", "dtype", "value"),
    [
        ("Int", "uint64", 1 << 63),
        ("Int", "float64", 1.0),
        ("Int", "bool", True),
        ("UInt", "int64", -1),
        ("Float", "int64", (1 << 53) + 1),
        ("Float", "bool", True),
        ("Bool", "int64", 1),
    ],
)
def test_a_value_that_a_kind_does_not_hold_is_refused(kind: str, dtype: str, value: Any) -> None:
    data = np.array(value).astype(dtype).tobytes()
    with pytest.raises(
        UnsupportedError, match=f"'s': a scalar of the kind {kind} that is"
    ) as caught:
        burnpack.plan(draft_of(scalar("s", kind, dtype, data)))
    assert caught.value.rule == "Scalar"


def test_many_scalars() -> None:
    for count in (23, 24, 256):
        arrays = [scalar(f"{n:03}", "Int", "int64", struct.pack("<q", -n)) for n in range(count)]
        root = metadata_of(written(draft_of(*arrays)))
        assert root["scalars"] == {f"{n:03}": {"Int": -n} for n in range(count)}


def test_a_scalar_needs_a_value_of_its_kind() -> None:
    with pytest.raises(ValueError, match="scalar 'lr' has no inline value"):
        burnpack.plan(draft_of(scalar("lr", "Float", "float64", None)))
    for kind, dtype in (("Float", "float32"), ("Complex", "float64"), (1, "int64")):
        with pytest.raises(UnsupportedError, match="tensor 'lr': a scalar of the kind"):
            burnpack.plan(draft_of(scalar("lr", kind, dtype, bytes(8))))  # type: ignore[arg-type]  # whatever users give


# Quantised tensors


BLOCK = {"storage": [4, 1, 1, 1, 1], "len": 1}
SCHEMES: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": None, "block": None},
    "float16": {"tensor": "F16", "block": None},
    "blocks": {"tensor": None, "block": {"size": BLOCK, "dtype": "BF16"}},
}
LEVELS: dict[str, dict[str, Any]] = {
    "tensor": {"param": "F32", "level": "Tensor"},
    "float16": {"param": "F16", "level": "Tensor"},
    "blocks": {"param": "BF16", "level": {"Block": BLOCK}},
}
SIZES = {"tensor": 32 + 4, "float16": 32 + 2, "blocks": 32 + 16}


@pytest.mark.parametrize("case", SCHEMES)
def test_schemes_are_spelled_as_the_dialect_does(case: str) -> None:
    scheme = {"value": "Q8S", "store": "Native", "mode": "Symmetric"}
    tensors = {"q": quantized((4, 8), bytes(range(SIZES[case])), {**scheme, **SCHEMES[case]})}
    new = packed(tensors)
    spelled = {"value": "Q8S", "store": "Native", "mode": "Symmetric", **LEVELS[case]}
    order = ["value", "param", "store", "level", "mode"]
    old = packed({"q": {**tensors["q"], "dtype": {"QFloat": {k: spelled[k] for k in order}}}})
    for file in (new, old):
        index, data = draft_and_data(read(file), file)
        copies = {d: materialize(burnpack.plan(index, dialect=d), data) for d in DIALECTS}
        assert copies["0.20"] == copies["0.21"] == old
        same_scales = case != "tensor" or file is new
        assert (copies["0.22"] == new) == same_scales


@pytest.mark.parametrize(
    ("scheme", "nbytes"),
    [
        ({"tensor": "F32", "block": {"size": BLOCK, "dtype": "UE4M3"}}, 32 + 8 + 4),
        ({"tensor": None, "block": None, "mode": "Lookup"}, 40),
    ],
)
def test_schemes_that_an_earlier_burn_lacks_are_refused(
    scheme: dict[str, Any], nbytes: int
) -> None:
    scheme = {"value": "Q8S", "store": "Native", "mode": "Symmetric", **scheme}
    file = packed({"q": quantized((4, 8), bytes(nbytes), scheme)})
    index, data = draft_and_data(read(file), file)
    assert materialize(burnpack.plan(index), data) == file
    with pytest.raises(UnsupportedError, match=r"tensor 'q': burn 0\.22 or newer") as caught:
        burnpack.plan(index, dialect="0.21")
    assert caught.value.hint == "Pass dialect='0.22'"


@pytest.mark.parametrize(
    "store", ["Native", {"PackedU32": 0}, {"PackedU32": 1}, {"PackedNative": 0}]
)
@pytest.mark.parametrize("value", ["Q8F", "Q4S", "Q2S", "E4M3", "E2M1"])
def test_every_quantisation_store_is_read_back(store: Any, value: str) -> None:
    scheme = {"value": value, "store": store, "mode": "Symmetric", "tensor": None, "block": None}
    bits = {"8": 8, "4": 4, "2": 2}.get(value[1], 8)
    codes = 64 if store == "Native" else 4 * (64 * bits // 32)
    file = packed({"q": quantized((2, 32), bytes(codes) + bytes(4), scheme)})
    index, data = draft_and_data(read(file), file)
    assert materialize(burnpack.plan(index), data) == file


def from_elsewhere(quantization: Quantization, **parts: WantedPart) -> WantedTensor:
    return WantedTensor("q", "float32", (4, 64), parts, "quantized", quantization=quantization)


@pytest.mark.parametrize(
    "tensor",
    [
        from_elsewhere(
            Quantization((1, 32), "int8", 8, 8, 1, scale_axes=(0, 1)),
            data=part("int8", (4, 64)),
            scales=part("float16", (4, 2)),
        ),
        from_elsewhere(
            Quantization((4, 64), "int8", 4, 32, 1),
            data=part("uint32", (4, 8)),
            scales=part("float32", ()),
        ),
        from_elsewhere(
            Quantization((2, 16), "int8", 8, 8, 1, global_scale=True),
            **{"global": part("float32", ())},
            data=part("int8", (4, 64)),
            scales=part("float8_e4m3fn", (2, 4)),
        ),
    ],
    ids=["rows", "packed", "global"],
)
def test_a_quantisation_of_another_format_becomes_a_scheme(tensor: WantedTensor) -> None:
    actual = read(written(draft_of(tensor))).tensors["q"]
    assert actual.layout == "quantized"
    assert actual.quantization == replace(tensor.quantization, scale_axes=())  # type: ignore[type-var]  # there is one
    assert json.loads(actual.attrs["burn_dtype"])["QFloat"]["mode"] == "Symmetric"
    assert {role: part.shape for role, part in actual.parts.items()} == {
        role: part.shape for role, part in tensor.parts.items()
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"zero": 8},
        {"code": "uint8"},
        {"scale_axes": (1, 0)},
        {"msb_first": True},
        {"bits": 3},
        {"block": (1, 16)},
        {"global_scale": True},
    ],
)
def test_a_quantisation_that_no_scheme_has_is_refused(changes: dict[str, Any]) -> None:
    quantization = Quantization((1, 32), "int8", 8, 8, 1)
    tensor = from_elsewhere(
        replace(quantization, **changes),
        data=part("int8", (4, 64)),
        scales=part("float16", (4, 2)),
    )
    with pytest.raises(UnsupportedError, match="tensor 'q': burn has no such quantisation"):
        burnpack.plan(draft_of(tensor))


@pytest.mark.parametrize(
    "stated",
    ["", "F32", "{", "[]", "{}", '{"QFloat": 1}', '{"QFloat": {"block": 1}}', 7, "[" * 100_000],
)
def test_a_malformed_scheme_is_ignored(stated: Any) -> None:
    tensor = from_elsewhere(
        Quantization((4, 64), "int8", 8, 8, 1),
        data=part("int8", (4, 64)),
        scales=part("float32", ()),
    )
    index = draft_of(replace(tensor, attrs={"burn_dtype": stated}))
    assert written(index) == written(draft_of(tensor))
    bare = replace(tensor, quantization=None, layout="structural", attrs={"burn_dtype": stated})
    with pytest.raises(UnsupportedError, match="burn has no such quantisation"):
        burnpack.plan(draft_of(bare))


# Errors


@pytest.mark.parametrize(
    ("index", "rule"),
    [
        (draft_of(dense("\ud800")), "Name"),
        (draft_of(scalar("\ud800", "Bool", "bool", b"\1")), "Name"),
        (draft_of(dense("w"), a="\ud800"), "Name"),
        (draft_of(dense("w"), **{"\ud800": "a"}), "Name"),
        (draft_of(dense("w", dims=("\ud800", None))), "Name"),
        (draft_of(a=b"bytes"), "Metadata"),
        (draft_of(a=object()), "Metadata"),
        (Draft({}, {cast("str", 1): "a"}), "Metadata"),
        (draft_of(**{"xckpt.dims": "{}"}), "Metadata"),
        (draft_of(dense("w", order="F")), "Order"),
        (draft_of(dense("w", compression="zstd")), "Encoding"),
        (draft_of(dense("w", algorithm="crc32c")), "Encoding"),
        (draft_of(csr("w", "float32", (2, 2), 1, "uint64")), "Layout"),
        (draft_of(dense("w", "complex64")), "Dtype"),
    ],
)
def test_unsupported_types_are_errors(index: Draft, rule: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        burnpack.plan(index)
    assert caught.value.rule == rule


@pytest.mark.parametrize(
    "options", [{"dialect": "0.19"}, {"dialect": 0.21}, {"param_ids": "drop"}, {"param_ids": None}]
)
def test_options_that_do_not_exist(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        burnpack.plan(draft_of(), **options)


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'w': 24 bytes, but float32 of \(7,\) has 28"):
        burnpack.plan(draft_of(replace(dense("w"), shape=(7,))))
