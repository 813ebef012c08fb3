"""zTensor 1.0, 1.1 and 1.2: components."""

from __future__ import annotations

from typing import Any

import cbor2
import pytest

from tests.formats.ztensor_files import (
    Stored,
    dense_v1,
    dense_v12,
    error_of,
    read,
    stored,
    v1_container,
    v1_file,
    v12_container,
    v12_file,
)
from xckpt import formats
from xckpt.errors import FormatError, UnsupportedError

ztensor = formats.get("ztensor")


def csr(**changes: Any) -> dict[str, Any]:
    """A 2 x 3 matrix with 3 stored values, as 1.0 describes it."""
    components = {
        "values": stored(bytes(12)),
        "indices": stored(bytes(24)),
        "indptr": stored(bytes(24)),
        **changes.pop("components", {}),
    }
    fields = {"dtype": "float32", "shape": [2, 3], "format": "sparse_csr"}
    return {**fields, "components": components, **changes}


def csr_v12(index: str = "u64", **fields: Any) -> dict[str, Any]:
    width = int(index[1:]) // 8
    return {
        "shape": [2, 3],
        "format": "sparse_csr",
        "components": {
            "values": stored(bytes(12), dtype="f32", **fields),
            "indices": stored(bytes(3 * width), dtype=index),
            "indptr": stored(bytes(3 * width), dtype=index),
        },
    }


# Version


@pytest.mark.parametrize(
    ("version", "warnings_shown"),
    [("1.0", 0), ("1.0.0", 0), ("1.0.7", 0), ("1.1", 1), ("1.10.2", 1), ("01.0", 0)],
)
def test_a_newer_minor_version_warns(version: str, warnings_shown: int) -> None:
    index = read(v1_file({}, version=version))
    assert index.version == version
    assert len(index.warnings) == warnings_shown


@pytest.mark.parametrize(("version", "warning_count"), [("1.1.0", 0), ("1.2.0", 0), ("1.3.0", 1)])
def test_minor_versions_up_to_1_2_are_known(version: str, warning_count: int) -> None:
    assert len(read(v12_file({}, version=version)).warnings) == warning_count


@pytest.mark.parametrize(
    "version", ["2.0", "0.1", "banana", "1", "", "1.0.0.0", "1.0\n", "\N{FULLWIDTH DIGIT ONE}.0"]
)
def test_other_versions_fail(version: str) -> None:
    assert error_of(v1_file({}, version=version)).rule == "Version"
    assert error_of(v12_file({}, version=version)).rule == "Version"


@pytest.mark.parametrize("version", [1, 1.0, None, b"1.0"])
def test_a_version_is_text(version: Any) -> None:
    assert error_of(v1_file({}, version=version)).rule == "Schema"


def test_a_version_of_many_digits_is_no_hang() -> None:
    assert error_of(v1_file({}, version="9" * 100_000 + ".0")).rule == "Version"


# Root


def test_attributes_and_generator() -> None:
    attributes = {"license": "MIT", "n": [1, b"\0", None, {"k": 1.5}]}
    index = read(v1_file({}, attributes=attributes, generator="g"))
    assert index.attrs == {**attributes, "generator": "g"}
    index = read(v1_file({}, attributes={"generator": "own"}, generator="g"))
    assert index.attrs == {"generator": "own"}
    assert read(v12_file({}, attributes=None)).attrs == {}


def test_text_that_looks_like_dates_stays_text() -> None:
    tagged = {"when": cbor2.CBORTag(0, "2013-03-21T20:04:00Z"), "what": cbor2.CBORTag(35, "(a+)+$")}
    assert read(v1_file({}, attributes=tagged)).attrs == {
        "when": "2013-03-21T20:04:00Z",
        "what": "(a+)+$",
    }


@pytest.mark.parametrize(
    "root",
    [
        [],
        1,
        "tensors",
        {"version": "1.0"},
        {"version": "1.0", "tensors": []},
        {"version": "1.0", "tensors": {1: {}}},
        {"version": "1.0", "tensors": {"w": []}},
        {"version": "1.0", "tensors": {}, "attributes": []},
        {"version": "1.0", "tensors": {}, "attributes": {1: 2}},
    ],
)
def test_roots_that_break_the_schema(root: Any) -> None:
    assert error_of(v1_container(cbor2.dumps(root))).rule == "Schema"


