"""Options of formats and their types."""

from __future__ import annotations

from xckpt import formats
from xckpt.writing import FormatOptions


def test_every_option_of_a_format_has_a_type() -> None:
    every = {option for name in formats.names() for option in formats.get(name).write_options}
    assert every == set(FormatOptions.__annotations__)
