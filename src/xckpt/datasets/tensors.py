"""The tensors of an open object: listed by flat name, selected, and put back into an object."""

from __future__ import annotations

import weakref
from functools import cached_property
from itertools import chain, islice
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import xarray as xr
from dask.utils import parse_bytes

from xckpt.arrays import read_later
from xckpt.arrays.derived import checkpoints_in, stacks_in
from xckpt.arrays.graph import TensorLayer, lazy_of
from xckpt.datasets.listing import list_arrays
from xckpt.datasets.making import make_dataset
from xckpt.datasets.mappings import as_dataset_of_one
from xckpt.datasets.stack_records import (
    StackMembers,
    is_made_by_stacking,
    marks_of_run,
    remember_stack,
    stack_of,
    unstacked_variables,
    with_own_record,
)
from xckpt.elements import BLOCK_TYPES, element_type_of, stored_dtype
from xckpt.errors import Cause, causes_of, warn
from xckpt.index import CodeFinding, Index, paused_collector
from xckpt.labels import TensorFilter, combined, flat_name, select, tree_paths
from xckpt.labels.filters import select_members, suggest_filters, suggest_names, warn_of_exclusions
from xckpt.storage.source import sources_of
from xckpt.structure import Structure, structure_of
from xckpt.structure.declared import facts_kept
from xckpt.structure.facts import model_facts
from xckpt.tensor_rows import Row, StackedNames, storage_words, tied
from xckpt.upstream.dask_arrays import is_dask_array
from xckpt.upstream.xarray_variables import data_of

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping

    from numpy.typing import DTypeLike

    from xckpt.arrays.lazy import LazyArray
    from xckpt.datasets.options import OpenOptions
    from xckpt.storage import Source

    DtypeFilter = DTypeLike | list[DTypeLike] | tuple[DTypeLike, ...] | set[DTypeLike]


# The coordinate that xarray adds to quantiles.
_LEVEL = "quantile"
#: A Dataset or a tree; functions return the type of their argument.
Obj = TypeVar("Obj", bound=xr.Dataset | xr.DataTree)


class Flat(NamedTuple):
    """A Dataset or a tree without its structure."""

    variables: dict[Any, xr.Variable]  # the data variables, by the flat name of the tensor
    nodes: dict[Any, str]  # paths of their nodes, from the root of the whole tree
    coords: dict[str, dict[Any, xr.Variable]]  # by path of the node; "/" is a Dataset itself

    def indexes(self, path: str) -> dict[Any, xr.Variable]:
        """Return the index coordinates of a node, including inherited ones."""
        indexes: dict[Any, xr.Variable] = {}
        while True:
            coords = self.coords.get(path, {})
            indexes = {n: v for n, v in coords.items() if v.dims in {(n,), ()}} | indexes
            if path == "/":
                return indexes
            path = path.rpartition("/")[0] or "/"


def flatten(obj: xr.Dataset | xr.DataTree) -> Flat:
    """Collect all variables, in time proportional to their number."""
    flat = Flat({}, {}, {})
    if isinstance(obj, xr.DataTree):
        flat.coords.update((node.path, dict(node.coords.variables)) for node in obj.parents)
    for path, ds in _datasets(obj):
        coords = flat.coords[path] = dict(ds.coords.variables)
        # A frozen mapping looks up each variable by its name.
        variables = getattr(ds.variables, "mapping", ds.variables)
        for name, variable in variables.items():
            if name in coords:
                continue
            tensor: Any = name if obj is ds else tensor_name(path, str(name), variable)
            if tensor in flat.variables:
                raise ValueError(f"two variables of the tree are called {tensor!r} when it is flat")
            flat.variables[tensor] = with_own_record(tensor, variable)
            flat.nodes[tensor] = path
    return flat


def tensor_name(path: str, leaf: str, variable: xr.Variable) -> str:
    """Return the flat name of a variable of a tree: the name of its tensor, unless it was moved."""
    encoding = variable.encoding
    stated, record = encoding.get("path"), stack_of(variable)
    encoded_name = encoding.get("tensor", "") if record is None else record.name
    name = flat_name(path, leaf, encoded_name if stated is None else "")
    if stated is None or ".".join(stated) != name or "tensor" not in encoding:
        return name
    tensor: str = encoding["tensor"]
    role = encoding.get("part")
    return tensor if role is None else tensor + stated[-1][stated[-1].rindex(f":{role}") :]


