"""`findings`: faults and oddities in a checkpoint, as a specialist would report them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import pandas as pd
import xarray as xr

from xckpt.datasets.tensors import run_dim
from xckpt.errors import shown
from xckpt.formatting import counted, shortened
from xckpt.health.evidence import Evidence
from xckpt.health.rules import RULES
from xckpt.index import paused_collector
from xckpt.labels.filters import combined, select, select_or_raise, suggest_names
from xckpt.notebook.documents import WIDEST_CELL, Field, Heading, Sentence, Table, more
from xckpt.notebook.shown import Shown
from xckpt.notebook.summary import SEVERITIES
from xckpt.options import OF_FRAMES, ScanOptions, takes
from xckpt.scan.entries import contents_of, entries_of, filter_of
from xckpt.statistics.computing import QUANTILES
from xckpt.statistics.computing import stats as compute_stats
from xckpt.statistics.grouping import Merged, merge_columns, place_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Unpack

    from xckpt.datasets.tensors import DescribedTensors
    from xckpt.health.evidence import RuleFinding
    from xckpt.labels import TensorFilter
    from xckpt.notebook.documents import Block
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
