r"""NumPy files: a zip archive of arrays (``.npz``) or one array (``.npy``), versions 1.0 to 3.0.

`numpy.savez` and `numpy.save` write them. An array is a header followed by its elements; integers
are little-endian::

    "\x93NUMPY"  major u8, minor u8     1.0, 2.0 or 3.0
    length u16, in 2.0 and 3.0 u32      length of the text, at most 65536
    text, padded with spaces to "\n"    in Latin-1, in 3.0 in UTF-8
    elements

The text is a Python literal with exactly three keys; xckpt parses it without evaluating code::

    {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }

``descr`` is a byte order (``<``, ``>``, ``|``), a kind, and a size in bytes. Arrays of other types
are listed, but cannot be read: text, dates, records, and objects, which would be pickles.

Each member of an archive is such an array, stored or deflated. Its name is a key and ``.npy``; if
members ``x`` and ``x.npy`` both exist, they keep their names. Members that are not arrays are left
out; members that are encrypted or have another compression are listed, but cannot be read. The
directory has the CRC-32 of a header with its elements, from which xckpt computes the CRC-32 of the
elements. The array of an ``.npy`` file has the name ``arr_0``.

xckpt writes version 1.0. Elements begin at multiples of 64 bytes. The header of a deflated array is
a separate deflate block. The comment of a member has the names of axes of its array. Coordinates
and attributes are a JSON object of texts in the extra data of the archive, which numpy ignores.

Specification: numpy/lib/_format_impl.py and _npyio_impl.py of github.com/numpy/numpy, 2.3; see
`xckpt.formats.archive` for archives.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any, Literal

from xckpt.elements import NUMPY_CODES, nbytes_of
from xckpt.errors import FormatError, UnsupportedError, shown
from xckpt.formats import Can, Format, Readable, archive, kit
from xckpt.formats.plan import LOST_DIMS, Draft, Plan, PlannedPart, WantedTensor
from xckpt.index import Index, Part, Tensor

_MAGIC, _SUFFIX, _ALIGNMENT, _LONGEST_TEXT = b"\x93NUMPY", ".npy", 64, 1 << 16
_LENGTHS = {b"\1\0": 2, b"\2\0": 4, b"\3\0": 4}
_KEYS = ["descr", "fortran_order", "shape"]
_HEAD = "the header of an array"
# Literals without calls. Python 2 wrote integers with an L. The possessive quantifier prevents
# exponential backtracking over the ways to split digits.
_LITERAL = re.compile(r"(?:[\s{}()\[\],:]|True|False|\d++L?|'[^'\\\n]*'|\"[^\"\\\n]*\")*")


class Npz(Format):
    """NumPy archives of arrays (``.npz``) and single arrays (``.npy``)."""

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
        """Return the capabilities of a file; an ``.npy`` file has no room for attributes."""
        is_single = path.lower().endswith(_SUFFIX)
        return replace(self.can, file_attrs=(), arrangement=False) if is_single else self.can

    def detect(self, head: bytes, size: int, name: str) -> bool:
        """Return whether a file is an array, or an archive whose first member is an array."""
        if not head.startswith(b"PK\3\4"):
            # The other two are archives without members: empty, or with attributes only.
            return head.startswith((_MAGIC, b"PK\5\6", b"PK\6\x08"))
        return archive.first_name(head).endswith(_SUFFIX) or _MAGIC in head

    def read(self, source: Readable) -> Index:
        """Read the headers of all arrays."""
        start = bytes(source.read(0, min(8, source.size)))
        is_single, notes = start.startswith(_MAGIC), kit.Notes()
        members = archive.Archive(source, "arr_0.npy" if is_single else None)
        tensors, attrs = _arrays(members, notes), kit.json_object(members.extra_data())
        if not all(type(text) is str for text in attrs.values()):
            attrs = {}  # another program wrote this extra data
        if notes.warnings() and not tensors:
            raise FormatError("no member of the archive is an array", rule="Members", offset=0)
        version = ".".join(map(str, start[6:])) if is_single else ""
        index = kit.index_of(self.name, source, tensors, attrs, notes=notes, version=version)
        return kit.with_arrangement(index)

    def plan(self, draft: Draft) -> Plan:
        """Plan an archive, or the file of one array if the path ends in ``.npy``."""
        self.check(draft)
        tensors, members = draft.tensors.values(), []
        if draft.path.lower().endswith(_SUFFIX):
            if len(tensors) != 1:
                reason = f"{len(tensors)} tensors, but an .npy file has one array: write .npz"
                raise UnsupportedError(reason, rule="Count")
            [tensor] = tensors
            head = self._head(tensor)
            part = tensor.parts["data"]._replace(compression=None, algorithm=None)
            planned = PlannedPart(tensor.name, "data", part, len(head))
            losses = {LOST_DIMS: [tensor.name] if any(tensor.dims or ()) else []}
            return replace(Plan.headed(head, [planned], len(head) + part.nbytes), losses=losses)
        for tensor in tensors:
            name, part, head = tensor.name, tensor.parts["data"], self._head(tensor)
            kit.check_text("the name", name, name)
            dims = kit.check_text("a name of an axis", kit.dims_text({name: tensor}) or "")
            members.append(archive.NewMember(name + _SUFFIX, name, head, part, dims.encode()))
        texts = kit.attribute_texts(draft, {tensor.name: tensor for tensor in tensors})
        texts.pop(kit.DIMS_KEY, None)  # stored as comments
        extra = json.dumps(texts, ensure_ascii=False).encode() if texts else b""
        return archive.plan(members, alignment=_ALIGNMENT, extra=extra)

    def _head(self, tensor: WantedTensor) -> bytes:
        spelled = self.spellings[tensor.dtype]
        descr = ("|" if spelled[1:] == "1" else "<") + spelled
        values = (descr, tensor.order == "F", tensor.shape)
        text = repr(dict(zip(_KEYS, values, strict=True))).encode()
        text += b" " * (-(len(text) + 11) % _ALIGNMENT) + b"\n"
        return _MAGIC + b"\1\0" + len(text).to_bytes(2, "little") + text


def _read_head(content: archive.Content) -> list[Any]:
    """Read ``descr``, ``fortran_order`` and ``shape``."""
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
    data = content.take(nbytes, _HEAD)
    try:
        text = data.decode("utf-8" if version == b"\3\0" else "latin-1").strip()
        fields = _LITERAL.fullmatch(text) and ast.literal_eval(re.sub(r"(\d)L", r"\1", text))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise FormatError(f"{_HEAD} does not parse: {shown(str(data))}", rule="Head") from error
    if type(fields) is not dict or sorted(map(str, fields)) != _KEYS:
        raise FormatError(f"{_HEAD} is {shown(text)}", rule="Head")
    return [fields[key] for key in _KEYS]


def _tensor(name: str, head: list[Any], content: Part, notes: kit.Notes) -> Tensor:
    """Return the tensor of an array with some header and content: its elements as bytes."""
    descr, is_fortran, shape = head
    is_plain = type(descr) is str and (descr[:1] in {"<", ">"} or descr[:1] + descr[2:] == "|1")
    dtype = NUMPY_CODES.get(descr[1:]) if is_plain else None
    sizes = shape if type(shape) is tuple and type(is_fortran) is bool else (None,)
    if [n for n in sizes if type(n) is not int or n < 0] or len(sizes) > kit.MOST_AXES:
        raise FormatError(f"{_HEAD} is invalid: {shown(repr(head))}", rule="Head")
    if kit.is_oversized(sizes, dtype):
        raise FormatError(f"the shape {shown(str(sizes))} is too large", rule="Shape")
    if dtype is None:
        reason = f"the element type {shown(str(descr))} is unsupported"
        reason += ": objects are pickles, which are never loaded" if "O" in str(descr) else ""
        problem = UnsupportedError(reason, offset=content.offset, rule="Unread")
        return Tensor(name, str(descr)[:99], shape, {"data": content}, problem=problem)
    nbytes, available = nbytes_of(dtype, prod(shape)), prod(content.shape or ())
    if nbytes > available:
        reason = f"the elements have {nbytes} bytes, but only {available} follow"
        cut = FormatError(reason, offset=content.offset, rule="Truncated", hint=kit.CUT)
        return Tensor(name, dtype, shape, {"data": content}, problem=cut.located(tensor=name))
    if nbytes < available:
        reason = "by the directory, its member has bytes after the array, which are ignored"
        notes.add(reason, f"tensor {shown(name)}")
        content = replace(content, digest=None, within=content)
    if content.encoding is None:
        content = replace(content, nbytes=nbytes)
    else:
        content = replace(content, decoded_nbytes=nbytes)
    byteorder: Literal["little", "big"] = "big" if descr[0] == ">" else "little"
    part = replace(content, dtype=dtype, shape=shape, byteorder=byteorder)
    return Tensor(name, dtype, shape, {"data": part}, order="F" if is_fortran else "C")


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
            tensor = _tensor(name, _read_head(content), content.rest(), notes)
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
        tensors |= kit.with_dims({name: tensor}, member.comment.decode(errors="replace"))
    return tensors
