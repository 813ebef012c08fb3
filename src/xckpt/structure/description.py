"""`describe_model`: a checkpoint by the statements of its file and by its structure.

A name counts only if the file states it: ``general.name`` of GGUF, ``modelspec.title``, a class in
``architectures``. A family that only names of tensors suggest is a resemblance, and says so. A
config whose model has other tensors describes another model, so that its sizes do not count.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from xckpt.structure.info import OF_TRAINING, PARAMETERS, Role
from xckpt.structure.numbering import leaf_of, module_of, split_leaf

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from xckpt.structure.forms import Form
    from xckpt.structure.model import Structure

    Kind = Literal["model", "training", "optimizer", "adapter", ""]

# Attributes with the name of the model: GGUF, Stability AI's modelspec, kohya.
_NAMES = ("general.name", "modelspec.title", "ss_output_name")
_BASES = ("base_model_name_or_path", "base_model", "model")
_BASES_OF_ADAPTERS = ("ss_sd_model_name", "ss_base_model_version", "general.base_model.0.name")
_STEPS = ("global_step", "global_steps", "step", "iteration", "iterations")
_CLASSES = ("_class_name", "class_name", "architecture", "arch")
# Names that Keras gives to models without one.
_UNNAMED = re.compile(r"(sequential|functional|model)(_[0-9]+)?")
_MOST_STEPS = 1 << 53
_LONGEST = 200
# The name of a model on the Hub, and not a path on a computer.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?")
_TOOLS = frozenset({"checkpoint", "output", "outputs", "model", "models", "None", "null"})
# Components whose sizes describe the whole, best first.
_MAIN = ("", "text", "encoder", "decoder", "vision", "audio")
# Families of components that only one kind of pipeline has.
_PIPELINES = {
    frozenset({"unet", "vae"}): "Stable Diffusion",
    frozenset({"sd3", "vae"}): "Stable Diffusion 3",
    frozenset({"flux", "vae"}): "Flux",
}
_SUBJECTS = ("family", "contradicted", "exporter")
_SIZES = ("embd", "head", "head_kv", "expert")


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Description of a checkpoint; renderers must escape texts, which the file may state."""

    #: Empty if nothing is known.
    kind: Kind = ""
    #: As the file states it.
    name: str = ""
    class_name: str = ""
    #: Family of architectures, and whether the file states it or names of tensors suggest it.
    family: str = ""
    is_stated: bool = False
    #: Type of model in a config, if the tensors have other names.
    contradicted: str = ""
    #: Model that this one, or the adapter, is made for or was made from.
    base: str = ""
    #: Kind of an adapter, its rank and its alpha; None if they are unknown, or differ.
    adapter: str = ""
    rank: int | None = None
    alpha: float | None = None
    #: Step of a training checkpoint.
    step: int | None = None
    #: Method of quantisation that the config states, and bits of a code; 0 if these differ.
    quantization: str = ""
    bits: int = 0
    #: Program that exported a graph.
    exporter: str = ""
    #: Sizes by name, such as ``embd``, as far as tensors have them.
    sizes: Mapping[str, int] = field(default_factory=dict)
    #: Number of repeated layers by component.
    layers: Mapping[str, int] = field(default_factory=dict)
    #: Family of each model in the file, by component; empty for a single model.
    components: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return the description as JSON has it, without fields that are empty."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        mappings = {name: dict(fields[name]) for name in ("sizes", "layers", "components")}
        return {name: value for name, value in {**fields, **mappings}.items() if value}


def describe_model(structure: Structure, attrs: Mapping[Any, Any]) -> ModelDescription:
    """Describe the model of a checkpoint; `attrs` are the attributes of its file."""
    if not len(structure):
        return ModelDescription()
    facts = structure.facts
    config = facts.config
    contradicted = facts.family if structure.contradicts_config else ""
    is_stated = bool(facts.family or facts.types) and not contradicted
    stated = {"name": _name(attrs, config), "class_name": _class_name(attrs, config)}
    family = "" if contradicted else structure.family
    pipeline = [n for parts, n in _PIPELINES.items() if parts <= {*structure.components.values()}]
    if pipeline and not is_stated:
        family = pipeline[0]
    adapter = _adapter_config(attrs)
    factors = structure.factors
    fields: dict[str, Any] = {
        **({} if contradicted else stated),
        "family": family,
        "is_stated": is_stated,
        "contradicted": contradicted,
        "base": "" if contradicted else _hub_name(config.get("_name_or_path")),
        "exporter": _exporter(attrs) if facts.format == "onnx" else "",
        "step": _step(attrs),
    }
    if facts.quantization is not None and Role.CODES in structure.roles.values():
        fields |= {"quantization": facts.quantization.method, "bits": facts.quantization.bits}
    if family:
        fields |= _extents(structure)
    kind = _kind(structure)
    if factors or adapter or attrs.get("general.type") == "adapter":
        kind = "adapter"
        fields |= _described_adapter(adapter, factors, attrs)
    elif kind == "model" and not any(
        fields.get(name) for name in ("name", "class_name", *_SUBJECTS)
    ):
        kind = "model" if fields.get("quantization") else ""
    return ModelDescription(kind=kind, **fields)


