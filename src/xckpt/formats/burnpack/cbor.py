"""The CBOR metadata, by the rules of burn (ciborium 0.2 under serde).

Fields of a struct are in any order, with keys of text or bytes; unknown fields are ignored. Tags
are skipped, except for large integers. An enum is the text of a variant without content, or a map
of one variant to its content. Two errors of ciborium are accepted here, because their meaning is
unambiguous: enums that are maps of indefinite length, and `data_offsets` of indefinite length.

Scalars are numbers in the metadata, and become tensors without axes. If a scalar and a tensor have
the same name, the scalar is renamed: it gets the suffix ``:scalar`` after as many colons as needed
for a unique name. So is a scalar whose name already has this form, so that the names in the file
can be derived from those of the variables.

Written maps are sorted by name, and structs have their fields in the order of burn's declarations;
empty maps at the top are left out. Everything except floats has the encoding of cbor2.
"""

from __future__ import annotations

import struct as binary
from functools import partial
from typing import TYPE_CHECKING, Any

from xckpt.elements import ELEMENT_TYPES
from xckpt.errors import FormatError, UnsupportedError, shown
from xckpt.formats import kit

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Mapping
    from collections.abc import Set as AbstractSet

    from xckpt.formats.plan import WantedTensor

_RULE = "MetadataDeserialization"

# The content of a variant without content.
UNIT = object()

_LONGEST_KEY = 4096
_LARGEST = (1 << 32) - 1

mistyped = partial(kit.mistyped, rule=_RULE)
number = partial(kit.number, rule=_RULE)
as_shape = partial(kit.as_shape, rule=_RULE)


# --- reading --------------------------------------------------------------------------------------


def decode(data: bytes) -> Any:
    """Decode the first CBOR value in `data`; the remaining bytes are ignored."""
    try:
        return kit.decode_cbor(data, tagged=_tagged)[0]
    except FormatError as error:
        error.rule = _RULE
        raise


def _tagged(tag: int, value: Any) -> Any:
    if tag not in {2, 3} or type(value) is not bytes or len(value.lstrip(b"\0")) > 8:
        return value
    large = int.from_bytes(value, "big")
    return ~large if tag == 3 else large


def mapping(label: str, value: Any) -> dict[str, Any]:
    """Return a map with keys of text."""
    for key in kit.mapping(label, value, _RULE):
        if type(key) is not str:
            raise mistyped(f"a key of {label}", key, "text")
    texts: dict[str, Any] = value
    return texts


def struct(label: str, value: Any, names: AbstractSet[str]) -> dict[str, Any]:
    """Return the fields of a struct."""
    if kit.mapping(label, value, _RULE).keys() <= names:
        fields: dict[str, Any] = value
        return fields
    fields = {}
    for key, item in value.items():
        name = _field_name(label, key)
        if name in fields:
            raise FormatError(f"{label} has the field {shown(name)} twice", rule=_RULE)
        if name in names:
            fields[name] = item
    return fields


def _field_name(label: str, key: Any) -> str:
    if type(key) is str:
        key = key.encode()
    if type(key) is not bytes:
        raise mistyped(f"a key of {label}", key, "text")
    if len(key) > _LONGEST_KEY:
        raise FormatError(f"a key of {label} has {len(key)} bytes", rule=_RULE)
    return str(key, "utf-8", "replace")


def variant(label: str, value: Any) -> tuple[str, Any]:
    """Return the variant of an enum and its content."""
    if type(value) is str:
        return value, UNIT
    if type(value) is not dict or len(value) != 1:
        raise mistyped(label, value, "a variant, as text or as a map of one")
    ((key, content),) = value.items()
    return _field_name(label, key), content


def unit(label: str, value: Any, variants: Collection[str]) -> str:
    """Return the variant of an enum whose variants have no content."""
    name, content = variant(label, value)
    if content is not UNIT:
        raise mistyped(label, value, "a variant without content")
    if name not in variants:
        raise unknown(label, name)
    return name


def unknown(label: str, name: str) -> UnsupportedError:
    """Return the error for an unknown variant."""
    return UnsupportedError(f"{label} is {shown(name)}, which is unknown", rule=_RULE)


def optional(value: Any) -> Any:
    """Return an optional value, with null for CBOR's undefined."""
    import cbor2

    return None if value is cbor2.undefined else value


# --- writing --------------------------------------------------------------------------------------


