"""Planned primitiv files equal those of the library, and never contain anything it refuses."""

from __future__ import annotations

import struct
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import golden_files
from tests.formats import primitiv_files as files
from tests.formats.indexes import drafted
from tests.formats.planned import materialize
from tests.sources import CountingSource
from xckpt import formats
from xckpt.errors import UnsupportedError
from xckpt.formats.plan import Draft, WantedPart, WantedTensor
from xckpt.formats.primitiv.models import key_and_stat, variable_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from xckpt.index import Index, Tensor

primitiv = formats.get("primitiv")

# Written by the library; odd files are written by hand, in forms that it only reads.
WRITTEN = golden_files("primitiv/*.primitiv")
ODD = golden_files("primitiv/odd/*.primitiv")


def tensor(name: str, shape: tuple[int, ...] = (2, 3), **fields: Any) -> WantedTensor:
    part = WantedPart("float32", shape, 4 * prod(shape))
    return WantedTensor(name, "float32", shape, {"data": part}, order="F", **fields)


def draft_of(*tensors: WantedTensor, **attrs: Any) -> Draft:
    return Draft({tensor.name: tensor for tensor in tensors}, attrs)


def named(*names: str) -> Draft:
    return draft_of(*map(tensor, names))


def read(data: bytes) -> Index:
    return primitiv.read(CountingSource(data))


def noise(index: Index | Draft) -> dict[tuple[str, str], bytes]:
    return {
        (name, "data"): bytes((7 * number + i) % 251 for i in range(tensor.parts["data"].nbytes))
        for number, (name, tensor) in enumerate(drafted(index).tensors.items())
    }


def written(index: Index | Draft, **options: Any) -> bytes:
    return materialize(primitiv.plan(drafted(index), **options), noise(index))


def values_of(index: Index, data: bytes) -> dict[tuple[str, str], bytes]:
    parts = {name: tensor.parts["data"] for name, tensor in index.tensors.items()}
    return {(n, "data"): data[p.offset : p.offset + p.nbytes] for n, p in parts.items()}


def described(index: Index) -> dict[str, Tensor]:
    """Give the tensors, wherever their data are."""
    return {name: replace(tensor, parts={}) for name, tensor in index.tensors.items()}


# --- the library's bytes --------------------------------------------------------------------------


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.stem)
def test_files_of_the_library_come_back_byte_for_byte(path: Path) -> None:
    data = path.read_bytes()
    index = read(data)
    assert materialize(primitiv.plan(drafted(index)), values_of(index, data)) == data


@pytest.mark.parametrize("path", ODD, ids=lambda path: path.stem)
def test_odd_files_come_back_as_the_library_writes_them(path: Path) -> None:
    data = path.read_bytes()
    index = read(data)
    copy = materialize(primitiv.plan(drafted(index)), values_of(index, data))
    again = read(copy)
    assert len(copy) <= len(data)
    # As text, in which NaN equals NaN.
    assert (described(again), repr(again.attrs)) == (described(index), repr(index.attrs))
    assert list(again.tensors) == sorted(index.tensors)
    assert values_of(again, copy) == values_of(index, data)


def test_a_model_by_hand() -> None:
    value, stat = np.arange(6, dtype="f4").reshape(2, 3), np.ones((2, 1), "f4")
    expected = files.file(
        files.MODEL,
        files.model(
            (["B"], files.parameter(files.tensor(value))),
            (
                ["a", "w"],
                files.parameter(files.tensor(value), ("Adam.m1", files.tensor(stat[:, 0]))),
            ),
        ),
    )
    index = draft_of(tensor("a.w"), tensor("a.w:Adam.m1", (2, 1)), tensor("B"))
    data = {("a.w", "data"): value.tobytes("F"), ("B", "data"): value.tobytes("F")}
    data["a.w:Adam.m1", "data"] = stat.tobytes()
    assert materialize(primitiv.plan(index), data) == expected


