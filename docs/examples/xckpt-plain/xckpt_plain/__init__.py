"""Plain tensors (``.plain``): a JSON header, and the data of all tensors in its order.

A file begins with ``PLAIN1`` and the size of the header, a little-endian u32. The header maps names
to element types and shapes, ``{"w": ["float32", [2, 3]]}``; elements are little-endian.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import prod

from xckpt.elements import nbytes_of
from xckpt.errors import FormatError
from xckpt.formats import Can, Format, Readable, kit
from xckpt.formats.plan import LOST_DIMS, Draft, Plan, place_parts
from xckpt.index import Index, Part, Tensor

_MAGIC = b"PLAIN1"
_TYPES = {name: name for name in ("float32", "float64", "int64", "uint8", "bfloat16")}


class Plain(Format):
    """Plain tensors (``.plain``)."""

    name = "plain"
    contract = 1
    description = "plain tensors"
    suffixes = (".plain",)
    types = _TYPES
    can = Can()

    def detect(self, head: bytes, size: int, name: str) -> bool:
        """Return whether the file begins with the magic bytes."""
        return head.startswith(_MAGIC)

    def read(self, source: Readable) -> Index:
        """Read the header."""
        cursor = kit.Cursor(source)
        if cursor.take(6, "the magic bytes") != _MAGIC:
            raise FormatError("the file does not begin with PLAIN1", rule="Magic", offset=0)
        length = int.from_bytes(cursor.take(4, "the size of the header"), "little")
        text = cursor.take(length, "the header")
        try:
            header = kit.mapping("the header", kit.decode_json(text, "the header", deepest=3))
            tensors = kit.read_each(header.items(), partial(_tensor, cursor))
        except FormatError as error:
            error.offset = 10 if error.offset is None else error.offset
            raise
        if cursor.left:
            raise FormatError(f"{cursor.left} bytes follow", rule="Size", offset=cursor.at)
        return Index(self.name, "1", tensors, source=source.name, nbytes=source.size)

    def plan(self, draft: Draft) -> Plan:
        """Plan the header, and the data after it."""
        self.check(draft)
        entries = {t.name: [self.spellings[t.dtype], t.shape] for t in draft.tensors.values()}
        header = json.dumps(entries).encode()
        head = _MAGIC + len(header).to_bytes(4, "little") + header
        ends = [0, *accumulate(nbytes_of(t.dtype, t.size) for t in draft.tensors.values())]
        parts = place_parts(draft.tensors.values(), ends, len(head))
        named = [t.name for t in draft.tensors.values() if any(t.dims or ())]
        plan = Plan.headed(head, parts, len(head) + ends[-1])
        return replace(plan, losses={LOST_DIMS: named})


def _tensor(cursor: kit.Cursor, name: str, entry: object) -> Tensor:
    if not isinstance(entry, list) or len(entry) != 2 or entry[0] not in _TYPES:
        raise FormatError("an entry must be [type, shape]", rule="Entry")
    dtype, shape = entry[0], kit.as_shape(entry[1], kit.LARGEST // 8)
    part = Part(dtype, shape, cursor.at, nbytes_of(dtype, prod(shape)))
    cursor.skip(part.nbytes, "data")
    return Tensor(name, dtype, shape, {"data": part})
