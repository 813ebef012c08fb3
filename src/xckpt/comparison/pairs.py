"""Two tensors as one stream of pairs, in the order that costs less.

Tensors stored in the same way may have the same bytes; their bytes are compared before any element
is decoded.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.arrays.dense import DenseArray
from xckpt.arrays.streams import (
    DECODING,
    ArrayStream,
    ChunkedStream,
    ChunkedZip,
    ElementStream,
    Raw,
    SparseStream,
    SparseZip,
    Zip,
)
from xckpt.comparison.arrangements import Step, Transposed, View, arranged, parts_of_view, undone
from xckpt.errors import CheckpointError, is_damage
from xckpt.scan.scanning import Accumulator
from xckpt.storage.local import is_mapped

if TYPE_CHECKING:
    from xckpt.typing import Array

#: Bytes to read at a time against the order of a file, where one read yields few elements.
TURNED_NBYTES = 64 << 20


def pair_of(first: ElementStream, second: ElementStream, name: str = "") -> Zip | ChunkedZip:
    """Return a stream of two tensors side by side, in the order that costs less."""
    pair: Zip | ChunkedZip
    if isinstance(first, ChunkedStream) or isinstance(second, ChunkedStream):
        pair = ChunkedZip(first, second)
    elif isinstance(first, SparseStream) and isinstance(second, SparseStream):
        pair = SparseZip(first, second)
    else:
        ours, theirs = _plain(first), _plain(second)
        orders = _order(ours), _order(theirs)
        if orders[0] != orders[1]:
            # Keep the order of the tensor that is costly to read in another one.
            if not is_sliceable(theirs) and is_sliceable(ours):
                ours = _reordered(ours, orders[1])
            else:
                theirs = _reordered(theirs, orders[0])
        pair = Zip(ours, theirs)
    if isinstance(pair, Zip):
        pair.identity = identity_of(first, second)
    pair.name = name
    return pair


def identity_of(first: ElementStream, second: ElementStream, *facts: Any) -> tuple[Any, ...] | None:
    """Return the identity of two tensors, and of other facts; None if either may change."""
    if first.identity is None or second.identity is None:
        return None
    (our_files, *our_rest), (their_files, *their_rest) = first.identity, second.identity
    return ((*our_files, *their_files), len(our_files), *our_rest, *their_rest, *facts)


def in_c_order(stream: ElementStream) -> ElementStream:
    """Return a stream of all elements in C order, complex numbers and zeros included."""
    if isinstance(stream, ChunkedStream):
        if stream.row or stream.array.ndim < 2:
            return stream
        inner = [-1] * (stream.array.ndim - 1)
        rechunked = ChunkedStream(stream.array.rechunk(("auto", *inner)))
        rechunked.name = stream.name
        return rechunked
    stream = _plain(stream)
    return stream if _order(stream) == "C" else _reordered(stream, "C")


def is_in_c_order(pair: Zip | ChunkedZip) -> bool:
    """Return whether a pair yields all elements of two tensors in C order."""
    return type(pair) is Zip and _order(pair.first) == _order(pair.second) == "C"


def _order(stream: ElementStream) -> str:
    """Return the memory order, C or F, in which a stream yields the elements."""
    shape = stream.array.shape
    has_order = 0 not in shape and sum(size > 1 for size in shape) > 1
    return "F" if stream.is_turned and has_order else "C"


def _reordered(stream: ElementStream, order: str) -> ElementStream:
    """Return a stream of the elements in another order than the stored one."""
    array = stream.array
    axes = tuple(range(len(array.shape)))[::-1]
    view = View(array, Transposed(axes)) if order == "F" else array
    return _view_stream(view, stream, is_across=True)


def _view_stream(view: Any, tensor: ElementStream, *, is_across: bool) -> ElementStream:
    """Return a stream of a view, whose rows may be scattered over the tensor."""
    stream = ArrayStream(view, tensor.nbytes)
    stream.whole = stream.loads = tensor.whole or (is_across and not is_sliceable(tensor))
    stream.place, stream.local = tensor.place, tensor.local
    if is_across and not tensor.local:
        stream.piece_nbytes = TURNED_NBYTES
    return stream


def stream_of_view(view: Any, tensor: ElementStream, name: str) -> ElementStream:
    """Return a stream of a view of a tensor."""
    _, steps = parts_of_view(view)
    if not steps:
        return in_c_order(tensor)
    if isinstance(tensor, ChunkedStream):
        stream = in_c_order(ChunkedStream(view[...]))
        # Blocks lie within rows, so that each row has to be in one chunk.
        if isinstance(stream, ChunkedStream) and stream.array.ndim > 1 and not stream.row:
            stream = ChunkedStream(stream.array.rechunk({1: -1}))
    else:
        stream = _view_stream(view, tensor, is_across=any(step.is_across for step in steps))
    stream.name = name
    return stream


def is_sliceable(stream: ElementStream) -> bool:
    """Return whether reading a slice costs no more than the bytes of its elements."""
    lazy = stream.array
    if not isinstance(lazy, DenseArray):
        return stream.local
    part = lazy.reader.part
    if part.encoding is not None or lazy.reader.is_arranged:
        return False
    if part.inline is not None or lazy.source.worth_skipping is not None:
        return True
    return is_mapped(lazy.source.view(part.offset, 1))


def _plain(stream: ElementStream) -> ElementStream:
    """Return a stream of all elements: complex numbers instead of magnitudes, zeros included."""
    if isinstance(stream, SparseStream):
        lazy = copy(stream.array)
        lazy.sparse = False
        dense = ArrayStream(lazy, stream.nbytes)
        dense.place = stream.place
        # Use fewer pieces if each piece costs as much as the whole tensor.
        dense.piece_nbytes = max(dense.piece_nbytes, lazy.nbytes_read)
        dense.whole = dense.piece_nbytes == lazy.nbytes_read
        return dense
    if stream.complex:
        stream = copy(stream)
        stream.complex = False
    return stream


# --- stored bytes --------------------------------------------------------------------------------


def stored_pair(pair: Any) -> Zip | None:
    """Return a stream of the stored bytes of two tensors; None if equal bytes prove nothing."""
    if not isinstance(pair, Zip) or pair.identity is None:
        return None
    arrays = pair.first.array, pair.second.array
    if any(getattr(a, "is_raw", False) or not hasattr(a, "readers") for a in arrays):
        return None
    if _meaning(pair.first) != _meaning(pair.second):
        return None
    ours, theirs = Raw(pair.first), Raw(pair.second)
    return Zip(ours, theirs) if ours.size == theirs.size else None


class SameBytes(Accumulator):
    """Comparison of the bytes of two tensors, up to the first difference."""

    def __init__(self) -> None:
        self.count = 0
        self.are_same = True

    @classmethod
    def begin(cls, stream: Any, argument: Any) -> SameBytes:  # noqa: ARG003
        """Return a new accumulator."""
        return cls()

    def update(self, start: int, *columns: Array) -> None:
        """Compare the next bytes."""
        a, b = columns
        self.count += len(a)
        if not self.are_same:
            return
        # Comparing eight bytes at a time is faster.
        words = len(a) // 8 * 8
        self.are_same = np.array_equal(a[words:], b[words:]) and np.array_equal(
            a[:words].view(np.uint64), b[:words].view(np.uint64)
        )

    def merge(self, other: SameBytes) -> None:
        """Add the result for other bytes of the same tensors."""
        self.count += other.count
        self.are_same &= other.are_same


def _meaning(stream: ElementStream) -> Any:
    """Return the properties, besides the bytes, that determine the values.

    A tensor with digests to verify has the same meaning as no other.
    """
    lazy = stream.array
    if any(part.verify for part in lazy.readers.values()):
        return stream  # the tensor must be decoded, so that a wrong digest raises
    stored = {
        role: replace(part.part, offset=0, digest=None, shard=None, inline=None)
        for role, part in lazy.readers.items()
    }
    decoding = [getattr(lazy, name, None) for name in (*DECODING, "decode")]
    return type(lazy), lazy.shape, stored, decoding


# --- matches -------------------------------------------------------------------------------------


class Partner(NamedTuple):
    """The matching tensor on the other side, and the rule of `compare` that matched it."""

    name: str
    rule: str
    #: Steps from the tensor of `a` to the one of `b` that the rule found.
    steps: tuple[Step, ...] = ()


class Match(NamedTuple):
    """A tensor of either side, or two matching tensors."""

    #: Name in `a`, or in `b` if only `b` has the tensor.
    name: str
    #: The tensor on each side, if it exists; both None if it was not selected.
    ours: ElementStream | None = None
    theirs: ElementStream | None = None
    #: The tensor in `b` that matches one in `a`.
    partner: Partner | None = None
    #: The elements of both tensors as they are stored, if the tensors have one shape.
    pair: Zip | ChunkedZip | None = None
    #: The steps from `a` to the order of `b`, if known, and the pair in that order.
    steps: tuple[Step, ...] = ()
    related: Zip | ChunkedZip | None = None

    @property
    def status(self) -> str:
        """The status if it is clear without reading, one of `STATUSES`; else empty."""
        if self.problem is not None:
            return "unreadable"
        if self.theirs is None:
            return "" if self.ours is None else "only_a"
        if self.ours is None:
            return "only_b"
        return "shape" if self.pair is None else ""

    @property
    def problem(self) -> CheckpointError | None:
        """The error of the tensor that cannot be read, the one in `a` first."""
        streams = (stream for stream in (self.ours, self.theirs) if stream is not None)
        return next((stream.problem for stream in streams if stream.problem is not None), None)

    @property
    def is_beyond(self) -> bool:
        """True if nothing is known of a chosen tensor, because its type is unsupported."""
        problems = [side.problem for side in (self.ours, self.theirs) if side is not None]
        return bool(problems) and not any(
            problem is None or is_damage(problem) for problem in problems
        )

    @property
    def is_chosen(self) -> bool:
        """True if the tensor was selected for the comparison."""
        return self.ours is not None or self.theirs is not None

    @property
    def size(self) -> int:
        """Number of elements in `a`, or in `b` if only `b` has the tensor or can be read."""
        sides = [stream for stream in (self.ours, self.theirs) if stream is not None]
        readable = [stream for stream in sides if stream.problem is None]
        return next((stream.size for stream in [*readable, *sides]), 0)

    @property
    def both(self) -> tuple[ElementStream, ElementStream] | None:
        """Both tensors, if they can be compared; else None."""
        ours, theirs = self.ours, self.theirs
        return None if self.pair is None or ours is None or theirs is None else (ours, theirs)

    @property
    def measured(self) -> Zip | ChunkedZip | None:
        """The pair of elements that belong together; None if it is unknown."""
        return self.pair if self.related is None else self.related

    @property
    def sides(self) -> tuple[ElementStream, ElementStream] | None:
        """Both tensors in the order of `b`; None if they cannot be compared."""
        if self.related is None or self.ours is None or self.theirs is None:
            return self.both
        view = arranged(self.ours.array, self.steps)
        return stream_of_view(view, self.ours, self.name), self.theirs

    @property
    def in_place_of_a(self) -> tuple[ElementStream, ElementStream] | None:
        """Both tensors in the order of `a`; None if they cannot be compared."""
        if self.measured is None or self.ours is None or self.theirs is None:
            return None
        view = undone(self.theirs.array, self.steps)
        return in_c_order(self.ours), stream_of_view(view, self.theirs, self.name)

    @property
    def relation(self) -> str:
        """The steps in words; empty without steps."""
        return " and ".join([step.done for step in self.steps])

    @property
    def shapes(self) -> str:
        """The shapes of both tensors if they differ; else empty."""
        if self.status != "shape" or self.ours is None or self.theirs is None:
            return ""
        return f"{self.ours.array.shape} and {self.theirs.array.shape}"
