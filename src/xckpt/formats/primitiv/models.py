"""The components of a file: MessagePack objects, shapes, tensors, parameters, and models.

The reader skips long objects, and the writer produces the same bytes as primitiv. The names of
variables, and their positions in a tree, come from the keys of parameters, which are lists of any
texts. Bytes of a key that are not UTF-8 become lone surrogates, by Python's error handler
"surrogateescape".
"""

from __future__ import annotations

import re
from itertools import pairwise
from math import prod
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from xckpt.errors import CheckpointError, FormatError, UnsupportedError, shown
from xckpt.formats import kit
from xckpt.index import Part, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from xckpt.formats.plan import Draft, WantedTensor

    # Pieces of a file to write: bytes, and tensors for their data.
    Pieces = Iterator[bytes | WantedTensor]

#: Limits of a shape: number of dims, and number of elements.
MOST_DIMS, U32 = 8, 1 << 32

# A limit for names, since the lengths in damaged files may be anything.
_LONGEST_TEXT = 1 << 24
_UINT32, _FLOAT32 = 0xCE, 0xCA
_NAMES = {_UINT32: "uint32", _FLOAT32: "float32"}
_INTEGER, _FLOAT = Struct(">BI"), Struct(">Bf")


class LengthType(NamedTuple):
    """A type of objects with a length."""

    name: str
    short: range  # type bytes that include the length
    long: dict[int, int]  # other type bytes: the size in bytes of the length that follows

    def pack(self, length: int) -> bytes:
        """Encode the type and the length of an object in the shortest form."""
        if length < len(self.short):
            return bytes([self.short[length]])
        code, width = next((c, w) for c, w in self.long.items() if length < 1 << 8 * w)
        return bytes([code]) + length.to_bytes(width, "big")


STR = LengthType("str", range(0xA0, 0xC0), {0xD9: 1, 0xDA: 2, 0xDB: 4})
BIN = LengthType("bin", range(0), {0xC4: 1, 0xC5: 2, 0xC6: 4})
ARRAY = LengthType("array", range(0x90, 0xA0), {0xDC: 2, 0xDD: 4})
MAP = LengthType("map", range(0x80, 0x90), {0xDE: 2, 0xDF: 4})


class ObjectCursor(kit.Cursor):
    """A reader of consecutive objects, which accepts only the expected types."""

    # ``msgpack.Unpacker`` can neither skip data nor report its position in the file.

    __slots__ = ()

    def uint32(self, label: str) -> int:
        """Read an integer of type uint32, the only one that primitiv knows."""
        value: int = _INTEGER.unpack(self._number(_UINT32, label))[1]
        return value

    def float32(self, label: str) -> float:
        """Read a number of type float32."""
        value: float = _FLOAT.unpack(self._number(_FLOAT32, label))[1]
        return value

    def length(self, kind: LengthType, label: str) -> int:
        """Read the length that an object begins with."""
        code = self.take(1, label)[0]
        if code in kind.short:
            return code - kind.short.start
        self.at -= 1
        width = kind.long.get(code)
        if width is None:
            raise self._mistyped(label, code, kind.name)
        return int.from_bytes(self.take(1 + width, label)[1:], "big")

    def string(self, label: str) -> str:
        """Read a str; a byte that is not UTF-8 becomes a lone surrogate."""
        nbytes = self.length(STR, label)
        if nbytes > _LONGEST_TEXT:
            self.require(nbytes, label)
            reason = f"{label}: {nbytes} bytes, more than the limit of {_LONGEST_TEXT}"
            raise UnsupportedError(reason, offset=self.at, rule="TextLength")
        return self.take(nbytes, label).decode("utf-8", "surrogateescape")

    def _number(self, code: int, label: str) -> bytes:
        type_byte = self.take(1, label)[0]
        self.at -= 1
        if type_byte != code:
            raise self._mistyped(label, type_byte, f"0x{code:02x} ({_NAMES[code]})")
        return self.take(5, label)

    def _mistyped(self, label: str, code: int, expected: str) -> FormatError:
        reason = f"{label}: type byte 0x{code:02x}, expected {expected}"
        return FormatError(reason, offset=self.at, rule="Type")

    def require(self, nbytes: int, label: str) -> None:
        """Raise `FormatError` if fewer bytes are left; see `kit.Cursor.require`."""
        if nbytes > self.left:
            reason = f"{label}: {nbytes} bytes, but the file ends after {self.left}"
            raise FormatError(reason, offset=self.at, rule="EndOfFile", hint=kit.TRUNCATED)


