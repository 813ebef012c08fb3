"""Arrays of an Index that become variables: whole tensors, parts of tensors, and stacks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.arrays import LazyArray, lazy_arrays
from xckpt.arrays.lazy import Opened
from xckpt.arrays.stacked import AbsentArray, MemberArrays, StackedArray, can_be_absent
from xckpt.datasets.options import OpenOptions, stacked_modules
from xckpt.errors import shown, warn
from xckpt.labels import AxisNamer, select
from xckpt.labels.filters import suggest_filters
from xckpt.labels.grids import Stack, find_stacks
from xckpt.storage.source import sources_of
from xckpt.structure import structure_of
from xckpt.structure.dims import axes_of
from xckpt.structure.numbering import is_module, modules_by_frequency, split_words

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from xckpt.index import Index, Tensor
    from xckpt.storage import Source

# Modules in a message.
_MOST_MODULES = 8
# Attempts to find a free name for a part by adding colons. Only malicious files need more.
_MOST_ATTEMPTS = 8


class Stacked(NamedTuple):
    """A stack of tensors, and their arrays."""

    stack: Stack
    members: MemberArrays


class Listed(NamedTuple):
    """An array that becomes a variable."""

    name: str  # of the variable
    lazy: LazyArray
    tensor: Tensor  # the first one of a stack
    role: str | None  # of a part; None for a whole tensor
    stacked: Stacked | None = None

    @property
    def stacked_dims(self) -> tuple[str, ...]:
        """Names of the axes that stacking made."""
        return () if self.stacked is None else self.stacked.stack.dims

    @property
    def suffix(self) -> str:
        """End of the name of a part, after the name of the tensor or stack."""
        base = self.tensor.name if self.stacked is None else self.stacked.stack.name
        return self.name.removeprefix(base)

    @property
    def members(self) -> tuple[str, ...]:
        """Names that the variables would have without stacking."""
        if self.stacked is None:
            return (self.name,)
        members, suffix = self.stacked.stack.members, self.suffix
        return tuple([f"{name}{suffix}" for name in members]) if suffix else members

    @property
    def suggested(self) -> tuple[str | None, ...] | None:
        """Names of the axes in the file, if it has any."""
        return self.tensor.dims if self.role is None else None

    @property
    def path(self) -> tuple[str, ...] | None:
        """Path in the tree of modules; None if it follows from the dots of the name."""
        if self.tensor.path is None:
            return None
        path = self.tensor.path
        if self.stacked is not None:
            path = split_words(self.stacked.stack.template)
        return path if self.role is None else (*path[:-1], f"{path[-1]}{self.suffix}")


class Listing(NamedTuple):
    """The arrays of an Index."""

    arrays: list[Listed]  # in the order of the variables
    flat_order: tuple[str, ...]  # names of the variables without stacking, in their order
    file_order: tuple[str, ...]  # the same names in file order, the parts of a tensor together
    sources: Mapping[str | None, Source]  # the file under None, shards by name
    shared: Mapping[str, str]  # tensors that share the data of another one; see `Index.shared`


def list_arrays(
    source: Source, index: Index, options: OpenOptions, *, for_tree: bool = False
) -> Listing:
    """List the arrays that become variables, without making arrays for other tensors."""
    drop = options.dropped
    chosen = select(index.tensors, options.filter(index))
    if index.arrangement.order:
        is_chosen = set(chosen).__contains__
        chosen = [name for name in index.arrangement.order if is_chosen(name)]
    tensors = [index.tensors[name] for name in chosen if name not in drop]
    sources = sources_of(source, index.shards)
    stacks = _stacks(tensors, index, sources, options, for_tree=for_tree)
    members = {name for stack in stacks.values() for name in stack.members}
    arrays: list[Listed] = []
    names = [tensor.name for tensor in tensors] if drop else chosen
    reading = replace(options.reading, opened=Opened(source.name, names, shared=index.shared))
    for tensor in tensors:
        stack = stacks.get(tensor.name)
        if stack is None and tensor.name in members:
            continue
        by_role = lazy_arrays(tensor, sources, reading)
        if stack is None:
            arrays += [Listed(tensor.name, lazy, tensor, role) for role, lazy in by_role.items()]
            continue
        stacked_tensors = tuple(stack.arrange([index.tensors[name] for name in stack.members]))
        for role, lazy in by_role.items():
            absent = AbsentArray(stack.name, lazy.shape, lazy.dtype) if stack.present else None
            stacked = MemberArrays(stacked_tensors, role, sources, reading, absent)
            grid = StackedArray(stack.name, stacked, stack.shape)
            arrays.append(Listed(stack.name, grid, tensor, role, Stacked(stack, stacked)))
    arrays = [array for array in _name_parts(arrays, tensors) if array.name not in drop]
    if options.globs_of_dims and arrays:
        _warn_of_unused_names(index, arrays, options.globs_of_dims)
    flat_order, file_order = _orders(arrays, tensors)
    return Listing(arrays, flat_order, file_order, sources, index.shared)


def _name_parts(arrays: list[Listed], tensors: list[Tensor]) -> list[Listed]:
    """Move parts to the end, under names that no tensor and no other part has."""
    whole_tensors = [array for array in arrays if array.role is None]
    if len(whole_tensors) == len(arrays):
        return whole_tensors
    used_names = {*(tensor.name for tensor in tensors), *(array.name for array in whole_tensors)}
    parts = []
    for array in arrays:
        if array.role is not None:
            part = array._replace(name=f"{array.name}:{array.role}")
            attempts = 0
            while not used_names.isdisjoint({part.name, *part.members}):
                attempts += 1
                colons = 1
                if attempts >= _MOST_ATTEMPTS:
                    colons += max(len(name) - len(name.rstrip(":")) for name in used_names)
                part = part._replace(name=f"{part.name}{':' * colons}")
            used_names.update({part.name, *part.members})
            parts.append(part)
    return whole_tensors + parts


def free_name(name: str, taken: Collection[Any]) -> str:
    """Return a name for a variable other than a tensor; tensors keep their exact names."""
    while name in taken:
        name = f"{name}:"
    return name


def _stacks(
    tensors: list[Tensor],
    index: Index,
    sources: Mapping[str | None, Source],
    options: OpenOptions,
    *,
    for_tree: bool,
) -> dict[str, Stack]:
    """Return the stacks, by the name of their first tensor in the file."""
    if options.stack is False:
        return {}
    only = stacked_modules(options.stack)
    axes, by_facts = AxisNamer(options.dims), axes_of(index)

    def may_be_absent(name: str) -> bool:
        tensor = index.tensors[name]
        if tensor.problem is not None or _in_parts(tensor, options):
            return False
        (lazy,) = lazy_arrays(tensor, sources, options.reading).values()
        return can_be_absent(lazy.empty((0,) * lazy.ndim))

    def stacks(
        tensors: Collection[Tensor],
        preferred_dims: Mapping[str, tuple[str | None, ...]] | None = None,
    ) -> list[Stack]:
        kinds = {
            tensor.name: stacking_key(tensor, axes, options, by_facts.get(tensor.name))
            for tensor in tensors
        }
        paths = {tensor.name: tensor.path for tensor in tensors if tensor.path is not None}
        parted = [t for t in tensors if t.layout != "dense" and _in_parts(t, options)]
        parts = [f"{tensor.name}:{role}" for tensor in parted for role in tensor.parts]
        reserved = {*parts, *(part.rpartition(".")[2] for part in parts)}
        return find_stacks(
            kinds,
            structure_of(index),
            only,
            paths=paths,
            reserved=reserved,
            for_tree=for_tree,
            preferred_dims=preferred_dims,
            may_be_absent=may_be_absent if options.join == "outer" else None,
        )

    order = {tensor.name: number for number, tensor in enumerate(tensors)}
    warn_of_unknown_modules(order, only)
    preferred_dims = None
    if len(tensors) < len(index.tensors):
        # Name dimensions as if all tensors were opened.
        all_stacks = stacks(index.tensors.values())
        preferred_dims = {name: stack.index_dims for stack in all_stacks for name in stack.members}
    chosen = stacks(tensors, preferred_dims)
    return {min(stack.members, key=order.__getitem__): stack for stack in chosen}


def _in_parts(tensor: Tensor, options: OpenOptions) -> bool:
    """Return whether the parts of a tensor become variables."""
    return tensor.layout == "structural" or (tensor.layout != "dense" and not options.decode)


def stacking_key(
    tensor: Tensor,
    names: AxisNamer,
    options: OpenOptions,
    by_facts: tuple[str | None, ...] | None = None,
) -> tuple[Any, ...]:
    """Return the properties that the members of a stack have in common."""
    parts: tuple[Any, ...] | None = None
    if _in_parts(tensor, options):
        parts = tuple([(r, part.dtype, part.shape) for r, part in tensor.parts.items()])
        if any(part.shape is None for part in tensor.parts.values()):
            parts = (*parts, tensor.name)  # parts without a stated size may differ
    decoded = tensor.layout == "blocks" and options.decode
    return (
        tensor.shape,
        # Blocks of several types are decoded to the same one.
        None if decoded else tensor.dtype,
        tensor.layout,
        tensor.order,
        tensor.dims or by_facts,
        tensor.quantization,
        tensor.problem is None,
        parts,
        names.users_names(tensor.name) if options.globs_of_dims else None,
    )


def warn_of_unknown_modules(names: Collection[str], modules: Collection[str] | None) -> None:
    """Warn of modules to stack that do not exist, and list the existing ones."""
    existing = modules_by_frequency(names, modules) if modules is not None else {}
    unknown = [m for m in modules or () if not any(is_module(t, m) for t in existing)]
    if not unknown:
        return
    shown_modules = [*dict.fromkeys(existing.values())][:_MOST_MODULES]
    listed = ", ".join(map(shown, shown_modules)) or "none"
    text = f"stack: no numbered module is called {', '.join(map(shown, unknown))}"
    text = f"{text}; there are: {listed}"
    warn(text)


def _orders(arrays: list[Listed], tensors: list[Tensor]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return `Listing.flat_order` and `Listing.file_order`."""
    if all(array.role is None for array in arrays):
        names = [array.name for array in arrays]
        if any(array.stacked is not None for array in arrays):
            members = {name for array in arrays for name in array.members}
            names = [tensor.name for tensor in tensors if tensor.name in members]
        return tuple(names), tuple(names)
    variables: dict[str, list[str]] = {tensor.name: [] for tensor in tensors}
    parted: set[str] = set()
    for array in arrays:
        owners = (array.tensor.name,) if array.stacked is None else array.stacked.stack.members
        if array.role is not None:
            parted.update(owners)
        for name, member in zip(owners, array.members, strict=True):
            variables[name].append(member)
    in_file = tuple([member for members in variables.values() for member in members])
    whole = [name for name in variables if name not in parted]
    parts = [part for name, members in variables.items() if name in parted for part in members]
    return (*whole, *parts), in_file


def _warn_of_unused_names(
    index: Index, arrays: list[Listed], dims: Mapping[str, Sequence[str | None]]
) -> None:
    """Warn of globs in `dims` that match no variable and no stacked tensor."""
    # The first tensor of a stack names its axes.
    names = {name for array in arrays for name in (array.name, array.tensor.name)}
    for glob in dims:
        if not select(names, glob):
            hint = suggest_filters(index.tensors, glob)
            text = f"{index.source}: dims[{glob!r}] matches no tensor{hint}"
            warn(text)
