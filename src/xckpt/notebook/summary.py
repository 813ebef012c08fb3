"""Overviews of a checkpoint from its metadata: a `Summary`, a tree of modules, a table of sizes.

`xckpt.notebook.views` makes blocks of a `Summary`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import islice
from keyword import iskeyword
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from xckpt.errors import shown, some
from xckpt.formatting import base_name, binary_size, counted, shape_text, word
from xckpt.index import paused_collector
from xckpt.notebook.documents import Block, Field, Sentence, Table
from xckpt.notebook.folding import (
    Family,
    Pattern,
    ascending,
    families_of,
    fold,
    fold_names,
    indices_text,
    marked,
    one_by_one,
    united,
)
from xckpt.notebook.footprint import Footprint, GroupTotal, components_of, totals_by, weigh
from xckpt.notebook.shown import Shown
from xckpt.structure import OF_TRAINING, Structure, structure_of
from xckpt.structure.declared import facts_of
from xckpt.structure.description import ModelDescription, describe_model
from xckpt.structure.numbering import (
    is_index,
    module_indices,
    numbered_modules,
    parse_name,
    strip_separator,
    tokens,
)
from xckpt.tensor_rows import TIED, Row, StackedNames, storage_words, tied

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    import pandas as pd


# Up to this number, tensors are listed one by one: folding would hide names and save nothing.
_FEW = 12
# Headers, padding and manifests take less than this share of any file of realistic size.
_UNUSED_SHARE = 0.1
_UNUSED_BYTES = 1 << 20
#: Severities of findings, worst first.
SEVERITIES = ("error", "warning", "info")
_MOST_LINES = 300
_WIDEST_NAME = 60
_MOST_PARTS = 6
_MOST_DESCRIBED = 16  # sets of modules; a summary shows fewer
_DEEPEST = 16
_LONGEST_SEQUENCE = 3

_Words = tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Total:
    """Number and stored size of the tensors with one element type, or one way of storing."""

    kind: str
    count: int
    nbytes: int


class TensorFinding(NamedTuple):
    """A suspicious value in the statistics of a tensor."""

    tensor: str
    rule: str  # "nan", "all_zero", ...
    value: float  # how much
    severity: str  # "error", "warning" or "info"
    explanation: str = ""


class KnownResults(NamedTuple):
    """Statistics and findings that are already computed, by tensor."""

    statistics: Mapping[str, Mapping[str, float]]  # by name
    findings: Collection[TensorFinding]


class FoldedFinding(NamedTuple):
    """The findings of one rule in tensors with similar names."""

    severity: str
    rule: str
    value: float  # the largest, of the first tensor of the pattern
    pattern: Pattern
    explanation: str = ""  # of that tensor


class ModuleSet(NamedTuple):
    """Numbered modules of one structure, if others of their name have another structure."""

    module: str  # name of the numbered module: "layers"
    indices: str  # "{3..60}"
    dim: str  # dimension of the stacked modules; empty if they are not stacked
    parts: tuple[str, ...]  # submodules that only these modules have: "mlp.experts", ...


@dataclass(frozen=True, slots=True)
class Summary:
    """An overview of a checkpoint.

    Texts come unchanged from the file, except for `title` and the texts of patterns, so a renderer
    must escape them.
    """

    title: str  # the name of the file without its folder
    format: str  # empty if unknown, like `version`
    version: str
    shards: int  # number of other files that hold parts
    count: int  # of tensors
    nbytes: int  # stored bytes of all tensors, with tied tensors counted once
    model: ModelDescription  # its name, family and kind, as far as they are known
    footprint: Footprint  # totals by role, and sizes in other precisions
    dtypes: tuple[Total, ...]  # by stored element type, largest first
    storage: tuple[Total, ...]  # by way of storing, without plainly dense tensors
    patterns: tuple[Pattern, ...]  # largest first
    modules: tuple[ModuleSet, ...]  # sets of numbered modules with different structures
    choose: str  # a call that selects modules by number; empty without numbered modules
    dims: Mapping[str, int]  # named dimensions and their sizes
    attrs: Mapping[Any, Any]
    errors: tuple[str, ...]  # tensors that cannot be read
    notes: tuple[str, ...]  # irregularities of the file
    findings: tuple[FoldedFinding, ...] | None  # worst first; None without statistics
    total: int = 0  # number of tensors of the file, if others are not selected

    @property
    def size(self) -> int:
        """Number of trainable elements, implied zeros included, tied ones once."""
        return self.footprint.parameters

    @property
    def groups(self) -> tuple[GroupTotal, ...]:
        """Totals by role, parameters first."""
        return self.footprint.groups

    @property
    def components(self) -> tuple[GroupTotal, ...]:
        """Totals by component, largest first; empty for a model of a single one."""
        return self.footprint.components


def new_summary(
    rows: Iterable[Row],
    *,
    title: str,
    format: str,
    version: str,
    attrs: Mapping[Any, Any],
    dims: Mapping[str, int] | None = None,
    errors: Sequence[str] = (),
    notes: Sequence[str] = (),
    shards: int = 0,
    findings: Iterable[TensorFinding] | None = None,
    stacked: Iterable[StackedNames] = (),
    obj: str = "",
    config: Mapping[Any, Any] | None = None,
    structure: Structure | None = None,
) -> Summary:
    """Summarise tensors in one pass.

    `obj` is the name of the open object in examples of code. `config` has the numbers of experts,
    as for `weigh`; the attributes by default.
    """
    rows = list(rows)
    structure = Structure(rows) if structure is None else structure
    rows = marked(rows, structure)
    families = families_of(rows, structure)
    footprint = weigh(families, attrs if config is None else config)
    footprint = replace(footprint, components=components_of(rows, structure))
    repeated = [_of_repeated(f, structure) for f in families if f.role not in OF_TRAINING]
    modules, chosen = module_sets(repeated, stacked), selection(repeated)
    if len(rows) <= _FEW:
        patterns = one_by_one(rows)
    else:
        patterns = [family.pattern() for family in united(families)]
    order = ascending([pattern.first for pattern in patterns])
    patterns = sorted([patterns[position] for position in order], key=lambda p: -p.nbytes)
    numbers = ", ".join(f"{module}={number}" for module, number in chosen.items())
    return Summary(
        title=base_name(title),
        format=format,
        version=version,
        shards=shards,
        count=sum([pattern.count for pattern in patterns]),
        nbytes=sum([pattern.nbytes for pattern in patterns]),
        model=describe_model(structure, attrs),
        footprint=footprint,
        dtypes=_totals((pattern.dtype, pattern) for pattern in patterns),
        storage=_totals((p.storage, p) for p in patterns if p.storage not in {"", TIED}),
        patterns=tuple(patterns),
        modules=tuple(modules),
        choose=f"{obj}.ckpt.sel({numbers})" if obj and numbers else "",
        dims=dims or {},
        attrs=attrs,
        errors=tuple(errors),
        notes=tuple(notes),
        findings=None if findings is None else tuple(folded_findings(findings)),
    )


def folded_findings(findings: Iterable[TensorFinding]) -> Iterator[FoldedFinding]:
    """Fold the findings of each rule in tensors with similar names."""
    by_rule: dict[tuple[int, str, str], list[TensorFinding]] = {}
    for finding in findings:
        is_known = finding.severity in SEVERITIES
        rank = SEVERITIES.index(finding.severity) if is_known else len(SEVERITIES)
        by_rule.setdefault((rank, finding.severity, finding.rule), []).append(finding)
    for (_, severity, rule), group in sorted(by_rule.items(), key=lambda item: item[0][0]):
        # The largest comes first, because a pattern names its first member. NaN sorts anywhere.
        group.sort(key=lambda finding: -abs(finding.value))
        values = {finding.tensor: (finding.value, finding.explanation) for finding in group}
        for pattern in fold(Row(name, rule, (), 0) for name in values):
            value, explanation = values[pattern.first]
            yield FoldedFinding(severity, rule, value, pattern, explanation)


def _totals(patterns: Iterable[tuple[str, Pattern]]) -> tuple[Total, ...]:
    count: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for kind, pattern in patterns:
        count[kind] += pattern.count
        nbytes[kind] += pattern.nbytes
    return tuple([Total(kind, count[kind], size) for kind, size in nbytes.most_common()])


def index_summary(
    index: Any, config: Mapping[Any, Any] | None = None, part_of: Any = None
) -> Summary:
    """Summarise an `xckpt.Index`, or a selection from one; `config` as for `new_summary`."""
    errors, notes = notices(index, index.warnings, index.facts)
    with paused_collector():
        summary = new_summary(
            index_rows(index),
            config=config,
            structure=structure_of(index),
            title=index.source,
            format=index.format,
            version=index.version,
            attrs=index.attrs,
            errors=errors,
            notes=notes,
            shards=len(index.shards),
        )
    if part_of is not None and len(part_of.tensors) > len(index.tensors):
        # The model is the one of the file, and gaps between the tensors need no note.
        model = describe_model(structure_of(part_of), part_of.attrs)
        return replace(summary, model=model, total=len(part_of.tensors))
    return replace(summary, notes=(*summary.notes, *_unexplained(index, summary.nbytes)))


def index_rows(index: Any) -> Iterable[Row]:
    """Return the rows of an `xckpt.Index`."""
    return tied(_rows(index.tensors.values()), index.shared)


def _rows(tensors: Iterable[Any]) -> Iterator[Row]:
    """Return the row of each tensor, in one loop over its parts: there can be 100,000 of them."""
    for tensor in tensors:
        nbytes = 0
        plain = tensor.layout == "dense"
        for part in tensor.parts.values():
            nbytes += part.nbytes
            plain = plain and part.encoding is None
        dtype, storage = tensor.dtype, ""
        if not plain:
            scheme = tensor.scheme
            encodings = [part.encoding for part in tensor.parts.values()]
            dtype = scheme or dtype
            storage = storage_words("dense" if scheme else tensor.layout, encodings)
        has_facts = tensor.attrs or tensor.declared or tensor.dims
        facts = facts_of(tensor) if has_facts else None
        yield Row(tensor.name, dtype, tensor.shape, nbytes, storage, facts)


def notices(
    opened: Any, warnings: Sequence[str], facts: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the errors and the notes about an Index or an `OpenTensors`."""
    risks, path = opened.risks, opened.source
    errors = [finding.message for finding in risks if finding.severity == "error"]
    for cause in opened.unreadable():
        number, reason = counted(len(cause.tensors), "tensor"), cause.reason(path, brief=True)
        errors.append(f"{number} cannot be read: {some(cause.tensors)}: {reason}")
    pairs = [f"{shown(name)} is {shown(owner)}" for name, owner in opened.shared.items()]
    share = "shares its" if len(pairs) == 1 else "share their"
    notes = [
        *_first_of(warnings, counted(len(warnings), "warning")),
        *facts,
        *[finding.message for finding in risks if finding.severity != "error"],
        *_first_of(pairs, f"{counted(len(pairs), 'tensor')} {share} bytes with another"),
    ]
    return errors, notes


