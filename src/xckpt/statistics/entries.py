"""What there is to describe: the variables of an object, and the tensors they are made of.

Results are laid out alike, with a dimension for what was found.
"""

from __future__ import annotations

import os
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from itertools import compress
from math import prod
from operator import getitem
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from uuid import uuid4

import dask.array as da
import numpy as np
import xarray as xr

from xckpt.arrays.graph import TensorGraph, TensorLayer
from xckpt.arrays.lazy import UnreadableArray
from xckpt.arrays.stacked import StackedArray
from xckpt.datasets.listing import Listed, list_arrays
from xckpt.datasets.mappings import as_dataset
from xckpt.datasets.options import OpenOptions
from xckpt.datasets.stack_records import (
    indices_left,
    naming_encoding,
    remember_stack,
    stack_of,
)
from xckpt.datasets.variables import LazyVariable
from xckpt.errors import locating, shown, some, warn
from xckpt.index import Index, paused_collector
from xckpt.interrupts import uninterrupted
from xckpt.labels import flat_name
from xckpt.labels.filters import suggest_names
from xckpt.labels.numbering import parse_name
from xckpt.registration import register_formatter
from xckpt.statistics.kinds import require_numbers
from xckpt.statistics.readers import ArrayReader, ChunkedTensor, reader_of
from xckpt.statistics.rows import LONGEST_ROW
from xckpt.storage import is_remote
from xckpt.storage.limits import require_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence

    from xckpt.arrays.lazy import LazyArray
    from xckpt.opening import OpenPath
    from xckpt.statistics.readers import Reader
    from xckpt.storage import Source
    from xckpt.typing import Dataset

    Describable = OpenPath | Index | xr.Dataset | xr.DataArray | xr.DataTree | Mapping[str, Any]

Array = np.ndarray[Any, np.dtype[Any]]

# Of the statistics of one row.
_ROW_NBYTES = 256


class Described(NamedTuple):
    """A variable, and the tensors that are described one by one."""

    #: Of the variable in the result.
    name: Hashable
    #: Those that stay: along which tensors are stacked; and the extent along them.
    dims: tuple[Hashable, ...]
    shape: tuple[int, ...]
    #: The tensors; the last dimension varies fastest. None where short rows are described together.
    readers: tuple[Reader, ...]
    #: What names the tensors, for the variable of the result.
    encoding: dict[str, Any]
    subject: Subject
    #: Where a stack has no tensor along these dimensions, and how many elements elsewhere stand
    #: for absent ones; None where all are there.
    gone: Array | None = None
    absent: Array | None = None

    @property
    def variable(self) -> xr.Variable:
        """What is described, with names of its dimensions."""
        return self.subject.variables[self.name]


