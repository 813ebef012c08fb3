"""Hashes of the numbers of a tensor: of all, of each row and of each column, in one pass.

A number is hashed as the bits of its float32; one that no float32 is, as those of a wider type. So
equal numbers have equal hashes whatever their types are; -0.0 is 0.0, and all NaN are one. The hash
of a row is a sum of products: of the hash of each number and of a weight of its column. The sums
are modulo 2**64, and the hash of 0.0 is 0. Therefore

- rows that differ have the same hash once in about 2**64 pairs (in the worst of cases 2**32),
- the hashes of the columns of a matrix are those of the rows of its transpose,
- zeros that are added at the end of rows or columns change no hash,
- the sum of the hashes of all numbers is the same in any order, and adds up where tensors are
  put together.

They tell damage and difference, but nobody who forges them: for that there are digests of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.compiling import compiled, inlined
from xckpt.statistics.accumulate import Accumulator
from xckpt.statistics.comparison import as_floats, in_two_parts
from xckpt.statistics.kinds import Kind, kind_named
from xckpt.statistics.pairs import in_c_order
from xckpt.statistics.scan import gather

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.progress import Progress
    from xckpt.statistics.readers import Reader

Array = np.ndarray[Any, np.dtype[Any]]

# One-dimensional tensors up to this size have a row for each element.
_MOST_SINGLE = 1 << 16
# Of all tensors at a time: 8 bytes each.
_MOST_ROWS = 6 << 20
_MOST_COLUMNS = 1 << 18
_OF_FLOAT64, _OF_INTEGERS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)


@dataclass(frozen=True, slots=True)
class Transform:
    """What becomes of a number: ``scale * x + offset``, rounded to one type after the other."""

    scale: float = 1.0
    offset: float = 0.0
    types: tuple[str, ...] = ()

    def __call__(self, values: Array) -> Array:
        """Transform float32 or float64; return numbers of such a type again."""
        if self.scale != 1.0 or self.offset:
            if values.dtype == np.float32 and self.types[:1] == ("float32",):
                moved = np.empty(len(values), np.float32)
                _move(np.ascontiguousarray(values), self.scale, self.offset, moved)
                values = moved
            else:
                values = values * np.float64(self.scale) + self.offset
        for name in self.types:
            # As float32, or as float64 if they are of that type.
            if values.dtype == np.float32 and name == "bfloat16":
                patterns = np.ascontiguousarray(values).view(np.uint32)
                values = np.empty(len(patterns), np.float32)
                _round_bfloat16(patterns, values.view(np.uint32))
            elif values.dtype == np.float32 and name in _SMALL:
                fine, values = np.ascontiguousarray(values), np.empty(len(values), np.float32)
                _round_small(fine, *map(np.float32, _SMALL[name]), values)
            else:
                values = values.astype(kind_named(name).dtype, copy=False)
                values = values if values.dtype.char in "fd" else values.astype(np.float32)
        return values


# Of types of few digits: 1.5 times the unit in the last place of float32 over that of the type,
# smallest normal number, largest one, what is beyond.
_SMALL = {
    "float16": (1.5 * 2**13, 2.0**-14, 65504.0, np.inf),
    "float8_e4m3fn": (1.5 * 2**20, 2.0**-6, 448.0, np.nan),
    "float8_e5m2": (1.5 * 2**21, 2.0**-14, 57344.0, np.inf),
}
_MAGNITUDE, _INFINITY, _NAN = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000), np.uint32(0x7FC00000)


@compiled
def _move(x: Any, scale: Any, offset: Any, out: Any) -> None:
    """Multiply and add in float64, and round to float32."""
    for i in range(x.size):
        out[i] = np.float32(np.float64(x[i]) * scale + offset)


@compiled
def _round_bfloat16(x: Any, out: Any) -> None:
    """Round float32, as patterns, to the nearest bfloat16; those halfway between two to even."""
    for i in range(x.size):
        bits = x[i]
        half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        rounded = (bits + half) & np.uint32(0xFFFF0000)
        out[i] = _NAN if bits & _MAGNITUDE > _INFINITY else rounded


@compiled
def _round_small(  # noqa: PLR0917
    x: Any, scale: Any, smallest: Any, largest: Any, beyond: Any, out: Any
) -> None:
    """Round float32 to the nearest number of a type of few digits; what is beyond the largest too.

    A loop for each step, or LLVM does not vectorise them.
    """
    highest = np.float32(2.0**64)  # or the sum is infinite
    bits, powers = x.view(np.uint32), out.view(np.uint32)
    for i in range(x.size):
        powers[i] = bits[i] & _INFINITY
    for i in range(x.size):
        # The digits of the sum of a number and a much larger one are those of the type.
        large = min(max(out[i], smallest), highest) * scale
        out[i] = (x[i] + large) - large
    for i in range(x.size):
        out[i] = np.copysign(beyond, out[i]) if abs(out[i]) > largest else out[i]


@dataclass(frozen=True, slots=True)
class Request:
    """What is hashed of a tensor."""

    shape: tuple[int, int]
    transform: Transform | None
    rows: bool
    columns: bool


class Fingerprint(Accumulator):
    """The hashes of a tensor as a matrix: of rows along its first axis, or along the first two.

    Attributes
    ----------
    shape : (int, int)
        Of the matrix. A tensor of one dimension has a row for each element if it is not large.
    digest, elements : int
        Of all numbers at their places, and in any order.
    rows, columns : array of uint64, or None
        One hash for each.
    low, high : float
        The extremes, NaN left out.
    bits : int
        All bits that any of the numbers has, of 32.
    """

    def __init__(self, kind: Kind, request: Request) -> None:
        self.kind = kind
        self.request = request
        self.count = 0
        self.digest = self.elements = self.bits = 0
        self.low, self.high = np.inf, -np.inf
        #: First row and sums of a part; all rows once there are several parts.
        self.first = 0
        self.rows: Array | None = None
        self.columns: Array | None = None
        if request.columns:
            self.columns = np.zeros(request.shape[1], np.uint64)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.request.shape

    @property
    def contents(self) -> tuple[int, int, tuple[int, int]]:
        """What is the same for two tensors of equal numbers in one order, and for no others."""
        return self.digest, self.elements, self.request.shape

    @classmethod
    def begin(cls, reader: Any, argument: Any) -> Fingerprint:
        """Return one for elements of a tensor; the argument is a `Request`."""
        return cls(reader.kind, argument)

    def update(self, start: int, values: Any) -> None:
        """Add a run of elements."""
        self.count += len(values)
        if not len(values):
            return
        floats = as_floats(values, self.kind.name)
        transform = self.request.transform
        if transform is not None:
            with np.errstate(all="ignore"):
                floats = transform(floats)
        self.low = float(np.fmin.reduce(floats, initial=self.low))
        self.high = float(np.fmax.reduce(floats, initial=self.high))
        words = _words(floats, None if transform else values, self.kind)
        columns = self.request.shape[1]
        first, column = divmod(start, columns)
        numbers = np.arange(first, (start + len(values) - 1) // columns + 1, dtype=np.uint64)
        sums, tally, nothing = (np.zeros(size, np.uint64) for size in (len(numbers), 2, 0))
        turned = (nothing, nothing)
        if self.columns is not None:
            turned = _weights(numbers), self.columns
        special = _SPECIAL[words.itemsize]
        _hash_rows(words, special, _weights_of(columns), column, sums, *turned, tally)
        # Another weight, or a square matrix would have the hash of its transpose.
        at_places = _weights(numbers + np.uint64(1 << 48)) * sums
        self.digest = (self.digest + int(at_places.sum())) & _MASK
        self.elements = (self.elements + int(tally[0])) & _MASK
        self.bits |= int(tally[1])
        if self.request.rows:
            self._add_rows(first, sums)

    def _add_rows(self, first: int, sums: Array) -> None:
        if self.rows is None:
            self.first, self.rows = first, sums
            return
        low = min(first, self.first)
        high = max(first + len(sums), self.first + len(self.rows))
        if low < self.first or high > self.first + len(self.rows):
            # All rows at once where parts are merged: they are not moved again.
            low, high = (0, self.request.shape[0]) if self.count > len(sums) else (low, high)
            rows = np.zeros(high - low, np.uint64)
            rows[self.first - low : self.first - low + len(self.rows)] = self.rows
            self.first, self.rows = low, rows
        self.rows[first - self.first : first - self.first + len(sums)] += sums

    def merge(self, other: Fingerprint) -> None:
        """Add what another one found in other elements."""
        self.count += other.count
        self.digest = (self.digest + other.digest) & _MASK
        self.elements = (self.elements + other.elements) & _MASK
        self.bits |= other.bits
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        if other.rows is not None:
            self._add_rows(other.first, other.rows)
        if self.columns is not None and other.columns is not None:
            self.columns += other.columns


_MASK = (1 << 64) - 1


def fingerprints(
    readers: Sequence[Reader],
    *,
    transforms: Sequence[Transform | None] | None = None,
    rows: bool = True,
    columns: bool | Sequence[bool] = False,
    progress: Progress | None = None,
) -> list[Fingerprint | None]:
    """Hash the numbers of tensors, in one pass over them; those of complex ones are not hashed.

    Hashes of rows and columns are kept while there are not too many; `digest` is always there.
    """
    ordered = [None if is_complex(reader) else in_c_order(reader) for reader in readers]
    shapes = [None if r is None else matrix_shape(r.array.shape) for r in ordered]
    # Rows are kept of those with long ones first.
    kept: set[int] = set()
    left = _MOST_ROWS if rows else -1
    for number in sorted(range(len(shapes)), key=lambda number: -(shapes[number] or (0, 0))[1]):
        left -= sum(shapes[number] or ())
        if left < 0:
            break
        kept.add(number)
    requests = []
    for number, shape in enumerate(shapes):
        if shape is not None:
            wanted = columns if isinstance(columns, bool) else columns[number]
            has_columns = wanted and number in kept and 1 < shape[1] <= _MOST_COLUMNS
            transform = transforms[number] if transforms else None
            requests.append(Request(shape, transform, number in kept, has_columns))
    some = [reader for reader in ordered if reader is not None]
    found = iter(gather(some, Fingerprint, lambda _, one: one, progress, arguments=requests))
    return [None if reader is None else next(found) for reader in ordered]


def is_complex(reader: Reader) -> bool:
    """Return whether elements are complex numbers."""
    return bool(reader.array.dtype.kind == "c")


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return how many rows and columns the hashes of a tensor are of."""
    if len(shape) == 1:
        return (shape[0], 1) if shape[0] <= _MOST_SINGLE else (1, shape[0])
    if len(shape) == 3:
        # So that stacked matrices have the rows of each.
        return shape[0] * shape[1], shape[2]
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


