from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from tests.contracts.declared import Bad, Declared, Expected, Want, arrays_in, golden_json, widened
from tests.formats.mlcp_files import checkpoint, tensor

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

STORED = {"Bool": "bool", "BFloat16": "bfloat16"}


class Mlcp(Declared):
    def expected(self, path: Path) -> Expected:
        expected, tensors = golden_json(path), {}
        mode = expected.get("payload_mode", "companion")
        arrays = {} if mode == "none" else _arrays(path, expected)
        as_stored = {}
        for key, name, dtype, place in _listed(path, expected):
            encoding = {"stored_dtype": STORED.get(dtype, dtype.lower())}
            values = arrays.get(key)
            if values is None:
                tensors[name] = Want(None, encoding)
                continue
            as_stored[name] = values.tobytes()
            values = widened(values) if dtype == "BFloat16" else values
            tensors[name] = Want(values, encoding | place)
        attrs = {"payload": mode}
        if path.suffix == ".json":
            attrs["format"] = "multishard"
        if "metadata" in expected:
            attrs = {**expected["metadata"], "payload": mode}
        return Expected(tensors, as_stored, expected.get("version_string"), attrs)

    def attributes(
        self, actual: Mapping[str, Any], expected: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Leave out the text of the metadata, which has the same attributes."""
        assert json.loads(actual["metadata_json"]).items() <= actual.items()
        is_all = "timestamp" in expected
        keys = actual.keys() - {"metadata_json"} if is_all else expected.keys()
        return {key: actual[key] for key in keys}

    def verdict(self, path: Path) -> Bad:
        verdict = golden_json(path.with_name("INDEX"), ".json")[path.name]["verdict"]
        return Bad(path, {"reject": "open"}.get(verdict, verdict))

    def small(self) -> dict[str, bytes]:
        weight, step = np.arange(6, dtype="<f4").reshape(2, 3), np.array(7, "<i8")
        bias, empty = np.arange(3, dtype="<f8"), np.zeros((0, 3), "<f4")
        shards = [
            [tensor("a.w", weight), tensor("step", step)],
            [tensor("a.b", bias), tensor("e", empty)],
        ]
        kinds = ("none", "inline", "per_shard", "tail")
        return super().small() | {kind: checkpoint(shards, kind) for kind in kinds}

    def hostile(self) -> Mapping[str, st.SearchStrategy[list[bytes]]]:
        heads = [
            checkpoint([], metadata={"shards": shards})
            for shards in (None, [{"rank": 0}, {"rank": 1}])
        ]
        body = st.binary(max_size=80)
        return {"body": body.map(lambda content: [head + content for head in heads])}


def _arrays(path: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """Load values by ``s{shard}_t{tensor}``; several files may share one set."""
    file_name = expected.get("same_arrays_as", f"{path.name}.expected.npz")
    prefix = path.name.partition(".")[0]
    beside = path.parent / file_name
    arrays_path = (
        beside if beside.exists() else path.parent / f"{prefix}.metadata.json.expected.npz"
    )
    return arrays_in(arrays_path)


def _listed(path: Path, expected: dict[str, Any]) -> list[tuple[str, str, str, dict[str, Any]]]:
    """Return npz key, variable, data type and place of each tensor."""
    source = path.with_name("ms_two_shards_cumoff.metadata.json")
    shards = expected.get("records")
    files = None if shards else expected.get("shards") or golden_json(source)["shards"]
    shards = shards or [shard["tensors"] for shard in files or ()]
    names = [tensor["name"] for shard in shards for tensor in shard]
    listed = []
    for s, shard in enumerate(shards):
        for t, record in enumerate(shard):
            is_unique = names.count(record["name"]) == 1
            name = record["name"] if is_unique else f"{record['name']}@rank_{s}"
            place = {"offset": record["payload_offset"]} if record.get("payload_offset") else {}
            if files and "shards" in expected:
                place = {"shard": files[s]["file"], "offset": record["file_offset"]}
            listed.append((f"s{s}_t{t}", name, record["dtype"], place))
    return listed


DECLARED = Mlcp(
    name="mlcp",
    good_patterns=["*.checkpoint", "*.metadata.json"],
    bad_patterns=["bad/*.checkpoint"],
    may_be_cut=True,  # the records without data
    guards_data=True,
    names_problems=False,  # the data of all are missing
    tolerated={"size_huge": True, "size_mismatch": True},
)
