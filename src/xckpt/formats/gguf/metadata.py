"""Metadata of GGUF: types of values, and their encoding."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from xckpt.formats import kit

if TYPE_CHECKING:
    from collections.abc import Sequence

# --- types, and writing ---------------------------------------------------------------------------

BOOL, TEXT, LIST = 7, 8, 9
DEEPEST = 16  # levels of lists
NUMBERS = {0: ("uint8", "B"), 1: ("int8", "b"), 2: ("uint16", "H"), 3: ("int16", "h")}
NUMBERS |= {4: ("uint32", "I"), 5: ("int32", "i"), 6: ("float32", "f"), 7: ("bool", "B")}
NUMBERS |= {10: ("uint64", "Q"), 11: ("int64", "q"), 12: ("float64", "d")}
_CODES = {dtype: (kind, code) for kind, (dtype, code) in NUMBERS.items()}


def default_type(values: Sequence[Any], *, in_list: bool) -> str | None:
    """Return the type that numbers are written with by default; None if they are not numbers."""
    kinds = {*map(type, values)}
    types: tuple[str, ...]
    if kinds == {bool}:
        return "bool"
    if kinds == {int}:
        types = ("int32", "uint32", "int64", "uint64")
        types = types if in_list else ("uint32", "int32", "uint64", "int64")
    elif kinds <= {int, float} and values:
        types = ("float32", "float64")
    else:
        return None if values else "int32"
    return next((dtype for dtype in types if _packed(dtype, values) is not None), None)


def _packed(dtype: str, values: Sequence[Any]) -> bytes | None:
    """Return the bytes of numbers as a type; None if the type does not hold their values."""
    layout = struct.Struct(f"<{len(values)}{_CODES[dtype][1]}")
    try:
        data = layout.pack(*values)
    except (struct.error, OverflowError):
        return None
    if dtype == "float32":
        pairs = zip(layout.unpack(data), values, strict=True)
        if any(a != b and (a == a or b == b) for a, b in pairs):  # noqa: PLR0124  NaN
            return None
    return data


def entry(key: str, value: Any, dtype: str | None) -> bytes:
    """Encode an attribute, with its former type `dtype` if that still holds its value."""
    name = kit.check_text("the attribute", key).encode()
    body = None if kit.is_deeper(value, DEEPEST) else _encoded(value, dtype)
    if body is None:
        body = _encoded(kit.check_text("an attribute", kit.as_text(key, value)), None) or b""
    return struct.pack("<Q", len(name)) + name + body


def _encoded(value: Any, dtype: str | None) -> bytes | None:
    """Return a value with its type; None if GGUF has no such type."""
    if _is_text(value):
        return struct.pack("<I", TEXT) + _text(value)
    if isinstance(value, bool | int | float):
        chosen, data = _as_numbers([value], dtype, in_list=False)
        return None if data is None else struct.pack("<I", _CODES[chosen][0]) + data
    if not isinstance(value, list | tuple):
        return None
    if all(map(_is_text, value)) and (value or dtype == "text"):
        head = struct.pack("<IIQ", LIST, TEXT, len(value))
        return head + b"".join([_text(text) for text in value])
    chosen, data = _as_numbers(value, dtype, in_list=True)
    if data is None:
        return None
    return struct.pack("<IIQ", LIST, _CODES[chosen][0], len(value)) + data


def _as_numbers(
    values: Sequence[Any], dtype: str | None, *, in_list: bool
) -> tuple[str, bytes | None]:
    """Return a type and the bytes of numbers: their former type `dtype` if it still holds them."""
    kinds = {*map(type, values)}
    if not kinds <= {bool, int, float} or (bool in kinds and len(kinds) > 1):
        return "", None
    is_same = (dtype == "bool") == (kinds == {bool}) or not values
    if dtype in _CODES and is_same and (float in kinds) <= dtype.startswith("float"):
        data = _packed(dtype, values)
        if data is not None:
            return dtype, data
    chosen = default_type(values, in_list=in_list)
    return ("", None) if chosen is None else (chosen, _packed(chosen, values))


def _is_text(value: Any) -> bool:
    """Return whether a value is a text, or bytes that a reader would not decode as UTF-8."""
    if not isinstance(value, bytes):
        return isinstance(value, str)
    try:
        value.decode()
    except UnicodeDecodeError:
        return True
    return False


def _text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else kit.check_text("an attribute", value).encode()
    return struct.pack("<Q", len(data)) + data
