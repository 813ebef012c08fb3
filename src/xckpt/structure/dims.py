"""Names of the dimensions of a file, decided over all of its tensors.

The names of an axis come from the strongest source that has one: the file, facts about the tensor
or the sizes of the model (`xckpt.structure.axes`), or its family (`xckpt.structure.families`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from xckpt.structure.axes import axes_by_facts
from xckpt.structure.facts import ModelFacts, model_facts
from xckpt.structure.info import Described
from xckpt.structure.model import family_of_index
from xckpt.structure.numbering import module_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xckpt.index import Index, Tensor
    from xckpt.structure.families import Family, Place

    Axes = tuple[str | None, ...]
    Shape = tuple[int, ...]


# Names of PEFT, with or without the name of an adapter, and of kohya.
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>A|B|down|up)(?P<adapter>(?:\.[^.]+)?)\.weight")


def axes_of(index: Index) -> Mapping[str, Axes]:
    """Return the names of axes that the file does not state, but that follow from it."""
    # Names are those within a module: ``out``, ``in``, ``embd``. The same name can have
    # another extent in another module.
    return index.once(_axes_of)


def dims_of(index: Index) -> Mapping[str, Axes]:
    """Return the names of `axes_of` for a Dataset of all modules."""
    # A vector has the outputs of the weight next to it. The vector of another module, such as a
    # norm, may belong to the inputs, and has no name.
    return index.once(_dims_of)


def with_stated(index: Index, inferred: Mapping[str, Axes]) -> Mapping[str, Axes]:
    """Return the names of axes that the file states, and the inferred ones of other tensors."""
    stated = {name: t.dims for name, t in index.tensors.items() if t.dims is not None}
    return {**inferred, **stated} if stated else inferred


def infer_dims(shapes: Mapping[str, Shape], attrs: Mapping[Any, Any]) -> Mapping[str, Axes]:
    """Return the names of dimensions that follow from the names of tensors and from attributes."""
    from xckpt.structure.families import family_of

    facts = model_facts(attrs)
    tensors = [Described(name, "float32", shape) for name, shape in shapes.items()]
    return _infer(tensors, facts, family_of(shapes, facts))


def _axes_of(index: Index) -> Mapping[str, Axes]:
    tensors = [t for t in index.tensors.values() if t.dims is None and t.problem is None]
    facts, family = model_facts(index.attrs), family_of_index(index)
    if family is None and facts.types:
        from xckpt.structure.families import family_of

        # A config of another model changes no names.
        family = family_of({tensor.name: tensor.shape for tensor in tensors})
    axes = _infer(tensors, facts, family)
    if len(tensors) == len(index.tensors):
        return axes
    return {tensor.name: axes[tensor.name] for tensor in tensors if tensor.name in axes}


def _dims_of(index: Index) -> Mapping[str, Axes]:
    axes = axes_of(index)
    vectors = [name for name, names in axes.items() if names == ("out",)]
    if not vectors:
        return axes
    modules = {module_of(name) for name, names in axes.items() if len(names) > 1}
    unclear = {name for name in vectors if module_of(name) not in modules}
    return {name: names for name, names in axes.items() if name not in unclear}


def _infer(
    tensors: Sequence[Tensor | Described], facts: ModelFacts, family: Family | None
) -> Mapping[str, Axes]:
    """Return the names of the axes of tensors, by name, where there are any."""
    # A list first: this runs for every tensor of a file, and a generator takes longer.
    declared = [tensor.declared for tensor in tensors]
    has_facts = facts.naming or any(declared)
    by_facts = axes_by_facts(tensors, facts) if has_facts else {}
    factors = _axes_of_factors(tensors)
    if family is None:
        return {**factors, **by_facts} if factors else by_facts
    by_family: Mapping[str, Axes] = {**factors, **family.dims} if factors else family.dims
    for name, axes in by_facts.items():
        if name not in by_family:
            continue
        names = by_family[name]
        # Sizes of the model outrank the family, which is more precise than "out" and "in".
        if facts.naming:
            by_facts[name] = tuple([a or b for a, b in zip(axes, names, strict=True)])
        elif _have_same_outputs(axes, family.describe(name)):
            by_facts[name] = tuple([b or a for a, b in zip(axes, names, strict=True)])
    return {**by_family, **by_facts} if by_facts else by_family


def _axes_of_factors(tensors: Sequence[Tensor | Described]) -> dict[str, Axes]:
    """Return the axes of the two matrices of LoRA, where both have the rank."""
    # The axes of a square product have the names of a square matrix without names.
    pairs: dict[tuple[str, str], dict[str, Tensor | Described]] = defaultdict(dict)
    for tensor in tensors:
        match = _FACTOR.fullmatch(tensor.name) if "lora_" in tensor.name else None
        if match is not None and len(tensor.shape) == 2:
            pairs[match["module"], match["adapter"]][match["side"]] = tensor
    axes: dict[str, Axes] = {}
    for pair in pairs.values():
        for inner, outer in (("A", "B"), ("down", "up")):
            if {inner, outer} <= pair.keys() and pair[inner].shape[0] == pair[outer].shape[1]:
                size, is_square = pair[inner].shape[1], pair[inner].shape[1] == pair[outer].shape[0]
                rows, columns = (f"d{size}_1", f"d{size}_2") if is_square else (None, None)
                axes |= {pair[inner].name: ("rank", columns), pair[outer].name: (rows, "rank")}
    return axes


def _have_same_outputs(axes: Axes, place: Place | None) -> bool:
    outputs = None if place is None else place.outputs
    return outputs is None or "out" not in axes or axes.index("out") == outputs