def _first_of(messages: Sequence[str], fact: str) -> list[str]:
    """Return the number of messages and the first one as a text; no text without messages."""
    first = ", first" if len(messages) > 1 else ""
    return [f"{fact}{first}: {messages[0]}"] if messages else []


def _unexplained(index: Any, stored: int) -> list[str]:
    """Report a file that is much larger or smaller than its tensors in total."""
    if index.shards or not index.nbytes:
        return []
    size = binary_size(index.nbytes)
    if stored > index.nbytes:
        if any(tensor.problem is not None for tensor in index.tensors.values()):
            return []  # it was cut short
        return [f"the file has only {size}: some tensors share their bytes"]
    unused = index.nbytes - stored
    if unused > _UNUSED_SHARE * index.nbytes and unused > _UNUSED_BYTES:
        return [f"the file has {size}: {binary_size(unused)} do not belong to any tensor"]
    return []


# --- numbered modules ----------------------------------------------------------------------------

# The layers of a model often differ: the first few are dense and the others mixtures of experts, or
# every sixth layer has global attention. Each such set of layers is a line of the summary. Stacked
# modules have a dimension for each set, because a dimension has one length.


def _of_repeated(family: Family, structure: Structure) -> Family:
    """Return a family in which numbers other than those of repeated modules are text."""
    if not family.indices or all(kept := structure.kept(family.template)):
        return family
    is_kept = iter(kept)
    components = [
        indices_text(part) if isinstance(part, frozenset) and not next(is_kept) else part
        for part in family.components
    ]
    return replace(family, components=tuple(components))


