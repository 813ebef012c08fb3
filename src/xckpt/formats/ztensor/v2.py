"""Version 2 of zTensor: a deterministic manifest with a hash, any layout, shards.

Opening enforces every rule of the reference reader, under the same name. It also checks the size
of dense data where it exceeds 64 bits, which the reference reader skips. A tensor whose attributes
do not determine its decoding becomes one variable per part.

The writer produces the canonical form where it can be determined before the data are read: the
magic, blobs at multiples of 64 KiB sorted by the UTF-8 names of tensors and then of roles, the
manifest at such a multiple, and the footer right after it. Every part has a digest of its decoded
bytes, XXH3 by default. Empty parts share a blob. Files deviate from the canonical form if they have
compressed parts (``zt.zstd-seekable/1``), a smaller alignment, or equal data more than once.
Adding tensors appends blobs, a manifest of all tensors and a footer.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.errors import FormatError, UnsupportedError, shown
from xckpt.formats import kit
from xckpt.formats.kit import mapping, mistyped, number
from xckpt.formats.plan import Draft, LiteralBytes, Plan, WantedTensor, Written
from xckpt.formats.ztensor import manifest
from xckpt.formats.ztensor.quantized import READERS, check_gguf, quantized_layout
from xckpt.index import Index, Layout, Part, Shard, Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.readable import Readable


MAGIC = b"\x89ZT2\r\n\x1a\n"
ALIGNMENT, CANONICAL_ALIGNMENT = 4096, 1 << 16

_VERSION = 2
# Offset, length and XXH3-64 of the manifest, version, zero, magic.
_FOOTER = Struct("<QQQII8s")
_SMALLEST = len(MAGIC) + _FOOTER.size
_LONGEST_NAME = 1024
_DIGEST = re.compile(r"[a-z0-9]+:[0-9a-f]+")
_ALGORITHMS = frozenset({"xxh3", "sha256", "crc32c"})
_SHARD_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_ROLES = frozenset({"data", "values", "indices", "indptr", "coords", "scales", "zeros"})
_GGUF = re.compile(r"gguf\.[^/]+/1")

# The names of the array layouts in zTensor, and the layouts here.
_ARRAYS: dict[str, Layout] = {
    "dense": "dense",
    "zt.sparse_csr/1": "sparse_csr",
    "zt.sparse_coo/1": "sparse_coo",
}
_LAYOUTS = {layout: spelled for spelled, layout in _ARRAYS.items()}
_SEEKABLE, _SPELLED_SEEKABLE = "zstd-seekable", "zt.zstd-seekable/1"
# Stored encodings and digests by requested compression and digest.
_ENCODINGS = {None: None, "zstd": _SEEKABLE, _SEEKABLE: _SEEKABLE}
_DIGESTS = {None: "xxh3", "xxh3": "xxh3", "sha256": "sha256", "crc32c": "xxh3"}
# How a file spells an element type: the dtype of the part, and its type or None.
_SPELLED: dict[str, tuple[str, str | None]] = {
    **{dtype: (carrier, spelled) for spelled, (dtype, carrier) in manifest.LOGICAL.items()},
    **{dtype: (spelled, None) for spelled, dtype in manifest.SHORT.items()},
}
# Of 33 levels, two are above the value of an attribute of the file, and three in a tensor.
_ROOT_LEVELS, _LEVELS = 31, 30


# --- the container --------------------------------------------------------------------------------


class _Manifest(NamedTuple):
    """The decoded manifest, and its byte range."""

    root: dict[Any, Any]
    start: int
    end: int


def _read_manifest(source: Readable) -> _Manifest | None:
    """Return the manifest; None in a data shard."""
    import xxhash

    footer = _footer(source)
    if footer is None:
        return None
    start, length, digest = footer
    data = bytes(source.read(start, length))
    with kit.locating(offset=start):
        computed = xxhash.xxh3_64_intdigest(data)
        if computed != digest:
            reason = f"the manifest's hash is {computed:016x}, the footer says {digest:016x}"
            raise FormatError(reason, rule="ManifestHash")
        root = mapping("manifest", manifest.decode_deterministic(data))
    return _Manifest(root, start, start + length)


def _footer(source: Readable) -> tuple[int, int, int] | None:
    """Return the offset, the length and the hash of the manifest."""
    size, footer_start = source.size, source.size - _FOOTER.size
    if size < _SMALLEST:
        reason = f"{size} bytes: expected {_SMALLEST} or more"
        raise FormatError(reason, offset=0, rule="FileTooSmall")
    start, length, digest, version, _, magic = _FOOTER.unpack(
        source.read(footer_start, _FOOTER.size)
    )
    if magic != MAGIC:
        reason, hint = f"the file ends {magic!r}, not with the magic", "It may be truncated"
        raise FormatError(reason, offset=size - 8, rule="FooterMagic", hint=hint)
    if version != _VERSION:
        reason = f"version {version}: expected {_VERSION}"
        raise FormatError(reason, offset=size - 16, rule="Version")
    if not length:
        if start or digest:
            reason = "a data shard with the offset or the hash of a manifest"
            raise FormatError(reason, offset=footer_start, rule="ManifestBounds")
        return None
    if length > manifest.LARGEST:
        reason = f"a manifest of {length} bytes is larger than {manifest.LARGEST}"
        raise FormatError(reason, offset=footer_start + 8, rule="ManifestTooLarge")
    if start % ALIGNMENT or start == 0:
        reason = f"the manifest's offset {start} is not a positive multiple of {ALIGNMENT}"
        raise FormatError(reason, offset=footer_start, rule="BlobAlignment")
    if start + length > footer_start:
        reason = f"the manifest ends at {start + length}, the data at {footer_start}"
        raise FormatError(reason, offset=footer_start, rule="ManifestBounds")
    return start, length, digest


# --- reading --------------------------------------------------------------------------------------


def read(source: Readable) -> Index:
    """Read a file of version 2."""
    parsed = _read_manifest(source)
    if parsed is None:
        return Index("ztensor", "2", {}, source=source.name, nbytes=source.size)
    root, start, end = parsed
    with kit.locating(offset=start):
        entries = mapping("objects", root.get("objects"))
        attrs = _attributes(root)
        shards = _shards(root, source.name)
        objects = _Objects(source.size, (start, end), shards)
        tensors = kit.read_each(manifest.pop_entries(entries, _check_name), objects.tensor)
        objects.check_overlaps()
    index = Index("ztensor", "2", tensors, attrs, source.name, source.size, shards)
    return kit.with_arrangement(replace(index, warnings=objects.notes.warnings()))


def _shards(root: Mapping[Any, Any], source_name: str) -> dict[str, Shard]:
    if "shards" not in root:
        return {}
    # A URL may have a query.
    path = source_name.partition("?")[0] if "://" in source_name else source_name
    stem = PurePath(path).stem
    shards = {}
    for name, entry in mapping("shards", root["shards"]).items():
        _check_shard_name(name)
        fields = mapping("shard", entry)
        size = number("size", fields.get("size"))
        if size < _SMALLEST:
            raise FormatError(f"the shard {name!r} has {size} bytes", rule="Schema")
        digest = _checked_digest(fields.get("digest"))
        # The reference reader looks next to the referring file, then in a store by content.
        candidates = (f"{stem}-{name}.zt", f"blobs/{digest.replace(':', '/')}")
        shards[name] = Shard(size, digest, candidates)
    return shards


def _check_shard_name(name: Any) -> None:
    if _SHARD_NAME.fullmatch(manifest.text("name of a shard", name)) is None:
        raise FormatError(f"the shard name {shown(name)}", rule="ShardName")


def _is_name(name: str) -> bool:
    return bool(name) and "\0" not in name and len(name.encode()) <= _LONGEST_NAME


def _check_name(field: str, value: Any) -> None:
    if not _is_name(manifest.text(field, value)):
        reason = f"{field} {shown(value)}: expected 1 to {_LONGEST_NAME} bytes without NUL"
        raise FormatError(reason, rule="Name")


def _checked_digest(value: Any) -> str:
    digest = manifest.text("digest", value)
    if _DIGEST.fullmatch(digest) is None:
        reason = f"the digest {shown(digest)}: expected algorithm:hex in lower case"
        raise FormatError(reason, rule="Schema")
    return digest


def _attributes(entry: dict[Any, Any]) -> dict[str, Any]:
    if "attributes" not in entry:
        return {}
    attrs = manifest.attributes(mapping("attributes", entry["attributes"]))
    for key in attrs:
        _check_name("name of an attribute", key)
    return attrs


class _Objects:
    """Parses the tensors of one manifest; no blob may overlap `manifest_range`."""

    def __init__(
        self, size: int, manifest_range: tuple[int, int], shards: Mapping[str, Shard]
    ) -> None:
        # Per file, where None is this file: the end of its data, and the ranges of its blobs.
        self._ends: dict[str | None, int] = {None: size - _FOOTER.size}
        self._ends.update((name, shard.size - _FOOTER.size) for name, shard in shards.items())
        self._ranges: dict[str | None, list[tuple[int, int]]] = {name: [] for name in self._ends}
        self._ranges[None].append(manifest_range)
        self.notes = kit.Notes()

    def check_overlaps(self) -> None:
        """Check that the ranges in each file are identical or disjoint."""
        for file, ranges in self._ranges.items():
            for start, _, _ in kit.find_overlaps([(*blob, "") for blob in ranges], shared=True):
                shard = "" if file is None else f" of the shard {file!r}"
                reason = f"the blob at byte {start}{shard} begins within another blob"
                offset = start if file is None else None
                raise FormatError(reason, offset=offset, rule="BlobOverlap")

    def tensor(self, name: str, entry: Any) -> Tensor:
        """Read the entry of a tensor."""
        shape = kit.as_shape(mapping("object", entry).get("shape"), manifest.MOST_ELEMENTS)
        layout = manifest.text("layout", entry.get("layout"))
        stored_parts = mapping("parts", entry.get("parts"))
        if not stored_parts:
            raise FormatError("an object without parts", rule="Schema")
        attrs = _attributes(entry)
        problem: UnsupportedError | None = None
        if _is_known(layout):
            try:
                dense_shape = shape if layout == "dense" else None
                parts = {
                    role: self._part(name, role, fields, shape=dense_shape)
                    for role, fields in stored_parts.items()
                }
                if layout == "dense":
                    manifest.require_roles(layout, parts, manifest.ROLES[layout])
                    manifest.check_dense(parts["data"], shape)
                    dtype = parts["data"].dtype
                    return Tensor(name, dtype, shape, parts, attrs=attrs, strict=True)
                tensor = Tensor(name, "", shape, parts, attrs=attrs, strict=True)
                return _assembled(tensor, layout)
            except UnsupportedError as error:
                # A traceback would keep the whole manifest alive.
                problem = error.with_traceback(None)
        parts = {
            role: manifest.flattened(self._part(name, role, fields, understood=False))
            for role, fields in stored_parts.items()
        }
        tensor = Tensor(name, "", shape, parts, attrs=attrs, strict=True)
        main = manifest.ROLES[_ARRAYS[layout]][0] if layout in _ARRAYS else None
        if problem is not None and main in parts:
            # An array that cannot be decoded; other layouts are shown as their parts anyway.
            problem.located(offset=parts[main].offset)
            spelled, known_dtype = _element_type(stored_parts[main])
            dtype = known_dtype or spelled
            return replace(tensor, dtype=dtype, layout=_ARRAYS[layout], problem=problem)
        problems = (
            manifest.unknown_error("encoding", fields["encoding"], name, parts[role].offset)
            for role, fields in stored_parts.items()
            if fields.get("encoding") not in {None, _SPELLED_SEEKABLE}
        )
        return replace(_as_parts(tensor, layout), problem=next(problems, None))

    def _part(
        self,
        name: str,
        role: Any,
        fields: Any,
        *,
        shape: manifest.Shape | None = None,
        understood: bool = True,
    ) -> Part:
        """Read a part; raise for an unknown element type or encoding if `understood`."""
        if role not in _ROLES:
            _check_name("name of a part", role)
        spelled, dtype = _element_type(fields)
        blob = fields.get("blob")
        if type(blob) is not list or len(blob) != 2:
            raise mistyped("blob", blob, "an offset and a length")
        offset, nbytes = blob
        if type(offset) is not int or offset < 0 or type(nbytes) is not int or nbytes < 0:
            raise FormatError("blob has other than non-negative integers", rule="Schema")
        digest = _checked_digest(fields["digest"]) if "digest" in fields else None
        encoding, decoded = _encoding(fields)
        shard = fields.get("shard")
        if "shard" in fields:
            _check_shard_name(shard)
        self._claim_range(shard, offset, nbytes)
        if understood and dtype is None:
            raise manifest.unknown_error("element type", spelled, name)
        if encoding == _SPELLED_SEEKABLE:
            encoding = _SEEKABLE
        elif understood and encoding is not None:
            raise manifest.unknown_error("encoding", encoding, name, offset)
        if digest is not None:
            manifest.note_digest(self.notes, _ALGORITHMS, name, offset, digest)
        dtype = dtype or "uint8"
        return Part(dtype, shape, offset, nbytes, encoding, decoded, digest, "decoded", shard=shard)

    def _claim_range(self, shard: str | None, offset: int, nbytes: int) -> None:
        """Check the range of a blob, and keep it for `check_overlaps`."""
        if offset % ALIGNMENT or offset == 0:
            reason = f"a blob at {offset}: expected a positive multiple of {ALIGNMENT}"
            raise FormatError(reason, rule="BlobAlignment")
        data_end = self._ends.get(shard)
        if data_end is None:
            raise FormatError(f"the shard {shard!r} is not in the table", rule="ShardRef")
        end = offset + nbytes
        if end > data_end:
            place = "the file" if shard is None else f"the shard {shard!r}"
            reason = f"bytes {offset} to {end}: the data of {place} end at byte {data_end}"
            raise FormatError(reason, rule="BlobBounds")
        if nbytes:
            self._ranges[shard].append((offset, end))


def _element_type(fields: Any) -> tuple[str, str | None]:
    """Return a part's element type as spelled in the file, and its name here if known."""
    if type(fields) is not dict:
        raise mistyped("part", fields, "a map")
    names = manifest.element_type(fields, manifest.SHORT, manifest.LOGICAL)
    if fields["dtype"] not in manifest.SHORT:
        raise FormatError(f"the dtype {shown(fields['dtype'])} does not exist", rule="Schema")
    if "type" in fields:
        manifest.text("type", fields["type"])
    return names


