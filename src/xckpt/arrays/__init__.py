"""Arrays: from the parts of a tensor to lazy arrays, and from these to dask arrays.

`lazy_arrays` returns the arrays that represent a tensor. `graph` turns them into dask arrays, and
`derived` looks into arrays that are computed from these; both import dask at once. The room may
import `storage`, the `Index` and the modules below them, but no format. Read `lazy` first, then
`dense` as an example.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from xckpt.arrays.blocks import BlockArray
from xckpt.arrays.dense import ChunkedArray, DenseArray, dense_array, elements
from xckpt.arrays.lazy import LazyArray, Opened, UnreadableArray
from xckpt.arrays.parts import PartReader, decoded_shape, part_readers
from xckpt.arrays.scaled import quantized_array
from xckpt.arrays.sparse import SPARSE_ARRAYS
from xckpt.elements import ELEMENT_TYPES, decoded_dtype, stored_dtype
from xckpt.errors import CheckpointError, FormatError, locating
from xckpt.index import StoredList, Tensor

if TYPE_CHECKING:
    from xckpt.storage import Source

__all__ = ["LazyArray", "LazyList", "ReadOptions", "lazy_arrays", "read_later"]

# The dtype of variables whose element type is unknown; their values cannot be read. xarray and
# numpy keep variables of this type in all computations, which then raise the error of the file.
_UNKNOWN = np.dtype(np.float32)
# Bytes that are decoded at most, while opening, to find the size of a part that states none.
_COUNTED_NBYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of reading values."""

    # Whether to return types that numpy computes well with and composite tensors as a whole, or the
    # stored types and the parts.
    decode: bool = True
    # Return sparse tensors as `sparse.COO` chunks instead of dense ones.
    sparse: bool = False
    # When digests are checked; see `PartReader`.
    verify: bool | None = None
    # The tensors that are opened together; reading does not depend on it.
    opened: Opened | None = field(default=None, compare=False, repr=False)


def lazy_arrays(
    tensor: Tensor, sources: Mapping[str | None, Source], options: ReadOptions
) -> dict[str | None, LazyArray]:
    """Return the arrays that a tensor is shown as."""
    arrays = _arrays(tensor, sources, options)
    return {role: lazy.of(tensor, role, options.opened) for role, lazy in arrays.items()}


def _arrays(
    tensor: Tensor, sources: Mapping[str | None, Source], options: ReadOptions
) -> dict[str | None, LazyArray]:
    if tensor.problem is not None:
        dtype, problem = _UNKNOWN, tensor.problem
        if tensor.dtype in ELEMENT_TYPES:
            dtype = (decoded_dtype if options.decode else stored_dtype)(tensor.dtype)
        return {None: UnreadableArray(tensor.name, sources[None], tensor.shape, dtype, problem)}
    readers = part_readers(tensor, sources, verify=options.verify)
    if tensor.layout == "dense":
        return {None: dense_array(tensor, readers["data"], decode=options.decode)}
    if tensor.layout == "chunked":
        return {None: ChunkedArray(tensor, readers, decode=options.decode)}
    if tensor.layout == "structural" or not options.decode:
        # Halves of complex numbers are numbers; the meaning of other parts is in the layout.
        decode = options.decode and tensor.parts.keys() == {"real", "imag"}
        return {
            role: _part(tensor, role, reader, decode=decode) for role, reader in readers.items()
        }
    if tensor.layout == "blocks":
        return {None: BlockArray(tensor.name, readers["data"], tensor.shape, tensor.dtype)}
    if tensor.layout in SPARSE_ARRAYS:
        return {None: SPARSE_ARRAYS[tensor.layout](tensor, readers, sparse=options.sparse)}
    return {None: quantized_array(tensor, readers)}


def _part(tensor: Tensor, role: str, reader: PartReader, *, decode: bool) -> LazyArray:
    """Return a part as an array; a part of unknown length is listed, but cannot be read."""
    try:
        shape = decoded_shape(tensor, role, reader, _COUNTED_NBYTES)
    except CheckpointError as problem:
        dtype = stored_dtype(reader.part.dtype)
        located = problem.with_traceback(None).located(path=reader.source.name, tensor=tensor.name)
        return UnreadableArray(tensor.name, reader.source, (reader.part.nbytes,), dtype, located)
    return DenseArray(tensor.name, reader, shape, decode=decode, strict=tensor.strict)


class LazyList(Sequence[Any]):
    """A list of numbers or texts in a file, which is read when an entry is accessed."""

    __slots__ = ("_entries", "reader", "stored")

    def __init__(self, reader: PartReader, stored: StoredList) -> None:
        self.reader = reader
        self.stored = stored
        self._entries: list[Any] | None = None

    def __len__(self) -> int:
        return self.stored.count

    def __getitem__(self, key: Any) -> Any:
        if self._entries is None:
            with locating(path=self.reader.source.name):
                self._entries = self._texts() if self.stored.length_nbytes else self._numbers()
        return self._entries[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def tolist(self) -> list[Any]:
        """Return all entries."""
        entries: list[Any] = self[:]
        return entries

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:  # noqa: FBT001, RUF100
        return np.array(self.tolist(), dtype)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LazyList) and (self.reader, self.stored) == (
            other.reader,
            other.stored,
        ):
            return True
        return isinstance(other, LazyList | list) and self.tolist() == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of lists

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return LazyList, (self.reader, self.stored)

    def __repr__(self) -> str:
        return repr(self.stored)

    def _bytes(self) -> memoryview:
        nbytes = self.reader.part.nbytes
        return self.reader.read(0, nbytes, nbytes)

    def _numbers(self) -> list[Any]:
        part = self.reader.part
        numbers = elements(self._bytes(), part.dtype, decode=True, byteorder=part.byteorder)
        entries: list[Any] = numbers.tolist()
        return entries

    def _texts(self) -> list[Any]:
        order = "<" if self.reader.part.byteorder == "little" else ">"
        length = Struct(order + {4: "I", 8: "Q"}[self.stored.length_nbytes])
        data, end = bytes(self._bytes()), 0
        texts: list[Any] = []
        for _ in range(self.stored.count):
            start = end + length.size
            end = start + length.unpack_from(data, end)[0] if start <= len(data) else start
            if end > len(data):
                reason = "a list of texts is not what it was when the file was opened"
                raise FormatError(reason, offset=self.reader.part.offset, rule="Truncated")
            text = data[start:end]
            try:
                texts.append(text.decode())
            except UnicodeDecodeError:
                texts.append(text)  # as bytes
        return texts


def read_later(attrs: Mapping[str, Any], sources: Mapping[str | None, Source]) -> dict[str, Any]:
    """Replace the descriptions of lists in attributes by lists that can be read."""
    return {
        name: LazyList(PartReader(sources[value.part.shard], value.part), value)
        if isinstance(value, StoredList)
        else value
        for name, value in attrs.items()
    }
