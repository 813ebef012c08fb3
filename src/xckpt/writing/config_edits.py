"""Edits of the configs beside a checkpoint, as attributes state them.

``attrs["config"]`` is a whole config, or some values without the kind of model. An attribute with
a path, such as ``config.text_config.attention_dropout``, sets one value.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from xckpt.errors import shown
from xckpt.structure.config_check import LABELS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

#: Key of the type of a model.
TYPE = "model_type"
# Keys that state the kind of a model or adapter; each config has one of them.
_KINDS = frozenset({TYPE, "_class_name", "architecture", "peft_type"})


def values_by_file(
    attrs: Mapping[str, Any], names: Collection[str]
) -> dict[str, dict[tuple[str, ...], Any]]:
    """Return the values that attributes set in configs, by the name of the file and their path."""
    values: dict[str, dict[tuple[str, ...], Any]] = {}
    for key, value in attrs.items():
        first, *path = key.split(".")
        if path and f"{first}.json" in names:
            values.setdefault(f"{first}.json", {})[tuple(path)] = value
    return values


def completed(
    edited: Mapping[str, Any], old: Mapping[str, Any], *, is_partial: bool = False
) -> dict[str, Any]:
    """Return an edited config with the other values of the old one.

    A config or section without the kind of the old one states some values. Labels are a whole.
    """
    is_partial = is_partial or not (_KINDS.isdisjoint(old) or not _KINDS.isdisjoint(edited))
    new = {**old, **edited} if is_partial else dict(edited)
    for key in [key for key in edited if key not in LABELS]:
        section, old_section = edited[key], old.get(key)
        if isinstance(section, dict) and isinstance(old_section, dict):
            new[key] = completed(section, old_section, is_partial=is_partial)
    return new


def with_values(
    config: Mapping[str, Any], values: Mapping[tuple[str, ...], Any], name: str
) -> dict[str, Any]:
    """Return a config with values at paths."""
    new = copy.deepcopy(dict(config))
    for path, value in values.items():
        section: Any = new
        for key in path[:-1]:
            section = section.setdefault(key, {})
            if type(section) is not dict:
                text = f"{key} of {name} is no object, and the attribute sets a value in it"
                raise ValueError(f"{shown('.'.join((name.removesuffix('.json'), *path)))}: {text}")
        section[path[-1]] = value
    return new


def nearest(edited: Mapping[str, Any], configs: Collection[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the first config with the fewest differences from an edited one."""

    def differences(config: Mapping[str, Any]) -> int:
        return sum(config.get(key, ...) != edited.get(key, ...) for key in {*config, *edited})

    return min(configs, key=differences)