def packed_uint32(*numbers: int) -> bytes:
    """Encode integers, in 5 bytes each."""
    return b"".join([_INTEGER.pack(_UINT32, number) for number in numbers])


def packed_float32(number: float) -> bytes:
    """Encode a number, in 5 bytes."""
    return _FLOAT.pack(_FLOAT32, number)


def packed_string(text: str) -> bytes:
    """Encode a str."""
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
    *dims, batch = [objects.uint32("dims and batch") for _ in range(count + 1)]
    size = prod(dims) * batch
    if not 0 < size < U32:
        reason = f"dims {dims} and batch {batch} are {size} elements, "
        reason += f"which must be from 1 to {U32 - 1}"
        raise FormatError(reason, offset=start, rule="ShapeSize")
    return trimmed(dims), batch


def packed_shape(dims: Sequence[int], batch: int) -> bytes:
    """Encode dims and batch."""
    return ARRAY.pack(len(dims)) + packed_uint32(*dims, batch)


def trimmed(dims: Sequence[int]) -> list[int]:
    """Return dims without trailing ones, as primitiv stores them."""
    result = list(dims)
    while result and result[-1] == 1:
        result.pop()
    return result


def read_tensor(
    objects: ObjectCursor, name: str, attrs: Mapping[str, Any], path: tuple[str, ...] | None
) -> Tensor:
    """Read the head of a tensor, and skip its data."""
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
    # No other axis can be named: users choose the keys, and a shape does not determine its role.
    axes = (*(None for _ in dims), "batch") if batch > 1 else None
    shape = (*dims, batch) if batch > 1 else (*dims,)
    parts = {"data": Part("float32", shape, offset, nbytes)}
    return Tensor(name, "float32", shape, parts, order="F", attrs=attrs, dims=axes, path=path)


def packed_tensor(tensor: WantedTensor, *, batched: bool = True) -> tuple[bytes, WantedTensor]:
    """Return the encoded head of a tensor and the tensor, after checking that it can be stored."""
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
        hint = "Rename its axis 'batch', so that it becomes an ordinary axis"
    else:
        return packed_shape(dims, batch) + BIN.pack(4 * tensor.size), tensor
    raise refused(tensor, reason, rule, hint)


def refused(tensor: WantedTensor, reason: str, rule: str, hint: str) -> UnsupportedError:
    """Return the error for a tensor that cannot be written."""
    return UnsupportedError(reason, tensor=tensor.name, rule=rule, hint=hint)


# --- names of parameters --------------------------------------------------------------------------

_K = TypeVar("_K", bound="Sequence[str]")
_N = TypeVar("_N")

# Each statistic repeats the name of its parameter: a small file must not make gigabytes of names.
_LONGEST_NAMES = 1 << 20
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
_IN_ELEMENT = re.compile("[%.:\udc80-\udcff]")
_IN_STAT = re.compile("[%\udc80-\udcff]")
_IN_LEAF = re.compile("[%:]")
_ESCAPE = re.compile("%([0-9A-F]{2})")
_ERRORS = "surrogateescape"
# The name of a parameter whose key is a single text without characters.
_NAMELESS = "%"
# Tensors with longer keys get no path; a tree splits their names instead, up to its own limit.
_DEEPEST = 64


def variable_name(key: Sequence[str], stat: str | None = None) -> str:
    """Join the elements of a parameter's key, such that different keys have different names."""
    if _IN_ELEMENT.search("".join(key)) is not None:
        key = [_IN_ELEMENT.sub(_escaped, element) for element in key]
    name = ".".join(key) or _NAMELESS
    return name if stat is None else f"{name}:{_IN_STAT.sub(_escaped, stat)}"


