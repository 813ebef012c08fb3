"""`findings`: faults and oddities in a checkpoint, as a specialist would report them.

`RULES` lists the rules; `run_summary` shows a training run with the findings of its steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, cast

import numpy as np
import pandas as pd
import xarray as xr

from xckpt.datasets.tensors import DescribedTensors, run_dim
from xckpt.errors import shown
from xckpt.formatting import base_name, counted, shortened
from xckpt.health import channels, elements, runs, siblings
from xckpt.health.evidence import Evidence, Rule, RuleFinding
from xckpt.health.runs import COUNTING, StepChanges, changes_of, joint_norm
from xckpt.index import paused_collector
from xckpt.labels.filters import combined, select, select_or_raise, suggest_names
from xckpt.notebook.documents import (
    WIDEST_CELL,
    Field,
    Heading,
    Sentence,
    Table,
    more,
    sentence_text,
    severity_of,
)
from xckpt.notebook.folding import ascending
from xckpt.notebook.shown import Shown
from xckpt.notebook.summary import SEVERITIES, TensorFinding, folded_findings
from xckpt.notebook.views import finding_blocks
from xckpt.opening.runs import run_metrics
from xckpt.options import OF_FRAMES, ScanOptions, takes
from xckpt.scan.entries import contents_of, entries_of, filter_of
from xckpt.statistics.computing import QUANTILES
from xckpt.statistics.computing import stats as compute_stats
from xckpt.statistics.grouping import Merged, merge_columns, place_tensors
from xckpt.structure import PARAMETERS, Role
from xckpt.structure.numbering import module_of

if TYPE_CHECKING:
    from xckpt.labels import TensorFilter
    from xckpt.notebook.documents import Block, Cell
    from xckpt.scan.entries import Describable
    from xckpt.statistics.definitions import Groups
    from xckpt.typing import Dataset

_COLUMNS = ("tensor", "rule", "value", "severity", "explanation")
_MOST_SHOWN = 60
_REQUIRED = {"count", "nan", "inf", "zero", "min", "max", "absmax", "std"}


class FindingsAccessor:
    """Methods of xckpt for a table of findings, or a selection of its rows."""

    def __init__(self, frame: Findings) -> None:
        self._frame = frame

    def by(self, *keys: str | Iterable[str]) -> Dataset:
        """Count the findings of each layer, role or numbered module.

        Parameters
        ----------
        *keys : str or list of str
            One or more keys, as for `CheckpointAccessor.by`.

        Returns
        -------
        xarray.Dataset
            The number of findings along the keys: of each severity (``error``, ``warning``,
            ``info``) and of each rule that holds for any tensor. ``tensors`` is the number of
            tensors of a group, and ``affected`` how many of them have a finding.

        Raises
        ------
        ValueError
            If no tensor has a key.

        Examples
        --------
        >>> xckpt.findings("m.zt").ckpt.by("layer")["warning"]
        """
        frame = self._frame
        # Rows of several tables may have been joined.
        tensors = dict.fromkeys([*frame.names, *frame["tensor"]])
        rows = {name: row for row, name in enumerate(tensors)}
        columns = {name: np.zeros(len(rows)) for name in ("affected", *SEVERITIES)}
        columns |= {rule: np.zeros(len(rows)) for rule in RULES if rule in set(frame["rule"])}
        for tensor, *names in zip(frame["tensor"], frame["severity"], frame["rule"], strict=True):
            columns["affected"][rows[tensor]] = 1
            for name in names:
                columns[name][rows[tensor]] += 1
        places = place_tensors(list(rows), keys, frame.origin)
        columns = {name: values[places.rows] for name, values in columns.items()}

        def merge(groups: Groups) -> Merged:
            return Merged({n: groups.total(n).astype(np.int64) for n in columns}, {})

        return cast("Dataset", merge_columns(places, columns, merge))


class Findings(Shown, pd.DataFrame):
    """A table of findings that shows sentences in full, in a notebook and in a terminal."""

    # pandas passes these on to selections, and pickles them.
    _metadata: ClassVar[list[str]] = ["names", "origin"]
    #: Names of all tensors that were examined, and their types; for `FindingsAccessor.by`.
    names: Sequence[str] = ()
    origin: DescribedTensors | None = None

    @property
    def ckpt(self) -> FindingsAccessor:
        """Methods of xckpt for this table."""
        return FindingsAccessor(self)

    @property
    def _constructor(self) -> type[Findings]:
        return Findings

    def _blocks(self) -> list[Block]:
        if list(self.columns) != list(_COLUMNS):
            rows = self.itertuples(index=False, name=None)
            kinds = {"tensor": "name", "value": "number", "explanation": "text"}
            fields = [Field(str(name), kinds.get(str(name), "word")) for name in self.columns]
            return [Table(fields, list(rows)[:_MOST_SHOWN], more(len(self) - _MOST_SHOWN))]
        counts = self["severity"].value_counts()
        present = [s for s in SEVERITIES if s in counts]
        numbers = [f"{counts[s]:,} {s}" if s == "info" else counted(counts[s], s) for s in present]
        numbers = numbers or ["none"]
        fact = f"{counted(len(self.names), 'tensor')}: {', '.join(numbers)}"
        return [Heading("", "Findings", [fact]), *findings_blocks(self, _MOST_SHOWN)]


def findings_blocks(findings: pd.DataFrame, most: int | None = None) -> list[Block]:
    """Return a sentence for each finding."""
    top = findings if most is None else findings.iloc[:most]
    blocks: list[Block] = []
    for tensor, rule, _, severity, explanation in top[list(_COLUMNS)].itertuples(index=False):
        subject = f"tensor {shown(shortened(tensor, WIDEST_CELL))}: " if tensor else ""
        blocks.append(Sentence(severity, f"{subject}{explanation} [{rule}]"))
    rest = more(len(findings) - len(top), "finding")
    return [*blocks, *([Sentence("hint", rest)] if rest else [])]


@takes(ScanOptions, **OF_FRAMES)
def findings(
    obj: Describable,
    tensors: TensorFilter | None = None,
    *,
    ignore: str | Iterable[str] | None = None,
    stats: xr.Dataset | None = None,
    **options: Unpack[ScanOptions],
) -> pd.DataFrame:
    """List tensors that look wrong or unusual, with explanations.

    ``docs/how-to/health-check.md`` has a table of all rules with their thresholds. A finding is a
    reason to look at a tensor, and not always a fault.

    Parameters
    ----------
    obj : path, mapping, Index, xarray.Dataset, xarray.DataArray or xarray.DataTree
        Checkpoint to examine. Tensors are read once, as in `stats` with ``channels=True``, and
        once more if they seem to be equal. The steps of a Dataset of `open_steps` are also compared
        with each other. A result of `stats` is examined without reading any tensor.
    stats : xarray.Dataset, optional
        Result of `xckpt.stats` for `obj`, which is then not read. A result as `obj` also is.

    Returns
    -------
    pandas.DataFrame
        With the columns ``tensor, rule, value, severity, explanation``; errors first, then
        warnings, each in the order of the tensors. A step of a run counts as a tensor. In a
        notebook it shows explanations in full. ``.ckpt.by("layer")`` counts the findings of each
        layer, role or numbered module.

    Raises
    ------
    ValueError
        If a rule does not exist, or statistics that the rules need are missing.
    TypeError
        If `ignore` is neither a string nor several strings.
    CheckpointError
        If a tensor cannot be read.

    Examples
    --------
    >>> findings = xckpt.findings("m.zt", ignore=["outlier_channels", "dead_rows:*.delta"])
    >>> for finding in findings.itertuples():
    ...     print(finding.severity, finding.tensor, finding.explanation)
    error model.layers.3.mlp.up_proj.weight 7 of 6,336 elements are NaN
    warning model.layers.2.self_attn.q_proj.bias all 48 elements are 0, unlike those of 5 siblings
    """
    given: Any = obj if stats is None else stats
    if isinstance(given, xr.Dataset) and "statistic" in given.dims:
        evidence = Evidence.of(given)
        known = [] if evidence.origin is None else [evidence.origin.structure]
        chosen = combined(tensors, options["exclude"], options["only"], lambda: known)
        with _no_rule(tensors):
            return _judge(evidence, ignored_rules(ignore), chosen)
    return examine(obj, tensors, ignore=ignore, **options)[1]


@takes(ScanOptions)
def examine(
    obj: Any,
    tensors: TensorFilter | None = None,
    *,
    ignore: str | Iterable[str] | None = None,
    quantiles: Sequence[float] = QUANTILES,
    exact_quantiles: bool = False,
    **options: Unpack[ScanOptions],
) -> tuple[xr.Dataset, pd.DataFrame]:
    """Return the statistics of an object and its findings."""
    ignored = ignored_rules(ignore)
    progress, cache = options["progress"], options["cache"]
    subject: Any = contents_of(obj, options["storage_options"])  # opens the file once
    chosen = filter_of(tensors, options, subject)
    with _no_rule(tensors):
        result = compute_stats(
            subject,
            chosen,
            quantiles=quantiles,
            exact_quantiles=exact_quantiles,
            channels=True,
            progress=progress,
            cache=cache,
        )
    with paused_collector():
        entries = entries_of(subject, chosen=chosen, silent=True)  # `stats` has warned
        streams = [stream for entry in entries for stream in entry.streams]
    run = run_dim(subject.coords)
    evidence = Evidence.of(result, run, streams=streams, progress=progress, cache=cache)
    return result, _judge(evidence, ignored)


@contextmanager
def _no_rule(tensors: TensorFilter | None) -> Iterator[None]:
    """Add a hint to an error if the name of a rule is not one of tensors."""
    try:
        yield
    except ValueError as error:
        if isinstance(tensors, str) and tensors in RULES:
            hint = f"{tensors!r} is a rule: the column 'rule' selects it, ignore= leaves it out"
            raise ValueError(f"{error}; {hint}") from error
        raise


def _judge(
    evidence: Evidence,
    ignored: Sequence[tuple[str, str | None]],
    chosen: TensorFilter | None = None,
) -> pd.DataFrame:
    """Apply all rules; return the sorted findings without the ignored ones."""
    missing = _REQUIRED - set(evidence.columns)
    if missing:
        raise ValueError(f"findings need the statistics {', '.join(sorted(missing))}")
    with np.errstate(all="ignore"):
        results = [finding for rule in RULES.values() for finding in rule.findings(evidence)]
    if chosen is not None:
        names = set(select_or_raise(evidence.names, chosen))
        results = [f for f in results if f.tensor in names]
    for rule, glob in ignored:
        names = {f.tensor for f in results if rule in {f.rule, "*"}}
        dropped = names if glob is None else set(select(names, glob))
        results = [f for f in results if rule not in {f.rule, "*"} or f.tensor not in dropped]
    results = list(_one_of_each_kind(evidence, _one_of_each_fact(results)))
    order = list(RULES)
    ranked = sorted(
        results,
        key=lambda f: (SEVERITIES.index(RULES[f.rule].severity), f.row, order.index(f.rule)),
    )
    rows = [(f.tensor, f.rule, f.value, RULES[f.rule].severity, f.explanation) for f in ranked]
    frame = Findings(rows, columns=list(_COLUMNS))
    frame.names, frame.origin = evidence.names, evidence.origin
    return frame


def _one_of_each_fact(results: Sequence[RuleFinding]) -> list[RuleFinding]:
    """Leave out findings that another finding about the tensor implies."""
    stated: dict[str, set[str]] = {}
    for finding in results:
        stated.setdefault(finding.tensor, set()).add(finding.rule)
    return [f for f in results if stated[f.tensor].isdisjoint(RULES[f.rule].implied_by)]


def _one_of_each_kind(evidence: Evidence, results: Iterable[RuleFinding]) -> Iterator[RuleFinding]:
    """Yield one finding of a rule for all tensors of a kind, if the rule asks for that."""
    kinds: dict[Any, list[RuleFinding]] = {}
    for finding in results:
        if RULES[finding.rule].is_of_kind:
            kinds.setdefault((finding.rule, evidence.kind_of(finding.row)), []).append(finding)
        else:
            yield finding
    for alike in kinds.values():
        alike.sort(key=lambda finding: -abs(finding.value))
        first, *others = alike
        if others:
            more = f"{len(others):,} more like it, such as {others[0].tensor}"
            first = first._replace(explanation=f"{first.explanation}; {more}")
        yield first


def ignored_rules(ignore: Any) -> list[tuple[str, str | None]]:
    """Return the rules to leave out, each with a glob of tensors or None for all tensors."""
    texts = [ignore] if isinstance(ignore, str) else [] if ignore is None else ignore
    if not isinstance(texts, Iterable) or isinstance(texts, Mapping):
        texts = [texts]
    ignored: list[tuple[str, str | None]] = []
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(
                f"ignore takes rules such as 'constant' or 'dead_rows:*.delta', not {text!r}"
            )
        rule, colon, glob = text.partition(":")
        if rule not in {*RULES, "*"}:
            hint = suggest_names(RULES, rule) or f"; rules are {', '.join(RULES)}"
            raise ValueError(f"ignore={text!r}: unknown rule{hint}")
        ignored.append((rule, glob if colon else None))
    return ignored


# --- rules ----------------------------------------------------------------------------------------

#: Every rule by its name, in the order in which findings of one tensor are listed.
RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        elements.Executes(), elements.Imports(), elements.Empty(), elements.NaN(),
        elements.Infinite(), elements.AllZero(), elements.Untrained(), elements.Constant(),
        elements.Exploding(), elements.LoneElement(),
        elements.NegativeStatistic(), elements.UnlikeStatistic(), elements.OddScale(),
        elements.NegativeMoment(), elements.OddStep(),
        siblings.SignsLost(), siblings.Hole(), channels.EqualRows(), channels.EqualTokens(),
        channels.RankOne(),
        channels.DeadRows(), channels.DeadColumns(), channels.DeadHeads(), channels.DeadExperts(),
        siblings.ZeroCentredNorm(), siblings.DeadGains(), siblings.NegativeNorm(),
        siblings.UnlikeLayer(), channels.OutlierChannels(),
        elements.Subnormal(), elements.WideType(), siblings.MixedTypes(), elements.NarrowCodes(),
        elements.SaturatedCodes(),
        siblings.Tied(), siblings.Duplicated(), siblings.EqualExperts(), siblings.CopiedLayer(),
        runs.IdenticalStep(), runs.UnlikeStep(), runs.StoppedChanging(),
    )
}  # fmt: skip


# --- a run at a glance ----------------------------------------------------------------------------

_MOST_STEPS = 6
_MOST_ROWS = 11  # of a kind, after the first one
_ALL = "all"
_NO_METRICS = "the files have no metrics, and no trainer_state.json is next to them"
# Names of rows for tensors other than weights.
_ROLES = {Role.MOMENT: "moments", Role.STATISTIC: "running statistics", Role.STATE: "state"}


class RunSummary(Shown, pd.DataFrame):
    """A table of a training run, with a column for each step; it shows a selection of its rows."""

    # ``attrs["run"]`` is its name, ``attrs["notes"]`` lists findings as sentences, and
    # ``attrs["marked"]`` the tensors and steps that they are about.

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
    marked_steps, marked_names = _marked(summary)
    positions = {str(step): position for position, step in enumerate(summary.columns)}
    marked = [positions[step] for step in marked_steps if step in positions]
    steps = _spread(range(summary.shape[1]), _MOST_STEPS, marked)
    titles = [f"{summary.columns[step]:,}" for step in steps]
    numbers = summary.to_numpy()
    rows: list[list[Cell]] = []
    for kind, places in kinds.items():
        rows.append([f"{kind}:"])
        # The first row is the total.
        row_of = {summary.index[row][1]: row for row in places[1:]}
        marked_rows = [row_of[name] for name in marked_names if name in row_of]
        for row in [places[0], *_spread(places[1:], _MOST_ROWS, marked_rows)]:
            values = [numbers[row, step] for step in steps]
            rows.append([f"  {summary.index[row][1]}", *values])
    hidden = summary.shape[1] - len(steps), len(summary) - (len(rows) - len(kinds))
    facts = [counted(hidden[0], "more step")] if hidden[0] else []
    facts += [counted(hidden[1], "more row")] if hidden[1] else []
    rest = f"… {' and '.join(facts)}: {where}" if facts else ""
    # Three digits, but whole numbers in full.
    fields = [Field(str(summary.columns.name), "tree")]
    fields += [Field(title, "number", digits=3) for title in titles]
    columns = [titles[0], titles[-1], *(titles[steps.index(n)] for n in marked if n in steps)]
    notes = list(summary.attrs["notes"])
    if not summary.attrs["is_compared"]:
        aim = "changes" if summary.attrs["is_examined"] else "changes and findings"
        notes.append(f"layers are not compared yet: {call} reads each step once, for {aim}")
    return [
        Heading(summary.attrs["run"], "Run", summary.attrs["facts"]),
        Table(fields, rows, rest, wanted=columns),
        *map(_note, notes),
    ]


def _marked(summary: pd.DataFrame) -> tuple[list[str], list[str]]:
    """Return the steps with findings, and the names of their modules, the first findings first."""
    steps: dict[str, None] = {}
    names: dict[str, None] = {}
    for tensor in summary.attrs["marked"]:
        step, _, name = tensor.removeprefix(f"{summary.columns.name}.").partition(".")
        steps[step] = None
        while name and name not in names:
            names[name] = None
            name = module_of(name)
    return list(steps), list(names)


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
    firsts: dict[str, str] = {}
    for finding in findings or ():
        firsts.setdefault(finding.rule, finding.tensor)
    frame.attrs["marked"] = [*firsts.values(), *(finding.tensor for finding in findings or ())]
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


def _spread(items: Sequence[int], most: int, marked: Sequence[int] = ()) -> list[int]:
    """Return at most `most` items at even distances, the first, the last and marked ones first."""
    if len(items) <= most:
        return list(items)
    ends = {items[0], items[-1]}
    required = {*ends, *[item for item in marked if item not in ends][: most - 2]}
    choices = (
        required | {items[round(n * (len(items) - 1) / (count - 1))] for n in range(count)}
        for count in range(most, 1, -1)
    )
    return sorted(next(choice for choice in choices if len(choice) <= most))
