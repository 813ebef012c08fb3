"""Bounds of measures within which tensors that differ are close."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.comparison.measure import MEASURES
from xckpt.labels.filters import suggest_names
from xckpt.statistics.tables import STATUSES

if TYPE_CHECKING:
    from collections.abc import Callable

#: Measures that are larger, the more two tensors differ.
BOUNDED = ("nan", "inf", "max_abs", "rmse", "rel_l2", "nmse")
_CHANGED, _CLOSE = STATUSES.index("changed"), STATUSES.index("close")


def checked_bounds(fail_above: Any) -> dict[str, float]:
    """Return the bounds of measures; raise if one is unknown, or not a number."""
    if fail_above is None:
        return {}
    if not isinstance(fail_above, Mapping):
        text = f"fail_above takes measures with bounds, {{'rel_l2': 1e-3}}, not {fail_above!r}"
        raise TypeError(text)
    bounds: dict[str, float] = {}
    for name, value in fail_above.items():
        if name not in BOUNDED:
            reason = "falls as tensors differ more" if name in MEASURES else "is no measure"
            hint = suggest_names(BOUNDED, str(name)) if name not in MEASURES else ""
            raise ValueError(f"fail_above: {name!r} {reason}{hint}; there are {', '.join(BOUNDED)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise ValueError(
                f"fail_above: the bound of {name} is a number of at least 0: {value!r}"
            )
        bounds[name] = float(value)
    return bounds


def mark_close(arrays: list[Any], bounds: Mapping[str, float]) -> list[Any]:
    """Give changed tensors within all bounds the status close; statistics are the first axis."""
    # Without bounds of their own, NaN and infinities are never close.
    limits = {"nan": 0.0, "inf": 0.0, **bounds} if bounds else {}
    for array in arrays if limits else ():
        within = [array[MEASURES.index(name)] <= limit for name, limit in limits.items()]
        is_close = (array[0] == _CHANGED) & np.all(within, axis=0)
        array[0] = np.where(is_close, _CLOSE, array[0])
    return arrays


def bounded(find: Callable[..., list[Any]], bounds: Mapping[str, float], inputs: Any) -> list[Any]:
    """Return what a comparison finds, with the status of close tensors."""
    return mark_close(find(inputs), bounds)
