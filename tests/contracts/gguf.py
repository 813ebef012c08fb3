"""Golden files of the real writers, and files that are written here byte by byte."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from tests.conftest import golden_files
from tests.contracts.declared import Bad, Declared, Expected, Want, golden_arrays, golden_json
from tests.formats.gguf_files import gguf_file, listed, text
from xckpt.elements import BLOCK_TYPES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# Files that ggml refuses, that break rules for writers, or that have bytes of no tensor.
WARNED = {"align_4_small", "gaps_and_order", "long_names", "metadata_odd", "trailing_bytes"}
# Any type and any count are valid for a metadata value.
NUMBERS = st.sampled_from([0, 1, 2, 4, 8, 9, 12, 13, 31, 32, 64, 255, 1 << 31, (1 << 64) - 1])
BYTES = st.lists(NUMBERS.map(lambda n: struct.pack("<Q", n)), max_size=12).map(b"".join)
VALUES = st.tuples(NUMBERS, BYTES).map(lambda v: struct.pack("<I", v[0] & 0xFFFFFFFF) + v[1])
KEYS = st.sampled_from(["general.alignment", "split.count", "split.no", "general.architecture", ""])
TENSORS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "blk.0.attn_q.weight"]), st.lists(NUMBERS, max_size=5))
    .flatmap(lambda t: st.tuples(st.just(t[0]), st.just(t[1]), NUMBERS, NUMBERS))
    .map(lambda t: (t[0], t[1], t[2] & 0xFFFFFFFF, t[3])),
    max_size=3,
)


class Gguf(Declared):
    """Expected values are those on which ggml and the package gguf agree."""

    def good(self) -> list[Any]:
        return list(golden_files("gguf/*.gguf"))

    def expected(self, path: Path) -> Expected:
        is_split = path.stem.startswith("split-")
        beside = path.with_name("split.gguf") if is_split else path
        content, arrays = golden_json(beside), golden_arrays(beside)
        tensors, stored = {}, {}
        for tensor in content["tensors"]:
            values = arrays[tensor.get("f32_npz", tensor["npz"])]
            block = tensor["ggml_type"].lower()
            name = block if block in BLOCK_TYPES else None
            encoding = {"stored_dtype": name, "layout": "blocks"} if name else {"layout": "dense"}
            exact = not (values.dtype.kind == "f" and np.isnan(values).any())
            tensors[tensor["name"]] = Want(values, encoding, exact=exact)
            data = path.with_name(tensor.get("file", path.name)).read_bytes()
            data = data[tensor["offset"] : tensor["offset"] + tensor["nbytes"]]
            if name:
                stored[f"{tensor['name']}:data"] = data
            elif content.get("byteorder", "little") == "little":
                stored[tensor["name"]] = data
        version = str(content.get("gguf_version", 3))
        attrs, warns = content["metadata"], path.stem in WARNED
        return Expected(tensors, stored, None if is_split else version, attrs, warns=warns)

    def attributes(
        self, actual: Mapping[str, Any], expected: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        return {name: spelled(value) for name, value in actual.items()}

    def bad(self) -> list[Any]:
        return [file for file in golden_files("gguf/bad/*.gguf") if with_verdict(file)]

    def verdict(self, path: Path) -> Bad:
        failures, _, rule = verdict_of(path)
        if rule.startswith(" open"):  # questionable, but to be opened
            return Bad(path, "ok|warn")
        if "every tensor" in rule or "all data" in rule:
            failures = "open|read:blk.0.a"  # the first of them
        return Bad(path, "either" if "either" in failures else failures)

    def small(self) -> dict[str, bytes]:
        tensors = [("a.w", [3, 2], 0, 0), ("a.q", [32], 8, 32)]
        attrs = {
            "general.architecture": text("llama"),
            "llama.block_count": struct.pack("<II", 4, 2),
            "split.count": struct.pack("<IH", 2, 1),
        }
        # One with a list that is left in the file.
        files = {}
        for version, count in ((1, 300), (3, 3)):
            tokens = listed(8, [struct.pack("<Q", 1) + b"t"] * count)
            data = gguf_file(attrs | {"tokens": tokens}, tensors, bytes(96), version=version)
            files[f"version {version}"] = data
        return {**super().small(), **files}

    def hostile(self) -> Mapping[str, st.SearchStrategy[list[bytes]]]:
        def files(entries: dict[str, bytes], tensors: list[Any], version: int) -> list[bytes]:
            return [gguf_file(entries, tensors, bytes(64), version=version)]

        entries = st.dictionaries(KEYS, VALUES, max_size=3)
        return {"metadata": st.builds(files, entries, TENSORS, st.sampled_from([1, 2, 3]))}


def verdict_of(path: Path) -> tuple[str, str, str]:
    return path.with_suffix(".txt").read_text("utf-8").lstrip("[").partition("]")


def with_verdict(file: Any) -> bool:
    """Return whether a file is a test case, not a companion of another file."""
    path = getattr(file, "values", (file,))[0]
    return not hasattr(path, "with_suffix") or not verdict_of(path)[0].startswith("with ")


def spelled(value: Any) -> Any:
    """Spell what JSON does not have as the golden files do."""
    if isinstance(value, bytes):
        return {"__bytes_hex__": value.hex()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": str(value)}
    if isinstance(value, str | int | float):
        return value
    return [spelled(element) for element in value]


DECLARED = Gguf(name="gguf", may_be_cut=True)
