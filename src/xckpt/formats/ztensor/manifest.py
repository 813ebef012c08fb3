"""The CBOR manifest: where it lies, decoding that trusts nothing, and attributes both ways.

cbor2 cannot tell deterministic encoding from any other, and ignores what follows the first value.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import isnan, nan
from typing import TYPE_CHECKING, Any

from xckpt.errors import FormatError, UnsupportedError
from xckpt.formats import kit
from xckpt.formats.kit import mistyped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from xckpt.formats.plan import Draft, WantedTensor
    from xckpt.index import Index, Tensor

LARGEST = 1 << 30
_HEAD = 8

# Depth 32 counted from the root, as version 2 does, is 33 containers.
_DEEPEST_2 = 33

_SCALARS = frozenset({str, int, float, bool, bytes, type(None)})


# --- decoding -------------------------------------------------------------------------------------


def locate(size: int, footer: int, length: int) -> int:
    """Find a manifest that ends where the footer begins."""
    # Not "<" as section 6 of the 1.0 specification has it: a file without tensors is all manifest.
    if length > size - _HEAD - footer:
        reason = f"the footer claims a manifest of {length} bytes, "
        reason += f"but there are {size - _HEAD - footer} before it"
        hint = kit.TRUNCATED
        raise FormatError(reason, offset=size - footer, rule="ManifestBounds", hint=hint)
    if length > LARGEST:
        reason = f"a manifest of {length} bytes is larger than {LARGEST}"
        raise FormatError(reason, offset=size - footer, rule="ManifestTooLarge")
    return size - footer - length


def decode(data: bytes) -> Any:
    """Decode any CBOR, as versions 0 and 1 permit."""
    return _one_value(data, lambda _tag, value: value)


def decode_deterministic(data: bytes) -> Any:
    """Decode core deterministic CBOR (RFC 8949, section 4.2.1) without tags, as version 2 demands.

    Encoding the value again and comparing the bytes takes three times as long as decoding. But
    every head that is not the shortest makes an encoding longer, so that of all encodings of a
    value with their keys in order, the deterministic one is the only one of its length: it is
    enough to count. NaN is the exception (all payloads are one value), and its length is NaN.
    """
    import cbor2

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
    """Count the bytes of the deterministic encoding; NaN if there is a NaN in it."""
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
    else:
        return _scalar_length(value)
    for item in items:
        # Most of a manifest: the call of a function is spared.
        if type(item) is int and item >= 0:
            length += 1 if item < 24 else 2 if item < 1 << 8 else _head_length(item)
        else:
            length += _encoded_length(item, orders)
    return length


def _scalar_length(value: Any) -> float:
    import cbor2

    kind = type(value)
    if kind is str or kind is bytes:
        length = len(value) if kind is bytes or value.isascii() else len(value.encode())
        return length + _head_length(length)
    if kind is int:
        return _head_length(value if value >= 0 else ~value)
    if kind is bool or value is None:
        return 1
    if kind is float:
        return nan if isnan(value) else len(cbor2.dumps(value, canonical=True))
    raise FormatError("a simple value other than false, true and null", rule="CborSyntax")


def _head_length(argument: int) -> int:
    """Return the size of a head in bytes (RFC 8949, section 3)."""
    if argument < 24:
        return 1
    if argument < 1 << 8:
        return 2
    if argument < 1 << 16:
        return 3
    return 5 if argument < 1 << 32 else 9


def _keys_length(keys: tuple[Any, ...]) -> int:
    """Count the bytes of a map's head and keys, which must be in bytewise order."""
    import cbor2

    # cbor2's canonical order is that of RFC 7049, shorter keys first; for text it is the same.
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
    """Return attributes of a file: a map with text keys, and in it whatever CBOR has."""
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


def storable(value: Any, levels: int, tensor: str | None = None) -> Any:
    """Check that CBOR without tags can hold an attribute that is to be written."""
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
        return [storable(item, levels - 1, tensor) for item in value]
    for key in value:
        if type(key) not in _SCALARS:
            raise _no_attribute(f"with a key of type {type(key).__name__}", tensor)
    return {
        storable(key, 0, tensor): storable(item, levels - 1, tensor) for key, item in value.items()
    }


def _no_attribute(what: str, tensor: str | None) -> UnsupportedError:
    reason, hint = f"an attribute is {what}", "Give it as text, or leave it out"
    return UnsupportedError(reason, tensor=tensor, rule="Attributes", hint=hint)


def kept_attributes(root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a file that grows, but for what is written anew."""
    kept = attributes(root.get("attributes"))
    return {key: kept[key] for key in kept if key not in {kit.DIMS_KEY, kit.ARRANGEMENT_KEY}}


def root_attributes(
    draft: Draft, levels: int, key_order: Callable[[str], Any], old: Index | None = None
) -> dict[str, Any]:
    """Return the attributes of a file to be written, and what is kept of all its tensors in them.

    `key_order` sorts the keys of a manifest; `old` is the file to which the tensors are added.
    """
    tensors: dict[str, Tensor | WantedTensor] = {**(old.tensors if old else {}), **draft.tensors}
    if old is not None:
        grown = old.arrangement.grown(draft.arrangement, draft.tensors)
        draft = replace(draft, arrangement=grown)
    attrs = {}
    for key, value in draft.attrs.items():
        if type(key) is not str:
            raise _no_attribute(f"named by a {type(key).__name__}", None)
        attrs[kit.check_text("the attribute", key)] = storable(value, levels)
    as_read = {name: tensors[name] for name in sorted(tensors, key=key_order)}
    return attrs | kit.arrangement_texts(draft, as_read, "Attributes")
