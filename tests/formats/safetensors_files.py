"""A writer of safetensors files for tests, valid or malformed."""

from __future__ import annotations

import json
import struct
from typing import Any


def entry(dtype: str, shape: list[int], begin: int, end: int, **fields: Any) -> dict[str, Any]:
    """Describe a tensor as a header does."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **fields}


def safetensors_file(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """Write a file; the header is an object for JSON, or text, or bytes."""
    text = header if isinstance(header, str | bytes) else json.dumps(header)
    encoded = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + data
