"""Writing burnpack files, byte for byte as burn does if it has tensors in the same order.

Names are in the order of their UTF-8 bytes. Data are in the order of the file that they come from,
else in that of the index (burn has them in the order of its modules), each tensor at a multiple of
256, with nothing behind the last. Maps without entries and param_ids that there are none of are
left out. Integers and floats are in their shortest form.

Scalars have their value in the metadata, which come first: it must be in the index, as the
`inline` bytes of their part.
"""

from __future__ import annotations

import json
import struct as binary
from hashlib import blake2b
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.elements import nbytes_of
from xckpt.errors import UnsupportedError, shown
from xckpt.formats.burnpack.encode import encode_metadata
from xckpt.formats.burnpack.scalars import ScalarNames, kind_and_value
from xckpt.formats.burnpack.schemes import placed_parts, scheme_of, spelled_scheme
from xckpt.formats.burnpack.tensors import ELEMENTS
from xckpt.formats.kit import DIMS_KEY, as_text, check_text, dims_text
from xckpt.index import Part
from xckpt.plan import Extent, Literal, Plan, by_source

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from xckpt.index import Index, Tensor

__all__ = [
    "FILE_ATTRS",
    "LAYOUTS",
    "TENSOR_ATTRS",
    "WRITES",
    "is_inline",
    "plan",
]

WRITES = (*dict.fromkeys(dtype for dtype, _ in ELEMENTS.values()), "bool32")
LAYOUTS = ("dense", "quantized", "structural")
TENSOR_ATTRS = ("param_id", "burn_dtype", "scalar")
FILE_ATTRS = None

_ALIGNMENT = 256
_DIALECTS = ("0.20", "0.21", "0.22")
_NAMES = {dtype: name for name, (dtype, _) in ELEMENTS.items() if name not in {"Flex32", "Bool"}}


class _Options(NamedTuple):
    dialect: str
    make_ids: bool


def is_inline(tensor: Tensor) -> bool:
    """Return whether the value of a tensor is in the metadata."""
    return "scalar" in tensor.attrs and not tensor.shape and tensor.layout == "dense"