def _encoding(fields: dict[Any, Any]) -> tuple[str | None, int | None]:
    if "encoding" not in fields and "decoded_length" not in fields:
        return None, None
    if "encoding" not in fields or "decoded_length" not in fields:
        raise FormatError("'encoding' and 'decoded_length' come together", rule="Schema")
    encoding = manifest.text("encoding", fields["encoding"])
    return encoding, number("decoded_length", fields["decoded_length"])


def _is_known(layout: str) -> bool:
    return layout in _ARRAYS or layout in READERS or _GGUF.fullmatch(layout) is not None


def _assembled(tensor: Tensor, layout: str) -> Tensor:
    """Interpret the parts of a tensor as its layout, which is known, prescribes."""
    parts, shape = dict(tensor.parts), tensor.shape
    if layout in _ARRAYS:
        array_layout = _ARRAYS[layout]
        manifest.require_roles(layout, parts, manifest.ROLES[array_layout])
        indices = [parts[role] for role in manifest.ROLES[array_layout][1:]]
        types = {part.dtype for part in indices}
        if len(types) > 1 or not types <= {"uint32", "uint64"}:
            reason = f"indices of type {' and '.join(sorted(types))}: expected u32 or u64"
            raise FormatError(reason, offset=indices[0].offset, rule="LayoutRule")
        dtype, parts = parts["values"].dtype, manifest.sparse_parts(array_layout, shape, parts)
        return replace(tensor, dtype=dtype, parts=parts, layout=array_layout)
    if layout not in READERS:
        check_gguf(shape, parts, tensor.attrs)
    elif (quantized := READERS[layout](shape, parts, tensor.attrs)) is not None:
        parts, quantization = quantized
        return replace(
            tensor, dtype="float32", parts=parts, layout="quantized", quantization=quantization
        )
    return _as_parts(tensor, layout)


