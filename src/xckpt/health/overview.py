"""A training run at a glance: metrics, changes of the layers, and findings, by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from xckpt.formatting import base_name, counted
from xckpt.health.runs import COUNTING, changes_of, joint_norm
from xckpt.notebook.documents import Field, Heading, Sentence, Table, sentence_text, severity_of
from xckpt.notebook.folding import ascending
from xckpt.notebook.shown import Shown
from xckpt.notebook.summary import SEVERITIES, folded_findings
from xckpt.notebook.views import finding_blocks
from xckpt.opening.runs import run_metrics
from xckpt.structure import PARAMETERS, Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    import xarray as xr

    from xckpt.health.runs import StepChanges
    from xckpt.notebook.documents import Block, Cell
    from xckpt.notebook.summary import TensorFinding

_MOST_STEPS = 6
_MOST_ROWS = 11  # of a kind, after the first one
_ALL = "all"
_NO_METRICS = "the files have no metrics, and no trainer_state.json is next to them"
# Names of rows for tensors other than weights.
_ROLES = {Role.MOMENT: "moments", Role.STATISTIC: "running statistics", Role.STATE: "state"}


class RunSummary(Shown, pd.DataFrame):
    """A table of a training run, with a column for each step; it shows a selection of its rows."""

    # ``attrs["run"]`` is its name, and ``attrs["notes"]`` lists findings as sentences.

    @property
    def _constructor(self) -> Any:
        return pd.DataFrame

    def __getitem__(self, key: Any) -> Any:
        try:
            return super().__getitem__(key)
        except KeyError:
            kinds = [kind for kind, name in self.index if key == name]
            if kinds:
                raise KeyError(
                    f"{key!r} is a row, and columns are steps: .loc[{(kinds[0], key)}]"
                ) from None
            metrics = [name for kind, name in self.index if kind == "metric"]
            known = f"the metrics are {', '.join(metrics)}" if metrics else _NO_METRICS
            raise KeyError(f"no step {key!r}, and no row of this name; {known}") from None

    def _blocks(self) -> list[Block]:
        return run_blocks(self)


def run_blocks(
    summary: pd.DataFrame,
    where: str = "the result is a DataFrame",
    call: str = "summary(changes=True)",
) -> list[Block]:
    """Return the view of a run; `where` are all rows, and `call` compares the steps."""
    kinds: dict[str, list[int]] = {}
    for row, (kind, _) in enumerate(summary.index):
        kinds.setdefault(kind, []).append(row)
    steps = _spread(range(summary.shape[1]), _MOST_STEPS)
    titles = [f"{summary.columns[step]:,}" for step in steps]
    numbers = summary.to_numpy()
    rows: list[list[Cell]] = []
    for kind, places in kinds.items():
        rows.append([f"{kind}:"])
        # The first row is the total.
        for row in [places[0], *_spread(places[1:], _MOST_ROWS)]:
            values = [numbers[row, step] for step in steps]
            rows.append([f"  {summary.index[row][1]}", *values])
    hidden = summary.shape[1] - len(steps), len(summary) - (len(rows) - len(kinds))
    facts = [counted(hidden[0], "more step")] if hidden[0] else []
    facts += [counted(hidden[1], "more row")] if hidden[1] else []
    rest = f"… {' and '.join(facts)}: {where}" if facts else ""
    # Three digits, but whole numbers in full.
    fields = [Field(str(summary.columns.name), "tree")]
    fields += [Field(title, "number", digits=3) for title in titles]
    notes = list(summary.attrs["notes"])
    if not summary.attrs["is_compared"]:
        aim = "changes" if summary.attrs["is_examined"] else "changes and findings"
        notes.append(f"layers are not compared yet: {call} reads each step once, for {aim}")
    return [
        Heading(summary.attrs["run"], "Run", summary.attrs["facts"]),
        Table(fields, rows, rest, wanted=[titles[0], titles[-1]]),
        *map(_note, notes),
    ]


def _note(text: str) -> Sentence:
    severity, _, finding = text.partition(": ")
    return Sentence(severity, finding) if severity in SEVERITIES else Sentence("", text)


def run_summary(
    ds: xr.Dataset, dim: str, count: int, findings: Sequence[TensorFinding] | None, *, changes: bool
) -> RunSummary:
    """Return the overview of a Dataset of `open_steps` with `count` tensors in each step."""
    steps = ds.variables[dim].to_numpy().tolist()
    rows: dict[tuple[str, str], Any] = {
        ("metric", name): values for name, values in run_metrics(ds, dim).items()
    }
    if changes and len(steps) > 1:
        compared = changes_of(ds, None)
        by_step = dict(zip(compared.steps[1:], range(len(compared.steps) - 1), strict=True))
        places = [by_step.get(step, -1) for step in steps]
        for key, values in _change_rows(compared).items():
            rows[key] = np.where(np.array(places) < 0, np.nan, np.append(values, np.nan)[places])
    notes = [*ds.encoding.get("facts", ())]
    if findings is not None:
        sentences = finding_blocks(list(folded_findings(findings)))
        notes += [": ".join(filter(None, (severity_of(s), sentence_text(s)))) for s in sentences]
    index = pd.MultiIndex.from_tuples(list(rows), names=["kind", "name"])
    values = np.array(list(rows.values())).reshape(-1, len(steps))
    frame = RunSummary(values, index, pd.Index(steps, name=dim))
    title = base_name(str(ds.encoding.get("source", "")))
    span = f"{steps[0]:,} to {steps[-1]:,}" if len(steps) > 1 else f"{steps[0]:,}"
    facts = [f"{counted(len(steps), dim)}, {span}", f"{counted(count, 'tensor')} each"]
    is_compared = changes or len(steps) < 2
    frame.attrs = {"run": title, "facts": facts, "notes": notes, "is_compared": is_compared}
    frame.attrs["is_examined"] = findings is not None
    return frame


def _change_rows(changes: StepChanges) -> dict[tuple[str, str], Any]:
    """Return the change of each layer, and of the tensors of other roles, from step to step."""
    # Changes are relative to the norm of the tensors; changes of counters are not.
    weights = [n for n, role in enumerate(changes.roles) if role in PARAMETERS]
    rows: dict[tuple[str, str], Any] = {}
    layers: dict[str, list[int]] = {}
    for row in weights:
        layers.setdefault(changes.layer_of(row), []).append(row)
    if weights:
        rows["relative change of weights", _ALL] = changes.relative_change(weights)
    names = list(layers)
    for position in ascending(names):
        name = names[position]
        rows["relative change of weights", name] = changes.relative_change(layers[name])
    rows_by_role: dict[Role, list[int]] = {}
    for row, role in enumerate(changes.roles):
        if role not in PARAMETERS:
            rows_by_role.setdefault(role, []).append(row)
    for role in sorted(rows_by_role, key=list(Role).index):
        name = _ROLES.get(role, f"{role.value}s")
        if role in COUNTING:
            rows["change of counters", name] = joint_norm(changes.norm[rows_by_role[role]])
        else:
            rows["relative change of others", name] = changes.relative_change(rows_by_role[role])
    # Kinds in the order of their first rows, without interleaving.
    order = list(dict.fromkeys(kind for kind, _ in rows))
    return dict(sorted(rows.items(), key=lambda item: order.index(item[0][0])))


def _spread(items: Sequence[int], most: int) -> list[int]:
    """Return at most `most` items at even distances, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(n * (len(items) - 1) / (most - 1))] for n in range(most)]
