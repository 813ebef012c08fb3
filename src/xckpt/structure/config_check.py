"""Differences of a config from the tensors of a model, whose old tensors may be unknown."""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from xckpt.structure.facts import (
    KEYS,
    StatedSize,
    contradicted_extents,
    model_facts,
    sections_of,
    sizes_of_tower,
    sizes_stated_in,
    tower_of,
)
from xckpt.structure.model import Structure

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from xckpt.structure.info import Described

    Shape = tuple[int, ...]

_NO_LAYERS = (
    "no tensor has the name of a layer, as names in a stack from zarr or netCDF have no numbers "
    "(save the checkpoint as it was opened, or .ckpt.unstack() it before to_zarr)"
)
#: Keys that name labels.
LABELS = ("id2label", "label2id")
#: Keys of configs by the name of an axis.
CONFIG_KEYS = KEYS | {"label": ("num_labels", "num_classes", *LABELS)}
# Sections of timm, which builds a model of these classes whatever the config states beside them.
_CLASSES, _SECTIONS_OF_CLASSES = "num_classes", ("model_args", "pretrained_cfg")


@dataclass(slots=True)
class ConfigFit:
    """A config for new tensors, and its differences from the one for the old tensors."""

    config: dict[str, Any]
    #: Values that follow from the new tensors: "vocab_size: 36 (was 32)".
    corrections: list[str] = field(default_factory=list)
    #: Differences without a certain value.
    problems: list[str] = field(default_factory=list)
    #: Names of the model's code that no tensor has, although all shapes are there.
    renamed: str = ""
    #: Weights of the model that are missing.
    missing: list[str] = field(default_factory=list)
    #: Whether these are all of a head that a config may state to be the table of tokens.
    lacks_head: bool = False
    #: Whether layers have the values of the layers that their tensors come from.
    has_moved_kinds: bool = False
    #: Tensors that are gone from layers of another kind, which the user stated.
    exchanged: list[str] = field(default_factory=list)
    #: Tensors that the model lacks, also under another number of a layer.
    added: list[str] = field(default_factory=list)
    #: New tensors with the name of another one after a prefix, or without one.
    repeated: list[str] = field(default_factory=list)
    #: Whether the vocabulary lost rows, has another number of rows, or has them in another order.
    has_fewer_tokens: bool = False
    has_other_tokens: bool = False
    has_reordered_tokens: bool = False
    #: Numbers of tokens that have no row: "pad_token_id: 32".
    unknown_tokens: dict[str, None] = field(default_factory=dict)
    #: Numbers of tokens that have the rows of others, or may have them.
    moved_tokens: frozenset[int] = frozenset()
    #: The key of labels, or of their numbers, that an edit of the other one contradicts.
    contradicted_key: str = ""
    #: Keys whose values the user set.
    edited: frozenset[str] = frozenset()

    def place(self, size: StatedSize) -> str:
        """Return the path of the key of a size."""
        parts = (f"{name}." for name, part in self.config.items() if part is size.section)
        return f"{next(parts, '')}{size.key}"

    def is_edited(self, size: StatedSize) -> bool:
        """Return whether the user set a size, or the section that it is in."""
        return self.place(size).partition(".")[0] in self.edited

    def add_problem(self, text: str, places: Iterable[str] = ()) -> None:
        """Add a difference that edits of these keys may explain."""
        is_explained = not self.edited.isdisjoint([place.partition(".")[0] for place in places])
        if not is_explained and text not in self.problems:
            self.problems.append(text)

    def correct(self, size: StatedSize, value: int) -> None:
        """State another size, unless the user did."""
        section: Any = size.section  # a part of the copy
        if not self.is_edited(size):
            self.corrections.append(f"{self.place(size)}: {value} (was {size.value})")
            section[size.key] = value


def check_config(
    config: Mapping[str, Any], tensors: Sequence[Described], *, counts_layers: bool = True
) -> ConfigFit:
    """Return a config with the sizes that tensors contradict, whose old tensors are unknown."""
    fit = ConfigFit(deepcopy(dict(config)))
    structure = Structure(tensors)
    members: dict[str, list[Described]] = defaultdict(list)
    for tensor in tensors:
        members[main_or_tower(tensor.name, config)].append(tensor)
    sizes = sizes_stated_in(fit.config)
    if counts_layers and "layer" in sizes and not _has_layers(structure):
        fit.problems.append(f"{fit.place(sizes['layer'])} {sizes['layer'].value}: {_NO_LAYERS}")
    for tower, of_tower in members.items():
        sizes = sizes_of_tower(fit.config, tower)
        _check_sizes(fit, sizes, structure, of_tower, counts_layers=counts_layers)
    return fit