class _Numbers(NamedTuple):
    """The indices of a set of modules, and their dimension if they are stacked."""

    indices: frozenset[str]
    dim: str


def module_sets(
    families: Iterable[Family], stacked: Iterable[StackedNames] = ()
) -> list[ModuleSet]:
    """Return the sets of numbered modules, if modules of one name have different structures."""
    # By the path of the numbered module: its sets, and the parts of the modules in each.
    sets_by_path: dict[_Words, dict[_Numbers, dict[_Words, None]]] = {}
    stacked = list(stacked)
    for template, numbers in [*_of_families(families, stacked), *_of(stacked)]:
        positions = [position for position, part in enumerate(template) if part is None]
        ends = [*positions[1:], len(template)]
        for position, end, module_set in zip(positions, ends, numbers, strict=True):
            parts = sets_by_path.setdefault(template[:position], {}).setdefault(module_set, {})
            parts[template[position + 1 : end]] = None
    paths_by_name: dict[str, list[_Words]] = {}
    for path in sets_by_path:
        paths_by_name.setdefault(numbered_modules((*path, None))[-1], []).append(path)
    result: list[ModuleSet] = []
    for base, paths in paths_by_name.items():
        different = {module_set for path in paths for module_set in sets_by_path[path]}
        # Two or three different modules are a sequence of steps, such as a convolution and a norm.
        if len(different) > 1 and len(frozenset().union(*[s.indices for s in different])) > (
            _LONGEST_SEQUENCE
        ):
            for path in paths:
                name = base if len(paths) == 1 else _text(path)
                sets = sets_by_path[path]
                owners = _owners(sets)
                order = {s: (min(map(int, s.indices)), -len(s.indices), s.dim) for s in sets}
                for module_set in sorted(order, key=order.__getitem__):
                    is_described = len(result) < _MOST_DESCRIBED
                    only = _parts(sets[module_set], owners) if is_described else ()
                    indices = indices_text(module_set.indices)
                    result.append(ModuleSet(name, indices, module_set.dim, only))
    return result


