"""Which arrays of an Index become variables: whole tensors, parts of them, and stacks of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from xckpt.arrays import LazyArray, lazy_arrays
from xckpt.arrays.stacked import AbsentArray, StackedArray, TensorArrays, can_be_absent
from xckpt.errors import shown, warn
from xckpt.labels import AxisNamer, select
from xckpt.labels.filters import suggest_filters
from xckpt.labels.grids import Stack, find_stacks, find_stacks_in_tree
from xckpt.labels.numbering import modules_by_frequency, split_words
from xckpt.storage.source import sources_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from xckpt.arrays import ReadOptions
    from xckpt.datasets.options import OpenOptions
    from xckpt.index import Index, Tensor
    from xckpt.storage import Source

__all__ = ["Listed", "Listing", "kind_of", "list_arrays", "require_join", "stacked_modules"]

# Shown in a message.
_MOST_MODULES = 8
# Colons that are tried one by one behind the name of a part. More are needed in files that were
# made to take long.
_FEW = 8


class Stacked(NamedTuple):
    """How tensors were stacked, and the array of each of them."""

    stack: Stack
    members: TensorArrays


class Listed(NamedTuple):
    """An array that becomes a variable.

    Parameters
    ----------
    name : str
        Of the variable.
    lazy : LazyArray
        Its values.
    tensor : Tensor
        That it shows, the first where it shows several.
    role : str or None
        The part of it that is shown, None where it is the whole.
    stacked : Stacked or None
        Where it shows several.
    """

    name: str
    lazy: LazyArray
    tensor: Tensor
    role: str | None
    stacked: Stacked | None = None

    @property
    def stacked_dims(self) -> tuple[str, ...]:
        """Names of the axes that stacking made."""
        return () if self.stacked is None else self.stacked.stack.dims

    @property
    def suffix(self) -> str:
        """What the name of a part has behind that of its tensor, or of the stack."""
        base = self.tensor.name if self.stacked is None else self.stacked.stack.name
        return self.name.removeprefix(base)

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the variables that it would be if it were not stacked."""
        if self.stacked is None:
            return (self.name,)
        members, suffix = self.stacked.stack.members, self.suffix
        return tuple([f"{name}{suffix}" for name in members]) if suffix else members

    @property
    def suggested(self) -> tuple[str | None, ...] | None:
        """Names of a tensor's axes that the file gives."""
        return self.tensor.dims if self.role is None else None

    @property
    def path(self) -> tuple[str, ...] | None:
        """Where it is in the tree of modules, where the dots of its name do not say so."""
        if self.tensor.path is None:
            return None
        path = self.tensor.path
        if self.stacked is not None:
            path = split_words(self.stacked.stack.template)
        return path if self.role is None else (*path[:-1], f"{path[-1]}{self.suffix}")


class Listing(NamedTuple):
    """What becomes of an Index.

    Parameters
    ----------
    arrays : list of Listed
        In the order of the variables.
    flat_order : tuple of str
        Names of the variables in the order that they have when nothing is stacked.
    file_order : tuple of str
        The same names with the parts of a tensor where it is in the file.
    sources : mapping of (str or None) to Source
        The file under None, its shards under their names.
    shared : mapping of str to str
        Tensors whose data are those of another one; see `Index.shared`.
    """

    arrays: list[Listed]
    flat_order: tuple[str, ...]
    file_order: tuple[str, ...]
    sources: Mapping[str | None, Source]
    shared: Mapping[str, str]


def list_arrays(
    source: Source, index: Index, options: OpenOptions, *, for_tree: bool = False
) -> Listing:
    """List what becomes a variable; nothing is built for what is left out."""
    drop = options.dropped
    chosen = select(index.tensors, options.tensors)
    if index.arrangement.order:
        kept = set(chosen)
        chosen = [name for name in index.arrangement.order if name in kept]
    tensors = [index.tensors[name] for name in chosen if name not in drop]
    sources = sources_of(source, index.shards)
    stacks = _stacks(tensors, index, sources, options, for_tree=for_tree)
    members = {name for each in stacks.values() for name in each.members}
    arrays: list[Listed] = []
    reading = options.reading
    for tensor in tensors:
        stacked = stacks.get(tensor.name)
        if stacked is None and tensor.name in members:
            continue
        arrays += _arrays(tensor, stacked, index, sources, reading)
    arrays = [each for each in _named_apart(arrays, tensors) if each.name not in drop]
    if options.dims and arrays:
        _warn_of_unused_names(index, arrays, options.dims)
    return Listing(arrays, *_orders(arrays, tensors), sources, index.shared)