def _kind(structure: Structure) -> Kind:
    """Return the kind of a checkpoint by the roles of its tensors."""
    roles = set(structure.roles.values())
    has_state = bool(roles & OF_TRAINING)
    if not roles & PARAMETERS:
        return "optimizer" if has_state else ""
    return "training" if has_state else "model"


# --- what the file states -------------------------------------------------------------------------


def _text(value: Any) -> str:
    """Return a text of a file that is short enough for a name; empty for anything else."""
    is_text = isinstance(value, str) and len(value) <= _LONGEST
    return value.strip() if is_text else ""


def _name(attrs: Mapping[Any, Any], config: Mapping[str, Any]) -> str:
    """Return the name that a file states for its model."""
    inner = config.get("config") if "class_name" in config else None  # of Keras
    of_layer = _text(inner.get("name")) if isinstance(inner, dict) else ""
    names = [_text(attrs.get(key)) for key in _NAMES]
    return next(filter(None, names), "" if _UNNAMED.fullmatch(of_layer) else of_layer)


def _class_name(attrs: Mapping[Any, Any], config: Mapping[str, Any]) -> str:
    """Return the class that a file states for its model."""
    classes = config.get("architectures")
    if isinstance(classes, list) and classes:
        return _text(classes[0])
    texts = [_text(section.get(key)) for section in (config, attrs) for key in _CLASSES]
    return next((text for text in texts if text not in {"", "Model"}), "")


def _hub_name(value: Any) -> str:
    """Return the name of a model on the Hub; empty for a path."""
    name = _text(value)
    is_name = _HUB_NAME.fullmatch(name) is not None and name not in _TOOLS
    return name if is_name and not name.startswith("checkpoint-") else ""


def _exporter(attrs: Mapping[Any, Any]) -> str:
    names = [_text(attrs.get(key)) for key in ("producer_name", "producer_version")]
    return " ".join(filter(None, names)) if names[0] else ""


def _step(attrs: Mapping[Any, Any]) -> int | None:
    for key in _STEPS:
        step = attrs.get(key)
        if type(step) is int and 0 <= step < _MOST_STEPS:
            return step
    return None


# --- adapters -------------------------------------------------------------------------------------


