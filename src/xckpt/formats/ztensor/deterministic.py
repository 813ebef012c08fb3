"""Core deterministic CBOR (RFC 8949, section 4.2.1), as version 2 demands.

The canonical encoding of cbor2 is that of RFC 7049: it puts shorter keys first, which is another
order where the keys of one map are of several types.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["encode_deterministic"]

_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY, _MAP = range(6)
_SIMPLE = {False: b"\xf4", True: b"\xf5", None: b"\xf6"}


def encode_deterministic(value: Any) -> bytes:
    """Encode a value.

    Parameters
    ----------
    value : object
        Made of dict, list, str, bytes, int of 64 bits, float, bool and None.

    Returns
    -------
    bytes
        Its one deterministic encoding.

    Examples
    --------
    >>> encode_deterministic({"b": [1, -1], "a": 0.5}).hex(" ")
    'a2 61 61 f9 38 00 61 62 82 01 20'
    """
    pieces: list[bytes] = []
    _encode(value, pieces.append)
    return b"".join(pieces)


def _encode(value: Any, put: Callable[[bytes], None]) -> None:
    kind = type(value)
    if kind is str:
        data = value.encode()
        put(_head(_TEXT, len(data)) + data)
    elif kind is int:
        put(_head(_UNSIGNED, value) if value >= 0 else _head(_NEGATIVE, ~value))
    elif kind is dict:
        put(_head(_MAP, len(value)))
        keys = [(encode_deterministic(key), item) for key, item in value.items()]
        for key, item in sorted(keys, key=itemgetter(0)):
            put(key)
            _encode(item, put)
    elif kind is list:
        put(_head(_ARRAY, len(value)))
        for item in value:
            _encode(item, put)
    elif kind is bytes:
        put(_head(_BYTES, len(value)) + value)
    elif kind is float:
        put(_shortest(value))
    else:
        put(_SIMPLE[value])


def _head(major: int, argument: int) -> bytes:
    if argument < 24:
        return bytes((major << 5 | argument,))
    for code, size in ((24, 1), (25, 2), (26, 4)):
        if argument < 1 << 8 * size:
            return bytes((major << 5 | code,)) + argument.to_bytes(size, "big")
    return bytes((major << 5 | 27,)) + argument.to_bytes(8, "big")


def _shortest(value: float) -> bytes:
    import cbor2

    return cbor2.dumps(value, canonical=True)
