"""Blocks as static HTML: a few kilobytes that look the same wherever a notebook is shown.

Untrusted notebooks, GitHub and nbviewer remove style sheets, scripts, SVG, ids and ARIA. Therefore
all style is inline, text and lines inherit their colours from a light or dark page, folding uses
`<details>`, and everything that is drawn is also there as text. A page of its own has the same
styles as classes, and a policy that forbids browsers to load or run anything.
"""

from __future__ import annotations

import re
from html import escape
from itertools import islice
from typing import TYPE_CHECKING

from xckpt.formatting import binary_size, share, word
from xckpt.notebook.documents import (
    LONGEST_SENTENCE,
    MOST_ITEMS,
    NAMES,
    NUMERIC,
    WIDEST_CELL,
    WIDEST_PART,
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
from xckpt.notebook.text import BREAK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from xckpt.notebook.documents import Block, Cell, Field

#: Colours of element types, with a contrast of at least 3:1 to white and to ``#111``. The last is
#: for all further types.
PALETTE = ("#2f81d6", "#d9731a", "#14958a", "#9a6bd6", "#c4528c", "#788794")
_EDGES = {"error": "#d1363f", "warning": "#d9731a", "exception": "#d9731a"}

_LINE = "1px solid #8886"
_CODE = "font:12px/1.5 Menlo,Consolas,monospace"
_LEFT, _FAINT = "padding:2px 6px;text-align:left", "font-weight:600;opacity:.72"
_WRAPPED = "overflow-wrap:break-word"
_STYLES = {
    "root": f"font:13px/1.5 system-ui,sans-serif;max-width:920px;{_WRAPPED}",
    "head": f"border-bottom:{_LINE};padding-bottom:5px",
    "muted": "opacity:.72",
    "line": "padding-top:4px",
    "hint": "padding-top:4px;opacity:.72",
    "mark": "padding-left:8px;margin-top:4px",
    "code": f"{_CODE};margin-left:6px;white-space:pre-wrap",
    "bar": "display:flex;height:9px;border-radius:3px;overflow:hidden;margin:8px 0 4px",
    "part": "display:inline-block;margin-right:20px",
    "scroll": "overflow-x:auto",
    "table": "border-collapse:collapse;margin:8px 0 4px;font-size:12.5px",
    "top": f"border-bottom:{_LINE}",
    "left": _LEFT,
    "right": "padding:2px 6px;text-align:right",
    "nowrap": f"{_LEFT};white-space:nowrap",
    "title": f"{_LEFT};{_FAINT}",
    "number": f"padding:2px 6px;text-align:right;{_FAINT}",
    "name": f"{_LEFT};{_CODE}",
    "names": f"{_LEFT};{_FAINT};min-width:15em",
    "drawn": "padding:0",
    "fold": "margin-top:2px",
    "click": "cursor:pointer",
    "list": f"{_CODE};margin:2px 0 4px 16px",
}
_NO_BREAK = "\xa0"
_REPEATED = re.compile(r"[^{}]*\{[\d.,…]+\}[./]")
_LONGEST_UNBROKEN = 20
_BAR_PIXELS = {"share": 40, "bar": 120}
_LONGEST_PIECE = 40
_MOST_PARTS = 8
_MOST_FOLDED_ROWS, _WIDEST_WORD = 8, 32

_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;max-width:1100px;margin:24px auto;padding:0 16px;"
    f"{_WRAPPED}}}"
    "h1{font-size:22px}h2{font-size:17px;margin-top:28px}"
    "figure{margin:12px 0}figure>*{max-width:100%;height:auto}"
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_PAGE = (
    '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
    f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    '<meta name="viewport" content="width=device-width,initial-scale=1">'
    '<meta name="color-scheme" content="light dark">'
)


def colors_of(kinds: Iterable[str]) -> dict[str, str]:
    """Return a colour for each element type, in the order of `PALETTE`."""
    return {kind: _color(place) for place, kind in enumerate(kinds)}


def _color(place: int) -> str:
    return PALETTE[min(place, len(PALETTE) - 1)]


def to_html(blocks: Iterable[Block]) -> str:
    """Return blocks as a fragment of HTML with inline styles."""
    blocks = list(blocks)
    first = blocks[0] if blocks else None
    label = ""
    if isinstance(first, Heading):
        facts = ", ".join(first.facts)
        label = f' role="group" aria-label="{_text(f"{first.label}: {facts}")}"'
    writer = _Writer({name: f' style="{style}"' for name, style in _STYLES.items()})
    return f"<div{label}{writer.style['root']}>{''.join(writer.lines(blocks))}</div>"


def to_page(blocks: Iterable[Block]) -> str:
    """Return blocks, which begin with a title, as a page, which is self-contained."""
    blocks = list(blocks)
    title = next(block.title for block in blocks if isinstance(block, Heading))
    style = _STYLE + "".join([f".{name}{{{style}}}" for name, style in _STYLES.items()])
    head = f"{_PAGE}<title>{_text(title)}</title><style>{style}</style></head>"
    lines = _Writer({name: f' class="{name}"' for name in _STYLES}).lines(blocks)
    return "\n".join([head, "<body>", *lines, "</body></html>\n"])


def _text(text: str, width: int = LONGEST_SENTENCE) -> str:
    return escape(word(text, width))


def _name(text: str) -> str:
    """Write a name that may break after dots, and within very long words."""
    pieces = [
        piece[start : start + _LONGEST_PIECE]
        for piece in BREAK.split(text)
        for start in range(0, len(piece), _LONGEST_PIECE)
    ]
    return "<wbr>".join(map(escape, pieces))


def _key(color: str) -> str:
    return f'<span style="color:{color}">■</span>{_NO_BREAK}'


class _Writer:
    """Writes the elements of a document with named styles."""

    def __init__(self, style: dict[str, str]) -> None:
        self.style = style

    def lines(self, blocks: Iterable[Block]) -> Iterator[str]:
        code: list[str] = []
        for block in blocks:
            if isinstance(block, Sentence) and block.kind == "code":
                code.append(_text(block.text))
                continue
            yield from self.code(code)
            yield "".join(_WRITERS[type(block)](self, block))
        yield from self.code(code)

    def code(self, lines: list[str]) -> Iterator[str]:
        """Write lines of code in one element, and empty the list."""
        if lines:
            text = "\n".join(lines)
            yield f"<div{self.style['code']}>{text}</div>"
            lines.clear()

    def muted(self, html: str) -> str:
        return f"<span{self.style['muted']}>{html}</span>" if html else ""

    def heading(self, heading: Heading) -> Iterator[str]:
        label = f"<b>{_text(heading.label)}</b>"
        facts = [
            _text(f) if f not in heading.minor else self.muted(_text(f)) for f in heading.facts
        ]
        if not heading.noun and not facts:
            yield f"<h{heading.level}>{_text(heading.title, WIDEST_CELL)}</h{heading.level}>"
            return
        yield f"<div{self.style['head']}>{' · '.join([label, *facts])}"
        yield f"<div>{_text(heading.phrase)}</div></div>" if heading.phrase else "</div>"

    def sentence(self, sentence: Sentence) -> Iterator[str]:
        severity, text = severity_of(sentence), escape(sentence_text(sentence))
        if severity or sentence.kind == "exception":
            color = _EDGES.get(sentence.kind, PALETTE[-1])
            label = f"<b>{escape(severity)}:</b> " if severity else ""
            edge = f"border-left:3px solid {color};{_STYLES['mark']}"
            yield f'<div style="{edge}">{label}{text}</div>'
        else:
            style = "hint" if sentence.kind == "hint" else "line"
            yield f"<div{self.style[style]}>{text}</div>"

    def bar(self, bar: Bar) -> Iterator[str]:
        """Draw the share of each part as a bar, and write it as text."""
        total = sum([part.nbytes for part in bar.parts])
        parts = list(enumerate(bar.parts[:_MOST_PARTS]))
        if total:
            yield f"<div{self.style['bar']}>"
            for n, part in parts:
                width = Share(part.nbytes, total).of(1000) / 10
                yield f'<span style="width:{width:g}%;background:{_color(n)}"></span>'
            yield "</div>"
        yield "<div>"
        for n, part in parts:
            label = f"{_text(part.label, WIDEST_PART)} {binary_size(part.nbytes)}"
            percent = self.muted(escape(share(part.nbytes, total)))
            yield f"<span{self.style['part']}>{_key(_color(n))}{label} {percent}</span> "
        yield self.muted(more(len(bar.parts) - _MOST_PARTS)) + "</div>"

    def folded(self, folded: Folded) -> Iterator[str]:
        yield from self.list(f"{folded.title} ({folded.total:,})", folded.items, folded.total)

    def list(
        self, title: str, items: Iterable[tuple[str, str]], count: int, most: int = MOST_ITEMS
    ) -> Iterator[str]:
        """Write pairs of a name and a value as a list that is folded at first."""
        yield f"<details{self.style['fold']}><summary{self.style['click']}>"
        yield f"{self.muted(_text(title))}</summary><div{self.style['list']}>"
        for name, value in islice(items, most):
            yield f"<b>{_text(name, _WIDEST_WORD)}</b> {_text(value, WIDEST_CELL)}<br>"
        yield f"{self.muted(more(count - most))}</div></details>"

    def picture(self, picture: Picture) -> Iterator[str]:
        if markup := picture.draw():
            label = _text(picture.caption)
            yield f'<figure role="img" aria-label="{label}">{markup}</figure>'

    # --- tables ----------------------------------------------------------------------------------

    def table(self, table: Table) -> Iterator[str]:
        fields, most = table.fields, table.most
        has_head = any(field.title for field in fields)
        if not has_head and fields[0].kind == "name":  # a few totals
            lines = []
            for row in table.rows:
                name, *texts = [_text(cell_text(c, f)) for c, f in zip(row, fields, strict=True)]
                lines.append(f"<b>{name}</b> {' · '.join(filter(None, texts))}")
            yield f"<div{self.style['muted']}>{'<br>'.join(lines)}</div>"
            return
        if table.rows:
            yield f"<div{self.style['scroll']}><table{self.style['table']}>"
            if has_head:
                head = "".join(map(self.head, fields))
                yield f"<thead><tr{self.style['top']}>{head}</tr></thead>"
            yield "<tbody>"
            for place, row in enumerate(table.rows[:most]):
                if len(row) < len(fields):
                    title = _text(str(row[0]))
                    yield f'<tr><th colspan="{len(fields)}"{self.style["title"]}>{title}</th></tr>'
                    continue
                color = _color(table.colors[place]) if table.colors else PALETTE[0]
                cells = [
                    self.cell(cell, field, color) for cell, field in zip(row, fields, strict=True)
                ]
                yield f"<tr>{''.join(cells)}</tr>"
            yield "</tbody></table></div>"
        folded = [] if most is None else table.rows[most:]
        if folded:
            items = []
            for row in folded[:_MOST_FOLDED_ROWS]:
                name, *texts = [cell_text(c, f) for c, f in zip(row, fields, strict=True)]
                items.append((name, ", ".join(filter(None, texts))))
            yield from self.list(
                table.rest.removeprefix("… "), items, len(folded), _MOST_FOLDED_ROWS
            )
        elif table.rest:
            yield from self.sentence(Sentence("hint", table.rest))

    def head(self, field: Field) -> str:
        if field.kind == "bar":
            return f"<td{self.style['drawn']}></td>"
        kind = "number" if field.kind in NUMERIC else "names" if field.kind in NAMES else "title"
        end = f"<td{self.style['drawn']}></td>" if field.kind == "share" else ""
        title = _text(field.title).replace(" ", _NO_BREAK)
        return f'<th scope="col"{self.style[kind]}>{title}</th>{end}'

    def cell(self, cell: Cell, field: Field, color: str) -> str:
        text, kind = cell_text(cell, field), field.kind
        drawn = ""
        if kind in _BAR_PIXELS:
            pixels = cell.of(_BAR_PIXELS[kind]) if isinstance(cell, Share) else 0
            box = f'<div style="width:{pixels}px;height:7px;background:{color}"></div>'
            drawn = f"<td{self.style['drawn']}>{box}</td>" if pixels else ""
            if kind == "bar":
                return drawn or "<td></td>"
        if kind in NAMES:
            inner = text.lstrip(" ")
            repeated = _REPEATED.match(inner) if kind == "pattern" else None
            cut = 0 if repeated is None else repeated.end()
            prefix = f"{self.muted(escape(inner[:cut]))}<wbr>" if cut else ""
            html = _NO_BREAK * (len(text) - len(inner)) + prefix + _name(inner[cut:])
            return f"<td{self.style['name']}>{html}</td>"
        html, style = escape(text), "right" if kind in NUMERIC else "left"
        if len(text) <= _LONGEST_UNBROKEN:
            html = html.replace(" ", _NO_BREAK)  # takes fewer bytes than a style
        elif kind != "text" and style == "left":
            style = "nowrap"
        key = _key(color) if kind == "key" else ""
        return f"<td{self.style[style]}>{key}{html}</td>{drawn}"


_WRITERS: dict[type, Callable[..., Iterable[str]]] = {
    Heading: _Writer.heading,
    Sentence: _Writer.sentence,
    Table: _Writer.table,
    Bar: _Writer.bar,
    Folded: _Writer.folded,
    Picture: _Writer.picture,
}
