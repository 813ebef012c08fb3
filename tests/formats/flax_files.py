"""Files of Flax, written by msgpack."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np

CHUNKED = "__msgpack_chunked_array__"


def extension(code: int, *entries: Any) -> msgpack.ExtType:
    """Return an extension whose body is an array of some entries."""
    return msgpack.ExtType(code, msgpack.packb(entries))


def array(values: Any, dtype: str | None = None) -> msgpack.ExtType:
    """Return a tensor; its element type may have another name."""
    values = np.asarray(values)
    return extension(1, values.shape, dtype or values.dtype.name, values.tobytes())


def chunked(values: Any, size: int) -> dict[str, Any]:
    """Return a tensor in pieces of `size` elements."""
    flat = values.reshape(-1)
    pieces = [array(flat[at : at + size]) for at in range(0, flat.size, size)]
    fields = {"shape": values.shape, "chunks": pieces}
    return {CHUNKED: True} | {
        name: {str(at): entry for at, entry in enumerate(field)} for name, field in fields.items()
    }


def flax_file(tree: Any) -> bytes:
    """Return a file."""
    data: bytes = msgpack.packb(tree)
    return data
