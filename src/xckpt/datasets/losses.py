"""Tensors that arithmetic between checkpoints left out.

xarray combines the variables that both Datasets have, and drops all others without a word. The
graph of a result still begins with the tensors that it is computed from, and each of these knows
which tensors were opened with it (`Opened`). A tensor is reported only if arithmetic explains that
it is missing: all results that need its checkpoint also need another one, which lacks it. A
selection of tensors that both sides have is thus no loss.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.arrays.derived import (
    Selection,
    is_broadcast,
    lazies_in,
    left_out_of,
    repeats_left_out_of,
)
from xckpt.arrays.graph import lazy_of
from xckpt.arrays.keys import normalize
from xckpt.datasets.mappings import NO_NUMBERS
from xckpt.datasets.stack_records import marks_of, remaining_indices
from xckpt.datasets.variables import mapped_arrays
from xckpt.formatting import base_name, counted
from xckpt.upstream.dask_arrays import is_dask_array
from xckpt.upstream.xarray_variables import data_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import xarray as xr

    from xckpt.arrays.lazy import LazyArray, Opened, Origin
    from xckpt.datasets.tensors import OpenTensors

#: The reason why an object of unknown sources has no tensors.
NO_TENSORS = (
    "it has no tensors; arithmetic keeps only those whose names both sides have "
    "(a.rename({old: new}) gives one another name)"
)
#: The reason why the result of arithmetic has no tensors.
NO_COMMON = (
    "the Dataset has no tensors: arithmetic keeps only those whose names both sides have, and "
    "these have none in common, as one side has a prefix, such as 'module.' or '_orig_mod.' "
    "(b.rename({name: 'module.' + name for name in b}) adds it), llama.cpp and transformers name "
    "them differently, or Keras numbers its models (xckpt.compare(a, b, names='auto').ckpt.names "
    "has those that belong together, and a.rename(names) gives a the names of b)"
)
# Beginning of the names of layers of arrays in memory, as dask names them.
_IN_MEMORY = "array-"


_REDUCED = (
    "as means and other reductions of xarray leave out types that numpy calls no numbers, such as "
    "bfloat16 (ds.astype('float32') of each model before keeps them)"
)
_ONE_SIDE = (
    "as arithmetic keeps the tensors that both sides have (base.ckpt.merge(updates) keeps all of "
    "base, and a.ckpt.merge(b - a, scale=0.5) all of the first model in a mean)"
)
_TIED = (
    "as the other side has it tied to the embeddings (b.assign({{{head!r}: b[{table!r}]}}) gives "
    "it a head of its own)"
)
_OTHER_NUMBERS = (
    "as arithmetic keeps the numbers of {dim} that both sides have, and the other side lacks these "
    "(give it the coordinate of the checkpoint: {dim}=ds[{dim!r}]; "
    "xr.set_options(arithmetic_join='exact') raises an error instead)"
)
_ONE_REPEATED = (
    "as arithmetic keeps the numbers of {dim} that both sides have, and only one side has these "
    "(repeat those of the other, too)"
)
_ONE_STACKED = (
    "as one side has them stacked along {dim}, and the other one by one (.ckpt.stack() of the "
    "other, or .ckpt.unstack() of the first, keeps them)"
)


class Loss(NamedTuple):
    """Tensors of an opened checkpoint that a result lacks."""

    source: str
    #: Number of tensors that were opened; 0 for copies of them.
    opened: int
    names: list[str]
    reason: str = _ONE_SIDE

    def __str__(self) -> str:
        count = f"{len(self.names)} of {counted(self.opened, 'tensor')}"
        if not self.opened:
            count = counted(len(self.names), "repeated tensor")
        return f"{count} of {self.source} missing, {self.reason}"


class _Uses:
    """The checkpoints that variables are computed from."""

    def __init__(self) -> None:
        # Tensors that are read, by checkpoint.
        self.tensors: dict[Opened, set[str]] = defaultdict(set)
        # Members of stacks among them.
        self.members: dict[Opened, set[str]] = defaultdict(set)
        # Checkpoints that a variable needs, for each variable.
        self.needs: list[set[Opened]] = []
        # The arrays in memory of its size that it needs, by their names in the graph.
        self.in_memory: list[frozenset[str]] = []
        # Members of stacks that alignment left out, by dimension; for each variable with stacks.
        self.left_out: dict[Opened, list[dict[str, set[str]]]] = defaultdict(list)
        # Names of repeated members that alignment left out, by dimension and checkpoint.
        self.repeats: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
        self._by_layer: dict[str, set[Opened]] = {}

    def add(self, variable: xr.Variable) -> None:
        """Add a variable."""
        array: Any = data_of(variable)
        mapped = mapped_arrays(variable)
        if not is_dask_array(array) and not mapped:
            return
        opened = {entry.opened for entry in mapped}
        for entry in mapped:
            self.tensors[entry.opened].add(entry.name)
        alignments = left_out_of(array)
        for name, lazy in lazies_in(array).items():
            if name not in self._by_layer:
                self._by_layer[name] = self._read(lazy)
            opened |= self._by_layer[name]
            if len(list(islice(lazy.tensor_origins, 2))) > 1:
                lost = {entry.dim: _members_at(lazy, entry) for entry in alignments}
                for checkpoint in self._by_layer[name]:
                    self.left_out[checkpoint].append(lost)
        self._add_repeats(array)
        self.needs.append(opened)
        is_stored = mapped or lazy_of(array) is not None
        layers = {} if is_stored else array.dask.layers
        self.in_memory.append(
            frozenset(
                name
                for name, layer in layers.items()
                # An array that broadcasts is a factor, and no tensor of a Dataset.
                if name.startswith(_IN_MEMORY) and not _broadcasts(layer, array)
            )
        )

    def _add_repeats(self, array: Any) -> None:
        for lazy, chosen, left_out in repeats_left_out_of(array):
            for number in left_out:
                position = int(chosen.positions[number])
                for origin in _parts_at(lazy, chosen.size, [position]):
                    name = f"{origin.tensor.name} at position {number} of {chosen.dim}"
                    if origin.opened is not None:
                        self.repeats[origin.opened.source, chosen.dim][name] = None

    def _read(self, lazy: LazyArray) -> set[Opened]:
        opened = set()
        origins = list(lazy.tensor_origins)
        for origin in origins:
            if origin.opened is not None:
                if len(origins) > 1:
                    self.members[origin.opened].add(origin.tensor.name)
                self.tensors[origin.opened].add(origin.tensor.name)
                opened.add(origin.opened)
        return opened

    def partners(self, opened: Opened) -> Iterator[Opened | None]:
        """Yield the checkpoints that all results of one need as well; None for arrays in memory."""
        users = [number for number, needs in enumerate(self.needs) if opened in needs]
        yield from set.intersection(*[self.needs[number] for number in users]) - {opened}
        in_memory = [self.in_memory[number] for number in users]
        # One array for all of several variables is a factor, too.
        is_one = len(self.needs) == 1
        if all(in_memory) and (is_one or not frozenset.intersection(*in_memory)):
            yield None


def _members_at(lazy: LazyArray, alignment: Selection) -> set[str]:
    """Return the tensors at positions of a stack; all of them if it was selected from before."""
    return {o.tensor.name for o in _parts_at(lazy, alignment.size, alignment.left_out)}


def _parts_at(lazy: LazyArray, size: int, positions: Iterable[int]) -> Iterator[Origin]:
    """Yield the tensors at positions of the axis of a size; all tensors without such an axis."""
    axis = next((n for n, length in enumerate(lazy.shape) if length == size), None)
    selected = [lazy]
    if axis is not None:
        before = (slice(None),) * axis
        keys = [(*before, slice(n, n + 1), ...) for n in positions]
        selected = [lazy.sliced(normalize(key, lazy.shape)) for key in keys]
    for part in selected:
        yield from part.tensor_origins


def _broadcasts(layer: Mapping[Any, Any], array: Any) -> bool:
    """Return whether the array of a layer in memory is smaller than a result."""
    shape = getattr(next(iter(layer.values()), None), "shape", ())
    sizes = zip(shape, array.shape, strict=False)
    return len(shape) < array.ndim or any(size == 1 < largest for size, largest in sizes)


def losses(tensors: OpenTensors) -> list[Loss]:
    """Return the tensors that a Dataset or a tree lacks because of arithmetic."""
    if reduced := _left_out_by_reductions(tensors):
        count = len(reduced) + len(tensors.variables)
        return [Loss("a mapping", count, reduced, _REDUCED)]
    if tensors.format is not None:
        return []
    uses = _Uses()
    for variable in tensors.variables.values():
        uses.add(variable)
    names = {row.name for row in tensors.rows}
    in_result = {opened: _in_result(opened, read, names) for opened, read in uses.tensors.items()}
    repeated = [
        Loss(base_name(source), 0, list(missing), _ONE_REPEATED.format(dim=dim))
        for (source, dim), missing in uses.repeats.items()
    ]
    result = [*repeated, *_unaligned(uses, names), *_stacked_on_one_side(tensors, uses, in_result)]
    reported = {name for loss in result for name in loss.names}
    for opened, stored_names in in_result.items():
        missing: dict[str, None] = {}
        read, members = uses.tensors[opened], uses.members[opened]
        for partner in uses.partners(opened):
            partner_names = {} if partner is None else in_result[partner]
            missing |= dict.fromkeys(
                name
                for name, stored in stored_names.items()
                if name not in names
                and name not in partner_names
                and stored not in reported
                # Layers that alignment with another checkpoint left out are read with their stack.
                and (stored not in read or (partner is not None and stored in members))
            )
        head = _tied_head(tensors, missing)
        missing = {name: None for name in missing if head is None or name != head[0]}
        source, count = base_name(opened.source), len(stored_names)
        if head is not None and opened.shared.get(stored_names[head[0]]) is None:
            reason = _TIED.format(head=head[0], table=head[1])
            result.append(Loss(source, count, [head[0]], reason))
        if missing:
            result.append(Loss(source, count, list(missing)))
    return result


def _left_out_by_reductions(tensors: OpenTensors) -> list[str]:
    """Return the arrays in memory that a reduction left out, whose results know no source."""
    names = getattr(tensors.obj, "encoding", {}).get(NO_NUMBERS, ())
    variables = tensors.variables
    is_reduced = not any(variable.encoding for variable in variables.values())
    return [*names] if is_reduced and variables.keys().isdisjoint(names) else []


def _tied_head(tensors: OpenTensors, missing: Mapping[str, None]) -> tuple[str, str] | None:
    """Return a missing head, and the embeddings that the other side has instead."""
    models = tensors.structure.models if missing else None
    if models is None:
        return None
    for name in missing:
        place = models.describe(name)
        if place is not None and (place.slot, place.param) == ("output", "weight"):
            table = tensors.structure.weight_of("token_embedding")
            return None if table is None else (name, table)
    return None


def _unaligned(uses: _Uses, names: set[str]) -> Iterator[Loss]:
    """Yield members of stacks whose numbers arrays in memory lack, which alignment left out."""
    for opened, by_variable in uses.left_out.items():
        for dim in set.intersection(*map(set, by_variable)):
            lost = {name for of_variable in by_variable for name in of_variable[dim]} - names
            missing = [name for name in opened.names if name in lost]
            if missing:
                reason = _OTHER_NUMBERS.format(dim=dim)
                yield Loss(base_name(opened.source), len(opened.names), missing, reason)


def _stacked_on_one_side(
    tensors: OpenTensors, uses: _Uses, in_result: Mapping[Opened, Mapping[str, str]]
) -> Iterator[Loss]:
    """Yield members of stacks that left only their coordinates."""
    used = {dim for variable in tensors.variables.values() for dim in variable.dims}
    coords = tensors.coords
    lost: dict[str, Any] = {
        name: dim
        for dim, coord in coords.items()
        if dim not in used and coord.dims == (dim,)
        for stack, record in marks_of(coord).items()
        if stack not in tensors.variables and not record.run
        for name in record.names(remaining_indices(record, coord, coords), record.dims)
        if name is not None
    }
    for opened in sorted(in_result, key=lambda opened: not opened.stacks):
        partners = list(uses.partners(opened))
        missing = [name for name in lost if name in in_result[opened]]
        sides = [opened, *partners]
        if partners and missing and not all(side and side.stacks for side in sides):
            reason = _ONE_STACKED.format(dim=lost[missing[0]])
            yield Loss(base_name(opened.source), len(in_result[opened]), missing, reason)
            return


def _in_result(opened: Opened, read: set[str], names: set[str]) -> dict[str, str]:
    """Return the opened tensors by their names in the result; empty if the names are unrelated."""
    if not read.isdisjoint(names):
        forms = {_Form("", "", "")}
    else:
        modules = {_module(name): name for name in names}
        forms = {form for name in read for form in _forms(name, names, modules)}
    in_result = {}
    for prefix, suffix, leaf in forms:
        for name in opened.names:
            if name.startswith(prefix) and name.endswith(suffix):
                in_result[name[len(prefix) : len(name) - len(suffix)] + leaf] = name
    return in_result


class _Form(NamedTuple):
    """The name of an opened tensor, around the part that it shares with one of a result."""

    prefix: str
    suffix: str
    leaf: str  # the end of the name in the result


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _forms(name: str, names: set[str], modules: Mapping[str, str]) -> Iterator[_Form]:
    """Yield the relation of an opened tensor to the result, at its first dot that shows one."""
    start = name.find(".") + 1
    while start:
        if name[start:] in names:
            yield _Form(name[:start], "", "")
            return
        end = len(name)
        while (end := name.rfind(".", start, end)) > start:
            if name[start:end] in modules and "." in name[start:end]:
                leaf = modules[name[start:end]].removeprefix(name[start:end])
                yield _Form(name[:start], name[end:], leaf)
                return
        start = name.find(".", start) + 1


class SourceShapes:
    """The shapes of the tensors that computed variables begin with."""

    def __init__(self) -> None:
        self._by_layer: dict[str, dict[str, tuple[int, ...]]] = {}

    def _of(self, layer: str, lazy: LazyArray) -> dict[str, tuple[int, ...]]:
        if layer not in self._by_layer:
            tensors = [origin.tensor for origin in lazy.tensor_origins if origin.role is None]
            self._by_layer[layer] = {tensor.name: tensor.shape for tensor in tensors}
        return self._by_layer[layer]

    def shapes(self, name: str, array: Any) -> list[tuple[int, ...]]:
        """Return the different shapes of the stored tensors of a name in a computed array."""
        shapes = [self._of(*item).get(name) for item in lazies_in(array).items()]
        return list(dict.fromkeys([shape for shape in shapes if shape is not None]))

    def broadcast(self, name: str, variable: xr.Variable) -> list[tuple[int, ...]]:
        """Return the shapes of the sources that broadcasting gave axes, of a name or else of all.

        Empty if it did not.
        """
        lazies, mapped = lazies_in(array := data_of(variable)), mapped_arrays(variable)
        shapes = {layer: self._of(layer, lazy).get(name) for layer, lazy in lazies.items()}
        sources = {layer: shape for layer, shape in shapes.items() if shape is not None}
        arrays = [entry for entry in mapped if entry.name == name]
        if not (sources or arrays):
            sources, arrays = {layer: lazy.shape for layer, lazy in lazies.items()}, [*mapped]
        before = dict.fromkeys((*sources.values(), *[entry.shape for entry in arrays]))
        if not before or variable.ndim <= max(map(len, before)):
            return []
        is_wider = all(entry.is_broadcast for entry in arrays)
        is_wider &= not sources or is_broadcast(array, sources)
        return list(before) if is_wider else []

    def is_stack(self, name: str, array: Any) -> bool:
        """Return whether an array is computed from a stack of the same name, with all its axes."""
        return any(
            lazy.name == name and len(lazy.shape) == array.ndim and len(self._of(layer, lazy)) > 1
            for layer, lazy in lazies_in(array).items()
        )
