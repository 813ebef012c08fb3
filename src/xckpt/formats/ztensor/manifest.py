"""Code that all versions of zTensor share: CBOR, attributes, element types, checks of parts.

cbor2 neither recognises deterministic encoding nor reports bytes after the first value, so both are
checked here. Functions for a layout get parts with the shape None, check their sizes, and return
them with their shapes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import isnan, nan, prod
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.elements import ELEMENT_TYPES, nbytes_of
from xckpt.errors import FormatError, UnsupportedError, escaped, shown
from xckpt.formats import kit
from xckpt.formats.kit import mistyped
from xckpt.formats.plan import Plan, PlannedPart, WantedPart
from xckpt.index import Index, Part, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from xckpt.formats.plan import Draft, LiteralBytes, WantedTensor, Written

    _Choices = Mapping[str | None, str | None]

LARGEST = 1 << 30
_HEAD = 8

# Depth 32 counted from the root, as version 2 does, is 33 containers.
_DEEPEST_2 = 33

_SCALARS = frozenset({str, int, float, bool, bytes, type(None)})


# --- decoding -------------------------------------------------------------------------------------


def locate(size: int, footer: int, length: int) -> int:
    """Return the offset of a manifest that ends where the footer begins."""
    # Section 6 of the 1.0 specification has "<" by mistake: a file without tensors has no blobs.
    if length > size - _HEAD - footer:
        reason = f"the footer claims a manifest of {length} bytes, "
        reason += f"but only {size - _HEAD - footer} precede it"
        hint = kit.TRUNCATED
        raise FormatError(reason, offset=size - footer, rule="ManifestBounds", hint=hint)
    if length > LARGEST:
        reason = f"the manifest has {length} bytes, more than {LARGEST}"
        raise FormatError(reason, offset=size - footer, rule="ManifestTooLarge")
    return size - footer - length


def decode(data: bytes) -> Any:
    """Decode any CBOR, as versions 0 and 1 permit."""
    return _one_value(data, lambda _tag, value: value)


def decode_deterministic(data: bytes) -> Any:
    """Decode core deterministic CBOR (RFC 8949, section 4.2.1) without tags, as in version 2."""
    import cbor2

    # Encoding the value again and comparing the bytes would take three times as long as decoding.
    # Comparing lengths is enough: among all encodings with sorted keys, the deterministic one is
    # the only shortest. NaN is an exception, since several payloads have the same length; its
    # length counts as NaN here, and the bytes are compared.
    value = _one_value(data, _refused, deepest=_DEEPEST_2, indefinite=False)
    length = _encoded_length(value, {})
    if length != len(data) and (not isnan(length) or cbor2.dumps(value, canonical=True) != data):
        raise FormatError("lengths or numbers are not in shortest form", rule="CborDeterminism")
    return value


def _refused(_tag: int, _value: Any) -> Any:
    raise ValueError("tags are not permitted")


def _one_value(data: bytes, tagged: Callable[[int, Any], Any], **limits: Any) -> Any:
    value, nbytes = kit.decode_cbor(data, tagged=tagged, **limits)
    if nbytes != len(data):
        reason = f"{len(data) - nbytes} bytes follow the manifest's one value"
        raise FormatError(reason, rule="CborSyntax")
    return value


def _encoded_length(value: Any, orders: dict[tuple[Any, ...], int]) -> float:
    """Return the size of the deterministic encoding in bytes; NaN if the value has a NaN."""
    kind = type(value)
    if kind is dict:
        keys = tuple(value)
        length: float | None = orders.get(keys)
        if length is None:
            length = orders[keys] = _keys_length(keys)
        items = value.values()
    elif kind is list or kind is tuple:
        length = _head_length(len(value))
        items = value
    elif kind is str or kind is bytes:
        length = len(value) if kind is bytes or value.isascii() else len(value.encode())
        return length + _head_length(length)
    elif kind is int:
        return _head_length(value if value >= 0 else ~value)
    elif kind is bool or value is None:
        return 1
    elif kind is float:
        import cbor2

        return nan if isnan(value) else len(cbor2.dumps(value, canonical=True))
    else:
        raise FormatError("a simple value other than false, true and null", rule="CborSyntax")
    for item in items:
        # Most of a manifest: the call of a function is spared.
        if type(item) is int and item >= 0:
            length += 1 if item < 24 else 2 if item < 1 << 8 else _head_length(item)
        else:
            length += _encoded_length(item, orders)
    return length


def _head_length(argument: int) -> int:
    """Return the size of a head in bytes (RFC 8949, section 3)."""
    if argument < 24:
        return 1
    return next((1 + size for size in (1, 2, 4) if argument < 1 << 8 * size), 9)


def _keys_length(keys: tuple[Any, ...]) -> int:
    """Count the bytes of a map's head and keys, which must be in bytewise order."""
    import cbor2

    # cbor2 sorts as RFC 7049 does, shorter keys first; for text the order is the same.
    try:
        encoded = [cbor2.dumps(key, canonical=True) for key in keys]
    except cbor2.CBORError as error:
        raise FormatError("a map key that is not a plain value", rule="CborSyntax") from error
    if any(first >= second for first, second in pairwise(encoded)):
        raise FormatError("map keys are not in bytewise order", rule="CborDeterminism")
    return _head_length(len(keys)) + sum(map(len, encoded))


