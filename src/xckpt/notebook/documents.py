"""Documents: everything that is shown to people, as blocks.

A builder next to the thing that it shows returns blocks, with names and values as they are in the
file. `to_text`, `to_html` and `to_markdown` of the modules ``text``, ``html`` and ``markdown``
escape, shorten and lay them out. So a repr, a report and a command show the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from xckpt.formatting import binary_size, counted, figure, printable, share, shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

#: Widths of texts, in columns of a terminal.
WIDEST_CELL = 120
LONGEST_SENTENCE = 400
WIDEST_PART = 38  # of a bar
_LONGEST_LEAD = 600
_LEAST_DETAIL = 24
#: Names and values of a folded list to show, where a document cannot unfold it to all.
MOST_ITEMS = 24
#: Kinds of fields that are aligned at their ends.
NUMERIC = frozenset({"number", "count", "size", "share"})
#: Kinds of fields whose cells may have several lines.
WORDY = frozenset({"text", "key"})
#: Kinds of fields whose cells are names.
NAMES = frozenset({"name", "pattern", "tree"})
_PLAIN_KINDS = frozenset({"", "lead", "hint", "code", "exception"})


class Share(NamedTuple):
    """A part of a whole; integers, because a file can claim more than a float can represent."""

    part: int
    total: int

    def of(self, parts: int) -> int:
        """Return the share as a number of equal parts."""
        return self.part * parts // self.total if self.total else 0


Cell: TypeAlias = "str | float | Share | None"


class Heading(NamedTuple):
    """The title of a view, a section or a page, and facts about it.

    With a noun it is a view of an object, ``<Checkpoint m.zt>``, whose other blocks are indented.
    """

    title: str
    noun: str = ""
    facts: Sequence[str] = ()
    phrase: str = ""  # before the facts
    minor: Sequence[str] = ()  # facts that may make room for the title
    level: int = 2  # 1 for the title of a page

    @property
    def label(self) -> str:
        """The noun and the title."""
        return " ".join(filter(None, (self.noun, self.title)))


class Sentence(NamedTuple):
    """A sentence, or a line of code.

    The kind is ``""``, ``"lead"`` directly after a heading, ``"exception"``, ``"hint"``,
    ``"code"``, or a word that is shown before the text, such as ``"error"``.
    """

    kind: str
    text: str
    detail: str = ""  # in parentheses; cut rather than the text


class Field(NamedTuple):
    """A column of a table.

    The kind is ``"text"`` for sentences, ``"word"``, ``"status"``, ``"key"`` with the colour of the
    row, ``"name"``, ``"pattern"`` of names, ``"tree"`` for indented names, ``"number"``,
    ``"count"``, ``"size"`` in bytes, ``"share"`` or ``"bar"``.
    """

    title: str
    kind: str = "text"
    digits: int = 4
    is_optional: bool = False  # left out without a word if the table is too wide


class Table(NamedTuple):
    """Rows of cells; a row of a single cell is the title of the rows after it."""

    fields: Sequence[Field]
    rows: Sequence[Sequence[Cell]]
    rest: str = ""  # a sentence about rows that are not listed
    most: int | None = None  # number of listed rows; HTML folds the rows after them
    wanted: Sequence[str] = ()  # titles of fields that a narrow line shows before others
    colors: Sequence[int] = ()  # a colour for each row, as a place in the bar
    hidden: int = 0  # number of columns that the table does not show


class BarPart(NamedTuple):
    """A part of a bar."""

    label: str
    nbytes: int


class Bar(NamedTuple):
    """Parts of a size in bytes."""

    parts: Sequence[BarPart]


class Folded(NamedTuple):
    """A long list of names and values, folded or cut. There may be a million of them."""

    title: str
    items: Iterable[tuple[str, str]]
    total: int
    link: str = " "  # between name and value in lines of text
    most_lines: int = 2


class Picture(NamedTuple):
    """A picture for documents that can have one; `draw` returns HTML, or nothing."""

    draw: Callable[[], str]
    caption: str


Block: TypeAlias = Heading | Sentence | Table | Bar | Folded | Picture


# --- texts of all renderings ---------------------------------------------------------------------

_FORMATS: dict[str, Callable[[Any], str]] = {"count": "{:,}".format, "size": binary_size}


def cell_text(cell: Cell, field: Field) -> str:
    """Return the text of a cell, which is printable and short."""
    if isinstance(cell, str):
        width = LONGEST_SENTENCE if field.kind == "text" else WIDEST_CELL
        return shortened(printable(cell), width)
    if cell is None:
        return ""
    if isinstance(cell, Share):
        return "" if field.kind == "bar" else share(*cell)
    return _FORMATS[field.kind](cell) if field.kind in _FORMATS else figure(cell, field.digits)


def severity_of(sentence: Sentence) -> str:
    """Return the word before a sentence; empty for most sentences."""
    return "" if sentence.kind in _PLAIN_KINDS else printable(sentence.kind)


def sentence_text(sentence: Sentence, room: int = _LONGEST_LEAD) -> str:
    """Return a printable sentence without its severity; its detail takes the remaining room."""
    room = min(room, _LONGEST_LEAD if sentence.kind == "lead" else LONGEST_SENTENCE)
    text = shortened(printable(sentence.text), room)
    if not sentence.detail:
        return text
    detail = printable(sentence.detail)
    most = max(_LEAST_DETAIL, room - len(text) - len(" ()"))
    return f"{text} ({detail if len(detail) <= most else f'{detail[: most - 1]}…'})"


def more(count: int, noun: str = "", where: str = "") -> str:
    """Return how many things are not shown, and the call that shows them; empty for none."""
    if count <= 0:
        return ""
    number = counted(count, f"more {noun}") if noun else f"{count:,} more"
    return f"… {number}{': ' if where else ''}{where}"


def number_listed(count: int, most: int) -> int:
    """Return how many rows to list: the line "1 more" would take as much room as the last row."""
    return count if count <= most + 1 else most
