"""Objects that show themselves as blocks, in a notebook and a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xckpt.notebook.documents import Block


class Shown:
    """Base class of objects that show themselves as blocks."""

    __slots__ = ()

    def _blocks(self) -> list[Block]:
        raise NotImplementedError

    def __repr__(self) -> str:
        from xckpt.notebook.text import to_text

        return to_text(self._blocks())

    def _repr_html_(self) -> str:
        from xckpt.notebook.html import to_html

        return to_html(self._blocks())


class View(Shown):
    """Blocks that show themselves in a notebook and a terminal."""

    def __init__(self, blocks: list[Block]) -> None:
        self._shown = blocks

    def _blocks(self) -> list[Block]:
        return self._shown