class Subject:
    """All that is described: data variables and coordinates, and where they were read from."""

    #: What whole tensors are taken from, by name.
    tensors: Mapping[Hashable, xr.Variable | Listed]

    def __init__(
        self,
        variables: Mapping[Hashable, xr.Variable],
        coords: Mapping[Hashable, xr.Variable],
        source: str,
        attrs: Mapping[Any, Any] | None = None,
    ) -> None:
        self.variables = self.tensors = variables
        self.coords = coords
        self.source = source
        #: Attributes of the checkpoint.
        self.attrs: Mapping[Any, Any] = attrs or {}

    def entries(self, dims: Collection[Hashable] | None = None) -> list[Described]:
        """List variables of numbers with their tensors; others are left out with a warning."""
        chosen = self.tensors
        if dims is not None:
            chosen = {n: v for n, v in self.variables.items() if not set(dims).isdisjoint(v.dims)}
            self._require_known(dims)
        found = []
        left_out: dict[str, list[str]] = defaultdict(list)
        for name, each in chosen.items():
            try:
                entry = self._entry(name, each, dims)
                if entry.gone is None or not entry.gone.all():
                    found.append(entry)
            except TypeError as error:
                left_out[_problem(each) or str(error)].append(str(name))
        for reason, names in left_out.items():
            text = f"{some(names)} {'has' if len(names) == 1 else 'have'} no statistics: {reason}"
            warn(text)
        return found

    def _require_known(self, dims: Collection[Hashable]) -> None:
        """Raise an error if no variable has one of some dimensions."""
        every = {dim for v in self.variables.values() for dim in v.dims}
        unknown = set(dims) - every
        if unknown:
            asked = str(min(unknown, key=str))
            hint = suggest_names(sorted(map(str, every)), asked)
            if not hint and any(asked in parse_name(str(name)).modules for name in self.variables):
                hint = "; with stack=True, or after ds.ckpt.stack(), numbered modules have one"
            raise ValueError(f"no variable has the dimension {shown(asked)}{hint}")

    def _entry(
        self, name: Hashable, each: xr.Variable | Listed, reduced: Collection[Hashable] | None
    ) -> Described:
        encoding = _naming(each)
        record = None if isinstance(each, Listed) else stack_of(each)
        lazy = each.lazy if isinstance(each, Listed) else _lazy_array(each)
        readers: tuple[Reader, ...]
        if lazy is not None and reduced is None and record is None:
            readers = (reader_of(lazy, _flat_name(name, encoding)),)
            return Described(name, (), (), readers, encoding, self)
        variable = self.variables[name]
        if reduced is None:
            stacked: tuple[Hashable, ...] = () if record is None else record.dims
            dims = tuple(dim for dim in variable.dims if dim in stacked)
        else:
            dims = tuple(dim for dim in variable.dims if dim not in reduced)
            with locating(tensor=str(name)):
                rows = prod(_shape(variable, dims))
                require_memory(rows * _ROW_NBYTES, "Describe fewer rows of it at once")
        shape = _shape(variable, dims)
        gone, absent = _absent(variable, dims, self.coords)
        inner = [variable.sizes[dim] for dim in variable.dims if dim not in dims]
        if reduced is not None and prod(inner) <= LONGEST_ROW:
            require_numbers(variable.dtype)
            return Described(name, dims, shape, (), encoding, self, gone, absent)
        if lazy is not None and not dims:
            readers = (reader_of(lazy, _flat_name(name, encoding)),)
        elif isinstance(lazy, StackedArray) and dims == variable.dims[: len(lazy.grid)]:
            part = _part_suffix(encoding)
            members = lazy.members if gone is None else compress(lazy.members, ~gone.ravel())
            readers = tuple(reader_of(m, m.name + part) for m in members)
        else:
            names = member_names(name, variable, dims, self.coords)
            arrays = _split(variable.transpose(*dims, ...), len(dims))
            pairs = zip(arrays, names, strict=True)
            there = pairs if gone is None else compress(pairs, ~gone.ravel())
            readers = tuple(_reader(array, str(each)) for array, each in there)
        return Described(name, dims, shape, readers, encoding, self, gone, absent)


class _FileSubject(Subject):
    """A file, of which a Dataset is made only where names of dimensions are asked for."""

    def __init__(self, source: Source, index: Index, options: OpenOptions) -> None:
        self.source = source.name
        self.attrs = index.attrs
        self._opened = source, index, options
        self._coords = index.arrangement.coords
        listing = list_arrays(source, index, options)
        self.tensors = {
            each.name: each
            for each in listing.arrays
            if each.role is not None or each.name not in self._coords
        }

    @cached_property
    def _dataset(self) -> Subject:
        from xckpt.datasets.making import make_dataset

        with paused_collector():
            return contents_of(make_dataset(*self._opened))

    @property
    def variables(self) -> Mapping[Hashable, xr.Variable]:  # type: ignore[override]  # not set
        """All that is described, as variables of the Dataset."""
        return self._dataset.variables

    @property
    def coords(self) -> Mapping[Hashable, xr.Variable]:  # type: ignore[override]
        """Coordinates of the Dataset."""
        return self._dataset.coords if self._coords else {}


