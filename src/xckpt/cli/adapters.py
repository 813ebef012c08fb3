"""The command for adapters: ``xckpt extract``."""

from __future__ import annotations

import click

from xckpt.cli.common import FileInput, json_rows, print_document, print_text, usage_errors
from xckpt.cli.options import command
from xckpt.formatting import figure, printable

__all__ = ["extract"]


@command("overwrite progress json")
@click.argument("base")
@click.argument("tuned")
@click.argument("folder")
@click.option("--rank", type=int, metavar="N", help="Highest rank; 256 with --energy.")
@click.option(
    "--energy", type=float, metavar="SHARE", help="Share of the squares to keep, such as 0.99."
)
def extract(
    base: str,
    tuned: str,
    folder: str,
    reading: FileInput,
    *,
    rank: int | None,
    energy: float | None,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Write the changes from BASE to TUNED as a LoRA adapter.

    PEFT loads the FOLDER. Each linear weight that differs gets factors of the lowest rank that
    keeps the energy, or of at most the rank. It prints their ranks and energies.
    """
    from xckpt.adapting import extract_adapter

    files = FileInput(reading.engine, reading.storage_options)
    a, b = (file if files.engine is None else files.dataset(file) for file in (base, tuned))
    with usage_errors(output=folder):
        table = extract_adapter(
            a,
            b,
            folder,
            rank,
            energy=energy,
            **reading.selection,
            overwrite=overwrite,
            progress=reading.scanning["progress"],
            storage_options=reading.storage_options,
        )
    if as_json:
        print_document({"folder": folder, "tensors": json_rows(table)})
        return 0
    for name, row in table.iterrows():
        print_text(
            f"{printable(str(name))}: rank {row['rank']:.0f}, energy {figure(row['energy'])}"
        )
    return 0
