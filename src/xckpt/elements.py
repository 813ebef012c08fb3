"""The table of element types: one row per type, with everything the package knows about it.

Types have the names of numpy and ml_dtypes where these have the type. A format module maps its own
spelling to these names with a closed dictionary; text from a file never reaches ``numpy.dtype``.
Functions that return dtypes or arrays load numpy on demand: format modules work without it.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np

# --- elements -------------------------------------------------------------------------------------


class FloatFormat(NamedTuple):
    """Layout and range of a binary floating-point type."""

    exponent_bits: int
    fraction_bits: int  # as stored, without the implied leading one
    smallest: float  # positive number
    largest: float  # finite number
    is_ieee: bool = False  # infinities, and NaN with payloads, are encoded as IEEE 754 does
    zeros: Literal[0, 1, 2] = 2  # 2 if there is a negative zero

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number with all bits of precision."""
        return self.smallest * 2.0**self.fraction_bits


@dataclass(frozen=True, slots=True)
class ElementType:
    """A kind of element: its size, its values, and its names in numpy and struct."""

    name: str  # in numpy or ml_dtypes; our own if neither has the type
    bits: int  # in a file; elements of less than 8 bits share bytes
    kind: Literal["float", "complex", "integer", "bool"]
    decoded: str  # name of the numpy type that ``decode=True`` returns
    float_format: FloatFormat | None = None  # of a complex type, the format of each component
    numpy_code: str | None = None  # kind and size in bytes, as in ``.npy`` files; None if unknown
    struct_code: str | None = None  # letter of the `struct` module; None if it has no such type
    # numpy type that ``decode=False`` returns, if neither library has a type of this name
    carrier: str | None = None

    @property
    def range(self) -> tuple[int, int] | None:
        """The smallest integer, and the largest plus one; None for other types."""
        if self.kind != "integer":
            return None
        half = 1 << self.bits - 1
        return (0, 2 * half) if self.name[0] == "u" else (-half, half)

    @property
    def fraction_bits(self) -> int:
        """Stored bits of the fraction; 0 for types without fractions."""
        return self.float_format.fraction_bits if self.float_format is not None else 0

    @property
    def is_ieee_float(self) -> bool:
        """True for real types with the infinities and NaN payloads of IEEE 754."""
        return self.kind == "float" and self.float_format is not None and self.float_format.is_ieee

    @property
    def fits_float64(self) -> bool:
        """True if a float64 can represent every value."""
        return self.kind != "complex" and (self.range is None or self.range[1] <= 1 << 53)

    @property
    def zeros(self) -> int:
        """Number of encodings of zero: 2 with a negative zero, 0 for types without a zero."""
        return self.float_format.zeros if self.float_format is not None else 1


_FLOAT64 = FloatFormat(11, 52, 2.0**-1074, sys.float_info.max, is_ieee=True)
_FLOAT32 = FloatFormat(8, 23, 2.0**-149, (2 - 2.0**-23) * 2.0**127, is_ieee=True)
_FLOAT16 = FloatFormat(5, 10, 2.0**-24, 65504.0, is_ieee=True)
_BFLOAT16 = FloatFormat(8, 7, 2.0**-133, (2 - 2.0**-7) * 2.0**127, is_ieee=True)

