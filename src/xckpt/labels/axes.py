"""Names of axes: the caller's, else the file's, else the size's.

Equal names mean equal extents throughout a Dataset, no tensor has one name twice, and no name is
that of a variable but for index coordinates: xarray would compute silently wrong on the second and
read a variable at open on the third.
"""

from __future__ import annotations

import re
from collections import ChainMap
from fnmatch import translate
from typing import TYPE_CHECKING, Any

from xckpt.errors import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

__all__ = ["AxisNames", "stated_name"]

# Names that we or xarray give to axes that have none.
_MADE_UP = re.compile(r"(d\d+(_\d+)?|dim_\d+)")


class AxisNames:
    """Gives the axes of one Dataset's variables their names, variable by variable.

    Parameters
    ----------
    dims : mapping of str to sequence of (str or None), optional
        The caller's names: a glob of variable names to one name for each axis, None where an
        axis is to be named otherwise. The last matching entry wins.
    reserved : collection of str
        Names that no axis may have: those of the variables.

    Raises
    ------
    TypeError
        If `dims` is not a mapping to sequences of names.
    ValueError
        If `dims` gives a tensor a name twice.

    Examples
    --------
    >>> names = AxisNames({"*.w": ("in", "out")})
    >>> names.of("a.w", (3, 4)), names.of("b", (4, 4))
    (('in', 'out'), ('d4', 'd4_1'))
    """

    def __init__(
        self,
        dims: Mapping[str, Sequence[str | None]] | None = None,
        reserved: Collection[str] = (),
    ) -> None:
        self._chosen = [_compiled(glob, names) for glob, names in (dims or {}).items()]
        self._reserved = reserved
        #: Names of variables that are dimensions.
        self._indexed: frozenset[str] = frozenset()
        self._sizes: ChainMap[str, int] = ChainMap()
        self._fitted_before: dict[
            tuple[Sequence[str | None], tuple[int, ...]], tuple[str, ...]
        ] = {}
        self._by_shape: dict[tuple[int, ...], tuple[str, ...]] = {}

    def below(self, indexed: Mapping[str, int]) -> AxisNames:
        """Return the names of a node below this one in a tree.

        A name that has a size here has the same size there. `indexed` has the sizes of dimensions
        that have the names of variables of the node.
        """
        below = AxisNames()
        below._chosen, below._reserved = self._chosen, self._reserved
        below._indexed = self._indexed.union(indexed)
        below._sizes = self._sizes.new_child(dict(indexed))
        return below

    def _is_reserved(self, name: str) -> bool:
        return name in self._reserved and name not in self._indexed

    def claim(self, name: str, size: int) -> None:
        """Keep a name for axes of one size, before any variable may take it for another."""
        self._sizes[name] = size

    def fits(self, name: str, size: int) -> bool:
        """Return whether no axis of another size has a name."""
        return self._sizes.get(name, size) == size

    def callers(self, tensor: str) -> tuple[str | None, ...] | None:
        """Return what the caller named the axes of a tensor, None if nothing matches."""
        for _, matches, names in reversed(self._chosen):
            if matches(tensor):
                return names
        return None

    def of(
        self,
        variable: str,
        shape: tuple[int, ...],
        suggested: Sequence[str | None] | None = None,
        stacked: tuple[str, ...] = (),
        member: str = "",
    ) -> tuple[str, ...]:
        """Name the axes of a variable."""
        chosen = self._chosen_for(variable, shape, stacked, member)
        if chosen is None and suggested is None and not stacked:
            return self._size_names(shape)
        if stacked:
            suggested = (*stacked, *(suggested or [None] * (len(shape) - len(stacked))))
        wanted = tuple(
            [
                (chosen[axis] if chosen is not None else None)
                or (suggested[axis] if suggested is not None else None)
                for axis in range(len(shape))
            ]
        )
        # What was wanted once is wanted by every layer, and gets the same answer.
        known = self._fitted_before.get((wanted, shape))
        if known is None:
            known = self._fitted_before[wanted, shape] = self._fitted(wanted, shape)
        return known

    def _chosen_for(
        self, variable: str, shape: tuple[int, ...], stacked: tuple[str, ...], member: str
    ) -> tuple[str | None, ...] | None:
        for glob, matches, names in reversed(self._chosen):
            if not (matches(variable) or (stacked and matches(member))):
                continue
            inner = len(shape) - len(stacked)
            if len(names) not in {len(shape), inner}:
                axes = f"{inner} axes, {len(shape)} when stacked" if stacked else f"{inner} axes"
                raise ValueError(
                    f"dims[{glob!r}] has {len(names)} names, but tensor {shown(variable)} has "
                    f"{axes} (shape {shape})"
                )
            self._refuse_names_of_variables(glob, names)
            if len(names) == inner:
                return (None,) * len(stacked) + names
            _refuse_other_names(glob, names, stacked)
            return names
        return None

    def _refuse_names_of_variables(self, glob: str, names: tuple[str | None, ...]) -> None:
        for name in names:
            if name is not None and self._is_reserved(name):
                raise ValueError(
                    f"dims[{glob!r}] names an axis {name!r}, which is the name of a variable; "
                    "choose another"
                )

    def _fitted(self, wanted: Sequence[str | None], shape: tuple[int, ...]) -> tuple[str, ...]:
        """Keep the wanted names that fit, and give the other axes the names of their sizes."""
        fitted: list[str | None] = []
        for name, size in zip(wanted, shape, strict=True):
            free = name is not None and name not in fitted and not self._is_reserved(name)
            fits = free and self._sizes.setdefault(str(name), size) == size
            fitted.append(name if fits else None)
        result: list[str] = []
        for name, size in zip(fitted, shape, strict=True):
            taken = {*result, *(other for other in fitted if other is not None)}
            result.append(name if name is not None else self._size_name(size, taken))
        return tuple(result)

    def _size_names(self, shape: tuple[int, ...]) -> tuple[str, ...]:
        known = self._by_shape.get(shape)
        if known is None:
            names: list[str] = []
            for size in shape:
                names.append(self._size_name(size, names))
            known = self._by_shape[shape] = tuple(names)
        return known

    def _size_name(self, size: int, taken: Collection[str]) -> str:
        """Return ``d768``, or ``d768_1``, ``d768_2``, ... where that is taken."""
        repeat = 0
        while True:
            name = f"d{size}_{repeat}" if repeat else f"d{size}"
            free = name not in taken and not self._is_reserved(name)
            if free and self._sizes.setdefault(name, size) == size:
                return name
            repeat += 1


