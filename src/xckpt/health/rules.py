"""The rules of `findings`, in the order in which they are listed.

A rule is a class with a name, a severity, the roles of the tensors it applies to, its thresholds,
and the sentence that explains a finding. Many rules compare a tensor with its siblings, whose names
differ only in their indices: a bias of zeros is usual in a new model, and odd in a single layer.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.elements import ELEMENT_TYPES, WIDE_FLOATS
from xckpt.formatting import binary_size, counted
from xckpt.health.code_ranges import NarrowCodes, SaturatedCodes
from xckpt.health.equal_tensors import CopiedLayer, Duplicated, EqualExperts, Tied
from xckpt.health.evidence import CODED, EVERY, Rule, RuleFinding, out_of_line
from xckpt.health.runs import IdenticalStep, StoppedChanging, UnlikeStep
from xckpt.statistics.channel_sketches import OUTLYING
from xckpt.structure import Described, Role, Structure
from xckpt.structure.emptiness import NO_TENSORS, empty_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xckpt.health.evidence import Evidence
    from xckpt.typing import Array

# --- contents ------------------------------------------------------------------------------------


class Empty(Rule):
    """The checkpoint has no tensors, or weights have no elements."""

    name, severity = "empty", "error"

    def findings(self, evidence: Evidence) -> Iterator[RuleFinding]:
        """Return the findings, also in tensors that cannot be read."""
        return self._judge(evidence)

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        if evidence.origin is None:
            tensors = zip(evidence.names, evidence.dtypes, evidence.shapes, strict=True)
            structure = Structure([Described(*tensor) for tensor in tensors])
        else:
            structure = evidence.origin.structure
        if not structure:
            yield RuleFinding(0, "", self.name, 0.0, NO_TENSORS)
        rows = {name: row for row, name in enumerate(evidence.names)}
        for name, reason in empty_weights(structure).items():
            yield RuleFinding(rows.get(name, len(rows)), name, self.name, 0.0, reason)


# --- elements ------------------------------------------------------------------------------------


class _NotFinite(Rule):
    severity = "error"
    word = ""

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        for row in np.flatnonzero(evidence[self.name] > 0):
            number, count = evidence[self.name][row], evidence["count"][row]
            verb = "is" if number == 1 else "are"
            sentence = f"{number:,.0f} of {count:,.0f} elements {verb} {self.word}"
            yield self.finding(evidence, row, number, sentence)


class NaN(_NotFinite):
    """Elements are NaN."""

    name, word = "nan", "NaN"
    roles = EVERY


class Infinite(_NotFinite):
    """Elements are infinite. Masks are made of infinities."""

    name, word = "inf", "infinite"
    roles = EVERY - {Role.CONSTANT}


# Vectors of zeros or ones in a new model, and matrices of zeros.
_INITIAL = re.compile(
    r"(^|_)(weight|bias|gamma|beta|scale|shift|mean|var|norm|ln|g|b|D|tokens?)$|(^|_)running_"
)
_INITIAL_MATRIX = re.compile(r"lora_[bB]\b")


class _OneValue(Rule):
    """All elements are the same, and this is not how the tensor begins in a new model."""

    #: Moments are zeros before the first step, and scales may all be the same.
    only_if_unlike_siblings = frozenset({Role.MOMENT, Role.SCALE})

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        count, low = evidence["count"], evidence["min"]
        is_finite = evidence["nan"] + evidence["inf"] == 0
        is_constant = (low == evidence["max"]) & (count > 1) & is_finite
        for siblings in evidence.families.values() if is_constant.any() else ():
            constants = [row for row in siblings if is_constant[row]]
            varied = len(siblings) - len(constants)
            # Most siblings are constant only if they begin so.
            values = {low[row] for row in constants}
            is_usual = 2 * len(constants) > len(siblings) and len(values) == 1
            is_usual |= evidence.is_new and not varied and values <= {0.0, 1.0}
            for row in constants:
                if self._is_bias_of_initial_norm(evidence, row):
                    continue
                if self._is_reported(low[row]) and not (
                    is_usual and self._is_initial(evidence, row)
                ):
                    sentence = f"all {count[row]:,.0f} elements are {low[row] + 0.0:.6g}"
                    if varied:
                        sentence += f", unlike those of {counted(varied, 'sibling')}"
                    yield self.finding(evidence, row, low[row] or count[row], sentence)

    def _is_reported(self, value: float) -> bool:
        raise NotImplementedError

    @staticmethod
    def _is_bias_of_initial_norm(evidence: Evidence, row: int) -> bool:
        """Return whether the finding about the gain of a norm says the same about its bias."""
        gain = evidence.gain_of(row)
        is_other = gain is not None and gain != row
        return is_other and bool(evidence["min"][gain] == 1 == evidence["max"][gain])

    def _is_initial(self, evidence: Evidence, row: int) -> bool:
        if evidence.is_new or evidence.roles[row] in self.only_if_unlike_siblings:
            return True
        name, value = evidence.plain_names[row], evidence["min"][row]
        is_matrix = value == 0 and _INITIAL_MATRIX.search(name) is not None
        is_vector = value in {0, 1} and evidence.is_vector(row)
        return is_matrix or (is_vector and bool(_INITIAL.search(name.rpartition(".")[2])))


class AllZero(_OneValue):
    """All elements are zero."""

    name, severity = "all_zero", "warning"
    roles = CODED | {Role.STATISTIC, Role.MOMENT, Role.SCALE}

    def _is_reported(self, value: float) -> bool:
        return value == 0


class Constant(_OneValue):
    """All elements are the same number other than zero."""

    name, severity = "constant", "info"
    roles = CODED | {Role.STATISTIC, Role.SCALE}

    def _is_reported(self, value: float) -> bool:
        return value != 0


class Exploding(Rule):
    """The largest magnitude is far beyond all but a few elements."""

    name, severity = "exploding", "warning"
    roles = frozenset({Role.WEIGHT, Role.AVERAGE, Role.MOMENT})
    #: The largest of a billion normally distributed elements is at about 6 standard deviations.
    #: Trained weights reach some tens, some language models 175, squares of gradients thousands.
    threshold, threshold_of_moments = 100.0, 10_000.0
    #: Trained weights reach 55 times the quantiles of 0.1 and 99.9 %, if these leave elements out.
    threshold_of_tails, fewest_elements = 200.0, 4000

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        std, largest, mean = evidence["std"], evidence["absmax"], evidence["mean"]
        ratio = largest / std
        is_moment = np.array([role is Role.MOMENT for role in evidence.roles], bool)
        limit = np.where(is_moment, self.threshold_of_moments, self.threshold)
        tail = np.maximum(np.abs(evidence["q0.001"]), np.abs(evidence["q0.999"]))
        is_tail = ~is_moment & (evidence["count"] >= self.fewest_elements) & (tail > 0)
        is_far = np.where(is_tail, largest > self.threshold_of_tails * tail, ratio > limit)
        # Elements far from zero have a small deviation: 100 and 101 do not explode.
        is_centred = (np.abs(mean) < largest / 2) | np.isnan(mean)
        for row in np.flatnonzero((std > 0) & is_far & is_centred):
            sentence = f"the largest magnitude, {largest[row]:.3g}, is {ratio[row]:,.0f}"
            yield self.finding(evidence, row, ratio[row], f"{sentence} standard deviations")


class LoneElement(Rule):
    """One element is far beyond all others of a matrix."""

    name, severity = "lone_element", "warning"
    roles = frozenset({Role.WEIGHT, Role.AVERAGE})
    #: Standard deviations that it has at least, and the next largest channel at most.
    threshold, others = 12.0, 7.0
    fewest_channels = 8

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        std, largest, following = evidence["std"], evidence["absmax"], evidence["next_largest"]
        ratio, rest = largest / std, following / std
        smaller = np.minimum(evidence["row_count"], evidence["column_count"])
        is_matrix = smaller >= self.fewest_channels
        is_lone = (std > 0) & (ratio > self.threshold) & (rest < self.others)
        # `trunc_normal_` of PyTorch leaves elements at its bounds.
        is_lone &= not evidence.is_new
        for row in np.flatnonzero(is_lone & is_matrix):
            place = f"{evidence['top_row'][row]:,.0f}, {evidence['top_column'][row]:,.0f}"
            words = " and ".join(evidence.channel_words(int(row)))
            sentence = (
                f"the element in {words} {place} is {ratio[row]:.0f} standard deviations, and "
                f"the largest elsewhere {rest[row]:.1f}"
            )
            yield self.finding(evidence, row, ratio[row], sentence)


class NegativeMoment(Rule):
    """An average of squares has a negative element."""

    name, severity = "negative_moment", "warning"
    roles = frozenset({Role.MOMENT})
    _squares = re.compile(r"(^|[._:/])(max_)?(exp_avg_sq|square_avg|nu|moment_2|m2|v)([._:/]|$)")

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        low = evidence["min"]
        for row in np.flatnonzero(low < 0):
            if self._squares.search(evidence.names[row]):
                sentence = f"an average of squares is {low[row]:.3g} at its smallest element"
                yield self.finding(evidence, row, low[row], sentence)


class Subnormal(Rule):
    """Many elements are too small for all digits of their type."""

    name, severity = "subnormal", "warning"
    threshold = 0.1  # share of the elements

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        share = evidence["subnormal"] / evidence["count"]
        for row in np.flatnonzero(share > self.threshold):
            sentence = (
                f"{share[row]:.0%} of the elements are subnormal: few of their digits are left"
            )
            yield self.finding(evidence, row, share[row], sentence)


# --- channels ------------------------------------------------------------------------------------


class _Dead(Rule):
    """Channels are zero in a tensor that has other elements."""

    severity = "warning"
    roles = CODED

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        has_others = evidence["zero"] < evidence["count"]
        for side, statistic in enumerate(("dead_rows", "dead_columns")):
            dead = evidence[statistic]
            for row in np.flatnonzero((dead > 0) & has_others).tolist():
                if evidence.is_vector(row):
                    continue
                name, value, sentence = self._classify(evidence, row, side, dead[row])
                if name == self.name and not self._is_initial(evidence, row, dead):
                    yield self.finding(evidence, row, value, sentence)

    @staticmethod
    def _is_initial(evidence: Evidence, row: Any, dead: Array) -> bool:
        siblings = evidence.families[evidence.family_of(row)]
        return (
            evidence.is_new
            and len(siblings) > 1
            and len({dead[sibling] for sibling in siblings}) == 1
        )

    @staticmethod
    def _classify(evidence: Evidence, row: Any, side: int, number: float) -> tuple[str, float, str]:
        """Return the rule that reports dead channels, its value and its sentence."""
        shape, block = evidence.shapes[row], evidence["dead_block"][row]
        kind = evidence.module_type(row)
        if side == 0 and number == 1 and (kind == "embedding" or evidence.is_tied_head(row)):
            return "", 0.0, ""  # padding token
        if side == 0 and (kind == "router" or evidence.is_stack_of_experts(row)):
            experts = counted(shape[0], "expert")
            return "dead_experts", number, f"{number:,.0f} of {experts} has nothing but zeros"
        total = evidence[("row_count", "column_count")[side]][row]
        share = "" if np.isnan(total) else f" of {total:,.0f}"
        plural = "" if number == 1 and not share else "s"
        word = evidence.channel_words(row)[side]
        sentence = f"{number:,.0f}{share} {word}{plural} {'is' if number == 1 else 'are'} zero"
        first = evidence[("first_empty_row", "first_dead_column")[side]][row]
        if number == 1 and not np.isnan(first):
            sentence += f": number {first:,.0f}"
        is_attention = evidence.slot(row).partition(".")[0] == "attention"
        if block > 1 and is_attention and number % block == 0:
            heads = counted(int(number // block), "head")
            return "dead_heads", number // block, f"{sentence}: as many as {heads} of {block:.0f}"
        return f"dead_{('row', 'column')[side]}s", number, sentence


class DeadRows(_Dead):
    """Rows, or output channels, are zero."""

    name = "dead_rows"


class DeadColumns(_Dead):
    """Columns, or input channels, are zero."""

    name = "dead_columns"


class DeadHeads(_Dead):
    """Rows or columns of whole attention heads are zero."""

    name = "dead_heads"


class DeadExperts(_Dead):
    """Experts are zero, or the router nearly never chooses them."""

    name = "dead_experts"

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        yield from super()._judge(evidence)
        for row in np.flatnonzero(evidence["faint_rows"] > 0):
            if evidence.module_type(int(row)) == "router":
                number, first = evidence["faint_rows"][row], evidence["faint_row"][row]
                sentence = (
                    f"{number:,.0f} of {counted(evidence.shapes[row][0], 'expert')} "
                    f"{'has' if number == 1 else 'have'} a row of the router near zero, "
                    f"first expert {first:.0f}"
                )
                yield self.finding(evidence, row, number, sentence)


class OutlierChannels(Rule):
    """A few channels have elements far beyond all others."""

    name, severity = "outlier_channels", "info"
    threshold = OUTLYING  # standard deviations
    few = 0.01  # share of the channels

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        rows, columns = evidence["outlier_rows"], evidence["outlier_columns"]
        ratio = evidence["absmax"] / evidence["std"]
        for row in np.flatnonzero((rows > 0) | (columns > 0)).tolist():
            words = evidence.channel_words(row)
            sides = [
                (outliers[row], evidence[f"{side}_count"][row], side, word)
                for outliers, side, word in zip(
                    (rows, columns), ("row", "column"), words, strict=True
                )
                if outliers[row] > 0
            ]
            if words[0] == "row":  # features of language models are columns
                sides.reverse()
            number, total, side, word = min(sides, key=lambda entry: entry[0])
            if number <= max(1, self.few * total):
                place = evidence[f"top_{side}"][row]
                sentence = (
                    f"{counted(int(number), word)} of {total:,.0f} "
                    f"{'has' if number == 1 else 'have'} elements beyond {self.threshold:g} "
                    f"standard deviations, up to {ratio[row]:.0f} in {word} {place:,.0f}"
                )
                yield self.finding(evidence, row, ratio[row], sentence)


# --- siblings ------------------------------------------------------------------------------------


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


class NegativeNorm(_Norm):
    """A gain of a norm is negative where others are around 1."""

    name, severity = "negative_norm", "info"

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
    threshold = 6.0  # robust standard deviations of all layers
    #: Fewest layers that show a trend, and the least spread around it.
    fewest_layers, least_spread = 5, 0.05
    #: At most one layer in this many is odd. More are part of the architecture.
    one_in = 16
    #: The first and the last layer usually differ from the others: by less than this factor, if the
    #: others differ among themselves by less than the second.
    far_end, most_alike = 5.0, 1.5

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        rms, count = evidence["rms"], evidence["count"]
        for siblings in evidence.series():
            rows = [row for row in siblings if rms[row] > 0 and np.isfinite(rms[row])]
            if len(rows) < self.fewest_layers:
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
                    sentence = (
                        f"its root mean square, {rms[row]:.3g}, is {factor:.2g} times that of the "
                        f"layers next to it: {distance:.0f} robust standard deviations"
                    )
                    yield self.finding(evidence, row, distance, sentence)

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
                sentence = (
                    f"its root mean square, {rms[row]:.3g}, is {factor:.2g} times that of the "
                    f"other {len(inner)} layers"
                )
                yield self.finding(evidence, row, factor, sentence)


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


# Kinds of modules whose matrices are alike, wherever they are.
_WITH_KERNELS = frozenset({"linear", "convolution"})


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


class EqualRows(Rule):
    """Many output channels of a matrix are equal."""

    name, severity = "equal_rows", "warning"
    roles = frozenset({Role.WEIGHT, Role.AVERAGE})
    threshold = 8  # rows
    fewest_elements = 8  # of a row
    #: Largest matrix that is read to compare its rows.
    most_elements = 1 << 25

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        if not evidence.readers or evidence.is_new:
            return
        rows, count = evidence["equal_rows"], evidence["count"]
        is_long = count / evidence["row_count"] >= self.fewest_elements
        is_read = is_long & (count <= self.most_elements) & (rows >= self.threshold)
        for row in np.flatnonzero(is_read).tolist():
            # Unused tokens of a vocabulary are often equal.
            if evidence.module_type(row) == "embedding" or evidence.is_tied_head(row):
                continue
            number, total = evidence.equal_rows(row), evidence["row_count"][row]
            if number >= self.threshold:
                word = evidence.channel_words(row)[0]
                yield self.finding(
                    evidence, row, number, f"{number} of {total:,.0f} {word}s are equal"
                )


# --- element types -------------------------------------------------------------------------------


class WideType(Rule):
    """Every element fits into a type of half the size."""

    name, severity = "wide_type", "info"
    fewest_elements = 64
    #: The smaller type that elements may fit.
    smaller = MappingProxyType({"float32": "bfloat16", "float64": "float32"})

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        spare, count = evidence["spare_bits"], evidence["count"]
        for row in np.flatnonzero((spare > 0) & (count >= self.fewest_elements)):
            dtype = evidence.dtypes[row]
            if dtype not in self.smaller:
                continue
            wide, narrow = ELEMENT_TYPES[dtype], ELEMENT_TYPES[self.smaller[dtype]]
            # If the whole fraction is spare, elements are powers of two, with few distinct values.
            if wide.fraction_bits - narrow.fraction_bits <= spare[row] < wide.fraction_bits:
                half = binary_size(int(count[row]) * narrow.bits // 8)
                sentence = f"every value of this {dtype} is a {narrow.name}: {half} would do"
                yield self.finding(evidence, row, spare[row], sentence)


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
                    yield self.finding(evidence, row, number, f"{sentence} {usual}")


# --- all of them ---------------------------------------------------------------------------------

#: Every rule by its name, in the order in which findings of one tensor are listed.
RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        *(Empty(), NaN(), Infinite(), AllZero(), Constant(), Exploding(), LoneElement()),
        *(NegativeMoment(), SignsLost(), Hole(), EqualRows()),
        *(DeadRows(), DeadColumns(), DeadHeads(), DeadExperts()),
        *(ZeroCentredNorm(), NegativeNorm(), UnlikeLayer(), OutlierChannels()),
        *(Subnormal(), WideType(), MixedTypes(), NarrowCodes(), SaturatedCodes()),
        *(Tied(), Duplicated(), EqualExperts(), CopiedLayer()),
        *(IdenticalStep(), UnlikeStep(), StoppedChanging()),
    )
}
