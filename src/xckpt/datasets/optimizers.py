"""The state of an optimizer, joined to the parameters that it belongs to."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from xckpt.datasets.optimizer_numbers import NumberedState, numbers_in, owners_of
from xckpt.datasets.stacking import unstack_modules
from xckpt.datasets.variables import structure_of_variables
from xckpt.errors import shown, warn
from xckpt.identity import next_namespace
from xckpt.labels import AxisNamer, explicit_name
from xckpt.structure import Role
from xckpt.structure.parameters import WHOLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    import xarray as xr

_OF_OPTIMIZERS = frozenset({Role.MOMENT, Role.MASTER, Role.STEP})
_BY_ID = re.compile(r"(\d+)\.(.+)", re.DOTALL | re.ASCII)
# Fields of the state of torch.optim and similar optimizers.
_FIELDS = WHOLE | {"step", "eta", "mu"}
# Components that wrappers of modules insert anywhere in names.
_WRAPPERS = frozenset(
    {"module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_flat_param"}
)
# First components of names in a file with the state of a whole training.
_ABOVE = frozenset(
    {
        *("app", "model", "optimizer", "optim", "state", "optimizer_state", "optim_state"),
        *("optimizer_state_dict", "base_optimizer_state"),
    }
)


def training_parts(training: xr.Dataset) -> tuple[xr.Dataset, xr.Dataset]:
    """Split the checkpoint of a training run into the model and the state of its optimizer."""
    roles = structure_of_variables(
        {name: v for name, v in training.variables.items() if name not in training.coords}
    ).roles
    state = [name for name, role in roles.items() if role in _OF_OPTIMIZERS]
    if not state:
        raise ValueError(
            "it has no state of an optimizer; give the Dataset or the path of one as well: "
            "join_optimizer(model, optimizer)"
        )
    model = training.drop_vars(state)
    return model, training.drop_vars([name for name in roles if name in model.variables])


def attach(
    model: xr.Dataset, optimizer: xr.Dataset, parameters: Sequence[str] | None = None
) -> xr.Dataset:
    """Attach the state of an optimizer; see `xckpt.opening.optimizers.join_optimizer`."""
    model, optimizer = unstack_modules(model), unstack_modules(optimizer)
    states = {str(n): v for n, v in optimizer.variables.items() if n not in optimizer.coords}
    by_number = numbers_in(states, optimizer.attrs)
    targets = _Parameters(model)
    numbered = _owners_by_number(by_number, targets, parameters)
    attached_states: list[_State] = []
    lost: list[str] = []
    for name, state in states.items():
        tensor = str(state.encoding["tensor"]) if "part" in state.encoding else name
        owners, field = numbered.get(tensor) or targets.owners(tensor)
        suffix = name.removeprefix(tensor)
        attached_states += [_State(name, state, *owner, field, suffix) for owner in owners.items()]
        if not owners:
            attached_states.append(_State(name, state))
            lost += [name] if _is_state(tensor) else []
    if all(state.parameter is None for state in attached_states):
        raise ValueError(_nothing_shared(targets, lost))
    if lost:
        text = f"{len(lost)} variables of the optimizer, {shown(lost[0])} the first, belong to no"
        warn(f"{text} parameter of the model")
    joined = model.assign(_attached(model, attached_states))
    if "namespace" in joined.encoding:
        # The same model may be joined to another optimizer, whose state has the same names.
        joined.encoding = {**joined.encoding, "namespace": next_namespace()}
    return joined


class _State(NamedTuple):
    """A variable of an optimizer, and the parameter that it belongs to."""

    name: str
    variable: xr.Variable
    parameter: str | None = None
    owner: xr.Variable | None = None
    field: str = ""
    suffix: str = ""  # of a part

    def renamed(self, name: str, suffix: str = "") -> str:
        """Return the name in the joined Dataset: ``parameter:field``."""
        return name if self.parameter is None else f"{self.parameter}:{self.field}{suffix}"


_Owners = dict[str, "xr.Variable"]


class _Parameters:
    """The parameters of a model by identity and by name, with variables that have their axes."""

    def __init__(self, model: xr.Dataset) -> None:
        self.by_id: dict[str, _Owners] = {}
        self.by_name: dict[str, _Owners] = {}
        for name, variable in model.variables.items():
            identity = variable.attrs.get("param_id")
            tensor = str(variable.encoding.get("tensor", name))
            # Skip joined state, which has the identity of its parameter.
            if "parameter" in variable.attrs or tensor.startswith(f"{identity}."):
                continue
            parameter = tensor if "part" in variable.encoding else str(name)
            self.by_name.setdefault(parameter, {}).setdefault(parameter, variable)
            if identity is not None:
                self.by_id.setdefault(str(identity), {}).setdefault(parameter, variable)
        # Names without wrappers and first components, if they identify a single parameter.
        self._bare: dict[str, _Owners] = {}
        for parameter, owner in self.by_name.items():
            bare = _without_wrappers(parameter.split("."))
            while len(bare) > 1 and bare[0] in _ABOVE:
                del bare[0]
            self._bare.setdefault(".".join(bare), {}).update(owner)
        self._bare = {name: owners for name, owners in self._bare.items() if len(owners) == 1}

    def owners(self, name: str) -> tuple[_Owners, str]:
        """Return the parameters that state belongs to, and its field; empty if there are none."""
        path = name.split(".")
        for by_name, components in ((self.by_name, path), (self._bare, _without_wrappers(path))):
            for start in range(len(components)):
                if start and components[start - 1] not in _ABOVE:
                    break
                inner = components[start:]
                by_id = _BY_ID.fullmatch(".".join(inner))
                if by_id is not None and by_id[1] in self.by_id:
                    return self.by_id[by_id[1]], by_id[2]
                for stop in range(len(inner) - 1, 0, -1):
                    owners = by_name.get(".".join(inner[:stop]))
                    if owners:
                        return owners, ".".join(inner[stop:])
                owners = by_name.get(".".join(inner[1:])) if inner[0] in _FIELDS else None
                if owners:
                    return owners, inner[0]
        return {}, ""


def _owners_by_number(
    optimizers: Sequence[NumberedState], targets: _Parameters, parameters: Sequence[str] | None
) -> dict[str, tuple[_Owners, str]]:
    """Return the parameters and the field of each variable of numbered state, by its name."""
    if parameters is not None and len(optimizers) != 1:
        raise ValueError(
            f"parameters= is for an optimizer that numbers its parameters and has 'param_groups'; "
            f"there are {len(optimizers)}"
        )
    result: dict[str, tuple[_Owners, str]] = {}
    states = {
        optimizer.name_of(number, field)
        for optimizer in optimizers
        for number, fields in optimizer.states.items()
        for field in fields
    }
    model = {
        name: variable
        for name, owners in targets.by_name.items()
        for variable in owners.values()
        if name not in states
    }
    for numbers in optimizers:
        names = parameters
        if names is None and numbers.names is not None:
            names = [next(iter(targets.owners(f"{n}.state")[0]), n) for n in numbers.names]
        for number, owner in owners_of(numbers, model, names).items():
            for field in numbers.states[number]:
                result[numbers.name_of(number, field)] = ({owner: model[owner]}, field)
    return result


def _without_wrappers(path: Sequence[str]) -> list[str]:
    return [component for component in path if component not in _WRAPPERS]


def _is_state(name: str) -> bool:
    """Return whether a name looks like a field of the state of a parameter."""
    path = name.split(".")
    while len(path) > 1 and path[0] in _ABOVE | _WRAPPERS:
        del path[0]
    is_field = len(path) > 1 and not _FIELDS.isdisjoint({path[0], path[-1]})
    return is_field or _BY_ID.fullmatch(".".join(path)) is not None


def _nothing_shared(parameters: _Parameters, lost: Sequence[str]) -> str:
    first = next(iter(parameters.by_name), None)
    has = f"; {shown(first)} is in the model" if first is not None else ""
    if not parameters.by_id:
        example = f", {shown(lost[0])} for one" if lost else ""
        return (
            "the model has no parameters with the attribute 'param_id', and none of a name that is "
            f"in the names of the optimizer{example}{has}"
        )
    if not lost:
        return (
            "the optimizer has no variables with names of the form '{param_id}.{field}' or "
            f"'{{parameter}}.{{field}}'{has}"
        )
    return (
        f"no parameter of the model has a 'param_id' or a name that the optimizer knows: "
        f"{shown(lost[0])} is in the optimizer, {next(iter(parameters.by_id))} in the model. "
        "Are they of one checkpoint, the model first?"
    )


def _attached(model: xr.Dataset, states: Sequence[_State]) -> dict[str, xr.Variable]:
    """Return the state as variables of the model, with its names and axes where they fit."""
    named: dict[str, _State] = {}
    for state in states:
        name = state.renamed(state.name, state.suffix)
        while name in named or name in model.variables:
            name = f"{name}:"
        named[name] = state
    variables = {str(name) for name in model.variables}
    # Axes may have the name of a coordinate along them.
    axes = AxisNamer(reserved={*variables, *named} - {str(dim) for dim in model.dims})
    for dim, size in model.sizes.items():
        axes.claim(str(dim), size)
    attached = {}
    for name, state in named.items():
        same = state.owner is not None and state.owner.shape == state.variable.shape
        dims = state.owner.dims if state.owner is not None and same else state.variable.dims
        chosen = axes.name_axes(name, state.variable.shape, tuple(map(explicit_name, dims)))
        # The copy shares the data.
        variable = attached[name] = state.variable.copy(deep=False)
        if state.parameter is not None:
            variable.attrs = {**variable.attrs, "parameter": state.parameter}
        encoding = dict(variable.encoding)
        if "tensor" in encoding:
            encoding["tensor"] = state.renamed(encoding["tensor"])
        if "preferred_chunks" in encoding:
            new_dims = dict(zip(variable.dims, chosen, strict=True))
            encoding["preferred_chunks"] = {
                new_dims[dim]: size
                for dim, size in encoding["preferred_chunks"].items()
                if dim in new_dims  # false after the user renamed dimensions
            }
        variable.encoding = encoding
        variable.dims = chosen
    return attached
