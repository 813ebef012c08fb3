"""Golden files of Flax, and files that are written here by msgpack."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from tests.conftest import golden_files
from tests.contracts.declared import (
    LARGE,
    Bad,
    Declared,
    Expected,
    Want,
    golden_arrays,
    golden_json,
)
from tests.formats.flax_files import array, chunked, extension, flax_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

W = np.array([[1.5, -0.0, np.inf], [np.pi, 1e-40, -2]], "f4")
B = np.array([3, 4], "f4")
NUMBERS = st.sampled_from([0, 1, 2, 3, 6, 24, 255, -1, 1 << 31, (1 << 64) - 1, None, 1.5, "x"])
SHAPES = NUMBERS | st.lists(NUMBERS, max_size=4)
TYPES = st.sampled_from(["float32", "int4", "bfloat16", "object", "float7", "", None, 3])
BUFFERS = st.sampled_from([0, 1, 6, 24, 255]).map(bytes) | NUMBERS
ARRAYS = st.builds(extension, st.sampled_from([1, 2, 3, 5]), SHAPES, TYPES, BUFFERS)
KEYS = st.sampled_from(["w", "b", "a/b", "", "shape", "chunks", "__msgpack_chunked_array__", "0"])
TREES = st.recursive(
    ARRAYS | NUMBERS, lambda t: st.lists(t, max_size=3) | st.dictionaries(KEYS, t, max_size=4)
)
WARNED = {"other_extensions", "placeholders"}
# Tensors that share a name with another one: the file is refused.
REFUSED = {"same_joined_name"}


class Flax(Declared):
    """Flax decides which values are right."""

    def good(self) -> list[Any]:
        patterns = ("*.msgpack", "checkpoint_30", "sharded/*.json")
        files = [path for pattern in patterns for path in golden_files(f"flax/{pattern}")]
        return [path for path in files if path.stem not in REFUSED]

    def expected(self, path: Path) -> Expected:
        is_index = path.suffix == ".json"
        beside = path.parent.with_name("sharded") if is_index else path
        document, arrays = golden_json(beside), golden_arrays(beside)
        tensors, stored = {}, {}
        for tensor in document["tensors"]:
            values = arrays[tensor.get("f32_npz", tensor["npz"])]
            is_known = tensor["flax_dtype"] == tensor["dtype"] if "flax_dtype" in tensor else True
            exact = not (values.dtype.kind == "f" and np.isnan(values).any())
            tensors[tensor["name"]] = Want(values if is_known else None, exact=exact)
            if is_known and not tensor["dtype"].startswith(("int4", "int2", "uint4", "uint2")):
                stored[tensor["name"]] = arrays[tensor["key"]].tobytes()
        attrs = document["metadata"] if is_index else document["values"]
        is_told = path.stem not in WARNED
        warns = path.stem in WARNED
        return Expected(
            tensors, stored, "", attrs if is_told else None, warns=warns, complete=False
        )

    def attributes(
        self, actual: Mapping[str, Any], expected: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        return {name: spelled(value, expected.get(name)) for name, value in actual.items()}

    def bad(self) -> list[Any]:
        files = golden_files("flax/bad/*.msgpack")
        return [path for path in files if _notes(path).exists()]  # others belong to an index

    def verdict(self, path: Path) -> Bad:
        when = _notes(path).read_text("utf-8").lstrip("[").partition("]")[0]
        return Bad(path, f"open|{when}" if when.startswith("read") else when)

    def small(self) -> dict[str, bytes]:
        tree = {"a": {"w": array(W), "b": array(B)}, "step": 3, "note": "text"}
        codes = np.array([7, 8, 15, 0], "u1")
        return {
            "tree": flax_file(tree),
            "chunks": flax_file({"params": {"w": chunked(W, 4)}, "list": [array(B), 1.5, None]}),
            "narrow": flax_file({"w": array(codes.reshape(2, 2), "int4")}),
        }

    def large(self, path: Path) -> None:
        tree = {"a.w": array(W), "a.b": array(B), "large": array(LARGE), "more": array(-LARGE)}
        path.write_bytes(flax_file(tree))

    def hostile(self) -> Mapping[str, st.SearchStrategy[list[bytes]]]:
        return {"trees": TREES.map(lambda tree: [flax_file(tree)])}


def _notes(path: Path) -> Path:
    return path.with_name(path.name.partition(".")[0] + ".txt")


def spelled(value: Any, like: Any) -> Any:
    """Spell what JSON does not have as the golden files do."""
    if isinstance(value, float) and math.isnan(value):
        return {"__float__": "nan"}
    if type(like) is not dict:
        return value
    [(kind, _)] = like.items()
    if kind == "__complex__":
        return {kind: [complex(value).real, complex(value).imag]}
    return {kind: str(value)}


DECLARED = Flax(name="flax")