@pytest.mark.parametrize("nbytes", [4, 252, 256, 65532, 65536])
def test_lengths_have_the_shortest_form(nbytes: int) -> None:
    values = np.zeros(nbytes // 4, "f4")
    expected = files.file(files.TENSOR, files.tensor(values))
    shape = () if nbytes == 4 else values.shape
    index = draft_of(tensor("value", shape))
    assert materialize(
        primitiv.plan(index, data_type="Tensor"), {("value", "data"): values.tobytes()}
    ) == expected.replace(b"\x91" + files.uint32(1), b"\x90")


# --- what comes back ------------------------------------------------------------------------------

ELEMENTS = st.text(
    st.characters(codec="utf-8") | st.sampled_from(".:%/\0\udc80\udcff"), max_size=6
).filter(
    lambda text: text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape") == text
)
KEYS = st.lists(ELEMENTS, min_size=1, max_size=3).map(tuple)
DIMS = st.lists(st.integers(1, 4), max_size=3).map(tuple)
SHAPES = st.tuples(DIMS, st.integers(1, 3))


def as_read(shape: tuple[tuple[int, ...], int]) -> tuple[tuple[int, ...], Any]:
    """Give shape and axes that come back."""
    dims, batch = shape
    while dims and dims[-1] == 1:
        dims = dims[:-1]
    return ((*dims, batch), (*(None for _ in dims), "batch")) if batch > 1 else (dims, None)


def without_modules(keys: Any) -> bool:
    return not any(a != b and b[: len(a)] == a for a in keys for b in keys)


@given(
    st.dictionaries(
        KEYS, st.tuples(DIMS, st.dictionaries(ELEMENTS, SHAPES, max_size=2)), max_size=4
    ).filter(without_modules)
)
def test_planned_files_are_read_back(parameters: Mapping[tuple[str, ...], Any]) -> None:
    tensors = []
    expected: dict[str, Any] = {}
    for key, (dims, stats) in parameters.items():
        for stat, (shape, batch) in {None: (dims, 1), **stats}.items():
            name = variable_name(key, stat)
            axes = (*(None for _ in shape), "batch") if batch > 1 else None
            full = (*shape, batch) if batch > 1 else shape
            tensors.append(tensor(name, full, dims=axes))
            expected[name] = as_read((shape, batch))
    index = draft_of(*tensors)
    data = written(index)
    copy = read(data)
    assert copy.attrs == {"data_type": "Model"}
    assert {name: (tensor.shape, tensor.dims) for name, tensor in copy.tensors.items()} == expected
    keys = [
        tuple(tensor.attrs["key"]) for tensor in copy.tensors.values() if "stat" not in tensor.attrs
    ]
    assert keys == sorted(
        parameters, key=lambda key: [e.encode("utf-8", "surrogateescape") for e in key]
    )
    assert values_of(copy, data) == noise(index)
    assert materialize(primitiv.plan(drafted(copy)), values_of(copy, data)) == data


@given(KEYS, st.none() | ELEMENTS)
def test_names_are_split_into_keys(key: tuple[str, ...], stat: str | None) -> None:
    assert key_and_stat(tensor(variable_name(key, stat))) == (key, stat)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("100%", ["100%"]),
        ("a..b", ["a", "", "b"]),
        ("", [""]),
        ("w:0", ["w:0"]),
        ("a.w:b:c", ["a", "w:b:c"]),
        ("%C3%A9", ["%C3%A9"]),
        ("%2e", ["%2e"]),
        ("a%2Eb", ["a.b"]),
    ],
)
def test_names_of_other_formats(name: str, key: list[str]) -> None:
    (copy,) = read(written(named(name))).tensors.values()
    assert copy.attrs["key"] == key
    assert copy.name == variable_name(key)


def test_tree_paths_are_keys() -> None:
    index = draft_of(
        tensor("w@rank_0", path=("rank_0", "w")),
        tensor("a.b.w", path=("a.b", "w")),
        tensor("a.b.w:m", path=("a.b", "w:m")),
        # Renamed: its place is where it was.
        tensor("new.w", path=("old", "w"), attrs={"key": ["old", "w"]}),
    )
    copy = read(written(index))
    assert list(copy.tensors) == ["a%2Eb.w", "a%2Eb.w:m", "new.w", "rank_0.w"]


def test_a_colon_may_be_a_part_of_a_name() -> None:
    copy = read(written(named("w", "w:0", "v:0")))
    assert {name: tensor.attrs.get("stat") for name, tensor in copy.tensors.items()} == {
        "v%3A0": None,
        "w": None,
        "w:0": "0",
    }


def test_parameters_are_sorted_and_statistics_are_not() -> None:
    index = named("b", "a.b", "B", "a%2Eb", "b:z", "b:a")
    assert list(read(written(index)).tensors) == ["B", "a.b", "a%2Eb", "b", "b:z", "b:a"]


