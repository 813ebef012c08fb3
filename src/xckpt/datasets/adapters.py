"""Adapters of low rank: LoRA and DoRA of PEFT, diffusers, kohya, MLX and llama.cpp.

An adapter changes tensors of a base model. For most of them it holds two factors, ``B @ A``, which
are multiplied by a scale and added; `find_adapters` pairs the factors and takes the scale from the
config, the attributes or a tensor ``alpha``. Without ``alpha``, kohya and diffusers take the rank;
a scale that others do not state is never assumed. `match_bases` finds the tensors of a model.

========================================  ========================================================
names of factors                          written by
========================================  ========================================================
``*.lora_A.weight``, ``*.lora_B.weight``  PEFT, diffusers; also with the name of the adapter
``*.lora_embedding_A``                    PEFT, embeddings: the base has the transpose
``*.lora_down.weight``, ``*.alpha``       kohya; the module has underscores instead of dots
``*.lora.down.weight``                    diffusers before 0.22, also with ``lora_linear_layer``
``*.lora_a``, ``*.lora_b``                MLX, transposed; llama.cpp after ``.weight``
========================================  ========================================================

References: peft 0.21.2, `tuners/lora`; kohya-ss/sd-scripts, `networks/lora.py`; mlx-lm,
`tuner/lora.py`; llama.cpp, `convert_lora_to_gguf.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.datasets.adapter_methods import (
    FLAT_PREFIX,
    FORMULAS,
    LORA,
    Scale,
    method_of_config,
    method_of_name,
    problem_of_options,
)
from xckpt.errors import shown, some
from xckpt.quantization.model import is_match
from xckpt.structure.counterparts import PIPELINE_PARTS, Counterparts, Requested, part_of_pipeline

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from xckpt.datasets.adapter_methods import Formula, Method
    from xckpt.datasets.tensors import OpenTensors
    from xckpt.structure import Structure
    from xckpt.structure.counterparts import Counterpart

# Ends of the names of tensors, by the purpose of the tensor. A transposed factor ends in "T".
_ENDINGS = {
    ".lora_A.weight": "A", ".lora_B.weight": "B", ".lora_B.bias": "bias",
    ".lora_embedding_A": "embedding A", ".lora_embedding_B": "embedding B",
    ".lora_magnitude_vector": "magnitude", ".lora_magnitude_vector.weight": "magnitude",
    ".lora_down.weight": "A", ".lora_up.weight": "B", ".dora_scale": "magnitude",
    ".lora.down.weight": "A", ".lora.up.weight": "B",
    ".lora_linear_layer.down.weight": "A", ".lora_linear_layer.up.weight": "B",
    "_lora.down.weight": "A", "_lora.up.weight": "B",
    ".weight.lora_a": "A", ".weight.lora_b": "B",
    ".lora_a": "A.T", ".lora_b": "B.T", ".m": "magnitude", ".alpha": "alpha",
}  # fmt: skip
# The name of an adapter stands between the factor and its ending.
_ADAPTER_NAME = re.compile(
    r"\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector)\.(?!weight$|bias$)[^.]+"
)
_PREFIXES = ("base_model.model.", "base_model.")
_SAVED = ".modules_to_save."
# Names of diffusers before 0.22, after the names of attention processors are removed.
_TEXT_ENCODER_NAMES = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}
# The part of a pipeline in front of a name. Models call other modules `transformer`.
_PART = re.compile(
    r"lora_(unet|transformer|te[123]?|prior_unet|prior_te)_"
    r"|(unet|diffusion_model|text_encoder(?:_[23])?|transformer(?=\.\w*blocks\.))\."
)
# PEFT nests the factors of several parameters of one module.
_NESTED = ".base_layer"
_LONGEST_NAME = 4096
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A change of one tensor of a base model.

    =================  =============================================================================
    kind               change
    =================  =============================================================================
    ``lora``           a product of factors is added
    ``dora``           the same, with new norms of the outputs
    ``loha``           an elementwise product of two products is added
    ``lokr``           a Kronecker product is added
    ``adalora``        a product of factors and singular values is added
    ``ia3``            rows or columns are multiplied by factors
    ``bias``           numbers are added to a bias
    ``saved``          a tensor takes the place of the one of the base model
    ``rows``           rows take the place of some of the base model
    ``unsupported``    anything else
    =================  =============================================================================
    """

    base: str  # name of the tensor in the base model, as far as the adapter states it
    kind: str
    tensors: Mapping[str, str]  # names by purpose: left, right, magnitude, value, hada_w1_a
    shape: tuple[int, ...]  # of the change
    rank: int | None = None
    alpha: float | None = None  # None if it is not stated, like the scale
    scale: float | None = None
    note: str = ""  # why there is no scale, or why the adapter is unsupported
    is_transposed: bool = False  # whether the product is of the transposed factors
    out_axis: int = 0  # axis of the outputs, whose norms DoRA sets
    is_linear: bool = False  # whether the config states the order of the axes
    rows: tuple[int, ...] = ()  # of the tensor, for "rows"
    is_optional: bool = False  # whether the base model may lack the tensor
    heads: int = 0  # of a tensor that has its rows in another order
    is_undone: bool = False  # whether the halves of heads alternate in the adapter

    @property
    def is_product(self) -> bool:
        """Whether the adapter has factors, whose product is added."""
        return self.kind in {"lora", "dora", "loha", "lokr", "adalora"}

    def is_turned(self, shape: tuple[int, ...], counterpart: Counterpart) -> bool:
        """Return whether a linear layer has its axes in the other order, by its shape or family."""
        if not self.is_linear or len(shape) != 2:
            return False
        if shape[0] == shape[1] and counterpart.outputs is not None:
            return self.out_axis != counterpart.outputs
        return self.shape == shape[::-1] != shape

    def turned(self) -> Adapter:
        """Return the adapter of a linear layer with the other order of axes."""
        left, right = self.tensors["left"], self.tensors["right"]
        return replace(
            self,
            tensors={**self.tensors, "left": right, "right": left},
            shape=self.shape[::-1],
            is_transposed=not self.is_transposed,
            out_axis=1 - self.out_axis,
        )


