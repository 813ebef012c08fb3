"""Tensors to write, with the streams of their bytes; tensors of a file keep their stored bytes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from xckpt.arrays.blocks import BlockArray
from xckpt.arrays.converted import ByteStream, Cast, Converted, StoredBytes, bytes_of
from xckpt.arrays.dense import ChunkedArray, DenseArray, OnePartArray, dense_array
from xckpt.arrays.keys import target_nbytes
from xckpt.arrays.parts import PartReader, decoded_shape
from xckpt.formats.plan import WantedPart, WantedTensor
from xckpt.index import Arrangement, Layout, Quantization, Tensor
from xckpt.storage.source import files_of
from xckpt.writing.sparse_parts import canonical_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from xckpt.arrays import LazyArray
    from xckpt.storage import Source


@dataclass(frozen=True, slots=True)
class Payload(WantedTensor):
    """A tensor to write, with the source of its values."""

    #: The array of each part: one part of a file (`OnePartArray`), numpy's or dask's.
    data: Mapping[str, Any] = field(default_factory=dict)
    #: Makes a dense array of a tensor of another layout.
    values: Callable[[], Any] | None = None
    #: Tensors that a file holds in place of a quantised one; they are written unless a dense layout
    #: is requested.
    stored: tuple[Payload, ...] = ()
    #: Whether computed values are rounded: to the integers that the tensor is made of, or, if they
    #: are merged, to the type of the model.
    rounds: bool = False
    #: Data for another type, not rounded before; None for the same data.
    wide_data: Mapping[str, Any] | None = None
    #: Warning of a type that is wider than those of all sources; empty without one.
    widened: str = ""

    def part_bytes(self, role: str, part: WantedPart, cast: Cast) -> ByteStream:
        """Return the bytes of a part in the form in which they are written."""
        array, name = self.data[role], self.name
        order = self.order if self.layout == "dense" else "C"
        if not isinstance(array, OnePartArray) or isinstance(array, DenseArray):
            data = bytes_of(array, part.dtype, cast, order, name, is_packed=True)
            if isinstance(data, Converted):
                if not data.is_turned or (data.is_small and array.reader.part.encoding is None):
                    return data
                chunked = lazy_dask_array(array.verified())
                return Converted(chunked, part.dtype, cast, order, name, is_packed=True)
        stored = array.reader.part
        is_same = part.compression == stored.encoding and stored.skip is None
        is_verbatim = stored.encoding is not None and is_same and part.level is None
        return StoredBytes(array, is_verbatim=is_verbatim)


class Gathered(NamedTuple):
    """All tensors of a new file, and its attributes."""

    payloads: list[Payload]
    attrs: Mapping[str, Any]
    arrangement: Arrangement
    attr_types: Mapping[str, str]  # element types that attributes have in the old file
    opened: str = ""  # path or URL that they were opened from
    config: Any = None  # in the attributes when they were opened
    merged: tuple[str, ...] = ()  # paths or URLs of adapters and updates


def stored_payload(
    tensor: Tensor, readers: Mapping[str, PartReader], values: Callable[[], Any] | None = None
) -> Payload:
    """Return a tensor of a file, to be written with its stored bytes."""
    layout: Layout = tensor.layout
    data: dict[str, Any] = {}
    parts: dict[str, WantedPart] = {}
    if layout == "chunked":
        # No format that is written has chunks of its own.
        layout = "dense"
        offset = min([part.offset for part in tensor.parts.values()])
        parts["data"] = WantedPart.of(tensor.dtype, tensor.shape, source_offset=offset)
        data["data"] = lazy_dask_array(ChunkedArray(tensor, readers, decode=False))
    elif "sparse" in layout and (in_order := canonical_parts(tensor, readers)) is not None:
        parts, data = in_order
    else:
        for role, part in tensor.parts.items():
            name, reader = tensor.name, readers[role]
            shape = decoded_shape(tensor, role, reader)
            parts[role] = WantedPart.of(part.dtype, shape, part.encoding, part.digest, part.offset)
            if layout == "blocks":
                data[role] = BlockArray(name, reader, tensor.shape, tensor.dtype)
            elif layout == "dense" and role == "data":
                data[role] = dense_array(tensor, reader, decode=False)
            else:
                data[role] = DenseArray(name, reader, shape, decode=False, strict=tensor.strict)
    # No format has codebooks: the stored tensors are written, or the values.
    scheme = tensor.quantization
    return Payload(
        tensor.name,
        tensor.dtype,
        tensor.shape,
        parts,
        layout=layout,
        order=tensor.order,
        attrs=tensor.attrs,
        dims=tensor.dims,
        quantization=scheme if isinstance(scheme, Quantization) else None,
        path=tensor.path,
        data=data,
        values=values,
        stored=tuple([stored_payload(*stored) for stored in replacements(tensor, readers)]),
    )


def replacements(
    tensor: Tensor, readers: Mapping[str, PartReader]
) -> Iterator[tuple[Tensor, Mapping[str, PartReader]]]:
    """Yield the tensors that a file has in place of a quantised one, with their readers."""
    for role, stored in (tensor.stored or {}).items():
        yield stored, {"data": replace(readers[role], part=stored.parts["data"])}


def lazy_dask_array(lazy: LazyArray) -> Any:
    """Make a dask array of a lazy one."""
    from xckpt.arrays.graph import tensor_array

    chunks = lazy.chunks(target_nbytes())
    return tensor_array(lazy, f"{lazy.name}-{uuid4().hex}", chunks, lazy.empty((0,) * lazy.ndim))


class Unchanged(NamedTuple):
    """A tensor of a file; `values` returns a dense array if it is stored otherwise."""

    tensor: Tensor
    readers: Mapping[str, PartReader]
    values: Callable[[], Any] | None = None

    @property
    def name(self) -> str:
        """Name in the new file."""
        return self.tensor.name

    def payload(self) -> Payload:
        """Return the tensor to be written with its stored bytes."""
        return stored_payload(*self)


def source_files(payloads: Iterable[Payload]) -> Iterator[Source]:
    """Yield the files that the values of tensors are read or computed from."""
    sources: dict[Source, None] = {}
    for payload in payloads:
        for array in payload.data.values():
            if isinstance(array, OnePartArray):
                sources[array.source] = None
                continue
            for layer in getattr(getattr(array, "dask", None), "layers", {}).values():
                # A `TensorLayer`; its module would import dask.
                sources |= dict.fromkeys(getattr(getattr(layer, "lazy", None), "sources", ()))
    for source in sources:
        yield from files_of(source)
