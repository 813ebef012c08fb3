"""Corrections of the structure by the user: globs of tensors, and what these are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from xckpt.errors import shown, warn
from xckpt.labels.filters import select, suggest_filters, suggest_names
from xckpt.structure import Role

if TYPE_CHECKING:
    from xckpt.index import Index

#: Fields of `xckpt.structure.TensorInfo` that users can set.
FIELDS = ("role", "component", "module_type", "slot")


def correct(index: Index, corrections: Any) -> Index:
    """Return an Index whose tensors have the facts that the user states."""
    checked = _checked(corrections)
    facts: dict[str, dict[str, str]] = {}
    for glob, fields in checked.items():
        names = select(index.tensors, glob)
        if not names:
            hint = suggest_filters(index.tensors, glob)
            text = f"{index.source}: structure[{glob!r}] matches no tensor{hint}"
            warn(text)
        for name in names:
            facts[name] = facts.get(name, {}) | fields
    tensors = dict(index.tensors)
    for name, fields in facts.items():
        declared = {**(tensors[name].declared or {}), "user": fields}
        tensors[name] = replace(tensors[name], declared=declared)
    return replace(index, tensors=tensors)


def _checked(corrections: Any) -> dict[str, dict[str, str]]:
    """Return corrections, or raise if they are no globs with fields of a `TensorInfo`."""
    if not isinstance(corrections, Mapping):
        raise TypeError(
            "structure maps globs of tensor names to what they are, such as "
            f"{{'*.window': {{'role': 'constant'}}}}, not {corrections!r:.80}"
        )
    checked = {}
    for glob, fields in corrections.items():
        if not isinstance(glob, str) or not isinstance(fields, Mapping):
            raise TypeError(f"structure[{glob!r}] is {fields!r:.80}, not a mapping of fields")
        for field, value in fields.items():
            if field not in FIELDS:
                hint = suggest_names(FIELDS, str(field)) or f"; fields are {', '.join(FIELDS)}"
                raise ValueError(f"structure[{glob!r}]: unknown field {field!r}{hint}")
            if not isinstance(value, str):
                raise TypeError(f"structure[{glob!r}][{field!r}] is a text, not {value!r:.80}")
        role = fields.get("role")
        if role is not None and role not in set(Role):
            roles = [known.value for known in Role]
            hint = suggest_names(roles, role) or f"; roles are {', '.join(roles)}"
            raise ValueError(f"structure[{glob!r}]: unknown role {shown(role)}{hint}")
        checked[glob] = {str(field): str(value) for field, value in fields.items()}
    return checked
