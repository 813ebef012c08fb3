"""Training runs: the steps in a folder, and the metrics that their files state."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from glob import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt import formats
from xckpt.opening.files import has_checkpoint
from xckpt.opening.names import (
    form_of,
    is_called_like_one,
    is_companion,
    is_unfinished,
    part_of,
    rank_of,
    steps_of,
)
from xckpt.opening.reading import read_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    import xarray as xr

    from xckpt.storage import FolderListing, Location

    _Form = tuple[tuple[str, ...], bool]

# Folders that are listed in parallel.
_CONCURRENCY = 16
# Burn writes model-5, optim-5 and scheduler-5 after the fifth epoch.
_BURN = ("model-", "optim-")
# sd-scripts of kohya writes x-000002.safetensors, and x.safetensors at the end.
_KOHYA_DIGITS = 6


class Run(NamedTuple):
    """The checkpoints of a training run."""

    steps: dict[int, Location]
    unfinished: list[str]  # names of steps whose writer did not end, or has not ended
    others: list[str]  # globs of other series in the same folder
    aside: list[str]  # other checkpoints in the same folder


def run_in(listing: FolderListing) -> Run | None:
    """Return the steps in a folder; None if fewer than two names are steps."""
    if any(mark in listing.files for mark in formats.folder_marks()):
        return None
    forms: dict[_Form, list[str]] = defaultdict(list)
    for name in (*listing.files, *listing.folders):
        is_folder = name in listing.folders
        is_whole = part_of(name) is None and rank_of(name) is None
        is_checkpoint = is_folder or (is_called_like_one(name) and not is_companion(name))
        if is_checkpoint and is_whole and name[0] != "." and not is_unfinished(name):
            forms[form_of(name), is_folder].append(name)
    runs = {form: names for form, names in forms.items() if steps_of(names) is not None}
    runs |= _runs_of_burn(forms) | _runs_of_kohya(forms, listing)
    if not runs:
        return None
    form, names = max(runs.items(), key=lambda run: len(run[1]))
    finished, steps = _finished(names, listing), _numbers_of(names)
    if len(finished) < 2:
        return None
    unfinished = [name for name in (*listing.files, *listing.folders) if is_unfinished(name)]
    unfinished += [name for name in names if name not in finished]
    other_series = [
        "*".join(map(escape, candidate[0]))
        for candidate, members in runs.items()
        if candidate != form and len(members) > 1 and candidate[1] == form[1]
    ]
    series = ["*".join(map(escape, form[0])), *other_series] if other_series else []
    aside = [
        name
        for name in listing.files
        if is_called_like_one(name)
        and not (name in names or is_companion(name) or is_unfinished(name))
    ]
    return Run({steps[name]: place for name, place in finished.items()}, unfinished, series, aside)


def _numbers_of(names: list[str]) -> dict[str, int]:
    numbers = steps_of(names) or [int("".join(filter(str.isdecimal, name))) for name in names]
    return dict(zip(names, numbers, strict=True))


def _runs_of_burn(forms: Mapping[_Form, list[str]]) -> dict[_Form, list[str]]:
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


def _runs_of_kohya(
    forms: Mapping[_Form, list[str]], listing: FolderListing
) -> dict[_Form, list[str]]:
    """Return numbered files of which there is a last one without a number: x-000002, x."""
    return {
        form: names
        for form, names in forms.items()
        if len(form[0]) == 2
        and form[0][0].endswith("-")
        and all(len(name) == len("".join(form[0])) + _KOHYA_DIGITS for name in names)
        and form[0][0][:-1] + form[0][1] in listing.files
    }


def _finished(names: list[str], listing: FolderListing) -> dict[str, Location]:
    """Return files, and folders that have a checkpoint, or one folder with a checkpoint."""

    def place_of(name: str) -> Location | None:
        if name in listing.files:
            return listing.files[name]
        contents = listing.folders[name].listing()
        if contents is None or has_checkpoint(contents):
            return None if contents is None else listing.folders[name]
        inner = [
            folder
            for name, folder in contents.folders.items()
            if not is_companion(name) and (below := folder.listing()) and has_checkpoint(below)
        ]
        return inner[0] if len(inner) == 1 else None

    with ThreadPoolExecutor(_CONCURRENCY) as threads:
        places = list(threads.map(place_of, names))
        return {n: place for n, place in zip(names, places, strict=True) if place is not None}


# --- metrics --------------------------------------------------------------------------------------

# File of the Trainer of transformers next to each checkpoint, with the history of its logs.
_TRAINER = "trainer_state"
_MOST_METRICS = 100


def run_metrics(ds: xr.Dataset, dim: str) -> dict[str, list[float]]:
    """Return the metrics of a Dataset of `open_steps` by name: a number for each step, or NaN."""
    steps = ds.variables[dim].to_numpy().tolist()
    format = ds.encoding.get("format")
    of_storage = formats.get(format).storage_attrs if format in formats.names() else ()
    # Attributes that vary between the files are coordinates.
    metrics = {
        str(name): coord.to_numpy().astype(np.float64).tolist()
        for name, coord in ds.coords.items()
        if coord.dims == (dim,) and name != dim and coord.dtype.kind in "iuf"
        if name not in of_storage
    }
    files: Mapping[int, str] | Any = ds.variables[dim].encoding.get("steps")
    logs = _logs({step: files.get(step, "") for step in steps} if isinstance(files, dict) else {})
    for name, values in logs.items():
        if name not in metrics and len(metrics) < _MOST_METRICS:
            logged = sorted(values)
            # The last value logged at or before each step.
            positions = [bisect_right(logged, step) for step in steps]
            metrics[name] = [values[logged[n - 1]] if n else float("nan") for n in positions]
    return metrics


def _logs(files: Mapping[int, str]) -> dict[str, dict[int, float]]:
    """Return the logged numbers by metric and step."""
    logs: dict[str, dict[int, float]] = {}
    read_until = -1
    # The newest file usually has the whole history; a run that was resumed may lack its beginning.
    for step in sorted(files, reverse=True):
        if read_until >= 0 and step >= read_until:
            continue
        state = read_config(files[step], {}, _TRAINER) if files[step] else None
        history = (state or {}).get("log_history")
        for entry in history if isinstance(history, list) else ():
            at = _number(entry.get("step")) if isinstance(entry, dict) else None
            if at is None or not 0 <= at <= step:
                continue
            read_until = int(at) if read_until < 0 else min(read_until, int(at))
            for name, value in entry.items():
                number = _number(value)
                if name != "step" and number is not None:
                    logs.setdefault(str(name), {}).setdefault(int(at), number)
    return logs


def _number(value: Any) -> float | None:
    """Return a value of a log as a float; None for other values, and for huge integers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
