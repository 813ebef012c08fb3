"""The modules of a checkpoint: as a tree, and which numbered ones have which parts.

The layers of a model are often not alike: the first few are dense and the others mixtures of
experts, or every sixth attends to everything. Each such set of numbers is a line of the summary,
and a dimension of its own where modules are stacked, because a dimension has one length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from itertools import islice
from keyword import iskeyword
from typing import TYPE_CHECKING, NamedTuple

from xckpt.labels.numbering import (
    is_index,
    numbered,
    numbered_bases,
    numbered_places,
    spans,
    without_front,
)
from xckpt.notebook.folding import Family, Row, ascending, fold, indices_text
from xckpt.notebook.formatting import binary_size, columns, counted, printable, shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ["ModuleSet", "ModuleTree", "StackedNames", "module_sets", "selection"]

_MOST_LINES = 300
_WIDEST_NAME = 60
_MOST_PARTS = 6
_MOST_DESCRIBED = 16  # sets of modules; a summary shows fewer
_DEEPEST = 16
_LONGEST_SEQUENCE = 3

_Words = tuple[str | None, ...]


class StackedNames(NamedTuple):
    """Tensors that an open object has as one variable."""

    template: tuple[str | int | None, ...]  # of their names: what is no str stands for an index
    dims: tuple[str, ...]  # one for each index
    indices: tuple[tuple[int, ...], ...]  # along each of these


class ModuleSet(NamedTuple):
    """Numbered modules that have something in common which others of their kind do not have."""

    module: str  # what the numbers number: "layers"
    indices: str  # "{3..60}"
    dim: str  # the dimension of what is in them; empty where that is not stacked
    parts: tuple[str, ...]  # what is in these modules only: "mlp.experts", ...


class _Numbers(NamedTuple):
    """What sets apart the tensors of a numbered module."""

    indices: frozenset[str]
    dim: str


def module_sets(
    families: Iterable[Family], stacked: Iterable[StackedNames] = ()
) -> list[ModuleSet]:
    """List the sets of modules, where modules of one name are not all alike."""
    # By the path of the numbered module: its sets, and what is in the modules of each.
    found: dict[_Words, dict[_Numbers, dict[_Words, None]]] = {}
    stacked = list(stacked)
    for template, numbers in [*_of_families(families, stacked), *_of(stacked)]:
        at = [place for place, part in enumerate(template) if part is None]
        for place, after, each in zip(at, [*at[1:], len(template)], numbers, strict=True):
            parts = found.setdefault(template[:place], {}).setdefault(each, {})
            parts[template[place + 1 : after]] = None
    named: dict[str, list[_Words]] = {}
    for path in found:
        named.setdefault(numbered_bases((*path, None))[-1], []).append(path)
    sets: list[ModuleSet] = []
    for base, paths in named.items():
        different = {each for path in paths for each in found[path]}
        # Of two or three it is a sequence of steps, say a convolution and a norm.
        if len(different) > 1 and len(frozenset().union(*[s.indices for s in different])) > (
            _LONGEST_SEQUENCE
        ):
            for path in paths:
                name = base if len(paths) == 1 else _text(path)
                owners = _owners(found[path])
                for each in sorted(found[path], key=_first_and_longest):
                    few = len(sets) < _MOST_DESCRIBED
                    only = _parts(found[path][each], owners) if few else ()
                    sets.append(ModuleSet(name, indices_text(each.indices), each.dim, only))
    return sets


def _of_families(
    families: Iterable[Family], stacked: Iterable[StackedNames]
) -> list[tuple[_Words, list[_Numbers]]]:
    """Return the templates of what is not stacked, whatever its shapes, and the numbers in it."""
    known = {_words(each.template) for each in stacked}
    indices: dict[_Words, list[set[str]]] = {}
    for family in families:
        if family.indices and family.template not in known:
            sets = indices.setdefault(family.template, [set() for _ in family.indices])
            for numbers, more in zip(sets, family.indices, strict=True):
                numbers.update(more)
    return [(t, [_Numbers(frozenset(n), "") for n in sets]) for t, sets in indices.items()]


def _of(stacked: Iterable[StackedNames]) -> list[tuple[_Words, list[_Numbers]]]:
    # Numbers that are in the names of stacks say together which modules are not stacked.
    apart: dict[tuple[_Words, int], set[str]] = {}
    placed = [(_words(each.template), each, numbered_places(each.template)) for each in stacked]
    for words, _, places in placed:
        for at, (_, part) in enumerate(places):
            if isinstance(part, str):
                apart.setdefault((words, at), set()).add(part)
    found = []
    for words, each, places in placed:
        along = iter(zip(each.indices, each.dims, strict=True))
        numbers = []
        for at, (_, part) in enumerate(places):
            indices, dim = (apart[words, at], "") if isinstance(part, str) else next(along)
            numbers.append(_Numbers(frozenset(map(str, indices)), dim))
        found.append((words, numbers))
    return found


def _first_and_longest(each: _Numbers) -> tuple[int, int, str]:
    return min(map(int, each.indices)), -len(each.indices), each.dim


def _words(template: Iterable[str | int | None]) -> _Words:
    return tuple([p if isinstance(p, str) and not is_index(p) else None for p in template])


def _text(pieces: Iterable[str | None]) -> str:
    """Write pieces from inside of names, with a star for each index."""
    found = spans((*pieces, None))[:-1]
    return without_front("".join([f"{front}{part or '*'}" for front, part in found]))


def _owners(sets: Mapping[_Numbers, Iterable[_Words]]) -> dict[_Words, _Numbers | None]:
    """Return which set of modules has parts that begin with some words; None if several do."""
    owners: dict[_Words, _Numbers | None] = {}
    for each, parts in sets.items():
        for words in parts:
            for length in range(1, min(len(words), _DEEPEST) + 1):
                start = words[:length]
                owners[start] = each if owners.get(start, each) == each else None
    return owners


def _parts(here: Iterable[_Words], owners: Mapping[_Words, _Numbers | None]) -> tuple[str, ...]:
    """Name the parts of modules in so few words that no others have parts of that name."""
    names: dict[str, None] = {}
    for words in here:
        deepest = min(len(words), _DEEPEST)
        length = next((n for n in range(1, deepest) if owners[words[:n]] is not None), len(words))
        names[_text(words[:length])] = None
    texts = [pattern.text for pattern in fold(Row(name, "", (), 0) for name in names if name)]
    more = [f"… {len(texts) - _MOST_PARTS:,} more"] if len(texts) > _MOST_PARTS + 1 else []
    return tuple(texts[:_MOST_PARTS] + more if more else texts)


def selection(families: Sequence[Family]) -> dict[str, int]:
    """Return numbers of modules to choose by, as an example, of the family of most tensors."""
    families = [family for family in families if family.indices]
    if not families:
        return {}
    largest = max(families, key=lambda family: (family.count, family.nbytes))
    chosen = {}
    for base, indices in zip(numbered_bases(largest.template), largest.indices, strict=True):
        if base.isidentifier() and not iskeyword(base):
            numbers = sorted(map(int, indices))
            chosen[base] = numbers[len(numbers) // 2]
    return chosen


# --- the tree ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Modules:
    """A module, or several that only differ in their number."""

    count: int = 0
    nbytes: int = 0
    indices: set[str] = field(default_factory=set)
    children: dict[str | None, _Modules] = field(default_factory=dict)


class ModuleTree:
    """The modules of a checkpoint, numbered ones folded, with what is in them.

    Examples
    --------
    >>> ds.ckpt.tree(depth=3)  # doctest: +SKIP
    model                   134 tensors   14.0 MiB
      embed_tokens            2 tensors    2.2 MiB
      layers                120 tensors   11.8 MiB
        {0..11}             120 tensors   11.8 MiB
    """

    def __init__(self, rows: Iterable[Row], depth: int) -> None:
        self._root = _Modules()
        known: dict[tuple[str | None, ...], list[str | None]] = {}
        for row in rows:
            node = self._root
            found = numbered(row.name)
            indices = iter(found.indices)
            if found.template not in known:
                parts = [part for _, part in spans(found.template)]
                known[found.template] = [p if isinstance(p, str) else None for p in parts]
            for word in known[found.template][:depth]:
                node = node.children.setdefault(word, _Modules())
                node.count += 1
                node.nbytes += row.nbytes
                if word is None:
                    node.indices.add(next(indices))

    def __repr__(self) -> str:
        lines = list(islice(_lines(self._root, 0), _MOST_LINES + 1))
        width = max((columns(name) for name, _, _ in lines), default=0)
        text = [
            f"{name}{' ' * (width - columns(name))}  {count:>16}  {size:>10}"
            for name, count, size in lines[:_MOST_LINES]
        ]
        if len(lines) > _MOST_LINES:
            text.append("… and more: choose a smaller depth, or a part with find()")
        return "\n".join(text) or "no tensors"

    def _repr_html_(self) -> str:
        return f"<pre style='line-height:1.4'>{escape(repr(self))}</pre>"


def _lines(node: _Modules, level: int) -> Iterator[tuple[str, str, str]]:
    keys = list(node.children)
    for at in ascending([key or "" for key in keys]):
        key, child = keys[at], node.children[keys[at]]
        name = indices_text(child.indices) if key is None else printable(key)
        short = shortened(name, _WIDEST_NAME)
        yield "  " * level + short, counted(child.count, "tensor"), binary_size(child.nbytes)
        yield from _lines(child, level + 1)
