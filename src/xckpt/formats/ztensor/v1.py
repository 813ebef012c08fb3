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
from xckpt.errors import CheckpointError, FormatError, UnsupportedError, shown
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
    # 1.0 has no magic in the footer: its specification subtracts 16 bytes from the size for the
    # head and the footer.
    plain = tail[8:] != MAGIC or magic == MAGIC_0
    footer = 8 if plain else 16
    length = int.from_bytes(tail[16 - footer :][:8], "little")
    start = manifest.locate(source.size, footer, length)
    ranges = _Ranges(source.size, start)
    attrs: dict[str, Any] = {}
    warnings: tuple[str, ...] = ()
    with kit.locating(offset=start):
        # A file of version 0.1 with only a head and a footer has no manifest.
        empty = magic == MAGIC_0 and not length and source.size == _HEAD + _FOOTER
        root: Any = [] if empty else manifest.decode(bytes(source.read(start, length)))
        if magic == MAGIC_0:
            version, tensors = "0.1", kit.read_each(_entries_0(root), partial(_tensor_0, ranges))
        else:
            version, warnings = _version(mapping("manifest", root), 0 if plain else 2)
            key = "tensors" if plain else "objects"
            reading = _Components(ranges, plain=plain)
            entries = manifest.drained(mapping(key, root.get(key)), manifest.text)
            tensors = kit.read_each(entries, reading.tensor)
            attrs = manifest.attributes(root.get("attributes"))
            if "generator" in root:
                generator = manifest.attributes({"generator": root["generator"]})
                attrs.setdefault("generator", generator["generator"])
    index = kit.index_of("ztensor", source, tensors, attrs, notes=ranges.notes, version=version)
    return kit.with_arrangement(replace(index, warnings=warnings + index.warnings))


class _Ranges:
    """Checks byte ranges in one file; notes unusual ranges that the specifications permit."""

    def __init__(self, size: int, data_end: int) -> None:
        self._size = size
        self._data_end = data_end
        self.notes = kit.Notes()

    def check(self, tensor: str, offset: Any, nbytes: Any) -> tuple[int, int]:
        if type(offset) is not int or type(nbytes) is not int or offset < 0 or nbytes < 0:
            number("offset", offset)
            number("length", nbytes)
        end = offset + nbytes
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

    def check_digest(self, tensor: str, offset: int, digest: str) -> None:
        """Note a digest that is not verified."""
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
        ranges.check_digest(name, offset, manifest.text("checksum", digest))
    attrs = manifest.attributes(
        {key: value for key, value in entry.items() if key not in _FIELDS_0 and type(key) is str}
    )
    blob = Part("uint8", None, offset, nbytes, encoding, digest=digest)
    problem = None
    if encoding not in {None, "zstd"}:
        problem = manifest.unknown("encoding", encoding, name, offset)
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
        problem = problem or manifest.unknown("element type", spelled, name, offset)
        parts = {"data": manifest.flat(blob)}
        return Tensor(name, dtype or spelled, shape, parts, attrs=attrs, problem=problem)
    if layout == "sparsecsr" and dtype is not None and encoding is None:
        return Tensor(name, dtype, shape, _rows_0(dtype, shape, blob), "sparse_csr", attrs=attrs)
    # "sparsecoo" interleaves coordinates and values, so the blob is not an array.
    attrs[manifest.LAYOUT_KEY] = layout
    parts = {"data": manifest.flat(blob)}
    kind = dtype or "uint8"
    return Tensor(name, kind, shape, parts, "structural", attrs=attrs, problem=problem)


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


def _version(root: Mapping[Any, Any], known_minor: int) -> tuple[str, tuple[str, ...]]:
    version = manifest.text("version", root.get("version"))
    parsed = _VERSION.fullmatch(version)
    if parsed is None:
        raise FormatError(f"the version {shown(version)} is not a version", rule="Version")
    if int(parsed[1]) != 1:
        reason = f"version {version}: expected 1.x, as the magic says"
        raise FormatError(reason, rule="Version")
    if int(parsed[2]) > known_minor:
        return version, (f"version {version} is newer than 1.{known_minor}, which is known",)
    return version, ()


