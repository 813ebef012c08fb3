"""Dense arrays in C or Fortran order, raw or compressed, of any element type."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from xckpt.arrays.chunks import Chunks, chunks_along_slowest
from xckpt.arrays.elements import elements, unpack_codes
from xckpt.arrays.lazy import LazyArray
from xckpt.arrays.selection import AxisKey, contiguous_run, result_shape, take
from xckpt.dtypes import ELEMENT_TYPES, decoded_dtype, nbytes_of, stored_dtype
from xckpt.errors import FormatError

if TYPE_CHECKING:
    import numpy as np

    from xckpt.arrays.parts import PartReader

__all__ = ["DenseArray"]


class DenseArray(LazyArray):
    """A dense tensor, or one part of a composite one.

    Parameters
    ----------
    name : str
        Name of the tensor, for messages.
    reader : PartReader
        Its bytes.
    shape : tuple of int
        Logical shape.
    order : {"C", "F"}
        Memory order.
    decode : bool
        Whether to give types that numpy computes well with, or those that are stored.
    strict : bool
        Whether values that the format forbids are errors.
    """

    __slots__ = ("decode", "order", "reader", "strict")

    def __init__(
        self,
        name: str,
        reader: PartReader,
        shape: tuple[int, ...],
        *,
        order: str = "C",
        decode: bool = True,
        strict: bool = False,
    ) -> None:
        element_type = reader.part.dtype
        dtype = decoded_dtype(element_type) if decode else stored_dtype(element_type)
        super().__init__(name, reader.source, shape, dtype)
        self.reader = reader
        self.order = order
        self.decode = decode
        self.strict = strict

    def chunks(self, target: int) -> Chunks:
        """Give chunks that are runs of bytes; see `LazyArray.chunks`."""
        if self.reader.part.encoding == "zstd":
            # It decodes from its start only: cut up, it would be decoded once for each chunk.
            return tuple((size,) for size in self.shape)
        return chunks_along_slowest(self.shape, self.dtype.itemsize, target, self.order)

    def _select(self, key: tuple[AxisKey, ...]) -> Any:
        if 0 in result_shape(self.shape, key):
            return self.empty(result_shape(self.shape, key))
        if self.order == "F":
            # A Fortran-ordered array is the transpose of a C-ordered one of the reversed shape.
            return self._select_c_order(self.shape[::-1], key[::-1]).T
        return self._select_c_order(self.shape, key)

    def _select_c_order(self, shape: tuple[int, ...], key: tuple[AxisKey, ...]) -> Any:
        run = contiguous_run(shape, key)
        flat = self._elements(run.start, run.start + prod(run.shape))
        return take(flat.reshape(run.shape), run.key)

    def _elements(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        part = self.reader.part
        bits = ELEMENT_TYPES[part.dtype].bits
        nbytes = nbytes_of(part.dtype, prod(self.shape))
        data = self.reader.read(start * bits // 8, (stop * bits + 7) // 8, nbytes)
        if bits < 8:
            return self._unpacked(data, start, stop)
        return elements(
            data, part.dtype, decode=self.decode, byteorder=part.byteorder, strict=self.strict
        )

    def _unpacked(self, data: memoryview, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Give 4-bit elements, the low half of a byte first."""
        dtype = self.reader.part.dtype
        bits = ELEMENT_TYPES[dtype].bits
        codes = unpack_codes(data, bits)
        first = start % (8 // bits)
        padding = codes[first + stop - start :]
        if self.strict and stop == prod(self.shape) and padding.any():
            raise FormatError("padding bits after the last element are not zero", rule="LayoutData")
        chosen = codes[first : first + stop - start]
        return elements(chosen.data, dtype, decode=self.decode)