def _of_families(
    families: Iterable[Family], stacked: Iterable[StackedNames]
) -> list[tuple[_Words, list[_Numbers]]]:
    """Return the templates of unstacked tensors, and the sets of their indices."""
    stacked_templates = {_words(names.template) for names in stacked}
    indices: dict[_Words, list[set[str]]] = {}
    for family in families:
        if family.indices and family.template not in stacked_templates:
            sets = indices.setdefault(family.template, [set() for _ in family.indices])
            for numbers, more in zip(sets, family.indices, strict=True):
                numbers.update(more)
    return [(t, [_Numbers(frozenset(n), "") for n in sets]) for t, sets in indices.items()]


def _of(stacked: Iterable[StackedNames]) -> list[tuple[_Words, list[_Numbers]]]:
    # Indices in the names of stacks belong to modules that are not stacked.
    unstacked: dict[tuple[_Words, int], set[str]] = {}
    parsed = [(_words(names.template), names, module_indices(names.template)) for names in stacked]
    for words, _, modules in parsed:
        for position, (_, index) in enumerate(modules):
            if isinstance(index, str):
                unstacked.setdefault((words, position), set()).add(index)
    result = []
    for words, names, modules in parsed:
        along = iter(zip(names.indices, names.dims, strict=True))
        numbers = []
        for position, (_, index) in enumerate(modules):
            if isinstance(index, str):
                numbers.append(_Numbers(frozenset(unstacked[words, position]), ""))
            else:
                indices, dim = next(along)
                numbers.append(_Numbers(frozenset(map(str, indices)), dim))
        result.append((words, numbers))
    return result


