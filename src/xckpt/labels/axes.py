"""Names of axes: chosen by the user, stated by the file, inferred, or made from their extents.

The names in a Dataset follow these rules:

- Axes with the same name have the same extent. If a name is asked for with several extents, most
  tensors decide which one has it; the others get their extent appended: ``out_352``.
- No tensor has the same name twice; xarray would return wrong results without an error. The axes
  get numbers, so that none of them has the name of a vector: ``d768_1``, ``d768_2``.
- No axis has the name of a variable, except of an index coordinate; xarray would read that variable
  when it opens the Dataset.

They do not depend on the order of the tensors, nor on which of them are opened.
"""

from __future__ import annotations

import re
from collections import ChainMap, Counter
from fnmatch import translate
from itertools import chain, count
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from xckpt.errors import shown, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    Names = Sequence[str | None]
    Dims = Mapping[str, Names] | Literal["size"]

# Names that xckpt (d768, d768_1) and xarray (dim_0) generate.
_GENERATED = re.compile(r"(d\d+(_\d+)?|dim_\d+)")


class AxisNamer:
    """Names for the axes of one Dataset."""

    # `dims` has the user's names: globs of variable names, each with one name per axis. None
    # leaves an axis to the file, or to its extent. The last matching glob wins. "size" names all
    # axes after their extents unless the file states a name. `reserved` are names of variables,
    # which no axis may have.
    def __init__(self, dims: Dims | None = None, reserved: Collection[str] = ()) -> None:
        self.by_size = isinstance(dims, str)
        if isinstance(dims, str) and dims != "size":
            raise ValueError(f"dims={dims!r}: expected 'size', or a mapping of globs to names")
        globs = {} if dims is None or isinstance(dims, str) else dims
        self._entries = [_parse_entry(glob, names) for glob, names in globs.items()]
        self._reserved = reserved
        #: Reserved names that axes may have: the names of index coordinates.
        self._index_coords: frozenset[str] = frozenset()
        self._extents: ChainMap[str, int] = ChainMap()
        # Layers repeat the same names and shapes: each combination is worked out once.
        self._fitted: dict[tuple[Names, tuple[int, ...], int], tuple[str, ...]] = {}
        #: Names that the user asked for, of axes with other extents.
        self._refused: dict[str, set[str]] = {}

    def for_child(self, index_sizes: Mapping[str, int]) -> AxisNamer:
        """Return a namer for a node with these index coordinates, below this one in a tree."""
        child = AxisNamer("size" if self.by_size else None)
        child._entries, child._reserved = self._entries, self._reserved
        child._index_coords = self._index_coords.union(index_sizes)
        child._extents = self._extents.new_child(dict(index_sizes))
        child._refused = self._refused
        return child

    def claim(self, name: str, size: int) -> None:
        """Reserve a name for axes of one extent."""
        self._extents[name] = size

    def survey(self, tensors: Mapping[str, _Shaped], suggested: Mapping[str, Names]) -> None:
        """Decide which extent has each name, by all tensors and the names suggested for some."""
        names: Iterable[Names] = suggested.values()
        shapes = [tensors[tensor].shape for tensor in suggested]
        if self._entries:
            preferred = [self._preferred(n, t.shape, suggested.get(n)) for n, t in tensors.items()]
            names, shapes = preferred, [tensor.shape for tensor in tensors.values()]
        votes: dict[str, Counter[int]] = {}
        for (axes, shape), total in Counter(zip(names, shapes, strict=True)).items():
            for name, extent in zip(axes, shape, strict=True):
                if name is not None and not self._is_reserved(name):
                    votes.setdefault(name, Counter())[extent] += total
        for name, extents in votes.items():
            most = max(extents.values())
            largest = max(extent for extent, total in extents.items() if total == most)
            self._extents.setdefault(name, largest)

    def _preferred(self, tensor: str, shape: tuple[int, ...], suggested: Names | None) -> Names:
        """Return the names that the axes of a tensor or stack should have."""
        unnamed = (None,) * len(shape)
        chosen = self.users_names(tensor) or ()
        # Globs name the axes of a tensor, or also those that stacking adds before them.
        chosen = (*unnamed, *chosen)[len(chosen) :]
        return tuple([a or b for a, b in zip(chosen, suggested or unnamed, strict=True)])

    def fits(self, name: str, size: int) -> bool:
        """Return whether no axis of another extent has this name."""
        return self._extents.get(name, size) == size

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
        suggested: Names | None = None,
        stack_dims: tuple[str, ...] = (),
        member: str = "",
    ) -> tuple[str, ...]:
        """Return the names of a variable's axes; `suggested` has the names in the file."""
        # A stack begins with the axes `stack_dims`, and the user's globs also match the name of
        # its first `member`.
        chosen = self._chosen_names(variable, shape, stack_dims, member)
        unnamed = (None,) * len(shape)
        if stack_dims:
            suggested = (*stack_dims, *(suggested or unnamed[len(stack_dims) :]))
        pairs = zip(chosen or unnamed, suggested or unnamed, strict=True)
        # A list first: this runs for every tensor of a file, and a generator takes longer.
        preferred = tuple([first or second for first, second in pairs])
        key = preferred, shape, len(stack_dims)
        names = self._fitted.get(key)
        if names is None:
            names = self._fitted[key] = self._fit(*key)
        for asked, name in zip(chosen or (), names, strict=False):
            if asked is not None and name != asked:
                self._refused.setdefault(asked, set()).add(name)
        return names

    def warn_of_refused(self, source: str) -> None:
        """Warn once of names that the user asked for, and that axes of other extents have."""
        if self._refused:
            texts = [f"{shown(n)} ({', '.join(sorted(o))})" for n, o in self._refused.items()]
            warn(
                f"{source}: dims has names for axes of several extents, which are called "
                f"otherwise: {'; '.join(texts)}"
            )

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

    def _fit(self, preferred: Names, shape: tuple[int, ...], stacked: int) -> tuple[str, ...]:
        """Return the preferred names where they fit, and names from extents elsewhere."""
        used = [
            name is not None and preferred.count(name) == 1 and self._take(name, extent)
            for name, extent in zip(preferred, shape, strict=True)
        ]
        names = {name for name, is_used in zip(preferred, used, strict=True) if is_used}
        own = shape[stacked:]
        fitted: list[str] = []
        for name, extent, is_used in zip(preferred, shape, used, strict=True):
            if name is not None and is_used:
                fitted.append(name)
                continue
            if name is None:
                base, is_repeated = f"d{extent}", own.count(extent) > 1 and not self.by_size
            elif preferred.count(name) > 1:
                base, is_repeated = name, True
            else:
                base, is_repeated = f"{name}_{extent}", False
            start = [] if is_repeated else [base]
            candidates = chain(start, (f"{base}_{number}" for number in count(1)))
            fitted.append(next(n for n in candidates if n not in names and self._take(n, extent)))
            names.add(fitted[-1])
        return tuple(fitted)

    def _take(self, name: str, extent: int) -> bool:
        """Use a name for an axis, unless a variable or another extent has it."""
        return not self._is_reserved(name) and self._extents.setdefault(name, extent) == extent

    def _is_reserved(self, name: str) -> bool:
        return name in self._reserved and name not in self._index_coords


def explicit_name(dim: Any) -> str | None:
    """Return the name of a dimension, or None if xckpt or xarray generated it."""
    return None if _GENERATED.fullmatch(str(dim)) else str(dim)


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


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
