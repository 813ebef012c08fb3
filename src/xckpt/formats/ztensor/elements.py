"""Names of element types in the versions of zTensor, as keys of `xckpt.elements.ELEMENT_TYPES`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xckpt.elements import ELEMENT_TYPES
from xckpt.errors import FormatError, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "BITS",
    "INTEGERS",
    "LONG",
    "REGISTERED_TYPES",
    "SHORT",
    "SHORT_1",
    "TYPES_1",
    "WRITTEN",
    "wrong_carrier",
]

BITS: Mapping[str, int] = {name: element.bits for name, element in ELEMENT_TYPES.items()}

# Version 2 has no boolean: there it is a logical type.
SHORT: Mapping[str, str] = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "u64": "uint64",
    "u32": "uint32",
    "u16": "uint16",
    "u8": "uint8",
}

# The text of version 1.1 lists the last four as element types; its readers and writers have
# them in no version. They cannot be mistaken, so they are read.
SHORT_1: Mapping[str, str] = {
    **SHORT,
    "bool": "bool",
    "f8_e4m3": "float8_e4m3fn",
    "f8_e5m2": "float8_e5m2",
    "complex64": "complex64",
    "complex128": "complex128",
}

# Versions 0.1 and 1.0 use the names of numpy and ml_dtypes, for these only.
LONG: Mapping[str, str] = {name: name for name in (*SHORT.values(), "bool")}

# Logical types of version 2: what they are, and which element type must carry them.
REGISTERED_TYPES: Mapping[str, tuple[str, str]] = {
    "bool": ("bool", "u8"),
    "f8_e4m3fn": ("float8_e4m3fn", "u8"),
    "f8_e5m2": ("float8_e5m2", "u8"),
    "f8_e4m3fnuz": ("float8_e4m3fnuz", "u8"),
    "f8_e5m2fnuz": ("float8_e5m2fnuz", "u8"),
    "f8_e8m0": ("float8_e8m0fnu", "u8"),
    "f4_e2m1": ("float4_e2m1fn", "u8"),
    "complex64": ("complex64", "f32"),
    "complex128": ("complex128", "f64"),
}

# Version 1.2 has fewer, and 1.1 a name that leaves out what the others say.
TYPES_1: Mapping[str, tuple[str, str]] = {
    **{
        name: REGISTERED_TYPES[name]
        for name in (
            "f8_e4m3fn",
            "f8_e5m2",
            "f8_e4m3fnuz",
            "f8_e5m2fnuz",
            "complex64",
            "complex128",
        )
    },
    "f8_e4m3": ("float8_e4m3fn", "u8"),
}

# What version 2 has, and with it every version that is written; wide and common ones first.
WRITTEN = tuple(dict.fromkeys([*LONG, *(dtype for dtype, _ in REGISTERED_TYPES.values())]))

INTEGERS = frozenset(name for name in LONG if name.startswith(("int", "uint")))


def wrong_carrier(logical: str, spelled: str, carrier: str) -> FormatError:
    """Make the error for a logical type that is stored as an element type it does not permit."""
    return FormatError(
        f"the type {logical!r} needs the dtype {carrier!r}, not {shown(spelled)}", rule="Schema"
    )