def _words(template: Iterable[str | int | None]) -> _Words:
    return tuple([p if isinstance(p, str) and not is_index(p) else None for p in template])


def _text(pieces: Iterable[str | None]) -> str:
    """Join pieces of names, with a star for each index."""
    words = tokens((*pieces, None))[:-1]
    return strip_separator("".join([f"{separator}{word or '*'}" for separator, word in words]))


def _owners(sets: Mapping[_Numbers, Iterable[_Words]]) -> dict[_Words, _Numbers | None]:
    """Return the set of modules by the first words of its parts; None if several sets have them."""
    owners: dict[_Words, _Numbers | None] = {}
    for module_set, parts in sets.items():
        for words in parts:
            for length in range(1, min(len(words), _DEEPEST) + 1):
                start = words[:length]
                is_unique = owners.get(start, module_set) == module_set
                owners[start] = module_set if is_unique else None
    return owners


def _parts(parts: Iterable[_Words], owners: Mapping[_Words, _Numbers | None]) -> tuple[str, ...]:
    """Name the parts of modules by the fewest words that distinguish them from other modules."""
    names: dict[str, None] = {}
    for words in parts:
        deepest = min(len(words), _DEEPEST)
        length = next((n for n in range(1, deepest) if owners[words[:n]] is not None), len(words))
        names[_text(words[:length])] = None
    texts = fold_names(name for name in names if name)
    more = [f"… {len(texts) - _MOST_PARTS:,} more"] if len(texts) > _MOST_PARTS + 1 else []
    return tuple(texts[:_MOST_PARTS] + more if more else texts)


