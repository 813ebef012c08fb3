"""Summaries of checkpoints as text and HTML, the explorer, and the IPython extension.

A summary needs only rows of metadata, never the bytes of tensors. The room may import the `Index`,
`labels`, and the modules below them, but neither Datasets nor files. Read `folding` first, which
turns names of tensors into patterns. `summary` builds on it, `views` makes blocks of a summary, and
`text`, `html` and `markdown` lay out the blocks of everything that is shown (`documents`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xckpt.index import Index, paused_collector, show_indexes_with

if TYPE_CHECKING:
    from xckpt.notebook.shown import View


def view_of_index(index: Index) -> View:
    """Return the summary of an Index."""
    from xckpt.notebook.shown import View
    from xckpt.notebook.summary import index_summary
    from xckpt.notebook.views import summary_blocks

    with paused_collector():
        return View(summary_blocks(index_summary(index)))


show_indexes_with(view_of_index)
