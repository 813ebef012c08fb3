"""Datasets from an Index: the variables of all tensors, with coordinates and encoding."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import xarray as xr

from xckpt.arrays import LazyArray, read_later
from xckpt.arrays.graph import tensor_array
from xckpt.arrays.keys import Chunks, target_nbytes
from xckpt.datasets.listing import Listed, Listing, free_name, list_arrays
from xckpt.datasets.stack_records import (
    StackMarks,
    StackMember,
    StackRecord,
    marked_encoding,
    record_stack,
)
from xckpt.datasets.variables import LazyVariable, preferred_chunks, xarray_variable
from xckpt.elements import ELEMENT_TYPES, stored_dtype
from xckpt.identity import next_namespace
from xckpt.labels import AxisNamer, explicit_name
from xckpt.labels.grids import Stack, StackedAttrs, stack_attrs
from xckpt.storage.source import ShardedSource, sources_of
from xckpt.structure.dims import axes_of, dims_of, with_stated
from xckpt.upstream.xarray_trees import assemble_dataset

if TYPE_CHECKING:
    import dask.array as da

    from xckpt.arrays.stacked import MemberArrays
    from xckpt.datasets.options import OpenOptions
    from xckpt.index import Index, Part, Tensor
    from xckpt.storage import Source

    Axes = tuple[str | None, ...]

# Coordinates of up to this size in bytes are indexes.
_LARGEST_INDEX = 1 << 26
# Keys of the encoding that all members of a stack have in common.
_COMMON = ("layout", "source", "stored_dtype", "stored_order", "part", "scheme", "declared")


def make_dataset(source: Source, index: Index, options: OpenOptions) -> xr.Dataset:
    """Make the flat Dataset of a checkpoint."""
    listing = list_arrays(source, index, options)
    arrays = {array.name: array for array in listing.arrays}
    groups = GroupMaker.of(source, index, options, listing, dims_of, reserved=arrays.keys())
    names, suggested = groups.names_below(groups.top, arrays), groups.suggested
    stacks = {array.name: array.lazy for array in listing.arrays if array.stacked is not None}
    names.survey({**stacks, **index.tensors} if stacks else index.tensors, suggested)
    group = groups.make(arrays, arrays, names, suggested)
    names.warn_of_refused(source.name)
    ds = assemble_dataset(group.variables, group.coords)
    ds.encoding = encoding_of_dataset(listing, group.dropped_attrs)
    if listing.file_order != listing.flat_order:
        ds.encoding["file_order"] = listing.file_order
    return ds


@dataclass(frozen=True, slots=True)
class GroupMaker:
    """Makes the variables of the Datasets of one opened file, and names their axes."""

    maker: VariableMaker
    coords: _Coordinates
    top: AxisNamer  # of the whole file; each Dataset has one below it
    suggested: Mapping[str, Axes]
    by_facts: Mapping[str, Axes]
    marks: StackMarks

    @classmethod
    def of(
        cls,
        source: Source,
        index: Index,
        options: OpenOptions,
        listing: Listing,
        infer: Callable[[Index], Mapping[str, Axes]],
        *,
        reserved: Collection[str],
    ) -> Self:
        """Return the maker for a file; no axis has one of the `reserved` names of variables."""
        top = AxisNamer(options.dims, reserved)
        # Stacked dimensions come first: other axes of the same name get another one.
        for array in listing.arrays:
            for dim, size in zip(array.stacked_dims, array.lazy.shape, strict=False):
                top.claim(dim, size)
        return cls(
            VariableMaker.of(source, listing, options),
            _Coordinates(index.arrangement.coords, top),
            top,
            with_stated(index, {} if top.by_size else infer(index)),
            axes_of(index),
            StackMarks(),
        )

    def names_below(self, above: AxisNamer, arrays: Mapping[str, Listed]) -> AxisNamer:
        """Return the namer of a Dataset, whose axes may have the names of its coordinates."""
        return above.for_child(self.coords.dims(arrays, above))

    def make(
        self,
        arrays: Mapping[str, Listed],
        used_names: Collection[str],
        names: AxisNamer,
        suggested: Mapping[str, Axes],
    ) -> _Group:
        """Make the variables of one Dataset from arrays by their names in it."""
        group = _Group({}, {}, {})
        for leaf, array in arrays.items():
            name, is_whole = array.tensor.name, array.role is None
            stated = suggested.get(name) if is_whole else None
            shape, stacked_dims = array.lazy.shape, array.stacked_dims
            dims = names.name_axes(array.name, shape, stated, stacked_dims, name)
            inferred = self.by_facts.get(name) if is_whole else None
            axes = _axis_encoding(array, dims, stated, inferred, names)
            if array.stacked is None:
                kind = group.coords if self.coords.has(array) else group.variables
                kind[leaf] = self.maker.variable(array, dims, axes)
                continue
            stack, members = array.stacked
            attrs = stack_attrs([None if t is None else t.attrs for t in members.tensors])
            group.variables[leaf] = self.maker.stack(array, dims, attrs.shared, axes)
            self.marks.add(array.name, group.variables[leaf])
            if members.options.opened is not None:
                members.options.opened.stacks = self.marks
            add_coords(group.coords, leaf, stack, attrs, used_names, marks=self.marks)
            if attrs.dropped:
                group.dropped_attrs[array.name] = attrs.dropped
        return group


class _Group(NamedTuple):
    """The variables of one Dataset."""

    variables: dict[str, xr.Variable]
    coords: dict[str, xr.Variable]
    dropped_attrs: dict[str, list[str]]


class _Coordinates:
    """The tensors that the file declares to be coordinates, and the dimensions that they name."""

    def __init__(self, names: Collection[str], namer: AxisNamer) -> None:
        self._names = frozenset(names)
        self._namer = namer

    def has(self, array: Listed) -> bool:
        """Return whether an array becomes a coordinate."""
        return array.name in self._names and array.role is None and array.stacked is None

    def dims(self, node: Mapping[str, Listed], above: AxisNamer) -> dict[str, int]:
        """Return the dimensions of a node that have the name of a coordinate, with their sizes."""
        # xarray turns a coordinate with this single dimension into an index, and reads it at once:
        # pandas must be able to index it, and it must be small.
        sizes: dict[str, int] = {}
        if not self._names:
            return sizes
        for leaf, array in node.items():
            if not array.suggested or not self.has(array):
                continue
            dims = self._namer.users_names(array.name) or array.suggested
            if leaf not in dims or len(dims) != array.lazy.ndim:
                continue
            size = array.lazy.shape[dims.index(leaf)]
            dtype = array.lazy.dtype
            is_indexable = (
                array.tensor.problem is None
                and dtype.isbuiltin
                and dtype != np.float16
                and array.tensor.size * dtype.itemsize <= _LARGEST_INDEX
            )
            if above.fits(leaf, size) and (len(dims) > 1 or is_indexable):
                sizes[leaf] = size
        return sizes


def _axis_encoding(
    array: Listed,
    dims: tuple[str, ...],
    suggested: Axes | None,
    inferred: Axes | None,
    names: AxisNamer,
) -> dict[str, dict[str, str | None]]:
    """Return the entries of the encoding about axes that the file names otherwise, or not at all.

    ``axes`` has the names in the file, ``axes_by_facts`` names that the Dataset has otherwise.
    """
    if suggested is None and inferred is None:
        return {}
    inner = dims[len(array.stacked_dims) :]
    users_names = names.users_names(array.name) or names.users_names(array.tensor.name) or ()
    other_names = _other_names(inner, array.suggested, inferred, users_names)
    entries: dict[str, dict[str, str | None]] = {}
    if other_names.in_file:
        entries["axes"] = dict(other_names.in_file)
    if other_names.by_facts:
        entries["axes_by_facts"] = dict(other_names.by_facts)
    return entries


class _OtherNames(NamedTuple):
    """Dimensions with the names that the file, or its facts, give their axes instead."""

    in_file: tuple[tuple[str, str | None], ...]
    by_facts: tuple[tuple[str, str | None], ...]


# Layers repeat the same names.
@lru_cache(maxsize=1024)
def _other_names(
    dims: tuple[str, ...], stated: Axes | None, inferred: Axes | None, users_names: Axes
) -> _OtherNames:
    unnamed = (None,) * len(dims)
    in_file, by_facts = [], []
    for dim, in_place, name in zip(dims, stated or unnamed, inferred or unnamed, strict=True):
        if dim in users_names:
            continue
        shown = explicit_name(dim)
        if in_place != shown:
            in_file.append((dim, in_place))
        if in_place is None and name not in {None, shown}:
            by_facts.append((dim, name))
    return _OtherNames(tuple(in_file), tuple(by_facts))


def add_coords(
    coords: dict[Any, xr.Variable],
    name: str,
    stack: Stack,
    attrs: StackedAttrs,
    used_names: Collection[Any],
    *,
    marks: StackMarks,
) -> None:
    """Add the coordinates of a stack: its indices, and attributes that differ between members."""
    encoding = marked_encoding(marks)
    for dim, indices in zip(stack.dims, stack.indices, strict=True):
        if dim not in coords:
            values = np.array(indices, np.int64)
            coords[dim] = xr.IndexVariable(dim, values, encoding=encoding)
    for attr, along in attrs.varying.items():
        coord = free_name(f"{name}:{attr}", {*used_names, *coords})
        coords[coord] = xr.Variable(stack.dims, along.reshape(stack.shape), encoding=encoding)


# --- variables ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VariableMaker:
    """Makes the variables of one opened file."""

    source: str  # name of the file
    # Digest of all options on which values or chunks depend; dask merges arrays of equal names.
    token: str
    target: int  # target size of a chunk, in bytes
    shared: Mapping[str, str]  # owners of the data of tied tensors, by name
    dask: bool  # otherwise variables have lazy arrays of xarray

    @classmethod
    def of(cls, source: Source, listing: Listing, options: OpenOptions) -> Self:
        """Return the maker for a file and its shards, read with these options."""
        target = target_nbytes()
        format_options = sorted(options.format_options.items())
        files = [(file.name, file.identity) for file in listing.sources.values()]
        token = _digest((files, options.reading, format_options, target))
        return cls(source.name, token, target, listing.shared, options.dask)

    def variable(
        self, listed: Listed, dims: tuple[str, ...], axes: dict[str, dict[str, str | None]]
    ) -> xr.Variable:
        """Make the variable of a listed array that is not stacked."""
        encoding = self.encoding(listed.tensor, listed.role, listed.suffix, axes)
        attrs = dict(listed.tensor.attrs) if listed.tensor.attrs else None
        return self._variable(listed.name, listed.lazy, dims, attrs, encoding)

    def _variable(
        self,
        name: str,
        lazy: LazyArray,
        dims: tuple[str, ...],
        attrs: dict[str, Any] | None,
        encoding: dict[str, Any],
        *,
        more: str = "",
    ) -> xr.Variable:
        chunks = lazy.chunks(self.target)
        encoding["preferred_chunks"] = preferred_chunks(dims, chunks)
        encoding["original_shape"] = lazy.shape
        if not self.dask:
            return xarray_variable(dims, lazy, attrs, encoding)
        return LazyVariable.of(dims, self.array(name, lazy, more, chunks), attrs, encoding)

    def stack(
        self,
        listed: Listed,
        dims: tuple[str, ...],
        attrs: dict[str, Any],
        axes: dict[str, dict[str, str | None]],
    ) -> xr.Variable:
        """Make the variable of a stack, with the attributes that its members have in common."""
        if listed.stacked is None:
            raise ValueError(f"{listed.name} is not stacked")
        stack, members = listed.stacked
        # Other tensors of the same file may be stacked under the same name.
        token = _digest((stack.template, stack.indices, stack.present and stack.members))
        encoding = _stacked_encoding(members.present, listed.role, self.source)
        if self.shared and listed.role is None:
            names = [t.name for t in members.present if t.name in self.shared]
            encoding |= {"shares": {name: self.shared[name] for name in names}} if names else {}
        record = StackRecord(
            stack.template,
            stack.dims,
            listed.suffix,
            stack.indices,
            tuple(attrs),
            self._name(listed.name, token),
            OpenedMembers(self, members, listed.suffix, axes),
            stack.present,
            name=listed.name,
        )
        record_stack(encoding, record)
        return self._variable(listed.name, listed.lazy, dims, attrs or None, encoding, more=token)

    def encoding(
        self, tensor: Tensor, role: str | None, suffix: str, axes: dict[str, dict[str, str | None]]
    ) -> dict[str, Any]:
        """Return the encoding of a variable that is not stacked."""
        encoding = _encoding(tensor, role, self.source, suffix)
        if axes:
            encoding |= axes
        if tensor.name in self.shared:
            encoding["shares"] = self.shared[tensor.name]
        return encoding

    def array(
        self, name: str, lazy: LazyArray, more: str = "", chunks: Chunks | None = None
    ) -> da.Array:
        """Make a dask array over a lazy array."""
        chunks = lazy.chunks(self.target) if chunks is None else chunks
        return tensor_array(lazy, self._name(name, more), chunks, lazy.empty((0,) * lazy.ndim))

    def _name(self, name: str, more: str) -> str:
        """Return the name of a dask array."""
        return f"{name}-{self.token}{more}"


class OpenedMembers(Sequence[StackMember]):
    """The members of a stack of an opened file, made on demand."""

    __slots__ = ("arrays", "axes", "maker", "suffix")

    def __init__(
        self,
        maker: VariableMaker,
        arrays: MemberArrays,
        suffix: str,
        axes: dict[str, dict[str, str | None]],
    ) -> None:
        self.maker = maker
        self.arrays = arrays
        self.suffix = suffix  # of the names of variables, after the names of the tensors
        self.axes = axes  # entries of the encoding

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, position: Any) -> Any:
        if isinstance(position, slice):
            return tuple([self[n] for n in range(len(self))[position]])
        tensor, role = self.arrays.tensors[position], self.arrays.role
        array = self.maker.array(f"{tensor.name}{self.suffix}", self.arrays[position])
        encoding = self.maker.encoding(tensor, role, self.suffix, self.axes)
        return StackMember(dict(tensor.attrs), encoding, array)


def _digest(key: Any) -> str:
    return blake2b(repr(key).encode(), digest_size=8).hexdigest()


def _stacked_encoding(tensors: Sequence[Tensor], role: str | None, source: str) -> dict[str, Any]:
    """Return the encoding of a stack: common properties of its members, and their total size."""
    first = _encoding(tensors[0], role, source)
    encoding = {key: first[key] for key in _COMMON if key in first}
    if tensors[0].layout == "blocks" and role is None:  # there may be several types
        encoding["stored_dtype"] = ", ".join(dict.fromkeys([tensor.dtype for tensor in tensors]))
    roles = [role] if role is not None else list(tensors[0].parts)
    parts = [tensor.parts[role] for tensor in tensors for role in roles if role in tensor.parts]
    encoding["nbytes"] = sum([part.nbytes for part in parts])
    compressions = {part.encoding for part in parts}
    if len(compressions) == 1:
        (compression,) = compressions
        if compression is not None:
            encoding["stored_compression"] = compression
    return encoding


def _encoding(tensor: Tensor, role: str | None, source: str, suffix: str = "") -> dict[str, Any]:
    """Return the encoding of a variable."""
    encoding: dict[str, Any] = {
        "tensor": tensor.name,
        "layout": tensor.layout,
        "source": source,
    }
    readable = tensor.problem is None
    if not readable:
        encoding["problem"] = tensor.problem
    part = tensor.parts.get(role or "data") if tensor.layout == "dense" or role else None
    if part is not None and readable:
        encoding |= _part_encoding(part)
        if tensor.order != "C":
            encoding["stored_order"] = tensor.order
    else:
        known = tensor.dtype in ELEMENT_TYPES
        encoding["stored_dtype"] = stored_dtype(tensor.dtype) if known else tensor.dtype
        encoding["nbytes"] = tensor.nbytes
        if readable:
            encoding["parts"] = {r: _part_encoding(part) for r, part in tensor.parts.items()}
    if role is None and (scheme := tensor.scheme):
        encoding["scheme"] = scheme
    if tensor.stored is not None:
        encoding["stored_as"] = {role: source.name for role, source in tensor.stored.items()}
    if role is not None:
        encoding["part"] = role
    if (facts := tensor.facts) is not None:
        encoding["declared"] = facts
    if tensor.path is not None:
        encoding["path"] = (*tensor.path[:-1], f"{tensor.path[-1]}{suffix}")
    return encoding


def _part_encoding(part: Part) -> dict[str, Any]:
    encoding: dict[str, Any] = {
        "stored_dtype": stored_dtype(part.dtype),
        "offset": part.offset,
        "nbytes": part.nbytes,
    }
    if part.encoding is not None:
        encoding["stored_compression"] = part.encoding
    if part.digest is not None:
        encoding["digest"] = part.digest
    if part.byteorder != "little":
        encoding["stored_byteorder"] = part.byteorder
    if part.strides is not None:
        encoding["stored_strides"] = part.strides
    if part.shard is not None:
        encoding["shard"] = part.shard
    return encoding


# --- the Dataset ----------------------------------------------------------------------------------


def encoding_of_dataset(listing: Listing, dropped_attrs: dict[str, list[str]]) -> dict[str, Any]:
    """Return the entries of the encoding that restore a Dataset as it was before stacking."""
    if all(array.stacked is None for array in listing.arrays):
        return {}
    return {"flat_order": listing.flat_order, "dropped_attrs": dropped_attrs}


def finish_dataset(ds: xr.Dataset, source: Source, index: Index) -> xr.Dataset:
    """Add attributes and encoding of the file to a Dataset, and the function that closes it."""
    shards_nbytes = sum([shard.size for shard in index.shards.values()])
    # Files that were merged are shards, too.
    own_nbytes = 0 if isinstance(source, ShardedSource) else index.nbytes
    ds.attrs = read_later(index.attrs, sources_of(source, index.shards))
    ds.encoding |= {
        "format": index.format,
        "format_version": index.version,
        "source": source.name,
        "namespace": next_namespace(),
        "file_nbytes": own_nbytes + shards_nbytes,
    }
    if index.tensors and not ds.variables:
        ds.encoding["unselected"] = len(index.tensors)
    if index.warnings:
        ds.encoding["warnings"] = index.warnings
    if index.facts:
        ds.encoding["facts"] = index.facts
    if isinstance(config := ds.attrs.get("config"), dict):
        ds.encoding["config"] = deepcopy(config)  # to find edits in the attributes
    if index.risks:
        ds.encoding["risks"] = index.risks
    if index.arrangement.order:
        ds.encoding["ordered"] = True
    if index.attr_types:
        ds.encoding["attr_types"] = dict(index.attr_types)
    # A bound method: xarray pickles the closer with the Dataset.
    ds.set_close(source.close)
    return ds
