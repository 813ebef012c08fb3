from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import cbor2
import google_crc32c
import numpy as np
import xxhash
import zstandard
from hypothesis import strategies as st

from tests.contracts.declared import (
    Bad,
    Declared,
    Expected,
    Want,
    golden_arrays,
    golden_json,
    widened,
)
from tests.formats.ztensor_files import (
    V0_MAGIC,
    V1_MAGIC,
    V2_MAGIC,
    dense_v1,
    dense_v2,
    dense_v12,
    stored,
    v0_container,
    v0_file,
    v1_container,
    v1_file,
    v2_container,
    v2_file,
    v12_container,
    v12_file,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


FIELDS = st.sampled_from(
    [
        *["version", "tensors", "objects", "attributes", "generator", "shards", "name", "offset"],
        *["length", "size", "dtype", "type", "layout", "format", "shape", "encoding", "digest"],
        *["components", "parts", "data", "values", "indices", "indptr", "coords", "blob", "shard"],
        *["checksum", "data_endianness", "decoded_length", "uncompressed_length", "scales"],
        *["bits", "group_size", "axis", "packing", "zero_point", "block_size", "w", ""],
    ]
)
WORDS = st.sampled_from(
    [
        *["1.0", "1.2.0", "f32", "u8", "u64", "float32", "uint8", "dense", "sparse_csr", "raw"],
        *["zt.sparse_csr/1", "zt.sparse_coo/1", "zt.quant_group/1", "zt.mx/1", "gguf.q4_0/1"],
        *["sparse_coo", "sparsecsr", "zstd", "zt.zstd-seekable/1", "f4_e2m1", "xxh3:00", "big"],
    ]
)
NUMBERS = st.sampled_from([0, 1, 2, 8, 9, 64, 4096, 1 << 40, 1 << 63, (1 << 64) - 1, -1, -64])
LEAVES = NUMBERS | WORDS | st.none() | st.booleans() | st.floats() | st.binary(max_size=3)
KEYS = FIELDS | st.integers(0, 30) | st.text(max_size=2)
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=30,
)
ROLES = st.sampled_from(["data", "values", "indices", "indptr", "coords", "scales", "zeros"])
PARTS = st.fixed_dictionaries(
    {},
    optional={
        "dtype": WORDS,
        "type": WORDS,
        "offset": NUMBERS,
        "length": NUMBERS,
        "blob": st.tuples(NUMBERS, NUMBERS).map(list),
        "encoding": WORDS | st.none(),
        "decoded_length": NUMBERS,
        "uncompressed_length": NUMBERS | st.none(),
        "digest": WORDS | st.just("md5:00"),
        "shard": WORDS,
    },
)
TENSORS = st.fixed_dictionaries(
    {},
    optional={
        "name": FIELDS,
        "offset": NUMBERS,
        "size": NUMBERS,
        "dtype": WORDS,
        "shape": st.lists(NUMBERS, max_size=3),
        "format": WORDS,
        "layout": WORDS,
        "components": st.dictionaries(ROLES, PARTS, max_size=4),
        "parts": st.dictionaries(ROLES, PARTS, max_size=4),
        "attributes": ANYTHING,
    },
)
BODY = bytes(4096 * 2)


def contained(manifest: Any) -> list[bytes]:
    encoded = cbor2.dumps(manifest)
    return [
        v0_container(encoded, V0_MAGIC + BODY),
        v1_container(encoded, V1_MAGIC + BODY),
        v12_container(encoded, V1_MAGIC + BODY),
        v2_container(cbor2.dumps(manifest, canonical=True), V2_MAGIC + BODY),
    ]


