"""Quantised tensors: ``(code - zero) * scale``, made block of rows by block of rows."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.dense import DenseArray
from xckpt.arrays.elements import elements, unpack_codes
from xckpt.arrays.lazy import RowBlockArray
from xckpt.elements import nbytes_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.arrays.parts import PartReader
    from xckpt.index import Quantization, Tensor

__all__ = ["QuantizedArray"]

Array = np.ndarray[Any, np.dtype[Any]]


class QuantizedArray(RowBlockArray):
    """A quantised tensor as float32.

    Parameters
    ----------
    tensor : Tensor
        With `quantization` set.
    readers : mapping of str to PartReader
        Bytes of ``data``, ``scales`` and, where they are stored, ``zeros`` and ``global``.
    """

    __slots__ = ("quantization", "readers")

    def __init__(self, tensor: Tensor, readers: Mapping[str, PartReader]) -> None:
        if tensor.quantization is None:
            raise ValueError(f"tensor {tensor.name!r} has no quantization")
        super().__init__(tensor.name, readers["data"].source, tensor.shape, np.dtype(np.float32))
        self.readers = dict(readers)
        self.quantization: Quantization = tensor.quantization

    def rows(self, start: int, stop: int) -> Array:
        """Make a block of rows."""
        scheme = self.quantization
        block = scheme.block[0]
        grid_rows = slice(start // block, -(-stop // block))
        codes = self._codes(start, stop)
        zeros: Array | int = 0 if scheme.zero is None else scheme.zero
        if scheme.zero is None:
            zeros = self._spread(self._zero_grid()[grid_rows], start, stop)
        # Scales that are infinite or NaN are what the file says, not a fault of this computation.
        with np.errstate(over="ignore", invalid="ignore"):
            scales = self._spread(self._scale_grid()[grid_rows], start, stop)
            return np.asarray((codes - zeros) * scales, np.float32)

    @property
    def _grid(self) -> tuple[int, ...]:
        blocks = self.quantization.block
        return tuple(-(-n // b) for n, b in zip(self.shape, blocks, strict=True))

    def _part(self, role: str, start: int, stop: int, nbytes: int) -> memoryview:
        return self.readers[role].read(start, stop, nbytes)

    def _codes(self, start: int, stop: int) -> Array:
        """Return the codes of some rows as float32."""
        scheme = self.quantization
        if scheme.word_bits == scheme.bits:
            codes = DenseArray(self.name, self.readers["data"], self.shape)
            return np.asarray(codes[start:stop], np.float32)
        if scheme.axis == 0:
            return self._packed("data", self.shape)[start:stop]
        row = self._packed_nbytes((1, *self.shape[1:]))
        data = self._part("data", start * row, stop * row, self.shape[0] * row)
        return self._unpacked(data, (stop - start, *self.shape[1:]))

    def _packed(self, role: str, shape: tuple[int, ...]) -> Array:
        """Return all codes of a part whose words hold several each."""
        nbytes = self._packed_nbytes(shape)
        return self._unpacked(self._part(role, 0, nbytes, nbytes), shape)

    def _packed_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in words: the packed axis is rounded up to whole words per line."""
        scheme = self.quantization
        per_word = scheme.word_bits // scheme.bits
        words = -(-shape[scheme.axis] // per_word)
        return (*shape[: scheme.axis], words, *shape[scheme.axis + 1 :])

    def _packed_nbytes(self, shape: tuple[int, ...]) -> int:
        return prod(self._packed_shape(shape)) * self.quantization.word_bits // 8

    def _unpacked(self, data: memoryview, shape: tuple[int, ...]) -> Array:
        scheme = self.quantization
        words = np.frombuffer(data, f"V{scheme.word_bits // 8}").reshape(self._packed_shape(shape))
        lines = np.ascontiguousarray(np.moveaxis(words, scheme.axis, -1))
        codes = unpack_codes(
            lines.view(np.uint8),
            scheme.bits,
            word_bits=scheme.word_bits,
            msb_first=scheme.msb_first,
        )
        codes = np.moveaxis(codes[..., : shape[scheme.axis]], -1, scheme.axis)
        if scheme.code == "int8":
            # Move the sign bit to the top, then let an arithmetic shift extend it.
            shift = 8 - scheme.bits
            codes = np.left_shift(codes, shift, dtype=np.uint8).view(np.int8) >> shift
        return codes.astype(np.float32)

    def _scale_grid(self) -> Array:
        scales = self._grid_of("scales").astype(np.float32)
        return self._global_scale() * scales if self.quantization.global_scale else scales

    def _global_scale(self) -> np.float32:
        dtype = self.readers["global"].part.dtype
        nbytes = nbytes_of(dtype, 1)
        (scale,) = elements(self._part("global", 0, nbytes, nbytes), dtype, decode=True)
        return np.float32(scale)

    def _zero_grid(self) -> Array:
        if self.quantization.packed_zeros:
            return self._packed("zeros", self._grid)
        return self._grid_of("zeros").astype(np.float32)

    def _grid_of(self, role: str) -> Array:
        """Return the entries of a stored grid, with the axes of the tensor."""
        part = self.readers[role].part
        nbytes = nbytes_of(part.dtype, prod(self._grid))
        flat = elements(self._part(role, 0, nbytes, nbytes), part.dtype, decode=True)
        axes = self.quantization.scale_axes or tuple(range(self.ndim))
        stored = flat.reshape([self._grid[axis] for axis in axes])
        return np.transpose(stored, np.argsort(axes))

    def _spread(self, grid: Array, start: int, stop: int) -> Array:
        """Repeat grid entries over their blocks, for the rows from `start` to `stop`."""
        for axis, block in enumerate(self.quantization.block):
            if block == 1 or grid.shape[axis] == 1:
                continue  # the latter is broadcast
            skipped = start % block if axis == 0 else 0
            wanted = stop - start if axis == 0 else self.shape[axis]
            grid = np.repeat(grid, block, axis=axis)
            grid = grid[(slice(None),) * axis + (slice(skipped, skipped + wanted),)]
        return grid
