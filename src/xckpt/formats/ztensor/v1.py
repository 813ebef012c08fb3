"""Versions 1.0, 1.1 and 1.2: a manifest of named tensors made of components.

The three share a magic. A file of 1.0 ends with the size of the manifest; those of 1.1 and 1.2,
which differ only in what 1.2 adds, end with the magic once more. Rulings where the specification
of 1.0 contradicts itself or real files are at the places they concern.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from xckpt.errors import CheckpointError, FormatError, UnsupportedError, shown
from xckpt.formats.kit import DIMS_KEY, with_dims
from xckpt.formats.ztensor.elements import (
    LONG,
    SHORT_1,
    TYPES_1,
    wrong_carrier,
)
from xckpt.formats.ztensor.extents import Extents
from xckpt.formats.ztensor.layouts import (
    checked_shape,
    coo,
    csr,
    dense_size,
    first_dtype,
    flat,
    require_roles,
    wrong_dense_size,
)
from xckpt.formats.ztensor.manifest import attributes, decode, locate, mapping, mistyped, text
from xckpt.formats.ztensor.storable import LAYOUT_KEY
from xckpt.formats.ztensor.unknown import unknown_element, unknown_encoding, unknown_encodings
from xckpt.index import Index, Part, Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.formats import Readable

__all__ = ["MAGIC", "read"]

MAGIC = b"ZTEN1000"

_VERSION = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})(?:\.[0-9]{1,9})?")
_ROLES = {
    "dense": ("data",),
    "sparse_csr": ("values", "indices", "indptr"),
    "sparse_coo": ("values", "coords"),
}
_ENCODINGS = (None, "raw", "zstd")
_INDICES = frozenset({"indices", "indptr", "coords"})


def read(source: Readable, tail: bytes) -> Index:
    """Read the index of a file of version 1.0, 1.1 or 1.2."""
    # 1.0 has no footer magic: the 16 bytes that its specification subtracts from the size are
    # the head and the footer.
    plain = tail[8:] != MAGIC
    footer = 8 if plain else 16
    length = int.from_bytes(tail[16 - footer :][:8], "little")
    start = locate(source.size, footer, length)
    extents = Extents(source.size, start)
    try:
        root = mapping("manifest", decode(bytes(source.read(start, length))))
        version, newer = _version(root, known_minor=0 if plain else 2)
        tensors = _Reading(extents, plain=plain).tensors(root)
        attrs = _root_attributes(root)
    except CheckpointError as error:
        if error.offset is None:
            error.offset = start
        raise
    dims = attrs.pop(DIMS_KEY, None)
    return Index(
        format="ztensor",
        version=version,
        tensors=tensors if dims is None else with_dims(tensors, dims),
        attrs=attrs,
        source=source.name,
        nbytes=source.size,
        warnings=(*newer, *extents.notes.warnings()),
    )


def _version(root: Mapping[Any, Any], *, known_minor: int) -> tuple[str, tuple[str, ...]]:
    version = text("version", root.get("version"))
    parsed = _VERSION.fullmatch(version)
    if parsed is None:
        raise FormatError(f"the version {shown(version)} is no version", rule="Version")
    if int(parsed[1]) != 1:
        raise FormatError(
            f"version {version}: expected 1.x, as the magic says",
            rule="Version",
        )
    if int(parsed[2]) > known_minor:
        return version, (f"version {version} is newer than 1.{known_minor}, which is known",)
    return version, ()


def _root_attributes(root: Mapping[Any, Any]) -> dict[str, Any]:
    attrs = attributes(root.get("attributes"))
    if "generator" in root:
        attrs.setdefault("generator", attributes({"generator": root["generator"]})["generator"])
    return attrs


class _Reading:
    """Makes the tensors of one manifest.

    Parameters
    ----------
    extents : Extents
        The ranges of the file.
    plain : bool
        Whether it is of version 1.0.
    """

    def __init__(self, extents: Extents, *, plain: bool) -> None:
        self._check = extents.check
        self._check_digest = extents.check_digest
        self._plain = plain
        self._element = _element_of_tensor if plain else _element_of_component

    def tensors(self, root: Mapping[Any, Any]) -> dict[str, Tensor]:
        """Read all tensors; entries leave the manifest, which spares the garbage collector."""
        key = "tensors" if self._plain else "objects"
        entries = mapping(key, root.get(key))
        tensors = {}
        for name in list(entries):
            text("name of a tensor", name)
            try:
                tensors[name] = self._tensor(name, entries.pop(name))
            except CheckpointError as error:
                raise error.located(tensor=name) from None
        return tensors

    def _tensor(self, name: str, entry: Any) -> Tensor:
        if type(entry) is not dict:
            raise mistyped("tensor", entry, "a map")
        shape = checked_shape(entry.get("shape"))
        components = mapping("components", entry.get("components"))
        layout = text("format", entry.get("format"))
        if layout not in _ROLES:
            return self._structural(name, entry, shape, components)
        try:
            if layout == "dense" and "data" in components:
                return self._dense(name, entry, shape, components["data"])
            require_roles(layout, components, *_ROLES[layout])
            return self._sparse(name, entry, shape, components)
        except UnsupportedError as problem:
            # A traceback would keep the whole manifest alive.
            bare = problem.with_traceback(None)
            return self._unreadable(name, entry, shape, components, bare)

    def _dense(
        self, name: str, entry: dict[Any, Any], shape: tuple[int, ...], component: Any
    ) -> Tensor:
        dtype = self._dtype(name, entry, component, "data")
        part = self._part(name, component, dtype, shape)
        size = part.nbytes if part.encoding is None else part.decoded_nbytes
        if size != dense_size(dtype, shape) and size is not None:
            raise wrong_dense_size(dtype, shape, size, part.offset)
        return Tensor(name, dtype, shape, {"data": part}, attrs=self._attrs(entry, component))

    def _sparse(
        self, name: str, entry: dict[Any, Any], shape: tuple[int, ...], components: dict[Any, Any]
    ) -> Tensor:
        layout = entry["format"]
        parts = {
            role: self._part(
                name, components[role], self._dtype(name, entry, components[role], role)
            )
            for role in _ROLES[layout]
        }
        problem = None
        # Readers of these versions find out when they assemble the tensor: the rest is fine.
        try:
            parts = csr(shape, parts) if layout == "sparse_csr" else coo(shape, parts)
        except FormatError as error:
            problem = error.with_traceback(None).located(tensor=name)
            parts = {role: flat(part) for role, part in parts.items()}
        return Tensor(
            name,
            parts["values"].dtype,
            shape,
            parts,
            layout,
            attrs=self._attrs(entry, components["values"]),
            problem=problem,
        )

    def _structural(
        self, name: str, entry: dict[Any, Any], shape: tuple[int, ...], components: dict[Any, Any]
    ) -> Tensor:
        parts = {}
        for role, component in components.items():
            _, dtype = self._element(entry, component, text("role", role))
            # 1.0 states one type for the tensor: for roles it does not define, that is no type.
            dtype = None if self._plain else dtype
            part = self._part(name, component, dtype or "uint8", understood=False)
            parts[role] = flat(part)
        encodings = [(field.get("encoding"), field["offset"]) for field in components.values()]
        dtype = LONG.get(text("dtype", entry.get("dtype"))) if self._plain else None
        dtype = dtype or first_dtype(parts.values())
        return Tensor(
            name,
            dtype,
            shape,
            parts,
            "structural",
            attrs={**self._attrs(entry, {}), LAYOUT_KEY: entry["format"]},
            problem=unknown_encodings(name, encodings, _ENCODINGS),
        )

    def _unreadable(
        self,
        name: str,
        entry: dict[Any, Any],
        shape: tuple[int, ...],
        components: dict[Any, Any],
        problem: UnsupportedError,
    ) -> Tensor:
        layout = entry["format"]
        parts = {
            role: flat(self._part(name, components[role], "uint8", understood=False))
            for role in _ROLES[layout]
        }
        main = _ROLES[layout][0]
        if problem.offset is None:
            problem.offset = parts[main].offset
        spelled, dtype = self._element(entry, components[main], main)
        return Tensor(
            name,
            dtype or spelled,
            shape,
            parts,
            layout,
            attrs=self._attrs(entry, components[main]),
            problem=problem,
        )

    def _dtype(self, name: str, entry: dict[Any, Any], component: Any, role: str) -> str:
        spelled, dtype = self._element(entry, component, role)
        if dtype is None:
            raise unknown_element(spelled, name)
        return dtype

    def _part(
        self,
        name: str,
        component: Any,
        dtype: str,
        shape: tuple[int, ...] | None = None,
        *,
        understood: bool = True,
    ) -> Part:
        if type(component) is not dict:
            raise mistyped("component", component, "a map")
        offset, nbytes = self._check(name, component.get("offset"), component.get("length"))
        encoding = decoded = None
        if component.get("encoding", "raw") != "raw":
            encoding = _encoding(component["encoding"])
            if encoding != "zstd" and encoding is not None and understood:
                raise unknown_encoding(encoding, name, offset)
            if encoding is not None and not self._plain:
                decoded = _decoded_size(component)
        digest = component.get("digest")
        if digest is not None:
            self._check_digest(name, offset, text("digest", digest))
        return Part(dtype, shape, offset, nbytes, encoding, decoded, digest)

    def _attrs(self, entry: dict[Any, Any], component: dict[Any, Any]) -> dict[str, Any]:
        attrs = attributes(entry["attributes"]) if "attributes" in entry else {}
        if component.get("type") is not None and not self._plain:
            attrs.setdefault("type", component["type"])
        return attrs


def _element_of_tensor(entry: dict[Any, Any], _component: Any, role: str) -> tuple[str, str | None]:
    """Return the element type of a part as 1.0 spells it, and its name here if it is known."""
    if role in _INDICES:
        return "uint64", "uint64"
    spelled = text("dtype", entry.get("dtype"))
    return spelled, LONG.get(spelled)


def _element_of_component(
    _entry: dict[Any, Any], component: Any, _role: str
) -> tuple[str, str | None]:
    """Return the element type of a part as 1.1 and 1.2 do."""
    component = mapping("component", component)
    spelled = text("dtype", component.get("dtype"))
    logical = component.get("type")
    if logical is None:
        return spelled, SHORT_1.get(spelled)
    if text("type", logical) not in TYPES_1:
        return logical, None
    dtype, carrier = TYPES_1[logical]
    if spelled != carrier:
        raise wrong_carrier(logical, spelled, carrier)
    return logical, dtype


def _encoding(value: Any) -> str | None:
    return None if value is None else text("encoding", value)


def _decoded_size(component: dict[Any, Any]) -> int | None:
    size = component.get("uncompressed_length")
    if size is not None and (type(size) is not int or size < 0):
        raise mistyped("uncompressed_length", size, "a non-negative integer")
    return size
