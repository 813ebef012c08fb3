"""Rules that compare a tensor with its siblings, whose names differ only in their indices.

A bias of zeros is usual in a new model, and odd in a single layer. Rules about equal tensors take
those with equal statistics, and compare their elements.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.comparison.measure import compare_pairs
from xckpt.comparison.pairs import pair_of
from xckpt.elements import WIDE_FLOATS
from xckpt.formatting import binary_size, counted
from xckpt.health.evidence import CODED, EVERY, Evidence, Rule, RuleFinding, out_of_line
from xckpt.structure import Role

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from xckpt.typing import Array

# Kinds of modules whose matrices are alike, wherever they are.
_WITH_KERNELS = frozenset({"linear", "convolution", "recurrent"})


class _Norm(Rule):
    """The gains of a norm are unlike the gains of other norms, which are around 1."""

    #: Largest mean of gains that are centred on 0; range of means that are centred on 1.
    near_zero, near_one = 0.25, (0.5, 2.0)
    #: A norm with fewer siblings is compared with all norms.
    fewest_siblings = 4
    #: Largest spread of gains that lost 1, as a share of what others are centred on.
    most_spread = 0.4
    #: Share of what others are centred on, below zero, from which on a gain is negative; and of the
    #: norms that have such gains, if they are unusual.
    least_negative, most_norms = 0.1, 0.25
    #: Median distance from the centre, as a share of it, up to which norms of all kinds are alike.
    most_different = 0.2

    def _norms_to_compare(self, evidence: Evidence) -> Iterator[tuple[int, float, str]]:
        """Yield the rows of norms whose siblings are around 1, their centre, and a phrase."""
        mean = evidence["mean"]
        norms = [row for row in evidence.norms if not np.isnan(mean[row])]
        groups: dict[tuple[Any, ...], list[int]] = {}
        for row in norms:
            for group in (evidence.family_of(row), (evidence.step_of(row),)):
                groups.setdefault(group, []).append(row)
        centres = {key: float(np.median(mean[rows])) for key, rows in groups.items()}
        for row in norms:
            key = evidence.family_of(row)
            if len(groups[key]) < self.fewest_siblings:
                key = (evidence.step_of(row),)
            count, centre = len(groups[key]) - 1, centres[key]
            is_spread = len(key) == 1 and self._are_spread(mean[groups[key]], centre)
            if count >= 2 and self.near_one[0] <= centre <= self.near_one[1] and not is_spread:
                yield row, centre, f"those of {count} like it on {centre:.2g}"

    def _are_spread(self, means: Array, centre: float) -> bool:
        """Return whether norms of several kinds differ too much to be compared."""
        usual = np.median(np.abs(means - centre))
        return bool(usual > self.most_different * centre)

    def _is_centred_on_zero(self, evidence: Evidence, row: int) -> bool:
        mean, std = evidence["mean"][row], evidence["std"][row]
        is_zero = evidence["min"][row] == evidence["max"][row] == 0
        return bool(is_zero or abs(mean) <= min(self.near_zero, std))


class ZeroCentredNorm(_Norm):
    """The gains of a norm are centred on 0 where others are centred on 1."""

    name, severity = "zero_centred_norm", "warning"
    implied_by = frozenset({"all_zero"})

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        for row, centre, norms in self._norms_to_compare(evidence):
            mean, is_constant = evidence["mean"][row], evidence["std"][row] == 0
            if evidence["std"][row] > self.most_spread * centre:
                continue
            family = evidence.families[evidence.family_of(row)]
            if len(family) > 1 and all(self._is_centred_on_zero(evidence, r) for r in family):
                continue  # a convention: the last norm of a residual block begins at zero
            if self._is_centred_on_zero(evidence, row) and not (evidence.is_new and is_constant):
                sentence = f"its weights are centred on {mean:.2g}, {norms}: is 1 missing?"
                yield self.finding(evidence, row, mean, sentence)


class DeadGains(_Norm):
    """Gains of a norm are zero where others are around 1, so that channels are constant."""

    name, severity = "dead_gains", "warning"
    implied_by = frozenset({"all_zero"})
    is_of_kind = True
    threshold = 0.05  # share of the gains

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        zero, count = evidence["zero"], evidence["count"]
        for row, *_ in self._norms_to_compare(evidence):
            if self.threshold * count[row] <= zero[row] < count[row]:
                verb = "is" if zero[row] == 1 else "are"
                sentence = f"{zero[row]:,.0f} of {count[row]:,.0f} gains of a norm {verb} 0"
                yield self.finding(evidence, row, zero[row], sentence)


class NegativeNorm(_Norm):
    """A gain of a norm is negative where others are around 1."""

    name, severity = "negative_norm", "info"
    is_of_kind = True

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        low, mean = evidence["min"], evidence["mean"]
        norms_around_one = list(self._norms_to_compare(evidence))
        negative = [
            (row, norms)
            for row, centre, norms in norms_around_one
            if low[row] < -self.least_negative * centre
        ]
        # In some models, many gains are negative.
        if len(negative) > max(1, self.most_norms * len(norms_around_one)):
            return
        for row, norms in negative:
            if not self._is_centred_on_zero(evidence, row):
                sentence = (
                    f"its smallest weight is {low[row]:.3g}; it is centred on {mean[row]:.2g}"
                )
                yield self.finding(evidence, row, low[row], f"{sentence}, {norms}")


class UnlikeLayer(Rule):
    """The root mean square of a layer is far from its neighbours."""

    name, severity = "unlike_layer", "warning"
    roles = frozenset({Role.WEIGHT, Role.AVERAGE})
    implied_by = frozenset({"exploding", "lone_element", "rank_one"})
    threshold = 6.0  # robust standard deviations of all layers
    #: Fewest layers that show a trend, and the least spread around it.
    fewest_layers, least_spread = 5, 0.05
    #: At most one layer in this many is odd. More are part of the architecture.
    one_in = 16
    #: The first and the last layer usually differ from the others: by less than this factor, if the
    #: others differ among themselves by less than the second.
    far_end, most_alike = 5.0, 1.5
    #: Factor between the largest and the second of a kind of module, and the fewest of a kind.
    far_beyond, fewest_of_kind = 25.0, 4

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        rms, count = evidence["rms"], evidence["count"]
        yield from self._beyond_all(evidence)
        yield from self._experts(evidence)
        for siblings in evidence.series():
            rows = [row for row in siblings if rms[row] > 0 and np.isfinite(rms[row])]
            # Numbers of unrelated tensors are no depth.
            shapes = Counter([evidence.shapes[row] for row in rows])
            if len(rows) < self.fewest_layers or 2 * max(shapes.values()) < len(rows):
                continue
            noise = np.log2(1 + 1 / np.sqrt(2 * count[rows].min()))
            spread = max(noise, np.log2(1 + self.least_spread))
            yield from self._ends(evidence, rows)
            distances = out_of_line(np.log2(rms[rows]), spread, self.threshold)[1:-1]
            if 0 < np.count_nonzero(distances) <= max(1, len(rows) // self.one_in):
                for position in (np.flatnonzero(distances) + 1).tolist():
                    row, distance = rows[position], abs(distances[position - 1])
                    neighbours = [
                        neighbour
                        for neighbour in rows[max(0, position - 2) : position + 3]
                        if neighbour != row
                    ]
                    factor = rms[row] / np.median(rms[neighbours])
                    sentence = self._sentence(rms[row], factor, "the layers next to it")
                    sentence += f": {distance:.0f} robust standard deviations"
                    yield self.finding(evidence, row, distance, sentence)

    def _beyond_all(self, evidence: Evidence) -> Iterator[RuleFinding]:
        """Yield matrices without siblings that are far beyond all of the same kind of module."""
        rms = evidence["rms"]
        kinds: dict[Any, list[int]] = {}
        for row in evidence.parameters:
            kind = evidence.module_type(row)
            if kind in _WITH_KERNELS and not evidence.is_vector(row) and np.isfinite(rms[row]):
                kinds.setdefault((evidence.step_of(row), kind), []).append(row)
        for (_, kind), rows in kinds.items():
            if len(rows) < self.fewest_of_kind:
                continue
            second, first = sorted(rows, key=rms.__getitem__)[-2:]
            if rms[first] > self.far_beyond * rms[second]:
                factor = rms[first] / rms[second]
                sentence = self._sentence(rms[first], factor, f"any other {kind} weight")
                yield self.finding(evidence, first, factor, sentence)

    def _experts(self, evidence: Evidence) -> Iterator[RuleFinding]:
        """Yield experts that are far from all others of their layer, which are alike."""
        rms = evidence["rms"]
        for experts in evidence.experts():
            rows = [row for row in experts if rms[row] > 0]
            for row in rows if len(rows) >= self.fewest_layers else ():
                others = rms[[other for other in rows if other != row]]
                factor = rms[row] / np.median(others)
                is_far = max(factor, 1 / factor) > self.far_end
                if is_far and others.max() <= self.most_alike * others.min():
                    sentence = self._sentence(rms[row], factor, f"the other {len(others)} experts")
                    yield self.finding(evidence, row, factor, sentence)

    def _ends(self, evidence: Evidence, rows: list[int]) -> Iterator[RuleFinding]:
        """Yield the first and the last layer if they are far from all others, which are alike."""
        rms = evidence["rms"]
        inner = rms[rows[1:-1]]
        if evidence.is_vector(rows[0]) or inner.max() > self.most_alike * inner.min():
            return
        shapes = {evidence.shapes[row] for row in rows[1:-1]}
        for row in (rows[0], rows[-1]):
            if evidence.shapes[row] not in shapes:
                continue
            factor = rms[row] / np.median(inner)
            if max(factor, 1 / factor) > self.far_end:
                sentence = self._sentence(rms[row], factor, f"the other {len(inner)} layers")
                yield self.finding(evidence, row, factor, sentence)

    @staticmethod
    def _sentence(rms: float, factor: float, others: str) -> str:
        return f"its root mean square, {rms:.3g}, is {factor:.2g} times that of {others}"


class _UnlikeSiblings(Rule):
    """A matrix has a property that none of its siblings has."""

    # Siblings are those of the same kind of module, if a matrix has few of its own.
    roles = frozenset({Role.WEIGHT, Role.AVERAGE})
    fewest_siblings, fewest_elements = 3, 256

    def _groups(self, evidence: Evidence) -> Iterator[list[int]]:
        alone: dict[Any, list[int]] = {}
        for siblings in evidence.families.values():
            if len(siblings) > self.fewest_siblings:
                yield siblings
                continue
            for row in siblings:
                kind = evidence.module_type(row), len(evidence.shapes[row]), evidence.step_of(row)
                alone.setdefault(kind, []).append(row)
        yield from (rows for kind, rows in alone.items() if kind[0] in _WITH_KERNELS)

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        count, std = evidence["count"], evidence["std"]
        for siblings in self._groups(evidence):
            rows = [
                row
                for row in siblings
                if count[row] >= self.fewest_elements
                and std[row] > 0
                and not evidence.is_vector(row)
            ]
            if len(rows) <= self.fewest_siblings:
                continue
            odd = [row for row in rows if self._is_odd(evidence, row)]
            if len(odd) == 1 and all(
                self._is_usual(evidence, row) for row in rows if row != odd[0]
            ):
                value, sentence = self._describe(evidence, odd[0])
                sentence = f"{sentence}, unlike those of {counted(len(rows) - 1, 'sibling')}"
                yield self.finding(evidence, odd[0], value, sentence)

    def _is_odd(self, evidence: Evidence, row: int) -> bool:
        raise NotImplementedError

    def _is_usual(self, evidence: Evidence, row: int) -> bool:
        raise NotImplementedError

    def _describe(self, evidence: Evidence, row: int) -> tuple[float, str]:
        raise NotImplementedError


class SignsLost(_UnlikeSiblings):
    """No element of a matrix is negative, as if it had been stored without signs."""

    name, severity = "signs_lost", "warning"

    def _is_odd(self, evidence: Evidence, row: int) -> bool:
        return bool(evidence["min"][row] >= 0 or evidence["max"][row] <= 0)

    def _is_usual(self, evidence: Evidence, row: int) -> bool:
        return bool(abs(evidence["mean"][row]) < evidence["std"][row] / 2)

    def _describe(self, evidence: Evidence, row: int) -> tuple[float, str]:
        sign = "negative" if evidence["min"][row] >= 0 else "positive"
        return 1.0, f"none of its {evidence['count'][row]:,.0f} elements is {sign}"


class Hole(_UnlikeSiblings):
    """A part of a matrix is zero, but neither whole rows nor whole columns."""

    name, severity = "hole", "warning"
    threshold, fewest_zeros = 1e-3, 16

    def _is_odd(self, evidence: Evidence, row: int) -> bool:
        zero, count = evidence["zero"][row], evidence["count"][row]
        is_channel = evidence["dead_rows"][row] > 0 or evidence["dead_columns"][row] > 0
        return bool(zero >= max(self.fewest_zeros, self.threshold * count)) and not is_channel

    def _is_usual(self, evidence: Evidence, row: int) -> bool:
        return bool(evidence["zero"][row] <= evidence["count"][row] * self.threshold / 100)

    def _describe(self, evidence: Evidence, row: int) -> tuple[float, str]:
        zero, count = evidence["zero"][row], evidence["count"][row]
        return zero, f"{zero:,.0f} of its {count:,.0f} elements are exactly 0"


class MixedTypes(Rule):
    """A tensor has another float type than most of its siblings."""

    name, severity = "mixed_types", "warning"

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        for siblings in evidence.families.values():
            dtypes = [evidence.dtypes[row] for row in siblings]
            if len(set(dtypes)) < 2 or not WIDE_FLOATS.issuperset(dtypes):
                continue
            usual = max(dict.fromkeys(dtypes), key=dtypes.count)
            number = dtypes.count(usual)
            shapes = {evidence.shapes[row] for row in siblings if evidence.dtypes[row] == usual}
            for row in siblings:
                dtype = evidence.dtypes[row]
                if dtype != usual and evidence.shapes[row] in shapes:
                    sentence = (
                        f"it is {dtype}, and {number} of its {len(siblings) - 1} siblings {usual}"
                    )
                    yield self.finding(evidence, row, number, sentence)


# --- equal tensors --------------------------------------------------------------------------------

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
        parts = evidence.structure.parse(evidence.plain_names[row])
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