def plan(index: Index, *, dialect: str = "0.22", param_ids: str = "keep") -> Plan:
    """Plan a burnpack file."""
    if dialect not in _DIALECTS:
        raise ValueError(f"dialect={dialect!r}: expected one of {', '.join(_DIALECTS)}")
    if param_ids not in {"keep", "make"}:
        raise ValueError(f"param_ids={param_ids!r}: expected 'keep' or 'make'")
    options = _Options(dialect, param_ids == "make")
    scalars = [name for name, tensor in index.tensors.items() if is_inline(tensor)]
    tensors = {name: each for name, each in index.tensors.items() if not is_inline(each)}
    tensors = by_source(tensors)
    descriptors, extents, end = _placed(tensors, options)
    values = _scalars([index.tensors[name] for name in scalars], tensors)
    metadata = encode_metadata(descriptors, _attributes(index), values)
    head = b"NRUB" + binary.pack("<HI", 1, len(metadata)) + metadata
    start = _aligned(len(head))
    placed = tuple(extent._replace(offset=start + (extent.offset or 0)) for extent in extents)
    return Plan((Literal(0, head),), placed, _ALIGNMENT, start + end)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _placed(
    tensors: Mapping[str, Tensor], options: _Options
) -> tuple[dict[str, Any], list[Extent], int]:
    """Describe tensors, with offsets from where data begin, and return where they end."""
    descriptors: dict[str, Any] = {}
    extents: list[Extent] = []
    end = 0
    for name, tensor in tensors.items():
        check_text("the name", name, name)
        dtype, parts = _typed(tensor, options)
        start = _aligned(end)
        extents += [
            Extent(name, role, _raw(part), start + part.offset) for role, part in parts.items()
        ]
        end = start + sum(part.nbytes for part in parts.values())
        descriptors[name] = {
            "dtype": dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        param_id = _param_id(tensor, options)
        if param_id is not None:
            descriptors[name]["param_id"] = param_id
    return descriptors, extents, end


def _raw(part: Part) -> Part:
    return Part(part.dtype, part.shape, 0, part.nbytes)


def _typed(tensor: Tensor, options: _Options) -> tuple[Any, Mapping[str, Part]]:
    """Return the dtype of a tensor as the metadata have it, and its parts with their offsets."""
    if tensor.order != "C":
        raise UnsupportedError("Fortran order", tensor=tensor.name, rule="Order")
    for part in tensor.parts.values():
        if part.encoding is not None or part.digest is not None:
            raise UnsupportedError(
                "burnpack has neither compression nor digests", tensor=tensor.name, rule="Encoding"
            )
    if tensor.layout in {"quantized", "structural"}:
        scheme = scheme_of(tensor)
        spelled = spelled_scheme(scheme, old=options.dialect != "0.22")
        if spelled is None:
            raise _not_before("0.22", f"the scheme {scheme}", tensor)
        return {"QFloat": spelled}, placed_parts(tensor, scheme)
    if tensor.layout != "dense" or set(tensor.parts) != {"data"}:
        raise UnsupportedError(
            f"burnpack has no {tensor.layout} layout",
            tensor=tensor.name,
            rule="Layout",
            hint="Save it dense",
        )
    dtype = tensor.parts["data"].dtype
    return _dtype(tensor, dtype, options), {"data": _dense(tensor, dtype)}


def _dense(tensor: Tensor, dtype: str) -> Part:
    nbytes = nbytes_of(dtype, prod(tensor.shape))
    found = tensor.parts["data"].nbytes
    if found != nbytes:
        raise ValueError(
            f"{shown(tensor.name)}: {found} bytes, but {dtype} of {tensor.shape} has {nbytes}"
        )
    return Part(dtype, tensor.shape, 0, nbytes)


def _dtype(tensor: Tensor, dtype: str, options: _Options) -> Any:
    stated = tensor.attrs.get("burn_dtype")
    if dtype == "bool" and options.dialect == "0.20":
        return "Bool"
    if dtype == "bool":
        return {"Bool": "U8" if stated == json.dumps({"Bool": "U8"}) else "Native"}
    if dtype == "bool32":
        if options.dialect == "0.20":
            raise _not_before("0.21", "booleans of 32 bits", tensor)
        return {"Bool": "U32"}
    if dtype == "float32" and stated == "Flex32":
        return stated
    if dtype not in _NAMES:
        raise UnsupportedError(
            f"burnpack has no {shown(dtype)[1:-1]}",
            tensor=tensor.name,
            rule="Dtype",
            hint=f"It has {', '.join(WRITES)}",
        )
    return _NAMES[dtype]


def _not_before(dialect: str, what: str, tensor: Tensor) -> UnsupportedError:
    return UnsupportedError(
        f"burn has {what} from {dialect} on",
        tensor=tensor.name,
        rule="Dialect",
        hint=f"Write dialect={dialect!r}",
    )


def _param_id(tensor: Tensor, options: _Options) -> int | None:
    stated = tensor.attrs.get("param_id")
    if stated is None:
        return _made_id(tensor.name) if options.make_ids else None
    text = str(stated)
    if text.isascii() and text.isdigit() and len(text) <= 20 and int(text) < 1 << 64:
        return int(text)
    raise UnsupportedError(
        f"the param_id {shown(text)} is no unsigned integer of 64 bits",
        tensor=tensor.name,
        rule="ParamId",
        hint="Give it in decimal digits, or leave it out",
    )


def _made_id(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def _attributes(index: Index) -> dict[str, str]:
    """Return the metadata of the file: texts, and what is none as JSON."""
    if DIMS_KEY in index.attrs:
        raise UnsupportedError(
            f"the attribute {DIMS_KEY!r} is where names of axes are kept",
            rule="Metadata",
            hint="Rename it",
        )
    texts = {key: _text(key, value) for key, value in index.attrs.items()}
    dims = dims_text(index.tensors)
    if dims is not None:
        texts[DIMS_KEY] = dims
    for key, text in texts.items():
        check_text("the attribute", key)
        check_text("an attribute", text)
    return texts


def _text(key: str, value: Any) -> str:
    if type(key) is not str:
        reason = f"an attribute is named by a {type(key).__name__}"
        raise UnsupportedError(reason, rule="Metadata", hint="Rename it")
    return as_text(key, value, nan=True)


def _scalars(
    scalars: Iterable[Tensor], tensors: Mapping[str, Tensor]
) -> dict[str, tuple[str, Any]]:
    """Return the kinds and values of scalars, by their names in the file."""
    names = ScalarNames(tensors)
    values = {}
    for scalar in scalars:
        check_text("the name", scalar.name, scalar.name)
        values[names.stored(scalar.name)] = kind_and_value(scalar)
    return values
