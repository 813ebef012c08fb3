"""The contents of tensors as bytes that do not depend on their file, and digests of these bytes.

The digest of a tensor is the SHA-256, in hexadecimal digits, of its elements as numpy stores them:
in C order, little-endian, booleans as 0 and 1, elements of fewer than eight bits in one byte. Its
`kind` is the selection of elements:

===========  ===================================================================================
`elements`   all elements of a dense tensor, in their stored element type
`decoded`    the values of a quantised tensor as float32
`nonzero`    the elements of a sparse tensor whose bits are not all zero, in C order. The digest
             covers two others: of the coordinates, as rows of int64, and of the values
===========  ===================================================================================

The digest therefore does not depend on compression, shards, memory order, byte order, and the
chunks of a Dataset.
"""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.arrays import LazyArray, ReadOptions, lazy_arrays
from xckpt.arrays.converted import (
    Converted,
    StoredBytes,
    as_bytes,
    bytes_of,
    cast_block,
    is_sparse,
    rows_of_chunks,
    thread_buffer,
)
from xckpt.arrays.dense import DenseArray
from xckpt.arrays.sparse import SparseArray
from xckpt.elements import ELEMENT_TYPES, nbytes_of
from xckpt.errors import UnsupportedError, locating
from xckpt.storage import reading_ahead
from xckpt.storage.limits import cpu_count
from xckpt.writing.payloads import Unchanged, replacements
from xckpt.writing.sparse_parts import stored_elements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from xckpt.arrays.converted import ByteStream
    from xckpt.arrays.parts import PartReader
    from xckpt.index import Part, Tensor
    from xckpt.storage.prefetch import Range
    from xckpt.writing.gathering import Computed

KINDS = ("elements", "decoded", "nonzero")

# Largest dense tensor; a few bytes can claim any size.
_LARGEST_NBYTES = 1 << 42
# Number and size of small tensors that are hashed by one task.
_MANY, _SMALL_NBYTES = 64, 1 << 16
# Least number of threads, because they wait for disks and servers.
_THREADS = 4


class TensorDigest(NamedTuple):
    """The digest of the contents of a tensor.

    Parameters
    ----------
    dtype : str
        Element type of what was hashed, a key of `xckpt.elements.ELEMENT_TYPES`.
    shape : tuple of int
        Logical shape.
    kind : {"elements", "decoded", "nonzero"}
        The hashed values: the elements of a dense tensor, the numbers of a quantised tensor, or
        the elements of a sparse tensor that are not zero.
    sha256 : str
        In hexadecimal digits.
    """

    dtype: str
    shape: tuple[int, ...]
    kind: str
    sha256: str


@dataclass(frozen=True, slots=True)
class TensorContent:
    """An array to hash: lazy, numpy's, dask's or sparse."""

    name: str
    dtype: str
    kind: str
    array: Any
    nbytes: int  # stored, for the progress
    file: str = ""  # the first file that has it

    @property
    def is_plain(self) -> bool:
        """Whether the hashed bytes are the decompressed bytes of the part."""
        return self.kind == "elements" and isinstance(self.stream(self.dtype), StoredBytes)

    def stream(self, dtype: str) -> ByteStream:
        """Return the elements in a type and in C order, as bytes."""
        return bytes_of(self.array, dtype, "exact", name=self.name)

    def ranges(self) -> Iterator[Range]:
        """Return the byte ranges that are read, if they are known before."""
        if isinstance(self.array, LazyArray):
            yield from self.array.ranges(...)


def contents_of(tensor: Unchanged | Computed) -> Iterator[TensorContent]:
    """Yield the arrays to hash of a tensor of an xarray object."""
    if isinstance(tensor, Unchanged):
        yield from stored_contents(tensor.tensor, tensor.readers)
        return
    kind = "nonzero" if tensor.is_sparse and tensor.array.ndim else "elements"
    dtype = "bool" if ELEMENT_TYPES[tensor.dtype].decoded == "bool" else tensor.dtype
    nbytes = nbytes_of(dtype, tensor.array.size)
    yield TensorContent(tensor.name, dtype, kind, tensor.array, nbytes)


def stored_contents(
    tensor: Tensor, readers: Mapping[str, PartReader], *, verify: bool | None = True
) -> Iterator[TensorContent]:
    """Yield the arrays to hash of a tensor of a file: one, or one for each part."""
    if tensor.stored is not None:
        for replacement in replacements(tensor, readers):
            yield from stored_contents(*replacement, verify=verify)
        return
    # Bytes that stand for booleans are compared as booleans.
    is_bool = tensor.layout == "dense" and ELEMENT_TYPES[tensor.dtype].decoded == "bool"
    decode = is_bool or tensor.layout not in {"dense", "chunked", "structural"}
    sources: dict[str | None, Any] = {None: next(iter(readers.values())).source}
    sources |= {reader.part.shard: reader.source for reader in readers.values()}
    for role, lazy in lazy_arrays(tensor, sources, ReadOptions(decode, verify=verify)).items():
        stored: Tensor | Part = tensor if role is None else tensor.parts[role]
        name = tensor.name if role is None else f"{tensor.name}:{role}"
        kind, dtype = "elements", stored.dtype
        if role is None and tensor.layout in {"quantized", "blocks"}:
            kind, dtype = "decoded", "float32"
        elif isinstance(lazy, SparseArray):
            kind = "nonzero"
        if lazy.dtype == bool:
            dtype = "bool"
        yield TensorContent(name, dtype, kind, lazy, stored.nbytes, lazy.source.name)


