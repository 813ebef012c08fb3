"""The role, module and axes of a tensor in its model, and the evidence for them."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Role(StrEnum):
    """Purpose of a tensor in a checkpoint."""

    WEIGHT = "weight"
    CODES = "codes"
    AVERAGE = "average"
    STATISTIC = "statistic"
    COUNTER = "counter"
    CONSTANT = "constant"
    MOMENT = "moment"
    MASTER = "master"
    STEP = "step"
    SCALE = "scale"
    STATE = "state"

    @property
    def group(self) -> str:
        """Heading under which summaries and pictures show the tensor."""
        return _GROUPS[self]


#: Roles of trainable tensors. Only their elements count as parameters.
PARAMETERS = frozenset({Role.WEIGHT, Role.CODES})
#: Roles of tensors that an optimizer or a training loop keeps.
OF_TRAINING = frozenset({Role.MOMENT, Role.MASTER, Role.STEP, Role.STATE})

_GROUPS = {
    Role.WEIGHT: "parameters",
    Role.CODES: "parameters",
    Role.AVERAGE: "averages",
    Role.STATISTIC: "buffers",
    Role.COUNTER: "buffers",
    Role.CONSTANT: "buffers",
    Role.MOMENT: "optimizer state",
    Role.MASTER: "optimizer state",
    Role.STEP: "optimizer state",
    Role.SCALE: "quantisation",
    Role.STATE: "training state",
}


class Described(NamedTuple):
    """A tensor without its values: name, stored type, shape, and the facts that a file states."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    declared: Mapping[str, Any] | None = None

    @property
    def axes(self) -> tuple[str | None, ...]:
        """Names of the axes that the file states; None for an axis without a name."""
        return (self.declared or {}).get("axes") or (None,) * len(self.shape)


class Evidence(NamedTuple):
    """A reason for a field of a `TensorInfo`."""

    #: "user", "file", "model", "family", "convention" or "shape", strongest first.
    source: str
    #: Field that the reason is about.
    field: str
    value: str
    #: The fact that is stated, or the convention of the name or the shape.
    reason: str
    #: False if a stronger source decided otherwise.
    decided: bool = True


class TensorInfo(NamedTuple):
    """The place and purpose of a tensor in its model.

    Parameters
    ----------
    role : Role
        Purpose of the tensor.
    component : str
        Part of a checkpoint that holds several: ``"optimizer"``, ``"encoder"``, ``"vision"``; empty
        for the only one.
    module : str
        Path of the module that owns the tensor.
    module_type : str
        Kind of the module: ``"linear"``, ``"convolution"``, ``"embedding"``, ``"norm"``,
        ``"recurrent"``, ``"attention"``, ``"router"``; empty if unknown.
    slot : str
        Place in the architecture, such as ``"attention.query"``; empty if unknown.
    param : str
        Name within the module, such as ``"weight"`` or ``"running_mean"``.
    axes : tuple of (str or None)
        Name of each axis, such as ``"out"``, ``"in"``, ``"height"``, or ``"head*key"`` and
        ``"embd"`` if the family is known; None if unknown.
    indices : tuple of (str, int)
        Number of each repeated module, outermost first: ``("layer", 3)``.
    owner : str or None
        Tensor that a scale or a moment belongs to.
    evidence : tuple of Evidence
        Reasons for the fields above, strongest first.
    """

    role: Role
    component: str
    module: str
    module_type: str
    slot: str
    param: str
    axes: tuple[str | None, ...]
    indices: tuple[tuple[str, int], ...]
    owner: str | None
    evidence: tuple[Evidence, ...]