def value_path(key: Sequence[str]) -> tuple[str, ...] | None:
    """Return the path of a parameter's value in a tree; its statistics are in the same node."""
    if len(key) > _DEEPEST:
        return None
    return (*key[:-1], _IN_LEAF.sub(_escaped, key[-1]))


def key_and_stat(tensor: WantedTensor) -> tuple[tuple[str, ...], str | None]:
    """Return the key of a parameter, and which of its statistics a tensor is."""
    if tensor.path:
        leaf, colon, stat = tensor.path[-1].partition(":")
        key = (*tensor.path[:-1], _unescaped(leaf))
        placed = key, stat if colon else None
        # If the name does not match the path, the variable was renamed, and its name counts.
        if "key" not in tensor.attrs or variable_name(*placed) == tensor.name:
            return placed
    # Otherwise parse the name, as the inverse of `variable_name`.
    joined, colon, escaped = tensor.name.partition(":")
    elements = [] if joined == _NAMELESS else joined.split(".")
    key = tuple([_unescaped(element) for element in elements or [""]])
    parsed_stat = _unescaped(escaped) if colon else None
    if variable_name(key, parsed_stat) != tensor.name or not all(
        map(_comes_back, (*key, parsed_stat or ""))
    ):
        return whole_key(tensor), None
    return key, parsed_stat


def whole_key(tensor: WantedTensor) -> tuple[str, ...]:
    """Return the key of a tensor whose name was not made by `variable_name`."""
    return tuple(tensor.path or tensor.name.split("."))


def _escaped(match: re.Match[str]) -> str:
    # The low byte of a lone surrogate is the byte that it stands for.
    return f"%{ord(match[0]) & 0xFF:02X}"


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda match: bytes.fromhex(match[1]).decode("ascii", _ERRORS), text)


def _comes_back(text: str) -> bool:
    """Return whether a text survives writing and reading; escaped bytes may form a character."""
    try:
        return text.encode("utf-8", _ERRORS).decode("utf-8", _ERRORS) == text
    except UnicodeEncodeError:
        return False


# --- reading and writing --------------------------------------------------------------------------


def read_parameter(
    objects: ObjectCursor, notes: kit.Notes, key: list[str], attrs: Mapping[str, Any]
) -> list[Tensor]:
    """Read a value and its statistics, the value first."""
    name, path = variable_name(key), value_path(key)
    try:
        value = read_tensor(objects, name, attrs, path)
        stats: dict[str, Tensor] = {}
        for number in range(objects.uint32("number of statistics")):
            if number * len(name) > _LONGEST_NAMES:
                reason = f"more than {number} statistics of a parameter whose name has {len(name)}"
                reason += " characters"
                raise UnsupportedError(reason, offset=objects.at, rule="TextLength")
            stat = objects.string("name of a statistic")
            check_utf8(notes, "statistic", stat)
            full = variable_name(key, stat)
            more = {**attrs, "stat": full.partition(":")[2]}
            place = None if path is None else (*path[:-1], f"{path[-1]}:{stat}")
            tensor = read_tensor(objects, full, more, place)
            if stats.setdefault(stat, tensor) is not tensor:
                notes.add("there twice; the first counts, as for primitiv", _named(full))
    except CheckpointError as error:
        raise error.located(tensor=name) from None
    if value.dims is not None:
        notes.add("with a batch, which primitiv would not load", _named(name))
    return [value, *stats.values()]


def packed_parameter(parameter: Parameter) -> Pieces:
    """Encode a value and its statistics."""
    yield from packed_tensor(parameter.value, batched=False)
    yield packed_uint32(len(parameter.stats))
    for name, stat in parameter.stats.items():
        yield packed_string(name)
        yield from packed_tensor(stat)


