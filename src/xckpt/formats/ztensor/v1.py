"""Versions 0.1 to 1.2 of zTensor: a reader for all, and a writer for 1.0.

Version 0.1 is an array of tensors with one blob each. Its entries have arbitrary attributes next to
the fields of the format. Sparse layouts pack all their arrays into the blob; no published writer
creates such files.

Versions 1.0, 1.1 and 1.2 share a magic. Files of 1.0 end with the size of the manifest; files of
1.1 and 1.2 end with the magic once more. Version 1.2 only adds to 1.1. Comments explain each
decision where the specification of 1.0 contradicts itself or real files.

The writer produces the same bytes as the reference implementation of version 1.0 (tag 1.0.1): the
magic, blobs at multiples of 64 in the order of the file that they are copied from, or else of the
draft, the manifest with tensors sorted by their UTF-8 bytes, and its length. The manifest comes
last because the sizes of compressed blobs and the digests are unknown before writing. The reference
implementation, unlike the specification, requires `generator` and `attributes` in the root, with
texts as values. The specification has no attributes of tensors; xckpt stores them as in version
1.1, in a field that readers of version 1.0 ignore.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from xckpt.elements import ELEMENT_TYPES
from xckpt.errors import CheckpointError, FormatError, UnsupportedError, escaped, shown
from xckpt.formats import kit
from xckpt.formats.kit import mapping, mistyped, number
from xckpt.formats.plan import Draft, LiteralBytes, Plan, WantedTensor, Written, by_source
from xckpt.formats.ztensor import manifest
from xckpt.index import Index, Part, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from xckpt.readable import Readable


MAGIC_0, MAGIC = b"ZTEN0001", b"ZTEN1000"

_ALIGNMENT = 64
_HEAD = _FOOTER = 8
_VERSION = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})(?:\.[0-9]{1,9})?")
_FIELDS_0 = {"name", "offset", "size", "dtype", "layout", "shape", "encoding", "checksum"}
_FIELDS_0 |= {"data_endianness"}
_INDEX_NBYTES = 8
_INDICES = frozenset({"indices", "indptr", "coords"})
_ALGORITHMS = frozenset({"crc32c", "sha256"})
# Stored encodings and digests by requested compression and digest.
_ENCODINGS = {None: None, "zstd": "zstd", "zstd-seekable": "zstd"}
_DIGESTS = {None: None, "crc32c": "crc32c", "sha256": "sha256", "xxh3": "crc32c"}
_GENERATOR = "xckpt"
# Of the 128 levels that the reference implementation reads, a tensor's attributes are the fourth.
_LEVELS = 125


def read(source: Readable, magic: bytes) -> Index:
    """Read a file of version 0.1, 1.0, 1.1 or 1.2."""
    tail = bytes(source.read(source.size - 16, 16))
    # Files of 0.1 and 1.0 end with the length of the manifest; 1.1 and 1.2 repeat the magic.
    has_one_magic = tail[8:] != MAGIC or magic == MAGIC_0
    footer = 8 if has_one_magic else 16
    length = int.from_bytes(tail[16 - footer :][:8], "little")
    start = manifest.locate(source.size, footer, length)
    ranges = _Ranges(source.size, start)
    attrs: dict[str, Any] = {}
    with kit.locating(offset=start):
        # A file of version 0.1 with only a head and a footer has no manifest.
        empty = magic == MAGIC_0 and not length and source.size == _HEAD + _FOOTER
        root: Any = [] if empty else manifest.decode(bytes(source.read(start, length)))
        if magic == MAGIC_0:
            version, tensors = "0.1", kit.read_each(_entries_0(root), partial(_tensor_0, ranges))
        else:
            known_minor = 0 if has_one_magic else 2
            version = _version(mapping("manifest", root), known_minor, ranges.notes)
            key = "tensors" if has_one_magic else "objects"
            components = _Components(ranges, is_1_0=has_one_magic)
            entries = manifest.pop_entries(mapping(key, root.get(key)), manifest.text)
            tensors = kit.read_each(entries, components.tensor)
            attrs = manifest.attributes(root.get("attributes"))
            if "generator" in root:
                generator = manifest.attributes({"generator": root["generator"]})
                attrs.setdefault("generator", generator["generator"])
    index = kit.index_of("ztensor", source, tensors, attrs, notes=ranges.notes, version=version)
    return kit.with_arrangement(index)


class _Ranges:
    """Checks byte ranges in one file; notes unusual ranges that the specifications permit."""

    def __init__(self, size: int, data_end: int) -> None:
        self._size = size
        self._data_end = data_end
        self.notes = kit.Notes()

    def check(self, tensor: str, offset: Any, nbytes: Any) -> tuple[int, int]:
        end = number("offset", offset) + number("length", nbytes)
        if end > self._size:
            reason = f"bytes {offset} to {end} are not in a file of {self._size}"
            raise FormatError(reason, rule="BlobBounds")
        if offset % _ALIGNMENT:
            reason = "not at a multiple of 64, which is slower to read"
            self.notes.add(reason, manifest.place(tensor, offset))
        if nbytes and (offset < _HEAD or end > self._data_end):
            reason = "overlapping the head or the manifest"
            self.notes.add(reason, manifest.place(tensor, offset))
        return offset, nbytes

    def note_digest(self, tensor: str, offset: int, digest: str) -> None:
        """Note a digest of an unknown algorithm."""
        manifest.note_digest(self.notes, _ALGORITHMS, tensor, offset, digest)


# --- reading 0.1 ----------------------------------------------------------------------------------


def _entries_0(entries: Any) -> Iterator[tuple[str, dict[Any, Any]]]:
    if type(entries) is not list:
        raise mistyped("manifest", entries, "an array")
    names = set()
    for entry in entries:
        name = manifest.text("name", mapping("tensor", entry).get("name"))
        if name in names:
            raise FormatError("two tensors have this name", tensor=name, rule="NameCollision")
        names.add(name)
        yield name, entry


def _tensor_0(ranges: _Ranges, name: str, entry: Mapping[Any, Any]) -> Tensor:
    shape = kit.as_shape(entry.get("shape"), manifest.MOST_ELEMENTS)
    layout = manifest.text("layout", entry.get("layout"))
    spelled = manifest.text("dtype", entry.get("dtype"))
    dtype = manifest.LONG.get(spelled)
    offset, nbytes = ranges.check(name, entry.get("offset"), entry.get("size"))
    encoding = entry.get("encoding")
    if encoding is not None and manifest.text("encoding", encoding) == "raw":
        encoding = None
    digest = entry.get("checksum")
    if digest is not None:
        ranges.note_digest(name, offset, manifest.text("checksum", digest))
    attrs = manifest.attributes(
        {key: value for key, value in entry.items() if key not in _FIELDS_0 and type(key) is str}
    )
    blob = Part("uint8", None, offset, nbytes, encoding, digest=digest)
    problem = None
    if encoding not in {None, "zstd"}:
        problem = manifest.unknown_error("encoding", encoding, name, offset)
    if layout == "dense" and dtype is not None and problem is None:
        order = entry.get("data_endianness")
        if order is not None and manifest.text("data_endianness", order) not in {"little", "big"}:
            raise FormatError(f"the byte order {shown(order)}", rule="Schema")
        # Writers state the byte order of raw data only; compressed data are little-endian.
        is_big = order == "big" and encoding is None
        part = replace(blob, dtype=dtype, shape=shape, byteorder="big" if is_big else "little")
        manifest.check_dense(part, shape)
        return Tensor(name, dtype, shape, {"data": part}, attrs=attrs)
    if layout == "dense":
        problem = problem or manifest.unknown_error("element type", spelled, name, offset)
        parts = {"data": manifest.flattened(blob)}
        return Tensor(name, dtype or spelled, shape, parts, attrs=attrs, problem=problem)
    if layout == "sparsecsr" and dtype is not None and encoding is None:
        return Tensor(name, dtype, shape, _rows_0(dtype, shape, blob), "sparse_csr", attrs=attrs)
    # "sparsecoo" interleaves coordinates and values, so the blob is not an array.
    attrs[manifest.LAYOUT_KEY] = layout
    parts = {"data": manifest.flattened(blob)}
    dtype = dtype or "uint8"
    return Tensor(name, dtype, shape, parts, "structural", attrs=attrs, problem=problem)


def _rows_0(dtype: str, shape: manifest.Shape, blob: Part) -> dict[str, Part]:
    """Split a blob of row pointers, column indices and values into parts."""
    if len(shape) != 2:
        raise FormatError(f"CSR of {len(shape)} axes: expected 2", rule="LayoutRule")
    pointers = _INDEX_NBYTES * (shape[0] + 1)
    width = ELEMENT_TYPES[dtype].bits // 8
    nonzero, remainder = divmod(blob.nbytes - pointers, _INDEX_NBYTES + width)
    if nonzero < 0 or remainder:
        reason = f"{blob.nbytes} bytes are not {pointers} of row pointers "
        reason += f"and a multiple of {_INDEX_NBYTES + width}"
        raise FormatError(reason, offset=blob.offset, rule="LayoutRule")
    indices = blob.offset + pointers
    values = indices + _INDEX_NBYTES * nonzero
    # The digest covers the whole blob, so it does not apply to any of these parts.
    return {
        "values": Part(dtype, (nonzero,), values, width * nonzero),
        "indices": Part("uint64", (nonzero,), indices, _INDEX_NBYTES * nonzero),
        "indptr": Part("uint64", (shape[0] + 1,), blob.offset, pointers),
    }


# --- reading 1.0, 1.1 and 1.2 ---------------------------------------------------------------------


def _version(root: Mapping[Any, Any], known_minor: int, notes: kit.Notes) -> str:
    version = manifest.text("version", root.get("version"))
    parsed = _VERSION.fullmatch(version)
    if parsed is None:
        raise FormatError(f"the version {shown(version)} is not a version", rule="Version")
    if int(parsed[1]) != 1:
        reason = f"version {version}: expected 1.x, as the magic says"
        raise FormatError(reason, rule="Version")
    if int(parsed[2]) > known_minor:
        notes.add(f"newer than 1.{known_minor}, which is known", f"version {version}")
    return version


class _Components:
    """Parses the tensors of one manifest, of version 1.0 or of 1.1 and 1.2."""

    def __init__(self, ranges: _Ranges, *, is_1_0: bool) -> None:
        self._ranges = ranges
        self._is_1_0 = is_1_0

    def tensor(self, name: str, entry: Any) -> Tensor:
        """Read the entry of a tensor."""
        shape = kit.as_shape(mapping("tensor", entry).get("shape"), manifest.MOST_ELEMENTS)
        components = mapping("components", entry.get("components"))
        layout: Any = manifest.text("format", entry.get("format"))
        attrs = manifest.attributes(entry["attributes"]) if "attributes" in entry else {}
        if layout not in manifest.ROLES:
            return self._read_structural(name, entry, shape, components, attrs)
        roles = manifest.ROLES[layout]
        manifest.require_roles(layout, components, roles, exactly=False)
        main = components[roles[0]]
        problem: CheckpointError | None = None
        try:
            dense_shape = shape if layout == "dense" else None
            parts = {
                role: self._part(name, entry, components[role], role, dense_shape) for role in roles
            }
            dtype = parts[roles[0]].dtype
            if layout == "dense":
                manifest.check_dense(parts["data"], shape)
        except UnsupportedError as error:
            parts = {
                role: manifest.flattened(self._bare_part(name, components[role])) for role in roles
            }
            error.located(offset=parts[roles[0]].offset)
            # A traceback would keep the whole manifest alive.
            problem = error.with_traceback(None)
            spelled, known_dtype = self._element_type(entry, main, roles[0])
            dtype = known_dtype or spelled
        if layout != "dense" and problem is None:
            # Reference readers check this when they load the tensor; other tensors are readable.
            try:
                parts = manifest.sparse_parts(layout, shape, parts)
            except FormatError as error:
                problem = error.with_traceback(None).located(tensor=name)
                parts = {role: manifest.flattened(part) for role, part in parts.items()}
                dtype = parts[roles[0]].dtype
        if not self._is_1_0 and main.get("type") is not None:
            attrs.setdefault("type", main["type"])
        return Tensor(name, dtype, shape, parts, layout, attrs=attrs, problem=problem)

    def _read_structural(
        self,
        name: str,
        entry: dict[Any, Any],
        shape: manifest.Shape,
        components: dict[Any, Any],
        attrs: dict[str, Any],
    ) -> Tensor:
        parts: dict[str, Part] = {}
        problem = None
        for role, component in components.items():
            _, part_dtype = self._element_type(entry, component, manifest.text("role", role))
            # The one type that 1.0 states for a tensor does not apply to roles it does not define.
            part = self._bare_part(name, component, None if self._is_1_0 else part_dtype)
            parts[role] = manifest.flattened(part)
            if problem is None and part.encoding not in {None, "zstd"}:
                problem = manifest.unknown_error("encoding", str(part.encoding), name, part.offset)
        dtype = next((part.dtype for part in parts.values()), "uint8")
        if self._is_1_0:
            dtype = manifest.LONG.get(manifest.text("dtype", entry.get("dtype")), dtype)
        attrs = {**attrs, manifest.LAYOUT_KEY: entry["format"]}
        return Tensor(name, dtype, shape, parts, "structural", attrs=attrs, problem=problem)

    def _element_type(
        self, entry: dict[Any, Any], component: Any, role: str
    ) -> tuple[str, str | None]:
        """Return a part's element type as spelled in the file, and its name here if known."""
        if not self._is_1_0:
            fields = mapping("component", component)
            return manifest.element_type(fields, manifest.SHORT_1, manifest.LOGICAL_1)
        if role in _INDICES:
            return "uint64", "uint64"
        spelled = manifest.text("dtype", entry.get("dtype"))
        return spelled, manifest.LONG.get(spelled)

    def _part(
        self,
        name: str,
        entry: dict[Any, Any],
        component: Any,
        role: str,
        shape: manifest.Shape | None,
    ) -> Part:
        spelled, dtype = self._element_type(entry, component, role)
        if dtype is None:
            raise manifest.unknown_error("element type", spelled, name)
        part = self._bare_part(name, component, dtype, shape)
        if part.encoding not in {None, "zstd"}:
            raise manifest.unknown_error("encoding", str(part.encoding), name, part.offset)
        return part

    def _bare_part(
        self,
        name: str,
        component: Any,
        dtype: str | None = None,
        shape: manifest.Shape | None = None,
    ) -> Part:
        """Read a part whose encoding may be unknown."""
        if type(component) is not dict:
            raise mistyped("component", component, "a map")
        get = component.get
        offset, nbytes = self._ranges.check(name, get("offset"), get("length"))
        encoding = decoded = None
        if (spelled := get("encoding")) is not None and manifest.text("encoding", spelled) != "raw":
            encoding = spelled
            if not self._is_1_0 and (decoded := get("uncompressed_length")) is not None:
                number("uncompressed_length", decoded)
        if (digest := get("digest")) is not None:
            self._ranges.note_digest(name, offset, manifest.text("digest", digest))
        return Part(dtype or "uint8", shape, offset, nbytes, encoding, decoded, digest)


