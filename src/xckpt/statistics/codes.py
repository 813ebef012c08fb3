"""Use of the range of codes in quantised tensors: the share at its ends, the share never used.

Codes are counted as they are stored, without scales. Elements of at most 8 bits are codes, too.
Blocks of GGUF are included if their codes have 4 or 8 bits, in bytes of their own.
"""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.arrays.blocks import BlockArray
from xckpt.arrays.dense import DenseArray
from xckpt.arrays.lazy import LazyArray, flat_blocks
from xckpt.arrays.scaled import TURNED_NBYTES, CodebookArray, QuantizedArray
from xckpt.arrays.streams import of_tensor
from xckpt.elements import BLOCK_TYPES, ELEMENT_TYPES, code_values
from xckpt.scan.scanning import gather
from xckpt.statistics.counts import Sketch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from xckpt.arrays.streams import ElementStream
    from xckpt.progress import Progress
    from xckpt.typing import Array

#: The statistics, of a tensor that has codes.
USE_OF_CODES = ("saturated", "unused")


class _Coded(NamedTuple):
    """The codes of a tensor, and the value of each code before scaling."""

    reader: ElementStream
    values: Array
    #: Whether a byte holds two codes.
    paired: bool = False


class CodeArray(LazyArray):
    """The codes of a tensor, or bytes with two codes each, which a function reads box by box."""

    __slots__ = ("read", "rows_nbytes")

    def __init__(
        self,
        lazy: LazyArray,
        shape: tuple[int, ...],
        read: Callable[[tuple[int, ...], tuple[int, ...]], Array],
        rows_nbytes: int | None = None,
    ) -> None:
        super().__init__(lazy.name, lazy.source, shape, np.dtype(np.uint8))
        self.read = read
        self.rows_nbytes = rows_nbytes  # size of blocks, if they consist of whole rows

    def select(self, key: tuple[Any, ...]) -> Array:
        """Return the codes in a box, with all axes."""
        starts = tuple([e.start if isinstance(e, slice) else e for e in key])
        return self.read(starts, tuple([e.stop if isinstance(e, slice) else e + 1 for e in key]))

    def flat(self, start: int, stop: int, buffer: Array) -> Iterator[tuple[int, Array]]:
        """Read codes in C order; see `LazyArray.flat`."""
        if self.rows_nbytes is None:
            return super().flat(start, stop, buffer)
        return flat_blocks(self, start, stop, self.rows_nbytes, whole_rows=True)


def use_of_codes(readers: Sequence[ElementStream], progress: Progress, *, cache: bool) -> Array:
    """Return a row of `USE_OF_CODES` for each tensor, NaN for those that have no codes."""
    shares = np.full((len(readers), len(USE_OF_CODES)), nan)
    coded = {n: codes for n, reader in enumerate(readers) if (codes := _coded(reader)) is not None}
    tensors = list(coded.values())

    def finish(number: int, sketch: Sketch) -> tuple[float, float]:
        codes, counts = sketch.counted()
        if tensors[number].paired:
            codes, counts = np.concatenate([codes & 15, codes >> 4]), np.tile(counts, 2)
        total = int(counts.sum())
        if not total:
            return nan, nan
        values = tensors[number].values
        finite = np.isfinite(values)
        # 0 and -0 are one value.
        distinct, of_code = np.unique(np.where(finite, values, 0.0), return_inverse=True)
        uses = np.bincount(of_code[codes], counts * finite[codes], len(distinct))
        if not (values[finite] == 0).any():
            distinct, uses = distinct[distinct != 0], uses[distinct != 0]
        # Symmetric codes leave the lowest out: -128 where the largest is 127.
        lowest = int(len(distinct) > 2 and not uses[0] and distinct[1] == -distinct[-1])
        ends = uses[lowest] + (uses[-1] if len(distinct) > 1 else 0)
        return float(ends / total), float(np.count_nonzero(uses == 0) / len(distinct))

    code_readers = [codes.reader for codes in tensors]
    rows = gather(code_readers, Sketch, finish, progress, cache=cache, stretched=True)
    for number, row in zip(coded, rows, strict=True):
        shares[number] = row
    return shares


def _coded(reader: ElementStream) -> _Coded | None:
    lazy = reader.array
    if isinstance(lazy, CodebookArray) or (
        isinstance(lazy, QuantizedArray) and lazy.quantization.bits <= 8
    ):
        is_turned = isinstance(lazy, QuantizedArray) and lazy.is_turned
        codes = CodeArray(lazy, lazy.shape, lazy.codes, TURNED_NBYTES if is_turned else None)
        return _Coded(_code_reader(reader, codes), lazy.code_values)
    if isinstance(lazy, BlockArray):
        block = BLOCK_TYPES[lazy.block_type]
        place = block.codes
        if place is None:
            return None
        stored = lazy.stored_blocks
        codes = CodeArray(
            lazy,
            (stored.shape[0], place.stop - place.start),
            lambda starts, stops: stored[starts[0] : stops[0], place.start : place.stop],
        )
        bits = ELEMENT_TYPES[place.dtype].bits
        values = code_values(place.dtype)[: 1 << bits] - place.zero
        return _Coded(_code_reader(reader, codes), values, paired=bits == 4)
    kind = reader.kind
    if isinstance(lazy, DenseArray) and kind.exact and kind.bits <= 8:
        if kind.dtype.kind == "b":
            return None
        return _Coded(reader, kind.values[: 1 << kind.bits])
    return None


def _code_reader(reader: ElementStream, codes: CodeArray) -> ElementStream:
    code_reader = of_tensor(codes, reader.name)
    code_reader.place, code_reader.nbytes = reader.place, reader.nbytes
    if reader.identity is not None:
        code_reader.identity = (reader.identity[0], "codes", *reader.identity[1:])
    return code_reader
