"""The state of an optimizer, joined to the parameters that it belongs to.

A ``state_dict()`` numbers parameters in the order in which they were passed to the optimizer, group
by group: ``state.3.exp_avg`` belongs to the fourth. It has no names, so that these follow from the
order of the tensors in the model, and all shapes have to agree. An ambiguous assignment is an
error.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.datasets.stacking import unstack_modules
from xckpt.datasets.variables import structure_of_variables
from xckpt.errors import shown, warn
from xckpt.identity import next_namespace
from xckpt.labels import AxisNamer, explicit_name
from xckpt.structure import Role
from xckpt.structure.facts import WHOLE, align
from xckpt.structure.numbering import split_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    import xarray as xr

    Shape = tuple[int, ...]

_STATE = re.compile(r"((?:.+\.)?)state\.([0-9]{1,18})\.(.+)", re.DOTALL)
_GROUP = re.compile(r"((?:.+\.)?)param_groups\.([0-9]{1,9})\.params", re.DOTALL)
_ENTRY = re.compile(
    r"((?:.+\.)?param_groups\.[0-9]{1,9}\.param(?:s|_names))\.([0-9]{1,9})", re.DOTALL
)
# Roles of tensors other than parameters, if their names leave no doubt.
_NOT_TRAINED = frozenset({Role.STATISTIC, Role.COUNTER, Role.AVERAGE, Role.MOMENT, Role.MASTER})
_REMEDY = "pass parameters=[...], the names in the order of the optimizer, group after group"


class NumberedState(NamedTuple):
    """The numbered state of one optimizer."""

    prefix: str  # text before ``state.0.exp_avg``
    groups: list[list[int]]  # numbers of the parameters in each group
    names: list[str] | None  # all parameters in order; None if the optimizer does not name them
    states: dict[int, dict[str, xr.Variable]]  # of each parameter, by field

    def name_of(self, number: int, field: str) -> str:
        """Return the name of a variable."""
        return f"{self.prefix}state.{number}.{field}"


def numbers_in(states: Mapping[str, xr.Variable], attrs: Mapping[Any, Any]) -> list[NumberedState]:
    """Return the state of each optimizer that numbers its parameters."""
    attrs = _joined_lists(attrs)
    groups: dict[str, dict[int, list[int]]] = {}
    for key, value in attrs.items():
        match = _GROUP.fullmatch(key)
        if match and isinstance(value, list | tuple) and all(type(n) is int for n in value):
            groups.setdefault(match[1], {})[int(match[2])] = list(value)
    numbered: dict[str, dict[int, dict[str, xr.Variable]]] = {}
    for name, variable in states.items():
        match = _STATE.fullmatch(name)
        if match and match[1] in groups:
            fields = numbered.setdefault(match[1], {}).setdefault(int(match[2]), {})
            fields[match[3]] = variable
    result = []
    for prefix, by_number in numbered.items():
        positions = sorted(groups[prefix])
        members = [groups[prefix][position] for position in positions]
        listed = Counter(number for group in members for number in group)
        strange = [n for n in by_number if listed[n] != 1]
        if strange:
            raise ValueError(
                f"'{prefix}param_groups' of the optimizer list parameter {strange[0]}, which has "
                f"state, {listed[strange[0]]} times"
            )
        names: list[str] = []
        for position in positions:
            group_names = attrs.get(f"{prefix}param_groups.{position}.param_names")
            names += map(str, group_names) if isinstance(group_names, list | tuple) else ()
        all_names = names if len(names) == sum(map(len, members)) else None
        result.append(NumberedState(prefix, members, all_names, by_number))
    return result


def _joined_lists(attrs: Mapping[Any, Any]) -> dict[str, Any]:
    """Return attributes with the entries of the lists in groups joined to lists again."""
    joined: dict[str, Any] = {}
    entries: dict[str, dict[int, Any]] = {}
    for key, value in attrs.items():
        match = _ENTRY.fullmatch(str(key))
        if match is None:
            joined[str(key)] = value
        else:
            entries.setdefault(match[1], {})[int(match[2])] = value
    for key, by_position in entries.items():
        joined[key] = [by_position[position] for position in sorted(by_position)]
    return joined


def owners_of(
    numbers: NumberedState, model: Mapping[str, xr.Variable], parameters: Sequence[str] | None
) -> dict[int, str]:
    """Return the name of the parameter of each number that has state."""
    order = [number for group in numbers.groups for number in group]
    shapes = {number: _shape(numbers, number) for number in numbers.states}
    if parameters is not None:
        if len(parameters) != len(order):
            raise ValueError(
                f"parameters has {len(parameters)} names, and the optimizer {len(order)} parameters"
            )
        owners = dict(zip(order, parameters, strict=True))
    else:
        candidates = _candidates(model)
        # Judge the whole model: a few weights may be in alphabetic order by chance.
        is_ordered = _is_ordered(model)
        owners = {}
        for group, inside in _by_group(numbers, shapes, candidates):
            if is_ordered:
                owners |= _aligned(numbers, group, shapes, inside)
            else:
                owners |= _by_shape(numbers, shapes, group, inside)
    for number, shape in shapes.items():
        name = owners[number]
        if name not in model:
            raise ValueError(f"{_some(numbers, number)} is of {shown(name)}, which the model lacks")
        _require_shape(numbers, number, shape, name, model[name].shape)
    return {number: owners[number] for number in shapes}


def _shape(numbers: NumberedState, number: int) -> Shape | None:
    """Return the shape of a parameter, inferred from its state; None if it is unknown."""
    fields = {field: v.shape for field, v in numbers.states[number].items()}
    stated = {field: shape for field, shape in fields.items() if field in WHOLE}
    if not stated:  # such as Adafactor, which has means of rows and of columns
        for field, row in fields.items():
            column = fields.get(f"{field.removesuffix('_row')}_col")
            if field.endswith("_row") and column and len(column) == len(row):
                stated[field] = (*row, column[-1])
    if not stated:
        stated = {field: shape for field, shape in fields.items() if shape and field != "step"}
        stated = stated if len(set(stated.values())) == 1 else {}
    if len(set(stated.values())) > 1:
        field = numbers.name_of(number, next(iter(stated)))
        raise ValueError(
            f"{shown(field)} and others of parameter {number} have several shapes: "
            f"{', '.join(map(str, sorted(set(stated.values()))))}"
        )
    return next(iter(stated.values()), None)


def _candidates(model: Mapping[str, xr.Variable]) -> dict[str, Shape]:
    """Return the shapes of possible parameters: floats that are not tied and have no other role."""
    roles = structure_of_variables(model).roles
    return {
        name: variable.shape
        for name, variable in model.items()
        if variable.dtype.kind not in "iubSUO"
        and roles[name] not in _NOT_TRAINED
        and "shares" not in variable.encoding
        and "part" not in variable.encoding
        and "parameter" not in variable.attrs
    }


def _by_group(
    numbers: NumberedState, shapes: Mapping[int, Shape | None], candidates: Mapping[str, Shape]
) -> Iterable[tuple[list[int], dict[str, Shape]]]:
    """Return each group with the tensors that only it can have."""
    groups = [group for group in numbers.groups if not shapes.keys().isdisjoint(group)]
    if len(groups) == 1 == len(numbers.groups):
        yield groups[0], dict(candidates)
        return
    groups = [[number for number in group if number in shapes] for group in groups]
    owner: dict[Shape | None, int] = {}
    for position, group in enumerate(groups):
        for number in group:
            if owner.setdefault(shapes[number], position) != position or shapes[number] is None:
                raise ValueError(
                    f"{_some(numbers, number)} and state of another group of parameters have the "
                    f"shape {shapes[number]}, which is ambiguous: {_REMEDY}"
                )
    for position, group in enumerate(groups):
        yield group, {n: shape for n, shape in candidates.items() if owner.get(shape) == position}


def _aligned(
    numbers: NumberedState,
    group: list[int],
    shapes: Mapping[int, Shape | None],
    candidates: Mapping[str, Shape],
) -> dict[int, str]:
    """Assign the numbers of a group to tensors in their order, if there is one way to do so."""
    names = list(candidates)
    first = align(group, shapes, names, candidates)
    if len(first) < len(group):
        for number, name in zip(group, names, strict=False) if len(names) == len(group) else ():
            _require_shape(numbers, number, shapes.get(number), name, candidates[name])
        number = group[len(first)]
        raise ValueError(
            f"the model has {len(names)} tensors that may be parameters, the optimizer "
            f"{len(group)} of them, and for {_some(numbers, number)} of shape "
            f"{shapes.get(number)} none is left in their order. Are they of one checkpoint?"
        )
    last = align(group[::-1], shapes, names[::-1], candidates)[::-1]
    for number, leftmost, rightmost in zip(group, first, last, strict=True):
        if number in shapes and leftmost != rightmost:
            raise ValueError(
                f"{_some(numbers, number)} of shape {shapes[number]} may belong to "
                f"{shown(leftmost)} or to {shown(rightmost)}: {_REMEDY}, or choose with "
                "model.ckpt.find what it trains"
            )
    return dict(zip(group, first, strict=True))


def _by_shape(
    numbers: NumberedState,
    shapes: Mapping[int, Shape | None],
    group: Collection[int],
    candidates: Mapping[str, Shape],
) -> dict[int, str]:
    """Assign numbers by their shape alone."""
    times = Counter(shapes.get(number) for number in group)
    owners = {}
    for number in group:
        if number not in shapes:
            continue
        fitting = [name for name, shape in candidates.items() if shape == shapes[number]]
        if len(fitting) != 1 or times[shapes[number]] > 1:
            options = " or ".join(map(shown, fitting[:2])) or "nothing in the model"
            raise ValueError(
                f"the file has tensors in alphabetic order, unlike the model, so "
                f"{_some(numbers, number)} of shape {shapes[number]} may belong to {options}: "
                f"{_REMEDY}"
            )
        owners[number] = fitting[0]
    return owners


def _is_ordered(names: Iterable[str]) -> bool:
    """Return whether names are in the order of the model, rather than mostly alphabetic."""
    children: dict[tuple[str, ...], dict[str, None]] = {}
    for name in names:
        path = tuple(split_name(name)[:64])
        for depth, part in enumerate(path):
            children.setdefault(path[:depth], {})[part] = None
    several = [list(parts) for parts in children.values() if len(parts) > 1]
    alphabetic = sum(parts == sorted(parts) for parts in several)
    return not several or 2 * alphabetic < len(several)


def _some(numbers: NumberedState, number: int) -> str:
    fields = numbers.states.get(number, {})
    field = next((name for name in fields if name in WHOLE), next(iter(fields), ""))
    return shown(numbers.name_of(number, field)) if field else f"parameter {number}"


def _require_shape(
    numbers: NumberedState, number: int, shape: Shape | None, name: str, other: Shape
) -> None:
    if shape not in {None, other}:
        raise ValueError(
            f"{_some(numbers, number)} is of a parameter of shape {shape}, and in its place in the "
            f"model is {shown(name)} of shape {other}. Are they of one checkpoint?"
        )


_OF_OPTIMIZERS = frozenset({Role.MOMENT, Role.MASTER, Role.STEP})
_SEPARATORS = re.compile(r"[./]")
_BY_ID = re.compile(r"(\d+)\.(.+)", re.DOTALL | re.ASCII)
# Fields of the state of torch.optim, optax and similar optimizers.
_FIELDS = WHOLE | {
    *("step", "eta", "mu", "nu", "trace", "v", "v_row", "v_col", "acc_grads", "sum_of_squares"),
    *("ema", "z"),
}
# Components that wrappers of modules insert anywhere in names.
_WRAPPERS = frozenset(
    {"module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_flat_param"}
)
# First components of names in a file with the state of a whole training.
_ABOVE = frozenset({
    "app", "model", "optimizer", "optim", "state", "optimizer_state", "optim_state",
    "optimizer_state_dict", "base_optimizer_state", "params", "opt_state", "inner_state",
    "inner_states", "inner_opt_state",
})  # fmt: skip


def training_parts(training: xr.Dataset) -> tuple[xr.Dataset, xr.Dataset]:
    """Split the checkpoint of a training run into the model and the state of its optimizer."""
    roles = structure_of_variables(
        {name: v for name, v in training.variables.items() if name not in training.coords}
    ).roles
    state = [name for name, role in roles.items() if role in _OF_OPTIMIZERS]
    if not state:
        facts = "".join(f" ({fact})" for fact in training.encoding.get("facts", ()))
        raise ValueError(
            f"it has no state of an optimizer{facts}; give the Dataset or the path of one as well: "
            "join_optimizer(model, optimizer)"
        )
    model = training.drop_vars(state)
    return model, training.drop_vars([name for name in roles if name in model.variables])


def attach(
    model: xr.Dataset, optimizer: xr.Dataset, parameters: Sequence[str] | None = None
) -> xr.Dataset:
    """Attach the state of an optimizer; see `xckpt.entry.join_optimizer`."""
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
            lost += [name] if _is_state(tensor, has_ids=bool(targets.by_id)) else []
    if all(state.parameter is None for state in attached_states):
        raise ValueError(_nothing_shared(targets, lost, [*states]))
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
            bare = _without_wrappers(_SEPARATORS.split(parameter))
            while len(bare) > 1 and bare[0] in _ABOVE:
                del bare[0]
            self._bare.setdefault(".".join(bare), {}).update(owner)
        self._bare = {name: owners for name, owners in self._bare.items() if len(owners) == 1}

    def owners(self, name: str) -> tuple[_Owners, str]:
        """Return the parameters that state belongs to, and its field; empty without a match."""
        bare = _without_wrappers(_SEPARATORS.split(name))
        for by_name, components in ((self.by_name, name.split(".")), (self._bare, bare)):
            for start in range(len(components)):
                if not _are_above(components[max(start - 2, 0) : start]):
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


def _are_above(last: Sequence[str]) -> bool:
    """Return whether the last two components before a name are of no parameter.

    optax numbers the optimizers of a chain, and ``multi_transform`` labels them.
    """
    return not last or last[-1] in _ABOVE or last[-1].isdecimal() or last[0] == "inner_states"


def _without_wrappers(path: Sequence[str]) -> list[str]:
    return [component for component in path if component not in _WRAPPERS]


def _is_state(name: str, *, has_ids: bool) -> bool:
    """Return whether a name looks like a field of the state of a parameter."""
    path = _SEPARATORS.split(name)
    while len(path) > 1 and path[0] in _ABOVE | _WRAPPERS:
        del path[0]
    is_field = len(path) > 1 and not _FIELDS.isdisjoint({path[0], path[-1]})
    return is_field or (has_ids and _BY_ID.fullmatch(".".join(path)) is not None)


def _nothing_shared(parameters: _Parameters, lost: Sequence[str], states: Sequence[str]) -> str:
    first = next(iter(parameters.by_name), None)
    has = f"; {shown(first)} is in the model" if first is not None else ""
    if not parameters.by_id:
        example = f", {shown((lost or states)[0])} for one" if states else ""
        return (
            "the model has no parameters with the attribute 'param_id', and none of a name that is "
            f"in the names of the optimizer{example}{has} (rename the tensors of one "
            "side if both are of one checkpoint)"
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
    states_by_name: dict[str, _State] = {}
    for state in states:
        name = state.renamed(state.name, state.suffix)
        while name in states_by_name or name in model.variables:
            name = f"{name}:"
        states_by_name[name] = state
    variables = {str(name) for name in model.variables}
    # Axes may have the name of a coordinate along them.
    axes = AxisNamer(reserved={*variables, *states_by_name} - {str(dim) for dim in model.dims})
    for dim, size in model.sizes.items():
        axes.claim(str(dim), size)
    attached = {}
    for name, state in states_by_name.items():
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
