from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import cbor2
import numpy as np
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
from tests.formats.burnpack_files import burnpack, container, dense, quantized, raw
from xckpt import read_index

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# Additions by later releases of burn to one tensor leave the others readable.
LATER = {"dtype_bool_bad_store", "dtype_unknown", "qfloat_unknown_value", "scalars_unknown_variant"}
SCALARS = {"Int": np.int64, "UInt": np.uint64, "Float": np.float64, "Bool": np.bool_}


FIELDS = st.sampled_from(
    [
        *["tensors", "metadata", "scalars", "dtype", "shape", "data_offsets", "param_id", "Bool"],
        *["QFloat", "value", "store", "mode", "tensor", "block", "param", "level", "size", "len"],
        *["storage", "PackedU32", "PackedNative", "Block", "BlockTensor", "global", "Int", "w", ""],
    ]
)
WORDS = st.sampled_from(
    [
        *["F32", "F64", "BF16", "U8", "Bool", "Flex32", "QFloat", "Native", "U32", "Symmetric"],
        *["Lookup", "Q8S", "Q4S", "Q2F", "E4M3", "UE8M0", "F16", "Tensor", "x"],
    ]
)
NUMBERS = st.sampled_from([0, 1, 2, 4, 8, 255, 256, 1 << 40, 1 << 63, (1 << 64) - 1, 1 << 99, -1])
LEAVES = NUMBERS | WORDS | st.none() | st.booleans() | st.floats() | st.binary(max_size=3)
KEYS = FIELDS | FIELDS.map(str.encode) | st.integers(0, 30) | st.text(max_size=2)
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=30,
)
SIZES = st.fixed_dictionaries(
    {"storage": st.lists(st.integers(0, 256), min_size=4, max_size=5), "len": st.integers(0, 6)}
)
SCHEMES = st.fixed_dictionaries(
    {
        "value": WORDS,
        "mode": st.just("Symmetric"),
        "store": st.just("Native") | st.dictionaries(FIELDS, st.integers(0, 3), max_size=1),
        "tensor": st.none() | WORDS,
        "block": st.none() | st.fixed_dictionaries({"size": SIZES, "dtype": WORDS}),
    },
    optional={"level": WORDS | st.fixed_dictionaries({"Block": SIZES}), "param": WORDS},
) | st.fixed_dictionaries(
    {
        "value": WORDS,
        "store": WORDS,
        "mode": WORDS,
        "param": WORDS,
        "level": WORDS | st.fixed_dictionaries({"Block": SIZES}),
    }
)
DESCRIPTORS = st.fixed_dictionaries(
    {
        "dtype": WORDS
        | st.fixed_dictionaries({"Bool": WORDS})
        | st.fixed_dictionaries({"QFloat": SCHEMES}),
        "shape": st.lists(NUMBERS, max_size=3),
        "data_offsets": st.lists(st.integers(0, 40) | NUMBERS, min_size=2, max_size=2),
    },
    optional={"param_id": NUMBERS, "x": ANYTHING},
)


class Burnpack(Declared):
    def good(self) -> list[Any]:
        return [path for path in super().good() if path.with_suffix(".expected.json").exists()]

    def expected(self, path: Path) -> Expected:
        expected, arrays, data = golden_json(path), golden_arrays(path), path.read_bytes()
        # Names may be long: the expectation has their hashes.
        names = {hashlib.sha256(n.encode()).hexdigest(): n for n in read_index(path).tensors}
        tensors, as_stored = {}, {}
        for tensor in expected["tensors"]:
            name, values = names[tensor["name_sha256"]], arrays[tensor["key"]]
            start, end = tensor["file_range"]
            values = widened(values) if tensor["dtype"] == "BF16" else values
            values = values.astype(bool) if "Bool" in tensor["dtype"] else values
            assert hashlib.sha256(data[start:end]).hexdigest() == tensor["sha256"]
            param_id = tensor["param_id"]
            attrs = {"param_id": None if param_id is None else str(param_id)}
            if tensor["dtype"] == "Flex32":
                attrs["burn_dtype"] = "Flex32"
            tensors[name] = Want(values, attrs=attrs)
            if "quant" not in tensor:
                as_stored[name] = data[start:end]
                continue
            for role, field in (("data", "value"), ("scales", "scale"), ("global", "global")):
                if nbytes := tensor[f"{field}_bytes"]:
                    as_stored[f"{name}:{role}"] = data[start : start + nbytes]
                    start += nbytes
            assert as_stored[f"{name}:data"] == arrays[f"{tensor['key']}.q"].tobytes()
        for name, tagged in expected["scalars"].items():
            ((kind, value),) = tagged.items()
            tensors[name] = Want(np.array(value, SCALARS[kind]), attrs={"scalar": kind})
        legacy = expected["layout"].startswith("legacy")
        version = "1-legacy" if legacy else "1"
        return Expected(tensors, as_stored, version, expected["metadata"], complete=False)

    def verdict(self, path: Path) -> Bad:
        return Bad(path, "read" if path.stem in LATER else "open")

    def hostile(self) -> Mapping[str, st.SearchStrategy[list[bytes]]]:
        tensors = st.dictionaries(KEYS, DESCRIPTORS | ANYTHING, max_size=3)
        return {
            "cbor": ANYTHING.map(lambda root: [container(cbor2.dumps(root), bytes(64))]),
            "tensors": st.tuples(tensors, ANYTHING, ANYTHING).map(_rooted),
            "bytes": st.binary(max_size=200).map(
                lambda data: [b"NRUB" + data, container(data, bytes(64))]
            ),
        }

    def small(self) -> dict[str, bytes]:
        tensors = {
            "w": dense(np.arange(6, dtype="<f4").reshape(2, 3), param_id=1 << 63),
            "q": quantized((3,), bytes(3) + np.float32(2).tobytes()),
            "u": raw({"Bool": "U32"}, (2,), bytes([1, 0, 0, 0, 0, 0, 0, 0])),
        }
        more: dict[str, Any] = {"metadata": {"k": "v"}, "scalars": {"lr": {"Float": 0.5}}}
        arrays = {f"legacy {old}": burnpack(tensors, legacy=old, **more) for old in (False, True)}
        return super().small() | arrays


def _rooted(drawn: tuple[Any, Any, Any]) -> list[bytes]:
    """Write tensors in both layouts, and with metadata and scalars."""
    contents = [
        {"tensors": drawn[0]},
        dict(zip(("tensors", "metadata", "scalars"), drawn, strict=True)),
    ]
    return [
        container(cbor2.dumps(root), bytes(64), legacy=legacy)
        for root, legacy in ((contents[0], False), (contents[0], True), (contents[1], False))
    ]


DECLARED = Burnpack(
    name="burnpack",
    good_patterns=["*.bpk", "ckpt/*.bpk"],
    bad_patterns=["bad/*.bpk"],
    guards_data=True,
)
