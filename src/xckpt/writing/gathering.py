"""The tensors of an xarray object, with stored bytes for unchanged variables.

Data variables become tensors, and so do coordinates with numbers; the `Arrangement` lists these
coordinates. Coordinates of stacks become part of the names of tensors. Unchanged variables are
copied as stored. Computed or changed variables keep the type, layout and order in their encoding.
Variables computed from a stack are unstacked as well if their coordinates name the modules.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import defaultdict
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xarray as xr

from xckpt import formats
from xckpt.arrays.converted import densified, element_type, is_sparse
from xckpt.arrays.dense import DenseArray
from xckpt.arrays.derived import is_combined, lazies_in, with_blocks
from xckpt.arrays.graph import lazy_of
from xckpt.arrays.lazy import UnreadableArray
from xckpt.datasets.combining import factor_changes, unrounded
from xckpt.datasets.losses import NO_COMMON, NO_TENSORS, SourceShapes, losses
from xckpt.datasets.mappings import as_dataset
from xckpt.datasets.row_orders import other_orders
from xckpt.datasets.stacking import lost_stacks
from xckpt.datasets.tensors import OpenTensors
from xckpt.datasets.variables import WIDENED, mapped_arrays
from xckpt.elements import ELEMENT_TYPES
from xckpt.errors import CheckpointError, CheckpointWarning, UnsupportedError
from xckpt.formats.plan import WantedPart
from xckpt.index import Arrangement, Index, Tensor
from xckpt.labels import AxisNamer, explicit_name
from xckpt.opening import open_index
from xckpt.quantization.model import CODE_ORDER
from xckpt.structure import Structure
from xckpt.structure.dims import infer_dims
from xckpt.structure.facts import model_facts
from xckpt.structure.info import PARAMETERS, Described, Role
from xckpt.upstream.xarray_variables import ExplicitlyIndexed, data_of, is_in_memory
from xckpt.writing.payloads import Gathered, Payload, Unchanged
from xckpt.writing.rehearsal import stated_before
from xckpt.writing.sparse_parts import sparse_parts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from xckpt.arrays import LazyArray
    from xckpt.writing.fitting import Changes, Fitting

_WIDENED = (
    "float64, though no source is, as with factors that are numpy scalars or vectors of float64; "
    "float(factor), weights.astype('float32') or dtype='float32' with cast='allow' avoids it"
)
_TURNED = "axes in another order than in the model, as after vector * matrix; this restores it"
_BROADCAST = (
    "more axes than in their sources, as dimensions with other names broadcast "
    "(b.rename({dim: name}) gives those of b the names of a, and "
    "ds.assign((ds[names] * weights).data_vars) changes some tensors, and keeps the others)"
)
_ONE_OF_TIED = (
    "tensors that keep their old values, though another one that was the same memory has new ones "
    "(assign both, or drop these)"
)
_TREE_AND_DATASET = (
    "the DataTree has no tensors: a DataTree and a Dataset have no names of tensors in common, and "
    "arithmetic keeps none (open both with xckpt.open, or both with xr.open_datatree)"
)
_NO_NUMBERS = (
    "stacks written as one tensor, as the coordinate with their numbers was dropped or replaced "
    "(ds.assign_coords(layers=ds['layers'].copy(data=numbers)) renumbers layers)"
)
_FLOAT_COUNTERS = (
    "counters are floats, as values in memory do not know the integers that they were (save before "
    "compute or load, or .astype('int64'))"
)
_UNNUMBERED = (
    "stacks written as one tensor, as a new name or a reduction leaves no place for their numbers "
    "(.ckpt.unstack() first keeps the numbers)"
)
# Names of dask's layers; others, such as casts and quantiles, choose their type. `xr.dot` makes
# tensordot of some products where opt_einsum is installed.
_ARITHMETIC = (
    *("add-", "sub-", "mul-", "truediv-", "pow-", "neg-", "chunk_einsum-", "tensordot-"),
)
_QUANTIZED = ("quantized", "blocks")
_DENSE = (
    "quantised tensors whose values were computed are written dense, and no longer declared as "
    "quantised"
)
_SPARSE = ("sparse_csr", "sparse_csc", "sparse_coo", "sparse_bsr", "sparse_bsc", "sparse_hybrid")


# --- tensors of an object ---------------------------------------------------------------------


class Computed(NamedTuple):
    """A computed tensor, with the name, type and layout for storing it."""

    name: str
    variable: xr.Variable  # its attributes, and its encoding if xckpt opened it, are written
    array: Any  # possibly lazy or sparse
    dtype: str
    is_sparse: bool
    dims: tuple[str | None, ...] | None
    rounds: bool = False  # to integers
    widened: str = ""  # see `Payload`

    def payload(self) -> Payload:
        """Return the tensor with the parts and data to write."""
        array, encoding = self.array, _encoding(self.variable)
        layout: Any = "dense"
        values = None
        data = {"data": array}
        if self.is_sparse:
            is_coo = _layout(encoding) == "sparse_coo" or array.ndim != 2
            layout = "sparse_coo" if is_coo else "sparse_csr"
            parts, data = sparse_parts(array, layout, self.dtype, self.name)
            values = partial(densified, array)
        else:
            compression, digest = encoding.get("stored_compression"), encoding.get("digest")
            offset = encoding.get("offset", 0)
            parts = {"data": WantedPart.of(self.dtype, array.shape, compression, digest, offset)}
        order: Any = "C" if self.is_sparse else encoding.get("stored_order", "C")
        # Rounding happens while the values are written, which counts those that are too large.
        merged = unrounded(self.variable)
        return Payload(
            self.name,
            self.dtype,
            array.shape,
            parts,
            layout,
            order,
            self.variable.attrs,
            self.dims,
            path=self.variable.encoding.get("path"),
            data=data if merged is None else {"data": merged.array},
            values=values,
            rounds=self.rounds or merged is not None,
            wide_data=None if merged is None else {"data": merged.total},
            widened=self.widened,
        )


def note_losses(obj: Any, changes: Changes, *, is_model: bool) -> None:
    """Note tensors and rows that results lack or mix, and an object without any tensor."""
    if not isinstance(obj, xr.Dataset | xr.DataTree):  # the user named each tensor
        return
    tensors = OpenTensors(obj)
    lost = losses(tensors)
    for loss in lost:
        changes.add_all(str(loss), loss.names)
    for change, bases in factor_changes(tensors).items():
        changes.add_all(change, bases)
    for change, names in other_orders(tensors).items():
        changes.add_all(change, names)
    changes.add_all(_ONE_OF_TIED, _half_changed(tensors.variables))
    was_opened = "format" in obj.encoding
    has_tensors = bool(tensors.variables or tensors.coord_tensors(()))
    if not (was_opened or has_tensors):
        # Not the user's own attributes alone.
        of_file = any(obj.attrs.keys() & {*form.storage_attrs} for form in formats.loaded())
        if is_model or of_file or model_facts(obj.attrs).sizes:
            if lost:
                raise ValueError(f"the Dataset has no tensors: {lost[0]}")
            raise ValueError(NO_COMMON if isinstance(obj, xr.Dataset) else _TREE_AND_DATASET)
        changes.add_all(NO_TENSORS, [] if lost else [type(obj).__name__])


def _half_changed(variables: Mapping[str, xr.Variable]) -> Iterator[str]:
    """Yield tensors that were the memory of another one, which was changed."""
    for name, variable in variables.items():
        shared = variable.encoding.get("shares")  # of stacks, it is by member
        owner = variables.get(shared) if isinstance(shared, str) else None
        if owner is not None and owner.encoding.get("tensor") != shared:
            yield f"{name} ({shared})"


def gather(obj: Any, fitting: Fitting, format: str | None = None) -> Gathered:
    """Return the tensors, attributes and arrangement of an object; see `require_readable`."""
    obj = _as_dataset(obj)
    tensors, coords = listed(obj, fitting.changes, format)
    payloads = [tensor.payload() for tensor in tensors]
    # xarray states the source of netCDF and zarr, which are no checkpoints, too.
    opened = of_object.source if (of_object := OpenTensors(obj)).format else ""
    fitting.require_readable(len(payloads), opened)
    modules: dict[str, Any] = {}
    if isinstance(obj, xr.DataTree):
        modules = {
            node.path: node.attrs
            for node in obj.descendants
            # The names of tensors do not imply empty modules.
            if node.attrs
            or not any(
                inner.data_vars or inner.to_dataset(inherit=False).variables
                for inner in node.subtree
            )
        }
    root = obj.root if isinstance(obj, xr.DataTree) else obj
    attrs = {str(name): value for name, value in obj.attrs.items()}
    # Tensors of an opened file follow the file, unless its arrangement lists an order.
    ordered = "format" not in root.encoding or root.encoding.get("ordered", False)
    order = [payload.name for payload in payloads] if ordered else ()
    arrangement = Arrangement(tuple(coords), tuple(order), modules)
    types = obj.encoding.get("attr_types", {})
    config = root.encoding.get("config")
    return Gathered(payloads, attrs, arrangement, types, opened, config, of_object.merged)


def opened_as(obj: Any, format: str) -> Index | None:
    """Return the first file that an object is made of, as `stated_before` does."""
    root = obj.root if isinstance(obj, xr.DataTree) else obj
    if not isinstance(root, xr.Dataset | xr.DataArray | xr.DataTree):
        return None
    engine = root.encoding.get("format")
    sources = [root.encoding["source"]] if engine in formats.names() else []
    if "format" not in root.encoding:
        sources = OpenTensors(obj).origins(1)
    if not sources:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            source, index = open_index(sources[0], engine)
    except (LookupError, OSError, ValueError, CheckpointError):  # deleted, or needs options
        return None
    source.close()
    return stated_before(index, format)


def listed(
    obj: Any, changes: Changes, format: str | None = None
) -> tuple[Iterator[Unchanged | Computed], list[str]]:
    """Return the tensors of an xarray object, and the names of coordinates among them."""
    obj = _as_dataset(obj)
    tensors = OpenTensors(obj)
    variables = tensors.unstacked()
    for name in variables:
        if not isinstance(name, str):
            raise TypeError(f"the names of tensors are text, unlike that of the variable {name!r}")
    changes.add_all(_UNNUMBERED, tensors.unnumbered())
    reason, stacks = lost_stacks(tensors)
    written = [
        name
        for name in stacks
        if name in variables and variables[name].encoding.get("tensor") != name  # as in a file
    ]
    changes.add_all(f"stacks written as one tensor, as {reason}", written)
    changes.add_all(_FLOAT_COUNTERS, _float_counters(tensors, variables))
    dims = {dim for variable in variables.values() for dim in variable.dims}
    for dim, coord in tensors.stacked_dims().items():
        numbers = [] if coord is None else np.atleast_1d(coord.values).tolist()
        if numbers != sorted(numbers):
            changes.add(_renumbered(dim, len(numbers)), ",".join(map(str, numbers)))
    coords = []
    for name, coord in tensors.coord_tensors(dims).items():
        if element_type(coord.dtype) is None:
            changes.add("coordinates without numbers are not written", name)
        elif name not in variables:
            variables[name] = coord.to_base_variable()
            coords.append(name)
    variables = {name: v for name, v in variables.items() if not _is_of_dense(name, variables)}
    root = obj.root if isinstance(obj, xr.DataTree) else obj
    # Axes without a name in a file of the same format stay unnamed.
    same_format = format is not None and root.encoding.get("format") == format
    inferred = _inferred_dims(variables, obj.attrs)
    return _iter_tensors(variables, changes, inferred, same_format=same_format), coords


def _float_counters(tensors: OpenTensors, variables: Mapping[str, xr.Variable]) -> list[str]:
    """Return counters of integers that arithmetic in memory made floats of."""
    floats = [
        name
        for name, variable in variables.items()
        if not variable.ndim
        and variable.dtype == np.float64
        and "stored_dtype" not in variable.encoding
        and not (mapped_arrays(variable) or lazies_in(data_of(variable)))
    ]
    return [name for name in floats if tensors.structure.is_counter(name)]


def _is_of_dense(name: str, variables: Mapping[str, xr.Variable]) -> bool:
    """Return whether a tensor has the order of the codes of a weight that is written dense."""
    # transformers takes it for a part of the weight, and raises.
    weight = variables.get(name.removesuffix(CODE_ORDER) + ".weight")
    if not name.endswith(CODE_ORDER) or weight is None:
        return False
    return unmodified_array(weight) is None and _was_quantized(weight)


def _renumbered(dim: str, count: int) -> str:
    call = f"ds.assign_coords({dim}=ds[{dim!r}].copy(data=range({count})))"
    return f"{dim} in another order are saved under their own numbers ({call} renumbers them)"


def _inferred_dims(
    variables: Mapping[str, xr.Variable], attrs: Mapping[Any, Any]
) -> Mapping[str, tuple[str, ...]]:
    """Return the names of the axes of variables that reading infers from the names of tensors."""
    shapes = {name: variable.shape for name, variable in variables.items()}
    dims = infer_dims(shapes, attrs)
    names = AxisNamer(reserved=variables.keys())
    names.survey(variables, dims)
    return {name: names.name_axes(name, shapes[name], axes) for name, axes in dims.items()}


def _as_dataset(obj: Any) -> xr.Dataset | xr.DataTree:
    """Return a Dataset of a DataArray or of a mapping of names to arrays, and a tree unchanged."""
    obj = as_dataset(obj)
    if isinstance(obj, xr.DataArray):
        if obj.name is None:
            raise ValueError("a DataArray is saved under its name: .rename('weight')")
        return obj.to_dataset(promote_attrs=False)
    if not isinstance(obj, xr.Dataset | xr.DataTree):
        text = "expected a Dataset, a DataTree, a DataArray or a mapping of names to arrays, got "
        hint = "; xckpt.convert writes a file in another format"
        text += f"{type(obj).__name__}{hint if isinstance(obj, str | os.PathLike) else ''}"
        raise TypeError(text)
    return obj


# --- unchanged variables --------------------------------------------------------------------


def unmodified_array(variable: xr.Variable) -> LazyArray | None:
    """Return the stored array of an unchanged variable; None for other variables."""
    return lazy_of(data_of(variable))


def _iter_tensors(
    variables: Mapping[str, xr.Variable],
    changes: Changes,
    inferred: Mapping[str, tuple[str, ...]],
    *,
    same_format: bool,
) -> Iterator[Unchanged | Computed]:
    """Yield the tensors of all variables, with parts joined; errors go to `changes.lost`."""
    joined = _join_parts(variables)
    tensor_of = {part: tensor for tensor, parts in joined.items() for part in parts.values()}
    noted = _NotedAxes(changes)
    for name, variable in variables.items():
        tensor_name = tensor_of.get(name)
        if tensor_name is None:
            lazy = unmodified_array(variable)
            if isinstance(lazy, UnreadableArray):
                changes.lost[name] = lazy.error().located(path=lazy.source.name)
            else:
                axes = inferred.get(name, ())
                dims = _dims(name, variable, axes, same_format=same_format)
                tensor = _tensor(name, variable, dims, changes)
                if isinstance(tensor, Computed):
                    noted.add(tensor, axes)
                yield tensor
        elif tensor_name in joined:
            parts = joined.pop(tensor_name)
            arrays: dict[str, Any] = {
                role: unmodified_array(variables[part]) for role, part in parts.items()
            }
            role, first_name = next(iter(parts.items()))
            tensor, first = arrays[role].origin.tensor, variables[first_name]
            path = tensor.path if "path" in first.encoding else None
            readers = {role: array.readers["data"] for role, array in arrays.items()}
            yield Unchanged(
                replace(tensor, name=tensor_name, attrs=first.attrs, path=path), readers
            )
    noted.end()


class _NotedAxes:
    """Axes of computed tensors that their sources do not have, or not in this order."""

    def __init__(self, changes: Changes) -> None:
        self._changes, self._sources = changes, SourceShapes()
        self._gained: list[str] = []
        self._has_others = False

    def add(self, tensor: Computed, axes: tuple[str, ...]) -> None:
        """Note the axes of a tensor, given those that its model has."""
        name, array = tensor.name, data_of(tensor.variable)
        if self._sources.is_stack(name, array):
            self._changes.add(_NO_NUMBERS, name)
        shapes = self._sources.shapes(name, array)
        in_order = _dims_in_order(tensor, axes, shapes)
        if in_order is not None:
            self._changes.add(_TURNED, f"{name}.transpose{in_order}")
        if before := self._sources.broadcast(name, tensor.variable):
            self._changes.add(_BROADCAST, _by_axes(name, array.shape, before))
        elif shapes and array.ndim > max(map(len, shapes)):
            self._gained.append(_by_axes(name, array.shape, shapes))
        elif shapes:
            self._has_others = True

    def end(self) -> None:
        """Note other tensors with more axes, unless all have them, as in stacked models."""
        for text in self._gained if self._has_others else ():
            self._changes.add(_BROADCAST, text)


def _by_axes(name: str, shape: tuple[int, ...], before: Iterable[tuple[int, ...]]) -> str:
    now, *old = ["x".join(map(str, sizes)) or "scalar" for sizes in (shape, *before)]
    return f"{name} {now}, was {' and '.join(old)}"


def _join_parts(variables: Mapping[str, xr.Variable]) -> dict[str, dict[str, str]]:
    """Return the variables of tensors whose parts are all unchanged, by tensor and role."""
    candidates: dict[tuple[str, str, str], dict[str, str]] = defaultdict(dict)
    roles: dict[tuple[str, str, str], list[str]] = {}
    for name, variable in variables.items():
        lazy = unmodified_array(variable)
        origin = None if lazy is None else lazy.origin
        if origin is None or origin.role is None:
            continue
        tensor, suffix = origin.tensor.name, f":{origin.role}"
        # Names in use get colons at the end, and users may rename all parts of a tensor.
        match = re.fullmatch(f"({re.escape(tensor)}|.+?){re.escape(suffix)}:*", name, re.DOTALL)
        if match is not None and match[1] not in variables:
            key = (match[1], tensor, str(variable.encoding.get("source")))
            candidates[key][origin.role] = name
            roles[key] = list(origin.tensor.parts)
    joined: dict[str, dict[str, str]] = {}
    for key, parts in candidates.items():
        if parts.keys() == set(roles[key]):
            joined.setdefault(key[0], {role: parts[role] for role in roles[key]})
    return joined


def _tensor(
    name: str, variable: xr.Variable, dims: tuple[str | None, ...] | None, changes: Changes
) -> Unchanged | Computed:
    """Return the tensor of a variable; raise if its values cannot be written."""
    lazy: Any = unmodified_array(variable)
    attrs, path = variable.attrs, variable.encoding.get("path")
    origin = None if lazy is None else lazy.origin
    if origin is not None and not _encoding(variable) and origin.tensor.dtype != lazy.dtype.name:
        return _computed(name, variable, dims)  # the user asked for the values as they are
    if origin is not None and origin.role is None:
        tensor = replace(origin.tensor.named(name), attrs=attrs, dims=dims, path=path)
        if origin.tensor.stored is not None and tensor.stored is None:
            changes.add("quantised tensors that are called otherwise are written dense", name)
            return _computed(name, variable, dims)
        is_dense = tensor.layout in {"dense", "chunked"}
        values = None if is_dense else lambda: densified(variable.data)
        return Unchanged(tensor, lazy.readers, values)
    if isinstance(lazy, DenseArray):
        part = lazy.reader.part
        tensor = Tensor(name, part.dtype, lazy.shape, {"data": part}, strict=lazy.strict)
        return Unchanged(replace(tensor, attrs=attrs, dims=dims, path=path), lazy.readers)
    if _was_quantized(variable):
        changes.add(_DENSE, name)
    return _computed(name, variable, dims)


def _was_quantized(variable: xr.Variable) -> bool:
    """Return whether a variable is computed from decoded tensors, with their axes."""
    if _layout(variable.encoding) in _QUANTIZED:
        return True
    lazies = lazies_in(data_of(variable)).values()
    origins = [origin for lazy in lazies for origin in islice(lazy.tensor_origins, 1)]
    return any(
        o.role is None and o.tensor.layout in _QUANTIZED and len(o.tensor.shape) == variable.ndim
        for o in origins
    )


def _dims(
    name: str, variable: xr.Variable, inferred: tuple[str, ...], *, same_format: bool
) -> tuple[str | None, ...] | None:
    """Return the names of axes, as in the old file if xckpt showed other ones; None if unnamed.

    Names that reading infers again are not written, unless the file or the user states them. A
    tensor with a new name gets all names, as reading infers none of the others.
    """
    stated = variable.encoding.get("axes", {})
    by_facts = {} if same_format else variable.encoding.get("axes_by_facts", {})
    was_opened = "layout" in variable.encoding
    dims: list[str | None] = []
    for position, dim in enumerate(variable.dims):
        # None: the file has no name for the axis, and its facts or the module of the tensor gave
        # one, which it gives again when the copy is opened in the same format.
        is_stated = dim in stated and (same_format or stated[dim] is not None)
        is_inferred = inferred[position : position + 1] == (dim,)
        if is_stated:
            is_lost = bool(inferred) and not is_inferred and "declared" not in variable.encoding
            dims.append(stated[dim] or (explicit_name(dim) if is_lost else None))
        elif is_inferred and (not was_opened or dim in stated):
            dims.append(None)
        else:
            dims.append(by_facts.get(dim) or explicit_name(dim))
    if any(dims) and (inferred or len(stated) != variable.ndim):
        pairs = zip(dims, variable.dims, strict=True)
        dims = [written or explicit_name(dim) for written, dim in pairs]
    # If xckpt did not open the Dataset, the user gave all names, even those like xckpt's own.
    if not was_opened and None in dims and not inferred:
        shown = _shown_dims(variable.shape, tuple(dims))
        if shown != variable.dims or not {name, name.rpartition(".")[2]}.isdisjoint(shown):
            return tuple(map(str, variable.dims))
    return tuple(dims) if any(dims) else None


@lru_cache
def _shown_dims(shape: tuple[int, ...], stated: tuple[str | None, ...]) -> tuple[str, ...]:
    """Return the names of all axes after opening a file that names some of them."""
    return AxisNamer().name_axes("", shape, stated)


# --- computed variables ---------------------------------------------------------------------------


def _computed(name: str, variable: xr.Variable, dims: tuple[str | None, ...] | None) -> Computed:
    """Return the tensor of a computed variable; raise if its values are not numbers."""
    array = array_of(variable)
    dtype = element_type(array.dtype)
    if dtype is None:
        hint = "Leave it out: ds.drop_vars(name), or put it into ds.attrs"
        if array.dtype.kind in "mM":
            hint = "Convert it: ds['t'].astype('int64') counts its units"
        raise UnsupportedError(
            f"{array.dtype} values have no place in a checkpoint, which holds numbers",
            tensor=name,
            rule="Dtype",
            hint=hint,
        )
    encoding = _encoding(variable)
    layout, before = _layout(encoding), encoding.get("stored_dtype")
    is_stored_sparse = bool(array.ndim) and (is_sparse(array) or layout in _SPARSE)
    # Decoded values are stored with their old type again.
    if layout in {"dense", "chunked", *_SPARSE} and isinstance(before, np.dtype):
        stored = element_type(before) or dtype
        # numpy has no 32-bit booleans: they are bool in memory, and their stored type is uint32.
        dtype = "bool32" if (dtype, stored) == ("bool", "uint32") else stored
    computed = Computed(name, variable, array, dtype, is_stored_sparse, dims)
    if array.dtype.kind == "f":
        return _in_source_type(computed)
    layers = getattr(getattr(array, "dask", None), "layers", ())
    sources = _source_types(computed)
    is_widened = any(name.startswith(WIDENED) for name in layers)
    is_widened |= array.dtype.kind == "i" and bool(mapped_arrays(variable)) and dtype not in sources
    if is_widened and len(sources) == 1 and not any(n.startswith("astype-") for n in layers):
        return computed._replace(dtype=sources.pop(), rounds=True)
    return computed


def _dims_in_order(
    tensor: Computed, axes: tuple[str, ...], shapes: Sequence[tuple[int, ...]]
) -> tuple[str, ...] | None:
    """Return the dimensions in the order of the model's, or of the stored tensor of the name.

    None if arithmetic of several arrays did not change the order.
    """
    array, dims = tensor.array, tuple(map(str, tensor.variable.dims))
    if not is_combined(array):
        return None
    if dims != axes and sorted(dims) == sorted(axes):
        return axes
    is_turned = shapes and array.shape not in shapes and sorted(shapes[0]) == sorted(array.shape)
    if not is_turned:
        return None
    remaining = list(zip(array.shape, dims, strict=True))
    in_order = []
    for size in shapes[0]:
        position = [extent for extent, _ in remaining].index(size)
        in_order.append(remaining.pop(position)[1])
    return tuple(in_order)


def _in_source_type(computed: Computed) -> Computed:
    """Return a tensor in the type of the integers that it is computed from; note wider floats.

    Only counters and constants stay integers, and no codes.
    """
    name, array = computed.name, computed.array
    types = _source_types(computed)
    is_lazy = hasattr(array, "dask")
    stored = ELEMENT_TYPES[computed.dtype]
    if is_lazy and types and all(map(_is_whole, types)) and lazy_of(array) is None:
        computed = computed._replace(array=with_blocks(array, _without_overflow))
    integers = [stored.name] if _is_whole(stored.name) else list(types)
    if len(integers) == 1 and _is_whole(integers[0]):
        role = Structure([Described(name, integers[0], array.shape)])[name].role
        if role not in PARAMETERS and role is not Role.SCALE:
            return computed._replace(dtype=integers[0], rounds=True)
    floats = {name for name in types if ELEMENT_TYPES[name].float_format is not None}
    is_wide = stored.name == "float64" and floats and "float64" not in floats
    if is_wide and (not is_lazy or _is_arithmetic(array)):
        return computed._replace(widened=_WIDENED)
    return computed


def _is_arithmetic(array: Any) -> bool:
    """Return whether arithmetic chose the type of a dask array, rather than a cast or function."""
    layers = list(array.dask.layers)
    is_typed = any(name.startswith("astype-") or "quantile-" in name for name in layers)
    return any(name.startswith(_ARITHMETIC) for name in ([array.name] if is_typed else layers))


def _source_types(computed: Computed) -> set[str]:
    """Return the types of the tensors of files and mappings that a tensor is computed from."""
    dtypes = [lazy.dtype for lazy in lazies_in(computed.array).values()]
    dtypes += [entry.dtype for entry in mapped_arrays(computed.variable)]
    return {name for name in map(element_type, dtypes) if name is not None}


def _is_whole(dtype: str) -> bool:
    """Return whether a type is one of integers or truth values."""
    return ELEMENT_TYPES[dtype].range is not None or ELEMENT_TYPES[dtype].kind == "bool"


def _without_overflow(block: Any) -> Any:
    """Widen integers, whose sums would wrap around."""
    is_narrow = block.dtype.kind in "biu" and block.dtype.itemsize < np.dtype("i8").itemsize
    return block.astype(np.int64) if is_narrow else block


def _encoding(variable: xr.Variable) -> Mapping[Any, Any]:
    """Return the encoding of a variable, if xckpt set it."""
    return variable.encoding if "layout" in variable.encoding else {}


def _layout(encoding: Mapping[Any, Any]) -> Any:
    """Return the layout in which a variable was stored; a single part is dense."""
    return "dense" if "part" in encoding else encoding.get("layout")


def array_of(variable: xr.Variable) -> Any:
    """Return the array of a variable; lazy arrays of other engines become dask arrays."""
    # Neither check suffices: sparse arrays are not `_in_memory`, and adapters may wrap arrays
    # that are.
    is_adapter = isinstance(data_of(variable), ExplicitlyIndexed)
    if is_adapter and not is_in_memory(variable):
        variable = variable.chunk(dict.fromkeys(variable.dims, "auto"))
    return variable.data
