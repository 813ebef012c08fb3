"""Which tensors of a checkpoint are equal: suspected because of their statistics, then read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.labels.numbering import numbered
from xckpt.notebook.formatting import binary_size
from xckpt.statistics.differences import compare_pairs
from xckpt.statistics.pairs import pair_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from xckpt.progress import ProgressOption
    from xckpt.statistics.measured import Found, Measured
    from xckpt.statistics.readers import Reader

# What equal tensors have in common, to the last bit. Those whose rows are in another order differ
# in where the largest element is.
_ALIKE = ("count", "nan", "inf", "zero", "min", "max", "mean", "l2", "top_row", "top_column")
# Tensors that are alike and not equal are compared with so many others.
_MOST_ROUNDS = 4
#: Smaller tensors are not worth a word if they are stored twice.
SMALLEST = 4096


def equal_tensors(
    measured: Measured, readers: Sequence[Reader], *, progress: ProgressOption, cache: bool
) -> list[Found]:
    """Find tensors that are one in the file, are stored twice, or make layers that are copies."""
    owners: dict[Any, int] = {}
    tied: list[int] = []
    found = []
    for at, reader in enumerate(readers):
        is_known = reader.identity is not None and reader.size
        owner = owners.setdefault(reader.identity, at) if is_known else at
        if owner != at:
            what = f"it is {measured.names[owner]}: both have the same bytes of the file"
            found.append(measured.found(at, "tied", 2, what))
            tied.append(at)
    twins = equal_to(measured, readers, _suspects(measured, tied), progress=progress, cache=cache)
    copies = _copied_layers(measured, twins)
    for at, twin in twins.items():
        name = measured.names[twin]
        if at in copies:
            layer, other = copies[at]
            what = f"it is equal to {name}: all of {layer} is a copy of {other}"
            found.append(measured.found(at, "copied_layer", 1, what))
        elif readers[at].nbytes >= SMALLEST and not measured.is_vector(at):
            nbytes = readers[at].nbytes
            what = f"it is equal to {name}: {binary_size(nbytes)} are stored twice"
            found.append(measured.found(at, "duplicated", nbytes, what))
    return found


def _suspects(measured: Measured, tied: list[int]) -> list[list[int]]:
    """Group tensors that may be equal; masks and constants are equal in many good models."""
    count, zero, largest = (measured[name] for name in ("count", "zero", "absmax"))
    with np.errstate(all="ignore"):
        two_valued = np.isclose(measured["l2"] ** 2, (count - zero) * largest**2, rtol=1e-12)
    trivial = two_valued | (measured["min"] == measured["max"]) | ~(count > 1)
    trivial[list(tied)] = True
    columns = np.array([np.nan_to_num(measured[name], nan=-1.0) for name in _ALIKE]).T
    groups: dict[Any, list[int]] = {}
    for at in np.flatnonzero(~trivial).tolist():
        key = (measured.dtypes[at], measured.shapes[at], columns[at].tobytes())
        groups.setdefault(key, []).append(at)
    return [group for group in groups.values() if len(group) > 1]


def equal_to(
    measured: Measured,
    readers: Sequence[Reader],
    groups: Iterable[list[int]],
    *,
    progress: ProgressOption,
    cache: bool,
) -> dict[int, int]:
    """Compare suspects with the first of their group; return which tensor each one is equal to."""
    twins: dict[int, int] = {}
    left = list(groups)
    for _ in range(_MOST_ROUNDS):
        suspected = [(at, group[0]) for group in left for at in group[1:]]
        pairs = [
            pair_of(readers[first], readers[at], measured.names[at]) for at, first in suspected
        ]
        rows = compare_pairs(pairs, progress=progress, cache=cache)
        same = {at: row[0] == 0 for (at, _), row in zip(suspected, rows, strict=True)}
        twins |= {at: first for at, first in suspected if same[at]}
        others = [[at for at in group[1:] if not same[at]] for group in left]
        left = [group for group in others if len(group) > 1]
    return dict(sorted(twins.items()))


def _copied_layers(measured: Measured, twins: dict[int, int]) -> dict[int, tuple[str, str]]:
    """Find the tensors of layers that are equal to other layers, and the names of both."""
    if not twins:
        return {}
    constant = measured["min"] == measured["max"]
    layers: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for at, name in enumerate(measured.names):
        found = numbered(name)
        if found.indices:
            module = found.outermost.removesuffix(found.indices[0])
            layer = (module, found.indices[0])
            layers.setdefault(layer, []).append((name.removeprefix(found.outermost), at))
    known: dict[Any, tuple[str, str]] = {}
    copies: dict[int, tuple[str, str]] = {}
    for layer, members in layers.items():
        content = [
            (rest, ("value", measured["min"][at]) if constant[at] else twins.get(at, at))
            for rest, at in sorted(members)
        ]
        first = known.setdefault((layer[0], tuple(content)), layer)
        if first != layer:
            names = ("".join(layer), "".join(first))
            copies |= {at: names for _, at in members if at in twins}
    return copies
