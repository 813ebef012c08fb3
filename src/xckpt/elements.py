"""The one table of element types: a row for each says all that the package knows of it.

Names are those of numpy and ml_dtypes, where these have one. A format module maps its own
spelling to these names by a closed table; text from a file is never handed to ``numpy.dtype``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "BLOCK_TYPES",
    "ELEMENT_TYPES",
    "NUMPY_CODES",
    "STRUCT_CODES",
    "BlockType",
    "ElementType",
    "decoded_dtype",
    "element_type_of",
    "nbytes_of",
    "stored_dtype",
    "types_spelled",
]


class Precision(NamedTuple):
    """Which numbers a type of floats has."""

    bits: int  # of the significand, with the hidden one
    least: int  # exponent of the least value
    largest: int  # and of the largest
    exponent_bits: int | None = None  # if NaN and infinities are those of IEEE 754


@dataclass(frozen=True, slots=True)
class ElementType:
    """How one kind of element is stored and what it becomes."""

    name: str  # in numpy or ml_dtypes, or of our own where neither has such a type
    bits: int  # of one element in a file; below 8 several share a byte
    kind: Literal["float", "complex", "integer", "bool"]  # what its values are
    decoded: str  # name of the numpy type that ``decode=True`` gives
    precision: Precision | None = None  # which numbers a float can be, or each of a complex number
    # Name of the numpy type that ``decode=False`` gives, where neither has a type of this name.
    carrier: str | None = None

    @property
    def range(self) -> tuple[int, int] | None:
        """The least integer, and the one after the largest."""
        if self.kind != "integer":
            return None
        half = 1 << self.bits - 1
        return (0, 2 * half) if self.name[0] == "u" else (-half, half)


_ROWS = (
    ElementType("float64", 64, "float", "float64", Precision(53, -1074, 1023, 11)),
    ElementType("float32", 32, "float", "float32", Precision(24, -149, 127, 8)),
    ElementType("complex128", 128, "complex", "complex128", Precision(53, -1074, 1023, 11)),
    ElementType("complex64", 64, "complex", "complex64", Precision(24, -149, 127, 8)),
    ElementType("int64", 64, "integer", "int64"),
    ElementType("int32", 32, "integer", "int32"),
    ElementType("int16", 16, "integer", "int16"),
    ElementType("int8", 8, "integer", "int8"),
    ElementType("uint64", 64, "integer", "uint64"),
    ElementType("uint32", 32, "integer", "uint32"),
    ElementType("uint16", 16, "integer", "uint16"),
    ElementType("uint8", 8, "integer", "uint8"),
    ElementType("bool", 8, "bool", "bool"),
    # How GPUs that address no single bytes store booleans: any bit set is true.
    ElementType("bool32", 32, "bool", "bool", carrier="uint32"),
    # numpy adds these up in their own type: sums overflow at 65504, and stall long before that.
    ElementType("float16", 16, "float", "float32", Precision(11, -24, 15, 5)),
    # numpy and xarray cannot reduce these (numpy.isdtype refuses them, pydata/xarray#9568).
    ElementType("bfloat16", 16, "float", "float32", Precision(8, -133, 127, 8)),
    ElementType("float8_e4m3fn", 8, "float", "float32", Precision(4, -9, 8)),
    ElementType("float8_e4m3fnuz", 8, "float", "float32", Precision(4, -10, 7)),
    ElementType("float8_e5m2", 8, "float", "float32", Precision(3, -16, 15, 5)),
    ElementType("float8_e5m2fnuz", 8, "float", "float32", Precision(3, -17, 15)),
    ElementType("float8_e8m0fnu", 8, "float", "float32", Precision(1, -127, 127)),
    ElementType("float4_e2m1fn", 4, "float", "float32", Precision(2, -1, 2)),
)

ELEMENT_TYPES: dict[str, ElementType] = {row.name: row for row in _ROWS}

# As others write them: PyTorch, Rust, Hugging Face, papers.
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


class BlockType(NamedTuple):
    """A type of quantised elements that share a block with their scales, and decode to float32."""

    name: str  # in ggml, in lower case
    size: int  # elements in a block, which lie along the last axis
    nbytes: int
    # Where its float16 are, which are all that another byte order turns; None where there may be
    # other numbers of several bytes.
    halves: tuple[int, ...] | None = None


_HALVES = {"q4_0": (0,), "q8_0": (0,), "q4_k": (0, 2), "q6_k": (208,), "mxfp4": (), "nvfp4": ()}

BLOCK_TYPES: dict[str, BlockType] = {
    name: BlockType(name, size, nbytes, _HALVES.get(name))
    for size, types in {
        32: {"q4_0": 18, "q4_1": 20, "q5_0": 22, "q5_1": 24, "q8_0": 34, "q8_1": 36}
        | {"iq4_nl": 18, "mxfp4": 17},
        64: {"q2_0": 18, "nvfp4": 36},
        128: {"q1_0": 18},
        256: {"q2_k": 84, "q3_k": 110, "q4_k": 144, "q5_k": 176, "q6_k": 210, "q8_k": 292}
        | {"iq1_s": 50, "iq1_m": 56, "iq2_xxs": 66, "iq2_xs": 74, "iq2_s": 82}
        | {"iq3_xxs": 98, "iq3_s": 110, "iq4_xs": 136, "tq1_0": 54, "tq2_0": 66},
    }.items()
    for name, nbytes in types.items()
}

# The letters of `struct` for types that it has.
STRUCT_CODES = {"int8": "b", "int16": "h", "int32": "i", "int64": "q", "bool": "?"}
STRUCT_CODES |= {"uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q"}
STRUCT_CODES |= {"float16": "e", "float32": "f", "float64": "d"}

_NUMPY_NAMES = frozenset(["float16", *(row.decoded for row in _ROWS)])

# As numpy's files have them after a byte order: a kind, and the size in bytes.
NUMPY_CODES = {
    f"{row.name[0]}{row.bits // 8}": row.name
    for row in sorted(_ROWS, key=lambda row: ("bfiuc".index(row.name[0]), row.bits))
    if row.name in _NUMPY_NAMES
}


@cache
def _numpy_dtype(name: str) -> np.dtype[Any]:
    import numpy as np

    if name in _NUMPY_NAMES:
        return np.dtype(name)
    import ml_dtypes  # 0.1 s to import: only for files that hold such types

    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


def stored_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy (or ml_dtypes) dtype of an element type as it is stored."""
    element_type = ELEMENT_TYPES[name]
    return _numpy_dtype(element_type.carrier or element_type.name)


