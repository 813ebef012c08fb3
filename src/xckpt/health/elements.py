"""Rules about single tensors: elements, running statistics, the state of optimizers, codes."""

from __future__ import annotations

from collections import Counter
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from xckpt.arrays.dense import DenseArray
from xckpt.arrays.scaled import QuantizedArray
from xckpt.arrays.streams import of_tensor
from xckpt.elements import ELEMENT_TYPES
from xckpt.formatting import binary_size, counted
from xckpt.health.evidence import CODED, EVERY, Evidence, Rule, RuleFinding
from xckpt.progress import Progress
from xckpt.scan.scanning import gather
from xckpt.statistics.channel_sketches import count_at_ends
from xckpt.statistics.counts import Sketch
from xckpt.statistics.describe import spectrum
from xckpt.structure import Described, Role, Structure
from xckpt.structure.description import NO_TENSORS, empty_weights

if TYPE_CHECKING:
    from collections.abc import Iterator


class Empty(Rule):
    """The checkpoint has no tensors, or weights have no elements."""

    name, severity = "empty", "error"
    roles = None

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        if evidence.origin is None:
            tensors = zip(evidence.names, evidence.dtypes, evidence.shapes, strict=True)
            structure = Structure([Described(*tensor) for tensor in tensors])
        else:
            structure = evidence.origin.structure
        if not structure:
            count = evidence.origin.unselected if evidence.origin else 0
            reason = f"the selection has none of the {count:,} tensors of the file"
            yield RuleFinding(0, "", self.name, 0.0, reason if count else NO_TENSORS)
        rows = {name: row for row, name in enumerate(evidence.names)}
        by_reason: dict[str, list[str]] = {}
        for name, reason in empty_weights(structure).items():
            by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            sentence = reason
            if len(names) > 1:
                sentence += f"; {len(names) - 1:,} more like it, such as {names[1]}"
            row = rows.get(names[0], len(rows))
            yield RuleFinding(row, names[0], self.name, 0.0, sentence)


class _Code(Rule):
    roles = None

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        risks = () if evidence.origin is None else evidence.origin.risks
        for finding in risks:
            if finding.rule == self.name:
                value = float(len(finding.names))
                yield RuleFinding(0, "", self.name, value, finding.message)


class Executes(_Code):
    """Other programs run code of the file when they load it."""

    name, severity = "executes", "error"


class Imports(_Code):
    """Other programs import classes of packages when they load the file."""

    name, severity = "imports", "warning"


class _NotFinite(Rule):
    severity = "error"
    word = ""

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        for row in np.flatnonzero(evidence[self.name] > 0):
            if self._is_meant(evidence, int(row)):
                continue
            number, count = evidence[self.name][row], evidence["count"][row]
            verb = "is" if number == 1 else "are"
            sentence = f"{number:,.0f} of {count:,.0f} elements {verb} {self.word}"
            yield self.finding(evidence, row, number, sentence)

    def _is_meant(self, evidence: Evidence, row: int) -> bool:
        raise NotImplementedError


class NaN(_NotFinite):
    """Elements are NaN."""

    name, word = "nan", "NaN"
    roles = EVERY

    def _is_meant(self, evidence: Evidence, row: int) -> bool:
        return evidence.is_setting(row)


class Infinite(_NotFinite):
    """Elements are infinite. Masks are made of infinities, and so are rows that mask."""

    name, word = "inf", "infinite"
    roles = EVERY - {Role.CONSTANT}

    def _is_meant(self, evidence: Evidence, row: int) -> bool:
        return evidence.has_masked_rows(row)


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
            if evidence.has_values and _are_untrained(evidence, siblings):
                continue
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
        """Return whether the finding about the gain of a norm covers its bias."""
        gain = evidence.gain_of(row)
        is_other = gain is not None and gain != row
        return is_other and bool(evidence["min"][gain] == 1 == evidence["max"][gain])

    def _is_initial(self, evidence: Evidence, row: int) -> bool:
        if evidence.is_new or evidence.roles[row] in self.only_if_unlike_siblings:
            return True
        name, value = evidence.plain_names[row], evidence["min"][row]
        # A vector that is the same in most layers, or has no sibling, may be so by design.
        is_vector = evidence.is_vector(row) or evidence.is_bias(row)
        return is_vector or (value == 0 and evidence.structure.begins_as_zeros(name))


