"""Tensors that arithmetic between checkpoints left out.

xarray combines the variables that both Datasets have, and drops all others without a word. The
graph of a result still begins with the tensors that it is computed from, and each of these knows
which tensors were opened with it (`Opened`). A tensor is reported only if arithmetic explains that
it is missing: all results that need its checkpoint also need another one, which lacks it. A
selection of tensors that both sides have is thus no loss.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from xckpt.arrays.graph import lazies_in, lazy_of
from xckpt.formatting import base_name, counted
from xckpt.upstream.dask_arrays import is_dask_array
from xckpt.upstream.xarray_variables import data_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from xckpt.arrays.lazy import LazyArray, Opened
    from xckpt.datasets.tensors import OpenTensors

__all__ = ["IN_MEMORY", "Loss", "SourceShapes", "losses"]

#: Beginning of the names of layers of arrays in memory, as dask names them.
IN_MEMORY = "array-"


class Loss(NamedTuple):
    """Tensors of an opened checkpoint that a result lacks."""

    source: str
    #: Number of tensors that were opened.
    opened: int
    names: list[str]

    def __str__(self) -> str:
        tensors = f"{len(self.names)} of {counted(self.opened, 'tensor')} of {self.source}"
        return (
            f"{tensors} missing, as arithmetic keeps the tensors that both sides have "
            "(base.ckpt.merge(other) keeps all of base, and may be called for each of several)"
        )


class _Uses:
    """The checkpoints that variables are computed from."""

    def __init__(self) -> None:
        # Tensors that are read, by checkpoint.
        self.tensors: dict[Opened, set[str]] = defaultdict(set)
        # Members of stacks among them.
        self.members: dict[Opened, set[str]] = defaultdict(set)
        # Checkpoints that a variable needs, for each variable.
        self.needs: list[set[Opened]] = []
        # The arrays in memory that it needs, by their names in the graph.
        self.in_memory: list[frozenset[str]] = []
        self._by_layer: dict[str, set[Opened]] = {}
        self._has_factor = False  # in the last variable

    def add(self, array: Any) -> None:
        """Add the array of a variable."""
        if not is_dask_array(array):
            return
        opened: set[Opened] = set()
        for name, lazy in lazies_in(array).items():
            if name not in self._by_layer:
                self._by_layer[name] = self._read(lazy)
            opened |= self._by_layer[name]
        self.needs.append(opened)
        layers = {} if lazy_of(array) is not None else array.dask.layers
        in_memory = {n: layer for n, layer in layers.items() if n.startswith(IN_MEMORY)}
        self.in_memory.append(frozenset(in_memory))
        self._has_factor = any(_broadcasts(layer, array) for layer in in_memory.values())

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
        # One array for all variables is a factor, and no Dataset that could lack tensors. So is
        # one that broadcasts to a single variable.
        is_one = len(self.needs) == 1 and not self._has_factor
        if all(in_memory) and (is_one or not frozenset.intersection(*in_memory)):
            yield None


def _broadcasts(layer: Mapping[Any, Any], array: Any) -> bool:
    """Return whether the array of a layer in memory is smaller than a result."""
    shape = getattr(next(iter(layer.values()), None), "shape", ())
    sizes = zip(shape, array.shape, strict=False)
    return len(shape) < array.ndim or any(size == 1 < largest for size, largest in sizes)


def losses(tensors: OpenTensors) -> list[Loss]:
    """Return the tensors that a Dataset or a tree lacks because of arithmetic."""
    if tensors.format is not None:
        return []
    uses = _Uses()
    for variable in tensors.variables.values():
        uses.add(data_of(variable))
    names = {row.name for row in tensors.rows}
    in_result = {opened: _in_result(opened, read, names) for opened, read in uses.tensors.items()}
    result = []
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
                # Layers that alignment with another checkpoint left out are read with their stack.
                and (stored not in read or (partner is not None and stored in members))
            )
        if missing:
            result.append(Loss(base_name(opened.source), len(stored_names), list(missing)))
    return result


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

    def is_stack(self, name: str, array: Any) -> bool:
        """Return whether an array is computed from a stack of the same name, with all its axes."""
        return any(
            lazy.name == name and len(lazy.shape) == array.ndim and len(self._of(layer, lazy)) > 1
            for layer, lazy in lazies_in(array).items()
        )
