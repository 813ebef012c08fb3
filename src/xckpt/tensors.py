"""An open Dataset or tree as its tensors: variables by flat names, chosen, and put back."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xarray as xr
from dask.utils import parse_bytes

from xckpt.dtypes import ELEMENT_TYPES, stored_dtype
from xckpt.errors import CheckpointWarning, shown
from xckpt.labels import TensorFilter, flat_name, select, tree_paths
from xckpt.labels.selection import closest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["Flat", "find", "flatten", "rebuild", "tensor_name"]


class Flat(NamedTuple):
    """A Dataset or a tree without its structure.

    Parameters
    ----------
    variables : dict of str to Variable
        The data variables, by the flat name of the tensor.
    nodes : dict of str to str
        The path of the node that each of them is in, from the root of the whole tree.
    coords : dict of str to dict of str to Variable
        The coordinates of each node, by path; ``"/"`` is a Dataset itself.
    """

    variables: dict[Any, xr.Variable]
    nodes: dict[Any, str]
    coords: dict[str, dict[Any, xr.Variable]]

    def indexes(self, path: str) -> dict[Any, xr.Variable]:
        """Return the index coordinates of a node, those that it inherits included."""
        found: dict[Any, xr.Variable] = {}
        while True:
            here = self.coords.get(path, {})
            found = {n: v for n, v in here.items() if v.dims in {(n,), ()}} | found
            if path == "/":
                return found
            path = path.rpartition("/")[0] or "/"


def flatten(obj: xr.Dataset | xr.DataTree) -> Flat:
    """Collect all variables, in time proportional to their number."""
    flat = Flat({}, {}, {})
    if isinstance(obj, xr.DataTree):
        flat.coords.update((node.path, dict(node.coords.variables)) for node in obj.parents)
    for path, ds in _datasets(obj):
        flat.coords[path] = dict(ds.coords.variables)
        for name, variable in ds.variables.items():
            if name in flat.coords[path]:
                continue
            tensor: Any = name if obj is ds else tensor_name(path, str(name), variable)
            if tensor in flat.variables:
                raise ValueError(f"two variables of the tree are called {tensor!r} when it is flat")
            flat.variables[tensor] = variable
            flat.nodes[tensor] = path
    return flat


def tensor_name(path: str, leaf: str, variable: xr.Variable) -> str:
    """Return the flat name of a variable of a tree: that of its tensor, if it is in its place."""
    name, encoding = flat_name(path, leaf), variable.encoding
    stated = encoding.get("path")
    if stated is None or ".".join(stated) != name or "tensor" not in encoding:
        return name
    own: str = encoding["tensor"]
    role = encoding.get("part")
    return own if role is None else own + stated[-1][stated[-1].rindex(f":{role}") :]


def rebuild(obj: xr.Dataset | xr.DataTree, flat: Flat) -> Any:
    """Make an object like another one of other variables."""
    if isinstance(obj, xr.Dataset):
        return _dataset(obj, flat.variables, flat.coords["/"])
    nodes: dict[str, dict[Any, xr.Variable]] = {obj.path: {}}
    paths = {name: variable.encoding.get("path") for name, variable in flat.variables.items()}
    for name, (path, leaf) in tree_paths(paths).items():
        nodes.setdefault(path, {})[leaf] = flat.variables[name]
    old = dict(_datasets(obj))
    datasets = {}
    for path in nodes | {path: {} for path, ds in old.items() if ds.attrs}:
        coords = {**flat.indexes(path), **flat.coords.get(path, {})}
        below = "/" + path.removeprefix(obj.path).lstrip("/")
        datasets[below] = _dataset(old.get(path, xr.Dataset()), nodes.get(path, {}), coords)
    return xr.DataTree.from_dict(datasets, name=obj.name)


def find(
    obj: xr.Dataset | xr.DataTree,
    names: TensorFilter | None = None,
    *,
    dtype: Any = None,
    min_bytes: int | str = 0,
) -> Any:
    """Choose variables by name, element type and size, in time proportional to their number."""
    flat = flatten(obj)
    dtypes = None if dtype is None else _dtypes(dtype)
    least = parse_bytes(min_bytes)
    known = {str(name): name for name in flat.variables}
    matching = select(known, names)
    if not matching and known and names is not None:
        _warn(known, names)
    chosen = {}
    for text in matching:
        variable = flat.variables[known[text]]
        if _stored_nbytes(variable) >= least and (dtypes is None or _stored(variable) in dtypes):
            chosen[known[text]] = variable
    return rebuild(obj, Flat(chosen, {}, flat.coords))


def _datasets(obj: xr.Dataset | xr.DataTree) -> Iterator[tuple[str, xr.Dataset]]:
    if isinstance(obj, xr.Dataset):
        yield "/", obj
        return
    for node in obj.subtree:
        yield node.path, node.to_dataset(inherit=False)


def _dataset(
    old: xr.Dataset, variables: Mapping[Any, xr.Variable], coords: Mapping[Any, xr.Variable]
) -> xr.Dataset:
    dims = {dim for variable in variables.values() for dim in variable.dims}
    kept = {n: v for n, v in coords.items() if n not in variables and dims.issuperset(v.dims)}
    new = xr.Dataset(variables, kept, old.attrs)
    new.encoding = dict(old.encoding)
    return new


def _dtypes(wanted: Any) -> set[np.dtype[Any]]:
    return {
        stored_dtype(each) if each in ELEMENT_TYPES else np.dtype(each)
        for each in (wanted if isinstance(wanted, list | tuple | set) else [wanted])
    }


def _stored(variable: xr.Variable) -> Any:
    return variable.encoding.get("stored_dtype", variable.dtype)


def _stored_nbytes(variable: xr.Variable) -> int:
    nbytes: int = variable.encoding.get("nbytes", variable.nbytes)
    return nbytes


def _warn(known: dict[str, Any], names: TensorFilter) -> None:
    alike = ", ".join(shown(name) for name in closest(known, names))
    hint = f"; similar names: {alike}" if alike else ""
    text = f"{names!r} matches none of the {len(known)} variables{hint}"
    warnings.warn(text, CheckpointWarning, stacklevel=4)
