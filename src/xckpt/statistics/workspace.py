"""Memory that a thread uses again and again, and the kernels that write to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.statistics import kernels
from xckpt.statistics.moments import LEAF

if TYPE_CHECKING:
    from xckpt.statistics.kinds import Kind

__all__ = ["Tables", "Workspace"]

Array = np.ndarray[Any, np.dtype[Any]]

#: Bytes of a block; more than one leaf, to call the kernels seldom.
BLOCK_NBYTES = 4 << 20


class Workspace:
    """Memory that a thread uses for one block after another.

    Parameters
    ----------
    nbytes : int
        Size of a block.
    """

    def __init__(self, nbytes: int = BLOCK_NBYTES) -> None:
        self.buffer = np.empty(nbytes, np.uint8)
        self._tables: dict[str, Tables] = {}

    def tables(self, kind: Kind) -> Tables:
        """Return the tables for a kind of elements; they are empty."""
        if kind.name not in self._tables:
            self._tables[kind.name] = Tables(kind, self.buffer.nbytes)
        return self._tables[kind.name]


class Tables:
    """What the kernels write for one kind of elements.

    Parameters
    ----------
    kind : Kind
        The kind.
    nbytes : int
        Size of a block.
    """

    def __init__(self, kind: Kind, nbytes: int) -> None:
        self.kind = kind
        leaves = -(-nbytes // kind.itemsize // LEAF)
        self.counters = np.zeros((2, 1 << kind.code_bits), np.uint32)
        self.used = False
        self.zeros = np.zeros(leaves, np.int64)
        self.tally = np.zeros(4, np.int64)
        self.extremes = np.zeros(2, np.int64)
        if kind.exact:
            return
        self.nodes = np.zeros((leaves, 7))
        self.signed = np.dtype(f"i{kind.itemsize}")
        key_type = kind.dtype if kind.integer else self.signed
        self.extremes = np.zeros(2, key_type)
        info = np.iinfo(key_type)
        self.widest = (info.max, info.min)
        scratch = np.empty(LEAF, np.float64 if kind.integer else kind.dtype)
        sums = np.empty(4 * kernels.LANES)
        self.out = (self.nodes, self.extremes, self.tally, self.zeros, scratch, sums)
        if not kind.integer:
            infinity = kind.dtype.type(np.inf).view(self.signed)
            self.constants = np.array([info.max, infinity, kind.bits - 1], self.signed)
            self.shift = kind.unsigned.type(kind.bits - kind.code_bits)

    def reset(self) -> None:
        """Forget what was counted; the counters are empty unless an error came before `drain`."""
        if self.used:
            self.counters[:] = 0
        self.tally[:] = 0
        if not self.kind.exact:
            self.extremes[:] = self.widest

    def count(self, values: Array) -> None:
        """Run the kernels over a block."""
        self.used = True
        kind = self.kind
        if kind.exact:
            negative = 1 << (kind.bits - 1) if kind.has_negative_zero else 0
            kernels.count_patterns(values, self.counters, negative, self.zeros)
            if not kind.has_zero:
                self.zeros[:] = 0
        elif kind.integer:
            kernels.count_integers(values, self.counters, self.out)
        else:
            kernels.count_floats(
                values,
                values.view(self.signed),
                values.view(kind.unsigned),
                self.shift,
                self.constants,
                self.counters,
                self.out,
            )

    def drain(self, codes: Array | None = None) -> tuple[Array, Array]:
        """Take the codes that were counted, and how often, out of the counters."""
        one, other = self.counters
        if codes is None:
            codes = np.flatnonzero(one | other).astype(np.uint32)
        counts = one[codes].astype(np.int64) + other[codes]
        one[codes] = other[codes] = 0
        self.used = False
        return codes, counts