def selection(families: Sequence[Family]) -> dict[str, int]:
    """Return an example of indices to select modules by, from the family of most tensors."""
    families = [family for family in families if family.indices]
    if not families:
        return {}
    largest = max(families, key=lambda family: (family.count, family.nbytes))
    chosen = {}
    for base, indices in zip(numbered_modules(largest.template), largest.indices, strict=True):
        if base.isidentifier() and not iskeyword(base):
            numbers = sorted(map(int, indices))
            chosen[base] = numbers[len(numbers) // 2]
    return chosen


# --- the tree ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Modules:
    """A module, or several that differ only in their index."""

    count: int = 0
    nbytes: int = 0
    indices: set[str] = field(default_factory=set)
    children: dict[str | None, _Modules] = field(default_factory=dict)


class ModuleTree(Shown):
    """The tree of modules of a checkpoint, with numbered modules folded, and their sizes.

    Examples
    --------
    >>> ds.ckpt.tree(depth=3)
    model                   134 tensors   14.0 MiB
      embed_tokens            2 tensors    2.2 MiB
      layers                120 tensors   11.8 MiB
        {0..11}             120 tensors   11.8 MiB
    """

    def __init__(self, rows: Iterable[Row], depth: int) -> None:
        self._root = _Modules()
        words_by_template: dict[tuple[str | None, ...], list[str | None]] = {}
        for row in rows:
            node = self._root
            parsed = parse_name(row.name)
            indices = iter(parsed.indices)
            if parsed.template not in words_by_template:
                parts = [part for _, part in tokens(parsed.template)]
                words = [part if isinstance(part, str) else None for part in parts]
                words_by_template[parsed.template] = words
            for part in words_by_template[parsed.template][:depth]:
                node = node.children.setdefault(part, _Modules())
                node.count += 1
                node.nbytes += row.nbytes
                if part is None:
                    node.indices.add(next(indices))

    def _compute(self, _: object) -> Any:
        text = (
            "ds.ckpt.tree() lists modules, and has no values: compute with the Datasets, "
            "(a + b) / 2, or with trees of xr.open_datatree(path, engine=...)"
        )
        raise TypeError(text)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _compute

    def _blocks(self) -> list[Block]:
        rows = list(islice(_lines(self._root, 0), _MOST_LINES + 1))
        if not rows:
            return [Sentence("", "no tensors")]
        omitted = "… and more: choose a smaller depth, or a part with find()"
        fields = [Field("", "tree"), Field("", "number"), Field("", "size")]
        return [Table(fields, rows[:_MOST_LINES], omitted if len(rows) > _MOST_LINES else "")]


def _lines(node: _Modules, level: int) -> Iterator[tuple[str, str, int]]:
    keys = list(node.children)
    for position in ascending([key or "" for key in keys]):
        key, child = keys[position], node.children[keys[position]]
        name = indices_text(child.indices) if key is None else word(key, _WIDEST_NAME) or '""'
        yield "  " * level + name, counted(child.count, "tensor"), child.nbytes
        yield from _lines(child, level + 1)


# --- tables ---------------------------------------------------------------------------------------


_KEYS: Mapping[str, Callable[[Row, Structure], str]] = {
    "dtype": lambda row, _: row.dtype,
    "layer": lambda row, structure: structure.layer(row.name),
    "role": lambda row, structure: structure.roles[row.name].value,
    "kind": lambda row, structure: structure.module_type(row.name),
    "module": lambda row, structure: structure.bare_module(row.name),
    "component": lambda row, structure: structure.component(row.name),
}


def sizes_table(
    rows: Iterable[Row],
    by: Literal["pattern", "dtype", "layer", "role", "kind", "module", "component"],
    structure: Structure | None = None,
) -> pd.DataFrame:
    """Return a table of the sizes of tensors, largest first."""
    import pandas as pd

    rows = list(rows)
    structure = Structure(rows) if structure is None else structure
    if by == "pattern":
        families = families_of(marked(rows, structure), structure)
        patterns = [family.pattern() for family in united(families)]
        names = [pattern.first for pattern in patterns]
        frame = pd.DataFrame(
            {
                "tensors": [pattern.count for pattern in patterns],
                "shape": [shape_text(pattern.shape, pattern.dtype) for pattern in patterns],
                "dtype": [pattern.dtype for pattern in patterns],
                "storage": [pattern.storage for pattern in patterns],
                "parameters": [pattern.parameters for pattern in patterns],
                "nbytes": [pattern.nbytes for pattern in patterns],
            },
            index=pd.Index([pattern.text for pattern in patterns], name=by, dtype=object),
        )
    elif by in _KEYS:
        totals = totals_by(_KEYS[by], rows, structure)
        names = [total.group for total in totals]
        frame = pd.DataFrame(
            {
                "tensors": [total.tensors for total in totals],
                "parameters": [total.size for total in totals],
                "nbytes": [total.nbytes for total in totals],
            },
            index=pd.Index(names, name=by, dtype=object),
        )
    else:
        keys = ", ".join(map(repr, _KEYS))
        raise ValueError(f"by must be 'pattern', {keys}, not {by!r}")
    total_nbytes: Any = max(1, frame["nbytes"].sum())
    frame["share"] = frame["nbytes"] / total_nbytes
    frame = frame.iloc[ascending(names)]
    return frame.sort_values("nbytes", ascending=False, kind="stable")
