"""Flax (``.msgpack``), the format of `flax.serialization` and `flax.training.checkpoints`.

A file is one msgpack object, a tree of maps and arrays, without a header. Numbers of msgpack are
big-endian. The first byte of an object is its type, and a length may follow::

    00-7f e0-ff         small integer               80-8f de df    map: key, value, ...
    c0 c2 c3            nil, false, true            90-9f dc dd    array
    ca-cf d0-d3         float, integer              a0-bf d9-db    text
    d4-d8 c7-c9         extension: code i8, body    c4-c6          bytes

Extensions of code 1 (arrays) and 3 (numbers of numpy) are tensors. Their body is the msgpack array
``[shape, name of the element type, bytes]``; elements are little-endian and in C order. Elements of
less than 8 bits have a byte each. Code 2 is a complex number, ``[real, imaginary]``.

Arrays of more than 2**30 bytes are cut: a map has the key ``__msgpack_chunked_array__``, ``shape``,
which maps "0", "1", ... to extents, and ``chunks``, which maps "0", "1", ... to pieces of the
flattened array. A piece is a range of bytes, and so a few blocks of the array.

The name of a tensor is its path in the tree, joined by "/"; an array alone is ``tensor``. Numbers,
texts and None in the tree are attributes of the file. Large models have several files and an index,
as described in `xckpt.formats.safetensors`. Flax writes lengths in the shortest form, and never
bytes after the object. xckpt raises an error for a key that a map has twice (Flax uses the last
one), for negative extents (Flax infers one) and for pieces of different types (Flax converts them).

Specification: flax/serialization.py of github.com/google/flax, 0.12, and spec.md of
github.com/msgpack/msgpack.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from struct import Struct
from typing import TYPE_CHECKING, Any

from xckpt.elements import ELEMENT_TYPES
from xckpt.errors import CheckpointError, FormatError, TruncatedError, UnsupportedError, shown
from xckpt.formats import Format, Readable, kit
from xckpt.index import Index, Part, Tensor, runs_of, strides_of

if TYPE_CHECKING:
    from collections.abc import Mapping


_VALUE, _TEXT, _BYTES, _ARRAY, _MAP, _EXTENSION = "number", "text", "bytes", "array", "map", "ext"
_FIXED = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = {code: Struct(">" + kind) for code, kind in enumerate("fdBHIQbhiq", 0xCA)}
# For the other first bytes, the kind and the number of bytes of the length that follows.
_LENGTHS = {
    first + n: (kind, width)
    for first, kind, widths in (
        (0xC4, _BYTES, (1, 2, 4)),
        (0xC7, _EXTENSION, (1, 2, 4)),
        (0xD9, _TEXT, (1, 2, 4)),
        (0xDC, _ARRAY, (2, 4)),
        (0xDE, _MAP, (2, 4)),
    )
    for n, width in enumerate(widths)
}
_TENSORS, _COMPLEX = {1, 3}, 2
_CHUNKED = "__msgpack_chunked_array__"
_PLACEHOLDERS = ("//GDAPlaceholder:", "PLACEHOLDER://")

_DEEPEST = 1000
_LONGEST_PATH = 64  # a tree splits longer names itself, up to a depth
_LONGEST_TEXT, _LONGEST_TYPE, _MOST_ATTRS = 1 << 16, 64, 10_000
_MOST_NAMES = 1 << 25  # characters of all names together: each repeats the keys of outer maps

# Bytes of an element.
_SIZES = {name: max(1, row.bits // 8) for name, row in ELEMENT_TYPES.items() if name != "bool32"}
_TYPES = {name: name for name in _SIZES}

# How a tree begins: in the first map, after numbers and short texts, is a tree or an extension.
_SHORT = b"|".join([re.escape(bytes([0xA0 + n])) + b".{%d}" % n for n in range(32)])
_PLAIN = rb"[\0-\x7f\xe0-\xff\xc0\xc2\xc3]|[\xcc\xd0].|[\xcd\xd1]..|[\xca\xce\xd2].{4}|"
_PLAIN += rb"[\xcb\xcf\xd3].{8}"
_LONG = rb"(?:\xd9.|\xda..|\xdb....).{1,255}?"
_INNER = rb"[\x80-\x9f\xc7-\xc9\xd4-\xd8\xdc-\xdf]"
_BEGINNING = re.compile(
    rb"(?:[\x81-\x8f]|\xde..|\xdf....)(?:%b|(?:(?:%b)(?:%b|%b))*(?:%b))%b|(?:\xc7.|\xc8..|\xc9....|\xd8)[\1\3]\x93"
    % (_LONG, _SHORT, _PLAIN, _SHORT, _SHORT, _INNER),
    re.DOTALL,
)
_TREE = re.compile(rb"[\x80-\x9f\xc7-\xc9\xd8\xdc-\xdf]")


class Flax(Format):
    """Flax (``.msgpack``), with arrays in pieces and models in several files."""

    name = "flax"
    description = "msgpack files of Flax"
    types = _TYPES

    def detect(self, head: bytes, size: int, name: str) -> bool:
        """Return whether a tree begins; without the suffix it must have an inner tree or array."""
        if name.partition("?")[0].lower().endswith(".msgpack"):
            return _TREE.match(head) is not None
        return head == b"\x80" or _BEGINNING.match(head) is not None

    def read(self, source: Readable) -> Index:
        """Walk the tree, and skip the data of tensors."""
        if not _TREE.match(kit.first_bytes(source, 1)):
            reason = "the file does not begin with a map or an array"
            raise FormatError(reason, offset=0, rule="Root")
        tree = _Tree(source)
        tree.walk()
        if tree.left:
            reason = f"{tree.left} bytes follow the only object"
            raise FormatError(reason, offset=tree.at, rule="ExtraData")
        tensors, attrs = tree.contents()
        return kit.index_of(self.name, source, tensors, attrs, notes=tree.notes)


@dataclass(slots=True)
class _Level:
    """A map or an array whose entries are being read; `keys` is None in an array."""

    path: tuple[str, ...]
    remaining: int
    keys: set[str] | None
    offset: int
    leaves: int  # that precede it
    in_array: bool  # at any depth
    position: int = -1
    is_chunked: bool = False


class _Tree(kit.Cursor):
    """A walk through a tree, which collects tensors and plain values, the leaves, by path."""

    __slots__ = ("_leaves", "_levels", "_room", "notes")

    def __init__(self, source: Readable) -> None:
        super().__init__(source)
        self.notes = kit.Notes()
        self._levels: list[_Level] = []
        self._leaves: list[tuple[tuple[str, ...], Any]] = []
        self._room = _MOST_NAMES

    def walk(self) -> None:
        """Read the one object of the file."""
        self._object((), in_array=False)
        while self._levels:
            level = self._levels[-1]
            if level.remaining:
                level.remaining -= 1
                path = (*level.path, self._key(level))
                self._object(path, in_array=level.in_array or level.keys is None)
            else:
                self._levels.pop()
                if level.is_chunked and not level.in_array:
                    self._join(level)

    def contents(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and attributes by name."""
        tensors: dict[str, Tensor] = {}
        attrs: dict[str, Any] = {}
        for path, value in self._leaves:
            name = _name(path)
            if name in tensors or name in attrs:
                reason = f"two paths in the tree have the name {shown(name)}"
                raise FormatError(reason, offset=0, tensor=name, rule="DuplicateName")
            if type(value) is Tensor:
                tensors[name] = value
            elif len(attrs) < _MOST_ATTRS:
                attrs[name] = value
            else:
                self.notes.add(f"after {_MOST_ATTRS} attributes, left out", shown(name))
        return tensors, attrs

    def _head(self) -> tuple[str, Any]:
        """Read a number, or the kind and the length of anything else, for which there is room."""
        code = self.byte("an object")
        if code < 0x80 or code >= 0xE0:
            return _VALUE, code if code < 0x80 else code - 0x100
        if code < 0xC0:
            kind = _MAP if code < 0x90 else _ARRAY if code < 0xA0 else _TEXT
            length = code & (0x1F if kind is _TEXT else 0xF)
        elif code in _FIXED:
            return _VALUE, _FIXED[code]
        elif code in _NUMBERS:
            return _VALUE, self.number(_NUMBERS[code], "a number")
        elif 0xD4 <= code <= 0xD8:
            kind, length = _EXTENSION, 1 << code - 0xD4
        elif code in _LENGTHS:
            kind, width = _LENGTHS[code]
            length = int.from_bytes(self.take(width, "a length"), "big")
        else:
            raise FormatError("no object begins with byte c1", offset=self.at - 1, rule="Type")
        self.require(length * (2 if kind is _MAP else 1), f"{kind} of {length}")
        return kind, length

    def _key(self, level: _Level) -> str:
        level.position += 1
        if level.keys is None:
            return str(level.position)
        offset = self.at
        kind, key = self._head()
        if kind is _TEXT:
            key = self.text(key, "a key", rule="Key")
        elif kind is not _VALUE or type(key) is not int:
            raise FormatError(f"a key must be text, not {kind}", offset=offset, rule="Key")
        key = str(key)
        if key in level.keys:
            reason = f"the key {shown(key)} is there twice in {shown(_name(level.path))}"
            raise FormatError(reason, offset=offset, rule="DuplicateKey")
        level.keys.add(key)
        level.is_chunked |= key == _CHUNKED
        return key

    def _object(self, path: tuple[str, ...], *, in_array: bool) -> None:
        """Enter a map or an array, or add a leaf."""
        offset = self.at
        kind, value = self._head()
        if len(path) >= _DEEPEST:
            reason = f"the tree is nested deeper than {_DEEPEST} levels"
            raise FormatError(reason, offset=offset, rule="Depth")
        self._room -= sum(map(len, path)) + 8 * len(path)
        if self._room < 0:
            reason = f"all names together are longer than {_MOST_NAMES}"
            raise UnsupportedError(reason, offset=offset, rule="NameLength")
        if kind in {_MAP, _ARRAY}:
            keys: set[str] | None = set() if kind is _MAP else None
            leaves = len(self._leaves)
            self._levels.append(_Level(path, value, keys, offset, leaves, in_array))
        elif kind is _EXTENSION:
            self._extension(path, value)
        elif kind is _VALUE:
            self._leaves.append((path, value))
        elif value > _LONGEST_TEXT:
            self.skip(value, kind)
            self.notes.add(f"{kind} of more than {_LONGEST_TEXT} bytes, left out", _place(path))
        else:
            data = self.take(value, kind)
            text = data.decode(errors="backslashreplace") if kind is _TEXT else data.hex()
            self._leaves.append((path, text))
            if text.startswith(_PLACEHOLDERS):
                self.notes.add("its data are in other files, which are not read", _place(path))

    def _extension(self, path: tuple[str, ...], nbytes: int) -> None:
        code = self.byte("the code of an extension")
        start = self.at
        with self.inside(nbytes, "the extension"):
            if code in _TENSORS:
                self._leaves.append((path, self._tensor(path)))
            elif code == _COMPLEX and nbytes == 19:
                head, real, imag = self._head(), self._head()[1], self._head()[1]
                if head != (_ARRAY, 2) or {type(real), type(imag)} != {float}:
                    reason = "a complex number must be two floats"
                    raise FormatError(reason, offset=start, rule="Complex")
                self._leaves.append((path, str(complex(real, imag))))
            else:
                self.notes.add(f"an extension of code {code}, left out", _place(path))
        self.at = start + nbytes

    def _tensor(self, path: tuple[str, ...]) -> Tensor:
        """Read the body of an array; a mistake within makes only this tensor unreadable."""
        name, start = _name(path), self.at
        place = path if 0 < len(path) <= _LONGEST_PATH else None
        try:
            return self._array(name, place)
        except TruncatedError as error:
            raise error.located(tensor=name, offset=start) from None
        except CheckpointError as error:
            problem = error.located(tensor=name, offset=start)
            return Tensor(name, "unknown", (), {}, problem=problem, path=place)

    def _array(self, name: str, path: tuple[str, ...] | None) -> Tensor:
        """Read the shape, the name of the element type, and the position of the bytes."""
        if self._head() != (_ARRAY, 3):
            raise FormatError("an array must be [shape, type, bytes]", rule="Array")
        kind, ndim = self._head()
        if kind is not _ARRAY or ndim > kit.MOST_AXES:
            raise FormatError(f"a shape must have at most {kit.MOST_AXES} extents", rule="Shape")
        shape = tuple([_extent(*self._head()) for _ in range(ndim)])
        kind, length = self._head()
        if kind not in {_TEXT, _BYTES} or length > _LONGEST_TYPE:
            raise FormatError("the name of an element type must be a short text", rule="Type")
        spelled = self.text(length, "the name of an element type", rule="Type")
        kind, nbytes = self._head()
        if kind not in {_TEXT, _BYTES}:
            raise FormatError(f"the elements must be bytes, not {kind}", rule="Array")
        offset = self.at
        self.skip(nbytes, "elements")
        if self.left:
            raise FormatError(f"{self.left} bytes follow the elements", rule="ExtraData")
        return _dense(name, spelled, shape, offset, nbytes, path=path)

    def _join(self, level: _Level) -> None:
        """Replace the leaves of a map of pieces by one tensor."""
        name, depth = _name(level.path), len(level.path)
        fields = {path[depth:]: value for path, value in self._leaves[level.leaves :]}
        del self._leaves[level.leaves :]
        try:
            tensor = _joined(name, fields)
        except CheckpointError as error:
            problem = error.located(tensor=name, offset=level.offset)
            tensor = Tensor(name, "unknown", (), {}, problem=problem)
        path = level.path if 0 < depth <= _LONGEST_PATH else None
        self._leaves.append((level.path, replace(tensor, path=path, declared=_facts(path))))


