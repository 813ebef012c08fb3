"""MessagePack objects, and shapes and tensors that are made of them.

They are read without the long ones, and written as primitiv's own writer does.
"""

from __future__ import annotations

from math import prod
from struct import Struct, unpack
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.errors import CheckpointError, FormatError, UnsupportedError
from xckpt.formats import kit
from xckpt.index import Part, Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xckpt.formats.plan import WantedTensor

#: Of a shape, and the number of its elements.
MOST_DIMS, U32 = 8, 1 << 32

# What the bytes of damaged files may claim is no reason to read them as one name.
_LONGEST_TEXT = 1 << 24
_UINT32, _FLOAT32 = 0xCE, 0xCA
_NAMES = {_UINT32: "uint32", _FLOAT32: "float32"}
_INTEGER, _FLOAT = Struct(">BI"), Struct(">Bf")


class LengthType(NamedTuple):
    """A type that begins with a length: its type bytes that are the length too, and the others.

    For each of those, how many bytes of the length follow.
    """

    name: str
    short: range
    long: dict[int, int]

    def pack(self, length: int) -> bytes:
        """Write the length that an object begins with, in the shortest form."""
        if length < len(self.short):
            return bytes([self.short[length]])
        code, width = next((c, w) for c, w in self.long.items() if length < 1 << 8 * w)
        return bytes([code]) + length.to_bytes(width, "big")


STR = LengthType("str", range(0xA0, 0xC0), {0xD9: 1, 0xDA: 2, 0xDB: 4})
BIN = LengthType("bin", range(0), {0xC4: 1, 0xC5: 2, 0xC6: 4})
ARRAY = LengthType("array", range(0x90, 0xA0), {0xDC: 2, 0xDD: 4})
MAP = LengthType("map", range(0x80, 0x90), {0xDE: 2, 0xDF: 4})


class ObjectCursor(kit.Cursor):
    """Reads objects one after the other; only the types that are expected.

    ``msgpack.Unpacker`` cannot jump over data, and its position is not that in the file.
    """

    __slots__ = ()

    def uint32(self, what: str) -> int:
        """Read an integer of type uint32, the only one that primitiv knows."""
        found: int = _INTEGER.unpack(self._number(_UINT32, what))[1]
        return found

    def uint32s(self, count: int, what: str) -> list[int]:
        """Read some integers that follow each other."""
        if 5 * count <= self.left:
            found = self.take(5 * count, what)
            if found[::5].count(_UINT32) == count:
                return list(unpack(">" + "xI" * count, found))
            self.at -= 5 * count
        # One at a time, to find which is wrong.
        return [self.uint32(what) for _ in range(count)]

    def float32(self, what: str) -> float:
        """Read a number of type float32."""
        found: float = _FLOAT.unpack(self._number(_FLOAT32, what))[1]
        return found

    def length(self, kind: LengthType, what: str) -> int:
        """Read the length that an object begins with."""
        code = self.take(1, what)[0]
        if code in kind.short:
            return code - kind.short.start
        self.at -= 1
        width = kind.long.get(code)
        if width is None:
            raise self._mistyped(what, code, kind.name)
        return int.from_bytes(self.take(1 + width, what)[1:], "big")

    def string(self, what: str) -> str:
        """Read a str; a byte that is not UTF-8 becomes a lone surrogate."""
        nbytes = self.length(STR, what)
        if nbytes > _LONGEST_TEXT:
            self._require(nbytes, what)
            reason = f"{what}: {nbytes} bytes, but at most {_LONGEST_TEXT} are read"
            raise UnsupportedError(reason, offset=self.at, rule="TextLength")
        return self.take(nbytes, what).decode("utf-8", "surrogateescape")

    def _number(self, code: int, what: str) -> bytes:
        found = self.take(1, what)[0]
        self.at -= 1
        if found != code:
            raise self._mistyped(what, found, f"0x{code:02x} ({_NAMES[code]})")
        return self.take(5, what)

    def _mistyped(self, what: str, code: int, expected: str) -> FormatError:
        reason = f"{what}: type byte 0x{code:02x}, expected {expected}"
        return FormatError(reason, offset=self.at, rule="Type")

    def _require(self, nbytes: int, what: str) -> None:
        if nbytes > self.left:
            reason = f"{what}: {nbytes} bytes, but the file ends after {self.left}"
            raise FormatError(reason, offset=self.at, rule="EndOfFile", hint=kit.TRUNCATED)


