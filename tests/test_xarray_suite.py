"""xarray's own suite for backends, as far as it is about reading numbers.

A zTensor 1.0 file has no place for coordinates, attributes of tensors or names of axes; the suite
expects them back, so they are kept aside and put back as a user would: ``dims=``, ``set_coords``,
``assign_coords``.
"""

from __future__ import annotations

import contextlib
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask.array as da
import pytest
import xarray as xr
from xarray.tests.test_backends import DatasetIOBase

from tests.formats.ztensor_files import dense_v1, v1_file

if TYPE_CHECKING:
    from collections.abc import Iterator

# Tests of what is written besides numbers, or of xarray's own cache.
ABOUT_OTHER_THINGS = [
    "test_load_async",  # needs an event loop; dask arrays load by threads
    "test_roundtrip_None_variable",
    "test_roundtrip_coordinates",  # netCDF's ways of writing them
    "test_roundtrip_coordinates_with_space",
    "test_roundtrip_cftime_datetime_data",
    "test_roundtrip_numpy_datetime_data",
    "test_roundtrip_object_dtype",
    "test_roundtrip_string_data",
    "test_roundtrip_string_encoded_characters",
    "test_roundtrip_stringdtype_data",
    "test_roundtrip_stringdtype_nulls",
    "test_roundtrip_stringdtype_with_na_object",
    "test_roundtrip_timedelta_data",
    "test_roundtrip_timedelta_data_via_dtype",
    "test_write_store",
]


class TestReading(DatasetIOBase):
    """The suite, over files written by the tests' own writer."""

    for name in ABOUT_OTHER_THINGS:
        locals()[name] = None
    del name

    def save(self, dataset: xr.Dataset, path: str | Path, **_: Any) -> None:
        """Write numbers to a file, and keep the rest aside."""
        stored = {
            str(name): variable.compute()
            for name, variable in dataset.variables.items()
            if variable.dtype.kind in "fiub" and name not in dataset.dims
        }
        tensors = {
            name: dense_v1(v.values.tobytes(), v.shape, v.dtype.name) for name, v in stored.items()
        }
        Path(path).write_bytes(v1_file(tensors))
        self._aside = (stored, dataset)

    @contextlib.contextmanager
    def open(self, path: str | Path, **kwargs: Any) -> Iterator[xr.Dataset]:
        """Open a file, and put back what was kept aside."""
        stored, dataset = self._aside
        dims = {name: variable.dims for name, variable in stored.items()}
        with xr.open_dataset(path, engine="ztensor", dims=dims, **kwargs) as ds:
            for name, variable in stored.items():
                ds.variables[name].attrs = variable.attrs
            rest = dataset.drop_vars(list(stored))
            whole = ds.set_coords([name for name in stored if name in dataset.coords])
            whole = whole.assign_coords(rest.coords).assign(rest.data_vars)
            whole.attrs = dataset.attrs
            yield whole

    def test_dataset_caching(self) -> None:
        """Arrays are dask's by design: what is computed is not kept, but what is loaded is."""
        expected = xr.Dataset({"foo": ("x", [5, 6, 7])})
        with self.roundtrip(expected) as actual:
            assert isinstance(actual.foo.data, da.Array)
            assert actual.foo.values.tolist() == [5, 6, 7]
            assert not actual.foo.variable._in_memory
            actual.load()
            assert actual.foo.variable._in_memory

    @pytest.mark.parametrize("use_dask", [True, False])
    def test_vectorized_indexing_negative_step(self, use_dask: bool) -> None:
        """Run xarray's, without its fixture; before 2026.8 it has no parameter."""
        test: Any = super().test_vectorized_indexing_negative_step
        if "use_dask" in inspect.signature(test).parameters:
            test(use_dask)
        else:
            test()