def _as_parts(tensor: Tensor, layout: str) -> Tensor:
    """Return a tensor that is shown as its parts."""
    parts = {role: manifest.flattened(part) for role, part in tensor.parts.items()}
    dtype = next(iter(parts.values())).dtype
    attrs = {**tensor.attrs, manifest.LAYOUT_KEY: layout}
    return replace(tensor, dtype=dtype, parts=parts, layout="structural", attrs=attrs)


# --- writing --------------------------------------------------------------------------------------


def plan(draft: Draft, alignment: int | None) -> Plan:
    """Lay out a file of version 2."""
    attrs = _root_attributes(draft)
    root = {"objects": {}, **({"attributes": attrs} if attrs else {})}
    return _planned(draft, root, (LiteralBytes(0, MAGIC),), len(MAGIC), alignment)


def append(source: Readable, draft: Draft, old: Index, alignment: int | None) -> Plan:
    """Lay out a new generation of a file of version 2."""
    old_manifest = _read_manifest(source)
    if old_manifest is None:
        raise UnsupportedError("a data shard, which has no manifest", path=source.name)
    root = dict(old_manifest.root)
    attrs = manifest.kept_attributes(root) | _root_attributes(draft, old)
    root.pop("attributes", None)
    if attrs:
        root["attributes"] = attrs
    return _planned(draft, root, (), source.size, alignment)


