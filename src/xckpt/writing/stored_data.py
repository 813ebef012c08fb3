"""The bytes of parts of files: as they are stored, decoded, or as another type."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from xckpt.arrays.elements import elements, unpack_codes
from xckpt.dtypes import ELEMENT_TYPES, nbytes_of
from xckpt.storage.encodings import STREAMS
from xckpt.storage.source import Blocks
from xckpt.writing.casting import convert
from xckpt.writing.data import PIECE_NBYTES, Data, Piece, as_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from xckpt.arrays.parts import PartReader
    from xckpt.writing.casting import Cast

__all__ = ["RecodedData", "StoredData", "VerbatimData"]


@dataclass(frozen=True, slots=True)
class StoredData(Data):
    """A part of a file, its elements as they are stored.

    Parameters
    ----------
    reader : PartReader
        The part; little-endian.
    nbytes : int
        Its decoded size.
    """

    reader: PartReader
    nbytes: int

    def blocks(self) -> Iterator[memoryview]:
        """Return all bytes in order; see `Data.blocks`."""
        # Digests that are not to be checked before are checked by whoever takes the bytes.
        reader = self.reader if self.reader.verify else replace(self.reader, verify=False)
        yield from reader.blocks(self.nbytes, PIECE_NBYTES)

    def pieces(self) -> Iterable[Piece] | None:
        """Return ranges, except of a stream that can only be decoded from its start."""
        return None if self.reader.part.encoding in STREAMS else self._pieces()

    def _pieces(self) -> Iterator[Piece]:
        for start in range(0, self.nbytes, PIECE_NBYTES):
            stop = min(start + PIECE_NBYTES, self.nbytes)
            yield Piece(start, stop, partial(self._read, start, stop))

    def _read(self, start: int, stop: int) -> memoryview:
        if not self.reader.is_raw:
            return self.reader.read(start, stop, self.nbytes)
        # Not a view of a memory map: it is written at once.
        self.reader.check(self.nbytes)
        return self.reader.source.read(self.reader.part.offset + start, stop - start)


@dataclass(frozen=True, slots=True)
class VerbatimData(Data):
    """The bytes of a part of a file as they are stored, compressed or not.

    Parameters
    ----------
    reader : PartReader
        The part.
    decoded_nbytes : int
        Its decoded size.
    """

    reader: PartReader
    decoded_nbytes: int

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # here it follows from the part
        """Stored size."""
        return self.reader.part.nbytes

    def blocks(self) -> Iterator[memoryview]:
        """Return all bytes in order; see `Data.blocks`."""
        stored = self.reader.stored_blocks()
        yield from stored if isinstance(stored, Blocks) else (stored,)


@dataclass(frozen=True, slots=True)
class RecodedData(Data):
    """A part of a file, its elements as another type, in the same order.

    Parameters
    ----------
    stored : StoredData
        The part.
    dtype : str
        Element type to write.
    cast : {"exact", "allow", "never"}
        What the conversion may lose.
    tensor : str
        For messages.
    count : int
        How many elements there are: small ones may leave a part of the last byte.
    strict : bool
        Whether booleans other than 0 and 1 are errors instead of true.
    """

    stored: StoredData
    dtype: str
    cast: Cast
    tensor: str
    count: int
    strict: bool = False

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # here it follows from the part
        """How many bytes are written."""
        return nbytes_of(self.dtype, self.count)

    @property
    def _bits(self) -> int:
        return ELEMENT_TYPES[self.stored.reader.part.dtype].bits

    def blocks(self) -> Iterator[memoryview]:
        """Return all bytes in order; see `Data.blocks`."""
        start = 0
        for block in self.stored.blocks():
            yield self._recoded(block, start)
            start += len(block)

    def pieces(self) -> Iterable[Piece] | None:
        """Return ranges where those of the stored part can be had."""
        pieces = self.stored.pieces()
        if pieces is None:
            return None
        bits = ELEMENT_TYPES[self.dtype].bits
        return (
            Piece(
                piece.start * bits // self._bits,
                min(piece.stop * bits // self._bits, self.nbytes),
                partial(self._read, piece),
            )
            for piece in pieces
        )

    def _read(self, piece: Piece) -> memoryview:
        return self._recoded(piece.read(), piece.start)

    def _recoded(self, block: memoryview, start: int) -> memoryview:
        part = self.stored.reader.part
        if self._bits < 8:
            block = unpack_codes(block, self._bits).data
        values = elements(
            block, part.dtype, decode=False, byteorder=part.byteorder, strict=self.strict
        )
        origin = (start * 8 // self._bits,)
        values = values[: self.count - origin[0]]
        converted = convert(values, self.dtype, self.cast, tensor=self.tensor, origin=origin)
        return as_bytes(converted)
