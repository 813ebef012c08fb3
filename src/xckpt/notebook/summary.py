"""What a checkpoint holds at a glance, from metadata alone: `Summary`, made once, shown two ways.

`xckpt.notebook.text` and `xckpt.notebook.html` render it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.errors import shown
from xckpt.notebook.folding import Pattern, Row, fold, one_by_one
from xckpt.notebook.formatting import base_name, binary_size, counted
from xckpt.notebook.text import render

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from xckpt.index import Index, Tensor

__all__ = [
    "Finding",
    "Summary",
    "Total",
    "index_html",
    "index_summary",
    "new_summary",
    "storage_words",
    "summarize",
    "summarize_index",
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


@dataclass(frozen=True, slots=True)
class Total:
    """How many tensors are of one kind, and how many bytes they take.

    Parameters
    ----------
    kind : str
        Element type or way of storing.
    count : int
        Number of tensors.
    nbytes : int
        Stored bytes.
    """

    kind: str
    count: int
    nbytes: int


class Finding(NamedTuple):
    """Something in the statistics of a tensor that calls for attention.

    Parameters
    ----------
    tensor : str
        Name of the tensor.
    rule : str
        What is wrong: ``"nan"``, ``"all_zero"``, ...
    value : float
        How much.
    severity : str
        ``"error"``, ``"warning"`` or ``"info"``.
    """

    tensor: str
    rule: str
    value: float
    severity: str


@dataclass(frozen=True, slots=True)
class Summary:
    """What a checkpoint holds at a glance.

    Text in it is as the file has it, except for `title` and the text of patterns: a renderer
    must escape the rest.

    Parameters
    ----------
    title : str
        Name of the file without its folder.
    format, version : str
        Of the file; empty where not known.
    shards : int
        Number of other files that hold parts.
    count : int
        Number of tensors.
    nbytes : int
        Stored bytes of all tensors.
    size : int
        Number of elements of all tensors, implied zeros included.
    dtypes : tuple of Total
        By stored element type, largest first.
    storage : tuple of Total
        By way of storing, where that is not plainly dense, largest first.
    patterns : tuple of Pattern
        Largest first.
    dims : mapping of str to int
        Named dimensions and their sizes.
    attrs : mapping
        What the file says of itself.
    notes : tuple of str
        What a user should know before relying on the file.
    findings : tuple of Finding or None
        The worst first; None where statistics are not known.
    """

    title: str
    format: str
    version: str
    shards: int
    count: int
    nbytes: int
    size: int
    dtypes: tuple[Total, ...]
    storage: tuple[Total, ...]
    patterns: tuple[Pattern, ...]
    dims: Mapping[str, int]
    attrs: Mapping[Any, Any]
    notes: tuple[str, ...]
    findings: tuple[Finding, ...] | None = None


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
    findings: Iterable[Finding] | None = None,
) -> Summary:
    """Sum up tensors in one pass."""
    patterns = _patterns(rows)
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
        findings=None if findings is None else tuple([Finding(*each) for each in findings]),
    )


def _patterns(rows: Iterable[Row]) -> list[Pattern]:
    rows = iter(rows)
    first = list(islice(rows, _FEW + 1))
    patterns = one_by_one(first) if len(first) <= _FEW else fold(chain(first, rows))
    return sorted(patterns, key=lambda pattern: -pattern.nbytes)


def _totals(patterns: Iterable[tuple[str, Pattern]]) -> tuple[Total, ...]:
    count: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for kind, pattern in patterns:
        count[kind] += pattern.count
        nbytes[kind] += pattern.nbytes
    return tuple([Total(kind, count[kind], size) for kind, size in nbytes.most_common()])


def summarize(
    rows: Iterable[Row],
    *,
    title: str,
    format: str,
    version: str,
    attrs: Mapping[Any, Any],
    dims: Mapping[str, int] | None = None,
    notes: Sequence[str] = (),
) -> str:
    """Write what tensors there are, folded, in at most 120 columns."""
    return render(
        new_summary(
            rows,
            title=title,
            format=format,
            version=version,
            attrs=attrs,
            dims=dims,
            notes=notes,
        )
    )


def summarize_index(index: Index) -> str:
    """Write what a file holds, folded, in at most 120 columns."""
    return render(index_summary(index))


def index_html(index: Index) -> str:
    """Write what a file holds as HTML for a notebook."""
    from xckpt.notebook import html

    return html.render(index_summary(index))


def index_summary(index: Index) -> Summary:
    """Sum up what a file holds."""
    summary = new_summary(
        _rows(index.tensors.values()),
        title=index.source,
        format=index.format,
        version=index.version,
        attrs=index.attrs,
        notes=[*_problems(index), *_warnings(index)],
        shards=len(index.shards),
    )
    return replace(summary, notes=(*summary.notes, *_unexplained(index, summary.nbytes)))


def _rows(tensors: Iterable[Tensor]) -> Iterator[Row]:
    """Return the row of each tensor, in one loop over its parts: there can be 100,000 of them."""
    for tensor in tensors:
        nbytes = 0
        plain = tensor.layout == "dense"
        for part in tensor.parts.values():
            nbytes += part.nbytes
            plain = plain and part.encoding is None
        storage = "" if plain else _storage(tensor)
        yield Row(tensor.name, tensor.dtype, tensor.shape, nbytes, tensor.size, storage)


def _storage(tensor: Tensor) -> str:
    return storage_words(tensor.layout, [part.encoding for part in tensor.parts.values()])


def storage_words(layout: str, encodings: Iterable[str | None]) -> str:
    """Name how a tensor is stored, for `Row.storage`."""
    # "zstd-seekable" is zstd with a table of its frames.
    compressions = [encoding.partition("-")[0] for encoding in encodings if encoding]
    return " ".join(dict.fromkeys([_STORAGE.get(layout, layout), *compressions])).strip()


def _problems(index: Index) -> list[str]:
    # The reason only: the whole message would show the path.
    problems = [
        f"{shown(tensor.name)}: {tensor.problem.reason}"
        for tensor in index.tensors.values()
        if tensor.problem is not None
    ]
    return _counted_first(problems, counted(len(problems), "tensor") + " cannot be read")


def _warnings(index: Index) -> list[str]:
    return _counted_first(index.warnings, counted(len(index.warnings), "warning"))


def _counted_first(messages: Sequence[str], fact: str) -> list[str]:
    """Say how many messages there are, and the first of them."""
    if not messages:
        return []
    return [f"{fact}: {messages[0]}" if len(messages) == 1 else f"{fact}, first: {messages[0]}"]


def _unexplained(index: Index, stored: int) -> list[str]:
    """Point at a file much larger or smaller than its tensors in sum."""
    if index.shards or not index.nbytes:
        return []
    size = binary_size(index.nbytes)
    if stored > index.nbytes:
        return [f"the file has {size} only: some tensors share their bytes"]
    unused = index.nbytes - stored
    if unused > _UNUSED_SHARE * index.nbytes and unused > _UNUSED_BYTES:
        return [f"the file has {size}: {binary_size(unused)} belong to no tensor"]
    return []
