"""Adapters of low rank: LoRA and DoRA of PEFT, diffusers, kohya, MLX and llama.cpp.

An adapter changes tensors of a base model. For most of them it holds two factors, ``B @ A``, which
are multiplied by a scale and added; `find_adapters` pairs the factors and takes the scale from the
config, the attributes or a tensor ``alpha``. Without ``alpha``, kohya and diffusers take the rank;
a scale that others do not state is never assumed.

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
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.datasets.adapter_methods import (
    FLAT_PREFIX,
    FORMULAS,
    LORA,
    Scale,
    Targets,
    fits_pattern,
    method_of_config,
    method_of_name,
    problem_of_options,
)
from xckpt.errors import shown, some

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from xckpt.datasets.adapter_methods import Formula, Method
    from xckpt.datasets.tensors import OpenTensors
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
#: The part of a pipeline in front of a name. Models call other modules `transformer`.
PART_OF_PIPELINE = re.compile(
    r"lora_(unet|transformer|te[123]?|prior_unet|prior_te)_"
    r"|(unet|diffusion_model|text_encoder(?:_[23])?|transformer(?=\.\w*blocks\.))\."
)
# PEFT nests the factors of several parameters of one module, the first one innermost.
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
    ``experts``        a product of factors is added to each expert of one tensor
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
    experts: int = 1  # whose factors are in the same tensors
    expert: int | None = None  # that the change is of, if it is of one
    part: slice | None = None  # rows of the change that the tensor of the model has
    is_parameter: bool = False  # whether the config names a parameter instead of a module
    is_omitted: bool = False  # by PEFT, as target_modules of the config do not name its module
    table: str = ""  # tensor of the adapter that its factors change, such as resized embeddings

    @property
    def is_product(self) -> bool:
        """Whether the adapter has factors, whose product is added."""
        return self.kind in {"lora", "dora", "loha", "lokr", "adalora", "experts"}

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
            shape=(*self.shape[:-2], *self.shape[:-3:-1]),
            is_transposed=not self.is_transposed,
            out_axis=1 - self.out_axis,
        )

    def of_expert(self, expert: int) -> Adapter:
        """Return the change of one expert, in a model with a tensor for each."""
        shape = self.shape[1:]
        return replace(self, kind="lora", shape=shape, expert=expert, is_linear=True)


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
    parameters = _parameters(modules, scales.targets)
    adapters = [
        _adapter(name, module, shapes, scales, parameters.get(name))
        for name, module in modules.items()
    ]
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
    tables = {_base_of(name): name for name in remaining_names if f"{_NESTED}." in name}
    adapters = [replace(a, table=tables[a.base]) if a.base in tables else a for a in adapters]
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


def _parameters(modules: Collection[str], targets: Targets) -> dict[str, str]:
    """Return the adapted parameters by the names of their modules; empty if they are unknown."""
    wrappers: dict[str, list[str]] = {}
    for name in modules:
        wrappers.setdefault(_base_module(name), []).append(name)
    parameters: dict[str, str] = {}
    for module, names in wrappers.items():
        inner_first = sorted(names, key=lambda name: -name.count(_NESTED))
        depths = [name.count(_NESTED) for name in reversed(inner_first)]
        adapted = targets.parameters_of(module, len(names))
        if adapted is None or (adapted and depths != list(range(len(names)))):
            adapted = ("",) * len(names)
        if adapted:
            parameters |= dict(zip(inner_first, adapted, strict=True))
    return parameters


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
    for wrapper in (_SAVED, ".token_adapter.", ".processor."):
        name = name.replace(wrapper, ".")
    while f"{_NESTED}." in name:
        name = name.replace(f"{_NESTED}.", ".")
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
    name: str,
    module: _AdaptedModule,
    shapes: Mapping[str, tuple[int, ...]],
    scales: _Scales,
    parameter: str | None,
) -> Adapter:
    """Return the adapter of a module, or of a parameter of it."""
    base = base_module = _base_module(name)
    if parameter:
        base = base_module = f"{base}.{parameter}"
    elif not base.endswith(".weight") and not FLAT_PREFIX.match(base):
        base = f"{base}.weight"
    formula = module.formula
    if formula is not None:
        return _by_formula(base, base_module, module, formula, shapes=shapes, scales=scales)
    names = _factor_names(module)
    problem = scales.problem_of(name, module, parameter)
    if problem or names is None:
        return _unsupported(base, module, problem or "one of its factors is missing")
    form, a, b = names
    first, second = shapes[a], shapes[b]
    if form == "mlx":
        first, second = first[::-1], second[::-1]
    fits = len(first) >= 2 and len(second) >= 2 and first[0] == second[1] and first[0] > 0
    if not fits or math.prod(second[2:]) != 1 or (form and len(first) != 2):
        problem = f"its factors have the shapes {list(shapes[a])} and {list(shapes[b])}"
        return _unsupported(base, module, problem)
    is_transposed = form == "embedding" or (scales.is_transposed and len(first) == 2)
    left, right, shape = b, a, (second[0], *first[1:])
    if is_transposed:
        left, right, shape = a, b, (first[1], second[0])
    adapter = Adapter(
        base,
        "lora",
        {"left": left, "right": right},
        shape,
        first[0],
        is_transposed=is_transposed or form == "mlx",
        out_axis=int(is_transposed),
        is_linear=not form and len(first) == 2,
        is_omitted=parameter is None and scales.targets.omits(base_module),
    )
    if parameter is not None:
        return _of_parameter(adapter, module, scales)
    scale = scales.find(base_module, module, adapter.rank)
    return _with_magnitudes(replace(adapter, **scale._asdict()), module, shapes)


def _unsupported(base: str, module: _AdaptedModule, problem: str) -> Adapter:
    return Adapter(base, "unsupported", dict(module.tensors), (), note=problem)


def _of_parameter(adapter: Adapter, module: _AdaptedModule, scales: _Scales) -> Adapter:
    """Return the adapter of a parameter, whose factors several experts may share."""
    rank, count = scales.rank(adapter.base), adapter.rank or 0
    if rank is None or count % rank or not adapter.is_linear:
        problem = f"adapter_config.json states the rank {rank}, and its factors have the rank "
        return _unsupported(adapter.base, module, f"{problem}{count}")
    experts = count // rank
    return replace(
        adapter,
        kind="lora" if experts == 1 else "experts",
        shape=adapter.shape if experts == 1 else (experts, *adapter.shape),
        rank=rank,
        experts=experts,
        is_parameter=True,
        **scales.find(adapter.base, module, rank)._asdict(),
    )


def _with_magnitudes(
    adapter: Adapter, module: _AdaptedModule, shapes: Mapping[str, tuple[int, ...]]
) -> Adapter:
    """Return an adapter with the magnitudes of DoRA, if its module has them."""
    name = module.tensors.get("magnitude")
    if name is None:
        return adapter
    if shapes[name] and not _are_of_outputs(shapes[name], adapter.shape[adapter.out_axis]):
        problem = f"its magnitudes have the shape {list(shapes[name])}"
        return _unsupported(adapter.base, module, problem)
    return replace(adapter, kind="dora", tensors={**adapter.tensors, "magnitude": name})


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
        self.targets = Targets(options)

    def problem_of(self, name: str, module: _AdaptedModule, parameter: str | None) -> str:
        """Return why the adapter of a module is unsupported; empty if it is supported."""
        method = module.method or self.stated
        if method is not None:
            return method.note
        if self.is_dora and _factor_names(module) and "magnitude" not in module.tensors:
            return "the config states DoRA, but its magnitude is missing"
        if parameter == "" or (parameter is None and name.endswith(_NESTED)):
            return self.targets.problem_of(_base_module(name))
        if parameter is not None and (self.is_transposed or self.is_dora):
            return "DoRA and fan_in_fan_out of parameters are unsupported"
        return self.problem

    def rank(self, name: str) -> int | None:
        """Return the rank that the config states for a parameter; None without one."""
        config = self.config or {}
        rank, problem = _by_pattern(config.get("rank_pattern"), name, config.get("r"))
        return rank if type(rank) is int and rank > 0 and not problem else None

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
            FLAT_PREFIX.match(n) or PART_OF_PIPELINE.match(n) for n in module.tensors.values()
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
        alpha, problem = _by_pattern(config.get("alpha_pattern"), name, config.get(formula.alpha))
        if problem:
            return Scale(note=f"the pattern {problem} of alpha is too complex")
        is_root = config.get("use_rslora") is True
        return formula.scale(_number(alpha, math.nan), rank, is_root=is_root)


def _by_pattern(values: Any, name: str, default: Any) -> tuple[Any, str]:
    """Return the value of the first pattern that fits a name, and a pattern that is too complex."""
    for pattern, value in values.items() if isinstance(values, dict) else ():
        fits = fits_pattern(str(pattern), name)
        if fits is None:
            return default, shown(str(pattern))
        if fits:
            return value, ""
    return default, ""


def _number(value: Any, default: Any = None) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -_LARGEST <= value <= _LARGEST:  # nor NaN
        return default
    return float(value)
