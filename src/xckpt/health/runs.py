"""Changes between the steps of a training run, and rules about them."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from xckpt.comparison.measure import MEASURES, compare_pairs
from xckpt.comparison.pairs import pair_of
from xckpt.datasets.tensors import run_dim
from xckpt.errors import some
from xckpt.formatting import counted
from xckpt.health.evidence import EVERY, Evidence, Rule, RuleFinding, out_of_line
from xckpt.health.siblings import equal_to
from xckpt.index import paused_collector
from xckpt.labels.filters import select_or_raise
from xckpt.notebook.folding import fold
from xckpt.scan.entries import contents_of, entries_of
from xckpt.structure import Role
from xckpt.structure.numbering import module_of
from xckpt.tensor_rows import Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from xckpt.labels import TensorFilter
    from xckpt.typing import Array

#: Roles of tensors that change by whole numbers, which would hide the smaller changes of weights.
COUNTING = frozenset({Role.COUNTER, Role.STEP, Role.STATE})


def step_changes(evidence: Evidence) -> StepChanges | None:
    """Return the changes of a run; None without streams or with fewer than two steps."""
    if evidence.run is None or not evidence.streams:
        return None
    changes = StepChanges(evidence, evidence.parameters or range(len(evidence.names)))
    return changes if len(changes.steps) > 1 and changes.names else None


class StepChanges:
    """Changes of each tensor of a run between steps: rows are tensors, named without steps."""

    def __init__(self, evidence: Evidence, rows: Iterable[int]) -> None:
        self.dim = evidence.run or ""
        by_name: dict[str, dict[int, int]] = {}
        for row in rows:
            step = evidence.step_of(row)
            if step:
                by_name.setdefault(evidence.plain_names[row], {})[int(step)] = row
        self.steps = sorted({step for places in by_name.values() for step in places})
        self.names = list(by_name)
        #: Row in the evidence of each tensor at each step; -1 if the step lacks the tensor.
        self.places = np.array(
            [[places.get(step, -1) for step in self.steps] for places in by_name.values()], np.int64
        ).reshape(len(self.names), len(self.steps))
        self._evidence, self._structure = evidence, evidence.structure
        by_measure = self._compare(self.places[:, :-1], self.places[:, 1:])
        self.same = by_measure["status"] == 0
        #: Norm of the change; also divided by the norm at the later step.
        self.norm = _norm_of(by_measure)
        self.relative = by_measure["rel_l2"]
        #: Number of elements that changed.
        self.changed = by_measure["count"] * (1 - by_measure["equal_fraction"])
        #: Role of each tensor.
        self.roles = [evidence.roles[int(places[places >= 0][0])] for places in self.places]

    def _compare(self, before: Array, after: Array) -> dict[str, Array]:
        """Return the `MEASURES` of the tensors at places of steps; NaN if one has no tensor."""
        exists = (before >= 0) & (after >= 0)
        streams, names = self._evidence.streams, self._evidence.names
        pairs = [
            pair_of(streams[new], streams[old], names[new])
            for old, new in zip(before[exists].tolist(), after[exists].tolist(), strict=True)
        ]
        table = np.full((*before.shape, len(MEASURES)), np.nan)
        if pairs:
            options: Any = {"progress": self._evidence.progress, "cache": self._evidence.cache}
            table[exists] = compare_pairs(pairs, **options)
        return {name: table[..., column] for column, name in enumerate(MEASURES)}

    def norm_between(self, rows: Array, before: Array, after: Array) -> Array:
        """Return the norm of the change of each of several tensors between any two steps."""
        return _norm_of(self._compare(self.places[rows, before], self.places[rows, after]))

    def relative_change(self, rows: Sequence[int]) -> Array:
        """Return the norm of the change of several tensors together, relative to their norm."""
        # The norm is of the later step, and of all of the tensors, whether they changed or not.
        norm = joint_norm(self.norm[rows])
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(norm == 0, 0.0, norm / joint_norm(self._sizes[rows]))

    @cached_property
    def _sizes(self) -> Array:
        """Norm of each tensor at the later step of each change."""
        with np.errstate(invalid="ignore", divide="ignore"):
            sizes: Array = self.norm / self.relative
        # Comparisons do not decode tensors with equal bytes.
        unknown = ~np.isfinite(sizes) & self.same
        if unknown.any():
            norms = self._evidence.norms_of_elements
            after = self.places[:, 1:]
            sizes[unknown] = norms[after[unknown]]
        return sizes

    def layer_of(self, row: int) -> str:
        """Return the name up to its first index, or the module of a name without one."""
        name = self.names[row]
        return self._structure.layer(name) or module_of(name) or name

    def first_row(self, step: int) -> int:
        """Return the row of the first tensor of a step, for findings about the whole step."""
        places = self.places[:, self.steps.index(step)]
        return int(places[places >= 0][0])


def _norm_of(by_measure: dict[str, Array]) -> Array:
    return by_measure["rmse"] * np.sqrt(by_measure["count"])


def joint_norm(norms: Array) -> Array:
    """Return the norm of all tensors together at each step; NaN if none of them is finite."""
    is_finite = np.isfinite(norms)
    total = np.sqrt((np.where(is_finite, norms, 0.0) ** 2).sum(axis=0))
    return np.where(is_finite.any(axis=0), total, np.nan)


def changes_of(obj: Any, tensors: TensorFilter | None) -> StepChanges:
    """Compare the steps of a Dataset of `open_steps`; `tensors` selects by names without steps."""
    subject = contents_of(obj)
    with paused_collector():
        streams = [stream for entry in entries_of(subject) for stream in entry.streams]
    dim = run_dim(subject.coords)
    dtypes = [stream.kind.name for stream in streams]
    shapes = [tuple(stream.array.shape) for stream in streams]
    names = [stream.name for stream in streams]
    evidence = Evidence(names, {}, dtypes, shapes, dim, streams=streams, subject=subject)
    plain = [
        evidence.plain_names[row] if evidence.step_of(row) else "" for row in range(len(names))
    ]
    if dim is None or len({evidence.step_of(row) for row in range(len(names))}) < 2:
        raise ValueError("the object has no steps to compare: open several with xckpt.open_steps")
    selected = set(select_or_raise(filter(None, dict.fromkeys(plain)), tensors))
    return StepChanges(evidence, [row for row, name in enumerate(plain) if name in selected])


# --- rules ---------------------------------------------------------------------------------------


class _RunRule(Rule):
    """A rule about the trainable tensors of a run, or about all tensors if none is trainable."""

    severity = "warning"
    roles = EVERY

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        changes = evidence.once(step_changes)
        if changes is not None:
            yield from self._judge_run(evidence, changes)

    @abstractmethod
    def _judge_run(self, evidence: Evidence, changes: StepChanges) -> Iterator[RuleFinding]:
        """Return the findings in the changes of a run."""

    def _at_step(self, evidence: Evidence, row: int, value: float, sentence: str) -> RuleFinding:
        """Return a finding about the whole step of a row."""
        step = f"{evidence.run}.{evidence.step_of(row)}"
        return RuleFinding(row, step, self.name, value, sentence)


class IdenticalStep(_RunRule):
    """All weights of a step are equal to the weights of another step."""

    name = "identical_step"

    def _judge_run(self, evidence: Evidence, changes: StepChanges) -> Iterator[RuleFinding]:
        sentence = f"all {counted(len(changes.names), 'tensor')} are equal to those of step"
        for step, first in _equal_steps(evidence, changes).items():
            yield self._at_step(evidence, changes.first_row(step), first, f"{sentence} {first}")


class Excursion(NamedTuple):
    """Steps in a row at which tensors are far from the steps around, which are close together."""

    #: Positions of the last step before and of the first step after.
    before: int
    after: int
    rows: Array  # of the tensors
    #: Change of these tensors together to the first of the steps, relative to the changes around.
    factor: float


class UnlikeStep(_RunRule):
    """The weights change much more, or less, than at the steps around; or they change back."""

    name = "unlike_step"
    threshold = 6.0  # robust standard deviations, each at least a factor of 1.25
    least_factor = 1.25
    #: A change this many times as large as its neighbours is reported even in short runs.
    enough = 5.0
    fewest_changes = 4
    # A change that is undone: how many times as large as the changes around, the cosine between
    # both changes, the number of steps until then, and of elements, since few are often rounded
    # forth and back.
    least_excursion, most_cosine, longest_excursion, fewest_elements = 1.5, -0.5, 3, 100

    def _judge_run(self, evidence: Evidence, changes: StepChanges) -> Iterator[RuleFinding]:
        excursions = self._excursions(changes)
        for excursion in excursions:
            yield self._undone(evidence, changes, excursion)
        undone = {n for trip in excursions for n in range(trip.before, trip.after)}
        for interval, factor, sentence in self._jumps(changes):
            if interval not in undone:
                row = changes.first_row(changes.steps[interval + 1])
                yield self._at_step(evidence, row, factor, sentence)

    def _excursions(self, changes: StepChanges) -> list[Excursion]:
        """Find steps at which tensors are far from the steps around, from the shortest ones."""
        rate = changes.norm / np.sqrt(np.diff(changes.steps))
        is_enough = (changes.changed >= self.fewest_elements) & np.isfinite(rate)
        rate = np.where(is_enough, rate, 0.0)
        excursions: list[Excursion] = []
        is_explained = np.zeros(rate.shape, bool)
        for span in range(1, min(self.longest_excursion, rate.shape[1] - 2) + 1):
            # Each window has the change to the first step and back, and those between and around.
            windows = sliding_window_view(np.pad(rate, ((0, 0), (1, 1))), span + 3, axis=1)
            others = np.delete(windows, [1, span + 1], axis=2).max(axis=2)
            least = windows[..., [1, span + 1]].min(axis=2)
            is_large = (least > 0) & (least >= self.least_excursion * others)
            is_large &= ~is_explained[:, :-span] & ~is_explained[:, span:]
            rows, starts = np.nonzero(is_large)
            there, back = changes.norm[rows, starts], changes.norm[rows, starts + span]
            total = changes.norm_between(rows, starts, starts + span + 1)
            is_undone = total**2 - there**2 - back**2 <= 2 * self.most_cosine * there * back
            rows, starts = rows[is_undone], starts[is_undone]
            is_explained[rows, starts] = is_explained[rows, starts + span] = True
            for start in np.unique(starts).tolist():
                of_start = rows[starts == start]
                with np.errstate(divide="ignore"):
                    factor = joint_norm(rate[of_start, start]) / joint_norm(others[of_start, start])
                excursions.append(Excursion(start, start + span + 1, of_start, float(factor)))
        return excursions

    def _undone(self, evidence: Evidence, changes: StepChanges, trip: Excursion) -> RuleFinding:
        """Return the finding about tensors that were wrong at some steps only."""
        before, first, after = (
            changes.steps[n] for n in (trip.before, trip.before + 1, trip.after)
        )
        patterns = fold(Row(changes.names[row], "", (), 0) for row in trip.rows.tolist())
        names = some([pattern.text for pattern in patterns], "patterns of names", 3)
        number = counted(len(changes.names), "tensor")
        times = f", {trip.factor:.3g} times as much as around it" if isfinite(trip.factor) else ""
        sentence = (
            f"{len(trip.rows):,} of {number} changed from step {before} to {first}{times}, "
            f"and back by step {after}: {names}"
        )
        return self._at_step(evidence, changes.first_row(first), trip.factor, sentence)

    def _jumps(self, changes: StepChanges) -> Iterator[tuple[int, float, str]]:
        """Yield intervals in which all tensors together change unusually: factor and sentence."""
        steps = np.array(changes.steps, np.float64)
        total = np.sqrt(np.nansum(changes.norm**2, axis=0))
        intervals = np.flatnonzero(np.isfinite(total) & (total > 0))
        if len(intervals) < self.fewest_changes:
            return
        # Many small steps in random directions lead as far as the root of their number.
        rate = np.log2(total[intervals] / np.sqrt(np.diff(steps)[intervals]))
        score = out_of_line(rate, np.log2(self.least_factor), self.threshold)
        for position in range(1, len(intervals)):  # the first change is large in every run
            neighbours = [
                neighbour
                for neighbour in range(position - 2, position + 3)
                if neighbour != position and 0 <= neighbour < len(rate)
            ]
            above = rate[position] - max(rate[neighbour] for neighbour in neighbours if neighbour)
            if not score[position] and above <= np.log2(self.enough):
                continue
            factor = 2.0 ** (rate[position] - np.median(rate[neighbours]))
            old, new = changes.steps[intervals[position]], changes.steps[intervals[position] + 1]
            sentence = (
                f"from step {old} to {new} tensors change {factor:.3g} times as much as around it, "
                f"by {total[intervals[position]]:.3g} in total"
            )
            if score[position]:
                sentence += f": {abs(score[position]):.0f} robust standard deviations"
            yield int(intervals[position]), float(factor), sentence


class StoppedChanging(_RunRule):
    """A tensor no longer changes, although others do."""

    name = "stopped"
    threshold = 2  # steps in a row

    def _judge_run(self, evidence: Evidence, changes: StepChanges) -> Iterator[RuleFinding]:
        has_changes = ~changes.same.all(axis=0)  # intervals in which anything changed
        for tensor, name in enumerate(changes.names):
            changed = np.flatnonzero(~changes.same[tensor] & ~np.isnan(changes.norm[tensor]))
            last_change = int(changed[-1]) + 1 if len(changed) else 0
            unchanged_count = int(np.count_nonzero(has_changes[last_change:]))
            row = int(changes.places[tensor, -1])
            if last_change and unchanged_count >= self.threshold and row >= 0:
                sentence = (
                    f"{name} did not change after step {changes.steps[last_change]}, "
                    f"in {unchanged_count} steps in which others did"
                )
                yield self.finding(evidence, row, changes.steps[last_change], sentence)


def _equal_steps(evidence: Evidence, changes: StepChanges) -> dict[int, int]:
    """Return the earlier step that each repeated step is equal to, in all tensors."""
    places = changes.places[(changes.places >= 0).all(axis=1)]
    columns = np.array([np.nan_to_num(column, nan=-1.0) for column in evidence.columns.values()]).T
    by_statistics: dict[bytes, list[int]] = {}
    for step, rows in enumerate(places.T):
        by_statistics.setdefault(columns[rows].tobytes(), []).append(step)
    suspected = [steps for steps in by_statistics.values() if len(steps) > 1]
    groups = [[int(rows[step]) for step in steps] for steps in suspected for rows in places]
    twins = equal_to(evidence, groups)
    equal = {}
    for first, *later in suspected:
        for step in later:
            pairs = zip(places[:, step].tolist(), places[:, first].tolist(), strict=True)
            if all(twins.get(new) == old for new, old in pairs):
                equal[changes.steps[step]] = changes.steps[first]
    return equal
