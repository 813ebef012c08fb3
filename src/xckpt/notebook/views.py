"""A checkpoint as blocks: the summary of its model, its findings, and its structure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from xckpt.formatting import TIMES, binary_size, counted, shape_text, short_count, value_text, word
from xckpt.notebook.documents import (
    Bar,
    BarPart,
    Block,
    Field,
    Folded,
    Heading,
    Sentence,
    Share,
    Table,
    more,
    number_listed,
)
from xckpt.notebook.folding import families_of, united
from xckpt.notebook.footprint import GroupTotal
from xckpt.structure import Role, Structure, TensorInfo
from xckpt.structure.forms import forms_of
from xckpt.tensor_rows import Row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pandas as pd

    from xckpt.notebook.documents import Cell
    from xckpt.notebook.folding import Pattern
    from xckpt.notebook.footprint import Footprint
    from xckpt.notebook.summary import FoldedFinding, Summary
    from xckpt.structure.description import ModelDescription

#: Title of a summary of tensors that are in no file.
IN_MEMORY = "in memory"
#: Number of patterns that a summary lists.
MOST_PATTERNS = 12
_MOST_NOTES = 5
_MOST_FINDINGS = 8
_MOST_MODULES = _MOST_COMPONENTS = 8
_COUNTED = ("error", "warning")
_WIDEST_KIND, _WIDEST_VERSION = 38, 16
# The size of a smaller model in other precisions is of no interest.
_FEWEST_WEIGHED = 10**6
_TOTALS = [Field("", kind) for kind in ("name", "number", "number", "size", "share")]


def summary_blocks(
    summary: Summary, calls: Sequence[str] = (), *, most: int | None = MOST_PATTERNS
) -> list[Block]:
    """Return a summary with at most `most` patterns, None for all, and suggestions of calls."""
    dims = ((name, f"{size:,}") for name, size in summary.dims.items())
    attrs = ((str(name), value_text(value)) for name, value in summary.attrs.items())
    storage = [
        (total.kind, f"{binary_size(total.nbytes)} ({counted(total.count, 'tensor')})")
        for total in summary.storage
    ]
    folded = [
        Folded("stored as", storage, len(storage), most_lines=1),
        Folded("dims", dims, len(summary.dims)),
        Folded("attrs", attrs, len(summary.attrs), link="=", most_lines=3),
    ]
    bar = Bar([BarPart(total.kind, total.nbytes) for total in summary.dtypes])
    tables = [_totals(summary, _groups(summary)), _totals(summary, _components(summary))]
    notes: list[Block] = [Sentence("error", error) for error in summary.errors[:_MOST_NOTES]]
    notes += [] if summary.findings is None else finding_blocks(summary.findings)
    notes += [Sentence("note", note) for note in summary.notes[:_MOST_NOTES]]
    if summary.size >= _FEWEST_WEIGHED:
        notes.append(Sentence("", str(summary.footprint)))
    return [
        _heading(summary),
        *([bar] if summary.dtypes else []),
        *[table for table in tables if table.rows],
        *notes,
        *([_patterns(summary, most)] if summary.patterns else []),
        *[Sentence("code", line) for line in _modules(summary)],
        *[block for block in folded if block.total],
        *([Sentence("hint", f"Next: {' · '.join(calls)}")] if calls else []),
    ]


def _heading(summary: Summary) -> Heading:
    model = model_text(summary)
    version = word(summary.version, _WIDEST_VERSION)
    # The version of a file must not look like the version of a framework.
    version = f"file version {version}" if version.isdigit() else version
    shards = counted(summary.shards, "shard") if summary.shards else ""
    parameters = f"{short_count(summary.size)} {'param' if summary.size == 1 else 'params'}"
    facts = [
        f"{word(summary.format)} {version}".strip(),
        shards,
        f"{summary.count:,} of {counted(summary.total, 'tensor')}"
        if summary.total
        else counted(summary.count, "tensor"),
        "" if model else parameters,
        binary_size(summary.nbytes),
        "lazy" if summary.format else "",
    ]
    return Heading(
        summary.title or IN_MEMORY,
        "Checkpoint",
        list(filter(None, facts)),
        model,
        list(filter(None, (shards, "lazy"))),
    )


def _totals(summary: Summary, totals: Sequence[tuple[GroupTotal, str]]) -> Table:
    rows = [
        (
            word(total.group),
            counted(total.tensors, "tensor"),
            f"{short_count(total.size)} {noun if total.size == 1 else noun + 's'}" if noun else "",
            total.nbytes,
            Share(total.nbytes, summary.nbytes),
        )
        for total, noun in totals
    ]
    return Table(_TOTALS, rows)


def _groups(summary: Summary) -> list[tuple[GroupTotal, str]]:
    """Return the groups of tensors; none if all are parameters."""
    is_plain = [total.group for total in summary.groups] in ([], ["parameters"])
    return [] if is_plain else [(total, "element") for total in summary.groups]


def _components(summary: Summary) -> list[tuple[GroupTotal, str]]:
    """Return the components of a model; none for a single one."""
    components = summary.components
    totals = [(total, "parameter") for total in components[:_MOST_COMPONENTS]]
    if remaining := components[_MOST_COMPONENTS:]:
        sums = GroupTotal(counted(len(remaining), "more component"))
        for total in remaining:
            sums.add(total.tensors, total.size, total.nbytes)
        totals.append((sums, ""))
    return totals


# --- patterns ------------------------------------------------------------------------------------


def _patterns(summary: Summary, most: int | None) -> Table:
    patterns, total = summary.patterns, summary.nbytes
    listed = len(patterns) if most is None else number_listed(len(patterns), most)
    is_folded = summary.count > len(patterns)
    colors = {total.kind: place for place, total in enumerate(summary.dtypes)}
    fields = [
        Field("tensors, repeated modules folded" if is_folded else "tensors", "pattern"),
        *([Field("count", "word")] if is_folded else []),
        Field("shape", "word"),
        Field("stored as", "key"),
        Field("size", "size"),
        Field("share", "share", is_optional=True),
    ]
    rows: list[list[Cell]] = [
        [
            pattern.text,
            *([_count(pattern)] if is_folded else []),
            shape_text(pattern.shape, pattern.dtype),
            word(f"{pattern.dtype} {pattern.storage}".rstrip(), _WIDEST_KIND),
            pattern.nbytes,
            Share(pattern.nbytes, total),
        ]
        for pattern in patterns
    ]
    return Table(
        fields,
        rows,
        _rest(patterns[listed:]),
        listed,
        colors=[colors[pattern.dtype] for pattern in patterns],
    )


def _count(pattern: Pattern) -> str:
    """Return the number of tensors in a pattern, and of index combinations if some are missing."""
    if pattern.grid > pattern.count:
        places = f"{pattern.grid:,}" if pattern.grid < 10**6 else short_count(pattern.grid)
        return f"{TIMES}{pattern.count:,} of {places}"
    return f"{TIMES}{pattern.count:,}" if pattern.grid > 1 else ""


def _rest(patterns: Sequence[Pattern]) -> str:
    """Return the totals of patterns that are not listed."""
    if not patterns:
        return ""
    count = sum([pattern.count for pattern in patterns])
    size = binary_size(sum([pattern.nbytes for pattern in patterns]))
    if count == len(patterns):
        return f"{more(count, 'tensor')}, {size}"
    return f"{more(len(patterns), 'pattern')}: {counted(count, 'tensor')}, {size}"


def _modules(summary: Summary) -> Iterator[str]:
    """Yield the sets of modules with the parts that only they have, and a call to select some."""
    for module_set in summary.modules[:_MOST_MODULES]:
        dim = f" (dimension {word(module_set.dim)})" if module_set.dim else ""
        parts = ", ".join(module_set.parts)
        yield f"{word(module_set.module)} {module_set.indices}{dim}: {parts}"
    if remaining := summary.modules[_MOST_MODULES:]:
        yield f"… {len(remaining):,} more sets of modules"
    if summary.choose and summary.modules:
        dims = ", whatever the dimensions are called" if any(m.dim for m in summary.modules) else ""
        yield f"choose with {summary.choose}{dims}"


# --- findings ------------------------------------------------------------------------------------


def finding_blocks(findings: Sequence[FoldedFinding]) -> list[Sentence]:
    """Return the number of findings by severity, and the first ones."""
    blocks = [Sentence("", _number_of(findings))]
    for severity, rule, value, pattern, explanation in findings[:_MOST_FINDINGS]:
        out_of = f" of {pattern.grid:,}" if pattern.grid > pattern.count else ""
        subject = f"{word(rule).replace('_', ' ')} in {counted(pattern.count, 'tensor')}{out_of}"
        detail = f"up to {value:.6g}" if pattern.count > 1 else explanation or f"{value:.6g}"
        blocks.append(Sentence(word(severity), f"{subject}: {pattern.text}", detail))
    remaining = sum([finding.pattern.count for finding in findings[_MOST_FINDINGS:]])
    if remaining:
        blocks.append(Sentence("hint", f"… {remaining:,} more findings"))
    return blocks


def _number_of(findings: Sequence[FoldedFinding]) -> str:
    severities: Counter[str] = Counter()
    for finding in findings:
        severities[finding.severity] += finding.pattern.count
    if not severities:
        return "no findings"
    parts = [
        counted(count, severity) if severity in _COUNTED else f"{count:,} {word(severity)}"
        for severity, count in severities.items()
    ]
    return f"{counted(severities.total(), 'finding')}: {', '.join(parts)}"


# --- the model, in the heading --------------------------------------------------------------------

_WIDEST_NAME, _WIDEST_DETAIL = 64, 40
_MOST_LISTED = 6
# Classes of Keras that many models have.
_GENERIC, _KIND = frozenset({"Sequential", "Functional"}), " model"
# Share of the parameters with one type for it to be the type of the model.
_NEARLY_ALL, _MOST = 0.99, 0.5


def model_text(summary: Summary) -> str:
    """Return what a checkpoint is: its model, parameters and sizes; empty if nothing is known."""
    model = summary.model
    head = _head(model)
    if not head:
        return ""
    details = ", ".join(_details(summary))
    return ", ".join([head, *_figures(summary)]) + (f" ({details})" if details else "")


def model_document(summary: Summary) -> dict[str, Any]:
    """Return the model of a checkpoint as JSON has it: a phrase, and the facts in it."""
    return {"text": model_text(summary), **summary.model.document()}


def _head(model: ModelDescription) -> str:
    """Return the kind of a checkpoint, and the model that it is of."""
    subject = _subject(model)
    if model.kind == "adapter":
        base = f" for {word(model.base, _WIDEST_NAME)}" if model.base else ""
        name = f"{word(model.name, _WIDEST_NAME)}: " if model.name else ""
        return f"{name}{word(model.adapter)} adapter{base}"
    at_step = "" if model.step is None else f" at step {model.step:,}"
    if model.kind == "optimizer":
        return f"optimizer state{at_step}"
    if model.kind == "training":
        article = "a " if subject.endswith(_KIND) else ""
        of_model = f" of {article}{subject}" if _is_named(model) else ""
        by_names = f", {subject}" if subject and not of_model else ""
        return f"training checkpoint{of_model}{at_step}{by_names}"
    return subject or ("model" if model.kind else "")


def _is_named(model: ModelDescription) -> bool:
    return bool(model.name or model.class_name or (model.family and model.is_stated))


def _subject(model: ModelDescription) -> str:
    """Return the name of a model, or what its names of tensors resemble."""
    if model.name or model.class_name:
        kind = _KIND if not model.name and model.class_name in _GENERIC else ""
        return word(model.name or model.class_name, _WIDEST_NAME) + kind
    if model.contradicted:
        return f"names unlike {word(model.contradicted)}, the type in its config"
    if model.family:
        family = word(model.family)
        return family if model.is_stated else f"names as in {family}"
    return f"graph exported by {word(model.exporter, _WIDEST_DETAIL)}" if model.exporter else ""


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_LISTED
    if more > 0:
        return f"{', '.join(names[:_MOST_LISTED])} and {more} more components"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _figures(summary: Summary) -> Iterator[str]:
    """Yield the number of parameters, the precision, and the quantisation."""
    model, footprint = summary.model, summary.footprint
    if model.kind == "adapter":
        if model.rank is not None:
            yield f"rank {model.rank:,}"
        if model.alpha is not None:
            yield f"alpha {model.alpha:g}"
    if footprint.parameters:
        parameters = f"{short_count(footprint.parameters)} parameters"
        if footprint.active != footprint.parameters:
            parameters += f", {short_count(footprint.active)} active"
        yield parameters
    if model.quantization:
        bits = f", {model.bits} bits" if model.bits else ""
        yield f"quantised with {word(model.quantization)}{bits}"
    elif footprint.schemes:
        yield _precision(footprint)


def _precision(footprint: Footprint) -> str:
    """Return the type of most parameters, or the first ones of several types."""
    schemes = sorted(footprint.schemes, key=lambda scheme: -scheme.size)
    largest = word(schemes[0].group, _WIDEST_DETAIL)
    if schemes[0].size >= _NEARLY_ALL * footprint.parameters:
        return largest
    if schemes[0].size >= _MOST * footprint.parameters:
        return f"mostly {largest}"
    more = len(schemes) - 2
    second = word(schemes[1].group, _WIDEST_DETAIL)
    if not more:
        return f"{largest} and {second}"
    return f"{largest}, {second} and {counted(more, 'more type')}"


def _details(summary: Summary) -> Iterator[str]:
    """Yield the family and the sizes of a model."""
    model = summary.model
    has_name = bool(model.name or model.class_name)
    has_subject = has_name or bool(model.family)
    if model.name and model.class_name and model.kind != "adapter":
        yield word(model.class_name, _WIDEST_DETAIL)
    parts = list(map(word, filter(None, model.components))) if not model.layers else []
    if model.family and has_name:
        family = f"{'' if model.is_stated else 'names as in '}{word(model.family)}"
        yield f"{family}: {_listed(parts)}" if parts else family
    elif parts:
        yield _listed(parts)
    if model.base and model.kind != "adapter" and model.base != model.name:
        yield f"from {word(model.base, _WIDEST_DETAIL)}"
    yield from _sizes(summary)
    if model.exporter and has_subject:
        yield f"exported by {word(model.exporter, _WIDEST_DETAIL)}"


def _sizes(summary: Summary) -> Iterator[str]:
    sizes, layers = summary.model.sizes, summary.model.layers
    if len(layers) == 1:
        yield counted(next(iter(layers.values())), "layer")
    elif layers and len(layers) <= _MOST_LISTED:
        numbers = [f"{count:,} {word(name)}" for name, count in layers.items() if name]
        main = f"{counted(layers[''], 'layer')} and " if "" in layers else ""
        yield f"{main}{_listed(numbers)} layers"
    if "embd" in sizes:
        yield f"{sizes['embd']:,} wide"
    heads, of_keys = sizes.get("head", 0), sizes.get("head_kv", 0)
    if heads and of_keys and of_keys != heads:
        yield f"{heads:,} query and {of_keys:,} key/value heads"
    elif heads:
        yield counted(heads, "head")
    if "expert" in sizes:
        experts = summary.footprint.experts
        used = f", {experts.chosen:,} active" if experts is not None else ""
        yield f"{counted(sizes['expert'], 'expert')}{used}"


# --- the structure --------------------------------------------------------------------------------

_SOURCES = {
    "user": "you",
    "file": "the file",
    "model": "the model",
    "family": "the family",
    "convention": "a convention",
    "shape": "the shape",
}


def structure_table(structure: Structure) -> pd.DataFrame:
    """Return a table with a row for each tensor."""
    import pandas as pd

    infos = {name: structure[name] for name in structure}
    columns = {
        "role": [info.role.value for info in infos.values()],
        "component": [info.component for info in infos.values()],
        "layer": [structure.layer(name) for name in infos],
        "module": [info.module for info in infos.values()],
        "module_type": [info.module_type for info in infos.values()],
        "slot": [info.slot for info in infos.values()],
        "param": [info.param for info in infos.values()],
        "axes": [_axes_text(info) for info in infos.values()],
        "owner": [info.owner or "" for info in infos.values()],
        "evidence": [_reason(info) for info in infos.values()],
    }
    return pd.DataFrame(columns, index=pd.Index(list(infos), name="tensor", dtype=object))


def evidence_table(info: TensorInfo) -> pd.DataFrame:
    """Return a table with a row for each reason, strongest source first."""
    import pandas as pd

    rows = [
        (evidence.field, str(evidence.value), evidence.source, evidence.reason, evidence.decided)
        for evidence in info.evidence
    ]
    return pd.DataFrame(rows, columns=["field", "value", "source", "reason", "decided"])


def structure_blocks(structure: Structure) -> list[Block]:
    """Return a row for tensors of one kind whose names differ in numbers or in one word."""
    # A graph has many settings of its operators, which are a single line.
    names = [name for name in structure if not _is_setting(structure, name)]
    settings = len(structure) - len(names)
    infos = [structure[name] for name in names]
    kinds = [(i.role.value, i.module_type, i.slot, i.param, i.axes, _reason(i)) for i in infos]
    lines: list[tuple[str, ...]] = []
    for form in forms_of(names, kinds):
        info = infos[form.places[0]]
        rows = [Row(names[place], "", (), 0) for place in sorted(form.places)]
        (pattern,) = [family.pattern().text for family in united(families_of(rows))]
        count = f"×{len(rows)}" if len(rows) > 1 else ""
        axes = _axes_text(info) or shape_text(structure.described(rows[0].name).shape, "")
        kind = " ".join(filter(None, (info.slot, info.module_type, info.param)))
        lines.append((pattern, count, info.role.value, kind, axes, _reason(info)))
    if settings:
        lines.append((f"settings of the operators ×{settings}", "", "constant", "", "", ""))
    roles = Counter(role.value for role in structure.roles.values()).most_common()
    counts = ", ".join([f"{count:,} {role}" for role, count in roles])
    total = counted(len(structure), "tensor")
    words = [Field(title, "word") for title in ("count", "role", "kind", "axes")]
    fields = [Field("tensors", "pattern"), *words, Field("evidence")]
    return [Sentence("lead", f"{total}: {counts}"), Table(fields, lines)]


def _is_setting(structure: Structure, name: str) -> bool:
    """Return whether a tensor is a constant because of the operators that use it."""
    if structure.roles[name] is not Role.CONSTANT:
        return False
    reasons = [e for e in structure[name].evidence if e.field == "role" and e.decided]
    return any(reason.source == "file" for reason in reasons)


def _axes_text(info: TensorInfo) -> str:
    return ", ".join([axis or "?" for axis in info.axes]) if any(info.axes) else ""


def _reason(info: TensorInfo) -> str:
    """Return the reason for the role."""
    for evidence in info.evidence:
        if evidence.field == "role" and evidence.decided:
            return f"{_SOURCES[evidence.source]}: {evidence.reason}"
    return ""
