"""Write with xarray, open again, and restore what ``ds.ckpt.plain()`` replaced."""

from __future__ import annotations

import base64
import json
import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from xckpt.elements import stored_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_MODULES = {"h5netcdf": "h5netcdf", "netcdf4": "netCDF4", "zarr": "zarr"}
# Installed writers only.
WRITERS = [writer for writer, module in _MODULES.items() if find_spec(module) is not None]


def written(obj: Any, path: Path, writer: str) -> Any:
    """Write what is open with xarray, open it again with xarray, and load it."""
    reopen: Any = xr.open_datatree if isinstance(obj, xr.DataTree) else xr.open_dataset
    with warnings.catch_warnings():
        # The formats of consolidated metadata and of texts may change.
        warnings.filterwarnings("ignore", ".*(Zarr format 3|Zarr V3) specification")
        if writer == "zarr":
            obj.to_zarr(path)
        else:
            obj.to_netcdf(path, engine=writer)
        with reopen(path, engine=writer) as reopened:
            return reopened.load()


def assert_same_values(actual: xr.Variable, expected: xr.Variable) -> None:
    """Compare dimensions, type and bits."""
    assert actual.dims == expected.dims
    kinds = {actual.dtype.kind, expected.dtype.kind}
    if kinds <= {"U", "O", "T"}:
        assert actual.values.tolist() == expected.values.tolist()
        return
    assert actual.dtype == expected.dtype
    assert actual.values.tobytes() == expected.values.tobytes()


def restored_attrs(attrs: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[str, Any]]:
    """Restore attributes, and return them with the conventions of the object."""
    attributes = dict(attrs)
    for name in json.loads(attributes.pop("xckpt_json", "[]")):
        attributes[name] = json.loads(attributes[name])
    names = attributes.pop("xckpt_attrs", {})
    words = ("xckpt_name", "xckpt_dims", "xckpt_dtype")
    conventions = {word: attributes.pop(word) for word in words if word in attributes}
    return {names.get(name, name): value for name, value in attributes.items()}, conventions


def restored(ds: xr.Dataset) -> xr.Dataset:
    """Turn back all that was replaced in a Dataset."""
    variables = {}
    for name, variable in ds.variables.items():
        attrs, conventions = restored_attrs(variable.attrs)
        values = variable.values
        dims = variable.dims
        if conventions.get("xckpt_dtype") == "json":
            texts = [json.loads(text) for text in values.ravel().tolist()]
            values = np.array(texts, object).reshape(values.shape)
        elif "xckpt_dtype" in conventions:
            dtype = stored_dtype(conventions["xckpt_dtype"])
            if dtype.kind == "c":
                values, dims = np.ascontiguousarray(values).view(dtype)[..., 0], dims[:-1]
            else:
                values = narrow(values, dtype)
        dims = tuple(conventions.get("xckpt_dims", dims))
        variables[conventions.get("xckpt_name", name)] = xr.Variable(dims, values, attrs)
    return xr.Dataset(variables, attrs=restored_attrs(ds.attrs)[0])


def narrow(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Convert back what was widened."""
    from xckpt.arrays.converted import cast_block

    return cast_block(values, dtype.name, "exact")


def same(actual: Any, expected: Any) -> bool:
    """Compare attributes, however a file spells the kinds of numbers and lists."""
    return json.dumps(_spelled(actual)) == json.dumps(_spelled(expected))


def _spelled(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _spelled(inner) for key, inner in sorted(value.items(), key=str)}
    return [_spelled(inner) for inner in value] if isinstance(value, list | tuple) else value