def test_keys_of_another_minor_version_are_refused() -> None:
    manifest = cbor2.dumps({"version": "1.0", "objects": {}})
    assert error_of(v1_container(manifest)).rule == "Schema"
    manifest = cbor2.dumps({"version": "1.2.0", "tensors": {}})
    assert error_of(v12_container(manifest)).rule == "Schema"


def test_order_and_odd_names() -> None:
    names = ["z", "", "a/b", "ü\N{RIGHT-TO-LEFT OVERRIDE}", "\0", "a" * 5000]
    index = read(v1_file({name: dense_v1(b"\1", [1], "uint8") for name in names}))
    assert list(index.tensors) == names


# Element types


@pytest.mark.parametrize(
    ("dtype", "logical", "expected", "itemsize"),
    [
        ("bf16", None, "bfloat16", 2),
        ("bool", None, "bool", 1),
        ("u8", "f8_e4m3fn", "float8_e4m3fn", 1),
        ("u8", "f8_e4m3", "float8_e4m3fn", 1),
        ("u8", "f8_e5m2fnuz", "float8_e5m2fnuz", 1),
        ("f32", "complex64", "complex64", 8),
        ("f64", "complex128", "complex128", 16),
        ("complex64", None, "complex64", 8),
        ("f8_e5m2", None, "float8_e5m2", 1),
    ],
)
def test_types_of_components(dtype: str, logical: str | None, expected: str, itemsize: int) -> None:
    fields = {} if logical is None else {"type": logical}
    tensor = read(v12_file({"w": dense_v12(bytes(3 * itemsize), [3], dtype, **fields)})).tensors[
        "w"
    ]
    assert tensor.dtype == tensor.parts["data"].dtype == expected
    assert tensor.attrs == fields
    assert tensor.problem is None


def test_the_type_does_not_replace_an_attribute() -> None:
    entry = {**dense_v12(bytes(3), [3], "u8", type="f8_e5m2"), "attributes": {"type": "mine"}}
    assert read(v12_file({"w": entry})).tensors["w"].attrs == {"type": "mine"}


def test_a_type_needs_its_carrier() -> None:
    data = v12_file({"w": dense_v12(bytes(8), [1], "i64", type="complex64")})
    assert error_of(data).rule == "Schema"


@pytest.mark.parametrize("dtype", ["f4", "<f4", "object", "float12", "FLOAT32", "O"])
def test_unknown_types_of_1_0(dtype: str) -> None:
    index = read(
        v1_file({"w": dense_v1(bytes(8), [2], dtype), "v": dense_v1(bytes(8), [2], "float32")})
    )
    tensor = index.tensors["w"]
    assert (tensor.dtype, tensor.shape, tensor.layout) == (dtype, (2,), "dense")
    assert (tensor.parts["data"].dtype, tensor.parts["data"].shape) == ("uint8", (8,))
    assert isinstance(tensor.problem, UnsupportedError)
    assert tensor.problem.tensor == "w"
    assert "drop_variables=['w']" in str(tensor.problem)
    assert index.tensors["v"].problem is None


@pytest.mark.parametrize(
    ("dtype", "fields", "expected"),
    [
        ("f128", {}, "f128"),
        ("u8", {"type": "f6_e3m2"}, "f6_e3m2"),
        ("u8", {"type": "bool"}, "bool"),
    ],
)
def test_unknown_types_of_1_2(dtype: str, fields: dict[str, str], expected: str) -> None:
    for entry in (dense_v12(bytes(16), [1], dtype, **fields), csr_v12(**fields)):
        main = entry["components"].get("data") or entry["components"]["values"]
        main.fields["dtype"] = dtype
        tensor = read(v12_file({"w": entry})).tensors["w"]
        assert tensor.dtype == expected
        assert tensor.layout == entry["format"]
        assert isinstance(tensor.problem, UnsupportedError)


# Encodings, digests


def test_encodings() -> None:
    components: dict[str, dict[str, Any]] = {
        "none": {},
        "raw": {"encoding": "raw"},
        "null": {"encoding": None},
        "zstd": {"encoding": "zstd"},
        "lz4": {"encoding": "lz4"},
    }
    entries = {name: dense_v1(bytes(8), [2], "float32", **c) for name, c in components.items()}
    entries["zstd"]["shape"] = [200]
    tensors = read(v1_file(entries)).tensors
    encodings = {name: tensor.parts["data"].encoding for name, tensor in tensors.items()}
    assert encodings == {"none": None, "raw": None, "null": None, "zstd": "zstd", "lz4": "lz4"}
    assert [name for name, tensor in tensors.items() if tensor.problem] == ["lz4"]
    assert tensors["lz4"].dtype == "float32"


