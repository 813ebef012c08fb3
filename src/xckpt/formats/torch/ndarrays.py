"""Arrays and numbers of NumPy in a pickle, whose bytes are in the pickle itself."""

from __future__ import annotations

import re
import struct
from math import prod
from typing import Any

from xckpt.elements import ELEMENT_TYPES, nbytes_of
from xckpt.formats import kit
from xckpt.formats.torch.records import Call, data_of, name_of, sizes_of
from xckpt.index import Part, Tensor

__all__ = ["array", "scalar"]

_NUMPY = re.compile(r"([biufc])([1248]|16)")
_KINDS = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}


def _numpy_type(value: Any) -> tuple[str, Any] | None:
    """Return element type and byte order of a type of numpy, None if it is not one of numbers."""
    if type(value) is not Call or name_of(value) != "numpy.dtype":
        return None
    code = value.args[0] if value.args else None
    found = _NUMPY.fullmatch(code) if type(code) is str else None
    mark = value.state[1] if type(value.state) is tuple and len(value.state) > 1 else "|"
    if found is None or mark not in ("<", ">", "|", "="):
        return None
    kind, nbytes = _KINDS[found[1]], int(found[2])
    name = kind if kind == "bool" else f"{kind}{8 * nbytes}"
    return (name, "big" if mark == ">" else "little") if name in ELEMENT_TYPES else None


def scalar(args: tuple[Any, ...]) -> Any:
    """Return the value of a scalar of numpy."""
    kind, data = _numpy_type(args[0]), data_of(args[1])
    if kind is None or data is None or len(data) != nbytes_of(kind[0], 1):
        return None
    mark = ">" if kind[1] == "big" else "<"
    codes = {"float64": "d", "float32": "f", "float16": "e", "bool": "?"}
    if kind[0] in codes:
        return struct.unpack(mark + codes[kind[0]], data)[0]
    if "int" in kind[0]:
        return int.from_bytes(data, kind[1], signed=kind[0][0] == "i")
    return None


def array(name: str, shape: Any, kind: Any, is_fortran: Any, content: Any) -> Tensor | None:
    """Describe an array; None if its elements are not numbers, or it is large."""
    known, data, size = _numpy_type(kind), data_of(content), sizes_of(shape)
    if known is None or data is None or not {*map(type, size)} <= {int} or len(size) > 64:
        return None
    dtype, byteorder = known
    if any(extent < 0 for extent in size) or nbytes_of(dtype, prod(size)) != len(data):
        return None
    if kit.is_oversized(size, dtype):
        return None
    order: Any = "F" if is_fortran is True else "C"
    part = Part(dtype, size, 0, len(data), byteorder=byteorder, inline=data)
    return Tensor(name, dtype, size, {"data": part}, order=order)