def _named_apart(arrays: list[Listed], tensors: list[Tensor]) -> list[Listed]:
    """Put parts last, and name them so that no tensor and no other part has the name."""
    whole = [each for each in arrays if each.role is None]
    if len(whole) == len(arrays):
        return whole
    taken = {*(tensor.name for tensor in tensors), *(each.name for each in whole)}
    parts = []
    for each in arrays:
        if each.role is not None:
            part = each._replace(name=f"{each.name}:{each.role}")
            tries = 0
            while not taken.isdisjoint({part.name, *part.members}):
                tries += 1
                more = 1 if tries < _FEW else 1 + max(len(t) - len(t.rstrip(":")) for t in taken)
                part = part._replace(name=f"{part.name}{':' * more}")
            taken.update({part.name, *part.members})
            parts.append(part)
    return whole + parts


def stacked_modules(stack: Literal[True] | str | Collection[str]) -> Collection[str] | None:
    """Return the modules that the option `stack` names, None for all."""
    if stack is True:
        return None
    modules = {stack} if isinstance(stack, str) else stack
    # A mapping or a number is a mistake, not a collection of names.
    if not isinstance(modules, set | frozenset | list | tuple) or not all(
        isinstance(module, str) for module in modules
    ):
        raise TypeError(
            "stack takes True, the name of a numbered module ('layers') or a list of them, "
            f"not {stack!r}"
        )
    return modules


def require_join(join: str) -> str:
    """Return the option `join`."""
    if join not in {"exact", "outer"}:
        raise ValueError(f"join={join!r}: expected 'exact' or 'outer'")
    return join


def free_name(name: str, taken: Collection[str]) -> str:
    """Name a variable that is no tensor; tensors have their exact names, so it gives way."""
    while name in taken:
        name = f"{name}:"
    return name


def _arrays(
    tensor: Tensor,
    stacked: Stack | None,
    index: Index,
    sources: Mapping[str | None, Source],
    reading: ReadOptions,
) -> Iterator[Listed]:
    """Return what a tensor, or the stack that it is the first of, is shown as."""
    arrays = lazy_arrays(tensor, sources, reading)
    if stacked is None:
        for role, lazy in arrays.items():
            yield Listed(tensor.name, lazy, tensor, role)
        return
    tensors = tuple(stacked.arrange([index.tensors[name] for name in stacked.members]))
    for role, lazy in arrays.items():
        absent = AbsentArray(stacked.name, lazy.shape, lazy.dtype) if stacked.present else None
        members = TensorArrays(tensors, role, sources, reading, absent)
        grid = StackedArray(stacked.name, members, stacked.shape)
        yield Listed(stacked.name, grid, tensor, role, Stacked(stacked, members))


def _stacks(
    tensors: list[Tensor],
    index: Index,
    sources: Mapping[str | None, Source],
    options: OpenOptions,
    *,
    for_tree: bool,
) -> dict[str, Stack]:
    """Find what is to be stacked, by the first tensor of each stack in file order."""
    if options.stack is False:
        return {}
    only = stacked_modules(options.stack)
    axes = AxisNamer(options.dims)

    def outer(name: str) -> bool:
        tensor = index.tensors[name]
        if tensor.problem is not None or _in_parts(tensor, options):
            return False
        (lazy,) = lazy_arrays(tensor, sources, options.reading).values()
        return can_be_absent(lazy.empty((0,) * lazy.ndim))

    def stacks(
        tensors: Collection[Tensor],
        preferred_dims: Mapping[str, tuple[str | None, ...]] | None = None,
    ) -> list[Stack]:
        kinds = {tensor.name: kind_of(tensor, axes, options) for tensor in tensors}
        paths = {tensor.name: tensor.path for tensor in tensors if tensor.path is not None}
        parted = [t for t in tensors if t.layout != "dense" and _in_parts(t, options)]
        parts = [f"{tensor.name}:{role}" for tensor in parted for role in tensor.parts]
        reserved = {*parts, *(part.rpartition(".")[2] for part in parts)}
        find = find_stacks_in_tree if for_tree else find_stacks
        return find(
            kinds,
            only,
            paths=paths,
            reserved=reserved,
            preferred_dims=preferred_dims,
            may_be_absent=outer if require_join(options.join) == "outer" else None,
        )

    order = {tensor.name: number for number, tensor in enumerate(tensors)}
    warn_of_unknown_modules(order, only)
    preferred_dims = None
    if len(tensors) < len(index.tensors):
        # A dimension has the name that it has where nothing is left out.
        whole = stacks(index.tensors.values())
        preferred_dims = {name: stack.index_dims for stack in whole for name in stack.members}
    found = stacks(tensors, preferred_dims)
    return {min(each.members, key=order.__getitem__): each for each in found}


