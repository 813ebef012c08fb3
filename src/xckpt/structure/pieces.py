"""Tensors that are pieces of others by their names: parts on ranks, and flat parameters."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.structure.numbering import parse_name, split_leaf, split_name

if TYPE_CHECKING:
    from collections.abc import Iterable

_RANK = re.compile(
    r"(?:(?P<stem>\w+?)[_-])??(?:(?:mp|tp|dp|fsdp)[_-]?)?(?:rank|tp|mp|shard|part)[_-]?(?P<rank>[0-9]{1,5})",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[0-9]{1,5}")
_FLAT = re.compile(r"_?flat_param(?:_[0-9]{1,5})?")
# Wrappers of modules that only names of FSDP and `torch.compile` have.
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "module"})
_MOST_WORDS = 64


class PieceName(NamedTuple):
    """The name of a tensor without a word for its rank, and the number of the rank."""

    name: str
    rank: int


@lru_cache(maxsize=1 << 14)
def on_ranks(name: str) -> tuple[PieceName, ...]:
    """Return the ways to read a word of a name as the number of a rank, the likeliest first.

    A number without a word is one of a rank only if nothing else has the remaining name.
    """
    words = split_name(name)
    if len(words) > _MOST_WORDS:
        return ()
    separator = split_leaf(name)[1] or "."
    by_word: list[PieceName] = []
    by_number: list[PieceName] = []
    for position, word in enumerate(words):
        match = _RANK.fullmatch(word)
        rest = [*words[:position], *words[position + 1 :]]
        if match is not None:
            if match["stem"]:
                rest.insert(position, match["stem"])
            by_word.append(PieceName(separator.join(rest), int(match["rank"])))
        elif _NUMBER.fullmatch(word):
            by_number.append(PieceName(separator.join(rest), int(word)))
    return (*by_word, *by_number[::-1])


def module_of_flat(name: str) -> str | None:
    """Return the path of the module whose parameters a tensor has one after the other.

    None if the tensor is no flat parameter of FSDP.
    """
    *modules, last = split_name(name)
    if _FLAT.fullmatch(last) is None:
        return None
    return without_wrappers(".".join(modules))


def without_wrappers(name: str) -> str:
    """Return a name with dots, and without the wrappers of FSDP."""
    return ".".join([word for word in split_name(name) if word not in _WRAPPERS])


def layer_of(name: str) -> tuple[int, ...]:
    """Return the numbers in a name, the one of its layer first; empty without any."""
    return tuple(map(int, parse_name(name).indices))


def are_in_order(names: Iterable[str]) -> bool:
    """Return whether layers follow one another, each with its tensors in the same order."""
    layers: dict[tuple[str, ...], list[Any]] = defaultdict(list)
    last: dict[Any, tuple[int, ...]] = {}
    for name in names:
        parsed = parse_name(name)
        numbers = layer_of(name)
        if numbers < last.get(parsed.template, ()):
            return False
        last[parsed.template] = numbers
        layers[parsed.indices[:1]].append((parsed.template, parsed.indices[1:]))
    layers.pop((), None)
    orders: dict[frozenset[Any], set[tuple[Any, ...]]] = defaultdict(set)
    for members in layers.values():
        orders[frozenset(members)].add(tuple(members))
    return all(len(orders_of_kind) == 1 for orders_of_kind in orders.values())
