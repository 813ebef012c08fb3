"""From the entries of a file to tensors: ids, element types, sizes, byte ranges."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from xckpt.dtypes import ELEMENT_TYPES
from xckpt.errors import FormatError, shown
from xckpt.identity import base_id
from xckpt.index import Part, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from xckpt.formats.gptrs.axes import ModelAxes
    from xckpt.formats.gptrs.entries import Entry

__all__ = ["Tensors"]

_ELEMENT_TYPES = ("float32", "float16", "bfloat16", "int32")
_NBYTES = [ELEMENT_TYPES[name].bits // 8 for name in _ELEMENT_TYPES]
_SIZES = 1 << 63  # numpy's sizes are signed


class Tensors:
    """Checks and collects the tensors of one file.

    Parameters
    ----------
    data_start : int
        Where data may begin.
    size : int
        Size of the file in bytes.
    axes : ModelAxes or None
        Names of axes, for a checkpoint of a known kind.
    ids : bool
        Whether the tensors are parameters, which have base ids.

    Attributes
    ----------
    found : dict of str to Tensor
        In the order of the file.
    has_ids : bool
        Whether the file has base ids, or leaves them all to be made of the names.
    """

    __slots__ = (
        "_axes",
        "_data_start",
        "_ids",
        "_nameless",
        "_ranges",
        "_size",
        "found",
        "has_ids",
    )

    def __init__(
        self, data_start: int, size: int, *, axes: ModelAxes | None = None, ids: bool = False
    ) -> None:
        self._data_start = data_start
        self._size = size
        self._axes = axes
        self._ids = ids
        self._nameless: list[str] = []
        # By range of bytes, the first tensor that is there: equal ranges are shared on purpose.
        self._ranges: dict[tuple[int, int], str] = {}
        self.found: dict[str, Tensor] = {}
        self.has_ids = False

    def add(self, entries: Iterable[Entry]) -> Tensors:
        """Make the tensors that a file describes.

        Parameters
        ----------
        entries : iterable of Entry
            What the file says of each.

        Returns
        -------
        Tensors
            This object.

        Raises
        ------
        FormatError
            If a name is repeated (rule DuplicateName), a stored id is not that of the name
            (BaseId), an element type is not known (DType), the size is not that of the shape
            (ByteLength), the shape is larger than an array can be (Shape), or the data are not
            where data can be (Bounds).
        """
        for entry in entries:
            name, shape, nbytes = entry.name, entry.shape, entry.nbytes
            if name in self.found:
                raise _broken(entry, "another tensor before it has this name", "DuplicateName")
            attrs: dict[str, Any] = {"requires_grad": entry.flag != 0}
            if self._ids:
                self._identify(entry, attrs)
            dtype = _checked_dtype(entry)
            self._check_range(entry)
            parts = {"data": Part(dtype, shape, entry.offset, nbytes)}
            dims = None if self._axes is None else self._axes.of(name, shape)
            self.found[name] = Tensor(name, dtype, shape, parts, attrs=attrs, dims=dims)
        return self

    def warnings(self) -> tuple[str, ...]:
        """Return one text for each reason there is to warn.

        Returns
        -------
        tuple of str
            Short, however many tensors there are.
        """
        texts = (self._about_names(), self._about_overlaps())
        return tuple(text for text in texts if text is not None)

    def _identify(self, entry: Entry, attrs: dict[str, Any]) -> None:
        expected = base_id(entry.name) if entry.name.isascii() else None
        if entry.stored_id and entry.stored_id != expected:
            wanted = "none, which a name beyond ASCII has" if expected is None else _hex(expected)
            raise _broken(
                entry, f"the base id {_hex(entry.stored_id)} is stored, expected {wanted}", "BaseId"
            )
        self.has_ids = self.has_ids or entry.stored_id != 0
        if expected is None:
            self._nameless.append(entry.name)
        else:
            attrs["base_id"] = _hex(expected)

    def _check_range(self, entry: Entry) -> None:
        start, end = entry.offset, entry.offset + entry.nbytes
        if end > self._size or (entry.nbytes and start < self._data_start):
            raise _broken(
                entry,
                f"bytes {start} to {end}, but data are in {self._data_start} to {self._size}",
                "Bounds",
            )
        if entry.nbytes:
            self._ranges.setdefault((start, end), entry.name)

    def _about_names(self) -> str | None:
        if not self._nameless:
            return None
        return (
            f"tensor {shown(self._nameless[0])}{_more(self._nameless)}: a name beyond ASCII; "
            "it has no base id, and gpt.rs refuses the file"
        )

    def _about_overlaps(self) -> str | None:
        overlapping = []
        reached, owner = 0, ""
        for (start, end), name in sorted(self._ranges.items()):
            if start < reached:
                overlapping.append(f"{shown(name)} at byte {start} overlaps {shown(owner)}")
            if end > reached:
                reached, owner = end, name
        return f"tensor {overlapping[0]}{_more(overlapping)}" if overlapping else None


def _checked_dtype(entry: Entry) -> str:
    """Return the element type, with which the shape makes up the size."""
    if entry.tag >= len(_ELEMENT_TYPES):
        raise _broken(
            entry,
            f"the element type {entry.tag} is not known: expected 0 (f32), 1 (f16), 2 (bf16) or "
            "3 (i32)",
            "DType",
        )
    itemsize = _NBYTES[entry.tag]
    expected = prod(entry.shape) * itemsize
    # Zeros do not make up for the others: numpy cannot represent such an array.
    if (expected or prod(filter(None, entry.shape)) * itemsize) >= _SIZES:
        raise _broken(entry, f"the shape {entry.shape} is larger than an array can be", "Shape")
    dtype = _ELEMENT_TYPES[entry.tag]
    if entry.nbytes != expected:
        raise _broken(
            entry,
            f"{entry.nbytes} bytes of data: expected {expected} for {dtype} of shape {entry.shape}",
            "ByteLength",
        )
    return dtype


def _broken(entry: Entry, reason: str, rule: str) -> FormatError:
    return FormatError(reason, offset=entry.at, tensor=entry.name, rule=rule)


def _hex(number: int) -> str:
    return f"{number:032x}"


def _more(things: list[str]) -> str:
    return f" and {len(things) - 1} more" if len(things) > 1 else ""
