"""What a checkpoint holds, from metadata alone: a `Summary`, a tree of modules, a table of sizes.

`xckpt.notebook.text` and `xckpt.notebook.html` show a `Summary`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from html import escape
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from xckpt.errors import shown
from xckpt.labels.stacking import numbered
from xckpt.notebook.folding import Pattern, Row, fold, indices_text, one_by_one
from xckpt.notebook.formatting import (
    base_name,
    binary_size,
    columns,
    counted,
    printable,
    shapes_text,
    shortened,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import pandas as pd

__all__ = [
    "ModuleTree",
    "Summary",
    "TensorFinding",
    "Total",
    "index_summary",
    "new_summary",
    "sizes_table",
    "storage_words",
]

# So few tensors are listed one by one: folding would hide names and save nothing.
_FEW = 12
# Headers, padding and manifests take less than this of any file that is not a toy.
_UNUSED_SHARE = 0.1
_UNUSED_BYTES = 1 << 20
_STORAGE = {
    "dense": "",
    "sparse_csr": "csr",
    "sparse_coo": "coo",
    "quantized": "quantized",
    "structural": "structural",
}
_MOST_LINES = 300
_WIDEST_NAME = 60


@dataclass(frozen=True, slots=True)
class Total:
    """How many tensors are of one element type, or stored in one way, and their stored bytes."""

    kind: str
    count: int
    nbytes: int


class TensorFinding(NamedTuple):
    """Something in the statistics of a tensor that calls for attention."""

    tensor: str
    rule: str  # "nan", "all_zero", ...
    value: float  # how much
    severity: str  # "error", "warning" or "info"


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
    nbytes: int  # stored bytes of all tensors
    size: int  # elements of all tensors, implied zeros included
    dtypes: tuple[Total, ...]  # by stored element type, largest first
    storage: tuple[Total, ...]  # by way of storing, where that is not plainly dense
    patterns: tuple[Pattern, ...]  # largest first
    dims: Mapping[str, int]  # named dimensions and their sizes
    attrs: Mapping[Any, Any]
    notes: tuple[str, ...]  # what a user should know before relying on the file
    findings: tuple[TensorFinding, ...] | None = (
        None  # worst first; None where statistics are not known
    )


def new_summary(
    rows: Iterable[Row],
    *,
    title: str,
    format: str,
    version: str,
    attrs: Mapping[Any, Any],
    dims: Mapping[str, int] | None = None,
    notes: Sequence[str] = (),
    shards: int = 0,
    findings: Iterable[TensorFinding] | None = None,
) -> Summary:
    """Sum up tensors in one pass."""
    rows = iter(rows)
    first = list(islice(rows, _FEW + 1))
    patterns = one_by_one(first) if len(first) <= _FEW else fold(chain(first, rows))
    patterns.sort(key=lambda pattern: -pattern.nbytes)
    return Summary(
        title=base_name(title),
        format=format,
        version=version,
        shards=shards,
        count=sum([pattern.count for pattern in patterns]),
        nbytes=sum([pattern.nbytes for pattern in patterns]),
        size=sum([pattern.size for pattern in patterns]),
        dtypes=_totals((pattern.dtype, pattern) for pattern in patterns),
        storage=_totals((pattern.storage, pattern) for pattern in patterns if pattern.storage),
        patterns=tuple(patterns),
        dims=dims or {},
        attrs=attrs,
        notes=tuple(notes),
        findings=None if findings is None else tuple([TensorFinding(*each) for each in findings]),
    )


def _totals(patterns: Iterable[tuple[str, Pattern]]) -> tuple[Total, ...]:
    count: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for kind, pattern in patterns:
        count[kind] += pattern.count
        nbytes[kind] += pattern.nbytes
    return tuple([Total(kind, count[kind], size) for kind, size in nbytes.most_common()])


def index_summary(index: Any) -> Summary:
    """Sum up an `xckpt.Index`, whose module imports this one for its repr."""
    # The reason only: the whole message would show the path.
    problems = [
        f"{shown(tensor.name)}: {tensor.problem.reason}"
        for tensor in index.tensors.values()
        if tensor.problem is not None
    ]
    summary = new_summary(
        _rows(index.tensors.values()),
        title=index.source,
        format=index.format,
        version=index.version,
        attrs=index.attrs,
        notes=[
            *_first_of(problems, counted(len(problems), "tensor") + " cannot be read"),
            *_first_of(index.warnings, counted(len(index.warnings), "warning")),
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
        yield Row(tensor.name, tensor.dtype, tensor.shape, nbytes, tensor.size, storage)


def storage_words(layout: str, encodings: Iterable[str | None]) -> str:
    """Name how a tensor is stored, for `Row.storage`."""
    # "zstd-seekable" is zstd with a table of its frames.
    compressions = [encoding.partition("-")[0] for encoding in encodings if encoding]
    return " ".join(dict.fromkeys([_STORAGE.get(layout, layout), *compressions])).strip()


def _first_of(messages: Sequence[str], fact: str) -> list[str]:
    """Say how many messages there are, and the first of them."""
    first = ", first" if len(messages) > 1 else ""
    return [f"{fact}{first}: {messages[0]}"] if messages else []


def _unexplained(index: Any, stored: int) -> list[str]:
    """Point at a file much larger or smaller than its tensors in total."""
    if index.shards or not index.nbytes:
        return []
    size = binary_size(index.nbytes)
    if stored > index.nbytes:
        return [f"the file has only {size}: some tensors share their bytes"]
    unused = index.nbytes - stored
    if unused > _UNUSED_SHARE * index.nbytes and unused > _UNUSED_BYTES:
        return [f"the file has {size}: {binary_size(unused)} do not belong to any tensor"]
    return []


# --- modules -------------------------------------------------------------------------------------


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
        for row in rows:
            node = self._root
            parts = row.name.split(".")[:depth]
            for part, word in zip(parts, numbered(parts).template, strict=True):
                node = node.children.setdefault(word, _Modules())
                node.count += 1
                node.nbytes += row.nbytes
                if word is None:
                    node.indices.add(part)

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
    for key, child in node.children.items():
        name = indices_text(child.indices) if key is None else printable(key)
        short = shortened(name, _WIDEST_NAME)
        yield "  " * level + short, counted(child.count, "tensor"), binary_size(child.nbytes)
        yield from _lines(child, level + 1)


def sizes_table(rows: Iterable[Row], by: Literal["pattern", "dtype", "layer"]) -> pd.DataFrame:
    """Return a table of how much the tensors take, largest first."""
    import pandas as pd

    if by == "pattern":
        found = fold(rows)
        frame = pd.DataFrame(
            {
                "tensors": [pattern.count for pattern in found],
                "shape": [shapes_text(pattern.shapes) for pattern in found],
                "dtype": [pattern.dtype for pattern in found],
                "storage": [pattern.storage for pattern in found],
                "parameters": [pattern.size for pattern in found],
                "nbytes": [pattern.nbytes for pattern in found],
            },
            index=pd.Index([pattern.text for pattern in found], name=by, dtype=object),
        )
    elif by in {"dtype", "layer"}:
        totals: dict[str, list[int]] = {}
        for row in rows:
            key = row.dtype if by == "dtype" else _layer(row.name)
            total = totals.setdefault(key, [0, 0, 0])
            total[0] += 1
            total[1] += row.size
            total[2] += row.nbytes
        frame = pd.DataFrame(
            list(totals.values()),
            index=pd.Index(list(totals), name=by, dtype=object),
            columns=["tensors", "parameters", "nbytes"],
        )
    else:
        raise ValueError(f"by must be 'pattern', 'dtype' or 'layer', not {by!r}")
    whole: Any = max(1, frame["nbytes"].sum())
    frame["share"] = frame["nbytes"] / whole
    return frame.sort_values("nbytes", ascending=False, kind="stable")


def _layer(name: str) -> str:
    """Return a name up to its first number; empty where there is none."""
    parts = name.split(".")
    template = numbered(parts).template
    return ".".join(parts[: template.index(None) + 1]) if None in template else ""
