"""The CBOR metadata, taken and refused as burn does (ciborium 0.2 under serde's derived readers).

Fields of a struct are in any order, their keys text or bytes, and unknown ones are ignored. Tags
are skipped, but for large integers. An enum is the text of a variant without content, or a map of
one variant to its content. Two refusals of ciborium are not imitated, because what they refuse
can be read in one way only: an enum that is a map of indefinite length, and `data_offsets` that
are an array of indefinite length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xckpt.errors import FormatError, UnsupportedError, shown
from xckpt.formats.kit import decode_cbor

if TYPE_CHECKING:
    from collections.abc import Collection
    from collections.abc import Set as AbstractSet

__all__ = [
    "UNIT",
    "decode",
    "mapping",
    "mistyped",
    "optional",
    "struct",
    "unit",
    "unknown",
    "variant",
]

_RULE = "MetadataDeserialization"

# What a variant without content has.
UNIT = object()

_LONGEST_KEY = 4096


def _tagged(tag: int, value: Any) -> Any:
    """Tags are skipped, but for those of large integers."""
    if tag not in {2, 3} or type(value) is not bytes or len(value.lstrip(b"\0")) > 8:
        return value
    number = int.from_bytes(value, "big")
    return ~number if tag == 3 else number


def decode(data: bytes) -> Any:
    """Decode the first CBOR value in some bytes; what follows it is ignored."""
    try:
        return decode_cbor(data, tagged=_tagged)[0]
    except FormatError as error:
        error.rule = _RULE
        raise


def mistyped(what: str, value: Any, expected: str) -> FormatError:
    """Make the error for a value that is missing or of the wrong type."""
    found = "missing or null" if value is None else type(value).__name__
    if type(value) in {str, int, float, bool}:
        found = shown(str(value)) if type(value) is str else str(value)
    elif type(value) in {list, dict}:
        found = f"{'an array' if type(value) is list else 'a map'} of {len(value)}"
    return FormatError(f"{what} is {found}: expected {expected}", rule=_RULE)


def mapping(what: str, value: Any) -> dict[str, Any]:
    """Return a map with keys of text."""
    if type(value) is not dict:
        raise mistyped(what, value, "a map")
    for key in value:
        if type(key) is not str:
            raise mistyped(f"a key of {what}", key, "text")
    return value


def struct(what: str, value: Any, known: AbstractSet[str]) -> dict[str, Any]:
    """Return the fields of a struct."""
    if type(value) is not dict:
        raise mistyped(what, value, "a map")
    if value.keys() <= known:
        return value
    fields: dict[str, Any] = {}
    for key, item in value.items():
        name = _field_name(what, key)
        if name in fields:
            raise FormatError(f"{what} has the field {shown(name)} twice", rule=_RULE)
        if name in known:
            fields[name] = item
    return fields


def _field_name(what: str, key: Any) -> str:
    if type(key) is str:
        key = key.encode()
    if type(key) is not bytes:
        raise mistyped(f"a key of {what}", key, "text")
    if len(key) > _LONGEST_KEY:
        raise FormatError(f"a key of {what} has {len(key)} bytes", rule=_RULE)
    return str(key, "utf-8", "replace")


def variant(what: str, value: Any) -> tuple[str, Any]:
    """Return the variant of an enum and its content."""
    if type(value) is str:
        return value, UNIT
    if type(value) is not dict or len(value) != 1:
        raise mistyped(what, value, "a variant, as text or as a map of one")
    ((key, content),) = value.items()
    return _field_name(what, key), content


def unit(what: str, value: Any, known: Collection[str]) -> str:
    """Return the variant of an enum whose variants have no content."""
    name, content = variant(what, value)
    if content is not UNIT:
        raise mistyped(what, value, "a variant without content")
    if name not in known:
        raise unknown(what, name)
    return name


def unknown(what: str, name: str) -> UnsupportedError:
    """Make the error for a variant that is not known."""
    return UnsupportedError(f"{what} is {shown(name)}, which is not known", rule=_RULE)


def optional(value: Any) -> Any:
    """Return a value that may be absent, with CBOR's undefined taken for null."""
    import cbor2

    return None if value is cbor2.undefined else value
