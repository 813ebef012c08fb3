"""A training run at a glance: metrics, changes of the layers, and findings, by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from xckpt.formatting import (
    base_name,
    columns,
    counted,
    figure,
    line_width,
    printable,
    shortened,
    wrapped,
)
from xckpt.health.runs import COUNTING, changes_of, joint_norm
from xckpt.notebook.folding import ascending
from xckpt.notebook.html import table as table_html
from xckpt.notebook.summary import folded_findings
from xckpt.notebook.text import aligned, finding_lines
from xckpt.opening.metrics import run_metrics
from xckpt.structure import PARAMETERS, Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    import xarray as xr

    from xckpt.health.runs import StepChanges
    from xckpt.notebook.summary import TensorFinding

_MOST_STEPS = 6
_MOST_ROWS = 11  # of a kind, after the first one
_WIDEST_NOTE = 118
_WIDEST_NAME, _WIDEST_NUMBER = 30, 9
_MOST_LINES = 3  # of a note
_ALL = "all"
_READS = "not compared yet: summary(changes=True) reads each step once, for changes and findings"
_NO_METRICS = "the files have no metrics, and no trainer_state.json is next to them"
# Names of rows for tensors other than weights.
_ROLES = {Role.MOMENT: "moments", Role.STATISTIC: "running statistics", Role.STATE: "state"}


class RunSummary(pd.DataFrame):
    """A table of a training run, with a column for each step; it shows a selection of its rows."""

    # ``attrs["run"]`` is its heading, ``attrs["notes"]`` lists findings as sentences, and
    # ``attrs["all"]`` states where all rows are.

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

    def __repr__(self) -> str:
        heading, *lines = self.shown_lines()
        return "\n".join([heading, *lines])

    def _repr_html_(self) -> str:
        titles, rows = self._cells()
        return table_html(self.attrs["run"], titles, rows, self._notes(titles, rows))

    def shown_lines(self) -> list[str]:
        """Return the heading, the table and the notes as lines of text."""
        titles, rows = self._cells()
        table = aligned([titles, *rows], "<" + ">" * (len(titles) - 1))
        width = line_width() - 2
        notes = [
            line for note in self._notes(titles, rows) for line in wrapped(note, width, _MOST_LINES)
        ]
        return [self.attrs["run"], *table, *[f"  {line}" for line in notes]]

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        """Return the titles and the cells of a selection of rows and steps."""
        kinds: dict[str, list[int]] = {}
        for row, (kind, _) in enumerate(self.index):
            kinds.setdefault(kind, []).append(row)
        names: list[tuple[str, int | None]] = []  # with rows; None for the title of a kind
        for kind, places in kinds.items():
            # The first row is the total.
            shown = [places[0], *_spread(places[1:], _MOST_ROWS)]
            labels = [shortened(printable(self.index[row][1]), _WIDEST_NAME) for row in shown]
            names.append((f"{kind}:", None))
            names += [(f"  {label}", row) for label, row in zip(labels, shown, strict=True)]
        widest = max([columns(name) for name, _ in names], default=0)
        room = (line_width() - len("  ") - widest) // (_WIDEST_NUMBER + len("  "))
        steps = _spread(range(self.shape[1]), min(_MOST_STEPS, room))
        # Three digits, but whole numbers in full, and a dash for NaN.
        numbers = self.to_numpy()
        rows = [
            [name, *["" if row is None else figure(numbers[row, step], 3) for step in steps]]
            for name, row in names
        ]
        return [str(self.columns.name), *[f"{self.columns[step]:,}" for step in steps]], rows

    def _notes(self, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
        """Return the number of hidden steps and rows, and the findings."""
        shown = sum(name.startswith(" ") for name, *_ in rows)
        hidden = self.shape[1] - len(titles[1:]), len(self) - shown
        facts = [counted(hidden[0], "more step")] if hidden[0] else []
        facts += [counted(hidden[1], "more row")] if hidden[1] else []
        more = [f"… {' and '.join(facts)}: {self.attrs['all']}"] if facts else []
        return [*more, *[shortened(printable(note), _WIDEST_NOTE) for note in self.attrs["notes"]]]


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
    notes += [] if changes or len(steps) < 2 else [_READS]
    if findings is not None:
        lines = finding_lines(list(folded_findings(findings)), _WIDEST_NOTE)
        notes += [f"{kind}: {text}" if kind else text for kind, text in lines]
    index = pd.MultiIndex.from_tuples(list(rows), names=["kind", "name"])
    values = np.array(list(rows.values())).reshape(-1, len(steps))
    frame = RunSummary(values, index, pd.Index(steps, name=dim))
    title = base_name(str(ds.encoding.get("source", "")))
    span = f"{steps[0]:,} to {steps[-1]:,}" if len(steps) > 1 else f"{steps[0]:,}"
    heading = f"<Run {title}>  {counted(len(steps), dim)}, {span} · {counted(count, 'tensor')} each"
    all_rows = "the result is a DataFrame"
    frame.attrs = {"run": printable(heading), "notes": notes, "all": all_rows}
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
