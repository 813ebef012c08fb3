from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.contracts.declared import (
    Bad,
    Declared,
    Expected,
    Want,
    golden_arrays,
    golden_json,
    widened,
)
from tests.formats.burnpack_files import burnpack, dense, quantized
from xckpt import read_index

if TYPE_CHECKING:
    from pathlib import Path

# What a later burn may have added to one tensor leaves the rest readable.
LATER = {"dtype_bool_bad_store", "dtype_unknown", "qfloat_unknown_value", "scalars_unknown_variant"}
SCALARS = {"Int": np.int64, "UInt": np.uint64, "Float": np.float64, "Bool": np.bool_}


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
            for role, of in (("data", "value"), ("scales", "scale"), ("global", "global")):
                if nbytes := tensor[f"{of}_bytes"]:
                    as_stored[f"{name}:{role}"] = data[start : start + nbytes]
                    start += nbytes
            assert as_stored[f"{name}:data"] == arrays[f"{tensor['key']}.q"].tobytes()
        for name, wanted in expected["scalars"].items():
            ((kind, value),) = wanted.items()
            tensors[name] = Want(np.array(value, SCALARS[kind]), attrs={"scalar": kind})
        legacy = expected["layout"].startswith("legacy")
        version = "1-legacy" if legacy else "1"
        return Expected(tensors, as_stored, version, expected["metadata"], complete=False)

    def verdict(self, path: Path) -> Bad:
        return Bad(path, "read" if path.stem in LATER else "open")

    def small(self) -> dict[str, bytes]:
        tensors = {
            "w": dense(np.arange(6, dtype="<f4").reshape(2, 3), param_id=1 << 63),
            "q": quantized((3,), bytes(3) + np.float32(2).tobytes()),
        }
        more: dict[str, Any] = {"metadata": {"k": "v"}, "scalars": {"lr": {"Float": 0.5}}}
        made = {f"legacy {old}": burnpack(tensors, legacy=old, **more) for old in (False, True)}
        return super().small() | made


DECLARED = Burnpack(
    name="burnpack", good_patterns=["*.bpk", "ckpt/*.bpk"], bad_patterns=["bad/*.bpk"]
)