class _Components:
    """Parses the tensors of one manifest; `plain` is True for version 1.0."""

    def __init__(self, ranges: _Ranges, *, plain: bool) -> None:
        self._ranges = ranges
        self._plain = plain

    def tensor(self, name: str, entry: Any) -> Tensor:
        """Read the entry of a tensor."""
        shape = kit.as_shape(mapping("tensor", entry).get("shape"), manifest.MOST_ELEMENTS)
        components = mapping("components", entry.get("components"))
        layout: Any = manifest.text("format", entry.get("format"))
        attrs = manifest.attributes(entry["attributes"]) if "attributes" in entry else {}
        if layout not in manifest.ROLES:
            return self._structural(name, entry, shape, components, attrs)
        roles = manifest.ROLES[layout]
        manifest.require_roles(layout, components, roles, exactly=False)
        main = components[roles[0]]
        problem: CheckpointError | None = None
        try:
            dense_shape = shape if layout == "dense" else None
            parts = {
                role: self._part(name, role, entry, components[role], dense_shape) for role in roles
            }
            kind = parts[roles[0]].dtype
            if layout == "dense":
                manifest.check_dense(parts["data"], shape)
        except UnsupportedError as error:
            parts = {role: manifest.flat(self._bare_part(name, components[role])) for role in roles}
            error.located(offset=parts[roles[0]].offset)
            # A traceback would keep the whole manifest alive.
            problem = error.with_traceback(None)
            spelled, dtype = self._element(entry, main, roles[0])
            kind = dtype or spelled
        if layout != "dense" and problem is None:
            # Reference readers check this when they load the tensor; other tensors are readable.
            try:
                parts = manifest.sparse(layout, shape, parts)
            except FormatError as error:
                problem = error.with_traceback(None).located(tensor=name)
                parts = {role: manifest.flat(part) for role, part in parts.items()}
                kind = parts[roles[0]].dtype
        if not self._plain and main.get("type") is not None:
            attrs.setdefault("type", main["type"])
        return Tensor(name, kind, shape, parts, layout, attrs=attrs, problem=problem)

    def _structural(
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
            _, dtype = self._element(entry, component, manifest.text("role", role))
            # The one type that 1.0 states for a tensor does not apply to roles it does not define.
            part = self._bare_part(name, component, None if self._plain else dtype)
            parts[role] = manifest.flat(part)
            if problem is None and part.encoding not in {None, "zstd"}:
                problem = manifest.unknown("encoding", str(part.encoding), name, part.offset)
        dtype_name = (
            manifest.LONG.get(manifest.text("dtype", entry.get("dtype"))) if self._plain else None
        )
        dtype_name = dtype_name or next((part.dtype for part in parts.values()), "uint8")
        attrs = {**attrs, manifest.LAYOUT_KEY: entry["format"]}
        return Tensor(name, dtype_name, shape, parts, "structural", attrs=attrs, problem=problem)

    def _element(self, entry: dict[Any, Any], component: Any, role: str) -> tuple[str, str | None]:
        """Return a part's element type as spelled in the file, and its name here if known."""
        if not self._plain:
            return manifest.element(
                mapping("component", component), manifest.SHORT_1, manifest.LOGICAL_1
            )
        if role in _INDICES:
            return "uint64", "uint64"
        spelled = manifest.text("dtype", entry.get("dtype"))
        return spelled, manifest.LONG.get(spelled)

    def _part(
        self,
        name: str,
        role: str,
        entry: dict[Any, Any],
        component: Any,
        shape: manifest.Shape | None,
    ) -> Part:
        spelled, dtype = self._element(entry, component, role)
        if dtype is None:
            raise manifest.unknown("element type", spelled, name)
        part = self._bare_part(name, component, dtype, shape)
        if part.encoding not in {None, "zstd"}:
            raise manifest.unknown("encoding", str(part.encoding), name, part.offset)
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
            if not self._plain and (decoded := get("uncompressed_length")) is not None:
                number("uncompressed_length", decoded)
        if (digest := get("digest")) is not None:
            self._ranges.check_digest(name, offset, manifest.text("digest", digest))
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
            raise _lacking(f"version 1.0 has no {shown(dtype)[1:-1]}", name, "Dtype")
        head = {"dtype": dtype, "shape": list(tensor.shape)}
        attrs = dict(tensor.attrs)
        if tensor.layout in manifest.ROLES:
            head["format"] = tensor.layout
        elif tensor.layout == "structural":
            head["format"] = _structural(tensor, parts, attrs.pop(manifest.LAYOUT_KEY, None))
        else:
            raise _lacking(f"version 1.0 has no {tensor.layout} layout", name, "Layout")
        new_parts = manifest.new_parts(tensor, parts, _ENCODINGS, _DIGESTS, "stored")
        entries[name] = manifest.NewEntry(head, new_parts, manifest.storable(attrs, _LEVELS, name))
    return manifest.planned(
        literals, entries, start, _ALIGNMENT, partial(_finish, root, entries, start)
    )


def _structural(tensor: WantedTensor, parts: Mapping[str, Part], layout: Any) -> str:
    """Return the layout of a tensor shown as its parts; version 1.0 cannot state their types."""
    if type(layout) is not str or layout in manifest.ROLES:
        raise manifest.unnamed_layout(tensor, manifest.ROLES)
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
                # As the specification spells it.
                checksum = f"crc32c:0x{value.removeprefix('0x').upper()}"
                components[role]["digest"] = checksum if algorithm == "crc32c" else place.digest
        tensors[name] = {**entry.head, "components": components}
        if entry.attrs:
            tensors[name]["attributes"] = entry.attrs
    data = cbor2.dumps({**root, "tensors": dict(sorted(tensors.items()))})
    footer = len(data).to_bytes(_FOOTER, "little")
    return (LiteralBytes(manifest.end_of(written, start), data + footer),)