def _root_attributes(draft: Draft, old: Index | None = None) -> dict[str, Any]:
    def canonical_key(key: str) -> tuple[int, bytes]:
        data = key.encode(errors="surrogatepass")
        return len(data), data

    attrs = manifest.root_attributes(draft, _ROOT_LEVELS, canonical_key, old)
    for key in attrs:
        _storable_name("the attribute", key)
    return attrs


def _planned(
    draft: Draft,
    root: dict[str, Any],
    literals: tuple[LiteralBytes, ...],
    start: int,
    alignment: int | None,
) -> Plan:
    if alignment is None:
        alignment = CANONICAL_ALIGNMENT
    elif alignment < ALIGNMENT or alignment & (alignment - 1):
        raise ValueError(f"alignment={alignment!r}: expected a power of two from 4096")
    entries = {name: _entry(draft.tensors[name]) for name in sorted(draft.tensors)}
    finish = partial(_finish, root, entries, start, alignment)
    return manifest.plan_parts(literals, entries, start, alignment, finish)


def _storable_name(what: str, name: str, tensor: str | None = None) -> str:
    if not _is_name(kit.check_text(what, name, tensor)):
        reason = f"{what} {shown(name)}: version 2 has names of 1 to {_LONGEST_NAME} bytes "
        reason += "without NUL"
        raise UnsupportedError(reason, tensor=tensor, rule="Name", hint="Rename it")
    return name