def test_trailing_axes_of_length_1_are_dropped() -> None:
    index = draft_of(
        tensor("a", (3, 1, 1)),
        tensor("b", (1, 3)),
        tensor("c", (1, 1)),
        tensor("d", (2, *(1,) * 9)),
        tensor("a:s", (2, 1, 1), dims=("x", "y", "batch")),
        tensor("a:t", (2, 1, 3), dims=("x", "y", "batch")),
    )
    shapes = {name: tensor.shape for name, tensor in read(written(index)).tensors.items()}
    assert shapes == {"a": (3,), "a:s": (2,), "a:t": (2, 3), "b": (1, 3), "c": (), "d": (2,)}


def test_types_of_data() -> None:
    assert read(written(draft_of())).attrs == {"data_type": "Model"}
    single = draft_of(tensor("w", (2, 3), dims=(None, "batch")))
    copy = read(written(single, data_type="Tensor"))
    assert (copy.attrs, list(copy.tensors)) == ({"data_type": "Tensor"}, ["value"])
    assert copy.tensors["value"].dims == (None, "batch")
    two = named("w", "w:Adam.m1")
    copy = read(written(replace(two, attrs={"data_type": "Parameter"})))
    assert (copy.attrs, list(copy.tensors)) == (
        {"data_type": "Parameter"},
        ["value", "value:Adam.m1"],
    )
    assert read(written(copy, data_type="Model")).tensors["value"].attrs == {"key": ["value"]}


SETTINGS = st.dictionaries(ELEMENTS, st.integers(0, 2**32 - 1), max_size=20)
RATES = st.dictionaries(ELEMENTS, st.floats(width=32, allow_nan=False), max_size=20)


@given(SETTINGS, RATES)
def test_settings_of_an_optimizer(integers: dict[str, int], floats: dict[str, float]) -> None:
    copy = read(written(draft_of(uint_configs=integers, float_configs=floats)))
    assert copy.attrs["data_type"] == "Optimizer"
    assert list(copy.attrs["uint_configs"].items()) == list(integers.items())
    assert list(copy.attrs["float_configs"].items()) == list(floats.items())
    assert written(copy) == written(draft_of(uint_configs=integers, float_configs=floats))


def test_learning_rates_are_rounded_to_float32() -> None:
    data = written(draft_of(float_configs={"SGD.eta": 0.1, "n": float("nan")}))
    rates = read(data).attrs["float_configs"]
    assert rates["SGD.eta"] == struct.unpack("f", struct.pack("f", 0.1))[0]
    assert rates["n"] != rates["n"]


@given(DIMS, st.integers(1, 9))
def test_shapes(dims: tuple[int, ...], batch: int) -> None:
    attrs = read(written(draft_of(data_type="Shape", dims=list(dims), batch=batch))).attrs
    assert attrs == {"data_type": "Shape", "dims": list(as_read((dims, 1))[0]), "batch": batch}


def test_capabilities_of_the_format() -> None:
    writer = formats.writable("primitiv")
    can = writer.can
    assert (can.types, can.orders, can.layouts) == (("float32",), ("F",), ("dense",))
    assert (tuple(writer.write_options), can.tensor_attrs) == (("data_type",), ("key", "stat"))
    assert isinstance(can.file_attrs, tuple)
    assert set(can.file_attrs) == {
        "data_type",
        "dims",
        "batch",
        "uint_configs",
        "float_configs",
        "optimizer",
    }


# --- what cannot be written -----------------------------------------------------------------------


def refused(index: Draft, rule: str, name: str | None = None, /, **options: Any) -> str:
    with pytest.raises(UnsupportedError) as caught:
        primitiv.plan(index, **options)
    error = caught.value
    assert (error.rule, error.tensor) == (rule, name)
    assert error.hint
    return str(error)


@pytest.mark.parametrize("dtype", ["float64", "int32", "bfloat16"])
def test_element_types(dtype: str) -> None:
    changed = replace(tensor("w"), dtype=dtype)
    assert dtype in refused(draft_of(changed), "Dtype", "w")


def test_layouts() -> None:
    assert "sparse_csr" in refused(draft_of(tensor("w", layout="sparse_csr")), "Layout", "w")


@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        ((0,), "ShapeSize"),
        ((3, 0, 1), "ShapeSize"),
        ((2**30,), "ShapeSize"),
        ((2**15, 2**15), "ShapeSize"),
        ((2,) * 9, "ShapeDepth"),
    ],
)
def test_tensors_that_are_too_large(shape: tuple[int, ...], rule: str) -> None:
    refused(draft_of(tensor("w", shape)), rule, "w")


