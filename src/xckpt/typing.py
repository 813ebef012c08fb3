"""The types of objects that have ``.ckpt``, for annotations.

xarray adds an accessor when it is registered, so a type checker does not know ``.ckpt`` of an
`xarray.Dataset`. The functions of xckpt return the types of this module, which are xarray's own at
run time. ``cast(xckpt.typing.Dataset, ds)`` makes one of a Dataset that xarray opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xarray as xr

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable
    from typing import Any, Self, overload

    from xckpt.accessor import CheckpointAccessor

__all__ = ["DataArray", "DataTree", "Dataset"]

if TYPE_CHECKING:

    class Dataset(xr.Dataset):
        """A Dataset with a typed accessor."""

        @property
        def ckpt(self) -> CheckpointAccessor[Dataset]:
            """Methods that xckpt adds."""

        @overload
        def __getitem__(self, key: Hashable) -> DataArray: ...
        @overload
        def __getitem__(self, key: Iterable[Hashable]) -> Self: ...
        def __getitem__(self, key: Any) -> Any: ...

    class DataArray(xr.DataArray):
        """A DataArray with a typed accessor."""

        @property
        def ckpt(self) -> CheckpointAccessor[Dataset]:
            """Methods that xckpt adds."""

    class DataTree(xr.DataTree):
        """A DataTree with a typed accessor."""

        @property
        def ckpt(self) -> CheckpointAccessor[DataTree]:
            """Methods that xckpt adds."""

else:
    Dataset, DataArray, DataTree = xr.Dataset, xr.DataArray, xr.DataTree
