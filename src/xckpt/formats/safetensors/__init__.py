"""safetensors (``.safetensors``).

A length, a JSON header, and the data of all tensors without a gap::

    offset   bytes   what
    0        8       n, length of the header, little-endian, at most 100,000,000
    8        n       the header: a JSON object in UTF-8, padded with spaces
    8 + n            data, little-endian, up to the end of the file

The header begins with ``{`` and names every tensor; ``data_offsets`` count from ``8 + n``, the
second is exclusive::

    {"__metadata__": {"format": "pt"},
     "embed.weight": {"dtype": "BF16", "shape": [512, 64], "data_offsets": [0, 65536]}}

``__metadata__`` is optional, or null, and maps text to text. Other fields of a tensor are ignored.
Elements are in C order. Tensors whose size in bits is no multiple of 8 are not allowed. In the
order of their offsets the tensors tile the data: the first begins at 0, each begins where the one
before it ends, and the last ends with the file. A tensor without elements has an empty range.

The header is what serde_json takes for JSON: no NaN, no lone surrogate, no number beyond a
64-bit float, at most 127 levels. Duplicate keys are not allowed. The package lets some of them
pass, and leading blanks, and a tensor written as an array of its fields; here these are errors.
So are shapes that numpy cannot represent.

Not said is how 6-bit elements share bytes: their tensors are listed, and their values not read.

References: README.md and safetensors/src/tensor.rs of github.com/huggingface/safetensors, 0.8;
rules have the names of its ``SafeTensorError``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from math import isfinite, prod
from typing import TYPE_CHECKING, Any

from xckpt.dims import DIMS_KEY, with_dims
from xckpt.dtypes import ELEMENT_TYPES
from xckpt.errors import CheckpointError, FormatError, UnsupportedError, shown
from xckpt.formats.safetensors.header import DTYPES, LARGEST_HEADER, LENGTH_NBYTES
from xckpt.formats.safetensors.plan import FILE_ATTRS, TENSOR_ATTRS, WRITES, plan
from xckpt.index import Index, Part, Tensor

if TYPE_CHECKING:
    from xckpt.formats import Readable

__all__ = ["FILE_ATTRS", "NAME", "SUFFIXES", "TENSOR_ATTRS", "WRITES", "detect", "plan", "read"]

NAME = "safetensors"
SUFFIXES = (".safetensors",)

_BEGINNING = re.compile(rb'\{[ \t\r\n]*["}]')
_DEEPEST = 127

_UNREAD = {"F6_E2M3": 6, "F6_E3M2": 6}
_BITS = {name: ELEMENT_TYPES[dtype].bits for name, dtype in DTYPES.items()} | _UNREAD

# Of numpy.
_MOST_AXES = 64
_LARGEST = (1 << 63) - 1


def detect(head: bytes, size: int, name: str) -> bool:  # noqa: ARG001 (the registry's signature)
    """Tell whether a file begins as a safetensors file does: there is no magic.

    Parameters
    ----------
    head : bytes
        The first bytes of the file.
    size : int
        Size of the file in bytes.
    name : str
        Its path or URL.

    Returns
    -------
    bool
        Whether a length that is allowed and the beginning of a JSON object are there.

    Examples
    --------
    >>> detect(b'\\x02\\0\\0\\0\\0\\0\\0\\0{}', 10, "m.safetensors")
    True
    """
    length = int.from_bytes(head[:LENGTH_NBYTES], "little")
    return length <= LARGEST_HEADER and _BEGINNING.match(head, LENGTH_NBYTES) is not None


def read(source: Readable) -> Index:
    """Read the index of a safetensors file: its header.

    Parameters
    ----------
    source : Readable
        The file.

    Returns
    -------
    Index
        Every tensor, in the order of their data.

    Raises
    ------
    FormatError
        If the file breaks a rule.
    UnsupportedError
        If it has an element type that is not known.
    """
    header = _header(source)
    entries = _parse(header)
    attrs = _metadata(entries.pop("__metadata__", None))
    tensors = _tensors(entries, LENGTH_NBYTES + len(header), source.size)
    tensors = with_dims(tensors, attrs.pop(DIMS_KEY, None))
    return Index(NAME, "", tensors, attrs, source.name, source.size)


def _header(source: Readable) -> bytes:
    size = source.size
    if size < LENGTH_NBYTES:
        raise _broken(f"{size} bytes are too few for a length", "HeaderTooSmall", 0)
    length = int.from_bytes(source.read(0, LENGTH_NBYTES), "little")
    if length > LARGEST_HEADER:
        raise _broken(f"a header of {length} > {LARGEST_HEADER} bytes", "HeaderTooLarge", 0)
    if length > size - LENGTH_NBYTES:
        reason = f"a header of {length} bytes is not in a file of {size}"
        raise _broken(reason, "InvalidHeaderLength", 0)
    return bytes(source.read(LENGTH_NBYTES, length))


def _parse(header: bytes) -> dict[str, Any]:
    if not header.startswith(b"{"):
        raise _broken(f"the header begins {header[:8]!r}, not '{{'", "InvalidHeaderStart")
    try:
        entries: dict[str, Any] = json.loads(
            header.decode(),
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=_finite,
        )
        if b"\\u" in header:
            # Python lets lone surrogates pass, but cannot encode them.
            json.dumps(entries, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise _broken(f"the header is not valid JSON: {error}") from error
    return entries


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"duplicate key {shown(key)}")
    return members


def _integer(digits: str) -> int | float:
    # To serde_json, -0 and what 64 bits do not hold are floats.
    return int(digits) if len(digits) <= 20 and digits != "-0" else _finite(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not isfinite(number):
        raise ValueError(f"number out of range: {shown(digits)}")
    return number


def _metadata(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if type(value) is not dict or not all(type(text) is str for text in value.values()):
        raise _broken("'__metadata__' must map text to text")
    return value


def _tensors(entries: dict[str, Any], start: int, size: int) -> dict[str, Tensor]:
    tensors = []
    for name, entry in entries.items():
        try:
            tensors.append(_tensor(name, entry, start))
        except CheckpointError as error:
            raise error.located(tensor=name) from None
    tensors.sort(key=lambda tensor: (tensor.parts["data"].offset, tensor.nbytes))
    end = start
    for tensor in tensors:
        offset = tensor.parts["data"].offset
        if offset != end:
            reason = f"data begin at byte {offset}, but those before end at byte {end}"
            raise _broken(reason, "InvalidOffset").located(tensor=tensor.name)
        end += tensor.nbytes
    if end != size:
        raise _broken(f"data end at byte {end}, but the file at {size}", "MetadataIncompleteBuffer")
    return {tensor.name: tensor for tensor in tensors}


def _tensor(name: str, entry: Any, start: int) -> Tensor:
    if type(entry) is not dict:
        raise _broken("a tensor must be an object")
    if len(entry) > 3:
        _check_depth(entry, _DEEPEST - 1)
    dtype = _dtype(entry.get("dtype"))
    shape = _sizes("shape", entry.get("shape"), _MOST_AXES)
    offsets = _sizes("data_offsets", entry.get("data_offsets"), 2)
    if len(offsets) != 2 or offsets[1] < offsets[0]:
        raise _broken(f"the offsets {offsets} are no range", "InvalidOffset")
    offset, nbytes = start + offsets[0], offsets[1] - offsets[0]
    _check_size(dtype, shape, nbytes)
    if dtype in DTYPES:
        part = Part(DTYPES[dtype], shape, offset, nbytes)
        return Tensor(name, part.dtype, shape, {"data": part})
    reason = f"how {dtype} elements share bytes is not defined"
    problem = UnsupportedError(reason, tensor=name, offset=offset, rule="Dtype")
    part = Part("uint8", (nbytes,), offset, nbytes)
    return Tensor(name, dtype, shape, {"data": part}, problem=problem)


def _dtype(value: Any) -> str:
    if type(value) is not str:
        raise _broken("'dtype' must be text")
    if value not in _BITS:
        reason = f"the element type {shown(value)} is not one of {', '.join(_BITS)}"
        raise UnsupportedError(reason, offset=LENGTH_NBYTES, rule="Dtype")
    return value


def _sizes(field: str, value: Any, most: int) -> tuple[int, ...]:
    if type(value) is not list or len(value) > most:
        raise _broken(f"{field!r} must be an array of at most {most} integers")
    for size in value:
        if type(size) is not int or not 0 <= size <= _LARGEST:
            raise _broken(f"{field!r} must have integers from 0 to {_LARGEST}")
    return tuple(value)


def _check_size(dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
    bits = _BITS[dtype] * prod(shape)
    if bits % 8:
        raise _broken(f"{bits} bits of data are no whole bytes", "MisalignedSlice")
    if bits != nbytes * 8:
        reason = f"{nbytes} bytes of data, but {dtype} {list(shape)} has {bits // 8}"
        raise _broken(reason, "TensorInvalidInfo")
    # A zero does not make up for other sizes: numpy cannot represent such an array, not even an
    # empty one. Decoded elements have 32 bits at least.
    if not bits and max(_BITS[dtype], 32) * prod(filter(None, shape)) // 8 > _LARGEST:
        raise _broken(f"the shape {list(shape)} is too large", "ValidationOverflow")


def _check_depth(value: Any, levels: int) -> None:
    if type(value) in {dict, list}:
        if not levels:
            raise _broken(f"the header is nested deeper than {_DEEPEST} levels")
        for inner in value.values() if type(value) is dict else value:
            _check_depth(inner, levels - 1)


def _broken(
    reason: str, rule: str = "InvalidHeaderDeserialization", offset: int = LENGTH_NBYTES
) -> FormatError:
    return FormatError(reason, offset=offset, rule=rule)