def element_type_of(dtype: Any) -> str:
    """Return the name of an element type: of one that numpy or PyTorch has, or as others write it.

    Examples
    --------
    >>> element_type_of("bf16"), element_type_of("fp8_e4m3")
    ('bfloat16', 'float8_e4m3fn')
    """
    told = dtype if isinstance(dtype, str) else getattr(dtype, "name", None)
    told = told or getattr(dtype, "__name__", str(dtype))  # a type, or what PyTorch has
    name = _SHORT_FLOAT.sub("float", str(told).lower().removeprefix("torch."))
    name = _ALIASES.get(name, name)
    if name in ELEMENT_TYPES:
        return name
    alike = get_close_matches(name, [*ELEMENT_TYPES, *_ALIASES], n=1)
    hint = f"did you mean {alike[0]!r}?" if alike else f"known: {', '.join(ELEMENT_TYPES)}"
    raise ValueError(f"{dtype!r} is not an element type; {hint}")


def types_spelled(names: str) -> dict[str, str]:
    """Return the element types that a format has under some of the names that others write."""
    return {name: element_type_of(name) for name in names.split()}


def decoded_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype that an element type decodes to."""
    return _numpy_dtype(ELEMENT_TYPES[name].decoded)


def nbytes_of(name: str, count: int) -> int:
    """Return the size in a file of `count` elements, in bytes."""
    return (ELEMENT_TYPES[name].bits * count + 7) // 8
