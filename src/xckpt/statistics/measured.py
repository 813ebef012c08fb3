"""The statistics of all tensors as columns, and which tensors are siblings: what rules look at."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from xckpt.labels.numbering import numbered
from xckpt.statistics.tables import named_tensors, said_of_tensors, tensor_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    import xarray as xr

Array = np.ndarray[Any, np.dtype[Any]]

# Neighbours on each side that a layer is compared with.
_NEAR = 2


class Found(NamedTuple):
    """That a rule holds for a tensor."""

    at: int
    name: str
    rule: str
    value: float
    explanation: str


class Measured:
    """Statistics of tensors by name, with NaN for those that nobody asked for."""

    def __init__(
        self,
        names: list[str],
        columns: dict[str, Array],
        dtypes: list[str],
        shapes: list[tuple[int, ...]],
        run: str | None = None,
    ) -> None:
        self.names = names
        self.columns = columns
        #: As stored; empty where they are not known.
        self.dtypes = dtypes
        self.shapes = shapes
        #: Dimension of the steps of a run: names begin with it.
        self.run = run

    @classmethod
    def of(cls, result: xr.Dataset, run: str | None = None) -> Self:
        """Take the result of `stats`."""
        names, rows = tensor_rows(result)
        columns = dict(zip(result["statistic"].to_numpy().tolist(), rows.T, strict=True))
        columns["dead_rows"] = np.array(
            said_of_tensors(result, {"dead_rows": np.nan})["dead_rows"], np.float64
        )
        dtypes: list[str] = []
        shapes: list[tuple[int, ...]] = []
        for variable, members in named_tensors(result):
            count = len([member for member in members if member is not None])
            dtypes += [str(variable.attrs.get("dtype", ""))] * count
            shape = np.atleast_1d(variable.attrs.get("shape", ())).astype(int)
            shapes += [tuple(shape.tolist())] * count
        has_steps = run is not None and all(name.startswith(f"{run}.") for name in names)
        return cls(names, columns, dtypes, shapes, run if has_steps else None)

    def __getitem__(self, statistic: str) -> Array:
        if statistic not in self.columns:
            self.columns[statistic] = np.full(len(self.names), np.nan)
        return self.columns[statistic]

    def found(self, at: Any, rule: str, value: Any, explanation: str) -> Found:
        """Say that a rule holds."""
        return Found(int(at), self.names[at], rule, float(value), explanation)

    def part(self, at: Any, number: float, word: str) -> str:
        """Write how many of the elements, up to the verb."""
        verb = "is" if number == 1 else "are"
        return f"{number:,.0f} of {self['count'][at]:,.0f} {word}s {verb}"

    def is_vector(self, at: Any) -> bool:
        """Return whether a tensor has not more than one axis, but for those of one element."""
        if self.dtypes[at]:
            return len([size for size in self.shapes[at] if size > 1]) <= 1
        return bool(np.isnan(self["dead_rows"][at]))

    @cached_property
    def dotted(self) -> list[str]:
        """The names with dots between all words, as patterns expect them."""
        return [name.replace("/", ".") for name in self.names]

    @cached_property
    def _split(self) -> list[tuple[str, tuple[Any, ...], tuple[int, ...]]]:
        """Return the step, the name without numbers, and the numbers of each tensor."""
        found = []
        for name in self.names:
            run, *parts = name.split(".", 2)
            step, own = parts if run == self.run and len(parts) > 1 else ("", name)
            numbers = numbered(own)
            found.append((step, numbers.template, tuple(map(int, numbers.indices))))
        return found

    def step_of(self, at: int) -> str:
        """Return the step that a tensor is of; empty where there are none."""
        return self._split[at][0]

    def plain_name(self, at: int) -> str:
        """Return the name of a tensor without its step."""
        step = self._split[at][0]
        return self.names[at].removeprefix(f"{self.run}.{step}.") if step else self.names[at]

    def family_of(self, at: int) -> tuple[Any, ...]:
        """Return what a tensor and its siblings have in common."""
        return self._split[at][:2]

    @cached_property
    def families(self) -> dict[tuple[Any, ...], list[int]]:
        """Tensors whose names differ in numbers only."""
        found: dict[tuple[Any, ...], list[int]] = {}
        for at in range(len(self.names)):
            found.setdefault(self.family_of(at), []).append(at)
        return found

    def series(self) -> Iterator[list[int]]:
        """Return tensors whose names differ in the first number only, in the order of that."""
        for siblings in self.families.values():
            found: dict[tuple[int, ...], list[int]] = {}
            for at in siblings:
                if self._split[at][2]:
                    found.setdefault(self._split[at][2][1:], []).append(at)
            for some in found.values():
                yield sorted(some, key=lambda at: self._split[at][2][0])

    @staticmethod
    def unlike(values: Array, least: float, far: float) -> Array:
        """Return how far each value is from those next to it; zero where that is not `far`.

        The unit is the robust standard deviation of such distances, `least` if that is less. A
        value has to be beyond all of its neighbours as well, by half of the distance.
        """
        last = len(values) - 1
        windows = []
        for at in range(len(values)):
            # Three at least, so that one of them may be odd.
            start, stop = min(at - _NEAR, last - _NEAR - 1), max(at + _NEAR, _NEAR + 1)
            near = np.r_[max(0, start) : at, at + 1 : min(last, stop) + 1]
            windows.append(values[near])
        distance = values - [np.median(window) for window in windows]
        outside = np.array(
            [
                max(value - window.max(), window.min() - value)
                for value, window in zip(values, windows, strict=True)
            ]
        )
        spread = 1.4826 * np.median(np.abs(distance - np.median(distance)))
        score = distance / max(spread, least)
        score[(np.abs(score) <= far) | (outside < np.abs(distance) / 2)] = 0.0
        return np.asarray(score)
