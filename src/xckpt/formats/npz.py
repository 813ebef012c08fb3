r"""NumPy's files: arrays in a zip archive (``.npz``) and one array (``.npy``), versions 1.0 to 3.0.

An array is a head and its elements; integers are little-endian::

    "\x93NUMPY"  major u8, minor u8     1.0, 2.0 or 3.0
    length u16, in 2.0 and 3.0 u32      of the text, at most 65536
    text, padded with spaces to "\n"    in Latin-1, in 3.0 in UTF-8
    elements

The text is a literal of Python with exactly three keys; it is never evaluated::

    {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }

``descr`` is a byte order (``<``, ``>``, ``|``), a kind, and a size in bytes. Other types are listed
and not read: text, dates, records, and objects, which are pickles and never loaded.

In an archive each member is such an array, stored or deflated, and called by a key and ``.npy``;
where members ``x`` and ``x.npy`` are both there, they keep their names. Other members are left out.
One that is encrypted or compressed otherwise is listed and not read. The directory has the CRC-32
of head and elements, and thus of the elements. The array of an ``.npy`` file is called ``arr_0``.

Version 1.0 is written. Elements begin at multiples of 64 bytes; deflated ones follow their head,
which is a block of its own. The names of axes of an array are in the comment of its member. What
else an object is, coordinates and attributes, is a JSON object of texts in the extra data of the
archive; numpy takes no notice of it.

References: numpy/lib/_format_impl.py and _npyio_impl.py of github.com/numpy/numpy, 2.3; for
archives `xckpt.formats.archive`.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

from xckpt.elements import NUMPY_CODES, nbytes_of
from xckpt.errors import FormatError, UnsupportedError, shown
from xckpt.formats import Can, Format, Readable, archive, kit
from xckpt.formats.plan import LOST_DIMS, Draft, Plan, PlannedPart, WantedTensor
from xckpt.index import Index, Part, Tensor

_MAGIC, _SUFFIX, _ALIGNMENT, _LONGEST_TEXT = b"\x93NUMPY", ".npy", 64, 1 << 16
_LENGTHS = {b"\1\0": 2, b"\2\0": 4, b"\3\0": 4}
_KEYS = ["descr", "fortran_order", "shape"]
_HEAD = "the head of an array"
# Nothing in it can be called. Python 2 wrote integers with an L. Digits are taken all at once, or
# there are as many ways to split them as there are numbers of so many bits.
_LITERAL = re.compile(r"(?:[\s{}()\[\],:]|True|False|\d++L?|'[^'\\\n]*'|\"[^\"\\\n]*\")*")


class Npz(Format):
    """NumPy's archives of arrays (``.npz``) and single arrays (``.npy``)."""

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
        """Return what a file can hold: one of a single array has no room for attributes."""
        is_single = path.lower().endswith(_SUFFIX)
        return replace(self.can, file_attrs=(), arrangement=False) if is_single else self.can

    def detect(self, head: bytes, size: int, name: str) -> bool:
        """Whether it is an array, or an archive whose first member is one."""
        if not head.startswith(b"PK\3\4"):
            # The others are archives of nothing, or of attributes alone.
            return head.startswith((_MAGIC, b"PK\5\6", b"PK\6\x08"))
        return archive.first_name(head).endswith(_SUFFIX) or _MAGIC in head

    def read(self, source: Readable) -> Index:
        """Read the heads of all arrays."""
        start = bytes(source.read(0, min(8, source.size)))
        is_single, notes = start.startswith(_MAGIC), kit.Notes()
        members = archive.Archive(source, "arr_0.npy" if is_single else None)
        tensors, attrs = _arrays(members, notes), kit.json_object(members.extra_data())
        if not all(type(text) is str for text in attrs.values()):
            attrs = {}  # which others put there
        texts = notes.warnings()
        if texts and not tensors:
            raise FormatError("no member of the archive is an array", rule="Members", offset=0)
        version, size = ".".join(map(str, start[6:])) if is_single else "", source.size
        index = Index(self.name, version, tensors, attrs, source.name, size, warnings=texts)
        return kit.arranged(index)

    def plan(self, draft: Draft) -> Plan:
        """Lay out an archive; where the path ends in ``.npy``, the file of one array."""
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
        texts.pop(kit.DIMS_KEY, None)  # which are comments
        extra = json.dumps(texts, ensure_ascii=False).encode() if texts else b""
        return archive.plan(members, alignment=_ALIGNMENT, extra=extra)

    def _head(self, tensor: WantedTensor) -> bytes:
        spelled = self.spelled[tensor.dtype]
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
        raise UnsupportedError(f"an array of version {version[0]}.{version[1]}", rule="Version")
    nbytes = int.from_bytes(content.take(_LENGTHS[version], _HEAD), "little")
    if nbytes > _LONGEST_TEXT:
        raise UnsupportedError(f"a head of {nbytes} > {_LONGEST_TEXT} bytes", rule="Head")
    data = content.take(nbytes, _HEAD)
    try:
        text = data.decode("utf-8" if version == b"\3\0" else "latin-1").strip()
        fields = _LITERAL.fullmatch(text) and ast.literal_eval(re.sub(r"(\d)L", r"\1", text))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise FormatError(f"{_HEAD} does not parse: {shown(str(data))}", rule="Head") from error
    if type(fields) is not dict or sorted(map(str, fields)) != _KEYS:
        raise FormatError(f"{_HEAD} is {shown(text)}", rule="Head")
    return [fields[key] for key in _KEYS]


