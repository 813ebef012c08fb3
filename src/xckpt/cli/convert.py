"""``xckpt convert``: a file becomes one of another format."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from xckpt.cli.files import Reading, engine_type, json_option, pairs, reading_options
from xckpt.cli.output import complain, is_terminal, print_document
from xckpt.errors import CheckpointError
from xckpt.notebook.formatting import binary_size, counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.formats import Format
    from xckpt.index import Index

__all__ = ["convert"]


@click.command
@click.argument("file")
@click.argument("new")
@click.option("--to", type=engine_type, help="Format of NEW; by default its ending tells.")
@click.option("--compression", metavar="NAME", help="Such as zstd or deflate, or none.")
@click.option("--level", metavar="N", help="Of the compression, 1 to 22.")
@click.option("--digest", metavar="NAME", help="Such as crc32c or sha256, or none.")
@click.option("--dtype", metavar="TYPE", help="Element type of all tensors.")
@click.option(
    "--encode",
    "encodings",
    nargs=2,
    multiple=True,
    metavar="GLOB KEY=VALUE,...",
    help="The same for some tensors, as '*.bias' dtype=float32,compression=none; may be repeated.",
)
@click.option(
    "--cast",
    type=click.Choice(["exact", "allow", "never"]),
    default="exact",
    show_default=True,
    help="What changes of element types may lose: nothing, precision; or there are none.",
)
@click.option(
    "--option",
    "texts",
    multiple=True,
    metavar="KEY=VALUE",
    help="Of the new format's own, as version=2; may be repeated.",
)
@click.option("--overwrite", is_flag=True, help="Replace NEW if it is there.")
@reading_options
@json_option
def convert(
    file: str,
    new: str,
    reading: Reading,
    *,
    to: str | None,
    encodings: tuple[tuple[str, str], ...],
    cast: Any,
    texts: tuple[str, ...],
    overwrite: bool,
    as_json: bool,
    **requests: str | None,
) -> int:
    """Write FILE in another format, or anew in its own.

    Values, names, attributes, compression and digests are kept as far as the new format has
    them; what it has not is told. NEW appears when it is complete. FILE may be larger than
    memory.
    """
    from xckpt.opening import read_index
    from xckpt.writing import convert as write

    index = reading.index(file)
    wanted = {"encoding": _encoding(requests, encodings), "cast": cast, "overwrite": overwrite}
    storage_options = reading.storage_options or None
    try:
        wanted |= _format_options(pairs(texts), _writer(new, to))
        write(
            file,
            new,
            to,
            tensors=reading.wanted,
            storage_options=storage_options,
            progress=is_terminal(),
            **wanted,
        )
    except FileExistsError as error:
        raise click.UsageError(f"{new} is there already; --overwrite replaces it") from error
    except CheckpointError:
        raise
    except ValueError as error:  # an option has a value that it may not have
        raise click.UsageError(str(error)) from error
    _report(index, read_index(new, storage_options=storage_options), as_json=as_json)
    return 0


def _report(old: Index, new: Index, *, as_json: bool) -> None:
    if not as_json:
        count, size = counted(len(new.tensors), "tensor"), binary_size(new.nbytes)
        complain(f"{new.source}: {new.format}, {count}, {size}")
        return
    print_document(
        {
            "source": old.source,
            "destination": new.source,
            "format": new.format,
            "version": new.version,
            "nbytes": new.nbytes,
            "tensors": len(new.tensors),
        }
    )


def _encoding(
    requests: Mapping[str, str | None], encodings: tuple[tuple[str, str], ...]
) -> dict[str, dict[str, Any]]:
    """Join what is asked for all tensors, and for some."""
    for_all = {key: text for key, text in requests.items() if text is not None}
    asked = [("*", for_all)] if for_all else []
    asked += [(glob, pairs(text.split(","))) for glob, text in encodings]
    encoding: dict[str, dict[str, Any]] = {}
    for glob, texts in asked:
        encoding.setdefault(glob, {}).update(
            {key: _encoded(key, text) for key, text in texts.items()}
        )
    return encoding


def _encoded(key: str, text: str) -> Any:
    if key == "level":
        return _whole_number(key, text)
    return None if text == "none" else text


def _writer(new: str, engine: str | None) -> Format:
    from xckpt.writing.destination import Destination

    try:
        destination = Destination.of(
            new,
            engine,
            encoding=None,
            cast="exact",
            overwrite=False,
            storage_options=None,
            format_options={},
        )
    except ValueError as error:
        reason = str(error).partition(";")[0]
        raise click.UsageError(f"{reason}; name the format with --to") from error
    return destination.writer


def _format_options(texts: Mapping[str, str], writer: Format) -> dict[str, Any]:
    """Read values as what the format takes: whole numbers, true or false, JSON, else text."""
    options: dict[str, Any] = {}
    for key, text in texts.items():
        if key not in writer.write_options:
            known = ", ".join(writer.write_options) or "none"
            raise click.UsageError(f"{writer.name} has no option {key!r} for writing, but {known}")
        kind = str(writer.write_options[key].annotation)
        if "int" in kind:
            options[key] = _whole_number(key, text)
        else:
            options[key] = text if "str" in kind else _json(key, text)
    return options


def _whole_number(key: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise click.UsageError(f"{key} is a whole number, not {text!r}") from None


def _json(key: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise click.UsageError(f"{key} is JSON, as true, 1 or {{...}}, not {text!r}") from None
