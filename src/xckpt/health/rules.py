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
from xckpt.health.equal_tensors import CopiedLayer, Duplicated, Tied
from xckpt.health.evidence import CODED, EVERY, Rule, RuleFinding, out_of_line
from xckpt.health.runs import IdenticalStep, StoppedChanging, UnlikeStep
from xckpt.labels.emptiness import NO_TENSORS, empty_weights
from xckpt.labels.roles import Role
from xckpt.statistics.channel_sketches import OUTLYING

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
        tensors = list(zip(evidence.names, evidence.dtypes, evidence.shapes, strict=True))
        if evidence.origin is not None:
            tensors = evidence.origin.tensors
        if not tensors:
            yield RuleFinding(0, "", self.name, 0.0, NO_TENSORS)
        rows = {name: row for row, name in enumerate(evidence.names)}
        for name, reason in empty_weights(tensors).items():
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
            is_usual = 2 * len(constants) > len(siblings) and len({low[r] for r in constants}) == 1
            for row in constants:
                if self._is_reported(low[row]) and not (
                    is_usual and self._is_initial(evidence, row)
                ):
                    sentence = f"all {count[row]:,.0f} elements are {low[row] + 0.0:.6g}"
                    if varied:
                        sentence += f", unlike those of {counted(varied, 'sibling')}"
                    yield self.finding(evidence, row, low[row] or count[row], sentence)

    def _is_reported(self, value: float) -> bool:
        raise NotImplementedError

    def _is_initial(self, evidence: Evidence, row: int) -> bool:
        if evidence.is_new or evidence.roles[row] in self.only_if_unlike_siblings:
            return True
        name, value = evidence.dotted[row], evidence["min"][row]
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
    """The largest magnitude is many standard deviations."""

    name, severity = "exploding", "warning"
    roles = frozenset({Role.WEIGHT, Role.AVERAGE, Role.MOMENT})
    #: The largest of a billion normally distributed elements is at about 6 standard deviations.
    #: Trained weights reach some tens, squares of gradients thousands.
    threshold, threshold_of_moments = 100.0, 10_000.0

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        std, largest, mean = evidence["std"], evidence["absmax"], evidence["mean"]
        ratio = largest / std
        is_moment = np.array([role is Role.MOMENT for role in evidence.roles])
        limit = np.where(is_moment, self.threshold_of_moments, self.threshold)
        # Elements far from zero have a small deviation: 100 and 101 do not explode.
        is_centred = (np.abs(mean) < largest / 2) | np.isnan(mean)
        for row in np.flatnonzero((std > 0) & (ratio > limit) & is_centred):
            sentence = f"the largest magnitude, {largest[row]:.3g}, is {ratio[row]:,.0f}"
            yield self.finding(evidence, row, ratio[row], f"{sentence} standard deviations")


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


# --- rows and columns ----------------------------------------------------------------------------

_EMBEDDING = re.compile(r"emb|wte|wpe|(^|\.)shared\.", re.IGNORECASE)
_ROUTER = re.compile(r"(^|[._])(router|gate|wg|ffn_gate_inp)([._]\w+)?$")
_HEADS = re.compile(r"attn|attention|[qkvo]_proj|query|key|value|qkv|\bw[qkvo]\b", re.IGNORECASE)


def is_router(evidence: Evidence, row: Any) -> bool:
    """Return whether a tensor has a row for each expert."""
    shape = evidence.shapes[row]
    module = evidence.dotted[row].removesuffix(".weight").removesuffix(".kernel")
    is_named = _ROUTER.search(module) is not None and not module.endswith("_proj")
    return is_named and len(shape) == 2 and 2 <= shape[0] < shape[1]


