"""A writer of small burnpack files in all dialects, for tests.

A tensor is its descriptor with its bytes in place of the offsets.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import cbor2

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

HEADER = 10
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": {"Bool": "Native"},
}
PER_TENSOR = {
    "value": "Q8S",
    "store": "Native",
    "mode": "Symmetric",
    "tensor": None,
    "block": None,
}


def burnpack(tensors: Mapping[str, Any], *, legacy: bool = False, **root: Any) -> bytes:
    """Write a file as burn does: names in order, data in the order given, `root` if not empty."""
    placed: dict[str, Any] = {}
    body = b""
    for name, entry in tensors.items():
        data = entry["data"]
        body += b"" if legacy else bytes(-len(body) % 256)
        offsets = [len(body), len(body) + len(data)]
        body += data
        fields = {key: value for key, value in entry.items() if key != "data"}
        param_id = fields.pop("param_id", None)
        placed[name] = {**fields, "data_offsets": offsets}
        if param_id is not None:
            placed[name]["param_id"] = param_id
    filled = {key: in_order(value) for key, value in root.items() if value}
    metadata = cbor2.dumps({"tensors": in_order(placed), **filled})
    return container(metadata, body, legacy=legacy)


def in_order(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Sort entries as Rust's BTreeMap does."""
    return dict(sorted(entries.items(), key=lambda item: item[0].encode()))


def container(metadata: bytes, body: bytes = b"", *, legacy: bool = False) -> bytes:
    """Put metadata and data in a file."""
    head = b"NRUB" + struct.pack("<HI", 1, len(metadata)) + metadata
    return head + (b"" if legacy else bytes(-len(head) % 256)) + body


def dense(array: np.ndarray, **fields: Any) -> dict[str, Any]:
    """Describe an array."""
    return raw(DTYPES[array.dtype.name], array.shape, array.tobytes(), **fields)


def quantized(
    shape: tuple[int, ...], data: bytes, scheme: Any = PER_TENSOR, **fields: Any
) -> dict[str, Any]:
    """Describe a quantised tensor by its scheme."""
    return raw({"QFloat": scheme}, shape, data, **fields)


def raw(dtype: Any, shape: tuple[int, ...], data: bytes, **fields: Any) -> dict[str, Any]:
    """Describe anything."""
    return {"dtype": dtype, "shape": list(shape), "data": data, **fields}
