"""Datasets of HDF5 as tensors: ranges of bytes, chunks with their filters, and fill values."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from xckpt.elements import ELEMENT_TYPES
from xckpt.errors import CheckpointError, FormatError, UnsupportedError
from xckpt.formats import kit
from xckpt.formats.chunks import clipped, missing
from xckpt.index import Part, Tensor, span_of, strides_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xckpt.formats.keras.hdf5 import Dataset, Image, Path

# Numbers of filters, and their names in `Part.encoding`.
_FILTERS = {1: "zlib", 2: "shuffle", 3: "fletcher32", 32000: "lzf"}
_ORDER = ["shuffle", "zlib", "lzf", "fletcher32"]
_LARGEST_CHUNK = 1 << 32


def read_tensor(path: Path, dataset: Dataset, image: Image) -> Tensor:
    """Return the tensor of a dataset; a dataset that cannot be read is its problem."""
    name = "/".join(path)
    attrs = {key: value for key, value in dataset.attrs.items() if key != "dtype"}
    try:
        return replace(_read(name, dataset, image), path=path, attrs=attrs)
    except CheckpointError as error:
        problem = error.located(tensor=name, offset=image.offset(dataset.header))
        shape, element = dataset.shape or (), dataset.element
        label = "unknown" if element is None else element.dtype or element.label
        shape = () if kit.is_oversized(shape) else shape
        return Tensor(name, label, shape, {}, problem=problem, path=path, attrs=attrs)


def _read(name: str, dataset: Dataset, image: Image) -> Tensor:
    if dataset.problem is not None:
        raise dataset.problem
    shape, dtype = dataset.shape, _dtype(dataset)
    if shape is None:
        raise UnsupportedError("it has no extents, and no elements", rule="Null")
    if kit.is_oversized(shape, dtype):
        raise FormatError(f"the shape {list(shape)} is too large", rule="Shape")
    itemsize = ELEMENT_TYPES[dtype].bits // 8
    if dataset.element is None or dataset.element.nbytes != itemsize:
        raise FormatError(f"its elements do not have {itemsize} bytes", rule="DType")
    nbytes = itemsize * prod(shape)
    byteorder = dataset.element.byteorder
    base = Part(dtype, shape, 0, 0, byteorder=byteorder)
    if dataset.chunk is not None:
        parts = dict(_chunked(dataset, base, image, itemsize))
        return Tensor(name, dtype, shape, parts, "chunked")
    if not nbytes:
        part = replace(base, offset=image.offset(dataset.header))
    elif dataset.at is None:
        part = _filled(dataset, base, itemsize)
    elif dataset.nbytes < nbytes:
        reason = f"{dataset.nbytes} bytes are stored for the {nbytes} of its shape {list(shape)}"
        raise FormatError(reason, rule="Layout")
    else:
        part = _placed(base, dataset.at, nbytes, image)
    return Tensor(name, dtype, shape, {"data": part})


def _dtype(dataset: Dataset) -> str:
    """Return the element type; an attribute is opaque bytes."""
    element = dataset.element
    if element is not None and element.dtype is not None:
        return element.dtype
    label = "unknown" if element is None else element.label
    stated = dataset.attrs.get("dtype")
    if label.startswith("opaque") and type(stated) is str and stated in ELEMENT_TYPES:
        return stated
    raise UnsupportedError(f"{label} are unsupported as elements", rule="DType")


def _placed(part: Part, at: int, nbytes: int, image: Image) -> Part:
    """Return a part with its bytes at an address."""
    if at + nbytes > image.size:
        reason = f"{nbytes} bytes at address {at} are not in the file, of {image.size}"
        raise FormatError(reason, rule="Truncated", hint=kit.TRUNCATED)
    outer = image.outer
    if outer is None:
        return replace(part, offset=image.start + at, nbytes=nbytes)
    place: Any = {"offset": outer.offset, "nbytes": outer.nbytes, "encoding": outer.encoding}
    return replace(part, **place, decoded_nbytes=nbytes, skip=at)


def _filled(dataset: Dataset, part: Part, itemsize: int) -> Part:
    """Return a part of the fill value, for elements that were never written."""
    fill = dataset.fill if dataset.fill is not None else bytes(itemsize)
    if len(fill) != itemsize:
        raise FormatError(f"a fill value of {len(fill)} bytes, not {itemsize}", rule="Fill")
    strides = (0,) * len(part.shape or ())
    return replace(part, offset=0, nbytes=itemsize, inline=fill, strides=strides or None)


def _chunked(
    dataset: Dataset, base: Part, image: Image, itemsize: int
) -> Iterator[tuple[str, Part]]:
    """Yield the parts of a chunked dataset, in the order of the file, then those never written."""
    shape, chunk = base.shape or (), dataset.chunk or ()
    decoded = itemsize * prod(chunk)
    if not 0 < decoded <= _LARGEST_CHUNK:
        raise FormatError(f"chunks of {decoded} bytes", rule="Chunks")
    steps = strides_of(chunk)
    origins = set()
    for number, stored in enumerate(dataset.chunks):
        origin = stored.origin
        if any(at >= n for at, n in zip(origin, shape, strict=True)):
            continue  # the dataset has been made smaller
        if any(at % n for at, n in zip(origin, chunk, strict=True)) or origin in origins:
            raise FormatError(f"a chunk at {list(origin)} overlaps another one", rule="Chunks")
        origins.add(origin)
        part = replace(base, shape=clipped(origin, chunk, shape), origin=origin)
        encoding = _encoding(dataset, stored.skipped, itemsize)
        if encoding is None:
            if stored.nbytes != decoded:
                reason = f"a chunk at {list(origin)} has {stored.nbytes} bytes, not {decoded}"
                raise FormatError(reason, rule="Chunks")
            span = span_of(part.shape or (), steps) * itemsize
            part = _placed(part, stored.at, span, image)
        elif image.outer is not None:
            reason = "its chunks are compressed, in a compressed member of an archive"
            raise UnsupportedError(reason, rule="Method", hint="Store the member uncompressed")
        else:
            part = _placed(part, stored.at, stored.nbytes, image)
            part = replace(part, encoding=encoding, decoded_nbytes=decoded)
        yield str(number), part if part.shape == chunk else replace(part, strides=steps)
    for origin, extents in missing(shape, chunk, origins):
        part = replace(base, shape=extents, origin=origin)
        yield f"fill {origin}", _filled(dataset, part, itemsize)


def _encoding(dataset: Dataset, skipped: int, itemsize: int) -> str | None:
    """Return the encoding of a chunk: its filters, the last one first; None without filters."""
    names = []
    for bit, (number, values) in enumerate(dataset.filters):
        if number not in _FILTERS:
            reason = f"filter {number} is unsupported"
            raise UnsupportedError(reason, rule="Filter", hint="Pack the file again with h5repack")
        if not skipped >> bit & 1:
            names.append(_FILTERS[number])
        if number == 2 and values[:1] != (itemsize,):
            raise UnsupportedError(f"bytes are shuffled by {values}", rule="Filter")
    if sorted(names, key=_ORDER.index) != names or len({*names}) < len(names):
        raise UnsupportedError(f"filters in the order {', '.join(names)}", rule="Filter")
    if itemsize == 1 and "shuffle" in names:  # it changes nothing
        names.remove("shuffle")
    spelled = [f"shuffle{itemsize}" if name == "shuffle" else name for name in reversed(names)]
    return "+".join(spelled) or None