def rebuild(obj: xr.Dataset | xr.DataTree, flat: Flat) -> Any:
    """Return an object of the same kind and attributes with other variables."""
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


class _TensorListing(NamedTuple):
    """All tensors of an open object, and the stacks that some are in."""

    rows: list[Row]
    homes: dict[str, str]  # the variables of stacked tensors, by name of the tensor
    members: dict[str, StackMembers]  # by name of the variable
    shapes: dict[tuple[Any, ...], tuple[int, ...]]  # by dimensions


class DescribedTensors(NamedTuple):
    """Descriptions of the tensors of a result, without its arrays."""

    structure: Structure
    #: Owners of the bytes of tied tensors.
    shared: dict[str, str]
    #: Dimension of the steps of a training run. Names begin with it and the step.
    run: str | None = None
    #: Code that other programs import or run when they load the file.
    risks: tuple[CodeFinding, ...] = ()
    #: Number of tensors in the file if a selection matches none of them.
    unselected: int = 0

    @property
    def of_one_step(self) -> DescribedTensors:
        """The tensors of a run by their names without steps."""
        if self.run is None:
            return self
        described = [self.structure.described(name) for name in self.structure]
        plain = [d._replace(name=split_step(d.name, self.run)[1]) for d in described]
        return DescribedTensors(Structure(plain, self.structure.facts), {})


