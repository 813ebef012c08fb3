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
from typing import TYPE_CHECKING, Any

from xckpt.errors import CheckpointError, FormatError, UnsupportedError, shown
from xckpt.formats.kit import DIMS_KEY, with_dims
from xckpt.formats.ztensor.container_v2 import (
    ALIGNMENT,
    FOOTER_NBYTES,
    LONGEST_NAME,
    SMALLEST,
    Footer,
    read_manifest,
)
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
    attributes,
    mapping,
    mistyped,
    text,
)
from xckpt.formats.ztensor.profiles import ARRAYS, profile, shown_as_parts
from xckpt.formats.ztensor.storable import LAYOUT_KEY
from xckpt.formats.ztensor.unknown import unknown_element, unknown_encoding, unknown_encodings
from xckpt.index import Index, Part, Shard, Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.formats import Readable

__all__ = ["ENCODINGS", "read"]


_DIGEST = re.compile(r"[a-z0-9]+:[0-9a-f]+")
_SHARD_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_ROLES = frozenset({"data", "values", "indices", "indptr", "coords", "scales", "zeros"})
ENCODINGS = {"zt.zstd-seekable/1": "zstd-seekable"}


def read(source: Readable) -> Index:
    """Read the index of a file of version 2."""
    found = read_manifest(source)
    if found is None:
        return Index(
            format="ztensor", version="2", tensors={}, source=source.name, nbytes=source.size
        )
    footer, root = found
    try:
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
    dims = attrs.pop(DIMS_KEY, None)
    return Index(
        format="ztensor",
        version="2",
        tensors=tensors if dims is None else with_dims(tensors, dims),
        attrs=attrs,
        source=source.name,
        nbytes=source.size,
        shards=shards,
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
        if size < SMALLEST:
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
    if not name or "\0" in name or (len(name) > 255 and len(name.encode()) > LONGEST_NAME):
        raise FormatError(
            f"{field} {shown(name)}: expected 1 to {LONGEST_NAME} bytes without NUL", rule="Name"
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
    manifest : Footer
        Where the manifest is.
    shards : mapping of str to Shard
        The files that parts may be in.
    """

    def __init__(self, size: int, manifest: Footer, shards: Mapping[str, Shard]) -> None:
        # By file, None being this one: where data end, and the ranges referred to.
        self._ends: dict[str | None, int] = {None: size - FOOTER_NBYTES}
        self._ends.update((name, shard.size - FOOTER_NBYTES) for name, shard in shards.items())
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
        tensor = self._assembled(name, shape, layout, parts, attrs)
        if tensor.layout == "structural":
            return replace(tensor, attrs={**attrs, LAYOUT_KEY: layout})
        return tensor

    def _assembled(
        self,
        name: str,
        shape: tuple[int, ...],
        layout: str,
        parts: dict[Any, Any],
        attrs: dict[str, Any],
    ) -> Tensor:
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
        problem = unknown_encodings(name, encodings, (None, *ENCODINGS))
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
            known = ENCODINGS.get(encoding)
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
        if offset % ALIGNMENT or offset == 0:
            raise FormatError(
                f"a blob at {offset}: expected a positive multiple of {ALIGNMENT}",
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