_ROWS = (
    ElementType("float64", 64, "float", "float64", _FLOAT64, "f8", "d"),
    ElementType("float32", 32, "float", "float32", _FLOAT32, "f4", "f"),
    ElementType("complex128", 128, "complex", "complex128", _FLOAT64, "c16"),
    ElementType("complex64", 64, "complex", "complex64", _FLOAT32, "c8"),
    ElementType("int64", 64, "integer", "int64", None, "i8", "q"),
    ElementType("int32", 32, "integer", "int32", None, "i4", "i"),
    ElementType("int16", 16, "integer", "int16", None, "i2", "h"),
    ElementType("int8", 8, "integer", "int8", None, "i1", "b"),
    ElementType("uint64", 64, "integer", "uint64", None, "u8", "Q"),
    ElementType("uint32", 32, "integer", "uint32", None, "u4", "I"),
    ElementType("uint16", 16, "integer", "uint16", None, "u2", "H"),
    ElementType("uint8", 8, "integer", "uint8", None, "u1", "B"),
    ElementType("bool", 8, "bool", "bool", None, "b1", "?"),
    # Booleans of GPUs that cannot address single bytes: true if any bit is set.
    ElementType("bool32", 32, "bool", "bool", carrier="uint32"),
    # Decoded, because numpy adds float16 in float16: sums overflow at 65504 and stall far below.
    ElementType("float16", 16, "float", "float32", _FLOAT16, "f2", "e"),
    # Decoded, because numpy and xarray cannot reduce the types of ml_dtypes: numpy.isdtype raises
    # (pydata/xarray#9568).
    ElementType("bfloat16", 16, "float", "float32", _BFLOAT16),
    ElementType("float8_e4m3fn", 8, "float", "float32", FloatFormat(4, 3, 2.0**-9, 448.0)),
    ElementType(
        "float8_e4m3fnuz", 8, "float", "float32", FloatFormat(4, 3, 2.0**-10, 240.0, zeros=1)
    ),
    ElementType(
        "float8_e5m2", 8, "float", "float32", FloatFormat(5, 2, 2.0**-16, 57344.0, is_ieee=True)
    ),
    ElementType(
        "float8_e5m2fnuz", 8, "float", "float32", FloatFormat(5, 2, 2.0**-17, 57344.0, zeros=1)
    ),
    ElementType(
        "float8_e3m4", 8, "float", "float32", FloatFormat(3, 4, 2.0**-6, 15.5, is_ieee=True)
    ),
    ElementType(
        "float8_e4m3b11fnuz", 8, "float", "float32", FloatFormat(4, 3, 2.0**-13, 30.0, zeros=1)
    ),
    ElementType(
        "float8_e8m0fnu", 8, "float", "float32", FloatFormat(8, 0, 2.0**-127, 2.0**127, zeros=0)
    ),
    ElementType("float4_e2m1fn", 4, "float", "float32", FloatFormat(2, 1, 0.5, 6.0)),
    *(ElementType(f"int{bits}", bits, "integer", "int8") for bits in (4, 2, 1)),
    *(ElementType(f"uint{bits}", bits, "integer", "uint8") for bits in (4, 2, 1)),
    ElementType(
        "float8_e4m3", 8, "float", "float32", FloatFormat(4, 3, 2.0**-9, 240.0, is_ieee=True)
    ),
    ElementType("float6_e2m3fn", 6, "float", "float32", FloatFormat(2, 3, 2.0**-3, 7.5)),
    ElementType("float6_e3m2fn", 6, "float", "float32", FloatFormat(3, 2, 2.0**-4, 28.0)),
)

#: Types that a tensor in a file can have, by name.
ELEMENT_TYPES: dict[str, ElementType] = {row.name: row for row in _ROWS}

#: Floats that hold weights as they are; smaller ones are codes and need scales.
WIDE_FLOATS = frozenset(
    name for name, row in ELEMENT_TYPES.items() if row.kind == "float" and row.bits >= 16
)
HALF_FLOATS = frozenset(name for name in WIDE_FLOATS if ELEMENT_TYPES[name].bits == 16)

#: Types of numpy by the code that ``.npy`` files have after the byte order.
NUMPY_CODES: dict[str, str] = {row.numpy_code: row.name for row in _ROWS if row.numpy_code}

