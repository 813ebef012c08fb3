r"""primitiv (usually ``.model``, ``.optimizer``, ``.param``): version 0.1 of its file format.

A file is MessagePack objects one after the other, without an outer array, padding, checksum or
end mark::

    file       uint32 major = 0, uint32 minor = 1, uint32 data type, then what that says:

    0x0        Shape      array of uint32 dims, uint32 batch
    0x100      Tensor     Shape, bin data
    0x200      Parameter  Tensor value, uint32 N, N x (str name, Tensor statistic)
    0x300      Model      uint32 N, N x (array of str key, Parameter)
    0x400      Optimizer  map of str to uint32, map of str to float32

An integer is always ``ce`` and 4 bytes big-endian, never MessagePack's shorter forms, and a float
``ca`` and 4 bytes; so the first 15 bytes of a file are ``ce00000000 ce00000001 ce00000T00``. The
lengths of str, bin, array and map have any of MessagePack's forms. The data of a tensor are
little-endian float32 in column-major order, with the samples of a batch one after the other, at
any alignment.

The length of data stands before them, so the index is made without reading them: a window of 4
KiB moves over the headers and jumps over the rest.

Limits: 8 dims, none of them and no batch 0, fewer than 2**32 elements. primitiv multiplies these
numbers in 32 bits and takes a file where they wrap; here it is refused.

References: primitiv File Format v0.1; github.com/primitiv/primitiv at db14ca4 (0.4.0), whose
reader is as strict with types, and where names repeat keeps the first statistic or setting and
the last parameter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xckpt.errors import FormatError
from xckpt.formats import Can, Format
from xckpt.formats.primitiv.axes import module_axes
from xckpt.formats.primitiv.contents import KINDS, Notes, read_content
from xckpt.formats.primitiv.names import variable_name
from xckpt.formats.primitiv.plan import (
    FILE_ATTRS,
    TENSOR_ATTRS,
    WRITES,
    plan,
)
from xckpt.formats.primitiv.scan import Scan
from xckpt.index import Index

if TYPE_CHECKING:
    from xckpt.formats import Readable

__all__ = ["Primitiv", "detect", "module_axes", "plan", "read", "variable_name"]

_MAGIC = bytes.fromhex("ce00000000 ce00000001 ce0000")


def detect(head: bytes, size: int, name: str) -> bool:  # noqa: ARG001 (the registry's signature)
    """Return whether a file is a primitiv file by its first 15 bytes."""
    magic, data_type = head[:13], head[13:15]
    return magic == _MAGIC and len(data_type) == 2 and int.from_bytes(data_type, "big") in KINDS


def read(source: Readable, *, with_stats: bool = True) -> Index:
    """Read the index of a primitiv file: all headers, no data."""
    scan = Scan(source)
    notes = Notes()
    try:
        tensors, attrs = read_content(scan, notes)
    except FormatError as error:
        error.hint = scan.hint(error.offset or 0) or error.hint
        raise
    if not with_stats:
        tensors = {name: tensor for name, tensor in tensors.items() if "stat" not in tensor.attrs}
    return Index(
        format=Primitiv.name,
        version="0.1",
        tensors=tensors,
        attrs=attrs,
        source=source.name,
        nbytes=source.size,
        warnings=notes.warnings(),
    )


class Primitiv(Format):
    """primitiv, version 0.1: shapes, tensors, parameters, models, optimizers."""

    name = "primitiv"
    description = "primitiv files"
    suffixes = (".primitiv", ".model", ".optimizer", ".param")
    shared_suffixes = suffixes[1:]
    can = Can(types=WRITES, orders=("F",), tensor_attrs=TENSOR_ATTRS, file_attrs=FILE_ATTRS)

    detect = staticmethod(detect)
    read = staticmethod(read)
    plan = staticmethod(plan)
    module_axes = staticmethod(module_axes)
