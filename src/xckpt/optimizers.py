"""The state of an optimizer, joined to the parameters it belongs to."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, NamedTuple

from xckpt.errors import CheckpointWarning, shown
from xckpt.identity import next_namespace
from xckpt.labels import AxisNames
from xckpt.stacking import unstack_modules

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import xarray as xr

__all__ = ["join_optimizer"]

_STATE = re.compile(r"(\d+)\.(.+)", re.DOTALL | re.ASCII)


def join_optimizer(model: xr.Dataset, optimizer: xr.Dataset) -> xr.Dataset:
    """Attach the state of an optimizer to the parameters of a model.

    A training framework that keeps both in files of their own links them by the identity of the
    parameter: the attribute `param_id` of a variable in `model`, and the first component of the
    names in `optimizer` (``"9283.momentum.moment_1"``).

    Parameters
    ----------
    model : xarray.Dataset
        A checkpoint of a module, as it was opened. What is stacked is taken apart first.
    optimizer : xarray.Dataset
        The record of its optimizer.

    Returns
    -------
    xarray.Dataset
        The model, and after its variables the state as ``{parameter}:{field}``
        (``"conv1.weight:momentum.moment_1"``), with the dimensions of the parameter where the
        shapes agree, and the attribute `parameter`. A parameter that the optimizer does not know
        has no state; parameters that share an identity all have it. What belongs to no parameter
        keeps the name it has in `optimizer`. Attributes of the Dataset and coordinates are the
        model's. Nothing is read.

    Raises
    ------
    ValueError
        If none of the state belongs to a parameter of the model.

    Warns
    -----
    CheckpointWarning
        If there is state of parameters that the model does not have.

    Examples
    --------
    >>> model = xr.open_dataset("model-3.bpk", engine="burnpack")  # doctest: +SKIP
    >>> optimizer = xr.open_dataset("optim-3.bpk", engine="burnpack")  # doctest: +SKIP
    >>> ds = xckpt.join_optimizer(model, optimizer)  # doctest: +SKIP
    >>> ds["conv1.weight:momentum.moment_1"].dims == ds["conv1.weight"].dims  # doctest: +SKIP
    True
    """
    model, optimizer = unstack_modules(model), unstack_modules(optimizer)
    parameters = _parameters(model)
    states = {str(n): v for n, v in optimizer.variables.items() if n not in optimizer.coords}
    found: list[_State] = []
    lost: list[str] = []
    for name, state in states.items():
        match = _STATE.fullmatch(name)
        owners = parameters.get(match[1], {}) if match is not None else {}
        found += [_State(name, state, *owner) for owner in owners.items()]
        if not owners:
            found.append(_State(name, state))
            lost += [name] if match is not None else []
    if all(state.parameter is None for state in found):
        raise ValueError(_nothing_shared(parameters, lost))
    if lost:
        text = f"{len(lost)} variables of the optimizer, {shown(lost[0])} the first, belong to no"
        warnings.warn(f"{text} parameter of the model", CheckpointWarning, stacklevel=2)
    joined = model.assign(_attached(model, found))
    if "namespace" in joined.encoding:
        # Joined to another optimizer, the model has other state of the same names.
        joined.encoding = {**joined.encoding, "namespace": next_namespace()}
    return joined


class _State(NamedTuple):
    """A variable of an optimizer, and the parameter that it belongs to."""

    name: str
    variable: xr.Variable
    parameter: str | None = None
    owner: xr.Variable | None = None

    def renamed(self, name: str) -> str:
        """Put the name of the parameter for its identity."""
        return name if self.parameter is None else f"{self.parameter}:{name.partition('.')[2]}"


def _parameters(model: xr.Dataset) -> dict[str, dict[str, xr.Variable]]:
    """Find the parameters of each identity, with a variable that shows their dimensions."""
    parameters: dict[str, dict[str, xr.Variable]] = {}
    for name, variable in model.variables.items():
        identity = variable.attrs.get("param_id")
        tensor = str(variable.encoding.get("tensor", name))
        # State has the identity of its parameter too.
        is_state = "parameter" in variable.attrs or tensor.startswith(f"{identity}.")
        if identity is not None and not is_state:
            parameter = tensor if "part" in variable.encoding else str(name)
            parameters.setdefault(str(identity), {}).setdefault(parameter, variable)
    return parameters


def _nothing_shared(parameters: Mapping[str, object], lost: Sequence[str]) -> str:
    if not parameters:
        return "the model has no parameters with the attribute 'param_id'"
    if not lost:
        return "the optimizer has no variables with names of the form '{param_id}.{field}'"
    return (
        f"no parameter of the model has a 'param_id' that the optimizer knows: {shown(lost[0])} "
        f"is in the optimizer, {next(iter(parameters))} in the model. "
        "Are they of one checkpoint, the model first?"
    )


def _attached(model: xr.Dataset, found: Sequence[_State]) -> dict[str, xr.Variable]:
    """Name the state and its axes as the model allows."""
    named: dict[str, _State] = {}
    for state in found:
        name = state.renamed(state.name)
        while name in named or name in model.variables:
            name = f"{name}:"
        named[name] = state
    variables = {str(name) for name in model.variables}
    # A coordinate has the name of its axis, which is then no reason to avoid it.
    axes = AxisNames(reserved={*variables, *named} - {str(dim) for dim in model.dims})
    axes.of("", tuple(model.sizes.values()), [str(dim) for dim in model.sizes])
    attached = {}
    for name, state in named.items():
        same = state.owner is not None and state.owner.shape == state.variable.shape
        dims = state.owner.dims if state.owner is not None and same else state.variable.dims
        chosen = axes.of(name, state.variable.shape, [str(dim) for dim in dims])
        attached[name] = _adapted(state, chosen)
    return attached


def _adapted(state: _State, dims: tuple[str, ...]) -> xr.Variable:
    """Make the variable one of the model; its data are shared, not touched."""
    variable = state.variable.copy(deep=False)
    if state.parameter is not None:
        variable.attrs = {**variable.attrs, "parameter": state.parameter}
    encoding = dict(variable.encoding)
    if "tensor" in encoding:
        encoding["tensor"] = state.renamed(encoding["tensor"])
    if "preferred_chunks" in encoding:
        names = dict(zip(variable.dims, dims, strict=True))
        encoding["preferred_chunks"] = {
            names[dim]: size
            for dim, size in encoding["preferred_chunks"].items()
            if dim in names  # not if its user renamed dimensions
        }
    variable.encoding = encoding
    variable.dims = dims
    return variable
