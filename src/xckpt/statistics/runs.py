"""The steps of a training run: how much changes from each to the next, and what is odd about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.index import paused_collector
from xckpt.labels.selection import select_some
from xckpt.notebook.formatting import counted
from xckpt.statistics.differences import MEASURES, compare_pairs
from xckpt.statistics.entries import contents_of
from xckpt.statistics.equals import equal_to
from xckpt.statistics.measured import Found, Measured
from xckpt.statistics.pairs import pair_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    import xarray as xr

    from xckpt.labels import TensorFilter
    from xckpt.progress import ProgressOption
    from xckpt.statistics.readers import Reader

Array = np.ndarray[Any, np.dtype[Any]]

#: Distance of a change from those next to it, in robust standard deviations, of which one is taken
#: to be a factor of 1.25 at least; and the changes below which nobody knows what is usual.
FAR, _LEAST_FACTOR, _FEWEST_CHANGES = 6.0, 1.25, 4
#: Steps in a row without a change of a tensor that changed before.
STOPPED = 2


def run_dim(coords: Mapping[Hashable, xr.Variable]) -> str | None:
    """Return the dimension of the steps of what `open_steps` opened; None for anything else."""
    dims = (str(name) for name, coord in coords.items() if coord.encoding.get("steps"))
    return next(dims, None)


class StepChanges:
    """How much each tensor of a run changed between steps: rows are tensors, in plain names."""

    def __init__(
        self,
        measured: Measured,
        readers: Sequence[Reader],
        *,
        progress: ProgressOption = None,
        cache: bool = True,
    ) -> None:
        self.dim = measured.run or ""
        by_name: dict[str, dict[int, int]] = {}
        for at in range(len(readers)):
            step = measured.step_of(at)
            if step:
                by_name.setdefault(measured.plain_name(at), {})[int(step)] = at
        self.steps = sorted({step for places in by_name.values() for step in places})
        self.names = list(by_name)
        #: The place of each tensor at each step in the table of all; -1 where there is none.
        self.places = np.array(
            [[places.get(step, -1) for step in self.steps] for places in by_name.values()], np.int64
        ).reshape(len(self.names), len(self.steps))
        before, after = self.places[:, :-1], self.places[:, 1:]
        there = (before >= 0) & (after >= 0)
        pairs = [
            pair_of(readers[new], readers[old], measured.names[new])
            for old, new in zip(before[there].tolist(), after[there].tolist(), strict=True)
        ]
        rows = compare_pairs(pairs, progress=progress, cache=cache)
        found = np.full((*before.shape, len(MEASURES)), np.nan)
        found[there] = np.array(rows, np.float64).reshape(-1, len(MEASURES))
        by_measure = {name: found[..., at] for at, name in enumerate(MEASURES)}
        self.same = by_measure["status"] == 0
        #: Norm of the change, and relative to that of the later step.
        self.norm = by_measure["rmse"] * np.sqrt(by_measure["count"])
        self.relative = by_measure["rel_l2"]


def changes_of(obj: Any, tensors: TensorFilter | None) -> StepChanges:
    """Compare the steps of what `open_steps` opened; `tensors` chooses by names without steps."""
    subject = contents_of(obj)
    with paused_collector():
        readers = [reader for entry in subject.entries() for reader in entry.readers]
    names = [reader.name for reader in readers]
    dim = run_dim(subject.coords)
    measured = Measured(names, {}, [""] * len(names), [()] * len(names), dim)
    plain = [measured.plain_name(at) if measured.step_of(at) else "" for at in range(len(names))]
    known = list(filter(None, dict.fromkeys(plain)))
    if dim is None or len({measured.step_of(at) for at in range(len(names))}) < 2:
        raise ValueError("there are no steps to compare: open several with xckpt.open_steps")
    chosen = set(select_some(known, tensors))
    kept = [at for at, name in enumerate(plain) if name in chosen]
    some = Measured([names[at] for at in kept], {}, [""] * len(kept), [()] * len(kept), dim)
    return StepChanges(some, [readers[at] for at in kept], progress=None, cache=True)


def run_findings(
    measured: Measured, readers: Sequence[Reader], *, progress: ProgressOption, cache: bool
) -> list[Found]:
    """Find steps that are equal or out of line, and tensors that stopped changing."""
    changes = StepChanges(measured, readers, progress=progress, cache=cache)
    if len(changes.steps) < 2 or not changes.names:
        return []
    equal = _equal_steps(measured, readers, changes, progress=progress, cache=cache)
    of = f"all {counted(len(changes.names), 'tensor')} are equal to those of step"
    found = [
        _at_step(measured, changes, step, ("identical_step", first, f"{of} {first}"))
        for step, first in equal.items()
    ]
    found += _out_of_line(measured, changes)
    moved = ~changes.same.all(axis=0)  # intervals in which anything changed
    for row, name in enumerate(changes.names):
        changed = np.flatnonzero(~changes.same[row] & ~np.isnan(changes.norm[row]))
        since = int(changed[-1]) + 1 if len(changed) else 0
        still = int(np.count_nonzero(moved[since:]))
        if since and still >= STOPPED:
            at = int(changes.places[row, -1])
            what = (
                f"{name} did not change after step {changes.steps[since]}, "
                f"in {still} steps in which others did"
            )
            found.append(measured.found(at, "stopped", changes.steps[since], what))
    return found


def _equal_steps(
    measured: Measured,
    readers: Sequence[Reader],
    changes: StepChanges,
    *,
    progress: ProgressOption,
    cache: bool,
) -> dict[int, int]:
    """Return which step each step is equal to, with all its tensors."""
    whole = (changes.places >= 0).all(axis=1)
    columns = np.array([np.nan_to_num(each, nan=-1.0) for each in measured.columns.values()]).T
    alike: dict[bytes, list[int]] = {}
    for number, places in enumerate(changes.places[whole].T):
        alike.setdefault(columns[places].tobytes(), []).append(number)
    groups = [
        [int(changes.places[row, number]) for number in numbers]
        for numbers in alike.values()
        if len(numbers) > 1
        for row in np.flatnonzero(whole)
    ]
    twins = equal_to(measured, readers, groups, progress=progress, cache=cache)
    equal = {}
    for numbers in alike.values():
        for number in numbers[1:]:
            pairs = zip(
                changes.places[whole][:, number], changes.places[whole][:, numbers[0]], strict=True
            )
            if all(twins.get(int(new)) == int(old) for new, old in pairs):
                equal[changes.steps[number]] = changes.steps[numbers[0]]
    return equal


def _out_of_line(measured: Measured, changes: StepChanges) -> list[Found]:
    steps = np.array(changes.steps, np.float64)
    total = np.sqrt(np.nansum(changes.norm**2, axis=0))
    there = np.flatnonzero(np.isfinite(total) & (total > 0))
    if len(there) < _FEWEST_CHANGES:
        return []
    # Many small steps in random directions lead as far as the root of their number.
    rate = np.log2(total[there] / np.sqrt(np.diff(steps)[there]))
    score = measured.unlike(rate, np.log2(_LEAST_FACTOR), FAR)
    found = []
    for place in np.flatnonzero(score).tolist():
        if place == 0:
            continue  # the first change is large in every run
        near = [
            each for each in range(max(0, place - 2), min(len(there), place + 3)) if each != place
        ]
        factor = 2.0 ** (rate[place] - np.median(rate[near]))
        old, new = changes.steps[there[place]], changes.steps[there[place] + 1]
        what = (
            f"from step {old} to {new} tensors change {factor:.3g} times as much as around it, "
            f"by {total[there[place]]:.3g} in total: {abs(score[place]):.0f} robust standard "
            "deviations"
        )
        found.append(_at_step(measured, changes, new, ("unlike_step", float(factor), what)))
    return found


def _at_step(
    measured: Measured, changes: StepChanges, step: int, found: tuple[str, float, str]
) -> Found:
    """Say something of a step, which stands at its first tensor."""
    places = changes.places[:, changes.steps.index(step)]
    at = int(places[places >= 0][0])
    return Found(at, f"{measured.run}.{measured.step_of(at)}", *found)
