"""Writing version 2, in its canonical form as far as that is known before the data are.

The head, blobs at multiples of 64 KiB in the order of the UTF-8 bytes of tensors and then of
roles, the manifest likewise, right behind it the footer. Every part has a digest of its decoded
bytes, XXH3 where no other is wanted. Parts without bytes are one blob.

Beyond the canonical form there are compressed parts (``zt.zstd-seekable/1``), smaller alignments,
and equal data that are stored more than once: what is equal shows when it has been written.

A new generation of a file is blobs, a manifest of all tensors and a footer behind the old footer.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.errors import CheckpointError, UnsupportedError, shown
from xckpt.formats.kit import DIMS_KEY, check_text, encode_cbor
from xckpt.formats.ztensor.container_v2 import LONGEST_NAME, MAGIC, VERSION, read_manifest
from xckpt.formats.ztensor.elements import REGISTERED_TYPES, SHORT
from xckpt.formats.ztensor.placing import aligned, end_of, placed
from xckpt.formats.ztensor.profiles import ARRAYS, profile
from xckpt.formats.ztensor.quantized_attributes import quantized_layout
from xckpt.formats.ztensor.storable import (
    LAYOUT_KEY,
    choice,
    root_attributes,
    storable,
    storable_parts,
    unnamed_layout,
)
from xckpt.formats.ztensor.v2 import ENCODINGS
from xckpt.plan import Literal, Plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.formats import Readable
    from xckpt.index import Index, Part, Tensor
    from xckpt.plan import Written

__all__ = ["CANONICAL_ALIGNMENT", "plan", "plan_append"]

CANONICAL_ALIGNMENT = 1 << 16

# Of 33 levels, a value in the root's attributes is the third, a tensor's attributes are the fourth.
_ROOT_LEVELS, _LEVELS = 31, 30
_SEEKABLE = "zstd-seekable"
_ENCODINGS = {None: None, "zstd": _SEEKABLE, _SEEKABLE: _SEEKABLE}
_DIGESTS = {None: "xxh3", "xxh3": "xxh3", "sha256": "sha256", "crc32c": "xxh3"}
_LAYOUTS = {layout: spelled for spelled, layout in ARRAYS.items()}
_SPELLED_ENCODINGS = {encoding: spelled for spelled, encoding in ENCODINGS.items()}
# The dtype and the type of a part.
_SPELLED: Mapping[str, tuple[str, str | None]] = {
    **{dtype: (carrier, spelled) for spelled, (dtype, carrier) in REGISTERED_TYPES.items()},
    **{dtype: (spelled, None) for spelled, dtype in SHORT.items()},
}


class _Entry(NamedTuple):
    """An object of the manifest, but for where its parts are."""

    layout: str
    shape: list[int]
    parts: dict[str, Part]
    attrs: dict[str, Any]


def plan(index: Index, alignment: int) -> Plan:
    """Plan a file of version 2."""
    attrs = _root_attributes(index)
    root = {"objects": {}, **({"attributes": attrs} if attrs else {})}
    return _planned(index, root, (Literal(0, MAGIC),), len(MAGIC), alignment)


def plan_append(source: Readable, index: Index, old: Index, alignment: int) -> Plan:
    """Plan a new generation of a file of version 2."""
    found = read_manifest(source)
    if found is None:
        raise UnsupportedError("a data shard, which has no manifest", path=source.name)
    root = dict(found[1])
    kept = dict(root.pop("attributes", {}))
    kept.pop(DIMS_KEY, None)
    attrs = {**kept, **_root_attributes(index, {**old.tensors, **index.tensors})}
    if attrs:
        root["attributes"] = attrs
    return _planned(index, root, (), source.size, alignment)


def _root_attributes(index: Index, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    attrs = root_attributes(index, _ROOT_LEVELS, tensors)
    for key in attrs:
        _checked_name("the attribute", key)
    return attrs


def _planned(
    index: Index, root: dict[str, Any], literals: tuple[Literal, ...], start: int, alignment: int
) -> Plan:
    """Plan data from some byte on, and the manifest behind them."""
    entries = {name: _entry(index.tensors[name]) for name in sorted(index.tensors)}
    parts = [
        (name, role, entry.parts[role])
        for name, entry in entries.items()
        for role in sorted(entry.parts)
    ]
    finish = partial(_finish, root, entries, start, alignment)
    return Plan(literals, placed(parts, start, alignment), alignment, finish=finish)


def _checked_name(what: str, text: str, tensor: str | None = None) -> str:
    size = len(check_text(what, text, tensor).encode())
    if not 0 < size <= LONGEST_NAME or "\0" in text:
        raise UnsupportedError(
            f"{what} {shown(text)}: version 2 has names of 1 to {LONGEST_NAME} bytes without NUL",
            tensor=tensor,
            rule="Name",
            hint="Rename it",
        )
    return text


def _entry(tensor: Tensor) -> _Entry:
    name = _checked_name("the name", tensor.name, tensor.name)
    parts = storable_parts(tensor, ("uint32", "uint64"))
    attrs = dict(tensor.attrs)
    if tensor.layout == "quantized":
        layout, attrs = quantized_layout(tensor, parts)
    elif tensor.layout == "structural":
        layout = _structural(tensor, parts, attrs.pop(LAYOUT_KEY, None), attrs)
    else:
        layout = _LAYOUTS[tensor.layout]
        main = parts["data" if tensor.layout == "dense" else "values"]
        if attrs.get("type") == _SPELLED[main.dtype][1]:
            attrs.pop("type", None)  # what a component of version 1.2 has, and here the part
    for key in attrs:
        _checked_name("the attribute", key, name)
    wished = {role: _wished(tensor, role, part) for role, part in parts.items()}
    return _Entry(layout, list(tensor.shape), wished, storable(attrs, _LEVELS, name))


def _structural(
    tensor: Tensor, parts: Mapping[str, Part], layout: Any, attrs: Mapping[str, Any]
) -> str:
    """Return the layout of a tensor that is its parts, if they may be of it."""
    if type(layout) is not str or layout in ARRAYS or not parts:
        raise unnamed_layout(tensor, ARRAYS)
    for role in parts:
        _checked_name("the part", role, tensor.name)
    assemble = profile(layout)
    if assemble is not None:
        try:
            assemble(tensor.name, tensor.shape, parts, attrs)
        except CheckpointError as error:
            raise error.located(tensor=tensor.name) from None
    return check_text("the layout", layout, tensor.name)


def _wished(tensor: Tensor, role: str, part: Part) -> Part:
    """Return a part the compression and the digest that are wanted for it."""
    wanted = tensor.parts[role]
    return replace(
        part,
        encoding=choice("compression", wanted.encoding, _ENCODINGS, tensor.name),
        digest=choice("digest", wanted.digest, _DIGESTS, tensor.name),
        digest_of="decoded",
    )


def _finish(
    root: Mapping[Any, Any],
    entries: Mapping[str, _Entry],
    start: int,
    alignment: int,
    written: Mapping[tuple[str, str], Written],
) -> tuple[Literal, ...]:
    """Make the manifest and the footer."""
    import xxhash

    empty = min((each.offset for each in written.values() if not each.nbytes), default=0)
    objects = dict(root["objects"])
    for name, entry in entries.items():
        parts = {
            role: _part(part, written[name, role], empty) for role, part in entry.parts.items()
        }
        objects[name] = {"layout": entry.layout, "shape": entry.shape, "parts": parts}
        if entry.attrs:
            objects[name]["attributes"] = entry.attrs
    manifest = encode_cbor({**root, "objects": objects})
    offset = aligned(end_of(written, start), alignment)
    footer = struct.pack(
        "<QQQII", offset, len(manifest), xxhash.xxh3_64_intdigest(manifest), VERSION, 0
    )
    return (Literal(offset, manifest + footer + MAGIC),)


def _part(part: Part, written: Written, empty: int) -> dict[str, Any]:
    dtype, logical = _SPELLED[part.dtype]
    offset = written.offset if written.nbytes else empty
    fields: dict[str, Any] = {"dtype": dtype, "blob": [offset, written.nbytes]}
    if logical is not None:
        fields["type"] = logical
    if part.encoding is not None:
        fields["encoding"] = _SPELLED_ENCODINGS[part.encoding]
        fields["decoded_length"] = part.nbytes
    if written.digest is not None:
        fields["digest"] = written.digest
    return fields
