"""Writers of small primitiv files for tests, valid or malformed."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np

SHAPE, TENSOR, PARAMETER, MODEL, OPTIMIZER = range(0, 0x500, 0x100)

Pair = tuple[bytes | str, bytes]


def uint32(number: int) -> bytes:
    """Write an integer."""
    return b"\xce" + struct.pack(">I", number)


def float32(number: float) -> bytes:
    """Write a float."""
    return b"\xca" + struct.pack(">f", number)


def text(value: bytes | str, form: str = "") -> bytes:
    """Write a str, in the shortest form or a struct form of its length."""
    data = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
    return _header(len(data), 0xA0, 32, {"B": 0xD9, "H": 0xDA, "I": 0xDB}, form) + data


def binary(data: bytes, form: str = "") -> bytes:
    """Write a bin."""
    return _header(len(data), 0, 0, {"B": 0xC4, "H": 0xC5, "I": 0xC6}, form) + data


def array(*items: bytes, form: str = "") -> bytes:
    """Encode an array of encoded elements."""
    return _header(len(items), 0x90, 16, {"H": 0xDC, "I": 0xDD}, form) + b"".join(items)


def mapping(*items: tuple[bytes, bytes], form: str = "") -> bytes:
    """Encode a map of encoded keys and values."""
    body = b"".join(key + value for key, value in items)
    return _header(len(items), 0x80, 16, {"H": 0xDE, "I": 0xDF}, form) + body


def _header(size: int, first: int, short: int, codes: dict[str, int], form: str) -> bytes:
    if not form and size < short:
        return bytes([first + size])
    form = form or next(f for f in codes if size < 256 ** struct.calcsize(f))
    return bytes([codes[form]]) + struct.pack(f">{form}", size)


def shape(dims: Sequence[int], batch: int = 1, form: str = "") -> bytes:
    """Write a Shape."""
    return array(*map(uint32, dims), form=form) + uint32(batch)


def tensor(values: np.ndarray, *, batched: bool = False) -> bytes:
    """Write a Tensor, whose last axis may be the batch."""
    dims, batch = (values.shape[:-1], values.shape[-1]) if batched else (values.shape, 1)
    return shape(dims, batch) + binary(values.astype("<f4").tobytes(order="F"))


def parameter(value: bytes, *stats: Pair) -> bytes:
    """Write a Parameter of a Tensor and of named Tensors."""
    entries = b"".join(text(name) + stat for name, stat in stats)
    return value + uint32(len(stats)) + entries


def model(*parameters: tuple[Iterable[bytes | str], bytes]) -> bytes:
    """Write a Model of keys and Parameters."""
    keyed = [array(*map(text, key)) + written for key, written in parameters]
    return uint32(len(parameters)) + b"".join(keyed)


def optimizer(uints: Iterable[tuple[str, int]], floats: Iterable[tuple[str, float]]) -> bytes:
    """Write an Optimizer."""
    first = mapping(*((text(name), uint32(number)) for name, number in uints))
    return first + mapping(*((text(name), float32(number)) for name, number in floats))


def file(data_type: int, content: bytes, version: tuple[int, int] = (0, 1)) -> bytes:
    """Put a header before what is written already."""
    return b"".join(map(uint32, (*version, data_type))) + content
