"""Names of tensors that a careless program would interpret."""

from __future__ import annotations

# Markup of consoles and of HTML, colours, a cleared screen, text that runs backwards, mathtext.
HOSTILE = (
    "[bold red]w[/]",
    "\x1b[31mred\x1b[2J",
    "abc\u202etxt.w",
    "line\nbreak\r\x07",
    "<img src=x onerror=alert(1)>",
    "$\\frac{a}{b}$_{c",
    ":smile: %s {0}",
    "_hidden",
)
