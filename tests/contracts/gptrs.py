from __future__ import annotations

from typing import TYPE_CHECKING

from tests.contracts.declared import (
    Bad,
    Declared,
    Expected,
    Want,
    golden_arrays,
    golden_json,
    widened,
)
from tests.formats.gptrs_files import WRITERS, record

if TYPE_CHECKING:
    from pathlib import Path

import numpy as np

ATTRS = {"requires_grad": "requires_grad", "base_id": "computed_base_id"}


class Gptrs(Declared):
    def expected(self, path: Path) -> Expected:
        expected, arrays = golden_json(path), golden_arrays(path)
        is_checkpoint = expected["magic"] == "GPTRSCHK"
        entries = expected["entries"]
        tensors, as_stored = {}, {}
        for number, entry in enumerate(entries):
            values = arrays[f"k{number}"]
            as_stored[entry["name"]] = values.tobytes()
            attrs = {key: entry.get(of) for key, of in ATTRS.items()}
            where = {"offset": entry["offset"], "nbytes": entry["byte_len"]}
            values = widened(values) if entry["dtype"] == "bf16" else values
            tensors[entry["name"]] = Want(values, where, attrs)
        attrs = {}
        if is_checkpoint:
            known = {key: expected[key] for key in ("kind", "config", "runtime")}
            attrs = {key: value for key, value in known.items() if value or key != "runtime"}
            if any(int(entry.get("stored_base_id") or "0", 16) for entry in entries):
                attrs["ids"] = "stored"
        dialect = "-bincode" if expected["index_encoding"] == "bincode1" else ""
        refused = is_checkpoint and not all(entry["name"].isascii() for entry in entries)
        return Expected(tensors, as_stored, f"{expected['version']}{dialect}", attrs, refused)

    def verdict(self, path: Path) -> Bad:
        verdict = golden_json(path.with_name("INDEX"), ".json")[path.name]["verdict"]
        return Bad(path, {"reject": "open"}.get(verdict, verdict))

    def small(self) -> dict[str, bytes]:
        two = [record("a.w", np.ones((2, 3), "<f4")), record("a.b", np.arange(4, dtype="<i4"))]
        return super().small() | {kind: write(two) for kind, write in WRITERS.items()}


DECLARED = Gptrs(
    name="gptrs",
    good_patterns=["*.bin"],
    bad_patterns=["bad/*.bin"],
    save_options=[{}, {"kind": "gpt", "config": {"n": 1}, "ids": "stored"}],
    tolerated={"config_no_kind": True, "config_runtime_bad": False, "name_empty": False},
)