class ZTensor(Declared):
    def good(self) -> list[Any]:
        return [path for path in super().good() if path.with_suffix(".expected.json").exists()]

    def expected(self, path: Path) -> Expected:
        expected, arrays = golden_json(path), golden_arrays(path)
        tensors: dict[str, Want] = {}
        as_stored: dict[str, bytes] = {}
        for name, tensor in expected["tensors"].items():
            dense, of_parts = tensor["dense"], tensor["parts"].items()
            parts = {f"{name}:{r}": arrays[p["npz"]].tobytes() for r, p in of_parts if "npz" in p}
            if tensor["read"] == "error":
                tensors[name] = Want(None)
            elif dense is None:
                tensors |= {part: Want(data) for part, data in parts.items()}
            else:
                is_bfloat = "bits-of-bfloat16" in dense["stored_as"] and "f32_npz" not in dense
                values = arrays[dense.get("f32_npz", dense["npz"])]
                # ml_dtypes and the expectation may differ in the sign of NaN, which float8 lacks.
                exact = "float8" not in dense["stored_as"]
                tensors[name] = Want(widened(values) if is_bfloat else values, exact=exact)
                if tensor["format"] != "dense":
                    as_stored |= parts
                elif "bits-of" in dense["stored_as"]:
                    as_stored[name] = arrays[dense["npz"]].tobytes()
        for name, tensor in expected["tensors"].items():
            if name in tensors:
                tensors[name] = tensors[name]._replace(attrs=tensor["attributes"] or {})
        attrs = None
        if not expected.get("attributes_unchecked"):
            attrs = dict(expected["attributes"] or {})
            if expected.get("generator"):
                attrs["generator"] = expected["generator"]
        warns = bool(expected["warnings"])
        version = expected["file_version"] and str(expected["file_version"])
        return Expected(tensors, as_stored, version, attrs, warns, complete=False)

    def attributes(
        self, actual: Mapping[str, Any], expected: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Spell bytes as expectations do, and drop the generator where they lack it."""
        selected = {key: v for key, v in actual.items() if key != "generator" or key in expected}
        text = json.dumps(selected, default=lambda value: {"__bytes_hex__": bytes(value).hex()})
        spelled: dict[str, Any] = json.loads(text)
        return spelled

    def verdict(self, path: Path) -> Bad:
        text = path.with_suffix(".txt").read_text()
        return Bad(path, text[1 : text.index("]")])

    def hostile(self) -> Mapping[str, st.SearchStrategy[list[bytes]]]:
        tensors = st.dictionaries(KEYS, TENSORS | ANYTHING, max_size=3)
        magics = st.sampled_from([V0_MAGIC, V1_MAGIC, V2_MAGIC])
        return {
            "cbor": ANYTHING.map(contained),
            "tensors": st.tuples(tensors, st.sampled_from(["1.0", "1.2.0"])).map(_listed),
            "bytes": st.tuples(magics, st.binary(max_size=200)).map(lambda drawn: _framed(*drawn)),
        }

    def small(self) -> dict[str, bytes]:
        data = np.arange(6, dtype="<f4").tobytes()
        crc = f"crc32c:0x{google_crc32c.value(data):08x}"
        entry = {"name": "w", "dtype": "float32", "shape": [2, 3], "layout": "dense"}
        components = {
            "values": stored(data[:8]),
            "indices": stored(np.array([1, 2], "<u8").tobytes()),
            "indptr": stored(np.array([0, 1, 2], "<u8").tobytes()),
        }
        fields: dict[str, Any] = {"dtype": "float32", "shape": [2, 3]}
        sparse = {**fields, "format": "sparse_csr", "components": components}
        packed = stored(zstandard.compress(data), encoding="zstd")
        dense = {**fields, "format": "dense", "components": {"data": packed}}
        attrs = {"k": [1.5, None]}
        later: dict[str, Any] = {
            "w": dense_v2(data, [2, 3], "f32", digest=f"xxh3:{xxhash.xxh3_64_hexdigest(data)}"),
            "z": dense_v2(b"?", [9], "u8", encoding="x/1", decoded_length=9),
        }
        return {
            **super().small(),
            "0.1": v0_file({**entry, "data": stored(data, encoding="raw", checksum=crc)}),
            "1.0": v1_file(
                {"w": dense_v1(data, [2, 3], "float32", digest=crc), "s": sparse, "z": dense},
                attributes=attrs,
            ),
            "1.2": v12_file(
                {
                    "w": dense_v12(data, [2, 3], "f32"),
                    "z": dense_v12(packed.data, [6], "f32", encoding="zstd"),
                }
            ),
            "2": v2_file(later, attributes=attrs),
        }


def _listed(drawn: tuple[dict[Any, Any], str]) -> list[bytes]:
    """Write tensors as all versions list them."""
    tensors, version = drawn
    root = {"version": version, "tensors": tensors, "objects": tensors}
    return [contained(list(tensors.values()))[0], *contained(root)]


def _framed(magic: bytes, data: bytes) -> list[bytes]:
    return [magic + data, magic + data + magic]


DECLARED = ZTensor(
    name="ztensor",
    good_patterns=["*.zt"],
    bad_patterns=["bad/*.zt"],
    save_options=[{}, {"version": "2"}],
    plan_options={"version": "2"},
    # A head and eight zeros are a file without tensors.
    also_complete=frozenset({("0.1", 16)}),
)
