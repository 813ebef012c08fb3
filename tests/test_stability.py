"""Public names, keywords and defaults equal those of `public_surface.txt`.

After a deliberate change: ``python -m tests.test_stability > tests/public_surface.txt``
"""

from __future__ import annotations

import inspect
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xckpt
from xckpt.accessor import CheckpointAccessor
from xckpt.backend import CheckpointBackend
from xckpt.cli import commands
from xckpt.plots import Plots

if TYPE_CHECKING:
    from collections.abc import Iterator

SURFACE = Path(__file__).with_name("public_surface.txt")


def parameters(function: Any) -> str:
    """Return the names, kinds and defaults of parameters."""
    signature = inspect.signature(function)
    plain = [
        p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name != "self"
    ]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


def members(name: str, cls: type) -> Iterator[str]:
    """Yield the public methods and properties of a class."""
    for member in sorted(vars(cls)):
        if not member.startswith("_"):
            value = getattr(cls, member)
            yield f"{name}.{member}{parameters(value) if callable(value) else ''}"


def surface() -> Iterator[str]:
    """Yield what users can name: functions, methods, engines, commands and options."""
    for name in sorted(xckpt.__all__):
        value = getattr(xckpt, name)
        if inspect.isfunction(value):
            yield f"xckpt.{name}{parameters(value)}"
        else:
            yield f"xckpt.{name}"
    yield from members("ds.ckpt", CheckpointAccessor)
    yield from members("ds.ckpt.plot", Plots)
    engines = entry_points(group="xarray.backends")
    for entry in sorted(engines, key=lambda entry: entry.name):
        if not entry.value.startswith("xckpt."):
            continue
        backend = entry.load()()
        assert isinstance(backend, CheckpointBackend)
        yield f"engine {entry.name}: {', '.join(backend.open_dataset_parameters)}"
    for name, command in sorted(commands.commands.items()):
        options = [option for parameter in command.params for option in parameter.opts]
        yield f"xckpt {name} {' '.join(options)}"


def test_the_public_surface_is_unchanged() -> None:
    expected = SURFACE.read_text("utf-8").splitlines()
    assert list(surface()) == expected, f"if this is deliberate: {__doc__}"


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in surface())
