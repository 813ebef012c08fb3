"""Numbers of parameters in the state of torch.optim, and the parameters that they stand for.

A ``state_dict()`` numbers parameters in the order in which they were passed to the optimizer, group
by group: ``state.3.exp_avg`` belongs to the fourth. It has no names, so that these follow from the
order of the tensors in the model, and all shapes have to agree. An ambiguous assignment is an
error.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.datasets.variables import structure_of_variables
from xckpt.errors import shown
from xckpt.structure import Role
from xckpt.structure.numbering import split_name
from xckpt.structure.parameters import WHOLE, align

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
_REMEDY = "pass parameters=[...], the names in the order in which the optimizer got them"


class NumberedState(NamedTuple):
    """The numbered state of one optimizer."""

    prefix: str  # text before ``state.0.exp_avg``
    groups: list[list[int]]  # numbers of the parameters in each group
    names: list[str] | None  # of all parameters in order, None if the optimizer has none
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
    field = next(iter(numbers.states.get(number, ())), "")
    return shown(numbers.name_of(number, field)) if field else f"parameter {number}"


def _require_shape(
    numbers: NumberedState, number: int, shape: Shape | None, name: str, other: Shape
) -> None:
    if shape not in {None, other}:
        raise ValueError(
            f"{_some(numbers, number)} is of a parameter of shape {shape}, and in its place in the "
            f"model is {shown(name)} of shape {other}. Are they of one checkpoint?"
        )
