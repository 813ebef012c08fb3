"""The declarations of every format in the registry; a missing one is an error."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from xckpt import formats

if TYPE_CHECKING:
    from tests.contracts.declared import Declared


def declared(name: str) -> Declared:
    """Return what a format declares."""
    declaration: Declared = import_module(f"tests.contracts.{name}").DECLARED
    assert declaration.name == name
    return declaration


DECLARED = [declared(name) for name in formats.names()]
WRITTEN = [declared for declared in DECLARED if formats.get(declared.name).can.types]
