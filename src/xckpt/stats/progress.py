"""How far a scan is: a bar that counts bytes, or a function that is told."""

from __future__ import annotations

import sys
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["reporting"]

_LONG_NBYTES = 10**9
# Nobody needs to know about what takes less.
_DELAY_SECONDS = 0.5


@contextmanager
def reporting(
    progress: bool | Callable[[int], object] | None,  # noqa: FBT001  as users give it
    total: int,
    what: str = "statistics",
) -> Iterator[Callable[[int], object]]:
    """Report progress as the user wants.

    Parameters
    ----------
    progress : bool, callable or None
        True shows a bar, False nothing; a function gets the number of bytes done so far. None
        shows a bar for more than about 1 GB, or in a terminal or notebook.
    total : int
        Bytes there are.
    what : str
        Shown before the bar.

    Yields
    ------
    callable
        To be called with the number of bytes just done.
    """
    if callable(progress):
        done = 0

        def report(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            progress(done)

        yield report
    elif progress or (progress is None and (total > _LONG_NBYTES or _somebody_looks())):
        delay = 0.0 if progress else _DELAY_SECONDS
        with _bar(total, what, delay) as bar:
            yield bar
    else:
        yield lambda _: None


def _somebody_looks() -> bool:
    return "ipykernel" in sys.modules or sys.stderr.isatty()


@contextmanager
def _bar(total: int, what: str, delay: float) -> Iterator[Callable[[int], object]]:
    with warnings.catch_warnings():
        # That ipywidgets are missing or too old; the bar is text then.
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm

        bar = tqdm(total=total, desc=what, unit="B", unit_scale=True, delay=delay, leave=False)
    try:
        yield bar.update
    finally:
        bar.close()