# --- names ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _AdaptedModule:
    """The tensors of an adapter for one module, by purpose."""

    tensors: dict[str, str] = field(default_factory=dict)
    method: Method | None = None  # other than LoRA

    @property
    def formula(self) -> Formula | None:
        """The formula of the update, if the module has all of its factors and no others."""
        names = self.tensors.keys() - {"alpha"} if self.method is not None else frozenset()
        return next((formula for formula in FORMULAS if formula.names == names), None)


def find_adapters(tensors: OpenTensors, config: Mapping[str, Any] | None) -> list[Adapter]:
    """Return the adapters among the tensors of a file, in the order of their first tensors."""
    shapes = {row.name: row.shape for row in tensors.rows}
    stated = method_of_config(config)
    modules, remaining_names = _modules_of(shapes, stated)
    if not any(module.method or _factor_names(module) for module in modules.values()):
        if stated is None:
            return []
        return [Adapter(_base_of(n), "unsupported", {}, (), note=stated.note) for n in shapes]
    scales = _Scales(tensors, config)
    adapters = [_adapter(name, module, shapes, scales) for name, module in modules.items()]
    bases = {adapter.base for adapter in adapters}
    for (name, module), adapter in zip(modules.items(), list(adapters), strict=True):
        base = f"{_base_module(name)}.bias"
        if "bias" in module.tensors:
            bias = module.tensors["bias"]
            tensor = {"value": bias}
            scale, note = adapter.scale, adapter.note
            adapters.append(Adapter(base, "bias", tensor, shapes[bias], scale=scale, note=note))
        elif adapter.kind == "ia3" and adapter.shape[1:] == (1,):
            adapters.append(replace(adapter, base=base, is_optional=True))
    for name in remaining_names:
        base = _base_of(name)
        # PEFT saves trained embeddings next to their factors, and resized ones up to three times.
        is_copy = _SAVED in name and name.replace(_SAVED, ".") in shapes
        if base not in bases and not is_copy and ".original_module." not in name:
            adapters.append(Adapter(base, "saved", {"value": name}, shapes[name]))
    counts = Counter(a.base for a in adapters if a.kind != "unsupported")
    repeated = [base for base, count in counts.items() if count > 1]
    if repeated:
        raise ValueError(f"the file has several adapters of {some(repeated, 'tensors')}")
    return adapters


