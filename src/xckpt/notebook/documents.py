"""Reports as documents: headings, sentences, tables, pictures and summaries, as HTML or Markdown.

Both are self-contained: they request nothing and run nothing. Markup in names and sentences from
files is escaped, and the policy of an HTML page forbids browsers to load or run anything.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from xckpt.formatting import printable, shortened
from xckpt.notebook import html, text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.notebook.summary import Summary

_WIDEST_CELL = 120
_LONGEST_SENTENCE = 400

_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;max-width:1100px;margin:24px auto;padding:0 16px}"
    "h1{font-size:22px}h2{font-size:17px;margin-top:28px}p{overflow-wrap:anywhere}"
    ".t{overflow-x:auto}.t table{border-collapse:collapse;font-size:13px}"
    ".t th,.t td{padding:2px 10px 2px 0;text-align:left;vertical-align:top}"
    ".t th{border-bottom:1px solid rgba(128,128,128,.5);font-weight:600}"
    ".t .n{text-align:right;white-space:nowrap}"
    ".t code{font:12px/1.5 Menlo,Consolas,monospace}"
    ".t td:has(code){min-width:26em}"
    "figure{margin:12px 0}figure>*{max-width:100%;height:auto}"
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_HEAD = (
    '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
    f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    '<meta name="viewport" content="width=device-width,initial-scale=1">'
    '<meta name="color-scheme" content="light dark">'
)
_MARKUP = re.compile(r"([\\`*_{}\[\]<>|~$&#@!])")


class Field(NamedTuple):
    """A column of a table: its title, and the kind of its cells."""

    title: str
    kind: str = "text"  # or "name", which is written as code, or "number"


class Document(ABC):
    """Base class of reports, which are written from beginning to end."""

    _heading: str
    _paragraph: str

    def __init__(self) -> None:
        self.title = ""
        self._pieces: list[str] = []

    def heading(self, title: str) -> None:
        """Begin a section."""
        self._pieces.append(self._heading.format(self._text(title)))

    def paragraph(self, sentence: str) -> None:
        """Add a sentence or two."""
        self._pieces.append(self._paragraph.format(self._text(sentence, _LONGEST_SENTENCE)))

    def table(self, fields: Sequence[Field], rows: Sequence[Sequence[str]]) -> None:
        """Add a table of cells with text."""
        table = []
        for row in rows:
            cells = []
            for cell, field in zip(row, fields, strict=True):
                width = _LONGEST_SENTENCE if field.kind == "text" else _WIDEST_CELL
                is_code = field.kind == "name"
                cells.append(self._code(cell) if is_code else self._text(cell, width))
            table.append(cells)
        self._table(fields, table)

    @abstractmethod
    def summary(self, summary: Summary) -> None:
        """Add the summary of a checkpoint."""

    def picture(self, markup: str, caption: str) -> None:  # noqa: B027  Markdown has none
        """Add an image or a drawing as HTML, if the document can have one."""

    @abstractmethod
    def finish(self) -> str:
        """Return the whole document as text."""

    @abstractmethod
    def _text(self, content: str, width: int = _WIDEST_CELL) -> str: ...

    @abstractmethod
    def _code(self, name: str) -> str: ...

    @abstractmethod
    def _table(self, fields: Sequence[Field], rows: Sequence[Sequence[str]]) -> None: ...


class HtmlDocument(Document):
    """A page of HTML."""

    _heading = "<h2>{}</h2>"
    _paragraph = "<p>{}</p>"

    def _text(self, content: str, width: int = _WIDEST_CELL) -> str:
        return escape(shortened(printable(content), width))

    def _code(self, name: str) -> str:
        """Return a name as code, with breaks allowed after dots and slashes, and in long words."""
        short = shortened(printable(name), _WIDEST_CELL)
        return f"<code>{html.breaking(short)}</code>" if name else ""

    def summary(self, summary: Summary) -> None:
        """See `Document.summary`."""
        self._pieces.append(html.render(summary))

    def _table(self, fields: Sequence[Field], rows: Sequence[Sequence[str]]) -> None:
        styles = [' class="n"' if field.kind == "number" else "" for field in fields]
        titles = [self._text(field.title) for field in fields]
        pairs = zip(titles, styles, strict=True)
        head = "".join(f'<th scope="col"{style}>{title}</th>' for title, style in pairs)
        lines = [
            "".join(f"<td{style}>{cell}</td>" for cell, style in zip(row, styles, strict=True))
            for row in rows
        ]
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        self._pieces.append(
            f'<div class="t"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )

    def picture(self, markup: str, caption: str) -> None:
        """See `Document.picture`."""
        label = escape(printable(caption))
        self._pieces.append(f'<figure role="img" aria-label="{label}">{markup}</figure>')

    def finish(self) -> str:
        """See `Document.finish`."""
        title = self._text(self.title)
        head = f"{_HEAD}<title>{title}</title><style>{_STYLE}</style></head>"
        return "\n".join([head, f"<body><h1>{title}</h1>", *self._pieces, "</body></html>\n"])


class MarkdownDocument(Document):
    """A page of Markdown in the dialect of GitHub, without pictures."""

    _heading = "## {}"
    _paragraph = "{}"

    def _text(self, content: str, width: int = _WIDEST_CELL) -> str:
        return _MARKUP.sub(r"\\\1", shortened(printable(content), width))

    def _code(self, name: str) -> str:
        """Return a name as code, with all markup escaped, table separators included."""
        content = shortened(printable(name), _WIDEST_CELL)
        if not content:
            return ""
        fence = "`" * (_longest_run(content) + 1)
        space = " " if content[0] in "` " or content[-1] in "` " else ""
        escaped = content.replace("|", r"\|")
        return f"{fence}{space}{escaped}{space}{fence}"

    def summary(self, summary: Summary) -> None:
        """See `Document.summary`."""
        lines = text.render(summary)
        fence = "`" * max(3, _longest_run(lines) + 1)
        self._pieces.append(f"{fence}text\n{lines}\n{fence}")

    def _table(self, fields: Sequence[Field], rows: Sequence[Sequence[str]]) -> None:
        titles = [self._text(field.title) for field in fields]
        marks = ["---:" if field.kind == "number" else "---" for field in fields]
        lines = [f"| {' | '.join(cells)} |" for cells in (titles, marks, *rows)]
        self._pieces.append("\n".join(lines))

    def finish(self) -> str:
        """See `Document.finish`."""
        return "\n\n".join([f"# {self._text(self.title)}", *self._pieces]) + "\n"


def _longest_run(content: str) -> int:
    """Return the length of the longest run of backticks."""
    return max(map(len, re.findall("`+", content)), default=0)