class OpenTensors:
    """The tensors of an open object by name, including stacked tensors and nodes of a tree."""

    #: The description of the file, if nothing but the file is open.
    index: Index | None = None

    def __init__(self, obj: xr.Dataset | xr.DataTree | xr.DataArray) -> None:
        self._obj = as_dataset_of_one(obj) if isinstance(obj, xr.DataArray) else obj

    @property
    def obj(self) -> xr.Dataset | xr.DataTree:
        """The Dataset or tree."""
        return self._obj

    @property
    def source(self) -> str:
        """Name of the file, also of a single step of a run; empty if it is unknown."""
        source = self._root.encoding.get("source", "")
        if marks_of_run(self._root.encoding) and not isinstance(self._obj, xr.DataTree):
            variables = self._obj.variables
            dim = run_dim({name: variables[name] for name in self._obj.coords})
            if dim is not None and not variables[dim].dims:
                step = variables[dim].values.item()
                source = variables[dim].encoding["steps"].get(step, source)
        return source if isinstance(source, str) else str(source)

    @property
    def attrs(self) -> Mapping[Any, Any]:
        """Attributes of the checkpoint."""
        return self._root.attrs

    def read_attrs(self) -> Mapping[Any, Any]:
        """Return the attributes of the checkpoint with lists that can be read."""
        return self.attrs

    def origins(self, most: int) -> list[str]:
        """Return the files that the first variables are computed from, while they are lazy."""
        arrays = [data_of(variable) for variable in islice(self.variables.values(), most)]
        return list(dict.fromkeys(chain.from_iterable(map(checkpoints_in, arrays))))

    @property
    def merged(self) -> tuple[str, ...]:
        """Files of the adapters and updates that were merged."""
        merged: tuple[str, ...] = self._root.encoding.get("merged", ())
        return merged

    @property
    def encoding(self) -> Mapping[Any, Any]:
        """The encoding of the checkpoint."""
        return self._root.encoding

    @property
    def run(self) -> str | None:
        """Dimension of the steps of a training run; None for other objects."""
        dim = None if isinstance(self._obj, xr.DataTree) else run_dim(self.coords)
        return dim if dim in self._obj.dims else None

    @property
    def format(self) -> str | None:
        """Name of the format of the file; None in memory and after arithmetic."""
        stated: str | None = self._root.encoding.get("format")
        return stated

    @property
    def variable_names(self) -> Collection[Any]:
        """Names of the variables; a stack of tensors is a single variable."""
        return self.variables

    @cached_property
    def variables(self) -> dict[Any, xr.Variable]:
        """The data variables by flat name, with the records of stacks restored."""
        flat, indexes, of_run = self._flat, self._indexes, marks_of_run(self._root.encoding)
        coords = self.coords.items()
        is_replaced = any(
            coord.dims == (name,) and not is_made_by_stacking(coord) for name, coord in coords
        )
        if not (of_run or is_replaced or any(is_made_by_stacking(coord) for _, coord in coords)):
            return flat.variables
        variables = {}
        for name, variable in flat.variables.items():
            sources = stacks_in(data_of(variable)) if is_replaced else []
            of_node = indexes[flat.nodes[name]]
            variables[name] = remember_stack(name, variable, of_node, of_run, sources)
        return variables

    @cached_property
    def coords(self) -> dict[Any, xr.Variable]:
        """The coordinates of all nodes."""
        return {name: v for coords in self._flat.coords.values() for name, v in coords.items()}

    @property
    def common_coords(self) -> dict[Any, xr.Variable]:
        """The coordinates, without indexes that nodes of a tree give different values."""
        coords = self.coords
        if not (coords and isinstance(self.obj, xr.DataTree)):
            return coords
        nodes = self._flat.coords.values()
        different = {
            name
            for name, coord in coords.items()
            if coord.dims == (name,)
            and any(name in node and not coord.equals(node[name]) for node in nodes)
        }
        return {name: coord for name, coord in coords.items() if name not in different}

    def stored(self, name: Any) -> LazyArray | None:
        """Return the array in the file that a variable represents; None for a computed variable."""
        return stored_array(self.variables[name])

    def is_stacked(self, name: Any) -> bool:
        """Return whether a variable is a stack of tensors, or one tensor of a stack."""
        return stack_of(self.variables[name]) is not None

    def unstacked(self) -> dict[Any, xr.Variable]:
        """Return a variable for each tensor, in the order of the file."""
        encoding = self.obj.encoding
        order = encoding.get("file_order", encoding.get("flat_order", ()))
        return unstacked_variables(self.variables, self.indexes_of, order)

    def unnumbered(self) -> list[str]:
        """Return the variables along stacked dimensions other than stacks of tensors."""
        dims = {name for name, coord in self.coords.items() if is_made_by_stacking(coord)}
        variables = self.variables.items() if dims else ()
        return [str(n) for n, v in variables if stack_of(v) is None and dims.intersection(v.dims)]

    def stacked_dims(self) -> dict[str, xr.Variable | None]:
        """Return the coordinates of the dimensions that stacking made, without those of steps."""
        coords: dict[str, xr.Variable | None] = {}
        for name, variable in self.variables.items():
            record = stack_of(variable)
            for dim in () if record is None else record.dims:
                if record is not None and dim != record.run and dim not in coords:
                    coords[dim] = self.indexes_of(name).get(dim)
        return coords

    def coord_tensors(self, dims: Collection[Any]) -> dict[str, xr.Variable]:
        """Return coordinates by tensor name; if stacking made them, only indexes along `dims`.

        Numbers that describe a step, or that xarray gives a quantile, are left out.
        """
        tensors: dict[str, xr.Variable] = {}
        runs = {record.run for record in marks_of_run(self._root.encoding).values()}
        stacked = set(self.stacked_dims())
        for path, coords in self._flat.coords.items():
            for name, coord in coords.items():
                is_made = is_made_by_stacking(coord) or name in runs or name in stacked
                if is_made and (coord.dims != (name,) or name not in dims):
                    continue
                if not coord.dims and "tensor" not in coord.encoding and (runs or name == _LEVEL):
                    continue
                is_tree = isinstance(self.obj, xr.DataTree)
                full = tensor_name(path, str(name), coord) if is_tree else str(name)
                tensors.setdefault(full, coord)
        return tensors

    @property
    def _root(self) -> xr.Dataset | xr.DataTree:
        return self.obj.root if isinstance(self.obj, xr.DataTree) else self.obj

    @cached_property
    def _flat(self) -> Flat:
        return flatten(self.obj)

    @cached_property
    def _indexes(self) -> dict[str, dict[Any, xr.Variable]]:
        return {path: self._flat.indexes(path) for path in self._flat.coords}

    # --- one by one ---------------------------------------------------------------------------

    @cached_property
    def _listing(self) -> _TensorListing:
        listing = _TensorListing([], {}, {}, {})
        with paused_collector():
            listing.rows.extend(self._list_rows(listing))
        return listing

    @cached_property
    def rows(self) -> list[Row]:
        """One row of metadata for each tensor, in file order if that is known."""
        with paused_collector():
            rows = self._listing.rows
            if shared := self.shared:
                rows = list(tied(rows, shared))
        flat_order = self.obj.encoding.get("flat_order", ())
        order = {name: position for position, name in enumerate(flat_order)}
        return sorted(rows, key=lambda row: order.get(row.name, len(order))) if order else rows

    @property
    def dims(self) -> dict[str, int]:
        """The dimensions of all variables with their sizes; the last size if they differ."""
        return {
            str(dim): size
            for dims, shape in self._listing.shapes.items()
            for dim, size in zip(dims, shape, strict=True)
        }

    def unreadable(self) -> list[Cause]:
        """Return why variables cannot be read, and which."""
        variables = self._flat.variables.items()
        problems = [
            (str(n), v.encoding["problem"]) for n, v in variables if "problem" in v.encoding
        ]
        return causes_of(problems)

    @property
    def stacks(self) -> list[StackedNames]:
        """The stacks, with their remaining dimensions."""
        stacks = self._listing.members.values()
        return [StackedNames(stack.record.template, stack.dims, stack.along) for stack in stacks]

    @property
    def stacked(self) -> Collection[str]:
        """Names of the tensors that are stacked."""
        return self._listing.homes

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors, including tensors whose parts are variables."""
        names = {row.name for row in self.rows}
        variables = self._flat.variables
        parts = {n: f":{v.encoding['part']}" for n, v in variables.items() if "part" in v.encoding}
        names.update(str(name).removesuffix(suffix) for name, suffix in parts.items())
        for name, home in self._listing.homes.items():
            names.add(name.removesuffix(parts.get(home, "")))
        return frozenset(names)

    def select(self, names: TensorFilter | None) -> list[str]:
        """Return the names of tensors that match, or whose stacked variable matches."""
        homes = self._listing.homes
        return select_members({row.name: homes.get(row.name, row.name) for row in self.rows}, names)

    def variables_of(self, names: Iterable[str]) -> set[str]:
        """Return the names of the variables of these tensors."""
        return {self._listing.homes.get(name, name) for name in names}

    @property
    def shared(self) -> dict[str, str]:
        """Owners of the bytes of tied tensors, by name, if the object has both."""
        stated: dict[str, tuple[str, str]] = {}
        for name, variable in self._flat.variables.items():
            encoding = variable.encoding
            if (shares := encoding.get("shares")) is not None:
                owners = shares if isinstance(shares, dict) else {str(name): shares}
                source = encoding.get("source", "")
                stated |= {tied: (source, owner) for tied, owner in owners.items()}
        if not stated:
            return {}
        # The file states the owner, which may have another name now, or another array its name.
        present: dict[tuple[str, str], str] = {}
        for name, variable in self._flat.variables.items():
            encoding = variable.encoding
            if "tensor" in encoding and "part" not in encoding:
                stored = (encoding.get("source", ""), encoding["tensor"])
                if stored not in present or stored[1] == name:
                    present[stored] = str(name)
        names, stacked = {row.name for row in self._listing.rows}, self.stacked
        pairs = {
            tied: owner[1] if owner[1] in stacked else present.get(owner)
            for tied, owner in stated.items()
        }
        return {
            tied: owner
            for tied, owner in pairs.items()
            if owner is not None and owner != tied and {tied, owner} <= names
        }

    @property
    def origin(self) -> DescribedTensors:
        """Descriptions of the tensors."""
        unselected = self._root.encoding.get("unselected", 0)
        return DescribedTensors(self.structure, self.shared, self.run, self.risks, unselected)

    @property
    def risks(self) -> tuple[CodeFinding, ...]:
        """Code that other programs import or run when they load the file."""
        risks: tuple[CodeFinding, ...] = self._root.encoding.get("risks", ())
        return risks

    @cached_property
    def structure(self) -> Structure:
        """Places of the tensors in their model."""
        file_format = str(self._root.encoding.get("format", ""))
        return Structure(self.rows, model_facts(self.attrs, format=file_format))

    @property
    def only(self) -> str:
        """Name of the only tensor."""
        if len(self.rows) != 1:
            raise ValueError(f"there are {len(self.rows)} tensors: pass the name of a tensor")
        return self.rows[0].name

    def variable(self, name: str) -> xr.Variable:
        """Return a tensor as a separate variable; raise `KeyError` for an unknown name."""
        listing = self._listing
        if name in listing.homes:
            return listing.members[listing.homes[name]].variable(name)
        if name in self._flat.variables:
            return self._flat.variables[name]
        raise KeyError(no_tensor(name, [row.name for row in self.rows]))

    def __getitem__(self, name: str) -> xr.DataArray:
        variable = self.variable(name)
        indexes = self.indexes_of(self._listing.homes.get(name, name))
        coords = {dim: indexes[dim] for dim in variable.dims if dim in indexes}
        return xr.DataArray(variable, coords, name=name)

    def holds(self, name: str) -> bool:
        """Return whether the object still has the same tensor, after changes in place."""
        home = self._listing.homes.get(name, name)
        if home not in self._flat.variables:
            return False
        node, obj = self._flat.nodes[home], self.obj
        now = obj.variables if isinstance(obj, xr.Dataset) else obj.root[node].variables
        array = data_of(self._flat.variables[home])
        is_present = any(data_of(variable) is array for variable in now.values())
        indexes = self._indexes[node].items()
        return is_present and all(now[dim] is index for dim, index in indexes if dim in now)

    def code(self, name: str) -> str:
        """Return the expression for a tensor of an object called ``ds`` or ``dt``."""
        listing = self._listing
        home = variable = listing.homes.get(name, name)
        obj, place = "ds", {}
        if name in listing.homes:
            place = listing.members[home].place(name)
        if isinstance(self.obj, xr.DataTree):
            variable, obj = self._path(home), "dt"
        index = [
            f"{dim}={number}" if dim.isidentifier() else f"**{{{_literal(dim)}: {number}}}"
            for dim, number in place.items()
        ]
        selection = f".sel({', '.join(index)})" if index else ""
        return f"{obj}[{_literal(variable)}]{selection}"

    def _list_rows(self, listing: _TensorListing) -> Iterator[Row]:
        """List the tensors of all variables, in a loop that may run 100,000 times."""
        dtype_names: dict[Any, str] = {}
        for name, variable in self.variables.items():
            encoding = variable.encoding
            # Properties of the variable take ten times as long, here and below.
            shape = listing.shapes[variable.dims] = data_of(variable).shape
            is_stated = "stored_dtype" in encoding
            dtype: Any = encoding["stored_dtype"] if is_stated else variable.dtype
            dtype = encoding.get("scheme", dtype)
            nbytes: int = encoding["nbytes"] if "nbytes" in encoding else variable.nbytes  # noqa: SIM401
            original = encoding.get("original_shape", shape)
            is_stacked = stack_of(variable) is not None
            if original != shape and not is_stacked:  # a selection, or several in one
                nbytes = _part_of(nbytes, shape, original)
            if dtype not in dtype_names:
                dtype_names[dtype] = str(dtype)
            # Decide the usual case here, for speed.
            is_plain = (
                encoding.get("layout") in {None, "dense"}
                and encoding.get("stored_compression") is None
                and "parts" not in encoding
            )
            storage = "" if is_plain else _storage(encoding)
            declared = encoding.get("declared")
            if declared is None and ("layout" not in encoding or variable.attrs):
                declared = facts_kept(variable.attrs, variable.dims)
            row = Row(str(name), dtype_names[dtype], shape, nbytes, storage, declared)
            if is_stacked:
                yield from self._list_members(row, variable, listing)
            else:
                yield row

    def _list_members(
        self, row: Row, variable: xr.Variable, listing: _TensorListing
    ) -> Iterator[Row]:
        """Add the members of a stack to the listing, and yield their rows."""
        try:
            members = StackMembers(row.name, variable, self.indexes_of(row.name))
        except ValueError:  # the coordinates do not identify the members
            yield row
            return
        record = members.record
        sizes = zip(variable.dims, variable.shape, strict=True)
        shape = tuple([size for dim, size in sizes if dim not in record.dims])
        count = len(record.members if record.present is None else record.present)
        nbytes = row.nbytes // max(1, count)
        if "nbytes" not in variable.encoding:  # a computed variable
            nbytes = variable.dtype.itemsize * prod(shape)
        original = variable.encoding.get("original_shape")
        if original is not None and original[len(record.dims) :] != shape:
            nbytes = _part_of(nbytes, shape, original[len(record.dims) :])
        listing.members[row.name] = members
        for member in members.numbers:
            # A single step of a run has the name of its variable.
            is_other = member != row.name and member in self._flat.variables
            if member not in listing.homes and not is_other:
                listing.homes[member] = row.name
                yield Row(member, row.dtype, shape, nbytes, row.storage, row.declared)

    def indexes_of(self, name: Any) -> Mapping[Any, xr.Variable]:
        """Return the index coordinates of a variable."""
        return self._indexes[self._flat.nodes[name]]

    def _path(self, name: str) -> str:
        """Return the path of a variable in the tree."""
        node = self._flat.nodes[name]
        leaves = self.obj.root[node].variables if node != "/" else self.obj.root.variables
        leaf = next(leaf for leaf, v in leaves.items() if tensor_name(node, str(leaf), v) == name)
        return f"{node.rstrip('/')}/{leaf}"


class FileTensors(OpenTensors):
    """The tensors of a file, without a Dataset until names of dimensions are needed."""

    def __init__(self, source: Source, index: Index, options: OpenOptions) -> None:
        self.index: Index = index
        self._source, self._options = source, options
        # The file of a path is not left open after the call; a later read opens it again.
        weakref.finalize(self, source.close)
        has_coords = index.arrangement.coords
        self._listed = {
            listed.name: listed
            for listed in list_arrays(source, index, options).arrays
            if listed.role is not None or listed.name not in has_coords
        }

    @property
    def shared(self) -> dict[str, str]:
        """Owners of the bytes of tied tensors, by name, as the file has them."""
        return self.index.shared

    @cached_property
    def obj(self) -> xr.Dataset:
        """The Dataset of the file."""
        with paused_collector():
            return make_dataset(self._source, self.index, self._options)

    @property
    def source(self) -> str:
        """Name of the file."""
        return self._source.name

    @property
    def format(self) -> str:
        """Name of the format of the file."""
        return self.index.format

    @property
    def attrs(self) -> Mapping[Any, Any]:
        """Attributes of the file."""
        return self.index.attrs

    def read_attrs(self) -> Mapping[Any, Any]:
        """Return the attributes of the file with lists that can be read."""
        return read_later(self.index.attrs, sources_of(self._source, self.index.shards))

    @property
    def origin(self) -> DescribedTensors:
        """Descriptions of the tensors, without the variables of the Dataset."""
        return DescribedTensors(self.structure, self.index.shared, risks=self.risks)

    @property
    def risks(self) -> tuple[CodeFinding, ...]:
        """Code that other programs import or run when they load the file."""
        return self.index.risks

    @cached_property
    def structure(self) -> Structure:
        """Places of the tensors of the file in their model."""
        return structure_of(self.index)

    @property
    def variable_names(self) -> Collection[Any]:
        """Names of the variables of the Dataset."""
        return self._listed

    @cached_property
    def coords(self) -> dict[Any, xr.Variable]:
        """The coordinates of the Dataset."""
        return super().coords if self.index.arrangement.coords else {}

    def stored(self, name: Any) -> LazyArray | None:
        """Return the array of a variable in the file."""
        return self._listed[name].lazy

    def is_stacked(self, name: Any) -> bool:
        """Return whether a variable is a stack of tensors."""
        return self._listed[name].stacked is not None


def no_tensor(name: str, known: Collection[str]) -> str:
    """Return the message for an unknown name, with similar names or a call to use instead."""
    is_glob = any(mark in str(name) for mark in "*?[")
    if is_glob and select(known, name):
        return f"{name!r} is a glob, not a name: ds.ckpt.find({name!r}) chooses what matches"
    if any(tensor.startswith(f"{name}.") for tensor in known):
        return f"{name!r} is a module, not a tensor: ds.ckpt.find('{name}.*') chooses its tensors"
    return f"no tensor {name!r} among {len(known)}{suggest_names(known, [str(name)])}"


def find(
    obj: Obj,
    tensors: TensorFilter | None = None,
    *,
    exclude: TensorFilter | None = None,
    only: str | None = None,
    dtype: DtypeFilter | None = None,
    min_bytes: int | str = 0,
) -> Obj:
    """Select variables by name, element type and size, in time proportional to their number."""
    flat = flatten(obj)
    requested: Collection[Any] = dtype if isinstance(dtype, list | tuple | set) else [dtype]
    dtypes = {_dtype(dtype) for dtype in requested if dtype is not None}
    min_nbytes = parse_bytes(min_bytes)
    keys = {str(name): name for name in flat.variables}
    chosen = combined(tensors, exclude)
    matches = select(keys, chosen)
    if not matches and keys and chosen is not None:
        hint = suggest_filters(keys, chosen)
        warn(f"{chosen!r} matches none of the {len(keys)} variables{hint}")
    warn_of_exclusions(keys, chosen)
    if only is not None:
        opened = OpenTensors(obj)
        of_model = combined(None, None, only, lambda: [opened.structure])
        present = opened.variables_of(select([row.name for row in opened.rows], of_model))
        matches = [name for name in matches if name in present]
    selected = {}
    for name in matches:
        variable = flat.variables[keys[name]]
        encoding = variable.encoding
        has_dtype = dtype is None or encoding.get("stored_dtype", variable.dtype) in dtypes
        if has_dtype and encoding.get("nbytes", variable.nbytes) >= min_nbytes:
            selected[keys[name]] = variable
    rebuilt: Obj = rebuild(obj, Flat(selected, {}, flat.coords))
    return rebuilt


def _dtype(dtype: Any) -> np.dtype[Any] | str:
    """Return an element type as encodings store it, or any other type that numpy knows."""
    if str(dtype).lower() in BLOCK_TYPES:
        return str(dtype).lower()
    try:
        return stored_dtype(element_type_of(dtype))
    except ValueError as error:
        try:
            numpy_dtype: np.dtype[Any] = np.dtype(dtype)
        except TypeError:
            raise TypeError(str(error)) from None
        return numpy_dtype


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
    used = {n: v for n, v in coords.items() if n not in variables and dims.issuperset(v.dims)}
    new = xr.Dataset(variables, used, old.attrs)
    new.encoding = dict(old.encoding)
    return new


def stored_array(variable: xr.Variable) -> LazyArray | None:
    """Return the array in the file that a variable represents, in any chunks; None for others."""
    # `chunks` and `data` would take as long as the rest, for thousands of small tensors.
    array = data_of(variable)
    if not is_dask_array(array):
        return None
    lazy = lazy_of(array)
    if lazy is not None:
        return lazy
    layers = array.dask.layers.items()
    layers = [layer for name, layer in layers if not name.startswith("rechunk-")]
    if len(layers) == 1 and isinstance(layers[0], TensorLayer):
        lazy = layers[0].lazy
        return lazy if lazy.shape == array.shape else None
    return None


def _part_of(nbytes: int, shape: tuple[int, ...], original: tuple[int, ...]) -> int:
    """Return the stored size of the elements of a shape, in proportion to the whole tensor."""
    return -(-nbytes * prod(shape) // max(1, prod(original)))


def _storage(encoding: Mapping[Any, Any]) -> str:
    if "part" in encoding:
        return storage_words("dense", [encoding.get("stored_compression")])
    parts = encoding.get("parts", {"data": encoding}).values()
    layout = "dense" if "scheme" in encoding else encoding.get("layout", "dense")
    return storage_words(layout, [part.get("stored_compression") for part in parts])


def _literal(text: str) -> str:
    plain = text.isprintable() and not set(text) & {'"', "\\"}
    return f'"{text}"' if plain else repr(text)


def split_step(name: str, run: str | None) -> tuple[str, str]:
    """Return the step of a tensor of a run, and its name without it; an empty one otherwise."""
    dim, *parts = name.split(".", 2)
    return (parts[0], parts[1]) if dim == run and len(parts) > 1 else ("", name)


def run_dim(coords: Mapping[Hashable, xr.Variable]) -> str | None:
    """Return the dimension of the steps in a Dataset of `open_steps`; None for other Datasets."""
    dims = (str(name) for name, coord in coords.items() if coord.encoding.get("steps"))
    return next(dims, None)