# --- writing 1.0 ----------------------------------------------------------------------------------


def plan(draft: Draft) -> Plan:
    """Lay out a file of version 1.0."""
    attrs = manifest.root_attributes(draft, _LEVELS, str)
    generator = attrs.pop("generator") if type(attrs.get("generator")) is str else _GENERATOR
    root = {"version": "1.0", "generator": generator, "attributes": attrs, "tensors": {}}
    return _planned(draft, root, (LiteralBytes(0, MAGIC),), len(MAGIC))


def append(source: Readable, draft: Draft, old: Index) -> Plan:
    """Lay out the blobs, manifest and length that add tensors to a file of version 1.0."""
    length = int.from_bytes(source.read(source.size - _FOOTER, _FOOTER), "little")
    start = manifest.locate(source.size, _FOOTER, length)
    root = mapping("manifest", manifest.decode(bytes(source.read(start, length))))
    added = manifest.root_attributes(draft, _LEVELS, str, old)
    if "generator" in root:
        added.pop("generator", None)
    root["attributes"] = manifest.kept_attributes(root) | added
    return _planned(draft, root, (), source.size)


def _planned(
    draft: Draft, root: dict[str, Any], literals: tuple[LiteralBytes, ...], start: int
) -> Plan:
    entries: dict[str, manifest.NewEntry] = {}
    for tensor in by_source(draft.tensors).values():
        name = kit.check_text("the name", tensor.name, tensor.name)
        parts = manifest.storable_parts(tensor, ("uint64",))
        main = manifest.ROLES.get(tensor.layout, ("",))[0]
        dtype = parts[main].dtype if main in parts else tensor.dtype
        if dtype not in manifest.LONG:
            raise _lacking(f"version 1.0 has no {escaped(dtype)}", name, "Dtype")
        head = {"dtype": dtype, "shape": list(tensor.shape)}
        attrs = dict(tensor.attrs)
        if tensor.layout in manifest.ROLES:
            head["format"] = tensor.layout
        elif tensor.layout == "structural":
            head["format"] = _structural_layout(tensor, parts, attrs.pop(manifest.LAYOUT_KEY, None))
        else:
            raise _lacking(f"version 1.0 has no {tensor.layout} layout", name, "Layout")
        new_parts = manifest.new_parts(tensor, parts, _ENCODINGS, _DIGESTS, "stored")
        attrs = manifest.as_storable(attrs, _LEVELS, name)
        entries[name] = manifest.NewEntry(head, new_parts, attrs)
    return manifest.plan_parts(
        literals, entries, start, _ALIGNMENT, partial(_finish, root, entries, start)
    )