def _name(path: tuple[str, ...]) -> str:
    return "/".join(path) if path else "tensor"


def _place(path: tuple[str, ...]) -> str:
    return shown(_name(path))


def _extent(kind: str, value: Any) -> int:
    if kind is not _VALUE or type(value) is not int or not 0 <= value <= kit.LARGEST:
        raise FormatError(f"an extent must be an integer from 0 to {kit.LARGEST}", rule="Shape")
    return value


def _dense(
    name: str,
    spelled: str,
    shape: tuple[int, ...],
    offset: int,
    nbytes: int,
    *,
    path: tuple[str, ...] | None = None,
) -> Tensor:
    """Return a tensor whose elements are `nbytes` bytes from `offset` on."""
    if spelled not in _SIZES:
        reason = f"the element type {shown(spelled)} cannot be read"
        problem = UnsupportedError(reason, tensor=name, offset=offset, rule="Type")
        parts = {"data": Part("uint8", (nbytes,), offset, nbytes)}
        return Tensor(name, spelled, shape, parts, problem=problem, path=path)
    if kit.is_oversized(shape, spelled):
        raise FormatError(f"the shape {list(shape)} is too large", rule="Shape")
    needed = prod(shape) * _SIZES[spelled]
    if nbytes != needed:
        reason = f"{nbytes} bytes of data, but {spelled} {list(shape)} has {needed}"
        raise FormatError(reason, offset=offset, rule="DataLength")
    is_narrow = ELEMENT_TYPES[spelled].bits < 8
    strides = strides_of(shape) if is_narrow else None
    part = Part(spelled, shape, offset, nbytes, strides=strides)
    return Tensor(name, spelled, shape, {"data": part}, path=path, declared=_facts(path))


