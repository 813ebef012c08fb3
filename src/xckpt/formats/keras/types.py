"""Element types and attributes of HDF5.

A type is a message: class and version u8, 24 bits, size u32, and fields of the class. Types of
numbers with the layouts of IEEE 754 and of two's complement are those of numpy; h5py writes
booleans as an enumeration, complex numbers as a record, and Keras bfloat16 as opaque bytes.
"""

from __future__ import annotations

from math import prod
from struct import Struct, error, unpack_from
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from xckpt.elements import ELEMENT_TYPES
from xckpt.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable

# Bit offset, precision, place and size of the exponent, place and size of the fraction, and bias.
_FLOATS = {
    (0, 16, 10, 5, 0, 10, 15): "float16",
    (0, 16, 7, 8, 0, 7, 127): "bfloat16",
    (0, 32, 23, 8, 0, 23, 127): "float32",
    (0, 64, 52, 11, 0, 52, 1023): "float64",
}
_OTHERS = {2: "times", 3: "text", 4: "bits", 6: "records", 7: "references"}
_OTHERS |= {8: "enumerations", 9: "sequences", 10: "arrays"}
_MOST_VALUES = 1 << 16


class Element(NamedTuple):
    """An element type; `dtype` is None if it has no equivalent, and `label` describes it."""

    dtype: str | None
    nbytes: int
    byteorder: Literal["little", "big"] = "little"
    label: str = ""


def element(data: bytes) -> tuple[Element, int]:
    """Parse a type; return it and the size of its message."""
    try:
        return _element(data, 0)
    except (error, IndexError, ValueError) as cause:
        raise FormatError("an element type is cut short", rule="Dtype") from cause


def _element(data: bytes, levels: int) -> tuple[Element, int]:
    kind, first, sign, size = unpack_from("<BBBxI", data)
    version, kind = kind >> 4, kind & 15
    order: Literal["little", "big"] = "big" if first & 1 else "little"
    if kind == 0:
        offset, precision = unpack_from("<HH", data, 8)
        name = f"{'' if first & 8 else 'u'}int{precision}"
        is_plain = offset == 0 and precision == 8 * size and name in ELEMENT_TYPES
        return Element(name if is_plain else None, size, order, f"{precision}-bit integers"), 12
    if kind == 1:
        name = _FLOATS.get(unpack_from("<HHBBBBI", data, 8), "")
        is_plain = first & 0x70 == 0x20 and sign == 8 * size - 1 and name != ""
        is_plain = is_plain and ELEMENT_TYPES[name].bits == 8 * size
        return Element(name if is_plain else None, size, order, "floats of another layout"), 20
    if kind == 5:
        return Element(None, size, label=f"opaque values of {size} bytes"), 8 + first
    if kind == 8 and not levels:
        return _enumeration(data, version, first | sign << 8, size)
    if (kind == 11 or (kind == 6 and first | sign << 8 == 2)) and not levels:
        return _complex(data, version, kind, size)
    return Element(None, size, label=_OTHERS.get(kind, f"values of class {kind}")), len(data)


def _complex(data: bytes, version: int, kind: int, size: int) -> tuple[Element, int]:
    """Parse a complex type, or a record of two members, which are the parts of one in h5py."""
    place, members = 8, []
    width = 4 if version < 3 else (size.bit_length() + 7) // 8
    for _ in range(2 if kind == 6 else 1):
        name, at = b"r", 0
        if kind == 6:
            name = data[place : data.index(b"\0", place)]
            place += _padded(len(name) + 1, version)
            at = int.from_bytes(data[place : place + width], "little")
            place += width + 28 * (version == 1)
        member, nbytes = _element(data[place:], 1)
        place += nbytes
        members.append((name, at, member))
    _, _, real = members[0]
    dtype = f"complex{16 * real.nbytes}"
    is_pair = kind == 11 or members == [(b"r", 0, real), (b"i", real.nbytes, real)]
    is_complex = is_pair and size == 2 * real.nbytes and (real.dtype or "").startswith("float")
    is_complex = is_complex and dtype in ELEMENT_TYPES
    return Element(dtype if is_complex else None, size, real.byteorder, "records"), place


def _enumeration(data: bytes, version: int, count: int, size: int) -> tuple[Element, int]:
    """Parse an enumeration; h5py has booleans as one of FALSE and TRUE."""
    base, place = _element(data[8:], 1)
    place += 8
    names = []
    for _ in range(count):
        names.append(data[place : data.index(b"\0", place)])
        place += _padded(len(names[-1]) + 1, version)
    values = data[place : place + count * size]
    is_bool = base.dtype in {"int8", "uint8"} and (names, values) == ([b"FALSE", b"TRUE"], b"\0\1")
    return Element("bool" if is_bool else None, size, label="enumerations"), place + len(values)


def _padded(nbytes: int, version: int) -> int:
    return -(-nbytes // 8) * 8 if version < 3 else nbytes


# --- attributes -----------------------------------------------------------------------------------

_CODES = {
    "bool": "?", "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i",
    "uint32": "I", "int64": "q", "uint64": "Q", "float16": "e", "float32": "f", "float64": "d",
}  # fmt: skip


# `heap` takes the address of a global heap and the number of an object in it.
def decode_attribute(data: bytes, heap: Callable[[int, int], bytes]) -> tuple[str, Any]:
    """Return the name and the value of an attribute; None unless it is text, numbers or a list."""
    try:
        version, flags, names, types, extents = unpack_from("<BBHHH", data)
        start = 9 if version == 3 else 8
        pad = 8 if version == 1 else 1
        ends = [start]
        for nbytes in (names, types, extents):
            ends.append(ends[-1] + -(-nbytes // pad) * pad)
        name = data[start : start + names].split(b"\0")[0].decode()
        kind, space = data[ends[1] : ends[1] + types], data[ends[2] : ends[2] + extents]
        if flags & 3:  # a shared type
            return name, None
        shape = unpack_from(f"<{space[1]}Q", space, 8 if space[0] == 1 else 4)
        is_null = space[0] == 2 and space[3] == 2
        return name, None if is_null else _value(kind, shape, data[ends[3] :], heap)
    except FormatError:
        raise
    except (error, IndexError, ValueError) as cause:
        raise FormatError("an attribute is malformed", rule="Attribute") from cause


def _value(
    kind: bytes, shape: tuple[int, ...], data: bytes, heap: Callable[[int, int], bytes]
) -> Any:
    count = prod(shape)
    (size,) = unpack_from("<I", kind, 4)
    if count * size > len(data) or count > _MOST_VALUES or len(shape) > 1 or not size:
        return None
    parsed = element(kind)[0]
    values: list[Any]
    if kind[0] & 15 == 3 or (kind[0] & 15 == 9 and kind[1] & 15 == 1):
        texts = [data[at : at + size] for at in range(0, count * size, size)]
        if kind[0] & 15 == 9:
            places = [unpack_from("<IQI", text) for text in texts]
            texts = [heap(at, number)[:n] if n else b"" for n, at, number in places]
        values = [text.rstrip(b"\0").decode(errors="replace") for text in texts]
    elif parsed.dtype in _CODES:
        order = ">" if parsed.byteorder == "big" else "<"
        values = list(Struct(f"{order}{count}{_CODES[parsed.dtype]}").unpack_from(data))
    else:
        return None
    return values if shape else values[0]
