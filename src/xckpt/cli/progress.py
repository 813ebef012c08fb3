"""A bar on standard error that counts bytes, where somebody looks."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(what: str, total: int | None) -> Iterator[Callable[..., object] | Literal[False]]:
    """Show how far something is, with its speed and the time that is left.

    Parameters
    ----------
    what : str
        Shown before the bar.
    total : int or None
        Bytes there are, if that is known.

    Yields
    ------
    callable or False
        To be called with the number of bytes done so far, and all of them if these are known
        better; False where standard error is no terminal.
    """
    if not sys.stderr.isatty():
        yield False
        return
    from rich import progress
    from rich.console import Console

    bar = progress.Progress(
        progress.TextColumn(what, markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(what, total=total)

        def update(done: int, total: Any = None) -> None:
            bar.update(task, completed=done, total=total)

        yield update
