"""xarray's own suite for backends, applied to saving and opening.

Checkpoints hold numbers only, and some formats no coordinates: other variables are set aside and
put back. The data of the suite are float64 and int64, which gpt.rs and primitiv lack: these formats
get values that fit their types, with ``cast="exact"``, so that a lost value would be an error.
`Narrow` lists the tests that do not apply to them, with the reason.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from typing import TYPE_CHECKING, Any, ClassVar

import dask.array as da
import numpy as np
import pytest
import xarray as xr
from xarray.tests import test_backends
from xarray.tests.test_backends import DatasetIOBase

from tests.writing.saved import ENGINES
from xckpt import UnsupportedError, formats
from xckpt.arrays.converted import element_type
from xckpt.writing import save

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Tests of other things than numbers, or of xarray's own cache.
ABOUT_OTHER_THINGS = [
    "test_load_async",  # needs an event loop; dask arrays load by threads
    "test_roundtrip_None_variable",
    "test_roundtrip_coordinates",  # netCDF's ways of writing them
    "test_roundtrip_coordinates_with_space",
    "test_roundtrip_cftime_datetime_data",
    "test_roundtrip_example_1_netcdf",  # a file of netCDF; xarray itself always skips this test
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


class Saving(DatasetIOBase):
    """The suite for one engine."""

    __test__ = False
    engine_: ClassVar[str]
    #: Of opening.
    keywords: ClassVar[dict[str, Any]] = {}

    for name in ABOUT_OTHER_THINGS:
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
        writes = formats.writable(self.engine_).can.types
        return element_type(variable.dtype) in writes and name not in dataset.dims

    @contextlib.contextmanager
    def open(self, path: str | Path, **kwargs: Any) -> Iterator[xr.Dataset]:
        """Open the file, and put back what was kept aside."""
        stored, dataset = self._aside
        with self._opened(path, **kwargs) as ds:
            for name, variable in stored.items():
                ds.variables[name].attrs = variable.attrs
            unsaved = dataset.drop_vars(list(stored))
            full = ds.set_coords([name for name in stored if name in dataset.coords])
            full = full.assign_coords(unsaved.coords).assign(unsaved.data_vars)
            full.attrs = dataset.attrs
            yield full

    @contextlib.contextmanager
    def _opened(self, path: str | Path, **kwargs: Any) -> Iterator[xr.Dataset]:
        stored, _ = self._aside
        dims = {name: variable.dims for name, variable in stored.items()}
        keywords = self.keywords | kwargs
        with xr.open_dataset(path, engine=self.engine_, dims=dims, **keywords) as ds:
            assert set(ds.variables) == set(stored)
            yield ds

    def test_dataset_caching(self) -> None:
        """Arrays are dask's by default: computed values are not cached, but loaded ones are."""
        if self.keywords:
            super().test_dataset_caching()
            return
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


class Whole(Saving):
    """The suite for formats with coordinates: only variables without numbers are set aside."""

    __test__ = False

    def save(self, dataset: xr.Dataset, path: str | Path, **_: Any) -> None:
        """Save all numbers as they are."""
        aside = [n for n, v in dataset.variables.items() if not self._has_place(n, v, dataset)]
        plain = dataset.drop_vars(aside)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of attributes that JSON lacks
            save(plain.drop_encoding(), path, self.engine_, overwrite=True)
        self._aside = (dict(plain.variables), dataset)

    def _has_place(self, name: Any, variable: xr.Variable, dataset: xr.Dataset) -> bool:
        return super()._has_place(name, variable, xr.Dataset())

    @contextlib.contextmanager
    def open(self, path: str | Path, **kwargs: Any) -> Iterator[xr.Dataset]:
        """Open the file, and put back what was kept aside."""
        stored, dataset = self._aside
        with xr.open_dataset(path, engine=self.engine_, **self.keywords | kwargs) as ds:
            assert set(ds.variables) == set(stored)
            for name, variable in ds.variables.items():
                added = set(variable.attrs) - set(stored[name].attrs)
                assert added <= {"rank"}  # of MLCP
                for attribute in added:
                    del variable.attrs[attribute]
            assert ds.attrs.keys() >= dataset.attrs.keys()
            ds.attrs = {name: ds.attrs[name] for name in dataset.attrs}
            unsaved = dataset.drop_vars(list(stored))
            yield ds.assign_coords(unsaved.coords).assign(unsaved.data_vars)


