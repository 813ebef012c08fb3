"""Evidence for findings: the statistics of all tensors, their roles and siblings.

A `Rule` looks at `Evidence` and returns findings. `xckpt.health.examining` lists all rules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np

from xckpt.datasets.tensors import DescribedTensors, split_step
from xckpt.statistics.computing import stats
from xckpt.statistics.tables import named_tensors, table, tensor_attributes, tensor_rows
from xckpt.structure import PARAMETERS, Described, Role, Structure
from xckpt.structure.numbering import module_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import xarray as xr

    from xckpt.arrays.streams import ElementStream
    from xckpt.progress import ProgressOption
    from xckpt.typing import Array

T = TypeVar("T")

#: Roles of weights, whether they are trained, averaged or copied for an optimizer.
WEIGHTS = frozenset({Role.WEIGHT, Role.AVERAGE, Role.MASTER})
#: Roles of weights, including codes of quantised weights.
CODED = WEIGHTS | {Role.CODES}
#: All roles except internal state, such as of random number generators.
EVERY = frozenset(Role) - {Role.STATE}

# Share of the vectors of a new model that are constant; of a trained model, hardly any is.
_CONSTANT_WHEN_NEW, _FEWEST_VECTORS = 0.4, 4
# Number of neighbours on each side that a layer is compared with.
_NEIGHBOURS = 2


class RuleFinding(NamedTuple):
    """A rule that holds for a tensor, or for the whole checkpoint if the name is empty."""

    row: int
    tensor: str
    rule: str
    value: float
    explanation: str


class _StepName(NamedTuple):
    """The name of a tensor, taken apart."""

    step: str  # empty outside of runs
    template: tuple[str | None, ...]  # pieces of the name, None for indices
    indices: tuple[int, ...]


class Rule(ABC):
    """A kind of finding, and the roles of the tensors it applies to."""

    name: ClassVar[str]
    #: "error", "warning" or "info".
    severity: ClassVar[str]
    #: Tensors of other roles are skipped; None for a rule about the file as a whole.
    roles: ClassVar[frozenset[Role] | None] = WEIGHTS
    #: Whether one finding stands for all tensors of a kind that the rule holds for.
    is_of_kind: ClassVar[bool] = False
    #: Rules that state the same fact: if one of them holds for a tensor, this one is left out.
    implied_by: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        """Return the findings in tensors of any role."""

    def findings(self, evidence: Evidence) -> Iterator[RuleFinding]:
        """Return the findings in tensors of the roles in `roles`."""
        for finding in self._judge(evidence):
            if self.roles is None or evidence.roles[finding.row] in self.roles:
                yield finding

    def finding(self, evidence: Evidence, row: Any, value: Any, explanation: str) -> RuleFinding:
        """Return a finding in the tensor of a row."""
        row = int(row)
        return RuleFinding(row, evidence.names[row], self.name, float(value), explanation)


@dataclass(eq=False)
class Evidence:
    """Statistics of tensors, by name; NaN if a statistic was not computed."""

    names: list[str]
    #: Statistics by name, with a number for each tensor.
    columns: dict[str, Array]
    #: Stored element types; empty if unknown.
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    #: Dimension of the steps of a training run. Names begin with it and the step.
    run: str | None = None
    _: KW_ONLY
    #: The tensors themselves. Without them, only rules about statistics hold.
    streams: Sequence[ElementStream] = ()
    progress: ProgressOption = None
    cache: bool = True
    #: Types of the tensors of the checkpoint, for their roles in groups.
    origin: DescribedTensors | None = None
    #: The object that the streams read; without it, statistics that are missing stay unknown.
    subject: Any = None
    _computed: dict[Any, Any] = field(default_factory=dict)
    #: Elements of the largest tensor that a rule reads as a whole.
    most_elements: ClassVar[int] = 1 << 25
    #: Largest relative difference of numbers that were rounded to 8 bits of fraction.
    rounding: ClassVar[float] = 0.01

    @classmethod
    def of(cls, result: xr.Dataset, run: str | None = None, **options: Any) -> Self:
        """Return the evidence in a result of `stats`."""
        names, rows = tensor_rows(result)
        columns = dict(zip(result["statistic"].to_numpy().tolist(), rows.T, strict=True))
        stated = tensor_attributes(result, {"dead_rows": np.nan})["dead_rows"]
        dead_rows, empty_rows = np.array(stated, np.float64), columns.get("empty_rows", np.nan)
        columns["dead_rows"] = np.where(np.isnan(empty_rows), dead_rows, empty_rows)
        dtypes: list[str] = []
        shapes: list[tuple[int, ...]] = []
        for variable, members in named_tensors(result):
            count = len([member for member in members if member is not None])
            dtypes += [str(variable.attrs.get("dtype", ""))] * count
            shape = np.atleast_1d(variable.attrs.get("shape", ())).astype(int)
            shapes += [tuple(shape.tolist())] * count
        counts = columns.get("count", np.zeros(len(names)))
        if np.isnan(counts).any():  # members of stacks that were not selected
            counted = np.flatnonzero(~np.isnan(counts)).tolist()
            columns = {key: column[counted] for key, column in columns.items()}
            names, dtypes = [names[n] for n in counted], [dtypes[n] for n in counted]
            shapes = [shapes[n] for n in counted]
        has_steps = run is not None and all(name.startswith(f"{run}.") for name in names)
        origin = result.encoding.get("origin")
        steps = run if has_steps else None
        return cls(names, columns, dtypes, shapes, steps, origin=origin, **options)

    def __getitem__(self, statistic: str) -> Array:
        if statistic not in self.columns:
            self.columns[statistic] = np.full(len(self.names), np.nan)
        return self.columns[statistic]

    @cached_property
    def norms_of_elements(self) -> Array:
        """Norm of the elements of each tensor; computed if it was not."""
        if "l2" not in self.columns and self.subject is not None:
            frame = table(stats(self.subject, progress=self.progress, cache=self.cache))
            self.columns["l2"] = frame["l2"].reindex(self.names).to_numpy(np.float64)
        return self["l2"]

    # --- kinds of tensors ------------------------------------------------------------------------

    @cached_property
    def structure(self) -> Structure:
        """Descriptions of the tensors, by their names without the step of a run."""
        original = self.origin.structure if self.origin is not None else Structure(())
        described = {}
        for row, name in enumerate(self.names):
            owner = name if name in original else name.rpartition(":")[0]
            declared = original.described(owner).declared if owner in original else None
            plain, dtype = self.plain_names[row], self.dtypes[row]
            shape = self.shapes[row]
            if not dtype:  # the shape is unknown, but `is_vector` still works
                shape = (2,) if self.is_vector(row) else (2, 2)
            described[plain] = Described(plain, dtype, shape, declared)
        if len(self.names) < len(original) and self.run is None:
            # Neighbours that have no statistics.
            described = {n: original.described(n) for n in original} | described
        return Structure(described.values(), original.facts)

    @cached_property
    def plain_names(self) -> list[str]:
        """Names without the steps of a run."""
        return [plain for _, plain in self._steps]

    @cached_property
    def roles(self) -> list[Role]:
        """Role of each tensor."""
        roles = self.structure.roles
        return [roles[name] for name in self.plain_names]

    @cached_property
    def parameters(self) -> list[int]:
        """Rows of trainable tensors."""
        return [row for row, role in enumerate(self.roles) if role in PARAMETERS]

    @cached_property
    def norms(self) -> list[int]:
        """Rows of the gains of norms."""
        gains = self.structure.norms
        return [row for row, name in enumerate(self.plain_names) if name in gains]

    def module_type(self, row: int) -> str:
        """Return the kind of the module that owns a tensor; empty if it is unknown."""
        return self.structure.module_type(self.plain_names[row])

    def is_setting(self, row: int) -> bool:
        """Return whether a tensor is an argument of an operator, such as a number to fill with."""
        return self.structure.is_setting(self.plain_names[row])

    def has_masked_rows(self, row: int) -> bool:
        """Return whether all infinities of a table are rows of negative ones; it is read."""
        if not self.streams or self.is_vector(row) or not self.is_readable(row):
            return False
        values = self.values(row)
        is_infinite = np.isinf(values)
        is_masked = np.isneginf(values).all(axis=tuple(range(1, values.ndim)))
        return bool(is_infinite[~is_masked].sum() == 0 < is_masked.sum() < len(values))

    def is_bias(self, row: int) -> bool:
        """Return whether a tensor is a bias. Biases of attention may have two axes."""
        return self.structure.is_bias(self.plain_names[row])

    def kind_of(self, row: int) -> tuple[Any, ...]:
        """Return the key that all tensors of a kind share: role, kind of module, type and axes."""
        axes = len([size for size in self.shapes[row] if size > 1])
        role, kind = self.roles[row], self.module_type(row)
        return self.step_of(row), role, kind, self.dtypes[row], axes

    def values(self, row: int) -> Array:
        """Return all elements of a tensor; it is read."""
        return np.asarray(self.streams[row].array[(slice(None),) * len(self.shapes[row])])

    def equal_rows(self, row: int) -> tuple[int, int]:
        """Return how many rows equal one row, and any earlier row, zeros aside; it is read."""
        values = self.values(row)
        channels = self.structure.channels(self.plain_names[row])
        axes = (0,) if channels is None else channels.rows
        matrix = np.moveaxis(values, axes, range(len(axes)))
        matrix = np.ascontiguousarray(matrix.reshape(int(np.prod(matrix.shape[: len(axes)])), -1))
        matrix = matrix[matrix.any(axis=1)]
        counts = np.unique(matrix, axis=0, return_counts=True)[1]
        return int(counts.max(initial=0)), len(matrix) - len(counts)

    def has_equal_experts(self, row: int) -> bool:
        """Return whether all experts of a stack are equal; it is read if it may be so."""
        number, total = self.shapes[row][0], self["row_count"][row]
        is_likely = self["repeated_rows"][row] >= total * (1 - 1 / number)
        if not self.streams or number < 2 or not is_likely or not self.is_readable(row):
            return False
        values = self.values(row)
        return bool((values == values[:1]).all())

    def is_readable(self, row: int) -> bool:
        """Return whether a tensor is small enough to read as a whole."""
        return bool(self["count"][row] <= self.most_elements)

    def is_rank_one(self, row: int) -> bool:
        """Return whether a matrix is the product of a column and a row, rounded; it is read."""
        matrix = self.values(row).reshape([n for n in self.shapes[row] if n > 1]).astype(np.float64)
        row_of_top, column = np.unravel_index(np.argmax(np.abs(matrix)), matrix.shape)
        top = matrix[row_of_top]
        product = np.outer(matrix[:, column], top / top[column])
        # One large element is most of the norm of a matrix, and not of each row.
        lengths = np.linalg.norm(matrix, axis=1)
        return bool((np.linalg.norm(matrix - product, axis=1) <= self.rounding * lengths).all())

    def slot(self, row: int) -> str:
        """Return the place of a tensor in the architecture; empty if it is unknown."""
        return self.structure.slot(self.plain_names[row])

    def is_stack_of_experts(self, row: int) -> bool:
        """Return whether the first axis of a tensor runs along experts."""
        return len(self.shapes[row]) == 3 and self.structure.has_experts(self.plain_names[row])

    def is_tied_head(self, row: int) -> bool:
        """Return whether a tensor has the shape of an embedding, as the output of a new model."""
        shape = self.shapes[row]
        return len(shape) == 2 and shape in self._shapes_of_embeddings

    @cached_property
    def _shapes_of_embeddings(self) -> set[tuple[int, ...]]:
        rows = range(len(self.names))
        return {self.shapes[row] for row in rows if self.module_type(row) == "embedding"}

    def channel_words(self, row: int) -> tuple[str, str]:
        """Return the words for the rows and the columns of a tensor."""
        channels = self.structure.channels(self.plain_names[row])
        if channels is not None and channels.are_known:
            return "output channel", "input channel"
        return "row", "column"

    def gain_of(self, row: int) -> int | None:
        """Return the row of the gain of a norm, from that of its bias."""
        return self._gains.get(module_of(self.names[row])) if self.is_vector(row) else None

    @cached_property
    def _gains(self) -> dict[str, int]:
        return {module_of(self.names[row]): row for row in self.norms}

    @cached_property
    def is_new(self) -> bool:
        """Whether the model seems to be initialised, but not trained."""
        # Then most gains of norms are constant, or most biases in a model without norms, or many
        # vectors of any kind.
        if not self.has_values:
            return False
        rows = self.norms or [row for row in self.parameters if self.is_bias(row)]
        rows = [row for row in rows if self["count"][row] > 1] or rows
        is_constant = self["min"][rows] == self["max"][rows]
        if len(rows) and np.mean(is_constant) > 1 / 2:
            return True
        vectors = [row for row in self.parameters if self.is_vector(row) and self["count"][row] > 1]
        are_constant = self["min"][vectors] == self["max"][vectors]
        is_enough = len(vectors) >= _FEWEST_VECTORS
        return is_enough and bool(np.mean(are_constant) > _CONSTANT_WHEN_NEW)

    @cached_property
    def has_values(self) -> bool:
        """Whether any matrix, or any vector of a checkpoint without matrices, is not constant."""
        rows = [row for row in self.parameters if not self.is_vector(row)] or self.parameters
        return bool((self["min"][rows] != self["max"][rows]).any())

    def is_zero(self, row: int) -> bool:
        """Return whether all elements are zero."""
        return bool(self["min"][row] == self["max"][row] == 0)

    def is_vector(self, row: int) -> bool:
        """Return whether a tensor has at most one axis that is longer than 1."""
        if self.dtypes[row]:
            return len([size for size in self.shapes[row] if size > 1]) <= 1
        return bool(np.isnan(self["dead_rows"][row]))

    # --- siblings --------------------------------------------------------------------------------

    @cached_property
    def _steps(self) -> list[tuple[str, str]]:
        """Step of each tensor, and its name without it."""
        return [split_step(name, self.run) for name in self.names]

    @cached_property
    def _parsed_names(self) -> list[_StepName]:
        """Name of each tensor, taken apart."""
        parsed = []
        for step, plain in self._steps:
            key = self.structure.siblings_key(plain)
            parsed.append(_StepName(step, key.template, tuple(map(int, key.indices))))
        return parsed

    def step_of(self, row: int) -> str:
        """Return the step of a tensor; empty outside of runs."""
        return self._steps[row][0]

    def family_of(self, row: int) -> tuple[Any, ...]:
        """Return the key that a tensor and its siblings share."""
        # A bias of a convolution is no sibling of a bias of a linear layer.
        name = self._parsed_names[row]
        return (name.step, name.template, self._ndim(row), self.roles[row])

    def _ndim(self, row: int) -> int:
        """Return the number of axes of a matrix, or that of the matrix of its module, negative."""
        if not self.is_vector(row):
            return len(self.shapes[row])
        weight = self._matrices.get(module_of(self.names[row]))
        return -(0 if weight is None else len(self.shapes[weight]))

    @cached_property
    def _matrices(self) -> dict[str, int]:
        """Row of the matrix of each module."""
        rows = range(len(self.names))
        return {module_of(self.names[row]): row for row in rows if not self.is_vector(row)}

    @cached_property
    def families(self) -> dict[tuple[Any, ...], list[int]]:
        """Rows of siblings, whose names differ only in their indices; vectors are kept apart."""
        families: dict[tuple[Any, ...], list[int]] = {}
        for row in range(len(self.names)):
            families.setdefault(self.family_of(row), []).append(row)
        return families

    def series(self) -> Iterator[list[int]]:
        """Yield the rows of tensors whose names differ only in the first index, in its order."""
        for siblings in self.families.values():
            series: dict[tuple[int, ...], list[int]] = {}
            for row in siblings:
                if indices := self._parsed_names[row].indices:
                    series.setdefault(indices[1:], []).append(row)
            for rows in series.values():
                yield sorted(rows, key=lambda row: self._parsed_names[row].indices[0])

    def experts(self) -> Iterator[list[int]]:
        """Yield the rows of tensors whose names differ only in the number of the expert."""
        groups: dict[Any, list[int]] = {}
        for row, name in enumerate(self.plain_names):
            if not self.structure.has_experts(name):
                continue
            indices = self.structure.indices(name)
            others = [(module, index) for module, index in indices if module != "expert"]
            if len(others) < len(indices) and self.roles[row] in PARAMETERS:
                template = self.structure.parse(name).template
                groups.setdefault((self.step_of(row), template, *others), []).append(row)
        yield from groups.values()

    def once(self, compute: Callable[[Evidence], T]) -> T:
        """Return what a function computes from the evidence; all rules share the result."""
        if compute not in self._computed:
            self._computed[compute] = compute(self)
        result: T = self._computed[compute]
        return result


def out_of_line(values: Array, least: float, far: float) -> Array:
    """Return the distance of each value from its neighbours; 0 where it is at most `far`."""
    # The unit is the robust standard deviation of distances, at least `least`. The result is 0
    # unless the value is beyond all of its neighbours, by half of its distance.
    last = len(values) - 1
    windows = []
    for position in range(len(values)):
        # At least three neighbours, so that their median tolerates one outlier.
        start, stop = (
            min(position - _NEIGHBOURS, last - _NEIGHBOURS - 1),
            max(position + _NEIGHBOURS, _NEIGHBOURS + 1),
        )
        neighbours = np.r_[max(0, start) : position, position + 1 : min(last, stop) + 1]
        windows.append(values[neighbours])
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