def _are_untrained(evidence: Evidence, siblings: list[int]) -> bool:
    """Return whether several matrices are all zero, each of them."""
    is_zero = (evidence.is_zero(row) and not evidence.is_vector(row) for row in siblings)
    return len(siblings) > 1 and all(is_zero)


class Untrained(Rule):
    """All matrices of a kind are zero, as some are before training."""

    name, severity = "untrained", "info"
    is_of_kind = True
    roles = CODED

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        if evidence.is_new or not evidence.has_values:
            return
        for siblings in evidence.families.values():
            if _are_untrained(evidence, siblings):
                row, number = siblings[0], len(siblings)
                sibling_count = counted(number - 1, "sibling")
                sentence = (
                    f"all elements are 0, and those of its {sibling_count}: were they trained?"
                )
                yield self.finding(evidence, row, number, sentence)


class AllZero(_OneValue):
    """All elements are zero."""

    name, severity = "all_zero", "warning"
    roles = CODED | {Role.STATISTIC, Role.MOMENT}

    def _is_reported(self, value: float) -> bool:
        return value == 0


class Constant(_OneValue):
    """All elements are the same number other than zero."""

    name, severity = "constant", "warning"
    is_of_kind = True
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
        ratio, following_ratio = largest / std, following / std
        smaller = np.minimum(evidence["row_count"], evidence["column_count"])
        is_matrix = smaller >= self.fewest_channels
        is_lone = (std > 0) & (ratio > self.threshold) & (following_ratio < self.others)
        # `trunc_normal_` of PyTorch leaves elements at its bounds.
        is_lone &= not evidence.is_new
        for row in np.flatnonzero(is_lone & is_matrix):
            place = f"{evidence['top_row'][row]:,.0f}, {evidence['top_column'][row]:,.0f}"
            words = " and ".join(evidence.channel_words(int(row)))
            sentence = (
                f"the element in {words} {place} is {ratio[row]:.0f} standard deviations, and "
                f"the largest elsewhere {following_ratio[row]:.2g}"
            )
            yield self.finding(evidence, row, ratio[row], sentence)


class Subnormal(Rule):
    """Many elements are too small for all digits of their type."""

    name, severity = "subnormal", "warning"
    is_of_kind = True
    #: Share of the elements; for float16, whose subnormal numbers are not tiny, the second one.
    threshold, threshold_of_float16 = 0.1, 0.5

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        share = evidence["subnormal"] / evidence["count"]
        is_half = np.array([dtype == "float16" for dtype in evidence.dtypes], bool)
        limit = np.where(is_half, self.threshold_of_float16, self.threshold)
        for row in np.flatnonzero(share > limit):
            sentence = (
                f"{share[row]:.0%} of the elements are subnormal: few of their digits are left"
            )
            yield self.finding(evidence, row, share[row], sentence)


class WideType(Rule):
    """Every element fits into a type of half the size."""

    name, severity = "wide_type", "info"
    is_of_kind, implied_by = True, frozenset({"nan", "all_zero", "constant"})
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


# --- running statistics, scales, and the state of an optimizer ------------------------------------


class NegativeStatistic(Rule):
    """A running variance, or a counter, has a negative element."""

    name, severity = "negative_statistic", "error"
    roles = frozenset({Role.STATISTIC, Role.COUNTER})

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        low, structure = evidence["min"], evidence.structure
        for row in np.flatnonzero(low < 0).tolist():
            name = evidence.plain_names[row]
            if structure.is_variance(name):
                sentence = f"a variance is {low[row]:.3g} at its smallest element"
                yield self.finding(evidence, row, low[row], sentence)
            elif structure.is_counter(name):
                yield self.finding(evidence, row, low[row], f"a counter is {low[row]:,.0f}")


