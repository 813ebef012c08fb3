"""Scalars: numbers that the metadata spell out, and their names among those of tensors.

They are read as tensors without axes. A file may have a scalar and a tensor of one name: then the
scalar gets ``:scalar`` after its own, and as many colons as make that free. So does one whose
name would be taken for such a name, so that the names of all variables tell those in the file.
"""

from __future__ import annotations

import struct as binary
from typing import TYPE_CHECKING, Any

from xckpt.errors import UnsupportedError, shown

if TYPE_CHECKING:
    from collections.abc import Container

    from xckpt.formats.plan import WantedTensor

#: Element type, type in CBOR, and struct format, by kind.
KINDS: dict[str, tuple[str, type, str]] = {
    "Int": ("int64", int, "<q"),
    "UInt": ("uint64", int, "<Q"),
    "Float": ("float64", float, "<d"),
    "Bool": ("bool", bool, "<?"),
}
_HELD = {
    "Int": lambda value: type(value) is int and -(1 << 63) <= value < 1 << 63,
    "UInt": lambda value: type(value) is int and 0 <= value < 1 << 64,
    "Float": lambda value: type(value) is float or (type(value) is int and float(value) == value),
    "Bool": lambda value: type(value) is bool,
}
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FORMS = {
    **dict(zip(_INTEGERS, "bhiqBHIQ", strict=True)),
    "float16": "e",
    "float32": "f",
    "float64": "d",
    "bool": "?",
}

_MARK = ":scalar"
# Of marks in a row: beyond, a name gets another one whatever is before.
_MOST_MARKS = 8


class ScalarNames:
    """Names of scalars in a file with some tensors, and those that they are shown under."""

    def __init__(self, tensors: Container[str]) -> None:
        self._tensors = tensors
        self._marked: dict[str, str] = {}

    def shown(self, name: str) -> str:
        """Return the name that a scalar is shown under: no tensor's, and no other scalar's."""
        return self._mark(name) if self._is_taken(name) else name

    def stored(self, name: str) -> str:
        """Return the name in the file of what is shown under a name."""
        own = _unmarked(name)
        if own is not None and name == self._mark(own) and self._is_taken(own):
            return own
        return name

    def _is_taken(self, name: str, marks: int = _MOST_MARKS) -> bool:
        """Whether a tensor has the name, or it is what a scalar gets for such a name."""
        if name in self._tensors:
            return True
        own = _unmarked(name)
        if own is None or name != self._mark(own):
            return False
        return marks == 0 or self._is_taken(own, marks - 1)

    def _mark(self, name: str) -> str:
        marked = self._marked.get(name)
        if marked is None:
            marked = name + _MARK
            while marked in self._tensors:
                marked += ":"
            self._marked[name] = marked
        return marked


def _unmarked(name: str) -> str | None:
    bare = name.rstrip(":")
    return bare.removesuffix(_MARK) if bare.endswith(_MARK) else None


def kind_and_value(tensor: WantedTensor) -> tuple[str, Any]:
    """Return the kind of a scalar that is to be written, and its value."""
    kind, part = tensor.attrs["scalar"], tensor.parts["data"]
    if part.inline is None:
        raise ValueError(f"the scalar {shown(tensor.name)} has no inline value")
    if not isinstance(kind, str) or kind not in KINDS:
        raise _unfit(tensor, f"a scalar of the kind {shown(str(kind))}")
    try:
        value = _value(part.dtype, part.inline)
    except (KeyError, binary.error):
        reason = f"a scalar of the kind {kind} that is {len(part.inline)} bytes of {part.dtype}"
        raise _unfit(tensor, reason) from None
    if not _HELD[kind](value):
        raise _unfit(tensor, f"a scalar of the kind {kind} that is {value!r}")
    return kind, KINDS[kind][1](value)


def _value(dtype: str, data: bytes) -> Any:
    if dtype == "bool32":
        return any(data)
    if dtype == "bfloat16":  # the upper half of a float32
        return binary.unpack("<f", bytes(2) + data)[0]
    return binary.unpack(f"<{_FORMS[dtype]}", data)[0]


def _unfit(tensor: WantedTensor, reason: str) -> UnsupportedError:
    hint = "Kinds are Int and UInt (integers of 64 bits), Float and Bool; without the "
    hint += "attribute 'scalar' it is a tensor"
    return UnsupportedError(reason, tensor=tensor.name, rule="Scalar", hint=hint)
