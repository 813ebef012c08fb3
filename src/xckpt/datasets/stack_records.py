"""Records of stacks: the tensors in a stacked variable, and the variables that they were before.

Only this module reads and writes ``encoding["stack"]``. For a stacked variable it is a
`StackRecord`: the template of the names, the dimensions, the indices along them, and each member as
a separate variable. The coordinates that stacking made have `StackMarks`, the records by name of
the variable, because a computed variable loses its encoding and keeps its coordinates. The
coordinates also show the members in a selection.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, product
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from xckpt.arrays.derived import selected_in
from xckpt.datasets.variables import LazyVariable, preferred_chunks
from xckpt.errors import shown
from xckpt.labels.grids import Stack, member_names
from xckpt.structure.numbering import renamed_template
from xckpt.upstream.dask_arrays import is_dask_array
from xckpt.upstream.xarray_variables import data_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

    import dask.array as da
    import xarray as xr

_KEY = "stack"


class StackMember(NamedTuple):
    """A stacked tensor as a separate variable."""

    attrs: dict[Any, Any]  # in the file
    encoding: dict[Any, Any]  # without stacking
    data: da.Array | None  # None if only the stack has the data


@dataclass(frozen=True, slots=True)
class StackRecord:
    """The dimensions and names of a stack, and its members before stacking."""

    # Names of the members, as in `xckpt.labels.grids.Stack`.
    template: tuple[str | int | None, ...]
    dims: tuple[str, ...]  # made by stacking
    # End of the names of members after the template, such as ``:scales`` for a part.
    suffix: str = ""
    # Indices along each dimension at the time of stacking.
    indices: tuple[tuple[int, ...], ...] = ()
    shared_attrs: tuple[str, ...] = ()  # names of the attributes that all members had in common
    # Name of the dask array of the whole stack; another array is a selection or a result.
    array: str | None = None
    # The last dimension varies fastest; empty for a computed variable.
    members: Sequence[StackMember | None] = ()
    # Indices of the members, if some places have none, as in `xckpt.labels.grids.Stack`.
    present: frozenset[tuple[int, ...]] | None = None
    # Dimension of the steps of a training run; empty for other stacks.
    run: str = ""
    # Name of the variable; a variable of another name has other members.
    name: str = ""

    def names(
        self, indices: tuple[tuple[int, ...], ...], dims: Collection[Hashable]
    ) -> list[str | None]:
        """Return the names of the members at all places of a grid; None for empty places.

        `dims` are the dimensions of the variable: a single step of a run, which lacks that of the
        steps, has the names of the model.
        """
        names: list[str | None] = [n + self.suffix for n in member_names(self.template, indices)]
        if self.is_one_step(dims):
            (step,) = indices[0]
            names = [name and name.removeprefix(f"{self.run}.{step}.") for name in names]
        if self.present is None:
            return names
        if any(map(set.difference, map(set, indices), map(set, self.indices))):
            raise ValueError(
                f"along {', '.join(self.dims)} there are other numbers than when it was stacked, "
                "and some tensors were absent: unstack before the coordinates are changed"
            )
        places = product(*indices)
        return [n if at in self.present else None for n, at in zip(names, places, strict=True)]

    def renamed(self, name: str) -> StackRecord | None:
        """Return the record of a variable of another name; None if it has no place for numbers."""
        suffix = self.suffix if name.endswith(self.suffix) else ""
        prefix = f"{self.run}." if self.run else ""
        template = renamed_template(self.template, prefix + name.removesuffix(suffix))
        if template is None:
            return None
        return replace(self, template=template, suffix=suffix, name=name)

    def is_one_step(self, dims: Collection[Hashable]) -> bool:
        """Return whether a variable with these dimensions is a single step of a run."""
        return bool(self.run) and self.run not in dims

    # xarray deep-copies encodings with their Dataset; a record never changes.
    def __deepcopy__(self, memo: Any) -> Self:
        return self


class StackMarks(dict[str, StackRecord]):
    """The records of all stacks in an object, by name of the variable."""

    __slots__ = ()

    def add(self, name: str, variable: xr.Variable) -> None:
        """Add the record of a variable, by its name and by the name that it has within a tree."""
        # Coordinates outlive the variable, and must not keep its members.
        record = replace(variable.encoding[_KEY], shared_attrs=(), array=None, members=())
        self.setdefault(name.replace("/", "."), record)
        self[name] = record

    def numbered(
        self, name: str, variable: xr.Variable, indexes: Mapping[Any, xr.Variable]
    ) -> StackRecord | None:
        """Return a record for a computed variable of another name, or of fewer dimensions."""
        stacked = {dim for record in self.values() for dim in record.dims if dim in variable.dims}
        for record in self.values() if stacked else ():
            if (
                record.present is None
                and stacked == {dim for dim in record.dims if dim in variable.dims}
                and all(_is_remembered(record, dim, variable, indexes) for dim in record.dims)
            ):
                return replace(record, suffix="").renamed(name)
        return None

    # xarray deep-copies encodings with their Dataset; records never change.
    def __deepcopy__(self, memo: Any) -> Self:
        return self


# --- the encoding --------------------------------------------------------------------------------


def stack_of(variable: xr.Variable) -> StackRecord | None:
    """Return the record of a stacked variable, None for other variables."""
    return variable.encoding.get(_KEY)


def with_own_record(name: Any, variable: xr.Variable) -> xr.Variable:
    """Return a variable whose record has the names that follow from its own, also if renamed."""
    record = stack_of(variable)
    if record is None or record.name == name:
        return variable
    variable = variable.copy(deep=False)
    variable.encoding = unstacked_encoding(variable)
    if (renamed := record.renamed(str(name))) is not None:
        record_stack(variable.encoding, renamed)
    return variable


def record_stack(encoding: dict[Any, Any], record: StackRecord) -> None:
    """Add the record of a stack to the encoding of its variable."""
    encoding[_KEY] = record


def marked_encoding(marks: StackMarks) -> dict[str, Any]:
    """Return the encoding of a coordinate that stacking makes."""
    return {_KEY: marks}


def marks_of(coord: xr.Variable) -> StackMarks:
    """Return the records of all stacks in the object of a coordinate that stacking made."""
    marks: StackMarks = coord.encoding.get(_KEY, StackMarks())
    return marks


def is_made_by_stacking(coord: xr.Variable) -> bool:
    """Return whether stacking made a coordinate."""
    return _KEY in coord.encoding


def naming_encoding(variable: xr.Variable, indexes: Mapping[Any, xr.Variable]) -> dict[str, Any]:
    """Return the encoding that names the remaining tensors of a stack; empty for other variables.

    The name of another variable is the name of its tensor. ``encoding["tensor"]`` of an opened one
    is the name in its file, also after the user renamed or assigned it.
    """
    record = stack_of(variable)
    if record is None:
        return {}
    indices = remaining_indices(record, variable, indexes)
    return {_KEY: record if indices == record.indices else replace(record, indices=indices)}


def unstacked_encoding(variable: xr.Variable) -> dict[Any, Any]:
    """Return an encoding without the record of the stack."""
    return {key: value for key, value in variable.encoding.items() if key != _KEY}


def marks_of_run(encoding: Mapping[Any, Any]) -> StackMarks:
    """Return the records of all stacks of a run, from the encoding of the object."""
    marks: StackMarks = encoding.get(_KEY, StackMarks())
    return marks


def remember_stack(
    name: Any,
    variable: xr.Variable,
    indexes: Mapping[Any, xr.Variable],
    of_run: StackMarks,
    # Of the checkpoints that the variable is computed from, for coordinates that were replaced.
    of_sources: Iterable[Mapping[str, StackRecord]] = (),
) -> xr.Variable:
    """Return a variable with the record of its stack, if the object still has it."""
    if _KEY in variable.encoding or "layout" in variable.encoding:  # as when it was opened
        return variable
    # A computed variable has no encoding; the coordinates that stacking made keep theirs, unless
    # they are interpolated.
    of_indexes = ((marks, _is_remembered) for marks in (*map(marks_of, indexes.values()), of_run))
    replaced = ((records, _is_renumbered) for records in of_sources)
    for records, is_kept in chain(of_indexes, replaced):
        record = records.get(name)
        if record is not None and all(
            is_kept(record, dim, variable, indexes) for dim in record.dims
        ):
            return _with_record(variable, record)
    for index in [indexes[dim] for dim in variable.dims if dim in indexes]:
        marks = marks_of(index)
        if (record := marks.numbered(str(name), variable, indexes)) is not None:
            return _with_record(variable, record)
    return variable


def _with_record(variable: xr.Variable, record: StackRecord) -> xr.Variable:
    variable = variable.copy(deep=False)
    record_stack(variable.encoding, record)
    return variable


def _is_remembered(
    record: StackRecord, dim: str, variable: xr.Variable, indexes: Mapping[Any, xr.Variable]
) -> bool:
    """Return whether a coordinate identifies what remains of a stack along a dimension."""
    index = indexes.get(dim)
    if index is None:
        return dim == record.run and dim not in variable.dims
    if (index.dims == (dim,)) != (dim in variable.dims):
        return False
    if dim == record.run and not is_made_by_stacking(index):  # for example interpolated
        return dim not in variable.dims or _are_distinct_integers(np.atleast_1d(index.values))
    return is_made_by_stacking(index)


def _is_renumbered(
    record: StackRecord, dim: str, variable: xr.Variable, indexes: Mapping[Any, xr.Variable]
) -> bool:
    """Return whether a dimension of a stack has a coordinate of other numbers."""
    index = indexes.get(dim) if dim in variable.dims and not record.run else None
    return index is not None and index.dims == (dim,) and _are_distinct_integers(index.values)


def mark_run(ds: xr.Dataset, marks: StackMarks, dim: str) -> None:
    """State in all records that a dimension has the steps of a training run."""
    # The encoding of the Dataset survives interpolation, unlike that of a coordinate.
    ds.encoding[_KEY] = marks
    for name, variable in ds.variables.items():
        record: Any = stack_of(variable)
        if isinstance(record, StackRecord) and record.dims[:1] == (dim,):
            record_stack(variable.encoding, replace(record, run=dim, name=str(name)))
    for name, record in marks.items():
        if record.dims[:1] == (dim,):
            marks[name] = replace(record, run=dim, name=name)


# --- remaining members ---------------------------------------------------------------------------


def remaining_indices(
    record: StackRecord, variable: xr.Variable, coords: Mapping[Hashable, xr.Variable]
) -> tuple[tuple[int, ...], ...]:
    """Return the remaining indices along each dimension; all of them without a coordinate.

    A coordinate that does not number the members leaves none.
    """
    indices: list[tuple[int, ...]] = []
    for dim, stacked in zip(record.dims, record.indices, strict=True):
        coord = coords.get(dim)
        if dim == record.run and record.is_one_step(variable.dims):
            indices.append(stacked[:1])  # names do not depend on the step
            continue
        if coord is None:
            indices.append(stacked)
            continue
        values = np.atleast_1d(coord.values)
        is_numbered = values.dtype.kind in "iuf" and bool(np.isfinite(values).all())
        remaining = dict.fromkeys(map(int, values.tolist())) if is_numbered else ()
        indices.append(tuple(remaining))
    return tuple(indices)


def member_variables(
    name: str, variable: xr.Variable, indexes: Mapping[Any, xr.Variable]
) -> dict[str, xr.Variable]:
    """Return the remaining members of a variable, or the variable itself if it is not stacked."""
    if stack_of(variable) is None:
        return {name: variable}
    members = StackMembers(name, variable, indexes)
    return {member: members.variable(member) for member in members.numbers}


def unstacked_variables(
    variables: Mapping[Any, xr.Variable],
    # Returns the index coordinates of a variable, by its name.
    indexes_of: Callable[[Any], Mapping[Any, xr.Variable]],
    order: Iterable[Any],
) -> dict[Any, xr.Variable]:
    """Return a variable for each tensor; those in `order` come first, in that order."""
    unstacked: dict[Any, xr.Variable] = {}
    for name, variable in variables.items():
        for member, member_variable in member_variables(name, variable, indexes_of(name)).items():
            if member in unstacked:
                raise ValueError(f"{shown(member)} is a variable, and stacked in {shown(name)} too")
            unstacked[member] = member_variable
    positions = {name: position for position, name in enumerate(order)}
    names = sorted(unstacked, key=lambda name: positions.get(name, len(positions)))
    return {name: unstacked[name] for name in names}


class StackMembers:
    """The remaining members of a stacked variable; ambiguous coordinates are a `ValueError`."""

    def __init__(
        self, name: str, variable: xr.Variable, indexes: Mapping[Any, xr.Variable]
    ) -> None:
        record = stack_of(variable)
        if record is None:
            raise ValueError(f"{shown(name)} is not stacked")
        indices = tuple([_checked_indices(name, variable, dim, indexes) for dim in record.dims])
        names = zip(record.names(indices, variable.dims), product(*indices), strict=True)
        #: The indices of each member along the stacked dimensions, by name.
        self.numbers = {name: numbers for name, numbers in names if name is not None}
        present = [set(along) for along in zip(*self.numbers.values(), strict=True)]
        pairs = zip(indices, present or [set()] * len(indices), strict=True)
        #: The indices of members along each stacked dimension.
        self.along = tuple([tuple([n for n in along if n in used]) for along, used in pairs])
        self.record = record
        # Members are lazy if they are selected from the stored stack.
        self._variable, selected = _stored_stack(variable, record)
        self._positions = [
            dict(zip(along, selected.get(dim, range(len(along))), strict=True))
            for dim, along in zip(record.dims, indices, strict=True)
        ]
        self._old_positions = [{index: n for n, index in enumerate(a)} for a in record.indices]
        data = data_of(variable)
        is_made = is_dask_array(data) and data.name == record.array
        # Whether the variable still has the array of the whole stack, and its numbers.
        is_made = is_made and indices == record.indices
        self._is_whole = is_made and variable.dims[: len(record.dims)] == record.dims

    def as_stack(self, name: str) -> Stack:
        """Return the stack that they make under a name."""
        record, numbers = self.record, self.numbers
        indices = tuple(map(tuple, self._positions))
        present = record.present and frozenset(numbers.values())
        return Stack(name, record.template, record.dims, indices, tuple(numbers), present)

    @property
    def dims(self) -> tuple[str, ...]:
        """The stacked dimensions; an empty name for a dimension that a selection dropped."""
        return tuple([dim if dim in self._variable.dims else "" for dim in self.record.dims])

    def place(self, member: str) -> dict[str, int]:
        """Return the index of a member along each remaining stacked dimension."""
        numbers = zip(self.record.dims, self.numbers[member], strict=True)
        return {dim: number for dim, number in numbers if dim in self._variable.dims}

    def variable(self, member: str) -> xr.Variable:
        """Return a member as a separate variable."""
        numbers, record = self.numbers[member], self.record
        # Only the members of a stored variable have attributes and encoding to restore.
        before: StackMember | None = None
        if record.members and all(map(dict.__contains__, self._old_positions, numbers)):
            position = 0
            for positions, number in zip(self._old_positions, numbers, strict=True):
                position = position * len(positions) + positions[number]
            before = record.members[position]
        if before is None:
            # A step without its number, or a layer with a new one, has the type that all have.
            stored, axes = self._variable.encoding, {}
            types = {key: stored[key] for key in ("layout", "stored_dtype") if key in stored}
            if types:
                axes = {
                    d: name for d, name in stored.get("axes", {}).items() if d not in record.dims
                }
            before = StackMember({}, types | ({"axes": axes} if axes else {}), None)
        data, dims = before.data, self._variable.dims
        if data is None or not self._is_whole:
            places = map(dict.__getitem__, self._positions, numbers)
            key: dict[Any, int] = dict(zip(record.dims, places, strict=True))
            # Select from the variable, because a selection from the dask array is not lazy.
            data = self._variable[tuple([key.get(dim, slice(None)) for dim in dims])].data
        dims = tuple([dim for dim in dims if dim not in record.dims])
        attrs, shared = dict(self._variable.attrs), record.shared_attrs
        # An attribute that all members had in common may have been removed from the stack.
        before_attrs = {k: v for k, v in before.attrs.items() if k not in shared or k in attrs}
        encoding = dict(before.encoding)
        if record.is_one_step(dims) and "tensor" in encoding:
            step = f"{record.run}.{numbers[0]}."
            encoding["tensor"] = encoding["tensor"].removeprefix(step)
        original_shape = self._variable.encoding.get("original_shape")
        if original_shape is not None:
            encoding.setdefault("original_shape", original_shape[len(record.dims) :])
        if is_dask_array(data):
            encoding["preferred_chunks"] = preferred_chunks(dims, data.chunks)
        return LazyVariable.of(dims, data, before_attrs | attrs or None, encoding)


def _stored_stack(
    variable: xr.Variable, record: StackRecord
) -> tuple[xr.Variable, Mapping[str, Sequence[int]]]:
    """Return the stored stack of a selection of layers, and their positions; else the variable."""
    selected = selected_in(data_of(variable))
    if selected is None or selected.array.ndim != variable.ndim:
        return variable, {}
    array, positions = selected
    sizes = zip(variable.dims, variable.shape, array.shape, strict=True)
    resized = {dim for dim, size, before in sizes if size != before}
    if not resized <= positions.keys() <= {*record.dims}:
        return variable, {}
    return variable._replace(data=array), {dim: at.tolist() for dim, at in positions.items()}


def _are_distinct_integers(values: Any) -> bool:
    return values.dtype.kind in "iu" and len(set(values.tolist())) == values.size


def _checked_indices(
    name: str, variable: xr.Variable, dim: str, indexes: Mapping[Any, xr.Variable]
) -> tuple[int, ...]:
    """Return the remaining indices along a stacked dimension, from its coordinate."""
    coord = indexes.get(dim)
    record = stack_of(variable)
    is_one_step = record is not None and dim == record.run and dim not in variable.dims
    if is_one_step and (coord is None or coord.dtype.kind not in "iu"):
        return (0,)  # selected with drop=True, or between two steps
    if coord is None or (coord.dims == (dim,)) != (dim in variable.dims):
        raise ValueError(
            f"{shown(name)} was stacked along {dim!r}, but has no coordinate {dim!r} to identify "
            "its remaining tensors: unstack before renaming or dropping that dimension or "
            "coordinate"
        )
    values = np.atleast_1d(coord.values)
    if not _are_distinct_integers(values):
        raise ValueError(
            f"the coordinate {dim!r} does not identify the remaining tensors of {shown(name)}: its "
            f"values must be distinct integers; isel({dim}=...) selects one, and "
            f"assign_coords({dim}=range({values.size})) numbers them"
        )
    return tuple(values.tolist())
