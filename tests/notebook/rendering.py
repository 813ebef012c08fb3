"""Summaries as text and as HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xckpt.notebook.html import to_html
from xckpt.notebook.text import to_text
from xckpt.notebook.views import summary_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.notebook.summary import Summary


def render_text(summary: Summary) -> str:
    return to_text(summary_blocks(summary))


def render_html(summary: Summary, calls: Sequence[str] = ()) -> str:
    return to_html(summary_blocks(summary, calls))