def test_the_largest_tensor() -> None:
    plan = primitiv.plan(draft_of(tensor("w", (2**30 - 1,))))
    (planned,) = plan.parts
    assert plan.nbytes == (planned.offset or 0) + 4 * (2**30 - 1) + 5
    assert plan.literals[0].data.endswith(b"\xc6\xff\xff\xff\xfc")


def test_a_batch_of_parameters() -> None:
    index = draft_of(tensor("w", (2, 3), dims=(None, "batch")))
    assert "batch of 3" in refused(index, "Batch", "w")
    assert "batch of 3" in refused(index, "Batch", "w", data_type="Parameter")
    single = draft_of(tensor("w", (2, 1), dims=(None, "batch")))
    assert read(written(single)).tensors["w"].shape == (2,)


def test_keys_without_a_model() -> None:
    assert "'a.b'" in refused(named("a.b", "a"), "Key", "a")
    same = draft_of(tensor("a."), tensor("x", path=("a", "")))
    assert "'a.'" in refused(same, "DuplicateName", "x")
    refused(named("\ud800"), "Key", "\ud800")
    refused(draft_of(tensor("w"), tensor("x", path=("w:\ud800",))), "Statistic", "x")


def test_a_statistic_without_its_parameter() -> None:
    index = draft_of(tensor("a.w:m", attrs={"key": ["a", "w"], "stat": "m"}), tensor("b"))
    assert "'a.w'" in refused(index, "Statistic", "a.w:m")


@pytest.mark.parametrize("data_type", ["Tensor", "Parameter"])
def test_files_of_one_tensor(data_type: str) -> None:
    assert "not 2" in refused(named("a", "b"), "Count", "b", data_type=data_type)
    assert "not 0" in refused(draft_of(), "Count", data_type=data_type)


def test_a_tensor_has_no_statistics() -> None:
    refused(named("a", "a:m"), "Count", "a", data_type="Tensor")


@pytest.mark.parametrize("data_type", ["Shape", "Optimizer"])
def test_files_without_tensors(data_type: str) -> None:
    refused(named("a"), "Count", "a", data_type=data_type)


@pytest.mark.parametrize("attr", ["dims", "batch", "uint_configs", "float_configs", "optimizer"])
@pytest.mark.parametrize("data_type", ["Shape", "Optimizer", "Model"])
def test_attributes_of_other_files(attr: str, data_type: str) -> None:
    index = draft_of(data_type=data_type, **{attr: {}})
    is_own = (data_type == "Shape" and attr in {"dims", "batch"}) or (
        data_type == "Optimizer" and attr not in {"dims", "batch"}
    )
    if not is_own:
        assert attr in refused(index, "Attribute")


@pytest.mark.parametrize(
    "attrs",
    [
        {"dims": 3},
        {"dims": [0]},
        {"dims": [2.0]},
        {"dims": [True]},
        {"dims": [2**16, 2**16]},
        {"batch": 0},
        {"batch": None},
    ],
)
def test_impossible_shapes(attrs: dict[str, Any]) -> None:
    refused(draft_of(**attrs), "ShapeSize", data_type="Shape")


def test_shapes_that_are_too_deep() -> None:
    refused(draft_of(dims=[2] * 9), "ShapeDepth", data_type="Shape")


@pytest.mark.parametrize(
    "attrs",
    [
        {"uint_configs": []},
        {"uint_configs": {"a": -1}},
        {"uint_configs": {"a": 2**32}},
        {"uint_configs": {"a": 1.0}},
        {"uint_configs": {1: 1}},
        {"uint_configs": {"\ud800": 1}},
        {"float_configs": {"a": "0.1"}},
        {"float_configs": {"a": 1e300}},
        {"float_configs": {"a": True}},
        {"uint_configs": {}, "optimizer": "Adam"},
    ],
)
def test_invalid_settings(attrs: dict[str, Any]) -> None:
    refused(draft_of(**attrs), "Settings", data_type="Optimizer")


@pytest.mark.parametrize("data_type", ["model", 3, None])
def test_unknown_data_types(data_type: Any) -> None:
    if data_type is not None:
        refused(draft_of(data_type=data_type), "DataType")
    with pytest.raises(ValueError, match="'Shape', 'Tensor', 'Parameter', 'Model', 'Optimizer'"):
        primitiv.plan(draft_of(), data_type="model")
