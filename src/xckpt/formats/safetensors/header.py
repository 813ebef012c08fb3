"""The header as readers and writers know it: its limits, and the names of element types."""

from __future__ import annotations

__all__ = ["DTYPES", "LARGEST_HEADER", "LENGTH_NBYTES"]

#: Of the length of the header, which comes first.
LENGTH_NBYTES = 8
LARGEST_HEADER = 100_000_000

#: In the order of the package's enumeration of them: it sorts tensors by that, last ones first.
DTYPES = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn",  # two in a byte, the first in its low half
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
