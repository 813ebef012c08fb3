"""Options that say what is read and how, and the files that are opened so."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from xckpt.errors import CheckpointWarning, shown
from xckpt.formats import names

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import xarray as xr

    from xckpt.index import Index

__all__ = [
    "Reading",
    "engine_type",
    "json_option",
    "pairs",
    "reading_options",
    "storage_options_option",
]

engine_type = click.Choice(names())

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document, for programs."
)


storage_options_option = click.option(
    "--storage-option",
    "storage_options",
    multiple=True,
    metavar="KEY=VALUE",
    callback=lambda _context, _parameter, texts: _json_values(pairs(texts)),
    help="For fsspec, as anon=true; a VALUE that is JSON is taken as such; may be repeated.",
)


@dataclass(frozen=True, slots=True)
class Reading:
    """What of a file is read, and how.

    Parameters
    ----------
    engine : str or None
        Format of the file; by default its content tells.
    tensors : tuple of str
        Globs of names; by default all.
    storage_options : dict
        For fsspec.
    """

    engine: str | None
    tensors: tuple[str, ...]
    storage_options: dict[str, Any]

    @property
    def wanted(self) -> list[str] | None:
        """The globs, None for all tensors."""
        return list(self.tensors) or None

    def index(self, file: str) -> Index:
        """Read what a file holds, of the chosen tensors."""
        from xckpt.labels.selection import closest, select
        from xckpt.opening import open_index

        source, index = open_index(file, self.engine, storage_options=self.storage_options or None)
        source.close()
        if not self.tensors:
            return index
        chosen = {name: index.tensors[name] for name in select(index.tensors, self.wanted)}
        if not chosen:
            alike = ", ".join(map(shown, closest(index.tensors, list(self.tensors))))
            hint = f"; similar names: {alike}" if alike else ""
            globs = " ".join(map(shown, self.tensors))
            raise click.UsageError(f"--tensors {globs} matches no tensor of {file}{hint}")
        return replace(index, tensors=chosen)

    def dataset(self, file: str) -> xr.Dataset:
        """Open the chosen tensors of a file."""
        import xarray as xr

        index = self.index(file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)  # they were shown just now
            return xr.open_dataset(
                file,
                engine=index.format,
                tensors=self.wanted,
                storage_options=self.storage_options or None,
            )


def reading_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command the options that make a `Reading`, which it gets as ``reading``."""

    @click.option(
        "--engine", type=engine_type, help="Format of what is read; by default its content tells."
    )
    @click.option("--tensors", multiple=True, metavar="GLOB", help="Only these; may be repeated.")
    @storage_options_option
    @wraps(command)
    def with_reading(
        engine: str | None, tensors: tuple[str, ...], storage_options: dict[str, Any], **others: Any
    ) -> Any:
        return command(reading=Reading(engine, tensors, storage_options), **others)

    return with_reading


def pairs(texts: Sequence[str]) -> dict[str, str]:
    """Split texts at their first equals sign."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise click.BadParameter(f"{text!r} is not KEY=VALUE")
        found[key.strip()] = value
    return found


def _json_values(texts: Mapping[str, str]) -> dict[str, Any]:
    """Read values that are JSON; others stay as they are."""
    values: dict[str, Any] = {}
    for key, text in texts.items():
        try:
            values[key] = json.loads(text)
        except ValueError:
            values[key] = text
    return values