def member_names(
    name: Hashable,
    variable: xr.Variable,
    dims: tuple[Hashable, ...],
    coords: Mapping[Hashable, xr.Variable],
) -> list[str | None]:
    """Name the tensors along stacked dimensions, some of which may have been cut.

    None is in the place of those that are absent.
    """
    record = stack_of(variable)
    if record is None and not dims:
        return [_flat_name(name, variable.encoding)]
    if record is not None and set(dims) <= set(record.dims):
        indices = indices_left(record, coords)
        if prod(map(len, indices)) == prod(variable.sizes[dim] for dim in dims):
            suffix = _part_suffix(variable.encoding)
            return [n and n.removesuffix(record.suffix) + suffix for n in record.names(indices)]
    positions = np.ndindex(*(variable.sizes[dim] for dim in dims))
    return [f"{name}[{', '.join(map(str, position))}]" for position in positions]


def _absent(
    variable: xr.Variable, dims: tuple[Hashable, ...], coords: Mapping[Hashable, xr.Variable]
) -> tuple[Array | None, Array | None]:
    """Find out what of a stack no tensor is in the file for: `Described.gone` and `absent`."""
    record = stack_of(variable)
    if record is None or record.present is None:
        return None, None
    left = indices_left(record, coords)
    along = tuple([dim for dim in record.dims if dim in variable.dims])
    shape = _shape(variable, along)
    mask = np.array([name is None for name in record.names(left)], bool)
    if mask.size != prod(shape) or not mask.any():
        return None, None
    empty = xr.Variable(along, mask.reshape(shape))
    reduced = [dim for dim in along if dim not in dims]
    inner = prod(n for dim, n in variable.sizes.items() if dim not in {*along, *dims})
    sizes = {dim: variable.sizes[dim] for dim in dims}
    gone = empty.all(reduced).set_dims(sizes).to_numpy()
    absent = (empty.sum(reduced) * inner).set_dims(sizes).to_numpy()
    return gone, np.where(gone, 0, absent)


def laid(rows: Array, shape: tuple[int, ...], gone: Array | None) -> Array:
    """Lay out what was found of each tensor; where there is none, NaN or zeros."""
    if gone is not None:
        found = rows
        fill = np.nan if rows.dtype.kind == "f" else 0
        rows = np.full((gone.size, rows.shape[1]), fill, rows.dtype)
        rows[~gone.ravel()] = found
    return np.ascontiguousarray(rows.T).reshape(-1, *shape)


def contents_of(obj: Any, storage_options: dict[str, Any] | None = None) -> Subject:
    """Find what there is to describe."""
    return contents_of_all([obj], storage_options)[0]


def contents_of_all(
    objects: Sequence[Any], storage_options: dict[str, Any] | None = None
) -> list[Subject]:
    """Find what there is to describe of several objects, some of which may be open."""
    objects = [as_dataset(obj) for obj in objects]
    if storage_options is not None and all(map(_is_open, objects)):
        text = "storage_options are for a path or URL: pass them to xr.open_dataset"
        raise TypeError(text)
    if len(objects) == 1 or not any(map(is_remote, objects)):
        return [_contents_of(obj, storage_options) for obj in objects]
    # While one of them waits for an answer, another one is opened.
    with ThreadPoolExecutor(len(objects), "xckpt-open") as threads:
        return list(threads.map(partial(_contents_of, storage_options=storage_options), objects))


def _is_open(obj: Any) -> bool:
    return isinstance(obj, xr.Dataset | xr.DataArray | xr.DataTree)


def _contents_of(obj: Any, storage_options: dict[str, Any] | None) -> Subject:
    if isinstance(obj, Subject):
        return obj
    if isinstance(obj, xr.Dataset):
        coords = {name: obj.variables[name] for name in obj.coords}
        variables = {
            n: remember_stack(n, v, coords) for n, v in obj.variables.items() if n not in coords
        }
        return Subject(variables, coords, str(obj.encoding.get("source", "")), obj.attrs)
    if isinstance(obj, xr.DataArray):
        coords = {name: coord.variable for name, coord in obj.coords.items()}
        name = "data" if obj.name is None else obj.name
        return Subject(
            {name: remember_stack(name, obj.variable, coords)},
            coords,
            str(obj.encoding.get("source", "")),
        )
    if isinstance(obj, xr.DataTree):
        return _tree_contents(obj)
    if isinstance(obj, Index | str | bytes | os.PathLike | list | tuple) or hasattr(obj, "read"):
        return _file_contents(obj, storage_options)
    if callable(getattr(obj, "state_dict", None)):
        raise TypeError(f"a {type(obj).__name__} is not a mapping of arrays: pass its state_dict()")
    raise TypeError(
        "expected a path, a mapping of names to arrays, an Index, a Dataset, a DataArray or a "
        f"DataTree, got {type(obj).__name__}"
    )