class UnlikeStatistic(Rule):
    """Running statistics of a norm are far beyond those of all other norms."""

    name, severity = "unlike_statistic", "warning"
    roles = frozenset({Role.STATISTIC})
    #: Factors of the means and of the variances. A first layer can have large ones.
    far_mean, far_variance = 1e4, 1e7
    fewest = 4

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        rms = evidence["rms"]
        groups: dict[tuple[str, bool], list[int]] = {}
        for row, role in enumerate(evidence.roles):
            if role is Role.STATISTIC and np.isfinite(rms[row]):
                is_variance = evidence.structure.is_variance(evidence.plain_names[row])
                groups.setdefault((evidence.step_of(row), is_variance), []).append(row)
        for (_, is_variance), rows in groups.items():
            if len(rows) < self.fewest:
                continue
            second, first = sorted(rows, key=rms.__getitem__)[-2:]
            factor = rms[first] / rms[second]
            if rms[second] > 0 and factor > (self.far_variance if is_variance else self.far_mean):
                word = "variances" if is_variance else "means"
                sentence = (
                    f"the root mean square of its {word}, {rms[first]:.3g}, is {factor:.2g} times "
                    f"that of any other norm"
                )
                yield self.finding(evidence, first, factor, sentence)


class OddScale(Rule):
    """A scale of codes is 0, or negative where no other one is."""

    name, severity = "odd_scale", "warning"
    roles = frozenset({Role.SCALE})
    fewest_others = 3

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        low, high = evidence["min"], evidence["max"]
        factors = [
            row
            for row, name in enumerate(evidence.plain_names)
            if evidence.roles[row] is Role.SCALE and evidence.structure.is_factor(name)
        ]
        negative = [row for row in factors if low[row] < 0]
        for row in factors:
            number = "it is" if evidence["count"][row] == 1 else "all of its elements are"
            if low[row] == high[row] == 0:
                yield self.finding(evidence, row, 0, f"{number} 0: so are the weights")
            elif negative == [row] and len(factors) > self.fewest_others:
                others = counted(len(factors) - 1, "other scale")
                sentence = f"its smallest element is {low[row]:.3g}, and {others} are positive"
                yield self.finding(evidence, row, low[row], sentence)


class OddStep(Rule):
    """An optimizer counts fewer or more steps for a parameter than for most others."""

    name, severity = "odd_step", "info"
    roles = frozenset({Role.STEP})
    is_of_kind = True
    fewest_siblings = 3
    #: Share of the usual step. Some batches give a parameter no gradient.
    least_difference = 0.1

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        low = evidence["min"]
        for siblings in evidence.families.values():
            steps = Counter([low[row] for row in siblings if evidence["count"][row] == 1])
            (usual, number), *_ = steps.most_common(1) or [(0.0, 0)]
            if number < self.fewest_siblings or 2 * number <= len(siblings):
                continue
            for row in siblings:
                if abs(low[row] - usual) > self.least_difference * usual:
                    others = counted(number, "sibling")
                    sentence = f"it is {low[row]:,.0f}, and that of {others} {usual:,.0f}"
                    yield self.finding(evidence, row, low[row], sentence)


class NegativeMoment(Rule):
    """An average of squares has a negative element."""

    name, severity = "negative_moment", "warning"
    roles = frozenset({Role.MOMENT})

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        low = evidence["min"]
        for row in np.flatnonzero(low < 0):
            if evidence.structure.is_of_squares(evidence.names[row]):
                sentence = f"an average of squares is {low[row]:.3g} at its smallest element"
                yield self.finding(evidence, row, low[row], sentence)


# --- ranges of codes ------------------------------------------------------------------------------


class CodeRange(NamedTuple):
    """Range of the codes of a quantised tensor, which has a row in the evidence."""

    row: int
    dtype: str
    elements: float
    low: float
    high: float
    at_ends: float
    #: Number of scales; each puts one code at an end.
    scales: float


def code_ranges(evidence: Evidence) -> list[CodeRange]:
    """Return the ranges of the codes of all quantised tensors."""
    return [*_plain_codes(evidence), *_decoded_codes(evidence)]


