"""Arrays of zarr, versions 2 and 3, as tensors over ranges of bytes.

An array is a JSON document, ``.zarray`` or ``zarr.json``, and chunks of equal extents; those at the
end of an axis are padded. A chunk has the key ``0.1`` or ``0/1`` in version 2 (``0`` without axes),
and ``c/0/1`` in version 3 (``c``). A missing chunk has the fill value everywhere.

With the codec ``sharding_indexed`` of version 3, a chunk consists of inner chunks and an index: an
offset and a size of 64 bits, little-endian, for each of them in C order, both with all bits set for
a missing one, and a CRC-32C of these.

Elements of less than 8 bits have a byte each. Compressors are zstd, gzip and zlib.

Specification: zarr-specs.readthedocs.io, versions 2 and 3.1; driver/zarr and driver/zarr3 of
github.com/google/tensorstore, 0.1.86.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from xckpt.elements import ELEMENT_TYPES, NUMPY_CODES
from xckpt.errors import FormatError, UnsupportedError, shown
from xckpt.formats import kit
from xckpt.formats.chunks import clipped, missing
from xckpt.index import Part, Tensor, span_of, strides_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from xckpt.formats.orbax.ocdbt import Value
    from xckpt.readable import Readable

    Shape = tuple[int, ...]

DOCUMENTS = (".zarray", "zarr.json")
_ENCODINGS = {"zstd": "zstd", "gzip": "gzip", "zlib": "zlib"}
# Most decoded bytes for each stored byte.
_DENSEST = {None: 1, "zstd": 1 << 15, "gzip": 1 << 11, "zlib": 1 << 11}
_ABSENT = (1 << 64) - 1
_TYPES = ELEMENT_TYPES.keys() - {"bool32"}
_SMALL = {name for name, row in ELEMENT_TYPES.items() if row.bits < 8}
_NUMBERS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


@dataclass(frozen=True, slots=True)
class Array:
    """The document of an array."""

    shape: Shape
    chunk: Shape
    dtype: str
    byteorder: Literal["little", "big"]
    compressor: str | None
    is_fortran: bool
    fill: bytes | None  # None if it cannot be encoded
    prefix: str  # of the keys of chunks: "" or "c"
    separator: str
    dims: tuple[str | None, ...] | None = None
    inner: Shape | None = None  # extents of the chunks in a shard
    has_crc: bool = False  # of the index of a shard
    is_index_first: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return max(1, ELEMENT_TYPES[self.dtype].bits // 8)


def parse(data: bytes, document: str) -> Array:
    """Parse the document of an array."""
    fields = kit.mapping(document, kit.decode_json(data, document, deepest=32))
    return _version_2(fields) if document == ".zarray" else _version_3(fields)


def _extents(shape: Any, chunk: Any) -> tuple[Shape, Shape]:
    sizes = kit.as_shape(shape, kit.LARGEST)
    extents = kit.as_shape(chunk, kit.LARGEST)
    if len(extents) != len(sizes) or 0 in extents:
        raise FormatError(f"chunks of {list(extents)} for a shape of {list(sizes)}", rule="Chunks")
    return sizes, extents


def _version_2(fields: Mapping[str, Any]) -> Array:
    shape, chunk = _extents(fields.get("shape"), fields.get("chunks"))
    spelled = fields.get("dtype")
    mark = spelled[:1] if type(spelled) is str else ""
    dtype: Any = NUMPY_CODES.get(str(spelled)[1:]) if mark in {"<", ">", "|"} else spelled
    if type(dtype) is not str or dtype not in _TYPES:
        raise UnsupportedError(f"elements of {shown(str(spelled))} are unsupported", rule="Dtype")
    if fields.get("filters"):
        raise UnsupportedError("filters are unsupported", rule="Codec", hint=_HINT)
    compressor = fields.get("compressor")
    name = None if compressor is None else kit.mapping("compressor", compressor).get("id")
    separator, order = fields.get("dimension_separator") or ".", fields.get("order")
    if separator not in (".", "/") or order not in ("C", "F"):
        raise FormatError("'order' or 'dimension_separator' is invalid", rule="Zarr")
    byteorder: Literal["little", "big"] = "big" if mark == ">" else "little"
    fill = _fill(fields.get("fill_value"), dtype, byteorder)
    is_fortran = order == "F"
    encoding = _compressor(name)
    return Array(shape, chunk, dtype, byteorder, encoding, is_fortran, fill, "", separator)


_HINT = "Save it with Orbax, or with the compressor zstd"


def _compressor(name: Any) -> str | None:
    if name is not None and str(name) not in _ENCODINGS:
        raise UnsupportedError(
            f"the compressor {shown(str(name))} is unsupported", rule="Codec", hint=_HINT
        )
    return None if name is None else _ENCODINGS[str(name)]


def _version_3(fields: Mapping[str, Any]) -> Array:
    grid = kit.mapping("chunk_grid", fields.get("chunk_grid"))
    if grid.get("name") != "regular":
        raise UnsupportedError(f"chunk_grid is {shown(str(grid.get('name')))}", rule="Zarr")
    grid = kit.mapping("chunk_grid", grid.get("configuration"))
    shape, chunk = _extents(fields.get("shape"), grid.get("chunk_shape"))
    dtype = fields.get("data_type")
    if type(dtype) is not str or dtype not in _TYPES or fields.get("node_type") != "array":
        raise UnsupportedError(f"elements of {shown(str(dtype))} are unsupported", rule="Dtype")
    keys = kit.mapping("chunk_key_encoding", fields.get("chunk_key_encoding"))
    is_default = keys.get("name", "default") == "default"
    separator = kit.mapping("configuration", keys.get("configuration") or {}).get("separator")
    separator = separator or ("/" if is_default else ".")
    if separator not in (".", "/") or keys.get("name", "default") not in ("default", "v2"):
        raise FormatError("'chunk_key_encoding' is invalid", rule="Zarr")
    names = fields.get("dimension_names")
    names = names if type(names) is list and len(names) == len(shape) else []
    dims = tuple([name if type(name) is str and name else None for name in names])
    codecs, options = _codecs(fields.get("codecs")), {}
    if codecs and codecs[0].name == "sharding_indexed":
        if len(codecs) > 1:
            raise UnsupportedError("compressed shards are unsupported", rule="Codec", hint=_HINT)
        options = _shard(codecs[0].configuration, chunk)
        codecs = _codecs(codecs[0].configuration.get("codecs"))
    byteorder: Literal["little", "big"] = "little"
    is_fortran, encoding = False, None
    for name, configuration in codecs:
        if name == "bytes":
            byteorder = "big" if configuration.get("endian") == "big" else "little"
        elif name == "transpose" and configuration.get("order") == [*range(len(shape))][::-1]:
            is_fortran = True
        elif encoding is None:
            encoding = _compressor(name)
        else:
            raise UnsupportedError("two compressors are unsupported", rule="Codec", hint=_HINT)
    fill = _fill(fields.get("fill_value"), dtype, byteorder)
    prefix = "c" if is_default else ""
    array = Array(shape, chunk, dtype, byteorder, encoding, is_fortran, fill, prefix, separator)
    return replace(array, dims=dims if any(dims) else None, **options)


def _shard(configuration: Mapping[str, Any], chunk: Shape) -> dict[str, Any]:
    """Return the fields of an array whose chunks are shards."""
    inner = kit.as_shape(configuration.get("chunk_shape"), kit.LARGEST)
    is_grid = len(inner) == len(chunk) and 0 not in inner
    if not is_grid or any(n % m for n, m in zip(chunk, inner, strict=True)):
        reason = f"inner chunks of {list(inner)} do not divide chunks of {list(chunk)}"
        raise FormatError(reason, rule="Chunks")
    index = [codec.name for codec in _codecs(configuration.get("index_codecs"))]
    if index not in (["bytes"], ["bytes", "crc32c"]):
        reason = f"an index of shards by {shown(str(index))} is unsupported"
        raise UnsupportedError(reason, rule="Codec", hint=_HINT)
    is_first = configuration.get("index_location", "end") == "start"
    return {"inner": inner, "has_crc": len(index) > 1, "is_index_first": is_first}


class _Codec(NamedTuple):
    """A step of the encoding of chunks."""

    name: str
    configuration: dict[str, Any]


def _codecs(value: Any) -> list[_Codec]:
    if type(value) is not list or len(value) > 16:
        raise kit.mistyped("codecs", value, "a list")
    codecs = [kit.mapping("a codec", codec) for codec in value]
    return [
        _Codec(str(c.get("name")), kit.mapping("a codec", c.get("configuration") or {}))
        for c in codecs
    ]


def _fill(value: Any, dtype: str, byteorder: str) -> bytes | None:
    """Encode a fill value."""
    element = ELEMENT_TYPES[dtype]
    if value is None or value in (0, False, "0.0", [0, 0], [0.0, 0.0]):
        return bytes(max(1, element.bits // 8))
    values = value if type(value) is list else [value]
    values = [_NUMBERS.get(v, v) if type(v) is str else v for v in values]
    codes = {"complex64": "2f", "complex128": "2d"}
    code = codes.get(dtype, element.struct_code)
    if code is None:
        return None
    try:
        return struct.pack((">" if byteorder == "big" else "<") + code, *values)
    except (struct.error, OverflowError):
        return None


# --- chunks ---------------------------------------------------------------------------------------


class Store:
    """Values by key, and the files that they are in."""

    def __init__(
        self,
        values: Mapping[bytes, Value],
        open_file: Callable[[str], Readable],
        *,
        is_complete: bool,
    ) -> None:
        self.values, self.open_file, self.is_complete = values, open_file, is_complete
        self._keys = list(values)
        self._scanned = 10 * len(self._keys) + 1000

    def read(self, value: Value, start: int, nbytes: int) -> bytes:
        """Read a range of a value."""
        if value.inline is not None:
            return value.inline[start : start + nbytes]
        self.check(value)
        return bytes(self.open_file(value.file).read(value.offset + start, nbytes))

    def check(self, value: Value) -> None:
        """Raise an error unless the file of a value exists and is long enough."""
        if value.inline is None:
            size = self.open_file(value.file).size
            if value.offset + value.nbytes > size:
                reason = f"{value.file}: {value.nbytes} bytes at byte {value.offset} are not in the"
                raise FormatError(f"{reason} file, which has {size}", rule="Truncated")

    def chunks(self, name: str, array: Array) -> dict[Shape, Value]:
        """Return the stored chunks of an array by their positions in the grid."""
        grid = [range(-(-n // m)) for n, m in zip(array.shape, array.chunk, strict=True)]
        start = f"{name}/" if name else ""
        if prod(map(len, grid)) <= max(64, len(self._keys)) // 4:
            cells = {
                cell: self.values.get((start + _key(array, cell)).encode())
                for cell in product(*grid)
            }
            return {cell: value for cell, value in cells.items() if value is not None}
        chunks = {}
        for key in self._keys[bisect_left(self._keys, start.encode()) :]:
            if not key.startswith(start.encode()):
                break
            self._scanned -= 1
            if self._scanned < 0:
                raise FormatError("the names of arrays contain each other", offset=0, rule="Limit")
            numbers = re.findall(rb"[0-9]{1,19}", key[len(start.encode()) :])
            cell = tuple(map(int, numbers))
            is_inside = len(cell) == len(grid) and all(map(range.__contains__, grid, cell))
            if is_inside and key == (start + _key(array, cell)).encode():
                chunks[cell] = self.values[key]
        return chunks


def keys_of(array: Array, most: int) -> list[str]:
    """Return the keys of all chunks of an array; none if there are more than `most`."""
    grid = [range(-(-n // m)) for n, m in zip(array.shape, array.chunk, strict=True)]
    return [_key(array, cell) for cell in product(*grid)] if prod(map(len, grid)) <= most else []


def _key(array: Array, cell: Shape) -> str:
    numbers = array.separator.join(map(str, cell))
    if array.prefix:
        return f"{array.prefix}{array.separator if cell else ''}{numbers}"
    return numbers or "0"


def tensor(name: str, array: Array, store: Store) -> Tensor:
    """Return an array as a tensor."""
    shape, dtype = array.shape, array.dtype
    if kit.is_oversized(shape, dtype):
        raise FormatError(f"the shape {list(shape)} is too large", rule="Shape")
    if not prod(shape):
        part = Part(dtype, shape, 0, 0, inline=b"")
        return Tensor(name, dtype, shape, {"data": part}, dims=array.dims)
    chunks = store.chunks(name, array)
    parts, origins = [], set()
    for cell, value in chunks.items():
        origin = tuple([n * m for n, m in zip(cell, array.chunk, strict=True)])
        store.check(value)
        if array.inner is None:
            parts.append(_part(array, origin, array.chunk, value))
            origins.add(origin)
            continue
        for within, piece in _pieces(array, value, store):
            at = tuple([n + m for n, m in zip(origin, within, strict=True)])
            if all(n < m for n, m in zip(at, shape, strict=True)):
                parts.append(_part(array, at, array.inner, piece))
                origins.add(at)
    parts += _absent(array, origins, store)
    if len(parts) == 1:
        part = replace(parts[0], origin=None)
        return Tensor(name, dtype, shape, {"data": part}, dims=array.dims)
    ordered = {str(number): part for number, part in enumerate(parts)}
    return Tensor(name, dtype, shape, ordered, "chunked", dims=array.dims)


def _part(array: Array, origin: Shape, chunk: Shape, value: Value) -> Part:
    """Return the part of a chunk, without the elements beyond the shape."""
    decoded, shape = array.itemsize * prod(chunk), clipped(origin, chunk, array.shape)
    if decoded > _DENSEST[array.compressor] * value.nbytes or decoded > kit.LARGEST >> 1:
        reason = f"the chunk at {list(origin)} has {value.nbytes} bytes, which cannot be {decoded}"
        raise FormatError(reason, rule="ChunkSize")
    if array.compressor is None and value.nbytes != decoded:
        reason = f"the chunk at {list(origin)} has {value.nbytes} bytes, not {decoded}"
        raise FormatError(reason, rule="ChunkSize")
    steps = strides_of(chunk, "F" if array.is_fortran else "C")
    strides: Shape | None = steps
    if shape == chunk and array.dtype not in _SMALL and (not array.is_fortran or len(shape) < 2):
        strides = None
    part = Part(
        array.dtype,
        shape,
        0 if value.inline is not None else value.offset,
        value.nbytes,
        array.compressor,
        decoded if array.compressor else None,
        byteorder=array.byteorder,
        shard=value.file or None,
        inline=value.inline,
        strides=strides,
        origin=origin,
    )
    if strides is not None and array.compressor is None:
        span = array.itemsize * span_of(shape, steps)
        inline = None if value.inline is None else value.inline[:span]
        part = replace(part, nbytes=span, inline=inline)
    return part


def _pieces(array: Array, value: Value, store: Store) -> Iterator[tuple[Shape, Value]]:
    """Yield the inner chunks of a shard by their first element in it."""
    import google_crc32c

    inner = array.inner or ()
    grid = [range(0, n, m) for n, m in zip(array.chunk, inner, strict=True)]
    count = prod(map(len, grid))
    nbytes = 16 * count + 4 * array.has_crc
    if nbytes > value.nbytes:
        reason = f"a shard of {value.nbytes} bytes has no index of {count} inner chunks"
        raise FormatError(reason, rule="ShardIndex")
    data = store.read(value, 0 if array.is_index_first else value.nbytes - nbytes, nbytes)
    index, crc = data[: 16 * count], data[16 * count :]
    if array.has_crc and google_crc32c.value(index) != int.from_bytes(crc, "little"):
        raise FormatError("the index of a shard does not have its checksum", rule="Crc32c")
    for origin, (offset, size) in zip(
        product(*grid), struct.iter_unpack("<QQ", index), strict=True
    ):
        if offset == size == _ABSENT:
            continue
        if offset + size > value.nbytes:
            reason = f"{size} bytes at byte {offset} of a shard, which has {value.nbytes}"
            raise FormatError(reason, rule="ShardIndex")
        inline = None if value.inline is None else value.inline[offset : offset + size]
        yield origin, value._replace(nbytes=size, offset=value.offset + offset, inline=inline)


def _absent(array: Array, origins: set[Shape], store: Store) -> Iterator[Part]:
    """Yield parts of the fill value for the chunks that are not stored."""
    extents = array.inner or array.chunk
    count = prod([-(-n // m) for n, m in zip(array.shape, extents, strict=True)]) - len(origins)
    if count and store.is_complete:
        reason = f"{count} of its chunks are not stored, but _METADATA states that all are"
        raise FormatError(reason, rule="ChunkMissing")
    if count and array.fill is None:
        reason = f"{count} of its chunks are not stored, and their fill value is unsupported"
        raise UnsupportedError(reason, rule="ChunkMissing", hint=_HINT)
    base = Part(array.dtype, (), 0, array.itemsize, byteorder=array.byteorder, inline=array.fill)
    for origin, shape in missing(array.shape, extents, origins) if count else ():
        # Strides even without axes, for types whose elements are not packed here.
        strides = (0,) * len(shape) if shape or array.dtype in _SMALL else None
        yield replace(base, shape=shape, strides=strides, origin=origin)
