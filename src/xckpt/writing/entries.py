"""What is to be written: a tensor with the data of its parts, before a format is asked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from xckpt.arrays.chunks import target_nbytes
from xckpt.arrays.dense import DenseArray
from xckpt.dtypes import nbytes_of
from xckpt.writing.data import ArrayData, DaskData
from xckpt.writing.stored_data import RecodedData, StoredData, VerbatimData

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from xckpt.arrays import LazyArray
    from xckpt.arrays.parts import PartReader
    from xckpt.index import Part, Tensor
    from xckpt.writing.casting import Cast
    from xckpt.writing.data import Data

__all__ = ["ArrayPart", "Contents", "Entry", "StoredPart", "lazy_dask_array"]

# Up to here a part whose axes have to be turned is read in pieces of it; larger ones by chunks.
_TURNED_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part of a file that nobody has changed.

    Parameters
    ----------
    reader : PartReader
        Its bytes.
    shape : tuple of int
        Of the array that it holds.
    order : {"C", "F"}
        Memory order of that.
    strict : bool
        Whether what the format forbids in values is an error.
    name : str
        Of the tensor, for messages.
    """

    reader: PartReader
    shape: tuple[int, ...]
    order: str
    strict: bool
    name: str

    @property
    def nbytes(self) -> int:
        """Decoded size."""
        return nbytes_of(self.reader.part.dtype, prod(self.shape))

    def data(
        self, part: Part, order: str, cast: Cast, *, recompress: bool = False
    ) -> Data | DaskData:
        """Return the bytes in the form in which they are to be written."""
        stored = self.reader.part
        if order != self.order and sum(n > 1 for n in self.shape) > 1:
            return self._turned(part.dtype, order, cast)
        data = StoredData(self.reader, self.nbytes)
        # A file may have booleans other than 0 and 1, where the new one must not.
        if part.dtype != stored.dtype or stored.byteorder == "big" or part.dtype == "bool":
            checked = StoredData(self._checking(), self.nbytes)
            count = prod(self.shape)
            return RecodedData(checked, part.dtype, cast, self.name, count, self.strict)
        is_same = part.encoding == stored.encoding and not stored.skip
        if stored.encoding is not None and is_same and not recompress:
            return VerbatimData(self.reader, self.nbytes)
        return data

    def _checking(self) -> PartReader:
        """Return a reader that checks the digest before anything of the part is used."""
        verify = self.reader.verify is not False
        return replace(self.reader, verify=verify)

    def _turned(self, dtype: str, order: str, cast: Cast) -> Data | DaskData:
        lazy = DenseArray(
            self.name,
            self._checking(),
            self.shape,
            order=self.order,
            decode=False,
            strict=self.strict,
        )
        if self.nbytes <= _TURNED_NBYTES and self.reader.part.encoding is None:
            return ArrayData(lazy, dtype, cast, self.name, order)
        return DaskData(lazy_dask_array(lazy), dtype, cast, self.name, order)


@dataclass(frozen=True, slots=True)
class ArrayPart:
    """Values that are computed, or in memory.

    Parameters
    ----------
    array : numpy.ndarray, LazyArray or dask.array.Array
        The values.
    name : str
        Of the tensor, for messages.
    """

    array: Any
    name: str

    def data(
        self, part: Part, order: str, cast: Cast, *, recompress: bool = False
    ) -> Data | DaskData:
        """Return the bytes in the form in which they are to be written; see `StoredPart.data`."""
        kind = DaskData if hasattr(self.array, "dask") else ArrayData
        return kind(self.array, part.dtype, cast, self.name, order)


@dataclass(slots=True)
class Entry:
    """A tensor that is to be written.

    Parameters
    ----------
    tensor : Tensor
        Its parts have raw sizes, the wanted compression and the wanted digest algorithm.
    parts : dict of str to (StoredPart or ArrayPart)
        The data, by role.
    values : callable or None
        Gives all values as a dense array, where the tensor is not dense but can be shown so.
    level : int or None
        Of compression, where one is wanted.
    """

    tensor: Tensor
    parts: dict[str, StoredPart | ArrayPart]
    values: Callable[[], Any] | None = None
    level: int | None = None


@dataclass(frozen=True, slots=True)
class Contents:
    """What is to be written.

    Parameters
    ----------
    entries : list of Entry
        Tensors, in order.
    attrs : mapping
        Attributes of the file.
    """

    entries: list[Entry]
    attrs: Mapping[str, Any]


def lazy_dask_array(lazy: LazyArray) -> Any:
    """Make a dask array of a lazy one."""
    from xckpt.arrays.graph import tensor_array

    chunks = lazy.chunks(target_nbytes())
    return tensor_array(lazy, f"{lazy.name}-{uuid4().hex}", chunks, lazy.empty((0,) * lazy.ndim))
