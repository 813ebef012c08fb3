"""Rules about the channels of a matrix: dead, equal, outlying, or multiples of one channel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.formatting import counted
from xckpt.health.evidence import CODED, Evidence, Rule, RuleFinding
from xckpt.statistics.channel_sketches import OUTLYING
from xckpt.structure import Role

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xckpt.typing import Array


class _Verdict(NamedTuple):
    """The rule that reports channels, with the value and the sentence of its finding."""

    rule: str
    value: float
    sentence: str


class _ChannelSide(NamedTuple):
    """The rows or the columns of a matrix, and the statistics about them."""

    name: str
    axis: int
    dead: str
    first_dead: str
    outlying: str


_ROWS = _ChannelSide("row", 0, "dead_rows", "first_empty_row", "outlier_rows")
_COLUMNS = _ChannelSide("column", 1, "dead_columns", "first_dead_column", "outlier_columns")


class _Dead(Rule):
    """Channels are zero in a tensor that has other elements."""

    severity = "warning"
    roles = CODED

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        has_others = evidence["zero"] < evidence["count"]
        for side in (_ROWS, _COLUMNS):
            dead = evidence[side.dead]
            for row in np.flatnonzero((dead > 0) & has_others).tolist():
                verdict = None if evidence.is_vector(row) else self._judge_side(evidence, row, side)
                if verdict is None or verdict.rule != self.name:
                    continue
                if not self._is_initial(evidence, row, dead):
                    yield self.finding(evidence, row, verdict.value, verdict.sentence)

    @staticmethod
    def _is_initial(evidence: Evidence, row: Any, dead: Array) -> bool:
        siblings = evidence.families[evidence.family_of(row)]
        return (
            evidence.is_new
            and len(siblings) > 1
            and len({dead[sibling] for sibling in siblings}) == 1
        )

    @staticmethod
    def _judge_side(evidence: Evidence, row: int, side: _ChannelSide) -> _Verdict | None:
        """Return the verdict on the dead channels of a tensor; None for a padding token."""
        count, block = evidence[side.dead][row], evidence["dead_block"][row]
        kind = evidence.module_type(row)
        if side is _ROWS and count == 1 and (kind == "embedding" or evidence.is_tied_head(row)):
            return None
        if side is _ROWS and (kind == "router" or evidence.is_stack_of_experts(row)):
            experts = counted(evidence.shapes[row][0], "expert")
            return _Verdict(
                "dead_experts", count, f"{count:,.0f} of {experts} has nothing but zeros"
            )
        total = evidence[f"{side.name}_count"][row]
        share = "" if np.isnan(total) else f" of {total:,.0f}"
        plural = "" if count == 1 and not share else "s"
        word = evidence.channel_words(row)[side.axis]
        sentence = f"{count:,.0f}{share} {word}{plural} {'is' if count == 1 else 'are'} zero"
        first = evidence[side.first_dead][row]
        if count == 1 and not np.isnan(first):
            sentence += f": number {first:,.0f}"
        is_attention = evidence.slot(row).partition(".")[0] == "attention"
        if block > 1 and is_attention and count % block == 0:
            heads = counted(int(count // block), "head")
            sentence += f": as many as {heads} of {block:.0f}"
            return _Verdict("dead_heads", count // block, sentence)
        return _Verdict(side.dead, count, sentence)


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
                count, first = evidence["faint_rows"][row], evidence["faint_row"][row]
                sentence = (
                    f"{count:,.0f} of {counted(evidence.shapes[row][0], 'expert')} "
                    f"{'has' if count == 1 else 'have'} a row of the router near zero, "
                    f"first expert {first:.0f}"
                )
                yield self.finding(evidence, row, count, sentence)


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
            # Features of language models are columns.
            sides = (_COLUMNS, _ROWS) if words[_ROWS.axis] == "row" else (_ROWS, _COLUMNS)
            counts = {
                side: evidence[side.outlying][row]
                for side in sides
                if evidence[side.outlying][row] > 0 and evidence[f"{side.name}_count"][row] > 1
            }
            if not counts:
                continue
            side = min(counts, key=counts.__getitem__)
            count, total = counts[side], evidence[f"{side.name}_count"][row]
            if count <= max(1, self.few * total):
                word, place = words[side.axis], evidence[f"top_{side.name}"][row]
                sentence = (
                    f"{counted(int(count), word)} of {total:,.0f} "
                    f"{'has' if count == 1 else 'have'} elements beyond {self.threshold:g} "
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
        if not evidence.streams or evidence.is_new:
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
            count_equal = max(repeated, most)
            sentence = f"{count_equal:,} of {total[row]:,.0f} {word}s are equal"
            if repeated >= most:
                sentence += " to another one"
            yield self.finding(evidence, row, count_equal, sentence + self._consequence)

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
        if not evidence.streams or evidence.is_new:
            return
        length, count = evidence["l2"], evidence["count"]
        alive = [evidence[f"{side.name}_count"] - evidence[side.dead] for side in (_ROWS, _COLUMNS)]
        may_be = np.abs(evidence["product_l2"] / length - 1) < evidence.rounding
        may_be &= (np.minimum(*alive) >= self.fewest_channels) & (count <= evidence.most_elements)
        for row in np.flatnonzero(may_be).tolist():
            is_matrix = len([size for size in evidence.shapes[row] if size > 1]) == 2
            if is_matrix and evidence.is_rank_one(row):
                words = evidence.channel_words(row)
                sentence = f"its rank is 1: every {words[0]} is a multiple of the same one"
                yield self.finding(evidence, row, 1, sentence)
