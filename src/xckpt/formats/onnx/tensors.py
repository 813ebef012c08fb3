"""Tensors of models: raw data, numbers in fields, data in other files, sparse tensors."""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass, field, replace
from math import prod
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from xckpt.elements import nbytes_of
from xckpt.errors import CheckpointError, FormatError, MissingShardError, UnsupportedError, shown
from xckpt.formats import Readable, kit
from xckpt.index import Part, Shard, Tensor, strides_of

if TYPE_CHECKING:
    from collections.abc import Iterator

VARINT, FIXED_64, BYTES, GROUP, END, FIXED_32 = range(6)
# Bytes after the tag, or after the size of bytes.
_NBYTES = {VARINT: 0, FIXED_64: 8, BYTES: 0, FIXED_32: 4}
_MOST_GROUPS = 100
_LONGEST_TEXT = 1 << 16


class Wire(kit.Cursor):
    """A reader of protobuf fields."""

    __slots__ = ()

    def integer(self) -> int:
        """Read a number, whose bits after the 64th do not count."""
        return self.varint("a number") & 0xFFFFFFFFFFFFFFFF

    def entries(self) -> Iterator[tuple[int, int, int]]:
        """Yield number, wire type and value of the fields of the area that was entered."""
        # The value of bytes is their size; the reader is at their start, and goes on after them.
        # The value of a fixed number is its offset. Groups are skipped.
        groups: list[int] = []
        while self.left or groups:
            offset = self.at
            tag = self.integer()
            number, wire = tag >> 3, tag & 7
            if wire == GROUP or (wire == END and groups):
                if wire == GROUP and len(groups) < _MOST_GROUPS:
                    groups.append(number)
                elif wire == GROUP or groups.pop() != number:
                    raise FormatError("groups are nested wrongly", offset=offset, rule="Group")
                continue
            if not number or wire not in _NBYTES:
                reason = f"no field has number {number} and wire type {wire}"
                raise FormatError(reason, offset=offset, rule="Wire")
            value = self.integer() if wire in {VARINT, BYTES} else self.at
            nbytes = value if wire == BYTES else _NBYTES[wire]
            self.require(nbytes, "a field")
            end = self.at + nbytes
            if not groups:
                yield number, wire, value
            self.at = end

    def string(self, nbytes: int, label: str) -> str:
        """Read a text of bounded size, with escapes for bytes that are not UTF-8."""
        if nbytes > _LONGEST_TEXT:
            reason = f"{label} has {nbytes} bytes, more than {_LONGEST_TEXT}"
            raise UnsupportedError(reason, offset=self.at, rule="TextLength")
        return self.take(nbytes, label).decode(errors="backslashreplace")

    def pair(self, nbytes: int) -> tuple[str, str, int]:
        """Read the fields 1 and 2 of a small message: texts, or for field 2 a number."""
        key, value, number = "", "", 0
        with self.inside(nbytes, "a message"):
            for entry, wire, size in self.entries():
                if entry == 1 and wire == BYTES:
                    key = self.string(size, "a key")
                elif entry == 2 and wire == BYTES:
                    value = self.string(size, "a value")
                elif entry == 2 and wire == VARINT:
                    number = signed(size)
        return key, value, number


def signed(value: int, bits: int = 64) -> int:
    """Return an unsigned number as a signed one."""
    return value - (1 << bits) if value >> (bits - 1) else value


_FLOATS, _INT32S, _INT64S, _DOUBLES, _UINT64S, _RAW = 4, 5, 7, 10, 11, 9
_DATA_FIELDS = {_FLOATS, _INT32S, 6, _INT64S, _DOUBLES, _UINT64S, _RAW}
# Type ids, element types, and the fields for values that are not raw.
TYPES = {
    1: ("float32", _FLOATS),
    2: ("uint8", _INT32S),
    3: ("int8", _INT32S),
    4: ("uint16", _INT32S),
    5: ("int16", _INT32S),
    6: ("int32", _INT32S),
    7: ("int64", _INT64S),
    9: ("bool", _INT32S),
    10: ("float16", _INT32S),
    11: ("float64", _DOUBLES),
    12: ("uint32", _UINT64S),
    13: ("uint64", _UINT64S),
    14: ("complex64", _FLOATS),
    15: ("complex128", _DOUBLES),
    16: ("bfloat16", _INT32S),
    17: ("float8_e4m3fn", _INT32S),
    18: ("float8_e4m3fnuz", _INT32S),
    19: ("float8_e5m2", _INT32S),
    20: ("float8_e5m2fnuz", _INT32S),
    21: ("uint4", _INT32S),
    22: ("int4", _INT32S),
    23: ("float4_e2m1fn", _INT32S),
    24: ("float8_e8m0fnu", _INT32S),
    25: ("uint2", _INT32S),
    26: ("int2", _INT32S),
}
_UNREAD = {0: "UNDEFINED", 8: "STRING", 27: "FLOAT6E2M3", 28: "FLOAT6E3M2"}