class _Dead(Rule):
    """Rows or columns are zero in a tensor that has other elements."""

    severity = "warning"
    roles = CODED

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        has_others = evidence["zero"] < evidence["count"]
        for word, statistic in (("row", "dead_rows"), ("column", "dead_columns")):
            dead = evidence[statistic]
            for row in np.flatnonzero((dead > 0) & has_others):
                name, value, sentence = self._classify(evidence, row, word, dead[row])
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
    def _classify(evidence: Evidence, row: Any, word: str, number: float) -> tuple[str, float, str]:
        """Return the rule that reports dead rows or columns, its value and its sentence."""
        shape, name, block = evidence.shapes[row], evidence.dotted[row], evidence["dead_block"][row]
        is_row = word == "row"
        if is_row and number == 1 and _EMBEDDING.search(name):
            return "", 0.0, ""  # padding token
        if is_row and ((len(shape) == 3 and "expert" in name) or is_router(evidence, row)):
            experts = counted(shape[0], "expert")
            return "dead_experts", number, f"{number:,.0f} of {experts} has nothing but zeros"
        total = shape[0] if shape and is_row else shape[-1] if len(shape) == 2 else 0
        share = f" of {total:,}" if total else ""
        plural = "" if number == 1 and not share else "s"
        sentence = f"{number:,.0f}{share} {word}{plural} {'is' if number == 1 else 'are'} zero"
        if block > 1 and _HEADS.search(name) and number % block == 0:
            heads = counted(int(number // block), "head")
            return "dead_heads", number // block, f"{sentence}: as many as {heads} of {block:.0f}"
        return f"dead_{word}s", number, sentence


class DeadRows(_Dead):
    """Rows are zero."""

    name = "dead_rows"


class DeadColumns(_Dead):
    """Columns are zero."""

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
            if is_router(evidence, row):
                number, first = evidence["faint_rows"][row], evidence["faint_row"][row]
                sentence = (
                    f"{number:,.0f} of {counted(evidence.shapes[row][0], 'expert')} "
                    f"{'has' if number == 1 else 'have'} a row of the router near zero, "
                    f"first expert {first:.0f}"
                )
                yield self.finding(evidence, row, number, sentence)


class OutlierChannels(Rule):
    """A few rows or columns have elements far beyond all others."""

    name, severity = "outlier_channels", "info"
    threshold = OUTLYING  # standard deviations
    few = 0.01  # share of the rows or columns

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        rows, columns = evidence["outlier_rows"], evidence["outlier_columns"]
        ratio = evidence["absmax"] / evidence["std"]
        for row in np.flatnonzero((rows > 0) & (columns > 0)):
            shape = evidence.shapes[row]
            by_column = columns[row], "column", int(np.prod(shape[1:]))
            number, word, total = min(by_column, (rows[row], "row", shape[0]))
            if number <= max(1, self.few * total):
                place = evidence[f"top_{word}"][row]
                sentence = (
                    f"{counted(int(number), word)} of {total:,} "
                    f"{'has' if number == 1 else 'have'} elements beyond {self.threshold:g} "
                    f"standard deviations, up to {ratio[row]:.0f} in {word} {place:.0f}"
                )
                yield self.finding(evidence, row, ratio[row], sentence)


# --- siblings ------------------------------------------------------------------------------------


class _Norm(Rule):
    """The gains of a norm are unlike the gains of other norms, which are around 1."""

    #: Largest mean of gains that are centred on 0; range of means that are centred on 1.
    near_zero, near_one = 0.25, (0.5, 2.0)
    #: A norm with fewer siblings is compared with all norms.
    fewest_siblings = 4

    def _norms_to_compare(self, evidence: Evidence) -> Iterator[tuple[int, str]]:
        """Yield the rows of norms whose siblings are around 1, and a phrase about the siblings."""
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
            if count >= 2 and self.near_one[0] <= centre <= self.near_one[1]:
                yield row, f"those of {count} like it on {centre:.2g}"

    def _is_centred_on_zero(self, evidence: Evidence, row: int) -> bool:
        mean, std = evidence["mean"][row], evidence["std"][row]
        is_zero = evidence["min"][row] == evidence["max"][row] == 0
        return bool(is_zero or abs(mean) <= min(self.near_zero, std))


class ZeroCentredNorm(_Norm):
    """The gains of a norm are centred on 0 where others are centred on 1."""

    name, severity = "zero_centred_norm", "warning"

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        for row, norms in self._norms_to_compare(evidence):
            mean, is_constant = evidence["mean"][row], evidence["std"][row] == 0
            if self._is_centred_on_zero(evidence, row) and not (evidence.is_new and is_constant):
                sentence = f"its weights are centred on {mean:.2g}, {norms}: is 1 missing?"
                yield self.finding(evidence, row, mean, sentence)


class NegativeNorm(_Norm):
    """A gain of a norm is negative where others are around 1."""

    name, severity = "negative_norm", "info"

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        low, mean = evidence["min"], evidence["mean"]
        for row, norms in self._norms_to_compare(evidence):
            if low[row] < 0 and not self._is_centred_on_zero(evidence, row):
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

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        rms, count = evidence["rms"], evidence["count"]
        for siblings in evidence.series():
            rows = [row for row in siblings if rms[row] > 0 and np.isfinite(rms[row])]
            if len(rows) < self.fewest_layers:
                continue
            noise = np.log2(1 + 1 / np.sqrt(2 * count[rows].min()))
            spread = max(noise, np.log2(1 + self.least_spread))
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
        *(Empty(), NaN(), Infinite(), AllZero(), Constant(), Exploding(), NegativeMoment()),
        *(DeadRows(), DeadColumns(), DeadHeads(), DeadExperts()),
        *(ZeroCentredNorm(), NegativeNorm(), UnlikeLayer(), OutlierChannels()),
        *(Subnormal(), WideType(), MixedTypes(), NarrowCodes(), SaturatedCodes()),
        *(Tied(), Duplicated(), CopiedLayer()),
        *(IdenticalStep(), UnlikeStep(), StoppedChanging()),
    )
}
