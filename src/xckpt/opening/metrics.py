"""Metrics of a training run, as its files state them: losses, learning rates, epochs."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.opening.configs import read_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    import xarray as xr

# File of the Trainer of transformers next to each checkpoint, with the history of its logs.
_TRAINER = "trainer_state"
_MOST_METRICS = 100


def run_metrics(ds: xr.Dataset, dim: str) -> dict[str, list[float]]:
    """Return the metrics of a Dataset of `open_steps` by name: a number for each step, or NaN."""
    steps = ds.variables[dim].to_numpy().tolist()
    # Attributes that vary between the files are coordinates.
    metrics = {
        str(name): coord.to_numpy().astype(np.float64).tolist()
        for name, coord in ds.coords.items()
        if coord.dims == (dim,) and name != dim and coord.dtype.kind in "iuf"
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