def _tensor(name: str, head: list[Any], rest: Part, notes: kit.Notes) -> Tensor:
    """Describe an array, of which the rest has the elements as bytes."""
    descr, is_fortran, shape = head
    is_plain = type(descr) is str and (descr[:1] in {"<", ">"} or descr[:1] + descr[2:] == "|1")
    dtype = NUMPY_CODES.get(descr[1:]) if is_plain else None
    sizes = shape if type(shape) is tuple and type(is_fortran) is bool else (None,)
    if [n for n in sizes if type(n) is not int or n < 0] or len(sizes) > kit.MOST_AXES:
        raise FormatError(f"no array is {shown(repr(head))}", rule="Head")
    if kit.is_oversized(sizes, dtype):
        raise FormatError(f"no array is as large as {shown(str(sizes))}", rule="Shape")
    if dtype is None:
        reason = f"elements of the type {shown(str(descr))} are not read"
        reason += ": objects are pickles, which are never loaded" if "O" in str(descr) else ""
        problem = UnsupportedError(reason, offset=rest.offset, rule="Unread")
        return Tensor(name, str(descr)[:99], shape, {"data": rest}, problem=problem)
    nbytes, left = nbytes_of(dtype, prod(shape)), prod(rest.shape or ())
    if nbytes > left:
        raise FormatError(f"{nbytes} bytes of elements, but {left} are left", rule="Truncated")
    if nbytes < left:
        reason = "by the directory, its member has bytes after the array, which are ignored"
        notes.add(reason, f"tensor {shown(name)}")
        rest = replace(rest, digest=None, within=rest)
    of: Any = {"nbytes" if rest.encoding is None else "decoded_nbytes": nbytes}
    of["byteorder"] = "big" if descr[0] == ">" else "little"
    part = replace(rest, dtype=dtype, shape=shape, **of)
    return Tensor(name, dtype, shape, {"data": part}, order="F" if is_fortran else "C")


def _arrays(members: archive.Archive, notes: kit.Notes) -> dict[str, Tensor]:
    """Describe the arrays of an archive."""
    names = [member.name for member in members.members]
    times = Counter(name.removesuffix(_SUFFIX) for name in names)
    kept = {name for name in names if times[name.removesuffix(_SUFFIX)] > 1}
    tensors: dict[str, Tensor] = {}
    for member, content in members.contents():
        key = member.name.removesuffix(_SUFFIX)
        name = member.name if {key, member.name} & kept else key
        try:
            tensor = _tensor(name, _read_head(content), content.rest(), notes)
        except UnsupportedError as error:
            rest = content.rest()
            problem = UnsupportedError(error.reason, offset=rest.offset, rule="Unread")
            tensor = Tensor(name, "unknown", rest.shape or (), {"data": rest}, problem=problem)
        except FormatError as error:
            if member.name.endswith(_SUFFIX):
                raise error.located(tensor=name, offset=content.at) from error.__cause__
            if not member.name.endswith("/"):
                notes.add("not an array, and left out", f"member {shown(member.name)}")
            continue
        tensors |= kit.with_dims({name: tensor}, member.comment.decode(errors="replace"))
    return tensors
