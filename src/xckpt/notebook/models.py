"""The model of a checkpoint as a phrase, for the first line of its summary.

`xckpt.structure.description` decides the facts. Texts from the file are escaped and short.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xckpt.formatting import counted, short_count, word

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xckpt.notebook.footprint import Footprint
    from xckpt.notebook.summary import Summary
    from xckpt.structure.description import ModelDescription

_WIDEST_NAME, _WIDEST_DETAIL = 64, 40
_MOST_COMPONENTS = 6
# Classes of Keras that many models have.
_GENERIC, _KIND = frozenset({"Sequential", "Functional"}), " model"
# Share of the parameters with one type for it to be the type of the model.
_NEARLY_ALL, _MOST = 0.99, 0.5


def model_text(summary: Summary) -> str:
    """Return what a checkpoint is: its model, parameters and sizes; empty if nothing is known."""
    model = summary.model
    head = _head(model)
    if not head:
        return ""
    details = ", ".join(_details(summary))
    return ", ".join([head, *_figures(summary)]) + (f" ({details})" if details else "")


def model_document(summary: Summary) -> dict[str, Any]:
    """Return the model of a checkpoint as JSON has it: a phrase, and the facts in it."""
    return {"text": model_text(summary), **summary.model.document()}


def _head(model: ModelDescription) -> str:
    """Return the kind of a checkpoint, and the model that it is of."""
    subject = _subject(model)
    if model.kind == "adapter":
        base = f" for {word(model.base, _WIDEST_NAME)}" if model.base else ""
        name = f"{word(model.name, _WIDEST_NAME)}: " if model.name else ""
        return f"{name}{word(model.adapter)} adapter{base}"
    at_step = "" if model.step is None else f" at step {model.step:,}"
    if model.kind == "optimizer":
        return f"optimizer state{at_step}"
    if model.kind == "training":
        article = "a " if subject.endswith(_KIND) else ""
        of_model = f" of {article}{subject}" if _is_named(model) else ""
        by_names = f", {subject}" if subject and not of_model else ""
        return f"training checkpoint{of_model}{at_step}{by_names}"
    return subject or ("model" if model.kind else "")


def _is_named(model: ModelDescription) -> bool:
    return bool(model.name or model.class_name or (model.family and model.is_stated))


def _subject(model: ModelDescription) -> str:
    """Return the name of a model, or what its names of tensors resemble."""
    if model.name or model.class_name:
        kind = _KIND if not model.name and model.class_name in _GENERIC else ""
        return word(model.name or model.class_name, _WIDEST_NAME) + kind
    if model.contradicted:
        return f"names unlike {word(model.contradicted)}, the type in its config"
    if model.family:
        family = word(model.family)
        return family if model.is_stated else f"names as in {family}"
    return f"graph exported by {word(model.exporter, _WIDEST_DETAIL)}" if model.exporter else ""


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_COMPONENTS
    if more > 0:
        return f"{', '.join(names[:_MOST_COMPONENTS])} and {more} more components"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _figures(summary: Summary) -> Iterator[str]:
    """Yield the number of parameters, the precision, and the quantisation."""
    model, footprint = summary.model, summary.footprint
    if model.kind == "adapter":
        if model.rank is not None:
            yield f"rank {model.rank:,}"
        if model.alpha is not None:
            yield f"alpha {model.alpha:g}"
    if footprint.parameters:
        parameters = f"{short_count(footprint.parameters)} parameters"
        if footprint.active != footprint.parameters:
            parameters += f", {short_count(footprint.active)} active"
        yield parameters
    if model.quantization:
        bits = f", {model.bits} bits" if model.bits else ""
        yield f"quantised with {word(model.quantization)}{bits}"
    elif footprint.schemes:
        yield _precision(footprint)


def _precision(footprint: Footprint) -> str:
    """Return the type of most parameters, or the first ones of several types."""
    schemes = sorted(footprint.schemes, key=lambda scheme: -scheme.size)
    largest = word(schemes[0].group, _WIDEST_DETAIL)
    if schemes[0].size >= _NEARLY_ALL * footprint.parameters:
        return largest
    if schemes[0].size >= _MOST * footprint.parameters:
        return f"mostly {largest}"
    more = len(schemes) - 2
    second = word(schemes[1].group, _WIDEST_DETAIL)
    if not more:
        return f"{largest} and {second}"
    return f"{largest}, {second} and {counted(more, 'more type')}"


def _details(summary: Summary) -> Iterator[str]:
    """Yield the family and the sizes of a model."""
    model = summary.model
    has_name = bool(model.name or model.class_name)
    has_subject = has_name or bool(model.family)
    if model.name and model.class_name and model.kind != "adapter":
        yield word(model.class_name, _WIDEST_DETAIL)
    parts = list(map(word, filter(None, model.components))) if not model.layers else []
    if model.family and has_name:
        family = f"{'' if model.is_stated else 'names as in '}{word(model.family)}"
        yield f"{family}: {_listed(parts)}" if parts else family
    elif parts:
        yield _listed(parts)
    if model.base and model.kind != "adapter" and model.base != model.name:
        yield f"from {word(model.base, _WIDEST_DETAIL)}"
    yield from _sizes(summary)
    if model.exporter and has_subject:
        yield f"exported by {word(model.exporter, _WIDEST_DETAIL)}"


def _sizes(summary: Summary) -> Iterator[str]:
    sizes, layers = summary.model.sizes, summary.model.layers
    if len(layers) == 1:
        yield counted(next(iter(layers.values())), "layer")
    elif layers and len(layers) <= _MOST_COMPONENTS:
        numbers = [f"{count:,} {word(name)}" for name, count in layers.items() if name]
        main = f"{counted(layers[''], 'layer')} and " if "" in layers else ""
        yield f"{main}{_listed(numbers)} layers"
    if "embd" in sizes:
        yield f"{sizes['embd']:,} wide"
    heads, of_keys = sizes.get("head", 0), sizes.get("head_kv", 0)
    if heads and of_keys and of_keys != heads:
        yield f"{heads:,} query and {of_keys:,} key/value heads"
    elif heads:
        yield counted(heads, "head")
    if "expert" in sizes:
        experts = summary.footprint.experts
        used = f", {experts.chosen:,} active" if experts is not None else ""
        yield f"{counted(sizes['expert'], 'expert')}{used}"
