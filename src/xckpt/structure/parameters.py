"""Parameters that an optimizer lists by number, found by their order and shapes.

`torch.optim` numbers parameters in the order in which it got them. The numbers name no tensor, but
the tensors of a model are in the same order in a file, and the state of each parameter has its
shape. A tensor counts as listed only if no other assignment in this order is possible.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Shape = tuple[int, ...]

_GROUP = re.compile(r"((?:.+\.)?)param_groups\.[0-9]{1,9}\.params", re.DOTALL)
_STATE = re.compile(r"state\.([0-9]{1,18})\.([A-Za-z_]+)")
#: Fields of the state of an optimizer that have the shape of their parameter.
WHOLE = frozenset({
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg",
    "grad_avg", "acc_delta", "sum", "prev", "step_size", "ax",
})  # fmt: skip
_MOST_LISTED = 1 << 20


def groups_of_numbers(attrs: Mapping[Any, Any]) -> dict[str, list[list[int]]]:
    """Return the numbers in each group of parameters, by the words before ``param_groups``."""
    groups: dict[str, list[list[int]]] = {}
    for key, value in attrs.items():
        match = _GROUP.fullmatch(key) if isinstance(key, str) and "param_groups." in key else None
        if match is None or not isinstance(value, list) or len(value) > _MOST_LISTED:
            continue
        if all(type(number) is int for number in value):
            groups.setdefault(match[1], []).append(value)
    return groups


def listed_by_number(
    groups: Mapping[str, Sequence[Sequence[int]]],
    shapes: Mapping[str, Shape],  # all tensors of the file
    candidates: Sequence[str],  # tensors of the model, in their order
    buffers: frozenset[str],  # candidates that have the names of buffers
) -> set[str]:
    """Return the tensors that are certain to be in the lists of the optimizers of a file."""
    listed: set[str] = set()
    for prefix, numbers in groups.items():
        by_number = _shapes_of_state(prefix, shapes)
        inside = {name: shapes[name] for name in candidates}
        all_numbers = [number for group in numbers for number in group]
        trained = [name for name in candidates if name not in buffers]
        is_counted = len(numbers) == 1 and len(trained) == len(all_numbers)
        if is_counted and by_number.keys() >= set(all_numbers):
            # As many tensors as numbers: the others are buffers if the shapes agree.
            names = align(all_numbers, by_number, trained, inside)
            if len(names) == len(all_numbers):
                listed.update(names)
                continue
        for group in numbers:
            first = align(group, by_number, candidates, inside)
            last = align(group[::-1], by_number, candidates[::-1], inside)[::-1]
            if len(first) == len(last) == len(group):
                pairs = zip(group, first, last, strict=True)
                listed.update(a for number, a, b in pairs if a == b and number in by_number)
    return listed


def _shapes_of_state(prefix: str, shapes: Mapping[str, Shape]) -> dict[int, Shape]:
    """Return the shape of each parameter that has state of this shape, by its number."""
    by_number = {}
    for name, shape in shapes.items():
        match = _STATE.fullmatch(name, len(prefix)) if name.startswith(prefix) else None
        if match is not None and match[2] in WHOLE:
            by_number[int(match[1])] = shape
    return by_number


def align(
    group: Iterable[int],
    shapes: Mapping[int, Shape | None],
    names: Iterable[str],
    candidates: Mapping[str, Shape],
) -> list[str]:
    """Assign each number to the next tensor of its shape; stop at a number without one."""
    remaining, assigned = iter(names), []
    for number in group:
        shape = shapes.get(number)
        name = next((name for name in remaining if shape in {None, candidates[name]}), None)
        if name is None:
            break
        assigned.append(name)
    return assigned
