"""Writing version 1.0: byte for byte as its reference implementation (tag 1.0.1), in one order.

The head, blobs at multiples of 64 in the order of the file that they come from, else of the
tensors, right behind the last one the manifest with tensors in the order of their UTF-8 bytes, and
its length. The manifest comes last because the size of a compressed blob, and a digest, are known
only when it is written.

That implementation demands `generator` and `attributes` in the root, and texts as values of the
latter. The specification does not. It gives tensors no attributes; here they have them as in
version 1.1, in a field that readers of version 1.0 ignore.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.errors import UnsupportedError, shown
from xckpt.formats.kit import DIMS_KEY, check_text
from xckpt.formats.ztensor import v1
from xckpt.formats.ztensor.elements import LONG
from xckpt.formats.ztensor.manifest import attributes, decode, locate, mapping
from xckpt.formats.ztensor.placing import end_of, placed
from xckpt.formats.ztensor.storable import (
    LAYOUT_KEY,
    choice,
    root_attributes,
    storable,
    storable_parts,
    unnamed_layout,
)
from xckpt.plan import Literal, Plan, by_source

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.formats import Readable
    from xckpt.index import Index, Part, Tensor
    from xckpt.plan import Written

__all__ = ["plan", "plan_append"]

_ALIGNMENT = 64
_FOOTER = 8
_GENERATOR = "xckpt"
_LAYOUTS = ("dense", "sparse_csr", "sparse_coo")
_ENCODINGS = {None: None, "zstd": "zstd", "zstd-seekable": "zstd"}
_DIGESTS = {None: None, "crc32c": "crc32c", "sha256": "sha256", "xxh3": "crc32c"}
# Of the 128 levels that the reference implementation reads, a tensor's attributes are the fourth.
_LEVELS = 125


def plan(index: Index) -> Plan:
    """Plan a file of version 1.0."""
    attrs = root_attributes(index, _LEVELS)
    generator = attrs.pop("generator") if type(attrs.get("generator")) is str else _GENERATOR
    root = {"version": "1.0", "generator": generator, "attributes": attrs, "tensors": {}}
    return _planned(index, root, (Literal(0, v1.MAGIC),), len(v1.MAGIC))


def plan_append(source: Readable, index: Index, old: Index) -> Plan:
    """Plan what makes a file of version 1.0 hold more tensors."""
    length = int.from_bytes(source.read(source.size - _FOOTER, _FOOTER), "little")
    start = locate(source.size, _FOOTER, length)
    root = mapping("manifest", decode(bytes(source.read(start, length))))
    added = root_attributes(index, _LEVELS, {**old.tensors, **index.tensors})
    if "generator" in root:
        added.pop("generator", None)
    kept = attributes(root.get("attributes"))
    kept.pop(DIMS_KEY, None)
    root["attributes"] = {**kept, **added}
    return _planned(index, root, (), source.size)


class _Entry(NamedTuple):
    """A tensor of the manifest, but for where its parts are."""

    head: dict[str, Any]
    parts: dict[str, Part]
    attrs: dict[str, Any]


def _planned(index: Index, root: dict[str, Any], literals: tuple[Literal, ...], start: int) -> Plan:
    """Plan data from some byte on, and the manifest behind them."""
    entries = {name: _entry(tensor) for name, tensor in by_source(index.tensors).items()}
    parts = [
        (name, role, part) for name, entry in entries.items() for role, part in entry.parts.items()
    ]
    finish = partial(_finish, root, entries, start)
    return Plan(literals, placed(parts, start, _ALIGNMENT), _ALIGNMENT, finish=finish)


def _entry(tensor: Tensor) -> _Entry:
    name = check_text("the name", tensor.name, tensor.name)
    parts = storable_parts(tensor, ("uint64",))
    head = {"dtype": _dtype(tensor, parts), "shape": list(tensor.shape)}
    attrs = dict(tensor.attrs)
    if tensor.layout in _LAYOUTS:
        head["format"] = tensor.layout
    elif tensor.layout == "structural":
        head["format"] = _structural(tensor, parts, attrs.pop(LAYOUT_KEY, None))
    else:
        raise _lacking(f"version 1.0 has no {tensor.layout} layout", name, "Layout")
    wished = {role: _wished(tensor, role, part) for role, part in parts.items()}
    return _Entry(head, wished, storable(attrs, _LEVELS, name))


def _dtype(tensor: Tensor, parts: Mapping[str, Part]) -> str:
    main = {"dense": "data", "structural": None}.get(tensor.layout, "values")
    dtype = tensor.dtype if main is None or main not in parts else parts[main].dtype
    if dtype not in LONG:
        raise _lacking(f"version 1.0 has no {shown(dtype)[1:-1]}", tensor.name, "Dtype")
    return dtype


def _structural(tensor: Tensor, parts: Mapping[str, Part], layout: Any) -> str:
    """Return the layout of a tensor that is its parts, of which the version says no types."""
    if type(layout) is not str or layout in _LAYOUTS:
        raise unnamed_layout(tensor, _LAYOUTS)
    for role, part in parts.items():
        if part.dtype != "uint8":
            reason = f"version 1.0 has no type of its own for the part {shown(role)}, {part.dtype}"
            raise _lacking(reason, tensor.name, "Layout")
        check_text("the part", role, tensor.name)
    return check_text("the layout", layout, tensor.name)


def _wished(tensor: Tensor, role: str, part: Part) -> Part:
    """Return a part the compression and the digest that are wanted for it."""
    wanted = tensor.parts[role]
    return replace(
        part,
        encoding=choice("compression", wanted.encoding, _ENCODINGS, tensor.name),
        digest=choice("digest", wanted.digest, _DIGESTS, tensor.name),
        digest_of="stored",
    )


def _lacking(reason: str, tensor: str, rule: str) -> UnsupportedError:
    return UnsupportedError(
        reason, tensor=tensor, rule=rule, hint="Write version='2', which has it"
    )


def _finish(
    root: Mapping[str, Any],
    entries: Mapping[str, _Entry],
    start: int,
    written: Mapping[tuple[str, str], Written],
) -> tuple[Literal, ...]:
    """Make the manifest and the footer."""
    import cbor2

    tensors = dict(root["tensors"])
    for name, entry in entries.items():
        roles = sorted(entry.parts)
        components = {role: _component(entry.parts[role], written[name, role]) for role in roles}
        tensors[name] = {**entry.head, "components": components}
        if entry.attrs:
            tensors[name]["attributes"] = entry.attrs
    manifest = cbor2.dumps({**root, "tensors": dict(sorted(tensors.items()))})
    footer = len(manifest).to_bytes(_FOOTER, "little")
    return (Literal(end_of(written, start), manifest + footer),)


def _component(part: Part, written: Written) -> dict[str, Any]:
    component: dict[str, Any] = {"offset": written.offset, "length": written.nbytes}
    if part.encoding is not None:
        component["encoding"] = part.encoding
    if written.digest is not None:
        component["digest"] = _spelled(written.digest)
    return component


def _spelled(digest: str) -> str:
    """Spell a digest as the specification does."""
    algorithm, _, value = digest.partition(":")
    if algorithm != "crc32c":
        return digest
    return f"crc32c:0x{value.removeprefix('0x').upper()}"