def test_the_decoded_size_of_1_2() -> None:
    entry = dense_v12(bytes(8), [200], "f32", encoding="zstd", uncompressed_length=800)
    assert read(v12_file({"w": entry})).tensors["w"].parts["data"].decoded_nbytes == 800
    entry = dense_v12(bytes(8), [200], "f32", encoding="zstd", uncompressed_length=801)
    assert error_of(v12_file({"w": entry})).rule == "DenseSize"
    entry = dense_v12(bytes(8), [200], "f32", encoding="zstd", uncompressed_length=True)
    assert error_of(v12_file({"w": entry})).rule == "Schema"
    entry = dense_v12(bytes(8), [2], "f32", uncompressed_length=5)
    assert read(v12_file({"w": entry})).tensors["w"].parts["data"].decoded_nbytes is None


@pytest.mark.parametrize("digest", ["crc32c:0xZZ", "crc32c", "", "sha256:00", "crc32c:0x00000000"])
def test_digests_are_checked_when_they_are_used(digest: str) -> None:
    index = read(v1_file({"w": dense_v1(bytes(8), [2], "float32", digest=digest)}))
    assert index.tensors["w"].parts["data"].digest == digest
    assert index.tensors["w"].parts["data"].digest_of == "stored"
    assert index.warnings == ()


def test_an_unknown_digest_algorithm_warns_once() -> None:
    tensors = {f"w{i}": dense_v1(b"", [0], "float32", digest="md5:00") for i in range(3)}
    (warning,) = read(v1_file(tensors)).warnings
    assert "md5" in warning
    assert "'w0'" in warning
    assert "2 more" in warning


# Byte ranges


def at(offset: Any, length: Any) -> bytes:
    """Write two tensors; the second has the given range."""
    tensors = {"t0": dense_v1(bytes(64), [16], "float32"), "t1": dense_v1(b"", [16], "float32")}
    tensors["t1"]["components"]["data"] = {"offset": offset, "length": length}
    return v1_file(tensors)


@pytest.mark.parametrize(
    ("offset", "length", "rule"),
    [
        (-64, 64, "Schema"),
        (64.0, 64, "Schema"),
        (True, 64, "Schema"),
        ("64", 64, "Schema"),
        (None, 64, "Schema"),
        (64, -64, "Schema"),
        (64, None, "Schema"),
        (64, 64.0, "Schema"),
        (1 << 20, 64, "BlobBounds"),
        (64, 1 << 20, "BlobBounds"),
        (64, (1 << 64) - 1, "BlobBounds"),
        ((1 << 64) - 64, 64, "BlobBounds"),
        (64, 60, "DenseSize"),
        (64, 68, "DenseSize"),
    ],
)
def test_ranges_out_of_bounds(offset: Any, length: Any, rule: str) -> None:
    error = error_of(at(offset, length))
    assert (error.rule, error.tensor) == (rule, "t1")


@pytest.mark.parametrize(
    ("offset", "text"), [(65, "multiple of 64"), (0, "head or the manifest"), (128, "overlapping")]
)
def test_odd_ranges_warn_and_are_read(offset: int, text: str) -> None:
    index = read(at(offset, 64))
    assert index.tensors["t1"].parts["data"].offset == offset
    assert any(text in warning and "'t1'" in warning for warning in index.warnings)


def test_shared_ranges_are_allowed() -> None:
    assert read(at(64, 64)).warnings == ()


# Shapes


@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        ("44", "Schema"),
        (None, "Schema"),
        ([-4], "Schema"),
        ([True], "Schema"),
        ([4.0], "Schema"),
        ([[4]], "Schema"),
        ([1] * 65, "Shape"),
        ([1 << 63], "Shape"),
        ([1 << 32, 1 << 32], "Shape"),
        ([1 << 62], "Shape"),
        ([(1 << 62) + 1, 1], "Shape"),
        ([1 << 40, 1 << 40, 0], "Shape"),
        ([0, 1 << 62], "Shape"),
        ([5], "DenseSize"),
        ([], "DenseSize"),
        ([0], "DenseSize"),
    ],
)
@pytest.mark.parametrize("version", [1, 12])
def test_shapes_that_break_rules(shape: Any, rule: str, version: int) -> None:
    if version == 1:
        data = v1_file({"w": {**dense_v1(bytes(64), [16], "float32"), "shape": shape}})
    else:
        data = v12_file({"w": {**dense_v12(bytes(64), [16], "f32"), "shape": shape}})
    error = error_of(data)
    assert (error.rule, error.tensor) == (rule, "w")