def encode(
    descriptors: Mapping[str, Any], attrs: Mapping[str, str], scalars: Mapping[str, tuple[str, Any]]
) -> bytes:
    """Encode the metadata of a file."""
    import cbor2

    root: dict[str, Any] = {"tensors": dict(sorted(descriptors.items()))}
    if attrs:
        root["metadata"] = dict(sorted(attrs.items()))
    if scalars:
        root["scalars"] = {name: {kind: value} for name, (kind, value) in sorted(scalars.items())}
    metadata = cbor2.dumps(root, encoders={float: _encode_float})
    if len(metadata) > _LARGEST:
        raise UnsupportedError("metadata of more than 4 GiB", rule="Metadata")
    return metadata


def _encode_float(encoder: Any, value: float) -> None:
    """Encode a float as ciborium does, in the shortest form that keeps its bits."""
    bits = binary.pack(">d", value)
    # cbor2 has one NaN only.
    for first, form in ((b"\xf9", ">e"), (b"\xfa", ">f")):
        try:
            shorter = binary.pack(form, value)
        except OverflowError:
            continue
        if binary.pack(">d", *binary.unpack(form, shorter)) == bits:
            encoder.write(first + shorter)
            return
    encoder.write(b"\xfb" + bits)


# --- scalars --------------------------------------------------------------------------------------

#: Element type, type in CBOR, and struct format, by kind.
KINDS: dict[str, tuple[str, type, str]] = {
    "Int": ("int64", int, "<q"),
    "UInt": ("uint64", int, "<Q"),
    "Float": ("float64", float, "<d"),
    "Bool": ("bool", bool, "<?"),
}
_HELD = {
    "Int": lambda value: type(value) is int and -(1 << 63) <= value < 1 << 63,
    "UInt": lambda value: type(value) is int and 0 <= value < 1 << 64,
    "Float": lambda value: type(value) is float or (type(value) is int and float(value) == value),
    "Bool": lambda value: type(value) is bool,
}

_MARK = ":scalar"
# Limit for the recursion over repeated marks; longer names get another mark unconditionally.
_MOST_MARKS = 8


class ScalarNames:
    """Translates the names of scalars in a file to the names of their variables, and back."""

    def __init__(self, tensors: Container[str]) -> None:
        self._tensors = tensors
        self._marked: dict[str, str] = {}

    def shown(self, name: str) -> str:
        """Return the name of a scalar's variable, which no tensor and no other scalar has."""
        return self._mark(name) if self._is_taken(name) else name

    def stored(self, name: str) -> str:
        """Return the name in the file of the scalar that a variable shows."""
        bare = _unmarked(name)
        if bare is not None and name == self._mark(bare) and self._is_taken(bare):
            return bare
        return name

    def _is_taken(self, name: str, marks: int = _MOST_MARKS) -> bool:
        """Return whether a name belongs to a tensor, or to a scalar that may have been renamed.

        A name with a mark is taken if the name before the mark is.
        """
        if name in self._tensors:
            return True
        bare = _unmarked(name)
        if bare is None or name != self._mark(bare):
            return False
        return marks == 0 or self._is_taken(bare, marks - 1)

    def _mark(self, name: str) -> str:
        marked = self._marked.get(name)
        if marked is None:
            marked = name + _MARK
            while marked in self._tensors:
                marked += ":"
            self._marked[name] = marked
        return marked


def _unmarked(name: str) -> str | None:
    bare = name.rstrip(":")
    return bare.removesuffix(_MARK) if bare.endswith(_MARK) else None


def kind_and_value(tensor: WantedTensor) -> tuple[str, Any]:
    """Return the kind and the value of a scalar to write."""
    kind, part = tensor.attrs["scalar"], tensor.parts["data"]
    if part.inline is None:
        raise ValueError(f"the scalar {shown(tensor.name)} has no inline value")
    if not isinstance(kind, str) or kind not in KINDS:
        raise _unfit(tensor, f"a scalar of the kind {shown(str(kind))}")
    data, dtype = part.inline, part.dtype
    if dtype == "bool32":
        data, dtype = bytes((any(data),)), "bool"
    elif dtype == "bfloat16":  # the upper half of a float32
        data, dtype = bytes(2) + data, "float32"
    code = ELEMENT_TYPES[dtype].struct_code or ""
    try:
        (value,) = binary.unpack(f"<{code}", data)
    except (ValueError, binary.error):
        reason = f"a scalar of the kind {kind} that is {len(part.inline)} bytes of {part.dtype}"
        raise _unfit(tensor, reason) from None
    if not _HELD[kind](value):
        raise _unfit(tensor, f"a scalar of the kind {kind} that is {value!r}")
    return kind, KINDS[kind][1](value)


def _unfit(tensor: WantedTensor, reason: str) -> UnsupportedError:
    hint = "Kinds are Int and UInt (integers of 64 bits), Float and Bool; without the "
    hint += "attribute 'scalar' it is a tensor"
    return UnsupportedError(reason, tensor=tensor.name, rule="Scalar", hint=hint)