def digest(
    content: TensorContent,
    like: TensorDigest | None = None,
    advance: Callable[[int], None] = lambda _: None,
    check: Callable[[], None] = lambda: None,
) -> TensorDigest:
    """Hash a tensor, with the element type and kind of `like` if it has the same shape."""
    # `advance` is called with numbers of bytes; `check` may raise to stop.
    array = content.array
    shape = tuple(map(int, array.shape))
    result = TensorDigest(content.dtype, shape, content.kind, "")
    if like is not None and like.shape == shape and (shape or like.kind != "nonzero"):
        result = result._replace(dtype=like.dtype, kind=like.kind)
    total = max(1, nbytes_of(result.dtype, prod(shape)))
    done = reported = 0
    values, coords = sha256(), sha256()
    blocks = _nonzero if result.kind == "nonzero" else _elements
    try:
        with locating(path=content.file or None, tensor=content.name):
            for block, is_coords in blocks(content, result.dtype):
                check()
                (coords if is_coords else values).update(block)
                done += len(block)
                passed = content.nbytes * min(done, total) // total
                advance(passed - reported)
                reported = passed
    except UnsupportedError:
        if result.dtype == content.dtype:
            raise
        return TensorDigest(content.dtype, shape, content.kind, "")  # no element type has them all
    advance(content.nbytes - reported)
    hasher = values
    if result.kind == "nonzero":
        hasher = sha256(coords.digest() + values.digest())
    return result._replace(sha256=hasher.hexdigest())


class _HashedBlock(NamedTuple):
    """Bytes of values to hash, or of coordinates."""

    data: Any
    is_coords: bool = False


def _elements(content: TensorContent, dtype: str) -> Iterator[_HashedBlock]:
    stream = content.stream(dtype)
    if stream.size > _LARGEST_NBYTES and not isinstance(content.array, DenseArray):
        raise UnsupportedError(f"{stream.size} bytes are more than can be read one by one")
    for _, (block,) in stream.blocks(0, stream.size, thread_buffer()):
        yield _HashedBlock(block)


def _nonzero(content: TensorContent, dtype: str) -> Iterator[_HashedBlock]:
    """Yield the values that are not zero, and their coordinates."""
    shape = content.array.shape
    for coords, stored in _stored_elements(content) if 0 not in shape else ():
        bits = np.ascontiguousarray(stored).view(np.uint8).reshape(len(stored), stored.itemsize)
        is_nonzero = bits.any(axis=-1)
        rows = np.stack([axis[is_nonzero] for axis in coords], axis=-1).astype("<i8", copy=False)
        yield _HashedBlock(as_bytes(rows), is_coords=True)
        values = cast_block(stored[is_nonzero], dtype, "exact", tensor=content.name)
        yield _HashedBlock(as_bytes(values))


def _stored_elements(content: TensorContent) -> Iterator[tuple[Sequence[Any], Any]]:
    """Return coordinates and elements in C order; some elements may be zero."""
    array = content.array
    if isinstance(array, SparseArray):
        yield from ((block.coords, block.values) for block in array.blocks())
    elif is_sparse(array):
        start = 0
        for rows in rows_of_chunks(array):
            (first, *others), values = stored_elements(rows, content.name)
            yield [first + start, *others], values
            start += rows.shape[0]
    else:
        stream = Converted(array, content.dtype, "exact")
        for position, (block,) in stream.elements(0, prod(array.shape), thread_buffer()):
            coords, values = stored_elements(block, content.name)
            yield np.unravel_index(position + coords[0], array.shape), values


# --- many tensors --------------------------------------------------------------------------------


@contextmanager
def side_by_side(
    work: Callable[[Any, Callable[[], None]], Any],
    items: Sequence[Any],
    ranges: Iterator[Range],
    size: Callable[[Any], int],
) -> Iterator[Iterator[Any]]:
    """Call a function for many tensors on threads, reading ahead; results come in order."""
    # `work` takes an item, and a function that raises if the result is no longer needed.
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise CancelledError

    def do(batch: list[Any]) -> list[Any]:
        return [work(item, check) for item in batch]

    with reading_ahead(ranges), ThreadPoolExecutor(max(_THREADS, cpu_count())) as threads:
        try:
            yield chain.from_iterable(threads.map(do, _batches(items, size)))
        finally:
            stop.set()
            threads.shutdown(wait=False, cancel_futures=True)


def _batches(items: Sequence[Any], size: Callable[[Any], int]) -> Iterator[list[Any]]:
    """Group small neighbours: a task costs more than reading them."""
    batch: list[Any] = []
    for item in items:
        is_small = size(item) <= _SMALL_NBYTES
        if batch and (not is_small or len(batch) == _MANY):
            yield batch
            batch = []
        if is_small:
            batch.append(item)
        else:
            yield [item]
    if batch:
        yield batch
