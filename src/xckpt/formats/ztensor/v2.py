"""Version 2: deterministic manifest under a hash, parts of any layout, shards.

Every rule of the reference reader is enforced at open, under its name, and one that it lacks: it
computes the size of dense data in 64 bits and skips the check where that overflows. Layouts whose
attributes leave the decoding open are shown as their parts.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.errors import CheckpointError, FormatError, UnsupportedError, shown
from xckpt.formats.ztensor.elements import (
    REGISTERED_TYPES,
    SHORT,
    wrong_carrier,
)
from xckpt.formats.ztensor.layouts import (
    checked_shape,
    dense_size,
    require_roles,
    wrong_dense_size,
)
from xckpt.formats.ztensor.manifest import (
    LARGEST,
    attributes,
    decode_deterministic,
    mapping,
    mistyped,
    text,
)
from xckpt.formats.ztensor.profiles import ARRAYS, profile, shown_as_parts
from xckpt.formats.ztensor.unknown import unknown_element, unknown_encoding, unknown_encodings
from xckpt.index import Index, Part, Shard, Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.formats import Readable

__all__ = ["MAGIC", "read"]

MAGIC = b"\x89ZT2\r\n\x1a\n"

_FOOTER = 40
_SMALLEST = 48
_VERSION = 2
_ALIGNMENT = 4096
_LONGEST_NAME = 1024

_DIGEST = re.compile(r"[a-z0-9]+:[0-9a-f]+")
_SHARD_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_ROLES = frozenset({"data", "values", "indices", "indptr", "coords", "scales", "zeros"})
_ENCODINGS = {"zt.zstd-seekable/1": "zstd-seekable"}


class _Footer(NamedTuple):
    offset: int
    length: int
    digest: int


def read(source: Readable) -> Index:
    """Read the index of a file of version 2.

    Parameters
    ----------
    source : Readable
        The file, which begins with the magic.

    Returns
    -------
    Index
        What it holds; nothing for a data shard.

    Raises
    ------
    FormatError
        If the file breaks a rule.
    """
    footer = _footer(source)
    if footer is None:
        return Index(
            format="ztensor", version="2", tensors={}, source=source.name, nbytes=source.size
        )
    data = bytes(source.read(footer.offset, footer.length))
    try:
        _check_hash(data, footer.digest)
        root = mapping("manifest", decode_deterministic(data))
        entries = mapping("objects", root.get("objects"))
        attrs = _attributes(root)
        shards = _shards(root, source.name)
        reading = _Reading(source.size, footer, shards)
        tensors = reading.tensors(entries)
        reading.check_overlaps()
    except CheckpointError as error:
        if error.offset is None:
            error.offset = footer.offset
        raise
    return Index(
        format="ztensor",
        version="2",
        tensors=tensors,
        attrs=attrs,
        source=source.name,
        nbytes=source.size,
        shards=shards,
    )


def _footer(source: Readable) -> _Footer | None:
    size = source.size
    if size < _SMALLEST:
        raise FormatError(
            f"{size} bytes: expected {_SMALLEST} or more", offset=0, rule="FileTooSmall"
        )
    footer = bytes(source.read(size - _FOOTER, _FOOTER))
    if footer[32:] != MAGIC:
        raise FormatError(
            f"the file ends {footer[32:]!r}, not with the magic",
            offset=size - 8,
            rule="FooterMagic",
            hint="It may be truncated",
        )
    version = int.from_bytes(footer[24:28], "little")
    if version != _VERSION:
        raise FormatError(f"version {version}: expected 2", offset=size - 16, rule="Version")
    found = _Footer(*(int.from_bytes(footer[at : at + 8], "little") for at in (0, 8, 16)))
    return _checked_footer(found, size)


def _checked_footer(footer: _Footer, size: int) -> _Footer | None:
    at = size - _FOOTER
    if footer.length == 0:
        if footer.offset or footer.digest:
            raise FormatError(
                "a data shard with the offset or the hash of a manifest",
                offset=at,
                rule="ManifestBounds",
            )
        return None
    if footer.length > LARGEST:
        raise FormatError(
            f"a manifest of {footer.length} bytes is larger than {LARGEST}",
            offset=at + 8,
            rule="ManifestTooLarge",
        )
    if footer.offset % _ALIGNMENT or footer.offset == 0:
        raise FormatError(
            f"the manifest's offset {footer.offset} is no positive multiple of {_ALIGNMENT}",
            offset=at,
            rule="BlobAlignment",
        )
    if footer.offset + footer.length > at:
        raise FormatError(
            f"the manifest ends at {footer.offset + footer.length}, the data at {at}",
            offset=at,
            rule="ManifestBounds",
        )
    return footer


def _check_hash(data: bytes, expected: int) -> None:
    import xxhash

    found = xxhash.xxh3_64_intdigest(data)
    if found != expected:
        raise FormatError(
            f"the manifest's hash is {found:016x}, the footer says {expected:016x}",
            rule="ManifestHash",
        )


def _shards(root: Mapping[Any, Any], source_name: str) -> dict[str, Shard]:
    if "shards" not in root:
        return {}
    stem = _stem(source_name)
    shards = {}
    for name, entry in mapping("shards", root["shards"]).items():
        _check_shard_name(name)
        fields = mapping("shard", entry)
        size = _number("size", fields.get("size"))
        if size < _SMALLEST:
            raise FormatError(f"the shard {name!r} has {size} bytes", rule="Schema")
        digest = _checked_digest(fields.get("digest"))
        # Where its resolvers look: beside the referring file, then in a store by content.
        candidates = (f"{stem}-{name}.zt", f"blobs/{digest.replace(':', '/')}")
        shards[name] = Shard(size, digest, candidates)
    return shards


def _stem(source_name: str) -> str:
    if "://" in source_name:
        source_name = source_name.partition("?")[0]
    return PurePath(source_name).stem


def _check_shard_name(name: Any) -> None:
    if _SHARD_NAME.fullmatch(text("name of a shard", name)) is None:
        raise FormatError(f"the shard name {shown(name)}", rule="ShardName")


def _checked_name(field: str, value: Any) -> str:
    name = text(field, value)
    if not name or "\0" in name or (len(name) > 255 and len(name.encode()) > _LONGEST_NAME):
        raise FormatError(
            f"{field} {shown(name)}: expected 1 to {_LONGEST_NAME} bytes without NUL", rule="Name"
        )
    return name


def _checked_digest(value: Any) -> str:
    digest = text("digest", value)
    if _DIGEST.fullmatch(digest) is None:
        raise FormatError(
            f"the digest {shown(digest)}: expected algorithm:hex in lower case", rule="Schema"
        )
    return digest


def _number(field: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise mistyped(field, value, "a non-negative integer")
    return value


def _attributes(entry: dict[Any, Any]) -> dict[str, Any]:
    if "attributes" not in entry:
        return {}
    attrs = attributes(mapping("attributes", entry["attributes"]))
    for key in attrs:
        _checked_name("name of an attribute", key)
    return attrs


class _Reading:
    """Makes the tensors of one manifest.

    Parameters
    ----------
    size : int
        Size of the file in bytes.
    manifest : _Footer
        Where the manifest is.
    shards : mapping of str to Shard
        The files that parts may be in.
    """

    def __init__(self, size: int, manifest: _Footer, shards: Mapping[str, Shard]) -> None:
        # By file, None being this one: where data end, and the ranges referred to.
        self._ends: dict[str | None, int] = {None: size - _FOOTER}
        self._ends.update((name, shard.size - _FOOTER) for name, shard in shards.items())
        self._ranges: dict[str | None, list[tuple[int, int]]] = {name: [] for name in self._ends}
        self._ranges[None].append((manifest.offset, manifest.offset + manifest.length))

    def tensors(self, entries: dict[Any, Any]) -> dict[str, Tensor]:
        """Read all tensors; entries leave the manifest, which spares the garbage collector."""
        tensors = {}
        for name in list(entries):
            _checked_name("name of a tensor", name)
            try:
                tensors[name] = self._tensor(name, entries.pop(name))
            except CheckpointError as error:
                raise error.located(tensor=name) from None
        return tensors

    def check_overlaps(self) -> None:
        """Check that the ranges in each file are identical or disjoint."""
        for file, ranges in self._ranges.items():
            for (start, end), (following, _) in pairwise(dict.fromkeys(sorted(ranges))):
                if following < end:
                    where = "" if file is None else f" of the shard {file!r}"
                    raise FormatError(
                        f"bytes {start} to {end}{where} overlap those from {following}",
                        offset=following if file is None else None,
                        rule="BlobOverlap",
                    )

    def _tensor(self, name: str, entry: Any) -> Tensor:
        if type(entry) is not dict:
            raise mistyped("object", entry, "a map")
        shape = checked_shape(entry.get("shape"))
        layout = text("layout", entry.get("layout"))
        parts = mapping("parts", entry.get("parts"))
        if not parts:
            raise FormatError("an object without parts", rule="Schema")
        attrs = _attributes(entry)
        try:
            if layout == "dense":
                return self._dense(name, shape, parts, attrs)
            assemble = profile(layout)
            if assemble is not None:
                built = {role: self._part(name, role, parts[role]) for role in parts}
                return assemble(name, shape, built, attrs)
        except UnsupportedError as problem:
            tensor = self._structural(name, shape, parts, attrs)
            # A traceback would keep the whole manifest alive.
            return _with_problem(tensor, layout, parts, problem.with_traceback(None))
        return self._structural(name, shape, parts, attrs)

    def _dense(
        self, name: str, shape: tuple[int, ...], parts: dict[Any, Any], attrs: dict[str, Any]
    ) -> Tensor:
        built = {role: self._part(name, role, parts[role], shape) for role in parts}
        if len(built) != 1 or "data" not in built:
            require_roles("dense", built, "data", exactly=True)
        part = built["data"]
        size = part.nbytes if part.encoding is None else part.decoded_nbytes
        if size != dense_size(part.dtype, shape):
            raise wrong_dense_size(part.dtype, shape, size or 0, part.offset)
        return Tensor(name, part.dtype, shape, built, attrs=attrs, strict=True)

    def _structural(
        self, name: str, shape: tuple[int, ...], parts: dict[Any, Any], attrs: dict[str, Any]
    ) -> Tensor:
        built = {
            role: self._part(name, role, part, understood=False) for role, part in parts.items()
        }
        encodings = [(part.get("encoding"), part["blob"][0]) for part in parts.values()]
        problem = unknown_encodings(name, encodings, (None, *_ENCODINGS))
        return shown_as_parts(name, shape, built, attrs, problem)

    def _part(
        self,
        name: str,
        role: Any,
        fields: Any,
        shape: tuple[int, ...] | None = None,
        *,
        understood: bool = True,
    ) -> Part:
        if role not in _ROLES:
            _checked_name("name of a part", role)
        spelled, dtype = _element(fields)
        offset, nbytes = _blob(fields.get("blob"))
        digest = _checked_digest(fields["digest"]) if "digest" in fields else None
        encoding, decoded = _encoding(fields)
        shard = fields.get("shard")
        if shard is not None or "shard" in fields:
            _check_shard_name(shard)
        self._check_range(shard, offset, nbytes)
        if understood and dtype is None:
            raise unknown_element(spelled, name)
        if encoding is not None:
            known = _ENCODINGS.get(encoding)
            if understood and known is None:
                raise unknown_encoding(encoding, name, offset)
            encoding = known or encoding
        return Part(
            dtype or "uint8",
            shape,
            offset,
            nbytes,
            encoding,
            decoded,
            digest,
            "decoded",
            "little",
            shard,
        )

    def _check_range(self, file: str | None, offset: int, nbytes: int) -> None:
        if offset % _ALIGNMENT or offset == 0:
            raise FormatError(
                f"a blob at {offset}: expected a positive multiple of {_ALIGNMENT}",
                rule="BlobAlignment",
            )
        data_end = self._ends.get(file)
        if data_end is None:
            raise FormatError(f"the shard {file!r} is not in the table", rule="ShardRef")
        end = offset + nbytes
        if end > data_end:
            where = "the file" if file is None else f"the shard {file!r}"
            raise FormatError(
                f"bytes {offset} to {end}: data of {where} end at {data_end}", rule="BlobBounds"
            )
        if nbytes:
            self._ranges[file].append((offset, end))


def _with_problem(
    tensor: Tensor, layout: str, parts: Mapping[str, Any], problem: UnsupportedError
) -> Tensor:
    """Mark an array that cannot be decoded; other layouts are shown as their parts anyway."""
    kind = ARRAYS.get(layout)
    main = "data" if kind == "dense" else "values"
    if kind is None or main not in parts:
        return tensor
    if problem.offset is None:
        problem.offset = tensor.parts[main].offset
    spelled, dtype = _element(parts[main])
    return replace(tensor, dtype=dtype or spelled, layout=kind, problem=problem)


def _element(fields: Any) -> tuple[str, str | None]:
    """Return the element type of a part as it is spelled, and its name here if it is known."""
    if type(fields) is not dict:
        raise mistyped("part", fields, "a map")
    spelled = text("dtype", fields.get("dtype"))
    dtype = SHORT.get(spelled)
    if dtype is None:
        raise FormatError(f"the dtype {shown(spelled)} does not exist", rule="Schema")
    if "type" not in fields:
        return spelled, dtype
    logical = text("type", fields["type"])
    if logical not in REGISTERED_TYPES:
        return logical, None
    dtype, carrier = REGISTERED_TYPES[logical]
    if spelled != carrier:
        raise wrong_carrier(logical, spelled, carrier)
    return logical, dtype


def _blob(value: Any) -> tuple[int, int]:
    if type(value) is not list or len(value) != 2:
        raise mistyped("blob", value, "an offset and a length")
    offset, nbytes = value
    if type(offset) is not int or offset < 0 or type(nbytes) is not int or nbytes < 0:
        raise FormatError("'blob' has other than non-negative integers", rule="Schema")
    return offset, nbytes


def _encoding(fields: dict[Any, Any]) -> tuple[str | None, int | None]:
    if "encoding" not in fields and "decoded_length" not in fields:
        return None, None
    if "encoding" not in fields or "decoded_length" not in fields:
        raise FormatError("'encoding' and 'decoded_length' come together", rule="Schema")
    return text("encoding", fields["encoding"]), _number("decoded_length", fields["decoded_length"])