def text(field: str, value: Any) -> str:
    """Return a field that must be text."""
    if type(value) is not str:
        raise mistyped(field, value, "text")
    return value


# --- attributes -----------------------------------------------------------------------------------


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of a file: a map with text keys and any CBOR values."""
    if value is None:
        return {}
    for key in kit.mapping("attributes", value):
        text("name of an attribute", key)
    plain: dict[str, Any] = _plain(value)
    return plain


def _plain(value: Any) -> Any:
    # cbor2's own classes for undefined and simple values cannot be pickled, and an Index must.
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is list:
        return [_plain(item) for item in value]
    if kind is not dict:
        import cbor2

        if value is cbor2.undefined:
            return None
        raise FormatError("a simple value that has no meaning", rule="CborSyntax")
    for key in value:
        if type(key) not in _SCALARS:
            raise FormatError("a key in an attribute is not a scalar", rule="Schema")
    return {key: _plain(item) for key, item in value.items()}


def as_storable(value: Any, levels: int, tensor: str | None = None) -> Any:
    """Raise `UnsupportedError` unless CBOR without tags can represent an attribute."""
    kind = type(value)
    if kind is str:
        return kit.check_text("an attribute", value, tensor)
    if kind is int and not -(1 << 64) <= value < 1 << 64:
        raise _no_attribute(f"{value:.3e}, an integer of more than 64 bits", tensor)
    if kind in _SCALARS:
        return value
    if kind not in {list, tuple, dict}:
        raise _no_attribute(f"of type {kind.__name__}", tensor)
    if not levels:
        raise _no_attribute("nested too deep", tensor)
    if kind is not dict:
        return [as_storable(item, levels - 1, tensor) for item in value]
    for key in value:
        if type(key) not in _SCALARS:
            raise _no_attribute(f"with a key of type {type(key).__name__}", tensor)
    return {
        as_storable(key, 0, tensor): as_storable(item, levels - 1, tensor)
        for key, item in value.items()
    }


def _no_attribute(problem: str, tensor: str | None) -> UnsupportedError:
    reason, hint = f"an attribute is {problem}", "Pass it as text, or leave it out"
    return UnsupportedError(reason, tensor=tensor, rule="Attributes", hint=hint)


def kept_attributes(root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a file that grows, except those that are written again."""
    attrs = attributes(root.get("attributes"))
    return {key: attrs[key] for key in attrs if key not in {kit.DIMS_KEY, kit.ARRANGEMENT_KEY}}


def root_attributes(
    draft: Draft,
    levels: int,
    key_order: Callable[[str], Any],  # sorts the keys of a manifest
    old: Index | None = None,  # the file to which the tensors are added
) -> dict[str, Any]:
    """Return the attributes of a new file, with the arrangement of its tensors among them."""
    tensors: dict[str, Tensor | WantedTensor] = {**(old.tensors if old else {}), **draft.tensors}
    if old is not None:
        grown = old.arrangement.grown(draft.arrangement, draft.tensors)
        draft = replace(draft, arrangement=grown)
    attrs = {}
    for key, value in draft.attrs.items():
        if type(key) is not str:
            raise _no_attribute(f"named by a {type(key).__name__}", None)
        attrs[kit.check_text("the attribute", key)] = as_storable(value, levels)
    as_read = {name: tensors[name] for name in sorted(tensors, key=key_order)}
    return attrs | kit.arrangement_texts(draft, as_read, "Attributes")


# --- layouts --------------------------------------------------------------------------------------

Shape = tuple[int, ...]

#: Attribute of a tensor shown as its parts: the name of its layout in the file.
LAYOUT_KEY = "ztensor_layout"

#: Roles of the parts of each layout; the part with the values comes first.
ROLES = {
    "dense": ("data",),
    "sparse_csr": ("values", "indices", "indptr"),
    "sparse_coo": ("values", "coords"),
}

#: Limit for the elements of a tensor. Sparse tensors may exceed the limit of numpy's arrays.
MOST_ELEMENTS = (1 << 64) - 1

# --- element types --------------------------------------------------------------------------------

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

# The text of version 1.1 lists the last four as element types. Its readers and writers have
# them in no version, but they are unambiguous, so they are read.
SHORT_1 = SHORT | {
    "bool": "bool",
    "f8_e4m3": "float8_e4m3fn",
    "f8_e5m2": "float8_e5m2",
    "complex64": "complex64",
    "complex128": "complex128",
}