def _file_contents(obj: Any, storage_options: dict[str, Any] | None) -> Subject:
    with uninterrupted():
        from xckpt.opening import open_index

    path, format = (obj.source, obj.format) if isinstance(obj, Index) else (obj, None)
    # xarray would open it by a format, which is known when it is open.
    source, index = open_index(path, format, storage_options=storage_options)
    register_formatter()  # results by channel have a variable for each tensor
    with paused_collector():
        return _FileSubject(source, index, OpenOptions(storage_options=storage_options))


def _tree_contents(tree: xr.DataTree) -> Subject:
    variables: dict[Hashable, xr.Variable] = {}
    coords: dict[Hashable, xr.Variable] = {}
    for node in tree.subtree:
        inside = dict(node.coords)
        here = {name: coord.variable for name, coord in inside.items()}
        coords |= here
        for leaf, variable in node.variables.items():
            if leaf not in inside:
                path = f"{node.relative_to(tree)}/{leaf}".removeprefix("./")
                found = remember_stack(flat_name(node.path, str(leaf)), variable, here)
                name = _flat_name(path, found.encoding)
                variables[path if name in variables else name] = found
    return Subject(variables, coords, str(tree.root.encoding.get("source", "")), tree.root.attrs)


def _lazy_array(variable: xr.Variable) -> LazyArray | None:
    """Return the array in the file, if a variable is that and nothing was computed from it."""
    # `chunks` and `data` ask in general ways what kind of array it is: half of the time for
    # thousands of small tensors.
    array = variable._data  # noqa: SLF001
    if not isinstance(array, da.Array):
        return None
    graph = array.dask
    lazy: LazyArray
    if isinstance(graph, TensorGraph):
        lazy = graph._tensor[0]  # noqa: SLF001  our own
        return lazy
    # Another cut of the same values.
    layers = [layer for name, layer in graph.layers.items() if not name.startswith("rechunk-")]
    if len(layers) == 1 and isinstance(layers[0], TensorLayer):
        lazy = layers[0].lazy
        return lazy if lazy.shape == array.shape else None
    return None


def _problem(each: xr.Variable | Listed) -> str | None:
    """Return why the tensor of a variable, or the first one of a stack, cannot be read."""
    lazy = each.lazy if isinstance(each, Listed) else _lazy_array(each)
    if isinstance(lazy, StackedArray):
        lazy = lazy.first
    return lazy.problem.reason if isinstance(lazy, UnreadableArray) else None


def _reader(array: Any, name: str) -> Reader:
    reader: Reader = ChunkedTensor(array) if hasattr(array, "dask") else ArrayReader(array)
    reader.local = not hasattr(array, "dask")
    reader.name = name
    return reader


def _split(variable: xr.Variable, ndim: int) -> Iterator[Any]:
    """Return the array of a variable for each position along its first dimensions."""
    array = variable.data if variable.chunks is not None else _Values(variable)
    positions = np.ndindex(*variable.shape[:ndim])
    return (array[position] if position else array for position in positions)


class _Values:
    """The values of a variable, of which no more are loaded than are asked for."""

    def __init__(self, variable: xr.Variable) -> None:
        self.variable = variable
        self.shape, self.dtype = variable.shape, variable.dtype

    def __getitem__(self, key: tuple[Any, ...]) -> Any:
        part = self.variable[key]
        # Only whole members are asked for without a slice.
        if any(isinstance(each, slice) for each in key) or not part.ndim:
            return part.data
        return _Values(part)


