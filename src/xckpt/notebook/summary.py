"""What a checkpoint holds, from metadata alone: a `Summary`, a tree of modules, a table of sizes.

`xckpt.notebook.text` and `xckpt.notebook.html` show a `Summary`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from html import escape
from itertools import islice
from keyword import iskeyword
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from xckpt.errors import shown
from xckpt.formatting import (
    UNKNOWN,
    base_name,
    binary_size,
    columns,
    counted,
    printable,
    shape_text,
    shortened,
)
from xckpt.labels.numbering import (
    is_index,
    module_indices,
    numbered_modules,
    parse_name,
    strip_separator,
    tokens,
)
from xckpt.labels.roles import PARAMETERS, Role, roles_of
from xckpt.notebook.folding import (
    Family,
    Pattern,
    ascending,
    count_parameters,
    families_of,
    fold,
    indices_text,
    mark_codes,
    marked,
    one_by_one,
    united,
)
from xckpt.tensor_rows import TIED, Row, StackedNames, storage_words, tied

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    import pandas as pd

# So few tensors are listed one by one: folding would hide names and save nothing.
_FEW = 12
# Headers, padding and manifests take less than this of any file that is not a toy.
_UNUSED_SHARE = 0.1
_UNUSED_BYTES = 1 << 20
_SEVERITIES = ("error", "warning", "info")
_MOST_LINES = 300
_WIDEST_NAME = 60
_MOST_PARTS = 6
_MOST_DESCRIBED = 16  # sets of modules; a summary shows fewer
_DEEPEST = 16
_LONGEST_SEQUENCE = 3

_Words = tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Total:
    """How many tensors are of one element type, or stored in one way, and their stored bytes."""

    kind: str
    count: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GroupTotal:
    """Tensors whose roles have one heading, such as buffers."""

    group: str
    count: int
    size: int
    nbytes: int


class TensorFinding(NamedTuple):
    """Something in the statistics of a tensor that calls for attention."""

    tensor: str
    rule: str  # "nan", "all_zero", ...
    value: float  # how much
    severity: str  # "error", "warning" or "info"
    explanation: str = ""


class KnownResults(NamedTuple):
    """What is known of tensors that have statistics."""

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
    """Numbered modules that have something in common which others of their kind do not have."""

    module: str  # what the numbers number: "layers"
    indices: str  # "{3..60}"
    dim: str  # the dimension of what is in them; empty where that is not stacked
    parts: tuple[str, ...]  # what is in these modules only: "mlp.experts", ...


@dataclass(frozen=True, slots=True)
class Summary:
    """What a checkpoint holds at a glance.

    Text in it is as the file has it, except for `title` and the text of patterns: a renderer
    must escape the rest.
    """

    title: str  # the name of the file without its folder
    format: str  # empty where not known, like `version`
    version: str
    shards: int  # number of other files that hold parts
    count: int  # of tensors
    nbytes: int  # stored bytes of all tensors, those of tied ones once
    size: int  # trainable elements, implied zeros included, tied ones once
    groups: tuple[GroupTotal, ...]  # by role, parameters first
    dtypes: tuple[Total, ...]  # by stored element type, largest first
    storage: tuple[Total, ...]  # by way of storing, where that is not plainly dense
    patterns: tuple[Pattern, ...]  # largest first
    modules: tuple[ModuleSet, ...]  # numbered modules, where they are not all alike
    choose: str  # the call that chooses some of these; empty where there is none
    dims: Mapping[str, int]  # named dimensions and their sizes
    attrs: Mapping[Any, Any]
    errors: tuple[str, ...]  # what cannot be read
    notes: tuple[str, ...]  # what a user should know before relying on the file
    findings: tuple[FoldedFinding, ...] | None  # worst first; None without statistics


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
) -> Summary:
    """Sum up tensors in one pass; `obj` is what an open object is called in code."""
    rows = list(rows)
    families = families_of(rows)
    mark_codes(families)
    groups = _groups(families, count_parameters(families))
    modules, chosen = module_sets(families, stacked), selection(families)
    if len(rows) <= _FEW:
        patterns = one_by_one(marked(rows))
    else:
        patterns = [family.pattern() for family in united(families)]
    order = ascending([pattern.first for pattern in patterns])
    patterns = [patterns[at] for at in sorted(order, key=lambda at: -patterns[at].nbytes)]
    numbers = ", ".join(f"{module}={number}" for module, number in chosen.items())
    return Summary(
        title=base_name(title),
        format=format,
        version=version,
        shards=shards,
        count=sum([pattern.count for pattern in patterns]),
        nbytes=sum([pattern.nbytes for pattern in patterns]),
        size=sum([total.size for total in groups if total.group == Role.WEIGHT.group]),
        groups=groups,
        dtypes=_totals((pattern.dtype, pattern) for pattern in patterns),
        storage=_totals((p.storage, p) for p in patterns if p.storage not in {"", TIED}),
        patterns=tuple(patterns),
        modules=tuple(modules),
        choose=f"{obj}.ckpt.sel({numbers})" if obj and numbers else "",
        dims=dims or {},
        attrs=attrs,
        errors=tuple(errors),
        notes=tuple(notes),
        findings=None if findings is None else tuple(_folded(findings)),
    )


def _folded(findings: Iterable[TensorFinding]) -> Iterator[FoldedFinding]:
    """Fold what one rule found in tensors with similar names."""
    by_rule: dict[tuple[int, str, str], list[TensorFinding]] = {}
    for finding in findings:
        known = finding.severity in _SEVERITIES
        rank = _SEVERITIES.index(finding.severity) if known else len(_SEVERITIES)
        by_rule.setdefault((rank, finding.severity, finding.rule), []).append(finding)
    for (_, severity, rule), some in sorted(by_rule.items(), key=lambda item: item[0][0]):
        # The largest first, as it is the one that a pattern names; NaN is not larger than another.
        some.sort(key=lambda finding: -abs(finding.value))
        values = {finding.tensor: (finding.value, finding.explanation) for finding in some}
        for pattern in fold(Row(name, rule, (), 0) for name in values):
            value, explanation = values[pattern.first]
            yield FoldedFinding(severity, rule, value, pattern, explanation)


def _groups(families: Sequence[Family], roles: Sequence[Role]) -> tuple[GroupTotal, ...]:
    """Sum families up by the headings of their roles, in the order of `Role`."""
    totals: dict[str, list[int]] = {role.group: [0, 0, 0] for role in Role}
    for family, role in zip(families, roles, strict=True):
        total = totals[role.group]
        total[0] += family.count
        total[1] += family.parameters if role in PARAMETERS else family.size
        total[2] += family.nbytes
    return tuple([GroupTotal(group, *total) for group, total in totals.items() if total[0]])


def _totals(patterns: Iterable[tuple[str, Pattern]]) -> tuple[Total, ...]:
    count: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for kind, pattern in patterns:
        count[kind] += pattern.count
        nbytes[kind] += pattern.nbytes
    return tuple([Total(kind, count[kind], size) for kind, size in nbytes.most_common()])


def index_summary(index: Any) -> Summary:
    """Sum up an `xckpt.Index`."""
    # The reason only: the whole message would show the path.
    problems = [
        f"{shown(tensor.name)}: {tensor.problem.reason}"
        for tensor in index.tensors.values()
        if tensor.problem is not None
    ]
    summary = new_summary(
        tied(_rows(index.tensors.values()), index.shared),
        title=index.source,
        format=index.format,
        version=index.version,
        attrs=index.attrs,
        errors=_first_of(problems, counted(len(problems), "tensor") + " cannot be read"),
        notes=[
            *_first_of(index.warnings, counted(len(index.warnings), "warning")),
            *shared_notes(index.shared),
        ],
        shards=len(index.shards),
    )
    return replace(summary, notes=(*summary.notes, *_unexplained(index, summary.nbytes)))


def _rows(tensors: Iterable[Any]) -> Iterator[Row]:
    """Return the row of each tensor, in one loop over its parts: there can be 100,000 of them."""
    for tensor in tensors:
        nbytes = 0
        plain = tensor.layout == "dense"
        for part in tensor.parts.values():
            nbytes += part.nbytes
            plain = plain and part.encoding is None
        encodings = () if plain else [part.encoding for part in tensor.parts.values()]
        storage = "" if plain else storage_words(tensor.layout, encodings)
        yield Row(tensor.name, tensor.dtype, tensor.shape, nbytes, storage)


def _first_of(messages: Sequence[str], fact: str) -> list[str]:
    """Say how many messages there are, and the first of them."""
    first = ", first" if len(messages) > 1 else ""
    return [f"{fact}{first}: {messages[0]}"] if messages else []


def unread_errors(rows: Iterable[Row]) -> list[str]:
    """Say which tensors cannot be read, nor is their type known: of files that are missing."""
    names = [shown(row.name) for row in rows if row.dtype == UNKNOWN]
    return _first_of(names, f"{counted(len(names), 'tensor')} cannot be read")


def shared_notes(shared: Mapping[str, str]) -> list[str]:
    """Say which tensors have the bytes of others."""
    some = [f"{shown(name)} is {shown(owner)}" for name, owner in shared.items()]
    share = "shares its" if len(some) == 1 else "share their"
    return _first_of(some, f"{counted(len(some), 'tensor')} {share} bytes with another")


def _unexplained(index: Any, stored: int) -> list[str]:
    """Point at a file much larger or smaller than its tensors in total."""
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

# The layers of a model are often not alike: the first few are dense and the others mixtures of
# experts, or every sixth attends to everything. Each such set of numbers is a line of the summary,
# and a dimension of its own where modules are stacked, because a dimension has one length.


class _Numbers(NamedTuple):
    """What sets apart the tensors of a numbered module."""

    indices: frozenset[str]
    dim: str


def module_sets(
    families: Iterable[Family], stacked: Iterable[StackedNames] = ()
) -> list[ModuleSet]:
    """List the sets of modules, where modules of one name are not all alike."""
    # By the path of the numbered module: its sets, and what is in the modules of each.
    found: dict[_Words, dict[_Numbers, dict[_Words, None]]] = {}
    stacked = list(stacked)
    for template, numbers in [*_of_families(families, stacked), *_of(stacked)]:
        at = [place for place, part in enumerate(template) if part is None]
        for place, after, each in zip(at, [*at[1:], len(template)], numbers, strict=True):
            parts = found.setdefault(template[:place], {}).setdefault(each, {})
            parts[template[place + 1 : after]] = None
    named: dict[str, list[_Words]] = {}
    for path in found:
        named.setdefault(numbered_modules((*path, None))[-1], []).append(path)
    sets: list[ModuleSet] = []
    for base, paths in named.items():
        different = {each for path in paths for each in found[path]}
        # Of two or three it is a sequence of steps, say a convolution and a norm.
        if len(different) > 1 and len(frozenset().union(*[s.indices for s in different])) > (
            _LONGEST_SEQUENCE
        ):
            for path in paths:
                name = base if len(paths) == 1 else _text(path)
                owners = _owners(found[path])
                order = {s: (min(map(int, s.indices)), -len(s.indices), s.dim) for s in found[path]}
                for each in sorted(order, key=order.__getitem__):
                    few = len(sets) < _MOST_DESCRIBED
                    only = _parts(found[path][each], owners) if few else ()
                    sets.append(ModuleSet(name, indices_text(each.indices), each.dim, only))
    return sets


def _of_families(
    families: Iterable[Family], stacked: Iterable[StackedNames]
) -> list[tuple[_Words, list[_Numbers]]]:
    """Return the templates of what is not stacked, whatever its shapes, and the numbers in it."""
    known = {_words(each.template) for each in stacked}
    indices: dict[_Words, list[set[str]]] = {}
    for family in families:
        if family.indices and family.template not in known:
            sets = indices.setdefault(family.template, [set() for _ in family.indices])
            for numbers, more in zip(sets, family.indices, strict=True):
                numbers.update(more)
    return [(t, [_Numbers(frozenset(n), "") for n in sets]) for t, sets in indices.items()]


def _of(stacked: Iterable[StackedNames]) -> list[tuple[_Words, list[_Numbers]]]:
    # Numbers that are in the names of stacks say together which modules are not stacked.
    apart: dict[tuple[_Words, int], set[str]] = {}
    placed = [(_words(each.template), each, module_indices(each.template)) for each in stacked]
    for words, _, places in placed:
        for at, (_, part) in enumerate(places):
            if isinstance(part, str):
                apart.setdefault((words, at), set()).add(part)
    found = []
    for words, each, places in placed:
        along = iter(zip(each.indices, each.dims, strict=True))
        numbers = []
        for at, (_, part) in enumerate(places):
            indices, dim = (apart[words, at], "") if isinstance(part, str) else next(along)
            numbers.append(_Numbers(frozenset(map(str, indices)), dim))
        found.append((words, numbers))
    return found


def _words(template: Iterable[str | int | None]) -> _Words:
    return tuple([p if isinstance(p, str) and not is_index(p) else None for p in template])


def _text(pieces: Iterable[str | None]) -> str:
    """Write pieces from inside of names, with a star for each index."""
    found = tokens((*pieces, None))[:-1]
    return strip_separator("".join([f"{front}{part or '*'}" for front, part in found]))


def _owners(sets: Mapping[_Numbers, Iterable[_Words]]) -> dict[_Words, _Numbers | None]:
    """Return which set of modules has parts that begin with some words; None if several do."""
    owners: dict[_Words, _Numbers | None] = {}
    for each, parts in sets.items():
        for words in parts:
            for length in range(1, min(len(words), _DEEPEST) + 1):
                start = words[:length]
                owners[start] = each if owners.get(start, each) == each else None
    return owners


def _parts(here: Iterable[_Words], owners: Mapping[_Words, _Numbers | None]) -> tuple[str, ...]:
    """Name the parts of modules in so few words that no others have parts of that name."""
    names: dict[str, None] = {}
    for words in here:
        deepest = min(len(words), _DEEPEST)
        length = next((n for n in range(1, deepest) if owners[words[:n]] is not None), len(words))
        names[_text(words[:length])] = None
    texts = [pattern.text for pattern in fold(Row(name, "", (), 0) for name in names if name)]
    more = [f"… {len(texts) - _MOST_PARTS:,} more"] if len(texts) > _MOST_PARTS + 1 else []
    return tuple(texts[:_MOST_PARTS] + more if more else texts)


def selection(families: Sequence[Family]) -> dict[str, int]:
    """Return numbers of modules to choose by, as an example, of the family of most tensors."""
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
    """A module, or several that only differ in their number."""

    count: int = 0
    nbytes: int = 0
    indices: set[str] = field(default_factory=set)
    children: dict[str | None, _Modules] = field(default_factory=dict)


class ModuleTree:
    """The modules of a checkpoint, numbered ones folded, with what is in them.

    Examples
    --------
    >>> ds.ckpt.tree(depth=3)  # doctest: +SKIP
    model                   134 tensors   14.0 MiB
      embed_tokens            2 tensors    2.2 MiB
      layers                120 tensors   11.8 MiB
        {0..11}             120 tensors   11.8 MiB
    """

    def __init__(self, rows: Iterable[Row], depth: int) -> None:
        self._root = _Modules()
        known: dict[tuple[str | None, ...], list[str | None]] = {}
        for row in rows:
            node = self._root
            found = parse_name(row.name)
            indices = iter(found.indices)
            if found.template not in known:
                parts = [part for _, part in tokens(found.template)]
                known[found.template] = [p if isinstance(p, str) else None for p in parts]
            for word in known[found.template][:depth]:
                node = node.children.setdefault(word, _Modules())
                node.count += 1
                node.nbytes += row.nbytes
                if word is None:
                    node.indices.add(next(indices))

    def __repr__(self) -> str:
        lines = list(islice(_lines(self._root, 0), _MOST_LINES + 1))
        width = max((columns(name) for name, _, _ in lines), default=0)
        text = [
            f"{name}{' ' * (width - columns(name))}  {count:>16}  {size:>10}"
            for name, count, size in lines[:_MOST_LINES]
        ]
        if len(lines) > _MOST_LINES:
            text.append("… and more: choose a smaller depth, or a part with find()")
        return "\n".join(text) or "no tensors"

    def _repr_html_(self) -> str:
        return f"<pre style='line-height:1.4'>{escape(repr(self))}</pre>"


def _lines(node: _Modules, level: int) -> Iterator[tuple[str, str, str]]:
    keys = list(node.children)
    for at in ascending([key or "" for key in keys]):
        key, child = keys[at], node.children[keys[at]]
        name = indices_text(child.indices) if key is None else printable(key)
        short = shortened(name, _WIDEST_NAME)
        yield "  " * level + short, counted(child.count, "tensor"), binary_size(child.nbytes)
        yield from _lines(child, level + 1)


# --- tables ---------------------------------------------------------------------------------------


def sizes_table(
    rows: Iterable[Row], by: Literal["pattern", "dtype", "layer", "role"]
) -> pd.DataFrame:
    """Return a table of the sizes of tensors, largest first."""
    import pandas as pd

    rows = list(rows)
    if by == "pattern":
        families = families_of(rows)
        count_parameters(families)
        mark_codes(families)
        found = [family.pattern() for family in united(families)]
        names = [pattern.first for pattern in found]
        frame = pd.DataFrame(
            {
                "tensors": [pattern.count for pattern in found],
                "shape": [shape_text(pattern.shape, pattern.dtype) for pattern in found],
                "dtype": [pattern.dtype for pattern in found],
                "storage": [pattern.storage for pattern in found],
                "parameters": [pattern.parameters for pattern in found],
                "nbytes": [pattern.nbytes for pattern in found],
            },
            index=pd.Index([pattern.text for pattern in found], name=by, dtype=object),
        )
    elif by in {"dtype", "layer", "role"}:
        totals: dict[str, list[int]] = {}
        roles = roles_of(row[:3] for row in rows)
        for row in rows:
            role = roles[row.name]
            key = row.dtype if by == "dtype" else role.value
            key = parse_name(row.name).outermost if by == "layer" else key
            total = totals.setdefault(key, [0, 0, 0])
            total[0] += 1
            total[1] += row.size if role in PARAMETERS and row.storage != TIED else 0
            total[2] += row.nbytes
        names = list(totals)
        frame = pd.DataFrame(
            list(totals.values()),
            index=pd.Index(list(totals), name=by, dtype=object),
            columns=["tensors", "parameters", "nbytes"],
        )
    else:
        raise ValueError(f"by must be 'pattern', 'dtype', 'layer' or 'role', not {by!r}")
    whole: Any = max(1, frame["nbytes"].sum())
    frame["share"] = frame["nbytes"] / whole
    frame = frame.iloc[ascending(names)]
    return frame.sort_values("nbytes", ascending=False, kind="stable")
