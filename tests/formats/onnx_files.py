"""Models of ONNX, written byte by byte."""

from __future__ import annotations

from typing import Any

import numpy as np

TYPES = {"float32": 1, "uint8": 2, "int8": 3, "int32": 6, "int64": 7, "float64": 11}


def varint(number: int) -> bytes:
    number &= 0xFFFFFFFFFFFFFFFF
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


def field(number: int, value: Any) -> bytes:
    """Return a field: a number, a text, or bytes."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + bytes(data)


def initializer(name: str, values: Any, **entries: str) -> bytes:
    """Return a tensor with raw data, or with external data if there are entries."""
    array = np.asarray(values)
    head = b"".join([field(1, extent) for extent in array.shape])
    head += field(2, TYPES[array.dtype.name]) + field(8, name)
    if not entries:
        return head + field(9, array.tobytes())
    external = [field(13, field(1, key) + field(2, text)) for key, text in entries.items()]
    return head + b"".join(external) + field(14, 1)


def node(operator: str, inputs: list[str], outputs: list[str], *attributes: bytes) -> bytes:
    names = [field(1, name) for name in inputs] + [field(2, name) for name in outputs]
    return b"".join([*names, field(4, operator), *(field(5, data) for data in attributes)])


def model(*initializers: bytes, nodes: tuple[bytes, ...] = ()) -> bytes:
    """Return a model with tensors in its graph."""
    graph = b"".join([field(1, data) for data in nodes] + [field(5, data) for data in initializers])
    imports = field(8, field(1, "") + field(2, 21))
    return field(1, 10) + field(7, graph + field(2, "graph")) + imports