@pytest.mark.parametrize("shape", [[], [1], [0], [0, 1 << 40], [3, 0, 2], [1] * 64])
def test_odd_but_valid_shapes(shape: list[int]) -> None:
    size = 0 if 0 in shape else 4
    tensor = read(v1_file({"w": dense_v1(bytes(size), shape, "float32")})).tensors["w"]
    assert tensor.shape == tensor.parts["data"].shape == tuple(shape)


# Layouts


@pytest.mark.parametrize(
    "entry",
    [
        {**dense_v1(bytes(4), [1], "float32"), "components": None},
        {**dense_v1(bytes(4), [1], "float32"), "components": []},
        {**dense_v1(bytes(4), [1], "float32"), "components": {"data": 5}},
        {**dense_v1(bytes(4), [1], "float32"), "format": None},
        {**dense_v1(bytes(4), [1], "float32"), "dtype": None},
        {**dense_v1(bytes(4), [1], "float32"), "dtype": ["float32"]},
        dense_v1(bytes(4), [1], "float32", encoding=["raw"]),
        dense_v1(bytes(4), [1], "float32", digest=5),
        {**dense_v1(bytes(4), [1], "float32"), "attributes": 5},
        {**dense_v1(bytes(4), [1], "float32"), "format": "acme", "components": {"x": 5}},
        {**dense_v1(bytes(4), [1], "float32"), "format": "acme", "components": {5: {}}},
    ],
)
def test_entries_that_break_the_schema(entry: dict[str, Any]) -> None:
    error = error_of(v1_file({"w": entry}))
    assert (error.rule, error.tensor) == ("Schema", "w")


def test_csr_of_1_0_has_64_bit_indices() -> None:
    tensor = read(v1_file({"w": csr()})).tensors["w"]
    assert (tensor.layout, tensor.dtype) == ("sparse_csr", "float32")
    assert {role: (part.dtype, part.shape) for role, part in tensor.parts.items()} == {
        "values": ("float32", (3,)),
        "indices": ("uint64", (3,)),
        "indptr": ("uint64", (3,)),
    }


@pytest.mark.parametrize("index", ["u64", "i64", "u32", "i32", "u16", "u8"])
def test_csr_of_1_2_states_its_index_type(index: str) -> None:
    tensor = read(v12_file({"w": csr_v12(index)})).tensors["w"]
    kind = "uint" if index[0] == "u" else "int"
    assert tensor.parts["indptr"].dtype == kind + index[1:]
    assert tensor.parts["indices"].shape == (3,)


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [2, 3, 1]},
        {"shape": [3, 3]},
        {"components": {"indptr": stored(bytes(32))}},
        {"components": {"indptr": stored(bytes(23))}},
        {"components": {"indices": stored(bytes(20))}},
        {"components": {"indices": stored(bytes(16))}},
        {"components": {"values": stored(bytes(8))}},
        {"components": {"values": stored(bytes(13))}},
    ],
)
def test_csr_of_the_wrong_size(changes: dict[str, Any]) -> None:
    index = read(v1_file({"w": csr(**changes), "v": csr()}))
    assert_misassembled(index.tensors["w"])
    assert index.tensors["v"].problem is None


def assert_misassembled(tensor: Any) -> None:
    """Check that a tensor is listed, and that reading it names the broken rule."""
    assert tensor.layout.startswith("sparse_c")
    assert isinstance(tensor.problem, FormatError)
    assert (tensor.problem.rule, tensor.problem.tensor) == ("LayoutRule", tensor.name)
    assert tensor.problem.offset is not None
    assert tensor.problem.__traceback__ is None
    assert {len(part.shape) for part in tensor.parts.values() if part.shape is not None} <= {1}


@pytest.mark.parametrize("role", ["values", "indices", "indptr"])
def test_csr_needs_its_components(role: str) -> None:
    entry = csr()
    del entry["components"][role]
    assert error_of(v1_file({"w": entry})).rule == "LayoutRule"


def test_float_indices_are_refused() -> None:
    entry = csr_v12()
    entry["components"]["indices"].fields["dtype"] = "f64"
    assert_misassembled(read(v12_file({"w": entry})).tensors["w"])