# Versions 0.1 and 1.0 use the names of numpy and ml_dtypes, for these only.
LONG = {name: name for name in (*SHORT.values(), "bool")}

# Logical types of version 2: the element type, and the type that must carry it.
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

# Version 1.2 has fewer logical types; version 1.1 spells float8_e4m3fn without "fn".
LOGICAL_1 = {
    "f8_e4m3": LOGICAL["f8_e4m3fn"],
    **{
        name: types for name, types in LOGICAL.items() if name not in {"bool", "f8_e8m0", "f4_e2m1"}
    },
}

# Element types that can be written, which version 2 has all of; wide and common types first.
WRITTEN = tuple(dict.fromkeys([*LONG, *(dtype for dtype, _ in LOGICAL.values())]))


def pop_entries(
    entries: dict[Any, Any], check_name: Callable[[str, Any], object]
) -> Iterator[tuple[str, Any]]:
    """Yield and remove the entries of tensors; the garbage collector then has less to visit."""
    for name in list(entries):
        check_name("name of a tensor", name)
        yield name, entries.pop(name)


def element_type(
    fields: Mapping[Any, Any], types: Mapping[str, str], logical: Mapping[str, tuple[str, str]]
) -> tuple[str, str | None]:
    """Return a part's element type as spelled in the file, and its name here if known."""
    spelled = text("dtype", fields.get("dtype"))
    type_name = fields.get("type")
    if type_name is None:
        return spelled, types.get(spelled)
    if text("type", type_name) not in logical:
        return type_name, None
    dtype, carrier = logical[type_name]
    if spelled != carrier:
        reason = f"the type {type_name!r} needs the dtype {carrier!r}, not {shown(spelled)}"
        raise FormatError(reason, rule="Schema")
    return type_name, dtype


def unknown_error(
    what: str, spelled: str, tensor: str, offset: int | None = None
) -> UnsupportedError:
    """Return the error for an unknown element type or encoding; other tensors are readable."""
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
    """Check the size of dense data if the file states it."""
    dtype = part.dtype
    expected = nbytes_of(dtype, prod(shape))
    size = decoded_size(part)
    # Data of the right size fit into an array, so only others need the second check.
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


