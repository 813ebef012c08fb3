"""Attributes that a new file does not keep, found by reading its plan before it is written.

Whether a format keeps an attribute depends on its value, on other attributes and on the tensors:
it may derive the same value, replace another one, or have room for it only in an unsharded file.
So the reader of the format reads the planned headers, with zeros instead of data.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import replace
from math import isclose, isnan
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from xckpt.errors import FormatError
from xckpt.formats.plan import Draft, LiteralBytes, Plan, Written
from xckpt.storage.digests import Hasher
from xckpt.writing.fitting import FILE_ATTRS, TENSOR_ATTRS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from xckpt.formats import Format, Readable
    from xckpt.index import Index, Tensor

_REPLACED = {
    FILE_ATTRS: "attributes of the file that it states otherwise",
    TENSOR_ATTRS: "attributes of tensors that the file states otherwise",
}
# Attribute of an index of shards: the number of bytes of all tensors.
_SIZE_OF_INDEX = "total_size"


def changed_attributes(
    draft: Draft,
    plan: Plan,
    writer: Format,
    *,
    given: Collection[str],
    before: Callable[[], Index | None],
    grown: Readable | None,
) -> Iterator[tuple[str, str]]:
    """Yield the changes of attributes in a planned file, as the kind of change and the name."""
    can = writer.can_in(draft.path)
    names = {
        change: {*can.stated_attrs, *(supported if isinstance(supported, tuple) else ())}
        for change, supported in ((FILE_ATTRS, can.file_attrs), (TENSOR_ATTRS, can.tensor_attrs))
    }
    # Options of the format replace attributes of the file with the same name.
    names[FILE_ATTRS].difference_update(given)
    tensor_attrs = [(TENSOR_ATTRS, tensor.name, tensor.attrs) for tensor in draft.tensors.values()]
    candidates = [
        (change, tensor, key, attrs[key])
        for change, tensor, attrs in [(FILE_ATTRS, None, draft.attrs), *tensor_attrs]
        for key in attrs
        if key in names[change]
    ]
    if not candidates:
        return
    files = _planned_files(draft.path, plan, grown)  # `grown` is the file that is appended to
    # An index of shards has no format, so its shards are read instead.
    indexes = [writer.read(files[name]) for name in (plan.companions if plan.is_index else [""])]
    offsets = {planned.tensor: planned.offset for planned in reversed(plan.parts)}
    if plan.is_index:
        stated = json.loads(bytes(files[""].read(0, files[""].size)))["metadata"]
        indexes.append(replace(indexes[0], tensors={}, attrs=stated))
    attrs_of = _attrs_in(indexes, offsets)
    lost = []
    for change, tensor, key, value in candidates:
        attrs = attrs_of(tensor)
        if key not in attrs or not _is_same(value, attrs[key]):
            lost.append((change, key, value, key in attrs))
    # An attribute with the value that an old file stated is not lost if the format derives it.
    old = before() if lost else None
    derived: dict[str, set[tuple[str, str]]] = {FILE_ATTRS: set(), TENSOR_ATTRS: set()}
    if old is not None:
        derived[FILE_ATTRS] = {(key, repr(value)) for key, value in old.attrs.items()}
        derived[TENSOR_ATTRS] = {
            (key, repr(value))
            for tensor in old.tensors.values()
            for key, value in tensor.attrs.items()
        }
    for change, key, value, is_replaced in lost:
        if not is_replaced and key not in can.stated_attrs:
            yield change, key
        elif (key, repr(value)) not in derived[change]:
            yield (_REPLACED[change] if is_replaced else change), key


def stated_before(index: Index, format: str) -> Index | None:
    """Return an old file whose attributes a format derives anew; None if it derives none.

    Of another format, that is the size in an index of shards, which is the same for all formats.
    """
    if index.format == format:
        return index
    if index.checkpoint is None or index.checkpoint.by != "index":
        return None
    sizes = {key: value for key, value in index.attrs.items() if key == _SIZE_OF_INDEX}
    return replace(index, tensors={}, attrs=sizes)


def _attrs_in(
    indexes: Sequence[Index], offsets: Mapping[str, int | None]
) -> Callable[[str | None], Mapping[str, Any]]:
    """Return a function from a tensor's name to its attributes; None stands for the file."""
    file_attrs: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    by_offset: dict[int | None, Tensor] = {}
    for index in reversed(indexes):
        file_attrs |= index.attrs
        tensors |= index.tensors
        for tensor in index.tensors.values():
            by_offset |= {
                part.offset: tensor for part in tensor.parts.values() if part.shard is None
            }

    def attrs_of(name: str | None) -> Mapping[str, Any]:
        if name is None:
            return file_attrs
        # Some formats rename tensors, but their offsets are planned.
        actual = tensors.get(name) or by_offset.get(offsets.get(name))
        return {} if actual is None else actual.attrs

    return attrs_of


