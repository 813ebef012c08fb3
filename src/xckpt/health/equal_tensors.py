"""Equal tensors of a checkpoint: candidates have equal statistics, and are then compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.comparison.measure import compare_pairs
from xckpt.comparison.pairs import pair_of
from xckpt.formatting import binary_size
from xckpt.health.evidence import CODED, EVERY, Rule
from xckpt.structure import Role

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from xckpt.health.evidence import Evidence, RuleFinding

# Statistics that are identical in equal tensors. If only the order of rows differs, so does the
# position of the largest element.
_COMPARED = ("count", "nan", "inf", "zero", "min", "max", "mean", "l2", "top_row", "top_column")
# Limits the comparisons of tensors that have the same statistics but are not equal.
_MOST_ROUNDS = 4
# Fewest experts that are not equal by chance.
_FEWEST_EXPERTS = 3


class EqualTensors:
    """Tensors that share their bytes, are stored twice, or belong to copied layers."""

    def __init__(self, evidence: Evidence) -> None:
        # Equal statistics do not prove equal tensors: these are read. Runs are skipped, because
        # `StepChanges` compares their steps.
        streams = evidence.streams if evidence.run is None else ()
        owners: dict[Any, int] = {}
        #: Row of the first tensor with the same bytes of the file.
        self.tied: dict[int, int] = {}
        for row, stream in enumerate(streams):
            if stream.identity is not None and stream.size:
                owner = owners.setdefault(stream.identity, row)
                if owner != row:
                    self.tied[row] = owner
        #: Row of a tensor with equal elements, stored elsewhere.
        self.twins: dict[int, int] = {}
        if streams:
            self.twins = equal_to(evidence, _suspects(evidence, self.tied))
        #: Names of the layers of a tensor and its twin, if all tensors of the layers are equal.
        self.copied_layers = _copied_layers(evidence, self.twins)
        #: Rows of the experts of a layer, by the row of the first one, if all of them are equal.
        self.equal_experts = _equal_experts(evidence, self.twins)


def _suspects(evidence: Evidence, tied: Collection[int]) -> list[list[int]]:
    """Group tensors that may be equal, except masks and constants, often equal by design."""
    count, zero, largest = (evidence[name] for name in ("count", "zero", "absmax"))
    with np.errstate(all="ignore"):
        two_valued = np.isclose(evidence["l2"] ** 2, (count - zero) * largest**2, rtol=1e-12)
    is_trivial = two_valued | (evidence["min"] == evidence["max"]) | ~(count > 1)
    is_trivial[list(tied)] = True
    columns = np.array([np.nan_to_num(evidence[name], nan=-1.0) for name in _COMPARED]).T
    groups: dict[Any, list[int]] = {}
    for row in np.flatnonzero(~is_trivial).tolist():
        # The role separates averages and optimizer copies, which begin equal to the weights.
        kind = (evidence.roles[row], evidence.dtypes[row], evidence.shapes[row])
        groups.setdefault((*kind, columns[row].tobytes()), []).append(row)
    return [group for group in groups.values() if len(group) > 1]


def equal_to(evidence: Evidence, groups: Iterable[list[int]]) -> dict[int, int]:
    """Compare tensors with the first of their group; return the row of the equal tensor, by row."""
    streams, names = evidence.streams, evidence.names
    twins: dict[int, int] = {}
    remaining = list(groups)
    for _ in range(_MOST_ROUNDS):
        suspected = [(row, group[0]) for group in remaining for row in group[1:]]
        pairs = [pair_of(streams[first], streams[row], names[row]) for row, first in suspected]
        measures = compare_pairs(pairs, progress=evidence.progress, cache=evidence.cache)
        is_same = {
            row: measure[0] == 0 for (row, _), measure in zip(suspected, measures, strict=True)
        }
        twins |= {row: first for row, first in suspected if is_same[row]}
        unequal = [[row for row in group[1:] if not is_same[row]] for group in remaining]
        remaining = [group for group in unequal if len(group) > 1]
    return dict(sorted(twins.items()))


def _copied_layers(evidence: Evidence, twins: dict[int, int]) -> dict[int, tuple[str, str]]:
    """Return the names of a copied layer and its original, by row of the tensors in the copy."""
    if not twins:
        return {}
    low, is_constant = evidence["min"], evidence["min"] == evidence["max"]
    layers: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for row, name in enumerate(evidence.names):
        parts = evidence.structure.parse(evidence.plain_name(row))
        if parts.indices:
            module = parts.outermost.removesuffix(parts.indices[0])
            layer = (module, parts.indices[0])
            layers.setdefault(layer, []).append((name.removeprefix(parts.outermost), row))
    first_with: dict[Any, tuple[str, str]] = {}
    copies: dict[int, tuple[str, str]] = {}
    for layer, members in layers.items():
        content = [
            (leaf, ("value", low[row]) if is_constant[row] else twins.get(row, row))
            for leaf, row in sorted(members)
        ]
        first = first_with.setdefault((layer[0], tuple(content)), layer)
        if first != layer:
            names = ("".join(layer), "".join(first))
            copies |= {row: names for _, row in members if row in twins}
    return copies


def _equal_experts(evidence: Evidence, twins: dict[int, int]) -> dict[int, list[int]]:
    """Return the rows of the experts of layers whose experts are all equal, by the first row."""
    return {
        rows[0]: rows
        for rows in (evidence.experts() if twins else ())
        if len(rows) >= _FEWEST_EXPERTS and all(twins.get(row) == rows[0] for row in rows[1:])
    }


# --- rules ---------------------------------------------------------------------------------------


class Tied(Rule):
    """Two tensors share the same bytes of the file."""

    name, severity = "tied", "info"
    roles = EVERY - {Role.CONSTANT, Role.COUNTER, Role.STEP}

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        for row, owner in evidence.once(EqualTensors).tied.items():
            sentence = f"it is {evidence.names[owner]}: both have the same bytes of the file"
            yield self.finding(evidence, row, 2, sentence)


class EqualExperts(Rule):
    """All experts of a layer are equal, so that the choice among them has no effect."""

    name, severity = "equal_experts", "warning"
    roles = CODED
    is_of_kind = True

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        if evidence.is_new:  # they may begin as copies of one layer
            return
        for row in np.flatnonzero(evidence["repeated_rows"] > 0).tolist():
            if evidence.is_stack_of_experts(row) and evidence.has_equal_experts(row):
                number = evidence.shapes[row][0]
                yield self.finding(evidence, row, number, f"all {number} experts are equal")
        for first, rows in evidence.once(EqualTensors).equal_experts.items():
            yield self.finding(evidence, first, len(rows), f"all {len(rows)} experts are equal")


class Duplicated(Rule):
    """The elements of a matrix are stored twice."""

    name, severity = "duplicated", "info"
    roles = CODED
    threshold = 4096  # bytes

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        equals = evidence.once(EqualTensors)
        experts = {row for rows in equals.equal_experts.values() for row in rows}
        for row, twin in equals.twins.items():
            nbytes = evidence.streams[row].nbytes
            is_copy = row in equals.copied_layers or row in experts
            # All layers of a new model may begin with the same numbers.
            siblings = evidence.families[evidence.family_of(row)]
            is_copy |= evidence.is_new and all(
                equals.twins.get(sibling, sibling) == twin for sibling in siblings
            )
            if nbytes >= self.threshold and not is_copy and not evidence.is_vector(row):
                sentence = (
                    f"it is equal to {evidence.names[twin]}: {binary_size(nbytes)} are stored twice"
                )
                yield self.finding(evidence, row, nbytes, sentence)


class CopiedLayer(Rule):
    """All tensors of a layer are equal to the tensors of another layer."""

    name, severity = "copied_layer", "warning"
    roles = CODED

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        equals = evidence.once(EqualTensors)
        copies: dict[tuple[str, str], list[int]] = {}
        for row, names in equals.copied_layers.items():
            copies.setdefault(names, []).append(row)
        for (copy, layer), rows in copies.items():
            name = evidence.names[equals.twins[rows[0]]]
            sentence = f"it is equal to {name}: all of {copy} is a copy of {layer}"
            yield self.finding(evidence, rows[0], len(rows), sentence)
