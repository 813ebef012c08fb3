"""Summaries of checkpoints as text and HTML, the explorer, and the IPython extension.

A summary needs only rows of metadata, never the bytes of tensors. The room may import the `Index`,
`labels`, and the modules below them, but neither Datasets nor files. Read `folding` first, which
turns names of tensors into patterns. `summary` builds on it; `text` and `html` render a summary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xckpt.index import paused_collector, show_indexes_with

if TYPE_CHECKING:
    from xckpt.index import Index

__all__ = ["index_html", "index_text"]


def index_text(index: Index) -> str:
    """Return the summary of an Index as text."""
    from xckpt.notebook.summary import index_summary
    from xckpt.notebook.text import render

    with paused_collector():
        return render(index_summary(index))


def index_html(index: Index) -> str:
    """Return the summary of an Index as HTML."""
    from xckpt.notebook.html import render
    from xckpt.notebook.summary import index_summary

    with paused_collector():
        return render(index_summary(index))


show_indexes_with(text=index_text, html=index_html)
