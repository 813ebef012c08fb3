"""``xckpt report``: a checkpoint, or what is between two, as a document."""

from __future__ import annotations

import click

from xckpt.cli.common import FileInput, is_terminal, reading_options_beside_output
from xckpt.cli.values import matching_of
from xckpt.errors import CheckpointError

__all__ = ["report"]


@click.command
@click.argument("file")
@click.argument("other", required=False)
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="PATH",
    help="The new file: HTML if it ends in .html, Markdown if it ends in .md.",
)
@click.option(
    "--names",
    metavar="auto|FILE",
    help="Match tensors by content and known names, or by a JSON object of names in FILE with "
    "names in OTHER.",
)
@click.option("--no-explain", is_flag=True, help="Do not find out why tensors differ.")
@click.option("--overwrite", is_flag=True, help="Replace the new file if it exists.")
@click.option("--no-cache", is_flag=True, help="Neither use nor store cached results.")
@reading_options_beside_output
def report(
    file: str,
    other: str | None,
    reading: FileInput,
    *,
    output: str,
    names: str | None,
    no_explain: bool,
    overwrite: bool,
    no_cache: bool,
) -> int:
    """Write a report on FILE, or on what is between FILE and OTHER.

    It holds all that it shows and runs nothing: a summary, what looks wrong, and how statistics go
    along the layers; of two files, what changed, why, how much, and what changed most.
    """
    from xckpt.accessor.reporting import document_for

    try:
        document_for(output)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        reading.dataset(file).ckpt.report(
            output,
            None if other is None else reading.dataset(other),
            names=matching_of(None, names),
            explain=not no_explain,
            overwrite=overwrite,
            progress=is_terminal(),
            cache=not no_cache,
            storage_options=reading.storage_options or None,
        )
    except CheckpointError:
        raise
    except FileExistsError as error:
        raise click.UsageError(f"{output} already exists; --overwrite replaces it") from error
    except ValueError as error:  # of names
        raise click.UsageError(str(error)) from error
    return 0