def flattened(part: Part) -> Part:
    """Return a part as a flat array of its elements; of bytes if they do not divide evenly."""
    size = decoded_size(part)
    if size is None:
        return part
    bits = ELEMENT_TYPES[part.dtype].bits
    if bits < 8 or size * 8 % bits:
        return replace(part, dtype="uint8", shape=(size,))
    return replace(part, shape=(size * 8 // bits,))


def sparse_parts(layout: str, shape: Shape, parts: Mapping[str, Part]) -> dict[str, Part]:
    """Check the sizes of the parts of a sparse array."""
    for role in ROLES[layout][1:]:
        if not parts[role].dtype.startswith(("int", "uint")):
            raise _unfit(parts[role], f"indices of type {parts[role].dtype}: expected integers")
    values = parts["values"]
    shapes: dict[str, Any]
    if layout == "sparse_csr":
        if len(shape) != 2:
            raise _unfit(parts["indptr"], f"CSR of {len(shape)} axes: expected 2")
        pointers = _count("indptr", parts["indptr"])
        if pointers is not None and pointers != shape[0] + 1:
            reason = f"'indptr' has {pointers} entries: expected {shape[0] + 1} for {shape[0]} rows"
            raise _unfit(parts["indptr"], reason)
        nonzero = _nonzero(_count("indices", parts["indices"]), values)
        shapes = {"values": (nonzero,), "indices": (nonzero,), "indptr": (shape[0] + 1,)}
    else:
        if not shape:
            raise _unfit(parts["coords"], "COO of no axes")
        numbers = _count("coords", parts["coords"])
        if numbers is not None and numbers % len(shape):
            reason = f"'coords' has {numbers} entries, which is not a multiple of {len(shape)} axes"
            raise _unfit(parts["coords"], reason)
        nonzero = _nonzero(None if numbers is None else numbers // len(shape), values)
        shapes = {"values": (nonzero,), "coords": (len(shape), nonzero)}
    return {
        role: replace(parts[role], shape=None if None in extents else extents)
        for role, extents in shapes.items()
    }


def _unfit(part: Part, reason: str) -> FormatError:
    return FormatError(reason, offset=part.offset, rule="LayoutRule")


def _count(role: str, part: Part) -> int | None:
    size = decoded_size(part)
    if size is None:
        return None
    width = ELEMENT_TYPES[part.dtype].bits // 8
    if size % width:
        raise _unfit(part, f"{role!r} has {size} bytes, which is not a multiple of {width}")
    return size // width


def _nonzero(indexed: int | None, values: Part) -> int | None:
    """Return the number of stored values, from the indices, since values may be packed."""
    if indexed is None:
        return None if ELEMENT_TYPES[values.dtype].bits < 8 else _count("values", values)
    size = decoded_size(values)
    expected = nbytes_of(values.dtype, indexed)
    if size is not None and size != expected:
        reason = f"'values' has {size} bytes: expected {expected} for {indexed} indices"
        raise _unfit(values, reason)
    return indexed


# --- writing --------------------------------------------------------------------------------------


class NewEntry(NamedTuple):
    """A tensor of a new manifest, before the positions of its parts are known."""

    head: dict[str, Any]
    parts: dict[str, WantedPart]
    attrs: dict[str, Any]


def storable_parts(tensor: WantedTensor, index_types: Sequence[str]) -> dict[str, Part]:
    """Return the parts of a tensor as a reader will see them, with offset 0."""
    if tensor.order != "C":
        raise UnsupportedError("Fortran order", tensor=tensor.name, rule="Order")
    parts = {}
    for role, part in tensor.parts.items():
        if part.dtype not in WRITTEN:
            hint = f"Supported types are {', '.join(WRITTEN)}"
            reason = f"zTensor does not support {escaped(part.dtype)}"
            raise UnsupportedError(reason, tensor=tensor.name, rule="Dtype", hint=hint)
        parts[role] = Part(part.dtype, part.shape, 0, part.nbytes)
    if tensor.layout == "quantized":
        return parts
    if tensor.layout == "structural":
        return {role: flattened(part) for role, part in parts.items()}
    with kit.locating(tensor=tensor.name):
        require_roles(tensor.layout, parts, ROLES[tensor.layout])
        if tensor.layout == "dense":
            check_dense(parts["data"], tensor.shape)
            return {"data": replace(parts["data"], shape=tensor.shape)}
        parts = sparse_parts(tensor.layout, tensor.shape, parts)
    roles = ROLES[tensor.layout][1:]
    bits = max(ELEMENT_TYPES[parts[role].dtype].bits for role in roles)
    dtype = next(name for name in index_types if ELEMENT_TYPES[name].bits >= bits)
    for role in roles:
        index = parts[role]
        count = index.nbytes * 8 // ELEMENT_TYPES[index.dtype].bits
        parts[role] = replace(index, dtype=dtype, nbytes=count * ELEMENT_TYPES[dtype].bits // 8)
    return parts


def new_parts(
    tensor: WantedTensor,
    parts: Mapping[str, Part],
    encodings: _Choices,
    digests: _Choices,
    digest_of: Any,
) -> dict[str, WantedPart]:
    """Return parts to be written, with the requested compression and digest."""

    def choice(option: str, name: str | None, choices: _Choices) -> str | None:
        if name in choices:
            return choices[name]
        hint = f"Choose one of {', '.join(sorted(filter(None, choices)))}"
        reason, rule = f"unsupported {option} {shown(name or '')}", option.capitalize()
        raise UnsupportedError(reason, tensor=tensor.name, rule=rule, hint=hint)

    result = {}
    for role, part in parts.items():
        requested = tensor.parts[role]
        compression = choice("compression", requested.compression, encodings)
        algorithm = choice("digest", requested.algorithm, digests)
        shape = part.shape or requested.shape
        result[role] = WantedPart(part.dtype, shape, part.nbytes, compression, algorithm, digest_of)
    return result


def unnamed_layout_error(tensor: WantedTensor, defined: Iterable[str]) -> UnsupportedError:
    """Return the error for parts that are neither an array nor of a named layout."""
    hint = f"Give it the attribute {LAYOUT_KEY!r}, a text other than {', '.join(defined)}"
    reason = "parts of a layout without a name"
    return UnsupportedError(reason, tensor=tensor.name, rule="Layout", hint=hint)


def plan_parts(
    literals: tuple[LiteralBytes, ...],
    entries: Mapping[str, NewEntry],
    start: int,
    alignment: int,
    finish: Callable[[Mapping[tuple[str, str], Written]], tuple[LiteralBytes, ...]],
) -> Plan:
    """Place parts one after the other, up to the first compressed part, whose size is unknown."""
    placed = []
    end: int | None = start
    for name, entry in entries.items():
        for role, part in entry.parts.items():
            offset = None if end is None else kit.aligned(end, alignment)
            placed.append(PlannedPart(name, role, part, offset))
            end = None if offset is None or part.compression else offset + part.nbytes
    return Plan(literals, tuple(placed), alignment, finish=finish)


def end_of(written: Mapping[tuple[str, str], Written], start: int) -> int:
    """Return the offset of the end of the written parts."""
    return max([start, *(part.offset + part.nbytes for part in written.values())])
