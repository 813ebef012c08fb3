"""Golden files of ONNX, and models that are written here byte by byte."""

from __future__ import annotations

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
from tests.formats.onnx_files import field, initializer, model, node

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

W = np.array([[1.5, -0.0, np.inf], [np.pi, 1e-40, -2]], "f4")
B = np.array([3, 4], "f4")
KEYS = ("ir_version", "producer_name", "producer_version", "model_version", "opset_import")
NUMBERS = st.sampled_from([0, 1, 2, 3, 5, 7, 8, 9, 13, 14, 15, 20, 21, 255, 1 << 31, (1 << 64) - 1])
FIELDS = st.recursive(
    st.builds(field, NUMBERS.filter(lambda n: n < 1 << 60), NUMBERS | st.binary(max_size=9)),
    lambda inner: st.builds(
        field, NUMBERS.filter(lambda n: n < 30), st.lists(inner, max_size=5).map(b"".join)
    ),
)


class Onnx(Declared):
    """onnx decides which values are right."""

    def good(self) -> list[Any]:
        files = [*golden_files("onnx/*.onnx"), *golden_files("onnx/*/model.onnx")]
        # Without the suffix, models whose first field is another one are not recognised.
        return [path for path in files if path.stem not in {"wire_order", "wire_unknown"}]

    def expected(self, path: Path) -> Expected:
        beside = path if path.parent.name == "onnx" else path.parent
        document, arrays = golden_json(beside), golden_arrays(beside)
        tensors = {}
        for tensor in document["tensors"]:
            values = arrays[tensor.get("f32_npz", tensor["npz"])]
            exact = not (values.dtype.kind == "f" and np.isnan(values).any())
            tensors[tensor["name"]] = Want(values, exact=exact)
        tensors |= {tensor["name"]: Want(None) for tensor in document["unreadable"]}
        attrs = {key: value for key, value in document["model"].items() if key in KEYS and value}
        return Expected(tensors, {}, None, attrs, complete=False)

    def attributes(
        self, actual: Mapping[str, Any], expected: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        return {key: value for key, value in actual.items() if key in KEYS and value}

    def bad(self) -> list[Any]:
        return list(golden_files("onnx/bad/*.onnx"))

    def verdict(self, path: Path) -> Bad:
        when = path.with_suffix(".txt").read_text("utf-8").lstrip("[").partition("]")[0]
        return Bad(path, f"open|{when}" if when.startswith("read") else when)

    def small(self) -> dict[str, bytes]:
        constant = field(1, "value") + field(5, initializer("", B)) + field(20, 4)
        nodes = (
            node("Constant", [], ["k"], constant),
            node("Gemm", ["x", "a.w", "a.b"], ["y"], field(1, "transB") + field(3, 1)),
        )
        numbers = field(1, 3) + field(2, 7) + field(8, "n") + field(7, b"\1\2\xff\1")
        return {
            "raw": model(initializer("a.w", W), initializer("a.b", B), nodes=nodes),
            "varints": model(initializer("a.w", W), numbers),
        }

    def large(self, path: Path) -> None:
        arrays = {"a.w": W, "a.b": B, "large": LARGE, "more": -LARGE}
        path.write_bytes(model(*[initializer(name, values) for name, values in arrays.items()]))

    def hostile(self) -> Mapping[str, st.SearchStrategy[list[bytes]]]:
        graphs = st.lists(FIELDS, max_size=5).map(b"".join)
        return {"fields": graphs.map(lambda graph: [field(1, 10) + field(7, graph), graph])}


DECLARED = Onnx(name="onnx", may_be_cut=True)