# Bytes of varints that are decoded when the file is opened, of one tensor and of all. Beyond that,
# packed ones are decoded on demand; numbers in several places are decoded up to a limit.
_MOST_INLINE, _MOST_INLINE_TOTAL, _MOST_SCATTERED = 1 << 16, 1 << 21, 1 << 25
_LONGEST_PATH = 64  # a tree splits longer names itself, up to a depth
_LONGEST_VARINT = 10
# Wire types of single numbers; others are unknown fields.
_WIRES = {_FLOATS: FIXED_32, _DOUBLES: FIXED_64}
_WIRES |= dict.fromkeys((_INT32S, _INT64S, _UINT64S), VARINT)
_SIZES = {VARINT: 0, FIXED_64: 8, FIXED_32: 4}
_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}
_DIGITS = re.compile(r"[0-9]{1,19}")


class _Packed(NamedTuple):
    """The range of packed numbers or of bytes."""

    offset: int
    nbytes: int


class _Singles(NamedTuple):
    """Consecutive numbers with a tag each: values of varints, or offsets of numbers of `size`."""

    size: int  # 0 for varints
    values: array[int]


@dataclass(slots=True)
class _Proto:
    """The fields of a tensor: dims, data, and where these are."""

    offset: int
    name: str = ""
    dims: list[int] = field(default_factory=list)
    type_id: int = 0
    is_segment: bool = False
    is_external: bool = False
    doc: str = ""
    # By field, the offsets and sizes of packed numbers or bytes; between them, single numbers.
    data: dict[int, list[_Packed | _Singles]] = field(default_factory=dict)
    external: dict[str, str] = field(default_factory=dict)