def _entry(tensor: WantedTensor) -> manifest.NewEntry:
    name = _storable_name("the name", tensor.name, tensor.name)
    parts = manifest.storable_parts(tensor, ("uint32", "uint64"))
    attrs = dict(tensor.attrs)
    if tensor.layout == "quantized":
        layout, attrs = quantized_layout(tensor, parts)
    elif tensor.layout == "structural":
        layout = _structural(tensor, parts, attrs.pop(manifest.LAYOUT_KEY, None), attrs)
    else:
        layout = _LAYOUTS[tensor.layout]
        main = parts[manifest.ROLES[tensor.layout][0]]
        if attrs.get("type") == _SPELLED[main.dtype][1]:
            attrs.pop("type", None)  # a component's type in version 1.2; here the part states it
    for key in attrs:
        _storable_name("the attribute", key, name)
    ordered = {role: parts[role] for role in sorted(parts)}
    new_parts = manifest.new_parts(tensor, ordered, _ENCODINGS, _DIGESTS, "decoded")
    head = {"layout": layout, "shape": list(tensor.shape)}
    return manifest.NewEntry(head, new_parts, manifest.as_storable(attrs, _LEVELS, name))


def _structural(
    tensor: WantedTensor, parts: dict[str, Part], layout: Any, attrs: dict[str, Any]
) -> str:
    """Return the layout of a tensor shown as its parts, after checking the parts against it."""
    if type(layout) is not str or layout in _ARRAYS or not parts:
        raise manifest.unnamed_layout_error(tensor, _ARRAYS)
    for role in parts:
        _storable_name("the part", role, tensor.name)
    if _is_known(layout):
        with kit.locating(tensor=tensor.name):
            _assembled(Tensor(tensor.name, tensor.dtype, tensor.shape, parts, attrs=attrs), layout)
    return kit.check_text("the layout", layout, tensor.name)


def _finish(
    root: Mapping[Any, Any],
    entries: Mapping[str, manifest.NewEntry],
    start: int,
    alignment: int,
    written: Mapping[tuple[str, str], Written],
) -> tuple[LiteralBytes, ...]:
    """Make the manifest and the footer."""
    import xxhash

    empty = min((part.offset for part in written.values() if not part.nbytes), default=0)
    objects = dict(root["objects"])
    for name, entry in entries.items():
        parts: dict[str, dict[str, Any]] = {}
        for role, part in entry.parts.items():
            (dtype, logical), place = _SPELLED[part.dtype], written[name, role]
            blob = [place.offset if place.nbytes else empty, place.nbytes]
            parts[role] = {"dtype": dtype, "blob": blob}
            if logical is not None:
                parts[role]["type"] = logical
            if part.compression is not None:
                parts[role] |= {"encoding": _SPELLED_SEEKABLE, "decoded_length": part.nbytes}
            if place.digest is not None:
                parts[role]["digest"] = place.digest
        objects[name] = {**entry.head, "parts": parts}
        if entry.attrs:
            objects[name]["attributes"] = entry.attrs
    data = kit.encode_cbor({**root, "objects": objects})
    offset = kit.aligned(manifest.end_of(written, start), alignment)
    digest = xxhash.xxh3_64_intdigest(data)
    footer = _FOOTER.pack(offset, len(data), digest, _VERSION, 0, MAGIC)
    return (LiteralBytes(offset, data + footer),)