def _modules_of(
    names: Collection[str], stated: Method | None
) -> tuple[dict[str, _AdaptedModule], list[str]]:
    """Return the modules with tensors of adapters, and the names of all other tensors."""
    modules: dict[str, _AdaptedModule] = {}
    remaining_names = []
    methods = [pair[1] for name in names if (pair := method_of_name(name, {}))]
    if stated is not None:
        methods.append(stated)
    prefixes = {method.prefix: method for method in methods if method.prefix}
    for name in names:
        plain = _ADAPTER_NAME.sub(r".\1", name) if len(name) <= _LONGEST_NAME else name
        ending = next((ending for ending in _ENDINGS if plain.endswith(ending)), None)
        other = method_of_name(plain, prefixes) if methods else None
        if other is not None:
            stem, method = other
            word = plain[len(stem) + 1 :]
            if _base_module(stem):  # not a tensor that all modules share
                module = modules.setdefault(stem, _AdaptedModule())
                module.method, module.tensors[word] = method, name
        elif ending is None:
            remaining_names.append(name)
        else:
            purpose = _ENDINGS[ending]
            stem = plain.removesuffix(ending) + (".weight" if ending.startswith(".weight") else "")
            module = modules.setdefault(stem, _AdaptedModule())
            if purpose in module.tensors:
                both = some([module.tensors[purpose], name], "tensors")
                raise ValueError(f"the file has several adapters of one module: {both}")
            module.tensors[purpose] = name
    other_stems = {stem for stem, module in modules.items() if module.method}
    remaining_names = [
        name for name in remaining_names if name.rpartition(".")[0] not in other_stems
    ]
    # Names such as "alpha" belong to an adapter only if the module has factors.
    for stem, module in list(modules.items()):
        if not module.method and module.tensors.keys() <= {"alpha", "magnitude"}:
            remaining_names += modules.pop(stem).tensors.values()
    return modules, remaining_names


def _factor_names(module: _AdaptedModule) -> tuple[str, str, str] | None:
    """Return the form of the factors, and the names of both; None if they are not complete."""
    for form, first, second in (
        ("", "A", "B"), ("embedding", "embedding A", "embedding B"), ("mlx", "A.T", "B.T"),
    ):  # fmt: skip
        if first in module.tensors and second in module.tensors:
            return form, module.tensors[first], module.tensors[second]
    return None


