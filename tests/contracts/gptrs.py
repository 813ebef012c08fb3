from __future__ import annotations

import json
import struct
from functools import partial
from typing import TYPE_CHECKING, Any

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
from tests.formats.gptrs_files import (
    ARCHIVE,
    CHECKPOINT,
    GPT,
    WRITERS,
    Record,
    indexed_file,
    inline_file,
    record,
    sized,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ATTRS = {"requires_grad": "requires_grad", "base_id": "computed_base_id"}


NAMES = st.text(max_size=12)
EXTENTS = st.lists(st.sampled_from([0, 1, 2, 3, 2**31, 2**63, 2**64 - 1]), max_size=4)
HOSTILE = st.builds(
    Record,
    name=NAMES | st.binary(max_size=5),
    shape=EXTENTS,
    data=st.binary(max_size=24),
    tag=st.integers(0, 5),
    flag=st.integers(0, 255),
    stored_id=st.just(bytes(16)) | st.binary(min_size=16, max_size=16),
    offset=st.none() | st.integers(-100, 100) | st.integers(0, 2**64 - 1),
    nbytes=st.none() | st.integers(0, 30) | st.integers(0, 2**64 - 1),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*GPT, "kind", "config", "runtime"]), inner, max_size=8)
    ),
)


class Gptrs(Declared):
    def expected(self, path: Path) -> Expected:
        expected, arrays = golden_json(path), golden_arrays(path)
        is_checkpoint = expected["magic"] == "GPTRSCHK"
        entries = expected["entries"]
        tensors, as_stored = {}, {}
        for number, entry in enumerate(entries):
            values = arrays[f"k{number}"]
            as_stored[entry["name"]] = values.tobytes()
            attrs = {key: entry.get(field) for key, field in ATTRS.items()}
            encoding = {"offset": entry["offset"], "nbytes": entry["byte_len"]}
            values = widened(values) if entry["dtype"] == "bf16" else values
            tensors[entry["name"]] = Want(values, encoding, attrs)
        attrs = {}
        if is_checkpoint:
            content = {key: expected[key] for key in ("kind", "config", "runtime")}
            attrs = {key: value for key, value in content.items() if value or key != "runtime"}
            if any(int(entry.get("stored_base_id") or "0", 16) for entry in entries):
                attrs["ids"] = "stored"
        dialect = "-bincode" if expected["index_encoding"] == "bincode1" else ""
        refused = is_checkpoint and not all(entry["name"].isascii() for entry in entries)
        return Expected(tensors, as_stored, f"{expected['version']}{dialect}", attrs, refused)

    def verdict(self, path: Path) -> Bad:
        verdict = golden_json(path.with_name("INDEX"), ".json")[path.name]["verdict"]
        return Bad(path, {"reject": "open"}.get(verdict, verdict))

    def hostile(self) -> Mapping[str, st.SearchStrategy[list[bytes]]]:
        any_bytes = st.tuples(
            st.sampled_from([CHECKPOINT, ARCHIVE]), st.integers(0, 3), st.binary(max_size=120)
        )
        return {
            "descriptions": st.tuples(st.lists(HOSTILE, max_size=3), JSON).map(_described),
            "bytes": any_bytes.map(lambda drawn: _begun(*drawn)),
        }

    def small(self) -> dict[str, bytes]:
        two = [record("a.w", np.ones((2, 3), "<f4")), record("a.b", np.arange(4, dtype="<i4"))]
        return super().small() | {kind: write(two) for kind, write in WRITERS.items()}


def _described(drawn: tuple[list[Record], Any]) -> list[bytes]:
    """Write descriptions in all containers, with a config and without."""
    records, config = drawn
    return [
        write(records, conf)
        for conf in (json.dumps(config).encode(), None)
        for write in (indexed_file, partial(indexed_file, bincode=True), inline_file)
    ]


def _begun(magic: bytes, version: int, data: bytes) -> list[bytes]:
    head = magic + struct.pack("<I", version)
    return [head + data, head + sized(b"{}") + sized(data)]


DECLARED = Gptrs(
    name="gptrs",
    good_patterns=["*.bin"],
    bad_patterns=["bad/*.bin"],
    save_options=[{}, {"kind": "gpt", "config": {"n": 1}, "ids": "stored"}],
    tolerated={"config_no_kind": True, "config_runtime_bad": False, "name_empty": False},
)