def _plain_codes(evidence: Evidence) -> Iterator[CodeRange]:
    """Yield the ranges of tensors whose statistics describe the stored codes."""
    names, dtypes = evidence.names, evidence.dtypes
    scales = evidence.structure.scales
    sizes = dict(zip(names, evidence["count"].tolist(), strict=True))
    for row in np.flatnonzero(~np.isnan(evidence["at_ends"])).tolist():
        is_code = evidence.roles[row] is Role.CODES and names[row] in scales
        if is_code or dtypes[row].startswith("float8"):
            count, low, high, ends = (
                evidence[name][row] for name in ("count", "min", "max", "at_ends")
            )
            scale_count = sizes.get(scales.get(names[row], ""), 0.0)
            yield CodeRange(row, dtypes[row], count, low, high, ends, scale_count)


def _decoded_codes(evidence: Evidence) -> list[CodeRange]:
    """Return the ranges of tensors whose statistics describe decoded numbers; skip packed codes."""
    tensors: list[tuple[int, QuantizedArray]] = []
    codes = []
    for row, stream in enumerate(evidence.streams):
        lazy = stream.array
        is_coded = isinstance(lazy, QuantizedArray)
        if is_coded and lazy.quantization.bits == lazy.quantization.word_bits == 8:
            flat = DenseArray(lazy.name, lazy.readers["data"], (prod(lazy.shape),), decode=False)
            tensors.append((row, lazy))
            codes.append(of_tensor(flat, lazy.name))
    with Progress(evidence.progress, "codes") as bar:

        def finish(number: int, sketch: Sketch) -> CodeRange:
            row, lazy = tensors[number]
            values = spectrum(sketch).values()
            blocks = zip(lazy.shape, lazy.quantization.block, strict=True)
            low, high = (values[0], values[-1]) if len(values) else (0.0, 0.0)
            scales = prod([-(-size // block) for size, block in blocks])
            kind, ends = sketch.kind.name, count_at_ends(sketch)
            return CodeRange(row, kind, sketch.count, float(low), float(high), ends, scales)

        return gather(codes, Sketch, finish, bar, cache=evidence.cache, stretched=True)


# --- rules ---------------------------------------------------------------------------------------


class _Codes(Rule):
    """Codes of quantised tensors use little of their range, or too much of its ends."""

    roles = CODED
    #: Tensors with fewer elements per possible code are skipped.
    elements_of_a_code = 64

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        for codes in evidence.once(code_ranges):
            levels = 1 << ELEMENT_TYPES[codes.dtype].bits
            if codes.elements >= self.elements_of_a_code * levels:
                for value, sentence in self._violations(codes, levels):
                    yield self.finding(evidence, codes.row, value, sentence)

    def _violations(self, codes: CodeRange, levels: int) -> Iterator[tuple[float, str]]:
        """Yield a value and a sentence for each finding."""
        raise NotImplementedError


class NarrowCodes(_Codes):
    """Codes use a part of their range."""

    name, severity = "narrow_codes", "info"
    is_of_kind = True
    threshold = 0.5  # of the range of integers
    threshold_of_floats = 1 / 16  # of the largest number

    def _violations(self, codes: CodeRange, levels: int) -> Iterator[tuple[float, str]]:
        low, high, dtype = codes.low, codes.high, codes.dtype
        float_format = ELEMENT_TYPES[dtype].float_format
        if float_format is not None:
            largest = max(abs(low), abs(high))
            used = largest / float_format.largest
            # Types with five bits of exponent are made for gradients.
            if float_format.exponent_bits != 5 and 0 < used < self.threshold_of_floats:
                sentence = f"the largest magnitude of its codes is {largest:.3g}, and {dtype}"
                yield used, f"{sentence} has {float_format.largest:g}"
        elif low < high and (part := (high - low + 1) / levels) < self.threshold:
            yield (
                part,
                f"codes are from {low:.0f} to {high:.0f}: {part:.0%} of the range of {dtype}",
            )


class SaturatedCodes(_Codes):
    """Values were cut off at the ends of the range of their codes."""

    name, severity = "saturated_codes", "warning"
    threshold = 0.05  # share of the codes; 0.25 of codes of 4 bits

    def _violations(self, codes: CodeRange, levels: int) -> Iterator[tuple[float, str]]:
        # Each scale puts one code at an end.
        share = max(0.0, codes.at_ends - codes.scales) / codes.elements
        if share > max(self.threshold, 4 / levels):
            yield (
                share,
                f"{share:.1%} of the codes are at an end of their range: values were cut off",
            )
