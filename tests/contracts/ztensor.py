from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard

from tests.contracts.declared import (
    Bad,
    Declared,
    Expected,
    Want,
    golden_arrays,
    golden_json,
    widened,
)
from tests.formats.ztensor_files import dense_v12, stored, v0_file, v1_file, v12_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


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
        attrs = None
        if not expected.get("attributes_unchecked"):
            attrs = dict(expected["attributes"] or {})
            if expected.get("generator"):
                attrs["generator"] = expected["generator"]
        warns = bool(expected["warnings"])
        return Expected(tensors, as_stored, attrs=attrs, warns=warns, complete=False)

    def attributes(self, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> Mapping[str, Any]:
        """Spell bytes as expectations do; who wrote a file is not in all of them."""
        kept = {key: v for key, v in found.items() if key != "generator" or key in wanted}
        text = json.dumps(kept, default=lambda value: {"__bytes_hex__": bytes(value).hex()})
        spelled: dict[str, Any] = json.loads(text)
        return spelled

    def verdict(self, path: Path) -> Bad:
        text = path.with_suffix(".txt").read_text()
        return Bad(path, text[1 : text.index("]")])

    def small(self) -> dict[str, bytes]:
        data = np.arange(6, dtype="<f4").tobytes()
        entry = {"name": "w", "dtype": "float32", "shape": [2, 3], "layout": "dense"}
        components = {
            "values": stored(data[:8]),
            "indices": stored(np.array([1, 2], "<u8").tobytes()),
            "indptr": stored(np.array([0, 1, 2], "<u8").tobytes()),
        }
        packed = {"values": stored(zstandard.compress(data), encoding="zstd")}
        of: dict[str, Any] = {"dtype": "float32", "shape": [2, 3]}
        sparse = {**of, "format": "sparse_csr", "components": components}
        dense = {**of, "format": "dense", "components": {"data": packed["values"]}}
        return {
            **super().small(),
            "0.1": v0_file({**entry, "data": stored(data, encoding="raw")}),
            "1.0 zstd and sparse": v1_file({"s": sparse, "z": dense}),
            "1.2": v12_file({"w": dense_v12(data, [2, 3], "f32")}),
        }


DECLARED = ZTensor(
    name="ztensor",
    good_patterns=["*.zt"],
    bad_patterns=["bad/*.zt"],
    save_options=[{}, {"version": "2"}],
    plan_options={"version": "2"},
    # A head and eight zeros are a file without tensors.
    also_complete=frozenset({("0.1", 16)}),
)
