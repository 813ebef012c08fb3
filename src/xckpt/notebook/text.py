"""Blocks as plain text, and as text with colours for a terminal; safe to print."""

from __future__ import annotations

import re
from itertools import zip_longest
from typing import TYPE_CHECKING

from xckpt.formatting import (
    binary_size,
    columns,
    line_width,
    printable,
    share,
    shortened,
    word,
    wrapped,
)
from xckpt.notebook.documents import (
    LONGEST_SENTENCE,
    NAMES,
    NUMERIC,
    WIDEST_CELL,
    WIDEST_PART,
    WORDY,
    Bar,
    Folded,
    Heading,
    Picture,
    Sentence,
    Share,
    Table,
    cell_text,
    more,
    sentence_text,
    severity_of,
)
from xckpt.notebook.short_names import apart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from xckpt.notebook.documents import Block, Cell, Field

#: The width of a line that no terminal breaks.
UNLIMITED = 1 << 20
_INDENT = _GAP = "  "
_DOT = " · "
_NARROWEST_NAME, _NARROWEST_SENTENCE = 30, 24
_MOST_LINES = 6  # of a sentence
_MOST_CELL_LINES = 12
_MOST_TITLE_LINES = 3
_ROOM_FOR_MORE = 20  # "… 1,234,567 more" and a separator
#: Places where a name may break: after slashes and dots, except the dots of "0..63".
BREAK = re.compile(r"(?<=[^.]\.)(?=[^.])|(?<=/)(?=.)")
_BAR_COLUMNS = 12
_EIGHTHS = " ▏▎▍▌▋▊▉"
_RED, _YELLOW, _BLUE, _BOLD = "31", "33", "34", "1"
#: Colours of severities and of statuses in a comparison.
_COLORS = {
    "error": f"{_BOLD};{_RED}",
    "warning": f"{_BOLD};{_YELLOW}",
    "info": f"{_BOLD};{_BLUE}",
    "changed": _YELLOW,
    **dict.fromkeys(("only_a", "only_b"), _RED),
    **dict.fromkeys(("shape", "unreadable"), f"{_BOLD};{_RED}"),
}


def to_text(blocks: Iterable[Block], width: int | None = None, *, is_terminal: bool = False) -> str:
    """Return blocks as lines, as wide as the terminal by default, with colours for a terminal."""
    return "\n".join(_Writer(line_width() if width is None else width, is_terminal).lines(blocks))


