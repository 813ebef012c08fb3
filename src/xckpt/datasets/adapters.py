"""Adapters of low rank: LoRA and DoRA of PEFT, diffusers, kohya, MLX and llama.cpp.

An adapter changes tensors of a base model. For most of them it holds two factors, ``B @ A``, which
are multiplied by a scale and added; `find_adapters` pairs the factors and takes the scale from the
config, the attributes or a tensor ``alpha``. A scale that is not stated is never assumed.

========================================  ========================================================
names of factors                          written by
========================================  ========================================================
``*.lora_A.weight``, ``*.lora_B.weight``  PEFT, diffusers; also with the name of the adapter
``*.lora_embedding_A``                    PEFT, embeddings: the base has the transpose
``*.lora_down.weight``, ``*.alpha``       kohya; the module has underscores instead of dots
``*.lora.down.weight``                    diffusers before 0.22
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

import dask.array as da
import numpy as np

from xckpt.arrays.keys import target_nbytes
from xckpt.datasets.adapter_methods import (
    FLAT_PREFIX,
    method_of_config,
    method_of_name,
    problem_of_options,
)
from xckpt.datasets.mappings import as_dataset
from xckpt.errors import shown, some, warn
from xckpt.quantization.config import is_match
from xckpt.upstream.xarray_variables import data_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    import pandas as pd
    import xarray as xr

    from xckpt.datasets.adapter_methods import Method
    from xckpt.datasets.tensors import OpenTensors
    from xckpt.typing import Array

# Ends of the names of tensors, by the purpose of the tensor. A transposed factor ends in "T".
_ENDINGS = {
    ".lora_A.weight": "A", ".lora_B.weight": "B", ".lora_B.bias": "bias",
    ".lora_embedding_A": "embedding A", ".lora_embedding_B": "embedding B",
    ".lora_magnitude_vector": "magnitude", ".lora_magnitude_vector.weight": "magnitude",
    ".lora_down.weight": "A", ".lora_up.weight": "B", ".dora_scale": "magnitude",
    ".lora.down.weight": "A", ".lora.up.weight": "B",
    "_lora.down.weight": "A", "_lora.up.weight": "B",
    ".weight.lora_a": "A", ".weight.lora_b": "B",
    ".lora_a": "A.T", ".lora_b": "B.T", ".m": "magnitude", ".alpha": "alpha",
}  # fmt: skip
# The name of an adapter stands between the factor and its ending.
_ADAPTER_NAME = re.compile(
    r"\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector)\.(?!weight$|bias$)[^.]+"
)
_PREFIXES = ("base_model.model.", "base_model.")
_LONGEST_NAME = 4096
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A change of one tensor of a base model."""

    base: str  # name of the tensor in the base model, as far as the adapter states it
    # "lora": product of factors; "dora": the same with new norms of the outputs; "bias": number
    # added to a bias; "saved": whole tensor instead of the one of the base model; "unsupported"
    kind: str
    tensors: Mapping[str, str]  # names by purpose: left, right, magnitude, value
    shape: tuple[int, ...]  # of the change
    rank: int | None = None
    alpha: float | None = None  # None if it is not stated, like the scale
    scale: float | None = None
    note: str = ""  # why there is no scale, or why the adapter is unsupported
    is_transposed: bool = False  # whether the product is of the transposed factors
    out_axis: int = 0  # axis of the outputs, whose norms DoRA sets
    is_linear: bool = False  # whether the config states the order of the axes

    @property
    def is_product(self) -> bool:
        """Whether the adapter has factors."""
        return self.kind in {"lora", "dora"}

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


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of a product, for functions that need not form it."""

    left: da.Array  # matrix of `rank` columns
    right: da.Array  # matrix of `rank` rows
    scale: float
    shape: tuple[int, ...]  # of the product; the axes after the first may be several
    product: str = ""  # name of the dask array of the product, which shows that it is unchanged
    dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype(np.float64))

    def arrays(self) -> tuple[Array, Array]:
        """Read both factors, as float64."""
        left, right = da.compute(self.left, self.right)
        return left.astype(np.float64), right.astype(np.float64)


# --- names ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _AdaptedModule:
    """The tensors of an adapter for one module, by purpose."""

    tensors: dict[str, str] = field(default_factory=dict)
    method: Method | None = None  # if it is unsupported


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
        if "bias" in module.tensors:
            base, bias = f"{_base_module(name)}.bias", module.tensors["bias"]
            tensor = {"value": bias}
            scale, note = adapter.scale, adapter.note
            adapters.append(Adapter(base, "bias", tensor, shapes[bias], scale=scale, note=note))
    for name in remaining_names:
        base = _base_of(name)
        if base not in bases:  # PEFT saves trained embeddings next to their factors
            adapters.append(Adapter(base, "saved", {"value": name}, shapes[name]))
    repeated = [base for base, count in Counter(a.base for a in adapters).items() if count > 1]
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
        unsupported = method_of_name(plain, prefixes) if methods else None
        if unsupported is not None:
            stem, method = unsupported
            if _base_module(stem):  # not a tensor that all modules share
                modules.setdefault(stem, _AdaptedModule()).method = method
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
    unsupported_stems = {stem for stem, module in modules.items() if module.method}
    remaining_names = [
        name for name in remaining_names if name.rpartition(".")[0] not in unsupported_stems
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
    for wrapper in (".base_layer.", ".modules_to_save.", ".token_adapter."):
        name = name.replace(wrapper, ".")
    return name


def _base_module(name: str) -> str:
    return _base_of(f"{name}.").rstrip(".")


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

    problem = scales.problem_of(module)
    if problem:
        return unsupported(problem)
    if names is None:
        return unsupported("one of its factors is missing")
    form, *(a, b) = names
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

    def problem_of(self, module: _AdaptedModule) -> str:
        """Return why the adapter of a module is unsupported; empty if it is supported."""
        method = module.method or self.stated
        if method is not None:
            return method.note
        if self.is_dora and _factor_names(module) and "magnitude" not in module.tensors:
            return "the config states DoRA, but its magnitude is missing"
        return self.problem

    def find(
        self, name: str, module: _AdaptedModule, rank: int
    ) -> tuple[float | None, float | None, str]:
        """Return alpha, the scale, and why there is no scale."""
        if "alpha" in module.tensors:
            values = np.asarray(self.tensors.variable(module.tensors["alpha"]).data)
            alpha = _number(float(values.reshape(-1)[0]) if values.size == 1 else None)
            return self._divided(alpha, rank, {})
        alpha = _number(self.tensors.attrs.get("adapter.lora.alpha"))
        if alpha is not None:
            return self._divided(alpha, rank, {})
        config = self.config
        if config is None and self.metadata:
            part = name.partition(".")[0] + "."
            config = {k[len(part) :]: v for k, v in self.metadata.items() if k.startswith(part)}
            name = name.removeprefix(part)
        if not config:
            return None, None, "adapter_config.json is missing, and no tensor states alpha"
        parameters = config.get("lora_parameters")
        if isinstance(parameters, dict) and _number(parameters.get("scale")) is not None:
            return None, _number(parameters["scale"]), ""
        alphas = config.get("alpha_pattern")
        for pattern, value in alphas.items() if isinstance(alphas, dict) else ():
            fits = _is_pattern_of(str(pattern), name)
            if fits is None:
                return None, None, f"the pattern {shown(str(pattern))} of alpha is too complex"
            if fits:
                return self._divided(_number(value), rank, config)
        return self._divided(_number(config.get("lora_alpha")), rank, config)

    @staticmethod
    def _divided(
        alpha: float | None, rank: int, config: Mapping[str, Any]
    ) -> tuple[float | None, float | None, str]:
        if alpha is None:
            return None, None, "alpha is not a number"
        return alpha, alpha / (math.sqrt(rank) if config.get("use_rslora") is True else rank), ""


def _is_pattern_of(pattern: str, name: str) -> bool | None:
    """Return whether PEFT applies a pattern to a module; None if matching could take long."""
    if pattern.startswith("^"):
        return is_match(f"{pattern}$", name)
    words = name.split(".")
    ends = [".".join(words[first:]) for first in range(len(words))]
    matches = [is_match(f"{pattern}$", end) for end in ends]
    return None if None in matches else any(matches)


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -_LARGEST <= value <= _LARGEST:  # nor NaN
        return None
    return float(value)


# --- base models ---------------------------------------------------------------------------------


def match_bases(
    adapters: Sequence[Adapter], names: Collection[str]
) -> tuple[dict[str, Adapter], list[str]]:
    """Return adapters by the names of their tensors in a base model, and the bases it lacks."""
    # Names match if they are equal, if one is the end of exactly one other, or, for kohya, if they
    # are equal with underscores instead of dots.
    base_names = set(names)
    by_end: dict[str, list[str]] = {}
    by_flat: dict[str, list[str]] = {}
    for name in names:
        for end in _ends(name):
            by_end.setdefault(end, []).append(name)
        by_flat.setdefault(name.removesuffix(".weight").replace(".", "_"), []).append(name)
    matches: dict[str, Adapter] = {}
    missing = []
    for adapter in adapters:
        base = adapter.base
        candidates = [base] if base in base_names else by_end.get(base, [])
        if not candidates and FLAT_PREFIX.match(base):
            candidates = by_flat.get(FLAT_PREFIX.sub("", base, count=1), [])
        if not candidates:
            candidates = next(([end] for end in _ends(base) if end in base_names), [])
        if len(candidates) == 1 and candidates[0] not in matches:
            matches[candidates[0]] = adapter
        else:
            missing.append(base)
    return matches, missing


def _ends(name: str) -> Iterator[str]:
    """Yield the ends of a name after each dot, the longest first; they have two words or more."""
    words = name.split(".")
    for first in range(1, min(len(words) - 1, 8)):
        yield ".".join(words[first:])


# --- results -------------------------------------------------------------------------------------


def adapter_table(adapters: Sequence[Adapter]) -> pd.DataFrame:
    """Return a table with one row for each adapter."""
    import pandas as pd

    columns = ("kind", "rank", "alpha", "scale", "shape", "note")
    rows = [[getattr(adapter, column) for column in columns] for adapter in adapters]
    index = pd.Index([adapter.base for adapter in adapters], name="base", dtype=object)
    frame = pd.DataFrame(rows, index, list(columns))
    frame["rank"] = frame["rank"].astype("Int64")
    return frame.astype({"alpha": float, "scale": float})


def factors_of(adapter: Adapter, tensors: OpenTensors, scale: float) -> Factors:
    """Return the factors of an adapter, unread."""
    matrices = []
    for side in ("left", "right"):
        matrix = da.asarray(tensors.variable(adapter.tensors[side]).data)
        if matrix.dtype not in {np.dtype("f4"), np.dtype("f8")}:
            matrix = matrix.astype(np.float32)
        if adapter.is_transposed:
            matrix = matrix.T
        # A convolution is a matrix with one row for each output.
        matrices.append(matrix.reshape(len(matrix), -1))
    left, right = matrices
    rows = max(1, target_nbytes() // (max(1, right.shape[1]) * left.dtype.itemsize))
    return Factors(left.rechunk((rows, -1)), right.rechunk(-1), scale, adapter.shape)


def factors_in(variable: xr.Variable) -> Factors | None:
    """Return the factors of a variable of `update_dataset` that is unchanged, or None."""
    factors = variable.encoding.get("factors")
    is_unchanged = isinstance(factors, Factors) and (
        getattr(data_of(variable), "name", None) == factors.product
    )
    return factors if is_unchanged else None


def update_dataset(
    adapters: Sequence[Adapter], tensors: OpenTensors, scale: float | None
) -> xr.Dataset:
    """Return the products of all adapters as lazy variables, by the names of their bases."""
    arrays: dict[str, da.Array] = {}
    factors: dict[str, Factors] = {}
    left_out: dict[str, list[str]] = {}
    for adapter in adapters:
        factor = adapter.scale if adapter.scale is not None else scale
        if not adapter.is_product:
            if adapter.kind == "unsupported":
                left_out.setdefault(adapter.note, []).append(adapter.base)
        elif factor is None:
            reason = f"{adapter.note}; pass updates(scale=...)"
            left_out.setdefault(reason, []).append(adapter.base)
        else:
            parts = factors_of(adapter, tensors, factor)
            product = da.matmul(parts.left, parts.right) * parts.left.dtype.type(factor)
            arrays[adapter.base] = product.reshape(adapter.shape)
            factors[adapter.base] = parts
    for reason, bases in left_out.items():
        warn(f"no update of {some(bases, 'tensors')}: {reason}")
    dataset: xr.Dataset = as_dataset(arrays)
    by_base = {adapter.base: adapter for adapter in adapters}
    for base, parts in factors.items():
        variable, adapter = dataset.variables[base], by_base[base]
        variable.attrs |= {"kind": adapter.kind, "rank": adapter.rank, "scale": parts.scale}
        variable.encoding["factors"] = replace(parts, product=arrays[base].name)
    return dataset