def _words(floats: Array, values: Array | None, kind: Kind) -> Array:
    """Return the bits of numbers: of float32 where all are of that type."""
    if floats.dtype == np.float32:
        return np.ascontiguousarray(floats).view(np.uint32)
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = floats.astype(np.float32)
    narrow += np.float32(0)  # -0.0
    words = narrow.view(np.uint32).astype(np.uint64)
    is_nan = np.isnan(floats)
    words[is_nan] = 0x7FC00000
    wide = (narrow != floats) & ~is_nan
    words[wide] = np.ascontiguousarray(floats[wide]).view(np.uint64) ^ _OF_FLOAT64
    if values is not None and kind.name in {"int64", "uint64"}:
        rest = in_two_parts(values, kind.name)[1] != 0
        words[rest] = values[rest].view(np.uint64) ^ _OF_INTEGERS
    return words


def _weights(numbers: Array) -> Array:
    """Return an odd number for each row or column: the next ones of splitmix64."""
    x = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


@lru_cache(maxsize=8)
def _weights_of(columns: int) -> Array:
    return _weights(np.arange(columns, dtype=np.uint64))


# Elements whose hashes are in the cache, next to the weights and sums of their columns.
_PIECE = 1024
# Of words of so many bytes: what a zero has none of, beyond what they are NaN, and which NaN.
_SPECIAL = {4: (_MAGNITUDE, _INFINITY, _NAN), 8: (np.uint64(_MASK),) * 3}


