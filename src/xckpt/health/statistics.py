"""Rules about running statistics, scales of codes, and the state of an optimizer."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from xckpt.formatting import counted
from xckpt.health.evidence import Rule
from xckpt.structure import Role

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xckpt.health.evidence import Evidence, RuleFinding


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
