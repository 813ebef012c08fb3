"""Rules about the channels of a matrix: dead, equal, outlying, or multiples of one channel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.formatting import counted
from xckpt.health.evidence import CODED, Rule
from xckpt.statistics.channel_sketches import OUTLYING
from xckpt.structure import Role

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xckpt.health.evidence import Evidence, RuleFinding
    from xckpt.typing import Array


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
    is_of_kind, implied_by = True, frozenset({"exploding", "lone_element"})
    threshold = OUTLYING  # standard deviations
    few = 0.01  # share of the channels
    least = 25.0  # standard deviations of the largest element

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        rows, columns = evidence["outlier_rows"], evidence["outlier_columns"]
        ratio = evidence["absmax"] / evidence["std"]
        is_outlying = ((rows > 0) | (columns > 0)) & (ratio > self.least)
        if evidence.is_new:  # single elements, as `trunc_normal_` leaves them
            is_outlying &= rows != columns
        for row in np.flatnonzero(is_outlying).tolist():
            words = evidence.channel_words(row)
            sides = [
                (outliers[row], evidence[f"{side}_count"][row], side, word)
                for outliers, side, word in zip(
                    (rows, columns), ("row", "column"), words, strict=True
                )
                if outliers[row] > 0 and evidence[f"{side}_count"][row] > 1
            ]
            if not sides:
                continue
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


class _EqualRows(Rule):
    """Output channels of a matrix are equal."""

    threshold = 8  # rows that are equal to one
    #: Share of the rows that are equal to another one, in groups of any size.
    share = 0.1
    fewest_elements = 8  # of a row

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        if not evidence.readers or evidence.is_new:
            return
        count, total = evidence["count"], evidence["row_count"]
        is_read = count / total >= self.fewest_elements
        is_read &= count <= evidence.most_elements
        is_read &= self._are_many(evidence["equal_rows"], evidence["repeated_rows"], total)
        for row in np.flatnonzero(is_read).tolist():
            has_tokens = evidence.module_type(row) == "embedding" or evidence.is_tied_head(row)
            if has_tokens != self._is_about_tokens:
                continue
            most, repeated = evidence.equal_rows(row)
            if not self._are_many(most, repeated, total[row]):
                continue
            word = evidence.channel_words(row)[0]
            number = max(repeated, most)
            sentence = f"{number:,} of {total[row]:,.0f} {word}s are equal"
            if repeated >= most:
                sentence += " to another one"
            yield self.finding(evidence, row, number, sentence + self._consequence)

    _is_about_tokens = False
    _consequence = ""

    def _are_many(self, most: Any, repeated: Any, total: Any) -> Any:
        fewest = np.maximum(self.threshold, self.share * total)
        return (np.asarray(most) >= self.threshold) | (np.asarray(repeated) >= fewest)


class EqualRows(_EqualRows):
    """Many output channels of a matrix are equal."""

    name, severity = "equal_rows", "warning"
    implied_by = frozenset({"constant", "equal_experts"})
    roles = frozenset({Role.WEIGHT, Role.AVERAGE})


class EqualTokens(_EqualRows):
    """Many rows of an embedding are equal, as those of tokens that no text has."""

    name, severity = "equal_tokens", "info"
    roles = frozenset({Role.WEIGHT, Role.AVERAGE})
    _is_about_tokens = True
    _consequence = ": the model cannot tell their tokens apart"


class RankOne(Rule):
    """A matrix is the product of one column and one row, so that all of its outputs are alike."""

    name, severity = "rank_one", "warning"
    roles = frozenset({Role.WEIGHT, Role.AVERAGE})
    implied_by = frozenset({"all_zero", "constant", "equal_rows", "nan", "inf"})
    fewest_channels = 8

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        if not evidence.readers or evidence.is_new:
            return
        length, count = evidence["l2"], evidence["count"]
        alive = [
            evidence[f"{side}_count"] - evidence[dead]
            for side, dead in (("row", "dead_rows"), ("column", "dead_columns"))
        ]
        may_be = np.abs(evidence["product_l2"] / length - 1) < evidence.rounding
        may_be &= (np.minimum(*alive) >= self.fewest_channels) & (count <= evidence.most_elements)
        for row in np.flatnonzero(may_be).tolist():
            is_matrix = len([size for size in evidence.shapes[row] if size > 1]) == 2
            if is_matrix and evidence.is_rank_one(row):
                words = evidence.channel_words(row)
                sentence = f"its rank is 1: every {words[0]} is a multiple of the same one"
                yield self.finding(evidence, row, 1, sentence)
