"""xarray's own suite for backends against what we write and read.

Its data are float64 and int64, which gpt.rs and primitiv do not hold; for all other formats it
runs. Checkpoints have no coordinates, and hold numbers only: what has no place is kept aside and
put back.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import xarray as xr
from xarray.tests.test_backends import DatasetIOBase

from tests.test_xarray_suite import ABOUT_OTHER_THINGS
from tests.writing.saved import ENGINES
from xckpt import formats
from xckpt.writing import save
from xckpt.writing.casting import element_type

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Saving(DatasetIOBase):
    """The suite for one engine."""

    __test__ = False
    engine_: ClassVar[str]

    for name in (*ABOUT_OTHER_THINGS, "test_dataset_caching"):
        locals()[name] = None
    del name

    def save(self, dataset: xr.Dataset, path: str | Path, **_: Any) -> None:
        """Save what the engine has a place for, and keep the rest aside."""
        stored = {n: v for n, v in dataset.variables.items() if self._has_place(n, v, dataset)}
        plain = xr.Dataset({str(name): v.to_base_variable() for name, v in stored.items()})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of attributes without a place
            save(plain.drop_encoding(), path, self.engine_, overwrite=True)
        self._aside = (stored, dataset)

    def _has_place(self, name: Any, variable: xr.Variable, dataset: xr.Dataset) -> bool:
        writes = formats.get_writer(self.engine_).writes
        return element_type(variable.dtype) in writes and name not in dataset.dims

    @contextlib.contextmanager
    def open(self, path: str | Path, **kwargs: Any) -> Iterator[xr.Dataset]:
        """Open the file, and put back what was kept aside."""
        stored, dataset = self._aside
        dims = {name: variable.dims for name, variable in stored.items()}
        with xr.open_dataset(path, engine=self.engine_, dims=dims, **kwargs) as ds:
            assert set(ds.variables) == set(stored)
            for name, variable in stored.items():
                ds.variables[name].attrs = variable.attrs
            rest = dataset.drop_vars(list(stored))
            whole = ds.set_coords([name for name in stored if name in dataset.coords])
            whole = whole.assign_coords(rest.coords).assign(rest.data_vars)
            whole.attrs = dataset.attrs
            yield whole

    @pytest.mark.parametrize("use_dask", [True, False])
    def test_vectorized_indexing_negative_step(self, use_dask: bool) -> None:
        """Run xarray's, without its fixture; before 2026.8 it has no parameter."""
        test: Any = super().test_vectorized_indexing_negative_step
        if "use_dask" in inspect.signature(test).parameters:
            test(use_dask)
        else:
            test()


for engine in ENGINES:
    if not {"float64", "int64"}.issubset(formats.get_writer(engine).writes):
        continue
    title = f"TestSaving{engine.title()}"
    globals()[title] = type(title, (Saving,), {"__test__": True, "engine_": engine})
