"""Tensors as rows of a listing, for summaries, pictures and selections.

A row describes a tensor of an `Index` or of an open object. It is a plain tuple, because a
checkpoint can have 100,000 of them.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.formatting import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: The storage of a tensor whose bytes belong to another one.
TIED = "tied"
_LAYOUTS = {
    "dense": "",
    "chunked": "chunked",
    "sparse_csr": "csr",
    "sparse_csc": "csc",
    "sparse_coo": "coo",
    "sparse_bsr": "bsr",
    "sparse_bsc": "bsc",
    "sparse_hybrid": "hybrid coo",
    "quantized": "quantized",
    "blocks": "",  # the element type implies it
    "structural": "structural",
}


class Row(NamedTuple):
    """Name, stored element type, shape and size of a tensor."""

    name: str  # exactly as in the file; no two rows have the same
    dtype: str  # stored element type
    shape: tuple[int, ...]
    nbytes: int  # as stored
    storage: str = ""  # "csr", "zstd", ...; empty for plain dense data
    declared: Mapping[str, Any] | None = None  # facts that the file states; see `Tensor.facts`

    @property
    def size(self) -> int:
        """Number of elements; 0 for a tensor in a missing file, whose shape is unknown."""
        return prod(self.shape) if self.shape or self.dtype != UNKNOWN else 0


class StackedNames(NamedTuple):
    """Tensors that are one variable of an open object."""

    template: tuple[str | int | None, ...]  # of their names; non-strings stand for indices
    dims: tuple[str, ...]  # one for each index
    indices: tuple[tuple[int, ...], ...]  # along each dimension


def tied(rows: Iterable[Row], shared: Mapping[str, str]) -> Iterable[Row]:
    """Count the bytes of tied tensors once, for the tensor that owns them."""
    if not shared:
        return rows
    return [r._replace(nbytes=0, storage=TIED) if r.name in shared else r for r in rows]


def storage_words(layout: str, encodings: Iterable[str | None]) -> str:
    """Describe how a tensor is stored, for `Row.storage`."""
    # "zstd-seekable" is zstd with a table of its frames.
    compressions = [encoding.partition("-")[0] for encoding in encodings if encoding]
    return " ".join(dict.fromkeys([_LAYOUTS.get(layout, layout), *compressions])).strip()