def _shape(variable: xr.Variable, dims: tuple[Hashable, ...]) -> tuple[int, ...]:
    return tuple(variable.sizes[dim] for dim in dims)


def _naming(each: xr.Variable | Listed) -> dict[str, Any]:
    """Return the encoding that names the tensors of a variable."""
    if isinstance(each, Listed):
        named = {"tensor": each.tensor.name}
        return named if each.role is None else {**named, "part": each.role}
    return naming_encoding(each)


def _flat_name(name: Hashable, encoding: Mapping[Any, Any]) -> str:
    return f"{encoding['tensor']}{_part_suffix(encoding)}" if "tensor" in encoding else str(name)


def _part_suffix(encoding: Mapping[Any, Any]) -> str:
    return f":{encoding['part']}" if "part" in encoding else ""


# --- results -------------------------------------------------------------------------------------


def deferred(
    find_all: Callable[..., list[Any]], inputs: Any, shapes: Sequence[tuple[int, ...]]
) -> list[Any]:
    """Return dask arrays that all come from one call."""
    from dask._task_spec import DataNode, Task, TaskRef
    from dask.highlevelgraph import HighLevelGraph

    scan = f"xckpt-stats-{uuid4().hex}"
    # As data: dask would look for tasks in every argument, down to the last tensor.
    node = DataNode(f"{scan}-inputs", inputs)
    task = Task(scan, find_all, TaskRef(node.key))
    shared: dict[str, Any] = {scan: {scan: task, node.key: node}}
    arrays = []
    for number, shape in enumerate(shapes):
        name = f"{scan}-{number}"
        key = (name, *([0] * len(shape)))
        layer: dict[Any, Any] = {key: Task(key, getitem, TaskRef(scan), number)}
        graph = HighLevelGraph({**shared, name: layer}, {name: {scan}, scan: set()})
        chunks = tuple((size,) for size in shape)
        arrays.append(da.Array(graph, name, chunks, dtype=np.float64))
    return arrays


def laid_out(
    statistics: Sequence[str],
    entries: Sequence[Described],
    values: Sequence[Any],
    attrs: Sequence[dict[str, Any]],
    contents: Subject,
) -> Dataset:
    """Make the Dataset of results."""
    sizes: dict[Hashable, int] = {}
    variables: dict[Hashable, Any] = {}
    for entry, data, told in zip(entries, values, attrs, strict=True):
        dims: list[Hashable] = ["statistic"]
        for dim, size in zip(entry.dims, entry.shape, strict=True):
            # A name under which it has this size everywhere: nodes of a tree differ.
            name, number = dim, 0
            while sizes.setdefault(name, size) != size:
                number += 1
                name = f"{dim}_{number}"
            dims.append(name)
        variables[entry.name] = LazyVariable.of(tuple(dims), data, told or None, entry.encoding)
    coords: dict[Hashable, Any] = {"statistic": ("statistic", np.array(statistics, dtype=str))}
    if sizes:
        coords |= {
            name: coord
            for name, coord in contents.coords.items()
            if coord.dims and all(sizes.get(d) == n for d, n in coord.sizes.items())
        }
    result = _assembled(variables, coords)
    if contents.source:
        result.attrs = {"source": contents.source}
    # In a notebook xarray would take minutes to show the results of very many tensors.
    result.encoding["statistics"] = True
    return cast("Dataset", result)


def _assembled(variables: dict[Hashable, xr.Variable], coords: dict[Hashable, Any]) -> xr.Dataset:
    """Make a Dataset of variables that fit together."""
    by_dims = {variable.dims: name for name, variable in variables.items()}
    taken = {"statistic", *coords, *by_dims.values(), *(dim for dims in by_dims for dim in dims)}
    few = {name: variable for name, variable in variables.items() if name in taken}
    result = xr.Dataset(few, coords)
    # It copies and compares all variables twice: of what was kept, that would take the most time.
    rest = {name: v for name, v in result.variables.items() if name not in few}
    whole: xr.Dataset = result._replace({**variables, **rest})
    return whole
