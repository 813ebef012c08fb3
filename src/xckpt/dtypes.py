"""The one table of element types: name, bits in a file, numpy dtype, and what it decodes to.

Names are those of numpy and ml_dtypes, where these have one. A format module maps its own
spelling to these names by a closed table; text from a file is never handed to ``numpy.dtype``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

__all__ = ["ELEMENT_TYPES", "ElementType", "decoded_dtype", "nbytes_of", "stored_dtype"]


@dataclass(frozen=True, slots=True)
class ElementType:
    """How one kind of element is stored and what it becomes.

    Parameters
    ----------
    name : str
        Name in numpy or ml_dtypes, or of our own where neither has such a type.
    bits : int
        Size of one element in a file, in bits; below 8 several share a byte.
    decoded : str
        Name of the numpy type that ``decode=True`` gives.
    carrier : str or None
        Name of the numpy type that ``decode=False`` gives, where neither numpy nor ml_dtypes has
        a type of this name.
    """

    name: str
    bits: int
    decoded: str
    carrier: str | None = None


def _same(name: str, bits: int) -> ElementType:
    return ElementType(name, bits, name)


ELEMENT_TYPES: dict[str, ElementType] = {
    e.name: e
    for e in (
        _same("float64", 64),
        _same("float32", 32),
        _same("float16", 16),
        _same("complex128", 128),
        _same("complex64", 64),
        _same("int64", 64),
        _same("int32", 32),
        _same("int16", 16),
        _same("int8", 8),
        _same("uint64", 64),
        _same("uint32", 32),
        _same("uint16", 16),
        _same("uint8", 8),
        _same("bool", 8),
        # How GPUs that address no single bytes store booleans: any bit set is true.
        ElementType("bool32", 32, "bool", carrier="uint32"),
        # numpy and xarray cannot reduce these (numpy.isdtype refuses them, pydata/xarray#9568).
        ElementType("bfloat16", 16, "float32"),
        ElementType("float8_e4m3fn", 8, "float32"),
        ElementType("float8_e4m3fnuz", 8, "float32"),
        ElementType("float8_e5m2", 8, "float32"),
        ElementType("float8_e5m2fnuz", 8, "float32"),
        ElementType("float8_e8m0fnu", 8, "float32"),
        ElementType("float4_e2m1fn", 4, "float32"),
    )
}


@cache
def _numpy_dtype(name: str) -> np.dtype[Any]:
    import numpy as np

    if name in _NUMPY_NAMES:
        return np.dtype(name)
    import ml_dtypes  # 0.1 s to import: only for files that hold such types

    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


_NUMPY_NAMES = frozenset(e.decoded for e in ELEMENT_TYPES.values())


def stored_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy (or ml_dtypes) dtype of an element type as it is stored."""
    element_type = ELEMENT_TYPES[name]
    return _numpy_dtype(element_type.carrier or element_type.name)


def decoded_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype that an element type decodes to."""
    return _numpy_dtype(ELEMENT_TYPES[name].decoded)


def nbytes_of(name: str, count: int) -> int:
    """Return the size in a file of `count` elements, in bytes."""
    return (ELEMENT_TYPES[name].bits * count + 7) // 8