def _base_of(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    for wrapper in (".base_layer.", _SAVED, ".token_adapter.", ".processor."):
        name = name.replace(wrapper, ".")
    return name


def _base_module(name: str) -> str:
    """Return the module of the base model, by its name in an adapter."""
    module = _base_of(f"{name}.").rstrip(".")
    path, _, last = module.rpartition(".")
    # Attention processors of diffusers before 0.22 have no modules of their own.
    if path.endswith("self_attn"):
        return f"{path}.{_TEXT_ENCODER_NAMES.get(last, last)}"
    return f"{module}.0" if last == "to_out" and ".processor." in name else module


def _adapter(
    name: str, module: _AdaptedModule, shapes: Mapping[str, tuple[int, ...]], scales: _Scales
) -> Adapter:
    """Return the adapter of a module."""
    base = base_module = _base_module(name)
    if not base.endswith(".weight") and not FLAT_PREFIX.match(base):
        base = f"{base}.weight"
    names = _factor_names(module)

    def unsupported(reason: str) -> Adapter:
        return Adapter(base, "unsupported", dict(module.tensors), (), note=reason)

    formula = module.formula
    if formula is not None:
        return _by_formula(base, base_module, module, formula, shapes=shapes, scales=scales)
    problem = scales.problem_of(name, module)
    if problem or names is None:
        return unsupported(problem or "one of its factors is missing")
    form, a, b = names
    first, second = shapes[a], shapes[b]
    if form == "mlx":
        first, second = first[::-1], second[::-1]
    fits = len(first) >= 2 and len(second) >= 2 and first[0] == second[1] and first[0] > 0
    if not fits or math.prod(second[2:]) != 1 or (form and len(first) != 2):
        return unsupported(f"its factors have the shapes {list(shapes[a])} and {list(shapes[b])}")
    rank = first[0]
    alpha, scale, note = scales.find(base_module, module, rank)
    is_transposed = form == "embedding" or (scales.is_transposed and len(first) == 2)
    left, right, shape = b, a, (second[0], *first[1:])
    if is_transposed:
        left, right, shape = a, b, (first[1], second[0])
    tensors = {"left": left, "right": right}
    if "magnitude" in module.tensors:
        tensors["magnitude"] = module.tensors["magnitude"]
    extents = shapes.get(tensors.get("magnitude", ""), ())
    if extents and not _are_of_outputs(extents, shape[int(is_transposed)]):
        return unsupported(f"its magnitudes have the shape {list(extents)}")
    return Adapter(
        base,
        "dora" if "magnitude" in tensors else "lora",
        tensors,
        shape,
        rank,
        alpha,
        scale,
        note,
        is_transposed=is_transposed or form == "mlx",
        out_axis=int(is_transposed),
        is_linear=not form and len(first) == 2,
    )


def _are_of_outputs(extents: tuple[int, ...], outputs: int) -> bool:
    """Return whether magnitudes are of outputs; LyCORIS has those of inputs, too, in a row."""
    is_row = len(extents) == 2 and extents[1] > 1
    return math.prod(extents) == outputs and not is_row


def _by_formula(
    base: str,
    base_module: str,
    module: _AdaptedModule,
    formula: Formula,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    scales: _Scales,
) -> Adapter:
    """Return the adapter of a module whose method has a formula."""
    tensors = {word: tensor for word, tensor in module.tensors.items() if word != "alpha"}
    of_words = {word: shapes[tensor] for word, tensor in tensors.items()}
    shape, rank = formula.shape_and_rank(of_words)
    rows = scales.rows(base_module) if formula.kind == "rows" else ()
    if not shape:
        problem = (
            f"its tensors of {formula.method} have the shapes {list(map(list, of_words.values()))}"
        )
    elif scales.is_transposed:
        problem = f"{formula.method} with fan_in_fan_out is unsupported"
    elif formula.kind == "rows" and len(rows) != shape[0]:
        problem = f"adapter_config.json has to state the indices of its {shape[0]:,} tokens"
    else:
        scale = scales.find(base_module, module, rank, formula)
        return Adapter(base, formula.kind, tensors, shape, rank, *scale, rows=rows)
    return Adapter(base, "unsupported", tensors, (), note=problem)


# --- scales --------------------------------------------------------------------------------------


class _Scales:
    """The scales that a config, the attributes and the tensors ``alpha`` state."""

    def __init__(self, tensors: OpenTensors, config: Mapping[str, Any] | None) -> None:
        self.tensors = tensors
        self.config = config
        metadata = tensors.attrs.get("lora_adapter_metadata")
        try:
            metadata = json.loads(metadata) if isinstance(metadata, str) else None
        except (ValueError, RecursionError):
            metadata = None
        self.metadata = metadata if isinstance(metadata, dict) else {}
        options = config or {}
        self.stated = method_of_config(config)
        self.problem = problem_of_options(options)
        self.is_dora = options.get("use_dora") is True
        self.is_transposed = options.get("fan_in_fan_out") is True

    def problem_of(self, name: str, module: _AdaptedModule) -> str:
        """Return why the adapter of a module is unsupported; empty if it is supported."""
        method = module.method or self.stated
        if method is not None:
            return method.note
        if self.is_dora and _factor_names(module) and "magnitude" not in module.tensors:
            return "the config states DoRA, but its magnitude is missing"
        is_nested = name.endswith(_NESTED)
        return problem_of_options({"target_parameters": True}) if is_nested else self.problem

    def rows(self, name: str) -> tuple[int, ...]:
        """Return the indices of the trained tokens of an embedding, as the config states them."""
        config = self.config or {}
        stated = config.get("trainable_token_indices", config.get("token_indices"))
        if isinstance(stated, dict):
            ends = [key for key in stated if f".{name}".endswith(f".{key}")]
            stated = stated[max(ends, key=len)] if ends else ()
        is_list = isinstance(stated, list) and all(type(n) is int and n >= 0 for n in stated)
        return tuple(stated) if is_list and len(set(stated)) == len(stated) else ()

    def find(
        self, name: str, module: _AdaptedModule, rank: int | None, formula: Formula = LORA
    ) -> Scale:
        """Return alpha, the scale, and why there is no scale."""
        config = self.config or {}
        if rank is None and formula.has_scale:  # PEFT divides by a rank that no factor has
            rank = config.get("r") if type(config.get("r")) is int else None
        if not (rank and formula.has_scale):
            return Scale(None, 1.0)
        alpha = self._alpha_of_file(module)
        if alpha is not None:
            return formula.scale(alpha, rank)
        if self.config is None and self.metadata:
            # Of a pipeline, keys begin with the part, such as "unet."; of one model, with nothing.
            part = "" if formula.alpha in self.metadata else name.partition(".")[0] + "."
            config = {k[len(part) :]: v for k, v in self.metadata.items() if k.startswith(part)}
            name = name.removeprefix(part)
        is_of_pipeline = any(
            FLAT_PREFIX.match(n) or _PART.match(n) for n in module.tensors.values()
        )
        if not config and is_of_pipeline:
            return Scale(None, 1.0)  # as kohya and diffusers do
        if not config:
            return Scale(note="adapter_config.json is missing, and no tensor states alpha")
        return self._of_config(name, rank, config, formula)

    def _alpha_of_file(self, module: _AdaptedModule) -> float | None:
        """Return alpha as a tensor or the attributes state it, NaN if it is not a number."""
        alpha = self.tensors.attrs.get("adapter.lora.alpha")
        if "alpha" in module.tensors:
            values = np.asarray(self.tensors.variable(module.tensors["alpha"]).data)
            alpha = float(values.reshape(-1)[0]) if values.size == 1 else math.nan
        return None if alpha is None else _number(alpha, math.nan)

    @staticmethod
    def _of_config(name: str, rank: int, config: Mapping[str, Any], formula: Formula) -> Scale:
        parameters = config.get("lora_parameters")  # of MLX
        if isinstance(parameters, dict) and _number(parameters.get("scale")) is not None:
            return Scale(None, _number(parameters["scale"]))
        alphas = config.get("alpha_pattern")
        alpha = config.get(formula.alpha)
        for pattern, value in alphas.items() if isinstance(alphas, dict) else ():
            fits = _is_pattern_of(str(pattern), name)
            if fits is None:
                return Scale(note=f"the pattern {shown(str(pattern))} of alpha is too complex")
            if fits:
                alpha = value
                break
        is_root = config.get("use_rslora") is True
        return formula.scale(_number(alpha, math.nan), rank, is_root=is_root)


def _is_pattern_of(pattern: str, name: str) -> bool | None:
    """Return whether PEFT applies a pattern to a module; None if matching could take long."""
    if pattern.startswith("^"):
        return is_match(f"{pattern}$", name)
    words = name.split(".")
    ends = [".".join(words[first:]) for first in range(len(words))]
    matches = [is_match(f"{pattern}$", end) for end in ends]
    return None if None in matches else any(matches)


def _number(value: Any, default: Any = None) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -_LARGEST <= value <= _LARGEST:  # nor NaN
        return default
    return float(value)


# --- base models ---------------------------------------------------------------------------------


class BaseMatches(NamedTuple):
    """Adapters and the tensors of a base model."""

    #: By the names of the tensors in the model.
    matches: dict[str, list[tuple[Adapter, Counterpart]]]
    #: Tensors that the model lacks.
    missing: list[str]
    #: Trained heads among them that the model has tied to its embeddings.
    heads: list[Adapter]


def match_bases(
    adapters: Sequence[Adapter],
    structure: Structure,
    names: Collection[str],
    source: str = "",
    types: Sequence[str] = (),
) -> BaseMatches:
    """Find the tensors of adapters in a base model.

    The folder in `source` may name the part of a pipeline that the model is, and `types` has the
    types of the model that the adapter states.

    Raises
    ------
    ValueError
        If an adapter fits several tensors, or several adapters fit one.
    """
    folder = re.split(r"[/\\]", source)[-2:]
    counterparts = Counterparts(structure, names, part_of_pipeline(folder), types)
    lists = counterparts.find([_requested(adapter) for adapter in adapters])
    matches: dict[str, list[tuple[Adapter, Counterpart]]] = {}
    missing, heads = [], []
    with_adapters = {c.name for of_adapter in lists for c in of_adapter if not c.is_tied}
    for adapter, of_adapter in zip(adapters, lists, strict=True):
        # A head that was trained and saved as a whole is no longer tied.
        used = [c for c in of_adapter if not c.is_tied or adapter.kind != "saved"]
        for counterpart in used:
            is_twin = counterpart.is_tied and counterpart.name in with_adapters
            if not is_twin or adapter.is_product or adapter.kind == "update":
                matches.setdefault(counterpart.name, []).append((adapter, counterpart))
        if of_adapter and not used:
            heads.append(adapter)
        if not used and not adapter.is_optional:
            missing.append(adapter.base)
    return BaseMatches(matches, missing, heads)


def _requested(adapter: Adapter) -> Requested:
    """Return the tensor that an adapter changes, as the adapter names it."""
    base = adapter.base
    is_flat = FLAT_PREFIX.match(base) is not None
    match = _PART.match(base)
    part = "" if match is None else PIPELINE_PARTS[match[1] or match[2]]
    prefix = match[0] if match else "lycoris_" if is_flat else ""
    path, param = base.removeprefix(prefix), "weight"
    if not is_flat:
        path, _, param = path.rpartition(".")
    return Requested(path, param, part, prefix, is_flat, adapter.shape)