# Modules that the user does not name are called by their class and a number.
_OF_CLASS = re.compile(r"(?P<kind>[A-Z][A-Za-z0-9]*)_[0-9]+")
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_PROJECTIONS = frozenset({"query", "key", "value", "out"})


def _facts(path: tuple[str, ...] | None) -> dict[str, Any] | None:
    """Return the facts about a leaf: its place in the tree, and the class of its module."""
    if path is None:
        return None
    kind = _class_named(path[-2]) if len(path) > 1 else ""
    if not kind and path[-2:-1] and path[-2] in _PROJECTIONS:
        above = _class_named(path[-3]) if len(path) > 2 else ""
        kind = "dense_general" if above.endswith("attention") else ""
    return {"tree": path, "module_class": kind} if kind else {"tree": path}


@lru_cache(1 << 12)
def _class_named(module: str) -> str:
    """Return the class in the name of a module, in snake case; empty without one."""
    match = _OF_CLASS.fullmatch(module)
    return _WORD.sub("_", match["kind"]).lower() if match is not None else ""


def _joined(name: str, fields: Mapping[tuple[str, ...], Any]) -> Tensor:
    """Return the tensor of a map of pieces, by the paths in it."""
    extents, pieces = _numbered(fields, "shape"), _numbered(fields, "chunks")
    shape = tuple([_extent(_VALUE, extent) for extent in extents])
    for piece in pieces:
        if type(piece) is Tensor and isinstance(piece.problem, UnsupportedError):
            problem = UnsupportedError(
                piece.problem.reason, tensor=name, offset=piece.problem.offset, rule="Type"
            )
            return Tensor(name, piece.dtype, shape, {}, problem=problem)
    if not pieces or any(type(piece) is not Tensor or piece.problem for piece in pieces):
        raise FormatError("a chunk must be an array without errors", rule="Chunks")
    dtype, count = pieces[0].dtype, sum([piece.size for piece in pieces])
    if {(piece.layout, piece.ndim, piece.dtype) for piece in pieces} != {("dense", 1, dtype)}:
        raise FormatError("chunks must have one axis and the same element type", rule="Chunks")
    if len(shape) > kit.MOST_AXES or kit.is_oversized(shape, dtype) or prod(shape) != count:
        reason = f"{count} elements in all chunks, but the shape is {shown(str(shape))}"
        raise FormatError(reason, rule="Chunks")
    if not count:
        return _dense(name, dtype, shape, pieces[0].parts["data"].offset, 0)
    parts: dict[str, Part] = {}
    start = 0
    for piece in pieces:
        # A range of the flattened array is a few blocks of it.
        offset = piece.parts["data"].offset
        for key in runs_of(shape, start, start + piece.size) if piece.size else ():
            size = tuple([along.stop - along.start for along in key])
            nbytes = prod(size) * _SIZES[dtype]
            block = _dense(name, dtype, size, offset, nbytes).parts["data"]
            parts[str(len(parts))] = replace(block, origin=tuple([k.start for k in key]))
            offset += nbytes
        start += piece.size
    return Tensor(name, dtype, shape, parts, "chunked")


def _numbered(fields: Mapping[tuple[str, ...], Any], field: str) -> list[Any]:
    """Return the values of a map with the keys "0", "1", ..., in order."""
    values = {path[1:]: value for path, value in fields.items() if path[0] == field}
    keys = [(str(number),) for number in range(len(values))]
    missing = [key[0] for key in keys if key not in values]
    if missing:
        raise FormatError(f"{field}: {missing[0]!r} of {len(keys)} is missing", rule="Chunks")
    return [values[key] for key in keys]
