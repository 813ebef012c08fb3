"""Blocks as Markdown in the dialect of GitHub, without pictures."""

from __future__ import annotations

from itertools import groupby, islice
from typing import TYPE_CHECKING

from xckpt.formatting import binary_size, printable, share, shortened, word
from xckpt.notebook.documents import (
    LONGEST_SENTENCE,
    MOST_ITEMS,
    NAMES,
    NUMERIC,
    WIDEST_CELL,
    Bar,
    Folded,
    Heading,
    Picture,
    Sentence,
    Table,
    cell_text,
    more,
    sentence_text,
    severity_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from xckpt.notebook.documents import Block, Cell, Field

_ESCAPES = str.maketrans({character: f"\\{character}" for character in r"\`*_{}[]<>|~$&#@!"})


def to_markdown(blocks: Iterable[Block]) -> str:
    """Return blocks as a page, or a part of one."""
    return "\n\n".join(filter(None, (_WRITERS[type(block)](block) for block in blocks))) + "\n"


def _text(text: str, width: int = WIDEST_CELL) -> str:
    return shortened(printable(text), width).translate(_ESCAPES)


def _code(text: str) -> str:
    """Write a name as code, with table separators escaped."""
    if not text:
        return ""
    runs = [len(list(run)) for character, run in groupby(text) if character == "`"]
    fence = "`" * (max(runs, default=0) + 1)
    space = " " if text[0] in "` " or text[-1] in "` " else ""
    escaped = text.replace("|", r"\|")
    return f"{fence}{space}{escaped}{space}{fence}"


def _heading(heading: Heading) -> str:
    if not heading.noun and not heading.facts:
        return f"{'#' * heading.level} {_text(heading.title)}"
    facts = " · ".join([_text(fact) for fact in heading.facts])
    return "  \n".join(
        filter(
            None, (f"**{_text(heading.label)}** · {facts}", _text(heading.phrase, LONGEST_SENTENCE))
        )
    )


def _sentence(sentence: Sentence) -> str:
    text, severity = sentence_text(sentence), severity_of(sentence)
    if sentence.kind == "code":
        return _code(text)
    label = f"**{severity.translate(_ESCAPES)}:** " if severity else ""
    return label + text.translate(_ESCAPES)


def _bar(bar: Bar) -> str:
    total = sum([part.nbytes for part in bar.parts])
    items = [
        (part.label, f"{binary_size(part.nbytes)} {share(part.nbytes, total)}")
        for part in bar.parts
    ]
    return _list((f"{_text(word(name))} {_text(size)}" for name, size in items), len(items))


def _folded(folded: Folded) -> str:
    items = (_code(f"{word(n)}{folded.link}{word(v, WIDEST_CELL)}") for n, v in folded.items)
    return f"**{_text(folded.title)}:** {_list(items, folded.total)}"


def _list(items: Iterable[str], count: int) -> str:
    return " · ".join([*islice(items, MOST_ITEMS), *filter(None, [more(count - MOST_ITEMS)])])


def _table(table: Table) -> str:
    shown = [n for n, field in enumerate(table.fields) if field.kind != "bar"]
    fields = [table.fields[n] for n in shown]
    lines = [
        [_text(field.title) for field in fields],
        ["---:" if field.kind in NUMERIC else "---" for field in fields],
    ]
    for row in table.rows[: table.most]:
        if len(row) < len(table.fields):
            lines.append([f"**{_text(str(row[0]))}**", *[""] * (len(fields) - 1)])
        else:
            lines.append([_cell(row[n], field) for n, field in zip(shown, fields, strict=True)])
    text = "\n".join([f"| {' | '.join(cells)} |" for cells in lines]) if table.rows else ""
    return "\n\n".join(filter(None, (text, _text(table.rest, LONGEST_SENTENCE))))


def _cell(cell: Cell, field: Field) -> str:
    text = cell_text(cell, field)
    return _code(text.strip()) if field.kind in NAMES else text.translate(_ESCAPES)


def _nothing(_picture: Picture) -> str:
    return ""


_WRITERS: dict[type, Callable[..., str]] = {
    Heading: _heading,
    Sentence: _sentence,
    Table: _table,
    Bar: _bar,
    Folded: _folded,
    Picture: _nothing,
}