def _in_parts(tensor: Tensor, options: OpenOptions) -> bool:
    """Return whether a tensor is shown as its parts."""
    return tensor.layout == "structural" or (tensor.layout != "dense" and not options.decode)


def kind_of(tensor: Tensor, names: AxisNamer, options: OpenOptions) -> tuple[Any, ...]:
    """Return all that the members of a stack have in common."""
    parts: tuple[Any, ...] | None = None
    if _in_parts(tensor, options):
        parts = tuple([(r, part.dtype, part.shape) for r, part in tensor.parts.items()])
        if any(part.shape is None for part in tensor.parts.values()):
            parts = (*parts, tensor.name)  # parts that state no size need not be of one
    decoded = tensor.layout == "blocks" and options.decode
    return (
        tensor.shape,
        # Of a model that is quantised to several types, all blocks are numbers of one.
        None if decoded else tensor.dtype,
        tensor.layout,
        tensor.order,
        tensor.dims,
        tensor.quantization,
        tensor.problem is None,
        parts,
        names.caller_names(tensor.name) if options.dims else None,
    )


def warn_of_unknown_modules(names: Collection[str], modules: Collection[str] | None) -> None:
    """Warn of modules to stack that no name has, with those that there are."""
    there = modules_by_frequency(names, modules) if modules is not None else []
    unknown = [module for module in modules or () if module not in there]
    if not unknown:
        return
    listed = ", ".join(shown(module) for module in there[:_MOST_MODULES]) or "none"
    asked = ", ".join(map(shown, unknown))
    text = f"stack: no numbered module is called {asked}; there are: {listed}"
    warn(text)


def _orders(arrays: list[Listed], tensors: list[Tensor]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return `Listing.flat_order` and `Listing.file_order`."""
    if all(each.role is None for each in arrays):
        names = [each.name for each in arrays]
        if any(each.stacked is not None for each in arrays):
            members = {name for each in arrays for name in each.members}
            names = [tensor.name for tensor in tensors if tensor.name in members]
        return tuple(names), tuple(names)
    variables: dict[str, list[str]] = {tensor.name: [] for tensor in tensors}
    parted: set[str] = set()
    for each in arrays:
        of = (each.tensor.name,) if each.stacked is None else each.stacked.stack.members
        if each.role is not None:
            parted.update(of)
        for name, member in zip(of, each.members, strict=True):
            variables[name].append(member)
    in_file = tuple([member for members in variables.values() for member in members])
    whole = [name for name in variables if name not in parted]
    parts = [part for name, members in variables.items() if name in parted for part in members]
    return (*whole, *parts), in_file


def _warn_of_unused_names(
    index: Index, arrays: list[Listed], dims: Mapping[str, Sequence[str | None]]
) -> None:
    """Warn of names of axes whose glob no variable has, nor a tensor that is stacked in one."""
    # Of the first tensor of a stack the glob counts, as where axes are named.
    names = {name for each in arrays for name in (each.name, each.tensor.name)}
    for glob in dims:
        if not select(names, glob):
            hint = suggest_filters(index.tensors, glob)
            text = f"{index.source}: dims[{glob!r}] matches no tensor{hint}"
            warn(text)