def test_sizes_of_compressed_csr_follow_from_raw_parts() -> None:
    zstd = stored(b"?", encoding="zstd")
    for compressed, expected in [
        (("values", "indices", "indptr"), None),
        (("values",), (3,)),
        (("indices", "indptr"), (3,)),
    ]:
        parts = read(v1_file({"w": csr(components=dict.fromkeys(compressed, zstd))})).tensors["w"]
        assert parts.parts["values"].shape == parts.parts["indices"].shape == expected
        assert parts.parts["indptr"].shape == (3,)


@pytest.mark.parametrize(
    ("shape", "coords", "values", "shapes"),
    [
        ([3, 4], bytes(32), bytes(8), ((2, 2), (2,))),
        ([9], bytes(8), bytes(4), ((1, 1), (1,))),
        ([2, 2, 2], b"", b"", ((3, 0), (0,))),
        ([3, 4], bytes(32), stored(b"?", encoding="zstd"), ((2, 2), (2,))),
        ([3, 4], stored(b"?", encoding="zstd"), bytes(8), ((2, 2), (2,))),
        ([3, 4], stored(b"?", encoding="zstd"), stored(b"?", encoding="zstd"), (None, None)),
    ],
)
def test_coo(shape: list[int], coords: Any, values: Any, shapes: tuple[Any, Any]) -> None:
    tensor = read(v1_file({"w": coo(shape, coords, values)})).tensors["w"]
    assert tensor.layout == "sparse_coo"
    assert (tensor.parts["coords"].shape, tensor.parts["values"].shape) == shapes
    assert tensor.parts["coords"].dtype == "uint64"


def coo(shape: list[int], coords: Any, values: Any) -> dict[str, Any]:
    parts = {"coords": coords, "values": values}
    return {
        "dtype": "float32",
        "shape": shape,
        "format": "sparse_coo",
        "components": {
            role: part if isinstance(part, Stored) else stored(part) for role, part in parts.items()
        },
    }


@pytest.mark.parametrize(
    ("shape", "coords", "values"),
    [
        ([], b"", b""),
        ([3, 4], bytes(24), bytes(4)),
        ([3, 4], bytes(33), bytes(8)),
        ([3, 4], bytes(32), bytes(12)),
        ([3, 4], stored(b"?", encoding="zstd"), bytes(7)),
    ],
)
def test_coo_of_the_wrong_size(shape: list[int], coords: Any, values: Any) -> None:
    assert_misassembled(read(v1_file({"w": coo(shape, coords, values)})).tensors["w"])


def test_other_formats_are_shown_as_their_components() -> None:
    entry = {
        "dtype": "uint8",
        "shape": [4, 4],
        "format": "quantized_4bit",
        "components": {"data": stored(bytes(8)), "scale": stored(b"?", encoding="zstd")},
    }
    tensor = read(v1_file({"q": entry})).tensors["q"]
    assert (tensor.layout, tensor.problem, tensor.dtype) == ("structural", None, "uint8")
    assert {role: (part.dtype, part.shape) for role, part in tensor.parts.items()} == {
        "data": ("uint8", (8,)),
        "scale": ("uint8", None),
    }


def test_components_of_other_formats_have_their_types() -> None:
    entry: dict[str, Any] = {
        "shape": [32, 8],
        "format": "quantized_group",
        "attributes": {"bits": 4},
        "components": {
            "packed_weight": stored(bytes(128), dtype="i32"),
            "scales": stored(bytes(32), dtype="f16", encoding="zstd", uncompressed_length=32),
            "odd": stored(bytes(7), dtype="f32"),
            "new": stored(bytes(6), dtype="f6"),
        },
    }
    tensor = read(v12_file({"q": entry})).tensors["q"]
    assert (tensor.layout, tensor.dtype) == ("structural", "int32")
    assert tensor.attrs == {"bits": 4, "ztensor_layout": "quantized_group"}
    assert {role: (part.dtype, part.shape) for role, part in tensor.parts.items()} == {
        "packed_weight": ("int32", (32,)),
        "scales": ("float16", (16,)),
        "odd": ("uint8", (7,)),
        "new": ("uint8", (6,)),
    }
    entry["components"]["new"].fields["encoding"] = "zstd-seekable"
    assert isinstance(read(v12_file({"q": entry})).tensors["q"].problem, UnsupportedError)


def test_components_that_a_format_does_not_have_are_ignored() -> None:
    entry = dense_v1(bytes(4), [1], "float32")
    entry["components"]["extra"] = stored(bytes(4))
    assert list(read(v1_file({"w": entry})).tensors["w"].parts) == ["data"]
