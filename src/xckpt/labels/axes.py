"""Names of axes: chosen by the user, stated by the file, or made from the size of the axis.

The names in a Dataset follow three rules:

- Axes with the same name have the same size.
- No tensor has the same name twice; xarray would return wrong results without an error.
- No axis has the name of a variable, except of an index coordinate; xarray would read that variable
  when it opens the Dataset.
"""

from __future__ import annotations

import re
from collections import ChainMap
from fnmatch import translate
from itertools import chain, count
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.errors import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

# Names that xckpt (d768, d768_1) and xarray (dim_0) generate.
_GENERATED = re.compile(r"(d\d+(_\d+)?|dim_\d+)")


class AxisNamer:
    """Names for the axes of one Dataset, assigned variable by variable."""

    # `dims` has the user's names: globs of variable names, each with one name per axis. None
    # leaves an axis to the file, or to its size. The last matching glob wins. `reserved` are names
    # of variables, which no axis may have.
    def __init__(
        self,
        dims: Mapping[str, Sequence[str | None]] | None = None,
        reserved: Collection[str] = (),
    ) -> None:
        self._entries = [_parse_entry(glob, names) for glob, names in (dims or {}).items()]
        self._reserved = reserved
        #: Reserved names that axes may have: the names of index coordinates.
        self._index_coords: frozenset[str] = frozenset()
        self._sizes: ChainMap[str, int] = ChainMap()
        # Layers repeat the same names and shapes: each combination is worked out once.
        self._fitted: dict[tuple[Sequence[str | None], tuple[int, ...]], tuple[str, ...]] = {}

    def for_child(self, index_sizes: Mapping[str, int]) -> AxisNamer:
        """Return a namer for a node with these index coordinates, below this one in a tree."""
        child = AxisNamer()
        child._entries, child._reserved = self._entries, self._reserved
        child._index_coords = self._index_coords.union(index_sizes)
        child._sizes = self._sizes.new_child(dict(index_sizes))
        return child

    def claim(self, name: str, size: int) -> None:
        """Reserve a name for axes of one size before a variable uses it for another size."""
        self._sizes[name] = size

    def fits(self, name: str, size: int) -> bool:
        """Return whether no axis of another size has this name."""
        return self._sizes.get(name, size) == size

    def users_names(self, tensor: str) -> tuple[str | None, ...] | None:
        """Return the user's names for the axes of a tensor, or None if no glob matches."""
        for entry in reversed(self._entries):
            if entry.matches(tensor):
                return entry.names
        return None

    def name_axes(
        self,
        variable: str,
        shape: tuple[int, ...],
        suggested: Sequence[str | None] | None = None,
        stack_dims: tuple[str, ...] = (),
        member: str = "",
    ) -> tuple[str, ...]:
        """Return the names of a variable's axes; `suggested` has the file's names."""
        # A stack begins with the axes `stack_dims`, and the user's globs also match the name of
        # its first `member`.
        chosen = self._chosen_names(variable, shape, stack_dims, member)
        unnamed = (None,) * len(shape)
        if stack_dims:
            suggested = (*stack_dims, *(suggested or unnamed[len(stack_dims) :]))
        pairs = zip(chosen or unnamed, suggested or unnamed, strict=True)
        # A list first: this runs for every tensor of a file, and a generator takes longer.
        preferred = tuple([first or second for first, second in pairs])
        names = self._fitted.get((preferred, shape))
        if names is None:
            names = self._fitted[preferred, shape] = self._fit(preferred, shape)
        return names

    def _chosen_names(
        self, variable: str, shape: tuple[int, ...], stack_dims: tuple[str, ...], member: str
    ) -> tuple[str | None, ...] | None:
        """Return the user's names for all axes of a variable, or None if no glob matches."""
        for entry in reversed(self._entries):
            if not entry.matches(variable) and not (stack_dims and entry.matches(member)):
                continue
            glob, names = entry.glob, entry.names
            own_ndim = len(shape) - len(stack_dims)
            if len(names) not in {len(shape), own_ndim}:
                stacked = f", {len(shape)} when stacked" if stack_dims else ""
                raise ValueError(
                    f"dims[{glob!r}] has {len(names)} names, but tensor {shown(variable)} has "
                    f"{own_ndim} axes{stacked} (shape {shape})"
                )
            for name in names:
                if name is not None and self._is_reserved(name):
                    raise ValueError(
                        f"dims[{glob!r}] names an axis {name!r}, which is the name of a variable; "
                        "choose another name"
                    )
            if len(names) == own_ndim:
                return (None,) * len(stack_dims) + names
            # The axes of the stack have coordinates of the same names, which stay as they are.
            for name, dim in zip(names, stack_dims, strict=False):
                if name not in {None, dim}:
                    raise ValueError(
                        f"dims[{glob!r}] names the stacked axis {dim!r} {name!r}; pass None for "
                        f"it, and rename it afterwards: ds.rename({{{dim!r}: {name!r}}})"
                    )
            return names
        return None

    def _fit(self, preferred: Sequence[str | None], shape: tuple[int, ...]) -> tuple[str, ...]:
        """Keep the preferred names that fit, and name the other axes after their sizes."""
        fitted: list[str | None] = []
        for preference, size in zip(preferred, shape, strict=True):
            fits = preference is not None and self._take(preference, size, fitted)
            fitted.append(preference if fits else None)
        names: list[str] = []
        for name, size in zip(fitted, shape, strict=True):
            names.append(self._name_from_size(size, {*names, *fitted}) if name is None else name)
        return tuple(names)

    def _name_from_size(self, size: int, used: Collection[str | None]) -> str:
        """Return ``d768``, or the first of ``d768_1``, ``d768_2``, ... that can be used."""
        candidates = chain([f"d{size}"], (f"d{size}_{number}" for number in count(1)))
        return next(name for name in candidates if self._take(name, size, used))

    def _take(self, name: str, size: int, used: Collection[str | None]) -> bool:
        """Use a name for an axis, unless the tensor, a variable or another size has it."""
        if name in used or self._is_reserved(name):
            return False
        return self._sizes.setdefault(name, size) == size

    def _is_reserved(self, name: str) -> bool:
        return name in self._reserved and name not in self._index_coords


def explicit_name(dim: Any) -> str | None:
    """Return the name of a dimension, or None if xckpt or xarray generated it."""
    return None if _GENERATED.fullmatch(str(dim)) else str(dim)


class _AxisNames(NamedTuple):
    """An entry of ``dims=``."""

    glob: str
    matches: Callable[[str], object]
    names: tuple[str | None, ...]


def _parse_entry(glob: Any, names: Any) -> _AxisNames:
    if not isinstance(glob, str) or isinstance(names, str):
        raise TypeError(
            f"dims maps globs of tensor names to sequences of axis names, not {glob!r}: {names!r}"
        )
    explicit = [name for name in names if name is not None]
    if not all(isinstance(name, str) and name for name in explicit):
        raise TypeError(
            f"dims[{glob!r}] has an axis name that is empty or not a string: {tuple(names)!r}"
        )
    if len(set(explicit)) != len(explicit):
        raise ValueError(f"dims[{glob!r}] has the same name for two axes: {tuple(names)!r}")
    return _AxisNames(glob, re.compile(translate(glob)).match, tuple(names))
