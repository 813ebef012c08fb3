"""Headers and data of a new file one after the other, and what tensors can be stored at all."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from xckpt.errors import UnsupportedError
from xckpt.formats.primitiv.contents import MOST_DIMS
from xckpt.formats.primitiv.packing import packed_length, packed_shape
from xckpt.formats.primitiv.scan import BIN
from xckpt.plan import Extent, Literal, Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.index import Tensor

__all__ = ["WRITES", "Layout", "trimmed", "unstorable"]

WRITES = ("float32",)

_LARGEST_BIN = (1 << 32) - 1


class Layout:
    """Collects headers and data in file order."""

    __slots__ = ("_at", "_extents", "_header", "_literals")

    def __init__(self) -> None:
        self._at = 0
        self._extents: list[Extent] = []
        self._header = bytearray()
        self._literals: list[Literal] = []

    def put(self, data: bytes) -> None:
        """Put a piece of a header behind all that is there."""
        self._header += data

    def put_tensor(self, tensor: Tensor, *, batched: bool = True) -> None:
        """Put a Tensor behind all that is there."""
        dims, batch = _dims_and_batch(tensor)
        if batch > 1 and not batched:
            reason = f"a parameter with a batch of {batch}, which primitiv would not load"
            hint = "Rename its axis 'batch', so that it is one like the others"
            raise unstorable(tensor, reason, "Batch", hint)
        nbytes = 4 * prod(dims) * batch
        self.put(packed_shape(dims, batch) + packed_length(BIN, nbytes))
        self._flush()
        self._extents.append(Extent(tensor.name, "data", tensor.parts["data"], self._at))
        self._at += nbytes

    def _flush(self) -> None:
        if self._header:
            self._literals.append(Literal(self._at, bytes(self._header)))
            self._at += len(self._header)
            self._header.clear()

    def plan(self) -> Plan:
        """Return the plan of all that was put."""
        self._flush()
        return Plan(tuple(self._literals), tuple(self._extents), nbytes=self._at)


def _dims_and_batch(tensor: Tensor) -> tuple[tuple[int, ...], int]:
    """Return the shape as primitiv counts it, after checking that it can be stored."""
    if tensor.layout != "dense" or tensor.dtype not in WRITES:
        found = tensor.dtype if tensor.layout == "dense" else f"the layout {tensor.layout!r}"
        hint = "Convert it to a dense array of float32 before, or leave it out"
        raise unstorable(tensor, f"{found}: primitiv has dense float32 only", "DType", hint)
    if 0 in tensor.shape:
        reason = f"the shape {tensor.shape}: primitiv has no tensors without elements"
        raise unstorable(tensor, reason, "ShapeSize", "Leave it out")
    if 4 * tensor.size > _LARGEST_BIN:
        reason = f"{tensor.size} elements, of which one tensor has at most {_LARGEST_BIN // 4}"
        raise unstorable(tensor, reason, "ShapeSize", "Split it into several")
    has_batch = tensor.dims is not None and tensor.dims[-1:] == ("batch",)
    dims = trimmed(tensor.shape[:-1] if has_batch else tensor.shape)
    if len(dims) > MOST_DIMS:
        reason = f"{len(dims)} axes, of which primitiv has at most {MOST_DIMS}"
        raise unstorable(tensor, reason, "ShapeDepth", "Reshape it")
    return dims, tensor.shape[-1] if has_batch else 1


def trimmed(dims: Sequence[int]) -> tuple[int, ...]:
    """Leave out the trailing dims that are 1, as primitiv does."""
    kept = list(dims)
    while kept and kept[-1] == 1:
        kept.pop()
    return tuple(kept)


def unstorable(tensor: Tensor, reason: str, rule: str, hint: str) -> UnsupportedError:
    """Make the error for a tensor that cannot be stored."""
    return UnsupportedError(reason, tensor=tensor.name, rule=rule, hint=hint)