class Narrow(Saving):
    """The suite for formats that have few element types, and no numbers without axes.

    Differences:

    - Random float64 data of the suite are made float32 first: their values do not matter.
    - int64 and booleans are stored as what the format has that is nearest, and cast back.
    - gpt.rs gives a number an axis, and primitiv has no axes of length 1 at the end of a shape:
      shapes are put back.
    """

    __test__ = False

    @pytest.fixture(autouse=True)
    def _single_precision(self, monkeypatch: pytest.MonkeyPatch) -> None:
        suite: Any = test_backends
        create, random = suite.create_test_data, np.random.randn

        def narrow(*args: Any, **kwargs: Any) -> xr.Dataset:
            ds: xr.Dataset = create(*args, **kwargs)
            wide = [name for name, variable in ds.variables.items() if variable.dtype == "f8"]
            return ds.assign({name: ds[name].astype("f4") for name in wide})

        monkeypatch.setattr(suite, "create_test_data", narrow)
        monkeypatch.setattr(np.random, "randn", lambda *s: random(*s).astype("f4").astype("f8"))

    def save(self, dataset: xr.Dataset, path: str | Path, **_: Any) -> None:
        """Save numbers as the type that the format has."""
        stored = {n: v for n, v in dataset.variables.items() if self._has_place(n, v, dataset)}
        plain = xr.Dataset({str(name): v.to_base_variable() for name, v in stored.items()})
        expected = {str(name): {"dtype": self._nearest(v)} for name, v in stored.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of attributes without a place
            save(plain.drop_encoding(), path, self.engine_, encoding=expected, overwrite=True)
        self._aside = (stored, dataset)

    def _nearest(self, variable: xr.Variable) -> str:
        writes = formats.writable(self.engine_).can.types
        integers = "int32" if "int32" in writes else "float32"
        return "float32" if variable.dtype.kind == "f" else integers

    def _has_place(self, name: Any, variable: xr.Variable, dataset: xr.Dataset) -> bool:
        return element_type(variable.dtype) is not None and name not in dataset.dims

    @contextlib.contextmanager
    def _opened(self, path: str | Path, **kwargs: Any) -> Iterator[xr.Dataset]:
        """Open the file, and put back shapes, axes and types."""
        stored, _ = self._aside
        with xr.open_dataset(path, engine=self.engine_, **self.keywords | kwargs) as ds:
            assert {v.dtype.name for v in ds.variables.values()} <= {"float32", "int32"}
            variables = {}
            for name, variable in stored.items():
                data = ds.variables[name].data
                data = data if data.shape == variable.shape else data.reshape(variable.shape)
                data = data if data.dtype == variable.dtype else data.astype(variable.dtype)
                variables[name] = (variable.dims, data)
            assert set(ds.variables) == set(stored)
            yield xr.Dataset(variables)

    def test_roundtrip_float64_data(self) -> None:
        """Pi with 53 bits has no place: it is refused, and not rounded."""
        with pytest.raises(UnsupportedError, match=r"element \[2\] is 3\.14159.*float32 cannot"):
            super().test_roundtrip_float64_data()


for engine in ENGINES:
    holds_all = {"float64", "int64"}.issubset(formats.writable(engine).can.types)
    title = f"TestSaving{engine.title()}"
    has_room = formats.get(engine).can.arrangement
    base = Narrow if not holds_all else Whole if has_room else Saving
    globals()[title] = type(title, (base,), {"__test__": True, "engine_": engine})
    if base is not Narrow:  # it reads arrays to put back their shapes
        title += "WithoutDask"
        members = {"__test__": True, "engine_": engine, "keywords": {"dask": False}}
        globals()[title] = type(title, (base,), members)