def _adapter_config(attrs: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Return the config of an adapter, of PEFT or as diffusers stores it in the file."""
    for key in ("adapter_config", "lora_adapter_metadata"):
        value = attrs.get(key)
        if isinstance(value, str) and len(value) < 1 << 20:
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                continue
        if isinstance(value, dict):
            return value
    return {}


def _described_adapter(
    config: Mapping[str, Any], factors: Collection[tuple[int, ...]], attrs: Mapping[Any, Any]
) -> dict[str, Any]:
    """Return the fields of an adapter."""
    kind = _text(config.get("peft_type") or config.get("fine_tune_type"))
    parameters = config.get("lora_parameters")
    options = {**config, **parameters} if isinstance(parameters, dict) else config
    # The rank is the shorter axis of both factors of every module.
    ranks = {min(shape) for shape in factors if len(shape) == 2}
    stated = options.get("r", options.get("rank", attrs.get("ss_network_dim")))
    rank = ranks.pop() if len(ranks) == 1 else _number(stated)
    alpha = options.get("lora_alpha", options.get("alpha", attrs.get("ss_network_alpha")))
    alpha = attrs.get("adapter.lora.alpha") if alpha is None else alpha
    bases = [_text(attrs.get(key)) for key in _BASES_OF_ADAPTERS]
    bases = [*[_text(config.get(key)) for key in _BASES], *bases]
    return {
        "adapter": "LoRA" if kind.lower() in {"", "lora"} else kind,
        "rank": None if rank is None or rank != int(rank) else int(rank),
        "alpha": _number(alpha),
        "base": next(filter(None, bases), ""),
    }


def _number(value: Any) -> float | None:
    """Return a positive number that a file states as a number or as text."""
    try:
        number = float(value) if isinstance(value, str | int | float) else 0.0
    except (ValueError, OverflowError):
        return None
    return number if 0 < number < _MOST_STEPS else None


# --- sizes ----------------------------------------------------------------------------------------


def _extents(structure: Structure) -> dict[str, Any]:
    """Return the sizes of a model that tensors have, its layers, and its components."""
    components = structure.components
    sizes = structure.sizes
    several = components if len(components) > 1 else {}
    main = next((name for name in _MAIN if name in components), None)
    if main is None and components:  # the models of a pipeline
        return {"components": several}
    known = {name: sizes.get(name, sizes.get(f"{main}.{name}", 0)) for name in _SIZES}
    if known["embd"] not in structure.extents:
        return {"components": several}
    layers = _layers(structure)
    if components and not layers:  # the sizes of one of several stages
        return {"components": several}
    order = [*_MAIN, *layers]
    return {
        "sizes": {name: size for name, size in known.items() if size},
        "layers": {name: layers[name] for name in sorted(layers, key=order.index)},
        "components": several,
    }


def _layers(structure: Structure) -> dict[str, int]:
    """Return the number of layers of each component."""
    layers: dict[str, int] = {}
    names = list(structure)
    for form in structure.forms:
        place = structure.place(names[form.places[0]]) if form.columns else None
        if place is not None:
            count = _members(structure, names, form)
            layers[place.component] = max(layers.get(place.component, 0), count)
    return {component: count for component, count in layers.items() if count}


def _members(structure: Structure, names: Sequence[str], form: Form) -> int:
    """Return how many layers the tensors of a form are in; 0 if that is ambiguous."""
    # A tensor whose indices differ shows which of them is the number of its layer.
    for position, spelled in enumerate(zip(*form.columns, strict=True)):
        numbers = list(map(int, spelled))
        if len(set(numbers)) == len(numbers):
            place = structure.place(names[form.places[position]])
            layers = [n for word, n in place.indices if word == "layer"] if place else []
            if len(layers) != 1 or layers[0] not in numbers:
                return 0
            return len(set(form.columns[numbers.index(layers[0])]))
    return 0


# --- checkpoints without contents -----------------------------------------------------------------

# Programs that shard weights over processes, such as DeepSpeed ZeRO-3, leave an array of shape
# ``[0]`` in the place of each weight. A checkpoint that is saved without gathering them opens like
# any other.

#: Reason why a checkpoint without tensors is a fault.
NO_TENSORS = (
    "there are no tensors: the state dict may have been empty when it was saved, as on a process "
    "without weights, or saving may have been interrupted"
)
_UNGATHERED = (
    "it has no elements: the weight may not have been gathered from the processes of ZeRO-3 or "
    "FSDP before it was saved"
)
_NO_EXTENT = "an axis has the length 0, so that the weight has no elements"
_MATRICES = frozenset({"weight", "kernel"})


def empty_weights(structure: Structure) -> dict[str, str]:
    """Return weights without elements that should have some, each with the likely reason.

    Parameters
    ----------
    structure : Structure
        All tensors of a checkpoint.

    Returns
    -------
    dict of str to str
        Weights without elements, if others of the same name have elements, or the name is one of
        matrices. A list without elements, such as the ids of removed rows, is not a fault, nor is
        the weight of a module that gets its weights from another one, as in e3nn: it stores a mask
        of its outputs.
    """
    shapes = {name: structure.described(name).shape for name in structure}
    empty = {name: shape for name, shape in shapes.items() if not prod(shape)}
    if not empty:
        return {}
    roles = structure.roles
    names = Counter(leaf_of(name) for name, shape in shapes.items() if prod(shape))
    masked = {
        module
        for name, role in roles.items()
        if role is Role.CONSTANT and (module := module_of(name))
    }
    reasons = {}
    for name, shape in empty.items():
        module, _, leaf = split_leaf(name)
        is_expected = names[leaf] or (leaf in _MATRICES and leaf != name)
        if roles[name] in PARAMETERS and is_expected and module not in masked:
            reasons[name] = _UNGATHERED if shape == (0,) else _NO_EXTENT
    return reasons
