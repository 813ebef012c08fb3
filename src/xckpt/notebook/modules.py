"""The modules of a checkpoint as a tree of lines, and its sizes as a table."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from xckpt.labels.stacking import numbered
from xckpt.notebook.folding import fold, indices_text
from xckpt.notebook.formatting import binary_size, columns, counted, printable, shortened
from xckpt.notebook.words import shapes_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pandas as pd

    from xckpt.notebook.folding import Row

__all__ = ["ModuleTree", "sizes_table"]

_MOST_LINES = 300
_WIDEST_NAME = 60


@dataclass(slots=True)
class _Node:
    """A module, or numbered modules side by side."""

    count: int = 0
    nbytes: int = 0
    indices: set[str] = field(default_factory=set)
    children: dict[str | None, _Node] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        self.count += 1
        self.nbytes += row.nbytes


class ModuleTree:
    """The modules of a checkpoint, numbered ones folded, with what is in them.

    Parameters
    ----------
    rows : iterable of Row
        Its tensors.
    depth : int
        How many levels are shown.

    Examples
    --------
    >>> ds.ckpt.tree(depth=3)  # doctest: +SKIP
    model                   134 tensors   14.0 MiB
      embed_tokens            2 tensors    2.2 MiB
      layers                120 tensors   11.8 MiB
        {0..11}             120 tensors   11.8 MiB
    """

    def __init__(self, rows: Iterable[Row], depth: int) -> None:
        self._root = _Node()
        for row in rows:
            node = self._root
            parts = row.name.split(".")[:depth]
            for part, word in zip(parts, numbered(parts).template, strict=True):
                node = node.children.setdefault(word, _Node())
                node.add(row)
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


def _lines(node: _Node, level: int) -> Iterator[tuple[str, str, str]]:
    for key, child in node.children.items():
        name = indices_text(child.indices) if key is None else printable(key)
        short = shortened(name, _WIDEST_NAME)
        yield "  " * level + short, counted(child.count, "tensor"), binary_size(child.nbytes)
        yield from _lines(child, level + 1)


def sizes_table(rows: Iterable[Row], by: Literal["pattern", "dtype", "layer"]) -> pd.DataFrame:
    """Sum tensors up, largest first."""
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
            total = totals.setdefault(row.dtype if by == "dtype" else _layer(row.name), [0, 0, 0])
            total[0] += 1
            total[1] += row.size
            total[2] += row.nbytes
        frame = pd.DataFrame(
            list(totals.values()),
            index=pd.Index(list(totals), name=by, dtype=object),
            columns=["tensors", "parameters", "nbytes"],
        )
    else:
        raise ValueError(f"by is 'pattern', 'dtype' or 'layer', not {by!r}")
    whole: Any = max(1, frame["nbytes"].sum())
    frame["share"] = frame["nbytes"] / whole
    return frame.sort_values("nbytes", ascending=False, kind="stable")


def _layer(name: str) -> str:
    """Return a name up to its first number; empty where there is none."""
    parts = name.split(".")
    template = numbered(parts).template
    return ".".join(parts[: template.index(None) + 1]) if None in template else ""
