"""The CBOR metadata as burn encodes them (ciborium 0.2 under serde's derived writers).

Maps have their names in order, structs their fields as burn declares them, and the top map leaves
out what has no entries. All but floats is what cbor2 makes of such a dict.
"""

from __future__ import annotations

import struct as binary
from typing import TYPE_CHECKING, Any

from xckpt.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["encode_metadata"]

_LARGEST_METADATA = (1 << 32) - 1


def encode_metadata(
    descriptors: Mapping[str, Any], attrs: Mapping[str, str], scalars: Mapping[str, tuple[str, Any]]
) -> bytes:
    """Encode the metadata of a file."""
    import cbor2

    fields = [cbor2.dumps("tensors") + cbor2.dumps(dict(sorted(descriptors.items())))]
    if attrs:
        fields.append(cbor2.dumps("metadata") + cbor2.dumps(dict(sorted(attrs.items()))))
    if scalars:
        entries = [
            cbor2.dumps(name) + b"\xa1" + cbor2.dumps(kind) + _number(value)
            for name, (kind, value) in sorted(scalars.items())
        ]
        fields.append(b"".join((cbor2.dumps("scalars"), _map_head(len(entries)), *entries)))
    metadata = bytes((0xA0 | len(fields),)) + b"".join(fields)
    if len(metadata) > _LARGEST_METADATA:
        raise UnsupportedError("metadata of more than 4 GiB", rule="Metadata")
    return metadata


def _map_head(count: int) -> bytes:
    import cbor2

    # That of an integer, with the kind of a map in its highest bits.
    first, *rest = cbor2.dumps(count)
    return bytes((first | 0xA0, *rest))


def _number(value: float) -> bytes:
    """Encode a number as ciborium does: a float in the shortest form that keeps its bits."""
    import cbor2

    if type(value) is not float:
        return cbor2.dumps(value)
    bits = binary.pack(">d", value)
    # cbor2 has one NaN only.
    for first, form in ((b"\xf9", ">e"), (b"\xfa", ">f")):
        try:
            shorter = binary.pack(form, value)
        except OverflowError:
            continue
        if binary.pack(">d", *binary.unpack(form, shorter)) == bits:
            return first + shorter
    return b"\xfb" + bits