def _structural_layout(tensor: WantedTensor, parts: Mapping[str, Part], layout: Any) -> str:
    """Return the layout of a tensor shown as its parts; version 1.0 cannot state their types."""
    if type(layout) is not str or layout in manifest.ROLES:
        raise manifest.unnamed_layout_error(tensor, manifest.ROLES)
    for role, part in parts.items():
        if part.dtype != "uint8":
            reason = f"version 1.0 has no type of its own for the part {shown(role)}, {part.dtype}"
            raise _lacking(reason, tensor.name, "Layout")
        kit.check_text("the part", role, tensor.name)
    return kit.check_text("the layout", layout, tensor.name)


def _lacking(reason: str, tensor: str, rule: str) -> UnsupportedError:
    hint = "Write version='2', which has it"
    return UnsupportedError(reason, tensor=tensor, rule=rule, hint=hint)


def _finish(
    root: Mapping[str, Any],
    entries: Mapping[str, manifest.NewEntry],
    start: int,
    written: Mapping[tuple[str, str], Written],
) -> tuple[LiteralBytes, ...]:
    """Make the manifest and the footer."""
    import cbor2

    tensors = dict(root["tensors"])
    for name, entry in entries.items():
        components: dict[str, dict[str, Any]] = {}
        for role, part in sorted(entry.parts.items()):
            place = written[name, role]
            components[role] = {"offset": place.offset, "length": place.nbytes}
            if part.compression is not None:
                components[role]["encoding"] = part.compression
            if place.digest is not None:
                algorithm, _, value = place.digest.partition(":")
                if algorithm == "crc32c":  # as the specification spells it
                    value = f"0x{value.removeprefix('0x').upper()}"
                components[role]["digest"] = f"{algorithm}:{value}"
        tensors[name] = {**entry.head, "components": components}
        if entry.attrs:
            tensors[name]["attributes"] = entry.attrs
    data = cbor2.dumps({**root, "tensors": dict(sorted(tensors.items()))})
    footer = len(data).to_bytes(_FOOTER, "little")
    return (LiteralBytes(manifest.end_of(written, start), data + footer),)