@inlined
def _mix(words: Any, special: Any, hashes: Any) -> None:
    """Hash words one by one: no two have one hash, and it has bits everywhere."""
    magnitude, infinity, nan = special
    for i in range(words.size):
        size = words[i] & magnitude
        word = words[i] if size else size
        h = np.uint64(word if size <= infinity else nan) * np.uint64(0xD6E8FEB86659FD93)
        hashes[i] = h ^ (h >> np.uint64(32))


@compiled
def _hash_rows(  # noqa: PLR0917
    words: Any,
    special: Any,
    weights: Any,
    column: Any,
    sums: Any,
    factors: Any,
    columns: Any,
    tally: Any,
) -> None:
    """Add up hashes of a run of elements, which begins in a column, by rows and by columns.

    The tally has those of all in any order, and all bits that are set.
    """
    memory = np.empty(_PIECE, np.uint64)
    total, bits, line = np.uint64(0), np.uint64(0), 0
    for start in range(0, words.size, _PIECE):
        piece = words[start : start + _PIECE]
        hashes = memory[: piece.size]
        _mix(piece, special, hashes)
        for i in range(piece.size):
            total += hashes[i]
            bits |= np.uint64(piece[i])
        at = 0
        while at < piece.size:
            size = min(piece.size - at, weights.size - column)
            part, of_part = hashes[at : at + size], weights[column : column + size]
            product = np.uint64(0)
            for i in range(size):
                product += part[i] * of_part[i]
            sums[line] += product
            if columns.size:
                factor, of_columns = factors[line], columns[column : column + size]
                for i in range(size):
                    of_columns[i] += factor * part[i]
            at += size
            column += size
            if column == weights.size:
                line += 1
                column = 0
    tally[0] += total
    tally[1] |= bits