class _Writer:
    """Writes the lines of a document."""

    def __init__(self, width: int, is_terminal: bool) -> None:  # noqa: FBT001  private
        self.width = width
        self.is_terminal = is_terminal
        self.indent = ""

    def lines(self, blocks: Iterable[Block]) -> Iterator[str]:
        for block in blocks:
            yield from _WRITERS[type(block)](self, block)

    def styled(self, text: str, color: str) -> str:
        return f"\x1b[{color}m{text}\x1b[0m" if color and self.is_terminal else text

    def heading(self, heading: Heading) -> Iterator[str]:
        title = word(heading.title, LONGEST_SENTENCE)
        facts = [word(fact, LONGEST_SENTENCE) for fact in heading.facts]
        if heading.noun or facts:
            self.indent = _INDENT
        if not heading.noun:
            line = ": ".join(filter(None, (title, ", ".join(facts))))
            yield from wrapped(line, self.width, _MOST_LINES)
            return
        before = f"<{word(heading.noun)}{' ' if title else ''}"
        if heading.phrase:
            room = max(_NARROWEST_NAME, self.width // 3)
            line = f"{before}{shortened(title, room)}>{_GAP}{printable(heading.phrase)}"
            yield from wrapped(line, self.width, _MOST_TITLE_LINES)
            yield shortened(_INDENT + _DOT.join(facts), self.width)
            return
        minor = [word(fact) for fact in heading.minor if word(fact) in facts]
        line = f"{before}{title}>{_GAP}{_DOT.join(facts)}".rstrip()
        while minor and columns(line) > self.width:
            facts.remove(minor.pop())
            line = f"{before}{title}>{_GAP}{_DOT.join(facts)}"
        yield from wrapped(line, self.width, _MOST_TITLE_LINES)

    def sentence(self, sentence: Sentence) -> Iterator[str]:
        severity = severity_of(sentence)
        indent = "" if sentence.kind == "lead" else _INDENT if severity else self.indent
        room = self.width - len(indent)
        if sentence.kind == "code":
            yield indent + shortened(printable(sentence.text), room)
            return
        label = f"{severity}: " if severity else ""
        text = sentence_text(sentence, room * (_MOST_LINES - 1) - len(label))
        lines = wrapped(label + text, room, _MOST_LINES, "" if sentence.kind == "lead" else _INDENT)
        for line in lines:
            remaining = line.removeprefix(severity)
            start = self.styled(severity, _COLORS.get(severity, "")) if remaining != line else ""
            yield indent + start + remaining
            severity = ""

    def folded(self, folded: Folded) -> Iterator[str]:
        label, total = f"{word(folded.title)}: ", folded.total
        items = (f"{word(n)}{folded.link}{word(v, WIDEST_CELL)}" for n, v in folded.items)
        yield from self.packed(label, items, total, folded.most_lines, _DOT)

    def bar(self, bar: Bar) -> Iterator[str]:
        total = sum([part.nbytes for part in bar.parts])
        items = []
        for part in bar.parts:
            percent = share(part.nbytes, total)
            size = f" {binary_size(part.nbytes)} ({percent})" if percent else ""
            items.append(word(part.label, WIDEST_PART) + size)
        yield from self.packed("", items, len(items), 2, "   ")

    def packed(
        self, label: str, items: Iterable[str], count: int, most_lines: int, separator: str
    ) -> Iterator[str]:
        """Pack items into lines, as many as fit, and count the others."""
        room = self.width - len(self.indent) - len(label)
        lines: list[str] = []
        for placed, item in enumerate(items):
            text = shortened(item, room - _ROOM_FOR_MORE)
            spare = _ROOM_FOR_MORE if len(lines) == most_lines else 0
            if lines and columns(lines[-1] + separator + text) <= room - spare:
                lines[-1] += separator + text
            elif len(lines) < most_lines:
                lines.append(text)
            else:
                lines[-1] += separator + more(count - placed)
                break
        for line in lines:
            yield self.indent + label + line
            label = " " * len(label)

    # --- tables ----------------------------------------------------------------------------------

    def table(self, table: Table) -> Iterator[str]:
        fields, rows = table.fields, table.rows[: table.most]
        cells = [[self._cell(c, f) for c, f in zip(row, fields, strict=False)] for row in rows]
        # Patterns and their sizes need no titles in lines of text.
        has_titles = fields[0].kind != "pattern"
        titles = [word(field.title, WIDEST_CELL) if has_titles else "" for field in fields]
        whole = [titles, *[row for row in cells if len(row) == len(fields)]]
        widths = [max(map(columns, texts)) for texts in zip(*whole, strict=True)]
        fitting = _fitting(table, widths, self.width - len(self.indent))
        if rows:
            if fields[0].kind == "name" and widths[0] > fitting[0]:
                labels = apart([row[0] for row in cells], fitting[0])
                cells = [[label, *row[1:]] for label, row in zip(labels, cells, strict=True)]
            if any(titles):
                yield from self._row(titles, fields, fitting, is_head=True)
            if any(titles) and self.is_terminal:
                yield self.indent + "─" * (sum(fitting.values()) + len(_GAP) * (len(fitting) - 1))
            for row in cells:
                if len(row) == len(fields):
                    yield from self._row(row, fields, fitting)
                else:
                    yield self.indent + shortened(row[0], self.width - len(self.indent))
        left_out = [f for n, f in enumerate(fields) if n not in fitting and not f.is_optional]
        hidden = [field.title for field in left_out if field.title]
        others = [f"{table.hidden:,} more columns"] if table.hidden else []
        narrow = f"too narrow for {', '.join([*hidden, *others])}" if hidden and rows else ""
        for line in filter(None, (table.rest, narrow)):
            yield from self.sentence(Sentence("hint", line))

    @staticmethod
    def _cell(cell: Cell, field: Field) -> str:
        if field.kind != "bar" or not isinstance(cell, Share):
            return cell_text(cell, field)
        whole, eighths = divmod(cell.of(8 * _BAR_COLUMNS), 8)
        return ("█" * whole + _EIGHTHS[eighths]).rstrip()

    def _row(
        self,
        texts: Sequence[str],
        fields: Sequence[Field],
        fitting: dict[int, int],
        *,
        is_head: bool = False,
    ) -> Iterator[str]:
        """Write a row, whose cells may have several lines."""
        cells = [_broken(texts[n], width, fields[n].kind) for n, width in fitting.items()]
        for parts in zip_longest(*cells, fillvalue=""):
            line = []
            for text, (n, width) in zip(parts, fitting.items(), strict=True):
                padding = " " * (width - columns(text))
                color = _COLORS.get(text, "") if fields[n].kind == "status" else ""
                styled = self.styled(text, _BOLD if is_head and text else color)
                is_right = fields[n].kind in NUMERIC
                line.append(padding + styled if is_right else styled + padding)
            yield (self.indent + _GAP.join(line)).rstrip()


def _fitting(table: Table, widths: Sequence[int], room: int) -> dict[int, int]:
    """Return the widths of the columns that fit into a line, in their order."""
    fields = table.fields
    all_columns = list(range(1, len(fields)))
    if sum(widths) + len(_GAP) * len(all_columns) > room:
        all_columns = [n for n in all_columns if not fields[n].is_optional]
    wanted = {title: position for position, title in enumerate(dict.fromkeys(table.wanted))}
    # Without a wish, sentences come last: they take the room that is there.
    order = sorted(
        all_columns,
        key=lambda n: (wanted.get(fields[n].title, len(wanted)), fields[n].kind in WORDY, n),
    )
    least = min(widths[0], _NARROWEST_NAME)
    spare = room - least
    fitting = {}
    for n in order:
        most = spare - len(_GAP)
        if widths[n] > most and not (fields[n].kind in WORDY and most >= _NARROWEST_SENTENCE):
            break
        fitting[n] = min(widths[n], most)
        spare -= fitting[n] + len(_GAP)
    return dict(sorted({**fitting, 0: min(widths[0], least + spare)}.items()))


def _broken(text: str, width: int, kind: str) -> list[str]:
    """Break the text of a cell into lines: names after dots, sentences between words."""
    if columns(text) <= width:
        return [text]
    if kind not in NAMES:
        return wrapped(text, width, _MOST_CELL_LINES, indent="")
    lines = [""]
    for piece in BREAK.split(text):
        if lines[-1].strip() and columns(lines[-1] + piece) > width:
            lines.append(_INDENT)
        lines[-1] = shortened(lines[-1] + piece, width)
    return lines


def _nothing(_writer: _Writer, _picture: Picture) -> tuple[str, ...]:
    return ()


_WRITERS: dict[type, Callable[..., Iterable[str]]] = {
    Heading: _Writer.heading,
    Sentence: _Writer.sentence,
    Table: _Writer.table,
    Bar: _Writer.bar,
    Folded: _Writer.folded,
    Picture: _nothing,
}