def read_model(objects: ObjectCursor, notes: kit.Notes) -> list[Tensor]:
    """Read all parameters of a model."""
    parameters: dict[str, list[Tensor]] = {}
    for _ in range(objects.uint32("number of parameters")):
        start = objects.at
        count = objects.length(ARRAY, "key")
        if count == 0:
            raise FormatError("a key without elements", offset=start, rule="Key")
        key = [objects.string("element of a key") for _ in range(count)]
        check_utf8(notes, "key", ".".join(key))
        tensors = read_parameter(objects, notes, key, {"key": key})
        name = tensors[0].name
        if parameters.pop(name, None) is not None:
            notes.add("there twice; the last counts, as for primitiv", _named(name))
        parameters[name] = tensors
    for key, _ in _modules(sorted(tensors[0].attrs["key"] for tensors in parameters.values())):
        reason = "both a parameter and a module, which primitiv does not permit"
        notes.add(reason, _named(variable_name(key)))
    return [tensor for tensors in parameters.values() for tensor in tensors]


def packed_model(parameters: list[Parameter]) -> Pieces:
    """Encode parameters, which must be sorted by key."""
    yield packed_uint32(len(parameters))
    for parameter in parameters:
        yield ARRAY.pack(len(parameter.key)) + b"".join(map(packed_string, parameter.key))
        yield from packed_parameter(parameter)


class Parameter(NamedTuple):
    """A parameter to be written, with its statistics in the order of their tensors."""

    key: tuple[str, ...]
    value: WantedTensor
    stats: dict[str, WantedTensor]


def parameters_of(draft: Draft) -> list[Parameter]:
    """Group tensors, which may have any names, into parameters with their statistics."""
    values: dict[tuple[str, ...], WantedTensor] = {}
    stats: list[tuple[tuple[str, ...], str, WantedTensor]] = []
    for tensor in draft.tensors.values():
        key, stat = key_and_stat(tensor)
        try:
            _encoded((*key, stat or ""))
        except UnicodeEncodeError:
            reason = "the name has half of a surrogate pair, which is not text"
            rule = "Key" if stat is None else "Statistic"
            raise refused(tensor, reason, rule, "Rename it") from None
        if stat is None:
            _add(values, key, tensor)
        else:
            stats.append((key, stat, tensor))
    owned: dict[tuple[str, ...], dict[str, WantedTensor]] = {}
    for owner, stat, tensor in stats:
        if owner in values:
            _add(owned.setdefault(owner, {}), stat, tensor)
        elif "stat" in tensor.attrs:
            reason = f"a statistic of {shown(variable_name(owner))}, which is not written"
            hint = "Write the parameter too, or leave the statistic out"
            raise refused(tensor, reason, "Statistic", hint)
        else:
            # A colon in a name of another format.
            _add(values, whole_key(tensor), tensor)
    parameters = [Parameter(key, value, owned.get(key, {})) for key, value in values.items()]
    parameters.sort(key=lambda parameter: _encoded(parameter.key))
    for key, following in _modules([parameter.key for parameter in parameters]):
        reason = f"it is a parameter, but also the module of {shown(values[following].name)}, "
        reason += "which primitiv does not permit"
        raise refused(values[key], reason, "Key", "Rename one of them")
    return parameters


def _encoded(key: Sequence[str]) -> list[bytes]:
    return [element.encode("utf-8", "surrogateescape") for element in key]


def _modules(keys: list[_K]) -> Iterator[tuple[_K, _K]]:
    """Yield sorted keys that are a prefix of the next key, with that key."""
    for key, following in pairwise(keys):
        if following[: len(key)] == key:
            yield key, following


def _add(tensors: dict[_N, WantedTensor], key: _N, tensor: WantedTensor) -> None:
    first = tensors.setdefault(key, tensor)
    if first is not tensor:
        reason = f"it has the same key as {shown(first.name)}"
        raise refused(tensor, reason, "DuplicateName", "Rename one of them")


def check_utf8(notes: kit.Notes, label: str, name: str) -> None:
    """Add a note if a text is not UTF-8."""
    if _NOT_UTF8.search(name) is not None:
        notes.add("not UTF-8", f"{label} {shown(name)}")


def _named(name: str) -> str:
    return f"tensor {shown(name)}"
