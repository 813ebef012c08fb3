r"""NumPy files: archives of arrays (``.npz``), and arrays one after another (``.npy``, ``.eqx``).

`numpy.savez`, `numpy.save` and Equinox write them. An array is a header followed by its elements;
integers are little-endian::

    "\x93NUMPY"  major u8, minor u8     1.0, 2.0 or 3.0
    length u16, in 2.0 and 3.0 u32      length of the text, at most 65536
    text, padded with spaces to "\n"    in Latin-1, in 3.0 in UTF-8
    elements

The text is a Python literal with exactly three keys; xckpt parses it without evaluating code::

    {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }

``descr`` is a byte order (``<``, ``>``, ``|``), a kind, and a size in bytes. ``<V2`` is bfloat16 of
ml_dtypes: for types of its own, numpy writes ``|V2``. Arrays of other types are listed, but cannot
be read: text, dates, records, and objects, which would be pickles.

Each member of an archive is such an array, stored or deflated. Its name is a key and ``.npy``; if
members ``x`` and ``x.npy`` both exist, they keep their names. Members that are not arrays are left
out; members that are encrypted or have another compression are listed, but cannot be read. The
directory has the CRC-32 of a header with its elements, from which xckpt computes the CRC-32 of the
elements.

Arrays without an archive have the names ``arr_0``, ``arr_1``, ... by position. Equinox writes the
leaves of a tree in this way (``.eqx``), and programs often write a line of JSON before them. An
array that is cut short, or that has objects, is the last one in the list.

xckpt writes version 1.0. Elements in archives begin at multiples of 64 bytes. The header of a
deflated array is a separate deflate block. The comment of a member has the names of axes of its
array. Coordinates and attributes are a JSON object of texts in the extra data of the archive, which
numpy ignores.

Specification: numpy/lib/_format_impl.py and _npyio_impl.py of github.com/numpy/numpy, 2.3;
equinox/_serialisation.py of github.com/patrick-kidger/equinox, 0.13; see `xckpt.formats.archive`
for archives.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

from xckpt.elements import NUMPY_CODES
from xckpt.errors import CheckpointError, FormatError, UnsupportedError, shown
from xckpt.formats import Can, Format, Readable, archive, kit
from xckpt.formats.pickles.scanning import scan
from xckpt.formats.plan import LOST_DIMS, Draft, LiteralBytes, Plan, PlannedPart, WantedTensor
from xckpt.index import Index, Part, Tensor, is_json

_MAGIC = b"\x93NUMPY"
_SUFFIX = ".npy"
_ALIGNMENT = 64
_LONGEST_TEXT = 1 << 16
# Suffixes of arrays one after another, and the text that may be before them.
_STREAMS = (_SUFFIX, ".eqx")
_LONGEST_LINE = 1 << 16
_JSON = (b"{", b"[", b'"')
_LENGTHS = {b"\1\0": 2, b"\2\0": 4, b"\3\0": 4}
_KEYS = ["descr", "fortran_order", "shape"]
# A type by its byte order, kind and size, and of dates the unit.
_DESCR = re.compile(r"[<>|=]?([a-zA-Z])([0-9]{1,9})(?:\[[^\]]*\])?")
_HEAD = "the header of an array"
_LOST_NAMES = "names, which become positions"
# Literals without calls. Python 2 wrote integers with an L. The possessive quantifier prevents
# exponential backtracking over the ways to split digits.
_LITERAL = re.compile(r"(?:[\s{}()\[\],:]|True|False|\d++L?|'[^'\\\n]*'|\"[^\"\\\n]*\")*")


class Npz(Format):
    """NumPy archives of arrays (``.npz``), and arrays one after another (``.npy``, ``.eqx``)."""

    name = "npz"
    description = "NumPy files"
    types = NUMPY_CODES
    can = Can(
        compressions=("deflate",),
        digests=("crc32",),
        orders=("C", "F"),
        file_attrs=None,
        arrangement=True,
    )

    def can_in(self, path: str) -> Can:
        """Return the capabilities of a file; only an archive has room for attributes."""
        is_stream = path.lower().endswith(_STREAMS)
        return replace(self.can, file_attrs=(), arrangement=False) if is_stream else self.can

    def detect(self, head: bytes, size: int, name: str) -> bool:
        """Return whether a file is an array, or an archive whose first member is an array."""
        if head.startswith(b"PK\3\4"):
            return archive.first_name(head).endswith(_SUFFIX) or _MAGIC in head
        if head.startswith(_JSON):
            is_named = name.partition("?")[0].lower().endswith(_STREAMS[1:])
            return is_named or b"\n" + _MAGIC in head
        # The other two are archives without members: empty, or with attributes only.
        return head.startswith((_MAGIC, b"PK\5\6", b"PK\6\x08"))

    def read(self, source: Readable) -> Index:
        """Read the headers of all arrays."""
        start, notes = kit.first_bytes(source, 8), kit.Notes()
        if start.startswith((_MAGIC, *_JSON)):
            attrs, at = _preface(source)
            tensors, version = _stream(kit.Cursor(source, at), notes)
            return kit.index_of(self.name, source, tensors, attrs, notes=notes, version=version)
        members = archive.Archive(source)
        tensors, attrs = _arrays(members, notes), kit.json_object(members.extra_data())
        if not all(type(text) is str for text in attrs.values()):
            attrs = {}  # another program wrote this extra data
        if notes.warnings() and not tensors:
            raise FormatError("no member of the archive is an array", rule="Members", offset=0)
        return kit.with_arrangement(kit.index_of(self.name, source, tensors, attrs, notes=notes))

    def plan(self, draft: Draft) -> Plan:
        """Plan an archive, or arrays one after another if the path ends in ``.npy`` or ``.eqx``."""
        self.check(draft)
        if draft.path.lower().endswith(_STREAMS):
            return self._stream(draft)
        tensors, members = draft.tensors.values(), []
        for tensor in tensors:
            name, part, head = tensor.name, tensor.parts["data"], self._head(tensor)
            kit.check_text("the name", name, name)
            dims = kit.check_text("a name of an axis", kit.dims_text({name: tensor}) or "")
            members.append(archive.NewMember(name + _SUFFIX, name, head, part, dims.encode()))
        texts = kit.attribute_texts(draft, {tensor.name: tensor for tensor in tensors})
        texts.pop(kit.DIMS_KEY, None)  # stored as comments
        extra = json.dumps(texts, ensure_ascii=False).encode() if texts else b""
        return archive.plan(members, alignment=_ALIGNMENT, extra=extra)

    def _stream(self, draft: Draft) -> Plan:
        """Plan arrays one after another; an ``.npy`` file has one."""
        count = len(draft.tensors)
        if count != 1 and draft.path.lower().endswith(_SUFFIX):
            reason = f"{count} tensors, but an .npy file has one array: write .npz"
            raise UnsupportedError(reason, rule="Count")
        literals, planned, at = [], [], 0
        for tensor in draft.tensors.values():
            head, part = self._head(tensor), tensor.parts["data"]
            part = part._replace(compression=None, algorithm=None)
            literals.append(LiteralBytes(at, head))
            planned.append(PlannedPart(tensor.name, "data", part, at + len(head)))
            at += len(head) + part.nbytes
        names = [n for i, n in enumerate(draft.tensors) if count > 1 and n != f"arr_{i}"]
        dims = [tensor.name for tensor in draft.tensors.values() if any(tensor.dims or ())]
        losses = {_LOST_NAMES: names, LOST_DIMS: dims}
        return Plan(tuple(literals), tuple(planned), nbytes=at, losses=losses)

    def _head(self, tensor: WantedTensor) -> bytes:
        spelled = self.spellings[tensor.dtype]
        descr = ("|" if spelled[1:] == "1" else "<") + spelled
        values = (descr, tensor.order == "F", tensor.shape)
        text = repr(dict(zip(_KEYS, values, strict=True))).encode()
        text += b" " * (-(len(text) + 11) % _ALIGNMENT) + b"\n"
        return _MAGIC + b"\1\0" + len(text).to_bytes(2, "little") + text


class _Head(NamedTuple):
    """The header of an array."""

    descr: Any
    dtype: str | None  # None if it is unsupported
    shape: tuple[int, ...]
    is_fortran: bool
    nbytes: int | None  # of the elements; None for objects


def _read_head(content: archive.Content | kit.Cursor) -> _Head:
    """Read the header of an array."""
    start = content.take(8, _HEAD)
    version = start[6:]
    if not start.startswith(_MAGIC):
        raise FormatError(f"an array begins {start[:6]!r}", rule="Magic")
    if version not in _LENGTHS:
        reason = f"version {version[0]}.{version[1]} of arrays is unknown"
        raise UnsupportedError(reason, rule="Version")
    nbytes = int.from_bytes(content.take(_LENGTHS[version], _HEAD), "little")
    if nbytes > _LONGEST_TEXT:
        reason = f"{_HEAD} has {nbytes} bytes, more than {_LONGEST_TEXT}"
        raise UnsupportedError(reason, rule="Head")
    return _parsed(bytes(content.take(nbytes, _HEAD)), is_utf8=version == b"\3\0")


@lru_cache(maxsize=64)  # layers repeat their headers
def _parsed(data: bytes, *, is_utf8: bool) -> _Head:
    """Parse the text of a header."""
    try:
        text = data.decode("utf-8" if is_utf8 else "latin-1").strip()
        fields = _LITERAL.fullmatch(text) and ast.literal_eval(re.sub(r"(\d)L", r"\1", text))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise FormatError(f"{_HEAD} does not parse: {shown(str(data))}", rule="Head") from error
    if type(fields) is not dict or sorted(map(str, fields)) != _KEYS:
        raise FormatError(f"{_HEAD} is {shown(text)}", rule="Head")
    descr, is_fortran, shape = (fields[key] for key in _KEYS)
    sizes = shape if type(shape) is tuple and type(is_fortran) is bool else (None,)
    if [n for n in sizes if type(n) is not int or n < 0] or len(sizes) > kit.MOST_AXES:
        raise FormatError(f"{_HEAD} is invalid: {shown(text)}", rule="Head")
    is_plain = type(descr) is str and (descr[:1] in {"<", ">"} or descr[:1] + descr[2:] == "|1")
    dtype = NUMPY_CODES.get(descr[1:]) if is_plain else None
    dtype = "bfloat16" if descr == "<V2" else dtype
    if kit.is_oversized(sizes, dtype):
        raise FormatError(f"the shape {shown(str(sizes))} is too large", rule="Shape")
    itemsize = _itemsize(descr)
    size = None if itemsize is None else prod(sizes) * itemsize
    return _Head(descr, dtype, sizes, is_fortran, size)


def _has_objects(head: _Head) -> bool:
    """Return whether numpy unpickles the elements."""
    return head.nbytes is None or "O" in str(head.descr)


def _itemsize(descr: Any) -> int | None:
    """Return the size of an element in bytes; None if the type does not state it."""
    if type(descr) is str:
        match = _DESCR.fullmatch(descr)
        return int(match[2]) * (4 if match[1] == "U" else 1) if match is not None else None
    if type(descr) is not list:
        return None
    total = 0
    for field in descr:  # (name, type) or (name, type, shape)
        if type(field) is not tuple or len(field) not in {2, 3}:
            return None
        nbytes, shape = _itemsize(field[1]), field[2] if len(field) == 3 else ()
        is_shape = type(shape) is tuple and all(type(n) is int and n >= 0 for n in shape)
        if nbytes is None or not is_shape:
            return None
        total += nbytes * prod(shape)
    return total


def _tensor(name: str, head: _Head, content: Part) -> Tensor:
    """Return the tensor of an array whose elements begin some content."""
    dtype, available = head.dtype, prod(content.shape or ())
    if dtype is None or head.nbytes is None:
        reason = f"the element type {shown(str(head.descr))} is unsupported"
        if "O" in str(head.descr):
            reason += ": objects are pickles, which are never loaded"
        problem = UnsupportedError(reason, offset=content.offset, rule="Unread")
        return Tensor(name, str(head.descr)[:99], head.shape, {"data": content}, problem=problem)
    if head.nbytes > available:
        reason = f"the elements have {head.nbytes} bytes, but only {available} follow"
        cut = FormatError(reason, offset=content.offset, rule="Truncated", hint=kit.CUT)
        return Tensor(name, dtype, head.shape, {"data": content}, problem=cut.located(tensor=name))
    changes: dict[str, Any] = {"dtype": dtype, "shape": head.shape}
    changes["byteorder"] = "big" if head.descr[0] == ">" else "little"
    changes["nbytes" if content.encoding is None else "decoded_nbytes"] = head.nbytes
    if head.nbytes < available:
        changes |= {"digest": None, "within": content}
    part = replace(content, **changes)
    return Tensor(name, dtype, head.shape, {"data": part}, order="F" if head.is_fortran else "C")


# --- arrays one after another ---------------------------------------------------------------------


def _preface(source: Readable) -> tuple[dict[str, Any], int]:
    """Return the attributes in the JSON before the first array, and the offset of that array."""
    data = kit.first_bytes(source, _LONGEST_LINE + len(_MAGIC))
    at = data.find(_MAGIC)
    if at == 0:
        return {}, 0
    if at < 0:
        reason = f"no array follows in the first {len(data)} bytes"
        raise FormatError(reason, offset=0, rule="Magic")
    value: Any = None
    with suppress(ValueError, RecursionError):
        value = json.loads(data[:at].decode())
    if value is None or data[at - 1 : at] != b"\n" or not is_json(value):
        reason = f"the {at} bytes before the first array are not a line of JSON"
        raise FormatError(reason, offset=0, rule="Json")
    return (value if type(value) is dict else {"header": value}), at


def _stream(cursor: kit.Cursor, notes: kit.Notes) -> tuple[dict[str, Tensor], str]:
    """Return arrays that follow one another, by name, and the version of the first one."""
    tensors: dict[str, Tensor] = {}
    version = ".".join(map(str, cursor.peek(8)[6:]))
    while cursor.left:
        name, at = f"arr_{len(tensors)}", cursor.at
        if not _MAGIC.startswith(cursor.peek(len(_MAGIC))):
            reason = f"{cursor.left} bytes from byte {at} on are not an array"
            if len(tensors) > 1:
                hint = f"The arrays before are intact: cut the file to {at} bytes to read them"
                raise FormatError(reason, offset=at, rule="Magic", hint=hint)
            notes.add(f"{reason}, and are ignored, as by numpy; the array is intact", "arr_0")
            break
        tensor = _next_array(cursor, name, notes)
        if not tensors and tensor.dtype == "unknown" and isinstance(tensor.problem, FormatError):
            raise tensor.problem  # of the first header
        tensors[name] = tensor
    return tensors, version


def _next_array(cursor: kit.Cursor, name: str, notes: kit.Notes) -> Tensor:
    """Read an array, which extends to the end of the file if it is cut or has no stated size."""
    start, dtype = cursor.at, "unknown"
    shape: tuple[int, ...] = ()
    try:
        head = _read_head(cursor)
        shape, dtype = head.shape, head.dtype or str(head.descr)[:99]
        nbytes = cursor.left if head.nbytes is None else min(head.nbytes, cursor.left)
        tensor = _tensor(name, head, Part("uint8", (nbytes,), cursor.at, nbytes))
        if _has_objects(head):
            content, cursor.at = cursor.at, start
            scan(partial(cursor.take, cursor.left), cursor.left, name, notes)
            cursor.at = content
    except UnsupportedError as error:
        problem: CheckpointError = UnsupportedError(error.reason, offset=start, rule="Unread")
    except FormatError as error:
        problem = error.located(tensor=name, offset=start)
    else:
        cursor.at += nbytes
        if head.nbytes is None and tensor.problem is not None:
            tensor.problem.hint = "Arrays after it cannot be found: save it as a number or a text"
        return tensor
    nbytes, parts = cursor.left, {}
    if dtype == "unknown":
        shape = (nbytes,)
        parts = {"data": Part("uint8", shape, cursor.at, nbytes)}
    cursor.at += nbytes
    return Tensor(name, dtype, shape, parts, problem=problem)


# --- archives -------------------------------------------------------------------------------------


def _arrays(members: archive.Archive, notes: kit.Notes) -> dict[str, Tensor]:
    """Return the arrays of an archive, by name."""
    names = [member.name for member in members.members]
    times = Counter(name.removesuffix(_SUFFIX) for name in names)
    ambiguous = {name for name in names if times[name.removesuffix(_SUFFIX)] > 1}
    tensors: dict[str, Tensor] = {}
    for member, content in members.contents():
        key = member.name.removesuffix(_SUFFIX)
        name = member.name if {key, member.name} & ambiguous else key
        try:
            head = _read_head(content)
            tensor = _tensor(name, head, content.rest())
            if _has_objects(head):
                scan(content.whole, member.nbytes, shown(name), notes)
        except UnsupportedError as error:
            part = content.rest()
            problem = UnsupportedError(error.reason, offset=part.offset, rule="Unread")
            tensor = Tensor(name, "unknown", part.shape or (), {"data": part}, problem=problem)
        except FormatError as error:
            if member.name.endswith(_SUFFIX):
                raise error.located(tensor=name, offset=content.at) from error.__cause__
            if not member.name.endswith("/"):
                notes.add("not an array, and left out", f"member {shown(member.name)}")
            continue
        if tensor.problem is None and tensor.parts["data"].within is not None:
            reason = "by the directory, its member has bytes after the array, which are ignored"
            notes.add(reason, f"tensor {shown(name)}")
        tensors |= kit.with_dims({name: tensor}, member.comment.decode(errors="replace"))
    return tensors
