"""The types of objects that have ``.ckpt``, for annotations.

xarray adds an accessor when it is registered, so a type checker does not know ``.ckpt`` of an
`xarray.Dataset`. The functions of xckpt return the types of this module, which are xarray's own at
run time; the stub next to this file declares their ``.ckpt``. ``cast(xckpt.typing.Dataset, ds)``
makes one of a Dataset that xarray opened.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

__all__ = ["DataArray", "DataTree", "Dataset"]

Dataset, DataArray, DataTree = xr.Dataset, xr.DataArray, xr.DataTree
#: An array of any type and number of dimensions.
Array = np.ndarray[Any, np.dtype[Any]]
