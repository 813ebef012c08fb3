from collections.abc import Hashable, Iterable
from typing import Any, Self, TypeAlias, overload

import numpy as np
import xarray as xr

from xckpt.accessor import CheckpointAccessor

__all__ = ["DataArray", "DataTree", "Dataset"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

class Dataset(xr.Dataset):
    @property
    def ckpt(self) -> CheckpointAccessor[Dataset]: ...
    @overload
    def __getitem__(self, key: Hashable) -> DataArray: ...
    @overload
    def __getitem__(self, key: Iterable[Hashable]) -> Self: ...

class DataArray(xr.DataArray):
    @property
    def ckpt(self) -> CheckpointAccessor[Dataset]: ...

class DataTree(xr.DataTree):
    @property
    def ckpt(self) -> CheckpointAccessor[DataTree]: ...