def _is_same(value: Any, actual: Any) -> bool:
    """Return whether a file has a value: exactly, as text, in 32 bits, or with more keys."""
    if isinstance(value, dict) and isinstance(actual, dict):
        return all(key in actual and _is_same(value[key], actual[key]) for key in value)
    if isinstance(value, list | tuple) and isinstance(actual, list | tuple):
        return len(value) == len(actual) and all(map(_is_same, value, actual))
    if isinstance(value, float) and isinstance(actual, float) and not isnan(value):
        return isclose(value, actual, rel_tol=2**-24)
    return repr(value) == repr(actual) or str(value) == actual


class _PlannedFile:
    """A planned file for a reader of headers, with zeros instead of data."""

    def __init__(self, name: str, files: Mapping[str, _PlannedFile], old: Readable | None) -> None:
        self.name, self._files, self._old = name, files, old
        self.size = old.size if old else 0
        self._literals: list[tuple[int, bytes]] = []

    def put(self, literals: Iterable[LiteralBytes]) -> None:
        """Add literal bytes."""
        for literal in literals:
            offset = self.size if literal.offset is None else literal.offset
            self._literals.append((offset, literal.data))
            self.size = max(self.size, offset + len(literal.data))
        self._literals.sort(key=itemgetter(0))

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return exactly `nbytes` bytes."""
        end = offset + nbytes
        if not 0 <= offset <= end <= self.size:
            raise FormatError("these bytes are not planned", path=self.name, offset=offset)
        buffer = bytearray(nbytes)
        if self._old is not None and offset < self._old.size:
            prefix = self._old.read(offset, min(end, self._old.size) - offset)
            buffer[: len(prefix)] = prefix
        first = bisect_right(self._literals, offset, key=itemgetter(0)) - 1
        for position, data in self._literals[max(first, 0) :]:
            if position >= end:
                break
            start, stop = max(position, offset), min(position + len(data), end)
            if start < stop:
                literal = data[start - position : stop - position]
                buffer[start - offset : stop - offset] = literal
        return memoryview(buffer)

    def sibling(self, name: str) -> _PlannedFile:
        """Return another file of the plan."""
        if name not in self._files:
            raise FileNotFoundError(name)
        return self._files[name]

    def folders(self) -> tuple[str, ...]:
        """Return no folders."""
        return ()


def _planned_files(path: str, plan: Plan, old: Readable | None) -> dict[str, _PlannedFile]:
    """Return the planned files by name; the main file has the name ""."""
    plans = {**plan.companions, "": plan}
    files: dict[str, _PlannedFile] = {}
    written: dict[tuple[str, str], Written] = {}
    folder, slash, basename = path.rpartition("/")
    for name, file_plan in plans.items():
        file = _PlannedFile(folder + slash + (name or basename), files, None if name else old)
        files[name] = file
        position = file.size
        alignment = file_plan.alignment
        for planned in file_plan.parts:
            part, offset = planned.part, planned.offset
            if offset is None:
                offset = -(-(position + planned.gap) // alignment) * alignment
            digest = None
            if part.algorithm is not None:
                digest = f"{part.algorithm}:{Hasher(part.algorithm).value().hex()}"
            # The compressed size is unknown, but no attribute depends on it.
            written[planned.tensor, planned.role] = Written(offset, part.nbytes, digest)
            position = offset + part.nbytes
            file.size = max(file.size, position)
        file.put(file_plan.literals)
    for name, file_plan in plans.items():
        file = files[name]
        file.put(file_plan.finish(written))
        file.size = file.size if file_plan.nbytes is None else file_plan.nbytes
    return files