# Spellings of PyTorch, Rust, Hugging Face and papers.
_ALIASES = {
    **{f"{prefix}{bits}": f"float{bits}" for prefix in ("f", "fp") for bits in (16, 32, 64)},
    **{f"i{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"c{bits}": f"complex{bits}" for bits in (64, 128)},
    "bf16": "bfloat16",
    "half": "float16",
    "double": "float64",
    "float8_e4m3": "float8_e4m3fn",
    "float8_e8m0": "float8_e8m0fnu",
    "float4_e2m1": "float4_e2m1fn",
    "boolean": "bool",
}
_SHORT_FLOAT = re.compile(r"^fp?(?=[48]_)")


def element_type_of(dtype: Any) -> str:
    """Return the name of an element type, given in any spelling or as a dtype of a library."""
    spelling = dtype if isinstance(dtype, str) else getattr(dtype, "name", None)
    spelling = spelling or getattr(dtype, "__name__", str(dtype))  # a class, or a torch.dtype
    name = _SHORT_FLOAT.sub("float", str(spelling).lower().removeprefix("torch."))
    # A text may be the spelling of PyTorch, but a dtype has an exact name.
    name = _ALIASES.get(name, name) if isinstance(dtype, str) or name not in ELEMENT_TYPES else name
    if name in ELEMENT_TYPES:
        return name
    similar = get_close_matches(name, [*ELEMENT_TYPES, *_ALIASES], n=1)
    hint = f"did you mean {similar[0]!r}?" if similar else f"known: {', '.join(ELEMENT_TYPES)}"
    raise ValueError(f"{dtype!r} is not an element type; {hint}")


def nbytes_of(name: str, count: int) -> int:
    """Return the size of `count` elements in a file, in bytes."""
    return (ELEMENT_TYPES[name].bits * count + 7) // 8


@cache
def stored_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype, of numpy or ml_dtypes, of elements as they are stored."""
    import numpy as np

    row = ELEMENT_TYPES[name]
    if row.numpy_code or row.carrier:
        return np.dtype(row.carrier or name)
    import ml_dtypes  # 0.1 s to import: only for files that have such types

    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


@cache
def decoded_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype that an element type decodes to."""
    import numpy as np

    return np.dtype(ELEMENT_TYPES[name].decoded)


@cache
def code_values(name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the values of all bit patterns of whole bytes, of a type of at most 16 bits."""
    # As in ml_dtypes, bits that the type does not use are ignored.
    import numpy as np

    dtype = stored_dtype(name)
    patterns = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}")
    if dtype.kind == "b":
        return np.minimum(patterns, 1).astype(np.float64)
    with np.errstate(invalid="ignore"):  # signalling NaN
        return patterns.view(dtype).astype(np.float64)


# --- blocks ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlockCodes:
    """Position and type of the codes in a block; codes of 4 bits share bytes."""

    start: int  # first byte in the block
    stop: int
    dtype: str  # a key of `ELEMENT_TYPES`
    zero: int = 0  # code of zero


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of quantised elements that share a block with their scales and decode to float32."""

    name: str  # in ggml, in lower case
    size: int  # elements in a block, which lie along the last axis
    nbytes: int
    # Offsets of float16 numbers, if a block has no other numbers of several bytes; None if it may.
    # Another byte order turns these.
    halves: tuple[int, ...] | None = None
    codes: BlockCodes | None = None  # None if codes are split over several places


_BLOCK_ROWS = (
    BlockType("q4_0", 32, 18, (0,), BlockCodes(2, 18, "uint4", zero=8)),
    BlockType("q4_1", 32, 20, None, BlockCodes(4, 20, "uint4")),
    BlockType("q5_0", 32, 22),
    BlockType("q5_1", 32, 24),
    BlockType("q8_0", 32, 34, (0,), BlockCodes(2, 34, "int8")),
    BlockType("q8_1", 32, 36),
    BlockType("iq4_nl", 32, 18, None, BlockCodes(2, 18, "uint4")),
    BlockType("mxfp4", 32, 17, (), BlockCodes(1, 17, "float4_e2m1fn")),
    BlockType("q2_0", 64, 18),
    BlockType("nvfp4", 64, 36, ()),
    BlockType("q1_0", 128, 18),
    BlockType("q2_k", 256, 84),
    BlockType("q3_k", 256, 110),
    BlockType("q4_k", 256, 144, (0, 2), BlockCodes(16, 144, "uint4")),
    BlockType("q5_k", 256, 176),
    BlockType("q6_k", 256, 210, (208,)),
    BlockType("q8_k", 256, 292),
    BlockType("iq1_s", 256, 50),
    BlockType("iq1_m", 256, 56),
    BlockType("iq2_xxs", 256, 66),
    BlockType("iq2_xs", 256, 74),
    BlockType("iq2_s", 256, 82),
    BlockType("iq3_xxs", 256, 98),
    BlockType("iq3_s", 256, 110),
    BlockType("iq4_xs", 256, 136),
    BlockType("tq1_0", 256, 54),
    BlockType("tq2_0", 256, 66),
)

#: Types of blocks by name.
BLOCK_TYPES: dict[str, BlockType] = {row.name: row for row in _BLOCK_ROWS}