def packed_uint32(*numbers: int) -> bytes:
    """Write integers, each always in 5 bytes."""
    return b"".join([_INTEGER.pack(_UINT32, number) for number in numbers])


def packed_float32(number: float) -> bytes:
    """Write a number, always in 5 bytes."""
    return _FLOAT.pack(_FLOAT32, number)


def packed_string(text: str) -> bytes:
    """Write a str."""
    data = text.encode("utf-8", "surrogateescape")
    return STR.pack(len(data)) + data


# --- shapes and tensors ---------------------------------------------------------------------------


def read_shape(objects: ObjectCursor) -> tuple[list[int], int]:
    """Read dims, without the trailing ones that are 1, and batch."""
    start = objects.at
    count = objects.length(ARRAY, "dims")
    if count > MOST_DIMS:
        reason = f"{count} dims are more than {MOST_DIMS}"
        raise FormatError(reason, offset=start, rule="ShapeDepth")
    *dims, batch = objects.uint32s(count + 1, "dims and batch")
    size = prod(dims) * batch
    if not 0 < size < U32:
        reason = f"dims {dims} and batch {batch} are {size} elements, "
        reason += f"which must be from 1 to {U32 - 1}"
        raise FormatError(reason, offset=start, rule="ShapeSize")
    return trimmed(dims), batch


def packed_shape(dims: Sequence[int], batch: int) -> bytes:
    """Write dims and batch."""
    return ARRAY.pack(len(dims)) + packed_uint32(*dims, batch)


def trimmed(dims: Sequence[int]) -> list[int]:
    """Leave out the trailing dims that are 1, as primitiv does."""
    kept = list(dims)
    while kept and kept[-1] == 1:
        kept.pop()
    return kept


def read_tensor(
    objects: ObjectCursor, name: str, attrs: Mapping[str, Any], path: tuple[str, ...] | None
) -> Tensor:
    """Read the head of a tensor, and go on after its data."""
    try:
        dims, batch = read_shape(objects)
        start = objects.at
        nbytes, expected = objects.length(BIN, "data"), 4 * prod(dims) * batch
        if nbytes != expected:
            reason = f"{nbytes} bytes of data, but the shape needs {expected}"
            raise FormatError(reason, offset=start, rule="DataLength")
        offset = objects.at
        objects.skip(nbytes, "data")
    except CheckpointError as error:
        raise error.located(tensor=name) from None
    # No other axis is sure: keys are the user's own words, and a shape does not tell its role.
    axes = (*(None for _ in dims), "batch") if batch > 1 else None
    shape = (*dims, batch) if batch > 1 else (*dims,)
    parts = {"data": Part("float32", shape, offset, nbytes)}
    return Tensor(name, "float32", shape, parts, order="F", attrs=attrs, dims=axes, path=path)


def packed_tensor(tensor: WantedTensor, *, batched: bool = True) -> tuple[bytes, WantedTensor]:
    """Write the head of a tensor, after checking that it can be stored."""
    has_batch = tensor.dims is not None and tensor.dims[-1:] == ("batch",)
    dims = trimmed(tensor.shape[:-1] if has_batch else tensor.shape)
    batch = tensor.shape[-1] if has_batch else 1
    if 0 in tensor.shape:
        reason, rule = f"the shape {tensor.shape}: primitiv has no empty tensors", "ShapeSize"
        hint = "Leave it out"
    elif 4 * tensor.size >= U32:
        reason, rule = f"{tensor.size} elements, but a tensor has at most 2**30 - 1", "ShapeSize"
        hint = "Split it into several"
    elif len(dims) > MOST_DIMS:
        reason, rule = f"{len(dims)} axes, but primitiv has at most {MOST_DIMS}", "ShapeDepth"
        hint = "Reshape it"
    elif batch > 1 and not batched:
        reason, rule = f"a batch of {batch}: primitiv would not load the parameter", "Batch"
        hint = "Rename its axis 'batch', so that it is one like the others"
    else:
        return packed_shape(dims, batch) + BIN.pack(4 * tensor.size), tensor
    raise refused(tensor, reason, rule, hint)


def refused(tensor: WantedTensor, reason: str, rule: str, hint: str) -> UnsupportedError:
    """Make the error for a tensor that cannot be written."""
    return UnsupportedError(reason, tensor=tensor.name, rule=rule, hint=hint)
