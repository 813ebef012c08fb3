"""Values that a format writes where others have only a description: `plan` needs them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from xckpt.errors import CheckpointError
from xckpt.writing.data import ArrayData, DaskData

if TYPE_CHECKING:
    from collections.abc import Iterable

    from xckpt.writing.casting import Cast
    from xckpt.writing.data import Data
    from xckpt.writing.entries import Entry

__all__ = ["put_inline"]


def put_inline(entries: Iterable[Entry], cast: Cast) -> None:
    """Read or compute the values of entries, all at once, into their tensors."""
    wanted = [(entry, _data(entry, cast)) for entry in entries]
    for (entry, _), data in zip(wanted, _computed([data for _, data in wanted]), strict=True):
        try:
            value = b"".join(data.blocks())
        except CheckpointError as error:
            raise error.located(tensor=entry.tensor.name) from error.__cause__
        part = replace(entry.tensor.parts["data"], inline=value)
        entry.tensor = replace(entry.tensor, parts={"data": part})


def _data(entry: Entry, cast: Cast) -> Data | DaskData:
    tensor = entry.tensor
    return entry.parts["data"].data(tensor.parts["data"], tensor.order, cast)


def _computed(wanted: list[Data | DaskData]) -> list[Data]:
    """Put arrays in memory in the place of dask arrays."""
    arrays = [data.array for data in wanted if isinstance(data, DaskData)]
    if arrays:
        import dask

        arrays = list(dask.compute(*arrays))
    computed = iter(arrays)
    return [
        ArrayData(next(computed), data.dtype, data.cast, data.tensor, data.order)
        if isinstance(data, DaskData)
        else data
        for data in wanted
    ]
