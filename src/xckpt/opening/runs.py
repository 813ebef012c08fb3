"""The steps of a training run in a folder."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from xckpt import formats
from xckpt.opening.files import has_checkpoint, is_called_like_one
from xckpt.opening.names import form_of, is_companion, is_unfinished, part_of, rank_of, steps_of

if TYPE_CHECKING:
    from xckpt.storage import Listing, Location

__all__ = ["Run", "run_in"]

# Folders that are listed in parallel.
_CONCURRENCY = 16
# Burn writes model-5, optim-5 and scheduler-5 after the fifth epoch.
_BURN = ("model-", "optim-")


class Run(NamedTuple):
    """The checkpoints of a training run."""

    steps: dict[int, Location]
    unfinished: list[str]  # names of steps whose writer did not end, or has not ended


def run_in(listing: Listing) -> Run | None:
    """Return the steps in a folder; None if fewer than two names are steps."""
    if any(mark in listing.files for mark in formats.folder_marks()):
        return None
    forms: dict[tuple[tuple[str, ...], bool], list[str]] = defaultdict(list)
    for name in (*listing.files, *listing.folders):
        is_folder = name in listing.folders
        is_whole = part_of(name) is None and rank_of(name) is None
        is_checkpoint = is_folder or (is_called_like_one(name) and not is_companion(name))
        if is_checkpoint and is_whole and name[0] != "." and not is_unfinished(name):
            forms[form_of(name), is_folder].append(name)
    runs = {form: names for form, names in forms.items() if steps_of(names) is not None}
    runs |= _runs_of_burn(forms)
    names = max(runs.values(), key=len, default=[])
    finished, steps = _finished(names, listing), _numbers_of(names)
    if len(finished) < 2:
        return None
    unfinished = [name for name in (*listing.files, *listing.folders) if is_unfinished(name)]
    unfinished += [name for name in names if name not in finished]
    entries = {**listing.files, **listing.folders}
    return Run({steps[name]: entries[name] for name in finished}, unfinished)


def _numbers_of(names: list[str]) -> dict[str, int]:
    numbers = steps_of(names) or [int("".join(filter(str.isdecimal, name))) for name in names]
    return dict(zip(names, numbers, strict=True))


def _runs_of_burn(
    forms: dict[tuple[tuple[str, ...], bool], list[str]],
) -> dict[tuple[tuple[str, ...], bool], list[str]]:
    """Return the models of a run whose optimizers have the same numbers."""
    models, optimizers = (
        {form: names for form, names in forms.items() if form[0][0] == first} for first in _BURN
    )
    numbers = [sorted(_numbers_of(names).values()) for names in optimizers.values()]
    return {
        form: names
        for form, names in models.items()
        if len(form[0]) == 2 and sorted(_numbers_of(names).values()) in numbers
    }


def _finished(names: list[str], listing: Listing) -> list[str]:
    """Return the names of files, and of folders that have a checkpoint."""

    def is_finished(name: str) -> bool:
        if name in listing.files:
            return True
        contents = listing.folders[name].listing()
        return contents is not None and has_checkpoint(contents)

    with ThreadPoolExecutor(_CONCURRENCY) as threads:
        results = threads.map(is_finished, names)
        return [name for name, finished in zip(names, results, strict=True) if finished]
