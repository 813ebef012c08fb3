"""Element types, and how the parts of a tensor fit its shape: what all versions share.

Parts are given with the shape None; the functions for a layout check their sizes and return them
with their shapes.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.elements import ELEMENT_TYPES
from xckpt.errors import CheckpointError, FormatError, UnsupportedError, shown
from xckpt.formats import kit
from xckpt.formats.plan import Extent, Plan, WantedPart
from xckpt.formats.ztensor.manifest import text
from xckpt.index import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from xckpt.formats.plan import Literal, WantedTensor, Written
    from xckpt.index import Tensor

    _Choices = Mapping[str | None, str | None]

Shape = tuple[int, ...]

#: The attribute of a tensor that is shown as its parts which says how the file calls its layout.
LAYOUT_KEY = "ztensor_layout"

#: The parts of arrays; what the values are in comes first.
ROLES = {
    "dense": ("data",),
    "sparse_csr": ("values", "indices", "indptr"),
    "sparse_coo": ("values", "coords"),
}

#: Of any tensor: what 64 bits count. numpy has no such arrays, but the parts of sparse ones.
MOST_ELEMENTS = (1 << 64) - 1

# --- element types --------------------------------------------------------------------------------

BITS = {name: element.bits for name, element in ELEMENT_TYPES.items()}

# Version 2 has no boolean: there it is a logical type.
SHORT = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "u64": "uint64",
    "u32": "uint32",
    "u16": "uint16",
    "u8": "uint8",
}

# The text of version 1.1 lists the last four as element types; its readers and writers have
# them in no version. They cannot be mistaken, so they are read.
SHORT_1 = {
    **SHORT,
    "bool": "bool",
    "f8_e4m3": "float8_e4m3fn",
    "f8_e5m2": "float8_e5m2",
    "complex64": "complex64",
    "complex128": "complex128",
}

# Versions 0.1 and 1.0 use the names of numpy and ml_dtypes, for these only.
LONG = {name: name for name in (*SHORT.values(), "bool")}

# Logical types of version 2: what they are, and which element type must carry them.
LOGICAL = {
    "bool": ("bool", "u8"),
    "f8_e4m3fn": ("float8_e4m3fn", "u8"),
    "f8_e5m2": ("float8_e5m2", "u8"),
    "f8_e4m3fnuz": ("float8_e4m3fnuz", "u8"),
    "f8_e5m2fnuz": ("float8_e5m2fnuz", "u8"),
    "f8_e8m0": ("float8_e8m0fnu", "u8"),
    "f4_e2m1": ("float4_e2m1fn", "u8"),
    "complex64": ("complex64", "f32"),
    "complex128": ("complex128", "f64"),
}

# Version 1.2 has fewer, and 1.1 a name that leaves out what the others say.
LOGICAL_1 = {
    "f8_e4m3": LOGICAL["f8_e4m3fn"],
    **{name: of for name, of in LOGICAL.items() if name not in {"bool", "f8_e8m0", "f4_e2m1"}},
}

# What version 2 has, and with it every version that is written; wide and common ones first.
WRITTEN = tuple(dict.fromkeys([*LONG, *(dtype for dtype, _ in LOGICAL.values())]))


def read_all(
    entries: dict[Any, Any],
    check_name: Callable[[str, Any], object],
    read: Callable[[str, Any], Tensor],
) -> dict[str, Tensor]:
    """Read all tensors; entries leave the manifest, which spares the garbage collector."""
    tensors = {}
    for name in list(entries):
        check_name("name of a tensor", name)
        try:
            tensors[name] = read(name, entries.pop(name))
        except CheckpointError as error:
            raise error.located(tensor=name) from None
    return tensors


def element(
    fields: Mapping[Any, Any], types: Mapping[str, str], logical: Mapping[str, tuple[str, str]]
) -> tuple[str, str | None]:
    """Return the element type of a part as it is spelled, and its name here if it is known."""
    spelled = text("dtype", fields.get("dtype"))
    named = fields.get("type")
    if named is None:
        return spelled, types.get(spelled)
    if text("type", named) not in logical:
        return named, None
    dtype, carrier = logical[named]
    if spelled != carrier:
        reason = f"the type {named!r} needs the dtype {carrier!r}, not {shown(spelled)}"
        raise FormatError(reason, rule="Schema")
    return named, dtype


def unknown(what: str, spelled: str, tensor: str, offset: int | None = None) -> UnsupportedError:
    """Make the error for an element type or an encoding that is not known; the rest is read."""
    reason, hint = f"unknown {what} {shown(spelled)}", kit.without(tensor)
    rule = "Encoding" if what == "encoding" else "Schema"
    return UnsupportedError(reason, tensor=tensor, offset=offset, rule=rule, hint=hint)


def note_digest(
    notes: kit.Notes, known: AbstractSet[str], tensor: str, offset: int, digest: str
) -> None:
    """Note a digest of an unknown algorithm. A malformed one fails when the part is read."""
    algorithm, colon, _ = digest.partition(":")
    if colon and algorithm not in known:
        reason = f"with a digest of the unknown algorithm {shown(algorithm)}, not verified"
        notes.add(reason, place(tensor, offset))


def place(tensor: str, offset: int) -> str:
    """Name a part of a tensor, in a note."""
    return f"tensor {shown(tensor)} at byte {offset}"


# --- sizes ----------------------------------------------------------------------------------------


def decoded_size(part: Part) -> int | None:
    """Return the size of a part in bytes after decoding."""
    return part.nbytes if part.encoding is None else part.decoded_nbytes


def check_dense(part: Part, shape: Shape) -> None:
    """Check the size of dense data, as far as the file tells it."""
    dtype = part.dtype
    expected = (BITS[dtype] * prod(shape) + 7) >> 3
    size = part.nbytes if part.encoding is None else part.decoded_nbytes
    # What is in the file is not too large.
    if (size != expected or not expected) and kit.is_oversized(shape, dtype):
        raise FormatError(f"{dtype} of shape {shape} is larger than an array can be", rule="Shape")
    if size != expected and size is not None:
        reason = f"{size} bytes != {expected} for {dtype} of shape {shape}"
        raise FormatError(reason, offset=part.offset, rule="DenseSize")


def require_roles(
    layout: str, parts: Mapping[str, object], roles: Sequence[str], *, exactly: bool = True
) -> None:
    """Check that a tensor has the parts of its layout."""
    for role in roles:
        if role not in parts:
            raise FormatError(f"{layout} without the part {role!r}", rule="LayoutRule")
    if exactly and len(parts) > len(roles):
        reason = f"{layout} has {len(parts)} parts: expected only {', '.join(roles)}"
        raise FormatError(reason, rule="LayoutRule")


def flat(part: Part) -> Part:
    """Return a part that no layout explains as a list of its elements."""
    size = decoded_size(part)
    if size is None:
        return part
    bits = BITS[part.dtype]
    if bits < 8 or size * 8 % bits:
        return replace(part, dtype="uint8", shape=(size,))
    return replace(part, shape=(size * 8 // bits,))


def sparse(layout: str, shape: Shape, parts: Mapping[str, Part]) -> dict[str, Part]:
    """Check the sizes of the parts of a sparse array."""
    for role in ROLES[layout][1:]:
        if not parts[role].dtype.startswith(("int", "uint")):
            raise _unfit(parts[role], f"indices of type {parts[role].dtype}: expected integers")
    if layout == "sparse_csr":
        return _rows(shape, parts)
    coords, values = parts["coords"], parts["values"]
    if not shape:
        raise _unfit(coords, "COO of no axes")
    numbers = _count("coords", coords)
    if numbers is not None and numbers % len(shape):
        reason = f"'coords' has {numbers} entries, which is not a multiple of {len(shape)} axes"
        raise _unfit(coords, reason)
    nonzero = _nonzero(None if numbers is None else numbers // len(shape), values)
    return {
        "values": replace(values, shape=None if nonzero is None else (nonzero,)),
        "coords": replace(coords, shape=None if nonzero is None else (len(shape), nonzero)),
    }


def _rows(shape: Shape, parts: Mapping[str, Part]) -> dict[str, Part]:
    if len(shape) != 2:
        raise _unfit(parts["indptr"], f"CSR of {len(shape)} axes: expected 2")
    pointers = _count("indptr", parts["indptr"])
    if pointers is not None and pointers != shape[0] + 1:
        reason = f"'indptr' has {pointers} entries: expected {shape[0] + 1} for {shape[0]} rows"
        raise _unfit(parts["indptr"], reason)
    nonzero = _nonzero(_count("indices", parts["indices"]), parts["values"])
    listed = None if nonzero is None else (nonzero,)
    return {
        "values": replace(parts["values"], shape=listed),
        "indices": replace(parts["indices"], shape=listed),
        "indptr": replace(parts["indptr"], shape=(shape[0] + 1,)),
    }


def _unfit(part: Part, reason: str) -> FormatError:
    return FormatError(reason, offset=part.offset, rule="LayoutRule")


def _count(role: str, part: Part) -> int | None:
    size = decoded_size(part)
    if size is None:
        return None
    width = BITS[part.dtype] // 8
    if size % width:
        raise _unfit(part, f"{role!r} has {size} bytes, which is not a multiple of {width}")
    return size // width


def _nonzero(indexed: int | None, values: Part) -> int | None:
    """Return the number of stored values, which the indices tell; packed values do not."""
    if indexed is None:
        return None if BITS[values.dtype] < 8 else _count("values", values)
    size = decoded_size(values)
    expected = (BITS[values.dtype] * indexed + 7) // 8
    if size is not None and size != expected:
        reason = f"'values' has {size} bytes: expected {expected} for {indexed} indices"
        raise _unfit(values, reason)
    return indexed


# --- writing --------------------------------------------------------------------------------------


class NewEntry(NamedTuple):
    """A tensor of a manifest that is to be written, but for where its parts are."""

    head: dict[str, Any]
    parts: dict[str, WantedPart]
    attrs: dict[str, Any]


def storable_parts(tensor: WantedTensor, index_types: Sequence[str]) -> dict[str, Part]:
    """Return the parts of a tensor as they are read again, wherever they are, if none is packed."""
    if tensor.order != "C":
        raise UnsupportedError("Fortran order", tensor=tensor.name, rule="Order")
    parts = {}
    for role, part in tensor.parts.items():
        if part.dtype not in WRITTEN:
            hint = f"They have {', '.join(WRITTEN)}"
            reason = f"no version has {shown(part.dtype)[1:-1]}"
            raise UnsupportedError(reason, tensor=tensor.name, rule="Dtype", hint=hint)
        parts[role] = Part(part.dtype, part.shape, 0, part.nbytes)
    if tensor.layout == "quantized":
        return parts
    if tensor.layout == "structural":
        return {role: flat(part) for role, part in parts.items()}
    try:
        require_roles(tensor.layout, parts, ROLES[tensor.layout])
        if tensor.layout == "dense":
            check_dense(parts["data"], tensor.shape)
            return {"data": replace(parts["data"], shape=tensor.shape)}
        parts = sparse(tensor.layout, tensor.shape, parts)
    except CheckpointError as error:
        raise error.located(tensor=tensor.name) from None
    roles = ROLES[tensor.layout][1:]
    bits = max(BITS[parts[role].dtype] for role in roles)
    dtype = next(name for name in index_types if BITS[name] >= bits)
    for role in roles:
        index = parts[role]
        count = index.nbytes * 8 // BITS[index.dtype]
        parts[role] = replace(index, dtype=dtype, nbytes=count * BITS[dtype] // 8)
    return parts


def wished(
    tensor: WantedTensor, parts: Mapping[str, Part], encodings: _Choices, digests: _Choices, of: Any
) -> dict[str, WantedPart]:
    """Return parts as they are written, with the compression and the digest they are to have."""

    def choice(what: str, wanted: str | None, known: _Choices) -> str | None:
        if wanted in known:
            return known[wanted]
        hint = f"Choose one of {', '.join(sorted(filter(None, known)))}"
        reason, rule = f"the {what} {shown(wanted or '')}", what.capitalize()
        raise UnsupportedError(reason, tensor=tensor.name, rule=rule, hint=hint)

    asked = {}
    for role, part in parts.items():
        own = tensor.parts[role]
        compression = choice("compression", own.compression, encodings)
        algorithm = choice("digest", own.algorithm, digests)
        shape = part.shape or own.shape
        asked[role] = WantedPart(part.dtype, shape, part.nbytes, compression, algorithm, of)
    return asked


def unnamed_layout(tensor: WantedTensor, defined: Iterable[str]) -> UnsupportedError:
    """Make the error for parts that are no array, where nothing says of which layout they are."""
    hint = f"Give it the attribute {LAYOUT_KEY!r}, a text other than {', '.join(defined)}"
    reason = "parts of a layout without a name"
    return UnsupportedError(reason, tensor=tensor.name, rule="Layout", hint=hint)


def planned(
    literals: tuple[Literal, ...],
    entries: Mapping[str, NewEntry],
    start: int,
    alignment: int,
    finish: Callable[[Mapping[tuple[str, str], Written]], tuple[Literal, ...]],
) -> Plan:
    """Place parts one after the other as far as sizes are known: up to the first compressed one."""
    extents = []
    end: int | None = start
    for name, entry in entries.items():
        for role, part in entry.parts.items():
            offset = None if end is None else kit.aligned(end, alignment)
            extents.append(Extent(name, role, part, offset))
            end = None if offset is None or part.compression else offset + part.nbytes
    return Plan(literals, tuple(extents), alignment, finish=finish)


def end_of(written: Mapping[tuple[str, str], Written], start: int) -> int:
    """Return where written parts end."""
    return max([start, *(each.offset + each.nbytes for each in written.values())])
