from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from tests.contracts.declared import Bad, Declared, Expected, Want, golden_arrays, golden_json
from tests.formats.primitiv_files import (
    MODEL,
    OPTIMIZER,
    PARAMETER,
    SHAPE,
    TENSOR,
    array,
    file,
    mapping,
    model,
    optimizer,
    parameter,
    shape,
    tensor,
    uint32,
)
from tests.formats.primitiv_files import text as text_of
from xckpt.formats.primitiv.models import variable_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# The library itself writes these; their names are not text, which deserves a warning.
WARNED = {"model_non_utf8_names"}


def text(hexed: str) -> str:
    """Spell a name as we do."""
    return bytes.fromhex(hexed).decode("utf-8", "surrogateescape")


def expected_name(entry: dict[str, Any]) -> str:
    """Name the variable of an entry."""
    key = [text(element) for element in entry.get("key_hex", [b"value".hex()])]
    return variable_name(key, text(entry["stat_hex"]) if "stat_hex" in entry else None)


class Primitiv(Declared):
    def good(self) -> list[Any]:
        return [path for path in super().good() if path.with_suffix(".expected.json").exists()]

    def expected(self, path: Path) -> Expected:
        expected, arrays = golden_json(path), golden_arrays(path)
        tensors = {}
        for entry in expected.get("entries", []):
            encoding = {"offset": entry["payload_offset"], "nbytes": entry["payload_nbytes"]}
            key = [text(element) for element in entry["key_hex"]] if "key_hex" in entry else None
            tensors[expected_name(entry)] = Want(arrays[entry["npz"]], encoding, {"key": key})
        attrs = {"data_type": expected["type"]}
        return Expected(tensors, {}, "0.1", attrs, path.stem in WARNED)

    def attributes(
        self, actual: Mapping[str, Any], expected: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Look at what all files have."""
        return {"data_type": actual["data_type"].lower()}

    def verdict(self, path: Path) -> Bad:
        listed: Any = golden_json(path.with_name("manifest"), ".json")
        (expected,) = (entry for entry in listed if entry["file"] == path.name)
        return Bad(path, {"error": "open"}.get(expected["expect"], expected["expect"]))

    def small(self) -> dict[str, bytes]:
        matrix = np.arange(6, dtype="f4").reshape(2, 3)
        moments = ("Adam.m1", tensor(matrix)), ("Adam.m2", tensor(matrix))
        weight, bias = parameter(tensor(matrix), *moments), parameter(tensor(np.array(1, "f4")))
        settings = [("Optimizer.epoch", 3)], [("SGD.eta", 0.5), ("x", 1.0)]
        return {
            **super().small(),
            "shape": file(SHAPE, shape([2, 3], 4)),
            "tensor": file(TENSOR, tensor(np.ones((2, 3)), batched=True)),
            "parameter": file(PARAMETER, weight),
            "model": file(MODEL, model((["a", "w"], weight), (["b"], bias))),
            "optimizer": file(OPTIMIZER, optimizer(*settings)),
        }

    def hostile(self) -> Mapping[str, st.SearchStrategy[list[bytes]]]:
        scalar, vector = tensor(np.array(1, "f4")), tensor(np.arange(2, dtype="f4"))
        name, counts = text_of("a"), [uint32(0), uint32(1)]
        pieces = [scalar, vector, *counts, name, array(name), mapping(), b"\xc4\x04"]
        types = st.sampled_from([SHAPE, TENSOR, PARAMETER, MODEL, OPTIMIZER])
        patched = st.lists(st.sampled_from(pieces)).map(b"".join)
        return {
            "content": st.builds(file, types, st.binary(max_size=200)).map(lambda data: [data]),
            "pieces": st.builds(file, types, patched).map(lambda data: [data]),
        }


DECLARED = Primitiv(
    name="primitiv",
    good_patterns=["*.primitiv", "odd/*.primitiv"],
    bad_patterns=["bad/*.primitiv"],
)
