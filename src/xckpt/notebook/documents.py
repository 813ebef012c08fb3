"""Reports as documents: headings, sentences, tables, pictures and summaries, as HTML or Markdown.

Both hold all that they show: nothing is requested, nothing runs. What names and sentences from
files have of markup is escaped, and a page of HTML forbids its reader to load or run anything.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from xckpt.notebook import html, text
from xckpt.notebook.formatting import printable, shortened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.notebook.summary import Summary

__all__ = ["Document", "Field", "HtmlDocument", "MarkdownDocument"]

_WIDEST_CELL = 120
_LONGEST_SENTENCE = 400

_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;max-width:1100px;margin:24px auto;padding:0 16px}"
    "h1{font-size:22px}h2{font-size:17px;margin-top:28px}p{overflow-wrap:anywhere}"
    ".t{overflow-x:auto}.t table{border-collapse:collapse;font-size:13px}"
    ".t th,.t td{padding:2px 10px 2px 0;text-align:left;vertical-align:top}"
    ".t th{border-bottom:1px solid rgba(128,128,128,.5);font-weight:600}"
    ".t .n{text-align:right;white-space:nowrap}"
    ".t code{font:12px/1.5 Menlo,Consolas,monospace;overflow-wrap:anywhere}"
    ".t td:has(code){min-width:20em}"
    "figure{margin:12px 0}figure>*{max-width:100%;height:auto;background:#fff}"
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
    """A column of a table: its title, and what it has, which says how that is written."""

    title: str
    kind: str = "text"  # or "name", which is code, or "number"


class Document(ABC):
    """What a report is written to, from its beginning to its end."""

    def __init__(self) -> None:
        self.title = ""
        self._pieces: list[str] = []

    @abstractmethod
    def heading(self, title: str) -> None:
        """Begin a section."""

    @abstractmethod
    def paragraph(self, sentence: str) -> None:
        """Add a sentence or two."""

    @abstractmethod
    def summary(self, summary: Summary) -> None:
        """Add what a checkpoint holds."""

    @abstractmethod
    def table(self, fields: Sequence[Field], rows: Sequence[Sequence[str]]) -> None:
        """Add a table of texts."""

    def picture(self, markup: str, caption: str) -> None:  # noqa: B027  Markdown has none
        """Add an image or a drawing, which is HTML, where there can be one."""

    @abstractmethod
    def finish(self) -> str:
        """Return all of it."""


class HtmlDocument(Document):
    """A page of HTML."""

    def heading(self, title: str) -> None:
        """See `Document.heading`."""
        self._pieces.append(f"<h2>{_html(title)}</h2>")

    def paragraph(self, sentence: str) -> None:
        """See `Document.paragraph`."""
        self._pieces.append(f"<p>{_html(sentence, _LONGEST_SENTENCE)}</p>")

    def summary(self, summary: Summary) -> None:
        """See `Document.summary`."""
        self._pieces.append(html.render(summary))

    def table(self, fields: Sequence[Field], rows: Sequence[Sequence[str]]) -> None:
        """See `Document.table`."""
        style = ' class="n"'
        styles = [style if field.kind == "number" else "" for field in fields]
        pairs = zip(fields, styles, strict=True)
        head = [f'<th scope="col"{style}>{_html(field.title)}</th>' for field, style in pairs]
        body = []
        for row in rows:
            cells = []
            for cell, field, style in zip(row, fields, styles, strict=True):
                width = _LONGEST_SENTENCE if field.kind == "text" else _WIDEST_CELL
                written = _html(cell, width)
                is_code = field.kind == "name" and written
                cells.append(f"<td{style}>{f'<code>{written}</code>' if is_code else written}</td>")
            body.append(f"<tr>{''.join(cells)}</tr>")
        self._pieces.append(
            f'<div class="t"><table><thead><tr>{"".join(head)}</tr></thead>'
            f"<tbody>{''.join(body)}</tbody></table></div>"
        )

    def picture(self, markup: str, caption: str) -> None:
        """See `Document.picture`."""
        label = escape(printable(caption))
        self._pieces.append(f'<figure role="img" aria-label="{label}">{markup}</figure>')

    def finish(self) -> str:
        """See `Document.finish`."""
        title = _html(self.title)
        head = f"{_HEAD}<title>{title}</title><style>{_STYLE}</style></head>"
        return "\n".join([head, f"<body><h1>{title}</h1>", *self._pieces, "</body></html>\n"])


class MarkdownDocument(Document):
    """A page of Markdown, as GitHub reads it; it has no pictures."""

    def heading(self, title: str) -> None:
        """See `Document.heading`."""
        self._pieces.append(f"## {_markdown(title)}")

    def paragraph(self, sentence: str) -> None:
        """See `Document.paragraph`."""
        self._pieces.append(_markdown(sentence, _LONGEST_SENTENCE))

    def summary(self, summary: Summary) -> None:
        """See `Document.summary`."""
        lines = text.render(summary)
        fence = "`" * max(3, _longest_run(lines) + 1)
        self._pieces.append(f"{fence}text\n{lines}\n{fence}")

    def table(self, fields: Sequence[Field], rows: Sequence[Sequence[str]]) -> None:
        """See `Document.table`."""
        lines = [
            [_markdown(field.title) for field in fields],
            ["---:" if field.kind == "number" else "---" for field in fields],
        ]
        for row in rows:
            cells = []
            for cell, field in zip(row, fields, strict=True):
                width = _LONGEST_SENTENCE if field.kind == "text" else _WIDEST_CELL
                cells.append(_code(cell) if field.kind == "name" else _markdown(cell, width))
            lines.append(cells)
        self._pieces.append("\n".join(f"| {' | '.join(cells)} |" for cells in lines))

    def finish(self) -> str:
        """See `Document.finish`."""
        return "\n\n".join([f"# {_markdown(self.title)}", *self._pieces]) + "\n"


def _html(content: str, width: int = _WIDEST_CELL) -> str:
    return escape(shortened(printable(content), width))


def _markdown(content: str, width: int = _WIDEST_CELL) -> str:
    return _MARKUP.sub(r"\\\1", shortened(printable(content), width))


def _code(name: str) -> str:
    """Write a name so that nothing in it is markup, not even of the table that it is in."""
    content = shortened(printable(name), _WIDEST_CELL)
    if not content:
        return ""
    fence = "`" * (_longest_run(content) + 1)
    space = " " if content[0] in "` " or content[-1] in "` " else ""
    escaped = content.replace("|", r"\|")
    return f"{fence}{space}{escaped}{space}{fence}"


def _longest_run(content: str) -> int:
    """Return how many backticks follow each other, at most."""
    return max(map(len, re.findall("`+", content)), default=0)