class ProtoReader(Wire):
    """A reader of the tensors of a model."""

    __slots__ = ("_inline", "_scattered", "_siblings", "notes", "shards")

    def __init__(self, source: Readable) -> None:
        super().__init__(source)
        self.notes = kit.Notes()
        self.shards: dict[str, Shard] = {}
        self._siblings: dict[str, CheckpointError | None] = {}
        self._inline, self._scattered = _MOST_INLINE_TOTAL, _MOST_SCATTERED

    def dense(self, nbytes: int, path: tuple[str, ...], name: str | None) -> Tensor:
        """Read a tensor; its name is `name` or its own after `path`, or the path if it is empty."""
        return self._tensor(self._proto(nbytes), path, name)

    def _proto(self, nbytes: int) -> _Proto:
        """Read the fields of a tensor."""
        proto = _Proto(self.at)
        with self.inside(nbytes, "a tensor"):
            for number, wire, value in self.entries():
                if number in _DATA_FIELDS:
                    self._place(proto.data.setdefault(number, []), number, wire, value)
                elif number == 1 and wire in {VARINT, BYTES}:
                    self._extents(proto, wire, value)
                elif number == 2 and wire == VARINT:
                    proto.type_id = signed(value & 0xFFFFFFFF, 32)
                elif number == 3:
                    proto.is_segment = True
                elif number in {8, 12} and wire == BYTES:
                    text = self.string(value, "a text of a tensor")
                    proto.name, proto.doc = (text, proto.doc) if number == 8 else (proto.name, text)
                elif number == 13 and wire == BYTES:
                    key, text, _ = self.pair(value)
                    proto.external[key] = text
                elif number == 14 and wire == VARINT:
                    proto.is_external = value == 1
        return proto

    def _place(self, places: list[_Packed | _Singles], number: int, wire: int, value: int) -> None:
        """Add the place of data."""
        if wire == BYTES:
            if number == _RAW:
                places.clear()  # the last of several counts
            places.append(_Packed(self.at, value))
        elif wire == _WIRES.get(number):
            size, last = _SIZES[wire], places[-1] if places else None
            if not isinstance(last, _Singles) or last.size != size:
                last = _Singles(size, array("Q"))
                places.append(last)
            last.values.append(value)

    def _extents(self, proto: _Proto, wire: int, value: int) -> None:
        if wire == VARINT:
            extents = [value]
        else:
            with self.inside(value, "dims"):
                extents = list(self._varints(kit.MOST_AXES + 1))
        proto.dims += extents[: kit.MOST_AXES + 1 - len(proto.dims)]

    def _varints(self, most: int) -> Iterator[int]:
        """Yield packed numbers up to the end of the area, at most so many."""
        while self.left and most:
            yield self.integer()
            most -= 1

    def _tensor(self, proto: _Proto, path: tuple[str, ...], name: str | None) -> Tensor:
        """Return a tensor; a mistake in it makes only this tensor unreadable."""
        full = (*path, proto.name if name is None else name) if name != "" else path
        joined = "/".join(full)
        attrs = {"doc_string": proto.doc} if proto.doc else {}
        place = full if len(full) > 1 and len(full) <= _LONGEST_PATH else None
        dtype, _ = TYPES.get(proto.type_id, (_UNREAD.get(proto.type_id, "unknown"), 0))
        shape: tuple[int, ...] = ()
        at = self.at
        try:
            shape = _shape(proto.dims, dtype)
            part = self._part(proto, dtype, shape)
            return Tensor(joined, dtype, shape, {"data": part}, attrs=attrs, path=place)
        except CheckpointError as error:
            problem = error.located(tensor=joined, offset=proto.offset)
            return Tensor(joined, dtype, shape, {}, attrs=attrs, path=place, problem=problem)
        finally:
            self.at = at

    def _part(self, proto: _Proto, dtype: str, shape: tuple[int, ...]) -> Part:
        if proto.type_id not in TYPES or proto.is_segment:
            reason = "segments of tensors" if proto.is_segment else f"elements of type {dtype}"
            if proto.type_id not in TYPES and proto.type_id not in _UNREAD:
                reason = f"data_type {proto.type_id}"
            raise UnsupportedError(f"{reason} cannot be read", rule="DataType")
        needed = nbytes_of(dtype, prod(shape))
        fields = [number for number, places in proto.data.items() if any(map(_nbytes, places))]
        if proto.is_external:
            if fields:
                raise FormatError("data inside and outside of the file", rule="Data")
            return self._external(proto, dtype, shape, needed)
        expected = TYPES[proto.type_id][1]
        if len(fields) > 1 or not set(fields) <= {expected, _RAW}:
            reason = f"data in the fields {fields}, but one of {[_RAW, expected]} must have them"
            raise FormatError(reason, rule="DataField")
        if not fields:
            if needed:
                raise FormatError(f"no data, but the shape has {needed} bytes", rule="DataLength")
            return Part(dtype, shape, proto.offset, 0)
        [number] = fields
        places = [place for place in proto.data[number] if _nbytes(place)]
        part = self._inside(number, places, Part(dtype, shape, proto.offset, needed))
        if part.encoding is None and part.nbytes != needed:
            reason = f"{part.nbytes} bytes of data, but {dtype} {list(shape)} has {needed}"
            raise FormatError(reason, offset=part.offset, rule="DataLength")
        return part

    def _inside(self, number: int, places: list[_Packed | _Singles], part: Part) -> Part:
        """Return a part with the data of a field; `part` begins with the tensor."""
        first = places[0]
        if len(places) == 1 and isinstance(first, _Packed):
            if number in {_RAW, _FLOATS, _DOUBLES}:
                return replace(part, offset=first.offset, nbytes=first.nbytes)
            if first.nbytes > min(_MOST_INLINE, self._inline):
                return _encoded(first, part)
            self._inline -= first.nbytes
        else:
            stored = sum(map(_nbytes, places))
            if stored > self._scattered:
                reason = f"{stored} bytes of data are in many places, and too many to decode"
                hint = "Save the model again with onnx, which writes each tensor in one place"
                raise UnsupportedError(reason, rule="Inline", hint=hint)
            self._scattered -= stored
        inline = self._decoded(number, places, part.dtype)
        return replace(part, nbytes=len(inline), inline=inline)

    def _decoded(self, number: int, places: list[_Packed | _Singles], dtype: str) -> bytes:
        """Return numbers of a field as the bytes of elements."""
        data = bytearray()
        for place in places:
            if number in {_FLOATS, _DOUBLES}:
                self._add_fixed(data, place)
            else:
                self._add_varints(data, place, _width(dtype))
        return bytes(data)

    def _add_fixed(self, data: bytearray, place: _Packed | _Singles) -> None:
        if isinstance(place, _Packed):
            data += self._bytes(*place)
            return
        for offset in place.values:
            data += self._bytes(offset, place.size)

    def _add_varints(self, data: bytearray, place: _Packed | _Singles, width: int) -> None:
        element, mask = Struct("<" + _CODES[width]), (1 << 8 * width) - 1
        if isinstance(place, _Singles):
            for value in place.values:
                data += element.pack(value & mask)
            return
        self.at = place.offset
        with self.inside(place.nbytes, "packed numbers"):
            for value in self._varints(place.nbytes):
                data += element.pack(value & mask)

    def _bytes(self, offset: int, nbytes: int) -> bytes:
        self.at = offset
        return self.take(nbytes, "data")

    def _external(self, proto: _Proto, dtype: str, shape: tuple[int, ...], needed: int) -> Part:
        """Return a part in another file, which must be in the folder of the model."""
        entries = proto.external
        unknown = entries.keys() - {"location", "offset", "length", "checksum", "basepath"}
        if unknown:
            self.notes.add(f"unknown key {shown(min(unknown))} of external data", shown(proto.name))
        location = entries.get("location", "").removeprefix("./")
        numbers = [entries.get(key, "0") for key in ("offset", "length")]
        if not all(map(_DIGITS.fullmatch, numbers)):
            reason = f"offset and length of external data are {shown(str(numbers))}, not numbers"
            raise FormatError(reason, rule="ExternalData")
        offset, length = map(int, numbers)
        if location not in self._siblings:
            self._siblings[location] = self._open(location, offset + needed)
        problem = self._siblings[location]
        if problem is not None:
            raise type(problem)(problem.reason, rule=problem.rule, hint=problem.hint)
        size = self.shards[location].size
        if "length" in entries and length != needed:
            reason = f"{length} bytes of external data, but {dtype} {list(shape)} has {needed}"
            raise FormatError(reason, rule="ExternalData")
        if offset + needed > size:
            reason = f"the file {shown(location)} ends at byte {size}, before the end of its data"
            raise FormatError(reason, rule="ExternalData", hint=kit.CUT)
        if "length" not in entries and offset + needed < size:
            reason = "external data without a length end before the end of their file"
            self.notes.add(reason, shown(proto.name))
        return Part(dtype, shape, offset, needed, shard=location)

    def _open(self, location: str, nbytes: int) -> CheckpointError | None:
        """Look up the size of a file with data; return the error if it cannot be read."""
        try:
            if location == kit.file_name(self._source.name):
                reason = f"{shown(location)} is the model itself, not a file with its data"
                raise FormatError(reason, rule="ExternalData")
            size = self._source.sibling(location).size
        except CheckpointError as error:
            return error.with_traceback(None)
        except OSError as error:
            reason = f"the file {shown(location)} with its data is missing"
            if not isinstance(error, FileNotFoundError):
                reason = f"the file {shown(location)} with its data: {error.strerror}"
            return MissingShardError(reason, hint=self._hint(location, nbytes))
        self.shards[location] = Shard(size, None, (location,), is_confined=True)
        return None

    def _hint(self, location: str, nbytes: int) -> str:
        """Return the advice about a missing file with data that has at least `nbytes` bytes."""
        model = kit.file_name(self._source.name)
        stem = model.rpartition(".")[0] or model
        ending = location[location.rfind(".") :] if "." in location else ""
        for name in dict.fromkeys((f"{stem}{ending}", f"{model}.data", f"{model}_data")):
            file = kit.sibling(self._source, name) if name != model else None
            if file is not None and file.size >= nbytes:
                renamed = f"{shown(name)} is there: if it was renamed with the model, rename it to"
                return f"Put it next to the model. {renamed} {shown(location)}"
        return "Put it next to the model"

    def sparse(self, nbytes: int, path: tuple[str, ...], name: str | None) -> Tensor:
        """Read a sparse tensor, whose indices are checked and made coordinates here."""
        start, protos = self.at, {1: _Proto(self.at), 2: _Proto(self.at)}
        shape = _Proto(self.at)
        with self.inside(nbytes, "a sparse tensor"):
            for number, wire, value in self.entries():
                if number in protos and wire == BYTES:
                    protos[number] = self._proto(value)
                elif number == 3 and wire in {VARINT, BYTES}:
                    self._extents(shape, wire, value)
        values = self._tensor(protos[1], path, name)
        at = self.at
        try:
            if values.problem is not None:
                return values
            extents = _shape(shape.dims, values.dtype)
            indices = self._tensor(protos[2], path, name)
            coords = self._coords(indices, extents, values.shape)
        except CheckpointError as error:
            problem = error.located(tensor=values.name, offset=start)
            return replace(values, parts={}, problem=problem)
        finally:
            self.at = at
        parts = {"values": values.parts["data"], "coords": coords}
        return replace(values, shape=extents, parts=parts, layout="sparse_coo")

    def _coords(self, indices: Tensor, shape: tuple[int, ...], values: tuple[int, ...]) -> Part:
        """Return the coordinates of the values, by axis; they are unique and in the shape."""
        if indices.problem is not None:
            raise indices.problem
        part, ndim, count = indices.parts["data"], len(shape), prod(values)
        is_linear = indices.shape == (count,)
        is_rows = ndim > 0 and indices.shape == (count, ndim)
        if indices.dtype != "int64" or not (is_linear or is_rows):
            reason = f"indices are {indices.dtype} {list(indices.shape)}, of {count} values"
            raise FormatError(reason, rule="Indices")
        if part.nbytes > _MOST_INLINE or part.shard is not None:
            reason = f"sparse tensors with {part.nbytes} bytes of indices cannot be read"
            raise UnsupportedError(reason, rule="Indices")
        data = self._bytes(part.offset, part.nbytes) if part.inline is None else part.inline
        numbers = [
            int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, len(data), 8)
        ]
        steps = strides_of(shape)
        if is_linear:
            if any(not 0 <= number < prod(shape) for number in numbers):
                raise FormatError(f"an index is not in the shape {list(shape)}", rule="Indices")
            rows = [
                tuple([n // step % size for step, size in zip(steps, shape, strict=True)])
                for n in numbers
            ]
        else:
            rows = [tuple(numbers[i : i + ndim]) for i in range(0, len(numbers), ndim)]
            inside = [0 <= n < size for row in rows for n, size in zip(row, shape, strict=True)]
            if not all(inside):
                raise FormatError(f"an index is not in the shape {list(shape)}", rule="Indices")
        if len(set(rows)) < len(rows):
            raise FormatError("an index is there twice", rule="Indices")
        by_axis = [row[axis] for axis in range(ndim) for row in rows]
        inline = b"".join([number.to_bytes(8, "little") for number in by_axis])
        return Part("int64", (ndim, len(rows)), part.offset, len(inline), inline=inline)


def _nbytes(place: _Packed | _Singles) -> int:
    """Return the size of data in bytes; a single number counts as one byte or its size."""
    if isinstance(place, _Packed):
        return place.nbytes
    return len(place.values) * max(1, place.size)


def _encoded(numbers: _Packed, part: Part) -> Part:
    """Return a part whose elements are packed numbers that are decoded on demand."""
    width = _width(part.dtype)
    count = part.nbytes // width
    if not numbers.nbytes // _LONGEST_VARINT <= count <= numbers.nbytes:
        reason = f"{numbers.nbytes} bytes of numbers, but {part.dtype} {list(part.shape or ())}"
        reason += f" has {count} of them"
        raise FormatError(reason, offset=numbers.offset, rule="DataLength")
    return replace(
        part,
        offset=numbers.offset,
        nbytes=numbers.nbytes,
        encoding=f"varint{width}",
        decoded_nbytes=part.nbytes,
    )


def _width(dtype: str) -> int:
    """Return the bytes of an element, or of the elements that share one."""
    return max(1, nbytes_of(dtype, 1))


def _shape(dims: list[int], dtype: str) -> tuple[int, ...]:
    shape = tuple(map(signed, dims))
    if len(shape) > kit.MOST_AXES or any(extent < 0 for extent in shape):
        reason = f"a shape must have at most {kit.MOST_AXES} extents, none of them negative"
        raise FormatError(reason, rule="Shape")
    if kit.is_oversized(shape, dtype):
        raise FormatError(f"the shape {list(shape)} is too large", rule="Shape")
    return shape