def stated_name(dim: Any) -> str | None:
    """Return the name of a dimension, None where it stands for no name."""
    return None if _MADE_UP.fullmatch(str(dim)) else str(dim)


def _refuse_other_names(glob: str, names: tuple[str | None, ...], stacked: tuple[str, ...]) -> None:
    """Refuse new names for the axes that stacking makes: they are also names of coordinates."""
    for name, made in zip(names, stacked, strict=False):
        if name not in {None, made}:
            raise ValueError(
                f"dims[{glob!r}] names the stacked axis {made!r} {name!r}; give None there, and "
                f"rename it afterwards: ds.rename({{{made!r}: {name!r}}})"
            )


def _compiled(glob: Any, names: Any) -> tuple[str, Callable[[str], object], tuple[str | None, ...]]:
    if not isinstance(glob, str) or isinstance(names, str):
        raise TypeError(
            f"dims maps globs of tensor names to sequences of axis names, not {glob!r}: {names!r}"
        )
    given = [name for name in names if name is not None]
    if not all(isinstance(name, str) and name for name in given):
        raise TypeError(f"dims[{glob!r}] has an axis name that is not a text: {tuple(names)!r}")
    if len(set(given)) != len(given):
        raise ValueError(f"dims[{glob!r}] gives one name to two axes: {tuple(names)!r}")
    return glob, re.compile(translate(glob)).match, tuple(names)