def main_or_tower(name: str, config: Mapping[str, Any]) -> str:
    """Return the key of the section for the tower that a tensor is in; empty for the main model."""
    tower = tower_of(name, config)
    return "" if any(config.get(tower) is part for part in sections_of(config)) else tower


def _has_layers(structure: Structure) -> bool:
    """Return whether tensors have numbers of layers, or an axis of them."""
    return any(
        "layer" in structure[name].axes or any(n == "layer" for n, _ in structure[name].indices)
        for name in structure
    )


def _check_sizes(
    fit: ConfigFit,
    sizes: Mapping[str, StatedSize],
    structure: Structure,
    tensors: Iterable[Described],
    *,
    counts_layers: bool,
) -> None:
    """Compare stated sizes with the extents and numbers of tensors."""
    extents: dict[str, set[int]] = defaultdict(set)
    layers, experts = set(), set()
    for tensor in tensors:
        info = structure[tensor.name]
        layers.update([number for name, number in info.indices if name == "layer"])
        experts.update([number for name, number in info.indices if name == "expert"])
        for axis, extent in zip(info.axes, tensor.shape, strict=True):
            extents[axis or ""].add(extent)
    if experts:
        extents["expert"].add(len(experts))
    if not counts_layers:
        extents.pop("layer", None)
    elif layers:
        extents["layer"] = {len(layers)}
    for axis, present in extents.items():
        factors = [sizes[name] for name in axis.split("*") if name in sizes]
        product = prod([size.value for size in factors])
        if len(factors) == axis.count("*") + 1 and present != {product}:
            new = " and ".join(map(str, sorted(present)))
            keys = [f"{fit.place(size)} {size.value}" for size in factors]
            was = f" instead of {product}" if len(keys) > 1 else ""
            fit.problems.append(f"{' and '.join(keys)}: the tensors have {new}{was}")


def check_extents(fit: ConfigFit, tensors: Sequence[Described]) -> None:
    """Compare sizes of single tensors with a config, whose old tensors are unknown."""
    problems: dict[str, str] = {}
    for tensor in tensors:
        problems |= contradicted_extents(tensor.name, tensor.shape, fit.config)
    fit.problems += problems.values()


def check_labels(fit: ConfigFit, tensors: Sequence[Described]) -> None:
    """Compare the labels of a config with the rows of classifiers, whose old ones are unknown."""
    structure = Structure(tensors, model_facts({"config": fit.config}))
    rows = label_counts(structure, {tensor.name: tensor.shape for tensor in tensors})
    for key in CONFIG_KEYS["label"] if rows else ():
        number = count(fit.config.get(key))
        if number is not None and rows != {number}:
            fit.problems.append(other_rows(key, number, rows))
    for size in stated_classes(fit.config) if rows else ():
        if rows != {size.value}:
            fit.problems.append(other_rows(fit.place(size), size.value, rows))


def stated_classes(config: Mapping[str, Any]) -> list[StatedSize]:
    """Return the numbers of classes in the sections of a config of timm."""
    sections = [config.get(name) for name in _SECTIONS_OF_CLASSES]
    return [
        StatedSize(section, _CLASSES, number)
        for section in sections
        if isinstance(section, dict) and type(number := section.get(_CLASSES)) is int
    ]


def other_rows(key: str, count: int, rows: Collection[int]) -> str:
    """Describe a number of labels that classifiers contradict."""
    return f"{key} {count}: the classifier has {' and '.join(map(str, sorted(rows)))} rows"


def label_counts(structure: Structure, shapes: Mapping[str, Shape]) -> set[int]:
    """Return the numbers of rows of classifiers."""
    return {
        extent
        for name in structure
        if structure[name].slot == "classifier"
        for axis, extent in zip(structure[name].axes, shapes[name], strict=True)
        if axis == "label"
    }


def count(value: Any) -> int | None:
    """Return a number, or the number of names; None for other values."""
    if isinstance(value, dict | list):
        return len(value)
    return value if type(value) is int else None
